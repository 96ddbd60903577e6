"""What an optimizer's step computes: rows of elementwise work, and the region of a chunk of one."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from hashlib import sha256
from typing import Any, Protocol, runtime_checkable

import torch

from zcompile.ir.schedule import EntryIndex, Register
from zcompile.ir.specs import Region, Work

ChunkFunction = Callable[[int, int, Sequence[Any]], None]
"""(first element, one past the last, operand values): compute, in place, on that range."""


@dataclass(frozen=True)
class Column:
    """A tiered operand of a row: `numel` elements from `begin` bytes into its entry on.

    writes         whether the chunk is stored back
    lasting        the entry outlives the step (a gradient does not)
    resident       it is computed with where it rests; nothing moves
    far            it rests where a slower link leads than that of the others
    eased          a change that waits is made to it as it passes: on the device it is made before,
                   elsewhere it is fetched for that
    """

    entry: EntryIndex
    begin: int
    dtype: torch.dtype
    writes: bool
    lasting: bool
    name: str
    resident: bool = False
    far: bool = False
    eased: bool = False


@dataclass(frozen=True)
class Row:
    """One elementwise computation over `numel` elements.

    plains  input registers that every chunk is handed whole, after the columns
    """

    numel: int
    columns: tuple[Column, ...]
    plains: tuple[Register, ...]
    compute: ChunkFunction


Part = tuple[Row, int, int]
"""Elements [first, last) of a row."""


def spread(rows: Sequence[Row], sizes: Sequence[int]) -> list[Part]:
    """All chunks [first, last), those of each kind evenly over the whole; a kind is what of a row
    rests afar. Without any, row after row."""
    kinds: dict[tuple[int, ...], list[Part]] = {}
    for row, elements in zip(rows, sizes, strict=True):
        far = tuple(n for n, c in enumerate(row.columns) if c.far and not c.resident)
        chunks = kinds.setdefault(far, [])
        chunks += [(row, first, min(row.numel, first + elements))
                   for first in range(0, row.numel, elements)]  # fmt: skip
    placed = []
    for chunks in kinds.values():
        total, done = sum(last - first for _, first, last in chunks), 0
        for row, first, last in chunks:
            placed.append(((done + (last - first) / 2) / total, (row, first, last)))
            done += last - first
    return [chunk for _, chunk in sorted(placed, key=lambda pair: pair[0])]


@runtime_checkable
class Joining(Protocol):
    """A `ChunkFunction` that also computes many whole rows in one call, as list ops do."""

    def joins(self, other: object) -> bool:
        """Whether a row computed by `other` may come along."""

    def joint(self, rows: Sequence[Row]) -> Callable[..., tuple[Any, ...]]:
        """Computes all of `rows`: of each in turn the columns, then the plains."""


def together(parts: Sequence[Part]) -> Iterator[Sequence[Part]]:
    """The parts in order, in groups that one call computes. Only what rests in reach, which is
    whole rows, is joined: the rest comes and goes chunk by chunk."""
    group: list[Part] = []
    for part in parts:
        if group and not _joins(group[-1][0], part[0]):
            yield group
            group = []
        group.append(part)
    if group:
        yield group


def _joins(before: Row, row: Row) -> bool:
    return (
        all(c.resident for c in (*before.columns, *row.columns))
        and _kinds(before) == _kinds(row)
        and isinstance(before.compute, Joining)
        and before.compute.joins(row.compute)
    )


def _kinds(row: Row) -> object:
    return [(c.dtype, c.writes) for c in row.columns], len(row.plains)


def resting_regions(name: str, rows: Sequence[Row]) -> Iterator[Region]:
    """What a step of that name computes, if all that its rows read rests where it is updated."""
    resting = [
        replace(row, columns=tuple(replace(c, resident=True, far=False) for c in row.columns))
        for row in rows
    ]
    for group in together([(row, 0, row.numel) for row in resting]):
        alone = len(group) == 1
        yield chunk_region(name, *group[0]) if alone else joint_region(name, [g[0] for g in group])


def joint_region(name: str, rows: Sequence[Row]) -> Region:
    """The compute of rows that go `together`. As many of the same sizes take the same time."""
    compute = rows[0].compute
    assert isinstance(compute, Joining), "rows are grouped by this"
    alone = [chunk_region(name, row, 0, row.numel) for row in rows]
    digest = sha256("\n".join(region.key for region in alone).encode()).hexdigest()[:16]
    work = Work(nbytes=sum(region.work.nbytes for region in alone), ops=len(rows))
    key, text = f"{name} of {len(rows)} rows {digest}", f"{len(rows)} rows"
    return Region(key, text, compute.joint(rows), work, alone[0].like)


def chunk_region(name: str, row: Row, first: int, last: int) -> Region:
    """The compute of elements [first, last) of `row`, in a step of that name.

    Its key is the same for chunks that take the same time: op, elements, what the operands are.
    """
    kinds = (f"{'=' if c.resident else ''}{c.dtype}{'!' if c.writes else ''}" for c in row.columns)
    key = f"{name} {last - first} {' '.join(kinds)} +{len(row.plains)}"
    widths = (c.dtype.itemsize * (1 + c.writes) for c in row.columns)
    work = Work(nbytes=(last - first) * sum(widths), ops=1)
    call = partial(_call, row.compute, first, last)
    like = " ".join((name, *(f"{c.dtype}{'!' if c.writes else ''}" for c in row.columns)))
    return Region(key, f"chunk [{first}, {last})", call, work, like)


def _call(compute: ChunkFunction, first: int, last: int, *values: Any) -> tuple[Any, ...]:
    compute(first, last, values)
    return ()
