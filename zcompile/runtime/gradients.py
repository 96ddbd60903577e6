"""Gradients come home: from a compiled backward, or from autograd itself.

A parameter's `.grad` is a tiered tensor whose bytes rest in the store. Sums are taken in the
order autograd takes them, so that they round alike: within one backward pass the contributions of
a parameter are added up first, and only their sum is added to what `.grad` held before.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from zcompile.errors import Unsupported
from zcompile.runtime.store import Entry, Store
from zcompile.runtime.ticket import Ticket
from zcompile.specs import Kind, Layout
from zcompile.torch_private import after_backward, hooks_of, will_accumulate

Wrap = Callable[[Entry, Layout], Tensor]
"""A tiered tensor over an entry; given from above, where tiered tensors are known."""


class Gradients:
    """Receives gradients of the parameters of one store.

    A compiled forward says how many contributions its backward will make (`expect`). A parameter
    that expects one is settled at once; one that expects several collects them in `_sums`.
    """

    def __init__(self, store: Store, wrap: Wrap) -> None:
        self._store = store
        self._wrap = wrap
        self._expected: dict[int, int] = {}
        self._sums: dict[int, tuple[Entry, Tensor, Tensor]] = {}

    def expect(self, entries: Iterable[Entry]) -> None:
        for entry in entries:
            self._expected[entry.key] = self._expected.get(entry.key, 0) + 1

    def receive(self, entry: Entry, grad: Tensor, after: Sequence[Ticket] | None = None) -> None:
        """One contribution to the gradient of the parameter that `entry` holds.

        grad   any strides, on the compute device; not kept, not changed
        after  complete once `grad` is computed; None: mark compute here
        raises  Unsupported, if this is `torch.autograd.grad` and not `backward`
        """
        param = entry.owner() if entry.owner is not None else None
        if param is None:
            return
        if not will_accumulate(param):
            raise Unsupported(
                f"the gradient of {entry.name!r} was asked for with torch.autograd.grad or with "
                "backward(inputs=...), which a compiled model with tiered parameters cannot give",
                "call loss.backward() and read .grad, or call the model without torch.compile",
            )
        for hook in hooks_of(param)[0].values():
            changed = hook(grad)
            grad = grad if changed is None else changed
        same = like(param, grad)
        if after is None or same is not grad:
            grad, after = same, [self._store.device.mark()]
        left = self._expected.pop(entry.key, 1) - 1
        if left > 0:
            self._expected[entry.key] = left
        held = self._sums.get(entry.key)
        if left <= 0 and held is None:
            self._settle(param, grad, after)
            return
        if held is None:
            if not self._sums:
                after_backward(self._flush)
            self._sums[entry.key] = (*self._home(entry.name, param, grad, after), param)
        else:
            self._store.add(held[0], _flat(grad), after=after)
        if left <= 0:
            self._flush_one(entry.key)

    def adopt(self, param: Tensor) -> None:
        """`param.grad`, made by autograd itself, moves to the store (a post-accumulate hook)."""
        grad = param.grad
        if grad is None or isinstance(getattr(grad, "entry", None), Entry):
            return
        name = param._name_in_store()  # type: ignore[attr-defined]  # a tiered tensor's
        param.grad = None
        home = self._home(name, param, like(param, grad), [self._store.device.mark()])
        param.grad = home[1]

    def _settle(self, param: Tensor, grad: Tensor, after: Sequence[Ticket]) -> None:
        if param.grad is None:
            name = param._name_in_store()  # type: ignore[attr-defined]  # a tiered tensor's
            param.grad = self._home(name, param, grad, after)[1]
        else:
            with torch.no_grad():
                self._add(param.grad, grad, after)
        _tell(param)

    def _add(self, held: Tensor, grad: Tensor, after: Sequence[Ticket]) -> None:
        entry = getattr(held, "entry", None)
        if isinstance(entry, Entry) and held.dtype == grad.dtype and held.stride() == grad.stride():
            self._store.add(entry, _flat(grad), after=after)
        else:
            held.add_(grad)

    def _home(
        self, name: str, param: Tensor, grad: Tensor, after: Sequence[Ticket]
    ) -> tuple[Entry, Tensor]:
        layout = Layout.of(grad)
        entry = self._store.create(f"{name}.grad", Kind.GRAD, layout.nbytes)
        self._store.put(entry, _flat(grad).view(torch.uint8), after=[*after])
        return entry, self._wrap(entry, layout)

    def _flush_one(self, key: int) -> None:
        _, total, param = self._sums.pop(key)
        if param.grad is None:
            param.grad = total
        else:
            with torch.no_grad():
                param.grad.add_(total)
        _tell(param)

    def _flush(self) -> None:
        """The backward pass has ended: whatever was still expected will not come."""
        for key in list(self._sums):
            self._flush_one(key)
        self._expected.clear()


def like(param: Tensor, grad: Tensor) -> Tensor:
    """`grad` with the strides of `param`: the layout autograd gives to `.grad`."""
    if grad.stride() == param.stride() and grad.dtype == param.dtype:
        return grad
    if not Layout.of(param).dense:
        return grad.contiguous()
    made = torch.empty_strided(param.size(), param.stride(), dtype=grad.dtype, device=grad.device)
    return made.copy_(grad)


def _flat(dense: Tensor) -> Tensor:
    """The elements of a dense tensor in the order of its storage, as one dimension."""
    return dense.as_strided((dense.numel(),), (1,))


def _tell(param: Tensor) -> None:
    hooks: dict[int, Any] = dict(hooks_of(param)[1])
    for hook in hooks.values():
        hook(param)


__all__ = ["Gradients", "Wrap", "like"]
