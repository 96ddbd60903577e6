"""An op on rows of operands: applied to a range of one row's elements, or to many rows at once."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from zcompile.ir.optimizer_step import Row
from zcompile.ir.torch_compat import Dispatched, trees
from zcompile.runtime.eager.narrowing import Narrowing
from zcompile.runtime.store.deferred import Deferred


@dataclass(frozen=True)
class Chunked:
    """Applies an op to a range of elements: columns are chunks already, wide plains are cut.

    eased     changes to make before: (column, which plain is the operand, change)
    narrowed  casts to make afterwards
    in_lists  rows that differ in their operands only are computed in one call
    """

    func: Dispatched
    spec: Any
    places: tuple[int, ...]
    columns: int
    to_target: bool
    eased: tuple[tuple[int, int, Deferred], ...]
    narrowed: Narrowing
    in_lists: bool

    def joins(self, other: object) -> bool:
        return self.in_lists and self == other

    def joint(self, rows: Sequence[Row]) -> "_Lists":
        columns, width = self.columns, self.columns + len(rows[0].plains)
        starts = range(0, width * len(rows), width)
        numbers: tuple[list[Any], dict[str, Any]] = trees.tree_unflatten(
            range(len(self.places)), self.spec
        )

        def where(leaf: int) -> list[int]:
            place = self.places[leaf]
            return [first + (place if place >= 0 else columns - place - 1) for first in starts]

        def filled(number: Any) -> _Operand:
            if isinstance(number, list):
                found = [where(leaf) for leaf in number]
                chosen = [each[row] for row in range(len(rows)) for each in found]
                return _Operand(True, any(self.places[n] < 0 for n in number), tuple(chosen))
            return _Operand(False, self.places[number] < 0, (where(number)[0],))

        args, kwargs = numbers
        return _Lists(
            self.func,
            tuple(filled(number) for number in args),
            {name: filled(number) for name, number in kwargs.items()},
            tuple(row.numel for row in rows),
            width,
            bool(self.eased),
            self.narrowed,
        )

    def __call__(self, first: int, last: int, values: Sequence[Any]) -> None:
        for column, plain, change in self.eased:
            change.apply(values[column], values[self.columns + plain])
        leaves = []
        for place in self.places:
            if place >= 0:
                leaves.append(values[place])
            else:
                leaves.append(_cut(values[self.columns - place - 1], first, last))
        target = leaves.pop() if self.to_target else None
        args, kwargs = trees.tree_unflatten(leaves, self.spec)
        result = self.func(*args, **kwargs)
        if target is not None:
            target.copy_(result[0] if isinstance(result, list | tuple) else result)
        self.narrowed(first, last, values)


@dataclass(frozen=True)
class _Operand:
    """An operand of a call for many rows.

    listed  a list with so many items of each row; else one value, that of the first row
    plain   no column, so that it is still as wide as its row
    where   indices of the values
    """

    listed: bool
    plain: bool
    where: tuple[int, ...]

    def of(self, values: Sequence[Any], numels: Sequence[int]) -> Any:
        found = [values[at] for at in self.where]
        if self.plain:
            each = max(1, len(found) // len(numels))
            found = [_cut(value, 0, numels[n // each]) for n, value in enumerate(found)]
        return found if self.listed else found[0]


@dataclass(frozen=True)
class _Lists:
    """Applies a list op to many whole rows at once, as it was called.

    eased  changes wait for the rows: those are made before such rows rest in reach, so that only a
           simulated step joins them
    """

    func: Dispatched
    args: tuple[_Operand, ...]
    kwargs: dict[str, _Operand]
    numels: tuple[int, ...]
    width: int
    eased: bool
    narrowed: Narrowing

    def __call__(self, *values: Any) -> tuple[Any, ...]:
        assert not self.eased, "a change waits for what is computed where it rests"
        numels = self.numels
        kwargs = {name: operand.of(values, numels) for name, operand in self.kwargs.items()}
        self.func(*(operand.of(values, numels) for operand in self.args), **kwargs)
        if self.narrowed.pairs:
            for row, numel in enumerate(numels):
                self.narrowed(0, numel, values[row * self.width : (row + 1) * self.width])
        return ()


def _cut(value: Any, first: int, last: int) -> Any:
    if not isinstance(value, Tensor) or value.dim() == 0:
        return value
    if value.numel() == 1:
        return value.reshape(1)
    return value.as_strided((last - first,), (1,), value.storage_offset() + first)
