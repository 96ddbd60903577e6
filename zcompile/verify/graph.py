"""Checks what must hold of a graph between any two passes.

One function per rule, each of which yields the sentence it would raise. Rules that a pass has not
yet established are named by the facts that establish them.
"""

from collections.abc import Callable, Iterator

import torch
from torch import fx

from zcompile.errors import GraphInvalid
from zcompile.ir import ops, printer
from zcompile.ir.graph import aliases_of, find, is_ours, phase_of, positions, region_of
from zcompile.ir.plan import GraphPlan
from zcompile.ir.types import Phase

Finding = tuple[fx.Node, str]
Rule = Callable[[fx.Graph, GraphPlan], Iterator[Finding]]


def verify(graph: fx.Graph, plan: GraphPlan, *, after: str, facts: frozenset[str]) -> None:
    """Check the rules whose facts are established.

    raises  GraphInvalid with the sentence and the lines around it, on the first broken rule
    """
    for fact, rule in RULES:
        if fact is None or fact in facts:
            for node, why in rule(graph, plan):
                raise GraphInvalid(after, why, printer.excerpt(graph, node))


def values_are_known(graph: fx.Graph, plan: GraphPlan) -> Iterator[Finding]:
    for node in graph.nodes:
        if node.op == "call_function" and "val" not in node.meta:
            yield node, f"%{node.name} has no value to reason about"


def handles_are_params(graph: fx.Graph, plan: GraphPlan) -> Iterator[Finding]:
    for node in find(graph, ops.gather, ops.fetch, *ops.SINKS):
        if not any(source.name in plan.params for source in node.all_input_nodes):
            yield node, f"%{node.name} names no known parameter"


def order_is_topological(graph: fx.Graph, plan: GraphPlan) -> Iterator[Finding]:
    where = positions(graph)
    for node in graph.nodes:
        for source in node.all_input_nodes:
            if where[source] > where[node]:
                yield node, f"%{node.name} reads %{source.name}, which comes later"


def pending_is_only_waited_for(graph: fx.Graph, plan: GraphPlan) -> Iterator[Finding]:
    for fetch in find(graph, ops.fetch):
        for user in fetch.users:
            if user.target is not ops.wait:
                yield user, f"%{user.name} reads %{fetch.name} before its wait"


def full_stays_in_its_phase(graph: fx.Graph, plan: GraphPlan) -> Iterator[Finding]:
    for wait in find(graph, ops.wait):
        for alias in aliases_of(wait):
            for user in alias.users:
                if user.op == "output":
                    yield user, f"the graph returns %{alias.name}, whose bytes are given back"
                elif phase_of(user) is not phase_of(wait):
                    yield user, f"%{user.name} takes %{wait.name} from forward to backward"


def nothing_reads_released(graph: fx.Graph, plan: GraphPlan) -> Iterator[Finding]:
    where = positions(graph)
    for release in find(graph, ops.release):
        (full,) = release.all_input_nodes
        for alias in aliases_of(full):
            for user in alias.users:
                if user is not release and where[user] > where[release]:
                    yield user, f"%{user.name} reads %{alias.name}, released above"


def everything_is_released_once(graph: fx.Graph, plan: GraphPlan) -> Iterator[Finding]:
    for wait in find(graph, ops.wait):
        count = sum(user.target is ops.release for user in wait.users)
        if count != 1:
            yield wait, f"%{wait.name} is released {count} times"


def forward_comes_first(graph: fx.Graph, plan: GraphPlan) -> Iterator[Finding]:
    seen_backward = False
    for node in graph.nodes:
        if node.op != "call_function":
            continue
        backward = phase_of(node) is Phase.BACKWARD
        if seen_backward and not backward:
            yield node, f"%{node.name} is forward and stands among backward nodes"
        seen_backward |= backward


def grads_of_sinks_stay(graph: fx.Graph, plan: GraphPlan) -> Iterator[Finding]:
    for node in find(graph, *ops.SINKS):
        if any(is_ours(user) or user.op == "call_function" for user in node.users):
            yield node, f"something computes with %{node.name}, which holds nothing"


def views_stay_in_their_region(graph: fx.Graph, plan: GraphPlan) -> Iterator[Finding]:
    for wait in find(graph, ops.wait):
        for view in aliases_of(wait):
            for user in view.users:
                if view is not wait and region_of(user) not in (None, region_of(view)):
                    yield user, f"%{user.name} reads %{view.name}, a view made in another region"


def tensors_have_sizes(graph: fx.Graph, plan: GraphPlan) -> Iterator[Finding]:
    for fetch in find(graph, ops.gather, ops.fetch, ops.wait):
        value = fetch.meta["val"]
        if isinstance(value, torch.Tensor) and any(
            not isinstance(n, int) for n in (*value.size(), *value.stride())
        ):
            yield fetch, f"%{fetch.name} has a dynamic size; parameters are static"


RULES: tuple[tuple[str | None, Rule], ...] = (
    (None, values_are_known),
    (None, handles_are_params),
    (None, order_is_topological),
    (None, tensors_have_sizes),
    (None, pending_is_only_waited_for),
    (None, forward_comes_first),
    ("PARAMS_GATHERED", full_stays_in_its_phase),
    (None, nothing_reads_released),
    ("PARAMS_RELEASED", everything_is_released_once),
    ("GRADS_REDUCED", grads_of_sinks_stay),
    ("REGIONS_CUT", views_stay_in_their_region),
)
