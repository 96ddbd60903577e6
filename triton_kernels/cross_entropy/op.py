"""The ops of cross-entropy: kernels on CUDA, formulas on the CPU.

They are defined by their schemas, and not by torch's `custom_op`, since `tile_gradient_` returns
what it writes, as ops of torch do that work in place: what reads the gradient reads its result.

Shapes: logits [tokens, classes], any row stride, classes without gaps; numbers of a token [tokens,
1], without gaps, f32 or f64 as `greatest` and `log_norm` are; target [tokens, 1] int64.
"""

import torch
from torch import Tensor, library

from triton_kernels import demand, on
from triton_kernels.cross_entropy import reference

_LIBRARY = library.Library("triton_kernels", "FRAGMENT")
_SEEN = "Tensor logits, Tensor target, Tensor greatest, Tensor total, Tensor picked"
_LIBRARY.define(f"see_tile({_SEEN}) -> (Tensor, Tensor, Tensor)")
_LIBRARY.define(f"see_tile_and_sum({_SEEN}, Tensor sum) -> (Tensor, Tensor, Tensor, Tensor)")
_LIBRARY.define(
    "tile_gradient_(Tensor(a!) logits, Tensor target, Tensor log_norm, Tensor loses, "
    "Tensor? picked, Tensor? spread) -> Tensor(a!)"
)


def see_tile(
    logits: Tensor, target: Tensor, greatest: Tensor, total: Tensor, picked: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """What is known of every token with one tile of the vocabulary more: greatest, total, picked.

    logits    [tokens, classes] f16, bf16, f32 or f64, of this tile
    target    less the number of classes in the tiles before; of other tiles, or of none: any number
    greatest  logit so far; the least finite number before the first tile
    total     sum of exponentials so far, relative to the greatest
    picked    logit of the target, if its tile has come
    raises    KernelUnavailable
    """
    made: tuple[Tensor, Tensor, Tensor] = torch.ops.triton_kernels.see_tile(
        logits, target, greatest, total, picked
    )
    return made


def see_tile_and_sum(
    logits: Tensor, target: Tensor, greatest: Tensor, total: Tensor, picked: Tensor, sum: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The same, and the sum of all logits, as label smoothing asks for it.

    sum  of the logits in the tiles before
    """
    made: tuple[Tensor, Tensor, Tensor, Tensor] = torch.ops.triton_kernels.see_tile_and_sum(
        logits, target, greatest, total, picked, sum
    )
    return made


def tile_gradient_(
    logits: Tensor,
    target: Tensor,
    log_norm: Tensor,
    loses: Tensor,
    picked: Tensor | None,
    spread: Tensor | None,
) -> Tensor:
    """Turn a tile of logits into its gradient, in place; returns it.

    logits    [tokens, classes] f16, bf16, f32 or f64
    target    less the number of classes in the tiles before
    log_norm  log of the sum of exponentials of all tiles
    loses     factor of every exponential
    picked    what is added where the target is; None: nothing
    spread    what is added everywhere; None: nothing
    raises    KernelUnavailable
    """
    made: Tensor = torch.ops.triton_kernels.tile_gradient_(
        logits, target, log_norm, loses, picked, spread
    )
    return made


def _see_on_cuda(
    logits: Tensor, target: Tensor, greatest: Tensor, total: Tensor, picked: Tensor
) -> tuple[Tensor, ...]:
    demand("triton_kernels::see_tile", logits.device)
    from triton_kernels.cross_entropy.kernel import launch_see_tile  # imports triton

    with on(logits.device):
        return launch_see_tile(logits, target, greatest, total, picked, None)


def _see_and_sum_on_cuda(
    logits: Tensor, target: Tensor, greatest: Tensor, total: Tensor, picked: Tensor, sum: Tensor
) -> tuple[Tensor, ...]:
    demand("triton_kernels::see_tile_and_sum", logits.device)
    from triton_kernels.cross_entropy.kernel import launch_see_tile  # imports triton

    with on(logits.device):
        return launch_see_tile(logits, target, greatest, total, picked, sum)


def _gradient_on_cuda(
    logits: Tensor,
    target: Tensor,
    log_norm: Tensor,
    loses: Tensor,
    picked: Tensor | None,
    spread: Tensor | None,
) -> Tensor:
    demand("triton_kernels::tile_gradient_", logits.device)
    from triton_kernels.cross_entropy.kernel import launch_tile_gradient  # imports triton

    with on(logits.device):
        launch_tile_gradient(logits, target, log_norm, loses, picked, spread)
    return logits


def _seen_traced(
    logits: Tensor, target: Tensor, greatest: Tensor, *others: Tensor
) -> tuple[Tensor, ...]:
    return tuple(torch.empty_like(greatest) for _ in range(1 + len(others)))


def _gradient_traced(logits: Tensor, *others: Tensor | None) -> Tensor:
    return logits


for _name, _formula, _kernel, _traced in (
    ("see_tile", reference.see_tile, _see_on_cuda, _seen_traced),
    ("see_tile_and_sum", reference.see_tile_and_sum, _see_and_sum_on_cuda, _seen_traced),
    ("tile_gradient_", reference.tile_gradient_, _gradient_on_cuda, _gradient_traced),
):
    _LIBRARY.impl(_name, _formula, "CPU")
    _LIBRARY.impl(_name, _kernel, "CUDA")
    library.register_fake(f"triton_kernels::{_name}", _traced, lib=_LIBRARY)
