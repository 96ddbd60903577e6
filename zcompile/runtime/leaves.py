"""What autograd knows of a leaf: who takes a gradient, in which layout, past which hooks."""

from functools import cache
from typing import Any

import torch
from torch import Tensor

from zcompile.errors import Unsupported
from zcompile.ir.handles import Leaf
from zcompile.ir.torch_compat import hooks_of, materialised, will_accumulate
from zcompile.ir.types import Layout
from zcompile.runtime.store.store import Entry


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
