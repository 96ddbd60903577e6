"""Writes a region over slices of tokens into a joint graph.

    forward    of each slice: what enters is sliced, all is computed; results are put together
    backward   of each slice: what forward did not keep is computed again, then the gradients;
               those of tokens are put together, those of weights add up

A sum over slices rounds otherwise than one over all tokens. In float16 and bfloat16 the part of
each slice is rounded to that dtype, and their sum, kept in float32, once more.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import fx

from zcompile.ir import ops
from zcompile.ir.graph import bases_of, root_of
from zcompile.ir.rewrite import SUM_DTYPE, GraphBuilder
from zcompile.passes.tile_tokens.regions import Half, Region, halves_of
from zcompile.passes.tile_tokens.rules import SIZED_VIEWS, Tokens, is_turned

aten = torch.ops.aten


def rewrite_region(graph: fx.Graph, region: Region, slices: int) -> bool:
    """In place; backward first, since it reads what forward is about to replace. False: it was
    left alone, since something else that was rewritten stands in the way."""
    halves = halves_of(graph, region)
    for half in reversed(halves):
        _Writing(graph, region.tokens, half, slices).write()
    graph.eliminate_dead_code()
    return bool(halves)


class _Writing:
    def __init__(self, graph: fx.Graph, tokens: Tokens, half: Half, slices: int) -> None:
        self.graph, self.tokens, self.half, self.slices = graph, tokens, half, slices
        self.sums: dict[fx.Node, fx.Node] = {}

    def write(self) -> None:
        half = self.half
        parts: dict[fx.Node, list[fx.Node]] = {node: [] for node in half.rows}
        for number in range(self.slices):
            made = self._slice(number)
            for node in half.rows:
                parts[node].append(made[node])
        whole = {node: self._joined(node, pieces) for node, pieces in parts.items()}
        for node, total in self.sums.items():
            whole[node] = self._builder(node).cast(total, node.meta["val"].dtype)
        for node in half.late:
            half.start.prepend(node)
        for node, put_together in whole.items():
            node.replace_all_uses_with(put_together)
        for node in reversed(half.nodes):
            if not node.users:
                self.graph.erase_node(node)

    def _builder(self, node: fx.Node) -> GraphBuilder:
        return GraphBuilder(self.graph, self.half.start, node, self.half.phase)

    def _slice(self, number: int) -> dict[fx.Node, fx.Node]:
        """Everything over one slice: node -> what it is there."""
        made = {node: self._narrowed(node, number) for node in self.half.inputs}
        for node in (*self.half.again, *self.half.nodes):
            if node in self.half.sums:
                self._add(node, made)
            else:
                made[node] = self._once(node, made)
        return made

    def _narrowed(self, node: fx.Node, number: int) -> fx.Node:
        build, step = self._builder(node), self.tokens.count // self.slices
        begin = number * step
        if is_turned(node, self.tokens):
            return _part(build, node, 1, begin, begin + step)
        if self.tokens.lead(node) == 1:
            return _part(build, node, 0, begin, begin + step)
        _, length = self._split()
        first, rest = divmod(begin, length)
        row = _part(build, node, 0, first, first + max(1, step // length))
        return row if step >= length else _part(build, row, 1, rest, rest + step)

    def _split(self) -> tuple[int, int]:
        assert self.tokens.split is not None, "else all tokens are one dimension"
        return self.tokens.split

    def _sizes(self, node: fx.Node) -> list[int]:
        """Of a slice of a value."""
        step, shape = self.tokens.count // self.slices, list(node.meta["val"].shape)
        if self.tokens.lead(node) == 1:
            return [step, *shape[1:]]
        _, length = self._split()
        return [max(1, step // length), min(step, length), *shape[2:]]

    def _once(self, node: fx.Node, made: Mapping[fx.Node, fx.Node]) -> fx.Node:
        there = {**self._views(node), **made}
        args = list(_there(node.args, there))
        build = self._builder(node)
        if node.target in SIZED_VIEWS:
            if node.target is not aten.expand.default:
                args[0] = build.contiguous(args[0])
            args[1] = self._sizes(node)
        return build(node.target, *args, **_there(dict(node.kwargs), there))

    def _views(self, node: fx.Node) -> dict[fx.Node, fx.Node]:
        """Views of whole weights, taken anew for each reader: a view that is taken once keeps what
        reads it in one region."""
        return {n: self._view(n) for n in self.half.wholes if n in node.all_input_nodes}

    def _view(self, node: fx.Node) -> fx.Node:
        bases = bases_of(node)
        if root_of(node).target is not ops.gather or len(bases) != 1:
            return node
        (base,) = bases
        return self._builder(node)(node.target, *_there(node.args, {base: self._view(base)}))

    def _add(self, node: fx.Node, made: Mapping[fx.Node, fx.Node]) -> None:
        """One slice's part of a sum, into what the slices before gave."""
        build, dtype = self._builder(node), node.meta["val"].dtype
        total = self.sums.get(node)
        if total is not None and node.target is aten.mm.default and dtype not in SUM_DTYPE:
            self.sums[node] = build(aten.addmm_.default, total, *_there(node.args, made))
            return
        part = build.cast(self._once(node, made), SUM_DTYPE.get(dtype, dtype))
        self.sums[node] = part if total is None else build(aten.add_.Tensor, total, part)

    def _joined(self, node: fx.Node, parts: list[fx.Node]) -> fx.Node:
        build = self._builder(node)
        if self.tokens.lead(node) == 1 or self._sizes(node)[1] == node.meta["val"].shape[1]:
            return build(aten.cat.default, parts, 0)
        shape, step = list(node.meta["val"].shape), self.tokens.count // self.slices
        flat = [build(aten.view.default, build.contiguous(p), [step, *shape[2:]]) for p in parts]
        return build(aten.view.default, build(aten.cat.default, flat, 0), shape)


def _there(given: Any, made: Mapping[fx.Node, fx.Node]) -> Any:
    return fx.node.map_arg(given, lambda node: made.get(node, node))


def _part(build: GraphBuilder, node: fx.Node, dim: int, begin: int, end: int) -> fx.Node:
    whole = begin == 0 and end == node.meta["val"].shape[dim]
    return node if whole else build(aten.slice.Tensor, node, dim, begin, end)
