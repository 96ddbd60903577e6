"""One suite over every tier: what is written is read, wherever it rests."""

import random
import weakref
from pathlib import Path

import pytest
import torch
from marking import Marked, Marking
from torch import Tensor

from zcompile.errors import TierFull
from zcompile.ir.units import KiB, MiB
from zcompile.runtime.device.pages import host_pages
from zcompile.runtime.meter import Gauge, Meter
from zcompile.runtime.tiers.base import Buffer, TierIO
from zcompile.runtime.tiers.disk import DiskTier
from zcompile.runtime.tiers.host import HostTier

UNIT = 4096
"""A multiple of every tier's alignment."""


def host_tier(directory: Path) -> TierIO:
    return HostTier(1 * MiB, host_pages, Gauge())


def disk_tier(directory: Path) -> TierIO:
    return DiskTier([directory], {}, Meter(), lambda error: None)


TIERS = {"host": host_tier, "disk": disk_tier}


@pytest.fixture(params=TIERS)
def tier(request, tmp_path):
    tier = TIERS[request.param](tmp_path)
    yield tier
    tier.close()


def buffer(nbytes: int, values: Tensor | None = None) -> Buffer:
    memory = host_pages(nbytes)
    if values is not None:
        memory.copy_(values)
    return Buffer.over(memory)


def random_bytes(nbytes: int) -> Tensor:
    return torch.randint(0, 256, (nbytes,), dtype=torch.uint8)


def test_what_is_written_is_read(tier):
    extent = tier.reserve(3 * UNIT, "w")
    values = random_bytes(3 * UNIT)
    tier.write(extent, 0, buffer(3 * UNIT, values)).wait()
    into = buffer(3 * UNIT)
    tier.read(extent, 0, into).wait()
    assert torch.equal(into.memory, values)


def test_a_part_is_written_and_read_where_it_lies(tier):
    extent = tier.reserve(4 * UNIT, "w")
    values = random_bytes(4 * UNIT)
    tier.write(extent, 0, buffer(4 * UNIT, values)).wait()
    middle = random_bytes(UNIT)
    tier.write(extent, 2 * UNIT, buffer(UNIT, middle)).wait()
    into = buffer(2 * UNIT)
    tier.read(extent, 2 * UNIT, into).wait()
    assert torch.equal(into.memory, torch.cat([middle, values[3 * UNIT :]]))


def test_extents_do_not_share_bytes(tier):
    extents = [tier.reserve(UNIT + 1, f"w{n}") for n in range(5)]
    for n, extent in enumerate(extents):
        tier.write(extent, 0, buffer(UNIT, torch.full((UNIT,), n))).wait()
    for n, extent in enumerate(extents):
        into = buffer(UNIT)
        tier.read(extent, 0, into).wait()
        assert into.memory.eq(n).all()


def test_an_extent_is_rounded_up_to_the_alignment(tier):
    extent = tier.reserve(1, "bias")
    assert extent.nbytes == tier.alignment
    assert extent.offset % tier.alignment == 0
    assert tier.usage()[1] == tier.alignment


def test_released_bytes_are_used_again(tier):
    first = tier.reserve(8 * UNIT, "a")
    tier.reserve(UNIT, "b")
    tier.release(first)
    assert tier.reserve(8 * UNIT, "c").offset == first.offset


def test_a_tier_that_is_full_says_how_full(tier):
    with pytest.raises(TierFull, match=rf"no tier has .* left for 'huge'\n +{tier.name}: "):
        tier.reserve(1 << 60, "huge")


def test_closing_twice_is_closing_once(tier):
    tier.close()
    tier.close()


def test_an_entry_of_the_host_tier_may_cross_blocks(monkeypatch):
    monkeypatch.setattr("zcompile.runtime.tiers.host.BLOCK_BYTES", 8 * KiB)
    blocks = []
    tier = HostTier(64 * KiB, lambda n: blocks.append(n) or host_pages(n), Gauge())
    tier.reserve(6 * KiB, "a")
    extent = tier.reserve(20 * KiB, "b")
    assert blocks == [8 * KiB] * 4
    values = random_bytes(20 * KiB)
    tier.write(extent, 0, buffer(20 * KiB, values)).wait()
    into = buffer(12 * KiB)
    tier.read(extent, 5 * KiB, into).wait()
    assert torch.equal(into.memory, values[5 * KiB : 17 * KiB])
    assert [n for _, m in tier.pieces(extent, 0, 20 * KiB) for n in [m.numel()]] == [
        2 * KiB,
        8 * KiB,
        8 * KiB,
        2 * KiB,
    ]


def test_the_host_tier_tells_where_bytes_lie_by_the_same_objects_until_it_is_closed():
    tier = HostTier(64 * KiB, host_pages, Gauge())
    extent = tier.reserve(8 * KiB, "a")
    with torch.inference_mode():
        ((_, memory),) = tier.pieces(extent, 0, 8 * KiB)
    assert tier.pieces(extent, 0, 8 * KiB)[0][1] is memory
    memory.add_(1)  # by training
    with Marking():
        assert type(torch.ones(8)[:4]) is Marked
        pieces = tier.pieces(extent, 0, KiB)
        made = HostTier(64 * KiB, host_pages, Gauge())
        pieces += made.pieces(made.reserve(KiB, "b"), 0, KiB)
    assert [type(piece) for _, piece in pieces] == [Tensor] * 2
    del pieces
    alive = weakref.ref(memory.untyped_storage())
    del memory
    tier.close()
    assert alive() is None


@pytest.mark.parametrize("block", [8 * KiB, 1 * MiB])
@pytest.mark.parametrize("seed", range(4))
def test_what_rests_on_the_host_moves_together_and_stays_what_it_is(monkeypatch, block, seed):
    monkeypatch.setattr("zcompile.runtime.tiers.host.BLOCK_BYTES", block)
    draw, in_use = random.Random(seed), Gauge()
    tier = HostTier(256 * KiB, host_pages, in_use)
    held = {}
    for _ in range(200):
        try:
            extent = tier.reserve(draw.choice((1, 100, 5 * KiB, 11 * KiB)), "w")
        except TierFull:
            continue
        values = random_bytes(extent.nbytes)
        tier.write(extent, 0, buffer(extent.nbytes, values)).wait()
        held[extent] = values
        if draw.random() < 0.6:
            gone = draw.choice(list(held))
            del held[gone]
            tier.release(gone)
    used = tier.usage()[1]
    made = tier.compact(list(held))
    assert sum(extent.nbytes for extent in made) == used == tier.usage()[1] == in_use.now
    for extent, values in zip(made, held.values(), strict=True):
        into = buffer(extent.nbytes)
        tier.read(extent, 0, into).wait()
        assert torch.equal(into.memory, values)
    free = tier.reserve(256 * KiB - used, "all that is left")
    assert free.offset == used
    tier.release(free)
    for extent in made:
        tier.release(extent)
    assert tier.usage()[1] == in_use.now == 0


def test_nothing_moves_on_a_host_that_others_use_too():
    tier = HostTier(64 * KiB, host_pages, Gauge())
    _, mine = tier.reserve(KiB, "another's"), tier.reserve(KiB, "mine")
    assert tier.compact([mine]) is None
    assert tier.reserve(KiB, "next").offset == 2 * KiB
