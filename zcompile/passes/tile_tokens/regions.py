"""Regions that treat every token by itself, around values much wider than what enters and leaves.

A region grows from the widest value on, through every value more than half as wide: from a product
that makes the hidden values of a block, over its nonlinearity, to the product that takes them back;
in backward, from the gradient that comes in to those that leave. What is narrow is its border. So
few weights are read in it, which must be there for all slices.

How a region is computed over slices of tokens: what each phase reads, makes and gives.

Backward makes again what it needs of forward's hidden values. What enters is there before a phase
begins with its slices; what reads the results waits until they are put together.

Into how many slices of tokens a region is cut: pure, with a table of cases.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from torch import fx

from zcompile.ir import ops
from zcompile.ir.graph import module_of, phase_of, positions, reached_from
from zcompile.ir.saved_values import SavedValues, is_value, storage_bytes
from zcompile.ir.torch_compat import wish_of
from zcompile.ir.types import NEVER_RECOMPUTED, Phase
from zcompile.passes.tile_tokens.rules import PRODUCTS, ROWS, SUM, VIEWS, Rule, Tokens, rule_of

MOST_SLICES = 16
"""A block's hidden values in so many slices are less than what enters and leaves it, which is there
whole; and products of few rows run far under a device's peak."""


@dataclass(frozen=True)
class RegionDemand:
    """Bytes that a region holds at once, whatever becomes of all other values.

    whole   of what enters and leaves it
    sliced  of what is made inside, in one slice of all tokens
    counts  numbers of equal slices that its tokens permit, ascending, from 1 on
    least   of what is made inside, in one slice of all tokens, that one op reads and makes
    """

    whole: int
    sliced: int
    counts: tuple[int, ...] = (1,)
    least: int = 0

    def held(self, slices: int) -> int:
        return self.whole + -(-self.sliced // slices)


def counts_of(count: int, split: tuple[int, int] | None) -> tuple[int, ...]:
    """Numbers of equal slices, each at least twice the one before; where tokens come as batch and
    length, of whole sequences or of equal parts of each."""

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
    """Of each region the fewest slices with which it fits `room` alone; the most, if none does."""
    return tuple(
        next((n for n in demand.counts if demand.held(n) <= room), demand.counts[-1])
        for demand in demands
    )


def finer(demands: Sequence[RegionDemand], slices: Sequence[int]) -> tuple[int, ...] | None:
    """One step on: those that hold most, and all that hold as much, in more slices; None if one
    of these cannot be cut further."""
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


def ways_to_slice(demands: Sequence[RegionDemand], room: int) -> Iterator[tuple[int, ...]]:
    """Nothing sliced, if that may fit; the fewest slices with which each region fits alone; then
    ever more of those that hold most."""
    whole = (1,) * len(demands)
    if all(demand.least <= room for demand in demands):
        yield whole
    tried: tuple[int, ...] | None = choose_slices(demands, room)
    if tried == whole:
        tried = finer(demands, whole)
    while tried is not None:
        yield tried
        tried = finer(demands, tried)


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

    def halves(self, nodes: frozenset[fx.Node], inside: frozenset[fx.Node]) -> tuple[Half, ...]:
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
        mine = set(forward)

        def hidden(source: fx.Node) -> bool:
            return not is_value(source) or self.values.root(source) in inside

        wanted = set(
            reached_from(
                backward, lambda n: [s for s in n.all_input_nodes if s in mine and hidden(s)]
            )
        )
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
        rows, sums = (
            [n for n in outer if self.rules[n].results[0] == kind] for kind in (ROWS, SUM)
        )
        return Half(
            phase,
            tuple(again),
            tuple(nodes),
            tuple(inputs),
            tuple(wholes),
            tuple(rows),
            tuple(sums),
            start,
            tuple(sorted(late)),
        )

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

        def readers(node: fx.Node) -> list[fx.Node]:
            before = self.where[start]
            return [u for u in node.users if u not in mine and self.where[u] < before]

        return set(reached_from(outer, readers)) - mine

    def _is_result(self, node: fx.Node, mine: set[fx.Node], inside: frozenset[fx.Node]) -> bool:
        return any(u not in mine for u in node.users) and (
            is_value(node) and self.values.root(node) not in inside
        )

    def _start(self, given: Sequence[fx.Node], phase: Phase) -> fx.Node:
        nodes: list[fx.Node] = [
            n
            for n in self.values.graph.nodes
            if n.op == "output" or (n.op == "call_function" and phase_of(n) is phase)
        ]
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


WIDE = 2
"""A value belongs to a region if it is wider than one part in so many of its widest."""


@dataclass(frozen=True)
class Region:
    """name   for people: the module that its widest value is of
    nodes   all that it computes, of both phases
    inside  storages that nothing outside reads
    demand  what it needs, and how it can be cut
    """

    name: str
    tokens: Tokens
    nodes: frozenset[fx.Node]
    inside: frozenset[fx.Node]
    demand: RegionDemand

    def there(self, mapping: Mapping[fx.Node, fx.Node]) -> "Region":
        """The same in a copy of the graph. mapping  of its nodes"""
        nodes, inside = (frozenset(mapping[n] for n in part) for part in (self.nodes, self.inside))
        return replace(self, nodes=nodes, inside=inside)


def regions_of(graph: fx.Graph) -> list[Region]:
    """All regions that hold more inside than enters and leaves them, in graph order."""
    found, taken = [], set[fx.Node]()
    for tokens in tokens_of(graph):
        counts = counts_of(tokens.count, tokens.split)
        if len(counts) == 1:
            continue
        search = _Search(graph, tokens)
        for nodes, inside in search.components():
            if taken.isdisjoint(nodes) and (halves := search.halves(nodes, inside)):
                demand = search.demand(halves, inside, counts)
                if demand.sliced > demand.whole:
                    found.append(Region(_name(inside), tokens, nodes, inside, demand))
                    taken |= nodes
    return sorted(found, key=lambda region: min(region.nodes))


def tokens_of(graph: fx.Graph) -> list[Tokens]:
    """What tokens may be, in a graph: the most frequent number of rows of products first."""
    return [Tokens(count, _split(graph, count)) for count in _counts(graph)]


def _name(inside: frozenset[fx.Node]) -> str:
    widest = max(sorted(inside), key=storage_bytes)
    return module_of(widest) or f"%{widest.name}"


def halves_of(graph: fx.Graph, region: Region) -> tuple[Half, ...]:
    """What a region consists of as the graph is now; none, if it cannot be cut any more."""
    return Ruled(graph, region.tokens, region.nodes).halves(region.nodes, region.inside)


def _counts(graph: fx.Graph) -> list[int]:
    """Numbers of rows that products have, the most frequent first."""
    seen: dict[int, int] = {}
    for node in graph.nodes:
        if node.target in PRODUCTS:
            rows = node.meta["val"].shape[0]
            if isinstance(rows, int) and rows > 1 and phase_of(node) is Phase.FORWARD:
                seen[rows] = seen.get(rows, 0) + 1
    return sorted(seen, key=lambda rows: -seen[rows])


def _split(graph: fx.Graph, count: int) -> tuple[int, int] | None:
    """Batch and length, as the first view has them that makes rows of tokens of them, or back."""
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


class _Search(Ruled):
    """Regions over one number of tokens."""

    @cached_property
    def families(self) -> dict[fx.Node, list[fx.Node]]:
        """Storage -> the values over it."""
        found: dict[fx.Node, list[fx.Node]] = {}
        for node in self.values.graph.nodes:
            if node.op == "call_function":
                found.setdefault(self.values.root(node), []).append(node)
        return found

    def _may_be_sliced(self, root: fx.Node) -> bool:
        """Whether all readers of a storage that has tokens read it in slices."""
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
        """(nodes, storages inside), the widest first."""
        free = {root: storage_bytes(root) for root in self.families if self._may_be_sliced(root)}
        for widest in sorted(free, key=lambda root: -free[root]):
            if widest not in free:
                continue
            least, queue = free.pop(widest) // WIDE, [widest]
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
