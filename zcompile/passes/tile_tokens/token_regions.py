"""Regions that treat every token by itself, around values much wider than what enters and leaves.

A region grows from the widest value on, through every value more than half as wide: from a product
that makes the hidden values of a block, over its nonlinearity, to the product that takes them back;
in backward, from the gradient that comes in to those that leave. What is narrow is its border. So
few weights are read in it, which must be there for all slices.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property

from torch import fx

from zcompile.ir.graph import module_of, phase_of
from zcompile.ir.saved_values import is_value, storage_bytes
from zcompile.ir.torch_compat import wish_of
from zcompile.ir.types import Phase
from zcompile.passes.tile_tokens.rules import PRODUCTS, ROWS, VIEWS, Tokens
from zcompile.passes.tile_tokens.slice_choice import RegionDemand, counts_of
from zcompile.passes.tile_tokens.token_halves import Half, Ruled

WIDE = 2
"""A value belongs to a region if it is wider than one part in so many of its widest."""

KEPT = frozenset({"MUST_SAVE", "MUST_CPU_OFFLOAD"})
"""Wishes of the user that forbid to compute a value again."""


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
        if node.target not in VIEWS or not isinstance(node.args[0], fx.Node):
            continue
        pair = [n.meta["val"].shape for n in (node.args[0], node)]
        for flat, deep in (pair, pair[::-1]):
            if (len(flat) == 2 and len(deep) >= 3 and flat[0] == count and deep[0] != count
                    and deep[0] * deep[1] == count):  # fmt: skip
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
        if wish_of(root) in KEPT or wish_of(self.values.maker(root)) in KEPT:
            return False
        return all(
            member in self.rules and user in self.rules and member in self.rules[user].rows
            for member in self.families[root] for user in member.users
        )  # fmt: skip

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
                for other in {self.values.root(n) for node in near for n in (node, *self.rules[
                        node].rows)} if near <= self.rules.keys() else ():  # fmt: skip
                    if other in free and free[other] > least:
                        del free[other]
                        queue.append(other)
            if nodes <= self.rules.keys():
                yield frozenset(nodes), frozenset(inside)

    def _picks(self, user: fx.Node, node: fx.Node) -> bool:
        """Whether `user` is one of several results of `node`."""
        return not is_value(node) and node in user.all_input_nodes
