"""`partition="owner"`: each large tensor is with one rank, and all numbers are those of slices."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from rank_models import Means, adamw, batch, digest, optimizer_named, state_of, train, words
from sampled import sampled_rows

import zcompile
from zcompile.config import Config
from zcompile.errors import ConfigInvalid, RanksDiffer, Unsupported
from zcompile.frontend.offload import session_behind
from zcompile.frontend.replan import plan_in_force
from zcompile.ir.partition import (
    PIECE_BYTES,
    SHARE_ELEMENTS,
    Owners,
    Partition,
    exchanged,
    gathered,
)
from zcompile.ir.types import SMALL_BYTES, EntryKind

ROOMY = {"device": "cpu", "device_memory": "4MiB", "host_memory": "64MiB"}
STEPS = 4
"""Two are seen, the third is planned."""
BATCHES = 6
"""Of a step, for 2 or 3 ranks: each takes several."""


def stepped(model, run, optimizer, rank, ranks, clip, step, means=None):
    """A step whose gradients are means over ranks, and sums over batches."""
    here = [rank] if means is None else range(ranks)
    for micro in range(BATCHES // ranks):
        for at in here:
            run(*batch(step, ranks * micro + at)).backward()
            if means is not None:
                means.take()
    if means is not None:
        means.give()
    if clip:
        torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
    optimizer.step()
    optimizer.zero_grad()


def trained(mesh, fields, name="adamw", clip=0.0, kinds=None):
    """Digests after training, and what the last step was like."""
    rank, ranks = mesh.get_local_rank(), mesh.size()
    model = words(**(kinds or {}))
    zcompile.offload(model, mesh=mesh, **{**ROOMY, **fields})
    optimizer = optimizer_named(name)(model.parameters())
    run = torch.compile(model, backend="zinf")
    for step in range(STEPS):
        if step == STEPS - 1:
            zcompile.stats(model, reset=True)
        stepped(model, run, optimizer, rank, ranks, clip, step)
    stats, session = zcompile.stats(model), session_behind(model)
    found = {key: stats[key] for key in ("bytes", "fabric", "peak", "plan")}
    if plan_in_force(session) is not None:
        found["predicted"] = stats["predicted"]
    held = [e for e in session.entries() if e.kind in (EntryKind.PARAM, EntryKind.STATE)]
    found["held"] = [
        (e.name, e.partition.owner, e.partition.own_count, e.nbytes) for e in held if e.partition
    ]
    state = state_of(model, optimizer)
    zcompile.close(model)
    return state, found


def in_one_process(ranks, name="adamw", kinds=None):
    """What plain PyTorch makes of the batches of all ranks, rank after rank."""
    model = words(**(kinds or {}))
    optimizer = optimizer_named(name)(model.parameters())
    means = Means(model, ranks)
    for step in range(STEPS):
        stepped(model, model, optimizer, 0, ranks, 0.0, step, means)
    return state_of(model, optimizer)


def checked(rows, ranks, fused=True):
    """Check what each rank holds, and what has crossed, of runs with owners.

    fused  else the optimizer makes lists between its ops, which no peak is predicted with
    """
    large = [p for p in words().parameters() if p.nbytes > SMALL_BYTES]
    for rank, (_, found) in enumerate(rows):
        owners = {name: owner for name, owner, _, _ in found["held"]}
        assert len([name for name in owners if not name.endswith("avg")]) >= len(large)
        for name, owner, count, nbytes in found["held"]:
            assert owner == next(o for n, o in owners.items() if n == name or name.startswith(n))
            assert (count > 0) == (owner == rank)
            if owner != rank:
                assert nbytes == 4 * SHARE_ELEMENTS, "padding alone"
        assert found["plan"]["stage"] == 3, "nothing is kept whole"
        assert not fused or found["peak"]["device"] <= found["predicted"]["peak"]["device"]
        assert found["bytes"]["rank_to_rank"] == found["predicted"]["bytes"]["rank_to_rank"] > 0
    told = [{name: owner for name, owner, _, _ in found["held"]} for _, found in rows]
    assert told == [told[0]] * ranks
    assert set(told[0].values()) == set(range(ranks))
    # Each byte of a weight goes from its owner to all others, in forward and in each backward but
    # where it is still there; each of a gradient from all others to its owner.
    sent = [found["fabric"]["bytes"] for _, found in rows]
    nbytes = sum(p.nbytes for p in large) * (ranks - 1) * (BATCHES // ranks)
    assert nbytes <= sum(row["gather"] for row in sent) <= 2 * nbytes
    few = [p.nbytes for p in words().parameters() if p.nbytes <= SMALL_BYTES]
    small = sum(math.ceil(n / PIECE_BYTES) * PIECE_BYTES for n in few)
    small *= ranks * (ranks - 1) * (BATCHES // ranks)
    assert sum(row["exchange"] for row in sent) == nbytes + small


@pytest.mark.slow
def test_clipped_steps_have_the_bits_of_slices(pool):
    fields = {"stage": 3}
    rows = pool.run(trained, 2, {**fields, "partition": "owner"}, "adamw", 0.05)
    slices = pool.run(trained, 2, fields, "adamw", 0.05)
    assert [state for state, _ in rows] == [state for state, _ in slices]
    checked(rows, 2)


@pytest.mark.parametrize(
    ("name", "kinds"),
    sampled_rows(
        [("adamw", {}), ("adam foreach", {}), ("sgd", {}), ("adamw", {"tied": True})],
        ("adamw", {}),
    ),
)
def test_ranks_end_with_the_bits_of_one_process(pool, name, kinds):
    rows = pool.run(trained, 3, {"partition": "owner"}, name, 0.0, kinds)
    assert [state for state, _ in rows] == [in_one_process(3, name, kinds)] * 3
    if not kinds:
        checked(rows, 3, fused=name != "adam foreach")


# --- State ---


def saved(mesh, path, fields):
    """Train all steps but the last, and save; the digests then."""
    model = zcompile.offload(words(), mesh=mesh, **ROOMY, **fields)
    optimizer, run = adamw(model.parameters()), torch.compile(model, backend="zinf")
    rank, ranks = (0, 1) if mesh is False else (mesh.get_local_rank(), mesh.size())
    train(model, run, optimizer, rank, ranks, steps=range(2))
    with pytest.MonkeyPatch.context() as patch:  # as no two checkpoints are called
        patch.setattr("zcompile.checkpoint.checkpoint.secrets.token_hex", lambda n: "0" * 2 * n)
        zcompile.save(path, model, optimizer, step=2)
    found = state_of(model, optimizer)
    zcompile.close(model)
    return found


def resumed(mesh, path, fields):
    """Resume on `meta`; the digests then, and after a step, if ranks divide its batches."""
    with torch.device("meta"):
        blank = words()
    model = zcompile.offload(blank, mesh=mesh, **ROOMY, **fields)
    optimizer, run = adamw(model.parameters()), torch.compile(model, backend="zinf")
    step = zcompile.resume(path, model, optimizer)["step"]
    found = state_of(model, optimizer)
    rank, ranks = (0, 1) if mesh is False else (mesh.get_local_rank(), mesh.size())
    if ranks != 3:
        train(model, run, optimizer, rank, ranks, steps=[step])
    after = state_of(model, optimizer)
    zcompile.close(model)
    return found, after


@pytest.mark.slow
def test_a_run_goes_on_with_slices_and_with_owners(pool, tmp_path):
    path, owner = str(tmp_path / "run"), {"partition": "owner"}
    first = pool.run(saved, 2, path, owner)
    begun, after = resumed(False, path, {})
    assert first == [begun] * 2
    assert after != begun
    assert [found for found, _ in pool.run(resumed, 3, path, {})] == [begun] * 3
    assert pool.run(resumed, 2, path, owner) == [(begun, after)] * 2
    names = ["model.safetensors", "optimizer.safetensors"]
    of_owners = [(tmp_path / "run" / name).read_bytes() for name in names]
    pool.run(saved, 2, path, {})
    assert [(tmp_path / "run" / name).read_bytes() for name in names] == of_owners
    assert [found for found, _ in pool.run(resumed, 3, path, owner)] == [begun] * 3


def digests_after_writes(model, run):
    """Read and write parameters outside of a graph, and gradients."""
    optimizer = adamw(model.parameters())
    with torch.no_grad():
        for param in model.parameters():
            param.mul_(0.5)
            param.add_(torch.ones(param.shape))
        torch.manual_seed(3)
        model.head.weight.normal_()
        model.table.weight[5].fill_(7.0)
        model.head.weight.add_(model.table.weight, alpha=0.25)  # which is another rank's
        model.load_state_dict({"norm.weight": torch.full((96,), 2.0)}, strict=False)
        shown = float(model.head.weight.norm()), model.table.weight[3].tolist()
    # All ranks take the same batch: the mean of two equal gradients is that.
    loss = run(*batch(0, 0))
    loss.backward()
    torch.nn.utils.clip_grad_value_(model.parameters(), 1e-3)
    optimizer.step()
    return state_of(model, optimizer), shown, loss.item(), repr(model.table.weight)


def outside(mesh, fields):
    model = zcompile.offload(words(), mesh=mesh, **ROOMY, **fields)
    found = digests_after_writes(model, torch.compile(model, backend="zinf"))
    zcompile.close(model)
    return found


@pytest.mark.slow
def test_readers_and_writers_outside_of_a_graph_see_whole_values(pool):
    (state, *shown), other = pool.run(outside, 2, {"partition": "owner"})
    assert (state, *shown) == other
    assert pool.run(outside, 2, {})[0] == other
    expected, *seen = digests_after_writes(model := words(), model)
    assert shown == seen
    assert state["weights"] == expected["weights"]


# --- What is asked for ---


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"partition": "rows"}, "'rows'.* is not one of slices, owner"),
        ({"partition": "owner", "mesh": False}, "mesh=False lets each train its own"),
        ({"partition": "owner", "stage": 2}, "not together with stage=2; give partition='slices'"),
        ({"partition": "owner", "param_dtype": torch.bfloat16}, "with param_dtype=torch.bfloat16"),
    ],
)
def test_what_owners_cannot_do_is_said(fields, says):
    with pytest.raises(ConfigInvalid, match=says):
        Config(device="cpu", **fields)


def test_one_process_alone_is_nobody_s_owner():
    with pytest.raises(ConfigInvalid, match=r"partition='owner' .* this process trains alone"):
        zcompile.offload(words(), **ROOMY, partition="owner")


def differing(mesh):
    partition = "slices" if mesh.get_local_rank() else "owner"
    with pytest.raises(RanksDiffer) as told:
        zcompile.offload(words(), mesh=mesh, **ROOMY, partition=partition)
    return str(told.value)


def test_ranks_that_differ_in_it_are_told(pool):
    for text in pool.run(differing, 2):
        assert "rank 0:" in text
        assert "partition=owner" in text
        assert "partition=slices" in text


def added_after_temporaries(mesh, path):
    """Make a temporary on one rank alone, then take in a weight, and save it."""
    model = zcompile.offload(words(blocks=1), mesh=mesh, **ROOMY, partition="owner")
    if mesh.get_local_rank():
        torch.zeros_like(model.head.weight.detach()[:190])
    model.more = torch.nn.Linear(256, 256, bias=False)
    torch.nn.init.constant_(model.more.weight, 0.5)
    zcompile.offload(model)
    owner = model.more.weight.entry.partition.owner
    zcompile.save(path, model)
    zcompile.close(model)
    return owner


def test_what_a_rank_makes_for_itself_changes_no_owner(pool, tmp_path):
    path = tmp_path / "run"
    first, second = pool.run(added_after_temporaries, 2, str(path))
    assert first == second
    plain = words(blocks=1)
    plain.more = torch.nn.Linear(256, 256, bias=False)
    zcompile.load(plain, path)
    assert torch.equal(plain.more.weight, torch.full((256, 256), 0.5))


def told_at_the_second_try(mesh):
    """Take in three more weights, at first with a rank that cannot; who holds what then."""
    model = zcompile.offload(words(blocks=1), mesh=mesh, **ROOMY, partition="owner")
    model.more = torch.nn.ModuleList(torch.nn.Linear(200, 200, bias=False) for _ in range(3))
    with pytest.MonkeyPatch.context() as patch:
        if mesh.get_local_rank():
            patch.setattr("zcompile.frontend.offload.check_nodes", lambda plain: 1 / 0)
        with pytest.raises((Unsupported, ZeroDivisionError)):
            zcompile.offload(model)
    zcompile.offload(model)
    found = [p.entry.partition.owner for p in model.parameters() if p.entry.partition]
    read = digest(model.parameters())
    zcompile.close(model)
    return found, read


def test_what_was_not_taken_in_has_no_owner(pool):
    first, second = pool.run(told_at_the_second_try, 2)
    assert first == second
    assert {*first[0][-3:]} == {0, 1}


# --- Who holds what ---


@given(st.lists(st.integers(SMALL_BYTES + 1, 10**7), max_size=40), st.integers(1, 9))
def test_owners_are_given_as_many_bytes(sizes, ranks):
    first, second = Owners(ranks), Owners(ranks)
    chosen = [first.next(nbytes) for nbytes in sizes]
    assert chosen == [second.next(nbytes) for nbytes in sizes], "all ranks choose alike"
    held = [sum(n for n, at in zip(sizes, chosen, strict=True) if at == r) for r in range(ranks)]
    assert max(held) - min(held) <= max(sizes, default=0)
    assert first.nbytes == tuple(held)
    before = first.nbytes
    first.next(10)
    first.go_back_to(before)
    assert first.next(10) == second.next(10)


@given(st.integers(1, 200_000), st.integers(1, 9), st.data())
def test_one_rank_holds_all_elements(numel, ranks, data):
    owner = data.draw(st.integers(0, ranks - 1))
    begin = data.draw(st.integers(0, numel - 1))
    count = data.draw(st.integers(1, numel - begin))
    parts = [Partition(numel, rank, ranks, owner) for rank in range(ranks)]
    held = [part.own for part in parts]
    assert held[owner] == (0, numel)
    assert [first for first, _ in held] == [0, *(last for _, last in held[:-1])], "in order"
    flat = torch.arange(1, numel + 1)
    for part in parts:
        assert part.count % SHARE_ELEMENTS == 0
        assert part.own_count == (numel if part.rank == owner else 0)
        assert torch.equal(part.cut(flat)[: part.own_count], flat[: part.own_count])
        whole = part.range_of(4)
        tile = whole.__class__(
            begin * 4, count * 4, whole.share_nbytes, part.rank, ranks, part.owner
        )
        assert tile.own == ((0, count * 4) if part.rank == owner else (0, 0))
        assert tile.home == ((begin * 4, (begin + count) * 4) if part.rank == owner else (0, 0))
        half = tile.in_nbytes(count * 2)
        assert (half.begin, half.nbytes, half.owner) == (begin * 2, count * 2, owner)
        mine = part.rank == owner
        came = gathered(count * 4, ranks, tile)
        assert came == ((0 if mine else count * 4), (count * 4 if ranks > 1 else 0))
        came = exchanged(count * 4, ranks, tile)
        most = (ranks - 1) * count * 4
        assert came == ((most if mine else 0), most)
