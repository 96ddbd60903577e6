"""Gradients that rest on the device are made at their reserved address, copied there, or stay as
made.

Large products drive Python's own code and data out of the caches, so whatever runs between two of
them takes about ten times as long as in a loop. Work for a gradient is therefore done for all
gradients of a call at once, before and after the call. With a reserved address, a matrix product is
computed straight into it; any other gradient is copied there as soon as it is computed. A gradient
that stays becomes an entry in the memory that compute made it in.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from zcompile.ir.handles import Leaf
from zcompile.ir.schedule import Cast, Schedule
from zcompile.ir.torch_compat import has_hooks, is_lazy, storage_of
from zcompile.ir.types import EntryKind, EntryRef, EntryRole, Layout
from zcompile.runtime.gradients.leaves import flattened, may_have_node_hooks
from zcompile.runtime.live_memory import LiveStorage
from zcompile.runtime.norms import Norms
from zcompile.runtime.store.resident import copy_dense
from zcompile.runtime.store.store import Entry, Store
from zcompile.runtime.tiers.base import Place
from zcompile.runtime.tiers.extents import WrittenRanges
from zcompile.runtime.widening import batches, most_wide, widened


class _Expected(NamedTuple):
    """A gradient that a call will make at its reserved address.

    layout  of the bytes there
    target  the elements there, in that layout
    """

    param: Tensor
    layout: Layout
    place: Place
    target: Tensor


class _Made(NamedTuple):
    """A gradient that a call has made for `leaf`, and that rests where `value` lies.

    layout  of the bytes that it rests as
    place   of its entry; None: it stays in memory that compute made
    """

    param: Tensor
    leaf: Leaf
    layout: Layout
    value: Tensor
    place: Place | None = None


class DeviceGradients:
    """The gradients of one call at a time that rest on the device.

    sole  gives the parameter of each of some leaves, if the call's contribution becomes its `.grad`
          as it is
    came  takes a finished gradient: its leaf, its parameter, and the tiered tensor
    """

    def __init__(
        self,
        store: Store,
        wrap: Callable[[Entry, Layout], Tensor],
        norms: Norms,
        sole: Callable[[Sequence[Leaf]], Sequence[Tensor | None]],
        came: Callable[[Leaf, Tensor, Tensor], None],
    ) -> None:
        self._store, self._wrap, self._norms = store, wrap, norms
        self._sole, self._came = sole, came
        self._expected: dict[int, _Expected] = {}
        """By the key of a leaf: of gradients that are to come."""
        self._may_stay: dict[int, tuple[Tensor, Layout]] = {}
        """Key of a leaf -> its parameter, and the layout of the gradient of that."""
        self._made: list[_Made] = []

    def begin(self, schedule: Schedule, leaves: Sequence[Leaf]) -> None:
        """A call begins: occupy the reserved addresses of its gradients.

        A parameter with hooks of a user takes each gradient as it comes, so then nothing is done
        here; nor is it where ranks exchange gradients (`exchanged.py`).
        """
        self.abandon()
        if self._store.fabric is not None or not schedule.lone_gradients:
            return
        if any(map(_may_be_hooked, leaves)):
            return
        staying = schedule.staying
        wanted = {
            index: None if index in staying else self._reserved_for(leaves[index], cast)
            for index in schedule.lone_gradients
            for cast in (schedule.narrow_gradients.get(index),)
        }
        near = [index for index, found in wanted.items() if found is not None or index in staying]
        params, device = self._sole([leaves[index] for index in near]), self._store.homes.device
        for index, param in zip(near, params, strict=True):
            leaf, reserved = leaves[index], wanted[index]
            if param is None or not (layout := _layout_of(param)).dense:
                continue
            if reserved is None:
                self._may_stay[leaf.key] = param, layout
                continue
            nbytes, cast = reserved
            bits = layout if cast is None else replace(layout, dtype=cast.copy_dtype)
            extent = device.take_reserved(EntryRef(leaf.key, EntryRole.GRADIENT))
            place = Place(nbytes, device, extent, WrittenRanges.to(nbytes))
            target = self._store.arena.view(extent.offset, bits)
            self._expected[leaf.key] = _Expected(param, bits, place, target)

    def _reserved_for(self, leaf: Leaf, cast: Cast | None) -> "tuple[int, Cast | None] | None":
        """Bytes of the free address that is reserved for a gradient, and the cast by which it is
        narrower than its parameter there; None, if there is none."""
        device, ref = self._store.homes.device, EntryRef(leaf.key, EntryRole.GRADIENT)
        if cast is not None:
            nbytes = leaf.nbytes // cast.dtype.itemsize * cast.copy_dtype.itemsize
            if device.has_reserved(ref, nbytes):
                return nbytes, cast
        # Else it is widened into its address, if that is wide.
        return (leaf.nbytes, None) if device.has_reserved(ref, leaf.nbytes) else None

    def targets(self, into: Sequence[int], leaves: Sequence[Leaf]) -> Sequence[Tensor]:
        """The memory into which compute may make the gradients of those of `leaves` that `into`
        names.

        Nothing, if not each of them has an address.
        """
        if not (into and self._expected):
            return ()
        expected = [self._expected.get(leaves[index].key) for index in into]
        places = [c.target for c in expected if c is not None]
        return places if len(places) == len(expected) else ()

    @property
    def to_come(self) -> int:
        """How many gradients are to come that have an address, or may stay."""
        return len(self._expected) + len(self._may_stay)

    @property
    def made(self) -> int:
        """How many have come, and rest there."""
        return len(self._made)

    def receive(self, leaf: Leaf, grad: Tensor) -> Tensor | LiveStorage | None:
        """Take over `grad`, which is computed: at its reserved address when this returns, or
        staying.

        returns  what counts as live until it would have left, had it gone further; None, if it has
                 no address, or not the layout of its parameter
        """
        if (stays := self._may_stay.pop(leaf.key, None)) is not None:
            return self._keep(leaf, *stays, grad)
        expected = self._expected.pop(leaf.key, None)
        if expected is None:
            return None
        param, layout, place, target = expected
        if grad.dtype.itemsize < target.dtype.itemsize and grad.stride() == target.stride():
            grad = grad.to(target.dtype)
        if not _same_layout(grad, target):
            place.tier.release(place.extent)
            return None
        self._made.append(_Made(param, leaf, layout, target, place))
        if grad.data_ptr() == target.data_ptr():
            return LiveStorage.standing_for(grad)
        copy_dense(target, grad)
        return grad

    def _keep(self, leaf: Leaf, param: Tensor, layout: Layout, grad: Tensor) -> Tensor | None:
        """Let a gradient stay in the memory it was made in, if that is its own; returns it then,
        else None.

        layout  of the gradient of the parameter
        """
        dtype = grad.dtype
        if dtype is not layout.dtype:
            if dtype.itemsize >= layout.dtype.itemsize:
                return None
            layout = replace(layout, dtype=dtype)
        own = storage_of(grad).nbytes() == grad.nbytes == layout.nbytes
        if not own or grad.stride() != layout.stride or is_lazy(grad):
            return None
        self._made.append(_Made(param, leaf, layout, grad))
        return grad

    def end(self) -> None:
        """The call is over: its gradients become those of their parameters."""
        self._may_stay.clear()
        self._give_back_expected()
        made, self._made = self._made, []
        if made:
            with torch.no_grad():
                self._make_entries(made)

    def _give_back_expected(self) -> None:
        """Give up the reserved addresses of gradients that did not come."""
        for expected in self._expected.values():
            expected.place.tier.release(expected.place.extent)
        self._expected.clear()

    def _make_entries(self, rows: Sequence[_Made]) -> None:
        """Make entries of the gradients of a call, all at once."""
        held = self._store.homes.held
        places = [row.place for row in rows if row.place is not None]
        try:
            for at, (param, _, layout, value, place) in enumerate(rows):
                if place is None:
                    name = f"{param._name_in_store()}.grad"  # type: ignore[attr-defined]  # a tiered tensor's
                    extent = held.take(flattened(value), name)
                    place = Place(layout.nbytes, held, extent, WrittenRanges.to(layout.nbytes))
                    places.insert(at, place)
            refs = [EntryRef(row.leaf.key, EntryRole.GRADIENT) for row in rows]
            entries = self._store.create_at(EntryKind.GRAD, places, refs)
        except BaseException:
            for place in places:
                place.tier.release(place.extent)
            raise
        # All wrapped before anybody is told of one: an entry dies with its tensor.
        grads: list[Tensor] = []
        try:
            for row, made in zip(rows, entries, strict=True):
                layout, dtype = row.layout, row.param.dtype
                if layout.dtype is not dtype:
                    made.rest_narrow(Cast(dtype, layout.dtype))
                    layout = replace(layout, dtype=dtype)
                grads.append(self._wrap(made, layout))
        except BaseException:
            for made in entries[len(grads) :]:
                self._store.handle(made)  # which nobody keeps, and with which it dies
            raise
        for made in entries:
            made.written()
        pairs = zip(entries, rows, strict=True)
        self._take_norms([(made, row.value, row.param.dtype) for made, row in pairs])
        for row, grad in zip(rows, grads, strict=True):
            self._came(row.leaf, row.param, grad)

    def _take_norms(self, made: Sequence[tuple[Entry, Tensor, torch.dtype]]) -> None:
        """Take the norms of entries in these dtypes, of which the values are there: of those that
        have them at once; others are widened first, as many at once as may be wide together."""
        as_made = [(entry, value) for entry, value, dtype in made if value.dtype is dtype]
        self._norms.note_each([entry for entry, _ in as_made], [value for _, value in as_made])
        if not self._norms.wanted:
            return
        narrow = dict[tuple[torch.dtype, torch.dtype], list[tuple[Entry, Tensor]]]()
        for entry, value, dtype in made:
            if value.dtype is not dtype:
                narrow.setdefault((value.dtype, dtype), []).append((entry, value))
        most = most_wide(self._store.device_budget)
        for (_, dtype), rows in narrow.items():
            entries, values = zip(*rows, strict=True)
            for x in batches([value.numel() * dtype.itemsize for value in values], most):
                self._norms.note_each(entries[x], widened(values[x], dtype))

    def abandon(self) -> None:
        """After an error: no gradient of this call came."""
        self._may_stay.clear()
        self._give_back_expected()
        for made in self._made:
            if made.place is not None:
                made.place.tier.release(made.place.extent)
        self._made.clear()


def _layout_of(param: Tensor) -> Layout:
    """The layout of the gradient of a parameter: its own, from the first byte on."""
    known: Layout | None = getattr(param, "entry_layout", None)  # a tiered tensor's
    return Layout.of(param) if known is None or known.offset or known.lazy else known


def _same_layout(grad: Tensor, target: Tensor) -> bool:
    """Whether `grad` and `target` have the same layout, so that the bytes of one are those of the
    other."""
    bits = grad.dtype == target.dtype and not is_lazy(grad)
    return bits and grad.stride() == target.stride()


def _may_be_hooked(leaf: Leaf) -> bool:
    """Whether a hook of a user may look into the gradient of a leaf."""
    param = leaf.owner() if leaf.owner is not None else None
    return param is not None and (may_have_node_hooks(param) or has_hooks(param))
