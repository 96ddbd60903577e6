"""The op of AdamW: the kernel on CUDA, the formula on the CPU."""

import torch
from torch import Tensor, library

from triton_kernels import demand, on
from triton_kernels.adamw import reference

GRADS = (torch.float32, torch.bfloat16, torch.float16)
NARROW = (torch.bfloat16, torch.float16)


@library.custom_op(
    "triton_kernels::adamw",
    mutates_args=("params", "exp_avgs", "exp_avg_sqs", "narrow"),
    device_types="cuda",
)
def adamw(
    params: list[Tensor],
    grads: list[Tensor],
    exp_avgs: list[Tensor],
    exp_avg_sqs: list[Tensor],
    narrow: list[Tensor],
    steps: list[Tensor],
    scale: Tensor | None,
    found_inf: Tensor | None,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    maximize: bool = False,
    programs: int = 0,
) -> None:
    """One step of AdamW (arXiv 1711.05101) for all parameters, in place, in one launch.

    Each list has an item for each parameter; items of a row have as many elements, in the same
    order of storage, without gaps. They lie on the device or in pinned host memory.

    params       f32
    grads        f32, bf16 or f16, all of one dtype; read only
    exp_avgs     f32, and so are exp_avg_sqs
    narrow       bf16 or f16: receives the new parameter, rounded; an empty list: nothing does
    steps        f32, of one element, on the device: number of this step, from 1
    scale        f32, of one element: factor of every gradient, as of clipping; None: 1
    found_inf    f32, of one element: unless it is 0 nothing is written; None: 0
    programs     at most so many run at once: few leave the device to others; 0: as many as fit
    raises       TypeError and ValueError for operands that are none of these, KernelUnavailable
    """
    lists = (params, grads, exp_avgs, exp_avg_sqs, narrow, steps)
    _check(*lists, [x for x in (scale, found_inf) if x is not None])
    if not params:
        return
    demand("triton_kernels::adamw", steps[0].device)
    for tensor in (t for column in lists for t in column if not t.is_cuda):
        if not tensor.is_pinned():
            raise ValueError(
                "triton_kernels::adamw is given a tensor in host memory that is not pinned, which "
                "the device cannot reach; make it by pin_memory(), or move it to the device"
            )
    from triton_kernels.adamw.kernel import launch  # imports triton

    rates = (lr, beta1, beta2, eps, weight_decay)
    with on(steps[0].device):
        launch(*lists, scale, found_inf, *rates, maximize, programs)


@adamw.register_kernel("cpu")
def _on_cpu(
    params: list[Tensor],
    grads: list[Tensor],
    exp_avgs: list[Tensor],
    exp_avg_sqs: list[Tensor],
    narrow: list[Tensor],
    steps: list[Tensor],
    scale: Tensor | None,
    found_inf: Tensor | None,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    maximize: bool = False,
    programs: int = 0,
) -> None:
    lists = (params, grads, exp_avgs, exp_avg_sqs, narrow, steps)
    _check(*lists, [x for x in (scale, found_inf) if x is not None])
    rates = (lr, beta1, beta2, eps, weight_decay)
    reference.adamw(*lists, scale, found_inf, *rates, maximize)


@adamw.register_fake
def _traced(*args: object, **kwargs: object) -> None:
    return None


def _check(
    params: list[Tensor],
    grads: list[Tensor],
    exp_avgs: list[Tensor],
    exp_avg_sqs: list[Tensor],
    narrow: list[Tensor],
    steps: list[Tensor],
    numbers: list[Tensor],
) -> None:
    """raises  TypeError for a dtype, ValueError for a size or a layout"""
    wide = {"params": params, "exp_avgs": exp_avgs, "exp_avg_sqs": exp_avg_sqs}
    for name, column in {**wide, "grads": grads, "narrow": narrow, "steps": steps}.items():
        if len(column) != len(params) and (column or name != "narrow"):
            raise ValueError(
                f"triton_kernels::adamw has {len(params)} params and {len(column)} {name}; give "
                "one of each for every parameter"
            )
        allowed = {"grads": GRADS, "narrow": NARROW}.get(name, (torch.float32,))
        found = {tensor.dtype for tensor in column}
        if len(found) > 1 or not found <= set(allowed):
            raise TypeError(
                f"triton_kernels::adamw has {name} of {', '.join(sorted(map(str, found)))}; it "
                f"takes one of {', '.join(map(str, allowed))} for all; call it once for each dtype"
            )
        for n, tensor in enumerate(column):
            if name == "steps":
                continue
            if tensor.numel() != params[n].numel() or not tensor.is_contiguous():
                raise ValueError(
                    f"triton_kernels::adamw has {name}[{n}] of size {list(tensor.shape)} and "
                    f"strides {list(tensor.stride())} beside a parameter of size "
                    f"{list(params[n].shape)}; it takes as many elements, in row-major order"
                )
    for tensor in (*steps, *numbers):
        if tensor.numel() != 1 or tensor.dtype is not torch.float32:
            raise TypeError(
                f"triton_kernels::adamw has a step, scale or found_inf of {tensor.dtype} and size "
                f"{list(tensor.shape)}; each is one torch.float32 number"
            )
