"""The code of regions, which looks whether results lie in memory as tracing told.

Strides decide what is traced: a formula of autograd leaves out a copy that it makes of what is not
contiguous. They are those of torch's fake kernels, and of ops that users register those of theirs;
where a real kernel lays its result out otherwise, an op behind it may read memory in a wrong order,
without a word. What is known of torch's own ops stands in `ir/eager_layouts.py`; this is the net
below it: regions look when they first run. Where a result of torch's lies otherwise, those who take
its layout for granted get a copy that lies as told from then on. A user's op may choose its layout
by the sizes of a call: its results are looked at in each. It is said once for each op.
"""

import logging
import threading
from collections import defaultdict
from collections.abc import Container, Sequence
from operator import getitem
from typing import Any, NamedTuple, TypeGuard

import torch
from torch import Tensor, fx
from torch.fx.node import map_arg

from zcompile.ir.eager_layouts import Order, as_ordered, dense_strides, is_laid_out
from zcompile.ir.printer import target_of
from zcompile.ir.torch_compat import Dispatched, hint

aten = torch.ops.aten
log = logging.getLogger(__name__)

_TRUSTING = frozenset(
    {
        aten.view.default,
        aten.view.dtype,
        aten._unsafe_view.default,
        aten.as_strided.default,
        aten.view_as_complex.default,
        aten.native_group_norm.default,
        aten.native_group_norm_backward.default,
        aten.native_layer_norm.default,
        aten.native_layer_norm_backward.default,
        aten._weight_norm_interface.default,
        aten._weight_norm_interface_backward.default,
    }
)
"""Torch's ops that fail, or read numbers in a wrong order, where an argument lies otherwise than
what traced them took for granted. Others look at the strides that they are given."""

_told: set[str] = set()
"""Ops of which it was said that their results are copied."""


# --- What is looked at ---

MAKER = "maker"
"""Key in `meta` of a node in the code of a region: the `Maker` of a result that is looked at."""
TRUSTS = "trusts"
"""Key in `meta` of a node in the code of a region: whether it takes for granted how its arguments
lie."""


class Maker(NamedTuple):
    """The op that makes a result, whose kernel chooses how that lies.

    leaves  what takes that for granted is outside of the region, too
    others  it is a user's, who is told; its kernel may choose by the sizes of each call
    to_all  all readers are given a copy: a user's op is taken at its word, and so are fusions. Of
            torch's own others round by the layout as in eager PyTorch
    """

    name: str
    leaves: bool
    others: bool = False
    to_all: bool = False


def maker_of(node: fx.Node, inside: Container[fx.Node]) -> Maker | None:
    """The op that makes a traced value, if there is something to look at.

    There is not at a view, at what an op was given and changed, and at a result of torch's that
    nobody takes for granted, such as one that is copied next (`LAYOUTS` of `ir/eager_layouts.py`).

    inside  the nodes of its region
    """
    value, maker = node.meta.get("val"), node
    if not _is_plain(value) or value.dim() < 2 or _hands_on(node):
        return None
    if node.target is getitem:
        (maker, _) = node.args  # type: ignore[assignment]  # of a tuple
    readers = [user for user in node.users if trusts(user)]
    others = _is_others(maker)
    if not (readers or others):
        return None
    leaves = others or any(user not in inside for user in readers)
    return Maker(target_of(maker), leaves, others, to_all=others)


def trusts(node: fx.Node) -> bool:
    """Whether an op takes for granted how its arguments lie, or gives a view to one that does."""
    if node.target in _TRUSTING or _is_others(node):
        return True
    return _hands_on(node) and any(map(trusts, node.users))


def _hands_on(node: fx.Node, position: int = 0) -> bool:
    """Whether a result of an op is what it was given, or a view of that."""
    if node.target is getitem and isinstance(node.args[0], fx.Node):
        return _hands_on(node.args[0], int(node.args[1]))  # type: ignore[arg-type]  # a position
    schema = getattr(node.target, "_schema", None)  # none: a fusion, an op with graphs of its own
    if schema is None or not schema.returns:
        return False
    return schema.returns[min(position, len(schema.returns) - 1)].alias_info is not None


def _is_others(node: fx.Node) -> bool:
    """Whether a node calls an op that is neither torch's nor ours."""
    return isinstance(node.target, Dispatched) and node.target.namespace not in _KNOWN


_KNOWN = frozenset(
    {"aten", "prims", "rngprims", "inductor", "mkldnn", "quantized", "_c10d_functional", "zinf"}
)
"""Namespaces of torch's ops, and of ours."""


# --- The code ---


