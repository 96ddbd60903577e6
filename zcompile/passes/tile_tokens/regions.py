"""Finds regions of a graph that treat every token by itself, around values much wider than their
borders.

A region grows from the widest value on, through every value more than half as wide: from a product
that makes the hidden values of a block, over its nonlinearity, to the product that takes them back;
in backward, from the gradient that comes in to those that leave. Narrow values are its border. So
few weights are read in it, which must be there for all slices.

Backward recomputes the hidden values of forward that it needs. Operands from outside are there
before a phase begins with its slices; readers of the results wait until those are put together.

The file has three parts: how many slices a region takes (pure, with a table of cases), what a
region computes in each phase, and the search for regions.
"""

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from torch import fx

from zcompile.ir import ops
from zcompile.ir.graph import SIZED_VIEWS, module_of, phase_of, positions, reached_from
from zcompile.ir.saved_values import SavedValues, is_value, storage_bytes
from zcompile.ir.torch_compat import wish_of
from zcompile.ir.types import NEVER_RECOMPUTED, NodeName, Phase
from zcompile.memory.live_bytes import live_bytes
from zcompile.passes.tile_tokens.rules import (
    PRODUCTS,
    ROWS,
    SUM,
    Rule,
    Tokens,
    rule_of,
)

MOST_SLICES = 16
"""Most slices of a region. With so many, a block's hidden values are less than the values that
enter and leave it, which are there whole; and products of few rows run far under a device's peak.
"""


