"""`p.data = x` on tiered tensors means what it means in torch: p shows from then on what x shows.

A tiered x of the same store: p points to the entry behind it. Whatever pointed to the old entry
keeps that, with its bytes: `old = p.data`, or a graph that waits for its backward. A plain x: p
takes its values, and x itself turns into a tiered view of them, so that either sees what is written
through the other. Where that cannot be (others hold the memory of x, or x rests in another store),
p has the values, and whoever uses it after x was written is told (`runtime/store/sources.py`).
"""

import weakref
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.utils import swap_tensors

from zcompile.errors import ParameterChanged, Unsupported
from zcompile.ir.handles import claimed, is_named_once, owners_of, shows
from zcompile.ir.torch_compat import holders_of_memory, is_lazy, is_traced, owns_memory, set_data
from zcompile.ir.types import EntryKind, Layout
from zcompile.runtime.eager.fillings import write
from zcompile.runtime.eager.unbacked import Unbacked
from zcompile.runtime.session import session_of
from zcompile.runtime.store.sources import EntrySource, MemorySource, drop_sources, taken_from
from zcompile.runtime.store.store import Entry, Store
from zcompile.runtime.transfer.interrupts import uninterrupted


@uninterrupted
def assign_data(cls: Any, tiered: Any, value: Tensor) -> None:
    """Carry out `tiered.data = value`.

    cls     what makes tiered tensors
    raises  ParameterChanged, if shape, dtype or strides differ; Unsupported; TierFull
    """
    ours: Any = value if isinstance(value, Unbacked) else None
    if is_traced(tiered._handle) or (ours is not None and is_traced(ours._handle)):
        raise Unsupported(
            "the .data of a tiered parameter is assigned inside a compiled function",
            "move that outside, or into a function under torch.compiler.disable",
        )
    if (
        ours is not None
        and ours._handle is tiered._handle
        and ours.entry_layout == tiered.entry_layout
    ):
        return
    _check_same_kind(tiered, value)
    if tiered.entry.store.fabric is not None:
        raise Unsupported(
            f"the .data of {tiered._name_in_store()!r} is assigned, and several ranks train the "
            "model: which elements this rank holds would not be known",
            "write to the parameter instead, under torch.no_grad() (p.copy_(x)), on every rank",
        )
    if ours is not None and ours.store_key == tiered.store_key:
        _point_to(cls, tiered, ours._handle, ours.entry_layout)
        return
    if ours is None and (other := shown_already(tiered.entry.store, value)) is not None:
        _point_to(cls, tiered, other._handle, replace(tiered.entry_layout, offset=0))
        return
    _take_values(cls, tiered, value.detach() if ours is None else ours.on_host())
    entry: Entry = tiered.entry
    if ours is not None:
        EntrySource(entry, ours.entry)
    elif not _turn_into_view(cls, value, tiered):
        MemorySource(entry, value)


def shown_already(store: Store, value: Tensor) -> Any:
    """A parameter of `store` that took its values from the very memory of a plain tensor, or None.

    The values must be the same still: in torch whoever takes them too lies in the same memory.
    """
    if value.layout is not torch.strided or value.is_meta:
        return None
    for found in taken_from(value.detach()):
        entry: Any = found
        if entry.store is store:
            return next((p for p in owners_of(entry) if p.entry is entry), None)
    return None


def _check_same_kind(tiered: Any, value: Tensor) -> None:
    """raises  ParameterChanged, if shape, dtype or strides differ"""
    if value.layout is torch.strided and not value.is_meta:
        same = (value.size(), value.dtype) == (tiered.size(), tiered.dtype)
        if same and _same_strides(value, tiered):
            return
    raise ParameterChanged(
        tiered._name_in_store(),
        f"was given .data of {_describe(value)} in place of {_describe(tiered)}",
        "change shape, dtype or strides before zcompile.offload",
    )


def _point_to(cls: Any, tiered: Any, handle: Tensor, layout: Layout) -> None:
    """Let `tiered` show what `handle` names from here on."""
    left: Entry = tiered.entry
    is_param = getattr(tiered, "_is_param", False)
    if is_param:
        tiered.set_title(tiered._name_in_store())
        shows(tiered, None)
        handle = claimed(handle, tiered)
    if layout != tiered.entry_layout:
        set_data(tiered, cls.named_by(handle, layout, tiered))
    tiered._name_by(handle, layout)
    entry: Entry = tiered.entry
    if is_param:
        shows(tiered, layout)
        if not entry.kind.lasting:
            entry.become_parameter()
        _rename(left)
        _rename(entry)


def _rename(entry: Entry) -> None:
    """Give an entry the name of a parameter that shows it, if any does."""
    names = [p._name_in_store() for p in owners_of(entry) if p.entry is entry]
    if names and entry.name not in names:
        entry.rename(names[0])


def _take_values(cls: Any, tiered: Any, value: Tensor) -> None:
    """Let `tiered` have the values of a plain tensor from here on, where nobody else has them."""
    entry: Entry = tiered.entry
    if tiered.covers and is_named_once(tiered):
        drop_sources(entry)  # nobody can tell its memory from a new one
        write(entry, tiered.entry_layout, value)
        return
    is_param = getattr(tiered, "_is_param", False)
    session, layout = session_of(entry), replace(tiered.entry_layout, offset=0)
    kind, of = (EntryKind.PARAM, None) if is_param else (entry.kind, entry.of)
    made = session.create(tiered._name_in_store(), kind, layout.nbytes, of=of)
    fresh = cls.over(made, layout)  # from here on the entry dies with it
    write(made, layout, value)
    if entry.key in session.births:
        session.births[made.key] = session.births[entry.key]
    _point_to(cls, tiered, fresh._handle, layout)


def _turn_into_view(cls: Any, value: Tensor, tiered: Any) -> bool:
    """Make the plain tensor itself a view of `tiered`, if nothing else knows its memory; says
    whether."""
    if (
        type(value) is not Tensor
        or value.requires_grad
        or value.device != tiered.device
        or is_lazy(value)
        or weakref.getweakrefs(value)
        or not owns_memory(value)
        or holders_of_memory(value) > 1
    ):
        return False
    marks = dict(vars(value))
    view = cls.sharing(tiered, tiered.entry_layout)
    try:
        swap_tensors(value, view)
    except RuntimeError:  # torch itself holds it, for a backward for one
        return False
    vars(value).update(marks)
    return True


def _describe(tensor: Tensor) -> str:
    """Dtype, size and strides of a tensor, for people."""
    if tensor.layout is not torch.strided:
        return f"{tensor.dtype} {tuple(tensor.size())} of layout {tensor.layout}"
    on = " on meta" if tensor.is_meta else ""
    return f"{tensor.dtype} {tuple(tensor.size())} with strides {tensor.stride()}{on}"


def _same_strides(a: Tensor, b: Tensor) -> bool:
    """Whether the strides that matter are the same."""
    rows = zip(a.size(), a.stride(), b.stride(), strict=True)
    return a.numel() < 2 or all(x == y for n, x, y in rows if n > 1)
