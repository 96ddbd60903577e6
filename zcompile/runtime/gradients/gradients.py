"""Gradients come home: from a compiled backward, or from autograd itself.

A parameter's `.grad` is a tiered tensor whose bytes rest in the store. Sums are taken in the
order autograd takes them, so that they round alike: within one backward pass the contributions of
a parameter are added up first, and only their sum is added to what `.grad` held before.
"""

from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain, count
from typing import Any

import torch
from torch import Tensor

from zcompile.errors import Unsupported
from zcompile.ir.handles import Leaf, leaf_of
from zcompile.ir.ties import Tie
from zcompile.ir.torch_compat import (
    after_backward,
    current_pass,
    hooks_of,
    is_gradient_named,
    is_lazy,
    materialised,
    others_hold_gradient,
    will_run,
)
from zcompile.ir.types import EntryKind, Layout
from zcompile.runtime.gradients.leaves import (
    Arriving,
    flat,
    hooked,
    is_reached,
    like,
    owner_of,
    send,
    state_of,
    taker,
    takes_tiles,
    tells_without_gradient,
    whole_layout,
)
from zcompile.runtime.gradients.near import DeviceGradients
from zcompile.runtime.gradients.shared import SharedGradients
from zcompile.runtime.norms import Norms
from zcompile.runtime.store.store import Entry, Store
from zcompile.runtime.transfer.interrupts import uninterrupted
from zcompile.runtime.transfer.ticket import Ticket

Wrap = Callable[[Entry, Layout], Tensor]
"""A tiered tensor over an entry; given from above, where tiered tensors are known."""


