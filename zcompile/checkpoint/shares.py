"""Writes one checkpoint from all ranks: each writes the pages that are for it (`pages.py`), where
they belong, to files that rank 0 has made.

Rank 0 describes the files, makes them in full length in a new directory, and tells the others where
what they share stands. All write and sync. Once all have, rank 0 writes what says that it is a
checkpoint, and puts the directory in its place. What ranks do not share, such as tensors of
`extra`, may differ from rank to rank: those of rank 0 are saved.

Whatever fails on one rank is known to all when they meet next (`together.py`), raises on all of
them, and leaves what stood there before; the run can go on. Where a rank does not see the new
directory, because its machine has a filesystem of its own under that path, rank 0 writes all, and
gathers for that, tensor by tensor, as it does with those whose shares are no ranges of a file: not
row-major. That comes last, when all else is written, since whoever fails to read in the middle of a
gather ends the session of all ranks.
"""

import json
import logging
import os
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from zcompile.checkpoint.block_files import BlockWriter
from zcompile.checkpoint.directory import Made
from zcompile.checkpoint.pages import SharedRow, Stretch, stretches_of
from zcompile.checkpoint.safetensors import PAGE_BYTES, Shard
from zcompile.checkpoint.stream import (
    Memory,
    NewFile,
    Part,
    ReportBytes,
    Source,
    is_shared,
    parts_of,
    share_of,
)
from zcompile.checkpoint.together import BLIND, WELL, Together
from zcompile.errors import Unsupported, ZinfError
from zcompile.runtime.eager.tensor import TieredTensor
from zcompile.runtime.io.files import close_or_warn
from zcompile.runtime.io.system_calls import SystemCalls
from zcompile.runtime.ranks.fabric import Fabric, told_to_ranks
from zcompile.runtime.tiers.base import FileRange
from zcompile.runtime.transfer.interrupts import deferred_interrupts, uninterrupted
from zcompile.runtime.transfer.ticket import Ticket

_END = 1 << 63
"""Beyond all files."""

logger = logging.getLogger("zcompile.checkpoint.shares")


class Where(NamedTuple):
    """Where a state stands of which ranks have shares, and what it is.

    begin, end  bytes of the file
    ranged      whether shares are ranges of these bytes; else rank 0 gathers it
    entry       name of the bytes that ranks hold shares of
    seen        kind, dtype, size and layout of what is saved of them, for people too
    model       number of the model, among those that the same ranks have offloaded
    """

    state: str
    file: str
    begin: int
    end: int
    ranged: bool
    entry: str
    seen: str
    model: int


@dataclass(frozen=True)
class Plan:
    """What rank 0 tells the others of the files.

    folder  name of the new directory, beside the checkpoint
    mark    name of a file in it, which no other directory has
    nbytes  of each file
    places  of what ranks share, in the order of the files
    """

    folder: str
    mark: str
    nbytes: Mapping[str, int]
    places: Sequence[Where]

    def packed(self) -> bytes:
        return json.dumps(vars(self)).encode()

    @classmethod
    def unpacked(cls, told: bytes) -> "Plan":
        fields: dict[str, Any] = json.loads(told)
        places = [Where(*place) for place in fields.pop("places")]
        return cls(places=places, **fields)

    def gathered(self, all_of_it: bool) -> list[Where]:
        """What rank 0 gathers, in its order: all ranks work by this list, and nothing that has no
        bytes is in it."""
        return [
            place
            for place in self.places
            if place.begin < place.end and (all_of_it or not place.ranged)
        ]


def plan_of(shards: Sequence[Shard], folder: str, mark: str) -> Plan:
    """What is to be written, by whom."""
    places = [
        Where(
            shard.prefix + name,
            shard.file,
            row.begin,
            row.end,
            share_of(tensor) is not None,
            tensor.entry.name,
            _seen_as(tensor),
            _model_of(tensor),
        )
        for shard in shards
        for name, row in shard.header.rows.items()
        if is_shared(tensor := shard.tensors[name])
    ]
    return Plan(folder, mark, {s.file: s.header.nbytes for s in shards}, places)


def _seen_as(tensor: TieredTensor) -> str:
    """What a tensor shows of its entry: the same on two ranks for the same tensor alone."""
    entry, layout = tensor.entry, tensor.entry_layout
    dtype = str(layout.dtype).removeprefix("torch.")
    text = f"{entry.kind.value} {dtype}{list(layout.size)}, strides {list(layout.stride)}"
    if layout.offset:
        text += f" from element {layout.offset} on"
    text += ", conjugate" if layout.conj else ""
    text += ", negative" if layout.neg else ""
    if entry.partition is not None and entry.partition.owner is not None:
        text += f", with rank {entry.partition.owner}"
    return f"{text}, of {entry.whole_bytes} bytes"


