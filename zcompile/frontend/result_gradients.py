"""Tells where the backward of a graph takes gradients in another layout than eager PyTorch does.

torch traces a graph for gradients that lie in memory as its results do, and copies those that come
otherwise: expanded from one number (of a `mean` outside of the graph), or of another memory format.
Nor has their sum with what comes from within the graph always the format that eager PyTorch gives
it (`ir/eager_formulas.py::passed_over`). The values are the same; but kernels add up the elements
of a gradient in the order of its memory, so that what they make of it (the gradient of a bias) may
differ in the last bits.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any

from torch import Tensor

from zcompile.ir.eager_formulas import layout_of
from zcompile.ir.torch_compat import grad_fn_of

LAID_OUT_OTHERWISE = (
    "the gradient of a result comes in another layout than torch traced the graph for; "
    "its elements may be added up in another order"
)


def watch_layouts(
    node: Any, results: Sequence[Any], passed_over: Collection[int], tell: Callable[[], None]
) -> None:
    """Have `tell` called if `node` of autograd is run with a gradient that is laid out otherwise
    than the result that it is of, or with one at a position that is passed over."""
    layouts = {
        result.output_nr: None if position in passed_over else layout_of(result)
        for position, result in enumerate(results)
        if isinstance(result, Tensor) and result.dim() and grad_fn_of(result) is node
    }
    if layouts:
        node.register_prehook(partial(_compare, layouts, tell))


def _compare(
    layouts: Mapping[int, object], tell: Callable[[], None], gradients: Sequence[Tensor | None]
) -> None:
    """Autograd calls this before the node, with None for a result that has no gradient."""
    for number, layout in layouts.items():
        gradient = gradients[number]
        if gradient is not None and layout_of(gradient) != layout:
            tell()
            return
