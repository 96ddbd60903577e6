"""Transfers under way: on the bytes of entries, and out of slots. Which another must wait for."""

from zcompile.ir.schedule import Schedule, Slot
from zcompile.planner.journeys import Journey

_Row = tuple[int, int, bool, Journey]
"""A transfer under way on bytes [begin, end) of an entry; whether it writes there."""


class Flying:
    """By the key of the entry."""

    def __init__(self) -> None:
        self._rows: dict[int, list[_Row]] = {}

    def start(self, key: int, begin: int, end: int, writes: bool, journey: Journey) -> None:
        """A transfer sets out."""
        self._rows.setdefault(key, []).append((begin, end, writes, journey))

    def blockers(self, key: int, begin: int, end: int, writes: bool) -> list[Journey]:
        """What moves those bytes of the entry now, if either side writes."""
        rows = self._rows.get(key)
        if not rows:
            return []
        self._rows[key] = rows = [row for row in rows if row[3].home_s is None]
        return [journey for first, last, wrote, journey in rows
                if first < end and begin < last and (wrote or writes)]  # fmt: skip


class Departing:
    """What still leaves the device from a slot that was given back."""

    def __init__(self) -> None:
        self._rows: list[tuple[int, int, Journey, bool]] = []

    def leave(self, schedule: Schedule, slot: Slot, journey: Journey) -> None:
        """A transfer out of a slot of `schedule` sets out."""
        self._rows.append((slot.address, slot.end, journey, bool(schedule.annex_at)))

    def under(self, slot: Slot) -> list[Journey]:
        """What must have left before `slot` is overwritten."""
        self._rows = rows = [row for row in self._rows if row[2].over_s is None]
        begin, end = slot.address, slot.end
        return [row[2] for row in rows if row[0] < end and begin < row[1]]

    def from_annex(self) -> list[Journey]:
        """What must have left the annex before it is given back."""
        return [row[2] for row in self._rows if row[3] and row[2].over_s is None]
