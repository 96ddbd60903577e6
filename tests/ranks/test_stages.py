"""ZeRO's stages: what all ranks keep whole changes what crosses between them, and no bit."""

import functools
import re
from contextlib import contextmanager

import pytest
import torch
from heard import warnings_of
from rank_models import (
    BATCHES,
    adamw,
    batch,
    digest,
    numbers_of,
    optimizer_named,
    state_of,
    train,
    words,
)
from safetensors.torch import load_file
from sampled import sampled, sampled_rows
from torch import nn
from torch._dynamo.exc import BackendCompilerFailed
from torch.nn import functional as F

import zcompile
from zcompile.errors import BudgetExceeded, ConfigInvalid
from zcompile.frontend.offload import session_behind
from zcompile.frontend.replan import Event, plan_in_force
from zcompile.ir.partition import partition_of
from zcompile.ir.types import EntryKind, Layout
from zcompile.ir.units import parse_budget, show_size
from zcompile.planner import step_plan
from zcompile.runtime.ranks.fabric import NOMINAL_BYTES_PER_S

ROOMY = {"device": "cpu", "device_memory": "4MiB", "host_memory": "64MiB"}
PLANNED = 4
"""Steps after which a plan is in force on all ranks: two are seen, and rank 0 is followed."""


def opened(mesh, fields, **kinds):
    """A model on the ranks of a mesh, or one of plain PyTorch; its rank, and how many there are."""
    model = words(**kinds)
    if mesh is None:
        return model, model, 0, 1
    zcompile.offload(model, mesh=mesh, **fields)
    return model, torch.compile(model, backend="zinf"), mesh.get_local_rank(), mesh.size()


def crossed(model, act):
    """Bytes that this rank has sent while something was done: gathers, exchanges."""
    zcompile.stats(model, reset=True)
    rate = session_behind(model).fabric.bytes_per_s("rank_to_rank")
    assert rate != NOMINAL_BYTES_PER_S, "who asks for figures takes none from the next plan"
    act()
    sent = zcompile.stats(model)["fabric"]["bytes"]
    return {lane: sent[lane] for lane in ("gather", "exchange")}


def looked_at(model, run, *numbers):
    """Losses of an evaluation."""
    with torch.no_grad():
        return [run(*batch(9, number)).item() for number in numbers]


def all_that_users_do(mesh, stage, path):
    """What one run has computed, and what has crossed meanwhile: steps, an evaluation, weights that
    are changed in place and loaded between steps, a checkpoint."""
    model, run, rank, ranks = opened(mesh, {**ROOMY, "stage": stage})
    optimizer = adamw(model.parameters())
    found, sent, told = [], {}, {}

    def steps(first, last):
        found.extend(train(model, run, optimizer, rank, ranks, steps=range(first, last)))

    def evaluated():
        found.extend(looked_at(model, run, 0))

    def counted(name, act):
        if mesh is None:
            act()
        else:
            sent[name] = crossed(model, act)

    steps(0, 1)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    steps(1, PLANNED)
    counted("step", lambda: steps(PLANNED, PLANNED + 1))
    if mesh is not None:
        stats, session = zcompile.stats(model), session_behind(model)
        kinds = dict.fromkeys(EntryKind, 0)
        for entry in session.entries():
            kinds[entry.kind] += entry.nbytes
        told = {"plan": stats["plan"], "predicted": stats["predicted"], "peak": stats["peak"]}
        told["held"] = {kind.name: nbytes for kind, nbytes in kinds.items()}
    counted("evaluation", evaluated)
    counted("evaluated again", evaluated)
    with torch.no_grad():
        model.head.weight.mul_(0.5)
    counted("evaluated with another weight", evaluated)
    steps(PLANNED + 1, PLANNED + 2)
    model.load_state_dict(before)
    evaluated()
    steps(PLANNED + 2, PLANNED + 3)
    saved = None
    if mesh is not None:
        zcompile.save(path, model)
    if mesh is None:
        saved = digest(model.state_dict().values())
    elif not rank:  # which has written it
        values = load_file(next(iter(sorted(path.rglob("*.safetensors")))))
        saved = digest(values[name] for name in model.state_dict())
    state = state_of(model, optimizer)
    if mesh is not None:
        zcompile.close(model)
    return (state, saved, found), sent, told


@pytest.fixture(scope="module")
def runs(pool, tmp_path_factory):
    """What each of two ranks has made of a stage."""

    @functools.cache
    def run(stage):
        path = tmp_path_factory.mktemp(f"stage{stage}") / "checkpoint"
        return pool.run(all_that_users_do, 2, stage, path)

    return run


