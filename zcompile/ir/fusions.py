"""Finds fusions: runs of compute of which Inductor may make one kernel, or few.

A fusion is what lies between two calls of a library. Products, convolutions, attention and lookups
in tables are kernels of a library with or without Inductor; ops that draw random numbers and ops
that write to what they are given keep eager's order. What lies between is pointwise ops, sums and
norms, and the views among them.

    %a = aten.add(%x, %r)               1
    %n = aten.native_layer_norm(%a)     1      one fusion: reads %x %r, makes %a %n
    %v = aten.view(%n)                         views that others read are made again outside
    %y = aten.mm(%v, %w)                       a library call ends it

A call of `flex_attention` is a fusion by itself: of the graphs that it is given, as its mask,
Inductor makes one kernel, which skips tiles that nobody reads.

Which nodes form a fusion hangs on what is computed alone: not on what is fetched, sent or offloaded
in between, nor on any budget. So the kernels that a model is computed by, and with them the bits of
its results, are the same wherever its bytes rest.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from operator import getitem
from typing import Any

import torch
from torch import fx

from zcompile.ir.graph import CASTS, UNTAGGED, bases_of, is_subgraph, root_of, subgraph_of, writes
from zcompile.ir.torch_compat import Dispatched, is_flex_attention, is_random

aten = torch.ops.aten

_FUSION = "zinf_fusion"
_FUSED = "zinf_fused"

SUMS = frozenset(
    {
        aten.sum.default,
        aten.sum.dim_IntList,
        aten.mean.default,
        aten.mean.dim,
        aten.amax.default,
        aten.amin.default,
        aten.var.correction,
        aten.var_mean.correction,
        aten._softmax.default,
        aten._softmax_backward_data.default,
        aten._log_softmax.default,
        aten._log_softmax_backward_data.default,
        aten.native_layer_norm.default,
        aten.native_layer_norm_backward.default,
        aten._fused_rms_norm.default,
        aten._fused_rms_norm_backward.default,
        aten.native_group_norm.default,
        aten.native_group_norm_backward.default,
        aten._native_batch_norm_legit_functional.default,
        aten._native_batch_norm_legit.no_stats,
        aten.native_batch_norm_backward.default,
        aten.nll_loss_forward.default,
        aten.nll_loss_backward.default,
        aten.avg_pool2d.default,
        aten._adaptive_avg_pool2d.default,
    }
)
"""Ops that Inductor makes loops of, and that add numbers up in an order of their own."""

MOVES = frozenset(
    {
        aten.cat.default,
        aten.clone.default,
        aten.constant_pad_nd.default,
        aten.full.default,
        aten.full_like.default,
        aten.gather.default,
        aten.new_ones.default,
        aten.new_zeros.default,
        aten.ones.default,
        aten.ones_like.default,
        aten.repeat.default,
        aten.select_backward.default,
        aten.slice_backward.default,
        aten.stack.default,
        aten.arange.default,
        aten.arange.start,
        aten.arange.start_step,
        aten.zeros.default,
        aten.zeros_like.default,
    }
)
"""Ops that only move or make values."""

MOST_NODES = 512
"""Nodes of a fusion; a longer run is cut. Inductor compares each kernel with each, which takes
minutes for thousands."""

EXACT = frozenset(
    {
        aten.abs.default,
        aten.add.Scalar,
        aten.add.Tensor,
        aten.bitwise_and.Tensor,
        aten.bitwise_not.default,
        aten.bitwise_or.Tensor,
        aten.clamp.default,
        aten.clamp_min.default,
        aten.div.Scalar,
        aten.div.Tensor,
        aten.eq.Scalar,
        aten.eq.Tensor,
        aten.ge.Scalar,
        aten.ge.Tensor,
        aten.gt.Scalar,
        aten.gt.Tensor,
        aten.le.Scalar,
        aten.le.Tensor,
        aten.logical_and.default,
        aten.logical_not.default,
        aten.lt.Scalar,
        aten.lt.Tensor,
        aten.masked_fill.Scalar,
        aten.maximum.default,
        aten.minimum.default,
        aten.mul.Scalar,
        aten.mul.Tensor,
        aten.ne.Scalar,
        aten.ne.Tensor,
        aten.neg.default,
        aten.relu.default,
        aten.sub.Tensor,
        aten.threshold_backward.default,
        aten.where.self,
    }
)
"""Pointwise ops that everybody rounds alike: one alone is left to eager, as one of `MOVES` or a
cast is. Of exponentials and the like Inductor's bits may differ, so it has those alone too."""

