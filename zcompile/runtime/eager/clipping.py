"""Gradient clipping on tiered gradients uses norms that are known and scales that are applied
later.

`clip_grad_norm_` measures every gradient, then multiplies all of them by one number. The norms were
taken when the gradients were produced (`runtime/norms.py`); the multiplication waits for the
optimizer's step, which reads every gradient anyway (`runtime/store/store.py`).
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from zcompile.ir.torch_compat import Dispatched
from zcompile.ir.types import EntryKind
from zcompile.runtime.norms import Measure, measure_of
from zcompile.runtime.session import session_of
from zcompile.runtime.store.sources import before_write
from zcompile.runtime.store.store import Deferred, Entry

aten = torch.ops.aten

MEASURES = frozenset({aten._foreach_norm.Scalar, aten.linalg_vector_norm.default})
SCALES = frozenset({aten._foreach_mul_.Tensor, aten._foreach_mul_.Scalar, aten.mul_.Tensor})
MOST_DEFERRED = 4
"""Changes of one gradient that wait; a loop that asks for more reads the gradient often anyway."""


def known_norm(
    cls: Any, func: Dispatched, args: Sequence[Any], kwargs: dict[str, Any]
) -> Any | None:
    """The result of a norm of one gradient, in the form `func` gives, if it was measured before."""
    if func not in MEASURES or not args:
        return None
    lists = isinstance(args[0], list)
    tensor: Any = args[0][0] if lists else args[0]
    if not is_gradient(cls, tensor):
        return None
    if func is aten.linalg_vector_norm.default and (len(args) > 2 or "dim" in kwargs):
        return None  # of rows or columns, as some optimizers ask; not of all elements
    measure = _measure_of(func, args, kwargs)
    known = session_of(tensor.entry).norms.of(tensor.entry, tensor.entry_layout, measure)
    if known is not None:
        return known
    tensor.entry.settle()  # before it is looked at where it rests
    at_rest = _measured_at_rest(tensor, measure)
    return at_rest if at_rest is not None else _measured_in_tiles(tensor, measure)


def known_norms(cls: Any, func: Dispatched, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """The norms of a list of gradients, as `func` gives them, if all were measured as they came;
    NotImplemented, if they are to be looked at one by one."""
    tensors = args[0] if args else ()
    if type(tensors) is not list or {*map(type, tensors)} != {cls}:
        return NotImplemented
    entries = [tensor.entry for tensor in tensors]
    sessions = {id(entry.store): entry.store for entry in entries}
    if len(sessions) > 1 or any([entry.kind is not EntryKind.GRAD for entry in entries]):
        return NotImplemented
    layouts, measure = [tensor.entry_layout for tensor in tensors], _measure_of(func, args, kwargs)
    known = session_of(entries[0]).norms.kept_of_each(entries, layouts, measure)
    if known is None:
        return NotImplemented
    found = [norm for (norm,) in known]
    if len({(norm.dtype, norm.device) for norm in found}) > 1:
        return [norm.clone() for norm in found]
    return [*torch.stack(found).unbind()]  # at once, and the caller's own as well


def _measure_of(func: Dispatched, args: Sequence[Any], kwargs: dict[str, Any]) -> Measure:
    rest = tuple(tuple(a) if isinstance(a, list) else a for a in args[1:])
    return measure_of(func, rest, tuple(sorted(kwargs.items())), isinstance(args[0], list))


def _measured_at_rest(tensor: Any, measure: Measure) -> Any | None:
    """The norm of a gradient that compute reaches where it rests; None for others.

    A gradient that was summed up, of a tied weight for one, was not measured as a whole before.
    """
    entry, session = tensor.entry, session_of(tensor.entry)
    if not session.can_view_in_place(entry):
        return None
    return measure(tensor.entry_layout.view(session.view_in_place(entry, 0, entry.nbytes, False)))


def _measured_in_tiles(tensor: Any, measure: Measure) -> Any | None:
    """The norm of a gradient that the device cannot hold whole, tile by tile; None for others."""
    entry, session = tensor.entry, session_of(tensor.entry)
    dtype, budget = tensor.entry_layout.dtype, session.arena.budget_bytes
    if entry.nbytes <= budget or not measure.joins:
        return None
    most, count = max(1, budget // 4 // dtype.itemsize), tensor.entry_layout.numel
    cuts = session.norms.cuts_of(entry)
    if sum(numel for _, numel in cuts) != count:  # it came whole, or as elements of another dtype
        cuts = [(begin, min(most, count - begin)) for begin in range(0, count, most)]
    session.settle()
    session.executor.foresight.abandon()  # what was fetched ahead lies where tiles will
    parts = []
    for offset, numel in cuts:
        memory = session.arena.take(numel * dtype.itemsize, entry.name)
        after = (session.device.mark(),)
        session.fetch(entry, memory, begin=offset * dtype.itemsize, after=after).join_compute()
        parts.append(measure(memory.view(dtype)))
    return measure.join(parts)


def on_device_and_not(cls: Any, args: Sequence[Any]) -> tuple[list[Any], list[Any]] | None:
    """Of a call of one of `SCALES` the gradients that are to be multiplied at once, since compute
    reaches them where they rest, and those whose change is to be deferred.

    None, if the list is not of both kinds, or if none of it can wait: then all of it is multiplied
    in the order of the list, which tells where a gradient is multiplied by another one, or twice.
    """
    if not isinstance(args[0], list) or not _can_wait(cls, args[0], args[1]):
        return None
    near, far = list[Any](), list[Any]()
    for tensor in args[0]:
        (near if _is_reached(tensor.entry) else far).append(tensor)
    return (near, far) if near and far else None


def _is_reached(entry: Entry) -> bool:
    """Whether nothing is saved by waiting with a change of an entry."""
    return entry.on_device and entry.narrow is None


def _can_wait(cls: Any, tensors: Sequence[Any], operand: Any) -> bool:
    """Whether `tensors *= operand` has the same result later, tensor by tensor."""
    if not _is_number(cls, operand) or not all(is_gradient(cls, t) for t in tensors):
        return False
    entries = {t.entry.key: t.entry for t in tensors}
    if len(entries) < len(tensors):
        return False
    if any(len(entry.deferred) >= MOST_DEFERRED for entry in entries.values()):
        return False
    # Of complex numbers, then of their parts: one after the other.
    return all(c.layout.dtype == t.entry_layout.dtype for t in tensors for c in t.entry.deferred)


def defer_scale(cls: Any, func: Dispatched, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Note `gradients *= number` for the next reader; NotImplemented if that cannot be.

    raises  as `defer_each`
    """
    lists = isinstance(args[0], list)
    tensors: list[Any] = args[0] if lists else [args[0]]
    if not _can_wait(cls, tensors, args[1]):
        return NotImplemented
    if all(_is_reached(tensor.entry) for tensor in tensors):
        return NotImplemented
    defer_each(func, tensors, args[1], lists)
    return None if lists else args[0]


def defer_each(func: Dispatched, gradients: Sequence[Any], number: Any, lists: bool = True) -> None:
    """Note `gradients *= number` for the next reader of each.

    lists   `func` takes lists
    raises  what else waits for a gradient fails with; then no change is noted
    """
    operand = number.clone() if isinstance(number, Tensor) else number
    for tensor in gradients:
        before_write(tensor.entry)
        tensor.entry.settle_updates()
    for tensor in gradients:
        change = Deferred(func, operand, lists, tensor.entry_layout)
        session_of(tensor.entry).deferrals.defer(tensor.entry, change)


def is_gradient(cls: Any, tensor: Any) -> bool:
    """Whether `tensor` is all of a tiered gradient."""
    if not isinstance(tensor, cls):
        return False
    tiered: Any = tensor
    entry = tiered.entry
    return entry.kind is EntryKind.GRAD and tiered.covers and entry.nbytes > 0


def _is_number(cls: Any, value: Any) -> bool:
    """Whether `value` is a plain number, or a plain tensor of one."""
    if isinstance(value, Tensor):
        return value.dim() == 0 and not isinstance(value, cls) and value.is_floating_point()
    return isinstance(value, float)
