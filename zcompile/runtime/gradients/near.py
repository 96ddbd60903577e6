"""Gradients that rest on the device: made there, or copied, or where they are made anyway.

Large products drive Python's own code and data out of the caches, so whatever runs between two of
them takes about ten times as long as in a loop. What has to be done for a gradient is therefore
done for all of a call at once, before and after it. Of one that has a berth, a matrix product is
made there; of everything else a copy goes there as soon as it is made. One that stays becomes an
entry as it is.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from zcompile.ir.handles import Leaf
from zcompile.ir.schedule import Schedule
from zcompile.ir.torch_compat import hooks_of, is_lazy
from zcompile.ir.types import EntryKind, Layout
from zcompile.runtime.gradients.leaves import flat, is_reached
from zcompile.runtime.live_memory import Row
from zcompile.runtime.norms import Norms
from zcompile.runtime.store.resident import copy_dense, is_near
from zcompile.runtime.store.store import Entry, Store
from zcompile.runtime.tiers.base import Place


@dataclass(frozen=True)
class _Coming:
    """A gradient that a call will make: blank until it ends.

    grad    the tiered tensor over `entry`
    target  its elements, in the berth
    """

    param: Tensor
    entry: Entry
    grad: Tensor
    target: Tensor


@dataclass(frozen=True)
class _Stayed:
    """A gradient that a call has made for `leaf`, and that stays in the memory of `value`."""

    param: Tensor
    leaf: Leaf
    layout: Layout
    value: Tensor


class DeviceGradients:
    """Those of one call at a time.

    lone  parameter of a leaf, if what the call makes for it becomes its `.grad` as it is
    came  takes what came for a leaf: its parameter, and the tiered gradient
    """

    def __init__(
        self,
        store: Store,
        wrap: Callable[[Entry, Layout], Tensor],
        norms: Norms,
        lone: Callable[[Leaf], Tensor | None],
        came: Callable[[Leaf, Tensor, Tensor], None],
    ) -> None:
        self._store, self._wrap, self._norms = store, wrap, norms
        self._lone, self._came = lone, came
        self._coming: dict[int, _Coming] = {}
        self._here: list[tuple[Leaf, _Coming]] = []
        self._stay: dict[int, Tensor] = {}
        self._stayed: list[_Stayed] = []

    def begin(self, schedule: Schedule, leaves: Sequence[Leaf]) -> None:
        """A call begins. One that a user's hook may look into takes each gradient as it comes."""
        self.abandon()
        if not schedule.lone_gradients or any(map(_is_hooked, leaves)):
            return
        device, staying = self._store.homes.device, schedule.staying
        for index in schedule.lone_gradients:
            leaf, stays = leaves[index], index in staying
            if not (stays or device.has_berth(-leaf.key, leaf.nbytes)):
                continue
            param = self._lone(leaf)
            if param is None or not (layout := Layout.of(param)).dense:
                continue
            if stays:
                self._stay[leaf.key] = param
                continue
            name = param._name_in_store()  # type: ignore[attr-defined]  # a tiered tensor's
            made = self._store.create(f"{name}.grad", EntryKind.GRAD, layout.nbytes, of=leaf.key)
            assert is_near(made), "a berth that was free is not any more"
            target = self._store.arena.view(made.place.extent.offset, layout)
            self._coming[leaf.key] = _Coming(param, made, self._wrap(made, layout), target)

    def targets(self, into: Sequence[int], leaves: Sequence[Leaf]) -> Sequence[Tensor]:
        """Where compute may make the gradients of those of `leaves` that `into` names; (), if
        not each has a place."""
        if not (into and self._coming):
            return ()
        coming = [self._coming.get(leaves[index].key) for index in into]
        places = [c.target for c in coming if c is not None]
        return places if len(places) == len(coming) else ()

    def receive(self, leaf: Leaf, grad: Tensor) -> Tensor | Row | None:
        """`grad`, computed, is in its berth when this returns, or stays; None, if it has no berth,
        or does not lie as its parameter.

        returns  what counts as held until it would have left, had it gone further
        """
        coming, param = self._coming.pop(leaf.key, None), self._stay.pop(leaf.key, None)
        if param is not None:
            return self._keep(leaf, param, grad)
        if coming is None:
            return None
        target = coming.target
        if not _lie_alike(grad, target):
            return None  # the entry dies with what is forgotten here
        self._here.append((leaf, coming))
        if grad.data_ptr() == target.data_ptr():
            return Row.standing_for(grad)
        copy_dense(target, grad)
        return grad

    def _keep(self, leaf: Leaf, param: Tensor, grad: Tensor) -> Tensor | None:
        layout = Layout.of(param)
        own = grad.untyped_storage().nbytes() == grad.nbytes == layout.nbytes
        bits = grad.dtype == layout.dtype and not is_lazy(grad)
        if not (own and bits and grad.stride() == layout.stride):
            return None
        self._stayed.append(_Stayed(param, leaf, layout, grad.detach()))
        return grad

    def end(self) -> None:
        """The call is over: what came becomes the gradients of its parameters."""
        stayed, self._stayed = self._stayed, []
        self._stay.clear()
        for found in stayed:
            self._adopt(found)
        here, self._here = self._here, []
        self._coming.clear()
        for leaf, coming in here:
            made = coming.entry
            self._store.borrow(made, 0, made.nbytes, True, overwrites=True)
            with torch.no_grad():
                self._norms.note(made, coming.target)
            self._came(leaf, coming.param, coming.grad)

    def _adopt(self, found: _Stayed) -> None:
        """A gradient that stays is an entry from here on."""
        store, name = self._store, f"{found.param._name_in_store()}.grad"  # type: ignore[attr-defined]  # a tiered tensor's
        held, nbytes = store.homes.held, found.layout.nbytes
        extent = held.take(flat(found.value), name)
        try:
            place = Place(nbytes, held, extent)
            made = store.create(name, EntryKind.GRAD, nbytes, of=found.leaf.key, at=place)
        except BaseException:
            held.release(extent)
            raise
        grad = self._wrap(made, found.layout)  # from here on the entry dies with it
        store.borrow(made, 0, nbytes, True, overwrites=True)
        with torch.no_grad():
            self._norms.note(made, found.value)
        self._came(found.leaf, found.param, grad)

    def abandon(self) -> None:
        """After an error: no gradient of this call came."""
        self._stay.clear()
        self._stayed.clear()
        self._here.clear()
        self._coming.clear()


def _lie_alike(grad: Tensor, target: Tensor) -> bool:
    """Whether the bytes of one are those of the other."""
    bits = grad.dtype == target.dtype and not is_lazy(grad)
    return bits and grad.stride() == target.stride()


def _is_hooked(leaf: Leaf) -> bool:
    param = leaf.owner() if leaf.owner is not None else None
    return param is not None and (is_reached(param) or bool(hooks_of(param)[0]))
