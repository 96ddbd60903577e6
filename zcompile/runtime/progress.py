"""Shows long work: what is being done and how far it is, once it has taken a second.

    with working("saving run/step-1000", total=nbytes, unit=show_size) as work:
        work.add(len(block))

Works may be nested, and open in several threads at once: what the oldest thread does is shown, on
the display for where the process runs (`displays.py`). `ZINF_PROGRESS=0` silences it. What a
terminal shows belongs to the process, and so does the one `BOARD` of this module. A thread looks
at the clock while a work is open, and there is none else: nothing here runs within a step.
"""

import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from zcompile.config import shows_progress
from zcompile.runtime.displays import TICK_S, Display, Line, display_here
from zcompile.runtime.transfer.interrupts import deferred_interrupts

logger = logging.getLogger("zcompile.runtime.progress")

FIRST_S = 1.0
"""Seconds after which a work counts as long."""


@dataclass(eq=False)
class Work:
    """One thing that takes its time. Cheap to update, from any thread.

    what   for people: "saving run/step-1000"
    total  of what is counted; None: it is not known
    unit   shows a count, as `show_size` shows bytes
    began  on the clock of the board
    """

    what: str
    total: int | None = None
    unit: Callable[[int], str] = str
    began: float = 0.0
    done: int = 0
    step: str = ""

    def begin(self, step: str) -> None:
        """Take note of what is done next."""
        self.step = step

    def at(self, done: int, step: str = "") -> None:
        """Take note that `done` are done, and of what is done next."""
        self.done, self.step = done, step

    def add(self, count: int = 1, step: str = "") -> None:
        """Take note that so many more are done."""
        self.done, self.step = self.done + count, step

    def __str__(self) -> str:
        count = ""
        if self.total is not None:
            count = f"{self.unit(min(self.done, self.total))} of {self.unit(self.total)}"
        elif self.done:
            count = self.unit(self.done)
        told = ", ".join(filter(None, (count, self.step)))
        return f"{self.what}: {told}" if told else self.what


def _line_of(works: list[Work], seconds: float) -> Line:
    """What is shown of nested works, the outermost first."""
    counted = [work for work in works if work.total]
    share = min(1.0, counted[-1].done / (counted[-1].total or 1)) if counted else None
    return Line(works[0].what, "; ".join(map(str, works)), share, seconds)