class RegionCode:
    """What a graph of ops computes: called with its inputs, it returns a tuple of its results.

    graph  of ops as they run; a node that has a `MAKER` has as `meta["val"]` what was traced
    """

    def __init__(self, graph: fx.Graph) -> None:
        self.graph = graph
        self._code: Any = None
        self._looked, self._looking = False, threading.Lock()

    def __call__(self, *given: Any) -> tuple[Any, ...]:
        if not self._looked:
            with self._looking:  # which writes to the graph
                results = self._first_run(given)
                self._looked = True
            return results
        if self._code is None:
            self._code = fx.GraphModule(torch.nn.Module(), self.graph).forward
        called: tuple[Any, ...] = self._code(*given)
        return called

    def _first_run(self, given: Sequence[Any]) -> tuple[Any, ...]:
        """Run the ops one by one; each value is dropped after its last reader, as the code does."""
        ends = _last_readers(self.graph)
        inputs, values = list(reversed(given)), dict[fx.Node, Any]()
        del given
        results: tuple[Any, ...] = ()
        for node in self.graph.nodes:  # a copy that is written behind one is the next
            if node.op == "placeholder":
                values[node] = inputs.pop()
                continue
            args, kwargs = map_arg((node.args, node.kwargs), values.__getitem__)
            if node.op == "output":
                (results,) = args
                break
            called = getattr(args[0], node.target) if node.op == "call_method" else node.target
            result = called(*(args[1:] if node.op == "call_method" else args), **kwargs)
            del args, kwargs, called
            maker, order = node.meta.get(MAKER), None
            if maker is not None:
                order = _order_told(node.meta["val"], result)
            if order is not None and (maker.others or not is_laid_out(result, order)):
                self._copy_behind(node, maker, order)
                ends = _last_readers(self.graph)
            values[node] = result
            del result
            for ended in ends[node]:
                values.pop(ended, None)
        return results

    def _copy_behind(self, node: fx.Node, maker: Maker, order: Order) -> None:
        """Give what lies as told to those who take that for granted."""
        with self.graph.inserting_after(node):
            laid = self.graph.call_function(as_told, (node, tuple(order), maker.name, maker.others))
        laid.meta["val"] = node.meta["val"]
        del node.meta[MAKER]  # a region that this one is joined to has the copy as well
        for user in [user for user in node.users if user is not laid]:
            reads = maker.leaves if user.op == "output" else user.meta.get(TRUSTS, False)
            if reads or maker.to_all:
                user.replace_input_with(node, laid)


def _last_readers(graph: fx.Graph) -> dict[fx.Node, list[fx.Node]]:
    """Node -> the values that nobody reads behind it, its own included if nobody does."""
    ends: dict[fx.Node, list[fx.Node]] = defaultdict(list)
    seen: set[fx.Node] = set()
    for node in reversed(graph.nodes):
        for value in (node, *node.all_input_nodes):
            if value not in seen:
                seen.add(value)
                ends[node].append(value)
    return ends


def as_told(value: Tensor, order: Order, maker: str, others: bool) -> Tensor:
    """A value if it is dense and in this order, else a copy that is."""
    if is_laid_out(value, order):
        return value
    _tell(maker, others, value, order)
    return as_ordered(value, order)


def _order_told(told: Tensor, result: Any) -> Order | None:
    """The order of dimensions in which a result was told to lie in memory.

    None for results that were told to have gaps, or elements that share memory: no op but views is
    known to make those.
    """
    if not _is_plain(result) or told.dim() != result.dim():
        return None
    sizes, strides = [*map(hint, told.size())], [*map(hint, told.stride())]
    order = sorted(range(told.dim()), key=strides.__getitem__, reverse=True)
    rows = zip(sizes, strides, dense_strides(sizes, order), strict=True)
    if any(stride != dense for size, stride, dense in rows if size != 1):
        return None
    return order


def _is_plain(value: Any) -> TypeGuard[Tensor]:
    """Whether a value is a tensor of strides, and nested in no other."""
    return isinstance(value, Tensor) and value.layout is torch.strided and not value.is_nested


def _tell(maker: str, others: bool, result: Tensor, order: Order) -> None:
    """Say once for each op that its results are copied; to who wrote it, as a warning."""
    if maker in _told:
        return
    _told.add(maker)
    log.log(
        logging.WARNING if others else logging.INFO,
        "%s gives a result with strides %s, and told of %s while it was traced: it is copied each "
        "time, so that what was traced behind it is right%s",
        maker,
        tuple(result.stride()),
        tuple(dense_strides(result.shape, order)),
        "; its fake kernel (register_fake) should lay results out as its kernel does"
        if others
        else "",
    )
