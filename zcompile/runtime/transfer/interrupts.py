"""Ctrl-C comes between two operations, never in the middle of one, as with torch's own ops.

Python raises KeyboardInterrupt between any two bytecodes of the main thread. One that struck
between taking an extent and noting whose it is would lose the extent; between the start of a
transfer and its end it would leave one that nobody finishes. So every door to the runtime notes the
interrupt, and delivers it on its way out, when what was made has an owner whose death gives it
back.

A second interrupt does not wait if the first has met a wait, or code of the user: there it is like
any error that may be raised at that point, and nothing is lost either.
"""

# The functions of `signal` wrap these, to convert integers to enums and back: 15 us for one section
# instead of one.
import _signal  # type: ignore[import-not-found]  # CPython has it in C
import sys
import sysconfig
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import wraps
from pathlib import Path
from signal import SIGINT
from types import CodeType, FrameType, TracebackType
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")
F = TypeVar("F", bound=Callable[..., Any])

_HERE = f"{Path(__file__).parents[1]}/"
_STDLIB = f"{sysconfig.get_path('stdlib')}/"
_PACKAGES = f"{sysconfig.get_path('purelib')}/"
_WAITS: set[CodeType] = set()
_ENDS: set[CodeType] = set()

_WITHIN = nullcontext()
"""What is nested in a section costs next to nothing: the outer one delivers."""


class _Handler:
    """Notes interrupts; `usual` is the handler they are for.

    active  until its section ends; user code within may have saved it, to put it back later
    """

    __slots__ = ("active", "noted", "usual")

    def __init__(self, usual: Callable[[int, FrameType | None], Any]) -> None:
        self.usual = usual
        self.noted = False
        self.active = True

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if not self.active or (self.noted and _may_break(frame)):
            self.noted = False
            self.usual(number, frame)
        else:
            self.noted = True


class _Section:
    """The outermost section of the main thread."""

    __slots__ = ("_handler",)

    def __init__(self, handler: _Handler) -> None:
        self._handler = handler

    def __enter__(self) -> None:
        _signal.signal(SIGINT, self._handler)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        handler = self._handler
        handler.active = False  # from here on it is the usual one by another name
        if _signal.getsignal(SIGINT) is handler:  # else user code within has set another, to stay
            _signal.signal(SIGINT, handler.usual)
        if handler.noted:
            handler.noted = False
            handler.usual(SIGINT, sys._getframe(1))


def deferred_interrupts() -> AbstractContextManager[None]:
    """Note SIGINT until the end of the block; outside the main thread, where it never arrives, and
    where a program has no handler of its own for it, this does nothing."""
    if threading.get_ident() != threading.main_thread().ident:
        return _WITHIN
    usual = _signal.getsignal(SIGINT)
    while isinstance(usual, _Handler):
        if usual.active:
            return _WITHIN
        usual = usual.usual
    if not callable(usual):
        return _WITHIN
    return _Section(_Handler(usual))


def deliver_interrupts() -> None:
    """A good moment within a long section: what was noted is delivered now."""
    handler = _signal.getsignal(SIGINT)
    if isinstance(handler, _Handler) and handler.noted:
        handler.noted = False
        handler.usual(SIGINT, sys._getframe(1))


def uninterrupted(func: Callable[P, R]) -> Callable[P, R]:
    """A door: `func` runs with interrupts deferred.

    What it returns may be lost if one is delivered on the way out, so it must be owned by then:
    by the caller's arguments, or by an object whose death gives it back.
    """

    @wraps(func)
    def door(*args: P.args, **kwargs: P.kwargs) -> R:
        with deferred_interrupts():
            return func(*args, **kwargs)

    return door


def waits(func: F) -> F:
    """`func` blocks until others have done something, and may raise what they failed with: a second
    interrupt breaks it off."""
    _WAITS.add(func.__code__)
    return func


def ends(func: F) -> F:
    """`func` cleans up: whatever it waits for, it has to wait for."""
    _ENDS.add(func.__code__)
    return func


def _may_break(frame: FrameType | None) -> bool:
    """Whether an interrupt in `frame` is like any error that may be raised there."""
    while frame is not None and _of_stdlib(frame):
        frame = frame.f_back
    if frame is None:
        return True
    if frame.f_code.co_filename.startswith(_HERE) and frame.f_code not in _WAITS:
        return False
    while frame is not None:
        if frame.f_code in _ENDS:
            return False
        frame = frame.f_back
    return True


def _of_stdlib(frame: FrameType) -> bool:
    name = frame.f_code.co_filename
    return name.startswith(_STDLIB) and not name.startswith(_PACKAGES)
