"""What the calls of a schedule hold of the device beside the arena, as data of the schedule."""

from dataclasses import dataclass
from typing import NamedTuple


class Level(NamedTuple):
    """Bytes of values that a call holds: before an instruction, at most while it is carried out,
    and after it. `departing`: of gradients, that may be under way once this one has left. `alone`:
    this one is a storage of its own, which lies as its parameter does and which nobody reads
    later. `carried`: of the whole storages that are free once this one has arrived: it may be a
    part of a larger one, and the last of several in one. None: as many as travel."""

    before: int = 0
    peak: int = 0
    after: int = 0
    departing: int = 0
    alone: bool = False
    carried: int | None = None


@dataclass(frozen=True)
class Holds:
    """What the calls of a schedule hold of the device beside the arena (`memory/levels.py`).

    levels      of the instructions that compute or let something leave, in their order
    registers   whose values count; `given`: those that a call begins with
    kept        results that are kept for backward
    left_bytes  of gradients that are still under way when a call has ended
    end_bytes   of values when it has, those of `left_bytes` included
    kept_bytes  that a forward leaves for its backward; `saved_bytes`: that a backward finds
    ahead_bytes of a forward that a backward follows: the most that both hold
    sizes       the dynamic sizes that all this was counted at; none, as the graph was traced
    """

    levels: tuple[Level, ...] = ()
    registers: frozenset[int] = frozenset()
    given: frozenset[int] = frozenset()
    kept: frozenset[int] = frozenset()
    left_bytes: int = 0
    end_bytes: int = 0
    kept_bytes: int = 0
    saved_bytes: int = 0
    ahead_bytes: int = 0
    sizes: tuple[int, ...] = ()

    @property
    def peak_bytes(self) -> int:
        return max((level.peak for level in self.levels), default=0)

    @property
    def needed_bytes(self) -> int:
        """What a call must find room for: a forward for its backward too, or that would be refused
        once buffers were changed."""
        return max(self.peak_bytes, self.ahead_bytes)


NOTHING_HELD = Holds()
