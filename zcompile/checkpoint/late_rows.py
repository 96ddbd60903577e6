"""A commit names the inputs of updates that are still to come, and who resumes computes them.

The update of a parameter may wait for the next forward (`ir/late_updates.py`) when its step is
committed. Then the commit holds the parameter and its states as they are before the update, the
gradient, and the row of the optimizer: its ops, and its numbers by value. A source of the commit
(`checkpoint/durable.py`) gives out what the row makes of them, so that whoever reads a commit finds
the step whole.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from zcompile.checkpoint.plain_values import Packer, check_packed, unpack
from zcompile.errors import Unsupported
from zcompile.ir.types import EntryKind, Layout
from zcompile.runtime.durable.index import StoredTensor
from zcompile.runtime.eager.joined import JoinedChunk
from zcompile.runtime.eager.kept_rows import packed, unpacked
from zcompile.runtime.late import LateUpdates
from zcompile.runtime.store.store import Entry

LATE = "late"
"""Key in the meta of a commit, and of the names of what only late rows read."""


@dataclass(frozen=True)
class RowsToCome:
    """Updates that wait while their step is committed.

    rows       JSON: what each computes, on which tensors of the commit
    gradients  that they read, by their names in the commit
    plain      tensors among their other operands
    """

    rows: list[Any]
    gradients: Mapping[str, tuple[Entry, Layout]]
    plain: Mapping[str, Tensor]

    @property
    def gradient_bytes(self) -> int:
        return sum(entry.nbytes for entry, _ in self.gradients.values())


def rows_to_come(late: LateUpdates, named: Mapping[str, tuple[Entry, Layout]]) -> RowsToCome | None:
    """The updates that wait, for a commit; None, if it cannot name them, as where a row computes
    with more than ops of torch.

    named  what the commit holds
    """
    if (waiting := late.whole_rows()) is None:
        return None
    names = {entry.key: name for name, (entry, _) in named.items()}
    if len(names) < len(named):
        return None  # an entry has two names: a commit reads it to keep it twice
    rows: list[Any] = []
    gradients: dict[str, tuple[Entry, Layout]] = {}
    tensors: dict[str, Tensor] = {}
    packer = Packer(tensors)
    for number, (row, entries, plains) in enumerate(waiting):
        compute, columns = packed(row.compute), list[dict[str, Any]]()
        for column, entry in zip(row.columns, entries, strict=True):
            if column.blank:
                continue  # the copy is made again
            name = names.get(entry.key)
            if name is None and entry.kind is EntryKind.GRAD:
                name = f"{LATE}.{number}.{len(columns)}"
                begin = column.begin // column.dtype.itemsize
                layout = Layout((row.numel,), (1,), begin, column.dtype)
                gradients[name] = entry, layout
            columns.append(
                {
                    "tensor": name,
                    "begin": column.begin,
                    "dtype": str(column.dtype).removeprefix("torch."),
                    "writes": column.writes,
                }
            )
        try:
            given = packer.pack(list(plains), f"{LATE}.{number}.plain")
        except Unsupported:  # on purpose: a value that a commit cannot hold, so the update is done
            return None
        if compute is None or any(column["tensor"] is None for column in columns):
            return None
        rows.append({"numel": row.numel, "columns": columns, "plains": given, "compute": compute})
    return RowsToCome(rows, gradients, tensors)


# --- What the rows make ---


@dataclass(frozen=True)
class _Column:
    tensor: str
    begin: int
    dtype: torch.dtype
    writes: bool


@dataclass(frozen=True)
class _Row:
    numel: int
    columns: tuple[_Column, ...]
    plains: Any
    compute: JoinedChunk


class UpdatesToCome:
    """The late updates of a commit, computed as their results are asked for.

    tensors  of the commit, those that lie in extents
    small    reads a small one: by its name, and the device where it was
    read     reads the bytes of a tensor: uint8 [nbytes], on the host
    device   where the run computed: "cpu", "cuda"
    raises   ValueError, if they are not such as `rows_to_come` makes
    """

    def __init__(
        self,
        rows: Any,
        tensors: Mapping[str, StoredTensor],
        smalls: Mapping[str, object],
        small: Callable[[str, str], Tensor],
        read: Callable[[StoredTensor], Tensor],
        device: str,
    ) -> None:
        self._tensors, self._small, self._read = tensors, small, read
        self._device = device if device != "cuda" or torch.cuda.is_available() else "cpu"
        self._of: dict[str, _Row] = {}
        self._last: tuple[_Row, dict[str, Tensor]] | None = None
        if not isinstance(rows, list):
            raise ValueError("no list of rows")
        for row in rows:
            made = self._checked(row, smalls)
            for column in made.columns:
                if column.writes:
                    if column.tensor in self._of:
                        raise ValueError(f"{column.tensor!r:.80} is updated twice")
                    self._of[column.tensor] = made

    def _checked(self, row: Any, smalls: Mapping[str, object]) -> _Row:
        if not (isinstance(row, dict) and isinstance(row.get("columns"), list)):
            raise ValueError("a row without columns")
        numel, plains = row.get("numel"), row.get("plains")
        if type(numel) is not int or numel < 1 or not isinstance(plains, list):
            raise ValueError("a row without elements")
        check_packed(plains, smalls, LATE)
        columns = tuple(self._column(column, numel) for column in row["columns"])
        if len({column.tensor for column in columns}) < len(columns):
            raise ValueError("a row with one tensor twice")
        compute = unpacked(row.get("compute"), [c.dtype for c in columns], len(plains))
        return _Row(numel, columns, plains, compute)

    def _column(self, column: Any, numel: int) -> _Column:
        column = column if isinstance(column, dict) else {}
        tensor, begin, writes = column.get("tensor"), column.get("begin"), column.get("writes")
        dtype = getattr(torch, str(column.get("dtype")), None)
        kept = self._tensors.get(tensor) if isinstance(tensor, str) else None
        if kept is None or not isinstance(dtype, torch.dtype) or type(begin) is not int:
            raise ValueError(f"an operand that is none: {column!r:.80}")
        if begin < 0 or begin % dtype.itemsize or begin + numel * dtype.itemsize > kept.nbytes:
            raise ValueError(f"an operand that lies outside of {tensor!r:.80}")
        return _Column(kept.name, begin, dtype, writes is True)

    def __contains__(self, name: str) -> bool:
        return name in self._of

    def value(self, name: str) -> Tensor:
        """The bytes of a tensor with its update: uint8 [nbytes], on the host."""
        row = self._of[name]
        if self._last is None or self._last[0] is not row:
            self._last = row, self._computed(row)
        return self._last[1][name]

    def forget(self) -> None:
        """Let go what is kept of the last row that was computed, in case another of its tensors is
        asked for next."""
        self._last = None

    def _computed(self, row: _Row) -> dict[str, Tensor]:
        """The bytes of what a row writes."""
        raw = {c.tensor: self._read(self._tensors[c.tensor]) for c in row.columns}
        parts = [
            raw[c.tensor][c.begin : c.begin + row.numel * c.dtype.itemsize].view(c.dtype)
            for c in row.columns
        ]
        values = [part.to(self._device, copy=True) for part in parts]
        plains = unpack(row.plains, self._plain)
        with torch.no_grad():
            row.compute(0, row.numel, [*values, *plains])
            for column, part, value in zip(row.columns, parts, values, strict=True):
                if column.writes:
                    part.copy_(value)
        return {c.tensor: raw[c.tensor] for c in row.columns if c.writes}

    def _plain(self, name: str, on: str) -> Tensor:
        there = torch.device(on).type == "cuda" and torch.cuda.is_available()
        return self._small(name, on).to(on if there else "cpu")
