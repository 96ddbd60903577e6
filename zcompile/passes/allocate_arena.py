"""Gives every fetched value an address in the device arena."""

from zcompile.ir.schedule import RegionProgram, Slot
from zcompile.ir.types import aligned
from zcompile.memory.allocator import Block, fits, pack_quickly, packed_bytes


def allocate_arena(program: RegionProgram) -> RegionProgram:
    """Choose addresses from live ranges: from the region before which a fetch starts to the last
    that reads the value.

        a: taken from region 0 to 0                   a: [0, 4096)
        b: taken from region 0 to 1             ->    b: [4096, 12288)

    Fetches have starts with which addresses within the budget can be found (`choose_starts`); they
    are searched for only where those that are found quickly end beyond it.
    """
    blocks = [Block(v.start, v.last, v.nbytes) for v in program.fetched]
    addresses = pack_quickly(blocks)
    budget = program.budget_bytes
    if budget is not None and packed_bytes(blocks, addresses) > budget:
        found = fits(blocks, budget)
        assert found is not None, "starts are chosen so that addresses fit"
        addresses = found
    slots = (Slot(a, aligned(b.nbytes)) for a, b in zip(addresses, blocks, strict=True))
    return program.with_values(
        v if v.in_place else v._replace(slot=next(slots)) for v in program.values
    )