@pytest.fixture(scope="module")
def eager():
    return all_that_users_do(None, None, None)[0]


@pytest.mark.parametrize("stage", sampled([2, 3], 2))
def test_the_stage_changes_no_bit(runs, eager, stage):
    """Also of what is read after a weight was changed between steps, by an op and by loading."""
    state, saved, losses = eager
    for rank, ((other, of_file, seen), _, told) in enumerate(runs(stage)):
        assert other == state
        assert of_file == (None if rank else saved)
        assert told["plan"]["stage"] == stage
        assert seen == of_rank(losses, rank)


def of_rank(losses, rank):
    """Of the losses of one process, those that one of two ranks has seen: its micro-batches of each
    step, and every evaluation."""
    order = [*"s" * (PLANNED + 1), *"eee", "s", "e", "s"]
    left, found = list(losses), []
    for what in order:
        taken, left = (left[:BATCHES], left[BATCHES:]) if what == "s" else (left[:1], left[1:])
        found += taken[rank::2] if what == "s" else taken
    assert not left
    return found


def formula(ranks, rank, **kinds):
    """Bytes of the shares that a rank sends of each weight; that it sends of all gradients, once;
    of all weights that ranks hold shares of; of what one rank holds of the model."""
    gathered, exchanged, whole, held = {}, 0, 0, 0
    for name, param in words(**kinds).named_parameters():
        part = partition_of(Layout.of(param), rank, ranks)
        if part is None:
            exchanged += (ranks - 1) * param.numel() * 4
            held += param.numel() * 4
            continue
        gathered[name] = (ranks - 1) * part.count * 4
        exchanged += (part.numel - part.own_count) * 4
        whole += part.padded * 4
        held += part.count * 4
    return gathered, exchanged, whole, held


@pytest.mark.parametrize("stage", sampled([2, 3], 2))
def test_what_crosses_is_what_was_predicted_and_the_formula(runs, stage):
    """Of a step of two micro-batches: stage 3 gathers a weight in each forward and each backward (a
    table in forward alone), stage 2 once; both exchange each gradient once for each of them."""
    micro = BATCHES // 2
    for rank, (_, sent, _) in enumerate(runs(stage)):
        shares, exchanged, _, _ = formula(2, rank)
        times = {name: 1 if stage == 2 else 2 * micro for name in shares}
        times["table.weight"] = 1 if stage == 2 else micro
        gathered = sum(times[name] * nbytes for name, nbytes in shares.items())
        assert sent["step"] == {"gather": gathered, "exchange": micro * exchanged}
    sent = sum(sum(sent["step"].values()) for _, sent, _ in runs(stage))
    told = [told["predicted"]["bytes"]["rank_to_rank"] for _, _, told in runs(stage)]
    assert sent == sum(told)


def test_a_weight_is_gathered_again_once_it_was_written_and_not_before(runs):
    for rank, (_, sent, _) in enumerate(runs(2)):
        shares, _, _, _ = formula(2, rank)
        gathered = {name: row["gather"] for name, row in sent.items()}
        assert gathered["evaluation"] == sum(shares.values()), "a step has written them"
        assert gathered["evaluated again"] == 0
        assert gathered["evaluated with another weight"] == shares["head.weight"]


@pytest.mark.parametrize("stage", sampled([2, 3], 2))
def test_memory_is_that_of_the_formula(runs, stage):
    """Shares of weights and of two states; in stage 2 all of each weight that is divided, too."""
    for rank, (_, _, told) in enumerate(runs(stage)):
        shares, _, whole, held = formula(2, rank)
        whole, number = (whole, len(shares)) if stage == 2 else (0, 0)
        assert told["plan"]["whole_bytes"] == told["held"]["COPY"] == whole
        assert (told["plan"]["whole"], told["plan"]["gathered"]) == (number, len(shares))
        assert (told["held"]["PARAM"], told["held"]["STATE"]) == (held, 2 * held)
        assert told["peak"]["device"] <= told["predicted"]["peak"]["device"]


