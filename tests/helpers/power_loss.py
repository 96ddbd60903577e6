"""What a power loss leaves on a disk: recorded at the border to the kernel, and replayed.

`Recording` notes what a program does to files below one directory, and when it says that something
is safe. `crashes` tells, for each instant of it, what a disk may hold then, by this model:

- What is written to a file is on the disk for certain once an `fsync` or `fdatasync` of that file,
  which began after the write had ended, has ended. Until then it may be there or not, each write
  by itself, in any order; in whole sectors of 512 bytes, or of 4096, any of which may be there.
- Its size is kept with the data, and may have grown without them; what was not written is zeros.
- `O_DIRECT` passes the cache of this machine, not that of the disk: such a write needs the sync as
  well. (`O_DSYNC`, a sync in each write, is used nowhere.)
- To create, rename, exchange or remove a name changes a directory, which is on the disk for certain
  once an `fsync` of that directory has ended which began after it. `fsync` of a file does not bring
  its name along. Until then changes of names are there up to some moment, in the order in which
  they were made, as with the journals of ext4 and xfs ("ordered"); or, which no journal does and
  POSIX does not forbid, in any subset ("weak").
- One change of names is there or not: `rename` replaces its target at once, `exchange` swaps two.
- A name may be on the disk before what is in its file.
- What was never changed stays as it was.
"""

import ctypes
import itertools
import os
import random
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from border import Border, Call

SECTORS = (512, 4096)
IGNORED = "zinf-trial-"
"""Files that are tried on and removed; nobody looks for them."""


class Node:
    """A file or a directory, whatever it is called."""

    def __init__(self, is_directory: bool) -> None:
        self.is_directory = is_directory
        self.names: dict[str, Node] = {}
        """Now, as the program sees it; of a directory."""


@dataclass(eq=False)
class Event:
    """at     its place in the recording
    done      the place by which it had ended, far away while it has not
    what      "write", "size", "names", "sync" or "said"
    node      the file or directory
    offset, data   what is written where; of "size", the size
    names     of a directory, what changes: name -> node, or None where the name goes
    began     of a sync: the place where it began; what ended before is on the disk
    call      of the border, for people
    """

    at: int
    what: str
    node: Node | None = None
    done: int = 1 << 60
    offset: int = 0
    data: bytes = b""
    names: dict[str, Node | None] = field(default_factory=dict)
    began: int = 0
    said: Any = None
    call: str = ""


Mutate = Callable[[Call, Callable[[], Any]], Any]


