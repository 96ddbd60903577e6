"""The device arena is a bounded block of device memory, with account of who holds which bytes.

Three kinds of holder share an arena:

    planned slots      of schedules, at planned addresses from the bottom; only accounted for here
    reserved ranges    of entries that rest on the device for long, as high as they fit
    eager ranges       of gathers outside schedules, where there is room, from the top down

Beyond the arena's addresses lies its *step scratch*: the memory that compiled graphs fill with
activations, and that is free between backward and the next forward. Chunks of an optimizer's step
stream through it then. It is as good for that as the arena's streaming buffer, and larger by far
where that is small.
"""

import gc
import threading
from bisect import bisect_left, bisect_right, insort
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor

from zcompile.errors import BudgetExceeded, SlotsOverlap, more_device_memory
from zcompile.ir.optimizer_step import NO_ROOM, StepRoom
from zcompile.ir.ties import Dead, Tie, tie_to
from zcompile.ir.torch_compat import storage_of, without_modes
from zcompile.ir.types import ALIGNMENT, Layout, aligned
from zcompile.ir.units import show_size
from zcompile.runtime.changes import CHANGES
from zcompile.runtime.device.base import Device
from zcompile.runtime.meter import Gauge
from zcompile.runtime.transfer.interrupts import uninterrupted

MOST_VIEWS = 1 << 16
"""The most views kept by `Arena.view`; more than that are of addresses that are used no more."""
MOST_SCHEDULES = 256
"""The most schedules for which `Arena.views_of` keeps views; a step has a few."""


def _reclaims_nothing(nbytes: int) -> bool:
    """In place of `Arena`'s `reclaim` where nothing rests in the arena."""
    return False


def _nothing_to_see() -> None:
    """In place of `Arena`'s `look` where transfers say by themselves that they are over."""


