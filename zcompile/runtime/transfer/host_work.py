"""Work of the host on bytes of entries where they rest takes its turn among their transfers.

An update that the host computes reads and writes bytes of several entries on the host tier. To
whoever comes before it or after it, it is one operation in flight on each of them (`HostUse`). It
begins once all is over that was submitted before on those bytes; what is submitted on them later
waits for it: a fetch, a read, a write, compute in place. So it need not be over when it was
submitted, and nobody can tell but by the time. One thread does it, the most urgent first of what
may begin (`HostLane`).

What fails there leaves what it was to write in part; whoever comes later is told.
"""

import threading
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import count
from sys import float_info
from time import perf_counter
from traceback import clear_frames

import torch
from torch import Tensor

from zcompile.runtime.device.cores import Cores
from zcompile.runtime.device.pages import clear_bytes, copy_bytes
from zcompile.runtime.tiers.base import Place
from zcompile.runtime.tiers.extents import WrittenRanges
from zcompile.runtime.transfer.ticket import Callback, Promise, Reporting, Ticket, Workers
from zcompile.runtime.transfer.transfer import InFlight


class HostUse(InFlight):
    """Bytes [begin, end) of an entry that work of the host reads, or reads and writes."""

    on_host = True

    def __init__(self, place: Place, begin: int, nbytes: int, writes: bool) -> None:
        self.place, self.begin, self.end = place, begin, begin + nbytes
        self.writes = writes
        self.home = Promise()
        self._before = WrittenRanges()

    def prepare(self) -> None:
        """Note which bytes of the entry hold a value now; called in the order of submission."""
        self._before = self.place.written.copy()
        if self.writes:
            self.place.written.add(self.begin, self.end)

    def lend(self) -> "Lent":
        """The bytes, once nothing before moves them; blank ones are zeros from here on."""
        parts = []
        for at, memory in self.place.tier.pieces(self.place.extent, self.begin, self.end):
            for low, high, held in self._before.pieces(at, at + memory.numel()):
                if not held:
                    clear_bytes(memory[low - at :], high - low)
            parts.append(memory)
        return Lent(parts[0] if len(parts) == 1 else torch.cat(parts), tuple(parts))

    def finish(self, error: BaseException | None) -> None:
        """The work is over."""
        self.home.finish(error)

    def fail(self, error: BaseException) -> None:
        self.home.finish(error)

    def done(self) -> bool:
        return self.home.done()

    def memory_done(self) -> bool:
        return self.home.done()

    def end_heard(self) -> Promise:
        return self.home

    def memory_heard(self) -> Promise:
        return self.home

    def await_end(self) -> None:
        """The host does it, and so hears of the end."""

    def join_compute(self) -> None:
        self.home.wait()

    def release(self) -> None:
        self.home.wait()

    def when_enqueued(self, callback: Callback) -> None:
        self.home.then(callback)

    def when_released(self, callback: Callback) -> None:
        self.home.then(callback)

    def copies_mark(self) -> Ticket | None:
        return None

    def home_mark(self) -> Ticket | None:
        return None


@dataclass(frozen=True)
class Lent:
    """Bytes of an entry that the host computes with.

    memory  uint8 [n]: where they rest; where they rest in several pieces of memory, a copy of them
    parts   those pieces
    """

    memory: Tensor
    parts: tuple[Tensor, ...]

    def give_back(self) -> None:
        """Let the entry have what was written."""
        if len(self.parts) > 1:
            sizes = [part.numel() for part in self.parts]
            for part, made in zip(self.parts, self.memory.split(sizes), strict=True):
                copy_bytes(part, made, part.numel())


LEAST_NORMAL, HALF = float_info.min, 0.5
"""Their product is a denormal number, and made when it is asked for: Python's floats are computed
in the mode of the thread, too."""


@dataclass(frozen=True)
class Mode:
    """What torch keeps for each thread by itself, and results depend on.

    threads  that an op is given: where a kernel cuts its elements depends on it, and with that
             which of them are computed as vectors
    flushes  denormal numbers are zeros (`torch.set_flush_denormal`)
    """

    threads: int
    flushes: bool

    @classmethod
    def of_this_thread(cls) -> "Mode":
        return cls(torch.get_num_threads(), not LEAST_NORMAL * HALF)

    def set_here(self) -> None:
        """From here on it is this thread's."""
        now = Mode.of_this_thread()
        if now.threads != self.threads:
            torch.set_num_threads(self.threads)
        if now.flushes != self.flushes:
            torch.set_flush_denormal(self.flushes)


class HostWork:
    """One piece of work.

    uses      what it reads and writes
    compute   does it: called with the memory of each use, uint8 [n]
    urgency   of what may begin, the least is done first
    refusal   from what the work failed with, and whether it had begun to write, the error that
              whoever uses what it was to write gets
    took      told the seconds that it took
    """

    def __init__(
        self,
        uses: Sequence[HostUse],
        compute: Callable[[Sequence[Tensor]], None],
        urgency: int,
        refusal: Callable[[BaseException, bool], BaseException],
        took: Callable[[float], None],
    ) -> None:
        self.uses, self.urgency = uses, urgency
        self._compute, self._refusal, self._took = compute, refusal, took
        self._mode = Mode.of_this_thread()
        self._begun = False

    def run(self, cores: Cores | None) -> None:
        """Do it, unless the store was closed meanwhile."""
        if all(use.done() for use in self.uses):
            return
        errors: list[BaseException] = []
        with Reporting(errors.append), torch.no_grad():
            self._mode.set_here()
            self._do(cores)
        for error in errors:  # it lives on, and shall not keep the memory
            clear_frames(error.__traceback__)
            del error
        self.end(errors.pop() if errors else None)

    def _do(self, cores: Cores | None) -> None:
        lent = [use.lend() for use in self.uses]
        with cores.for_host() if cores is not None else nullcontext():
            began, self._begun = perf_counter(), True
            self._compute([each.memory for each in lent])
            self._took(perf_counter() - began)
        for use, each in zip(self.uses, lent, strict=True):
            if use.writes:
                each.give_back()

    def end(self, error: BaseException | None) -> None:
        """It is over, or will not be done, since something failed before it. What it only reads is
        as good as before."""
        refused = None if error is None else self._refusal(error, self._begun)
        for use in self.uses:
            use.finish(refused if use.writes else None)


class HostLane:
    """Does the work of one store, in a thread.

    cores    that compute takes as well; None: the device has its own
    crashed  told what is a defect of ours
    """

    def __init__(self, cores: Cores | None, crashed: Callable[[BaseException], None]) -> None:
        self._cores = cores
        self._lock = threading.Lock()
        self._numbers = count()
        self._ready: list[tuple[int, int, HostWork]] = []
        self._stopped = False
        # Now: once work is in flight, nothing may fail but the work.
        self._workers = Workers("zinf-update", 1, crashed)

    def begin(self, work: HostWork, error: BaseException | None) -> None:
        """All that `work` follows is over, or failed with `error`."""
        if error is not None:
            work.end(error)
            return
        with self._lock:
            if self._stopped:
                return  # and with the store, whoever waits for it is told
            heappush(self._ready, (work.urgency, next(self._numbers), work))
            self._workers.submit(self._do_next)

    def _do_next(self) -> None:
        with self._lock:
            _, _, work = heappop(self._ready)
        work.run(self._cores)

    def stop(self) -> None:
        """Begin nothing any more, and wait for what is being done."""
        with self._lock:
            self._stopped = True
        self._workers.stop()
