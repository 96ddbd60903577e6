"""What the kernel that packs gradients computes, in torch: copies, rounded where dtypes differ."""

from collections.abc import Sequence

from torch import Tensor


def leave(grads: Sequence[Tensor], packed: Tensor, offsets: Sequence[int]) -> None:
    """Copy every gradient to its place in `packed`; see `op.py::leave`."""
    for grad, offset in zip(grads, offsets, strict=True):
        packed[offset : offset + grad.numel()].copy_(grad.view(-1))
