"""Gradients come home: from a compiled backward, or from autograd itself.

A parameter's `.grad` is a tiered tensor whose bytes rest in the store. Sums are taken in the
order autograd takes them, so that they round alike: within one backward pass the contributions of
a parameter are added up first, and only their sum is added to what `.grad` held before.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from zcompile.errors import Unsupported
from zcompile.runtime.gradient_tiles import Arriving, send, takes_tiles, whole_layout
from zcompile.runtime.leaves import (
    flat,
    hooked,
    like,
    state_of,
    taker,
    tells_without_gradient,
)
from zcompile.runtime.near_gradients import NearGradients
from zcompile.runtime.norms import Norms
from zcompile.runtime.store import Entry, Store
from zcompile.runtime.ticket import Ticket
from zcompile.specs import Kind, Layout
from zcompile.torch_private import after_backward, current_pass, hooks_of

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
        self._arriving: dict[tuple[int, int], Arriving] = {}
        self.near = NearGradients(store, wrap, norms, self._lone, self._came)

    def expect(self, entries: Iterable[Entry]) -> None:
        if current_pass() < 0:  # no backward is running, so a pass that left sums has failed
            self._sums.clear()
            self._arriving.clear()
        for entry in entries:
            self._expected[entry.key] = self._expected.get(entry.key, 0) + 1

    def take(
        self,
        entry: Entry,
        grad: Tensor,
        offset: int | None = None,
        after: Sequence[Ticket] | None = None,
    ) -> None:
        """All of a contribution; or, with an offset, a tile of one."""
        if offset is None:
            self.receive(entry, grad, after)
        else:
            self.receive_tile(entry, grad, offset, after)

    def receive(self, entry: Entry, grad: Tensor, after: Sequence[Ticket] | None = None) -> None:
        """One contribution to the gradient of the parameter that `entry` holds.

        grad   any strides, on the compute device; not kept, not changed
        after  complete once `grad` is computed; None: mark compute here
        raises  Unsupported, if this is `torch.autograd.grad` and not `backward`
        """
        param = taker(entry)
        if param is None:
            return
        same = like(param, grad)
        if after is None or same is not grad:
            grad, after = same, [self._store.device.mark()]
        key = current_pass(), entry.key
        if self._comes_alone(key, param):
            self._settle(param, grad, after)
        else:
            self._collect(key, entry.name, param, grad, after)

    def receive_tile(
        self, entry: Entry, grad: Tensor, offset: int, after: Sequence[Ticket] | None = None
    ) -> None:
        """A tile of one contribution, which counts once all its tiles are here.

        grad    the elements from `offset` on of the row-major gradient; as in `receive`
        raises  Unsupported, as `receive`
        """
        param = taker(entry)
        if param is None:
            return
        if after is None or not grad.is_contiguous():
            grad, after = grad.contiguous(), [self._store.device.mark()]
        key = current_pass(), entry.key
        if key not in self._arriving:
            self._arriving[key] = self._first_tile(key, param, grad.dtype)
        arriving = self._arriving[key]
        send(self._store, self._norms, arriving, grad, offset, after)
        if not arriving.left:
            del self._arriving[key]
            self._all_came(key, arriving)

    def _lone(self, entry: Entry) -> Tensor | None:
        """The parameter of `entry`, if the next contribution is to be its `.grad` as it is."""
        param = taker(entry) if self._expected.get(entry.key) == 1 else None
        if param is None or param.grad is not None:
            return None
        return None if (current_pass(), entry.key) in self._sums else param

    def _came(self, entry: Entry, param: Tensor, grad: Tensor) -> None:
        self._expected.pop(entry.key, None)
        self._become(param, grad)
        _tell(param)

    def _comes_alone(self, key: tuple[int, int], param: Tensor) -> bool:
        """Whether the contribution that begins is all that this pass gives to `param`."""
        expected = self._expected.pop(key[1], 0)
        if expected > 1:
            self._expected[key[1]] = expected - 1
        alone = expected == 1 and key not in self._sums and not hooks_of(param)[0]
        return alone or key[0] < 0

    def _first_tile(self, key: tuple[int, int], param: Tensor, dtype: torch.dtype) -> Arriving:
        """Where the tiles of a contribution are to go."""
        alone, held = self._comes_alone(key, param), None
        if not alone and key in self._sums:
            held = self._sums[key].total
        elif alone and not hooks_of(param)[0]:
            held = param.grad
        found, layout = state_of(param.grad), whole_layout(param, dtype)
        if held is not None and takes_tiles(held, layout):
            return Arriving(param, held, True, alone, found, param.numel())
        name = param._name_in_store()  # type: ignore[attr-defined]  # a tiered tensor's
        fresh = self._wrap(self._blank(name, param, layout.nbytes), layout)
        return Arriving(param, fresh, False, alone, found, param.numel())

    def _all_came(self, key: tuple[int, int], arriving: Arriving) -> None:
        """A contribution is whole: what `receive` does with one that came at once."""
        param, total = arriving.param, arriving.held
        if not arriving.adds:
            self._norms.note_whole(arriving.entry, Layout.of(total))
        if not arriving.alone:
            if arriving.adds:
                return
            held = self._sums.get(key)
            if held is None:
                self._keep(key, _Sum(arriving.entry, total, param, arriving.found))
            else:
                with torch.no_grad():
                    held.total.add_(total)
            return
        if not arriving.adds:
            self._become(param, hooked(param, total))
        _tell(param)

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
        seen = hooked(param, grad)
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
            self._store.add(entry, flat(grad), after=after)
        else:
            held.add_(grad)

    def _become(self, param: Tensor, total: Tensor) -> None:
        """`total`, at home, is what this pass gives to `param`."""
        if param.grad is None:
            param.grad = total
        else:
            with torch.no_grad():
                param.grad.add_(total)

    def _blank(self, name: str, param: Tensor, nbytes: int) -> Entry:
        of = param.entry.key  # type: ignore[attr-defined]  # a tiered tensor's
        return self._store.create(f"{name}.grad", Kind.GRAD, nbytes, of=of)

    def _home(
        self, name: str, param: Tensor, grad: Tensor, after: Sequence[Ticket]
    ) -> tuple[Entry, Tensor]:
        layout = Layout.of(grad)
        entry = self._blank(name, param, layout.nbytes)
        self._store.put(entry, flat(grad).view(torch.uint8), after=[*after])
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
            self._store.add(held.entry, flat(grad), after=after)
            return
        entry, total = self._home(name, param, grad, after)
        self._keep(key, _Sum(entry, total, param, state_of(param.grad)))

    def _keep(self, key: tuple[int, int], collected: "_Sum") -> None:
        """The first contribution of a pass to a parameter: more may come, until it is settled."""
        if not any(pass_ == key[0] for pass_, _ in self._sums):
            after_backward(partial(self._flush, key[0]))
        self._sums[key] = collected

    def _flush_one(self, key: tuple[int, int]) -> None:
        held = self._sums.pop(key)
        param = held.param
        if hooks_of(param)[0] and state_of(param.grad) != held.found:
            raise Unsupported(
                f"parameter {param._name_in_store()!r} has a hook and gets gradients both from the "  # type: ignore[attr-defined]  # a tiered tensor's
                "compiled model and from code outside of it, so the hook cannot see their sum",
                "compute both parts in the compiled model, or remove the hook",
            )
        self._become(param, hooked(param, held.total))
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


def _tell(param: Tensor) -> None:
    """Call post-accumulate hooks, unless autograd does when it comes to `param`."""
    if not tells_without_gradient():
        after_backward(partial(_call_hooks, param))


def _call_hooks(param: Tensor) -> None:
    for hook in list(hooks_of(param)[1].values()):
        hook(param)


__all__ = ["Gradients", "Wrap", "like"]
