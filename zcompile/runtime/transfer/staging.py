"""The staging ring lends a fixed piece of host memory to transfers between the disk and the device.

A transfer that needs buffers joins the queue of its lane and is handed one per chunk, as large as
that chunk, first come, first served. Buffers of one size would let a small tensor hold as much as a
large one, and few writes wait for a slow disk at a time. Writes lie in the first three quarters of
the ring, as low as they can, reads in the last three, as high as they can, and reads go first: so a
backlog of writes never stops a read, nor the other way round, however their sizes are mixed.
"""

import threading
from collections import deque
from typing import Protocol

import torch
from torch import Tensor

from zcompile.machine.staging import StagingSize, lane_bytes
from zcompile.runtime.io.trial import BLOCK_BYTES
from zcompile.runtime.meter import Gauge
from zcompile.runtime.tiers.base import Buffer
from zcompile.runtime.tiers.extents import RangeAllocator


class Staged(Protocol):
    """A transfer that travels in chunks."""

    def buffer_bytes(self, begin: int, end: int) -> int:
        """Bytes of buffer for the chunk [begin, end), at most a chunk of the ring; rounded up to
        whole blocks by the ring."""

    def begin_chunk(self, begin: int, end: int, buffer: Buffer) -> None:
        """Start bytes [begin, end) through `buffer`, which goes back to the ring when they have
        ended."""


class _Lane:
    """A queue of transfers of one direction, whose buffers lie in [begin, end) of the ring, low or
    high."""

    def __init__(self, begin: int, end: int, at_end: bool) -> None:
        self.begin, self.end, self.at_end = begin, end, at_end
        self.waiting: deque[tuple[Staged, deque[tuple[int, int]]]] = deque()

    def next_bytes(self) -> int:
        """Bytes of the next buffer; 0 if nobody waits."""
        if not self.waiting:
            return 0
        staged, chunks = self.waiting[0]
        return staged.buffer_bytes(*chunks[0])

    def next(self) -> tuple[Staged, int, int]:
        """Take the next chunk off the queue: (its transfer, begin, end)."""
        staged, chunks = self.waiting[0]
        begin, end = chunks.popleft()
        if not chunks:
            self.waiting.popleft()
        return staged, begin, end


class Staging:
    """The ring over `memory` [size.nbytes]; thread-safe.

    Buffers begin and end at multiples of `BLOCK_BYTES` from where `memory` begins.

    behind_bytes  most bytes of a slot of the arena that passes the ring on its way to the disk,
                  though it could go straight; as if the disk were slow, until somebody has measured
                  (`machine/staging.py::behind_bytes`)
    """

    def __init__(self, memory: Tensor, size: StagingSize, in_use: Gauge) -> None:
        self.chunk_bytes, self.nbytes = size.chunk_bytes, size.nbytes
        self._whole = Buffer.over(memory)
        self._ranges = RangeAllocator(BLOCK_BYTES, size.nbytes)
        self._in_use = in_use
        self.behind_bytes = most = lane_bytes(size.nbytes)
        self._lanes = {
            "read": _Lane(size.nbytes - most, size.nbytes, at_end=True),
            "write": _Lane(0, most, at_end=False),
        }
        self._lock = threading.Lock()
        self._handing_out = False

    def write_behind(self, nbytes: int) -> None:
        """Let slots of at most so many bytes pass the ring on their way to the disk."""
        self.behind_bytes = nbytes

    def request(self, lane: str, staged: Staged, chunks: deque[tuple[int, int]]) -> None:
        """Queue `staged` for one buffer for each of `chunks`, a deque that is consumed."""
        if chunks:
            with self._lock:
                self._lanes[lane].waiting.append((staged, chunks))
            self._hand_out()

    def give(self, buffer: Buffer) -> None:
        """Take `buffer` back: its chunk is over."""
        begin = buffer.memory.data_ptr() - self._whole.memory.data_ptr()
        with self._lock:
            self._ranges.give(begin, buffer.nbytes)
        self._in_use.change(-buffer.nbytes)
        self._hand_out()

    def close(self) -> None:
        """Free the memory, unless a transfer that was given up still holds a part of it."""
        with self._lock:
            if not self._ranges.used_bytes:
                self._whole = Buffer.over(torch.empty(1, dtype=torch.uint8))

    def _hand_out(self) -> None:
        """Hand out buffers until there are none, or nobody wants one.

        A chunk that fails at once gives its buffer back from within; then, or when another thread
        hands out already, the loop that runs goes on, so calls never pile up.
        """
        while True:
            with self._lock:
                turn = None if self._handing_out else self._next_buffer()
                if turn is None:
                    return
                self._handing_out = True
            (staged, begin, end), buffer = turn
            self._in_use.change(buffer.nbytes)
            try:
                staged.begin_chunk(begin, end, buffer)
            finally:
                with self._lock:
                    self._handing_out = False

    def _next_buffer(self) -> tuple[tuple[Staged, int, int], Buffer] | None:
        """The next chunk and the buffer for it, or None.

        A chunk that finds no hole that is large enough keeps those behind it in its lane waiting:
        holes grow until it does.
        """
        for lane in self._lanes.values():
            nbytes = self._ranges.aligned(lane.next_bytes())
            if not nbytes:
                continue
            begin = self._ranges.take_within(nbytes, lane.begin, lane.end, lane.at_end)
            if begin is not None:
                return lane.next(), self._whole.part(begin, begin + nbytes)
        return None
