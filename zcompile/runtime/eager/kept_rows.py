"""Rows of an optimizer's step are written as JSON and read back, so that a durable commit can name
updates that are still to come, and whoever resumes computes them.

    {"ops": [{"op": ["aten::_fused_adamw_", "default"],
              "args": [[{"column": 0}], [{"column": 1}], ..., {"plain": 2}], "kwargs": {}, ...}],
     "changes": [{"column": 1, "plain": 9, "op": ["aten::mul_", "Tensor"], "lists": false}]}

Kept is what a row computes: ops of torch, and what each of their operands is: a column of the row,
one of its plain operands, or the result of an op before. A row that computes with anything else is
not kept. Copies in another dtype, which are the last columns of a row, are left out: they are made
again.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from zcompile.ir.torch_compat import Dispatched, trees
from zcompile.ir.types import Layout
from zcompile.runtime.eager.joined import JoinedChunk, JoinedOp
from zcompile.runtime.eager.rows import is_elementwise
from zcompile.runtime.eager.streaming import Chunked
from zcompile.runtime.store.store import Deferred

PLACES = ("column", "plain", "result")


def packed(compute: object) -> dict[str, Any] | None:
    """What a row computes, as JSON; None, if it is not ops of torch alone."""
    if isinstance(compute, Chunked):
        if compute.to_target or not isinstance(compute.func, Dispatched):
            return None
        places = tuple(("column", n) if n >= 0 else ("plain", -n - 1) for n in compute.places)
        ops: Sequence[JoinedOp] = [JoinedOp(compute.func, compute.spec, places, None)]
    elif isinstance(compute, JoinedChunk) and not compute.held:
        ops = compute.ops
    else:
        return None
    rows = [_packed_op(op) for op in ops]
    changes = [
        {"column": column, "plain": plain, "op": _name_of(change.func), "lists": change.lists}
        for column, plain, change in compute.changes
    ]
    if any(row is None for row in rows) or any(change["op"] is None for change in changes):
        return None
    return {"ops": rows, "changes": changes}


def _packed_op(op: JoinedOp) -> dict[str, Any] | None:
    name, marks = _name_of(op.func), [_Place(*place) for place in op.places]
    args, kwargs = trees.tree_unflatten(marks, op.spec)
    trees_ = [_packed_tree(value) for value in (*args, *kwargs.values())]
    if name is None or any(tree is UNKNOWN for tree in trees_):
        return None
    return {
        "op": name,
        "args": trees_[: len(args)],
        "kwargs": dict(zip(kwargs, trees_[len(args) :], strict=True)),
        "made": op.made,
        "drops": list(op.drops),
    }


@dataclass(frozen=True)
class _Place:
    """Stands for an operand: where it is found, and its number there."""

    where: str
    number: int


UNKNOWN = object()
"""What is no list, no operand, and not nothing."""


def _packed_tree(value: object) -> Any:
    if isinstance(value, _Place):
        return {value.where: value.number}
    if value is None:
        return None
    if type(value) is not list:
        return UNKNOWN
    items = [_packed_tree(item) for item in value]
    return UNKNOWN if any(item is UNKNOWN for item in items) else items


def _name_of(func: object) -> list[str] | None:
    """The name of an op of torch, and of its overload."""
    if not isinstance(func, Dispatched) or func.namespace != "aten":
        return None
    return [func._schema.name, func._overloadname]


# --- Back again ---


def unpacked(kept: Any, dtypes: Sequence[torch.dtype], plains: int) -> JoinedChunk:
    """What a row computes, of its kept form, which anybody may have written.

    dtypes  of its columns
    plains  number of its plain operands
    raises  ValueError
    """
    numbers = {"column": len(dtypes), "plain": plains}
    ops: list[JoinedOp] = []
    made: set[int] = set()
    for row in _list(kept, "ops"):
        ops.append(_op(row, {**numbers, "result": made}))
        if (result := ops[-1].made) is not None:
            made.add(result)
        if not made.issuperset(ops[-1].drops):
            raise ValueError("an op drops what was not made")
        made.difference_update(ops[-1].drops)
    if not ops:
        raise ValueError("a row without an op")
    changes = []
    for row in _list(kept, "changes"):
        column, plain = row.get("column"), row.get("plain")
        if not (_is_below(column, len(dtypes)) and _is_below(plain, plains)):
            raise ValueError(f"a change of {row!r:.80}")
        layout = Layout((1,), (1,), 0, dtypes[column])
        changes.append(
            (column, plain, Deferred(_func(row.get("op")), None, bool(row.get("lists")), layout))
        )
    return JoinedChunk(tuple(ops), len(dtypes), tuple(changes), ())


def _op(row: Any, numbers: Mapping[str, Any]) -> JoinedOp:
    func, made, drops = _func(row.get("op")), row.get("made"), row.get("drops")
    named, kwargs = _list(row, "args"), row.get("kwargs")
    if not isinstance(kwargs, dict) or not isinstance(drops, list):
        raise ValueError(f"an op without operands: {row!r:.80}")
    if not (made is None or type(made) is int) or any(type(drop) is not int for drop in drops):
        raise ValueError(f"results of {row!r:.80}")
    operands = (
        tuple(_tree(value, numbers) for value in named),
        {name: _tree(value, numbers) for name, value in kwargs.items()},
    )
    leaves, spec = trees.tree_flatten(operands)
    places = tuple((leaf.where, leaf.number) for leaf in leaves if isinstance(leaf, _Place))
    if len(places) != len(leaves):
        raise ValueError(f"operands of {row!r:.80}")
    return JoinedOp(func, spec, places, made, tuple(drops))


def _tree(value: Any, numbers: Mapping[str, Any]) -> Any:
    if value is None:
        return None
    if isinstance(value, list):
        return [_tree(item, numbers) for item in value]
    if isinstance(value, dict) and len(value) == 1:
        ((where, number),) = value.items()
        there = numbers.get(where, 0)
        known = number in there if isinstance(there, set) else _is_below(number, there)
        if type(number) is int and known:
            return _Place(where, number)
    raise ValueError(f"an operand that is none: {value!r:.80}")


def _func(name: Any) -> Dispatched:
    """An elementwise op of torch by its names."""
    if isinstance(name, list) and len(name) == 2 and all(isinstance(part, str) for part in name):
        packet, overload = name[0].removeprefix("aten::"), name[1] or "default"
        found = getattr(getattr(torch.ops.aten, packet, None), overload, None)
        if isinstance(found, Dispatched) and is_elementwise(found):
            return found
    raise ValueError(f"{name!r:.80} is no elementwise op of this torch")


def _list(kept: Any, name: str) -> list[Any]:
    found = kept.get(name) if isinstance(kept, dict) else None
    if not isinstance(found, list):
        raise ValueError(f"{name!r} is not a list")
    return found


def _is_below(number: object, most: int) -> bool:
    return type(number) is int and 0 <= number < most
