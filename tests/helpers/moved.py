"""Decisions about saved values that no budget asked for: all moved, made again, or by turns; and
values that have another layout when they leave."""

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, ClassVar

import pytest
from torch import fx

from zcompile.frontend import backend
from zcompile.ir.plan import GraphPlan
from zcompile.ir.saved_values import SavedValues
from zcompile.ir.schedule import Offload
from zcompile.ir.torch_compat import storage_of
from zcompile.passes.base import Fact, Pass
from zcompile.passes.plan_activations.rewrite import Borders, Rewriting, plan_offload, sink_views
from zcompile.runtime import executor

WAYS = ("host", "disk", "again", "host or again")


@dataclass(frozen=True)
class Forced(Pass):
    """how      one of WAYS; what cannot be done to a value leaves it as it is
    decided  of each graph, how many values are made again, and how many are moved
    """

    how: str = "host"
    decided: list[tuple[int, int]] = field(default_factory=list, compare=False)

    name: ClassVar[str] = "plan-activations"
    needs: ClassVar[frozenset[Fact]] = frozenset({Fact.PHASES_ASSIGNED})
    gives: ClassVar[frozenset[Fact]] = frozenset()

    def rewrite(self, graph: fx.Graph, plan: GraphPlan) -> GraphPlan:
        sink_views(graph)
        values, borders = SavedValues(graph), Borders(graph)
        again, away = set(), {}
        for number, saved in enumerate(values.saved):
            ways = [way for way in self.how.split(" or ") if way != "again"]
            move = ways and (number % 2 == 0 or "again" not in self.how)
            if move and values.may_move(saved.root):
                away[saved.root] = plan_offload(borders, saved.root, ways[0])
            elif not move and values.may_repeat(saved.root):
                again.add(saved.root)
        self.decided.append((len(again), len(away)))
        return Rewriting(values, plan, frozenset(again), away).rewrite()


@contextmanager
def forced(how: str) -> Iterator[list[tuple[int, int]]]:
    """What is compiled inside is decided so. Gives what was decided, as `Forced` has it."""
    original, decided = backend.pipeline, []
    backend.pipeline = lambda *given: (Forced(how, decided), *original(*given))
    try:
        yield decided
    finally:
        backend.pipeline = original


def of_another_layout(patch: pytest.MonkeyPatch) -> list[Any]:
    """From here on a value of several dimensions has another layout when it leaves than it was
    traced with, so that its bytes are copied. Weak references to the storages of these values, of
    which each keeps its own until its register lets go."""
    offload, values = executor.ACTIONS[Offload], []

    def offload_permuted(call: Any, x: Offload) -> None:
        value = call.values[x.value]
        dims = [*reversed(range(value.dim()))]
        permuted = value.permute(dims).contiguous().permute(dims)
        if permuted.stride() != value.stride():
            values.append(weakref.ref(storage_of(value)))
            call.values[x.value] = permuted
        offload(call, x)
        call.values[x.value] = value

    patch.setitem(executor.ACTIONS, Offload, offload_permuted)
    return values
