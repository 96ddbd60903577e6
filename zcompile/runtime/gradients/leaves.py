"""Describes leaves of autograd: who takes a gradient, in which layout, and past which hooks.

A contribution may come in tiles (`TiledContribution`): each tile is stored at once, and the last
one completes the gradient.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from zcompile.errors import Unsupported
from zcompile.ir.handles import Leaf
from zcompile.ir.torch_compat import (
    hooks_of,
    materialised,
    will_accumulate,
    will_accumulate_each,
)
from zcompile.ir.types import Layout, row_major
from zcompile.runtime.norms import Norms
from zcompile.runtime.store.store import Entry, Store, used_by_runtime
from zcompile.runtime.transfer.ticket import Ticket

# --- Who takes a gradient ---


def accumulating_parameter(leaf: Leaf) -> Tensor | None:
    """The parameter that a gradient is for, or None.

    None if the parameter is gone, or wants no gradient of this pass, as in `torch.autograd.grad`
    and `backward(inputs=...)` that name others.

    raises  Unsupported, if `torch.autograd.grad` is to return the gradient of this parameter
    """
    param = owner_of(leaf)
    if param is None or not param.requires_grad:
        return None
    try:
        return param if will_accumulate(param) else None
    except RuntimeError as error:  # what torch says to a leaf that torch.autograd.grad asks for
        raise Unsupported(
            f"torch.autograd.grad asks for the gradient of {leaf.name!r}, which a compiled model "
            "with tiered parameters cannot return",
            "call loss.backward() and read .grad (backward(inputs=[...]) limits it to some), or "
            "call the model without torch.compile",
        ) from error


def accumulating_parameters(leaves: Sequence[Leaf]) -> list[Tensor | None]:
    """`accumulating_parameter` of each of `leaves`: a backward asks that of hundreds at once."""
    found = [owner_of(leaf) for leaf in leaves]
    asked = [param for param in found if param is not None and param.requires_grad]
    try:
        answers = dict(zip(map(id, asked), will_accumulate_each(asked), strict=True))
    except RuntimeError:  # of one of them, which is named then
        return [accumulating_parameter(leaf) for leaf in leaves]
    return [param if answers.get(id(param)) else None for param in found]


def refuse_graph_of_gradients(leaves: Sequence[Leaf], _: object) -> None:
    """Autograd comes to the node of a compiled call: refuse `backward(create_graph=True)`.

    The gradients of `leaves` do not pass through autograd, so that they have no graph, and a loss
    that is made of them would be a constant.

    raises  Unsupported, if one of the parameters takes a gradient that is to have a graph
    """
    if not torch.is_grad_enabled():  # which it is in a backward that records its ops
        return
    for leaf in leaves:
        if accumulating_parameter(leaf) is not None:
            raise Unsupported(
                f"the gradient of {leaf.name!r} is to have a graph (create_graph=True), and a "
                "compiled model computes it, whose backward cannot be differentiated",
                "call the model without torch.compile where gradients are differentiated",
            )


def owner_of(leaf: Leaf) -> Tensor | None:
    """The parameter whose gradient comes by a handle; None if it is gone."""
    return leaf.owner() if leaf.owner is not None else None


# --- Layout ---


def in_layout_of(param: Tensor, grad: Tensor) -> Tensor:
    """`grad` with the strides of `param`, the layout autograd gives to `.grad`; its own bits."""
    grad = materialised(grad)
    if not Layout.of(param).dense:
        return grad.contiguous()
    if grad.stride() == param.stride():
        return grad
    made = torch.empty_strided(param.size(), param.stride(), dtype=grad.dtype, device=grad.device)
    return made.copy_(grad)


def flattened(dense: Tensor) -> Tensor:
    """The elements of a dense tensor in the order of its storage: [numel]."""
    if dense.stride() == (1,):
        return dense
    return dense.as_strided((dense.numel(),), (1,))


def gradient_state(grad: Tensor | None) -> object:
    """A value that changes when somebody gives a parameter another gradient, or adds to the one it
    has."""
    entry = getattr(grad, "entry", None)
    if isinstance(entry, Entry):
        return entry.key, entry.version
    return grad is not None and (id(grad), 0 if grad.is_inference() else grad._version)


# --- Hooks ---


def may_have_node_hooks(param: Tensor) -> bool:
    """Whether somebody got hold of the node by which autograd adds to the gradient of a parameter.

    Hooks may have been put there, which only autograd can call.
    """
    reached: bool = getattr(param, "reached", False)
    return reached


def run_hooks(param: Tensor, grad: Tensor) -> Tensor:
    """What the hooks that a user registered on `param` make of its gradient."""
    for hook in list(hooks_of(param)[0].values()):
        changed = hook(grad)
        grad = grad if changed is None else changed
    return grad


@cache
def autograd_always_calls_post_hooks() -> bool:
    """Whether autograd calls post-accumulate hooks of a leaf that it brought no gradient."""
    told: list[Tensor] = []
    leaf = torch.zeros((), requires_grad=True)
    leaf.register_post_accumulate_grad_hook(told.append)
    with torch.enable_grad():
        _Nothing.apply(leaf).backward()  # type: ignore[no-untyped-call]  # torch's
    return bool(told)


class _Nothing(torch.autograd.Function):
    """A function whose backward gives no gradient."""

    @staticmethod
    def forward(ctx: Any, leaf: Tensor) -> Tensor:
        return torch.zeros(())

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> None:
        return None


# --- Tiles ---


@dataclass
class TiledContribution:
    """A contribution to a gradient of which some tiles are here.

    param  whose gradient it is
    held   the tiered gradient over the entry that the tiles go to
    adds   tiles are added to what rests there; else they are all of it
    alone  the contribution is all that this backward pass gives to `param`
    found  the state of `.grad` when the first tile came
    left   elements that are still to come
    """

    param: Tensor
    held: Tensor
    adds: bool
    alone: bool
    found: object
    left: int

    @property
    def entry(self) -> Entry:
        held: Any = self.held
        entry: Entry = held.entry
        return entry


def whole_layout(param: Tensor, dtype: torch.dtype) -> Layout:
    """The layout of all tiles together: row-major, as the parameter."""
    size = tuple(param.size())
    return Layout(size, row_major(size), 0, dtype)


def can_add_tiles(held: Tensor | None, layout: Layout) -> bool:
    """Whether tiles of a gradient of this layout can be added to `held` one by one."""
    entry = getattr(held, "entry", None)
    return isinstance(entry, Entry) and getattr(held, "entry_layout", None) == layout


def store_tile(
    store: Store,
    norms: Norms,
    contribution: TiledContribution,
    tile: Tensor,
    offset: int,
    after: Sequence[Ticket],
) -> None:
    """Start storing `tile`, which begins `offset` elements after the first.

    tile   contiguous
    after  complete once it is computed
    """
    flat, entry = tile.reshape(-1), contribution.entry
    begin = offset * flat.element_size()
    if contribution.adds:
        with used_by_runtime(entry):
            store.add(entry, flat, begin=begin, after=after)
    else:
        store.put(entry, flat.view(torch.uint8), begin=begin, after=after)
        norms.note_tile(entry, offset, tile)
    contribution.left -= flat.numel()
