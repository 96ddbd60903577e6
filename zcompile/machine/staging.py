"""Sizes the staging ring between disk and device, and the share of each direction in it."""

from collections.abc import Mapping
from typing import NamedTuple

from zcompile.errors import ConfigInvalid
from zcompile.ir.units import KiB, MiB, show_size
from zcompile.machine.model import Link

MOST_CHUNK_BYTES = 4 * MiB
LEAST_CHUNK_BYTES = 64 * KiB
LEAST_CHUNKS = 4
LEAST_BYTES = LEAST_CHUNKS * LEAST_CHUNK_BYTES
MOST_STAGING_BYTES = 256 * MiB
"""At 7 GB/s of NVMe this is 37 ms in flight, more than a link needs to be busy."""
MOST_BESIDE_BYTES = 32 * MiB
"""Largest ring where reads go straight from the disk to the arena, and the ring serves writes and
all else."""
BESIDE_PART = 16
"""One part in so many of the host is such a ring, unless that is large: chunks of writes are large
in it, and what it takes of a small host would save reads and writes as the home of entries."""
SMALL_BESIDE_BYTES = 4 * MiB
"""Largest ring of a quarter of the host, where a 16th is less."""
RING_PART = 128
"""The ring takes one part in so many of the host. Nothing rests in it: a byte more of it is a byte
more that is read from disk and written there in every step."""
SMALL_RING_BYTES = 2 * MiB
"""Largest ring of an eighth of the host, where a 128th is less: small chunks are mostly
overhead."""
BACKLOG_PART = 4
"""Gradients in flight take at most one part in so many of the host, though never less than the
smallest ring and never more than the largest."""


class StagingSize(NamedTuple):
    """chunk_bytes: the largest buffer that is handed out; chunks: number of those."""

    chunk_bytes: int
    chunks: int

    @property
    def nbytes(self) -> int:
        return self.chunk_bytes * self.chunks


def staging_size(host_budget: int, straight: bool = False) -> StagingSize:
    """Size of the ring, for a host budget in bytes.

    straight  most reads of the disk do not need the ring: that may be as fast as it is, and what
              does need the ring moves in larger chunks

    raises  ConfigInvalid if the budget is smaller than the smallest ring
    """
    if host_budget < LEAST_BYTES:
        raise ConfigInvalid(
            "host_memory",
            host_budget,
            "is too small: transfers are staged in at "
            f"least {show_size(LEAST_BYTES)}; give that or more",
        )
    if straight:
        part = max(host_budget // BESIDE_PART, min(host_budget // 4, SMALL_BESIDE_BYTES))
    else:
        part = max(host_budget // RING_PART, min(host_budget // 8, SMALL_RING_BYTES))
    target = min(part, _most(straight))
    chunk = MOST_CHUNK_BYTES
    while chunk > LEAST_CHUNK_BYTES and chunk * 8 > target:
        chunk //= 2
    return StagingSize(chunk, max(LEAST_CHUNKS, target // chunk))


def backlog_bytes(host_budget: int, straight: bool = False) -> int:
    """Most bytes of gradients in flight to their entries, before the next waits for one to
    arrive."""
    return max(LEAST_BYTES, min(host_budget // BACKLOG_PART, _most(straight)))


def _most(straight: bool) -> int:
    return MOST_BESIDE_BYTES if straight else MOST_STAGING_BYTES


SLOWER_THAN_A_COPY = 6
"""Slots are written behind by a disk that is so many times slower than a copy, or more
(`benchmarks/written_slots.py`). The copy takes a core and memory from compute."""


def behind_bytes(ring_bytes: int, links: Mapping[str, Link]) -> int:
    """Most bytes of a slot of the arena that passes the ring on its way to the disk, though it
    could go straight: what writes have room for at once there, or 0 if the disk is too quick for
    that.

    Such a slot is free as soon as it is copied, and the disk writes it behind what comes next: a
    slot is room that others wait for. What else is in the ring by then is not asked: several slots
    in a row wait there for each other, as they would for the disk.
    """
    copy, write = links.get("d2h"), links.get("disk_write")
    slow = copy and write and copy.bytes_per_s >= SLOWER_THAN_A_COPY * write.bytes_per_s
    return lane_bytes(ring_bytes) if slow else 0


def lane_bytes(ring_bytes: int) -> int:
    """Most bytes of the ring that reads take; writes take as many."""
    return ring_bytes - ring_bytes // 4
