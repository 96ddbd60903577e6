"""Ops on lists of tensors are cut into rows: one op on one parameter with its gradient and states.

`_fused_adamw_(params, grads, ...)` is one row per parameter; `param.mul_(0.5)` is one row. A row
whose operands have the same elements in the same order of storage may be applied to any range of
them, and gives the same bits. Low-precision copies of parameters are made, and kept up to date in
an optimizer's step, as further columns of such rows.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from zcompile.errors import BudgetExceeded
from zcompile.ir.optimizer_step import Column, Row, lower_step
from zcompile.ir.schedule import Cast, EntryIndex
from zcompile.ir.torch_compat import Dispatched, arguments_of, trees
from zcompile.ir.types import EntryKind, Layout
from zcompile.runtime.session import session_of
from zcompile.runtime.store.store import Entry

REDUCTIONS = frozenset({"_foreach_norm", "_foreach_max", "_foreach_powsum"})
"""List ops whose result is not elementwise."""
UNANNOTATED_WRITES: dict[Dispatched, frozenset[str]] = dict.fromkeys(
    (torch.ops.aten.native_batch_norm.default, torch.ops.aten.native_batch_norm.out),
    frozenset({"running_mean", "running_var"}),
)
"""Arguments that an op writes, though its schema does not say so."""
UNTAGGED = frozenset({"abs_", "_to_copy"})
"""Elementwise ops that torch does not tag as such."""


@dataclass(frozen=True)
class Application:
    """One op on one row of operands: `func(*args, **kwargs)` with lists cut down to one item."""

    func: Dispatched
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def tensors(self) -> list[Tensor]:
        return [x for x in leaves_of(self.args, self.kwargs) if isinstance(x, Tensor)]

    def written(self) -> list[Tensor]:
        """The tensors that the op writes: as its schema says, or `UNANNOTATED_WRITES`."""
        return self._given(written=True)

    def read(self) -> list[Tensor]:
        """The tensors of all other arguments; in `x.copy_(x)` one is both."""
        return self._given(written=False)

    def _given(self, *, written: bool) -> list[Tensor]:
        found: list[Tensor] = []
        unsaid = UNANNOTATED_WRITES.get(self.func, ())
        for position, argument in enumerate(arguments_of(self.func)):
            writes = argument.writes or argument.name in unsaid
            if argument.name == "grads" and self.kwargs.get("grad_scale") is None:
                writes = False  # fused optimizers write gradients only to unscale them in place
            if writes is not written:
                continue
            value = (
                self.args[position] if position < len(self.args) else self.kwargs.get(argument.name)
            )
            found.extend(
                v for v in (value if isinstance(value, list) else [value]) if isinstance(v, Tensor)
            )
        return found


def leaves_of(args: Sequence[Any], kwargs: dict[str, Any]) -> list[Any]:
    """The arguments of an op, lists taken apart."""
    found: list[Any] = []
    for value in (*args, *kwargs.values()):
        if type(value) is list:
            found.extend(value)
        elif type(value) in (tuple, dict):
            found.extend(trees.tree_leaves(value))
        else:
            found.append(value)
    return found


def rows_of(func: Dispatched, args: Sequence[Any], kwargs: dict[str, Any]) -> list[Application]:
    """The rows of an op: one application per item of a list op; of any other op, itself alone."""
    lists = [a for a in (*args, *kwargs.values()) if isinstance(a, list) and a]
    tensors = [a for a in lists if isinstance(a[0], Tensor)]
    if not tensors or not func._schema.name.startswith(
        ("aten::_foreach", "aten::_fused", "aten::_amp")
    ):
        return [Application(func, tuple(args), kwargs)]
    count = len(tensors[0])

    def pick(value: Any, index: int) -> Any:
        if isinstance(value, list) and len(value) == count:
            return [value[index]]
        if isinstance(value, Tensor) and func._overloadname == "Tensor" and value.dim() == 1:
            return value[index : index + 1]  # _foreach_addcdiv_.Tensor: one scalar per item
        return value

    return [
        Application(
            func, tuple(pick(a, i) for a in args), {k: pick(v, i) for k, v in kwargs.items()}
        )
        for i in range(count)
    ]


@cache
def is_elementwise(func: Dispatched) -> bool:
    """Whether the op may be applied to any range of elements by itself, and gives the same bits."""
    if any("Tensor" not in str(result.type) for result in func._schema.returns):
        return False  # aten.equal is tagged pointwise, and answers with one bool
    if torch.Tag.nondeterministic_seeded in func.tags or len(func._schema.returns) > 1:
        return False  # rrelu draws in one go; frexp answers twice
    name = func._schema.name.removeprefix("aten::")
    listed = name.startswith(
        ("_foreach", "_fused_adam", "_fused_sgd", "_fused_adagrad", "_amp_foreach")
    )
    tagged = torch.Tag.pointwise in func.tags or name in UNTAGGED
    return (tagged or listed) and name not in REDUCTIONS


def streamable(app: Application, cls: type, divided: tuple[type, ...] = ()) -> bool:
    """Whether every tensor of the row is either one element or has the layout of the others.

    All must rest in one store, since one schedule has one arena. Where ranks hold shares, all must
    be divided alike.

    divided  classes of other tensors, which the caller knows to be divided alike
    """
    tensors = app.tensors()
    wide = [t for t in tensors if t.numel() != 1]
    tiered: list[Any] = [t for t in tensors if isinstance(t, cls)]
    if not wide or not tiered or any(t.numel() == 1 for t in tiered):
        return False
    first = wide[0]
    if first.numel() == 0 or len({t.store_key for t in tiered}) > 1:
        return False
    alike = all(t.size() == first.size() and t.stride() == first.stride() for t in wide)
    same = len({t.device for t in wide}) == 1
    if not (alike and same and Layout.of(first).dense):
        return False
    if any(argument.is_out for argument in arguments_of(app.func)) and _resizes_out(app):
        return False
    if any(t.dim() > first.dim() for t in tensors):
        return False  # one element of more dimensions gives the result its own
    if app.kwargs.get("memory_format") not in (None, torch.preserve_format):
        return False
    if any(t.entry_layout.lazy for t in tiered):
        return False  # chunks are of the bytes
    if not _share_alike(app, tiered, (cls, *divided)):
        return False
    lying = {(t.entry.key, t.entry_layout) for t in tiered}
    return len({key for key, _ in lying}) == len(lying)


def _share_alike(app: Application, tiered: Sequence[Any], divided: tuple[type, ...]) -> bool:
    """Whether each rank can compute the row on its shares, if there are any: all operands are
    divided alike, whole, and what is written is divided too."""
    if all(t.entry.partition is None for t in tiered):
        return True
    parts = {t.entry.partition for t in tiered}
    written = (t for t in app.written() if t.numel() > 1)
    return (
        len(parts) == 1
        and all(t.covers for t in tiered)
        and all(isinstance(t, divided) for t in written)
    )


def _resizes_out(app: Application) -> bool:
    """Whether the tensor that `out=` names is not as large as the result, so that torch would
    resize it."""
    made = torch.broadcast_shapes(*(t.size() for t in app.read()))
    return any(t.size() != made for t in app.written())


def counts_writes_in_kernels(func: Dispatched) -> bool:
    """Whether torch counts the writes of an op where it computes, and not before it asks us."""
    return func._schema.name.startswith("aten::_foreach")


def can_run_as_lists(app: Application) -> bool:
    """Whether rows such as this one, of one list op, may be put together again as they came."""
    func, values = app.func, (*app.args, *app.kwargs.values())
    if not func._schema.is_mutable or not func._schema.name.startswith(
        ("aten::_foreach", "aten::_fused")
    ):
        return False
    if any(isinstance(value, tuple | dict) for value in values):
        return False
    # _foreach_addcdiv_.Tensor takes one tensor with a scalar for each item, which was cut up.
    return func._overloadname != "Tensor" or not any(
        isinstance(value, Tensor) and value.dim() for value in values
    )


# --- Low-precision copies ---


@dataclass(frozen=True)
class CopyCasts:
    """Casts columns of a chunk into others: (from, to), as indices of columns."""

    pairs: tuple[tuple[int, int], ...]

    def __call__(self, first: int, last: int, values: Sequence[Any]) -> None:
        for wide, narrow in self.pairs:
            values[narrow].copy_(values[wide])


NO_CASTS = CopyCasts(())


def make_copy(entry: Entry, cast: Cast) -> None:
    """Make `entry.copies[cast.copy_dtype]`, or make it again. raises  TierFull, and what a transfer
    raises"""
    session, numel = session_of(entry), entry.nbytes // cast.dtype.itemsize
    copy = copy_of(entry, cast.copy_dtype, numel)
    version = entry.version
    columns = (
        column_of(entry, EntryIndex(0), cast.dtype, writes=False),
        column_of(copy, EntryIndex(1), cast.copy_dtype, writes=True),
    )
    row = Row(numel, columns, (), CopyCasts(((0, 1),)), copies=1)
    build = partial(lower_step, "a copy in another dtype", [row], 0, 2, session.window_room)
    kind = ("copy", numel, cast, tuple(column.resident for column in columns))
    try:
        schedule = session.step(kind, build)
    except BudgetExceeded as error:
        if not session.reclaim(error.needed_bytes):
            raise
        make_copy(entry, cast)  # anew, since they rest elsewhere now
        return
    session.executor.run(schedule, [], [entry, copy])
    entry.copy_made(cast.copy_dtype, version)


def copy_of(entry: Entry, dtype: torch.dtype, numel: int) -> Entry:
    """The entry of a copy, blank, so that bytes that will be overwritten are not read before."""
    if dtype in entry.copies:
        return entry.blank_copy(dtype)
    name = f"{entry.name} in {str(dtype).removeprefix('torch.')}"
    copy = entry.store.create(name, EntryKind.COPY, numel * dtype.itemsize)
    entry.keep_copy(dtype, copy)
    return copy


def column_of(entry: Entry, index: EntryIndex, dtype: torch.dtype, *, writes: bool) -> Column:
    """All of an entry as an operand of a step."""
    changes = entry.deferred and entry.narrow is None
    resident = entry.store.can_view_in_place(entry) and not changes
    far = entry.home == "disk"
    return Column(index, 0, dtype, writes, entry.kind.lasting, entry.name, resident, far)