class Recording:
    """What goes on below `base`, which is empty when it begins.

    mutate  as `Border.around`, before a call is made and noted
    """

    def __init__(self, base: Path, mutate: Mutate = lambda call, go: go()) -> None:
        self.base = base
        self.root = Node(True)
        self.events: list[Event] = []
        self.border = Border(
            lambda call, go: mutate(call, lambda: self._noted(call, go)), self._ended
        )
        self._fds: dict[int, Node] = {}
        self._writes: dict[int, Event] = {}
        self._lock = threading.RLock()

    def say(self, what: Any) -> None:
        """The program tells its user that something is safe."""
        self._note("said", None, said=what)

    def _note(self, what: str, node: Node | None, **facts: Any) -> Event:
        with self._lock:
            event = Event(len(self.events), what, node, **facts)
            self.events.append(event)
            return event

    def _noted(self, call: Call, go: Callable[[], Any]) -> Any:
        handler = getattr(self, f"_{call.name}", None)
        return go() if handler is None else handler(call, go, call.arguments)

    def _ended(self, number: int, result: int) -> None:
        with self._lock:
            if (event := self._writes.pop(number, None)) is not None:
                assert result == len(event.data), "the test does not model short writes"
                event.done = len(self.events)

    def _made(self, event: Event, go: Callable[[], Any]) -> Any:
        try:
            result = go()
        except OSError:
            event.what = "failed"
            raise
        event.done = len(self.events)
        return result

    def _find(self, name: str | Path, dir_fd: int | None) -> tuple[Node | None, str]:
        """The directory that a name is in, if it is one of ours, and its last part."""
        if dir_fd is not None:
            return self._fds.get(dir_fd), str(name)
        path = Path(os.path.abspath(name))
        if path == self.base:
            return self.root, ""
        if not path.is_relative_to(self.base):
            return None, path.name
        node = self.root
        for part in path.relative_to(self.base).parts[:-1]:
            if part not in node.names:
                return None, path.name
            node = node.names[part]
        return node, path.name

    def _open(self, call: Call, go: Callable[[], Any], given: dict[str, Any]) -> Any:
        with self._lock:
            inside, name = self._find(given["name"], given.get("dir_fd"))
            fd = go()
            if inside is None or name.startswith(IGNORED):
                return fd
            if name and name not in inside.names:
                if given["flags"] & os.O_CREAT:
                    self._rename_in(inside, {name: Node(False)}, f"create {name}")
                else:
                    return fd  # made by others
            node = inside.names[name] if name else inside
            self._fds[fd] = node
            assert not given["flags"] & os.O_TRUNC, "the test does not model this"
            return fd

    def _close(self, call: Call, go: Callable[[], Any], given: dict[str, Any]) -> Any:
        with self._lock:
            self._fds.pop(given["fd"], None)
        return go()

    def _rename_in(self, inside: Node, names: dict[str, Node | None], call: str) -> None:
        event = self._note("names", inside, names=names, call=call)
        event.done = event.at
        for name, node in names.items():
            if node is None:
                inside.names.pop(name, None)
            else:
                inside.names[name] = node

    def _mkdir(self, call: Call, go: Callable[[], Any], given: dict[str, Any]) -> Any:
        inside, name = self._find(given["name"], given.get("dir_fd"))
        go()
        if inside is not None and name:
            self._rename_in(inside, {name: Node(True)}, f"mkdir {name}")

    def _symlink(self, call: Call, go: Callable[[], Any], given: dict[str, Any]) -> Any:
        raise AssertionError("the test does not model links")

    def _unlink(self, call: Call, go: Callable[[], Any], given: dict[str, Any]) -> Any:
        inside, name = self._find(given["name"], given.get("dir_fd"))
        go()
        if inside is not None and not name.startswith(IGNORED):
            self._rename_in(inside, {name: None}, f"unlink {name}")

    _rmdir = _unlink

    def _rename(self, call: Call, go: Callable[[], Any], given: dict[str, Any]) -> Any:
        inside, name = self._find(given["name"], given.get("dir_fd"))
        there, new = self._find(given["new"], given.get("dir_fd"))
        assert inside is there, "the test does not model moves between directories"
        go()
        if inside is not None:
            self._rename_in(inside, {name: None, new: inside.names[name]}, f"rename {name} {new}")

    def _exchange(self, call: Call, go: Callable[[], Any], given: dict[str, Any]) -> Any:
        inside, one = self._find(given["one"], None)
        there, other = self._find(given["other"], None)
        assert inside is there
        go()
        if inside is not None:
            swapped = {one: inside.names[other], other: inside.names[one]}
            self._rename_in(inside, swapped, f"exchange {one} {other}")

    def _pwrite(self, call: Call, go: Callable[[], Any], given: dict[str, Any]) -> Any:
        node = self._fds.get(given["fd"])
        if node is None:
            return go()
        data = bytes(given["source"])
        event = self._note("write", node, offset=given["offset"], data=data, call="pwrite")
        assert self._made(event, go) == len(data), "the test does not model short writes"
        return len(data)

    def _ring_write(self, call: Call, go: Callable[[], Any], given: dict[str, Any]) -> Any:
        node = self._fds.get(given["fd"])
        if node is not None:
            data = ctypes.string_at(given["address"], given["nbytes"])
            with self._lock:
                event = self._note("write", node, offset=given["offset"], data=data, call=call.name)
                self._writes[call.number] = event
        return go()

    def _punch(self, call: Call, go: Callable[[], Any], given: dict[str, Any]) -> Any:
        """A write of zeros, which adds nothing to the size."""
        node, nbytes = self._fds.get(given["fd"]), given["nbytes"]
        if node is None:
            return go()
        assert given["offset"] + nbytes <= os.fstat(given["fd"]).st_size, "a hole within the file"
        event = self._note("write", node, offset=given["offset"], data=bytes(nbytes), call="punch")
        return self._made(event, go)

    def _truncate(self, call: Call, go: Callable[[], Any], given: dict[str, Any]) -> Any:
        return self._sized(given["fd"], given["nbytes"], "cut", go)

    def _allocate(self, call: Call, go: Callable[[], Any], given: dict[str, Any]) -> Any:
        return self._sized(given["fd"], given["offset"] + given["nbytes"], "size", go)

    def _sized(self, fd: int, size: int, what: str, go: Callable[[], Any]) -> Any:
        node = self._fds.get(fd)
        return go() if node is None else self._made(self._note(what, node, offset=size), go)

    def _fsync(self, call: Call, go: Callable[[], Any], given: dict[str, Any]) -> Any:
        node, began = self._fds.get(given["fd"]), len(self.events)
        go()
        if node is not None:
            self._note("sync", node, began=began, call=f"{call.name} {call.of and call.of.name}")

    _fdatasync = _fsync


