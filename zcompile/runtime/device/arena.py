"""The device arena: one bounded block of device memory, and who holds which bytes of it.

Two kinds of holder share it. A schedule's slots lie at planned addresses, from the bottom; the
arena only keeps account of them. Eager gathers take ranges where there is room, from the top down.

Device memory beside the arena, while no graph holds it: chunks of an optimizer's step lie there.

Between backward and the next forward, activations are gone. What they took is as good for streaming
as the arena's window is, and larger by far where that is small.
"""

import gc
import threading
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from zcompile.errors import BudgetExceeded, SlotsOverlap
from zcompile.ir.optimizer_step import NO_ROOM, StepRoom
from zcompile.ir.ties import Tie
from zcompile.ir.types import ALIGNMENT, Layout, aligned
from zcompile.ir.units import show_size
from zcompile.runtime.device.base import Device
from zcompile.runtime.meter import Gauge
from zcompile.runtime.transfer.interrupts import uninterrupted


def lies_in(tensor: Tensor, memory: Tensor | None) -> bool:
    """Whether a tensor begins in this memory: uint8 [n]; None: there is none."""
    if memory is None or tensor.device != memory.device:
        return False
    return 0 <= tensor.data_ptr() - memory.data_ptr() < memory.numel()


class StepScratch:
    """Its addresses go on beyond the arena's.

    room    what may be used; no bytes: nothing
    memory  while somebody may use it
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self.room = NO_ROOM
        self.memory: Tensor | None = None
        self._needed = 0

    def plan(self, room: StepRoom) -> None:
        """From here on this may be used."""
        assert self.memory is None, "somebody is in it"
        self.room, self._needed = room, 0

    def need(self, end: int) -> bool:
        """Slots of a schedule end at this address. False, if that is more than is allocated."""
        self._needed = max(self._needed, end - self.room.begin)
        return self.memory is None or self._needed <= self.memory.numel()

    def open(self) -> None:
        """Allocate what schedules need. raises  DeviceTooSmall"""
        if self.memory is None:
            self.memory = self._device.allocate(self._needed)

    def slot(self, address: int, nbytes: int) -> Tensor | None:
        """The bytes of a planned slot: uint8 [nbytes]; None, if they do not lie in what is open."""
        memory, at = self.memory, address - self.room.begin
        if memory is None or at < 0 or at + nbytes > memory.numel():
            return None
        return memory[at : at + nbytes]

    def close(self) -> None:
        """Give the memory back; for who knows that nothing uses it."""
        self.memory = None


MOST_VIEWS = 1 << 16
"""Of what rests in the arena; more than that is made of addresses that are used no more."""


class Arena:
    """`budget_bytes` of `device`'s memory, allocated at the first use; thread-safe.

    transfers_over  returns when no transfer that is under way now holds memory any more
    """

    def __init__(
        self, device: Device, budget_bytes: int, in_use: Gauge, transfers_over: Callable[[], None]
    ) -> None:
        self.budget_bytes, self.beside_bytes = budget_bytes, 0
        self.scratch = StepScratch(device)
        self._device = device
        self._in_use = in_use
        self._transfers_over = transfers_over
        self.relieve: Callable[[int], bool] = _nobody
        """Asked, when there is no room for so many bytes, to make some; whether it did."""
        self._memory: Tensor | None = None
        self._lock = threading.Lock()
        self._slots: list[tuple[int, int]] = []  # (begin, end), ordered
        self._holders: dict[int, str] = {}  # of slots, by `begin`
        self._lent: dict[int, tuple[int, str]] = {}  # begin -> (end, name)
        self._ties: dict[int, Tie] = {}  # of what was lent as a tensor, by `begin`
        self._returned: deque[Tie | int] = deque()
        self._views: dict[tuple[int, Layout], Tensor] = {}

    @property
    def peak_bytes(self) -> int:
        """The most that was in use at once, measured."""
        return self._in_use.peak

    @property
    @uninterrupted
    def used_bytes(self) -> int:
        with self._lock:
            self._reap()
        return self._in_use.now

    @uninterrupted
    def give_way(self, nbytes: int) -> None:
        """So much of the device is not the arena's from here on. What lies in it stays where it
        is; the memory itself is exchanged now, or by an eager gather once nothing does."""
        with self._lock:
            self.budget_bytes += self.beside_bytes - nbytes
            self.beside_bytes = nbytes
            self._reap()
            self._exchange()

    def holds(self, tensor: Tensor) -> bool:
        """Whether a tensor lies in the arena, or in its scratch."""
        return lies_in(tensor, self._memory) or lies_in(tensor, self.scratch.memory)

    def window(self, tensor: Tensor) -> Tensor:
        """The same bytes, not keeping `tensor`'s storage alive if that lies in the arena.

        tensor  uint8 [n], contiguous
        """
        if self._memory is None or not lies_in(tensor, self._memory):
            return tensor
        begin = tensor.data_ptr() - self._memory.data_ptr()
        return self._memory[begin : begin + tensor.numel()]

    def slot(self, address: int, nbytes: int) -> Tensor:
        """The bytes of a planned slot: uint8 [nbytes]. Accounts for nothing."""
        if address + nbytes > self.budget_bytes:
            if (beside := self.scratch.slot(address, nbytes)) is not None:
                return beside
            raise BudgetExceeded(
                "device",
                self.budget_bytes,
                address + nbytes,
                "a planned slot",
                (),
                "raise device_memory",
            )
        memory = self._memory if self._memory is not None else self._whole()
        return memory[address : address + nbytes]

    def view(self, address: int, layout: Layout) -> Tensor:
        """A tensor of `layout` over the bytes from `address` on, where something rests for long:
        the same object each time, so nobody may change what it is. Accounts for nothing."""
        known = address, layout
        view = self._views.get(known)
        if view is None:
            if len(self._views) >= MOST_VIEWS:
                self._views.clear()
            view = self._views[known] = layout.view(self.slot(address, layout.end_bytes))
        return view

    @uninterrupted
    def take_slot(self, address: int, nbytes: int, name: str = "a value") -> None:
        """A planned slot is in use from now on, for what is called `name`.

        raises  BudgetExceeded, if a gather holds it; SlotsOverlap, if another slot does
        """
        if nbytes == 0:
            return
        holder = self._occupy(address, address + nbytes, name)
        if holder is not None:
            self._settle()
            holder = self._occupy(address, address + nbytes, name)
        if holder is not None:
            with self._lock:
                raise self._crowded(
                    nbytes,
                    f"a slot at {address} of a schedule, which the gathered {holder!r} overlaps,",
                )

    @uninterrupted
    def give_slot(self, address: int, nbytes: int) -> None:
        """The slot is not in use any more."""
        if nbytes == 0:
            return
        with self._lock:
            self._slots.remove((address, address + nbytes))
        self._in_use.change(-nbytes)

    @uninterrupted
    def take(self, nbytes: int, name: str) -> Tensor:
        """Room for an eager value: uint8 [nbytes] with a storage of its own.

        The range comes back to the arena when that storage dies.
        raises  BudgetExceeded when no hole is large enough
        """
        if nbytes == 0:
            return torch.empty(0, dtype=torch.uint8, device=self._device.torch_device)
        size = aligned(nbytes)
        begin = self._claim(size, name)
        if begin is None:
            self._settle()
            begin = self._claim(size, name)
        if begin is None and self.relieve(nbytes):
            begin = self._claim(size, name)
        if begin is None:
            with self._lock:
                raise self._crowded(size, f"gathering {name!r}", whole=True)
        try:
            return self._device.lend(
                self._whole()[begin : begin + nbytes], partial(self._watch, begin)
            )
        except BaseException:
            if begin not in self._ties:
                self._returned.append(begin)
            raise

    @uninterrupted
    def hold(self, nbytes: int, above: int, name: str) -> int | None:
        """Where `nbytes` will rest, at `above` or higher, as high as they fit; None: nowhere."""
        with self._lock:
            self._reap()
            top = self.budget_bytes // ALIGNMENT * ALIGNMENT
            for begin, end in [*reversed(self._held()), (0, above)]:
                if top - nbytes >= max(end, above):
                    self._lent[top - nbytes] = (top, name)
                    self._in_use.change(nbytes)
                    return top - nbytes
                top = min(top, begin // ALIGNMENT * ALIGNMENT)
            return None

    @uninterrupted
    def let_go(self, begin: int) -> None:
        """Nothing rests any more in the room held from `begin` on."""
        self._returned.append(begin)

    def _watch(self, begin: int, lent: object) -> None:
        self._ties[begin] = Tie(lent, self._returned, begin)

    def _settle(self) -> None:
        """Before giving up: a transfer may still hold a range, or a dead reference cycle."""
        self._transfers_over()
        gc.collect()

    def _claim(self, size: int, name: str) -> int | None:
        with self._lock:
            self._reap()
            self._exchange()
            begin = self._hole(size)
            if begin is None:
                return None
            self._lent[begin] = (begin + size, name)
            self._in_use.change(size)
            return begin

    def _hole(self, size: int) -> int | None:
        """Where `size` bytes fit: the tightest hole above all slots, else the highest below."""
        floor = self._slots[-1][1] if self._slots else 0
        above: list[tuple[int, int]] = []
        below: list[int] = []
        for low, top in self._holes():
            if top - low >= size:
                if low >= floor:
                    above.append((top - low, -(top - size)))
                else:
                    below.append(top - size)
        if above:
            return -min(above)[1]
        return max(below, default=None)

    def _holes(self) -> Iterator[tuple[int, int]]:
        """What is free, from the top down, in whole units of the alignment."""
        top = self.budget_bytes // ALIGNMENT * ALIGNMENT
        for begin, end in [*reversed(self._held()), (0, 0)]:
            low = -(-end // ALIGNMENT) * ALIGNMENT
            if low < top:
                yield low, top
            top = min(top, begin // ALIGNMENT * ALIGNMENT)

    def _held(self) -> list[tuple[int, int]]:
        ranges = list(self._slots)
        for begin, (end, _) in self._lent.items():
            insort(ranges, (begin, end))
        return ranges

    def _occupy(self, begin: int, end: int, name: str) -> str | None:
        """Enter a slot, or name who is in its way."""
        with self._lock:
            if (holder := self._lent_within(begin, end)) is not None:
                return holder
            at = bisect_left(self._slots, (begin, end))
            for low, high in self._slots[max(at - 1, 0) : at + 1]:
                if low < end and begin < high:
                    raise SlotsOverlap((begin, end, name), (low, high, self._holders[low]))
            self._slots.insert(at, (begin, end))
            self._holders[begin] = name
            self._in_use.change(end - begin)
            return None

    def _lent_within(self, begin: int, end: int) -> str | None:
        self._reap()
        for low, (high, name) in self._lent.items():
            if low < end and begin < high:
                return name
        return None

    def _reap(self) -> None:
        """Take back the ranges whose tensors died. They only say so, without any lock, since
        they may die within a garbage collection that strikes while the lock is held."""
        while self._returned:
            gone = self._returned.popleft()
            begin = gone if isinstance(gone, int) else gone.mark
            self._ties.pop(begin, None)
            if begin in self._lent:
                end, _ = self._lent.pop(begin)
                self._in_use.change(begin - end)

    def _crowded(self, nbytes: int, where: str, whole: bool = False) -> BudgetExceeded:
        """whole  room in one piece would do, wherever it is"""
        alive = [(name, end - begin) for begin, (end, name) in self._lent.items()]
        slots = sum(end - begin for begin, end in self._slots)
        if slots:
            alive.append(("slots of the running schedule", slots))
        if self.beside_bytes:
            alive.append(("values of compiled graphs", self.beside_bytes))
        budget = self.budget_bytes + self.beside_bytes
        needed = self._in_use.now + nbytes + self.beside_bytes
        if whole and needed <= budget:
            holes = [top - low for low, top in self._holes()] or [0]
            alive.append((f"free, in pieces of {show_size(max(holes))} or less", sum(holes)))
            needed = budget + nbytes - max(holes)
        return BudgetExceeded(
            "device",
            budget,
            needed,
            where,
            alive,
            f"give zcompile.offload device_memory={needed} or more, drop "
            "references to gathered values, or compile the model, so that "
            "gathers are planned",
        )

    def _whole(self) -> Tensor:
        with self._lock:
            if self._memory is None:
                self._memory = self._device.allocate(self.budget_bytes)
            return self._memory

    def _exchange(self) -> None:
        """Let go of memory of another size than is the arena's by now, if nothing is in it."""
        memory, empty = self._memory, not self._slots and not self._lent
        if empty and memory is not None and memory.numel() != self.budget_bytes:
            self._memory = None
            self._views.clear()


def _nobody(nbytes: int) -> bool:
    return False
