"""Fetches parameters that are only read after a cast in the dtype of that cast."""

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import fx

from zcompile.ir import ops
from zcompile.ir.graph import CASTS, find, output_of
from zcompile.ir.plan import GraphPlan, Note
from zcompile.passes.base import Fact, Pass


@dataclass(frozen=True)
class NarrowParams(Pass):
    """Where every reader of a gathered parameter casts it to `dtype`, fetch a copy in `dtype`.

        %p = zinf.fetch(%w, .., f32)              %p = zinf.fetch(%w, .., bf16)
        %f = zinf.wait(%p)                ->      %f = zinf.wait(%p)
        %c = aten._to_copy(%f, bf16)              %y = aten.mm(%x, %f)
        %y = aten.mm(%x, %c)

    The store keeps such a copy beside the parameter and makes it by the same cast, so no bit
    changes. This is how autocast reads weights: half the bytes travel, and the optimizer still
    updates the float32 master. Only for parameters that rest on disk: a copy of a parameter on the
    host would take more of the host, or rest on disk itself.

    dtype  of the copies; None leaves all as it is
    """

    dtype: torch.dtype | None = None

    name: ClassVar[str] = "narrow-params"
    needs: ClassVar[frozenset[Fact]] = frozenset({Fact.PARAMS_GATHERED})
    gives: ClassVar[frozenset[Fact]] = frozenset({Fact.PARAMS_NARROWED})

    def rewrite(self, graph: fx.Graph, plan: GraphPlan) -> GraphPlan:
        if self.dtype is None:
            return plan
        narrowed = [fetch for fetch in find(graph, ops.fetch) if self._narrow(graph, fetch, plan)]
        if not narrowed:
            text = f"no parameter on disk is read only after a cast to {self.dtype} (autocast)"
            return replace(plan, notes=(*plan.notes, Note(self.name, None, text)))
        return plan

    def _narrow(self, graph: fx.Graph, fetch: fx.Node, plan: GraphPlan) -> bool:
        """Fetch the copy, if all readers cast to it and it exists; returns whether."""
        (wait,) = fetch.users
        casts = list(wait.users)
        spec = plan.spec_of(fetch)
        if (
            spec.home != "disk"
            or not spec.layout.covers(spec.nbytes)
            or not all(self._casts(graph, wait, cast) for cast in casts)
        ):
            return False
        first = casts[0]
        for node in (fetch, wait):
            node.meta["val"] = first.meta["val"]
        _, size, stride, offset, _, device = fetch.args
        fetch.args = (fetch.args[0], size, stride, offset, self.dtype, device)
        for cast in casts:
            cast.replace_all_uses_with(wait)
            graph.erase_node(cast)
        return True

    def _casts(self, graph: fx.Graph, wait: fx.Node, user: fx.Node) -> bool:
        """Whether `user` is a cast to `dtype`, and does nothing else."""
        if user.target not in CASTS or output_of(graph) in user.users:
            return False
        value, result = wait.meta["val"], user.meta["val"]
        plain = set(user.kwargs) <= {"dtype"} or user.kwargs.get("device") in (None, value.device)
        same = result.dtype is self.dtype and result.stride() == value.stride()
        return plain and same and value.dtype.itemsize > result.dtype.itemsize
