"""Gives every gathered parameter an address in the device arena, and checks the budget."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

from torch import fx

from zcompile.errors import BudgetExceeded
from zcompile.ir import ops
from zcompile.ir.graph import find, phase_of, positions
from zcompile.ir.plan import GraphPlan, layout_of_fetch
from zcompile.ir.schedule import Slot
from zcompile.ir.types import NodeName, Phase, aligned
from zcompile.memory.allocator import Block, pack, packed_bytes
from zcompile.passes.base import Fact, Pass


@dataclass(frozen=True)
class AllocateArena(Pass):
    """Choose addresses from live ranges: from the fetch that takes a slot to its release.

        %a_pending = zinf.fetch(%a)               %a_pending -> [0, 4096)
        ...                               ->
        %b_pending = zinf.fetch(%b)               %b_pending -> [4096, 12288)

    The two phases share the arena, one after the other. The graph does not change.
    """

    name: ClassVar[str] = "allocate-arena"
    needs: ClassVar[frozenset[Fact]] = frozenset({Fact.FETCHES_PLACED})
    gives: ClassVar[frozenset[Fact]] = frozenset({Fact.BUDGET_MET})

    def rewrite(self, graph: fx.Graph, plan: GraphPlan) -> GraphPlan:
        slots: dict[NodeName, Slot] = {}
        for phase in (Phase.FORWARD, Phase.BACKWARD):
            slots |= _slots(graph, plan, phase)
        return replace(plan, slots=slots)


def _slots(graph: fx.Graph, plan: GraphPlan, phase: Phase) -> Mapping[NodeName, Slot]:
    """The slots of the fetches of one phase."""
    where = positions(graph)
    fetches = [n for n in find(graph, ops.fetch) if phase_of(n) is phase]
    blocks = []
    for fetch in fetches:
        (wait,) = fetch.users
        (release,) = [user for user in wait.users if user.target is ops.release]
        blocks.append(Block(where[fetch], where[release], layout_of_fetch(fetch).nbytes))
    addresses = pack(blocks)
    needed = packed_bytes(blocks, addresses)
    if plan.budget_bytes is not None and needed > plan.budget_bytes:
        raise BudgetExceeded(
            "device",
            plan.beside.device_bytes or plan.budget_bytes,
            needed + plan.beside.nbytes,
            plan.beside.with_fetches(phase.value),
            plan.beside.holders,
            f"give zcompile.offload device_memory={needed + plan.beside.nbytes} or more",
        )
    return {
        NodeName(fetch.name): Slot(address, aligned(block.nbytes))
        for fetch, block, address in zip(fetches, blocks, addresses, strict=True)
    }
