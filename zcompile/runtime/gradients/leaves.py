"""What autograd knows of a leaf: who takes a gradient, in which layout, past which hooks.

A gradient that comes in tiles: each goes home at once, and the last one makes them a whole.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from zcompile.errors import Unsupported
from zcompile.ir.handles import Leaf
from zcompile.ir.torch_compat import hooks_of, materialised, will_accumulate
from zcompile.ir.types import Layout, row_major
from zcompile.runtime.norms import Norms
from zcompile.runtime.store.store import Entry, Store
from zcompile.runtime.transfer.ticket import Ticket


def taker(leaf: Leaf) -> Tensor | None:
    """The parameter that a gradient is for; None if it is gone, or wants none of this pass, as in
    `torch.autograd.grad` and `backward(inputs=...)` that name others.

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


def owner_of(leaf: Leaf) -> Tensor | None:
    """The parameter whose gradient comes by a handle; None if it is gone."""
    return leaf.owner() if leaf.owner is not None else None


def is_reached(param: Tensor) -> bool:
    """Whether somebody got hold of the node by which autograd adds to the gradient of a parameter,
    and may have put hooks on it."""
    reached: bool = getattr(param, "reached", False)
    return reached


def state_of(grad: Tensor | None) -> object:
    """Changes when somebody gives a parameter another gradient, or adds to the one it has."""
    entry = getattr(grad, "entry", None)
    return (entry.key, entry.version) if isinstance(entry, Entry) else id(grad)


def like(param: Tensor, grad: Tensor) -> Tensor:
    """`grad` with the strides of `param`, the layout autograd gives to `.grad`; its own bits."""
    grad = materialised(grad)
    if not Layout.of(param).dense:
        return grad.contiguous()
    if grad.stride() == param.stride() and grad.dtype == param.dtype:
        return grad
    made = torch.empty_strided(param.size(), param.stride(), dtype=grad.dtype, device=grad.device)
    return made.copy_(grad)


def flat(dense: Tensor) -> Tensor:
    """The elements of a dense tensor in the order of its storage, as one dimension."""
    return dense.as_strided((dense.numel(),), (1,))


def hooked(param: Tensor, grad: Tensor) -> Tensor:
    """What the hooks that a user registered on `param` make of its gradient."""
    for hook in list(hooks_of(param)[0].values()):
        changed = hook(grad)
        grad = grad if changed is None else changed
    return grad


@cache
def tells_without_gradient() -> bool:
    """Whether autograd calls the post-accumulate hooks of a leaf that it brought no gradient."""
    told: list[Tensor] = []
    leaf = torch.zeros((), requires_grad=True)
    leaf.register_post_accumulate_grad_hook(told.append)
    with torch.enable_grad():
        _Nothing.apply(leaf).backward()  # type: ignore[no-untyped-call]  # torch's
    return bool(told)


class _Nothing(torch.autograd.Function):
    """Has no gradient to give."""

    @staticmethod
    def forward(ctx: Any, leaf: Tensor) -> Tensor:
        return torch.zeros(())

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> None:
        return None


@dataclass
class Arriving:
    """A contribution of which some tiles are here.

    param  whose gradient it is
    held   the tiered gradient over the entry that they go to
    adds   they are added to what rests there; else they are all of it
    alone  it is all that this backward pass gives to `param`
    found  what `.grad` was when the first tile came
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
    """How all tiles together lie: row-major, as the parameter does."""
    size = tuple(param.size())
    return Layout(size, row_major(size), 0, dtype)


def takes_tiles(held: Tensor | None, layout: Layout) -> bool:
    """Whether tiles of a gradient that lies so can be added to `held` one by one."""
    entry = getattr(held, "entry", None)
    return isinstance(entry, Entry) and getattr(held, "entry_layout", None) == layout


def send(
    store: Store,
    norms: Norms,
    arriving: Arriving,
    tile: Tensor,
    offset: int,
    after: Sequence[Ticket],
) -> None:
    """`tile` leaves for its place, `offset` elements after the first.

    tile   contiguous
    after  complete once it is computed
    """
    flat, entry = tile.reshape(-1), arriving.entry
    begin = offset * flat.element_size()
    if arriving.adds:
        store.add(entry, flat, begin=begin, after=after)
    else:
        store.put(entry, flat.view(torch.uint8), begin=begin, after=after)
        norms.note_tile(entry, offset, tile)
    arriving.left -= flat.numel()
