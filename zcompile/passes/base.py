"""Defines what a pass is, and the facts that tie passes together."""

import enum
from abc import ABC, abstractmethod
from typing import ClassVar

from torch import fx

from zcompile.ir.plan import GraphPlan


class Fact(enum.Enum):
    """A property of a graph that one pass establishes and another needs."""

    PHASES_ASSIGNED = "phases assigned"
    LOSSES_TILED = "losses tiled"
    TILES_CHOSEN = "tiles chosen"
    WEIGHTS_TILED = "weights tiled"
    TOKENS_TILED = "tokens tiled"
    BATCH_SLICED = "batch sliced"
    ACTIVATIONS_CHOSEN = "activations chosen"
    ACTIVATIONS_PLANNED = "activations planned"
    PARAMS_GATHERED = "params gathered"
    PARAMS_NARROWED = "params narrowed"
    PARAMS_RELEASED = "params released"
    GRADS_REDUCED = "gradients reduced"
    FUSIONS_FOUND = "fusions found"
    REGIONS_CUT = "regions cut"
    FUSIONS_COMPILED = "fusions compiled"
    BUDGET_SPLIT = "budget split"


class Pass(ABC):
    """Edits the graph it is given and returns the plan, changed or as it came.

    A pass reads nothing but its arguments and its own fields: no device, no clock, no environment.

    needs, gives  facts that must hold before, and that hold after
    """

    name: ClassVar[str]
    needs: ClassVar[frozenset[Fact]]
    gives: ClassVar[frozenset[Fact]]

    @abstractmethod
    def rewrite(self, graph: fx.Graph, plan: GraphPlan) -> GraphPlan:
        """Edit `graph` in place and return the plan.

        raises  ZinfError, if what the user asked for cannot be met
        """
