"""How large a chunk of a row of an optimizer's step is: what fits the arena and suits a link."""

from zcompile.packing import aligned
from zcompile.step_rows import Row

CHUNK_ELEMENTS = 1024
"""Chunks begin at multiples of this, so that an element keeps its place in every vector loop."""


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
