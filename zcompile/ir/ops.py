"""Declares the zinf:: ops: schema, meaning and fake of each.

One call declares an op. Its meaning is what it does on one rank when it is simply called; a
schedule does the same things earlier, in parallel. Between any two passes a graph that holds these
ops can be run as it stands and must give the same numbers.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, library

from zcompile.ir.handles import entry_of, leaf_of
from zcompile.ir.torch_compat import Dispatched, faked_at_once

_LIBRARY = library.Library("zinf", "DEF")

Meaning = Callable[..., Any]


def declare(schema: str, fake: Meaning) -> Callable[[Meaning], Dispatched]:
    """Define `zinf::<schema>`; the decorated function becomes its meaning, and the op is what is
    returned.

    fake  makes the result of the op in tracing
    """

    def bind(meaning: Meaning) -> Dispatched:
        name = schema.split("(", 1)[0]
        _LIBRARY.define(schema)
        _LIBRARY.impl(name, meaning, "CompositeExplicitAutograd")
        library.register_fake(f"zinf::{name}", fake, lib=_LIBRARY)
        overload: Dispatched = getattr(torch.ops.zinf, name).default
        return overload

    return bind


def _full_fake(
    handle: Tensor,
    size: Sequence[int],
    stride: Sequence[int],
    offset: int,
    dtype: torch.dtype,
    device: torch.device,
) -> Tensor:
    return torch.empty_strided(size, stride, dtype=dtype, device=device)


_FULL = (
    "(Tensor handle, SymInt[] size, SymInt[] stride, SymInt offset, ScalarType dtype, "
    "Device device) -> Tensor"
)


@declare(f"gather{_FULL}", fake=_full_fake)
def gather(
    handle: Tensor,
    size: Sequence[int],
    stride: Sequence[int],
    offset: int,
    dtype: torch.dtype,
    device: torch.device,
) -> Tensor:
    """Return the full tensor behind a handle; blocks. What tracing puts into a graph."""
    return entry_of(handle).gather(size, stride, offset, dtype)


# Tracing meets it as often as the ops of the model.
faked_at_once(_LIBRARY, "gather", _full_fake)


@declare(f"fetch{_FULL}", fake=_full_fake)
def fetch(
    handle: Tensor,
    size: Sequence[int],
    stride: Sequence[int],
    offset: int,
    dtype: torch.dtype,
    device: torch.device,
) -> Tensor:
    """Start to bring the full tensor behind a handle; called plainly, it is there at once."""
    return entry_of(handle).gather(size, stride, offset, dtype)


@declare("wait(Tensor(a) pending) -> Tensor(a)", fake=lambda pending: pending)
def wait(pending: Tensor) -> Tensor:
    """Return the value that a pending op promised. The only op that may read a pending value."""
    return pending


@declare("release(Tensor(a!) full) -> ()", fake=lambda full: None)
def release(full: Tensor) -> None:
    """Give the bytes of a gathered tensor back; called plainly, poison them, so that a late reader
    shows."""
    if full.is_floating_point() or full.is_complex():
        full.fill_(float("nan"))
    else:
        full.fill_(1 if full.dtype is torch.bool else torch.iinfo(full.dtype).max)


@declare(
    "reduce_grad(Tensor grad, Tensor(a!) handle) -> Tensor",
    fake=lambda grad, handle: torch.empty(0, device=handle.device),
)
def reduce_grad(grad: Tensor, handle: Tensor) -> Tensor:
    """Send a gradient to its entry: it becomes `param.grad`, or is added to it.

    Returns an empty tensor, which stands for the gradient among the results of the graph.
    """
    leaf_of(handle).reduce_grad(grad)
    return torch.empty(0, device=handle.device)


@declare(
    "offload(Tensor value, Tensor near, str tier, str name) -> Tensor",
    fake=lambda value, near, tier, name: torch.empty((), dtype=torch.int64, device="cpu"),
)
def offload(value: Tensor, near: Tensor, tier: str, name: str) -> Tensor:
    """Start to move a value that backward needs to `tier`, and return the handle of its new entry.

    near  any handle of a parameter: the new entry goes into the same store
    tier  "host" or "disk"
    name  for people
    `value` stays on the device until `left` is called for the handle.
    """
    handle: Tensor = entry_of(near).store.offload(value, tier, name)
    return handle


@declare("left(Tensor value, Tensor(a!) handle) -> ()", fake=lambda value, handle: None)
def left(value: Tensor, handle: Tensor) -> None:
    """End the life of `value` on the device: it is in the entry of `handle` now. Does nothing,
    called plainly."""


@declare(
    "reduce_tile(Tensor grad, Tensor(a!) handle, SymInt offset) -> Tensor",
    fake=lambda grad, handle, offset: torch.empty(0, device=handle.device),
)
def reduce_tile(grad: Tensor, handle: Tensor, offset: int) -> Tensor:
    """Send a part of a gradient to its entry; when all parts are there, they are one contribution.

    grad    contiguous; the elements from `offset` on of the row-major gradient
    offset  in elements
    Parts of one contribution come in any order; the next contribution begins when all of it was
    there.
    """
    leaf_of(handle).reduce_grad(grad, offset)
    return torch.empty(0, device=handle.device)


SINKS = frozenset({reduce_grad, reduce_tile})
"""Ops that send a gradient to its entry; their result is empty."""
OURS = frozenset({gather, fetch, wait, release, offload, left, *SINKS})
"""All zinf ops."""
