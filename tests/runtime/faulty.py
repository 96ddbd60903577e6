"""Faults under the I/O engine: a ring whose outcomes a test decides.

The requests that nothing is decided about really happen.
"""

import errno
import threading
from collections.abc import Callable, Sequence

import pytest

from zcompile.runtime.io import trial
from zcompile.runtime.io.rings import Outcome, Request, Ring

Decide = Callable[[Request], Request | int | None]
"""Another request, a result without a request, or None: as it is."""


class Faults:
    """What goes wrong in every ring that is opened after this.

    decide    asked about every request
    refusals  errnos that the next calls of `submit` fail with, 0 for none
    most      requests that one call accepts
    gate      no outcome is told while this is not set
    reverse   outcomes that are told together come in reverse
    seen      requests that were accepted, in order
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.decide: Decide = lambda request: None
        self.refusals: list[int] = []
        self.most = 1 << 30
        self.gate = threading.Event()
        self.gate.set()
        self.reverse = False
        self.seen: list[Request] = []
        for name, opened in list(trial.RINGS.items()):
            monkeypatch.setitem(trial.RINGS, name, lambda opened=opened: FaultyRing(opened(), self))

    def fail(self, verb: str, code: int = errno.EIO, nth: int | None = None) -> None:
        """Every read or write fails from here on, or only the n-th, counted from 0."""
        count = iter(range(1 << 30))

        def decide(request: Request) -> int | None:
            if request.write != (verb == "write"):
                return None
            return -code if nth is None or next(count) == nth else None

        self.decide = decide

    def cut(self, nbytes: int) -> None:
        """No request moves more than `nbytes`."""
        self.decide = lambda request: request._replace(nbytes=min(nbytes, request.nbytes))

    def none(self) -> None:
        self.decide = lambda request: None


class FaultyRing:
    """A `Ring` over another, with faults."""

    def __init__(self, ring: Ring, faults: Faults) -> None:
        self.name, self.depth = ring.name, ring.depth
        self.request_bytes = ring.request_bytes
        self._ring, self._faults = ring, faults
        self._told: list[Outcome] = []
        self._under_way = 0
        self._more = threading.Condition()

    def submit(self, requests: Sequence[Request]) -> int:
        if self._faults.refusals and (code := self._faults.refusals.pop(0)):
            raise OSError(code, "refused")
        accepted = requests[: self._faults.most]
        for request in accepted:
            self._faults.seen.append(request)
            self._submit(request, self._faults.decide(request))
        return len(accepted)

    def reap(self) -> list[Outcome]:
        with self._more:
            self._more.wait_for(lambda: self._told or self._under_way)
        self._faults.gate.wait()
        with self._more:
            if self._told:
                outcomes, self._told = self._told, []
            else:
                outcomes = self._ring.reap()
                self._under_way -= len(outcomes)
        return outcomes[::-1] if self._faults.reverse else outcomes

    def close(self) -> None:
        self._ring.close()

    def _submit(self, request: Request, decision: Request | int | None) -> None:
        with self._more:
            if isinstance(decision, int):
                self._told.append(Outcome(request.key, decision))
            else:
                assert self._ring.submit([decision or request]) == 1
                self._under_way += 1
            self._more.notify_all()
