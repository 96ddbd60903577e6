"""Numbers what Inductor is to compile, and moves what the store does out of it."""

from collections.abc import Container, Iterator
from dataclasses import dataclass, field, replace
from operator import getitem
from typing import ClassVar

import torch
from torch import fx

from zcompile.ir import ops
from zcompile.ir.fusions import (
    MOST_NODES,
    computes,
    is_cast,
    is_fusible,
    is_fusible_but_for_sizes,
    is_worth_compiling,
    set_fusion,
)
from zcompile.ir.graph import aliases_of, bases_of, find, is_compute, phase_of, root_of
from zcompile.ir.plan import GraphPlan, Note
from zcompile.ir.torch_compat import hint, is_flex_attention
from zcompile.ir.types import Phase
from zcompile.ir.units import MiB
from zcompile.passes.base import Fact, Pass

MOST_READ = 1 * MiB
"""Bytes of a parameter that a fusion reads: norms, biases, positions. One that is larger is read by
an op of its own, since it would be fetched before the fusion begins."""


@dataclass(frozen=True)
class FindFusions(Pass):
    """Give each run of compute between two library calls a number, and clear it of our ops.

        %a = aten.add(%x, %r)                     %p = zinf.fetch(%w)
        zinf.release(%v)                          %f = zinf.wait(%p)
        %p = zinf.fetch(%w)                       %a = aten.add(%x, %r)                1
        %f = zinf.wait(%p)                ->      %n = aten.native_layer_norm(%a, %f)  1
        %n = aten.native_layer_norm(%a, %f)       zinf.release(%v)
        zinf.release(%f)                          zinf.release(%f)

    A call of flex_attention has a number to itself.

    What a member of the run reads goes ahead of it, all else goes behind. So which nodes form a
    fusion hangs on what is computed, and not on what moves meanwhile. Casts of parameters, and
    casts of gradients that leave, are no members: those are as large as a weight, and one kernel
    each.

    enabled  else nothing is done: all compute is run as it is
    """

    name: ClassVar[str] = "find-fusions"
    needs: ClassVar[frozenset[Fact]] = frozenset(
        {Fact.PARAMS_RELEASED, Fact.GRADS_REDUCED, Fact.PHASES_ASSIGNED}
    )
    gives: ClassVar[frozenset[Fact]] = frozenset({Fact.FUSIONS_FOUND})

    enabled: bool = False

    def rewrite(self, graph: fx.Graph, plan: GraphPlan) -> GraphPlan:
        if not self.enabled:
            return plan
        weights = frozenset(
            fetch for fetch in find(graph, ops.fetch) if not plan.spec_of(fetch).activation
        )
        for number, run in enumerate(_runs(graph, weights)):
            run.clear()
            set_fusion(run.members, number)
        dynamic = [n for n in graph.nodes if is_compute(n) and is_fusible_but_for_sizes(n)]
        if not dynamic:
            return plan
        text = f"{len(dynamic)} ops run eagerly: their sizes are dynamic (give dynamic=False)"
        return replace(plan, notes=(*plan.notes, Note(self.name, None, text)))


