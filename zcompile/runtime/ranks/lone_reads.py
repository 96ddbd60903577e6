"""Rank 0 reads alone: the other ranks send it their shares of what it asks for, until it ends.

    rank 0      asks for tensor 7    gets its shares      asks for tensor 3    ...    ends
    the others  wait                 send their shares    wait                 ...    go on

So what a library does on one rank alone, as writing files in a format of its own, need not be done
by all of them. Before it begins, the ranks agree on the tensors that may be asked for; a question
names one by its place among those. Nothing else that concerns several ranks is done meanwhile.
"""

import struct
import threading
from collections.abc import Sequence
from contextlib import suppress

import torch
from torch import Tensor

from zcompile.errors import RankZeroFailed, Unsupported, ZinfError
from zcompile.runtime.ranks.fabric import Fabric, told_to_ranks
from zcompile.runtime.ranks.transport import host_memory
from zcompile.runtime.store.store import Entry
from zcompile.runtime.transfer.interrupts import deferred_interrupts

DOING = "read on rank 0 alone"
ENDED, FAILED = -1, -2
"""Said in place of the number of a tensor."""
TEXT_BYTES = 400
"""Of a question: what has failed on rank 0, for people."""
_QUESTION = struct.Struct(f"<qI{TEXT_BYTES}s")


class LoneReads:
    """What rank 0 may read alone, from `begin` on until `end` there and `serve` elsewhere are over.

    fabrics  of the sessions that it is of, all over the same ranks: one of each, or more
    entries  of which ranks hold shares: the same, in the same order, on all ranks
    """

    def __init__(self, fabrics: Sequence[Fabric], entries: Sequence[Entry]) -> None:
        self._fabrics, self._fabric, self._entries = fabrics, fabrics[0], list(entries)
        self._numbers = {entry.key: number for number, entry in enumerate(entries)}
        self._others = [rank for rank in range(fabrics[0].size) if rank != fabrics[0].rank]
        self._lock = threading.Lock()
        """Held from a question until its shares have come: threads take turns."""

    def begin(self) -> None:
        """Agree with the other ranks on what may be read. raises  RanksDiffer, RankFailed"""
        rows = [(e.name, e.whole_bytes, str(_owner_of(e)), e.unset) for e in self._entries]
        names = ", ".join(name for name, *_ in rows)
        self._fabric.agree(DOING, rows, text=f"of {len(rows)} shared tensors: {names}")
        for fabric in self._fabrics:
            fabric.read_alone(self)

    def check_readable(self, entry: Entry) -> None:
        """raises  Unsupported, where rank 0 may not read a tensor alone"""
        if self._fabric.rank:
            raise Unsupported(
                f"rank {self._fabric.rank} reads {entry.name!r} within zcompile.rank_zero_reads, "
                "where rank 0 alone reads",
                "ask what the context yields, as in `if is_rank_zero:`, or read it outside",
            )
        if entry.partition is not None and entry.key not in self._numbers:
            raise Unsupported(
                f"{entry.name!r} is read on rank 0 alone, and is of nothing that "
                "zcompile.rank_zero_reads was given",
                "give it every module and optimizer that is read; let all ranks read what belongs "
                "to none, as gradients",
            )

    def refusal(self, what: str) -> Unsupported:
        """The error where a rank would do what all ranks do together."""
        return Unsupported(
            f"rank {self._fabric.rank} would {what} within zcompile.rank_zero_reads, where rank 0 "
            "only reads and the others wait",
            "let all ranks do that before it, or behind it",
        )

    # --- Rank 0 ---

    def whole(self, entry: Entry) -> Tensor:
        """The bytes of the whole tensor in ordinary host memory: uint8 [entry.whole_bytes]; blocks.

        raises  Unsupported, if this rank may not read it alone; what reading its own share raises,
                before any other rank is asked; RankFailed
        """
        self.check_readable(entry)
        with torch.inference_mode(False):  # another thread writes to it
            whole = host_memory(1, entry.whole_bytes, torch.uint8)[0]
        first, last = _range_of(entry, self._fabric.rank)
        whole[first:last] = _own_of(entry)
        group = self._fabric.mesh.group_of(0)[1:]
        parts = {rank: whole[slice(*_range_of(entry, rank))] for rank in group}
        came = {rank: part for rank, part in parts.items() if part.numel()}
        # Who asks takes the answer, or the next one would be taken for it.
        with self._lock, deferred_interrupts(), told_to_ranks(self._fabric):
            self._say(self._numbers[entry.key])
            self._fabric.deliver(f"get the shares of {entry.name!r}", {}, came)
        return whole

    def end(self, error: BaseException | None) -> None:
        """Let the other ranks go on, who are told what has failed here, if anything.

        raises  RankFailed, if nothing has
        """
        self._over()
        if error is None:
            self._say(ENDED)
            return
        with suppress(ZinfError):  # the ranks cannot go on, which is what has failed, or known
            self._say(FAILED, _told(error))

    def _say(self, number: int, text: str = "") -> None:
        said = text.encode(errors="replace")[:TEXT_BYTES]
        row = bytearray(_QUESTION.pack(number, len(said), said))
        question = torch.frombuffer(row, dtype=torch.uint8)
        self._fabric.deliver("ask for shares", dict.fromkeys(self._others, question), {})

    # --- The others ---

    def serve(self) -> None:
        """Send rank 0 what it asks for, until it has ended.

        raises  RankZeroFailed, if what it did has failed there; RankFailed
        """
        self._over()
        with told_to_ranks(self._fabric):  # rank 0 waits for this one, also if it is interrupted
            failed = self._served()
        if failed is not None:
            raise RankZeroFailed(self._fabric.hosts[0], failed)

    def _served(self) -> str | None:
        """Answer questions until there is none; returns what has failed on rank 0."""
        fabric = self._fabric
        question = torch.zeros(_QUESTION.size, dtype=torch.uint8, device="cpu")
        while True:
            fabric.deliver("wait for rank 0, which reads alone", {}, {0: question})
            number, length, raw = _QUESTION.unpack(question.numpy().tobytes())
            if number == ENDED:
                return None
            if number == FAILED:
                return str(raw[:length].decode(errors="replace"))
            entry = self._entries[number]
            if fabric.rank not in fabric.mesh.group_of(0):
                continue  # rank 0's group holds all of it
            own = _own_of(entry)
            if own.numel():
                fabric.deliver(f"send the share of {entry.name!r}", {0: own}, {})

    def _over(self) -> None:
        for fabric in self._fabrics:
            fabric.read_alone(None)


def _told(error: BaseException) -> str:
    """An error, for people on other ranks."""
    try:
        text = str(error)
    except Exception:  # noqa: BLE001  # on purpose: who cannot say what has failed, fails all the same
        text = ""
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _owner_of(entry: Entry) -> int | None:
    assert entry.partition is not None, "ranks hold shares of it"
    return entry.partition.owner


def _range_of(entry: Entry, rank: int) -> tuple[int, int]:
    """The bytes [first, last) of the tensor that a rank of the first group holds."""
    part = entry.partition
    assert part is not None, "ranks hold shares of it"
    itemsize = entry.nbytes // part.count
    first, last = part.of_rank(rank)
    return first * itemsize, last * itemsize


def _own_of(entry: Entry) -> Tensor:
    """The bytes of this rank's share, without padding. raises  ValueUnset, and what reading does"""
    part = entry.partition
    assert part is not None, "ranks hold shares of it"
    nbytes = part.own_count * (entry.nbytes // part.count)
    return entry.store.read_here(entry)[:nbytes]
