"""Runs blocks over slices of the batch: all samples through one block, then through the next."""

from dataclasses import dataclass, replace
from typing import ClassVar

from torch import fx

from zcompile.errors import quoted
from zcompile.ir.graph import module_of
from zcompile.ir.memory_curve import SlicedRegion
from zcompile.ir.plan import BatchSlices, GraphPlan, Note, Rounding
from zcompile.ir.saved_values import is_value, storage_bytes
from zcompile.ir.torch_compat import Dispatched, is_random
from zcompile.ir.units import show_size
from zcompile.passes.base import Fact, Pass
from zcompile.passes.slice_batch.axes import OVER_BATCH
from zcompile.passes.slice_batch.rewrite import ranges, write_batch
from zcompile.passes.slice_batch.stages import BatchGraph, Stages, batch_graph


@dataclass(frozen=True)
class SliceBatch(Pass):
    """Run a graph, stage by stage, over slices of its batch.

        %a = block_1(%x, %w1)                  %a0 = block_1(%x[:4], %w1)
        %b = block_2(%a, %w2)          ->      %a1 = block_1(%x[4:], %w1)
        ...                                    %b0 = block_2(%a0, %w2);  %b1 = block_2(%a1, %w2)
        %db, %dw2 = backward_2(..)             ...
        %da, %dw1 = backward_1(..)             of each slice: %a0 again, what is inside of block_2,
                                               %db0 = .., %dw2 += ..

    A weight is fetched once for all slices of a stage, in each phase. What one stage leaves for the
    next stays in slices; each is kept, computed again or offloaded as any other value. Gradients of
    weights add up over the slices, in the order of the batch, which rounds otherwise; products of
    fewer rows may, if the library takes another kernel.

    How many slices, and where stages begin, stands in `GraphPlan.batch`.
    """

    name: ClassVar[str] = "slice-batch"
    needs: ClassVar[frozenset[Fact]] = frozenset({Fact.TILES_CHOSEN, Fact.TOKENS_TILED})
    gives: ClassVar[frozenset[Fact]] = frozenset({Fact.BATCH_SLICED})

    def rewrite(self, graph: fx.Graph, plan: GraphPlan) -> GraphPlan:
        if plan.batch is None:
            return plan
        found = batch_graph(graph)
        assert found is not None, "there was a batch when slices of it were chosen"
        stages = found.stages(plan.batch.cuts)
        sliced = _records(found, stages, plan.batch.slices)
        write_batch(found, stages, plan.batch.slices)
        notes = [Note(self.name, None, region.describe()) for region in sliced]
        why = (
            "gradients of its weights are added up slice after slice, and products have fewer rows"
        )
        rounded = [Rounding(self.name, region.name, why) for region in sliced]
        return replace(
            plan,
            sliced=(*plan.sliced, *sliced),
            notes=(*plan.notes, *notes),
            roundings=(*plan.roundings, *rounded),
        )


def write_batch_slices(graph: fx.Graph, chosen: BatchSlices) -> None:
    """Write slices of the batch into the graph."""
    found = batch_graph(graph)
    assert found is not None, "there is a batch"
    write_batch(found, found.stages(chosen.cuts), chosen.slices)


def why_no_batch(graph: fx.Graph, found: BatchGraph | None, least: int) -> list[str]:
    """For each module with a large value that is made for the whole batch, why: sentences.

    least  bytes from which on a value is large
    """
    if found is None:
        return []
    told: dict[str, str] = {}
    for node in found.batch.refused:
        made = [n for n in (node, *node.users) if is_value(n)]
        nbytes = max((storage_bytes(n) for n in made if found.values.root(n) is n), default=0)
        name = module_of(node) or f"%{node.name}"
        if nbytes > least and name not in told:
            told[name] = (
                f"{show_size(nbytes)} of {quoted(name)} are not cut into slices of the batch: "
                f"{_why_whole(node)}"
            )
    return list(told.values())


def _why_whole(node: fx.Node) -> str:
    if isinstance(node.target, Dispatched) and is_random(node):
        return f"%{node.name} draws random numbers, of all samples at once as eager does"
    if node.target in OVER_BATCH:
        return f"%{node.name} takes statistics over the batch"
    return f"%{node.name} does not treat each sample by itself, as far as is known"


def _records(found: BatchGraph, stages: Stages, slices: int) -> list[SlicedRegion]:
    """What the stages hold, in the phase that needs most: of backward, where there is one."""
    count = found.batch.count
    most = max(end - begin for begin, end in ranges(count, slices))
    rows = []
    for stage in stages.backward or stages.forward:
        if not stage.nodes:
            continue
        inside = found.inside(stage)
        rows.append(
            SlicedRegion(
                found.name(stage),
                slices,
                count,
                found.left(stage),
                inside,
                -(-inside * most // count),
                "samples",
            )
        )
    return rows
