"""Under autocast weights and gradients cross between ranks in the dtype of that, with the bits of
one process under autocast."""

import functools
from types import SimpleNamespace

import pytest
import torch
from rank_models import Means, batch, optimizer_named, state_of, words
from sampled import sampled, sampled_rows
from torch import nn
from torch.nn import functional as F

import zcompile
from zcompile.errors import BudgetExceeded, RanksDiffer
from zcompile.frontend.kept_wholes import Kept, KeptWholes
from zcompile.frontend.offload import session_behind
from zcompile.frontend.replan import Event, StepController, plan_in_force
from zcompile.ir.partition import partition_of
from zcompile.ir.types import EntryKind, Layout, Phase
from zcompile.planner import step_plan

BF16, FP16 = torch.bfloat16, torch.float16
ROOMY = {"device": "cpu", "device_memory": "4MiB", "host_memory": "64MiB", "stage": 3}
BATCHES = 6
"""Of a step: they divide by 1, 2 and 3 ranks."""
STEPS = 3


def losses_of(call, step, rank, ranks):
    """The losses of a rank, each of a micro-batch, as autocast makes them; backward is outside.

    Without its cache, as graphs are traced: eager would add up what two uses of a weight make in
    low precision.
    """
    numbers = range(rank, BATCHES, ranks)
    for number in numbers:
        with torch.autocast("cpu", BF16, cache_enabled=False):
            loss = call(*batch(step, number))
        yield loss / len(numbers)


def trained_alone(mesh, ranks, tied=False):
    """The state that one process of plain PyTorch ends with, which adds up the gradients of all
    micro-batches, each times 1/ranks, in the order of micro-batches, and of ranks within them."""
    model = words(tied=tied)
    made = optimizer_named("adamw")(model.parameters())
    means = Means(model, ranks)
    for step in range(STEPS):
        rows = [losses_of(model, step, rank, ranks) for rank in range(ranks)]
        for loss in (loss for micro in zip(*rows, strict=True) for loss in micro):
            loss.backward()
            means.take()
        means.give()
        made.step()
        made.zero_grad()
    return state_of(model, made)


def stepped(model, call, optimizer, mesh, steps):
    """Train as users write it."""
    for step in steps:
        for loss in losses_of(call, step, mesh.get_local_rank(), mesh.size()):
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def trained(mesh, fields, steps=STEPS, alone=None, tied=False):
    """The state after training; what the last step has sent, what was predicted of it, what is kept
    in low precision or whole, how many copies the last update has left to be made again, and after
    how many steps the plan in force kept copies in low precision.

    alone  patches of one of the ranks: how much faster a plan must be that keeps copies in low
           precision, or that it has no room for them
    """
    model, kept = words(tied=tied), 0
    zcompile.offload(model, mesh=mesh, **{**ROOMY, **fields})
    made = optimizer_named("adamw")(model.parameters())
    run = torch.compile(model, backend="zinf")
    session = session_behind(model)
    with pytest.MonkeyPatch.context() as patch:
        if alone is not None:
            patch.setattr(step_plan, "NARROW_PAYS", alone[mesh.get_local_rank()])
        if alone is not None and alone[mesh.get_local_rank()] == NO_ROOM:
            patch.setattr(step_plan, "_has_room", lambda step, room: False)
        for step in range(steps):
            if step == steps - 1:
                zcompile.stats(model, reset=True)
            stepped(model, run, made, mesh, [step])
            kept += bool(getattr(plan_in_force(session), "reads", None))
    stats = zcompile.stats(model)
    sent = stats["fabric"]["bytes"]
    told = {"sent": {lane: sent[lane] for lane in ("gather", "exchange")}, "kept": kept}
    told |= {"plan": stats["plan"], "peak": stats["peak"], "predicted": stats.get("predicted")}
    told["copies"] = sum(e.nbytes for e in session.entries() if e.kind is EntryKind.COPY)
    told["stale"] = sum(
        version != entry.version
        for entry in session.entries()
        for _, version in entry.copies.values()
    )
    state = state_of(model, made)
    zcompile.close(model)
    return state, told


@pytest.fixture(scope="module")
def alone(pool):
    """As ranks compute: in the pool, with one thread."""
    return functools.cache(lambda ranks, *rest: pool.run(trained_alone, 1, ranks, *rest)[0])


