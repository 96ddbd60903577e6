"""Finds and inserts nodes of joint graphs, follows views, and tells the phase of a node.

A node is asked what it is by its target, never by its name. Aliasing is read from op schemas.
"""

import operator
import re
from collections.abc import Callable, Iterable, Iterator
from functools import cache

import torch
from torch import fx

from zcompile.ir import ops
from zcompile.ir.torch_compat import Dispatched, is_tangent
from zcompile.ir.types import Phase

_PHASE = "zinf_phase"
_REGION = "zinf_region"
_USE = "zinf_use"
_ROOT = re.compile(r"^L\['\w+'\](\.|$)")
"""Matches the name of the object whose method Dynamo traces: "L['self'].", with any name for
self."""

UNANNOTATED_VIEWS = frozenset(
    {
        torch.ops.aten._unsafe_view.default,
        torch.ops.aten.unsafe_split.Tensor,
        torch.ops.aten.unsafe_split_with_sizes.default,
    }
)
"""Ops whose result shares storage with their first argument, though the schema does not say so."""

KEEP_STRIDES = frozenset(
    {
        torch.ops.aten.copy.default,
        torch.ops.aten.slice_scatter.default,
        torch.ops.aten.select_scatter.default,
        torch.ops.aten.diagonal_scatter.default,
        torch.ops.aten.as_strided_scatter.default,
    }
)
"""Ops whose result has the layout of their first argument, over a copy of the whole storage behind
that argument; of one that shows elements several times (`expand`) they copy what is shown. The fake
tensors of tracing may have less storage than the results."""

CASTS = frozenset({torch.ops.aten._to_copy.default})
"""Copies in another dtype: cheaper to compute again from a gathered parameter than to save."""

TRANSPOSES = frozenset(
    {torch.ops.aten.t.default, torch.ops.aten.transpose.int, torch.ops.aten.permute.default}
)
"""Views that exchange dimensions."""

RESHAPES = frozenset(
    {
        torch.ops.aten.view.default,
        torch.ops.aten._unsafe_view.default,
        torch.ops.aten.reshape.default,
    }
)
"""Views that are given the sizes of their result, and keep the order of the elements."""

SIZED_VIEWS = RESHAPES | {torch.ops.aten.expand.default}
"""Views that are given the sizes of their result."""

SAME_DIMS = CASTS | {
    torch.ops.aten.detach.default,
    torch.ops.aten.alias.default,
    torch.ops.aten.clone.default,
}
"""Ops of one input, whose result has the dimensions of that."""

KEEP_DIMS = (
    TRANSPOSES
    | SIZED_VIEWS
    | SAME_DIMS
    | {torch.ops.aten.unsqueeze.default, torch.ops.aten.squeeze.dim}
)
"""Views, casts and copies that may keep a dimension of their input whole: tiles along it pass
through them (`rewrite.moved` says where to)."""


UNTAGGED = frozenset(
    {
        torch.ops.aten._to_copy.default,
        torch.ops.aten.detach.default,
        torch.ops.aten.leaky_relu_backward.default,
        torch.ops.aten.softplus_backward.default,
        torch.ops.aten.hardswish_backward.default,
        torch.ops.aten.mish_backward.default,
        torch.ops.aten.hardsigmoid_backward.default,
        torch.ops.aten.log_sigmoid_backward.default,
    }
)
"""Elementwise ops that torch does not tag as pointwise."""


def find(graph: fx.Graph, *targets: object) -> list[fx.Node]:
    """Calls of any of `targets`, in graph order."""
    return [n for n in graph.nodes if n.op == "call_function" and n.target in targets]


def phase_of(node: fx.Node) -> Phase:
    """The phase that `assign_phases`, or `insert`, gave to a node."""
    phase: Phase = node.meta[_PHASE]
    return phase


def set_phase(node: fx.Node, phase: Phase) -> None:
    node.meta[_PHASE] = phase


def region_of(node: fx.Node) -> int | None:
    """The region a compute node was cut into; None for everything else."""
    region: int | None = node.meta.get(_REGION)
    return region


def set_region(node: fx.Node, region: int) -> None:
    node.meta[_REGION] = region


def mark_use(gather: fx.Node, use: str) -> None:
    """Keep a gather for `use` alone: an equal gather for another use is not merged with it."""
    gather.meta[_USE] = use


def use_of(gather: fx.Node) -> str:
    """The use that a gather was made for; "" for any reader."""
    use: str = gather.meta.get(_USE, "")
    return use


