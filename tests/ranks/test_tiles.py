"""Weights that come in tiles, where several ranks hold shares of them: the bits of one process with
the same tiles."""

import pytest
import torch
from rank_models import STEPS, Means, optimizer_named, state_of, words
from sampled import sampled_rows
from torch import nn

import zcompile
from zcompile.errors import RankFailed, Unsupported
from zcompile.ir.partition import SharedRange

BUDGETS = {"device": "cpu", "device_memory": "4MiB", "host_memory": "64MiB"}
TILES = {**BUDGETS, "tile_bytes": "24KiB"}
"""Two tiles take no more: weights of 72 KiB and more are cut."""


def drawn(step, number, tokens, length):
    """Batch `number` of a step."""
    made = torch.Generator().manual_seed(1000 * step + number)
    ids = torch.randint(tokens, (2, length + 1), generator=made)
    return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()


def trained(mesh, ranks, fields, kinds, micro=1, steps=STEPS, disk=None, lengths=(8,)):
    """The state after steps in tiles, each of so many batches on each rank, of lengths in turn; and
    what stats say of the last step. mesh None: as one process makes it of all batches, each
    gradient times 1/ranks, rank after rank.
    """
    torch._dynamo.reset()
    here = range(ranks) if mesh is None else [mesh.get_local_rank()]
    if disk is not None:
        fields = {**fields, "disk": f"{disk}/{'alone' if mesh is None else 'ranks'}"}
    model = zcompile.offload(words(**kinds), mesh=False if mesh is None else mesh, **fields)
    optimizer = optimizer_named("adamw")(model.parameters())
    run, tokens = torch.compile(model, backend="zinf"), kinds.get("tokens", 200)
    means = Means(model, ranks)
    for step in range(steps):
        zcompile.stats(model, reset=True)
        for number in range(micro):
            for rank in here:
                length = lengths[step % len(lengths)]
                run(*drawn(step, ranks * number + rank, tokens, length)).backward()
                if mesh is None:
                    means.take()
        means.give()
        optimizer.step()
        optimizer.zero_grad()
    stats = dict(zcompile.stats(model))
    found = state_of(model, optimizer)
    zcompile.close(model)
    return found, stats


UNPLANNED = {**TILES, "residency": False}
CASES = {
    "cut": (UNPLANNED, {}, {}),
    # The table is read by rows and by products, and its gradient has two contributions.
    "tied": (UNPLANNED, {"tied": True}, {"micro": 2}),
    # Rows of 400 bytes: tiles begin and end anywhere in pages, and within a unit of shares.
    "odd rows": ({**UNPLANNED, "tile_bytes": "9KiB"}, {"width": 100, "tied": True}, {}),
    # Small weights are whole on every rank, and cut as well.
    "small": ({**UNPLANNED, "tile_bytes": "6KiB"}, {"width": 40, "tokens": 500}, {"micro": 2}),
    "planned": (TILES, {}, {"micro": 2, "steps": 4}),
    # The head is larger than the device: it is cut because of that.
    "too large": (
        {**BUDGETS, "device_memory": "700KiB", "residency": False},
        {"tokens": 3000},
        {},
    ),
    "lengths": (UNPLANNED, {}, {"lengths": (8, 6, 7)}),
    # The loss is summed over pieces of its tokens: all of a weight's gradient is one tile.
    "tokens": ({**BUDGETS, "residency": False}, {"blocks": 2}, {"lengths": (384,)}),
}


ROWS = [(case, ranks) for case in CASES for ranks in (2, 3)]


@pytest.mark.parametrize(("case", "ranks"), sampled_rows(ROWS, ("tokens", 2)))
def test_ranks_with_tiles_end_with_the_bits_of_one_process_with_them(pool, case, ranks):
    fields, kinds, more = CASES[case]
    expected, alone = trained(None, ranks, fields, kinds, **more)
    defaults = {"micro": 1, "steps": STEPS, "disk": None, "lengths": (8,)} | more
    rows = pool.run(trained, ranks, ranks, fields, kinds, *defaults.values())
    assert [state for state, _ in rows] == [expected] * ranks
    assert any("tile-" in row["by"] for row in alone["inexact"])
    for _, stats in rows:
        assert stats["inexact"] == alone["inexact"]
        assert stats["peak"]["device"] <= alone["peak"]["device"]
    if rows[0][1]["predicted"] is not None:
        sent = [stats["fabric"]["bytes"] for _, stats in rows]
        sent = sum(row["gather"] + row["exchange"] for row in sent)
        assert sent == sum(stats["predicted"]["bytes"]["rank_to_rank"] for _, stats in rows)


