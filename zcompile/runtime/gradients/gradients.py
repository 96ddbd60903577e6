"""Gradients of a compiled backward, or of autograd itself, become `.grad` of tiered parameters.

A parameter's `.grad` is a tiered tensor whose bytes rest in the store. Sums are taken in the order
autograd takes them, so that they round alike: within one backward pass the contributions of a
parameter are added up first, and only their sum is added to what `.grad` held before.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, count
from typing import Any

import torch
from torch import Tensor

from zcompile.errors import TierFull, Unsupported
from zcompile.ir.handles import Leaf, leaf_of
from zcompile.ir.schedule import Cast
from zcompile.ir.ties import Dead, Tie, tie_to
from zcompile.ir.torch_compat import (
    accumulates_into,
    after_backward,
    current_pass,
    grad_of,
    hooks_of,
    is_gradient_named,
    is_lazy,
    materialised,
    others_hold_gradient,
    will_run,
)
from zcompile.ir.types import EntryKind, Layout
from zcompile.runtime.gradients.exchanged import ExchangedGradients
from zcompile.runtime.gradients.leaves import (
    TiledContribution,
    accumulating_parameter,
    accumulating_parameters,
    autograd_always_calls_post_hooks,
    can_add_tiles,
    flattened,
    gradient_state,
    in_layout_of,
    may_have_node_hooks,
    owner_of,
    refuse_graph_of_gradients,
    run_hooks,
    store_tile,
    whole_layout,
)
from zcompile.runtime.gradients.on_device import DeviceGradients
from zcompile.runtime.gradients.shared import SharedGradients
from zcompile.runtime.gradients.unexchanged import UnexchangedSums
from zcompile.runtime.norms import Norms
from zcompile.runtime.store.store import Entry, Store, used_by_runtime
from zcompile.runtime.transfer.interrupts import uninterrupted
from zcompile.runtime.transfer.ticket import Ticket

Wrap = Callable[[Entry, Layout], Tensor]
"""Makes a tiered tensor over an entry; given from above, where tiered tensors are known."""


class Gradients:
    """Receives gradients of the parameters of one store.

    A compiled forward says how many contributions its backward will make (`expect`), and by which
    node of autograd (`expect_from`). So each pass knows what it will bring: autograd tells which
    nodes it comes to. A parameter to which a pass brings exactly one contribution, and that has no
    hooks, is finalized at once. Any other collects contributions in `_sums` until autograd comes to
    the parameter itself, after everything that uses it (`come_to`). Sums are kept by backward pass,
    so that what a failed pass left behind is never added to.

    A parameter whose node of autograd somebody got hold of (`leaves.may_have_node_hooks`) is
    autograd's alone: its contributions are stored and, as tiered tensors, given to autograd
    (`returned`), which adds up and calls all hooks in its own order.

    Where several ranks train, they exchange gradients (`exchanged`), unless backward runs within
    `no_sync`: then each sums its own as one process does, and all ops that it needs for that are
    its own too (`unexchanged`).
    """

    def __init__(self, store: Store, wrap: Wrap, norms: Norms) -> None:
        self._store = store
        self._wrap = wrap
        self._norms = norms
        self._expected: tuple[Leaf, ...] = ()
        self._calls: dict[int, tuple[Tie, tuple[int, ...]]] = {}
        """Calls that were made: tie to the node, and the parameter's id of each contribution."""
        self._unknown_pass: set[int] = set()
        """Ids of parameters to which a call contributes whose node was not found."""
        self._used_outside: set[int] = set()
        """Keys of the entries of parameters of which uses outside of compiled graphs were recorded
        by autograd in this step: it may add to their gradients as well."""
        self._adds: dict[int, bool] = {}
        """Keys of the entries of parameters -> whether it did, when it came to them last. A norm
        that is logged is a use that comes to nothing; to collect gradients for it would take
        room."""
        self._added_to: tuple[int, set[int]] = -1, set()
        """A pass, and handles of parameters to which autograd has brought a part in it."""
        self._numbers = count()
        self._dead_nodes = Dead()
        """To nodes that have died."""
        self._pass_counts: tuple[int, Counter[int]] = -1, Counter()
        """A pass -> how many contributions it brings, by the parameter's id."""
        self._left_out: tuple[int, dict[int, object]] = -1, {}
        """A pass -> the state of `.grad` of parameters, by id, when a call of it left them out."""
        self._sums: dict[tuple[int, int], _PassSum] = {}
        self._tiled: dict[tuple[int, int], TiledContribution] = {}
        self.returned: dict[int, Tensor] = {}
        """Tiered gradients that the running call gives to autograd instead of making them
        `.grad` itself, by the parameter's id."""
        self._after_call: list[Callable[[], None]] | None = None
        """Sums of what is at home, which are calls of their own and wait for the end of the call
        that runs; None, if none runs."""
        self._shared = SharedGradients(self._move_to_store)
        self.unexchanged = UnexchangedSums()
        self._no_syncs = 0
        """Contexts of `no_sync` that are open."""
        self.exchanged = ExchangedGradients(
            store,
            wrap,
            self._contributions_of,
            self._comes_alone,
            _call_post_hooks,
            self.unexchanged,
        )
        self.on_device = DeviceGradients(
            store, wrap, norms, self._sole_parameters, self._store_result
        )

    @property
    def within_no_sync(self) -> bool:
        """Whether a backward that runs now sums the gradients of this rank alone."""
        return self._no_syncs > 0

    def enter_no_sync(self) -> None:
        """Backward exchanges nothing, until as many `leave_no_sync`."""
        self._no_syncs += 1

    def leave_no_sync(self) -> None:
        self._no_syncs -= 1

    @property
    def _exchanges(self) -> bool:
        """Whether ranks exchange what a backward that runs now makes."""
        return self._store.fabric is not None and not self._no_syncs

    @property
    def _sums_alone(self) -> bool:
        """Whether this rank is one of several, and sums what a backward makes that runs now."""
        return self._store.fabric is not None and self._no_syncs > 0

    @uninterrupted
    def expect(self, leaves: Iterable[Leaf]) -> None:
        """A call begins that will contribute to the gradients of `leaves`, one for each time a leaf
        is named."""
        if current_pass() < 0:  # no backward is running, so a pass that left sums has failed
            self._sums.clear()
            self._tiled.clear()
            self._shared.clear()
            self.exchanged.clear()
        self._expected = tuple(leaf for leaf in leaves if owner_of(leaf) is not None)

    def begin(self) -> None:
        """A call begins."""
        self._after_call = []

    def finish(self) -> None:
        """The call is over, and another may run: sums that waited for that are taken now."""
        self.exchanged.land()
        jobs, self._after_call = self._after_call, None
        for job in jobs or ():
            job()

    def expect_from(self, node: Callable[[], Any | None]) -> None:
        """Contributions that are expected since the last call come when autograd runs this node.

        Without a node nobody knows when: contributions to those parameters are always collected.
        """
        if self._expected:
            while self._dead_nodes:
                self._calls.pop(self._dead_nodes.popleft().mark, None)
            owners = tuple(id(owner_of(leaf)) for leaf in self._expected)
            if (found := node()) is not None:
                number = next(self._numbers)
                self._calls[number] = tie_to(found, self._dead_nodes, number), owners
                found.register_prehook(partial(refuse_graph_of_gradients, self._expected))
            else:
                self._unknown_pass.update(owners)
            self._expected = ()

    def count_contributions(self) -> None:
        """A backward call begins: if it is the first of its pass, count the contributions of the
        pass."""
        number = current_pass()
        if number >= 0 and self._pass_counts[0] != number:
            calls = [(tie(), keys) for tie, keys in self._calls.values()]
            runs = [keys for node, keys in calls if node is not None and will_run(node)]
            self._pass_counts = number, Counter(chain.from_iterable(runs))

    def leave_out(self, leaves: Iterable[Leaf]) -> None:
        """A backward call begins that contributes nothing to `leaves`, which are expected of it:
        nobody differentiates what reads them."""
        self.count_contributions()
        number, brings = self._pass_counts
        if self._left_out[0] != number:
            self._left_out = number, {}
        for param in map(owner_of, leaves):
            if param is not None:
                brings[id(param)] -= 1
                self._left_out[1][id(param)] = gradient_state(param.grad)

    def brings_to(self, param: Tensor) -> bool:
        """Whether the pass that is running has brought a gradient to `param`, to which autograd has
        come: it comes also to those that calls left out, and not in eager PyTorch."""
        number, states = self._left_out
        if number != current_pass() or id(param) not in states:
            return True
        return states[id(param)] != gradient_state(param.grad)

    def _contributions_of(self, param: Tensor) -> int:
        """How many contributions the pass that is running brings to a gradient; 0, if that is not
        known."""
        number, brings = self._pass_counts
        known = number == current_pass() and id(param) not in self._unknown_pass
        return brings[id(param)] if known else 0

    @uninterrupted
    def take(
        self,
        leaf: Leaf,
        grad: Tensor,
        offset: int | None = None,
        after: Sequence[Ticket] | None = None,
    ) -> None:
        """Receive all of a contribution; or, with an offset, a tile of one."""
        if offset is None:
            self.receive(leaf, grad, after)
        else:
            self.receive_tile(leaf, grad, offset, after)

    def may_rest_narrow(self, leaf: Leaf) -> bool:
        """Whether the next contribution of a leaf becomes its `.grad` as it is, so that it may rest
        in the dtype it was made in: nobody adds to it, or looks at it on the way."""
        if self._sums_alone:
            return False
        param = accumulating_parameter(leaf)
        if param is None:
            return True
        if param.grad is not None or _autograd_accumulates(param):
            return False
        return self._is_sole_contribution((current_pass(), leaf.key), param)

    def receive(self, leaf: Leaf, grad: Tensor, after: Sequence[Ticket] | None = None) -> None:
        """Receive one contribution to the gradient of the parameter that `leaf` stands for.

        grad   any strides, on the compute device; not kept, not changed; narrower than the
               parameter only if it `may_rest_narrow`
        after  complete once `grad` is computed; None: mark compute here
        raises  Unsupported, if this is `torch.autograd.grad` and not `backward`
        """
        param = accumulating_parameter(leaf)
        if param is None:
            return
        if self._sums_alone:
            self.unexchanged.check_adds(param)
        same = in_layout_of(param, grad)
        if after is None or same is not grad:
            grad, after = same, [self._store.device.mark()]
        key = current_pass(), leaf.key
        if _autograd_accumulates(param):
            self._give_to_autograd(param, grad, after)
        elif self._is_sole_contribution(key, param):
            self._finalize(param, grad, after)
        else:
            self._collect(key, leaf.name, param, grad, after)

    def receive_tile(
        self, leaf: Leaf, grad: Tensor, offset: int, after: Sequence[Ticket] | None = None
    ) -> None:
        """Receive a tile of one contribution, which counts once all its tiles are here.

        grad    the elements from `offset` on of the row-major gradient; as in `receive`
        raises  Unsupported, as `receive`
        """
        param = accumulating_parameter(leaf)
        if param is None:
            return
        if after is None or is_lazy(grad) or not grad.is_contiguous():
            grad, after = materialised(grad).contiguous(), [self._store.device.mark()]
        key = current_pass(), leaf.key
        if key not in self._tiled:
            if self._sums_alone:
                self.unexchanged.check_adds(param)
            self._tiled[key] = self._start_tiles(key, param, grad.dtype)
        tiled = self._tiled[key]
        store_tile(self._store, self._norms, tiled, grad, offset, after)
        if not tiled.left:
            del self._tiled[key]
            self._finish_tiles(key, tiled)

    def _sole_parameters(self, leaves: Sequence[Leaf]) -> list[Tensor | None]:
        """The parameter of each of `leaves` whose next contribution becomes its `.grad` as it is;
        of the others None."""
        (number, brings), now = self._pass_counts, current_pass()
        if number != now:
            return [None] * len(leaves)
        unknown, sums = self._unknown_pass, self._sums
        return [
            param
            if param is not None
            and brings[id(param)] == 1
            and id(param) not in unknown
            and param.grad is None
            and (now, leaf.key) not in sums
            else None
            for leaf, param in zip(leaves, accumulating_parameters(leaves), strict=True)
        ]

    def _store_result(self, leaf: Leaf, param: Tensor, grad: Tensor) -> None:
        """Take over a gradient that was made on the device."""
        self._set_or_add(param, grad)
        _call_post_hooks(param)

    def _is_sole_contribution(self, key: tuple[int, int], param: Tensor) -> bool:
        """Whether the contribution that begins is all that this pass gives to `param`."""
        if hooks_of(param)[0] or key in self._sums:
            return False
        return self._comes_alone(param)

    def _comes_alone(self, param: Tensor) -> bool:
        """Whether a contribution may be added to `.grad` as it comes. What autograd may bring as
        well is added to it first, unless there is no `.grad` yet, where the order is all one; not
        so where ranks add up what each of them has made of both."""
        if self._contributions_of(param) != 1:
            return False
        key, first = param.entry.key, param.grad is None and not self._exchanges  # type: ignore[attr-defined]  # a tiered tensor's
        return first or not self._adds.get(key, key in self._used_outside)

    def _learn(self, param: Any, brought: bool) -> None:
        """Autograd has come to a parameter.

        brought  it has made `.grad`, which there was not
        """
        if brought:
            self._note_part(param)
        number, params = self._added_to
        added = number == current_pass() and leaf_of(param._handle).key in params
        key = param.entry.key
        if current_pass() >= 0 and (added or key in self._used_outside or key in self._adds):
            self._adds[key] = added

    def _note_part(self, param: Any) -> None:
        """Autograd brings a part of a gradient in the pass that runs."""
        if self._added_to[0] != (number := current_pass()):
            self._added_to = number, set()
        self._added_to[1].add(leaf_of(param._handle).key)

    def note_use(self, entry: Entry) -> None:
        """Autograd has recorded a use of a parameter outside of compiled graphs."""
        self._used_outside.add(entry.key)

    def end_step(self) -> None:
        """An optimizer's step is over: uses that come now are of another."""
        self._used_outside.clear()

    @uninterrupted
    def add(self, held: Any, grad: Tensor) -> bool:
        """Add what autograd has added up for a parameter to its gradient; whether that was to be
        done otherwise than by adding it, and is done: with other contributions of the pass.

        held  the tiered gradient that autograd is about to add to, if it is autograd
        """
        param: Any = accumulates_into(held)
        if param is None or getattr(param, "entry", None) is None:
            return False
        self._note_part(param)
        if self._exchanges:
            return self.exchanged.add(param, grad)
        if self._sums_alone:
            self.unexchanged.check_adds(param)
        found = (
            None
            if hooks_of(param)[0]
            else self._sums.pop((current_pass(), leaf_of(param._handle).key), None)
        )
        if found is None:
            if self._sums_alone:
                self._add_in_place(held, grad)
            return self._sums_alone
        self._add_in_place(found.total, grad)
        self._add_in_place(held, found.total)
        return True

    def _add_in_place(self, held: Any, more: Any) -> None:
        """Add `more` to `held`, outside of autograd; one of them is tiered, or both."""
        if not self._sums_alone:
            with torch.no_grad():
                held.add_(more)
            return
        # By no op, on which all ranks would have to agree.
        if isinstance(getattr(more, "entry", None), Entry):
            more = more.entry_layout.view(self._store.read_all(more.entry)).to(held.device)
        if not isinstance(getattr(held, "entry", None), Entry):
            # Made by autograd in this pass, of uses outside of compiled graphs.
            with torch.no_grad():
                held.add_(more)
            return
        flat = flattened(in_layout_of(held, more.detach()))
        with used_by_runtime(held.entry):
            self._store.add(held.entry, flat, after=[self._store.device.mark()])

    def _start_tiles(
        self, key: tuple[int, int], param: Tensor, dtype: torch.dtype
    ) -> TiledContribution:
        """Choose where the tiles of a contribution are stored, when the first one comes."""
        alone, held = self._is_sole_contribution(key, param), None
        if _autograd_accumulates(param):
            alone = False
        elif not alone and key in self._sums:
            held = self._sums[key].total
        elif alone and not hooks_of(param)[0]:
            held = param.grad
        found, layout = gradient_state(param.grad), whole_layout(param, dtype)
        if held is not None and can_add_tiles(held, layout):
            return TiledContribution(param, held, True, alone, found, param.numel())
        name = param._name_in_store()  # type: ignore[attr-defined]  # a tiered tensor's
        fresh = self._wrap(self._blank(name, param, layout.nbytes), layout)
        return TiledContribution(param, fresh, False, alone, found, param.numel())

    def _finish_tiles(self, key: tuple[int, int], tiled: TiledContribution) -> None:
        """All tiles are here: do what `receive` does with a contribution that came at once."""
        param, total = tiled.param, tiled.held
        if not tiled.adds:
            self._norms.note_whole(tiled.entry, Layout.of(total))
        if _autograd_accumulates(param):
            assert not tiled.adds, "tiles of what autograd is to have were added to something"
            if (before := self.returned.setdefault(id(param), total)) is not total:
                self._add_after_call(before, total)
            return
        if not tiled.alone:
            if tiled.adds:
                return
            held = self._sums.get(key)
            if held is None:
                self._start_sum(key, _PassSum(tiled.entry, total, param, tiled.found))
            else:
                self._add_after_call(held.total, total)
            return
        if not tiled.adds:
            self._set_or_add(param, self._seen_by_hooks(param, total))
        _call_post_hooks(param)

    def come_to(self, param: Tensor) -> None:
        """Autograd has come to `param`: a post-accumulate hook, the first of every tiered
        parameter. raises  as `adopt`"""
        adds = self._adds or self._added_to[1] or self._used_outside
        if adds or self._is_to_be_adopted(param):
            self.adopt(param)

    def _set_gradient(self, param: Tensor, grad: Tensor) -> None:
        """Make a tiered tensor `.grad` of a parameter."""
        param.grad = grad
        if self._sums_alone:
            self.unexchanged.note(param)

    def _is_to_be_adopted(self, param: Tensor) -> bool:
        """Whether there is more to do for a gradient than to see that it is at home: not, as a
        rule, and that is asked of each parameter twice in each step."""
        fabric = self._store.fabric
        return bool(self._sums) or fabric is not None or not _is_at_home(param)

    @uninterrupted
    def adopt(self, param: Tensor) -> None:
        """Autograd has come to `param`: finalize its collected sum, and move `.grad` to the store.

        Not if others hold `.grad`: what is written to `p.grad = flat[a:b]` is to be seen in `flat`.
        What autograd made is not held by others, though it be a part of what it splits among
        parameters (`cat`). Nor if it has a graph (`create_graph=True`), which no entry has.

        raises  Unsupported, if a hook would have to see one sum of which autograd has a part
        """
        tiered: Any = param
        plain = param.grad is not None and not isinstance(getattr(param.grad, "entry", None), Entry)
        if plain or self._adds or self._added_to[1] or tiered.entry.key in self._used_outside:
            self._learn(tiered, plain and not tiered.grad_given)
        if self._store.fabric is not None and (current_pass() < 0 or self._exchanges):
            self._adopt_exchanged(tiered)
            return
        if self._sums_alone and plain:
            self.exchanged.check_brought(tiered, tiered.grad)
        if not self._sums and param.grad is not None and not plain:
            return  # the usual case, for each parameter twice in each step
        key = current_pass(), leaf_of(tiered._handle).key
        if key in self._sums:
            self._flush_one(key)
        if param.grad is None or isinstance(getattr(param.grad, "entry", None), Entry):
            return
        if param.grad.layout is not torch.strided:
            return  # sparse: small, and of no fixed size
        if param.grad.requires_grad:
            return  # the user is to differentiate it
        if others_hold_gradient(param):
            if key[0] < 0 or tiered.grad_given or is_gradient_named(param):
                return
            if param.grad.untyped_storage().nbytes() == param.grad.nbytes:
                self._shared.put(key[0], leaf_of(tiered._handle), param)
                return  # a part of more is what autograd splits
        self._move_to_store(param)

    def adopt_each(self, params: Iterable[Tensor]) -> None:
        """`adopt` each of these: before an optimizer's step, which has hundreds, hardly one has a
        gradient that is plain."""
        found = [*params]
        if not self._sums and self._store.fabric is None:
            found = [p for p in found if not hasattr(grad_of(p), "entry_layout")]
        for param in found:
            self.adopt(param)

    def _adopt_exchanged(self, param: Any) -> None:
        """As `adopt`, where several ranks train the model: they exchange what autograd has made,
        and compare what a user gives.

        raises  Unsupported, RanksDiffer, RankFailed
        """
        leaf, grad = leaf_of(param._handle), param.grad
        in_pass = current_pass() >= 0
        if in_pass:
            self.exchanged.come_to(leaf)
        if grad is None or isinstance(getattr(grad, "entry", None), Entry):
            self.exchanged.flush((current_pass(), leaf.key))
        elif in_pass:
            self.exchanged.bring(leaf, param, grad)
        else:
            self.exchanged.give(param, grad)

    @uninterrupted
    def _move_to_store(self, param: Tensor) -> None:
        """Move the bytes of `param.grad` to the store."""
        grad = param.grad
        assert grad is not None
        name = param._name_in_store()  # type: ignore[attr-defined]  # a tiered tensor's
        param.grad = None
        try:
            self._set_gradient(
                param,
                self._store_whole(
                    name, param, in_layout_of(param, grad), [self._store.device.mark()]
                ),
            )
        except BaseException:
            param.grad = grad
            raise

    def _give_to_autograd(self, param: Tensor, grad: Tensor, after: Sequence[Ticket]) -> None:
        """Store `grad`, and give it to autograd as a tiered tensor, which its hooks see."""
        key = id(param)
        held: Any = self.returned.get(key)
        if held is not None:
            self._store.add(held.entry, flattened(grad), after=after)
            return
        name = param._name_in_store()  # type: ignore[attr-defined]  # a tiered tensor's
        self.returned[key] = self._store_whole(name, param, grad, after)

    def abandon(self) -> None:
        """A call failed: forget its contributions."""
        self.on_device.abandon()
        self.returned.clear()
        self._after_call = None

    def _finalize(self, param: Tensor, grad: Tensor, after: Sequence[Ticket]) -> None:
        """Make a sole contribution `.grad`, or add it to `.grad`."""
        seen = run_hooks(param, grad)
        if seen is not grad:
            grad, after = in_layout_of(param, seen), [self._store.device.mark()]
        if param.grad is None:
            name = param._name_in_store()  # type: ignore[attr-defined]  # a tiered tensor's
            self._set_gradient(param, self._store_whole(name, param, grad, after))
        else:
            self._add(param, param.grad, grad, after)
        _call_post_hooks(param)

    def _add(self, param: Tensor, held: Tensor, grad: Tensor, after: Sequence[Ticket]) -> None:
        """Add a contribution to `held`, which is `.grad`."""
        entry = getattr(held, "entry", None)
        if not isinstance(entry, Entry):
            with torch.no_grad():
                held.add_(grad)
        elif held.dtype == grad.dtype and held.stride() == grad.stride():
            begin = int(held.storage_offset()) * grad.element_size()  # a user may give part of one
            with used_by_runtime(entry):
                entry.store.add(entry, flattened(grad), begin=begin, after=after)
        else:
            name = param._name_in_store()  # type: ignore[attr-defined]  # a tiered tensor's
            self._add_after_call(held, self._store_gradient(name, param, grad, after)[1])

    def _add_after_call(self, held: Tensor, more: Tensor) -> None:
        """Add a stored gradient to a stored one, after the call that runs."""
        if self._after_call is None:
            self._add_in_place(held, more)
        else:
            self._after_call.append(partial(self._add_in_place, held, more))

    def _set_or_add(self, param: Tensor, total: Tensor) -> None:
        """Make `total`, which is stored, `.grad` of `param`, or add it to that."""
        if param.grad is None:
            self._set_gradient(param, total)
        else:
            self._add_after_call(param.grad, total)

    def _blank(self, name: str, param: Tensor, nbytes: int) -> Entry:
        """A new blank entry for the gradient of `param`.

        raises  TierFull
        """
        of = param.entry.key  # type: ignore[attr-defined]  # a tiered tensor's
        try:
            return self._store.create(f"{name}.grad", EntryKind.GRAD, nbytes, of=of)
        except TierFull as error:
            if not self._sums_alone:
                raise
            more = (
                "; or exchange each micro-batch, whose gradients are shares, instead of within "
                "zcompile.no_sync (accelerate and transformers: sync_each_batch=True, lightning: "
                "accumulate_grad_batches=1)"
            )
            raise TierFull(f"{name}.grad", nbytes, error.tiers, more, error.whole) from None

    def _store_gradient(
        self, name: str, param: Tensor, grad: Tensor, after: Sequence[Ticket]
    ) -> tuple[Entry, Tensor]:
        """Store `grad` as a new entry; returns that and a tiered tensor over it."""
        layout = Layout.of(grad)
        entry = self._blank(name, param, layout.nbytes)
        self._store.put(entry, flattened(grad).view(torch.uint8), after=[*after])
        return entry, self._wrap(entry, layout)

    def _store_whole(
        self, name: str, param: Tensor, grad: Tensor, after: Sequence[Ticket]
    ) -> Tensor:
        """Store `grad` as the whole gradient of `param`; its norms are taken on the way."""
        if grad.dtype.itemsize < param.dtype.itemsize:
            return self._store_narrow(name, param, grad, after)
        entry, tiered = self._store_gradient(name, param, grad, after)
        with torch.no_grad():
            self._norms.note(entry, grad.detach())
        return tiered

    def _store_narrow(
        self, name: str, param: Tensor, grad: Tensor, after: Sequence[Ticket]
    ) -> Tensor:
        """As `_store_whole`, of a gradient that rests in the narrower dtype it was made in."""
        entry = self._blank(name, param, grad.nbytes)
        self._store.put(entry, flattened(grad).view(torch.uint8), after=[*after])
        entry.rest_narrow(Cast(param.dtype, grad.dtype))
        with torch.no_grad():
            self._norms.note(entry, grad.detach().to(param.dtype))
        return self._wrap(entry, replace(Layout.of(grad), dtype=param.dtype))

    def _collect(
        self, key: tuple[int, int], name: str, param: Tensor, grad: Tensor, after: Sequence[Ticket]
    ) -> None:
        """Add a contribution to the sum of its pass."""
        held = self._sums.get(key)
        if held is not None:
            self._store.add(held.entry, flattened(grad), after=after)
            return
        entry, total = self._store_gradient(name, param, grad, after)
        self._start_sum(key, _PassSum(entry, total, param, gradient_state(param.grad)))

    def _start_sum(self, key: tuple[int, int], collected: "_PassSum") -> None:
        """Begin the sum of a pass for a parameter: more may come, until autograd comes to the
        parameter."""
        if not any(pass_ == key[0] for pass_, _ in self._sums):
            after_backward(partial(self._flush, key[0]))
        self._sums[key] = collected

    def _flush_one(self, key: tuple[int, int]) -> None:
        """Finalize one sum."""
        held = self._sums.pop(key)
        param = held.param
        if hooks_of(param)[0] and gradient_state(param.grad) != held.found:
            raise Unsupported(
                f"parameter {param._name_in_store()!r} has a hook and gets gradients both from the "  # type: ignore[attr-defined]  # a tiered tensor's
                "compiled model and from code outside of it, so the hook cannot see their sum",
                "compute both parts in the compiled model, or remove the hook",
            )
        self._set_or_add(param, self._seen_by_hooks(param, held.total))
        self.adopt(param)
        _call_post_hooks(param)

    def _seen_by_hooks(self, param: Tensor, total: Any) -> Tensor:
        """What hooks make of a gradient that is stored. If it is of this rank alone they see it as
        a plain tensor, whose ops other ranks have no part in."""
        if not self._sums_alone or not hooks_of(param)[0]:
            return run_hooks(param, total)
        device = self._store.device.torch_device
        plain = total.entry_layout.view(self._store.read_all(total.entry).to(device))
        seen = in_layout_of(param, run_hooks(param, plain))
        name = param._name_in_store()  # type: ignore[attr-defined]  # a tiered tensor's
        return self._store_gradient(name, param, seen, [self._store.device.mark()])[1]

    @uninterrupted
    def _flush(self, ended: int) -> None:
        """Finalize all sums of a backward pass that has ended: contributions still expected will
        not come."""
        for key in [key for key in self._sums if key[0] == ended]:
            self._flush_one(key)


@dataclass(frozen=True)
class _PassSum:
    """The sum of contributions to one parameter within one backward pass.

    entry, total  where the sum rests, and the tiered tensor over it
    found         the state of `.grad` when the first contribution came
    """

    entry: Entry
    total: Tensor
    param: Tensor
    found: object


def _is_at_home(param: Tensor) -> bool:
    """Whether `.grad` is a tiered tensor."""
    return hasattr(grad_of(param), "entry_layout")


def _autograd_accumulates(param: Tensor) -> bool:
    """Whether autograd itself is to add to the gradient, since hooks may wait at the node that
    does.

    Such hooks are called before and after, in an order that is torch's own.
    """
    return may_have_node_hooks(param) and current_pass() >= 0


def _call_post_hooks(param: Tensor) -> None:
    """Call post-accumulate hooks, unless autograd does when it comes to `param`."""
    if not autograd_always_calls_post_hooks():
        after_backward(partial(_call_post_hooks_of, param))


def _call_post_hooks_of(param: Tensor) -> None:
    for hook in list(hooks_of(param)[1].values()):
        hook(param)
