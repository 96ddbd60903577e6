"""Decides what backward gets of forward's values: saved, recomputed, or offloaded meanwhile."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import ClassVar

from torch import fx

from zcompile.ir.memory_curve import Activation, ActivationCost, MemoryCurve
from zcompile.ir.plan import GraphPlan, Note
from zcompile.ir.saved_values import SavedValues
from zcompile.ir.types import CheckpointPolicy, NodeName
from zcompile.machine.model import Compute, Machine
from zcompile.passes.base import Fact, Pass
from zcompile.passes.plan_activations.graph import ActivationBudget, GraphProblem, ProblemReader
from zcompile.passes.plan_activations.problem import KEEP, MOVED, RECOMPUTE, Problem, Value, answer
from zcompile.passes.plan_activations.rewrite import name_of
from zcompile.passes.plan_activations.solve import Choice, Solved, as_wished
from zcompile.passes.trial import Trial

ACTIONS = {
    "auto": (RECOMPUTE, "host", "disk"),
    "recompute": (RECOMPUTE,),
    "offload": ("host", "disk"),
    "keep": (),
}
"""`Config.activations` -> actions that a value may be given, besides saving it."""
ROUNDS = 6
"""Most choices that are tried out; each leaves free the bytes that the one before was over the
budget."""
NOMINAL_BUDGET = ActivationBudget(
    Machine("nominal", {}, {}, Compute({"float32": 1e12}, 1e11)), MappingProxyType({})
)
"""A nominal machine, for asking whether everything fits before the real one need be measured."""
SLACK = 256
"""Beside the bytes that a choice was over, 1/SLACK of the budget is left free, since allocators
round."""
SURE_PART = 0.7
"""Part of the budget: a choice that is estimated to take less is not tried out."""


@dataclass(frozen=True)
class ChooseActivations(Pass):
    """Write into the plan what becomes of each value that backward needs of forward.

        budget 64 MiB                              budget 64 MiB
                                        ->         %r offloaded to the host; %a recomputed

    The budget holds what is kept, beside the window for weights. Random ops are never repeated.
    With room for everything, everything is saved. What was chosen before is left as it is. The
    graph does not change.

    activations  "auto", "keep", "recompute" or "offload": see `Config`
    around       the machine and its tiers; None: everything is saved
    trial        runs what a choice is followed by, up to regions
    compares     whether to count the live bytes with everything saved, too
    solved       what was chosen before, in trials and after them
    """

    activations: str = "auto"
    around: Callable[[], ActivationBudget] | None = None
    trial: Trial = field(default_factory=lambda: Trial(()))
    compares: bool = True
    solved: Solved = field(default_factory=Solved, compare=False)

    name: ClassVar[str] = "choose-activations"
    needs: ClassVar[frozenset[Fact]] = frozenset({Fact.PHASES_ASSIGNED})
    gives: ClassVar[frozenset[Fact]] = frozenset({Fact.ACTIVATIONS_CHOSEN})

    def rewrite(self, graph: fx.Graph, plan: GraphPlan) -> GraphPlan:
        if plan.activation_cost is None:
            values = SavedValues(graph)
            if plan.budget_bytes is None or self.around is None or not values.saved:
                return plan
            plan = self._decided(values, plan, plan.budget_bytes)
        cost = plan.activation_cost
        assert cost is not None, "it is counted with the decision"
        if cost.least_s is not None:
            text = (
                f"activations cost {cost.again_s + cost.exposed_s:.3g} s a step; nothing that fits "
                f"can cost less than {cost.least_s:.3g} s"
            )
            plan = replace(plan, notes=(*plan.notes, Note(self.name, None, text)))
        if self.compares and any(row.action != KEEP for row in plan.activations):
            plan = replace(plan, kept=self._all_kept(graph, plan))
        return plan

    def _decided(self, values: SavedValues, plan: GraphPlan, budget: int) -> GraphPlan:
        reader = ProblemReader(values, plan)
        found = reader.read(NOMINAL_BUDGET)
        choice = self._as_wished(reader, found, budget)
        if choice is None:
            assert self.around is not None
            found = reader.read(self.around())
            choice = self._chosen(reader, found, budget)
        elif _given_up(choice):  # as the user wished: what that costs depends on the machine
            assert self.around is not None
            found = reader.read(self.around())
            choice = replace(choice, answer=answer(found.problem, choice.actions))
        least_s = choice.least_seconds if choice.fits else None
        cost = ActivationCost(choice.answer.again_s, choice.answer.exposed_s, least_s)
        return replace(plan, activations=_activations(reader, found, choice), activation_cost=cost)

    def _as_wished(self, reader: ProblemReader, found: GraphProblem, budget: int) -> Choice | None:
        """Everything saved, but for what the user asked for.

        None, if there is no room for that and for twice the slots that are needed at once.
        """
        problem = replace(found.problem, budget=budget)
        choice = as_wished(replace(problem, window=0))
        if any(v.wish in MOVED for v in problem.values):
            return None  # where to is not known yet
        estimate = max(choice.answer.held) + 2 * max(choice.answer.slots)
        if estimate < SURE_PART * budget:
            return choice
        if estimate * SURE_PART > budget:
            return None
        held, window = self._needed(reader, found, choice)
        return choice if held + 2 * window <= budget else None

    def _chosen(self, reader: ProblemReader, found: GraphProblem, budget: int) -> Choice:
        """The first choice that fits as it is counted after all passes; else the one that needs
        least."""
        problem = replace(found.problem, budget=budget)
        ways = [
            way for way in ACTIONS[self.activations] if way == RECOMPUTE or way in problem.tiers
        ]
        margin, best = 0, None
        for _ in range(ROUNDS):
            choice = self.solved.split(problem, found.streams, ways, margin)
            estimate = max(choice.answer.held) + max(choice.answer.slots)
            if choice.fits and estimate < SURE_PART * budget:
                return choice
            over = sum(self._needed(reader, found, choice)) - budget
            if best is None or over < best[0]:
                best = (over, choice)
            if over <= 0 or not choice.fits:
                break
            margin += over + budget // SLACK
        assert best is not None, "one choice at least is tried out"
        return best[1]

    def _needed(
        self, reader: ProblemReader, found: GraphProblem, choice: Choice
    ) -> tuple[int, int]:
        """Bytes of the device that a choice needs: live bytes outside the arena, and the smallest
        window."""
        activations = _activations(reader, found, choice)
        plan = replace(reader.plan, budget_bytes=None, activations=activations)
        return self.trial.on_copy(reader.values.graph, plan).needed()

    def _all_kept(self, graph: fx.Graph, plan: GraphPlan) -> MemoryCurve:
        """The memory curve with everything saved."""
        plan = replace(plan, budget_bytes=None, activations=())
        return self.trial.on_copy(graph, plan).held.as_curve()


def _given_up(choice: Choice) -> bool:
    """Whether anything that backward needs is not saved."""
    rows = zip(choice.actions, choice.answer.wanted, strict=True)
    return any(want is not None and action != KEEP for action, want in rows)


def _left_at(reader: ProblemReader, found: GraphProblem, choice: Choice) -> dict[int, int]:
    """Number of each value that is offloaded -> position before which its memory is not given back.

    That is when the value will have left, or sooner where more bytes would be live than anywhere
    else.
    """
    away = [
        number
        for number, want in enumerate(choice.answer.wanted)
        if want is not None and choice.actions[number] not in (KEEP, RECOMPUTE)
    ]
    if not away:
        return {}
    (borders, mapping), problem = reader.sunk, found.problem
    held, most = list(choice.answer.held), max(choice.answer.held)
    positions: dict[int, int] = {}
    free_s = 0.0
    for number in away:
        value, root = problem.values[number], mapping[found.roots[number]]
        rate = problem.tiers[choice.actions[number]].leave_s
        starts = borders.after(borders.at(root))
        free_s = max(free_s, found.clock[min(starts, len(found.clock) - 1)]) + value.nbytes * rate
        at = borders.after(value.gone(choice.actions[number]))
        while at < problem.boundary and found.clock[at] < free_s:
            then = borders.after(at)  # memory is given back there at the earliest
            if max(held[at:then]) + value.nbytes > most:
                break
            held[at:then] = [n + value.nbytes for n in held[at:then]]
            at = then
        positions[number] = at
    return positions


def _activations(
    reader: ProblemReader, found: GraphProblem, choice: Choice
) -> tuple[Activation, ...]:
    """What becomes of each value that backward needs, for the dump."""
    rows = []
    problem, left_at = found.problem, _left_at(reader, found, choice)
    for number, value in enumerate(problem.values):
        if choice.answer.wanted[number] is None:
            continue
        action, seconds = choice.actions[number], 0.0
        if action == RECOMPUTE:
            seconds = _share(problem, choice, value) * problem.makers[value.maker].seconds
        elif action != KEEP:
            away = problem.tiers[action]
            seconds = value.nbytes * (away.leave_s + away.back_s) + 2 * away.start_s
        root = found.roots[number]
        rows.append(
            Activation(
                NodeName(root.name),
                name_of(root),
                value.nbytes,
                action,
                seconds,
                _why(reader.values, root, value.wish, action, choice),
                left_at.get(number, 0),
            )
        )
    return tuple(rows)


def _share(problem: Problem, choice: Choice, value: Value) -> float:
    """A value's share of the seconds of its op: results that are recomputed together share them by
    bytes."""
    made = problem.makers[value.maker].makes
    again = [
        problem.values[n].nbytes
        for n in made
        if choice.actions[n] == RECOMPUTE and choice.answer.wanted[n] is not None
    ]
    return value.nbytes / sum(again) if sum(again) else 1 / len(again)


def _why(
    values: SavedValues, root: fx.Node, wish: CheckpointPolicy | None, action: str, choice: Choice
) -> str:
    """Why a value is treated as it is, for people."""
    if root in values.returned:
        return "a result of the graph, which its caller holds"
    if wish is not None and action != KEEP:
        return f"asked for by torch.utils.checkpoint ({wish.name})"
    if action == RECOMPUTE:
        return "making it again costs least per byte where most is held"
    if action != KEEP:
        return "moving it costs least per byte where most is held"
    if not values.may_repeat(root) and not values.may_move(root):
        return "it can neither be made again nor moved"
    if not values.may_repeat(root):
        return "random, or not the same twice: it is not made again, and there is room for it"
    return "there is room for it" if choice.fits else "nothing is gained by giving it up"
