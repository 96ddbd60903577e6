"""What the calls of a graph hold of the compute device beside the arena: bytes, node by node.

A value takes bytes from the node that makes it to its last reader, views of it included, as the
executor does: a region that reads a value last owns it, and lets go of it right after that reader.
The storages count, not the tensors: views, in-place results and the parts of a tuple share one.
While a node runs, what it reads, what it makes and all that is read later are held at once.

    %a = aten.mm(%x, %w)       a                        x: the caller's, w: a slot of the arena
    %b = aten.relu(%a)         a b
    %c = aten.neg(%b)            b c                    %a died in %b
    return (%c)                    c

A graph holds what it makes itself, and the gradients that backward is called with. Not counted:
inputs of the model, buffers and constants, slots of the arena, what lies on another device than
gathered parameters do, and what a kernel takes for itself while it runs. A value that forward makes
and backward reads is held in between; what forward returns to its caller and backward does not read
is the caller's once forward has ended.

A gradient that goes home is held until its departure is joined, which happens at a planned point
and not when the transfer happens to end (`under_way.py`): before one leaves, the oldest are joined
until all that are under way take no more than `Footprint.departing` says together. What is still
under way at the end is held by what comes next.

Times are node indices, sizes are bytes; a dynamic size counts as it was when the graph was traced,
or as `size` says: a call is counted at its own sizes before it is carried out (`sized.py`).

To ask what a decision would change, give `Footprint.curve` what it takes away or adds:

    held = footprint(graph, plan.params)
    value = max(held.saved, key=lambda v: v.nbytes)
    held.peak                                              # bytes
    max(held.curve([value.absent(held.boundary)]))         # were it not kept for backward
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate

from torch import fx

from zcompile.ir.graph import module_of, phase_of
from zcompile.ir.plan import Curve
from zcompile.ir.torch_compat import hint, is_tangent
from zcompile.ir.types import NodeName, ParamSpec
from zcompile.memory.storages import Given, Size, StorageWalk, unique

MOST_HOLDERS = 8
"""That a curve names at its peak."""


@dataclass(frozen=True)
class Change:
    """`nbytes` more (or, if negative, fewer) are held while the nodes `first` to `last` run."""

    first: int
    last: int
    nbytes: int


@dataclass(frozen=True)
class Held:
    """A storage that the calls of a graph hold.

    maker    the node that makes it; of what a call is given, its placeholder
    part     which result of a node that has several
    nbytes   of the whole storage
    first    index of the maker
    last     index of the last node that it is alive in, that one included
    readers  indices of all nodes that read it or a view of it, ascending
    """

    maker: fx.Node
    part: int
    nbytes: int
    first: int
    last: int
    readers: tuple[int, ...]

    def absent(self, boundary: int) -> Change:
        """Were it not kept from its last reader in forward to its first one in backward."""
        before = max((r for r in self.readers if r < boundary), default=self.first)
        after = min((r for r in self.readers if r >= boundary), default=self.last + 1)
        return Change(before + 1, after - 1, -self.nbytes)


@dataclass(frozen=True)
class Footprint:
    """nodes          of the graph, in order
    boundary         index of the first node of backward that computes; of a graph of one phase,
                     the number of its nodes
    values           what is held, in the order of `first`
    departing        gradient that leaves -> bytes that may be under way with it
    left_bytes       of gradients that are still under way when the graph has ended
    alone            the departures that are `Level.alone`
    carried          departure -> `Level.carried`
    """

    nodes: tuple[fx.Node, ...]
    boundary: int
    values: tuple[Held, ...]
    of: Mapping[fx.Node, tuple[Held, ...]]
    departing: Mapping[fx.Node, int] = field(default_factory=dict)
    left_bytes: int = 0
    alone: frozenset[fx.Node] = frozenset()
    carried: Mapping[fx.Node, int] = field(default_factory=dict)

    def curve(self, changes: Iterable[Change] = ()) -> list[int]:
        """Bytes held while each node runs, were it not for `changes`."""
        change = [0] * (len(self.nodes) + 1)
        own = (Change(v.first, v.last, v.nbytes) for v in self.values)
        for c in (*own, *changes):
            if c.first <= c.last:
                change[c.first] += c.nbytes
                change[c.last + 1] -= c.nbytes
        return list(accumulate(change[:-1]))

    @cached_property
    def peak(self) -> int:
        """The most bytes held at once."""
        return max(self.curve(), default=0)

    @cached_property
    def peak_at(self) -> int:
        """Index of the first node at which the most is held."""
        return self.curve().index(self.peak)

    @cached_property
    def saved(self) -> tuple[Held, ...]:
        """Made in forward and read in backward."""
        return tuple(
            v for v in self.values if v.first < self.boundary <= v.last and not is_tangent(v.maker)
        )

    @property
    def saved_bytes(self) -> int:
        return sum(v.nbytes for v in self.saved)

    def holders(self, index: int) -> list[Held]:
        """Who holds what while node `index` runs, the largest first."""
        alive = [v for v in self.values if v.first <= index <= v.last]
        return sorted(alive, key=lambda v: -v.nbytes)

    def told(self, index: int) -> list[tuple[str, int]]:
        """The holders of node `index` for people: name with its module, bytes."""
        return [
            (f"{v.maker.name} ({module})" if (module := module_of(v.maker)) else v.maker.name,
             v.nbytes)
            for v in self.holders(index)
        ]  # fmt: skip

    @property
    def where(self) -> str:
        """Where the most is held, for people."""
        node = self.nodes[self.peak_at]
        return f"{phase_of(node).value} pass of {module_of(node) or 'the model'}"

    def as_curve(self) -> Curve:
        """What is held, as data that outlives the graph."""
        return Curve(
            tuple(node.name for node in self.nodes), self.boundary, tuple(self.curve()),
            self.where, dict(self.told(self.peak_at)[:MOST_HOLDERS]),
        )  # fmt: skip

    def handed_over(self, names: Iterable[str]) -> Given:
        """What a graph that has these nodes as placeholders is given; for `footprint` of it."""
        wanted = set(names)
        return {
            NodeName(node.name): tuple((f"{v.maker.name}.{v.part}", v.nbytes) for v in held)
            for node, held in self.of.items()
            if node.name in wanted and node.op != "placeholder"
        }


def footprint(
    graph: fx.Graph,
    params: Mapping[NodeName, ParamSpec],
    given: Given | None = None,
    size: Size = hint,
) -> Footprint:
    """What the calls of a graph hold: of a joint graph, or of one phase of it.

    params  handle placeholder -> what kind of parameter is behind it
    given   of a backward graph: what its forward kept for it (`Footprint.handed_over`)
    size    what a dynamic size counts as
    """
    walk = StorageWalk(graph, params, given or {}, size)
    departing, left, alone, carried = walk.walk()
    kept = {id(s): Held(s.maker, s.part, s.nbytes, s.first, s.last, tuple(sorted(s.readers)))
            for s in walk.storages}  # fmt: skip
    of = {node: tuple(kept[id(s)] for s in unique(parts))
          for node, parts in walk.parts.items() if any(parts)}  # fmt: skip
    values = tuple(sorted(kept.values(), key=lambda v: v.first))
    return Footprint(walk.nodes, walk.boundary, values, of, departing, left, alone, carried)
