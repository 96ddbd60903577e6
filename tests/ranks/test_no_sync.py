"""Several micro-batches whose gradients ranks exchange once, within `zcompile.no_sync`: the numbers
of DistributedDataParallel with its `no_sync`, in the bytes of one exchange."""

import functools
from contextlib import nullcontext

import pytest
import torch
from gradients_beside import Broken, loss_beside
from rank_models import Means, adamw, batch, digest, state_of, words
from rank_plans import ROOMY, SLOW, TIGHT, everything_late
from sampled import sampled
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import zcompile
from zcompile.errors import ConfigInvalid, RankFailed, RanksDiffer, TierFull, Unsupported
from zcompile.frontend.offload import session_behind
from zcompile.frontend.replan import plan_in_force
from zcompile.runtime.gradients.exchanged import MOST_CROSSING, ExchangedGradients

BUDGETS = {"device": "cpu", "device_memory": "4MiB", "host_memory": "64MiB"}
UNPLANNED = {**BUDGETS, "residency": False}
STEPS, MICRO = 2, 3
"""The sum of a rank is begun, added to, and exchanged with the last micro-batch."""


class Sometimes(nn.Module):
    """A weight that is not used when it is told so."""

    def __init__(self):
        super().__init__()
        self.words = words(blocks=0)
        self.more = nn.Linear(96, 200)

    def forward(self, ids, wanted, uses=True):
        x = self.words.norm(self.words.table(ids))
        y = self.words.head(x) + self.more(x) if uses else self.words.head(x)
        return nn.functional.cross_entropy(y.flatten(0, 1), wanted.flatten())


class Apart(nn.Module):
    """A weight that two compiled graphs use, and eager code between them."""

    def __init__(self):
        super().__init__()
        self.words = words(blocks=0)
        self.more = nn.Linear(96, 200)

    def forward(self, ids, wanted):
        x = self.words.table(ids)
        x = self.apart(x + self.more(x) @ self.more.weight)
        x = self.words.norm(x + self.more(x) @ self.more.weight)
        return nn.functional.cross_entropy(self.words.head(x).flatten(0, 1), wanted.flatten())

    @torch.compiler.disable
    def apart(self, x):
        return x + (x @ self.more.weight.t()) @ self.words.head.weight


class Reentrant(nn.Module):
    """Of which a block is a reentrant checkpoint, whose backward is a pass of its own."""

    def __init__(self):
        super().__init__()
        self.words = words()

    def forward(self, ids, wanted):
        x = checkpoint(self.words.blocks[0], self.words.table(ids), use_reentrant=True)
        x = self.words.head(self.words.norm(x))
        return nn.functional.cross_entropy(x.flatten(0, 1), wanted.flatten())


