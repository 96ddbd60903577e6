"""Defines steps.jsonl: what a run says of its steps while it goes, for `zinf watch`.

    DIR/run-<n>/steps.jsonl    lines, appended one by one

Each line is a JSON object with one key, which names its record: {"stepped": {...}}. The first is
`Begun`; `Planned` says what is predicted from there on, `Stepped` what happened since the line
before, and `Ended` comes last, where the process could say so. Of a long run only the first line
and the newest are kept. Times are Unix seconds. A reader ignores keys it does not know, and reads
only its own `FORMAT`.
"""

import json
import os
import socket
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

from zcompile.errors import RunUnreadable
from zcompile.ir.serialize import decode, plain

FORMAT = 1
KEPT = 512
"""Lines that a reader remembers."""


@dataclass(frozen=True)
class Process:
    """Names a process.

    born   clock ticks between the machine's start and the process's: tells it from a later one with
           the same pid
    where  the host and the namespace of pids in which `pid` means this process
    """

    pid: int
    born: int
    where: str


@dataclass(frozen=True)
class Begun:
    """The first line: who writes.

    model   class of the model
    device  "cuda:0"; "cpu" where the device is emulated
    """

    name: ClassVar[str] = "begun"
    format: int
    zcompile: str
    model: str
    device: str
    process: Process
    time: float


@dataclass(frozen=True)
class Capacity:
    """Bytes per second that a link can carry. shares: the link that takes turns with it."""

    bytes_per_s: float
    shares: str | None = None


@dataclass(frozen=True)
class Planned:
    """What is in force from here on.

    number   of the plan, from 1; 0 without one
    why      no plan of a whole step is in force; "" where one is
    step_s   predicted seconds of a step; None without a plan
    binding  phase -> compute, or the link that binds it
    links    by name; empty as long as they are not known
    budgets  bytes of each tier that is there
    """

    name: ClassVar[str] = "planned"
    number: int
    why: str
    step_s: float | None
    binding: Mapping[str, str]
    links: Mapping[str, Capacity]
    budgets: Mapping[str, int]


@dataclass(frozen=True)
class Stepped:
    """What happened since the line before.

    step     number of the step that ended last, from 1
    count    steps that have ended since the line before
    seconds  that they took, each from its first call to that of the next step; None for the first
             step of a run, whose beginning nobody saw
    compute_s, stall_s, optimizer_s  seconds, of the device's clock
    nbytes   bytes that have arrived over each link
    busy_s   seconds in which a link was in use; a link that cannot tell is left out
    used     bytes of each tier by now
    peak     the most bytes of each tier since the beginning, or since the user reset that
    """

    name: ClassVar[str] = "stepped"
    step: int
    count: int
    time: float
    seconds: float | None
    compute_s: float
    stall_s: float
    optimizer_s: float
    nbytes: Mapping[str, int]
    busy_s: Mapping[str, float]
    used: Mapping[str, int]
    peak: Mapping[str, int]


@dataclass(frozen=True)
class Ended:
    """The last line. step: number of the last step; why: the error that ended the process, if one
    did."""

    name: ClassVar[str] = "ended"
    step: int
    time: float
    why: str = ""


Record = Begun | Planned | Stepped | Ended
_KINDS: Mapping[str, type[Record]] = {kind.name: kind for kind in (Begun, Planned, Stepped, Ended)}
_STEPPED = b'{"stepped"'


def log_file(run: Path) -> Path:
    return run / "steps.jsonl"


def line(record: Record) -> bytes:
    """A record as a line, with its newline."""
    text = json.dumps({record.name: plain(record)}, separators=(",", ":"), allow_nan=False)
    return text.encode() + b"\n"


def read_line(text: bytes) -> Record | None:
    """The record of a line; None of one that a later version has added.

    raises  ValueError, which says what is wrong
    """
    value = json.loads(text)
    if not isinstance(value, dict) or len(value) != 1:
        raise ValueError("a line should be an object with one key")
    ((name, told),) = value.items()
    if name == Begun.name and isinstance(told, dict) and told.get("format") != FORMAT:
        version = told.get("zcompile", "of another version")
        raise ValueError(
            f"it is of format {told.get('format')!r}, and this zcompile reads {FORMAT}: use the "
            f"zinf of zcompile {version}"
        )
    return decode(_KINDS[name], told, name) if name in _KINDS else None


# --- Who writes ---


def this_process() -> Process:
    pid = os.getpid()
    return Process(pid, _born(pid) or 0, _namespace())


def is_alive(process: Process) -> bool | None:
    """Whether a process lives; None if it cannot be known here: it is of another machine."""
    if process.where != _namespace():
        return None
    born = _born(process.pid)
    return born is not None and born == process.born


def _namespace() -> str:
    with suppress(OSError):
        return f"{socket.gethostname()} {os.readlink('/proc/self/ns/pid')}"
    return socket.gethostname()


def _born(pid: int) -> int | None:
    """Field 22 of /proc/<pid>/stat, after the name in brackets, which may hold anything; None of a
    process that is not there, or has ended and waits for its parent to notice."""
    try:
        told = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    except OSError:
        return None
    return None if told[0] in (b"Z", b"X") else int(told[19])


# --- Reading ---


@dataclass
class StepLog:
    """The log of one run, as far as it was read.

    steps   the newest, oldest first
    recent  of them came after `planned.number` changed
    """

    run: Path
    begun: Begun | None = None
    planned: Planned | None = None
    ended: Ended | None = None
    steps: deque[Stepped] = field(default_factory=lambda: deque(maxlen=KEPT))
    recent: int = 0
    _offset: int = 0
    _file: int = 0

    def read(self) -> None:
        """Read what was added since the last call; a last line without an end is left for the next.

        raises  RunUnreadable; not where there is no log yet
        """
        path = log_file(self.run)
        try:
            with path.open("rb") as log:
                told = os.fstat(log.fileno())
                if told.st_ino != self._file or told.st_size < self._offset:
                    self._begin_again(told.st_ino)
                log.seek(self._offset)
                text = log.read()
        except FileNotFoundError:
            return
        except OSError as error:
            raise RunUnreadable(path, f"cannot be read: {error.strerror}") from error
        whole = text[: text.rfind(b"\n") + 1]
        self._offset += len(whole)
        rows = whole.splitlines()
        for number, row in enumerate(rows):
            if number < len(rows) - 2 * KEPT and row.startswith(_STEPPED):
                continue  # forgotten anyway
            try:
                self._take(read_line(row))
            except ValueError as error:
                raise RunUnreadable(path, f"is not what a run writes: {error}") from error

    def _begin_again(self, file: int) -> None:
        """The file is another one, or was cut: as its writer does when it drops old lines."""
        self._file, self._offset = file, 0
        self.begun = self.planned = self.ended = None
        self.steps.clear()
        self.recent = 0

    def _take(self, record: Record | None) -> None:
        match record:
            case Begun():
                self.begun = record
            case None:
                return
            case _ if self.begun is None:
                raise ValueError("its first line is missing, which says who writes")
            case Planned():
                if self.planned is None or record.number != self.planned.number:
                    self.recent = 0
                self.planned = record
            case Stepped():
                self.steps.append(record)
                self.recent = min(self.recent + 1, KEPT)
            case Ended():
                self.ended = record
