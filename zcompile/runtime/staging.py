"""The staging ring: a fixed piece of the host's memory between the disk and the device.

A transfer that needs buffers joins the queue of its lane and is handed one per chunk, as large as
that chunk, first come, first served. Buffers of one size would let a small tensor hold as much as a
large one, and few writes wait for a slow disk at a time. Writes lie in the first three quarters of
the ring, as low as they can, reads in the last three, as high as they can, and go first: so a
backlog of writes never stops a read, nor the other way round, however their sizes are mixed.
"""

import threading
from collections import deque
from typing import NamedTuple, Protocol

from torch import Tensor

from zcompile.errors import ConfigInvalid
from zcompile.runtime.disk_trial import BLOCK_BYTES
from zcompile.runtime.extents import Extents
from zcompile.runtime.meter import Gauge
from zcompile.runtime.tiers import Buffer
from zcompile.traffic import lane_bytes
from zcompile.units import KiB, MiB, show_size

MOST_CHUNK_BYTES = 4 * MiB
LEAST_CHUNK_BYTES = 64 * KiB
LEAST_CHUNKS = 4
LEAST_BYTES = LEAST_CHUNKS * LEAST_CHUNK_BYTES
MOST_STAGING_BYTES = 256 * MiB
"""At 7 GB/s of NVMe this is 37 ms in flight, more than a link needs to be busy."""
MOST_BESIDE_BYTES = 32 * MiB
"""Where most transfers go straight between disk and arena, and the ring serves the others."""
RING_PART = 128
"""Such a part of the host is the ring. Nothing rests in it: a byte more of it is a byte more that
is read from disk and written there in every step."""
SMALL_RING_BYTES = 1 * MiB
"""An eighth of the host, up to this, where a 128th is less: small chunks are mostly overhead."""
BACKLOG_PART = 4
"""Of the host: gradients on their way take at most as much, though never less than the least ring
and never more than the largest."""


class StagingSize(NamedTuple):
    """chunk_bytes: the largest buffer that is handed out; chunks: how many of those there are."""

    chunk_bytes: int
    chunks: int

    @property
    def nbytes(self) -> int:
        return self.chunk_bytes * self.chunks


def staging_size(host_budget: int, straight: bool = False) -> StagingSize:
    """How much of the host budget is the ring.

    straight  most transfers between disk and device do not need it: the disk may be as fast as it
              is, and what does need it is moved in larger chunks, a quarter of a small host

    raises  ConfigInvalid if the budget is smaller than the least ring
    """
    if host_budget < LEAST_BYTES:
        raise ConfigInvalid("host_memory", host_budget, "is too small: transfers are staged in at "
                            f"least {show_size(LEAST_BYTES)}; give that or more")  # fmt: skip
    small = min(host_budget // 8, SMALL_RING_BYTES)
    part = host_budget // 4 if straight else max(host_budget // RING_PART, small)
    target = min(part, _most(straight))
    chunk = MOST_CHUNK_BYTES
    while chunk > LEAST_CHUNK_BYTES and chunk * 8 > target:
        chunk //= 2
    return StagingSize(chunk, max(LEAST_CHUNKS, target // chunk))


def backlog_bytes(host_budget: int, straight: bool = False) -> int:
    """Of gradients on their way home, at most, before the next waits for one to arrive."""
    return max(LEAST_BYTES, min(host_budget // BACKLOG_PART, _most(straight)))


def _most(straight: bool) -> int:
    return MOST_BESIDE_BYTES if straight else MOST_STAGING_BYTES


class Staged(Protocol):
    """A transfer that travels in chunks."""

    def room(self, begin: int, end: int) -> int:
        """Bytes of buffer for the chunk [begin, end), at most a chunk of the ring; rounded up to
        whole blocks by it."""

    def begin_chunk(self, begin: int, end: int, buffer: Buffer) -> None:
        """Start bytes [begin, end) through `buffer`, which goes back to the ring at their end."""


class _Lane:
    """Transfers of one direction that wait for buffers, which lie in [begin, end) of the ring, at
    its beginning or at its end."""

    def __init__(self, begin: int, end: int, at_end: bool) -> None:
        self.begin, self.end, self.at_end = begin, end, at_end
        self.waiting: deque[tuple[Staged, deque[tuple[int, int]]]] = deque()

    def wants(self) -> int:
        """Bytes of the next buffer; 0 if nobody waits."""
        if not self.waiting:
            return 0
        staged, chunks = self.waiting[0]
        return staged.room(*chunks[0])

    def next(self) -> tuple[Staged, int, int]:
        staged, chunks = self.waiting[0]
        begin, end = chunks.popleft()
        if not chunks:
            self.waiting.popleft()
        return staged, begin, end


class Staging:
    """The ring over `memory` [size.nbytes]; thread-safe. Buffers begin and end at multiples of
    `BLOCK_BYTES` from where `memory` begins."""

    def __init__(self, memory: Tensor, size: StagingSize, in_use: Gauge) -> None:
        self.chunk_bytes, self.nbytes = size.chunk_bytes, size.nbytes
        self._whole = Buffer.over(memory)
        self._ranges = Extents(BLOCK_BYTES, size.nbytes)
        self._in_use = in_use
        most = lane_bytes(size.nbytes)
        self._lanes = {"read": _Lane(size.nbytes - most, size.nbytes, at_end=True),
                       "write": _Lane(0, most, at_end=False)}  # fmt: skip
        self._lock = threading.Lock()
        self._pumping = False

    def request(self, lane: str, staged: Staged, chunks: deque[tuple[int, int]]) -> None:
        """`staged` will be handed one buffer for each of `chunks`, a deque that is consumed."""
        if chunks:
            with self._lock:
                self._lanes[lane].waiting.append((staged, chunks))
            self._pump()

    def give(self, buffer: Buffer) -> None:
        """A chunk is over."""
        begin = buffer.memory.data_ptr() - self._whole.memory.data_ptr()
        with self._lock:
            self._ranges.give(begin, buffer.nbytes)
        self._in_use.change(-buffer.nbytes)
        self._pump()

    def _pump(self) -> None:
        """Hand out buffers until there are none, or nobody wants one.

        A chunk that fails at once gives its buffer back from within; then, or when another thread
        is at it already, the loop that runs goes on, so calls never pile up.
        """
        while True:
            with self._lock:
                turn = None if self._pumping else self._turn()
                if turn is None:
                    return
                self._pumping = True
            (staged, begin, end), buffer = turn
            self._in_use.change(buffer.nbytes)
            try:
                staged.begin_chunk(begin, end, buffer)
            finally:
                with self._lock:
                    self._pumping = False

    def _turn(self) -> tuple[tuple[Staged, int, int], Buffer] | None:
        """Who is next, and the buffer for it. What finds no hole that is large enough keeps those
        of its lane that are behind it waiting: holes grow until it does."""
        for lane in self._lanes.values():
            nbytes = self._ranges.aligned(lane.wants())
            if not nbytes:
                continue
            begin = self._ranges.take_within(nbytes, lane.begin, lane.end, lane.at_end)
            if begin is not None:
                return lane.next(), self._whole.part(begin, begin + nbytes)
        return None
