"""Add: an entry becomes itself plus what comes; the sum is formed on the host.

memory -> half a buffer; disk -> the other half; their sum -> disk
memory -> half a buffer; home on the host += that half
"""

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from zcompile.runtime.device.pages import clear_bytes
from zcompile.runtime.tiers.place import Place
from zcompile.runtime.tiers.tiers import Buffer
from zcompile.runtime.transfer.ticket import Countdown, Ticket
from zcompile.runtime.transfer.transfer import Means
from zcompile.runtime.transfer.transfers import LeftChunk, Put

SERIAL_ELEMENTS = 32 * 1024 - 64
"""Torch adds fewer than 32768 elements in the calling thread; more would start OpenMP threads in
every worker. A multiple of 64 keeps the parts aligned. The sum is the same to the bit."""


class Add(Put):
    """Home += memory, in elements of `dtype`; the sum is formed on the host."""

    cut_in = 2  # half a buffer for what comes, half for what was there

    def __init__(self, place: Place, begin: int, memory: Tensor, owner: Tensor,
                 marks: Sequence[Ticket], means: Means, dtype: torch.dtype) -> None:  # fmt: skip
        super().__init__(place, begin, memory, owner, marks, means)
        self._dtype = dtype

    def _issue(self) -> None:
        self.by_chunks([(self.begin, self.end)])

    def _chunk(self, begin: int, end: int, buffer: Buffer) -> None:
        half = buffer.nbytes // 2
        both = Countdown()
        both.then(partial(self._sum_later, begin, end, buffer))
        low, high = self.place.blocks(begin, end)
        if not self.place.tier.in_memory and self.was.touches(low, high):
            both.hold()
            self.place.tier.read(self.place.extent, low, buffer.part(0, high - low)).then(both.drop)
        self.means.device.copy("d2h", buffer.memory[half : half + end - begin],
                                self.part(begin, end), self.marks,
                                LeftChunk(self, both.drop))  # fmt: skip

    def _sum_later(self, begin: int, end: int, buffer: Buffer,
                   error: BaseException | None) -> None:  # fmt: skip
        self.means.adder.submit(partial(self._sum, begin, end, buffer, error))

    def _sum(self, begin: int, end: int, buffer: Buffer, error: BaseException | None) -> None:
        if error is not None:
            self.written(buffer, error)
            return
        new = buffer.memory[buffer.nbytes // 2 :]
        tier, extent = self.place.tier, self.place.extent
        if tier.in_memory:
            for at, memory in tier.pieces(extent, begin, end):
                self._add(memory, new[at - begin : at - begin + memory.numel()], at)
            self.written(buffer, None)
        else:
            low, high = self.place.blocks(begin, end)
            self._add(buffer.memory[begin - low : end - low], new[: end - begin], begin)
            self.write(low, high, buffer, None)

    def _add(self, old: Tensor, new: Tensor, begin: int) -> None:
        """old += new, where `old` is the entry from `begin` on; what was blank counts as zero."""
        for low, high, held in self.was.pieces(begin, begin + old.numel()):
            if not held:
                clear_bytes(old[low - begin :], high - low)
        total, more = old.view(self._dtype), new.view(self._dtype)
        for at in range(0, total.numel(), SERIAL_ELEMENTS):
            total[at : at + SERIAL_ELEMENTS].add_(more[at : at + SERIAL_ELEMENTS])
