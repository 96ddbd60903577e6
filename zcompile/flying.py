"""Transfers under way: on the bytes of entries, and out of slots. Which another must wait for."""

from typing import NamedTuple

from zcompile.schedule import Schedule, Slot
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


class Departing:
    """What still leaves the device from a slot that was given back."""

    def __init__(self) -> None:
        self._rows: list[tuple[Slot, Journey, bool]] = []

    def leave(self, schedule: Schedule, slot: Slot, journey: Journey) -> None:
        """A transfer out of a slot of `schedule` sets out."""
        self._rows.append((slot, journey, bool(schedule.annex_at)))

    def under(self, slot: Slot) -> list[Journey]:
        """What must have left before `slot` is overwritten."""
        self._rows = [row for row in self._rows if row[1].over_s is None]
        return [journey for other, journey, _ in self._rows if other.overlaps(slot)]

    def from_annex(self) -> list[Journey]:
        """What must have left the annex before it is given back."""
        return [journey for _, journey, annexed in self._rows if annexed and journey.over_s is None]
