"""Gradients that several ranks train with: exchanged, summed in the order of ranks, kept as shares.

A compiled backward exchanges each contribution as soon as it is made, so that what crosses between
ranks is up to the graph alone. What the parts of all ranks become is up to this rank: the sum over
ranks is added to `.grad`, rank after rank, which is the order in which one process would add the
same gradients, each times 1/ranks. Contributions of one backward pass are added up first, part by
part, as autograd adds them before they reach `.grad`.

A gradient that is a widening cast of what compute made, as under autocast, crosses as it was made:
half the bytes. Its parts are widened here, each before it is scaled and added, which loses nothing,
so that the sum has the bits of one over wide parts.

What code outside of compiled graphs brings comes by autograd, which adds up all uses of a parameter
in a pass: the ranks agree that they exchange it, parameter by parameter.

What a rank has summed within `no_sync` (`unexchanged.py`) is exchanged by the first backward after
that: what this backward makes of the same gradient is added to it before, and both cross as one.
That is so for a contribution that is all that the backward brings. Of any other, what the backward
brings is added up first, as autograd does, so that the sum of before crosses by itself, and so does
one to which the backward brings nothing.

Where several groups of ranks each hold a whole, each sums up what its ranks bring, and these sums
are added one after the other. Where a rank has more of a gradient to add up before, the parts of
all ranks come to each that holds the share, and are added up there in the same order.

A gradient that leaves in tiles is exchanged tile by tile, and each tile becomes part of `.grad` as
a whole one does: so it has the bits of one process with the same tiles. A rank has a part of a
tile, or nothing.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from zcompile.errors import Unsupported
from zcompile.ir.handles import Leaf, leaf_of
from zcompile.ir.partition import SharedRange
from zcompile.ir.torch_compat import (
    after_backward,
    current_pass,
    hooks_of,
    is_within_another_pass,
    materialised,
)
from zcompile.ir.types import EntryKind, Layout
from zcompile.runtime.gradients.leaves import (
    accumulating_parameter,
    flattened,
    in_layout_of,
    may_have_node_hooks,
    owner_of,
    run_hooks,
)
from zcompile.runtime.gradients.unexchanged import UnexchangedSums
from zcompile.runtime.ranks.fabric import Exchanged, told_to_ranks
from zcompile.runtime.ranks.transport import host_rows
from zcompile.runtime.store.store import Entry, Store, used_by_runtime
from zcompile.runtime.transfer.interrupts import deferred_interrupts
from zcompile.runtime.transfer.ticket import Promise, Ticket

MOST_CROSSING = 2
"""Sums that cross by themselves at a time."""

Wrap = Callable[[Entry, Layout], Tensor]


@dataclass(frozen=True)
class _PassParts:
    """What contributions of one backward pass to a gradient add up to, part by part."""

    param: Tensor
    dtype: torch.dtype
    exchanged: Exchanged
    """In `dtype`, or in a narrower one that is exact."""


@dataclass
class _Tiles:
    """The tiles of the only contribution of a backward pass to a gradient: each goes home as it
    comes.

    home  the entry that they go to
    adds  they are added to what rests there, which is `.grad`
    left  elements that are still to come, on all ranks
    """

    param: Tensor
    dtype: torch.dtype
    home: Entry
    adds: bool
    left: int


@dataclass(frozen=True)
class _Landing:
    """A mean over ranks on its way to bytes of an entry that rests on the device, from `begin` on:
    row, uint8 [n]."""

    entry: Entry
    row: Tensor
    ticket: Ticket
    begin: int = 0


class Packed(NamedTuple):
    """A small gradient that waits for others to be exchanged with.

    flat   [numel], on the host once all of `after` is complete, and compute has come so far
    """

    leaf: Leaf
    flat: Tensor
    after: Sequence[Ticket]


class ExchangedGradients:
    """Receives gradients that the ranks have exchanged.

    wrap              makes a tiered tensor over an entry
    contributions_of  how many contributions the pass that runs brings to a parameter; 0: unknown
    comes_alone       whether one may be added to the `.grad` of a parameter as it comes
    call_post_hooks   calls the post-accumulate hooks of a parameter, unless autograd does
    unexchanged       what this rank has summed within `no_sync`
    """

    def __init__(
        self,
        store: Store,
        wrap: Wrap,
        contributions_of: Callable[[Tensor], int],
        comes_alone: Callable[[Tensor], bool],
        call_post_hooks: Callable[[Tensor], None],
        unexchanged: UnexchangedSums,
    ) -> None:
        self._store, self._wrap = store, wrap
        self._contributions_of, self._comes_alone = contributions_of, comes_alone
        self._call_post_hooks = call_post_hooks
        self._unexchanged = unexchanged
        self._exchanging = -1
        """The pass at whose end all sums of this rank are exchanged that are left by then."""
        self._sums: dict[tuple[int, int], _PassParts] = {}
        self._tiled: dict[tuple[int, int], _Tiles] = {}
        self._to_come: dict[tuple[int, int], int] = {}
        """Of sums that begin with a contribution in tiles, its elements that are still to come."""
        self._landing: list[_Landing] = []
        self._hooked: set[tuple[int, int]] = set()
        """Passes, and parameters whose hooks have seen what a compiled graph brings in them."""
        self._came_to: tuple[int, set[int]] = -1, set()
        """A pass, and the parameters that autograd has come to in it, and called hooks of."""

    def sees_wide(self, leaf: Leaf) -> bool:
        """Whether the next gradient of the parameter is to be of the dtype of that: hooks are to
        see it, and what they make of it, as a sum of several, need not fit a narrower one."""
        param = owner_of(leaf)
        if param is None or not param.requires_grad:
            return False
        return bool(hooks_of(param)[0]) or self._unexchanged.is_held_by(param)

    def comes_alone(self, leaf: Leaf, in_tiles: bool) -> bool:
        """Whether ranks may sum up the next gradient of the parameter as it comes: nothing else is
        to be added to what this rank makes of it.

        in_tiles  it comes so
        """
        param = accumulating_parameter(leaf)
        if param is None:
            return True
        if (current_pass(), leaf.key) in self._sums or not self._comes_alone(param):
            return False
        return not (in_tiles and self._unexchanged.is_held_by(param))

    def before(
        self, leaf: Leaf, grad: Tensor, narrow: bool = False, is_tile: bool = False
    ) -> Tensor:
        """The elements of a gradient in the order in which they are exchanged: [numel].

        Hooks of the parameter see it here: the gradient of this rank, as with
        DistributedDataParallel.

        narrow   the ranks have agreed that it crosses in a dtype narrower than the parameter's
        is_tile  it is a tile of a gradient: row-major elements of that
        raises   Unsupported, if hooks would have to see something else
        """
        param = owner_of(leaf)
        if param is not None and param.requires_grad:
            if may_have_node_hooks(param):
                raise Unsupported(
                    f"the node of autograd that adds to the gradient of {leaf.name!r} was taken "
                    "hold of (grad_fn of a view of it), and several ranks train the model",
                    "use register_hook or register_post_accumulate_grad_hook of the parameter",
                )
            if hooks_of(param)[0] and is_tile:
                raise Unsupported(
                    f"parameter {leaf.name!r} has a hook, its gradient is made in tiles, and "
                    "several ranks train the model: this rank has no whole gradient for it to see",
                    "use register_post_accumulate_grad_hook, which sees the mean over ranks; or "
                    "give more device_memory, or tile_bytes",
                )
            if hooks_of(param)[0]:
                self._hooked.add((current_pass(), leaf.key))
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
            grad = materialised(grad).contiguous() if is_tile else in_layout_of(param, grad)
        else:
            grad = materialised(grad).contiguous()
        if self._store.arena.holds(grad):
            grad = grad.clone()  # what is fetched next may lie there
        return flattened(grad.detach())

    def packed(self, leaf: Leaf, grad: Tensor) -> Packed:
        """As `before`, in a copy: a small gradient that waits for others to be exchanged with."""
        flat, after = self.with_sum(leaf, self._copied_to_host(self.before(leaf, grad)))
        return Packed(leaf, flat, after)

    def _copied_to_host(self, flat: Tensor) -> Tensor:
        """A copy of elements, on the host once compute has come so far."""
        streams = self._store.device.streams
        if streams is not None and not streams.is_on_host(flat):
            row = streams.host_row(flat.numel(), flat.dtype)
            return row.copy_(flat, non_blocking=True)
        return torch.empty(flat.numel(), dtype=flat.dtype, device="cpu").copy_(flat)

    def with_sum(
        self, leaf: Leaf, flat: Tensor, after: Sequence[Ticket] = ()
    ) -> tuple[Tensor, Sequence[Ticket]]:
        """What this rank has of a gradient that is exchanged now: `flat`, and what it has summed
        within `no_sync`, if that is to cross with it.

        flat     [numel], as `before` gives it; complete once all of `after` is, or compute has come
                 so far
        returns  such elements, and what they are complete after
        """
        if not self._unexchanged:
            return flat, after
        param = accumulating_parameter(leaf)
        if param is None or not self._unexchanged.is_held_by(param):
            return flat, after
        if (current_pass(), leaf.key) in self._sums or not self._comes_alone(param):
            return flat, after
        return self._added_to_sum(param, flat, after)

    def _added_to_sum(
        self, param: Any, flat: Tensor, after: Sequence[Ticket] = ()
    ) -> tuple[Tensor, Sequence[Ticket]]:
        """The sum of this rank, which is the parameter's gradient no more, and `flat`, as of
        `with_sum`."""
        streams = self._store.device.streams
        if streams is not None and not streams.is_on_host(flat):
            flat = self._copied_to_host(flat)
        total, read = self._read_sum(param)
        mark = self._store.device.mark()
        added = self._fabric.add_here(total, flat, (read, mark, *after))
        param.grad = None
        return total, [added]

    def _read_sum(self, param: Any) -> tuple[Tensor, Ticket]:
        """The sum of this rank, [numel] on the host once the ticket is complete."""
        entry: Entry = param.grad.entry
        with used_by_runtime(entry):
            row, ticket = self._store.read_to_host(entry)
        return row.view(param.grad.dtype), ticket

    def take(self, leaf: Leaf, dtype: torch.dtype, exchanged: Exchanged) -> None:
        """Receive one contribution.

        dtype  of the gradient; that of what was exchanged, or wider
        """
        param = accumulating_parameter(leaf)
        if param is None:
            return
        self._exchange_the_rest_at_the_end()
        key = current_pass(), leaf.key
        if self._is_all_of_it(param, exchanged, key not in self._sums and self._comes_alone(param)):
            self._finalize(_PassParts(param, dtype, exchanged))
        elif (before := self._sums.get(key)) is not None:
            sums = self._fabric.added(before.exchanged, exchanged, dtype)
            self._sums[key] = _PassParts(param, dtype, sums)
        else:
            self._flush_at_the_end_of(key[0])
            self._sums[key] = _PassParts(param, dtype, exchanged)

    def _is_all_of_it(self, param: Any, exchanged: Exchanged, alone: bool) -> bool:
        """Whether what the ranks have exchanged is all that a pass brings to a gradient.

        alone  it is, of what this rank makes; with several groups all ranks have agreed on that
        """
        if param.entry.partition is None or self._fabric.mesh.replicas == 1:
            return alone
        return exchanged.of_groups

    def take_tile(
        self,
        leaf: Leaf,
        grad: Tensor,
        offset: int,
        exchanged: Exchanged,
        tile: SharedRange | None,
    ) -> None:
        """Receive a tile of one contribution.

        grad       the tile that this rank has made
        offset     its first element in the row-major gradient
        exchanged  its parts; of a shared parameter those of this rank's share
        tile       which part of it this rank's share has; None: each rank has all of it
        """
        param = accumulating_parameter(leaf)
        if param is None:
            return
        self._exchange_the_rest_at_the_end()
        key, dtype = (current_pass(), leaf.key), grad.dtype
        first = offset if tile is None else tile.home[0] // grad.element_size()
        alone = self._comes_alone(param) and not self._unexchanged.is_held_by(param)
        alone = self._is_all_of_it(param, exchanged, alone and key not in self._sums)
        if key in self._tiled or alone:
            self._bring_home(key, param, grad, first, exchanged)
            return
        if key not in self._sums:
            self._flush_at_the_end_of(key[0])
            blank = self._fabric.blank(self._counts(param)[0], dtype)
            self._sums[key] = _PassParts(param, dtype, blank)
            self._to_come[key] = param.numel()
        sums, left = self._sums[key].exchanged, self._to_come.get(key, 0)
        made = self._fabric.placed(sums, exchanged, first, dtype, adds=not left)
        self._sums[key] = _PassParts(param, dtype, made)
        if left:
            self._to_come[key] = left - grad.numel()

    # --- From outside of compiled graphs ---

    def come_to(self, leaf: Leaf) -> None:
        """Autograd has come to a parameter: what is added to its gradient now is a hook's."""
        number = current_pass()
        if self._came_to[0] != number:
            self._came_to = number, set()
        self._came_to[1].add(leaf.key)

    def bring(self, leaf: Leaf, param: Any, grad: Tensor) -> None:
        """Receive what autograd has made `.grad` of a parameter that had none, of uses outside of
        compiled graphs: the gradient of this rank, which is exchanged now.

        grad    any strides; not kept, not changed
        raises  Unsupported, if a part of it is a user's; RanksDiffer, RankFailed
        """
        self.check_brought(param, grad)
        param.grad = None
        self._join(leaf, param, grad)

    @staticmethod
    def check_brought(param: Any, grad: Tensor) -> None:
        """Check what autograd has made `.grad` of a parameter.

        raises  Unsupported, if a part of it is a user's, or it is sparse
        """
        if param.grad_given or grad.layout is not torch.strided:
            what = "was set to a plain tensor before backward" if param.grad_given else "is sparse"
            raise Unsupported(
                f"the .grad of {param._name_in_store()!r} {what}, and several ranks train the "
                "model",
                "set it when backward is over, on all ranks to the same values"
                if param.grad_given
                else "use a dense embedding (sparse=False)",
            )

    def add(self, param: Any, grad: Tensor) -> bool:
        """Receive what autograd is about to add to the gradient of a parameter, as `bring`; whether
        it is autograd who does, and not a hook."""
        leaf, (number, params) = leaf_of(param._handle), self._came_to
        if number == current_pass() and leaf.key in params:
            return False
        self._join(leaf, param, grad)
        return True

    def give(self, param: Any, grad: Tensor) -> None:
        """Take over what a user has made `.grad` of a parameter: all ranks the same values, of
        which each keeps its share.

        raises  RanksDiffer, RankFailed
        """
        name = param._name_in_store()
        flat = flattened(in_layout_of(param, grad.detach()))
        self._fabric.agree("set a gradient", name, flat, text=f"of {name!r}")
        part = param.entry.partition
        share = flat.clone() if part is None else part.cut(flat)
        entry = self._blank(param, share.nbytes)
        self._store.put(entry, share.view(torch.uint8), after=self._store.computed(share))
        param.grad = self._wrap(entry, _layout_of(param, grad.dtype))

    def _join(self, leaf: Leaf, param: Any, grad: Tensor) -> None:
        """Make what autograd brings `.grad`, or add it to that, with what compiled graphs have
        brought in this pass.

        raises  Unsupported, if hooks have seen the two parts one by one, or it has a graph
        """
        key = current_pass(), leaf.key
        if key in self._hooked:
            raise Unsupported(
                f"parameter {leaf.name!r} has a hook and gets gradients both from the compiled "
                "model and from code outside of it, so the hook cannot see their sum",
                "compute both parts in the compiled model, or remove the hook",
            )
        if grad.requires_grad:
            raise Unsupported(
                f"the gradient of {leaf.name!r} is to have a graph (create_graph=True), and "
                "several ranks train the model, each of which keeps a share",
                "use torch.autograd.grad(loss, parameters, create_graph=True)",
            )
        self._exchange_the_rest_at_the_end()
        flat = flattened(in_layout_of(param, grad.detach()))
        self._to_come.pop(key, None)
        if (before := self._sums.pop(key, None)) is not None:
            exchanged = self._exchanged_now(param, flat.clone())
            exchanged = self._fabric.added(before.exchanged, exchanged, grad.dtype)
        elif self._unexchanged.is_held_by(param):
            flat, after = self._added_to_sum(param, flat.clone())
            exchanged = self._exchanged_now(param, flat, after, dtype=grad.dtype)
        else:
            exchanged = self._exchanged_now(param, flat.clone(), dtype=grad.dtype)
        self._make_or_add(_PassParts(param, grad.dtype, exchanged))
        self.land()

    def _exchanged_now(
        self,
        param: Any,
        flat: Tensor,
        after: Sequence[Ticket] = (),
        what: str = "a gradient that was made outside of compiled graphs",
        dtype: torch.dtype | None = None,
    ) -> Exchanged:
        """Let the ranks exchange a gradient that no schedule has; they agree on that first.

        flat   [numel], which nobody changes; complete once all of `after` is, or compute has come
               so far
        dtype  of the gradient, if nothing is to be added to what this rank has of it; else None
        """
        name, part = param._name_in_store(), param.entry.partition
        detail = [name, tuple(param.size()), flat.dtype]
        if part is not None and self._fabric.mesh.replicas > 1:
            detail.append(dtype)  # by which groups sum it up, or do not
        self._fabric.agree(f"exchange {what}", *detail, text=f"of {name!r}")
        after = [*after, *self._store.computed(flat)]
        return self._fabric.exchange(flat, part, name, after, None, dtype)  # type: ignore[no-any-return]

    # --- What ranks have summed by themselves ---

    def _exchange_the_rest_at_the_end(self) -> None:
        """This pass exchanges gradients: at its end the ranks exchange all sums that are left.

        raises  Unsupported, if it ends before all is there that is to be exchanged
        """
        if self._unexchanged and self._exchanging != (number := current_pass()):
            if is_within_another_pass():
                raise Unsupported(
                    "a backward pass runs within another, as those of checkpoint(use_reentrant="
                    "True) do, and is to exchange what micro-batches have summed within "
                    "zcompile.no_sync: more of it comes when this pass has ended",
                    "use checkpoint(use_reentrant=False), or exchange each micro-batch",
                )
            self._exchanging = number
            after_backward(partial(self._exchange_the_rest, number))

    def _exchange_the_rest(self, number: int) -> None:
        """Exchange the sums to which a pass that has ended brought nothing, one by one: one is read
        while the one before it crosses, so that memory of the host holds two."""
        crossing: deque[Promise] = deque()
        # An interrupt waits until all have crossed, since the others wait for what comes after.
        with deferred_interrupts(), told_to_ranks(self._store.fabric):
            self.flush_pass(number)
            for param in self._unexchanged.params():
                if len(crossing) == MOST_CROSSING:
                    crossing.popleft().wait()
                grad: Any = param.grad
                exchanged = self._exchanged_sum(param, grad.dtype)
                crossing.append(exchanged.ticket)
                self._make_or_add(_PassParts(param, grad.dtype, exchanged))
                self.land()

    def _exchanged_sum(self, param: Any, dtype: torch.dtype | None = None) -> Exchanged:
        """Let the ranks exchange what they have summed of a gradient, which is the parameter's
        gradient no more; `dtype`: as of `_exchanged_now`."""
        total, read = self._read_sum(param)
        what = "what micro-batches have summed"
        exchanged = self._exchanged_now(param, total, (read,), what, dtype)
        param.grad = None
        return exchanged

    # --- Sums of a pass ---

    def _flush_at_the_end_of(self, number: int) -> None:
        """Finalize what a pass has brought when it ends, unless that is asked for already."""
        if not any(number == other for other, _ in self._sums):
            after_backward(partial(self.flush_pass, number))

    def flush(self, key: tuple[int, int]) -> None:
        """Autograd has come to a parameter: its sum of this pass, if there is one, is complete."""
        self._to_come.pop(key, None)
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
        self._tiled.clear()
        self._to_come.clear()
        self._landing.clear()
        self._hooked.clear()

    def land(self) -> None:
        """Let what rests on the device arrive there: compute itself brings it, and would wait for
        the other ranks in the middle of a call."""
        landing, self._landing = self._landing, []
        for x in landing:
            self._store.put(x.entry, x.row, begin=x.begin, after=[x.ticket])

    @property
    def _fabric(self) -> Any:
        fabric = self._store.fabric
        assert fabric is not None, "gradients are exchanged"
        return fabric

    def _finalize(self, held: _PassParts) -> None:
        """Make what all ranks bring `.grad`, or add it to that, and call hooks."""
        self._make_or_add(held)
        self._call_post_hooks(held.param)

    def _make_or_add(self, held: _PassParts) -> None:
        param: Any = held.param
        if self._unexchanged.is_held_by(param):
            sums = self._fabric.added(self._exchanged_sum(param), held.exchanged, held.dtype)
            held = _PassParts(param, held.dtype, sums)
        if param.grad is None:
            param.grad = self._stored(held)
        else:
            self._add(held)

    def _stored(self, held: _PassParts) -> Tensor:
        """The mean over ranks, in a new entry: a share, if the parameter is one."""
        total = self._fabric.folded(held.exchanged, held.dtype)
        entry = self._blank(held.param, total.parts[0].nbytes)
        grad = self._wrap(entry, _layout_of(held.param, held.dtype))
        self._put(entry, total)
        return grad

    def _blank(self, param: Any, nbytes: int) -> Entry:
        """A new blank entry for the gradient of `param`: a share, if the parameter is one."""
        of, partition, name = param.entry.key, param.entry.partition, param._name_in_store()
        return self._store.create(
            f"{name}.grad", EntryKind.GRAD, nbytes, of=of, partition=partition
        )

    def _put(self, entry: Entry, total: Exchanged, begin: int = 0) -> None:
        """Write a mean over ranks, [1, n], to an entry, from byte `begin` on."""
        row = total.parts[0].view(torch.uint8)
        if entry.on_device:
            self._landing.append(_Landing(entry, row, total.ticket, begin))
        else:
            self._store.put(entry, row, begin=begin, after=[total.ticket])

    def _bring_home(
        self, key: tuple[int, int], param: Any, grad: Tensor, first: int, exchanged: Exchanged
    ) -> None:
        """Make what all ranks bring to a tile part of `.grad`, or add it to that.

        first  element of this rank's share at which its part begins
        """
        tiled, dtype = self._tiled.get(key), grad.dtype
        if tiled is None:
            adds = param.grad is not None
            home = self._grad_of(param, dtype) if adds else self._blank_in_tiles(param, dtype)
            tiled = self._tiled[key] = _Tiles(param, dtype, home, adds, param.numel())
        begin = first * dtype.itemsize
        if exchanged.parts.shape[1]:  # else this rank holds nothing of it
            if tiled.adds:
                self._add_parts(tiled.home, exchanged, dtype, begin)
            else:
                self._put(tiled.home, self._fabric.folded(exchanged, dtype), begin)
        tiled.left -= grad.numel()
        if not tiled.left:
            del self._tiled[key]
            if not tiled.adds:
                param.grad = self._wrap(tiled.home, _layout_of(param, dtype))
            self._call_post_hooks(param)

    @staticmethod
    def _counts(param: Any) -> tuple[int, int]:
        """Elements that this rank holds of a parameter: with padding, and without."""
        part = param.entry.partition
        return (param.numel(),) * 2 if part is None else (part.count, part.own_count)

    def _blank_in_tiles(self, param: Any, dtype: torch.dtype) -> Entry:
        """A new entry for a gradient, of which tiles will write all but the padding."""
        (count, own), width = self._counts(param), dtype.itemsize
        entry = self._blank(param, count * width)
        if own < count:
            padding = host_rows(1, (count - own) * width, torch.uint8)[0]
            self._store.put(entry, padding, begin=own * width)
        return entry

    def _add(self, held: _PassParts) -> None:
        """Add what each rank brings to `.grad`, rank after rank."""
        home = self._grad_of(held.param, held.dtype)
        self._add_parts(home, held.exchanged, held.dtype)

    def _add_parts(
        self, home: Entry, exchanged: Exchanged, dtype: torch.dtype, begin: int = 0
    ) -> None:
        """Add what each rank brings to an entry, from byte `begin` on."""
        self.land()
        scaled = self._fabric.scaled(exchanged, dtype)
        for part in scaled.parts:
            self._store.add(home, part, begin=begin, after=[scaled.ticket])

    def _grad_of(self, param: Any, dtype: torch.dtype) -> Entry:
        """The entry of `.grad`, to which what ranks bring is added.

        raises  Unsupported, if it is not of backward's making
        """
        entry = getattr(param.grad, "entry", None)
        layout = _layout_of(param, dtype)
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
        return entry


def _layout_of(param: Tensor, dtype: torch.dtype) -> Layout:
    """The layout of a gradient: dense, as its parameter if that is."""
    layout = Layout.of(param)
    if layout.dense and layout.dtype == dtype:
        return layout
    like = torch.empty_strided(layout.size, layout.stride, dtype=dtype, device="meta")
    return Layout.of(like if layout.dense else torch.empty(layout.size, dtype=dtype, device="meta"))
