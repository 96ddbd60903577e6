"""Groups of ranks each hold a whole model: a mesh of two dimensions, as in FSDP2's HSDP."""

import time
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from itertools import count
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from rank_groups import SumsOfGroups, mesh_of, number_of, trained_in_groups
from rank_models import (
    adamw,
    batch,
    digest,
    optimizer_named,
    state_of,
    whole_state_of,
    words,
)
from rank_plans import ROOMY, everything_late
from sampled import sampled, sampled_rows
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

import zcompile
from zcompile.errors import ConfigInvalid
from zcompile.frontend.offload import session_behind
from zcompile.frontend.replan import plan_in_force
from zcompile.runtime.ranks import lane
from zcompile.runtime.ranks import link as rank_link

BUDGETS = {"device": "cpu", "device_memory": "4MiB", "host_memory": "64MiB"}
SHAPES = [(2, 2), (4, 1), (1, 4)]


def trained(_, shape, micros=1, steps=2, fields=None, kinds=None, optimizer="adamw", late=False):
    """Digests of weights and states after training on a mesh of two dimensions; what the last step
    was like."""
    mesh, model = mesh_of(*shape), words(**(kinds or {}))
    zcompile.offload(model, mesh=mesh, **{**BUDGETS, **(fields or {})})
    made = optimizer_named(optimizer)(model.parameters())
    run = torch.compile(model, backend="zinf")
    with everything_late(late):
        for step in range(steps):
            zcompile.stats(model, reset=True)
            for micro in range(micros):
                number = number_of(dist.get_rank(), micro, mesh.size())
                (run(*batch(step, number)) / micros).backward()
            made.step()
            made.zero_grad()
    stats = dict(zcompile.stats(model))
    plan = plan_in_force(session_behind(model))
    stats["late"] = 0 if plan is None else len(plan.late)
    found = state_of(model, made)
    zcompile.close(model)
    return found, stats


# --- The order of sums ---


@pytest.mark.slow  # the bits of FSDP2, and what is counted, below
@pytest.mark.parametrize("shape", SHAPES)
def test_sums_are_in_the_order_of_ranks_then_of_groups(pool, shape):
    """The second micro-batch is added to what the first one came to."""
    rows = pool.run(trained, 4, shape, 2)
    assert [state for state, _ in rows] == [trained_in_groups(shape, 2)] * 4


def by_fsdp2(_, micros):
    """The state after steps of FSDP2, in which ranks synchronize after the last micro-batch."""
    mesh, model = mesh_of(2, 2), words()
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    run = fully_shard(model, mesh=mesh)
    return whole_state_of(*stepped(model, run, mesh, run.set_requires_gradient_sync, micros))


def by_offloading(_, micros):
    """As `by_fsdp2`; within `no_sync` nothing but what is gathered crosses."""
    mesh, model = mesh_of(2, 2), words()
    zcompile.offload(model, mesh=mesh, **BUDGETS)
    run, within = torch.compile(model, backend="zinf"), ExitStack()

    def exchange(is_last):
        within.close()
        if not is_last:
            within.enter_context(zcompile.no_sync(model))

    found = state_of(*stepped(model, run, mesh, exchange, micros))
    zcompile.close(model)
    return found


def stepped(model, run, mesh, exchange, micros):
    """A model and its optimizer after steps; exchange(True) before a backward that exchanges."""
    optimizer, rank = adamw(model.parameters()), dist.get_rank()
    for step in range(3):
        for micro in range(micros):
            exchange(micro == micros - 1)
            (run(*batch(step, number_of(rank, micro, mesh.size()))) / micros).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


@pytest.mark.parametrize("micros", sampled([1, 2], 2))
def test_groups_end_with_the_bits_of_fsdp2(pool, micros):
    """Where several micro-batches are not exchanged one by one, as FSDP2 does it too."""
    assert pool.run(by_offloading, 4, micros) == pool.run(by_fsdp2, 4, micros)


# --- What is added up before ranks sum it ---