def _model_of(tensor: TieredTensor) -> int:
    """Which of the models that the same ranks have offloaded a tensor is of: two of one class name
    their entries alike."""
    fabric = tensor.entry.store.fabric
    assert fabric is not None, "ranks hold shares of it"
    return fabric.number


def check_held_alike(fabric: Fabric, tensors: Mapping[str, Tensor]) -> None:
    """Refuse shared tensors that other ranks hold otherwise than those of the model that is saved.

    raises  Unsupported
    """
    for name, tensor in tensors.items():
        held = tensor.entry.store.fabric if is_shared(tensor) else None
        if held is not None and (held.ranks, held.mesh) != (fabric.ranks, fabric.mesh):
            raise Unsupported(
                f"{name!r} is of a model whose mesh has {_mesh_of(held)}, and the model that is "
                f"saved has {_mesh_of(fabric)}",
                "save that model by itself, or give its values as plain tensors, as .cpu() on all "
                "ranks of its mesh makes them",
            )


def _mesh_of(fabric: Fabric) -> str:
    """For people: the mesh of a model."""
    told = f"the ranks {list(fabric.ranks)} of the world"
    return told if fabric.mesh.replicas == 1 else f"{told} as {fabric.mesh}"


def make_files(shards: Sequence[Shard], made: Made, mark: str, system: SystemCalls) -> None:
    """Make the files, with the room that they take, and the mark.

    raises  IOFault, OSError
    """
    for shard in shards:
        with deferred_interrupts():
            nbytes = shard.header.nbytes
            file = BlockWriter(made.path / shard.file, made.fd, nbytes, system)
            try:
                file.reserve(nbytes)
            finally:
                file.close()
    _touch(mark, made.fd, system)


@uninterrupted
def _touch(name: str, folder: int, system: SystemCalls) -> None:
    system.close(system.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, dir_fd=folder))


class Own(NamedTuple):
    """What this rank has of a save: its shares, and the rest on rank 0.

    shared  states of which ranks have shares
    shards  the files, on rank 0
    """

    shared: Mapping[str, TieredTensor]
    shards: Sequence[Shard]


def write_own(
    together: Together,
    plan: Plan,
    made: Made | None,
    own: Own,
    system: SystemCalls,
    told: Callable[[int], ReportBytes],
) -> None:
    """Write what this rank has to write, and sync; all ranks call it at once.

    made    the new directory, on rank 0
    told    is given the number of bytes, and returns who is told of them
    raises  CheckpointUnwritable on every rank if one fails; RankFailed, RanksDiffer, IOFault
    """
    _check_same(plan, own.shared, together.fabric)
    with ExitStack() as opened:
        folder = made
        if folder is None and (folder := _seen(together.path, plan, system)) is not None:
            opened.callback(close_or_warn, folder.path, partial(system.close, folder.fd))
        divided = _Divided(plan, own, together.fabric)
        blind = together.meet(WELL if folder is not None else BLIND)
        if blind:
            divided.leave_to_first(own.shards)
        else:
            divided.exchange()
        if made is not None:
            system.unlink(plan.mark, dir_fd=made.fd)
            if blind:
                _warn(together, blind)
        report = told(divided.nbytes)
        gathered = plan.gathered(all_of_it=bool(blind))
        files = _Files(plan, folder, system, report)
        files.write(_without(divided.of_files, gathered))
        if gathered:
            together.meet()  # all else is written: what fails from here on is seldom a disk
            _gather(together.fabric, gathered, own, files, divided.of_files)
    together.meet()


class _Files(NamedTuple):
    """The new files. folder: that they lie in; None: this rank does not see it, nor writes."""

    plan: Plan
    folder: Made | None
    system: SystemCalls
    report: ReportBytes

    def write(self, of_files: Mapping[str, Sequence[Part]]) -> None:
        """Write parts of files, sync and close them; it is with them that the disk has them.

        raises  IOFault, OSError, and what transfers raise
        """
        with ExitStack() as stack:
            files = []
            for file, parts in of_files.items():
                assert self.folder is not None, "who is blind writes nothing"
                with deferred_interrupts():  # one after it was opened would leave it open
                    to, nbytes = self.folder.path / file, self.plan.nbytes[file]
                    files.append(NewFile(to, self.folder.fd, parts, nbytes, self.system, made=True))
                    stack.callback(files[-1].close)
            for new in files:
                new.stream(self.report)