@dataclass(frozen=True)
class RegionDemand:
    """Bytes that a region has live at once, whatever becomes of all other values.

    whole   of values that enter and leave it
    sliced  of values made inside, with one slice of all tokens
    counts  numbers of equal slices that its tokens permit, ascending, from 1 on
    least   of values made inside, with one slice of all tokens, that one op reads and makes
    """

    whole: int
    sliced: int
    counts: tuple[int, ...] = (1,)
    least: int = 0

    def held(self, slices: int) -> int:
        """Bytes live at once with so many slices."""
        return self.whole + -(-self.sliced // slices)


def counts_of(count: int, split: tuple[int, int] | None) -> tuple[int, ...]:
    """Numbers of equal slices, each at least twice the one before.

    Where tokens are (batch, length), slices are whole sequences or equal parts of each sequence.
    """

    def permits(slices: int) -> bool:
        if count % slices:
            return False
        if split is None or not split[0] % slices:
            return True
        return not slices % split[0] and not split[1] % (slices // split[0])

    found = [1]
    for slices in range(2, min(count, MOST_SLICES) + 1):
        if slices >= 2 * found[-1] and permits(slices):
            found.append(slices)
    return tuple(found)


def choose_slices(demands: Sequence[RegionDemand], room: int) -> tuple[int, ...]:
    """For each region the fewest slices with which it fits `room` by itself; the most, if none
    does."""
    return tuple(
        next((n for n in demand.counts if demand.held(n) <= room), demand.counts[-1])
        for demand in demands
    )


def more_slices(demands: Sequence[RegionDemand], slices: Sequence[int]) -> tuple[int, ...] | None:
    """The next candidate: more slices of the regions with most live bytes; None if one of these
    cannot be cut further."""
    most = max((d.held(n) for d, n in zip(demands, slices, strict=True)), default=0)
    made = []
    for demand, count in zip(demands, slices, strict=True):
        if demand.held(count) == most:
            more = [n for n in demand.counts if n > count]
            if not more:
                return None
            count = more[0]
        made.append(count)
    return tuple(made) if made else None


def slice_candidates(demands: Sequence[RegionDemand], room: int) -> Iterator[tuple[int, ...]]:
    """Numbers of slices to try, coarsest first.

    Nothing sliced, if that may fit; the fewest slices with which each region fits by itself; then
    ever more of the regions with most live bytes.
    """
    whole = (1,) * len(demands)
    if all(demand.least <= room for demand in demands):
        yield whole
    tried: tuple[int, ...] | None = choose_slices(demands, room)
    if tried == whole:
        tried = more_slices(demands, whole)
    while tried is not None:
        yield tried
        tried = more_slices(demands, tried)


@dataclass(frozen=True)
class RegionPhase:
    """What a region computes in one phase.

    recomputed  nodes of forward that backward computes again, slice by slice
    nodes       in graph order
    inputs      values from outside that are sliced
    wholes      values from outside that are not: weights, mostly
    rows        results [tokens, ..] for others; those of slices are put together
    sums        results for others that are sums over tokens
    start       the node before which all values from outside are there
    deferred    other nodes before `start` that read results, directly or not; they can wait
    """

    phase: Phase
    recomputed: tuple[fx.Node, ...]
    nodes: tuple[fx.Node, ...]
    inputs: tuple[fx.Node, ...]
    wholes: tuple[fx.Node, ...]
    rows: tuple[fx.Node, ...]
    sums: tuple[fx.Node, ...]
    start: fx.Node
    deferred: tuple[fx.Node, ...]


class RowwiseAnalysis:
    """How the ops of a graph run over slices of so many tokens.

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
        """Whether a node gives the same again when it is computed again."""
        maker = self.values.maker(node)
        return maker is not node or self.values.may_repeat(node)

    def phases(
        self, nodes: frozenset[fx.Node], inside: frozenset[fx.Node]
    ) -> tuple[RegionPhase, ...]:
        """Forward and backward of a region; none, if the region reads what is computed from its
        results.

        inside  storages that nothing outside reads
        """
        if not nodes <= self.rules.keys():
            return ()
        order = sorted(nodes, key=self.where.__getitem__)
        forward = [n for n in order if phase_of(n) is Phase.FORWARD]
        backward = [n for n in order if phase_of(n) is Phase.BACKWARD]
        recomputed = self._recomputed(forward, backward, inside)
        phases = [self._phase(Phase.FORWARD, [], forward, inside)] if forward else []
        phases += [self._phase(Phase.BACKWARD, recomputed, backward, inside)] if backward else []
        return tuple(h for h in phases if h is not None) if None not in phases else ()

    def _recomputed(
        self, forward: Sequence[fx.Node], backward: Sequence[fx.Node], inside: frozenset[fx.Node]
    ) -> list[fx.Node]:
        """What backward computes anew: the values inside that it reads, and what they are of."""
        mine = set(forward)

        def hidden(source: fx.Node) -> bool:
            return not is_value(source) or self.values.root(source) in inside

        wanted = set(
            reached_from(
                backward, lambda n: [s for s in n.all_input_nodes if s in mine and hidden(s)]
            )
        )
        return [n for n in forward if n in wanted]

    def _phase(
        self,
        phase: Phase,
        recomputed: list[fx.Node],
        nodes: list[fx.Node],
        inside: frozenset[fx.Node],
    ) -> RegionPhase | None:
        """One phase of a region; None, if it cannot be sliced."""
        given = self._given([*recomputed, *nodes])
        outer = [n for n in nodes if self._is_result(n, set(nodes), inside)]
        if given is None or not all(self._fits(n, phase) for n in outer):
            return None
        inputs, wholes = given
        start = self._start((*inputs, *wholes), phase)
        deferred = self._deferrable(outer, start, set(nodes))
        if deferred & {start, *inputs, *wholes}:
            return None
        rows, sums = (
            [n for n in outer if self.rules[n].results[0] == kind] for kind in (ROWS, SUM)
        )
        return RegionPhase(
            phase,
            tuple(recomputed),
            tuple(nodes),
            tuple(inputs),
            tuple(wholes),
            tuple(rows),
            tuple(sums),
            start,
            tuple(sorted(deferred)),
        )

    def _given(
        self, nodes: Sequence[fx.Node]
    ) -> tuple[dict[fx.Node, None], dict[fx.Node, None]] | None:
        """Values from outside: (sliced, whole); None if a value made inside would be needed
        whole."""
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
        """Whether a result can be put together from those of slices."""
        (kind, *_) = self.rules[result].results
        if not is_value(result) or not result.meta["val"].is_contiguous():
            return False
        return kind == ROWS or (kind == SUM and phase is Phase.BACKWARD)

    def _deferrable(
        self, outer: Sequence[fx.Node], start: fx.Node, mine: set[fx.Node]
    ) -> set[fx.Node]:
        """Nodes before `start` that read results, directly or not."""

        def readers(node: fx.Node) -> list[fx.Node]:
            before = self.where[start]
            return [u for u in node.users if u not in mine and self.where[u] < before]

        return set(reached_from(outer, readers)) - mine

    def _is_result(self, node: fx.Node, mine: set[fx.Node], inside: frozenset[fx.Node]) -> bool:
        """Whether others read a node of the region."""
        return any(u not in mine for u in node.users) and (
            is_value(node) and self.values.root(node) not in inside
        )

    def _start(self, given: Sequence[fx.Node], phase: Phase) -> fx.Node:
        """The first node of a phase before which all of `given` is there."""
        nodes = self._ops[phase]
        last = max((self.where[n] for n in given), default=-1)
        return nodes[bisect_right(nodes, last, key=self.where.__getitem__)]

    @cached_property
    def _ops(self) -> Mapping[Phase, Sequence[fx.Node]]:
        """The ops of each phase and the output, in their order."""
        nodes = list(self.values.graph.nodes)
        calls = [n for n in nodes if n.op == "call_function"]
        return {
            phase: [*(n for n in calls if phase_of(n) is phase), nodes[-1]]
            for phase in (Phase.FORWARD, Phase.BACKWARD)
        }

    def demand(
        self, phases: Sequence[RegionPhase], inside: frozenset[fx.Node], counts: tuple[int, ...]
    ) -> RegionDemand:
        """Bytes that a region needs in the phase that needs most."""
        most = RegionDemand(0, 0, counts)
        for part in phases:
            whole = {self.values.root(n) for n in (*part.inputs, *part.rows)}
            held = RegionDemand(
                sum(map(storage_bytes, whole)), self._inside_peak(part, inside), counts
            )
            most = max(most, held, key=lambda demand: demand.held(1))
        least = max(self._op_bytes(node, inside) for part in phases for node in part.nodes)
        return replace(most, least=least)

    def _op_bytes(self, node: fx.Node, inside: frozenset[fx.Node]) -> int:
        """Bytes of values inside that an op reads and makes; 0 for a product, which may be cut
        further."""
        if node.target in PRODUCTS:
            return 0
        roots = {self.values.root(n) for n in (node, *node.all_input_nodes)}
        return sum(storage_bytes(root) for root in roots & inside)

    def _inside_peak(self, part: RegionPhase, inside: frozenset[fx.Node]) -> int:
        """Peak bytes of values inside, during one phase over all tokens."""
        order = (*part.recomputed, *part.nodes)
        last: dict[fx.Node, int] = {}
        for at, node in enumerate(order):
            roots = {self.values.root(n) for n in (node, *node.all_input_nodes)}
            last |= dict.fromkeys(roots & inside, at)
        lives = [(at, last[n], storage_bytes(n)) for at, n in enumerate(order) if n in inside]
        return max(live_bytes(lives, len(order)), default=0)


WIDEST_OVER = 2
"""A value belongs to a region if it is wider than one part in so many of the region's widest
value."""


@dataclass(frozen=True)
class Region:
    """A part of a graph that can run over slices of tokens.

    name    for people: the module that its widest value is of
    nodes   all that it computes, in both phases
    inside  storages that nothing outside reads
    demand  bytes that it needs, and how it can be cut
    """

    name: str
    tokens: Tokens
    nodes: frozenset[fx.Node]
    inside: frozenset[fx.Node]
    demand: RegionDemand

    @property
    def first(self) -> NodeName:
        """Its first node, by which a plan names it."""
        return NodeName(min(self.nodes).name)

    def in_copy(self, mapping: Mapping[fx.Node, fx.Node]) -> "Region":
        """The same region in a copy of the graph.

        mapping  old node -> new one
        """
        nodes, inside = (frozenset(mapping[n] for n in part) for part in (self.nodes, self.inside))
        return replace(self, nodes=nodes, inside=inside)


def regions_of(graph: fx.Graph) -> list[Region]:
    """All regions that have more live bytes inside than enter and leave them, in graph order."""
    found, taken = [], set[fx.Node]()
    for tokens in tokens_of(graph):
        counts = counts_of(tokens.count, tokens.split)
        if len(counts) == 1:
            continue
        search = _RegionSearch(graph, tokens)
        for nodes, inside in search.components():
            if taken.isdisjoint(nodes) and (phases := search.phases(nodes, inside)):
                demand = search.demand(phases, inside, counts)
                if demand.sliced > demand.whole:
                    found.append(Region(_name(inside), tokens, nodes, inside, demand))
                    taken |= nodes
    return sorted(found, key=lambda region: min(region.nodes))


def tokens_of(graph: fx.Graph) -> list[Tokens]:
    """What tokens may be in a graph: the most frequent number of rows of products first."""
    return [Tokens(count, _split(graph, count)) for count in _counts(graph)]


def _name(inside: frozenset[fx.Node]) -> str:
    """Module of the widest value."""
    widest = max(sorted(inside), key=storage_bytes)
    return module_of(widest) or f"%{widest.name}"


def phases_of(graph: fx.Graph, region: Region) -> tuple[RegionPhase, ...]:
    """The phases of a region as the graph is now; none, if it cannot be sliced any more."""
    return RowwiseAnalysis(graph, region.tokens, region.nodes).phases(region.nodes, region.inside)


def _counts(graph: fx.Graph) -> list[int]:
    """Numbers of rows that products of forward have, the most frequent first."""
    seen: dict[int, int] = {}
    for node in graph.nodes:
        if node.target in PRODUCTS:
            rows = node.meta["val"].shape[0]
            if isinstance(rows, int) and rows > 1 and phase_of(node) is Phase.FORWARD:
                seen[rows] = seen.get(rows, 0) + 1
    return sorted(seen, key=lambda rows: -seen[rows])


def _split(graph: fx.Graph, count: int) -> tuple[int, int] | None:
    """(batch, length) of the first view that flattens these into `count` tokens, or back."""
    for node in graph.nodes:
        if node.target not in SIZED_VIEWS or not isinstance(node.args[0], fx.Node):
            continue
        pair = [n.meta["val"].shape for n in (node.args[0], node)]
        for flat, deep in (pair, pair[::-1]):
            if (
                len(flat) == 2
                and len(deep) >= 3
                and flat[0] == count
                and deep[0] != count
                and deep[0] * deep[1] == count
            ):
                return int(deep[0]), int(deep[1])
    return None


class _RegionSearch(RowwiseAnalysis):
    """Finds regions over one number of tokens."""

    @cached_property
    def families(self) -> dict[fx.Node, list[fx.Node]]:
        """Storage -> the values over it."""
        found: dict[fx.Node, list[fx.Node]] = {}
        for node in self.values.graph.nodes:
            if node.op == "call_function":
                found.setdefault(self.values.root(node), []).append(node)
        return found

    def _may_be_sliced(self, root: fx.Node) -> bool:
        """Whether all readers of a storage [tokens, ..] read it in slices."""
        rule = self.rules.get(root)
        if rule is None or rule.results[0] != ROWS or not is_value(root):
            return False
        if any(wish_of(n) in NEVER_RECOMPUTED for n in (root, self.values.maker(root))):
            return False
        return all(
            member in self.rules and user in self.rules and member in self.rules[user].rows
            for member in self.families[root]
            for user in member.users
        )

    def components(self) -> Iterator[tuple[frozenset[fx.Node], frozenset[fx.Node]]]:
        """The nodes of each region and the storages inside, the widest first."""
        free = {root: storage_bytes(root) for root in self.families if self._may_be_sliced(root)}
        for widest in sorted(free, key=lambda root: -free[root]):
            if widest not in free:
                continue
            least, queue = free.pop(widest) // WIDEST_OVER, [widest]
            nodes, inside = set[fx.Node](), set[fx.Node]()
            while queue:
                root = queue.pop()
                inside.add(root)
                members = self.families[root]
                near = {self.values.maker(root), *members, *(u for m in members for u in m.users)}
                near |= {user for node in near for user in node.users if self._picks(user, node)}
                nodes |= near
                for other in (
                    {self.values.root(n) for node in near for n in (node, *self.rules[node].rows)}
                    if near <= self.rules.keys()
                    else ()
                ):
                    if other in free and free[other] > least:
                        del free[other]
                        queue.append(other)
            if nodes <= self.rules.keys():
                yield frozenset(nodes), frozenset(inside)

    def _picks(self, user: fx.Node, node: fx.Node) -> bool:
        """Whether `user` is one of several results of `node`."""
        return not is_value(node) and node in user.all_input_nodes
