"""Reads the choice of saved values (`problem.py`) off a joint graph."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property

from torch import fx

from zcompile.ir import ops
from zcompile.ir.copies import copy_graph
from zcompile.ir.graph import aliases_of, find, is_compute, phase_of, views_and_casts_of
from zcompile.ir.plan import GraphPlan
from zcompile.ir.saved_values import SavedValues, is_value, storage_bytes
from zcompile.ir.torch_compat import gradient_of, is_tangent, keeps_tangents, wish_of
from zcompile.ir.types import CheckpointPolicy, Layout, NodeName, ParamSpec, Phase, Work, aligned
from zcompile.machine.cost import predicted_seconds
from zcompile.machine.model import Compute, Machine
from zcompile.passes.plan_activations.problem import Maker, OffloadTier, Problem, Value, Weight
from zcompile.passes.plan_activations.rewrite import Borders, sink_views
from zcompile.passes.plan_activations.solve import UPDATED, StreamingLoad

LINKS = {"host": (("d2h",), ("h2d",)), "disk": (("d2h", "disk_write"), ("disk_read", "h2d"))}
"""Tier -> the links on the way there and back."""


@dataclass(frozen=True)
class ActivationBudget:
    """The machine that activations are planned for.

    machine  rates of compute and links
    rooms    tier -> bytes that activations may take there
    beside   compute runs beside the host, which starts transfers meanwhile (CUDA)
    """

    machine: Machine
    rooms: Mapping[str, int]
    beside: bool = False


@dataclass(frozen=True)
class GraphProblem:
    """The problem of a graph, and what belongs to it.

    problem  with a budget of nothing yet
    roots    the node of each of its values
    streams  seconds and bytes of weights and gradients
    clock    seconds of compute before each node
    """

    problem: Problem
    roots: tuple[fx.Node, ...]
    streams: StreamingLoad
    clock: tuple[float, ...]


class ProblemReader:
    """Reads the problem of a joint graph before its parameters are gathered: once what the graph
    says, and for each machine what that takes there."""

    def __init__(self, values: SavedValues, plan: GraphPlan) -> None:
        self.values, self.plan = values, plan
        self.nodes: tuple[fx.Node, ...] = tuple(values.graph.nodes)
        self.where = {node: at for at, node in enumerate(self.nodes)}
        backward = (at for at, node in enumerate(self.nodes) if values.is_backward(node))
        self.boundary = next(backward, len(self.nodes) - 1)
        self.gathers, self.gather_of = _gathers(values.graph)
        self.gathered: list[list[fx.Node]] = [[] for _ in self.gathers]
        """Of each group of gathers: what they bring, its views and casts."""
        for member, group in self.gather_of.items():
            self.gathered[group].append(member)
        self.roots: list[fx.Node] = []
        self.index: dict[fx.Node, int] = {}
        self.borders = Borders(values.graph)
        # Storages of forward, with the ops that make them.
        self.made: list[Value] = []
        self.makers: list[tuple[Work, Maker]] = []
        for node in self.nodes[: self.boundary]:
            if self._makes(node):
                maker, results = self._maker(node, len(self.makers), len(self.made))
                self.makers.append((values.work(node), maker))
                self.made += results
        self.weights = tuple(self._weight(gathers) for gathers in self.gathers)
        self.other = self._other()

    def read(self, around: ActivationBudget) -> GraphProblem:
        """The problem on one machine."""
        machine = around.machine
        makers = tuple(
            replace(maker, seconds=predicted_seconds(work, machine.compute))
            for work, maker in self.makers
        )
        problem = Problem(
            tuple(self.made),
            makers,
            self.weights,
            self.other,
            self.boundary,
            {tier: _away(machine, tier, room) for tier, room in around.rooms.items()},
            (0.0, 0.0),
            0,
        )
        # Seconds of compute, and what links could carry meanwhile.
        clock = tuple(self._clock(machine.compute))
        compute = (clock[self.boundary], clock[-1] - clock[self.boundary])
        weights_s, weight_bytes = self._traffic(machine)
        beside = around.beside
        streams = StreamingLoad(
            compute,
            weights_s,
            weight_bytes,
            0 if beside else len(self.gathers),
            self._updates(machine) if beside else (0.0, 0.0),
            beside and _apart(machine),
        )
        problem = replace(problem, slack_s=streams.slack_s(0))
        return GraphProblem(problem, tuple(self.roots), streams, clock)

    @cached_property
    def sunk(self) -> tuple[Borders, Mapping[fx.Node, fx.Node]]:
        """Borders of the graph once its views are sunk, and each node in the copy that they are
        of: the same for every choice."""
        copy, mapping = copy_graph(self.values.graph)
        sink_views(copy)
        return Borders(copy), mapping

    def _makes(self, node: fx.Node) -> bool:
        values = self.values
        if not is_compute(node) or not values.is_forward(node):
            return False
        return self._results(node) != []

    def _results(self, node: fx.Node) -> list[fx.Node]:
        """The storages that an op makes; none for a view, or a node that picks a result of
        another."""
        values = self.values
        if is_value(node):
            return [node] if values.root(node) is node and values.maker(node) is node else []
        parts = [user for user in node.users if is_value(user) and values.root(user) is user]
        return [user for user in parts if values.maker(user) is node]

    def _maker(self, node: fx.Node, number: int, first: int) -> tuple[Maker, list[Value]]:
        """An op, whose seconds are not known yet, and the values that it makes."""
        results = self._results(node)
        reads, weights = [], []
        for source in node.all_input_nodes:
            if source in self.gather_of:
                weights.append(self.gather_of[source])
            elif (root := self.values.root(source)) in self.index:
                reads.append(self.index[root])
        made = [self._value(node, root, number) for root in results]
        for offset, root in enumerate(results):
            self.index[root] = first + offset
            self.roots.append(root)
        maker = Maker(
            0.0,
            tuple(dict.fromkeys(reads)),
            tuple(range(first, first + len(results))),
            tuple(dict.fromkeys(weights)),
            self.values.may_repeat(results[0]),
        )
        return maker, made

    def _value(self, node: fx.Node, root: fx.Node, number: int) -> Value:
        at = self.where[node]
        aliases = set(aliases_of(root))  # a view is taken where it is read, and reads nothing
        read_at = sorted(
            {
                self.where[user]
                for alias in aliases
                for user in alias.users
                if user.op != "output" and user not in aliases
            }
        )
        forward = [when for when in read_at if when < self.boundary]
        held = root in self.values.returned
        return Value(
            root.name,
            storage_bytes(root),
            at,
            max(forward, default=at),
            tuple(when for when in read_at if when >= self.boundary),
            number,
            self.values.may_move(root),
            CheckpointPolicy.MUST_SAVE if held else wish_of(root) or wish_of(node),
            self.borders.after(max(forward, default=at)) - 1,
        )

    def _weight(self, gathers: list[fx.Node]) -> Weight:
        family = {*gathers, *self.gathered[self.gather_of[gathers[0]]]}
        read_at = sorted(
            {
                self.where[user]
                for n in family
                for user in n.users
                if user not in family and user.op != "output"
            }
        )
        nbytes = aligned(Layout.of(gathers[0].meta["val"]).nbytes)
        early = tuple(at for at in read_at if at < self.boundary)
        return Weight(nbytes, early, tuple(at for at in read_at if at >= self.boundary))

    def _other(self) -> list[int]:
        """Bytes at each time of values that forward does not make: gradients, mostly."""
        curve = [0] * (len(self.nodes) + 1)
        sinks = self._sinks()
        for node in self.nodes:
            for root, first in self._late(node):
                last = max(
                    (
                        self.where[user]
                        for alias in aliases_of(root)
                        for user in (alias, *alias.users)
                    ),
                    default=first,
                )
                if is_tangent(root) and keeps_tangents():
                    last = len(self.nodes) - 1
                if root in sinks and last == len(self.nodes) - 1:
                    last = sinks[root]
                nbytes = storage_bytes(root)
                curve[first] += nbytes
                curve[max(first, last) + 1] -= nbytes
        total, sums = 0, []
        for change in curve[:-1]:
            total += change
            sums.append(total)
        return sums

    def _late(self, node: fx.Node) -> list[tuple[fx.Node, int]]:
        """The storages that a node of backward makes, each with its time; of a tangent, at once."""
        if node.op == "placeholder":
            return [(node, self.boundary)] if is_tangent(node) and is_value(node) else []
        if node in self.values.gathered or not is_compute(node):
            return []
        if phase_of(node) is not Phase.BACKWARD:
            return []
        return [(root, self.where[node]) for root in self._results(node)]

    def _sinks(self) -> dict[fx.Node, int]:
        """Storage of a gradient that is sent home -> time until which it is live.

        That is until the next but one is made, as long as it may be in flight.
        """
        output = self.nodes[-1]
        results = output.args[0] if isinstance(output.args[0], list | tuple) else ()
        descs = output.meta.get("desc") or ()
        found = [
            self.values.root(result)
            for result, desc in zip(results, descs, strict=False)
            if isinstance(result, fx.Node) and gradient_of(desc) is not None
        ]
        late = sorted({root for root in found if root in self.where}, key=self.where.__getitem__)
        times = [self.where[root] for root in late]
        return {root: times[min(n + 2, len(times) - 1)] for n, root in enumerate(late)}

    def _traffic(self, machine: Machine) -> tuple[tuple[float, float], int]:
        """Seconds of weights on the link that takes longest, in each phase; bytes of them."""
        seconds, total = 0.0, 0
        for gathers in self.gathers:
            nbytes = Layout.of(gathers[0].meta["val"]).nbytes
            total += nbytes
            seconds += nbytes * self._pace(machine, gathers, back=True)
        return (seconds, seconds), total

    def _updates(self, machine: Machine) -> tuple[float, float]:
        """Seconds of the links to the device and off it for updates that wait for the forward
        (`planner/late_step.py`): states come, and what is written leaves. Gradients are taken to
        have stayed."""
        to = off = 0.0
        for gathers in self.gathers:
            if self._spec(gathers).sink:
                nbytes = Layout.of(gathers[0].meta["val"]).nbytes
                to += (UPDATED - 1) * nbytes * self._pace(machine, gathers, back=True)
                off += UPDATED * nbytes * self._pace(machine, gathers, back=False)
        return to, off

    def _spec(self, gathers: list[fx.Node]) -> ParamSpec:
        (handle, *_) = gathers[0].all_input_nodes
        return self.plan.params[NodeName(handle.name)]

    def _pace(self, machine: Machine, gathers: list[fx.Node], back: bool) -> float:
        """Seconds per byte of a parameter, on the link that takes longest: on the way back to the
        device, or away from it."""
        links = machine.links
        away, home = LINKS["disk" if self._spec(gathers).home == "disk" else "host"]
        return max(
            (1 / links[w].bytes_per_s for w in (home if back else away) if w in links), default=0.0
        )

    def _clock(self, compute: Compute) -> Iterator[float]:
        """Seconds of compute before each node."""
        now = 0.0
        for node in self.nodes:
            yield now
            if is_compute(node):
                now += predicted_seconds(self.values.work(node), compute)


def _apart(machine: Machine) -> bool:
    """Whether the links to the device and off it carry at once."""
    links = machine.links
    return {"h2d", "d2h"} <= links.keys() and links["h2d"].lane != links["d2h"].lane


def _away(machine: Machine, tier: str, room: int) -> OffloadTier:
    """Seconds per byte and room of a tier."""
    links = machine.links
    out, back = ([links[name] for name in names if name in links] for names in LINKS[tier])
    start = sum(link.latency_s for link in (*out, *back))
    leave_s, back_s = (
        max((1 / link.bytes_per_s for link in ways), default=0.0) for ways in (out, back)
    )
    return OffloadTier(leave_s, back_s, room, start)


def _gathers(graph: fx.Graph) -> tuple[list[list[fx.Node]], dict[fx.Node, int]]:
    """Groups of gathers that will be merged, and the group of every gathered value."""
    groups: dict[object, list[fx.Node]] = {}
    for gather in find(graph, ops.gather):
        groups.setdefault(tuple(str(argument) for argument in gather.args), []).append(gather)
    numbers: dict[fx.Node, int] = {}
    for number, gathers in enumerate(groups.values()):
        for gather in gathers:
            for member in views_and_casts_of(gather):
                numbers[member] = number
    return list(groups.values()), numbers