def is_ours(node: fx.Node) -> bool:
    """Whether a node calls a zinf op."""
    return node.op == "call_function" and node.target in ops.OURS


def is_compute(node: fx.Node) -> bool:
    """Whether a region may hold the node: a call of an op that is not ours."""
    return node.op == "call_function" and node.target not in ops.OURS


def is_subgraph(node: fx.Node) -> bool:
    """Whether a node is no value but a graph that an op is given, as the mask of flex_attention."""
    return node.op == "get_attr" and "val" not in node.meta


def subgraph_of(node: fx.Node) -> fx.GraphModule:
    """The graph that a node for which `is_subgraph` holds stands for."""
    owner = node.graph.owning_module
    assert owner is not None, "a graph that ops are given graphs in has a module"
    found = owner.get_submodule(str(node.target))
    assert isinstance(found, fx.GraphModule), "an op is given nothing else"
    return found


def output_of(graph: fx.Graph) -> fx.Node:
    output: fx.Node
    (output,) = graph.find_nodes(op="output")
    return output


def bases_of(node: fx.Node) -> tuple[fx.Node, ...]:
    """The nodes whose storage `node` shares; none for a fresh value."""
    if node.op != "call_function":
        return ()
    if node.target is operator.getitem:
        (parent, _) = node.args
        return (parent,) if isinstance(parent, fx.Node) and bases_of(parent) else ()
    if node.target in UNANNOTATED_VIEWS:
        base = node.args[0]
        return (base,) if isinstance(base, fx.Node) else ()
    if not isinstance(node.target, Dispatched):
        return ()
    bases: list[fx.Node] = []
    for position, name in _viewed_arguments(node.target):
        value = node.args[position] if position < len(node.args) else node.kwargs.get(name)
        values = value if isinstance(value, list | tuple) else (value,)
        bases.extend(v for v in values if isinstance(v, fx.Node))
    return tuple(bases)


@cache
def _viewed_arguments(op: Dispatched) -> tuple[tuple[int, str], ...]:
    """Position and name of each argument whose storage the results of an op share; none where all
    are fresh. Kept, since torch makes the parts of a schema anew for each look at them."""
    schema = op._schema
    if not any(r.alias_info is not None for r in schema.returns):
        return ()
    named = enumerate(schema.arguments)
    return tuple((at, given.name) for at, given in named if given.alias_info is not None)


def writes(node: fx.Node) -> bool:
    """Whether a call writes to what it is given: its result is that, and no mere view."""
    return isinstance(node.target, Dispatched) and node.target._schema.is_mutable


def storage_sources(node: fx.Node, results: int) -> list[tuple[fx.Node, ...]]:
    """For each result of a call, the arguments whose storage it shares; none for a fresh result.

    results  number of results; one for a call that does not return a tuple
    """
    if not isinstance(node.target, Dispatched) or node.target in UNANNOTATED_VIEWS:
        return [bases_of(node)] * results
    schema = node.target._schema
    if len(schema.returns) != results:  # a list of views, of which the schema knows one
        return [bases_of(node)] * results
    given: dict[str, list[fx.Node]] = {}
    for position, argument in enumerate(schema.arguments):
        if argument.alias_info is None:
            continue
        value = node.args[position] if position < len(node.args) else node.kwargs.get(argument.name)
        values = value if isinstance(value, list | tuple) else (value,)
        for name in argument.alias_info.before_set:
            given.setdefault(name, []).extend(v for v in values if isinstance(v, fx.Node))

    def sources(aliased: Iterable[str]) -> tuple[fx.Node, ...]:
        named = tuple(n for name in aliased for n in given.get(name, ()))
        return named or bases_of(node)  # of a list of views no name is told

    infos = (r.alias_info for r in schema.returns)
    return [() if info is None else sources(info.before_set) for info in infos]


def reached_from(
    roots: Iterable[fx.Node], neighbours: Callable[[fx.Node], Iterable[fx.Node]]
) -> Iterator[fx.Node]:
    """`roots`, and every node that steps to `neighbours` lead to, depth first; each once."""
    queue = list(dict.fromkeys(roots))
    seen = set(queue)
    while queue:
        node = queue.pop()
        yield node
        for other in neighbours(node):
            if other not in seen:
                seen.add(other)
                queue.append(other)


