"""One training step of a copy on paper: forward and backward so many times, then the optimizer."""

import types
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from zcompile.errors import Running, Unsupported
from zcompile.frontend.dry_run.paper import paper_backend
from zcompile.ir.torch_compat import failure_of, muted_tracing, trees, without_recompile_limit

REMEDY = (
    "a plan runs the model as it is: give it inputs that it takes, and see that it runs with them"
)


def run_step(
    model: nn.Module, inputs: Sequence[Any], optimizer: torch.optim.Optimizer, times: int
) -> None:
    """Run it. raises  Unsupported, UserCodeFailed"""

    def loss_of(*given: Any) -> Tensor:
        named = len(given) == 1 and isinstance(given[0], Mapping)
        return _loss(model(**given[0]) if named else model(*given))

    # Dynamo keeps what it compiled with the code, and would come to its limit after some plans.
    # What lies behind a graph break is the model's own code, which is not ours to make anew.
    fresh = types.FunctionType(loss_of.__code__.replace(), globals(), "loss_of",
                               None, loss_of.__closure__)  # fmt: skip
    compiled = torch.compile(fresh, backend=paper_backend, dynamic=False)
    name, given = type(model).__name__, ", ".join(_told(inputs))
    for _ in range(times):
        with (
            Running(f"forward of {name} with ({given})", REMEDY, failure_of),
            muted_tracing(),
            without_recompile_limit(),
        ):
            loss = compiled(*inputs)
        if not loss.requires_grad:
            raise Unsupported("the model's output does not depend on what it trains",
                              "let forward return the loss")  # fmt: skip
        with Running(f"backward of {name} with ({given})", REMEDY, failure_of):
            loss.backward()
    with Running(f"a step of {type(optimizer).__name__}", REMEDY, failure_of):  # fmt: skip
        optimizer.step()


def _loss(result: Any) -> Tensor:
    """The loss of a call: its result, its `.loss`, or else a mean that stands for one."""
    if isinstance(result, Tensor) and result.dim() == 0:
        return result
    loss = getattr(result, "loss", None)
    if isinstance(loss, Tensor):
        return loss
    tensors = [x for x in trees.tree_leaves(result) if isinstance(x, Tensor)]
    if not tensors:
        raise Unsupported(f"the model's forward returned {type(result).__name__} without a tensor",
                          "let it return the loss, or what a loss can be made of")  # fmt: skip
    return tensors[0].float().mean()


def _told(inputs: Sequence[Any]) -> Iterator[str]:
    """Dtype and sizes of each tensor."""
    for x in trees.tree_leaves(inputs):
        if isinstance(x, Tensor):
            yield f"{str(x.dtype).removeprefix('torch.')}[{', '.join(map(str, x.shape))}]"
        else:
            yield repr(x)
