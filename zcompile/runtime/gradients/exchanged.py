"""Gradients that several ranks train with: exchanged, summed in the order of ranks, kept as shares.

A compiled backward exchanges each contribution as soon as it is made, so that what crosses between
ranks is up to the graph alone. What the parts of all ranks become is up to this rank: the sum over
ranks is added to `.grad`, rank after rank, which is the order in which one process would add the
same gradients, each times 1/ranks. Contributions of one backward pass are added up first, part by
part, as autograd adds them before they reach `.grad`.

A gradient that is a widening cast of what compute made, as under autocast, crosses as it was made:
half the bytes. Its parts are widened here, each before it is scaled and added, which loses nothing,
so that the sum has the bits of one over wide parts.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from zcompile.errors import Unsupported
from zcompile.ir.handles import Leaf
from zcompile.ir.torch_compat import after_backward, current_pass, hooks_of, materialised
from zcompile.ir.types import EntryKind, Layout
from zcompile.runtime.gradients.leaves import (
    accumulating_parameter,
    flattened,
    in_layout_of,
    may_have_node_hooks,
    owner_of,
    run_hooks,
)
from zcompile.runtime.ranks.fabric import Exchanged
from zcompile.runtime.store.store import Entry, Store
from zcompile.runtime.transfer.ticket import Ticket

Wrap = Callable[[Entry, Layout], Tensor]


@dataclass(frozen=True)
class _PassParts:
    """What contributions of one backward pass to a gradient add up to, part by part."""

    param: Tensor
    dtype: torch.dtype
    exchanged: Exchanged
    """In `dtype`, or in a narrower one that is exact."""


@dataclass(frozen=True)
class _Landing:
    """A mean over ranks on its way to an entry that rests on the device: row, uint8 [nbytes]."""

    entry: Entry
    row: Tensor
    ticket: Ticket


class ExchangedGradients:
    """Receives gradients that the ranks have exchanged.

    wrap              makes a tiered tensor over an entry
    contributions_of  how many contributions the pass that runs brings to a parameter; 0: unknown
    call_post_hooks   calls the post-accumulate hooks of a parameter, unless autograd does
    """

    def __init__(
        self,
        store: Store,
        wrap: Wrap,
        contributions_of: Callable[[Tensor], int],
        call_post_hooks: Callable[[Tensor], None],
    ) -> None:
        self._store, self._wrap = store, wrap
        self._contributions_of, self._call_post_hooks = contributions_of, call_post_hooks
        self._sums: dict[tuple[int, int], _PassParts] = {}
        self._landing: list[_Landing] = []

    def sees_wide(self, leaf: Leaf) -> bool:
        """Whether hooks of the parameter are to see its next gradient, in the dtype of that: what
        they make of it need not fit a narrower one."""
        param = owner_of(leaf)
        return param is not None and param.requires_grad and bool(hooks_of(param)[0])

    def before(self, leaf: Leaf, grad: Tensor, narrow: bool = False) -> Tensor:
        """The elements of a gradient in the order in which they are exchanged: [numel].

        Hooks of the parameter see it here: the gradient of this rank, as with
        DistributedDataParallel.

        narrow  the ranks have agreed that it crosses in a dtype narrower than the parameter's
        raises  Unsupported, if hooks would have to see something else
        """
        param = owner_of(leaf)
        if param is not None and param.requires_grad:
            if may_have_node_hooks(param):
                raise Unsupported(
                    f"the node of autograd that adds to the gradient of {leaf.name!r} was taken "
                    "hold of (grad_fn of a view of it), and several ranks train the model",
                    "use register_hook or register_post_accumulate_grad_hook of the parameter",
                )
            if hooks_of(param)[0]:
                if self._contributions_of(param) != 1:
                    raise Unsupported(
                        f"parameter {leaf.name!r} has a hook, is used several times, and several "
                        "ranks train the model: the hook cannot see the sum of its gradients",
                        "use register_post_accumulate_grad_hook, which sees the mean over ranks",
                    )
                if narrow:
                    raise Unsupported(
                        f"a hook of parameter {leaf.name!r} was registered while backward ran, and "
                        "several ranks train the model, which have begun to exchange its gradient "
                        "in a narrower dtype",
                        "register it before backward",
                    )
                grad = run_hooks(param, grad)
            grad = in_layout_of(param, grad)
        else:
            grad = materialised(grad).contiguous()
        if self._store.arena.holds(grad):
            grad = grad.clone()  # what is fetched next may lie there
        return flattened(grad.detach())

    def packed(self, leaf: Leaf, grad: Tensor) -> tuple[Leaf, Tensor]:
        """As `before`, in a copy: a small gradient that waits for others to be exchanged with."""
        flat = self.before(leaf, grad)
        return leaf, torch.empty(flat.numel(), dtype=flat.dtype, device="cpu").copy_(flat)

    def take(self, leaf: Leaf, dtype: torch.dtype, exchanged: Exchanged) -> None:
        """Receive one contribution.

        dtype  of the gradient; that of what was exchanged, or wider
        """
        param = accumulating_parameter(leaf)
        if param is None:
            return
        key = current_pass(), leaf.key
        if key not in self._sums and self._contributions_of(param) == 1:
            self._finalize(_PassParts(param, dtype, exchanged))
        elif (before := self._sums.get(key)) is not None:
            sums = self._fabric.added(before.exchanged, exchanged, dtype)
            self._sums[key] = _PassParts(param, dtype, sums)
        else:
            if not any(number == key[0] for number, _ in self._sums):
                after_backward(partial(self.flush_pass, key[0]))
            self._sums[key] = _PassParts(param, dtype, exchanged)

    def flush(self, key: tuple[int, int]) -> None:
        """Autograd has come to a parameter: its sum of this pass, if there is one, is complete."""
        if (held := self._sums.pop(key, None)) is not None:
            self._finalize(held)
            self.land()

    def flush_pass(self, number: int) -> None:
        """A backward pass has ended: what it still might bring does not come."""
        for key in [key for key in self._sums if key[0] == number]:
            self.flush(key)

    def clear(self) -> None:
        """A pass has failed: forget what it has brought."""
        self._sums.clear()
        self._landing.clear()

    def land(self) -> None:
        """Let what rests on the device arrive there: compute itself brings it, and would wait for
        the other ranks in the middle of a call."""
        landing, self._landing = self._landing, []
        for x in landing:
            self._store.put(x.entry, x.row, after=[x.ticket])

    @property
    def _fabric(self) -> Any:
        fabric = self._store.fabric
        assert fabric is not None, "gradients are exchanged"
        return fabric

    def _finalize(self, held: _PassParts) -> None:
        """Make what all ranks bring `.grad`, or add it to that."""
        param: Any = held.param
        if param.grad is None:
            param.grad = self._stored(held)
        else:
            self._add(held)
        self._call_post_hooks(param)

    def _stored(self, held: _PassParts) -> Tensor:
        """The mean over ranks, in a new entry: a share, if the parameter is one."""
        param: Any = held.param
        total = self._fabric.folded(held.exchanged, held.dtype)
        partition = param.entry.partition
        name, row = f"{param._name_in_store()}.grad", total.parts[0]
        of = param.entry.key
        entry = self._store.create(name, EntryKind.GRAD, row.nbytes, of=of, partition=partition)
        grad = self._wrap(entry, _layout_of(param, held.dtype))
        if entry.on_device:
            self._landing.append(_Landing(entry, row.view(torch.uint8), total.ticket))
        else:
            self._store.put(entry, row.view(torch.uint8), after=[total.ticket])
        return grad

    def _add(self, held: _PassParts) -> None:
        """Add what each rank brings to `.grad`, rank after rank."""
        param: Any = held.param
        entry = getattr(param.grad, "entry", None)
        layout = _layout_of(param, held.dtype)
        if (
            not isinstance(entry, Entry)
            or entry.partition != param.entry.partition
            or param.grad.entry_layout != layout
        ):
            raise Unsupported(
                f"the .grad of {param._name_in_store()!r} is {param.grad.dtype} "
                f"{tuple(param.grad.size())}, and not of backward's making, while several ranks "
                "train the model",
                "set it to None, and let backward make it",
            )
        self.land()
        parts, ticket = self._fabric.scaled(held.exchanged, held.dtype)
        for part in parts:
            entry.store.add(entry, part, after=[ticket])


def _layout_of(param: Tensor, dtype: torch.dtype) -> Layout:
    """The layout of a gradient: dense, as its parameter if that is."""
    layout = Layout.of(param)
    if layout.dense and layout.dtype == dtype:
        return layout
    like = torch.empty_strided(layout.size, layout.stride, dtype=dtype, device="meta")
    return Layout.of(like if layout.dense else torch.empty(layout.size, dtype=dtype, device="meta"))