class Gradients:
    """Receives gradients of the parameters of one store.

    A compiled forward says how many contributions its backward will make (`expect`), and by which
    node of autograd (`come_by`). So each pass knows what it will bring: autograd tells which nodes
    it comes to. A parameter to which it brings exactly one, and that has no hooks, is settled at
    once. Any other collects what comes in `_sums` until autograd comes to the parameter itself,
    after everything that uses it (`adopt`). Sums are kept by backward pass, so that what a failed
    pass left behind is never added to.

    A parameter whose node of autograd somebody got hold of (`leaves.is_reached`) is
    autograd's alone:
    what comes for it goes home and, as a tiered tensor, to autograd (`returned`), which adds up and
    calls all hooks in its own order.
    """

    def __init__(self, store: Store, wrap: Wrap, norms: Norms) -> None:
        self._store = store
        self._wrap = wrap
        self._norms = norms
        self._expected: tuple[int, ...] = ()
        self._calls: dict[int, tuple[Tie, tuple[int, ...]]] = {}
        """Of a call that was made: to its node, and the parameter's id of each contribution."""
        self._unforeseen: set[int] = set()
        """Ids of parameters to which a call contributes whose node was not found."""
        self._numbers = count()
        self._over: deque[Tie] = deque()
        """To nodes that have died."""
        self._brings: tuple[int, Counter[int]] = -1, Counter()
        """A pass -> how many contributions it brings, by the parameter's id."""
        self._sums: dict[tuple[int, int], _Sum] = {}
        self._arriving: dict[tuple[int, int], Arriving] = {}
        self.returned: dict[int, Tensor] = {}
        """Of the call that runs: tiered gradients that it gives to autograd instead of making them
        `.grad` itself, by the parameter's id."""
        self._late: list[Callable[[], None]] | None = None
        """Sums of what is at home, which are calls of their own and wait for the end of the call
        that runs; None, if none runs."""
        self._shared = SharedGradients(self._take_home)
        self.near = DeviceGradients(store, wrap, norms, self._lone, self._came)

    @uninterrupted
    def expect(self, leaves: Iterable[Leaf]) -> None:
        if current_pass() < 0:  # no backward is running, so a pass that left sums has failed
            self._sums.clear()
            self._arriving.clear()
            self._shared.clear()
        self._expected = tuple(
            id(param) for leaf in leaves if (param := owner_of(leaf)) is not None
        )

    def begin(self) -> None:
        """A call begins."""
        self._late = []

    def finish(self) -> None:
        """The call is over, and another may run: what waited for that is done now."""
        late, self._late = self._late, None
        for job in late or ():
            job()

    def come_by(self, node: Callable[[], Any | None]) -> None:
        """What is expected since the last call will come when autograd runs this node. Without one
        nobody knows when: what comes for those parameters is always collected."""
        if self._expected:
            while self._over:
                self._calls.pop(self._over.popleft().mark, None)
            if (found := node()) is not None:
                number = next(self._numbers)
                self._calls[number] = Tie(found, self._over, number), self._expected
            else:
                self._unforeseen.update(self._expected)
            self._expected = ()

    def count(self) -> None:
        """A backward call begins: if it is the first of its pass, see what that brings in all."""
        number = current_pass()
        if number >= 0 and self._brings[0] != number:
            calls = [(tie(), keys) for tie, keys in self._calls.values()]
            runs = [keys for node, keys in calls if node is not None and will_run(node)]
            self._brings = number, Counter(chain.from_iterable(runs))

    def _brought(self, param: Tensor) -> int:
        """How many contributions to a gradient the pass that is running brings in all; 0, if that
        is not known."""
        number, brings = self._brings
        known = number == current_pass() and id(param) not in self._unforeseen
        return brings[id(param)] if known else 0

    @uninterrupted
    def take(
        self,
        leaf: Leaf,
        grad: Tensor,
        offset: int | None = None,
        after: Sequence[Ticket] | None = None,
    ) -> None:
        """All of a contribution; or, with an offset, a tile of one."""
        if offset is None:
            self.receive(leaf, grad, after)
        else:
            self.receive_tile(leaf, grad, offset, after)

    def receive(self, leaf: Leaf, grad: Tensor, after: Sequence[Ticket] | None = None) -> None:
        """One contribution to the gradient of the parameter that `leaf` stands for.

        grad   any strides, on the compute device; not kept, not changed
        after  complete once `grad` is computed; None: mark compute here
        raises  Unsupported, if this is `torch.autograd.grad` and not `backward`
        """
        param = taker(leaf)
        if param is None:
            return
        same = like(param, grad)
        if after is None or same is not grad:
            grad, after = same, [self._store.device.mark()]
        key = current_pass(), leaf.key
        if _is_autograds(param):
            self._return(param, grad, after)
        elif self._comes_alone(key, param):
            self._settle(param, grad, after)
        else:
            self._collect(key, leaf.name, param, grad, after)

    def receive_tile(
        self, leaf: Leaf, grad: Tensor, offset: int, after: Sequence[Ticket] | None = None
    ) -> None:
        """A tile of one contribution, which counts once all its tiles are here.

        grad    the elements from `offset` on of the row-major gradient; as in `receive`
        raises  Unsupported, as `receive`
        """
        param = taker(leaf)
        if param is None:
            return
        if after is None or is_lazy(grad) or not grad.is_contiguous():
            grad, after = materialised(grad).contiguous(), [self._store.device.mark()]
        key = current_pass(), leaf.key
        if key not in self._arriving:
            self._arriving[key] = self._first_tile(key, param, grad.dtype)
        arriving = self._arriving[key]
        send(self._store, self._norms, arriving, grad, offset, after)
        if not arriving.left:
            del self._arriving[key]
            self._all_came(key, arriving)

    def _lone(self, leaf: Leaf) -> Tensor | None:
        """The parameter of `entry`, if the next contribution is to be its `.grad` as it is."""
        param = taker(leaf)
        if param is not None and self._brought(param) != 1:
            return None
        if param is None or param.grad is not None:
            return None
        return None if (current_pass(), leaf.key) in self._sums else param

    def _came(self, leaf: Leaf, param: Tensor, grad: Tensor) -> None:
        self._become(param, grad)
        _tell(param)

    def _comes_alone(self, key: tuple[int, int], param: Tensor) -> bool:
        """Whether the contribution that begins is all that this pass gives to `param`."""
        if hooks_of(param)[0] or key in self._sums:
            return False
        return self._brought(param) == 1

    def _first_tile(self, key: tuple[int, int], param: Tensor, dtype: torch.dtype) -> Arriving:
        """Where the tiles of a contribution are to go."""
        alone, held = self._comes_alone(key, param), None
        if _is_autograds(param):
            alone = False
        elif not alone and key in self._sums:
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
        if _is_autograds(param):
            assert not arriving.adds, "tiles of what autograd is to have were added to something"
            if (before := self.returned.setdefault(id(param), total)) is not total:
                self._add_late(before, total)
            return
        if not arriving.alone:
            if arriving.adds:
                return
            held = self._sums.get(key)
            if held is None:
                self._keep(key, _Sum(arriving.entry, total, param, arriving.found))
            else:
                self._add_late(held.total, total)
            return
        if not arriving.adds:
            self._become(param, hooked(param, total))
        _tell(param)

    @uninterrupted
    def adopt(self, param: Tensor) -> None:
        """Autograd has come to `param`: settle what was collected; `.grad` moves to the store,
        unless others hold it: what is written to `p.grad = flat[a:b]` is to be seen in `flat`.
        What autograd made is not held by others, though it be a part of what it splits among
        parameters (`cat`).

        A post-accumulate hook, the first of every tiered parameter.
        raises  Unsupported, if a hook would have to see one sum of which autograd has a part
        """
        tiered: Any = param
        key = current_pass(), leaf_of(tiered._handle).key
        if key in self._sums:
            self._flush_one(key)
        if param.grad is None or isinstance(getattr(param.grad, "entry", None), Entry):
            return
        if param.grad.layout is not torch.strided:
            return  # sparse: small, and of no fixed size
        if others_hold_gradient(param):
            if key[0] < 0 or tiered.grad_given or is_gradient_named(param):
                return
            if param.grad.untyped_storage().nbytes() == param.grad.nbytes:
                self._shared.put(key[0], leaf_of(tiered._handle), param)
                return  # a part of more is what autograd splits
        self._take_home(param)

    @uninterrupted
    def _take_home(self, param: Tensor) -> None:
        grad = param.grad
        assert grad is not None
        name = param._name_in_store()  # type: ignore[attr-defined]  # a tiered tensor's
        param.grad = None
        try:
            param.grad = self._alone(name, param, like(param, grad), [self._store.device.mark()])
        except BaseException:
            param.grad = grad
            raise

    def _return(self, param: Tensor, grad: Tensor, after: Sequence[Ticket]) -> None:
        """`grad` goes home, and from there to autograd, whose hooks see a tiered tensor."""
        key = id(param)
        held: Any = self.returned.get(key)
        if held is not None:
            self._store.add(held.entry, flat(grad), after=after)
            return
        name = param._name_in_store()  # type: ignore[attr-defined]  # a tiered tensor's
        self.returned[key] = self._alone(name, param, grad, after)

    def abandon(self) -> None:
        """A call failed: nothing of it came."""
        self.near.abandon()
        self.returned.clear()
        self._late = None

    def _settle(self, param: Tensor, grad: Tensor, after: Sequence[Ticket]) -> None:
        seen = hooked(param, grad)
        if seen is not grad:
            grad, after = like(param, seen), [self._store.device.mark()]
        if param.grad is None:
            name = param._name_in_store()  # type: ignore[attr-defined]  # a tiered tensor's
            param.grad = self._alone(name, param, grad, after)
        else:
            self._add(param, param.grad, grad, after)
        _tell(param)

    def _add(self, param: Tensor, held: Tensor, grad: Tensor, after: Sequence[Ticket]) -> None:
        entry = getattr(held, "entry", None)
        if not isinstance(entry, Entry):
            with torch.no_grad():
                held.add_(grad)
        elif held.dtype == grad.dtype and held.stride() == grad.stride():
            begin = int(held.storage_offset()) * grad.element_size()  # a user may give part of one
            entry.store.add(entry, flat(grad), begin=begin, after=after)
        else:
            name = param._name_in_store()  # type: ignore[attr-defined]  # a tiered tensor's
            self._add_late(held, self._home(name, param, grad, after)[1])

    def _add_late(self, held: Tensor, more: Tensor) -> None:
        """`held += more`, both at home."""
        if self._late is None:
            _add_to(held, more)
        else:
            self._late.append(partial(_add_to, held, more))

    def _become(self, param: Tensor, total: Tensor) -> None:
        """`total`, at home, is what this pass gives to `param`."""
        if param.grad is None:
            param.grad = total
        else:
            self._add_late(param.grad, total)

    def _blank(self, name: str, param: Tensor, nbytes: int) -> Entry:
        of = param.entry.key  # type: ignore[attr-defined]  # a tiered tensor's
        return self._store.create(f"{name}.grad", EntryKind.GRAD, nbytes, of=of)

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

    @uninterrupted
    def _flush(self, ended: int) -> None:
        """The backward pass has ended: whatever was still expected will not come."""
        for key in [key for key in self._sums if key[0] == ended]:
            self._flush_one(key)


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


def _add_to(held: Tensor, more: Tensor) -> None:
    with torch.no_grad():
        held.add_(more)


def _is_autograds(param: Tensor) -> bool:
    """Whether autograd itself is to add to the gradient, since hooks may wait at the node that
    does: they are called before and after, in an order that is torch's own."""
    return is_reached(param) and current_pass() >= 0


def _tell(param: Tensor) -> None:
    """Call post-accumulate hooks, unless autograd does when it comes to `param`."""
    if not tells_without_gradient():
        after_backward(partial(_call_hooks, param))


def _call_hooks(param: Tensor) -> None:
    for hook in list(hooks_of(param)[1].values()):
        hook(param)
