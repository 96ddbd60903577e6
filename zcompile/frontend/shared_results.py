"""Graphs that return several views of one value, which AOTAutograd refuses beside subclasses.

Autograd must know that such views share memory, since a user may write one of them: AOTAutograd
lets the graph return the value too, and makes the views of it anew outside. Where an input is of a
subclass, as tiered parameters are, it does so only for a value that the graph returns by itself.

Left to its refusal are views whose gradients would not be eager's: those of which autograd keeps no
record, since they were made under `no_grad`, would have one; and where three overlap, gradients
would be added up in another order.
"""

from collections.abc import Callable, Sequence
from itertools import combinations
from typing import Any

import torch
from torch import Tensor, fx

from zcompile.ir.graph import output_of
from zcompile.ir.torch_compat import is_traceable_wrapper_subclass, is_within_transform, memory_of


def return_shared(gm: fx.GraphModule) -> int | None:
    """Let a graph of Dynamo return, behind its results, each value that several of them are views
    of; returns how many results it had, or None if there is no such value."""
    output = output_of(gm.graph)
    results = list(output.args[0])  # type: ignore[arg-type]
    number = len(results)
    shared = _shared(gm.graph, [r for r in results if isinstance(r, fx.Node)])
    for maker in shared:
        whole = maker
        if maker.meta["example_value"]._is_view():  # of what its op keeps to itself
            with gm.graph.inserting_after(maker):
                whole = gm.graph.call_method("clone", (maker,))
            maker.replace_all_uses_with(whole)
            whole.args = (maker,)
            results = [whole if r is maker else r for r in results]
        if whole not in results:
            results.append(whole)
    if not shared:
        return None
    output.args = (tuple(results),)
    gm.recompile()
    return number


def _shared(graph: fx.Graph, results: list[fx.Node]) -> list[fx.Node]:
    """The first node of each memory that several results, of which autograd keeps a record, are in;
    not of the memory of inputs, of none that an op gave several nodes at once, and of none whose
    copy would lie otherwise."""
    alike: dict[int, list[fx.Node]] = {}
    for node in graph.nodes:
        if node.op != "output" and (memory := _memory(node)) is not None:
            alike.setdefault(memory, []).append(node)
    found: list[fx.Node] = []
    for maker, *others in alike.values():
        value = maker.meta["example_value"]
        views = {node for node in (maker, *others) if node in results and _differentiable(node)}
        known = {maker, *others}
        if (
            len(views) > 1
            and maker.op != "placeholder"
            and _differentiable(maker)
            and not (maker in results and not value._is_view())
            and not (value._is_view() and torch.empty_like(value).stride() != value.stride())
            and all(known.intersection(node.all_input_nodes) for node in others)
            and all(node.meta["example_value"].grad_fn is not None for node in views)
            and not _three_overlap([node.meta["example_value"] for node in views], value)
        ):
            found.append(maker)
    return found


def _memory(node: fx.Node) -> int | None:
    """A number for the memory of a plain tensor; None for all else.

    What a function under `torch.func` computes is no result, but what torch makes of it where it
    leaves the function. Two views that leave one are not seen to be of one memory: torch refuses
    the graph.
    """
    value = node.meta.get("example_value")
    if not isinstance(value, Tensor) or is_traceable_wrapper_subclass(value):
        return None
    if is_within_transform(value):
        return None
    return memory_of(value)


def _differentiable(node: fx.Node) -> bool:
    value = node.meta["example_value"]
    return isinstance(value, Tensor) and value.requires_grad


def _three_overlap(views: Sequence[Tensor], whole: Tensor) -> bool:
    """Whether three of `views`, all of the memory of `whole`, may have an element in common."""
    if len(views) < 3:
        return False
    numbers = [n for view in views for n in (*view.size(), *view.stride(), view.storage_offset())]
    if not all(isinstance(n, int) for n in numbers):
        return True
    meeting = [pair for pair in combinations(range(len(views)), 2) if _meet(*pair, views, whole)]
    return any(sum(at in pair for pair in meeting) > 1 for at in range(len(views)))


def _meet(first: int, second: int, views: Sequence[Tensor], whole: Tensor) -> bool:
    """Whether two views may have an element in common: as boxes of `whole`, or else by the ranges
    of memory that they lie in."""
    a, b = views[first], views[second]
    boxes = whole.is_contiguous() and all(whole.stride())
    if boxes and a.stride() == b.stride() == whole.stride():
        found = zip(_box(a, whole), _box(b, whole), strict=True)
    else:
        found = zip([_range(a)], [_range(b)], strict=True)
    return all(begin < other_end and other < end for (begin, end), (other, other_end) in found)


def _box(view: Tensor, whole: Tensor) -> list[tuple[int, int]]:
    """The indices [begin, end) of `whole` that a view with its strides shows, in each dimension."""
    left, box = int(view.storage_offset() - whole.storage_offset()), []
    for size, stride in zip(view.size(), view.stride(), strict=True):
        begin, left = divmod(left, stride)
        box.append((begin, begin + size))
    return box


def _range(view: Tensor) -> tuple[int, int]:
    """The elements [begin, end) of memory between which a view lies."""
    steps = zip(view.size(), view.stride(), strict=True)
    begin = int(view.storage_offset())
    return begin, begin + sum((size - 1) * stride for size, stride in steps) + 1


def first(results: int, compiled: Callable[..., Any]) -> Callable[..., Any]:
    """`compiled`, which gives the first `results` of its results."""

    def call(*args: Any) -> Any:
        return compiled(*args)[:results]

    return call
