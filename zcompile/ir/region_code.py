"""The code of regions, which looks whether results lie in memory as tracing told.

Strides decide what is traced: a formula of autograd leaves out a copy that it makes of what is not
contiguous. They are those of torch's fake kernels, and of ops that users register those of theirs;
where a real kernel lays its result out otherwise, an op behind it may read memory in a wrong order,
without a word. What is known of torch's own ops stands in `ir/eager_layouts.py`; this is the net
below it. Kernels choose a layout by what they are given, so that one look is enough: at the first
run of a region. Where a result lies otherwise, a copy that lies as told takes its place from then
on, and it is said once for each op.
"""

import logging
from collections import defaultdict
from collections.abc import Sequence
from operator import getitem
from typing import Any, TypeGuard

import torch
from torch import Tensor, fx
from torch.fx.node import map_arg

from zcompile.ir.eager_layouts import LAYOUTS, Order, as_ordered, dense_strides, is_laid_out
from zcompile.ir.printer import target_of
from zcompile.ir.torch_compat import hint

aten = torch.ops.aten
log = logging.getLogger(__name__)

_COPIES = frozenset({aten.clone.default, aten.permute.default})
"""What begins the copy that is traced behind an op of `LAYOUTS`."""

_told: set[str] = set()
"""Ops of which it was said that their results are copied."""


MAKER = "maker"
"""Key in `meta` of a node in the code of a region: the op of whose result is looked how it lies."""


def maker_of(node: fx.Node) -> str:
    """The op that makes a traced value, if its kernel chooses how it lies; else "".

    Of a view, of what an op was given and changed, and of what is copied next as the kernel lays it
    out (`LAYOUTS`), nothing is to be seen.
    """
    value, maker, position = node.meta.get("val"), node, 0
    if not _is_plain(value) or value.dim() < 2:
        return ""
    if node.target is getitem:
        maker, position = node.args  # type: ignore[assignment]  # of a tuple
    schema = getattr(maker.target, "_schema", None)  # none: a fusion, an op with graphs of its own
    if schema is not None:
        returns = schema.returns
        if returns[min(position, len(returns) - 1)].alias_info is not None:
            return ""
    if maker.target in LAYOUTS and all(user.target in _COPIES for user in node.users):
        return ""
    return target_of(maker)


class RegionCode:
    """What a graph of ops computes: called with its inputs, it returns a tuple of its results.

    graph  of ops as they run; a node that has a `MAKER` has as `meta["val"]` what was traced
    """

    def __init__(self, graph: fx.Graph) -> None:
        self.graph = graph
        self._code: Any = None
        self._looked = False

    def __call__(self, *given: Any) -> tuple[Any, ...]:
        if not self._looked:
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
        strays: list[tuple[fx.Node, Order]] = []
        results: tuple[Any, ...] = ()
        for node in self.graph.nodes:
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
            maker = node.meta.get(MAKER)
            if maker and (order := _stray(node.meta["val"], result)) is not None:
                _tell(maker, node.meta["val"], result)
                result = as_ordered(result, order)
                strays.append((node, order))
            values[node] = result
            del result
            for ended in ends[node]:
                del values[ended]
        for node, order in strays:
            with self.graph.inserting_after(node):
                laid = self.graph.call_function(as_ordered, (node, tuple(order)))
            laid.meta["val"] = node.meta["val"]
            del node.meta[MAKER]  # a region that this one is joined to has the copy as well
            for user in [user for user in node.users if user is not laid]:
                user.replace_input_with(node, laid)
        return results


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


def _stray(told: Tensor, result: Any) -> Order | None:
    """In which order of dimensions a result was told to lie that lies otherwise.

    None also for results that were told to have gaps, or elements that share memory: no op but
    views is known to make those.
    """
    if not _is_plain(result) or told.dim() != result.dim():
        return None
    strides = [hint(stride) for stride in told.stride()]
    if strides == list(result.stride()):
        return None
    order = sorted(range(told.dim()), key=strides.__getitem__, reverse=True)
    dense = dense_strides([hint(size) for size in told.size()], order)
    if any(n != m for n, m, size in zip(strides, dense, told.size(), strict=True) if size != 1):
        return None
    return None if is_laid_out(result, order) else order


def _is_plain(value: Any) -> TypeGuard[Tensor]:
    """Whether a value is a tensor of strides, and nested in no other."""
    return isinstance(value, Tensor) and value.layout is torch.strided and not value.is_nested


def _tell(maker: str, told: Tensor, result: Tensor) -> None:
    """Say once for each op that its results are copied; to who wrote it, as a warning."""
    if maker in _told:
        return
    _told.add(maker)
    is_torchs = maker.startswith(("aten.", "prims."))
    log.log(
        logging.INFO if is_torchs else logging.WARNING,
        "%s gives a result with strides %s, and told of %s while it was traced: it is copied each "
        "time, so that what was traced behind it is right%s",
        maker,
        tuple(result.stride()),
        tuple(hint(stride) for stride in told.stride()),
        ""
        if is_torchs
        else "; its fake kernel (torch.library.register_fake) should lay results out as its kernel "
        "does",
    )