class Board:
    """Works that are open, and the display that shows them.

    clock    seconds that only go up
    display  finds the display, each time that something is to be shown
    ticks    whether a thread looks at the clock while a work is open; else `tick` is called
    """

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        display: Callable[[], Display] = display_here,
        ticks: bool = True,
    ) -> None:
        self._clock, self._make, self._ticks = clock, display, ticks
        self.first_s = FIRST_S
        self.forget()

    def forget(self) -> None:
        """Begin anew, as in a child process, which has neither the works nor the thread."""
        self._lock = threading.RLock()
        self._stacks: dict[int, list[Work]] = {}
        """Thread -> its open works, the outermost first; the oldest thread first."""
        self._unseen: list[Work] = []
        """Open works that are not shown."""
        self._waits: set[object] = set()
        """One thing for each wait for other ranks that is on its way."""
        self._display: Display | None = None
        self._next = 0.0
        self._timer: tuple[threading.Thread, threading.Event] | None = None

    def working(
        self, what: str, total: int | None = None, unit: Callable[[int], str] = str
    ) -> "_Opened":
        """A context in which a work is open."""
        return _Opened(self, Work(what, total, unit))

    def tell(self, log: logging.Logger, text: str) -> None:
        """Log a text, and show it where the log is not seen."""
        log.info("%s", text)
        if not shows_progress() or (log.hasHandlers() and log.isEnabledFor(logging.INFO)):
            return
        with self._lock:
            self._try(lambda: (self._display or self._make()).tell(text))

    def tick(self) -> None:
        """Show what is due by now."""
        with self._lock:
            now = self._clock()
            if (line := self._line(now)) is None or line.seconds < self.first_s or now < self._next:
                return
            self._try(lambda: self._show(line))
            self._next = now + (self._display.every_s if self._display is not None else FIRST_S)

    def opened(self, work: Work) -> None:
        """Take note of a work that begins in this thread."""
        if not shows_progress():
            self._unseen.append(work)
            return
        with self._lock:
            work.began = self._clock()
            self._stacks.setdefault(threading.get_ident(), []).append(work)
            if self._timer is None and self._ticks:
                self._start()

    def closed(self, work: Work) -> None:
        """Take note of the end of a work; of one that is not open too."""
        timer = None
        if work in self._unseen:
            self._unseen.remove(work)
        with self._lock:
            for thread, works in list(self._stacks.items()):
                if work not in works:
                    continue
                if len(works) == 1:
                    self._end(_line_of(works, self._clock() - work.began), thread)
                else:
                    works.remove(work)
            if not self._stacks:
                timer, self._timer = self._timer, None
        if timer is not None:
            looking, end = timer
            end.set()
            # It may close a work itself: of a generator that is collected while it shows a line.
            if looking is not threading.current_thread():
                looking.join()

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """A context in which other ranks are waited for: who waits is not busy, whatever the work
        is that it waits within."""
        wait = object()
        try:
            self._waits.add(wait)
            yield
        finally:
            self._waits.discard(wait)

    def doing(self) -> str:
        """The works of the oldest thread, the outermost first, shown or not; "" if none is open, or
        other ranks are waited for."""
        with self._lock:
            if self._waits:
                return ""
            works = next(iter(self._stacks.values()), self._unseen)
            return "; ".join(map(str, list(works)))

    def _line(self, now: float) -> Line | None:
        works = next(iter(self._stacks.values()), None)
        return None if works is None else _line_of(works, now - works[0].began)

    def _show(self, line: Line) -> None:
        display = self._make()
        if type(display) is not type(self._display):  # as when a bar of tqdm has appeared
            if self._display is not None:
                self._display.end(line)
            self._display = display
        self._display.show(line)

    def _end(self, line: Line, thread: int) -> None:
        """Drop the last work of a thread; if it was the one that was shown, its line ends."""
        was_shown = next(iter(self._stacks)) == thread
        del self._stacks[thread]
        if was_shown and (display := self._display) is not None:
            self._display, self._next = None, 0.0
            self._try(lambda: display.end(line))

    def _try(self, show: Callable[[], object]) -> None:
        """Show something; where that fails, the work goes on unseen."""
        try:
            show()
        except (OSError, ValueError, RuntimeError) as error:  # closed, or not to be written to
            self._display = None
            logger.debug("progress could not be shown: %s", error, exc_info=True)

    def _start(self) -> None:
        end = threading.Event()
        thread = threading.Thread(target=self._run, args=(end,), name="zinf-progress", daemon=True)
        try:
            thread.start()
        except RuntimeError as error:  # there are too many: the work goes on unseen
            logger.debug("progress is not shown: %s", error)
        else:
            self._timer = thread, end

    def _run(self, end: threading.Event) -> None:
        while not end.wait(TICK_S):
            self.tick()


class _Opened:
    """The context of one work."""

    def __init__(self, board: Board, work: Work) -> None:
        self._board, self._work = board, work

    def __enter__(self) -> Work:
        try:
            with deferred_interrupts():
                self._board.opened(self._work)
        except BaseException:
            self._board.closed(self._work)
            raise
        return self._work

    def __exit__(self, *_: object) -> None:
        try:
            with deferred_interrupts():
                self._board.closed(self._work)
        except BaseException:
            self._board.closed(self._work)
            raise


BOARD = Board()
_COMPILING = Work("torch.compile")


def compiling_begins(_: object) -> None:
    """Take note that `torch.compile` begins to trace."""
    BOARD.opened(_COMPILING)


def compiling_ends(_: object) -> None:
    """Take note that `torch.compile` is done."""
    BOARD.closed(_COMPILING)


os.register_at_fork(after_in_child=BOARD.forget)
working, tell = BOARD.working, BOARD.tell