_ITEM = aten._local_scalar_dense.default
_SYMBOLIC = (torch.SymInt, torch.SymFloat, torch.SymBool)
_DYNAMIC_SIZES = (
    "its sizes, or those of its mask's blocks, are dynamic, as torch makes them when they have "
    "changed: give torch.compile dynamic=False to have each compiled"
)
_DYNAMIC_NUMBER = (
    "a number that its mask or score captures is dynamic, as torch makes it when it has changed: "
    "capture it as a tensor, or give torch.compile dynamic=False to have each compiled"
)
_OWN_CONSTANTS = "a graph that it is given has constants of its own, by which it is not known again"


@dataclass(frozen=True)
class Fused:
    """A fusion that is compiled.

    key      digest of its structure, and of what the compiler was told
    call     values in, a list of fresh tensors out, none of which is a view of another
    nbytes   that are live at its peak, of what it makes: results and temporaries
    kernels  that it runs
    """

    key: str
    call: Callable[..., Sequence[Any]]
    nbytes: int
    kernels: int


# --- Marks on nodes ---


def fusion_of(node: fx.Node) -> int | None:
    """The number of the fusion that a node is in; None: it is run as it is."""
    number: int | None = node.meta.get(_FUSION)
    return number


def set_fusion(nodes: Iterable[fx.Node], number: int | None) -> None:
    """Put nodes in a fusion of their graph; None: take them out."""
    for node in nodes:
        node.meta.pop(_FUSION, None)
        node.meta.pop(_FUSED, None)
        if number is not None:
            node.meta[_FUSION] = number


def fused_of(node: fx.Node) -> Fused | None:
    """What the fusion of a node was compiled to; None: it is none, or not compiled."""
    fused: Fused | None = node.meta.get(_FUSED)
    return fused


def set_fused(nodes: Iterable[fx.Node], fused: Fused) -> None:
    for node in nodes:
        node.meta[_FUSED] = fused


def fusions_of(nodes: Iterable[fx.Node]) -> dict[int, list[fx.Node]]:
    """The fusions among `nodes`, each with its nodes in order."""
    found: dict[int, list[fx.Node]] = {}
    for node in nodes:
        if (number := fusion_of(node)) is not None:
            found.setdefault(number, []).append(node)
    return found


# --- What a fusion reads and makes ---


def made_by(nodes: Sequence[fx.Node]) -> list[fx.Node]:
    """The nodes of a fusion whose values are read outside, by themselves or as views; in order."""
    inside = set(nodes)
    read = [n for n in nodes if any(user not in inside for user in n.users)]
    made = {n if _is_fresh(n) else root_of(n) for n in read}
    return [n for n in nodes if n in made]


def read_by(nodes: Sequence[fx.Node], made: Sequence[fx.Node]) -> list[fx.Node]:
    """The nodes outside a fusion that it takes to compute `made`, in the order of first use.

    Graphs that an op is given are no values, but a part of what is computed (`copied`)."""
    inside, needed = set(nodes), set(made)
    for node in reversed(nodes):
        if node in needed:
            needed.update(node.all_input_nodes)
    read = (n for node in nodes if node in needed for n in node.all_input_nodes)
    return list(dict.fromkeys(n for n in read if n not in inside and not is_subgraph(n)))


def views_of_results(nodes: Sequence[fx.Node]) -> list[fx.Node]:
    """The views of a fusion that others read, and the views that these are taken of; in order."""
    inside, wanted = set(nodes), set[fx.Node]()
    for node in reversed(nodes):
        if not _is_fresh(node) and any(u not in inside or u in wanted for u in node.users):
            wanted.add(node)
    return [n for n in nodes if n in wanted]


