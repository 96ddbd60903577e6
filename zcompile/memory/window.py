"""Counts the bytes of arena that the fetches of a graph need at least.

What is fetched lies in the arena from the region that first reads it to the last one that does.
With each fetch right before its first reader, the addresses of all of them end at the smallest
arena in which the graph runs at all; a fetch that starts earlier needs more.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import fx

from zcompile.errors import BudgetExceeded, more_device_memory
from zcompile.ir import ops
from zcompile.ir.graph import phase_of, region_of
from zcompile.ir.plan import NOTHING_BESIDE, GraphMemory, GraphPlan
from zcompile.ir.types import Phase
from zcompile.memory.allocator import Block, fits, pack, pack_quickly, packed_bytes


@dataclass(frozen=True)
class Need:
    """A fetched value, and the first and last region that reads it.

    name    for error messages
    nbytes  that the fetch brings
    """

    name: str
    first: int
    last: int
    nbytes: int


def needs_of(graph: fx.Graph, plan: GraphPlan, phase: Phase) -> tuple[Need, ...]:
    """The fetched values of one phase, in the order of their fetches."""
    firsts: dict[fx.Node, int | None] = {}
    lasts: dict[fx.Node, int] = {}
    waited: list[fx.Node] = []
    last = 0
    for node in graph.nodes:
        if node.op != "call_function" or phase_of(node) is not phase:
            continue
        if (region := region_of(node)) is not None:
            last = region
            firsts.update(dict.fromkeys(waited, region))
            waited.clear()
        elif node.target is ops.fetch:
            firsts[node] = None
        elif node.target is ops.wait:
            waited += node.all_input_nodes
        elif node.target is ops.release:
            (wait,) = node.all_input_nodes
            (fetch,) = wait.all_input_nodes
            lasts[fetch] = last
    found = []
    for fetch, first in firsts.items():
        assert first is not None, f"no region reads %{fetch.name}"
        name = str(plan.spec_of(fetch).name)
        found.append(Need(name, first, lasts[fetch], plan.fetched_bytes(fetch)))
    return tuple(found)


def blocks_of(needs: Sequence[Need], starts: Sequence[int]) -> list[Block]:
    """The memory of fetched values whose fetches start before these regions."""
    return [Block(s, n.last, n.nbytes) for n, s in zip(needs, starts, strict=True)]


def quickly_packed(needs: Sequence[Need], starts: Sequence[int]) -> int:
    """Bytes of an arena for these starts, with addresses that are found without a search."""
    blocks = blocks_of(needs, starts)
    return packed_bytes(blocks, pack_quickly(blocks))


def in_place(needs: Sequence[Need]) -> tuple[int, ...]:
    """The latest starts: each fetch right before its first reader."""
    return tuple(need.first for need in needs)


def smallest_window(graph: fx.Graph, plan: GraphPlan) -> int:
    """Bytes of the smallest arena in which each phase of the graph can be scheduled."""
    least = 0
    for phase in (Phase.FORWARD, Phase.BACKWARD):
        needs = needs_of(graph, plan, phase)
        blocks = blocks_of(needs, in_place(needs))
        least = max(least, packed_bytes(blocks, pack(blocks)))
    return least


def check_fits(
    needs: Sequence[Need],
    budget_bytes: int,
    where: str,
    beside: GraphMemory = NOTHING_BESIDE,
) -> int:
    """Bytes of an arena, at most the budget, in which these values surely find addresses.

    where   phase, for the error
    beside  live bytes outside the arena, for the error
    raises  BudgetExceeded, if they do not fit even with every fetch right before its first reader
    """
    starts = in_place(needs)
    if (quick := quickly_packed(needs, starts)) <= budget_bytes:
        return quick
    blocks = blocks_of(needs, starts)
    if fits(blocks, budget_bytes) is None:
        least = packed_bytes(blocks, pack(blocks))
        raise _too_small(needs, least, budget_bytes, where, beside)
    return budget_bytes


def _too_small(
    needs: Sequence[Need], least: int, budget_bytes: int, where: str, beside: GraphMemory
) -> BudgetExceeded:
    """The error: who is alive at the peak, and the budget that would do."""
    needed = least + beside.nbytes

    def alive(region: int) -> list[Need]:
        return [n for n in needs if n.first <= region <= n.last]

    peak = max({n.first for n in needs}, key=lambda r: sum(n.nbytes for n in alive(r)))
    return BudgetExceeded(
        "device",
        beside.device_bytes or budget_bytes,
        needed,
        beside.with_fetches(where),
        [*((n.name, n.nbytes) for n in alive(peak)), *beside.holders],
        f"{more_device_memory(needed)} (this is the smallest that holds "
        "the parameters which one piece of compute reads together"
        f"{', and the values between them)' if beside.nbytes else ')'}",
    )
