"""A gradient that comes in tiles: each goes home at once, and the last one makes them a whole."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from zcompile.ir.types import Layout, row_major
from zcompile.runtime.norms import Norms
from zcompile.runtime.store.store import Entry, Store
from zcompile.runtime.transfer.ticket import Ticket


@dataclass
class Arriving:
    """A contribution of which some tiles are here.

    param  whose gradient it is
    held   the tiered gradient over the entry that they go to
    adds   they are added to what rests there; else they are all of it
    alone  it is all that this backward pass gives to `param`
    found  what `.grad` was when the first tile came
    left   elements that are still to come
    """

    param: Tensor
    held: Tensor
    adds: bool
    alone: bool
    found: object
    left: int

    @property
    def entry(self) -> Entry:
        held: Any = self.held
        entry: Entry = held.entry
        return entry


def whole_layout(param: Tensor, dtype: torch.dtype) -> Layout:
    """How all tiles together lie: row-major, as the parameter does."""
    size = tuple(param.size())
    return Layout(size, row_major(size), 0, dtype)


def takes_tiles(held: Tensor | None, layout: Layout) -> bool:
    """Whether tiles of a gradient that lies so can be added to `held` one by one."""
    entry = getattr(held, "entry", None)
    return isinstance(entry, Entry) and getattr(held, "lies", None) == layout


def send(
    store: Store,
    norms: Norms,
    arriving: Arriving,
    tile: Tensor,
    offset: int,
    after: Sequence[Ticket],
) -> None:
    """`tile` leaves for its place, `offset` elements after the first.

    tile   contiguous
    after  complete once it is computed
    """
    flat, entry = tile.reshape(-1), arriving.entry
    begin = offset * flat.element_size()
    if arriving.adds:
        store.add(entry, flat, begin=begin, after=after)
    else:
        store.put(entry, flat.view(torch.uint8), begin=begin, after=after)
        norms.note_tile(entry, offset, tile)
    arriving.left -= flat.numel()
