"""Writes one checkpoint from all ranks: each writes the pages that are for it (`pages.py`), where
they belong, to files that rank 0 has made.

Rank 0 describes the files, makes them in full length in a new directory, and tells the others where
what they share stands. All write and sync. Once all have, rank 0 writes what says that it is a
checkpoint, and puts the directory in its place. What ranks do not share, such as tensors of
`extra`, may differ from rank to rank: those of rank 0 are saved.

Whatever fails on one rank is known to all when they meet next, raises on all of them, and leaves
what stood there before; the run can go on. Where a rank does not see the new directory, because its
machine has a filesystem of its own under that path, rank 0 writes all, and gathers for that, tensor
by tensor, as it does with those whose shares are no ranges of a file: not row-major.
"""

import errno
import json
import logging
import os
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from zcompile.checkpoint.block_files import BlockWriter
from zcompile.checkpoint.directory import Made
from zcompile.checkpoint.pages import SharedRow, Stretch, stretches_of
from zcompile.checkpoint.safetensors import Shard
from zcompile.checkpoint.stream import (
    Memory,
    NewFile,
    Part,
    ReportBytes,
    is_shared,
    parts_of,
    share_of,
)
from zcompile.errors import (
    CheckpointUnwritable,
    RankFailed,
    RanksDiffer,
    Unsupported,
    ZinfError,
)
from zcompile.runtime.eager.tensor import TieredTensor
from zcompile.runtime.io.system_calls import SystemCalls
from zcompile.runtime.ranks.fabric import DIGEST_BYTES, Fabric
from zcompile.runtime.transfer.interrupts import deferred_interrupts, uninterrupted
from zcompile.runtime.transfer.ticket import Ticket

SAVING = "save"
WELL, BLIND, FAILED = (bytes([n]) + bytes(DIGEST_BYTES - 1) for n in range(3))
"""What a rank says where ranks meet; BLIND: it does not see the directory."""

logger = logging.getLogger("zcompile.checkpoint.shares")


class Together:
    """Where the ranks of one save meet, and what each says there.

    gathers  whether some tensors are brought together on the way, so that who waits may wait for
             that: then a failure ends the session of all ranks, as one in the middle of a step does
    """

    def __init__(self, fabric: Fabric, path: Path) -> None:
        self.fabric, self.path = fabric, path
        self.gathers = False
        self._ended = False

    def meet(self, says: bytes = WELL) -> list[int]:
        """Wait until all ranks have come here; returns the ranks that are blind.

        raises  CheckpointUnwritable, if a rank has failed; RanksDiffer, RankFailed
        """
        told = self._tell(says, str(self.path))
        for rank, (said, text) in enumerate(told):
            if said == FAILED:
                self._ended = True
                raise CheckpointUnwritable(
                    errno.EIO,
                    self.path,
                    f"rank {rank} on {self.fabric.hosts[rank]} could not do its part: {text}",
                    "mend that, and save again: what stood there stands, and the run can go on",
                )
        return [rank for rank, (said, _) in enumerate(told) if said == BLIND]

    @contextmanager
    def telling(self) -> Iterator[None]:
        """A context in which this rank does its part: where it fails, all ranks are told."""
        try:
            yield
        except (RankFailed, RanksDiffer):
            raise
        except (ZinfError, OSError) as error:
            if self._ended:
                raise
            if self.gathers:
                self.fabric.failed_here(error)
                raise
            self._ended = True
            with suppress(RankFailed, RanksDiffer):
                self._tell(FAILED, f"{type(error).__name__}: {error}")
            raise
        except BaseException as error:
            self.fabric.failed_here(error)
            raise

    def _tell(self, says: bytes, text: str) -> list[tuple[bytes, str]]:
        return self.fabric.tell(SAVING, says, str(self.path), text=text)


class Place(NamedTuple):
    """Where a state stands of which ranks have shares.

    begin   the byte of the file at which it begins
    ranged  whether shares are ranges of its bytes there; else rank 0 gathers it
    """

    state: str
    file: str
    begin: int
    ranged: bool


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
    places: Sequence[Place]

    def packed(self) -> bytes:
        return json.dumps(vars(self)).encode()

    @classmethod
    def unpacked(cls, told: bytes) -> "Plan":
        fields: dict[str, Any] = json.loads(told)
        places = [Place(*place) for place in fields.pop("places")]
        return cls(places=places, **fields)

    def gathered(self, all_of_it: bool) -> list[str]:
        """The states that rank 0 gathers, in its order."""
        return [place.state for place in self.places if all_of_it or not place.ranged]


def plan_of(shards: Sequence[Shard], folder: str, mark: str) -> Plan:
    """What is to be written, by whom."""
    places = [
        Place(shard.prefix + name, shard.file, row.begin, share_of(tensor) is not None)
        for shard in shards
        for name, row in shard.header.rows.items()
        if is_shared(tensor := shard.tensors[name])
    ]
    return Plan(folder, mark, {s.file: s.header.nbytes for s in shards}, places)


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
    with ExitStack() as stack:
        folder = made
        if folder is None and (folder := _seen(together.path, plan, system)) is not None:
            stack.callback(system.close, folder.fd)
        parts = _Divided(plan, own, together.fabric)
        blind = together.meet(WELL if folder is not None else BLIND)
        if blind:
            parts.leave_to_first(own.shards)
        else:
            parts.exchange()
        gathered = plan.gathered(all_of_it=bool(blind))
        together.gathers = bool(gathered)
        if made is not None:
            system.unlink(plan.mark, dir_fd=made.fd)
            if blind:
                _warn(together, blind)
        report = told(parts.nbytes)
        files = []
        for file, pieces in parts.of_files.items():
            assert folder is not None, "who is blind writes nothing"
            with deferred_interrupts():  # one after it was opened would leave it open
                to, nbytes = folder.path / file, plan.nbytes[file]
                files.append(NewFile(to, folder.fd, pieces, nbytes, system, made=True))
                stack.callback(files[-1].close)
        for new in files:
            new.stream(report)
        if made is None:
            for name in gathered:  # rank 0 writes what all ranks read
                tensor = own.shared[name]
                tensor.entry.store.read_all(tensor.entry)
        together.gathers = False
        together.meet()


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
                row = SharedRow(place.begin, tensor.numel(), tensor.dtype.itemsize)
                rows.append(row)
                source, (begin, end) = share_of(tensor), row.of_rank(fabric.rank, fabric.size)
                assert source is not None, "it is one on rank 0"
                if begin < end:
                    held.append(Part(begin, end, place.state, source))
            if file in shards:
                held += _others(shards[file])
            self._stretches[file] = stretches_of(nbytes, rows, fabric.size)
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
    first = {place.state for place in plan.places}
    if odd := sorted(first ^ set(shared)):
        have, lack = (0, fabric.rank) if odd[0] in first else (fabric.rank, 0)
        raise Unsupported(
            f"rank {have} saves {odd[0]!r}, of which all ranks hold shares, and rank {lack} does "
            "not",
            "give zcompile.save the same model, optimizer and shared tensors on every rank",
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
