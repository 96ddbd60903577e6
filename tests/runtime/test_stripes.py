"""Large entries lie over all directories; every byte comes back from where it was put."""

import errno
import os

import pytest
import torch
from border import Border
from hypothesis import given, settings
from hypothesis import strategies as st

from zcompile.errors import DiskUnusable, TierFull
from zcompile.ir.types import EntryKind
from zcompile.ir.units import Bytes, KiB, MiB
from zcompile.runtime.device.pages import host_pages
from zcompile.runtime.meter import Meter
from zcompile.runtime.tiers.base import Buffer
from zcompile.runtime.tiers.disk import STRIPE_BYTES, DiskTier, share_of, stripe_pieces


@settings(deadline=None, derandomize=True)
@given(st.integers(1, 5), st.integers(0, 12 * STRIPE_BYTES))
def test_the_parts_hold_every_byte_once(parts, nbytes):
    assert sum(share_of(n, parts, nbytes) for n in range(parts)) == nbytes
    ends = dict.fromkeys(range(parts), 0)
    at = 0
    for piece in stripe_pieces(parts, 0, nbytes):
        assert piece.begin == at
        assert piece.offset == ends[piece.part], "a part is filled from its begin on, without holes"
        at = piece.end
        ends[piece.part] += piece.end - piece.begin
    assert at == nbytes
    assert ends == {n: share_of(n, parts, nbytes) for n in range(parts)}


@pytest.fixture
def tier(tmp_path):
    directories = [tmp_path / name for name in "ab"]
    for directory in directories:
        directory.mkdir()
    tier = DiskTier(directories, {}, Meter(), lambda error: None)
    yield tier
    tier.close()


def pattern(nbytes):
    memory = host_pages(nbytes)
    memory.copy_(torch.arange(nbytes, dtype=torch.int64).remainder_(251))
    return memory


@pytest.mark.parametrize("nbytes", [2 * STRIPE_BYTES, 3 * STRIPE_BYTES + 4096])
def test_a_large_entry_lies_in_every_directory(tier, nbytes):
    extent = tier.reserve(nbytes, "w")
    assert len({stretch.fd for stretch in tier.file_ranges(extent, 0, nbytes)}) == 2
    source = pattern(nbytes)
    tier.write(extent, 0, Buffer.over(source)).wait()
    target = host_pages(nbytes)
    tier.read(extent, 0, Buffer.over(target)).wait()
    assert torch.equal(source, target)
    begin = STRIPE_BYTES - 8192
    part = host_pages(16_384)
    tier.read(extent, begin, Buffer.over(part)).wait()
    assert torch.equal(part, source[begin : begin + 16_384])


def test_a_small_entry_lies_in_one(tier):
    extent = tier.reserve(1 * MiB, "w")
    assert len(tier.file_ranges(extent, 0, 1 * MiB)) == 1


def test_what_is_released_is_used_again(tier):
    first = tier.reserve(4 * STRIPE_BYTES, "a")
    _, used, _ = tier.usage()
    tier.release(first)
    assert tier.usage()[1] == used - 4 * STRIPE_BYTES
    tier.reserve(4 * STRIPE_BYTES, "b")
    assert tier.usage()[1] == used


def test_where_one_disk_is_full_an_entry_lies_in_the_other_whole(tier, monkeypatch):
    monkeypatch.setattr(tier._files[1], "take", lambda nbytes: None)
    extent = tier.reserve(2 * STRIPE_BYTES, "w")
    assert len(tier.file_ranges(extent, 0, 2 * STRIPE_BYTES)) == 1
    monkeypatch.setattr(tier._files[0], "take", lambda nbytes: None)
    with pytest.raises(TierFull, match="'v'"):
        tier.reserve(2 * STRIPE_BYTES, "v")
    tier.release(extent)
    assert tier.usage()[1] == 0


def test_a_store_stripes_what_rests_on_disk_unless_it_is_durable(tmp_path, open_store):
    for durable in (False, True):
        directories = [tmp_path / f"{name}{durable}" for name in "ab"]
        for directory in directories:
            directory.mkdir()
        store = open_store(host_memory=Bytes(256 * KiB), disk=tuple(directories), durable=durable)
        entry = store.create("w", EntryKind.PARAM, 2 * STRIPE_BYTES)
        store.put(entry, pattern(entry.nbytes)).wait()
        assert torch.equal(store.read_all(entry), pattern(entry.nbytes))
        assert len(store.file_ranges(entry, 0, entry.nbytes)) == (1 if durable else 2)


def test_where_one_disk_fails_the_other_keeps_nothing(tmp_path):
    failing = False

    def around(call, go):
        if failing and call.name == "allocate" and call.of.parent == tmp_path / "b":
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return go()

    places = [tmp_path / name for name in "ab"]
    tier = DiskTier(places, {}, Meter(), lambda error: None, system=Border(around))
    try:
        failing = True
        for _ in range(2):
            with pytest.raises(DiskUnusable, match=f"{tmp_path}/b.*cannot be grown"):
                tier.reserve(2 * STRIPE_BYTES, "w")
            assert [file.extents.used_bytes for file in tier._files] == [0, 0]
    finally:
        tier.close()