def _gather(
    fabric: Fabric,
    gathered: Sequence[Where],
    own: Own,
    files: _Files,
    of_files: Mapping[str, Sequence[Part]],
) -> None:
    """Bring together what rank 0 alone can write, tensor by tensor; it writes the pages of that.

    A failure to write can be told at the next meeting, since rank 0 goes on to gather. One to read
    ends the session of all ranks: they wait in the middle of a gather.

    of_files  all that rank 0 writes
    """
    due = {place.state: own.shared[place.state] for place in gathered}
    if fabric.rank > 0:
        with told_to_ranks(fabric):
            for tensor in due.values():
                tensor.entry.store.read_all(tensor.entry)
        return
    at = {(place.file, place.begin): place.state for place in gathered}

    def wrapped(file: str, part: Part) -> Part:
        state = at.get((file, part.begin))
        if state is None:
            return part
        return part._replace(source=_Gathered(part.source, fabric, partial(due.pop, state, None)))

    pages = _pages_of(gathered)
    later = {
        file: [
            wrapped(file, part) for low, high in pages[file] for part in _between(parts, low, high)
        ]
        for file, parts in of_files.items()
        if file in pages
    }
    try:
        files.write(later)
    except (ZinfError, OSError):
        with suppress(ZinfError):  # the session has ended, if it was a gather that failed
            for tensor in due.values():
                tensor.entry.store.read_all(tensor.entry)
        raise


class _Gathered:
    """A tensor that all ranks bring together, as a source: a failure to read it is told to them.

    begun  is called when the ranks have been met in it
    """

    def __init__(self, source: Source, fabric: Fabric, begun: Callable[[], object]) -> None:
        self._source, self._fabric, self._begun = source, fabric, begun

    def read(self, begin: int, into: Tensor) -> Sequence[Ticket]:
        with told_to_ranks(self._fabric):
            self._begun()
            return self._source.read(begin, into)

    def file_ranges(self, begin: int, end: int) -> Sequence[FileRange]:
        return ()