@dataclass
class _Run:
    """A run of compute that grows node by node.

    members  in order; `inside`: the same
    between  nodes since the first member that are no members, in order
    tainted  those of them that come of a member
    ahead    those of them that a member reads
    """

    phase: Phase
    members: list[fx.Node] = field(default_factory=list)
    inside: set[fx.Node] = field(default_factory=set)
    between: list[fx.Node] = field(default_factory=list)
    tainted: set[fx.Node] = field(default_factory=set)
    ahead: set[fx.Node] = field(default_factory=set)

    def skip(self, node: fx.Node) -> None:
        """Leave a node where it is for now."""
        self.between.append(node)
        if any(n in self.inside or n in self.tainted for n in node.all_input_nodes):
            self.tainted.add(node)

    def takes(self, node: fx.Node) -> bool:
        """Make a node a member, with the views of members that it reads, if that can be.

        It cannot where the node needs what is no member, and comes of one.
        """
        views, ahead = set[fx.Node](), set[fx.Node]()
        between, queue = set(self.between), list(node.all_input_nodes)
        while queue:
            needed = queue.pop()
            if needed not in between or needed in views or needed in ahead:
                continue
            if needed in self.tainted:
                if not is_compute(needed) or not bases_of(needed):
                    return False
                views.add(needed)
            else:
                ahead.add(needed)
            queue += needed.all_input_nodes
        self.ahead |= ahead
        self.tainted -= views
        taken = [n for n in self.between if n in views]
        self.between = [n for n in self.between if n not in views]
        self.members += [*taken, node]
        self.inside.update(views, {node})
        return True

    def add_parts(self, node: fx.Node) -> None:
        """Take in the results of a member that has several, right behind it."""
        parts = [user for user in node.users if user.target is getitem]
        for part in reversed(parts):
            node.append(part)
        self.members += parts
        self.inside.update(parts)

    def clear(self) -> None:
        """Move what is no member ahead of the run, or behind it."""
        self.members.sort()  # a view is taken in after members that it stands before
        first, last = self.members[0], self.members[-1]
        for node in self.between:
            if node in self.ahead:
                first.prepend(node)
        behind = [n for n in self.between if n not in self.ahead and n < last]
        for node in reversed(behind):
            last.append(node)


Weights = Container[fx.Node]
"""The fetches that bring parameters. A value that was offloaded counts as what forward made: that
it was, is decided by a budget."""


def _runs(graph: fx.Graph, weights: Weights) -> Iterator[_Run]:
    """The runs that are worth compiling, each once it has ended; `clear` moves none of another."""
    run: _Run | None = None

    def ended() -> Iterator[_Run]:
        if run is not None and is_worth_compiling(run.members):
            yield run

    for node in list(graph.nodes):
        if node.op != "call_function" and node.op != "output":
            continue
        if run is not None and node in run.inside:
            continue
        fits = node.op != "output" and _is_member(node, weights)
        if run is not None and (
            node.op == "output" or phase_of(node) is not run.phase or _ends(node, weights)
        ):
            yield from ended()
            run = None
        if run is not None and fits:
            if len(run.members) < MOST_NODES and run.takes(node):
                run.add_parts(node)
                continue
            yield from ended()
            run = None
        if is_flex_attention(node):
            alone = _Run(phase_of(node))
            alone.takes(node)
            alone.add_parts(node)
            yield alone
        elif fits:
            run = _Run(phase_of(node))
            run.takes(node)
            run.add_parts(node)
        elif run is not None:
            run.skip(node)


def _is_member(node: fx.Node, weights: Weights) -> bool:
    """Whether a node may be a member by itself; a view only as what a member reads."""
    if not is_compute(node) or not is_fusible(node) or not computes(node):
        return False
    return not _is_aside(node, weights) and all(
        _nbytes(root) <= MOST_READ for root in map(root_of, node.all_input_nodes) if root in weights
    )


def _ends(node: fx.Node, weights: Weights) -> bool:
    """Whether a run ends at a node: at a call of a library, or of something else that is left as
    it is."""
    if not is_compute(node) or _is_member(node, weights) or _is_aside(node, weights):
        return False
    if node.target is getitem:
        return False  # its parent has ended the run, or is a view
    return not (is_fusible(node) and bases_of(node))


def _is_aside(node: fx.Node, weights: Weights) -> bool:
    """Whether a node makes something of parameters alone, or casts a gradient that leaves."""
    if not is_fusible(node) or not computes(node):
        return False
    roots = [root_of(n) for n in node.all_input_nodes]
    if roots and all(root in weights for root in roots):
        return True
    if not is_cast(node):
        return False
    aliases = set(aliases_of(node))
    readers = [user for alias in aliases for user in alias.users if user not in aliases]
    return bool(readers) and all(user.target in ops.SINKS for user in readers)


def _nbytes(node: fx.Node) -> int:
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor):
        return 0
    return hint(value.numel()) * value.dtype.itemsize
