"""Writes calls into a graph at its insertion point, with the values that they give."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from zcompile.ir.graph import insert
from zcompile.ir.specs import Phase
from zcompile.ir.torch_private import Dispatched

aten = torch.ops.aten


@dataclass(frozen=True)
class Pen:
    """Writes calls at the graph's insertion point, with their values for reasoning."""

    graph: fx.Graph
    phase: Phase
    like: fx.Node

    def __call__(self, op: Dispatched, *args: fx.node.Argument, **kwargs: object) -> fx.Node:
        with torch.no_grad():
            val = op(*_values(args), **_values(kwargs))
        node = insert(self.graph, op, *args, like=self.like, phase=self.phase, val=val)
        node.kwargs = kwargs  # type: ignore[assignment]  # as create_node takes them
        return node

    def cast(self, node: fx.Node, dtype: torch.dtype) -> fx.Node:
        if node.meta["val"].dtype is dtype:
            return node
        return self(aten._to_copy.default, node, dtype=dtype)

    def rows(self, node: fx.Node, a: int, b: int) -> fx.Node:
        count = node.meta["val"].shape[0]
        whole = a == 0 and (not isinstance(count, int) or b >= count)
        return node if whole else self(aten.slice.Tensor, node, 0, a, b)

    def joined(self, parts: Sequence[fx.Node]) -> fx.Node:
        """Rows of all parts."""
        return parts[0] if len(parts) == 1 else self(aten.cat.default, list(parts), 0)

    def row_major(self, node: fx.Node) -> fx.Node:
        if node.meta["val"].is_contiguous():
            return node
        return self(aten.clone.default, node, memory_format=torch.contiguous_format)


def _values(args: Any) -> Any:
    return fx.node.map_arg(args, lambda node: node.meta["val"])