def trained(mesh, fields, clip, kinds, pays=None, no_room=False):
    """The state after training a model with a frozen block; what the plan keeps, what is told, and
    the most weights that a plan has kept.

    pays     patch how much faster a plan must be that keeps weights whole
    no_room  patch this rank, if it is not the first, to have no room for them
    """
    model, run, rank, ranks = opened(mesh, fields, **kinds)
    for param in model.blocks[0].parameters():
        param.requires_grad_(False)
    optimizer = optimizer_named("adamw")(p for p in model.parameters() if p.requires_grad)
    most = 0
    with patched(pays if pays is None else pays[rank]):
        for step in range(PLANNED + 4):
            if no_room and rank and not step:
                session_behind(model).controller._wholes.give_up("a test")
            train(model, run, optimizer, rank, ranks, clip, steps=range(step, step + 1))
            if (plan := plan_in_force(session_behind(model))) is not None:
                most = max(most, len(plan.wholes))
    plan, stats = plan_in_force(session_behind(model)), zcompile.stats(model)
    kept = sorted(plan.step.facts[ref].name for ref in plan.wholes)
    state = state_of(model, optimizer)
    zcompile.close(model)
    return state, kept, stats["plan"] | {"most": most}


def cut(self, ids, wanted):
    """The forward of `Words`, with a graph break between its blocks."""
    x = self.blocks[0](self.table(ids))
    torch._dynamo.graph_break()
    x = self.blocks[1](x)
    return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), wanted.flatten())


