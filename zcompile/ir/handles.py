"""Names entries of stores by handles, through the one table that all stores of a process share.

A handle is a 0-dim int64 CPU tensor: the one inner tensor of a tiered tensor, and an input of every
compiled graph that touches it. Its value stands for a key of the table below. Keys are spread over
all 63 bits, so that a handle that somebody rounded or changed, as hooks on saved tensors may, names
no entry, and never another one. The graph says which handle; the call says which entry. The table
is the only thing that two models in one process share, and it holds entries weakly: an entry lives
as long as its store keeps it.
"""

import ctypes
import itertools
import weakref
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from zcompile.errors import ParameterChanged
from zcompile.ir.ties import Dead, Tie, tie_to
from zcompile.ir.torch_compat import counted_with, is_held_by


class Leaf(Protocol):
    """What gradients need of whatever a handle names: an entry, or a share of one.

    owner  the parameter whose gradient arrives by this handle
    shown  the layout by which the owner shows the named bytes; None if it does not, since its .data
           is something else
    """

    key: int
    owner: "weakref.ref[Any] | None"
    shown: object

    @property
    def name(self) -> str: ...
    @property
    def nbytes(self) -> int: ...
    def reduce_grad(self, grad: Tensor, offset: int | None = None) -> None:
        """Make `grad` the gradient of the owner, or add it; with an offset, that part
        (`ops.reduce_tile`)."""


class Held(Protocol):
    """What the ops need of an entry; `runtime.store.Entry` is the one that exists."""

    key: int
    nbytes: int
    owner: "weakref.ref[Any] | None"
    shown: object
    store: Any
    """Has `offload(value, tier, name)`: makes a new entry of `value` and returns its handle."""

    @property
    def name(self) -> str: ...
    def gather(
        self, size: Sequence[int], stride: Sequence[int], offset: int, dtype: torch.dtype
    ) -> Tensor:
        """Return the full value on the compute device, gathered now; blocks."""

    def reduce_grad(self, grad: Tensor, offset: int | None = None) -> None:
        """Make `grad` the gradient of this entry's parameter, or add it; with an offset, that part
        of it (`ops.reduce_tile`)."""


REBUILD_ADVICE = "build the model anew, offload that, and load what was saved"
"""Advice for errors about entries that are gone: their values went with the store."""

_SPREAD, _WIDTH = 0x1E3779B97F4A7C15, 1 << 63
"""Multiplier that spreads keys over 63 bits, and the modulus."""
_GATHER = pow(_SPREAD, -1, _WIDTH)
"""Inverse of `_SPREAD`: turns the value of a handle back into its key."""
_KEYS = itertools.count(1)
_ENTRIES: dict[int, Tie] = {}
_GONE = Dead()
"""References to entries that have died; a `WeakValueDictionary` would run Python code when they
do."""


_Number = ctypes.c_int64 * 1
"""The memory of a handle."""


def _spread(key: int) -> int:
    return key * _SPREAD % _WIDTH


def _key_of(handle: Tensor) -> int:
    return int(handle) * _GATHER % _WIDTH


def new_key() -> int:
    return next(_KEYS)


def bind(entry: Held) -> None:
    """Let `entry.key` name `entry`, and drop the keys of entries that have died."""
    while _GONE:
        try:
            _ENTRIES.pop(_GONE.popleft().mark, None)
        except IndexError:  # another thread was here
            break
    _ENTRIES[entry.key] = tie_to(entry, _GONE, entry.key)


def memory_of(key: int, died: Dead) -> tuple[Any, Tie]:
    """The memory of a handle that stands for `key`, and the tie by which `died` is told of its end.

    It dies with the storage of the handle, which is what counts: autograd may keep the handle for
    backward after whoever held it is gone. The tie is kept before the handle is made, so that the
    end is told where that fails.
    """
    memory = _Number(_spread(key))
    return memory, tie_to(memory, died, key)


def handle_over(memory: Any) -> Tensor:
    """The handle over its memory: a 0-dim tensor, and no view of another, of which tracing would
    make a stand-in too."""
    return torch.frombuffer(memory, dtype=torch.int64).squeeze_()


class _Cell(_Number):  # type: ignore[misc, valid-type]  # made by ctypes
    """The memory of a further handle, which keeps the entry's first handle alive.

    Writes are counted for all handles of an entry at once: whichever of them a graph has saved for
    its backward, autograd sees that the bytes were written since.
    """

    root: Tensor


class Share:
    """A further handle of an entry: that of a parameter which was given it by `p.data = x`.

    Gradients of a call belong to the owner of the handle that was called with. So each parameter
    has a handle of its own for what it shows, and a parameter that goes on to show something else
    leaves its handle to the calls in flight.

    of     key of the entry
    owner  the parameter
    tie    to the memory of the handle
    """

    def __init__(self, key: int, of: int, owner: Tensor, tie: Tie) -> None:
        self.key, self.of, self.tie = key, of, tie
        self.owner: weakref.ref[Any] | None = weakref.ref(owner)
        self.shown: object = None

    @property
    def entry(self) -> Held:
        return _entry_at(self.of)

    @property
    def name(self) -> str:
        """Name of the parameter."""
        owner = self.owner() if self.owner is not None else None
        return self.entry.name if owner is None else str(owner._name_in_store())

    @property
    def nbytes(self) -> int:
        return self.entry.nbytes

    def reduce_grad(self, grad: Tensor, offset: int | None = None) -> None:
        self.entry.store.take_gradient(self, grad, offset)