class Arena:
    """`budget_bytes` of `device`'s memory, allocated at the first use; thread-safe.

    transfers_over  returns when no transfer that is in flight now holds memory any more
    look            called before a range is looked for: sees which transfers are over, and
                    waits for none
    reclaim         called when there is no room for so many bytes; frees some, and says whether it
                    did
    outside_bytes   of the device's budget that compiled graphs have instead of the arena
    """

    def __init__(
        self,
        device: Device,
        budget_bytes: int,
        in_use: Gauge,
        transfers_over: Callable[[], None],
        reclaim: Callable[[int], bool] = _reclaims_nothing,
        look: Callable[[], None] = _nothing_to_see,
    ) -> None:
        self.budget_bytes, self.outside_bytes = budget_bytes, 0
        self.scratch = StepScratch(device)
        self._device = device
        self._in_use = in_use
        self._transfers_over = transfers_over
        self._reclaim, self._look = reclaim, look
        self._memory: Tensor | None = None
        self._lock = threading.Lock()
        self._slots: list[tuple[int, int]] = []  # (begin, end), ordered
        self._holders: dict[int, str] = {}  # of slots, by `begin`
        # Eager and reserved ranges: begin -> (end, name).
        self._eager: dict[int, tuple[int, str]] = {}
        self._eager_from = budget_bytes
        """None of them begins below."""
        # Ties to the storages over eager ranges, by `begin`.
        self._ties: dict[int, Tie] = {}
        self._returned = Dead()
        self._slot_memory: dict[tuple[int, int], Tensor] = {}
        self._views: dict[tuple[int, Layout], Tensor] = {}
        self._views_of: dict[int, list[tuple[object, object, Tensor] | None]] = {}
        self.lent: dict[object, Any] = {}
        """What calls were lent last, for who lends to write down."""

    @property
    def peak_bytes(self) -> int:
        """The most bytes that were in use at once, measured."""
        return self._in_use.peak

    @property
    @uninterrupted
    def used_bytes(self) -> int:
        with self._lock:
            self._take_back_dead()
        return self._in_use.now

    @uninterrupted
    def set_outside_bytes(self, nbytes: int) -> None:
        """Give `nbytes` of the device to compiled graphs, and the rest to the arena.

        What lies in the arena stays where it is; the memory itself is exchanged now, or by an eager
        gather once nothing lies in it.
        """
        with self._lock:
            self.budget_bytes += self.outside_bytes - nbytes
            self.outside_bytes = nbytes
            self._take_back_dead()
            self._drop_memory_of_other_size()

    def holds(self, tensor: Tensor) -> bool:
        """Whether a tensor lies in the arena, or in its step scratch."""
        return lies_in(tensor, self._memory) or self.scratch.holds(tensor)

    def window(self, tensor: Tensor) -> Tensor:
        """The same bytes, as a view that does not keep the storage of `tensor` alive if that lies
        in the arena.

        tensor  uint8 [n], contiguous
        """
        if self._memory is None or not lies_in(tensor, self._memory):
            return tensor
        begin = tensor.data_ptr() - self._memory.data_ptr()
        return self._memory[begin : begin + tensor.numel()]

    def is_apart(self, tensor: Tensor) -> bool:
        """Whether the storage of a tensor is another than the arena's, and goes back when it
        dies."""
        return self._memory is None or storage_of(tensor) is not storage_of(self._memory)

    def window_and_holds(self, tensor: Tensor) -> tuple[Tensor, bool]:
        """`window` and `holds` at once, for what is asked of each transfer."""
        if not self.is_apart(tensor):  # a slot, as most are: its storage is nobody's to keep
            return tensor, True
        window = self.window(tensor)
        return window, window is not tensor or self.scratch.holds(tensor)

    def slot(self, address: int, nbytes: int) -> Tensor:
        """The bytes of a planned slot: uint8 [nbytes], the same object each time, so nobody may
        change its metadata. Accounts for nothing."""
        if address + nbytes > self.budget_bytes:
            return self._scratch_with(address, nbytes).slot(address, nbytes)
        known = address, nbytes
        slot = self._slot_memory.get(known)
        if slot is None:
            if len(self._slot_memory) >= MOST_VIEWS:
                self._forget_views()
            with torch.inference_mode(False), without_modes():  # as of `view`
                memory = self._memory if self._memory is not None else self._allocated()
                slot = self._slot_memory[known] = memory[address : address + nbytes]
        return slot

    def slot_view(self, address: int, layout: Layout) -> Tensor:
        """A tensor of `layout` over the bytes of a planned slot from `address` on; as `slot`."""
        if address + layout.end_bytes > self.budget_bytes:
            return self._scratch_with(address, layout.end_bytes).view(address, layout)
        return self.view(address, layout)

    def _scratch_with(self, address: int, nbytes: int) -> "StepScratch":
        """The step scratch, which has a slot. raises  BudgetExceeded, if it has not"""
        if self.scratch.has(address, nbytes):
            return self.scratch
        raise BudgetExceeded(
            "device",
            self.budget_bytes,
            address + nbytes,
            "a planned slot",
            (),
            "raise device_memory",
        )

    def view(self, address: int, layout: Layout) -> Tensor:
        """A tensor of `layout` over the bytes from `address` on, where an entry rests for long.

        The same object each time, so nobody may change its metadata. Accounts for nothing.
        """
        known = address, layout
        view = self._views.get(known)
        if view is None:
            if len(self._views) >= MOST_VIEWS:
                self._forget_views()
            # It outlives this call: torch lets nobody write to what inference mode has made, and a
            # mode of the user may make other tensors.
            with torch.inference_mode(False), without_modes():
                view = self._views[known] = layout.view(self.slot(address, layout.end_bytes))
        return view

    def views_of(self, schedule: int, count: int) -> list[tuple[object, object, Tensor] | None]:
        """The `count` borrows that a schedule begins with, each with the extent that it was lent
        last, and the view of that; None: nothing. For who lends to write down.

        schedule  its serial
        """
        found = self._views_of.get(schedule)
        if found is None or len(found) != count:
            if len(self._views_of) >= MOST_SCHEDULES:
                self._views_of.clear()
            found = self._views_of[schedule] = [None] * count
        return found

    def _forget_views(self) -> None:
        self._slot_memory.clear()
        self._views.clear()
        self._views_of.clear()
        self.lent.clear()
        CHANGES.note()

    @uninterrupted
    def take_slot(self, address: int, nbytes: int, name: str = "a value") -> None:
        """Account for a planned slot, which is in use from now on for what is called `name`.

        raises  BudgetExceeded, if an eager gather holds the range; SlotsOverlap, if another slot
                does
        """
        if nbytes == 0:
            return
        holder = self._enter_slot(address, address + nbytes, name)
        if holder is not None:
            self._wait_for_transfers()
            holder = self._enter_slot(address, address + nbytes, name)
        if holder is not None:
            with self._lock:
                raise self._full_error(
                    nbytes,
                    f"a slot at {address} of a schedule, which the gathered {holder!r} overlaps,",
                )

    @uninterrupted
    def give_slot(self, address: int, nbytes: int) -> None:
        """Account for a planned slot that is not in use any more."""
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
        # A free hole; else one that transfers or garbage still held; else one that a planner frees.
        begin = self._take_range(size, name)
        if begin is None:
            self._wait_for_transfers()
            begin = self._take_range(size, name)
        if begin is None and self._reclaim(nbytes):
            begin = self._take_range(size, name)
        if begin is None:
            with self._lock:
                raise self._full_error(size, f"gathering {name!r}", whole=True)
        try:
            return self._device.owning_view(
                self._allocated()[begin : begin + nbytes], partial(self._watch, begin)
            )
        except BaseException:
            if begin not in self._ties:
                self._returned.append(begin)
            raise

    @uninterrupted
    def reserve(self, nbytes: int, above: int, name: str) -> int | None:
        """Reserve `nbytes` at `above` or higher, as high as they fit; returns the address, or
        None."""
        self._look()  # which transfers hold ranges no more
        with self._lock:
            self._take_back_dead()
            top = self.budget_bytes // ALIGNMENT * ALIGNMENT
            for begin, end in [*reversed(self._used_ranges()), (0, above)]:
                if top - nbytes >= max(end, above):
                    self._enter_eager(top - nbytes, top, name)
                    return top - nbytes
                top = min(top, begin // ALIGNMENT * ALIGNMENT)
            return None

    @uninterrupted
    def unreserve(self, begin: int) -> None:
        """Give back the range that was reserved from `begin` on."""
        self._returned.append(begin)

    @uninterrupted
    def take_back(self) -> None:
        """Let what was given back by now count no more: nothing else may come for a phase."""
        if self._returned:
            with self._lock:
                self._take_back_dead()

    def _watch(self, begin: int, view: object) -> None:
        """Note that the range from `begin` on comes back when the storage of `view` dies."""
        self._ties[begin] = tie_to(view, self._returned, begin)

    def _wait_for_transfers(self) -> None:
        """Before giving up: a transfer may still hold a range, or a dead reference cycle."""
        self._transfers_over()
        gc.collect()

    def _take_range(self, size: int, name: str) -> int | None:
        """Take an eager range of `size` bytes; returns its address, or None without a hole that
        large."""
        with self._lock:
            self._take_back_dead()
            self._drop_memory_of_other_size()
            begin = self._find_hole(size)
            if begin is None:
                return None
            self._enter_eager(begin, begin + size, name)
            return begin

    def _enter_eager(self, begin: int, end: int, name: str) -> None:
        self._eager[begin] = (end, name)
        self._eager_from = min(self._eager_from, begin)
        self._in_use.change(end - begin)

    def _find_hole(self, size: int) -> int | None:
        """The address for `size` bytes: in the tightest hole above all slots, else in the highest
        below."""
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
        """Free ranges (begin, end), from the top down, in whole units of the alignment."""
        top = self.budget_bytes // ALIGNMENT * ALIGNMENT
        for begin, end in [*reversed(self._used_ranges()), (0, 0)]:
            low = -(-end // ALIGNMENT) * ALIGNMENT
            if low < top:
                yield low, top
            top = min(top, begin // ALIGNMENT * ALIGNMENT)

    def _used_ranges(self) -> list[tuple[int, int]]:
        """Ranges (begin, end) of slots and of eager and reserved ranges, ordered."""
        ranges = list(self._slots)
        for begin, (end, _) in self._eager.items():
            insort(ranges, (begin, end))
        return ranges

    def _enter_slot(self, begin: int, end: int, name: str) -> str | None:
        """Note a slot in use; or return the name of who holds a part of it."""
        with self._lock:
            if (holder := self._eager_within(begin, end)) is not None:
                return holder
            at = bisect_left(self._slots, (begin, end))
            for low, high in self._slots[max(at - 1, 0) : at + 1]:
                if low < end and begin < high:
                    raise SlotsOverlap((begin, end, name), (low, high, self._holders[low]))
            self._slots.insert(at, (begin, end))
            self._holders[begin] = name
            self._in_use.change(end - begin)
            return None

    def _eager_within(self, begin: int, end: int) -> str | None:
        """The name of who holds an eager or reserved range that overlaps [begin, end), or None."""
        self._take_back_dead()
        if end <= self._eager_from:  # the window that values stream through lies below all of them
            return None
        for low, (high, name) in self._eager.items():
            if low < end and begin < high:
                return name
        self._eager_from = min(self._eager, default=self.budget_bytes)
        return None

    def _take_back_dead(self) -> None:
        """Take back the ranges whose tensors died.

        Tensors only append to `_returned` when they die, without any lock, since they may die
        within a garbage collection that strikes while the lock is held.
        """
        while self._returned:
            gone = self._returned.popleft()
            begin = gone if isinstance(gone, int) else gone.mark
            self._ties.pop(begin, None)
            if begin in self._eager:
                end, _ = self._eager.pop(begin)
                self._in_use.change(begin - end)

    def _full_error(self, nbytes: int, where: str, whole: bool = False) -> BudgetExceeded:
        """The error where `nbytes` find no room.

        whole  room in one piece would do, wherever it is
        """
        alive = [(name, end - begin) for begin, (end, name) in self._eager.items()]
        slots = sum(end - begin for begin, end in self._slots)
        if slots:
            alive.append(("slots of the running schedule", slots))
        if self.outside_bytes:
            alive.append(("values of compiled graphs", self.outside_bytes))
        budget = self.budget_bytes + self.outside_bytes
        needed = self._in_use.now + nbytes + self.outside_bytes
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
            f"{more_device_memory(needed)}, drop "
            "references to gathered values, or compile the model, so that "
            "gathers are planned",
        )

    def _allocated(self) -> Tensor:
        """The memory, allocated now if this is its first use."""
        with self._lock:
            if self._memory is None:
                self._memory = self._device.allocate(self.budget_bytes)
            return self._memory

    def close(self) -> None:
        """Free the memory, once no transfer uses it; what was gathered keeps it as long as it
        lives."""
        with self._lock:
            self._memory = None
            self._forget_views()
        self.scratch.close()

    def _drop_memory_of_other_size(self) -> None:
        """Free memory of another size than the arena has by now, if nothing lies in it."""
        memory, empty = self._memory, not self._slots and not self._eager
        if empty and memory is not None and memory.numel() != self.budget_bytes:
            memory = self._memory = None
            self._forget_views()
            self._device.give_back_unused()  # else it stays reserved beside that of the new size


class StepScratch:
    """Device memory outside the arena that an optimizer's step may use; its addresses follow the
    arena's.

    It is allocated in pieces: slots that overlap lie in one, as those of one chunk after the other
    do. What activations leave of torch's allocator is in pieces, between gradients that stay; for
    one piece as large as all slots it would reserve as much again.

    room    the addresses that may be used; none, if it has no bytes
    pieces  address and memory of each, in order, while a step may use them; else none
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self.room = NO_ROOM
        self.pieces: tuple[tuple[int, Tensor], ...] = ()
        self._needed: list[tuple[int, int]] = []
        """Ranges (begin, end) of slots, ordered; those that overlap are one."""
        self._had: list[int] = []
        """Bytes of each piece, when they were allocated last under this plan."""
        self._by_memory: list[tuple[int, Tensor]] = []
        """The pieces, by where their memory begins."""
        self._slots: dict[tuple[int, int], Tensor] = {}
        self._views: dict[tuple[int, Layout], Tensor] = {}

    def plan(self, room: StepRoom) -> None:
        """Let steps use the addresses of `room` from here on."""
        assert not self.pieces, "somebody is in it"
        self.room, self._needed, self._had = room, [], []

    def need(self, slots: Iterable[tuple[int, int]]) -> bool:
        """Note slots (address, bytes) of a schedule; False, if memory is open that lacks one."""
        for address, nbytes in slots:
            begin, end = address, address + nbytes
            apart = []
            for low, high in self._needed:
                if low < end and begin < high:
                    begin, end = min(begin, low), max(end, high)
                else:
                    apart.append((low, high))
            self._needed = sorted([*apart, (begin, end)])
        return not self.pieces or all(self.has(begin, end - begin) for begin, end in self._needed)

    def open(self) -> None:
        """Allocate what schedules need. raises  DeviceTooSmall"""
        if self.pieces:
            return
        sizes = [end - begin for begin, end in self._needed]
        if self._had != sizes:
            # What is free goes back, and is asked for again in these sizes; the next forward has
            # its activations in it.
            self._device.give_back_unused()
        memory = self._device.allocate_each(sizes)
        self._had = sizes
        self.pieces = tuple(
            (begin, piece) for (begin, _), piece in zip(self._needed, memory, strict=True)
        )
        self._by_memory = sorted(((m.data_ptr(), m) for m in memory), key=itemgetter(0))

    def holds(self, tensor: Tensor) -> bool:
        """Whether a tensor lies in it: asked of each transfer."""
        pieces = self._by_memory
        at = bisect_right(pieces, tensor.data_ptr(), key=itemgetter(0)) - 1
        return at >= 0 and lies_in(tensor, pieces[at][1])

    def has(self, address: int, nbytes: int) -> bool:
        """Whether a planned slot lies in the open memory."""
        return self._find(address, nbytes) is not None

    def _find(self, address: int, nbytes: int) -> tuple[Tensor, int] | None:
        """The piece that a slot lies in, and where in it; None, if it is not there."""
        at = bisect_right(self.pieces, address, key=itemgetter(0)) - 1
        if at < 0:
            return None
        begin, piece = self.pieces[at]
        fits = address - begin + nbytes <= piece.numel()
        return (piece, address - begin) if fits else None

    def slot(self, address: int, nbytes: int) -> Tensor:
        """The bytes of a planned slot, which it has: uint8 [nbytes]; as `Arena.slot`."""
        known = address, nbytes
        slot = self._slots.get(known)
        if slot is None:
            found = self._find(address, nbytes)
            assert found is not None, "it is open"
            piece, at = found
            with torch.inference_mode(False), without_modes():  # as of `Arena.view`
                slot = self._slots[known] = piece[at : at + nbytes]
        return slot

    def view(self, address: int, layout: Layout) -> Tensor:
        """A tensor of `layout` over the bytes of a slot, which it has; as `Arena.view`."""
        known = address, layout
        view = self._views.get(known)
        if view is None:
            with torch.inference_mode(False), without_modes():  # as of `Arena.view`
                view = self._views[known] = layout.view(self.slot(address, layout.end_bytes))
        return view

    def close(self) -> None:
        """Free the memory. The caller knows that nothing uses it."""
        self.pieces, self._by_memory = (), []
        self._slots.clear()
        self._views.clear()


def lies_in(tensor: Tensor, memory: Tensor | None) -> bool:
    """Whether a tensor begins in `memory`: uint8 [n], or None for no memory."""
    if memory is None or tensor.device != memory.device:
        return False
    return 0 <= tensor.data_ptr() - memory.data_ptr() < memory.numel()