def copied(
    nodes: Sequence[fx.Node], made: Sequence[fx.Node], read: Sequence[fx.Node]
) -> fx.GraphModule:
    """A module of a fusion by itself: its inputs in the order of `read`, its results in that of
    `made`, with the graphs that its ops are given."""
    root, graph = torch.nn.Module(), fx.Graph()
    env = {node: graph.placeholder(f"in_{at}") for at, node in enumerate(read)}
    for node, placeholder in env.items():
        placeholder.meta = {"val": node.meta["val"]}
    needed = set(made)
    for node in reversed(nodes):
        if node in needed:
            needed.update(node.all_input_nodes)
    for node in (n for n in nodes if n in needed):
        for given in filter(is_subgraph, node.all_input_nodes):
            root.add_module(str(given.target), subgraph_of(given))
            env[given] = graph.get_attr(str(given.target))
        env[node] = copy = graph.node_copy(node, env.__getitem__)
        copy.meta = {"val": node.meta["val"]}
    graph.output(tuple(env[node] for node in made))
    return fx.GraphModule(root, graph)


# --- Which nodes ---


def is_fusible(node: fx.Node) -> bool:
    """Whether a node may be in a fusion: it computes element by element, adds up, or is a view.

    Its sizes are numbers, and it lies on one device with what it reads.
    """
    return _is_known(node) and all(map(_is_static, _tensors(node)))


def is_fusible_but_for_sizes(node: fx.Node) -> bool:
    """Whether a node would be fusible, and does work, if its sizes were numbers."""
    return _is_known(node) and computes(node) and not all(map(_is_static, _tensors(node)))


def refusal_of(nodes: Iterable[fx.Node]) -> str | None:
    """Why Inductor is not asked to compile a fusion that is a call of `flex_attention`, and what to
    do about it; None: it is."""
    calls = [node for node in nodes if is_flex_attention(node)]
    inputs = [n for node in calls for n in node.all_input_nodes]
    graphs = [subgraph_of(n).graph for n in inputs if is_subgraph(n)]
    if not all(_is_static(tensor) for node in calls for tensor in _tensors(node)):
        return _DYNAMIC_SIZES
    numbers = any(isinstance(n.meta.get("val"), _SYMBOLIC) for n in inputs)
    # A captured float comes as a tensor, of which the graph reads the number.
    if numbers or any(graph.find_nodes(op="call_function", target=_ITEM) for graph in graphs):
        return _DYNAMIC_NUMBER
    if any(graph.find_nodes(op="get_attr") for graph in graphs):
        return _OWN_CONSTANTS
    return None


def _is_known(node: fx.Node) -> bool:
    if node.op != "call_function":
        return False
    if node.target is getitem:
        (parent, _) = node.args
        return isinstance(parent, fx.Node) and _is_known(parent)
    if not isinstance(node.target, Dispatched) or writes(node) or is_random(node):
        return False
    known = node.target in SUMS or node.target in MOVES or node.target in UNTAGGED
    if not (known or torch.Tag.pointwise in node.target.tags or bases_of(node)):
        return False
    tensors = _tensors(node)
    return len({t.device for t in tensors}) == 1 and all(map(_is_dense, tensors))


def computes(node: fx.Node) -> bool:
    """Whether a node that is fusible does work: it is no view, and no part of a tuple."""
    return node.target is not getitem and _is_fresh(node)


def is_worth_compiling(nodes: Iterable[fx.Node]) -> bool:
    """Whether Inductor makes a difference: there is more than one op, or one that it may round
    otherwise than eager."""
    work = [node for node in nodes if computes(node)]
    return len(work) > 1 or any(node.target not in EXACT | MOVES | CASTS for node in work)


def is_cast(node: fx.Node) -> bool:
    return node.target in CASTS


def _is_fresh(node: fx.Node) -> bool:
    return not bases_of(node)


def _is_dense(tensor: torch.Tensor) -> bool:
    return tensor.layout is torch.strided and not tensor.dtype.is_complex


def _is_static(tensor: torch.Tensor) -> bool:
    sizes = (*tensor.size(), *tensor.stride(), tensor.storage_offset())
    return all(isinstance(n, int) for n in sizes)


def _tensors(node: fx.Node) -> list[torch.Tensor]:
    """What a node makes, and what it reads."""
    found: list[torch.Tensor] = []
    for n in (node, *node.all_input_nodes):
        value = n.meta.get("val")
        values = value if isinstance(value, list | tuple) else (value,)
        found += (v for v in values if isinstance(v, torch.Tensor))
    return found
