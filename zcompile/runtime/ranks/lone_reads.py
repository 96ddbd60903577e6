"""Rank 0 reads alone: the other ranks send it their shares of what it asks for, until it ends.

    rank 0      asks for tensor 7    gets its shares      asks for tensor 3    ...    ends
    the others  wait                 send their shares    wait                 ...    go on

So what a library does on one rank alone, as writing files in a format of its own, need not be done
by all of them. Before it begins, the ranks agree on the tensors that may be asked for; a question
names one by its place among those. Nothing else that concerns several ranks is done meanwhile.
"""

import struct
from collections.abc import Sequence

import torch
from torch import Tensor

from zcompile.errors import Unsupported
from zcompile.runtime.ranks.fabric import Fabric, told_to_ranks
from zcompile.runtime.ranks.transport import host_memory
from zcompile.runtime.store.store import Entry

DOING = "read on rank 0 alone"
ENDED, FAILED = -1, -2
"""Said in place of the number of a tensor."""
TEXT_BYTES = 400
"""Of a question: what has failed on rank 0, for people."""
_QUESTION = struct.Struct(f"<qI{TEXT_BYTES}s")


class LoneReads:
    """What rank 0 may read alone, from `begin` on until `end` and `serve` are over.

    entries  of which ranks hold shares: the same, in the same order, on all ranks
    """

    def __init__(self, fabric: Fabric, entries: Sequence[Entry]) -> None:
        self._fabric, self._entries = fabric, list(entries)
        self._numbers = {entry.key: number for number, entry in enumerate(entries)}
        self._others = [rank for rank in range(fabric.size) if rank != fabric.rank]

    def begin(self) -> None:
        """Agree with the other ranks on what may be read.

        raises  RanksDiffer, RankFailed; Unsupported, while others are open
        """
        rows = [(e.name, e.whole_bytes, str(_owner_of(e))) for e in self._entries]
        names = ", ".join(name for name, *_ in rows)
        self._fabric.agree(DOING, rows, text=f"of {len(rows)} shared tensors: {names}")
        self._fabric.read_alone(self)

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
                f"{entry.name!r} is read on rank 0 alone, and is none of what "
                "zcompile.rank_zero_reads was given",
                "give it the model and the optimizer; let all ranks read what belongs to neither, "
                "as gradients",
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

        raises  Unsupported, if this rank may not read it alone; RankFailed
        """
        self.check_readable(entry)
        with told_to_ranks(self._fabric):
            self._say(self._numbers[entry.key])
            with torch.inference_mode(False):  # another thread writes to it
                whole = host_memory(1, entry.whole_bytes, torch.uint8)[0]
            own = _own_of(entry)
            first, last = _range_of(entry, self._fabric.rank)
            whole[first:last] = own
            parts = {rank: whole[slice(*_range_of(entry, rank))] for rank in self._others}
            came = {rank: part for rank, part in parts.items() if part.numel()}
            self._fabric.deliver(f"get the shares of {entry.name!r}", {}, came)
        return whole

    def end(self, error: BaseException | None) -> None:
        """Let the other ranks go on, who are told what has failed here. raises  RankFailed"""
        self._fabric.read_alone(None)
        if error is None:
            self._say(ENDED)
        else:
            self._say(FAILED, f"{type(error).__name__}: {error}")

    def _say(self, number: int, text: str = "") -> None:
        said = text.encode()[:TEXT_BYTES]
        row = bytearray(_QUESTION.pack(number, len(said), said))
        question = torch.frombuffer(row, dtype=torch.uint8)
        self._fabric.deliver("ask for shares", dict.fromkeys(self._others, question), {})

    # --- The others ---

    def serve(self) -> None:
        """Send rank 0 what it asks for, until it has ended.

        raises  Unsupported, if what it did has failed there; RankFailed
        """
        fabric = self._fabric
        fabric.read_alone(None)
        question = torch.zeros(_QUESTION.size, dtype=torch.uint8, device="cpu")
        while True:
            fabric.deliver("wait for rank 0, which reads alone", {}, {0: question})
            number, length, raw = _QUESTION.unpack(question.numpy().tobytes())
            if number == ENDED:
                return
            if number == FAILED:
                text = raw[:length].decode(errors="replace")
                raise Unsupported(
                    f"rank 0 on {fabric.hosts[0]} has failed while it read alone: {text}",
                    "mend that there, and do it again on all ranks: no value has changed, and the "
                    "run can go on",
                )
            entry = self._entries[number]
            with told_to_ranks(fabric):
                own = _own_of(entry)
                if own.numel():
                    fabric.deliver(f"send the share of {entry.name!r}", {0: own}, {})


def _owner_of(entry: Entry) -> int | None:
    assert entry.partition is not None, "ranks hold shares of it"
    return entry.partition.owner


def _range_of(entry: Entry, rank: int) -> tuple[int, int]:
    """The bytes [first, last) of the tensor that a rank holds."""
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
