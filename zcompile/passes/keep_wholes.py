"""Lets calls read parameters, of which ranks hold shares, where all of each rests on this rank.

A call gathers such a parameter if it was written since, and keeps it; the calls after it read what
was kept. That is ZeRO's second stage: over a link between ranks go two bytes per byte of a
parameter, and not three (a gather in forward, one in backward, the exchange of a gradient).
"""

from collections.abc import Set
from dataclasses import replace

from zcompile.ir.schedule import (
    Cast,
    CopyRead,
    EntryIndex,
    ReadValue,
    RegionProgram,
    Schedule,
)


def gathered_by(schedule: Schedule) -> tuple[EntryIndex, ...]:
    """The entries of which a schedule, as it was compiled, gathers the shares of all ranks; not
    those that come in tiles, since the device has no room for all of them."""
    if schedule.program is None:
        return ()
    shared = [(v.entry, v.share) for v in schedule.program.values if v.share is not None]
    tiled = {entry for entry, share in shared if share.tile is not None}
    return tuple(dict.fromkeys(entry for entry, _ in shared if entry not in tiled))


def keep_wholes(
    program: RegionProgram, kept: Set[EntryIndex], made: Set[EntryIndex]
) -> RegionProgram:
    """The program of calls for which all of the entries `kept` rests on this rank, in the dtype
    that they are gathered in.

        w: a share of [0, 2K), read by 0, 3    w, made:  as it was, and stored to the copy behind 3
                                         ->    w, else:  the copy of w, read by 0, 3

    made  of `kept`, those that were written since they were gathered
    """
    own = len(program.outline.handles)
    first = {v.entry: v for v in reversed(program.values) if v.share is not None}
    copies = [value for value in program.values if first.get(value.entry) is value]
    copies = [value for value in copies if value.entry in kept]
    index = {value.entry: EntryIndex(own + n) for n, value in enumerate(copies)}
    reads = tuple(
        CopyRead(
            value.entry,
            Cast(value.layout.dtype, value.layout.dtype),
            value.nbytes,
            value.layout.numel,
            whole=True,
            made=value.entry in made,
        )
        for value in copies
    )

    def placed(value: ReadValue) -> ReadValue:
        if value.share is None or value.entry not in index:
            return value
        if value.entry not in made:
            return value._replace(entry=index[value.entry], share=None, cast=None)
        return value._replace(kept_in=index[value.entry]) if first[value.entry] is value else value

    names = {int(index[value.entry]): f"all of {value.name}" for value in copies}
    names = {**program.outline.names, **names}
    outline = replace(program.outline, copies=reads, names=names)
    return replace(program, outline=outline).with_values(map(placed, program.values))
