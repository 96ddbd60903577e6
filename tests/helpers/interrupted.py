"""Ctrl-C at every bytecode of an operation in turn, and whether anything was lost.

An interrupt is raised by the trace function, when the first of all visits to a bytecode of ours
begins, and goes through whatever handler is in force then. No clock is involved, and no signal from
outside, so a run that fails fails again.
"""

import gc
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import zcompile
from zcompile.runtime.store.store import Store

OURS = f"{Path(zcompile.__file__).parent}/"
BELOW = ("contextlib.py", "weakref.py", "_weakrefset.py", "threading.py", "queue.py")
"""Of the standard library, what may run between two bytecodes of ours, or in a finalizer."""

Spot = tuple[CodeType, int]


class Tracer:
    """Sees each bytecode of ours. `strike`: where the interrupt is raised, once."""

    def __init__(self, strike: Spot | None = None) -> None:
        self.seen: dict[Spot, None] = {}
        self.strike = strike
        self.struck = False

    def __call__(self, frame: FrameType, event: str, arg: object) -> Any:
        name = frame.f_code.co_filename
        if not name.startswith(OURS) and os.path.basename(name) not in BELOW:
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        return self.step

    def step(self, frame: FrameType, event: str, arg: object) -> Any:
        if event == "opcode":
            spot = frame.f_code, frame.f_lasti
            if self.strike is None:
                self.seen[spot] = None
            elif spot == self.strike:
                sys.settrace(None)
                self.struck = True
                signal.raise_signal(signal.SIGINT)
        return self.step

    @contextmanager
    def on(self) -> Iterator[None]:
        # Not with a trace function of coverage or a debugger: it would be lost when ours is struck.
        before = sys.gettrace()
        sys.settrace(self)
        try:
            yield
        finally:
            sys.settrace(before)


def spots_of(operation: Callable[[], object]) -> Sequence[Spot]:
    """Every bytecode of ours that `operation` runs, in the order in which it first does."""
    tracer = Tracer()
    with tracer.on():
        operation()
    return [*tracer.seen]


def strike(spot: Spot, operation: Callable[[], object]) -> tuple[bool, bool]:
    """Whether `operation` came to `spot`, and whether the interrupt then came out of it."""
    tracer = Tracer(spot)
    try:
        with tracer.on():
            operation()
    except KeyboardInterrupt:
        return tracer.struck, True
    return tracer.struck, False


def state_of(store: Store) -> dict[str, object]:
    """All that an operation takes and has to give back, once what is dead is buried."""
    gc.collect()
    store.drain()
    store.holds(next(iter(store._entries.values())))  # which buries
    meter, arena, mover = store.meter, store.arena, store._mover
    tiers: dict[str, object] = {}
    for tier in store.homes._tiers:
        name, used, _ = tier.usage()
        mine = sum(e.place.extent.nbytes for e in store._entries.values() if e.place.tier is tier)
        tiers[name] = used, used - mine
    return {
        "entries": len(store._entries),
        "tiers": tiers,
        "host": meter.host.now,
        "planned host": meter.planned_host.now,
        "planned disk": meter.planned_disk.now,
        "arena": (arena.used_bytes, sorted(arena._eager), list(arena._slots)),
        "device": meter.device.now,
        "activations": _activations(store),
        "under way": len(mover._in_flight),
        "backlog": store._backlog._now,
        "staging": store._context.staging._ranges.used_bytes,
        "locks": sorted(_locked(store)),
        "descriptors": len(os.listdir("/proc/self/fd")),
        "threads": threading.active_count(),
        "handler": signal.getsignal(signal.SIGINT),
    }


def _activations(store: Any) -> int:
    return store.live_memory.nbytes if hasattr(store, "live_memory") else 0


def _locked(store: Store) -> Iterator[str]:
    """Locks of the store that are held, though nothing is under way."""
    owners = {
        "mover": store._mover,
        "arena": store.arena,
        "backlog": store._backlog,
        "staging": store._context.staging,
        "meter": store.meter,
    }
    owners |= {tier.name: tier for tier in store.homes._tiers}
    if (executor := getattr(store, "executor", None)) is not None and executor._busy.locked():
        yield "executor"
    for name, owner in owners.items():
        lock = getattr(owner, "_lock", None)
        if lock is not None:
            free = threading.Thread(target=_take, args=(lock, taken := []))
            free.start()
            free.join()
            if not taken:
                yield name


def _take(lock: Any, taken: list[bool]) -> None:
    if lock.acquire(timeout=1.0):
        taken.append(True)
        lock.release()


@contextmanager
def nothing_swallowed() -> Iterator[None]:
    """No exception is lost in a finalizer meanwhile."""
    lost: list[object] = []
    before, sys.unraisablehook = sys.unraisablehook, lambda told: lost.append(told.exc_value)
    try:
        yield
        gc.collect()
    finally:
        sys.unraisablehook = before
    assert not lost


def check_everywhere(
    operation: Callable[[], object],
    store: Store,
    *,
    most: int | None = None,
    after: Callable[[], object] = lambda: None,
) -> None:
    """Interrupt `operation` at each of its bytecodes, or at `most` of them, evenly spread: the
    interrupt comes out, once, and what `after` leaves is what it left before."""
    for _ in range(2):  # what is made once, and kept
        operation()
        after()
    for _ in range(3):  # the last of them: a step may be planned meanwhile, and then not again
        spots = spots_of(operation)
        after()
    assert len(spots) > 20
    struck = 0
    gc.collect()
    gc.freeze()
    before = state_of(store)
    chosen = spots[:: max(1, len(spots) // (most or len(spots)))]
    for spot in chosen:
        with nothing_swallowed():
            came, out = strike(spot, operation)
            after()
        where = f"{spot[0].co_filename}:{spot[0].co_qualname} at {spot[1]}"
        assert came == out, where
        struck += came
        assert (now := state_of(store)) == before, (where, _different(before, now))
    assert struck > len(chosen) // 2  # an interrupt may change which way the next run takes


def _different(before: dict[str, object], now: dict[str, object]) -> dict[str, object]:
    return {key: (before[key], now[key]) for key in before if before[key] != now[key]}
