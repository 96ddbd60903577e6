"""Graphs that return several views of one value, which AOTAutograd refuses beside subclasses.

Autograd must know that such views share memory, since a user may write one of them: AOTAutograd
lets the graph return the value too, and makes the views of it anew outside. Where an input is of a
subclass, as tiered parameters are, it does so only for a value that the graph returns by itself.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx

from zcompile.ir.graph import output_of
from zcompile.ir.torch_compat import is_traceable_wrapper_subclass, memory_of


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
        ):
            found.append(maker)
    return found


def _memory(node: fx.Node) -> int | None:
    """A number for the memory of a plain tensor; None for all else."""
    value = node.meta.get("example_value")
    if not isinstance(value, Tensor) or is_traceable_wrapper_subclass(value):
        return None
    return memory_of(value)


def _differentiable(node: fx.Node) -> bool:
    value = node.meta["example_value"]
    return isinstance(value, Tensor) and value.requires_grad


def first(results: int, compiled: Callable[..., Any]) -> Callable[..., Any]:
    """`compiled`, which gives the first `results` of its results."""

    def call(*args: Any) -> Any:
        return compiled(*args)[:results]

    return call
