"""Ctrl-C is delivered between two operations of the runtime, never in the middle of one.

That is how torch's own ops behave. Python raises KeyboardInterrupt between any two bytecodes of the
main thread. An interrupt between taking an extent and noting whose it is would lose the extent;
between the start of a transfer and its end it would leave a transfer that nobody finishes. So every
door to the runtime (`uninterrupted`) notes an interrupt, and delivers it on its way out, when what
was made has an owner whose death gives it back.

A second interrupt is delivered at once, if it strikes while the runtime waits for others
(`interruptible`), or within code of the user: there it is like any error that may be raised at that
point, and nothing is lost either.
"""

# The functions of `signal` wrap these, to convert integers to enums and back: 15 us for one section
# instead of one.
import _signal  # type: ignore[import-not-found]  # CPython has it in C
import os
import sys
import sysconfig
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import wraps
from pathlib import Path
from signal import SIGINT
from types import CodeType, FrameType
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")
F = TypeVar("F", bound=Callable[..., Any])


# --- Sections ---

_WITHIN = nullcontext()
"""What a nested section returns, at next to no cost: the outer section delivers."""


class _Handler:
    """A signal handler that notes interrupts for the handler `usual`.

    active  until its section ends; user code within may have saved the handler, to put it back
            later
    """

    __slots__ = ("active", "noted", "usual")

    def __init__(self, usual: Callable[[int, FrameType | None], Any]) -> None:
        self.usual = usual
        self.noted = False
        self.active = True

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if not self.active or (self.noted and _may_interrupt(frame)):
            self.noted = False
            self.usual(number, frame)
        else:
            self.noted = True


class _Section:
    """The outermost section of the main thread: interrupts are noted in it and delivered at its
    end."""

    __slots__ = ("_handler",)

    def __init__(self, handler: _Handler) -> None:
        self._handler = handler

    def __enter__(self) -> None:
        _signal.signal(SIGINT, self._handler)

    def __exit__(self, *_: object) -> None:
        handler = self._handler
        handler.active = False  # from here on it is the usual one by another name
        if _signal.getsignal(SIGINT) is handler:  # else user code within has set another, to stay
            _signal.signal(SIGINT, handler.usual)
        if handler.noted:
            handler.noted = False
            handler.usual(SIGINT, sys._getframe(1))


class _MainThread:
    """Knows the thread that interrupts arrive in, without asking at each door."""

    def __init__(self) -> None:
        self.ident = threading.main_thread().ident
        os.register_at_fork(after_in_child=self._after_fork)

    def _after_fork(self) -> None:
        self.ident = threading.get_ident()


_MAIN_THREAD = _MainThread()


def _outermost_section() -> _Section | None:
    """The section that begins here; None within another, outside the main thread, where SIGINT
    never arrives, and where a program has no handler of its own for it."""
    if threading.get_ident() != _MAIN_THREAD.ident:
        return None
    usual = _signal.getsignal(SIGINT)
    while isinstance(usual, _Handler):
        if usual.active:
            return None
        usual = usual.usual
    return _Section(_Handler(usual)) if callable(usual) else None


def deferred_interrupts() -> AbstractContextManager[None]:
    """Note SIGINT until the end of the block."""
    return _outermost_section() or _WITHIN


def deliver_interrupts() -> None:
    """Deliver a noted interrupt now: for a good moment within a long section."""
    handler = _signal.getsignal(SIGINT)
    if isinstance(handler, _Handler) and handler.noted:
        handler.noted = False
        handler.usual(SIGINT, sys._getframe(1))


def uninterrupted(func: Callable[P, R]) -> Callable[P, R]:
    """Decorate a door to the runtime: `func` runs with interrupts deferred.

    The result may be lost if an interrupt is delivered on the way out, so it must be owned by then:
    by the caller's arguments, or by an object whose death gives it back.
    """

    @wraps(func)
    def door(*args: P.args, **kwargs: P.kwargs) -> R:
        section = _outermost_section()
        if section is None:  # the usual case of a door behind another costs one call
            return func(*args, **kwargs)
        with section:
            return func(*args, **kwargs)

    return door


# --- Where a second interrupt is delivered ---

_HERE = f"{Path(__file__).parents[1]}/"
_STDLIB = f"{sysconfig.get_path('stdlib')}/"
_PACKAGES = f"{sysconfig.get_path('purelib')}/"
_INTERRUPTIBLE: set[CodeType] = set()
_CLEANUP: set[CodeType] = set()


def interruptible(func: F) -> F:
    """Decorate a function that blocks until others have done something: a second interrupt ends the
    wait.

    Such a function may raise what the others failed with.
    """
    _INTERRUPTIBLE.add(func.__code__)
    return func


def cleanup(func: F) -> F:
    """Decorate a function that cleans up: no interrupt ends its waits, whatever they are for."""
    _CLEANUP.add(func.__code__)
    return func


def _may_interrupt(frame: FrameType | None) -> bool:
    """Whether an interrupt in `frame` is like any error that may be raised there."""
    while frame is not None and _is_stdlib(frame):
        frame = frame.f_back
    if frame is None:
        return True
    if frame.f_code.co_filename.startswith(_HERE) and frame.f_code not in _INTERRUPTIBLE:
        return False
    while frame is not None:
        if frame.f_code in _CLEANUP:
            return False
        frame = frame.f_back
    return True


def _is_stdlib(frame: FrameType) -> bool:
    name = frame.f_code.co_filename
    return name.startswith(_STDLIB) and not name.startswith(_PACKAGES)
