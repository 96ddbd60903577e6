"""Elementwise ops on tiered tensors, whatever their size: parsed into rows, run as a step schedule.

`_fused_adamw_(params, grads, ...)` is one row per parameter; `param.mul_(0.5)` is one row. Every
operand of a row has the same elements in the same order of storage, so the op may be applied to
any range of them and gives the same bits. Operands that do not fit that description make the
caller take the other road: gather whole, compute, write back.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from zcompile.lower_step import Column, Row, lower_step
from zcompile.runtime.session import session_of
from zcompile.runtime.store import Entry
from zcompile.schedule import EntryIndex, Register
from zcompile.specs import Layout
from zcompile.torch_private import Dispatched, trees
from zcompile.unbacked import Unbacked

REDUCTIONS = frozenset({"_foreach_norm", "_foreach_max", "_foreach_powsum"})
"""List ops whose result is not elementwise."""
UNTAGGED = frozenset({"abs_", "_to_copy"})
"""Elementwise, though torch does not tag them so."""


@dataclass(frozen=True)
class Application:
    """One op on one row of operands: `func(*args, **kwargs)` with lists cut down to one item."""

    func: Dispatched
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def tensors(self) -> list[Tensor]:
        leaves, _ = trees.tree_flatten((self.args, self.kwargs))
        return [leaf for leaf in leaves if isinstance(leaf, Tensor)]

    def written(self) -> list[Tensor]:
        """The tensors the schema says are written."""
        found: list[Tensor] = []
        for position, argument in enumerate(self.func._schema.arguments):
            if argument.alias_info is None or not argument.alias_info.is_write:
                continue
            value = (
                self.args[position] if position < len(self.args) else self.kwargs.get(argument.name)
            )
            if argument.name == "grads" and self.kwargs.get("grad_scale") is None:
                continue  # fused optimizers write gradients only to unscale them in place
            found.extend(
                v for v in (value if isinstance(value, list) else [value]) if isinstance(v, Tensor)
            )
        return found


def rows_of(func: Dispatched, args: Sequence[Any], kwargs: dict[str, Any]) -> list[Application]:
    """A list op, one application per item; any other op, itself alone."""
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


def streamable(app: Application, cls: type) -> bool:
    """Whether every tensor of the row is either one element or has the layout of the others.

    All must rest in one store, since one schedule has one arena.
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
    if any(t.dim() > first.dim() for t in tensors):
        return False  # one element of more dimensions gives the result its own
    if app.kwargs.get("memory_format") not in (None, torch.preserve_format):
        return False
    lying = {(t.entry.key, t.lies) for t in tiered}
    return len({key for key, _ in lying}) == len(lying)


class _Call:
    """Collects the entries and plain inputs of one streamed call."""

    def __init__(self, cls: type) -> None:
        self._cls = cls
        self.entries: list[Entry] = []
        self.inputs: list[Any] = []
        self.signature: list[object] = []

    def entry(self, entry: Entry) -> EntryIndex:
        self.entries.append(entry)
        return EntryIndex(len(self.entries) - 1)

    def input(self, value: Any) -> Register:
        self.inputs.append(value)
        return Register(len(self.inputs) - 1)

    def row(self, app: Application, target: "Tensor | None") -> Row:
        """target  receives the result of an op that makes a new tensor; None for in-place ops"""
        leaves: list[Any]
        leaves, spec = trees.tree_flatten((app.args, app.kwargs))
        found: list[Any] = [t for t in app.written() if isinstance(t, self._cls)]
        written = {t.entry.key for t in found}
        places: list[int] = []  # per leaf: >= 0 a column; < 0 plain input -(n + 1)
        columns: list[Column] = []
        plains: list[Register] = []
        seen: dict[int, int] = {}  # in p.mul_(p) both operands are one column
        operands: Sequence[Any] = leaves if target is None else [*leaves, target]
        for leaf in operands:
            if isinstance(leaf, self._cls):
                tiered: Any = leaf
                key = tiered.entry.key
                if key not in seen:
                    seen[key] = len(columns)
                    columns.append(self._column(tiered, key in written or leaf is target))
                places.append(seen[key])
            else:
                plains.append(self.input(leaf))
                places.append(-len(plains))
        kinds = [_kind(leaf) for leaf in leaves if not isinstance(leaf, self._cls)]
        shapes = [replace(column, entry=EntryIndex(0), name="") for column in columns]
        numel = next(t.numel() for t in app.tensors() if t.numel() != 1)
        self.signature.append(
            (app.func, spec, numel, target is None, tuple(places), tuple(shapes), tuple(kinds))
        )
        compute = _Chunked(app.func, spec, tuple(places), len(columns), target is not None)
        return Row(numel, tuple(columns), tuple(plains), compute)

    def _column(self, leaf: Unbacked, writes: bool) -> Column:
        entry, layout = leaf.entry, leaf.lies
        return Column(
            self.entry(entry),
            layout.offset * layout.dtype.itemsize,
            layout.dtype,
            writes,
            entry.kind.lasting,
            entry.name,
        )


def _kind(leaf: object) -> object:
    if isinstance(leaf, Tensor):
        return (leaf.dtype, leaf.device, leaf.numel() == 1)
    return type(leaf)


@dataclass(frozen=True)
class _Chunked:
    """Applies an op to a range of elements: columns are chunks already, wide plains are cut."""

    func: Dispatched
    spec: Any
    places: tuple[int, ...]
    columns: int
    to_target: bool

    def __call__(self, first: int, last: int, values: Sequence[Any]) -> None:
        leaves = []
        for place in self.places:
            if place >= 0:
                leaves.append(values[place])
            else:
                leaves.append(_cut(values[self.columns - place - 1], first, last))
        target = leaves.pop() if self.to_target else None
        args, kwargs = trees.tree_unflatten(leaves, self.spec)
        result = self.func(*args, **kwargs)
        if target is not None:
            target.copy_(result[0] if isinstance(result, list | tuple) else result)


def _cut(value: Any, first: int, last: int) -> Any:
    if not isinstance(value, Tensor) or value.dim() == 0:
        return value
    if value.numel() == 1:
        return value.reshape(1)
    return value.as_strided((last - first,), (1,), value.storage_offset() + first)


def stream(
    func: Dispatched, apps: Sequence[Application], targets: Sequence["Tensor | None"], cls: type
) -> None:
    """Run the rows, in order; all their tiered operands belong to one store.

    raises  BudgetExceeded, and what a transfer raises
    """
    call = _Call(cls)
    rows = [call.row(app, target) for app, target in zip(apps, targets, strict=True)]
    session = session_of(call.entries[0])
    key = tuple(call.signature)
    name = func._schema.name.removeprefix("aten::")
    if key not in session.steps:
        session.steps[key] = lower_step(
            name, rows, len(call.inputs), len(call.entries), session.device_budget
        )
        session.meter.plan_device(session.steps[key].peak_bytes)
    session.executor.run(session.steps[key], call.inputs, call.entries)
