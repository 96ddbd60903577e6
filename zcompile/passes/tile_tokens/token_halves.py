"""How a region is computed over slices of tokens: what each phase reads, makes and gives.

Backward makes again what it needs of forward's hidden values. What enters is there before a phase
begins with its slices; what reads the results waits until they are put together.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import fx

from zcompile.ir import ops
from zcompile.ir.graph import phase_of, positions
from zcompile.ir.saved_values import SavedValues, is_value, storage_bytes
from zcompile.ir.types import Phase
from zcompile.passes.tile_tokens.rules import PRODUCTS, ROWS, SUM, Rule, Tokens, rule_of
from zcompile.passes.tile_tokens.slice_choice import RegionDemand


@dataclass(frozen=True)
class Half:
    """What a region computes in one phase.

    again   nodes of forward that backward computes once more, slice by slice
    nodes   in graph order
    inputs  what comes from outside, and is sliced
    wholes  what comes from outside, and is not: weights, mostly
    rows    results for others that have tokens; put together of all slices
    sums    results for others that are sums over tokens
    start   the node before which all that comes from outside is there
    late    others before that which read results, directly or not; they can wait
    """

    phase: Phase
    again: tuple[fx.Node, ...]
    nodes: tuple[fx.Node, ...]
    inputs: tuple[fx.Node, ...]
    wholes: tuple[fx.Node, ...]
    rows: tuple[fx.Node, ...]
    sums: tuple[fx.Node, ...]
    start: fx.Node
    late: tuple[fx.Node, ...]


class Ruled:
    """A graph, and how its ops run over slices of so many tokens.

    among  nodes that are asked about; None: all
    """

    def __init__(
        self, graph: fx.Graph, tokens: Tokens, among: frozenset[fx.Node] | None = None
    ) -> None:
        self.values, self.where, self.tokens = SavedValues(graph), positions(graph), tokens
        self.rules: dict[fx.Node, Rule] = {}
        values = self.values
        for node in graph.nodes:
            if among is not None and node not in among:
                continue
            if node.op != "call_function" or node in values.gathered or node.target in ops.OURS:
                continue
            rule = rule_of(node, tokens, self.rules)
            if rule is not None and rule.rows.isdisjoint(values.gathered) and self._pure(node):
                self.rules[node] = rule

    def _pure(self, node: fx.Node) -> bool:
        maker = self.values.maker(node)
        return maker is not node or self.values.may_repeat(node)

    def halves(
        self, nodes: frozenset[fx.Node], inside: frozenset[fx.Node]
    ) -> tuple[Half, ...]:  # fmt: skip
        """Forward and backward of a region; none, if it reads what is made of its results."""
        if not nodes <= self.rules.keys():
            return ()
        order = sorted(nodes, key=self.where.__getitem__)
        forward = [n for n in order if phase_of(n) is Phase.FORWARD]
        backward = [n for n in order if phase_of(n) is Phase.BACKWARD]
        again = self._again(forward, backward, inside)
        halves = [self._half(Phase.FORWARD, [], forward, inside)] if forward else []
        halves += [self._half(Phase.BACKWARD, again, backward, inside)] if backward else []
        return tuple(h for h in halves if h is not None) if None not in halves else ()

    def _again(
        self, forward: Sequence[fx.Node], backward: Sequence[fx.Node], inside: frozenset[fx.Node]
    ) -> list[fx.Node]:
        """What backward computes anew: the values inside that it reads, and what they are of."""
        mine, wanted = set(forward), set[fx.Node]()
        queue = list(backward)
        while queue:
            for source in queue.pop().all_input_nodes:
                hidden = not is_value(source) or self.values.root(source) in inside
                if source in mine and source not in wanted and hidden:
                    wanted.add(source)
                    queue.append(source)
        return [n for n in forward if n in wanted]

    def _half(
        self, phase: Phase, again: list[fx.Node], nodes: list[fx.Node], inside: frozenset[fx.Node]
    ) -> Half | None:
        given = self._given([*again, *nodes])
        outer = [n for n in nodes if self._is_result(n, set(nodes), inside)]
        if given is None or not all(self._fits(n, phase) for n in outer):
            return None
        inputs, wholes = given
        start = self._start((*inputs, *wholes), phase)
        late = self._late(outer, start, set(nodes))
        if late & {start, *inputs, *wholes}:
            return None
        rows, sums = ([n for n in outer if self.rules[n].results[0] == kind]
                      for kind in (ROWS, SUM))  # fmt: skip
        return Half(phase, tuple(again), tuple(nodes), tuple(inputs), tuple(wholes), tuple(rows),
                    tuple(sums), start, tuple(sorted(late)))  # fmt: skip

    def _given(
        self, nodes: Sequence[fx.Node]
    ) -> tuple[dict[fx.Node, None], dict[fx.Node, None]] | None:
        """What comes from outside, sliced and whole; None if that cannot be had."""
        mine, inputs, wholes = set(nodes), dict[fx.Node, None](), dict[fx.Node, None]()
        for node in nodes:
            for source in node.all_input_nodes:
                sliced = source in self.rules[node].rows
                if source not in mine:
                    (inputs if sliced else wholes)[source] = None
                elif not sliced or self.rules[source].results[0] == SUM:
                    return None
        return None if any(not is_value(n) for n in inputs) else (inputs, wholes)

    def _fits(self, result: fx.Node, phase: Phase) -> bool:
        """Whether a result can be put together of those of slices."""
        (kind, *_) = self.rules[result].results
        if not is_value(result) or not result.meta["val"].is_contiguous():
            return False
        return kind == ROWS or (kind == SUM and phase is Phase.BACKWARD)

    def _late(self, outer: Sequence[fx.Node], start: fx.Node, mine: set[fx.Node]) -> set[fx.Node]:
        """Nodes before `start` that read results, directly or not."""
        late = set[fx.Node]()
        queue = list(outer)
        while queue:
            for user in queue.pop().users:
                if user not in mine and user not in late and self.where[user] < self.where[start]:
                    late.add(user)
                    queue.append(user)
        return late

    def _is_result(self, node: fx.Node, mine: set[fx.Node], inside: frozenset[fx.Node]) -> bool:
        return any(u not in mine for u in node.users) and (
            is_value(node) and self.values.root(node) not in inside
        )

    def _start(self, given: Sequence[fx.Node], phase: Phase) -> fx.Node:
        nodes: list[fx.Node] = [n for n in self.values.graph.nodes if n.op == "output" or (
            n.op == "call_function" and phase_of(n) is phase)]  # fmt: skip
        last = max((self.where[n] for n in given), default=-1)
        return next(n for n in nodes if self.where[n] > last)

    def demand(
        self, halves: Sequence[Half], inside: frozenset[fx.Node], counts: tuple[int, ...]
    ) -> RegionDemand:
        """Of the half that needs most."""
        most = RegionDemand(0, 0, counts)
        for half in halves:
            whole = {self.values.root(n) for n in (*half.inputs, *half.rows)}
            held = RegionDemand(sum(map(storage_bytes, whole)), self._working(half, inside), counts)
            most = max(most, held, key=lambda demand: demand.held(1))
        least = max(self._at_once(node, inside) for half in halves for node in half.nodes)
        return replace(most, least=least)

    def _at_once(self, node: fx.Node, inside: frozenset[fx.Node]) -> int:
        """Bytes of values inside that an op reads and makes; a product may be cut further."""
        if node.target in PRODUCTS:
            return 0
        roots = {self.values.root(n) for n in (node, *node.all_input_nodes)}
        return sum(storage_bytes(root) for root in roots & inside)

    def _working(self, half: Half, inside: frozenset[fx.Node]) -> int:
        """The most bytes of values inside at once."""
        order = (*half.again, *half.nodes)
        last: dict[fx.Node, int] = {}
        for at, node in enumerate(order):
            for n in (node, *node.all_input_nodes):
                if self.values.root(n) in inside:
                    last[self.values.root(n)] = at
        now = most = 0
        for at, node in enumerate(order):
            if node in inside:
                now += storage_bytes(node)
                most = max(most, now)
            now -= sum(storage_bytes(root) for root, end in last.items() if end == at)
        return most