class Twice(nn.Module):
    """A weight that two compiled graphs use, and eager code between them, if it is told so."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.words = words(blocks=0)
        self.more = nn.Linear(96, 200)
        self.apart = True

    def forward(self, ids, wanted):
        x = self.words.table(ids)
        x = self.between(x + self.more(x) @ self.more.weight)
        x = self.words.norm(x + self.more(x) @ self.more.weight)
        return nn.functional.cross_entropy(self.words.head(x).flatten(0, 1), wanted.flatten())

    @torch.compiler.disable
    def between(self, x):
        return x + (x @ self.more.weight.t()) @ self.more.weight if self.apart else x


def trained_twice(alone, shape, apart, within=False, compiled=True):
    """The state after steps of a weight with several contributions in each pass; with `shape` None
    that of one rank, which adds up what it makes in a pass as each of several does."""
    model, rank = Twice(), dist.get_rank()
    model.apart = apart
    mesh = alone if shape is None else mesh_of(*shape)
    zcompile.offload(model, mesh=mesh, **BUDGETS)
    run = torch.compile(model, backend="zinf") if compiled else model
    optimizer = adamw(model.parameters())
    sums = SumsOfGroups(model, 2, 2)
    for step in range(2):
        if shape is None:
            for number in range(4):
                backward(model, run, step, number, within)
                sums.take()
            sums.give()
        else:
            backward(model, run, step, rank, within)
        optimizer.step()
        optimizer.zero_grad()
    found = state_of(model, optimizer)
    zcompile.close(model)
    return found


def backward(model, run, step, number, within):
    """One micro-batch, or two, of which the first is not exchanged."""
    for micro in range(2) if within else range(1):
        with zcompile.no_sync(model) if within and not micro else nullcontext():
            run(*batch(step, number + 4 * micro)).backward()


CASES = [
    ("graphs", False, False, True),
    ("eager between", True, False, True),
    ("no_sync", True, True, True),
    ("eager alone", True, False, False),
]


@pytest.mark.parametrize(("name", "apart", "within", "compiled"), sampled_rows(CASES, CASES[2]))
def test_contributions_of_a_pass_are_added_up_before_groups_sum_them(
    pool, name, apart, within, compiled
):
    expected = pool.run(trained_twice, 1, None, apart, within, compiled)
    assert pool.run(trained_twice, 4, (2, 2), apart, within, compiled) == expected * 4


def used_on_one_rank(_):
    """The state after a step in which one rank alone measured a small weight, which autograd may
    have added to then: it collects what it brings to that, and all others follow. None: plain."""
    mesh, model = mesh_of(2, 2), words()
    zcompile.offload(model, mesh=mesh, **BUDGETS)
    run, optimizer = torch.compile(model, backend="zinf"), adamw(model.parameters())
    rank = dist.get_rank()
    gradients, sent = session_behind(model).gradients, []
    for step in range(2):
        zcompile.stats(model, reset=True)
        if rank == 3 and step:
            gradients.note_use(model.head.weight.entry)
        run(*batch(step, rank)).backward()
        sent.append(zcompile.stats(model)["fabric"]["bytes"]["replicate"])
        optimizer.step()
        optimizer.zero_grad()
    found = state_of(model, optimizer)
    zcompile.close(model)
    return found, sent


@pytest.mark.slow
def test_what_one_rank_collects_all_ranks_exchange_part_by_part(pool):
    rows = pool.run(used_on_one_rank, 4)
    assert [state for state, _ in rows] == [trained_in_groups((2, 2))] * 4
    for rank, (_, (first, second)) in enumerate(rows):
        part = (96 * 200 - 10240, 10240)[rank % 2 == 0] * 4
        assert first - second == part, "of that one no sums of groups cross"


# --- Bytes ---

PER_NODE = [
    # ranks_per_node, and the links that gathers and the sums of groups pass.
    (4, "rank_to_rank", "rank_to_rank"),
    (2, "rank_to_rank", "node_to_node"),
    (1, "node_to_node", "node_to_node"),
]


@pytest.mark.parametrize(("per_node", "within", "between"), sampled_rows(PER_NODE, PER_NODE[1]))
def test_what_crosses_is_counted_and_predicted_link_by_link(pool, per_node, within, between):
    fields = {**ROOMY, "ranks_per_node": per_node}
    rows = pool.run(trained, 4, (2, 2), 1, 4, fields, {"blocks": 2})
    assert [state for state, _ in rows] == [trained_in_groups((2, 2), 1, 4, blocks=2)] * 4
    for link in {within, between}:
        came = sum(stats["bytes"][link] for _, stats in rows)
        assert came == sum(stats["predicted"]["bytes"][link] for _, stats in rows)
    sent = {
        lane: sum(stats["fabric"]["bytes"][lane] for _, stats in rows)
        for lane in ("gather", "exchange", "replicate")
    }
    assert sum(sent.values()) == sum(
        sum(stats["bytes"][link] for link in {within, between}) for _, stats in rows
    )
    large = [p.nbytes for p in words(blocks=2).parameters() if p.nbytes > 64 * 1024]
    # Each group gathers within itself, twice a step what both phases read, and exchanges there;
    # each share's sum crosses.
    padded = [-(-n // 4 // 2 // 1024) * 1024 * 4 * 2 for n in large]
    assert sent["gather"] == 2 * (2 * sum(padded) - padded[0])
    assert sent["replicate"] == 2 * sum(large)
    small = (
        4
        * 3
        * sum(
            -(-p.nbytes // 64) * 64 for p in words(blocks=2).parameters() if p.nbytes <= 64 * 1024
        )
    )
    assert sent["exchange"] == 2 * sum(large) + small


def with_rates_of_noise(_, slower):
    """Bytes that came and bytes predicted, where one link was measured to be slower than the
    other."""
    mesh, model = mesh_of(2, 2), words(blocks=0)
    zcompile.offload(model, mesh=mesh, **{**BUDGETS, **ROOMY}, ranks_per_node=2)
    made, run = adamw(model.parameters()), torch.compile(model, backend="zinf")
    for step in range(4):
        zcompile.stats(model, reset=True)
        run(*batch(step, dist.get_rank())).backward()
        made.step()
        made.zero_grad()
    stats, session = zcompile.stats(model), session_behind(model)
    costs = session.controller.costs()
    links = {
        name: replace(link, bytes_per_s=1e6 if name == slower else 1e9)
        for name, link in costs.machine.links.items()
    }
    costs = replace(costs, machine=replace(costs.machine, links=links))
    predicted = session.controller.predicted_at(costs)["bytes"]
    zcompile.close(model)
    return [(stats["bytes"][link], predicted[link]) for link in ("rank_to_rank", "node_to_node")]


@pytest.mark.parametrize("slower", ["rank_to_rank", "node_to_node"])
def test_what_crosses_is_predicted_on_the_link_that_counts_it_whatever_was_measured(pool, slower):
    for came in pool.run(with_rates_of_noise, 4, slower):
        for counted, predicted in came:
            assert counted == predicted > 0


class Ticks:
    """A clock in place of the module `time`: the n-th that asks is told n seconds, so that what is
    measured hangs on how often it is asked and not on who else is on the machine."""

    monotonic = staticmethod(time.monotonic)  # of which nothing is measured

    def __init__(self):
        self._seconds = count(1.0)

    def perf_counter(self):
        return next(self._seconds)


def rates(_, shape):
    """The rate that a plan takes for the link of all ranks, and what is counted of that."""
    mesh, model, ticks = mesh_of(*shape), words(blocks=2), Ticks()
    with patch.object(lane, "time", ticks), patch.object(rank_link, "time", ticks):
        zcompile.offload(model, mesh=mesh, **BUDGETS)
        optimizer, run = adamw(model.parameters()), torch.compile(model, backend="zinf")
        for step in range(2):
            run(*batch(step, dist.get_rank())).backward()
            optimizer.step()
            optimizer.zero_grad()
        fabric = session_behind(model).fabric
        fabric.finish()  # or one that is on its way is in one of the two and not in the other
        stats = zcompile.stats(model)
        found = fabric.bytes_per_s("rank_to_rank"), fabric.bytes_per_s("node_to_node")
        counted = stats["bytes"]["rank_to_rank"], stats["seconds"]["rank_to_rank"]
        zcompile.close(model)
    return found, counted, stats["fabric"]["bytes"]


@pytest.mark.parametrize("shape", sampled([(4, 1), (2, 2)], (2, 2)))
def test_plans_take_the_rate_of_all_that_came_over_a_link(pool, shape):
    rows = pool.run(rates, 4, shape)
    most = max(nbytes for _, (nbytes, _), _ in rows)
    for found, (_, seconds), sent in rows:
        assert sent["replicate"] > 0
        assert found[0] == found[1], "no ring has a slowest link of that name"
        assert found[0] == pytest.approx(most / seconds), "of the rank that waits for most"


def paced(_):
    """Seconds of a gather and of an exchange over a slow link between nodes."""
    model = words()
    fields = {"ranks_per_node": 2, "throttle": {"node_to_node": "200KB/s"}, "residency": False}
    zcompile.offload(model, mesh=mesh_of(2, 2), **BUDGETS, **fields)
    run = torch.compile(model, backend="zinf")
    run(*batch(0, dist.get_rank())).backward()
    found = zcompile.stats(model)
    zcompile.close(model)
    return found["fabric"]["seconds"], found["bytes"]


@pytest.mark.slow
def test_a_slow_link_between_nodes_paces_what_crosses_between_groups_alone(pool):
    for seconds, nbytes in pool.run(paced, 4):
        assert seconds["replicate"] > 0.9 * (nbytes["node_to_node"] / 200e3) / 2
        assert seconds["gather"] < seconds["replicate"] / 2


# --- With other features ---

FEATURES = {
    "planned": (ROOMY, {"blocks": 2}, {}),
    "late": ({**ROOMY, "device_memory": "560KiB", "throttle": {"h2d": "50MB/s"}}, {}, {}),
    "stage 2": ({"stage": 2}, {}, {}),
    "owner": ({"partition": "owner"}, {}, {}),
    "tied": ({}, {"tied": True}, {}),
    "sgd": ({}, {}, {"optimizer": "sgd"}),
    "foreach": ({}, {}, {"optimizer": "adam foreach"}),
    "disk": ({"host_memory": "1MiB", "residency": False}, {"blocks": 2}, {}),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", FEATURES)
def test_features_keep_the_bits(pool, name, tmp_path):
    fields, kinds, more = FEATURES[name]
    if name == "disk":
        fields = {**fields, "disk": str(tmp_path)}
    optimizer = more.get("optimizer", "adamw")
    expected = trained_in_groups((2, 2), 2, 4, optimizer, **kinds)
    rows = pool.run(trained, 4, (2, 2), 2, 4, fields, kinds, optimizer, name == "late")
    assert [state for state, _ in rows] == [expected] * 4
    if name == "late":
        assert all(stats["late"] for _, stats in rows)
    if name == "stage 2":
        assert all(stats["plan"]["stage"] == 2 for _, stats in rows)
    if name == "disk":
        assert any(stats["bytes"]["disk_read"] for _, stats in rows)


def clipped(_, shape, bound):
    """The state, and norms, after steps that are clipped; of a mesh of one dimension for None."""
    mesh = DeviceMesh("cpu", [0, 1, 2, 3]) if shape is None else mesh_of(*shape)
    model = zcompile.offload(words(), mesh=mesh, **BUDGETS)
    run, optimizer = torch.compile(model, backend="zinf"), adamw(model.parameters())
    norms = []
    for step in range(2):
        run(*batch(step, dist.get_rank())).backward()
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), bound).item())
        optimizer.step()
        optimizer.zero_grad()
    found = state_of(model, optimizer)
    zcompile.close(model)
    return found, norms


@pytest.mark.slow
def test_norms_are_those_of_one_group(pool):
    """All groups hold the same, so each share counts once."""
    rows = pool.run(clipped, 4, (2, 2), 0.05)
    assert rows == [rows[0]] * 4
    _, alike = pool.run(clipped, 4, None, 0.05)[0]
    assert rows[0][1] == pytest.approx(alike, rel=1e-5)
    assert min(alike) > 0.05, "the bound is in effect"
    # With groups of one each rank holds all: a norm of one share.
    assert pool.run(clipped, 4, (4, 1), 0.05)[0] == pool.run(clipped, 4, None, 0.05)[0]


def scaled_in_low_precision(_, shape):
    """The state after steps under autocast with a scaler, one rank's gradients not finite once;
    with `shape` None that of plain PyTorch in one process."""
    model = run = words()
    if shape is not None:
        zcompile.offload(model, mesh=mesh_of(*shape), stage=3, **BUDGETS)
        run = torch.compile(model, backend="zinf")
    optimizer, sums = adamw(model.parameters()), SumsOfGroups(model, 2, 2)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    for step in range(3):
        for number in range(4) if shape is None else [dist.get_rank()]:
            with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
                loss = run(*batch(step, number))
            if step == 1 and number == 3:
                loss = loss * float("inf")
            scaler.scale(loss).backward()
            if shape is None:
                sums.take()
        if shape is None:
            sums.give()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    found = state_of(model, optimizer), scaler.get_scale()
    if shape is not None:
        zcompile.close(model)
    return found


@pytest.mark.slow
def test_gradients_cross_narrow_within_groups_and_sums_wide_between_them(pool):
    expected = pool.run(scaled_in_low_precision, 1, None)
    assert pool.run(scaled_in_low_precision, 4, (2, 2)) == expected * 4


def tiled(_, shape, micros):
    """As `trained`, in tiles; `shape` None: as one process with the same tiles makes it."""
    torch._dynamo.reset()
    fields = {"tile_bytes": "24KiB", "residency": False}
    model = words()
    zcompile.offload(model, mesh=False if shape is None else mesh_of(*shape), **BUDGETS, **fields)
    run, optimizer = torch.compile(model, backend="zinf"), adamw(model.parameters())
    sums = SumsOfGroups(model, 2, 2)
    for step in range(2):
        for micro in range(micros):
            for rank in range(4) if shape is None else [dist.get_rank()]:
                run(*batch(step, rank + 4 * micro)).backward()
                if shape is None:
                    sums.take()
        if shape is None:
            sums.give()
        optimizer.step()
        optimizer.zero_grad()
    assert zcompile.stats(model)["inexact"], "it comes in tiles"
    found = state_of(model, optimizer)
    zcompile.close(model)
    return found


@pytest.mark.slow
def test_tiles_are_summed_as_whole_gradients_are(pool):
    assert pool.run(tiled, 4, (2, 2), 2) == [tiled(None, None, 2)] * 4


def with_muon(_, shape):
    """Norms and whole matrices: an optimizer that reads all of each gradient."""
    mesh = mesh_of(*shape)
    model = zcompile.offload(words(), mesh=mesh, **BUDGETS)
    run = torch.compile(model, backend="zinf")
    matrices = [p for p in model.parameters() if p.dim() == 2]
    optimizer = torch.optim.Muon(matrices, lr=1e-3)
    for step in range(2):
        run(*batch(step, dist.get_rank())).backward()
        optimizer.step()
        model.zero_grad()
    found = digest(model.parameters())
    zcompile.close(model)
    return found


def with_muon_in_one_process(_):
    model = words()
    matrices = [p for p in model.parameters() if p.dim() == 2]
    optimizer, sums = torch.optim.Muon(matrices, lr=1e-3), SumsOfGroups(model, 2, 2)
    for step in range(2):
        for number in range(4):
            model(*batch(step, number)).backward()
            sums.take()
        sums.give()
        optimizer.step()
        model.zero_grad()
    return digest(model.parameters())


@pytest.mark.slow
def test_an_optimizer_of_whole_matrices_gathers_them_within_each_group(pool):
    expected = pool.run(with_muon_in_one_process, 1)
    assert pool.run(with_muon, 4, (2, 2)) == expected * 4


def read_alone(_):
    """What rank 0 reads alone, and what its group and the other one have sent for that."""
    model = zcompile.offload(words(), mesh=mesh_of(2, 2), **BUDGETS)
    whole, found = digest(model.parameters()), None
    zcompile.stats(model, reset=True)
    with zcompile.rank_zero_reads(model) as is_rank_zero:
        if is_rank_zero:
            found = digest(model.parameters())
    sent = zcompile.stats(model)["fabric"]["bytes"]["gather"]
    zcompile.close(model)
    return whole, found, sent


@pytest.mark.slow
def test_rank_0_reads_from_its_own_group(pool):
    rows = pool.run(read_alone, 4)
    assert rows[0][0] == rows[0][1] == digest(words().parameters())
    assert rows[1][2] > 0
    assert [sent for _, _, sent in rows[2:]] == [0, 0]


# --- The mesh ---


def refused(_, ranks, fields):
    mesh = DeviceMesh("cpu", ranks) if isinstance(ranks, list) else mesh_of(*ranks)
    if dist.get_rank() not in mesh.mesh:
        return None
    try:
        zcompile.close(zcompile.offload(words(), mesh=mesh, **BUDGETS, **fields))
    except ConfigInvalid as error:
        return str(error)
    return ""


def outside(_):
    try:
        mesh = DeviceMesh("cpu", [[0, 1]], _init_backend=False)
        zcompile.offload(words(), mesh=mesh, **BUDGETS)
    except ConfigInvalid as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("ranks", "fields", "says"),
    [
        ([[[0, 1], [2, 3]]], {}, "has 3 dimensions; give the one whose ranks share"),
        ([[0, 2], [1, 3]], {}, "has its ranks in another order than their numbers'"),
        ([[0], [1]], {}, "has 2 of the 4 ranks of torch.distributed"),
        ((2, 2), {"ranks_per_node": 3}, "does not divide the 4 ranks"),
    ],
)
def test_meshes_that_cannot_be_are_refused(pool, ranks, fields, says):
    found = [text for text in pool.run(refused, 4, ranks, fields) if text is not None]
    assert found
    assert all(says in text for text in found), found


def with_other_shapes(_):
    shape = [(2, 2), (4, 1)][dist.get_rank() % 2]
    meshes = {shape: mesh_of(*shape) for shape in [(2, 2), (4, 1)]}
    try:
        zcompile.close(zcompile.offload(words(), mesh=meshes[shape], **BUDGETS))
    except zcompile.errors.RanksDiffer as error:
        return str(error)
    return ""


@pytest.mark.slow
def test_ranks_with_other_meshes_of_the_same_ranks_are_told(pool):
    for text in pool.run(with_other_shapes, 4):
        assert "how they offload a model" in text
        assert "mesh=2x2" in text
        assert "mesh=4x1" in text
