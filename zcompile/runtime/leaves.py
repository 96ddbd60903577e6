"""What autograd knows of a leaf: who takes a gradient, in which layout, past which hooks."""

from functools import cache
from typing import Any

import torch
from torch import Tensor

from zcompile.errors import Unsupported
from zcompile.runtime.store import Entry
from zcompile.specs import Layout
from zcompile.torch_private import hooks_of, will_accumulate


def taker(entry: Entry) -> Tensor | None:
    """The parameter that a gradient is for; None if it is gone.

    raises  Unsupported, if this is `torch.autograd.grad` and not `backward`
    """
    param = entry.owner() if entry.owner is not None else None
    if param is not None and not _accumulates(param):
        raise Unsupported(
            f"{entry.name!r} is on the way of torch.autograd.grad or backward(inputs=...), "
            "which a compiled model with tiered parameters cannot serve",
            "call loss.backward() and read .grad, or call the model without torch.compile",
        )
    return param


def state_of(grad: Tensor | None) -> object:
    """Changes when somebody gives a parameter another gradient, or adds to the one it has."""
    entry = getattr(grad, "entry", None)
    return (entry.key, entry.version) if isinstance(entry, Entry) else id(grad)


def like(param: Tensor, grad: Tensor) -> Tensor:
    """`grad` with the strides of `param`, the layout autograd gives to `.grad`; its own bits."""
    grad = grad.resolve_conj().resolve_neg()
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


def _accumulates(param: Tensor) -> bool:
    try:
        return will_accumulate(param)
    except RuntimeError:  # what torch says to a leaf inside torch.autograd.grad
        return False


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