def _pages_of(gathered: Sequence[Where]) -> dict[str, list[tuple[int, int]]]:
    """The pages [begin, end), in bytes, that hold any of what is gathered, by file; in order."""
    found: dict[str, list[tuple[int, int]]] = {}
    for place in gathered:
        low = place.begin // PAGE_BYTES * PAGE_BYTES
        high = -(-place.end // PAGE_BYTES) * PAGE_BYTES
        ranges = found.setdefault(place.file, [])
        if ranges and low <= ranges[-1][1]:
            low = ranges.pop()[0]
        ranges.append((low, high))
    return found


def _without(
    of_files: Mapping[str, Sequence[Part]], gathered: Sequence[Where]
) -> dict[str, list[Part]]:
    """The parts that lie in no page with anything that is gathered; files with any."""
    pages, found = _pages_of(gathered), {}
    for file, parts in of_files.items():
        left: list[Part] = []
        at = 0
        for low, high in (*pages.get(file, ()), (_END, _END)):
            left += _between(parts, at, low)
            at = high
        if left:
            found[file] = left
    return found


class _Divided:
    """The parts of each file that this rank writes.

    of_files  by name, those with any
    """

    def __init__(self, plan: Plan, own: Own, fabric: Fabric) -> None:
        self._fabric = fabric
        self.of_files: dict[str, list[Part]] = {}
        self._stretches: dict[str, list[Stretch]] = {}
        self._held: dict[str, list[Part]] = {}
        shards = {shard.file: shard for shard in own.shards}
        for file, nbytes in plan.nbytes.items():
            rows, held = [], []
            for place in plan.places:
                if place.file != file or not place.ranged:
                    continue
                tensor = own.shared[place.state]
                part = tensor.entry.partition
                assert part is not None, "ranks share it"
                row = SharedRow(place.begin, part.numel, tensor.dtype.itemsize, part.owner)
                rows.append(row)
                source, (begin, end) = share_of(tensor), row.of_rank(part.rank, part.ranks)
                assert source is not None, "it is one on rank 0"
                if begin < end:
                    held.append(Part(begin, end, place.state, source))
            if file in shards:
                held += _others(shards[file])
            # All groups hold the same, of which the ranks of the first one write.
            self._stretches[file] = stretches_of(nbytes, rows, fabric.mesh.shards)
            self._held[file] = sorted(held, key=_begin)
        self._sends = self._read_for_others()

    @property
    def nbytes(self) -> int:
        """Bytes that this rank writes."""
        return sum(part.nbytes for parts in self.of_files.values() for part in parts)

    def leave_to_first(self, shards: Sequence[Shard]) -> None:
        """Rank 0 writes all of it."""
        self.of_files = {shard.file: parts_of(*shard.content) for shard in shards}

    def exchange(self) -> None:
        """Send bytes that others write, and receive those that this rank writes."""
        receives = {
            rank: torch.empty(nbytes, dtype=torch.uint8) for rank, nbytes in self._foreign().items()
        }
        self._fabric.deliver("save what lies in pages of others", self._sends, receives)
        taken = dict.fromkeys(receives, 0)
        for file, stretches in self._stretches.items():
            parts: list[Part] = []
            for begin, end, holder, writer in stretches:
                if writer != self._fabric.rank:
                    continue
                if holder == writer:
                    parts += _between(self._held[file], begin, end)
                    continue
                at = taken[holder]
                taken[holder] = at + end - begin
                sent = Memory(receives[holder][at : taken[holder]])
                parts.append(Part(begin, end, f"a part of rank {holder}", sent))
            if parts:
                self.of_files[file] = parts

    def _foreign(self) -> dict[int, int]:
        """Bytes that this rank writes for others, by rank."""
        found: dict[int, int] = {}
        for stretches in self._stretches.values():
            for begin, end, holder, writer in stretches:
                if writer == self._fabric.rank != holder:
                    found[holder] = found.get(holder, 0) + end - begin
        return found

    def _read_for_others(self) -> dict[int, Tensor]:
        """What this rank holds and others write, by the rank that does: uint8 [n] each."""
        found: dict[int, list[Tensor]] = {}
        tickets: list[Ticket] = []
        for file, stretches in self._stretches.items():
            for begin, end, holder, writer in stretches:
                if holder != self._fabric.rank or writer == holder:
                    continue
                for part in _between(self._held[file], begin, end):
                    into = torch.empty(part.nbytes, dtype=torch.uint8)
                    tickets += part.source.read(part.skip, into)
                    found.setdefault(writer, []).append(into)
        for ticket in tickets:
            ticket.wait()
        return {rank: torch.cat(pieces) for rank, pieces in found.items()}


def _begin(part: Part) -> int:
    return part.begin


def _others(shard: Shard) -> list[Part]:
    """The parts of a file that rank 0 has alone."""
    parts = parts_of(*shard.content)
    return [
        part
        for part in parts
        if part.nbytes and (part.begin == 0 or share_of(shard.tensors[part.name]) is None)
    ]


def _between(held: Sequence[Part], begin: int, end: int) -> Iterator[Part]:
    """Bytes [begin, end) of a file, of parts that are here, in order: all of them."""
    for part in held[max(0, bisect_right(held, begin, key=_begin) - 1) :]:
        if part.begin >= end:
            return
        low, high = max(part.begin, begin), min(part.end, end)
        if low < high:
            yield Part(low, high, part.name, part.source, part.skip + low - part.begin)


def _check_same(plan: Plan, shared: Mapping[str, TieredTensor], fabric: Fabric) -> None:
    """raises  Unsupported, where the ranks save other tensors"""
    todo = "give zcompile.save the same model, optimizer and shared tensors on every rank"
    first = {place.state: place for place in plan.places}
    if odd := sorted(first.keys() ^ set(shared)):
        have, lack = (0, fabric.rank) if odd[0] in first else (fabric.rank, 0)
        raise Unsupported(
            f"rank {have} saves {odd[0]!r}, of which all ranks hold shares, and rank {lack} does "
            "not",
            todo,
        )
    for name, place in first.items():
        tensor = shared[name]
        told = [f"{place.entry!r} ({place.seen})", f"{tensor.entry.name!r} ({_seen_as(tensor)})"]
        if told[0] != told[1]:
            raise Unsupported(
                f"as {name!r} rank 0 saves {told[0]}, and rank {fabric.rank} {told[1]}: the ranks "
                "hold shares of it, and what they write would be of both",
                todo,
            )
        if place.model != _model_of(tensor):
            raise Unsupported(
                f"as {name!r} rank 0 saves {place.entry!r} of one model, and rank {fabric.rank} "
                "that of another: the ranks hold shares of it, and they would write both",
                todo,
            )


def _seen(path: Path, plan: Plan, system: SystemCalls) -> Made | None:
    """The directory that rank 0 has made, open; None, if this rank sees another filesystem.

    raises  OSError
    """
    folder = Path(os.path.realpath(path)).with_name(plan.folder)
    with deferred_interrupts():
        try:
            fd = system.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        except (FileNotFoundError, NotADirectoryError):
            return None
        try:
            system.stat(plan.mark, dir_fd=fd)
        except FileNotFoundError:
            system.close(fd)
            return None
        except BaseException:
            system.close(fd)
            raise
    return Made(folder, fd)


def _warn(together: Together, blind: Sequence[int]) -> None:
    """Say that rank 0 writes all, and what that means."""
    fabric = together.fabric
    who = ", ".join(f"rank {rank} on {fabric.hosts[rank]}" for rank in blind)
    logger.warning(
        "%s, as rank 0 on %s sees it, is not seen by %s: rank 0 writes all of the checkpoint, "
        "tensor by tensor. Save to a directory that all machines share, so that each rank writes "
        "its part; or copy this one to the same path of each machine before zcompile.resume",
        together.path,
        fabric.hosts[0],
        who,
    )
