"""A list for code that is not ours, which asks of every node of a graph whether it is in a sum of
lists: a walk over thousands each time, where a set says it at once."""

from collections.abc import Iterable
from typing import Any


class Listed(list[Any]):
    """A list; what `+` makes of it and others knows what it holds, as long as nobody changes it."""

    def __add__(self, other: Iterable[Any]) -> "Listed":
        return _Sum([*self, *other])


class _Sum(Listed):
    def __init__(self, values: Iterable[Any]) -> None:
        super().__init__(values)
        self._held = frozenset(self)

    def __contains__(self, value: object) -> bool:
        return value in self._held
