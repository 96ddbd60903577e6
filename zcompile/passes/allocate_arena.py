"""Gives every fetched value an address in the device arena."""

from collections.abc import Sequence

from zcompile.ir.schedule import ReadValue, RegionProgram, Slot
from zcompile.ir.types import aligned
from zcompile.memory.allocator import Block, fits, pack_quickly, packed_bytes
from zcompile.memory.earliest import earliest_places
from zcompile.memory.window import Need


def allocate_arena(program: RegionProgram) -> RegionProgram:
    """Choose addresses from live ranges: from the region before which a fetch starts to the last
    that reads the value.

        a: taken from region 0 to 0                   a: [0, 4096)
        b: taken from region 0 to 1             ->    b: [4096, 12288)

    Fetches have starts with which addresses within the budget can be found (`choose_starts`): those
    that are found quickly, or else the earliest places, if each is free when its fetch starts. They
    are searched for only where neither will do. Parts of a value lie in its slot.
    """
    slotted = program.slotted
    blocks = [Block(v.start, v.last, v.nbytes) for v in slotted]
    addresses = pack_quickly(blocks)
    budget = program.budget_bytes
    if budget is not None and packed_bytes(blocks, addresses) > budget:
        found = _earliest(slotted, budget) or fits(blocks, budget)
        assert found is not None, "starts are chosen so that addresses fit"
        addresses = found
    slot_of = {
        v.register: (v.begin, Slot(address, aligned(v.nbytes)))
        for v, address in zip(slotted, addresses, strict=True)
    }

    def placed(v: ReadValue) -> ReadValue:
        if v.in_place:
            return v
        begin, slot = slot_of[v.register if v.part_of is None else v.part_of]
        return v._replace(slot=Slot(slot.address + v.begin - begin, aligned(v.nbytes)))

    return program.with_values(map(placed, program.values))


def _earliest(values: Sequence[ReadValue], budget_bytes: int) -> tuple[int, ...] | None:
    """The addresses of the earliest places, if each is free when the fetch of its value starts."""
    needs = [Need(v.name, v.first, v.last, v.nbytes) for v in values]
    places = earliest_places(needs, budget_bytes)
    if places is None or any(p.free_from > v.start for p, v in zip(places, values, strict=True)):
        return None
    return tuple(place.address for place in places)
