"""Counts the work of a region from its nodes: FLOPs, bytes and kernels.

Formulas of matrix products, convolutions and attention are torch's own. Every other op counts by
the bytes that it reads and writes; a view costs nothing. A fusion (`fusions.py`) reads what it is
given and writes what others read of it; what is between it keeps in registers.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from math import prod
from typing import Any, cast

import torch
from torch import fx
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

from zcompile.ir.fusions import fused_of, fusion_of, fusions_of, made_by, read_by
from zcompile.ir.graph import bases_of, is_compute, phase_of
from zcompile.ir.torch_compat import hint
from zcompile.ir.types import Phase, Work

aten = torch.ops.aten
BY_SIZE = frozenset({aten.mm, aten.addmm, aten.bmm, aten.baddbmm})
"""Ops whose FLOP formulas read sizes only; there are many of them, and making tensors for each
would be slow."""
_ATTENTION = "_scaled_dot_product_flash_attention_for_cpu"
"""Attention on the CPU; torch has formulas for it on other devices only."""


def work_of(nodes: Sequence[fx.Node]) -> Work:
    """The work of a region of these nodes; each has `meta["val"]`, as tracing leaves it."""
    flops = Counter[str]()
    dense_nbytes = nbytes = ops = 0
    for members in fusions_of(nodes).values():
        made = made_by(members)
        nbytes += sum(_nbytes(n) for n in (*read_by(members, made), *made))
        fused = fused_of(members[0])
        ops += 1 if fused is None else fused.kernels
    for node in nodes:
        if not _computes(node) or fusion_of(node) is not None:
            continue
        ops += 1
        touched = touched_bytes(node)
        if (count := flops_of(node)) is None:
            nbytes += touched
        else:
            flops[_dtype_of(node)] += count
            dense_nbytes += touched
    ((dtype, _),) = flops.most_common(1) or [("float32", 0)]
    return Work(flops.total(), dense_nbytes, nbytes, dtype, ops)


def total_work(works: Sequence[Work]) -> Work:
    """The work of several regions together."""
    most = max(works, key=lambda work: work.flops)
    return Work(
        sum(work.flops for work in works),
        sum(work.dense_nbytes for work in works),
        sum(work.nbytes for work in works),
        most.dtype,
        sum(work.ops for work in works),
    )


def work_by_phase(graph: fx.Graph) -> dict[Phase, Work]:
    """The work of forward and of backward of a graph with assigned phases."""
    nodes: dict[Phase, list[fx.Node]] = {}
    for node in graph.nodes:
        if is_compute(node):
            nodes.setdefault(phase_of(node), []).append(node)
    return {phase: work_of(of) for phase, of in nodes.items()}


def flops_of(node: fx.Node) -> int | None:
    """Multiplications and additions of a dense op; None for any other op."""
    packet = getattr(node.target, "overloadpacket", None)
    formulas = cast(Mapping[Any, Any], flop_registry)
    name = getattr(node.target, "__name__", "").partition(".")[0]
    if name == _ATTENTION:
        return int(sdpa_flop_count(*map(_size, node.args[:3])))
    if name == f"{_ATTENTION}_backward":
        return int(sdpa_backward_flop_count(*map(_size, node.args[:4])))
    if packet not in formulas:
        return None
    shaped = _size if packet in BY_SIZE else _shaped
    given = cast(Any, fx.map_arg((node.args, dict(node.kwargs)), cast(Any, shaped)))
    args, kwargs = given
    return int(formulas[packet](*args, **kwargs, out_val=shaped(node)))


def touched_bytes(node: fx.Node) -> int:
    """Bytes of the operands and results of an op; an expanded operand counts once."""
    return sum(_nbytes(n) for n in (*node.all_input_nodes, node))


def _computes(node: fx.Node) -> bool:
    """Whether a node does work: it returns tensors, and is no view."""
    value = node.meta.get("val")
    tensors = value if isinstance(value, list | tuple) else (value,)
    name = getattr(node.target, "__name__", "")
    if not any(isinstance(v, torch.Tensor) for v in tensors) or name == "getitem":
        return False
    return not bases_of(node) or _writes(node)


def _writes(node: fx.Node) -> bool:
    schema = getattr(node.target, "_schema", None)
    return schema is not None and bool(schema.is_mutable)


def _nbytes(node: fx.Node) -> int:
    value = node.meta.get("val")
    tensors = value if isinstance(value, list | tuple) else (value,)
    return sum(_touched(v) for v in tensors if isinstance(v, torch.Tensor))


def _touched(value: torch.Tensor) -> int:
    """Bytes of a tensor, without repetition along dimensions of stride 0."""
    pairs = zip(value.size(), value.stride(), strict=True)
    return prod(hint(n) for n, stride in pairs if hint(stride)) * value.dtype.itemsize


def _shaped(node: fx.Node) -> Any:
    """The value of a node as a meta tensor, for FLOP formulas that read nothing but its sizes."""
    return _sized(node.meta.get("val"))


def _size(node: Any) -> Any:
    """The sizes of a node's value, for the formulas of `BY_SIZE`."""
    value = node.meta.get("val")
    return tuple(hint(n) for n in value.size()) if isinstance(value, torch.Tensor) else value


def _sized(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        size = [hint(n) for n in value.size()]
        return torch.empty(size, dtype=value.dtype, device="meta")
    if isinstance(value, list | tuple):
        return type(value)(_sized(v) for v in value)
    return hint(value) if isinstance(value, torch.SymInt) else value


def _dtype_of(node: fx.Node) -> str:
    (value, *_) = (n.meta.get("val") for n in (*node.all_input_nodes, node))
    return str(getattr(value, "dtype", "float32")).removeprefix("torch.")