class Mostly(nn.Module):
    """Many weights that are not used unless it is told so."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(96, 96)
        self.more = nn.ModuleList(nn.Linear(96, 400, bias=False) for _ in range(6))

    def forward(self, x, uses):
        return self.head(x).sum() + sum(more(x).sum() for more in self.more if uses)


def built(kind):
    torch.manual_seed(0)
    if kind == "apart":
        return Apart()
    if kind in ("unused", "broken"):
        return Sometimes() if kind == "unused" else Broken()
    if kind == "nothing gathered":  # every rank has all of what is so small
        return words(width=16, blocks=0)
    model = words(tied=kind == "tied", blocks=0 if kind == "bare" else 1)
    if kind == "three blocks":
        return words(blocks=3)
    if kind == "frozen":
        model.head.weight.requires_grad_(False)
    return model


def hooked(kind, model):
    """`model`, a large and a small weight of which may have hooks, which see each micro-batch."""
    for param in (model.head.weight, model.norm.bias) if kind == "hooked" else ():
        param.register_hook(lambda grad: grad * 2.0)
    return model


def loss_of(kind, model, run, step, number, is_last):
    autocast = torch.autocast("cpu", torch.bfloat16, cache_enabled=False)
    with autocast if kind == "autocast" else nullcontext():
        more = (not is_last,) if kind == "unused" else ()
        loss = run(*batch(step, number), *more) / MICRO
    return loss_beside(model, loss) if kind == "loss beside" else loss


def clip_as_ranks_do(params, most):
    """`clip_grad_norm_` with norms that are summed in float64."""
    grads = [p.grad for p in params if p.grad is not None]
    norms = torch.stack([g.double().square().sum().sqrt().float() for g in grads])
    factor = torch.clamp(most / (torch.linalg.vector_norm(norms) + 1e-6), max=1.0)
    for grad in grads:
        grad.mul_(factor)


def taken_from(model, optimizer, fields):
    """What was trained; the model is closed, if it was offloaded with `fields`."""
    found = state_of(model, optimizer)
    if fields is not None:
        zcompile.close(model)
    return found


def in_one_process(mesh, kind, ranks, clip=0.0, fields=None, steps=STEPS):
    """What one process makes that adds up the micro-batches of each rank, and then, each times
    1/ranks, what ranks have made. With `fields` it is a model that is offloaded, and compiled."""
    model = hooked(kind, built(kind))
    run = model
    if fields is not None:
        torch._dynamo.reset()
        run = torch.compile(zcompile.offload(model, mesh=False, **fields), backend="zinf")
    optimizer, means = adamw(model.parameters()), Means(model, ranks)
    if kind == "frozen":
        means = Means(nn.ParameterList(p for p in model.parameters() if p.requires_grad), ranks)
    for step in range(steps):
        for rank in range(ranks):
            for micro in range(MICRO):
                number = rank + ranks * micro
                loss_of(kind, model, run, step, number, micro == MICRO - 1).backward()
            means.take()
        means.give()
        if clip:
            clip_as_ranks_do(model.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()
    return taken_from(model, optimizer, fields)


def train(kind, model, run, optimizer, mesh, no_sync, clip=0.0, steps=range(STEPS)):
    rank, ranks = mesh.get_local_rank(), mesh.size()
    for step in steps:
        for micro in range(MICRO):
            is_last = micro == MICRO - 1
            with nullcontext() if is_last else no_sync():
                loss_of(kind, model, run, step, rank + ranks * micro, is_last).backward()
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()


def over_ranks(mesh, kind, clip=0.0, fields=None, steps=STEPS):
    """The state after training; the model is compiled, unless it is to be called eagerly."""
    torch._dynamo.reset()
    model = hooked(kind, zcompile.offload(built(kind), mesh=mesh, **(fields or UNPLANNED)))
    optimizer = adamw(model.parameters())
    run = model if kind == "eager" else torch.compile(model, backend="zinf")
    no_sync = functools.partial(zcompile.no_sync, run)
    train(kind, model, run, optimizer, mesh, no_sync, clip, range(steps))
    found = state_of(model, optimizer)
    assert not session_behind(model).gradients.unexchanged.params()
    if fields is not None and "disk" in fields:
        assert zcompile.stats(model)["peak"]["disk"] > 0
    zcompile.close(model)
    return found


def wrapped(mesh, kind):
    """The state that DistributedDataParallel ends with."""
    model = built(kind)
    run, optimizer = (
        DistributedDataParallel(model, process_group=mesh.get_group()),
        adamw(model.parameters()),
    )
    train(kind, model, run, optimizer, mesh, run.no_sync)
    return state_of(model, optimizer)


@pytest.mark.parametrize("kind", sampled(["plain", "tied"], "tied"))
def test_two_ranks_have_the_bits_of_distributed_data_parallel(pool, kind):
    expected = pool.run(wrapped, 2, kind)
    assert pool.run(over_ranks, 2, kind) == expected
    assert pool.run(in_one_process, 1, kind, 2) == expected[:1], "and the order that is told"


DISK = {"host_memory": "900KiB", "disk": ...}
CASES = [
    ("plain", 2, 0.05, {}),
    ("plain", 3, 0.0, {"partition": "owner"}),
    ("plain", 2, 0.0, {"stage": 2, "residency": True}),
    ("three blocks", 2, 0.0, DISK),
    ("plain", 2, 0.0, {"durable": True, "disk": ...}),
    ("plain", 1, 0.0, {}),
    ("eager", 2, 0.0, {}),
    ("loss beside", 2, 0.0, {}),
    ("broken", 2, 0.0, {}),
    ("unused", 2, 0.0, {}),
    ("frozen", 2, 0.0, {}),
    ("hooked", 2, 0.0, {}),
    ("autocast", 2, 0.0, {}),
    ("autocast", 2, 0.0, {"param_dtype": torch.bfloat16}),
]
QUICK = [0, 8, 9, 11, 13]


@pytest.mark.parametrize(
    ("kind", "ranks", "clip", "fields"),
    [
        row if at in QUICK else pytest.param(*row, marks=pytest.mark.slow)
        for at, row in enumerate(CASES)
    ],
)
def test_ranks_add_up_their_own_micro_batches_first(pool, tmp_path, kind, ranks, clip, fields):
    expected = pool.run(in_one_process, 1, kind, ranks, clip)
    more = {"disk": str(tmp_path)} if "disk" in fields else {}
    found = pool.run(over_ranks, ranks, kind, clip, {**UNPLANNED, **fields, **more})
    assert found == expected * ranks


@pytest.mark.slow  # what it adds to the cases above is tiles
def test_weights_in_tiles_have_the_bits_of_one_process_with_the_same_tiles(pool):
    fields = {**UNPLANNED, "tile_bytes": "24KiB"}
    for kind in ("plain", "tied"):
        expected = pool.run(in_one_process, 1, kind, 2, 0.0, fields)
        assert pool.run(over_ranks, 2, kind, 0.0, fields) == expected * 2


def test_compiled_graphs_and_eager_code_between_them_use_one_weight(pool):
    expected = pool.run(in_one_process, 1, "apart", 2, 0.0, UNPLANNED)
    assert pool.run(over_ranks, 2, "apart") == expected * 2


TIMES = (1, 8, 1)
"""As long is each micro-batch of a step that differs from those before."""


def longer(mesh, ranks, fields=None):
    """The state after steps of which the last has a micro-batch, not the first, that needs the room
    where sums rest by a plan. Without fields: what one process makes, as `in_one_process`."""
    torch._dynamo.reset()
    model = built("three blocks")
    if fields is not None:
        zcompile.offload(model, mesh=mesh, **fields)
    run = model if fields is None else torch.compile(model, backend="zinf")
    optimizer, means = adamw(model.parameters()), Means(model, ranks)
    for step in range(PLANNED):
        for rank in range(ranks) if fields is None else [mesh.get_local_rank()]:
            for micro, times in enumerate(TIMES):
                waits = fields is not None and micro < MICRO - 1
                ids, wanted = batch(step, rank + ranks * micro)
                times = times if step == PLANNED - 1 else 1
                with zcompile.no_sync(model) if waits else nullcontext():
                    loss = run(ids.repeat(times, 1), wanted.repeat(times, 1)) / MICRO
                    loss.backward()
            if fields is None:
                means.take()
        if fields is None:
            means.give()
        optimizer.step()
        optimizer.zero_grad()
    return taken_from(model, optimizer, fields)


@pytest.mark.slow  # who has no room is told, below
def test_sums_give_their_room_on_the_device_to_a_longer_micro_batch(pool):
    expected = pool.run(longer, 1, 2)
    fields = {**BUDGETS, "device_memory": "1500KiB", "stage": 3}
    assert pool.run(longer, 2, 2, fields) == expected * 2


def crossing_alone(mesh, fails):
    """How many sums are on their way at most of those that the last backward brings nothing to; or
    what has become of all, if the exchange of one fails."""
    model = zcompile.offload(Mostly(), mesh=mesh, throttle={"rank_to_rank": "3MB/s"}, **UNPLANNED)
    run = torch.compile(model, backend="zinf")
    usual, made, most = ExchangedGradients._exchanged_now, [], [0]

    def exchanged_now(self, param, *args, **options):
        if fails and len(made) == 2:
            raise KeyError("of the test's")
        made.append(usual(self, param, *args, **options))
        most[0] = max(most[0], sum(not x.ticket.done() for x in made))
        return made[-1]

    ExchangedGradients._exchanged_now = exchanged_now
    try:
        with zcompile.no_sync(model):
            run(torch.ones(2, 96), True).backward()
        told = (KeyError, RankFailed)  # the rank that fails first may tell the other before it does
        with pytest.raises(told, match="of the test's") if fails else nullcontext():
            run(torch.ones(2, 96), False).backward()
        left = [param for param in model.parameters() if param.grad.entry.unexchanged]
        return len(made), most[0], len(left)
    finally:
        ExchangedGradients._exchanged_now = usual
        zcompile.close(model)


@pytest.mark.slow  # a pass within another, below, has such sums
def test_sums_that_cross_by_themselves_are_few_at_a_time_and_stay_if_one_fails(pool):
    weights = 6
    for made, most, left in pool.run(crossing_alone, 2, False):
        assert (made, left) == (weights, 0)
        assert most <= MOST_CROSSING
    for made, _, left in pool.run(crossing_alone, 2, True):
        assert left == weights - made


def scaled(mesh, is_wrapped):
    """The state, and the scale, after a step of which one micro-batch of one rank overflows."""
    torch._dynamo.reset()
    model = built("plain")
    if is_wrapped:
        run = DistributedDataParallel(model, process_group=mesh.get_group())
        no_sync = run.no_sync
    else:
        run = torch.compile(zcompile.offload(model, mesh=mesh, **UNPLANNED), backend="zinf")
        no_sync = functools.partial(zcompile.no_sync, model)
    optimizer, scaler = adamw(model.parameters()), torch.amp.GradScaler("cpu", init_scale=8.0)
    rank, ranks = mesh.get_local_rank(), mesh.size()
    for step in range(3):
        for micro in range(MICRO):
            is_last = micro == MICRO - 1
            with nullcontext() if is_last else no_sync():
                loss = loss_of("plain", model, run, step, rank + ranks * micro, is_last)
                if (step, micro, rank) == (1, 0, 1):
                    loss = loss * float("inf")
                scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    found = state_of(model, optimizer), scaler.get_scale()
    if not is_wrapped:
        zcompile.close(model)
    return found


@pytest.mark.slow  # `GradScaler` reads what was exchanged, as in tests/ranks/test_features.py
def test_a_step_is_skipped_of_which_one_sum_is_not_finite(pool):
    expected = pool.run(scaled, 2, True)
    assert expected[0][1] < 8.0
    assert pool.run(scaled, 2, False) == expected


def saved_between(mesh, path):
    """The state after a step in whose middle a checkpoint is written, and what that has."""
    model = zcompile.offload(built("plain"), mesh=mesh, **UNPLANNED)
    run, optimizer = torch.compile(model, backend="zinf"), adamw(model.parameters())
    rank, ranks, before = mesh.get_local_rank(), mesh.size(), digest(model.parameters())
    for micro in range(MICRO):
        is_last = micro == MICRO - 1
        with nullcontext() if is_last else zcompile.no_sync(model):
            loss_of("plain", model, run, 0, rank + ranks * micro, is_last).backward()
        if micro == 0:
            zcompile.save(path, model, optimizer)
    optimizer.step()
    optimizer.zero_grad()
    found = state_of(model, optimizer)
    zcompile.resume(path, model)
    resumed = digest(model.parameters())
    zcompile.close(model)
    return found, resumed == before


@pytest.mark.slow  # a checkpoint holds no gradients
def test_a_checkpoint_between_micro_batches_changes_nothing(pool, tmp_path):
    (expected,) = pool.run(in_one_process, 1, "plain", 2, 0.0, None, 1)
    found = pool.run(saved_between, 2, str(tmp_path / "run"))
    assert found == [(expected, True)] * 2


# --- What crosses ---


PLANNED = 4
"""Steps: two are seen, the third is planned, and the last is looked at."""


def planned(mesh, kind="plain", fields=None, late=False):
    """Of the last of some steps by a plan: what crossed between ranks, and what was predicted; and
    what crosses for one micro-batch."""
    torch._dynamo.reset()
    model = zcompile.offload(built(kind), mesh=mesh, **{**ROOMY, **(fields or {})})
    run, optimizer = torch.compile(model, backend="zinf"), adamw(model.parameters())
    no_sync = functools.partial(zcompile.no_sync, model)
    with everything_late(late):
        train(kind, model, run, optimizer, mesh, no_sync, steps=range(PLANNED - 1))
        zcompile.stats(model, reset=True)
        train(kind, model, run, optimizer, mesh, no_sync, steps=range(PLANNED - 1, PLANNED))
        stats, plan = zcompile.stats(model, reset=True), plan_in_force(session_behind(model))
    found = {
        "crossed": stats["fabric"]["bytes"],
        "predicted": stats["predicted"]["bytes"],
        "moved": stats["bytes"],
        "micro_batches": plan.step.micro_batches,
        "late": len(plan.late),
        "state": state_of(model, optimizer),
        "peak": (stats["peak"]["device"], stats["predicted"]["peak"]["device"]),
    }
    zcompile.stats(model, reset=True)
    loss_of(kind, model, run, 0, mesh.get_local_rank(), True).backward()
    found["once"] = zcompile.stats(model)["fabric"]["bytes"]
    zcompile.close(model)
    return found


def is_predicted(rows):
    """Whether ranks have sent what their plans say, all together."""
    sent = sum(found["crossed"]["exchange"] + found["crossed"]["gather"] for found in rows)
    return sent == sum(found["predicted"]["rank_to_rank"] for found in rows)


def test_a_step_takes_the_bytes_of_one_exchange_as_its_plan_says(pool):
    expected = pool.run(in_one_process, 1, "bare", 2, 0.0, None, PLANNED)[0]
    rows = pool.run(planned, 2, "bare")
    assert is_predicted(rows)
    for found in rows:
        assert found["state"] == expected
        assert found["crossed"]["exchange"] == found["once"]["exchange"] > 0
        assert found["crossed"]["gather"] == MICRO * found["once"]["gather"]
        assert found["micro_batches"] == MICRO
        # Sums rest on the device, where there is room, and give it to what is made of them.
        for link in ("h2d", "d2h"):
            assert found["moved"][link] == found["predicted"][link] == 0
        assert found["peak"][0] <= found["peak"][1]


@pytest.mark.slow  # late updates change nothing of what backward does
def test_updates_may_be_late_and_all_weights_whole(pool):
    expected = pool.run(in_one_process, 1, "plain", 2, 0.0, None, PLANNED)[0]
    tight = {"device_memory": TIGHT[2], "throttle": SLOW}
    late = pool.run(planned, 2, "plain", tight, True)
    whole = pool.run(planned, 2, "plain", {"stage": 2})
    assert [found["state"] for found in late + whole] == [expected] * 4
    assert all(found["late"] for found in late)
    assert is_predicted(whole)


@pytest.mark.slow
def test_what_autocast_makes_narrow_crosses_as_a_wide_sum(pool):
    expected = pool.run(in_one_process, 1, "autocast", 2, 0.0, None, PLANNED)[0]
    rows = pool.run(planned, 2, "autocast")
    assert [found["state"] for found in rows] == [expected] * 2
    assert is_predicted(rows)


# --- What cannot be used, and what ranks differ in ---


def backward(model, run, number):
    run(*batch(0, number)).backward()


def refused(act):
    with pytest.raises(Unsupported) as caught:
        act()
    return str(caught.value)


def refused_on_each_rank(act, kind=Unsupported):
    """What a rank is told of an act that fails alike on all: who fails first ends the others, some
    of which may be told why that one failed, before they come as far."""
    with pytest.raises((kind, RankFailed)) as caught:
        act()
    return str(caught.value)


def broken_off(model, run, rank):
    with zcompile.no_sync(model):
        backward(model, run, rank)
        raise KeyError("of the user's, within the context")


def used_too_early(mesh):
    """What each is told that would use the sums of a rank; and that training goes on."""
    model = zcompile.offload(words(blocks=0), mesh=mesh, **UNPLANNED)
    run, optimizer = torch.compile(model, backend="zinf"), adamw(model.parameters())
    rank = mesh.get_local_rank()
    other = zcompile.offload(nn.Linear(2, 2), mesh=mesh, **UNPLANNED)
    before = digest(model.parameters())
    with pytest.raises(KeyError, match="of the user's"):
        broken_off(model, run, rank)
    grads = [param.grad for param in model.parameters()]
    assert [grad.size() for grad in grads] == [param.size() for param in model.parameters()]
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    scaler.scale(torch.zeros(()))
    uses = (
        optimizer.step,
        lambda: nn.utils.clip_grad_norm_(model.parameters(), 1.0),
        lambda: scaler.unscale_(optimizer),
        lambda: grads[0].norm(),
        lambda: grads[0].tolist(),
        lambda: grads[0][0].clone(),
        lambda: torch._foreach_mul_(grads, 0.5),
        lambda: model.head.weight.data.add_(model.head.weight.grad, alpha=-0.1),
        lambda: optimizer.zero_grad(set_to_none=False),
    )
    told = [refused(act) for act in uses]
    if rank == 0:  # before any other rank is asked
        told.append(refused(lambda: grads[1].norm()))
        told.append(refused(lambda: torch._foreach_norm([other.weight, grads[1]])))
    assert digest(model.parameters()) == before
    optimizer.zero_grad()
    assert not session_behind(model).gradients.unexchanged.params(), "they were dropped"
    zcompile.close(other)
    return told, trained_on(model, run, optimizer, rank)


def trained_on(model, run, optimizer, rank):
    backward(model, run, rank)
    optimizer.step()
    optimizer.zero_grad()
    found = state_of(model, optimizer)
    zcompile.close(model)
    return found


def one_step(mesh):
    model = zcompile.offload(words(blocks=0), mesh=mesh, **UNPLANNED)
    run, optimizer = torch.compile(model, backend="zinf"), adamw(model.parameters())
    return trained_on(model, run, optimizer, mesh.get_local_rank())


def test_what_the_ranks_have_not_exchanged_is_used_by_nobody(pool):
    expected = pool.run(one_step, 2)
    for (told, found), want in zip(pool.run(used_too_early, 2), expected, strict=True):
        for sentence in told:
            assert "is what this rank has summed within zcompile.no_sync" in sentence
            assert "call the last backward" in sentence
        assert found == want


def begun_wrongly(mesh, kind):
    """What backward within it is told; it ends the session, as what fails in a backward does."""
    model = zcompile.offload(words(blocks=0), mesh=mesh, **UNPLANNED)
    run = torch.compile(model, backend="zinf")
    if kind == "exchanged":
        backward(model, run, mesh.get_local_rank())
    elif kind == "node":
        assert model.head.weight.view(-1).grad_fn.next_functions
    with zcompile.no_sync(model):
        told = refused_on_each_rank(lambda: backward(model, run, mesh.get_local_rank()))
    zcompile.close(model)
    return told


@pytest.mark.parametrize(
    ("kind", "sentence"),
    [("exchanged", "call zero_grad() before the first"), ("node", "was taken hold of")],
)
def test_sums_begin_where_nothing_was_exchanged(pool, kind, sentence):
    for told in pool.run(begun_wrongly, 2, kind):
        assert sentence in told


def within_another(mesh, uses_graphs):
    """What the backward is told that is to exchange sums before all of them is there."""
    torch._dynamo.reset()
    model = zcompile.offload(Reentrant(), mesh=mesh, **UNPLANNED)
    if uses_graphs:
        model.words.blocks[0].compile(backend="zinf")
    with zcompile.no_sync(model):
        backward(model, model, mesh.get_local_rank())
    told = refused_on_each_rank(lambda: backward(model, model, mesh.get_local_rank()))
    zcompile.close(model)
    return told


def test_a_pass_within_another_exchanges_no_sums(pool):
    for uses_graphs in (True, False):
        for told in pool.run(within_another, 2, uses_graphs):
            assert "use checkpoint(use_reentrant=False)" in told


def without_room(mesh):
    """What the backward is told that finds no room for the sum of a rank."""
    fields = {**UNPLANNED, "host_memory": "1000KiB"}
    model = zcompile.offload(built("three blocks"), mesh=mesh, **fields)
    run = torch.compile(model, backend="zinf")
    backward(model, run, mesh.get_local_rank())
    model.zero_grad()
    with zcompile.no_sync(model):
        told = refused_on_each_rank(lambda: backward(model, run, mesh.get_local_rank()), TierFull)
    zcompile.close(model)
    return told


def test_who_has_no_room_for_sums_is_told_how_to_do_without(pool):
    for told in pool.run(without_room, 2):
        assert "exchange each micro-batch" in told
        assert "sync_each_batch=True" in told


def differing(mesh, kind):
    """What a rank is told where one is within the context and the other is not, or has dropped
    what it summed."""
    rank = mesh.get_local_rank()
    model = built("nothing gathered" if kind == "nothing gathered" else "bare")
    zcompile.offload(model, mesh=mesh, **UNPLANNED)
    run = model if kind == "eager" else torch.compile(model, backend="zinf")
    try:
        with zcompile.no_sync(model) if kind == "dropped" or rank == 0 else nullcontext():
            backward(model, run, rank)
        if kind == "dropped" and rank == 0:
            model.zero_grad()
        backward(model, run, rank)
        for param in model.parameters():  # waits for what the ranks exchange
            param.grad.norm()
    except RanksDiffer as error:
        return str(error)
    finally:
        zcompile.close(model)
    return None


@pytest.mark.parametrize("kind", ["compiled", "nothing gathered", "eager", "dropped"])
def test_ranks_that_are_not_all_within_it_are_told(pool, kind):
    for told in pool.run(differing, 2, kind):
        assert told is not None
        assert "be within zcompile.no_sync for the same ones" in told
        if kind in ("compiled", "nothing gathered"):
            assert "backward within no_sync of graph0" in told


def test_one_process_has_nothing_to_exchange():
    model = zcompile.offload(words(), **UNPLANNED)
    with zcompile.no_sync(model):
        backward(model, model, 0)
    assert model.head.weight.grad.norm() > 0
    with pytest.raises(ConfigInvalid, match="'Linear' has no parameter that is offloaded"):
        zcompile.no_sync(model, nn.Linear(2, 2)).__enter__()
    with pytest.raises(ConfigInvalid, match="is given no model"):
        zcompile.no_sync().__enter__()
    zcompile.close(model)
    with pytest.raises(ConfigInvalid, match="is not a module; give it the model"):
        zcompile.no_sync(model.parameters()).__enter__()
