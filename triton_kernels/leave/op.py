"""The op that packs gradients: the kernel on CUDA, copies on the CPU.

It is defined by its schema, and not by torch's `custom_op`, which works in Python on every tensor
of a list.
"""

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor, library

from triton_kernels import demand, on
from triton_kernels.leave import reference

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SIDE = 64
"""Elements of which every place is a multiple: 128 bytes at least, a line of a cache, so that no
two gradients share one."""


def places(numels: Sequence[int]) -> list[int]:
    """Where gradients of so many elements begin in a buffer, and where its end is: one more item.

    places([5, 64, 65]) is [0, 64, 128, 256]
    """
    return list(accumulate((-(-n // SIDE) * SIDE for n in numels), initial=0))


_LIBRARY = library.Library("triton_kernels", "FRAGMENT")
_LIBRARY.define("leave(Tensor[] grads, Tensor(a!) packed, SymInt[] offsets) -> ()")


def leave(grads: list[Tensor], packed: Tensor, offsets: list[int]) -> None:
    """Copy many small gradients into one buffer, in one launch.

    grads    f32, bf16 or f16, all of one dtype, on the device, each in row-major order
    packed   [elements] f32, bf16 or f16, in pinned host memory or on the device: values are
             rounded to its dtype. What lies between gradients is left as it is
    offsets  where each begins, in elements; as `places` says, or any that do not overlap
    raises   TypeError and ValueError for operands that are none of these, KernelUnavailable
    """
    with torch.no_grad():  # gradients are packed, not differentiated
        torch.ops.triton_kernels.leave(grads, packed, offsets)


def _on_cuda(grads: list[Tensor], packed: Tensor, offsets: list[int]) -> None:
    _check(grads, packed, offsets)
    if not grads:
        return
    demand("triton_kernels::leave", grads[0].device)
    for tensor in grads:
        if not tensor.is_cuda:
            raise ValueError(
                f"triton_kernels::leave packs what lies on the device; a gradient of size "
                f"{list(tensor.shape)} is on {tensor.device}: copy it by itself"
            )
    if not packed.is_cuda and not packed.is_pinned():
        raise ValueError(
            "triton_kernels::leave packs into host memory that is not pinned, which the device "
            "cannot reach; make the buffer by pin_memory()"
        )
    from triton_kernels.leave.kernel import launch  # imports triton

    with on(grads[0].device):
        launch(grads, packed, offsets)


def _on_cpu(grads: list[Tensor], packed: Tensor, offsets: list[int]) -> None:
    _check(grads, packed, offsets)
    reference.leave(grads, packed, offsets)


def _traced(grads: list[Tensor], packed: Tensor, offsets: list[int]) -> None:
    return None


def _check(grads: list[Tensor], packed: Tensor, offsets: list[int]) -> None:
    """raises  TypeError for a dtype, ValueError for a size or a layout"""
    found = {grad.dtype for grad in grads}
    if len(found) > 1 or not found | {packed.dtype} <= set(DTYPES):
        raise TypeError(
            f"triton_kernels::leave packs gradients of {', '.join(sorted(map(str, found)))} into "
            f"{packed.dtype}; it takes {', '.join(map(str, DTYPES))}, one for all gradients: call "
            "it once for each dtype"
        )
    if len(grads) != len(offsets) or packed.dim() != 1 or not packed.is_contiguous():
        raise ValueError(
            f"triton_kernels::leave packs {len(grads)} gradients at {len(offsets)} offsets into a "
            f"buffer of size {list(packed.shape)}; give one offset for each, and a buffer of one "
            "dimension without gaps"
        )
    for grad, offset in zip(grads, offsets, strict=True):
        if not grad.is_contiguous() or not 0 <= offset <= packed.numel() - grad.numel():
            raise ValueError(
                f"triton_kernels::leave packs a gradient of size {list(grad.shape)} and strides "
                f"{list(grad.stride())} at {offset} of {packed.numel()} elements; it must be in "
                "row-major order, and end within the buffer"
            )


_LIBRARY.impl("leave", _on_cpu, "CPU")
_LIBRARY.impl("leave", _on_cuda, "CUDA")
library.register_fake("triton_kernels::leave", _traced, lib=_LIBRARY)
