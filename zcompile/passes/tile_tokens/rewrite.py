"""Writes a region over slices of tokens into a joint graph.

    forward    of each slice: operands are sliced, all is computed; results are put together
    backward   of each slice: values that forward did not save are recomputed, then the gradients;
               those of tokens are put together, those of weights add up

A sum over slices rounds otherwise than one over all tokens. In float16 and bfloat16 the part of
each slice is rounded to that dtype, and their sum, kept in float32, once more.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import fx

from zcompile.ir import ops
from zcompile.ir.graph import SIZED_VIEWS, bases_of, root_of
from zcompile.ir.rewrite import SUM_DTYPE, GraphBuilder
from zcompile.passes.tile_tokens.regions import Region, RegionPhase, phases_of
from zcompile.passes.tile_tokens.rules import Tokens, is_transposed

aten = torch.ops.aten


def rewrite_region(graph: fx.Graph, region: Region, slices: int) -> bool:
    """Rewrite a region in place; False, if another rewritten region stands in the way.

    Backward comes first, since it reads values that forward is about to replace.
    """
    parts_found = phases_of(graph, region)
    for part in reversed(parts_found):
        _SliceWriter(graph, region.tokens, part, slices).write()
    graph.eliminate_dead_code()
    return bool(parts_found)


class _SliceWriter:
    """Writes one phase of a region, slice by slice.

    sums  node -> the sum over the slices so far
    """

    def __init__(self, graph: fx.Graph, tokens: Tokens, part: RegionPhase, slices: int) -> None:
        self.graph, self.tokens, self.part, self.slices = graph, tokens, part, slices
        self.sums: dict[fx.Node, fx.Node] = {}

    def write(self) -> None:
        part = self.part
        parts: dict[fx.Node, list[fx.Node]] = {node: [] for node in part.rows}
        for number in range(self.slices):
            made = self._slice(number)
            for node in part.rows:
                parts[node].append(made[node])
        whole = {node: self._joined(node, pieces) for node, pieces in parts.items()}
        for node, total in self.sums.items():
            whole[node] = self._builder(node).cast(total, node.meta["val"].dtype)
        for node in part.deferred:
            part.start.prepend(node)
        for node, put_together in whole.items():
            node.replace_all_uses_with(put_together)
        for node in reversed(part.nodes):
            if not node.users:
                self.graph.erase_node(node)

    def _builder(self, node: fx.Node) -> GraphBuilder:
        return GraphBuilder(self.graph, self.part.start, node, self.part.phase)

    def _slice(self, number: int) -> dict[fx.Node, fx.Node]:
        """Write everything for one slice: node -> its value there."""
        made = {node: self._narrowed(node, number) for node in self.part.inputs}
        for node in (*self.part.recomputed, *self.part.nodes):
            if node in self.part.sums:
                self._add(node, made)
            else:
                made[node] = self._repeat(node, made)
        return made

    def _narrowed(self, node: fx.Node, number: int) -> fx.Node:
        """The tokens of slice `number` of a value [tokens, ..], [batch, length, ..] or [..,
        tokens]."""
        build, step = self._builder(node), self.tokens.count // self.slices
        begin = number * step
        if is_transposed(node, self.tokens):
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
        """Sizes of one slice of a value: [tokens / slices, ..], or [batch, length, ..] of a part of
        these."""
        step, shape = self.tokens.count // self.slices, list(node.meta["val"].shape)
        if self.tokens.lead(node) == 1:
            return [step, *shape[1:]]
        _, length = self._split()
        return [max(1, step // length), min(step, length), *shape[2:]]

    def _repeat(self, node: fx.Node, made: Mapping[fx.Node, fx.Node]) -> fx.Node:
        """Write `node` with the operands of a slice."""
        there = {**self._views(node), **made}
        args = list(_mapped(node.args, there))
        build = self._builder(node)
        if node.target in SIZED_VIEWS:
            if node.target is not aten.expand.default:
                args[0] = build.contiguous(args[0])
            args[1] = self._sizes(node)
        return build(node.target, *args, **_mapped(dict(node.kwargs), there))

    def _views(self, node: fx.Node) -> dict[fx.Node, fx.Node]:
        """Views of whole weights, taken anew for each reader: a view that is taken once would keep
        all its readers in one region."""
        return {n: self._view(n) for n in self.part.wholes if n in node.all_input_nodes}

    def _view(self, node: fx.Node) -> fx.Node:
        bases = bases_of(node)
        if root_of(node).target is not ops.gather or len(bases) != 1:
            return node
        (base,) = bases
        return self._builder(node)(node.target, *_mapped(node.args, {base: self._view(base)}))

    def _add(self, node: fx.Node, made: Mapping[fx.Node, fx.Node]) -> None:
        """Add a slice's part of a sum over tokens to that of the slices before."""
        build, dtype = self._builder(node), node.meta["val"].dtype
        total = self.sums.get(node)
        if total is not None and node.target is aten.mm.default and dtype not in SUM_DTYPE:
            self.sums[node] = build(aten.addmm_.default, total, *_mapped(node.args, made))
            return
        part = build.cast(self._repeat(node, made), SUM_DTYPE.get(dtype, dtype))
        self.sums[node] = part if total is None else build(aten.add_.Tensor, total, part)

    def _joined(self, node: fx.Node, parts: list[fx.Node]) -> fx.Node:
        """The value of all tokens from those of the slices."""
        build = self._builder(node)
        if self.tokens.lead(node) == 1 or self._sizes(node)[1] == node.meta["val"].shape[1]:
            return build(aten.cat.default, parts, 0)
        shape, step = list(node.meta["val"].shape), self.tokens.count // self.slices
        flat = [build(aten.view.default, build.contiguous(p), [step, *shape[2:]]) for p in parts]
        return build(aten.view.default, build(aten.cat.default, flat, 0), shape)


def _mapped(given: Any, made: Mapping[fx.Node, fx.Node]) -> Any:
    """Arguments with nodes replaced by those that `made` has for them."""
    return fx.node.map_arg(given, lambda node: made.get(node, node))


def _part(build: GraphBuilder, node: fx.Node, dim: int, begin: int, end: int) -> fx.Node:
    """[begin, end) of dimension `dim` of `node`; itself, if that is all."""
    whole = begin == 0 and end == node.meta["val"].shape[dim]
    return node if whole else build(aten.slice.Tensor, node, dim, begin, end)
