"""The zinf:: ops: schema, meaning, fake.

An op is declared in one breath. Its meaning is what it does on one rank when it is simply called;
a schedule does the same things earlier, in parallel. Between any two passes a graph that holds
these ops can be run as it stands and must give the same numbers.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, library

from zcompile.ir.handles import entry_of, leaf_of
from zcompile.ir.torch_compat import Dispatched

_LIBRARY = library.Library("zinf", "DEF")

Meaning = Callable[..., Any]


def declare(schema: str, fake: Meaning) -> Callable[[Meaning], Dispatched]:
    """Define `zinf::<schema>`; the decorated function becomes its meaning, the op its value."""

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
    """The full tensor behind a handle; blocks. What tracing puts into a graph."""
    return entry_of(handle).gather(size, stride, offset, dtype)


@declare(f"fetch{_FULL}", fake=_full_fake)
def fetch(
    handle: Tensor,
    size: Sequence[int],
    stride: Sequence[int],
    offset: int,
    dtype: torch.dtype,
    device: torch.device,
) -> Tensor:
    """A pending full tensor: started, not yet there. Called plainly, it is there at once."""
    return entry_of(handle).gather(size, stride, offset, dtype)


@declare("wait(Tensor(a) pending) -> Tensor(a)", fake=lambda pending: pending)
def wait(pending: Tensor) -> Tensor:
    """The value a pending op promised. The only op that may read a pending value."""
    return pending


@declare("release(Tensor(a!) full) -> ()", fake=lambda full: None)
def release(full: Tensor) -> None:
    """Give the bytes back. Called plainly, it poisons them, so that a late reader shows."""
    if full.is_floating_point() or full.is_complex():
        full.fill_(float("nan"))
    else:
        full.fill_(1 if full.dtype is torch.bool else torch.iinfo(full.dtype).max)


@declare(
    "reduce_grad(Tensor grad, Tensor(a!) handle) -> Tensor",
    fake=lambda grad, handle: torch.empty(0, device=handle.device),
)
def reduce_grad(grad: Tensor, handle: Tensor) -> Tensor:
    """A gradient goes home: it becomes `param.grad`, or is added to it. Returns nothing of use."""
    leaf_of(handle).reduce_grad(grad)
    return torch.empty(0, device=handle.device)


@declare(
    "offload(Tensor value, Tensor near, str tier, str name) -> Tensor",
    fake=lambda value, near, tier, name: torch.empty((), dtype=torch.int64, device="cpu"),
)
def offload(value: Tensor, near: Tensor, tier: str, name: str) -> Tensor:
    """A value that backward needs goes to `tier`, as a new entry of the store that the entry of
    `near` is in; the result is its handle. Started, not over: `value` stays until it has left."""
    handle: Tensor = entry_of(near).store.offload(value, tier, name)
    return handle


@declare("left(Tensor value, Tensor(a!) handle) -> ()", fake=lambda value, handle: None)
def left(value: Tensor, handle: Tensor) -> None:
    """From here on nothing reads `value`: it is in the entry of `handle`. Nothing to do, called
    plainly."""


@declare(
    "reduce_tile(Tensor grad, Tensor(a!) handle, SymInt offset) -> Tensor",
    fake=lambda grad, handle, offset: torch.empty(0, device=handle.device),
)
def reduce_tile(grad: Tensor, handle: Tensor, offset: int) -> Tensor:
    """Part of a gradient goes home; once all parts have come, they are one contribution.

    grad    contiguous; the elements from `offset` on of the row-major gradient
    offset  in elements
    Parts of one contribution come in any order; the next begins when all of it was there.
    """
    leaf_of(handle).reduce_grad(grad, offset)
    return torch.empty(0, device=handle.device)


SINKS = frozenset({reduce_grad, reduce_tile})
"""Where a gradient leaves; they return nothing of use."""
OURS = frozenset({gather, fetch, wait, release, offload, left, *SINKS})
