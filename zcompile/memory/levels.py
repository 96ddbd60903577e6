"""What a schedule's calls hold beside the arena, instruction by instruction.

A footprint speaks of nodes, a schedule of instructions: only those that compute or let something
leave change what is held. They keep their order however a schedule is arranged, so each has its
level by its number among them.
"""

from collections.abc import Iterator
from types import MappingProxyType

from torch import fx

from zcompile.ir import ops
from zcompile.ir.graph import is_compute, region_of
from zcompile.ir.schedule import CHANGE_HOLDING, Register, Run, Schedule
from zcompile.ir.torch_compat import is_tangent
from zcompile.ir.types import Holds, Level
from zcompile.memory.footprint import Footprint
from zcompile.memory.storages import DEPARTURES, Given

NOTHING_KEPT: Given = MappingProxyType({})


def holds_of(schedule: Schedule, held: Footprint, kept: Given = NOTHING_KEPT) -> Holds:
    """What the calls of `schedule` hold, from the footprint of the graph it was lowered from.

    kept  of a forward: what it keeps for its backward
    """
    levels = tuple(_levels(held))
    counted = [x for x in schedule.instructions if isinstance(x, CHANGE_HOLDING)]
    assert len(levels) == len(counted), "a level for every instruction that changes what is held"
    names = {node.name for node in held.of}
    places = [n for n in held.nodes if n.op == "placeholder"]
    given = frozenset(Register(i) for i, n in enumerate(places) if n.name in names)
    named = [
        (name, register)
        for run in counted
        if isinstance(run, Run)
        for name, register in zip(run.names, run.outputs, strict=True)
    ]
    made = frozenset(register for name, register in named if name in names)
    left = frozenset(register for name, register in named if name in names and name in kept)
    ends = levels[-1].after if levels else 0
    stays = dict(storage for storages in kept.values() for storage in storages)
    saved = sum(v.nbytes for v in held.values
                if v.maker.op == "placeholder" and not is_tangent(v.maker))  # fmt: skip
    return Holds(
        levels, given | made, given, left, held.left_bytes, ends, sum(stays.values()), saved
    )


def _levels(held: Footprint) -> Iterator[Level]:
    """One for each run of compute nodes of one region, each gradient that leaves, and each value
    that has left."""
    curve = held.curve()
    after = [0] * len(curve)
    for value in held.values:
        after[value.first] += value.nbytes
        after[value.last] -= value.nbytes
    for index in range(1, len(after)):
        after[index] += after[index - 1]

    def level(first: int, last: int) -> Level:
        before = after[first - 1] if first else 0
        node = held.nodes[last]
        departing, alone = held.departing.get(node, 0), node in held.alone
        peak, carried = max(curve[first : last + 1]), held.carried.get(node)
        return Level(before, peak, after[last], departing, alone, carried)

    begun: int | None = None
    region: int | None = None
    for index, node in enumerate(held.nodes):
        inside = is_compute(node)
        if begun is not None and not (inside and region_of(node) == region):
            yield level(begun, index - 1)
            begun = None
        if inside and begun is None:
            begun, region = index, region_of(node)
        if _lets_go(node):
            yield level(index, index)
    assert begun is None, "a graph ends with its results"


def _lets_go(node: fx.Node) -> bool:
    return node.op == "call_function" and (node.target in DEPARTURES or node.target is ops.left)
