"""What an optimizer's step computes: rows of elementwise work, and the region of a chunk of one."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from zcompile.schedule import EntryIndex, Region, Register, Work

ChunkFunction = Callable[[int, int, Sequence[Any]], None]
"""(first element, one past the last, operand values): compute, in place, on that range."""


@dataclass(frozen=True)
class Column:
    """A tiered operand of a row: `numel` elements from `begin` bytes into its entry on.

    writes         whether the chunk is stored back
    lasting        the entry outlives the step (a gradient does not)
    resident       it is computed with where it rests; nothing moves
    far            it rests where a slower link leads than that of the others
    """

    entry: EntryIndex
    begin: int
    dtype: torch.dtype
    writes: bool
    lasting: bool
    name: str
    resident: bool = False
    far: bool = False


@dataclass(frozen=True)
class Row:
    """One elementwise computation over `numel` elements.

    plains  input registers that every chunk is handed whole, after the columns
    """

    numel: int
    columns: tuple[Column, ...]
    plains: tuple[Register, ...]
    compute: ChunkFunction


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
