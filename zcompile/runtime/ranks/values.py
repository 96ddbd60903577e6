"""Sees to it that all ranks begin with the same values: where they differ, rank 0's are taken."""

import logging
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from zcompile.ir.types import Layout
from zcompile.runtime.ranks.fabric import DIGEST_BYTES, Fabric, digest_of

log = logging.getLogger(__name__)

MOST_NAMED = 3
"""Most parameters that a warning names."""


def agree_on_parameters(
    fabric: Fabric, params: Sequence[tuple[str, Tensor]], held: Sequence[int] | None = None
) -> None:
    """Check that all ranks have the same parameters, whatever their values.

    held    bytes of which each rank is the owner with them; None: each has a slice of all
    raises  RanksDiffer
    """
    rows = [(name, tuple(p.size()), p.stride(), p.dtype, p.requires_grad) for name, p in params]
    total = sum(p.numel() for _, p in params)
    text = f"with {len(rows)} parameters of {total} elements: {', '.join(n for n, _ in params)}"
    if held is not None:
        text += f"; by rank the ranks own {', '.join(map(str, held))} bytes"
    fabric.agree("offload a model", *rows, held, text=text)


def tell_of_other_values(names: Sequence[str]) -> None:
    """Warn that the ranks had other values of these."""
    more = f" and {len(names) - MOST_NAMED} more" if len(names) > MOST_NAMED else ""
    log.warning(
        "the ranks began with other values of %s%s; those of rank 0 are taken, as "
        "DistributedDataParallel does: give all ranks the same seed to build the same model",
        ", ".join(map(repr, names[:MOST_NAMED])),
        more,
    )


def agreed_value(
    fabric: Fabric, name: str, value: Tensor, differs: Callable[[], object] | None = None
) -> Tensor:
    """The value that all ranks begin with: their own where it is the same, else rank 0's, which
    lies on the host.

    value    a plain tensor, dense or not; on meta it has no value
    differs  is called where they have others; None: that is a warning
    raises   RanksDiffer, if size or dtype differ
    """
    what = f"{value.dtype} {tuple(value.size())}{' on meta' if value.is_meta else ''}"
    own = bytes(DIGEST_BYTES) if value.is_meta else digest_of(value)
    said = fabric.compare("take in", own, name, what, text=f"{name!r}: {what}")
    if len(set(said)) == 1:
        return value
    if differs is None:
        tell_of_other_values([name])
    else:
        differs()
    layout = Layout.of(value)
    mine = torch.empty(layout.size, dtype=layout.dtype, device="cpu")
    mine.copy_(value.detach())
    fabric.spread(mine.view(-1).view(torch.uint8), name)
    if not layout.dense:
        return mine
    made = torch.empty_strided(layout.size, layout.stride, dtype=layout.dtype, device="cpu")
    return made.copy_(mine)


def agree_on_buffers(fabric: Fabric, model: nn.Module) -> None:
    """Give all ranks the buffers of rank 0, once: what forwards make of them is a rank's own."""
    for name, buffer in model.named_buffers():
        if not buffer.is_meta and buffer.numel():
            with torch.no_grad():
                taken = agreed_value(fabric, f"buffer {name}", buffer)
                if taken is not buffer:
                    buffer.copy_(taken)
