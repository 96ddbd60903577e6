"""What was asked of an entry and not done yet: a cheap change that the next reader makes.

Clipping multiplies every gradient by one number. Done at once this reads and writes all of them;
deferred, the optimizer's step multiplies each chunk as it passes. Whoever else reads the entry
finds it done, since the store does it first.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from torch import Tensor

from zcompile.ir.types import Layout


@dataclass(frozen=True)
class Deferred:
    """`func(values, operand)`, elementwise and in place.

    lists   `func` takes a list of tensors
    operand  one number, or a tensor of one
    layout  of the tensor it was asked of, which covers its entry
    """

    func: Callable[..., object]
    operand: Any
    lists: bool
    layout: Layout

    def apply(self, values: Tensor, operand: Any) -> None:
        """values  a range of the entry's elements; operand  `self.operand`, on its way"""
        self.func([values] if self.lists else values, operand)


class Changing(Protocol):
    """What changes can be deferred of; an entry."""

    key: int
    deferred: tuple[Deferred, ...]
    version: int


E = TypeVar("E", bound=Changing)


class Deferrals(Generic[E]):
    """Who has something deferred, and who does it.

    make  does what is deferred of an entry, and clears it; set by the side that can compute
    """

    def __init__(self) -> None:
        self.make: Callable[[E], None] | None = None
        self._waiting: dict[int, E] = {}

    def defer(self, entry: E, change: Deferred) -> None:
        """To be done before the entry is read, or by whoever reads it."""
        entry.deferred = (*entry.deferred, change)
        entry.version += 1
        self._waiting[entry.key] = entry

    def settle(self, entry: E) -> None:
        """Do what is deferred of the entry."""
        if entry.deferred:
            assert self.make is not None, "a change was deferred where nobody can make it"
            self.make(entry)

    def forget(self, entry: E) -> None:
        """It is dead."""
        self._waiting.pop(entry.key, None)

    def settle_all(self, lives: Callable[[E], bool]) -> None:
        """Do what is deferred of any entry that `lives`."""
        while self._waiting:
            _, entry = self._waiting.popitem()
            if lives(entry):
                self.settle(entry)
