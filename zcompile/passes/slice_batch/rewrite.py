"""Writes a graph whose batch runs in slices, stage after stage.

    forward    stage by stage, in each slice by slice: the calls of the stage, with their slices
    backward   of each stage and slice: what forward did not save is computed again, then the
               gradients; those of weights add up, slice after slice, in the order of the batch

Slices stay apart from stage to stage. A call for the whole batch reads them put together, and what
it makes is read in parts.

A sum over slices rounds otherwise than one over the batch. In float16 and bfloat16 the part of each
slice is rounded to that dtype, and their sum, kept in float32, once more.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import fx

from zcompile.ir import ops
from zcompile.ir.graph import SIZED_VIEWS, bases_of, output_of, phase_of, root_of
from zcompile.ir.rewrite import SUM_DTYPE, GraphBuilder, shape
from zcompile.ir.saved_values import is_value
from zcompile.ir.torch_compat import keep_wish
from zcompile.ir.types import Phase
from zcompile.passes.slice_batch.axes import SQUEEZES, Axis, gone_dims
from zcompile.passes.slice_batch.stages import BatchGraph, Stage, Stages

aten = torch.ops.aten


def ranges(count: int, slices: int) -> list[tuple[int, int]]:
    """[begin, end) of each slice of so many samples; the first are larger by one if they must.

    ranges(7, 3) == [(0, 3), (3, 5), (5, 7)]
    """
    each, more = divmod(count, slices)
    ends = [each * n + min(n, more) for n in range(slices + 1)]
    return list(pairwise(ends))


def write_batch(found: BatchGraph, stages: Stages, slices: int) -> None:
    """Rewrite the graph in place."""
    _BatchWriter(found, stages, ranges(found.batch.count, slices)).write()


class _BatchWriter:
    """Writes the stages of a graph.

    parts  value of forward or backward -> its slices
    whole  value of slices -> of the whole batch, where it was put together or added up
    cut    (value of the whole batch, or of none, and where a slice is taken of it) -> that slice,
           of the slice of the batch that is being written
    """

    def __init__(
        self, found: BatchGraph, stages: Stages, slices: Sequence[tuple[int, int]]
    ) -> None:
        self.graph, self.batch, self.stages, self.slices = found.graph, found.batch, stages, slices
        self.rules, self.values = found.batch.rules, found.values
        self.parts: dict[fx.Node, list[fx.Node]] = {}
        self.whole: dict[fx.Node, fx.Node] = {}
        self.sums: dict[fx.Node, fx.Node] = {}
        self.cut: dict[tuple[fx.Node, Axis], fx.Node] = {}
        self.phase, self.point = Phase.FORWARD, output_of(self.graph)

    def write(self) -> None:
        output = output_of(self.graph)
        calls = [n for n in self.graph.nodes if n.op == "call_function"]
        late = [n for n in calls if phase_of(n) is Phase.BACKWARD]
        self.point = late[0] if late else output
        results = [n for n in output.all_input_nodes if n in self.rules]
        for stage in self.stages.forward:
            self._stage(stage)
        for node in results:
            if phase_of(node) is Phase.FORWARD:
                self._together(node)
        self.phase, self.point = Phase.BACKWARD, output
        for stage in self.stages.backward:
            self._stage(stage)
        for node in results:
            output.replace_input_with(node, self._together(node))
        for node in reversed(list(self.graph.nodes)):
            if node in self.rules and not node.users:
                self.graph.erase_node(node)
        self.graph.eliminate_dead_code()

    def _stage(self, stage: Stage) -> None:
        for node in stage.before:
            for source in node.all_input_nodes:
                if source in self.rules:
                    node.replace_input_with(source, self._together(source))
            self.point.prepend(node)
        self.sums = {}
        for node in stage.nodes:
            self.parts[node] = []
        for begin, end in self.slices:
            made: dict[fx.Node, fx.Node] = {}
            self.cut = {}
            for node in (*stage.again, *stage.nodes):
                if self.batch.is_sum(node):
                    self._add(node, made, (begin, end))
                else:
                    made[node] = self._call(node, made, (begin, end))
            for node in stage.nodes:
                if node in made:
                    self.parts[node].append(made[node])
        for node, total in self.sums.items():
            self.whole[node] = self._build(node).cast(total, node.meta["val"].dtype)

    def _build(self, like: fx.Node) -> GraphBuilder:
        return GraphBuilder(self.graph, self.point, like, self.phase)

    # One slice

    def _call(self, node: fx.Node, made: dict[fx.Node, fx.Node], part: tuple[int, int]) -> fx.Node:
        """Write `node` for one slice."""
        args, kwargs = self._arguments(node, made, part)
        build = self._build(node)
        if node.target in SIZED_VIEWS and node.target is not aten.expand.default:
            source = node.args[0]
            assert isinstance(source, fx.Node)
            if source.meta["val"].is_contiguous():
                args[0] = build.contiguous(args[0])
        if node.target in SQUEEZES:  # which would take away a batch of one sample, too
            made[node] = build(aten.squeeze.dims, args[0], gone_dims(node))
        else:
            made[node] = build(node.target, *args, **kwargs)
        keep_wish(node, made[node])
        return made[node]

    def _arguments(
        self, node: fx.Node, made: dict[fx.Node, fx.Node], part: tuple[int, int]
    ) -> tuple[list[Any], dict[str, Any]]:
        rule, count = self.rules[node], part[1] - part[0]
        there = {source: self._operand(node, source, made, part) for source in node.all_input_nodes}
        given: Any = fx.node.map_arg((node.args, dict(node.kwargs)), there.__getitem__)
        args, kwargs = list(given[0]), dict(given[1])
        for size in rule.sized:
            if size.at is None:
                args[size.position] = size.each * count
            else:
                sizes = list(args[size.position])
                sizes[size.at] = size.each * count
                args[size.position] = sizes
        return args, kwargs

    def _operand(
        self,
        node: fx.Node,
        source: fx.Node,
        made: dict[fx.Node, fx.Node],
        part: tuple[int, int],
    ) -> fx.Node:
        """What a call reads of `source` in one slice."""
        axis = self.rules[node].reads.get(source)
        if axis is None:
            if source in self.rules:
                return self.whole[source]
            return self._weight(node, source)
        if source in made:
            return made[source]
        if source in self.rules and not (isinstance(axis, Axis) and source in self.whole):
            return self.parts[source][self.slices.index(part)]
        assert isinstance(axis, Axis), "what is of a slice alone is not read whole"
        if (source, axis) not in self.cut:
            whole = self.whole.get(source) or self._weight(node, source)
            self.cut[source, axis] = self._narrowed(whole, source, axis, part)
        return self.cut[source, axis]

    def _weight(self, node: fx.Node, source: fx.Node) -> fx.Node:
        """A view of a weight, taken anew for each reader: a view that is taken once would keep all
        its readers in one region."""
        bases = bases_of(source)
        if root_of(source).target is not ops.gather or len(bases) != 1:
            return source
        (base,) = bases
        there = {base: self._weight(node, base)}
        args = fx.node.map_arg(source.args, lambda n: there.get(n, n))
        return self._build(node)(source.target, *args)

    def _narrowed(
        self, whole: fx.Node, source: fx.Node, axis: Axis, part: tuple[int, int]
    ) -> fx.Node:
        """The samples [begin, end) of a value of the whole batch."""
        build, size = self._build(source), list(shape(source))
        begin, end = (at * axis.inner for at in part)
        outer = self.batch.outer(source, axis)
        if outer == 1:
            return build(aten.slice.Tensor, whole, axis.dim, begin, end)
        deep = build(aten.view.default, build.contiguous(whole), self._split(size, axis, outer))
        rows = build(aten.slice.Tensor, deep, axis.dim + 1, begin, end)
        size[axis.dim] = outer * (end - begin)
        return build(aten.view.default, build.contiguous(rows), size)

    def _split(self, size: Sequence[int], axis: Axis, outer: int) -> list[int]:
        """Sizes with [outer, batch * inner] in the place of the dimension of the batch."""
        return [*size[: axis.dim], outer, size[axis.dim] // outer, *size[axis.dim + 1 :]]

    def _add(self, node: fx.Node, made: dict[fx.Node, fx.Node], part: tuple[int, int]) -> None:
        """Add a slice's part of a sum over the batch to that of the slices before."""
        build, dtype = self._build(node), node.meta["val"].dtype
        total = self.sums.get(node)
        if total is not None and node.target is aten.mm.default and dtype not in SUM_DTYPE:
            args, _ = self._arguments(node, made, part)
            self.sums[node] = build(aten.addmm_.default, total, *args)
            return
        part_of = build.cast(self._call(node, made, part), SUM_DTYPE.get(dtype, dtype))
        self.sums[node] = part_of if total is None else build(aten.add_.Tensor, total, part_of)

    # The whole batch

    def _together(self, node: fx.Node) -> fx.Node:
        """The value of the whole batch from those of slices."""
        if node not in self.whole:
            self.whole[node] = self._joined(node)
        return self.whole[node]

    def _joined(self, node: fx.Node) -> fx.Node:
        """Slices side by side, in the layout of the value that they take the place of."""
        axis, value, build = self.batch.axis(node), node.meta["val"], self._build(node)
        assert axis is not None, "what has no batch is added up"
        order = sorted(range(value.dim()), key=lambda d: -value.stride(d))
        if not value.permute(order).is_contiguous():
            if (view := self._view_of_joined(node)) is not None:
                return view
            order = list(range(value.dim()))
        outer, parts = self.batch.outer(node, axis), self.parts[node]
        if outer > 1:
            deep = [
                build(aten.view.default, build.contiguous(p), self._split(shape(p), axis, outer))
                for p in parts
            ]
            joined = build(aten.cat.default, deep, axis.dim + 1)
            return build(aten.view.default, joined, list(shape(node)))
        if order == list(range(value.dim())):
            return build(aten.cat.default, parts, axis.dim)
        turned = [build(aten.permute.default, p, order) for p in parts]
        joined = build(aten.cat.default, turned, order.index(axis.dim))
        back = [order.index(d) for d in range(value.dim())]
        return build(aten.permute.default, joined, back)

    def _view_of_joined(self, node: fx.Node) -> fx.Node | None:
        """A view with gaps, taken of a value that is put together; None, if it is of no value."""
        chain = [node]
        while (bases := bases_of(chain[-1])) and not is_value(chain[-1].all_input_nodes[0]):
            chain.append(bases[0])
        if len(bases) != 1 or bases[0] not in self.rules:
            return None
        made = {bases[0]: self._together(bases[0])}
        for view in reversed(chain):
            args: Any = fx.node.map_arg(view.args, lambda n: made.get(n, n))
            made[view] = self._build(view)(view.target, *args)
        return made[node]
