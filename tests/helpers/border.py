"""Stands at the border to the kernel: sees every call on files, and decides what becomes of it.

    calls = Border(around)
    model = offloaded(model, calls, disk=tmp_path, ...)

`around(call, go)` is asked about each call: it returns `go()`, or raises an OSError, or returns
something else instead. Requests of transfers come as the calls "ring_read" and "ring_write", when
they are submitted; for these `go()` submits, and what is returned or raised is the outcome.
"""

import errno
import inspect
import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn

from zcompile.config import build
from zcompile.frontend.offload import move_in, open_session
from zcompile.runtime.io.rings import Outcome, Request, Ring
from zcompile.runtime.io.system_calls import SystemCalls
from zcompile.runtime.open import open_resources

NAMELESS = "zinf-trial-0"
"""What we call a file without a name."""
HELPERS = ("write_all", "read_all")
"""Made of other calls."""
CALLS = tuple(
    name
    for name, value in vars(SystemCalls).items()
    if inspect.isfunction(value) and not name.startswith("_") and name not in (*HELPERS, "ring")
)


@dataclass
class Call:
    """name, arguments  as `SystemCalls` has them; of a request: fd, offset, nbytes, address
    of               the path of the file or directory, where that is known
    number           from 0, among all calls
    """

    name: str
    arguments: dict[str, Any]
    of: Path | None
    number: int


Around = Callable[[Call, Callable[[], Any]], Any]


@dataclass
class Border(SystemCalls):
    """The kernel behind `around`.

    ended  told of each request that was made, by the number of its call, with its outcome
    paths  of descriptors that are open
    count  calls so far
    """

    around: Around = lambda call, go: go()
    ended: Callable[[int, int], None] = lambda number, result: None
    paths: dict[int, Path] = field(default_factory=dict)
    count: int = 0
    lock: Any = field(default_factory=threading.RLock)

    def ring(self, opened: Callable[[], Ring]) -> Ring:
        return WatchedRing(self.call("ring", {}, None, partial(super().ring, opened)), self)

    def call(
        self,
        name: str,
        arguments: dict[str, Any],
        of: Path | None,
        go: Any,
        told: Callable[[int], None] = lambda number: None,
    ) -> Any:
        with self.lock:
            made = Call(name, arguments, of, self.count)
            self.count += 1
        told(made.number)
        return self.around(made, go)

    def path_of(self, arguments: dict[str, Any]) -> Path | None:
        """What a call is about."""
        fd = arguments.get("fd", arguments.get("dir_fd"))
        below = self.paths.get(fd) if isinstance(fd, int) else None
        if arguments.get("flags", 0) & os.O_TMPFILE == os.O_TMPFILE and below is not None:
            return below / NAMELESS
        name = arguments.get("name", arguments.get("of", arguments.get("one")))
        if name is None or isinstance(name, int):
            return self.paths.get(name) if isinstance(name, int) else below
        return Path(name) if below is None else below / name

    def opened(self, name: str, arguments: dict[str, Any], of: Path | None, result: Any) -> None:
        """Remember which descriptor is which file."""
        if name == "open" and of is not None:
            self.paths[result] = of
        elif name == "close":
            self.paths.pop(arguments["fd"], None)


def _routed(name: str) -> Callable[..., Any]:
    plain = getattr(SystemCalls, name)
    signature = inspect.signature(plain)

    def routed(self: Border, *given: Any, **named: Any) -> Any:
        bound = signature.bind(self, *given, **named)
        arguments = {key: value for key, value in bound.arguments.items() if key != "self"}
        of = self.path_of(arguments)

        def go() -> Any:
            if name == "close":  # before the number is given to another file
                self.opened(name, arguments, of, None)
            result = plain(self, *given, **named)
            if name == "open":
                self.opened(name, arguments, of, result)
            return result

        return self.call(name, arguments, of, go)

    return routed


for _name in CALLS:
    setattr(Border, _name, _routed(_name))


class WatchedRing:
    """A `Ring` whose requests pass the border; those that are answered there never reach it."""

    def __init__(self, ring: Ring, border: Border) -> None:
        self.name, self.depth = ring.name, ring.depth
        self.request_bytes = ring.request_bytes
        self._ring, self._border = ring, border
        self._told: list[Outcome] = []
        self._under_way = 0
        self._numbers: dict[int, int] = {}
        self._more = threading.Condition()

    def submit(self, requests: Sequence[Request]) -> int:
        for request in requests:
            self._submit(request)
        return len(requests)

    def reap(self) -> list[Outcome]:
        with self._more:
            self._more.wait_for(lambda: self._told or self._under_way)
            if self._told:
                told, self._told = self._told, []
                return told
        outcomes = self._ring.reap()
        with self._more:
            self._under_way -= len(outcomes)
            numbers = [self._numbers.pop(outcome.key) for outcome in outcomes]
        for number, outcome in zip(numbers, outcomes, strict=True):
            self._border.ended(number, outcome.result)
        return outcomes

    def close(self) -> None:
        self._ring.close()

    def _submit(self, request: Request) -> None:
        """`go()` takes how many bytes are to be moved, by default all, and starts the request."""
        started = False

        def go(nbytes: int | None = None) -> None:
            nonlocal started
            started = True
            asked = request if nbytes is None else request._replace(nbytes=nbytes)
            with self._more:
                self._under_way += 1
            while True:
                try:
                    if self._ring.submit([asked]):
                        break
                except OSError as error:
                    if error.errno != errno.EAGAIN:
                        with self._more:
                            self._under_way -= 1
                        raise
            with self._more:
                self._more.notify_all()

        path = self._border.paths.get(request.fd)
        name = "ring_write" if request.write else "ring_read"
        arguments = {
            "fd": request.fd,
            "offset": request.offset,
            "nbytes": request.nbytes,
            "address": request.address,
        }
        try:
            told = partial(self._numbers.__setitem__, request.key)
            result = self._border.call(name, arguments, path, go, told)
        except OSError as error:
            result = -(error.errno or errno.EIO)
        if not started:
            assert isinstance(result, int), "a request that is not made has an outcome"
            with self._more:
                self._told.append(Outcome(request.key, result))
                self._more.notify_all()


def offloaded(model: nn.Module, system: SystemCalls, **fields: Any) -> nn.Module:
    """As `zcompile.offload`, with all calls on files made by `system`."""
    config = build(None, fields, "zcompile.offload")
    return move_in(open_session(config, partial(open_resources, system=system)), model)
