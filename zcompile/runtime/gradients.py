"""Gradients come home: from a compiled backward, or from autograd itself.

A parameter's `.grad` is a tiered tensor whose bytes rest in the store. Sums are taken in the
order autograd takes them, so that they round alike: within one backward pass the contributions of
a parameter are added up first, and only their sum is added to what `.grad` held before.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from zcompile.errors import Unsupported
from zcompile.runtime.norms import Norms
from zcompile.runtime.store import Entry, Store
from zcompile.runtime.ticket import Ticket
from zcompile.specs import Kind, Layout
from zcompile.torch_private import after_backward, current_pass, hooks_of, will_accumulate

Wrap = Callable[[Entry, Layout], Tensor]
"""A tiered tensor over an entry; given from above, where tiered tensors are known."""


class Gradients:
    """Receives gradients of the parameters of one store.

    A compiled forward says how many contributions its backward will make (`expect`). A parameter
    that expects exactly one, and has no hooks, is settled at once. Any other collects what comes in
    `_sums` until autograd comes to the parameter itself, after everything that uses it (`adopt`).
    Sums are kept by backward pass, so that what a failed pass left behind is never added to.
    """

    def __init__(self, store: Store, wrap: Wrap, norms: Norms) -> None:
        self._store = store
        self._wrap = wrap
        self._norms = norms
        self._expected: dict[int, int] = {}
        self._sums: dict[tuple[int, int], _Sum] = {}

    def expect(self, entries: Iterable[Entry]) -> None:
        if current_pass() < 0:  # no backward is running, so a pass that left sums has failed
            self._sums.clear()
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
        if not _accumulates(param):
            raise Unsupported(
                f"{entry.name!r} is on the way of torch.autograd.grad or backward(inputs=...), "
                "which a compiled model with tiered parameters cannot serve",
                "call loss.backward() and read .grad, or call the model without torch.compile",
            )
        same = like(param, grad)
        if after is None or same is not grad:
            grad, after = same, [self._store.device.mark()]
        expected = self._expected.pop(entry.key, 0)
        if expected > 1:
            self._expected[entry.key] = expected - 1
        key = current_pass(), entry.key
        alone = expected == 1 and key not in self._sums and not hooks_of(param)[0]
        if alone or key[0] < 0:
            self._settle(param, grad, after)
        else:
            self._collect(key, entry.name, param, grad, after)

    def adopt(self, param: Tensor) -> None:
        """Autograd has come to `param`: settle what was collected; `.grad` moves to the store.

        A post-accumulate hook, the first of every tiered parameter.
        raises  Unsupported, if a hook would have to see one sum of which autograd has a part
        """
        tiered: Any = param
        key = current_pass(), tiered.entry.key
        if key in self._sums:
            self._flush_one(key)
        grad = param.grad
        if grad is None or isinstance(getattr(grad, "entry", None), Entry):
            return
        if grad.layout is not torch.strided:
            return  # sparse: small, and of no fixed size
        name = param._name_in_store()  # type: ignore[attr-defined]  # a tiered tensor's
        param.grad = None
        param.grad = self._alone(name, param, like(param, grad), [self._store.device.mark()])

    def _settle(self, param: Tensor, grad: Tensor, after: Sequence[Ticket]) -> None:
        seen = _hooked(param, grad)
        if seen is not grad:
            grad, after = like(param, seen), [self._store.device.mark()]
        if param.grad is None:
            name = param._name_in_store()  # type: ignore[attr-defined]  # a tiered tensor's
            param.grad = self._alone(name, param, grad, after)
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
        of = param.entry.key  # type: ignore[attr-defined]  # a tiered tensor's
        entry = self._store.create(f"{name}.grad", Kind.GRAD, layout.nbytes, of=of)
        self._store.put(entry, _flat(grad).view(torch.uint8), after=[*after])
        return entry, self._wrap(entry, layout)

    def _alone(self, name: str, param: Tensor, grad: Tensor, after: Sequence[Ticket]) -> Tensor:
        """`grad` at home as the whole gradient of `param`; its norms are taken on the way."""
        entry, tiered = self._home(name, param, grad, after)
        with torch.no_grad():
            self._norms.note(entry, grad.detach())
        return tiered

    def _collect(
        self, key: tuple[int, int], name: str, param: Tensor, grad: Tensor, after: Sequence[Ticket]
    ) -> None:
        held = self._sums.get(key)
        if held is not None:
            self._store.add(held.entry, _flat(grad), after=after)
            return
        if not any(pass_ == key[0] for pass_, _ in self._sums):
            after_backward(partial(self._flush, key[0]))
        entry, total = self._home(name, param, grad, after)
        self._sums[key] = _Sum(entry, total, param, _state_of(param.grad))

    def _flush_one(self, key: tuple[int, int]) -> None:
        held = self._sums.pop(key)
        param = held.param
        if hooks_of(param)[0] and _state_of(param.grad) != held.found:
            raise Unsupported(
                f"parameter {param._name_in_store()!r} has a hook and gets gradients both from the "  # type: ignore[attr-defined]  # a tiered tensor's
                "compiled model and from code outside of it, so the hook cannot see their sum",
                "compute both parts in the compiled model, or remove the hook",
            )
        total = _hooked(param, held.total)
        if param.grad is None:
            param.grad = total
        else:
            with torch.no_grad():
                param.grad.add_(total)
        self.adopt(param)
        _tell(param)

    def _flush(self, ended: int) -> None:
        """The backward pass has ended: whatever was still expected will not come."""
        for key in [key for key in self._sums if key[0] == ended]:
            self._flush_one(key)
        self._expected.clear()


@dataclass(frozen=True)
class _Sum:
    """Contributions to one parameter within one backward pass.

    entry, total  where the sum rests, and the tiered tensor over it
    found         what `.grad` was when the first contribution came
    """

    entry: Entry
    total: Tensor
    param: Tensor
    found: object


def _state_of(grad: Tensor | None) -> object:
    """Changes when somebody gives a parameter another gradient, or adds to the one it has."""
    entry = getattr(grad, "entry", None)
    return (entry.key, entry.version) if isinstance(entry, Entry) else id(grad)


def like(param: Tensor, grad: Tensor) -> Tensor:
    """`grad` with the strides of `param`: the layout autograd gives to `.grad`."""
    if not Layout.of(param).dense:
        return grad.contiguous()
    if grad.stride() == param.stride() and grad.dtype == param.dtype:
        return grad
    made = torch.empty_strided(param.size(), param.stride(), dtype=grad.dtype, device=grad.device)
    return made.copy_(grad)


def _flat(dense: Tensor) -> Tensor:
    """The elements of a dense tensor in the order of its storage, as one dimension."""
    return dense.as_strided((dense.numel(),), (1,))


def _accumulates(param: Tensor) -> bool:
    try:
        return will_accumulate(param)
    except RuntimeError:  # what torch says to a leaf inside torch.autograd.grad
        return False


def _hooked(param: Tensor, grad: Tensor) -> Tensor:
    """What the hooks that a user registered on `param` make of its gradient."""
    for hook in list(hooks_of(param)[0].values()):
        changed = hook(grad)
        grad = grad if changed is None else changed
    return grad


def _tell(param: Tensor) -> None:
    """Call post-accumulate hooks, unless autograd does when it comes to `param`."""
    if not tells_without_gradient():
        after_backward(partial(_call_hooks, param))


def _call_hooks(param: Tensor) -> None:
    for hook in list(hooks_of(param)[1].values()):
        hook(param)


@cache
def tells_without_gradient() -> bool:
    """Whether autograd calls the post-accumulate hooks of a leaf that it brought no gradient."""
    told: list[Tensor] = []
    leaf = torch.zeros((), requires_grad=True)
    leaf.register_post_accumulate_grad_hook(told.append)
    with torch.enable_grad():
        _Nothing.apply(leaf).backward()  # type: ignore[no-untyped-call]  # torch's
    return bool(told)


class _Nothing(torch.autograd.Function):
    """Has no gradient to give."""

    @staticmethod
    def forward(ctx: Any, leaf: Tensor) -> Tensor:
        return torch.zeros(())

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> None:
        return None


__all__ = ["Gradients", "Wrap", "like"]
