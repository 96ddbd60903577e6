"""CUDA without a card: the calls of `torch.cuda` that `CudaDevice` makes, with clocks behind them.

Work is done at once, in the order in which hosts enqueue it. What is looked at is whether it would
have been in order at any speed: a stream knows what the host knew that enqueued its last work, and
what the events knew that it waited for; an event knows what its stream knew. `query` says that
an event has yet to come, but where all are over at once (`Event.answers`), and of the end of a copy
nobody hears before some host waits (`Held`), so nothing is learned by luck.

Where a test gives the ops a pace (`Event.pace`), they take time as well, of a host that goes on
while streams are behind it, and events tell it.
"""

import contextlib
import ctypes
import threading
import traceback
import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any, ClassVar

import torch
from streams.clocks import LOCK, Doer, Memory, joined, knowing, known, learn, scope, told
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from zcompile.ir.torch_compat import storage_of, without_modes
from zcompile.runtime.device.arena import Arena
from zcompile.runtime.device.cuda import CudaCopier, CudaDevice

_THREADS = threading.local()


class Pace:
    """Simulated seconds that ops take, of the host and of a stream.

    now       time of the host
    launched  ops so far
    """

    def __init__(self, host_s: float, stream_s: float) -> None:
        self._host_s, self._stream_s = host_s, stream_s
        self.now, self.launched = 0.0, 0

    def launch(self, stream: "Stream") -> None:
        """The host enqueues an op, which the stream comes to as soon as it has nothing else."""
        self.now += self._host_s
        self.launched += 1
        self.occupy(stream, self._stream_s)

    def occupy(self, stream: "Stream", seconds: float) -> None:
        """The stream is busy for so long with what the host enqueues now."""
        stream.over_s = max(stream.over_s, self.now) + seconds


class Stream(Doer):
    """As `torch.cuda.Stream`.

    over_s  when all is over that was enqueued so far, where ops have a pace
    """

    def __init__(self, device: object = None, name: str = "") -> None:
        super().__init__(name or f"stream{id(self)}")
        self.over_s = 0.0

    def __enter__(self) -> "Stream":
        _THREADS.__dict__.setdefault("streams", []).append(self)
        return self

    def __exit__(self, *error: object) -> None:
        _THREADS.streams.pop()

    def wait_event(self, event: "Event") -> None:
        with LOCK:
            learn(self.known, joined(event.known, scope().known))
        self.over_s = max(self.over_s, event.at_s)

    def wait_stream(self, stream: "Stream") -> None:
        with LOCK:
            learn(self.known, joined(stream.known, scope().known))
        self.over_s = max(self.over_s, stream.over_s)

    def synchronize(self) -> None:
        told(self.known)


class Event:
    """As `torch.cuda.Event`."""

    waits: ClassVar[Counter[str]] = Counter()
    """Of the main thread, by who waited."""
    answers: ClassVar[bool] = False
    """Whether who asks is told that it is over, and so learns what it knows."""
    pace: ClassVar[Pace | None] = None
    """What ops take; None: no time at all, and then a timing event is never seen to be over."""

    def __init__(self, enable_timing: bool = False, blocking: bool = False) -> None:
        self.known: dict[str, int] = {}
        self._times = enable_timing
        self.at_s = 0.0

    def record(self, stream: Stream) -> None:
        with LOCK:
            learn(stream.known, scope().known)
            self.known = dict(stream.known)
        if Event.pace is not None:
            self.at_s = max(stream.over_s, Event.pace.now)

    def query(self) -> bool:
        if self._times and Event.pace is not None:
            return self.at_s <= Event.pace.now
        if self._times or not Event.answers:
            return False
        told(self.known)
        return True

    def synchronize(self) -> None:
        told(self.known)

    def elapsed_time(self, later: "Event") -> float:
        return 1e3 * (later.at_s - self.at_s)


