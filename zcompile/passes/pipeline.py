"""Lists the passes in their order, written once, and runs them.

The runner does for every pass what no pass does for itself: verify, tell the watcher, recompile at
the end.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Protocol

from torch import fx

from zcompile.config import Config
from zcompile.errors import PassOrder
from zcompile.ir.plan import GraphPlan
from zcompile.ir.work import work_by_phase
from zcompile.passes.base import Fact, Pass
from zcompile.passes.choose_tiles import ChooseTiles
from zcompile.passes.compile_fusions import CompileFusion, CompileFusions
from zcompile.passes.cut_regions import CutRegions
from zcompile.passes.find_fusions import FindFusions
from zcompile.passes.gather_params import GatherParams
from zcompile.passes.narrow_params import NarrowParams
from zcompile.passes.plan_activations import PlanActivations
from zcompile.passes.plan_activations.decision import ChooseActivations
from zcompile.passes.plan_activations.graph import ActivationBudget
from zcompile.passes.reduce_grads import ReduceGrads
from zcompile.passes.release_params import ReleaseParams
from zcompile.passes.slice_batch import SliceBatch
from zcompile.passes.split_budget import SplitBudget
from zcompile.passes.tile_loss import TileLoss
from zcompile.passes.tile_matmuls import TileMatmuls
from zcompile.passes.tile_tokens import TileTokens
from zcompile.passes.trial import Trial, not_told
from zcompile.verify.graph import verify


class Watch(Protocol):
    """Is told what each pass did: the log, the dump, both, or neither."""

    def before(self, graph: fx.Graph, plan: GraphPlan) -> None: ...

    def after(self, step: int, name: str, graph: fx.Graph, plan: GraphPlan) -> None: ...


class Silence:
    """A watcher that does nothing."""

    def before(self, graph: fx.Graph, plan: GraphPlan) -> None:
        pass

    def after(self, step: int, name: str, graph: fx.Graph, plan: GraphPlan) -> None:
        pass


SILENT = Silence()


def _tile_bytes(config: Config) -> int | None:
    return None if config.tile_bytes is None else int(config.tile_bytes)


def pipeline(
    config: Config,
    around: Callable[[], ActivationBudget] | None = None,
    tried: Callable[[], None] = not_told,
    compiler: CompileFusion | None = None,
    by_kernels: bool | None = None,
) -> tuple[Pass, ...]:
    """The passes in order; the one place where the user's wishes become the fields of a pass.

    around    the machine that activations are planned for; None: all are saved
    tried     is called at each trial, of which there may be many
    compiler  compiles a fusion; None: whatever `config` says, compute is run as it is
    by_kernels  whether kernels of our own compute tiles of a loss; None: as `config` says for here
    """
    fused = config.tiles_by_kernels if by_kernels is None else by_kernels
    tile_bytes, gathered = _tile_bytes(config), _gathered(config)
    tiles = TileMatmuls(tile_bytes)
    rewrite = PlanActivations()
    activations = ChooseActivations(config.activations, around, Trial((rewrite, *gathered), tried))
    split = SplitBudget()
    whole = Trial((tiles, replace(activations, compares=False), rewrite, *gathered, split), tried)
    again = config.activations in ("auto", "recompute")  # whether values may be computed again
    return (
        TileLoss(tile_bytes, fused),  # a loss over a large vocabulary is tiled
        # What is cut, and how finely: by trials.
        ChooseTiles(tile_bytes, whole, again, config.param_dtype is not None),
        TileTokens(),  # what fits over slices of tokens only
        SliceBatch(),  # what fits over slices of the batch only, block after block
        tiles,  # what the budget cannot hold whole comes in tiles
        activations,  # what backward needs: kept, made again, or moved off the device
        rewrite,  # made again, or moved
        *gathered,
        CompileFusions(compiler),  # compute between library calls: a few kernels
        split,  # what the graph itself holds is not the arena's
    )


def _gathered(config: Config) -> tuple[Pass, ...]:
    return (
        GatherParams(),  # one gather per parameter and phase, before its first reader
        # what is only read after a cast comes in that dtype
        NarrowParams(config.param_dtype, alike=config.may_keep_wholes),
        ReleaseParams(),  # full -> nothing, after its last reader
        # gradient -> home tier, as soon as it is made; a commit holds it as the optimizer reads it
        ReduceGrads(narrow=not config.durable),
        FindFusions(config.regions == "inductor"),  # compute between library calls, in one piece
        CutRegions(),  # compute between our ops, numbered
    )


def decided(config: Config) -> tuple[Pass, ...]:
    """The passes that follow where all is decided, nothing is cut and nothing fused: a plan says
    what becomes of activations."""
    return (PlanActivations(), *_gathered(config), SplitBudget())


DECIDED = frozenset({Fact.PHASES_ASSIGNED, Fact.ACTIVATIONS_CHOSEN})
"""What holds before the passes of `decided`."""


def run(
    joint: fx.GraphModule,
    plan: GraphPlan,
    passes: Sequence[Pass],
    *,
    watch: Watch = SILENT,
    begins: Callable[[int, str], None] = lambda step, name: None,
    given: frozenset[Fact] = frozenset({Fact.PHASES_ASSIGNED}),
) -> GraphPlan:
    """Run `passes` over a graph whose phases are assigned (`graph.assign_phases`).

    given   what holds before the first
    begins  is called before each pass, with how many are done and its name
    raises  PassOrder, GraphInvalid, and whatever a pass says of the user's wishes
    """
    facts = set(given)
    plan = replace(plan, traced_work=work_by_phase(joint.graph))
    watch.before(joint.graph, plan)
    for step, pass_ in enumerate(passes, start=1):
        if missing := pass_.needs - facts:
            raise PassOrder(pass_.name, [f.value for f in missing], [p.name for p in passes])
        begins(step - 1, pass_.name)
        plan = pass_.rewrite(joint.graph, plan)
        facts |= pass_.gives
        verify(joint.graph, plan, after=pass_.name, facts=frozenset(f.name for f in facts))
        watch.after(step, pass_.name, joint.graph, plan)
    joint.recompile()
    return plan