@dataclass
class File:
    """What a file holds; `size` may be beyond."""

    content: bytearray = field(default_factory=bytearray)
    size: int = 0

    def apply(
        self, event: Event, sectors: Callable[[int], bool] | None = None, sector: int = 512
    ) -> None:
        """sectors  which of those that the event writes are there; None: all"""
        if event.what == "write":
            end = event.offset + len(event.data)
            self.content.extend(bytes(max(end - len(self.content), 0)))
            for at in range(0, len(event.data), len(event.data) if sectors is None else sector):
                if sectors is None:
                    self.content[event.offset : end] = event.data
                elif sectors(at // sector):
                    part = event.data[at : at + sector]
                    self.content[event.offset + at : event.offset + at + len(part)] = part
            self.size = max(self.size, end)
        elif event.what == "size":
            self.size = max(self.size, event.offset)
        else:
            del self.content[event.offset :]
            self.size = event.offset


Choice = tuple[tuple[int, ...], tuple[tuple[int, str], ...]]
"""Places of the changes of names that are there, and of writes: all, their size, or a tearing."""
TEARINGS: dict[str, tuple[int, Callable[[int], bool]]] = {
    f"{name} of {sector}": (sector, there)
    for sector in SECTORS
    for name, there in (
        ("first", lambda n: n == 0),
        ("rest", lambda n: n > 0),
        ("odd", lambda n: n % 2 == 1),
        ("even", lambda n: n % 2 == 0),
    )
}


@dataclass
class Crash:
    """One state that a disk may be in.

    at      how many events had begun
    choice  of what was not yet certain
    """

    recording: Recording
    at: int
    choice: Choice
    certain: list[Event]

    def tree(self) -> dict[str, File | None]:
        """Path below the base -> what is there; None for a directory."""
        names, writes = set(self.choice[0]), dict(self.choice[1])
        held: dict[int, dict[str, Node]] = {}
        files: dict[int, File] = {}
        sure = {id(event) for event in self.certain}
        for event in self.recording.events[: self.at]:
            if event.what == "names" and (id(event) in sure or event.at in names):
                inside = held.setdefault(id(event.node), {})
                for name, node in event.names.items():
                    if node is None:
                        inside.pop(name, None)
                    else:
                        inside[name] = node
            elif event.what in ("write", "size", "cut"):
                file = files.setdefault(id(event.node), File())
                how = "all" if id(event) in sure else writes.get(event.at)
                if how == "all":
                    file.apply(event)
                elif how == "size":
                    file.apply(event, lambda n: False, 1 << 30)
                elif how is not None:
                    sector, there = TEARINGS[how]
                    file.apply(event, there, sector)
        found: dict[str, File | None] = {}

        def walk(node: Node, below: str) -> None:
            for name, inner in held.get(id(node), {}).items():
                if inner.is_directory:
                    found[below + name] = None
                    walk(inner, f"{below}{name}/")
                else:
                    found[below + name] = files.get(id(inner), File())

        walk(self.recording.root, "")
        return found

    def put(self, base: Path) -> None:
        """Into `base`, which is empty."""
        for name, file in self.tree().items():
            if file is None:
                (base / name).mkdir()
                continue
            with (base / name).open("wb") as to:
                to.write(file.content)
                to.truncate(file.size)

    def said(self) -> list[Any]:
        """What the program had told its user by then."""
        return [e.said for e in self.recording.events[: self.at] if e.what == "said"]

    def __str__(self) -> str:
        events = self.recording.events
        last = [
            f"{e.at} {e.what} {e.call} {e.said or ''}"
            for e in events[max(0, self.at - 6) : self.at]
        ]
        return f"after event {self.at} ({'; '.join(last)}), with {self.choice}"


def crashes(recording: Recording, weak: bool, seed: int, most: int) -> Iterator[Crash]:
    """At every instant, what a disk may hold: all that can be, where that is at most `most`, or
    else nothing, everything, each alone, all but each, and some by chance."""
    chance = random.Random(seed)
    events = recording.events
    for at in range(len(events) + 1):
        before = events[:at]
        certain = _certain(before, at)
        sure = {id(event) for event in certain}
        names = [e.at for e in before if e.what == "names" and id(e) not in sure]
        writes = [e.at for e in before if e.what in ("write", "size", "cut") and id(e) not in sure]
        if at and not names and not writes and before[-1].what != "said":
            continue  # as it was before the last event, or a sync later
        of_names = list(_prefixes(names))
        if weak:
            of_names = list(dict.fromkeys([*of_names, *_subsets(names, most, chance)]))
        of_writes = list(_ways(writes, events, most, chance))
        pairs = list(itertools.product(of_names, of_writes))
        if len(pairs) > most:
            corners = [(n, w) for n in (of_names[0], of_names[-1]) for w in of_writes]
            corners += [(n, w) for n in of_names for w in (of_writes[0], of_writes[-1])]
            pairs = [*chance.sample(corners, min(len(corners), most)), *chance.sample(pairs, most)]
        for pair in dict.fromkeys(pairs):
            yield Crash(recording, at, pair, certain)


def _certain(before: Sequence[Event], at: int) -> list[Event]:
    """What a sync has brought to the disk."""
    began: dict[int, int] = {}
    for event in before:
        if event.what == "sync":
            began[id(event.node)] = max(began.get(id(event.node), 0), event.began)
    return [
        e
        for e in before
        if e.what in ("names", "write", "size", "cut")
        and e.at < began.get(id(e.node), -1)
        and e.done <= began[id(e.node)]
    ]


def _prefixes(items: Sequence[int]) -> Iterator[tuple[int, ...]]:
    for count in range(len(items) + 1):
        yield tuple(items[:count])


def _subsets(items: Sequence[int], most: int, chance: random.Random) -> Iterator[tuple[int, ...]]:
    if 1 << len(items) <= most:
        for count in range(len(items) + 1):
            yield from itertools.combinations(items, count)
        return
    yield ()
    yield tuple(items)
    for item in items:
        yield (item,)
        yield tuple(other for other in items if other != item)
    for _ in range(8):
        yield tuple(item for item in items if chance.random() < 0.5)


def _ways(
    writes: Sequence[int], events: Sequence[Event], most: int, chance: random.Random
) -> Iterator[tuple[tuple[int, str], ...]]:
    """Which writes are there, and how: whole or not in every subset, one torn or one only grown."""
    for subset in _subsets(writes, most, chance):
        yield tuple((item, "all") for item in subset)
    for torn in writes:
        if events[torn].what != "write":
            continue
        for how in ("size", *TEARINGS):
            rest = tuple((item, "all") for item in writes if item != torn)
            yield tuple(sorted((*rest, (torn, how))))
            yield ((torn, how),)