class Simulation:
    """The streams and the memory of one simulated card.

    records  whether accesses are noted: clocks go on in any case
    label    says what this thread computes, for people
    asked    called before a copy to the host
    """

    def __init__(self) -> None:
        self.memory = Memory()
        self.held = Held()
        self.records = True
        self.asked: Callable[[], object] = lambda: None
        self._sources: list[Any] = []
        self.compute = Stream(name="compute")
        self.pinned: list[tuple[int, int]] = []
        self._hosted: dict[int, Any] = {}
        self.transfers: Counter[str] = Counter()
        self._storages: dict[int, Any] = {}
        self.cuda = SimpleNamespace(
            Stream=Stream,
            Event=Event,
            stream=lambda stream: stream,
            current_stream=self.current_stream,
            current_device=lambda: 0,
            set_device=lambda device: None,
            device=lambda device: contextlib.nullcontext(),
            mem_get_info=lambda device: (8 << 30, 8 << 30),
            empty_cache=lambda: None,
            cudart=lambda: SimpleNamespace(
                cudaHostRegister=self._pin, cudaHostUnregister=lambda address: 0
            ),
        )

    def current_stream(self, device: object = None) -> Stream:
        streams = getattr(_THREADS, "streams", ())
        return streams[-1] if streams else self.compute

    def _pin(self, address: int, nbytes: int, flags: int) -> int:
        self.pinned.append((address, address + nbytes))
        return 0

    def is_pinned(self, memory: Tensor) -> bool:
        at = memory.data_ptr()
        return any(begin <= at < end for begin, end in self.pinned)

    def lies_on_host(self, made: Tensor) -> Tensor:
        """Memory that is the host's own, without being pinned; returns it."""
        storage = storage_of(made)
        begin, end = storage.data_ptr(), storage.data_ptr() + storage.nbytes()

        def gone(_: object) -> None:
            self._hosted.pop(begin, None)
            self.memory.gone(begin, end)

        if begin:
            # What was a batch of the test's before, on a card, is never the host's memory later.
            self.memory.gone(begin, end)
            self._hosted[begin] = weakref.ref(storage, gone)
        return made

    def is_on_host(self, memory: Tensor) -> bool:
        return self.is_pinned(memory) or storage_of(memory).data_ptr() in self._hosted

    @contextlib.contextmanager
    def computing(self, label: str) -> Iterator[None]:
        """What this thread enqueues inside is called so."""
        labels = _THREADS.__dict__.setdefault("labels", ["compute"])
        labels.append(label)
        try:
            yield
        finally:
            labels.pop()

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Every op of this thread inside is work on its current stream."""
        if getattr(_THREADS, "watches", False):
            yield
            return
        _THREADS.watches = True
        try:
            with Watching(self):
                yield
        finally:
            _THREADS.watches = False

    @property
    def label(self) -> str:
        return _THREADS.__dict__.setdefault("labels", ["compute"])[-1]

    def launch(self, reads: list[Tensor], writes: list[Tensor], what: str = "") -> None:
        """Work on the current stream of this thread that reads and writes such tensors."""
        stream = self.current_stream()
        if Event.pace is not None:
            Event.pace.launch(stream)
        if not self.records:
            return
        with LOCK:
            learn(stream.known, scope().known)
        self.memory.touch(stream, self.label + what, spans(reads), spans(writes))

    def on_host(self, label: str, reads: "Spans", writes: "Spans") -> None:
        """The host itself reads or writes memory that copies touch too, now."""
        if self.records:
            self.memory.touch(scope(), label, reads, writes)

    def pinned_spans(self, tensors: list[Tensor]) -> "Spans":
        """Those that copies touch too."""
        return spans([t for t in tensors if t.numel() and self.is_on_host(t)])

    def note_source(self, source: Tensor) -> None:
        """A copy to the host is about to be asked for."""
        self._sources = [s for s in self._sources if s() is not None]
        self._sources.append(weakref.ref(storage_of(source)))
        self.asked()

    def source_bytes(self, arena: Arena) -> int:
        """Bytes alive outside the arena and its step scratch, which have an account of their own,
        that copies to the host have read, or will."""
        alive = {id(s): s for made in self._sources if (s := made()) is not None}
        memories = [arena.slot(0, 1), *(piece for _, piece in arena.scratch.pieces)]
        inside = {memory.untyped_storage().data_ptr() for memory in memories}
        return sum(s.nbytes() for s in alive.values() if s.data_ptr() not in inside)

    def watch(self, made: Tensor) -> None:
        """Memory that compute made: look who still uses it when it goes back to its allocator."""
        if not self.records:
            return
        storage = storage_of(made)
        begin, end = storage.data_ptr(), storage.data_ptr() + storage.nbytes()
        if begin and begin not in self._storages:
            self._storages[begin] = weakref.ref(storage, partial(self._freed, begin, end))

    def _freed(self, begin: int, end: int, gone: object) -> None:
        # The allocator of torch gives it to the next that computes, behind what was enqueued there.
        with LOCK:
            self._storages.pop(begin, None)
            self.memory.free(begin, end, scope().known, self.compute.known)


Spans = list[tuple[int, int]]


def spans(tensors: list[Tensor]) -> Spans:
    """The bytes that tensors may touch, as (begin, end)."""
    found = []
    for t in tensors:
        if t.numel():
            last = sum((n - 1) * stride for n, stride in zip(t.size(), t.stride(), strict=True))
            found.append((t.data_ptr(), t.data_ptr() + (last + 1) * t.element_size()))
    return found


class Watching(TorchDispatchMode):
    """Every op that is not a view is work on the current stream."""

    def __init__(self, simulation: Simulation) -> None:
        super().__init__()
        self._simulation = simulation

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        given = [*args, *(kwargs or {}).values()]
        plain = [t for value in given for t in _tensors(value)]
        if any(type(t) not in (Tensor, torch.nn.Parameter) for t in plain):
            return NotImplemented  # a tiered tensor knows what to do
        out = func(*args, **(kwargs or {}))
        paces = self._simulation.records or Event.pace is not None
        if not paces or _is_view(func):
            return out
        if func._schema.name.startswith("aten::empty"):  # memory, and no work
            for each in _tensors(out):
                self._simulation.watch(each)
            return out
        writes, reads = [], []
        for at, argument in enumerate(func._schema.arguments):
            value = args[at] if at < len(args) else (kwargs or {}).get(argument.name)
            written = argument.alias_info is not None and argument.alias_info.is_write
            (writes if written else reads).extend(_tensors(value))
        held = {t.untyped_storage().data_ptr() for t in (*writes, *reads)}
        made = [t for t in _tensors(out) if t.untyped_storage().data_ptr() not in held]
        self._simulation.launch(reads, [*writes, *made], f" {func._schema.name[6:]}")
        for each in made:
            self._simulation.watch(each)
        return out


def _is_view(func: Any) -> bool:
    returns = func._schema.returns
    return bool(returns) and all(r.alias_info and not r.alias_info.is_write for r in returns)


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, list | tuple):
        return [t for part in value for t in _tensors(part)]
    return []


class Held:
    """What the device submits to a thread of its own, and nobody does until a host waits.

    So the host knows of the end of a copy as late as it can.
    """

    def __init__(self) -> None:
        self._jobs: deque[Callable[[], None]] = deque()
        self._changed = threading.Condition()

    def submit(self, job: Callable[[], None]) -> None:
        asked = known()

        def run() -> None:
            with knowing(asked):
                job()

        with self._changed:
            self._jobs.append(run)
            self._changed.notify_all()

    def stop(self) -> None:
        self._jobs.clear()

    def tell(self, error: object = None) -> None:
        """Something else has happened."""
        with self._changed:
            self._changed.notify_all()

    def work_until(self, over: Callable[[], bool]) -> None:
        """Do one job after the other, the oldest first, until it is over."""
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._jobs or over())
                if over():
                    return
                job = self._jobs.popleft()
            _THREADS.reaps = True
            try:
                job()
            finally:
                _THREADS.reaps = False


class SimulatedCuda(CudaDevice):
    """The device itself, but for where its memory lies: on the host, as on the emulated one."""

    simulation: Simulation

    def __init__(self, throttle: object, meter: Any, crashed: Any) -> None:
        super().__init__(torch.device("cuda", 0), meter, crashed)
        for link, stream in self._streams.items():
            stream.name = link
        for reaper in self._reapers.values():
            reaper.stop()
        self._reapers = dict.fromkeys(self._streams, self.simulation.held)
        self.torch_device = torch.device("cpu")

    def is_on_host(self, memory):
        return self.simulation.is_on_host(memory)

    def copier(self, name):
        super().copier(name)
        stream = self._own_streams[-1]
        stream.name = f"{name} of ranks"
        return SimulatedCopier(self, stream, name)

    def host_row(self, numel, dtype):
        with without_modes():
            return self.simulation.lies_on_host(torch.empty(numel, dtype=dtype))

    def owning_view(self, memory, watch):
        array: Any = (ctypes.c_ubyte * max(memory.numel(), 1)).from_address(memory.data_ptr())
        array.memory = memory
        watch(array)
        return torch.frombuffer(array, dtype=torch.uint8, count=memory.numel())

    def allocate_each(self, sizes):
        # Not as the device's own, after which copies know all that compute has done: no memory
        # here is another's before, so what orders them else is seen to be enough. The device's own
        # has a test to itself (`test_stores.py`).
        with torch.inference_mode(False):
            made = [torch.empty(nbytes, dtype=torch.uint8) for nbytes in sizes]
        for memory in made:
            self.simulation.watch(memory)
        return made

    def can_bypass_staging(self, direction):
        return False  # no system call reaches the memory of a card

    def copy(self, direction, target, source, after, listener):
        if direction == "d2h":
            self.simulation.note_source(source)
        super().copy(direction, target, source, after, listener)

    def enqueue(self, direction, copies, after, name):
        if direction == "d2h":
            for _, source in copies:
                self.simulation.note_source(source)
        return super().enqueue(direction, copies, after, name)

    def _on_stream(self, direction, work, after, name):
        self.simulation.transfers[direction] += 1

        def watched():
            with self.simulation.computing(f"{direction} {name}"), self.simulation.watching():
                work()

        return super()._on_stream(direction, watched, after, name)


class SimulatedCopier(CudaCopier):
    """What a lane of ranks copies with: its copies are work on its stream."""

    def enqueue(self, target, source):
        simulation = self._device.simulation
        with simulation.computing(f"{self.name} of ranks"), simulation.watching():
            return super().enqueue(target, source)


def host_wait(what: str) -> None:
    """Note that the main thread waits."""
    here = threading.current_thread() is threading.main_thread()
    if here and not getattr(_THREADS, "reaps", False):
        frames = traceback.extract_stack(limit=12)
        Event.waits[what + " < ".join(f.name for f in reversed(frames))] += 1