_SHARES: dict[int, Share] = {}
_SHARES_OF: dict[int, dict[int, Share]] = {}
"""Key of an entry -> its shares, by their keys."""
_LEFT = Dead()
"""References to shares whose handle has died."""


def _bury_shares() -> None:
    """Drop the shares whose handles have died."""
    while _LEFT:
        try:
            gone = _SHARES.pop(_LEFT.popleft().mark, None)
        except IndexError:  # another thread was here
            return
        if gone is None:
            continue
        others = _SHARES_OF.get(gone.of, {})
        others.pop(gone.key, None)
        if not others:
            _SHARES_OF.pop(gone.of, None)


def leaf_of(handle: Tensor) -> Leaf:
    """Whom the gradients of calls with this handle belong to: its share, or else the entry.

    raises  ParameterChanged if the entry is gone
    """
    return _SHARES.get(_key_of(handle)) or entry_of(handle)


def disown(handle: Tensor) -> None:
    """Let the parameter that owns a handle be nobody's owner any more."""
    leaf_of(handle).owner = None


def leaves_of(handles: Sequence[Tensor], entries: Sequence[Held]) -> Sequence[Leaf]:
    """`leaf_of` each handle, where `entries` are behind them."""
    if _LEFT:
        _bury_shares()
    if not _SHARES:
        return entries
    return [_SHARES.get(_key_of(h)) or e for h, e in zip(handles, entries, strict=True)]


def claimed(handle: Tensor, param: Tensor) -> Tensor:
    """A handle by which `param` names what `handle` names: the same, if no other parameter owns it.

    A parameter that returns to its own entry gets the handle it had there: graphs have saved that
    one, and later writes are to be counted where they look.
    """
    leaf = leaf_of(handle)
    if leaf.owner is None:
        leaf.owner = weakref.ref(param)
    if leaf.owner() is param:
        return handle
    _bury_shares()
    before: Any = leaf.tie() if isinstance(leaf, Share) else None
    root: Tensor = handle if before is None else before.root
    owner = _entry_at(_key_of(root)).owner
    if owner is not None and owner() is param:
        return root
    key, of, memory = new_key(), _key_of(root), _Cell()
    memory[0], memory.root = _spread(key), root
    share = Share(key, of, param, tie_to(memory, _LEFT, key))
    _SHARES[key] = _SHARES_OF.setdefault(of, {})[key] = share
    return counted_with(root, handle_over(memory))


def shows(param: Any, layout: object) -> None:
    """Record the layout by which `param` shows what its handle names, for graphs that wait for
    their backward; None, if it is about to show something else."""
    leaf = leaf_of(param._handle)
    if leaf.owner is not None and leaf.owner() is param:
        leaf.shown = layout


def shown_as(leaf: Leaf, layout: object) -> None:
    """Record the very object by which `leaf` shows its entry; it equals what was recorded."""
    leaf.shown = layout


def is_named_once(tiered: Any) -> bool:
    """Whether nothing but this tiered tensor names its entry: no view, no graph, no share."""
    shared = isinstance(leaf_of(tiered._handle), Share)
    return not shared and is_held_by(tiered, "_handle")


def owners_of(entry: Held) -> list[Any]:
    """The parameters that have a handle of `entry`, even if only for calls in flight."""
    _bury_shares()
    shares = list(_SHARES_OF.get(entry.key, {}).values())
    refs = [entry.owner, *(share.owner for share in shares)]
    found = [ref() for ref in refs if ref is not None]
    return [param for param in found if param is not None]


def entry_of(handle: Tensor) -> Held:
    """The entry behind a handle.

    handle  [] int64, on the CPU
    raises  ParameterChanged if the entry is gone, or the handle was changed
    """
    key = _key_of(handle)
    share = _SHARES.get(key)
    return _entry_at(key if share is None else share.of)


def entries_of(handles: Sequence[Tensor]) -> list[Held]:
    """`entry_of` each handle: a call names hundreds of entries."""
    found: list[Held] = []
    for handle in handles:
        named = _ENTRIES.get(_key_of(handle))  # a share's key is none of these
        entry = None if named is None else named()
        found.append(entry_of(handle) if entry is None else entry)
    return found


def _entry_at(key: int) -> Held:
    tie = _ENTRIES.get(key)
    entry: Held | None = None if tie is None else tie()
    if entry is None:
        raise ParameterChanged(
            f"behind handle {key}",
            "is not there: its store was closed, or hooks on saved tensors gave back another "
            "number than they were given, or a copy of one that stood for an activation",
            f"{REBUILD_ADVICE}; or let torch.autograd.graph.saved_tensors_hooks leave integers as "
            "they are",
        )
    return entry