def formula(rank, ranks, copies=True):
    """Bytes that a rank sends in a step: gathers, exchanges. Of weights that are read after a cast
    half the bytes cross; the table is read as it is, in forward alone.

    copies  whether weights are gathered in low precision; gradients cross so in any case
    """
    gathered = exchanged = 0
    for name, param in words().named_parameters():
        part, wide = partition_of(Layout.of(param), rank, ranks), name == "table.weight"
        if part is None:
            exchanged += (ranks - 1) * param.numel() * 4
            continue
        gathered += (1 if wide else 2) * (ranks - 1) * part.count * (4 if wide or not copies else 2)
        exchanged += (part.numel - part.own_count) * (4 if wide else 2)
    micro = BATCHES // ranks
    return {"gather": micro * gathered, "exchange": micro * exchanged}


def held(rank, ranks, itemsize=2):
    """Bytes of copies in low precision of what a rank holds of the weights that are cast, in
    `itemsize`, or of all of each with one rank."""
    shares = (
        partition_of(Layout.of(param), rank, ranks)
        for name, param in words().named_parameters()
        if name != "table.weight"
    )
    return sum(part.count * itemsize for part in shares if part is not None)


@pytest.mark.parametrize("ranks", sampled([1, 2, 3], 3))
def test_gradients_cross_narrow_with_the_bits_of_one_process(pool, alone, ranks):
    rows = pool.run(trained, ranks, {"residency": False})
    assert [state for state, _ in rows] == [alone(ranks)] * ranks
    sent = [told["sent"] for _, told in rows]
    assert sent == [formula(rank, ranks, copies=False) for rank in range(ranks)]


@pytest.mark.parametrize(
    ("ranks", "residency"),
    sampled_rows([(1, True), (2, False), (3, True)], (3, True)),
)
@pytest.mark.slow
def test_weights_that_are_asked_for_in_a_dtype_are_gathered_in_it(pool, alone, ranks, residency):
    rows = pool.run(trained, ranks, {"residency": residency, "param_dtype": BF16})
    assert [state for state, _ in rows] == [alone(ranks)] * ranks
    for rank, (_, told) in enumerate(rows):
        assert told["sent"] == formula(rank, ranks)
        assert told["copies"] == held(rank, ranks)
        assert not told["stale"], "the optimizer writes them along, also of a share with padding"


PLANNED = 6
"""Steps after which the ranks go by a plan: two are seen, and rank 0 is followed."""
NO_ROOM = -1.0
ALWAYS, NEVER = 0.0, float("inf")
SLOW = {"h2d": "50MB/s", "d2h": "50MB/s"}


@pytest.mark.parametrize("stage", sampled(["auto", 3], 3))
@pytest.mark.slow
def test_all_ranks_keep_the_copies_that_rank_0_chooses(pool, stage):
    """Rank 0 finds that it pays, and rank 1 that it does not: what crosses is the same on both, and
    what was predicted."""
    fields = {"stage": stage, "device_memory": "700KiB", "throttle": SLOW}
    rows = pool.run(trained, 2, fields, PLANNED, [ALWAYS, NEVER])
    plain = pool.run(trained, 1, {"residency": False}, PLANNED)
    assert rows[0][0] == rows[1][0]
    for rank, (_, told) in enumerate(rows):
        assert told["kept"]
        assert told["sent"] == formula(rank, 2)
        assert told["copies"] == held(rank, 2)
        assert not told["stale"]
        assert told["peak"]["device"] <= told["predicted"]["peak"]["device"]
    sent = sum(sum(told["sent"].values()) for _, told in rows)
    assert sent == sum(told["predicted"]["bytes"]["rank_to_rank"] for _, told in rows)
    assert plain[0][0] == rows[0][0], "micro-batches of two ranks are those of one, in turn"


@pytest.mark.slow
def test_rank_0_gives_up_copies_that_another_rank_has_no_room_for(pool):
    fields = {"device_memory": "700KiB", "throttle": SLOW}
    rows = pool.run(trained, 2, fields, 2 * PLANNED, [ALWAYS, NO_ROOM])
    (first, told), (second, of_second) = rows
    assert first == second
    assert told["kept"] in range(1, PLANNED), "it has kept some before"
    assert not of_second["kept"]
    for rank, (_, row) in enumerate(rows):
        assert row["sent"] == formula(rank, 2, copies=False)
        assert not row["copies"]


