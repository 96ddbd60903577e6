"""A lane of the host that computes as late as it may: an update is computed when somebody waits for
it, or for what comes after it, and not before. Nothing depends on a clock, and nobody's reading too
early goes unseen.
"""

import threading
from typing import Any

import pytest

from zcompile.runtime import open
from zcompile.runtime.transfer.host_work import HostLane, HostWork
from zcompile.runtime.transfer.ticket import Promise
from zcompile.runtime.transfer.waiting import WAITS, Bell


class HeldLane(HostLane):
    """Does its work in the thread that waits."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self._changed = threading.Condition()
        self._waiting: list[tuple[int, int, HostWork]] = []
        self.done: list[HostWork] = []
        """All that was done, in order."""

    @property
    def waits(self) -> int:
        """Number of pieces of work that may be done, and are not."""
        return len(self._waiting)

    def begin(self, work: HostWork, error: BaseException | None) -> None:
        if error is not None:
            work.end(error)
            return
        with self._changed:
            self._waiting.append((work.urgency, next(self._numbers), work))
            self._changed.notify_all()

    def some(self, count: int) -> None:
        """Do so many, or as many as there are."""
        for _ in range(count):
            with self._changed:
                if not self._waiting:
                    return
            self._one()

    def until(self, promise: Promise) -> None:
        """Somebody waits for `promise`: do one after the other until it is kept."""
        promise.then(lambda _: self._tell())
        while not promise.done():
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or promise.done())
                if promise.done():
                    return
            with WAITS:
                self._one()

    def _one(self) -> None:
        with self._changed:
            first = min(self._waiting, key=lambda row: row[:2])
            self._waiting.remove(first)
        self.done.append(first[2])
        first[2].run(self._cores)

    def _tell(self) -> None:
        with self._changed:
            self._changed.notify_all()


SETTLE = Promise.wait_finished


def arrived(session: Any) -> None:
    """Wait until all that was sent home has come there, and do no update for that: those whose
    gradients are there may be done then. What follows an update on its entry comes after it."""
    behind = set()
    for moved in [*session._mover._in_flight]:
        if moved.on_host:
            behind.add(id(moved.place))
        elif moved.writes and id(moved.place) not in behind:
            SETTLE(moved.end_heard())


def held(patch: pytest.MonkeyPatch) -> list[HeldLane]:
    """From here on stores have such lanes; those that were made, the last one last."""
    made: list[HeldLane] = []
    settle = Promise.wait_finished

    def make(*given: Any) -> HeldLane:
        made.append(HeldLane(*given))
        return made[-1]

    def wait_for_it(promise: Promise) -> None:
        if made and threading.current_thread() is threading.main_thread():
            made[-1].until(promise)
        settle(promise)

    patch.setattr(open, "HostLane", make)
    patch.setattr(Promise, "wait_finished", wait_for_it)
    return made


def late(patch: pytest.MonkeyPatch) -> None:
    """From here on lanes compute in their own threads, as ever, but only while somebody waits,
    for whatever."""
    run = HostWork.run

    def runs(work: HostWork, cores: Any) -> None:
        bell: Bell = Bell()
        WAITS.bells.append(bell)
        while not WAITS:
            bell.get()
        WAITS.bells.remove(bell)
        run(work, cores)

    patch.setattr(HostWork, "run", runs)


def in_flight(session: Any) -> int:
    """Operands of rows that are not over."""
    return sum(moved.on_host for moved in [*session._mover._in_flight])