def in_pieces(mesh):
    """The state after steps of a model that is two graphs, at last with batches of other lengths;
    what is kept."""
    model, run, rank, ranks = opened(mesh, {**ROOMY, "stage": 2}, blocks=2)
    model.forward = cut.__get__(model)
    optimizer = adamw(model.parameters())
    train(model, run, optimizer, rank, ranks, steps=range(PLANNED + 1))
    for length in (5, 6, 7):
        for number in numbers_of(rank, ranks):
            ids, wanted = batch(length, number)
            (run(ids[:, :length], wanted[:, :length]) / (BATCHES // ranks)).backward()
        optimizer.step()
        optimizer.zero_grad()
    told = None
    if mesh is not None:
        told = zcompile.stats(model)
        told = told["plan"]["stage"], told["peak"]["together"] <= told["planned_peak"]["together"]
    state = state_of(model, optimizer)
    if mesh is not None:
        zcompile.close(model)
    return state, told


@pytest.mark.slow
def test_two_graphs_and_other_lengths_read_what_is_kept(pool):
    state, _ = in_pieces(None)
    assert pool.run(in_pieces, 2) == [(state, (2, True))] * 2


def with_aux(self, ids, wanted):
    """The forward of `Words`, with a second head as long as there is one."""
    x = self.table(ids)
    for block in self.blocks:
        x = block(x)
    x = self.norm(x)
    found = F.cross_entropy(self.head(x).flatten(0, 1), wanted.flatten())
    if self.aux is None:
        return found
    return found + F.cross_entropy(self.aux(x).flatten(0, 1), wanted.flatten())


class Wide(nn.Module):
    """Whose larger weight fits the device, and not beside its gradient and the activations."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(256, 1024)
        self.second = nn.Linear(1024, 640)

    def forward(self, x):
        return self.second(self.first(x).relu()).square().mean()


def in_tiles(mesh, options, rows):
    """What is refused and warned of where weights of a graph come in tiles, with stage=2."""
    model = zcompile.offload(Wide(), mesh=mesh, **ROOMY, stage=2)
    run, refused = torch.compile(model, backend="zinf", options=options), ""
    with warnings_of("zcompile.frontend.ranks") as said:
        try:
            run(torch.ones(rows, 256)).backward()
        except BackendCompilerFailed as error:
            refused = str(error)
    digest(model.parameters())  # what was there before is there
    zcompile.close(model)
    return refused, said


def test_tiles_that_options_ask_for_are_refused_beside_whole_weights(pool):
    for refused, said in pool.run(in_tiles, 2, {"tile_bytes": "24KiB"}, 8):
        assert "Unsupported: torch.compile(options={'tile_bytes': 24576}) is asked for" in refused
        assert not said


@pytest.mark.slow
def test_tiles_for_want_of_room_are_told_of_beside_whole_weights(pool):
    for refused, (text,) in pool.run(in_tiles, 2, {}, 200):
        assert not refused
        assert "stage=2 was asked for, and graph0 has no room for all of 'second.weight'" in text


def losing_a_head(mesh, fields):
    """The state of a model that has lost a head before the first plan, and the stage in force."""
    torch.manual_seed(1)
    model = words()
    model.aux = torch.nn.Linear(96, 200, bias=False)
    model.forward = with_aux.__get__(model)
    rank, ranks = (0, 1) if mesh is None else (mesh.get_local_rank(), mesh.size())
    if mesh is not None:
        zcompile.offload(model, mesh=mesh, **fields)
    run = model if mesh is None else torch.compile(model, backend="zinf")
    optimizer = adamw(model.parameters())
    train(model, run, optimizer, rank, ranks, steps=range(2))
    model.aux = optimizer = None
    torch._dynamo.reset()
    optimizer = adamw(model.parameters())
    train(model, run, optimizer, rank, ranks, steps=range(2, 2 + PLANNED))
    stage = None if mesh is None else zcompile.stats(model)["plan"]["stage"]
    state = state_of(model, optimizer)
    if mesh is not None:
        zcompile.close(model)
    return state, stage


@pytest.mark.slow
def test_a_weight_that_is_gone_before_the_first_plan_is_not_kept(pool):
    state, _ = losing_a_head(None, None)
    assert pool.run(losing_a_head, 2, {**ROOMY, "stage": 2}) == [(state, 2)] * 2


def losing_room(mesh, fields, tokens):
    """The state of a model of which rank 1 loses the room to keep weights whole, to an evaluation
    of that many tokens; the stages in force before and at last, and warnings of that."""
    model, run, rank, ranks = opened(mesh, fields)
    optimizer = adamw(model.parameters())
    told = []
    with warnings_of("zcompile.frontend.kept_wholes") as said:
        train(model, run, optimizer, rank, ranks, steps=range(PLANNED))
        told += [zcompile.stats(model)["plan"]["stage"]] if mesh else []
        with torch.no_grad():
            run(*(x.repeat(1 + (tokens // 16 - 1) * rank, 1) for x in batch(9, 0)))
        train(model, run, optimizer, rank, ranks, steps=range(PLANNED, 2 * PLANNED))
        told += [zcompile.stats(model)["plan"]["stage"]] if mesh else []
    state = state_of(model, optimizer)
    if mesh is not None:
        zcompile.close(model)
    return state, told, said


@pytest.mark.slow
def test_training_goes_on_where_room_to_keep_weights_is_lost(pool):
    """Rank 1 has none, warns and keeps none, and the other follows it."""
    fields = {**ROOMY, "device_memory": "1536KiB", "stage": 2}
    eager, _, _ = losing_room(None, None, 16)
    rows = pool.run(losing_room, 2, fields, 640)
    assert [state for state, _, _ in rows] == [eager] * 2
    assert [told for _, told, _ in rows] == [[2, 3]] * 2
    (other,), (own,) = (said for _, _, said in rows)
    assert "stage=2 was asked for" in own
    assert "needs" in own
    assert "another rank has no room" in other


@contextmanager
def patched(pays):
    with pytest.MonkeyPatch.context() as patch:
        if pays is not None:
            patch.setattr(step_plan, "WHOLES_PAY", pays)
        yield


@pytest.mark.parametrize(
    ("ranks", "clip"), sampled_rows([(2, 0.05), (4, 0.05), (4, 0.0)], (2, 0.05))
)
@pytest.mark.slow
def test_tied_and_frozen_weights_and_clipping_have_the_same_bits(pool, ranks, clip):
    one = pool.run(trained, 1, {**ROOMY, "stage": 3}, clip, {"tied": True})[0][0]
    rows = pool.run(trained, ranks, {**ROOMY, "stage": 2}, clip, {"tied": True})
    assert [state for state, _, _ in rows] == [one] * ranks
    assert all(told["stage"] == 2 for _, _, told in rows)


@pytest.mark.slow
@pytest.mark.parametrize("chosen", sampled([True, False], True))
def test_all_ranks_keep_what_rank_0_chooses(pool, chosen):
    """Rank 0 finds that it pays, and rank 1 that it does not; or the other way round."""
    pays = [0.0, float("inf")] if chosen else [float("inf"), 0.0]
    rows = pool.run(trained, 2, ROOMY, 0.0, {}, pays)
    assert [told["stage"] for _, _, told in rows] == [2 if chosen else 3] * 2
    assert rows[0][1] == rows[1][1]
    assert bool(rows[0][1]) == chosen


def disturbed(mesh):
    """The state after steps; bytes gathered by an evaluation after one rank alone found a weight
    out of date, by the same once more, by a step in which a rank gave its room back between forward
    and backward, and by the step after the one in which it planned anew."""
    model, run, rank, ranks = opened(mesh, {**ROOMY, "stage": 2})
    optimizer = adamw(model.parameters())
    sent = []

    def counted(act):
        if mesh is None:
            act()
        else:
            sent.append(crossed(model, act)["gather"])

    def steps(first, last):
        train(model, run, optimizer, rank, ranks, steps=range(first, last))

    def withdrawing(step):
        numbers = list(numbers_of(rank, ranks))
        for number in numbers:
            loss = run(*batch(step, number)) / len(numbers)
            if rank == 1 and number == numbers[0]:
                session_behind(model).controller.handle(Event.ROOM_NEEDED)
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    steps(0, PLANNED)
    looked = [looked_at(model, run, 0)]
    if mesh is not None and rank == 0:
        model.head.weight.entry.written()
    for _ in range(2):
        counted(lambda: looked.append(looked_at(model, run, 0)))
    assert looked[0] == looked[1] == looked[2]
    counted(lambda: withdrawing(PLANNED))
    steps(PLANNED + 1, PLANNED + 2)
    counted(lambda: steps(PLANNED + 2, PLANNED + 3))
    state = state_of(model, optimizer)
    if mesh is not None:
        zcompile.close(model)
    return state, sent


@pytest.mark.slow
def test_ranks_that_have_not_the_same_of_a_weight_gather_it_together(pool):
    state, _ = disturbed(None)
    for rank, (other, sent) in enumerate(pool.run(disturbed, 2)):
        shares, _, _, _ = formula(2, rank)
        every, backward = sum(shares.values()), sum(shares.values()) - shares["table.weight"]
        assert other == state
        assert sent == [shares["head.weight"], 0, every + 2 * backward, every]


@pytest.mark.slow
def test_rank_0_gives_up_what_another_rank_has_no_room_for(pool):
    rows = pool.run(trained, 2, ROOMY, 0.0, {}, [0.0, 0.0], True)
    (first, kept, told), (second, _, of_second) = rows
    assert (kept, told["stage"]) == ([], 3)
    assert told["most"], "it has kept some before"
    assert not of_second["most"]
    assert first == second == pool.run(trained, 1, {**ROOMY, "stage": 3}, 0.0, {})[0][0]


def too_large(mesh, device_memory):
    """The error of a stage that the device has no room for, and after how many steps it came."""
    model, steps, said = None, 0, ""
    try:
        model, run, rank, ranks = opened(
            mesh, {**ROOMY, "device_memory": device_memory, "stage": 2}, blocks=2
        )
        optimizer = adamw(model.parameters())
        for steps in range(PLANNED):
            train(model, run, optimizer, rank, ranks, steps=range(steps, steps + 1))
    except BudgetExceeded as error:
        said = str(error)
    if model is not None:
        zcompile.close(model)
    return said, steps


@pytest.mark.parametrize(
    ("device_memory", "steps"), sampled_rows([("400KiB", 0), ("640KiB", 2)], ("400KiB", 0))
)
def test_a_stage_that_does_not_fit_is_refused(pool, device_memory, steps):
    """At once, if nothing else could fit either; else when the first step is planned."""
    for said, after in pool.run(too_large, 2, device_memory):
        assert "parameters are kept whole on every rank" in said
        assert "or stage='auto'" in said
        assert after == steps


def built_too_large(mesh):
    """The error of a stage that the device has no room for, where the model is built."""
    fields, built = {**ROOMY, "device_memory": "400KiB", "stage": 2}, []
    with pytest.raises(BudgetExceeded) as refused, zcompile.init(mesh=mesh, **fields):
        built.append(words(blocks=2))
    return str(refused.value)


def test_a_stage_that_does_not_fit_is_refused_where_a_model_is_built(pool):
    """At the end of it, and not when the first step is planned."""
    for said in pool.run(built_too_large, 2):
        assert "a model whose parameters are kept whole on every rank (stage=2)" in said
        assert "a lower bound" in said
        assert "head.weight" in said


def given_what_is_asked_for(mesh, device_memory):
    """What the refusal of so much said, and asked for; what it says if it is given that, and after
    how many steps."""
    said, _ = too_large(mesh, device_memory)
    asked = int(re.search(r"device_memory='?(\d+)", said)[1])
    torch._dynamo.reset()
    return said, asked, too_large(mesh, f"{asked}B")


@pytest.mark.slow
@pytest.mark.parametrize("device_memory", sampled(["560KiB", "640KiB", "800KiB"], "640KiB"))
def test_what_a_refusal_asks_for_is_enough(pool, device_memory):
    budget = parse_budget(device_memory)
    for said, asked, then in pool.run(given_what_is_asked_for, 2, device_memory):
        assert "the window to stream through" in said
        assert f"the budget is {show_size(budget)}" in said
        assert budget < asked < 2 * budget
        assert then == ("", PLANNED - 1)


@pytest.mark.parametrize("stage", [2, 3])
def test_a_stage_of_a_process_that_trains_alone_is_refused(stage):
    with pytest.raises(ConfigInvalid, match=f"stage={stage} is of several ranks"):
        zcompile.offload(words(), stage=stage, **ROOMY)