@pytest.mark.slow
def test_all_of_a_weight_is_kept_in_the_dtype_that_is_asked_for(pool):
    """Stage 2 gathers each once a step, in half the bytes, and holds half of them."""
    rows = pool.run(trained, 2, {"stage": 2, "param_dtype": BF16}, PLANNED)
    plain = pool.run(trained, 1, {"residency": False}, PLANNED)
    for rank, (state, told) in enumerate(rows):
        assert state == plain[0][0]
        assert told["plan"]["stage"] == 2
        cast = {n: p for n, p in words().named_parameters() if p.numel() > 16384}
        parts = {n: partition_of(Layout.of(p), rank, 2) for n, p in cast.items()}
        sizes = {n: 4 if n == "table.weight" else 2 for n in cast}
        assert told["plan"]["whole_bytes"] == sum(parts[n].padded * sizes[n] for n in cast)
        assert told["sent"]["gather"] == sum(parts[n].count * sizes[n] for n in cast)


def compiled_in_two_dtypes(mesh):
    """A model of which all is to be kept whole, its graphs in float16 and in bfloat16, its
    optimizer, and a batch."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(160, 160, bias=False), nn.Linear(160, 160, bias=False))
    zcompile.offload(model, mesh=mesh, **{**ROOMY, "stage": 2})
    calls = {
        dtype: torch.compile(model, backend="zinf", options={"param_dtype": dtype})
        for dtype in (FP16, BF16)
    }
    made = torch.optim.SGD(model.parameters(), lr=1e-2)
    x = torch.randn(8, 160, generator=torch.Generator().manual_seed(3))
    return model, calls, made, x


def in_two_dtypes(mesh):
    """Trained in float16, all of each weight kept, and evaluated in float16 and bfloat16 in turn:
    in how many weights are kept, and whether each evaluation has the bits of eager."""
    model, calls, made, x = compiled_in_two_dtypes(mesh)
    for _ in range(3):
        with torch.autocast("cpu", FP16, cache_enabled=False):
            loss = calls[FP16](x).square().mean()
        loss.backward()
        made.step()
        made.zero_grad()
    first, second = (torch.tensor(param.tolist()) for param in model.parameters())
    alike = []
    for dtype in (FP16, BF16, BF16, FP16):
        with torch.no_grad(), torch.autocast("cpu", dtype, cache_enabled=False):
            expected = F.linear(F.linear(x, first), second)
            alike.append(torch.equal(calls[dtype](x), expected))
    kept = zcompile.stats(model)["plan"]["whole"]
    zcompile.close(model)
    return kept, alike


def test_what_is_kept_whole_is_read_in_its_own_dtype_alone(pool):
    """bfloat16 and float16 have as many bytes."""
    assert pool.run(in_two_dtypes, 2) == [(2, [True] * 4)] * 2


def trained_in_two_dtypes(mesh):
    """Each step has a backward in float16 and one in bfloat16: how many weights are kept whole, and
    the bytes that the last step has sent, and was predicted to send."""
    model, calls, made, x = compiled_in_two_dtypes(mesh)
    for _ in range(PLANNED):
        zcompile.stats(model, reset=True)
        for dtype, call in calls.items():
            with torch.autocast("cpu", dtype, cache_enabled=False):
                loss = call(x).square().mean()
            loss.backward()
        made.step()
        made.zero_grad()
    stats = zcompile.stats(model)
    bytes_sent = stats["fabric"]["bytes"]
    zcompile.close(model)
    sent = bytes_sent["gather"] + bytes_sent["exchange"]
    return stats["plan"]["whole"], sent, stats["predicted"]["bytes"]["rank_to_rank"]


@pytest.mark.slow
def test_a_weight_that_is_gathered_in_two_dtypes_is_not_kept_whole(pool):
    kept, sent, predicted = zip(*pool.run(trained_in_two_dtypes, 2), strict=True)
    assert kept == (0, 0)
    assert sum(sent) == sum(predicted)


def beside_copies_of_another_graph(mesh):
    """What a rank gathers in a step with everything kept whole, behind an evaluation that was
    compiled to read copies of shares."""
    torch._dynamo.reset()
    model = words()
    zcompile.offload(model, mesh=mesh, **{**ROOMY, "stage": 2})
    made = optimizer_named("adamw")(model.parameters())
    run = torch.compile(model, backend="zinf")
    evaluate = torch.compile(model, backend="zinf", options={"param_dtype": BF16})
    stepped(model, run, made, mesh, range(STEPS))
    with torch.no_grad():
        next(losses_of(evaluate, STEPS, mesh.get_local_rank(), mesh.size()))
    assert any(entry.copies for entry in session_behind(model).entries())
    zcompile.stats(model, reset=True)
    stepped(model, run, made, mesh, [STEPS])
    sent = zcompile.stats(model)["fabric"]["bytes"]["gather"]
    zcompile.close(model)
    return sent


@pytest.mark.slow
def test_copies_of_another_graph_are_not_read_in_place_of_what_is_kept_whole(pool):
    for rank, sent in enumerate(pool.run(beside_copies_of_another_graph, 2)):
        cast = (p for n, p in words().named_parameters() if n != "table.weight")
        parts = [partition_of(Layout.of(param), rank, 2) for param in cast]
        assert sent == sum(part.count * 4 for part in parts if part is not None)


def losing_wholes(mesh, steps):
    """The state of ranks of which rank 0 loses its room for whole weights, and copies in low
    precision pay; the numbers of weights that the last plan keeps whole, and of graphs that read
    copies."""
    torch._dynamo.reset()
    model, rank = words(), mesh.get_local_rank()
    fields = {"stage": 2, "device_memory": "1500KiB", "throttle": SLOW}
    zcompile.offload(model, mesh=mesh, **{**ROOMY, **fields})
    made = optimizer_named("adamw")(model.parameters())
    run = torch.compile(model, backend="zinf")
    controller = session_behind(model).controller
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(step_plan, "NARROW_PAYS", ALWAYS)
        for step in range(steps):
            if step == STEPS and not rank:
                assert controller.plan.wholes
                controller._wholes.give_up("a test")
                controller.handle(Event.ROOM_NEEDED)
            stepped(model, run, made, mesh, [step])
    plan, state = controller.plan, state_of(model, made)
    zcompile.close(model)
    return state, len(plan.wholes), len(plan.reads)


@pytest.mark.slow
def test_ranks_that_lose_what_is_kept_whole_read_copies(pool):
    """Until rank 1 has given up what is whole it was not asked for copies, and nobody gives those
    up."""
    rows = pool.run(losing_wholes, 2, 2 * PLANNED)
    plain = pool.run(trained, 1, {"residency": False}, 2 * PLANNED)
    assert rows == [(plain[0][0], 0, 2)] * 2


def evaluating(mesh, steps):
    """Steps between which all ranks evaluate, for which rank 0 has no room with copies: after how
    many of them a plan was in force that keeps copies, and how many plans there were."""
    torch._dynamo.reset()
    model, rank = words(), mesh.get_local_rank()
    zcompile.offload(model, mesh=mesh, **{**ROOMY, "device_memory": "700KiB", "throttle": SLOW})
    made = optimizer_named("adamw")(model.parameters())
    run = torch.compile(model, backend="zinf")
    session, kept = session_behind(model), 0
    fits = StepController.too_large

    def too_large(self, schedule, entries):
        reads = any(not copy.whole for copy in schedule.copies)
        if rank == 0 and reads and schedule.phase is Phase.FORWARD and not schedule.trains:
            return BudgetExceeded("device", 0, 1, "a test", [], "")
        return fits(self, schedule, entries)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(step_plan, "NARROW_PAYS", [ALWAYS, NEVER][rank])
        patch.setattr(StepController, "too_large", too_large)
        for step in range(steps):
            for loss in losses_of(run, step, rank, mesh.size()):
                loss.backward()
            if step % 2:
                with torch.no_grad():
                    next(losses_of(run, step, rank, mesh.size()))
            made.step()
            made.zero_grad()
            kept += bool(getattr(plan_in_force(session), "reads", None))
    state, plans = state_of(model, made), session.controller._plans
    zcompile.close(model)
    return state, kept, plans


@pytest.mark.slow
def test_a_graph_that_has_no_room_for_copies_leaves_them_to_others(pool):
    rows = pool.run(evaluating, 2, 2 * PLANNED)
    plain = pool.run(trained, 1, {"residency": False}, 2 * PLANNED)
    for state, kept, plans in rows:
        assert state == plain[0][0]
        assert kept >= PLANNED
        assert plans <= 3


def cut(self, ids, wanted):
    """A forward of two graphs, both of which read the head."""
    x = self.table(ids)
    for block in self.blocks:
        x = block(x)
    first = F.cross_entropy(self.head(x).flatten(0, 1), wanted.flatten())
    torch._dynamo.graph_break()
    return first + F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), wanted.flatten())


def with_hooks_and_two_graphs(mesh, ranks, fields):
    """The state after training a model whose head gets two contributions, and one of whose weights
    has a hook; what the hook has seen."""
    model, seen = words(), []
    model.forward = cut.__get__(model)

    def halve(grad):
        seen.append(grad.dtype)
        return grad * 0.3

    run, made = model, None
    if mesh is not None:
        zcompile.offload(model, mesh=mesh, **{**ROOMY, **fields})
        run = torch.compile(model, backend="zinf")
    model.blocks[0].up.weight.register_hook(halve)
    made = optimizer_named("adamw")(model.parameters())
    means = Means(model, ranks)
    for step in range(2):
        here = range(ranks) if mesh is None else [mesh.get_local_rank()]
        rows = [losses_of(run, step, rank, ranks) for rank in here]
        for loss in (loss for micro in zip(*rows, strict=True) for loss in micro):
            loss.backward()
            if mesh is None:
                means.take()
        means.give()
        made.step()
        made.zero_grad()
    state = state_of(model, made)
    if mesh is not None:
        zcompile.close(model)
    return state, set(seen)


def alone_with_hooks(mesh, ranks):
    return with_hooks_and_two_graphs(None, ranks, None)


@pytest.mark.parametrize("param_dtype", sampled([None, BF16], BF16))
@pytest.mark.slow
def test_hooks_and_several_contributions_see_wide_gradients(pool, param_dtype):
    (expected,) = pool.run(alone_with_hooks, 1, 2)
    fields = {"residency": False, "param_dtype": param_dtype}
    assert pool.run(with_hooks_and_two_graphs, 2, 2, fields) == [expected] * 2


def hooked_on_one_rank(mesh, fields):
    """The state after training where a hook is there on one rank alone; dtypes that it has seen,
    and bytes of gradients that the last step has sent."""
    torch._dynamo.reset()
    model, seen = words(), set()
    zcompile.offload(model, mesh=mesh, **{**ROOMY, **fields})
    made = optimizer_named("adamw")(model.parameters())
    run = torch.compile(model, backend="zinf")
    if mesh.get_local_rank():
        model.head.weight.register_hook(lambda grad: seen.add(grad.dtype))
    stepped(model, run, made, mesh, range(STEPS))
    state = state_of(model, made)
    for step in range(2):  # by then rank 1 follows what rank 0 keeps
        zcompile.stats(model, reset=True)
        stepped(model, run, made, mesh, [step])
    stats = zcompile.stats(model)
    sent = stats["fabric"]["bytes"]
    predicted = stats["predicted"] and stats["predicted"]["bytes"]["rank_to_rank"]
    zcompile.close(model)
    return state, seen, sent, predicted


@pytest.mark.parametrize("residency", sampled([True, False], False))
@pytest.mark.slow
def test_a_hook_on_one_rank_alone_lets_its_gradient_cross_wide_on_all(pool, alone, residency):
    rows = pool.run(hooked_on_one_rank, 2, {"residency": residency})
    assert [state for state, *_ in rows] == [alone(2)] * 2
    assert [seen for _, seen, *_ in rows] == [set(), {torch.float32}]
    if residency:  # the steps are planned
        sent = sum(sent["gather"] + sent["exchange"] for _, _, sent, _ in rows)
        assert sent == sum(predicted for *_, predicted in rows)
    for rank, (_, _, sent, _) in enumerate(rows):
        part = partition_of(Layout.of(words().head.weight), rank, 2)
        more = BATCHES // 2 * 2 * (part.numel - part.own_count)
        assert sent["exchange"] == formula(rank, 2)["exchange"] + more


def of_length(step, rank, length):
    """Tokens of a rank whose batches have a length of their own."""
    drawn = torch.Generator().manual_seed(1000 * step + rank)
    ids = torch.randint(200, (2, length + 1), generator=drawn)
    return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()


def lengths_of(rank):
    """Of the batches of each step: on rank 1 alone they change, so that graphs become dynamic."""
    return [8 + (step if rank else 0) for step in range(STEPS + 1)]


def of_lengths(mesh, fields):
    """The state after training, and the losses of evaluations, of ranks whose batches have lengths
    of their own; with `fields` None, as one process of plain PyTorch makes both of all batches."""
    torch._dynamo.reset()
    model = words()
    here, call = [mesh.get_local_rank()], model
    if fields is None:
        here = range(2)
    else:
        zcompile.offload(model, mesh=mesh, **{**ROOMY, **fields})
        call = torch.compile(model, backend="zinf")
    made = optimizer_named("adamw")(model.parameters())
    seen = {rank: [] for rank in here}
    for step in range(STEPS + 1):
        sums = {}
        for rank in here:
            tokens = of_length(step, rank, lengths_of(rank)[step])
            with torch.autocast("cpu", BF16, cache_enabled=False):
                loss = call(*tokens)
            loss.backward()
            for param in model.parameters() if fields is None else ():
                part = param.grad * 0.5
                sums[param] = sums[param] + part if param in sums else part
                param.grad = None
        for param, total in sums.items():
            param.grad = total
        made.step()
        made.zero_grad()
        for rank in here:
            tokens = of_length(step, rank, lengths_of(rank)[-1 - step])
            with torch.no_grad(), torch.autocast("cpu", BF16, cache_enabled=False):
                seen[rank].append(call(*tokens).item())
    state = state_of(model, made)
    if fields is not None:
        zcompile.close(model)
    return state, seen


@pytest.mark.parametrize("stage", sampled([3, "auto", 2], "auto"))
@pytest.mark.slow
def test_ranks_whose_batches_have_different_lengths_train_and_evaluate(pool, stage):
    """One rank's graphs are dynamic, and the other's are not, and both ask each other alike."""
    ((state, seen),) = pool.run(of_lengths, 1, None)
    rows = pool.run(of_lengths, 2, {"stage": stage})
    assert [row[0] for row in rows] == [state] * 2
    assert {rank: losses for _, row in rows for rank, losses in row.items()} == seen


def test_what_rank_0_keeps_for_a_graph_that_is_seldom_called_is_kept():
    """An evaluation every so many steps: each change of what is kept costs a plan."""
    session = Asking()
    kept = KeptWholes(session, StepController)
    kept._read = {1: (0,), 2: (0,)}
    ours = frozenset()
    changes = 0
    for step in range(60):
        calls = [(1, "trained"), (2, "evaluated")] if step % 15 == 0 else [(1, "trained")]
        for serial, ref in calls:
            mine = Kept.UP_TO_DATE if ref in ours else Kept.NOT_KEPT
            told = [bytes([Kept.UP_TO_DATE, 0]), bytes([mine, 0])]
            kept._note(SimpleNamespace(serial=serial), [SimpleNamespace(ref=ref)], told)
        facts = {"trained": 0, "evaluated": 0}
        step_of = SimpleNamespace(facts=facts)
        if kept.step_ended(SimpleNamespace(wholes=ours, reads={}, step=step_of)):
            ours, changes = kept._kept_by_first, changes + 1
    assert ours == {"trained", "evaluated"}
    assert changes == 1


class Asking:
    """A session of two ranks, the second of them."""

    def __init__(self):
        self.fabric = SimpleNamespace(rank=1, size=2)
        self.config = SimpleNamespace(may_keep_wholes=True, may_read_copies=True, stage="auto")


def of_two_dtypes(mesh, asked):
    """What a forward and a backward tell where the ranks read weights in two dtypes of one size."""
    torch._dynamo.reset()
    dtype = (BF16, FP16)[mesh.get_local_rank()]
    model = zcompile.offload(words(), mesh=mesh, residency=False, rank_timeout=30, **ROOMY)
    options = {"options": {"param_dtype": dtype}} if asked else {}
    call = torch.compile(model, backend="zinf", **options)

    def walk():
        with torch.autocast("cpu", dtype, cache_enabled=False):
            loss = call(*batch(0, 0))
        loss.backward()

    with pytest.raises(RanksDiffer) as caught:
        walk()
    zcompile.close(model)
    return str(caught.value)


@pytest.mark.parametrize("asked", sampled([True, False], False))
def test_ranks_that_read_in_two_dtypes_of_one_size_are_told(pool, asked):
    """As many bytes would cross, and one rank would take those of the other for its own."""
    said = "forward of" if asked else "backward of"
    assert all(said in text for text in pool.run(of_two_dtypes, 2, asked))


def scaled(mesh, clip, fields=None, hooked=False):
    """The state after steps in float16 with a GradScaler, of which rank 1 overflows in the third,
    and the scale after each; with `fields` None, as one process of plain PyTorch makes both of the
    batches of two ranks.

    hooked  weights have hooks, so that their gradients cross wide
    """
    torch._dynamo.reset()
    model = words()
    here, call = [mesh.get_local_rank()], model
    if fields is None:
        here = range(2)
    else:
        zcompile.offload(model, mesh=mesh, **{**ROOMY, **fields})
        call = torch.compile(model, backend="zinf")
    for param in model.parameters() if hooked else ():
        param.register_hook(lambda grad: grad)
    made = optimizer_named("adam foreach")(model.parameters())
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=3)
    scales = []
    for step in range(STEPS + 3):
        sums = {}
        for rank in here:
            with torch.autocast("cpu", FP16, cache_enabled=False):
                loss = call(*batch(step, rank))
            scaler.scale(loss * 1e8 if rank and step == 2 else loss).backward()
            for param in model.parameters() if fields is None else ():
                part = param.grad * 0.5
                sums[param] = sums[param] + part if param in sums else part
                param.grad = None
        for param, total in sums.items():
            param.grad = total
        scaler.unscale_(made)
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        scaler.step(made)
        scaler.update()
        made.zero_grad()
        scales.append(scaler.get_scale())
    state = state_of(model, made)
    if fields is not None:
        zcompile.close(model)
    return state, scales


@pytest.mark.slow
@pytest.mark.parametrize("fields", [{"residency": False}, {"param_dtype": FP16}])
def test_a_grad_scaler_sees_what_one_rank_alone_overflows(pool, fields):
    (expected,) = pool.run(scaled, 1, 0.0)
    assert expected[1][2] < expected[1][1], "that step is skipped"
    assert pool.run(scaled, 2, 0.0, fields) == [expected] * 2


@pytest.mark.slow
def test_gradients_that_cross_narrow_are_clipped_as_those_that_cross_wide(pool):
    """A norm is added up over shares, and so has not the bits of one process."""
    wide, *rest = pool.run(scaled, 2, 0.5, {"residency": False}, True)
    assert [wide] * 3 == [*rest, *pool.run(scaled, 2, 0.5, {"residency": False})]


def durably(mesh, disk):
    """The state after a durable run under autocast that was closed, and resumed, on the way."""
    rank, ranks = mesh.get_local_rank(), mesh.size()
    for steps in (range(STEPS - 1), range(STEPS - 1, STEPS)):
        torch._dynamo.reset()
        model = words()
        fields = {**ROOMY, "stage": "auto", "param_dtype": BF16, "durable": True, "disk": disk}
        zcompile.offload(model, mesh=mesh, **fields)
        made = optimizer_named("adamw")(model.parameters())
        if steps[0]:
            assert zcompile.resume(disk, model, made)["step"] == steps[0]
        run = torch.compile(model, backend="zinf")
        zcompile.stats(model, reset=True)
        stepped(model, run, made, mesh, steps)
        sent = zcompile.stats(model)["fabric"]["bytes"]["gather"]
        assert sent == len(steps) * formula(rank, ranks)["gather"]
        state = state_of(model, made)
        zcompile.close(model)
    return state


@pytest.mark.slow
def test_a_durable_run_gathers_copies_and_resumes_with_the_same_bits(pool, alone, tmp_path):
    assert pool.run(durably, 2, str(tmp_path)) == [alone(2)] * 2


@pytest.mark.slow
@pytest.mark.parametrize("stage", [2, 3, "auto"])
def test_a_weight_that_is_read_wide_as_well_trains_with_the_same_bits(pool, alone, stage):
    """A tied weight: forward reads the table as it is, backward only what it is cast to."""
    rows = pool.run(trained, 2, {"stage": stage, "param_dtype": BF16}, STEPS, None, True)
    assert [state for state, _ in rows] == [alone(2, True)] * 2
    assert rows[0][1]["plan"]["stage"] == 2 or stage != 2
