"""Where chunks of an optimizer's step lie, and how large they are: what fits, and suits a link."""

from collections.abc import Iterable
from dataclasses import dataclass

from zcompile.ir.specs import aligned
from zcompile.ir.step_rows import Row
from zcompile.ir.units import KiB, MiB

CHUNK_BYTES = 32 * MiB
"""Per operand and chunk, unless the device says otherwise. Small arenas lead to smaller chunks by
themselves."""
DEPTH = 3
"""Chunks on the device at once: one arrives, one computes, one leaves."""
DEEP = 8
"""Where operands come over links of different speed, more chunks on their way even them out."""
DEEPER = 16
"""In the annex, where bytes are plenty."""
LEAST_PACED_BYTES = 128 * KiB
PACE_S = 0.02
"""What the slowest link does in this time is a chunk that costs little to start and little to wait
for, when the first arrives and the last leaves."""
CHUNK_ELEMENTS = 1024
"""Chunks begin at multiples of this, so that an element keeps its place in every vector loop."""


@dataclass(frozen=True)
class StepRoom:
    """Where chunks lie on the device, and how they are cut.

    begin        address: 0, or beyond the arena, in its annex
    nbytes       from there on
    chunk_bytes  of an operand, at most
    depth        most chunks at once
    """

    begin: int = 0
    nbytes: int = 0
    chunk_bytes: int = CHUNK_BYTES
    depth: int = DEPTH


NO_ROOM = StepRoom()


def paced_bytes(bytes_per_s: Iterable[float], most: int) -> int:
    """Of a chunk that suits links of these speeds, and `most` at most."""
    slowest = min(bytes_per_s, default=most / PACE_S)
    return min(most, max(LEAST_PACED_BYTES, int(slowest * PACE_S)))


def set_bytes(row: Row, elements: int) -> int:
    """Arena bytes of one chunk: a slot for each column that moves."""
    return sum(aligned(elements * c.dtype.itemsize) for c in row.columns if not c.resident)


def chunk_elements(row: Row, share_bytes: int, chunk_bytes: int) -> int | None:
    """The most elements of a chunk whose slots fit the share; None if not even the least do."""
    widths = [column.dtype.itemsize for column in row.columns if not column.resident]
    if not widths:
        return row.numel
    most = chunk_bytes // max(widths)
    if row.numel <= most and set_bytes(row, row.numel) <= share_bytes:
        return row.numel
    # So many elements fill whole multiples of ALIGNMENT, whatever the dtype.
    return min(most, share_bytes // sum(widths)) // CHUNK_ELEMENTS * CHUNK_ELEMENTS or None
