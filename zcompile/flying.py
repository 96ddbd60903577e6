"""Transfers under way on the bytes of entries: which of them another must wait for."""

from typing import NamedTuple

from zcompile.traffic import Journey


class _Row(NamedTuple):
    """A transfer under way on bytes [begin, end) of an entry."""

    begin: int
    end: int
    writes: bool
    journey: Journey


class Flying:
    """By the key of the entry."""

    def __init__(self) -> None:
        self._rows: dict[int, list[_Row]] = {}

    def start(self, key: int, begin: int, end: int, writes: bool, journey: Journey) -> None:
        """A transfer sets out."""
        self._rows.setdefault(key, []).append(_Row(begin, end, writes, journey))

    def blockers(self, key: int, begin: int, end: int, writes: bool) -> list[Journey]:
        """What moves those bytes of the entry now, if either side writes."""
        rows = self._rows.get(key)
        if not rows:
            return []
        self._rows[key] = rows = [row for row in rows if row.journey.home_s is None]
        return [row.journey for row in rows
                if row.begin < end and begin < row.end and (row.writes or writes)]  # fmt: skip