def aliases_of(node: fx.Node) -> Iterator[fx.Node]:
    """`node` and every view of it, directly or through other views, in discovery order."""
    return reached_from([node], lambda base: [u for u in base.users if base in bases_of(u)])


def views_and_casts_of(gather: fx.Node) -> list[fx.Node]:
    """A gathered parameter, its views, and casts of those: the nodes that backward repeats."""
    found = list(aliases_of(gather))
    for member in found:
        for user in member.users:
            if user.target in CASTS and user not in found:
                found.extend(n for n in aliases_of(user) if n not in found)
    return found


def root_of(node: fx.Node) -> fx.Node:
    """The node whose storage a chain of views shares: `node` itself if it is fresh."""
    while bases := bases_of(node):
        node = bases[0]
    return node


def readers_of(node: fx.Node) -> set[fx.Node]:
    """Everything that reads `node` or a view of it; views are readers too."""
    return {user for alias in aliases_of(node) for user in alias.users}


def insert(
    graph: fx.Graph,
    op: Dispatched,
    *args: fx.node.Argument,
    like: fx.Node,
    phase: Phase,
    val: object,
    name: str | None = None,
) -> fx.Node:
    """Add a call at the graph's insertion point, with module and stack trace of `like`.

    val  the value that the call has in tracing
    """
    node = graph.create_node("call_function", op, args, name=name)
    for key in ("nn_module_stack", "fwd_nn_module_stack", "stack_trace", "seq_nr"):
        if key in like.meta:
            node.meta[key] = like.meta[key]
    node.meta["val"] = val
    set_phase(node, phase)
    return node


def erase_unread(graph: fx.Graph, *nodes: fx.Node) -> None:
    """Erase those of `nodes` that nothing reads, and what only they read."""
    queue, gone = list(nodes), set[fx.Node]()
    while queue:
        node = queue.pop()
        pure = node.op == "call_function" and not node.is_impure()
        if pure and not node.users and node not in gone:
            queue.extend(node.all_input_nodes)
            gone.add(node)
            graph.erase_node(node)


def sink(view: fx.Node) -> None:
    """Move a view right before its first reader: earlier, it would keep its base alive."""
    readers = [user for user in view.users if user.op != "output"]
    if readers:
        min(readers).prepend(view)


def positions(graph: fx.Graph) -> dict[fx.Node, int]:
    """Index of each node."""
    return {node: index for index, node in enumerate(graph.nodes)}


def module_of(node: fx.Node) -> str:
    """Dotted path of the innermost module a node came from; "" if unknown."""
    stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack")
    if not stack:
        return ""
    path, _ = list(stack.values())[-1]
    return _ROOT.sub("", str(path))


def assign_phases(graph: fx.Graph, forward_outputs: int | None) -> None:
    """Give each node its phase, and put forward first.

    Forward is what the first `forward_outputs` outputs need, and whatever has an effect without
    reading a gradient; backward is the rest. None: the whole graph is forward (inference). A call
    that returns nothing, such as an assertion of values, has None as its value in tracing.
    """
    graph.eliminate_dead_code()
    output = output_of(graph)
    results = list(output.args[0]) if isinstance(output.args[0], list | tuple) else [output.args[0]]
    wanted = results if forward_outputs is None else results[:forward_outputs]
    forward = _needed_by([r for r in wanted if isinstance(r, fx.Node)])
    tainted: set[fx.Node] = set()
    for node in graph.nodes:
        if is_tangent(node) or any(n in tainted for n in node.all_input_nodes):
            tainted.add(node)
        elif node.op != "output" and node not in forward and node.is_impure():
            forward |= _needed_by([node])
    for node in list(graph.nodes):
        if node.op == "call_function" and node.target is operator.getitem:
            inside = node.args[0] in forward
        else:
            inside = forward_outputs is None or node in forward
            inside = inside or (node.op in ("placeholder", "get_attr") and not is_tangent(node))
        if inside:
            forward.add(node)
        set_phase(node, Phase.FORWARD if inside else Phase.BACKWARD)
        if isinstance(node.target, Dispatched) and not node.target._schema.returns:
            node.meta.setdefault("val", None)  # tracing leaves it out
    for node in [n for n in graph.nodes if n.op == "call_function"]:
        if phase_of(node) is Phase.BACKWARD:
            output.prepend(node)


def _needed_by(roots: list[fx.Node]) -> set[fx.Node]:
    return set(reached_from(roots, lambda node: node.all_input_nodes))
