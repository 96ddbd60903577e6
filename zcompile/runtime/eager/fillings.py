"""Copies, zeros, constants and factories of tensors have a meaning of their own on tiered tensors.

Their bytes can take a shorter way than through the arena, or need not travel at all.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from zcompile.ir.torch_compat import Dispatched, materialised
from zcompile.ir.types import EntryKind, Layout, row_major
from zcompile.runtime.eager.rows import Application, streamable
from zcompile.runtime.eager.streaming import stream
from zcompile.runtime.store.store import Entry
from zcompile.runtime.transfer.interrupts import uninterrupted

aten = torch.ops.aten

LIKES = frozenset(
    {
        aten.zeros_like.default,
        aten.empty_like.default,
        aten.ones_like.default,
        aten.full_like.default,
    }
)
"""Factories whose result stands for state of the same kind: the result is tiered as its model
is."""
NEWS = frozenset(
    {
        aten.new_empty.default,
        aten.new_empty_strided.default,
        aten.new_zeros.default,
        aten.new_ones.default,
        aten.new_full.default,
    }
)
"""Factories that ask a tensor for its dtype and device only."""


@uninterrupted
def new_like(cls: Any, tiered: Any, layout: Layout) -> Tensor:
    """A new blank entry in the store of `tiered`, as a tiered tensor of `layout`.

    Until an optimizer keeps it, the entry is taken for a temporary of one step.
    """
    entry: Entry = tiered.entry
    name = (
        entry.name if entry.name.endswith(".state") else f"{entry.name.removesuffix('.grad')}.state"
    )
    made = entry.store.create_for(name, EntryKind.RESULT, layout, like=tiered)
    wrapped: Tensor = cls.over(made, layout)
    return wrapped


def _copy(cls: Any, func: Dispatched, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Carry out target.copy_(source), where either may be tiered."""
    target, source = args[0], args[1]
    if not isinstance(target, cls):
        return target.copy_(source.on_host())
    if isinstance(source, cls):
        if source.entry is target.entry and _same_elements(
            source.entry_layout, target.entry_layout
        ):
            return target  # matmul(out=) copies, where storages do not tell it that it need not
        if source.store_key == target.store_key:
            return _fill(cls, func, args, kwargs)
        source = source.on_host()  # two stores share no arena
    if not target.covers:
        return NotImplemented
    write(target.entry, target.entry_layout, source)
    return target


def _same_elements(a: Layout, b: Layout) -> bool:
    """Whether two layouts have the same elements in the same order, whatever their sizes."""
    if (a.offset, a.dtype, a.numel) != (b.offset, b.dtype, b.numel):
        return False
    if (a.conj, a.neg) != (b.conj, b.neg):
        return False
    return a == b or all(x.stride == row_major(x.size) for x in (a, b))


@uninterrupted
def write(
    entry: Entry, layout: Layout, source: Tensor, agreed: bool = False, given: bool = False
) -> None:
    """Give an entry the values of a plain tensor, broadcast and cast as `copy_` does.

    agreed  all ranks are known to have these values
    given   nobody writes to the memory of `source` any more: it is read where it is
    raises  RanksDiffer, if they do not
    """
    source = materialised(source.detach())
    if Layout.of(source) == replace(layout, offset=0):
        flat = source.as_strided((layout.span,), (1,), source.storage_offset())
        if not given:
            flat = flat.clone()
    else:
        made = torch.empty_strided(
            layout.size, layout.stride, dtype=layout.dtype, device=source.device
        )
        layout.marked(made).copy_(source)
        flat = made.as_strided((layout.span,), (1,))
    store = entry.store
    where = flat.device.type
    after = [store.device.mark()] if where == store.device.torch_device.type else []
    if store.fabric is not None and not agreed:
        store.fabric.agree("write", entry.name, flat, text=f"{entry.name!r} with their values")
    store.put_whole(entry, flat.view(torch.uint8), after=after)


def _zero(cls: Any, func: Dispatched, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Make a whole entry blank, which moves nothing."""
    target = args[0]
    if not target.covers:
        return NotImplemented
    target.entry.store.zero(target.entry)
    return target


def _like(cls: Any, func: Dispatched, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """A tiered tensor like the argument; a plain one, if it is asked for on another device."""
    source = args[0]
    kwargs = dict(kwargs)
    device = kwargs.pop("device", None)
    if device is not None and torch.device(device).type != source.device.type:
        plain = torch.empty_strided((), (), dtype=source.dtype).expand(source.size())
        return func(plain, *args[1:], device=device, **kwargs)
    layout: Layout = source.entry_layout
    stand_in = torch.empty_strided(layout.size, layout.stride, dtype=layout.dtype, device="meta")
    kwargs.pop("pin_memory", None)
    made = func(stand_in, *args[1:], **kwargs)
    result = new_like(cls, source, Layout.of(made))
    if func is aten.ones_like.default:
        result.fill_(1)
    elif func is aten.full_like.default:
        result.fill_(args[1])
    return result


def _new(cls: Any, func: Dispatched, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """A plain tensor of the same dtype and device; the bytes of `args[0]` do not matter."""
    source = args[0]
    return func(torch.empty((), dtype=source.dtype, device=source.device), *args[1:], **kwargs)


def _drawn(cls: Any, func: Dispatched, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """A plain tensor of the same size and strides, with random values."""
    size, stride = args[0].entry_layout.size, args[0].entry_layout.stride
    blank = torch.empty_strided(size, stride, dtype=args[0].dtype, device=args[0].device)
    return func(blank, *args[1:], **kwargs)


def _to_copy(cls: Any, func: Dispatched, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Copy to another device straight from the host, not through the arena."""
    source = args[0]
    device = kwargs.get("device")
    if device is None or torch.device(device).type == source.device.type:
        return NotImplemented
    return func(source.on_host(), *args[1:], **kwargs)


def _fill(cls: Any, func: Dispatched, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Stream a fill or copy: elementwise, though torch does not tag it so."""
    app = Application(func, tuple(args), dict(kwargs))
    if not isinstance(args[0], cls) or not streamable(app, cls):
        return NotImplemented
    target = args[0]
    if target.entry.unset and target.covers:
        target.entry.store.zero(target.entry)  # what is overwritten need not have had a value
    stream(func, [app], [None], cls)
    return target


Special = Callable[[Any, Dispatched, Sequence[Any], dict[str, Any]], Any]
SPECIAL: dict[Dispatched, Special] = {
    aten.copy_.default: _copy,
    aten.zero_.default: _zero,
    aten.fill_.Scalar: _fill,
    aten._to_copy.default: _to_copy,
    **dict.fromkeys(LIKES, _like),
    **dict.fromkeys(NEWS, _new),
    **dict.fromkeys((aten.rand_like.default, aten.randn_like.default), _drawn),
}
"""Ops with a meaning of their own; NotImplemented sends them down the common path."""