@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
def test_the_parts_of_a_tile_are_those_of_the_shares(ranks):
    """Parts are in order, make the whole tile, and lie in shares where the shares have them."""
    whole, share = 20 * 512, -(-20 // ranks) * 512
    shares = [range(r * share, (r + 1) * share) for r in range(ranks)]
    for begin, end in [(0, whole), (0, 512), (700, 5000), (508, 516), (9000, whole)]:
        at = 0
        for rank in range(ranks):
            tile = SharedRange(begin, end - begin, share, rank, ranks)
            first, last = tile.own
            assert (first, last) == SharedRange(begin, end - begin, share, 0, ranks).of_rank(rank)
            assert first in (at, last)
            at = max(at, last)
            low, high = tile.home
            assert high - low == last - first == tile.own_nbytes
            if first < last:
                assert begin + first == shares[rank][low]
                assert begin + last - 1 == shares[rank][high - 1]
        assert at == end - begin


@pytest.mark.slow
@pytest.mark.parametrize("case", ["tied", "planned", "too large"])
def test_a_tile_may_be_all_with_one_rank(pool, case):
    fields, kinds, more = CASES[case]
    expected, _ = trained(None, 2, fields, kinds, **more)
    more = {"micro": 1, "steps": STEPS} | more
    rows = pool.run(trained, 2, 2, {**fields, "partition": "owner"}, kinds, *more.values())
    assert [state for state, _ in rows] == [expected] * 2


@pytest.mark.slow
def test_parts_of_tiles_are_fetched_from_disk(pool, tmp_path):
    """Where parts begin and end within blocks of the disk."""
    fields, kinds, _ = CASES["odd rows"]
    fields = {**fields, "host_memory": "512KiB"}
    expected, _ = trained(None, 3, fields, kinds, disk=tmp_path)
    (tmp_path / "ranks").mkdir()
    rows = pool.run(trained, 3, 3, fields, kinds, 1, STEPS, str(tmp_path))
    assert [state for state, _ in rows] == [expected] * 3
    assert all(stats["bytes"]["disk_read"] for _, stats in rows)


def with_a_hook(mesh):
    """What each rank meets where one of them has a hook."""
    rank = mesh.get_local_rank()
    model = zcompile.offload(words(blocks=1), mesh=mesh, **TILES)
    if rank == mesh.size() - 1:
        model.head.weight.register_hook(lambda grad: grad)
    run = torch.compile(model, backend="zinf")
    with pytest.raises((Unsupported, RankFailed)) as refused:
        run(*drawn(0, rank, 200, 8)).backward()
    zcompile.close(model)
    return type(refused.value).__name__, str(refused.value)


@pytest.mark.slow
def test_a_hook_that_would_see_tiles_is_refused_on_all_ranks(pool):
    (failed, why), (kind, text) = pool.run(with_a_hook, 2)
    assert (failed, kind) == (RankFailed.__name__, Unsupported.__name__)
    assert "rank 1 on " in why
    for said in (why, text):
        assert "'head.weight' has a hook, its gradient is made in tiles, and several ranks" in said


# --- Slices, which each rank takes of its own batch ---


class Wide(nn.Module):
    """Two blocks whose hidden values are larger than all else: they are made for some tokens at a
    time."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 512), nn.GELU(), nn.Linear(512, 64))
            for _ in range(2)
        )

    def forward(self, x):
        for block in self.blocks:
            x = x + block(x)
        return x.square().mean()


HIDDEN_BYTES = 2 * 512 * 512 * 4
"""Of one hidden value: a nonlinearity holds two of them, its backward three."""


def sliced(mesh, ranks):
    """The state after two steps in slices of tokens, as in `trained`, and who made any."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    here = range(ranks) if mesh is None else [mesh.get_local_rank()]
    fields = {**BUDGETS, "device_memory": HIDDEN_BYTES, "residency": False}
    model = zcompile.offload(Wide(), mesh=False if mesh is None else mesh, **fields)
    optimizer, run = (
        optimizer_named("sgd")(model.parameters()),
        torch.compile(model, backend="zinf"),
    )
    means = Means(model, ranks)
    for step in range(2):
        for rank in here:
            made = torch.Generator().manual_seed(10 * step + rank)
            run(torch.randn(2, 512, 64, generator=made)).backward()
            if mesh is None:
                means.take()
        means.give()
        optimizer.step()
        optimizer.zero_grad()
    by = {row["by"] for row in zcompile.stats(model)["inexact"]}
    found = state_of(model, optimizer)
    zcompile.close(model)
    return found, by


@pytest.mark.slow
def test_slices_of_tokens_have_the_bits_of_one_process_with_them(pool):
    expected = sliced(None, 2)
    assert "tile-tokens" in expected[1]
    assert pool.run(sliced, 2, 2) == [expected] * 2
