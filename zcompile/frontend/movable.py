"""Refuses models and parameters that cannot be moved to a tier, and finds what shares memory."""

import weakref
from collections.abc import Iterable
from dataclasses import replace

import torch
from torch import Tensor, nn

from zcompile.errors import ModelWrapped, Unsupported
from zcompile.ir.torch_compat import (
    hooks_of,
    is_saved_by_graphs,
    is_shared_between_processes,
    memory_of,
    with_kept_nodes,
)
from zcompile.ir.types import Layout

WRAPPERS = ("DistributedDataParallel", "DataParallel", "FullyShardedDataParallel", "FSDPModule")
"""Names of classes that replicate or shard by themselves; named, so that they need not be
importable."""


def check_model(model: nn.Module) -> None:
    """Refuse what is no module, or has a module in it that replicates or shards by itself.

    raises  Unsupported, ModelWrapped
    """
    if not isinstance(model, nn.Module):
        raise no_module_error(model, "zcompile.offload")
    for module in model.modules():
        if wrapper := wrapper_of(module):
            raise ModelWrapped(wrapper)


def no_module_error(model: object, caller: str) -> Unsupported:
    """The error where `caller` was given something else in place of a model."""
    if isinstance(model, type):
        return Unsupported(
            f"{model.__name__} is a class, and no model that was made",
            f"give {caller} an object of it: {model.__name__}(...)",
        )
    return Unsupported(
        f"{type(model).__name__} is not a torch.nn.Module", f"give {caller} the model itself"
    )


def wrapper_of(module: nn.Module) -> str:
    """Name of the class of `WRAPPERS` that `module` is of; "" if of none."""
    names = (kind.__name__ for kind in type(module).__mro__)
    return next((name for name in names if name in WRAPPERS), "")


def check_nodes(plain: list[tuple[str, nn.Parameter]]) -> None:
    """Refuse parameters if hooks may wait at an autograd node that a parameter leaves behind.

    raises  Unsupported
    """
    kept = with_kept_nodes(param for _, param in plain)
    names = (name for name, p in plain if any(p is k for k in kept))
    name = next(names, "")
    if name:
        raise Unsupported(
            f"the AccumulateGrad node of parameter {name!r} is kept, perhaps for hooks, and would "
            "not be the parameter's any more",
            "drop it, and register hooks after zcompile.offload",
        )


def check_kept_results(model: nn.Module, plain: list[tuple[str, nn.Parameter]]) -> None:
    """Refuse modules that keep what was computed from a parameter, by a graph that saved it.

    plain   those that are to be moved
    raises  Unsupported
    """
    moved = {id(param) for _, param in plain}
    for path, module in model.named_modules():
        # Nobody walks the graph: a node that Python has seen counts as kept, in `check_nodes`.
        kept = [n for n, x in vars(module).items() if isinstance(x, Tensor) and not x.is_leaf]
        own = [(n, p) for n, p in module.named_parameters(path, recurse=False) if id(p) in moved]
        saved = [name for name, param in own if kept and is_saved_by_graphs(param)]
        if saved:
            holder = repr(path) if path else "the model"
            raise Unsupported(
                f"{holder} keeps as its .{kept[0]} what was computed before, as "
                f"torch.nn.utils.weight_norm does, by a graph that saved parameter {saved[0]!r}",
                "apply that after zcompile.offload, or take "
                "torch.nn.utils.parametrizations.weight_norm; what forward computes anew "
                "anyway may be set to None before",
            )


def check_movable(name: str, param: Tensor) -> None:
    """Refuse a parameter, if something would be lost on the way.

    raises  Unsupported
    """
    if type(param) is not nn.Parameter or param.layout is not torch.strided:
        raise Unsupported(
            f"parameter {name!r} is a {type(param).__name__} of layout {param.layout}",
            "only dense torch.nn.Parameter can be offloaded; materialize it first",
        )
    if is_shared_between_processes(param):
        raise Unsupported(
            f"parameter {name!r} lies in memory that other processes share, or a file (as after "
            "share_memory()), and they would not see what is written to it any more",
            "give it memory of its own first (p.data = p.data.clone())",
        )
    if any(hooks_of(param)):
        raise Unsupported(
            f"parameter {name!r} has hooks already", "register hooks after zcompile.offload"
        )
    if weakref.getweakrefs(param):
        raise Unsupported(
            f"parameter {name!r} is referred to weakly, as by a compiled graph",
            "offload the model before it is compiled, or build it under zcompile.init",
        )


def first_in_memory(named: Iterable[tuple[str, Tensor]]) -> dict[int, Tensor]:
    """id of a parameter -> an earlier one with the same layout in the same memory.

    raises  Unsupported, if two share a part of their memory
    """
    lying: dict[int, list[tuple[str, Tensor, Layout]]] = {}
    found: dict[int, Tensor] = {}
    for name, param in named:
        layout = replace(Layout.of(param), offset=int(param.storage_offset()))
        others = lying.setdefault(memory_of(param), [])
        for before, other, lies in others:
            if layout == lies:
                found[id(param)] = other
                break
            if not layout.numel or not _overlap(layout, lies):
                continue
            raise Unsupported(
                f"parameters {before!r} and {name!r} share a part of their memory",
                "give each memory of its own (param.data = param.data.clone()), or make both views "
                "of one parameter",
            )
        else:
            others.append((name, param, layout))
    return found


def _overlap(a: Layout, b: Layout) -> bool:
    """Whether two layouts over the same memory share a byte."""
    begin = max(a.offset * a.dtype.itemsize, b.offset * b.dtype.itemsize)
    return begin < min(a.end_bytes, b.end_bytes)
