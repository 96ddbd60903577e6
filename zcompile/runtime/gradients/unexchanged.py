"""Gradients that a rank sums within `no_sync`, until a later backward has the ranks exchange them.

Each is the `.grad` of its parameter, as with DistributedDataParallel: whole, and this rank's alone.
But nobody may use it before it is exchanged, unlike there: an optimizer would take other steps on
each rank. `zero_grad()` drops it.
"""

import weakref
from collections.abc import Iterable
from typing import Any

from torch import Tensor

from zcompile.errors import Unsupported
from zcompile.runtime.gradients.leaves import may_have_node_hooks
from zcompile.runtime.store.store import Entry, unexchanged_error


class UnexchangedSums:
    """Those of the parameters of one store."""

    def __init__(self) -> None:
        self._params: dict[int, weakref.ref[Tensor]] = {}
        """Key of the entry of a sum -> its parameter, which may have another gradient by now."""

    def note(self, param: Tensor) -> None:
        """The gradient of a parameter, which is tiered, is a sum of this rank from here on."""
        grad: Any = param.grad
        entry: Entry = grad.entry
        entry.is_of_this_rank()
        self._params[entry.key] = weakref.ref(param)

    def __bool__(self) -> bool:
        """Whether there may be any."""
        return bool(self._params)

    def is_held_by(self, param: Tensor) -> bool:
        """Whether the gradient of a parameter is such a sum."""
        return bool(self._params) and _is_unexchanged(param.grad)

    def params(self) -> list[Tensor]:
        """The parameters that hold one, in an order that is the same on all ranks."""
        found: dict[int, Tensor] = {}
        for key, known in [*self._params.items()]:
            param = known()
            grad: Any = None if param is None else param.grad
            if param is not None and _is_unexchanged(grad) and grad.entry.key == key:
                found[key] = param
            else:
                del self._params[key]
        return sorted(found.values(), key=_name_of)

    def names_among(self, entries: Iterable[Entry]) -> list[str]:
        """The names of those parameters, of these entries, that hold one."""
        if not self._params:
            return []
        owners = ((entry, entry.owner() if entry.owner is not None else None) for entry in entries)
        return [e.name for e, owner in owners if owner is not None and self.is_held_by(owner)]

    def check_exchanged(self, params: Iterable[Tensor]) -> None:
        """raises  Unsupported, if a parameter among these holds one"""
        if not self._params:
            return
        for param in params:
            if self.is_held_by(param):
                grad: Any = param.grad
                raise unexchanged_error(grad.entry.name)

    def check_adds(self, param: Tensor) -> None:
        """Check that what a backward within `no_sync` makes for a parameter may be added up on this
        rank.

        raises  Unsupported
        """
        name = _name_of(param)
        if may_have_node_hooks(param):
            raise Unsupported(
                f"the node of autograd that adds to the gradient of {name!r} was taken hold of "
                "(grad_fn of a view of it), and backward runs within zcompile.no_sync",
                "use register_hook or register_post_accumulate_grad_hook of the parameter",
            )
        if param.grad is not None and not _is_unexchanged(param.grad):
            raise Unsupported(
                f"{name!r} has a .grad that ranks have exchanged, or that was set, and backward "
                "runs within zcompile.no_sync, which begins sums of this rank",
                "call zero_grad() before the first backward within it; set_to_none=True is its "
                "default",
            )


def _is_unexchanged(grad: Any) -> bool:
    entry = getattr(grad, "entry", None)
    return isinstance(entry, Entry) and entry.unexchanged


def _name_of(param: Any) -> str:
    name: str = param._name_in_store()
    return name
