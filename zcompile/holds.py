"""What the calls of a schedule hold of the device beside the arena, as data of the schedule."""

from dataclasses import dataclass
from typing import NamedTuple


class Level(NamedTuple):
    """Bytes of values that a call holds: before an instruction, at most while it is carried out,
    and after it. `departing`: of gradients, that may be under way once this one has left. `alone`:
    this one is a storage of its own, which lies as its parameter does and which nobody reads
    later."""

    before: int = 0
    peak: int = 0
    after: int = 0
    departing: int = 0
    alone: bool = False


@dataclass(frozen=True)
class Holds:
    """What the calls of a schedule hold of the device beside the arena (`levels.py`).

    levels      of the instructions that compute or let something leave, in their order
    registers   whose values count; `given`: those that a call begins with
    kept        results that are kept for backward
    left_bytes  of gradients that are still under way when a call has ended
    end_bytes   of values when it has, those of `left_bytes` included
    kept_bytes  that a forward leaves for its backward; `saved_bytes`: that a backward finds
    """

    levels: tuple[Level, ...] = ()
    registers: frozenset[int] = frozenset()
    given: frozenset[int] = frozenset()
    kept: frozenset[int] = frozenset()
    left_bytes: int = 0
    end_bytes: int = 0
    kept_bytes: int = 0
    saved_bytes: int = 0

    @property
    def peak_bytes(self) -> int:
        return max((level.peak for level in self.levels), default=0)


NOTHING_HELD = Holds()
