"""Divides a graph whose batch runs in slices into stages: all slices of one, then all of the next.

A stage reads its weights for all slices, so that each is fetched once; what it leaves for later
stages is kept in slices. A stage ends

    where a call for the whole batch reads what slices made, and slices read what it makes
    at a cut: a narrow place between two large weights, such as the residual between two blocks

Backward is divided where forward is, at the narrowest places between: a value inside of a stage of
forward is computed again, slice by slice, in the one stage of backward that reads it.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from torch import fx

from zcompile.ir import ops
from zcompile.ir.graph import module_of, phase_of, reached_from, root_of, writes
from zcompile.ir.saved_values import SavedValues, is_value, storage_bytes
from zcompile.ir.torch_compat import Dispatched, is_random, wish_of
from zcompile.ir.types import NEVER_RECOMPUTED, NodeName, Phase
from zcompile.memory.live_bytes import live_bytes
from zcompile.passes.slice_batch.axes import BatchAxes, batch_axes

LARGE = 8
"""A weight is large if it is more than one part in so many of the largest."""
LEVEL = 1.25
"""Cuts that leave at most so many times the bytes of the narrowest are of its level."""


MOST_SLICES = 16
"""Most slices of a batch: products of few rows run far under a device's peak, and each slice makes
the graph larger."""


def counts_of(samples: int) -> tuple[int, ...]:
    """Numbers of slices to try, each twice the one before; at last one for each sample, if those
    are few."""
    found = [n for n in (2, 4, 8, MOST_SLICES) if n <= samples]
    return (*found, samples) if found and found[-1] < samples < MOST_SLICES else tuple(found)


@dataclass(frozen=True)
class Stage:
    """A part of one phase.

    before  calls for the whole batch, which come first
    nodes   calls that run slice by slice
    again   calls of forward that backward repeats before them, in each slice
    """

    before: tuple[fx.Node, ...]
    nodes: tuple[fx.Node, ...]
    again: tuple[fx.Node, ...] = ()


@dataclass(frozen=True)
class Stages:
    """A graph in stages; the last of each phase has no nodes.

    saved  storages that backward reads in slices as forward made them
    """

    forward: tuple[Stage, ...]
    backward: tuple[Stage, ...]
    saved: frozenset[fx.Node]


class BatchGraph:
    """A graph with a batch that can run in slices.

    order  phase -> its calls, views right before their first readers
    """

    def __init__(self, graph: fx.Graph, batch: BatchAxes) -> None:
        self.graph, self.batch, self.values = graph, batch, batch.values
        calls = _views_late(graph)
        self.order = {p: [n for n in calls if phase_of(n) is p] for p in Phase}

    def cuts(self) -> list[tuple[fx.Node, int]]:
        """For each two large weights that follow each other in forward, the call before which
        fewest bytes of slices are live, and those."""
        order, live = self.order[Phase.FORWARD], self._live(Phase.FORWARD)
        found = []
        for (first, _), (then, _) in pairwise(self._large()):
            at = min(range(first + 1, then + 1), key=lambda n: live[n])
            found.append((order[at], live[at]))
        return found

    def levels(self) -> list[tuple[NodeName, ...]]:
        """Sets of cuts, the fewest first: the narrowest, those as well that are less narrow, and
        so on."""
        cuts, found = self.cuts(), list[tuple[NodeName, ...]]()
        rest = sorted({nbytes for _, nbytes in cuts})
        while rest:
            most = max(n for n in rest if n <= LEVEL * rest[0])
            found.append(tuple(NodeName(node.name) for node, nbytes in cuts if nbytes <= most))
            rest = [n for n in rest if n > most]
        return found

    def merged(self, cuts: Sequence[NodeName], most: int) -> tuple[NodeName, ...]:
        """Some of the cuts: stages are joined as long as their weights take at most `most` bytes
        together."""
        order = self.order[Phase.FORWARD]
        weight = dict(self._weights())
        kept, total = list[NodeName](), 0
        starts = [at for at, node in enumerate(order) if node.name in cuts]
        for begin, end in pairwise([0, *starts, len(order)]):
            nbytes = sum(weight.get(at, 0) for at in range(begin, end))
            if begin and total and total + nbytes > most:
                kept.append(NodeName(order[begin].name))
                total = 0
            total += nbytes
        return tuple(kept)

    def _weights(self) -> Iterator[tuple[int, int]]:
        """Position in forward of the first call of slices that reads a weight, and its bytes."""
        seen = set[fx.Node]()
        for at, node in enumerate(self.order[Phase.FORWARD]):
            if node not in self.batch.rules:
                continue
            nbytes = 0
            for source in node.all_input_nodes:
                root = self.values.root(source)
                if source in self.values.gathered and root not in seen:
                    seen.add(root)
                    nbytes += storage_bytes(root)
            if nbytes:
                yield at, nbytes

    def _large(self) -> list[tuple[int, int]]:
        weights = list(self._weights())
        most = max((nbytes for _, nbytes in weights), default=0)
        return [(at, nbytes) for at, nbytes in weights if nbytes * LARGE > most]

    def _live(self, phase: Phase) -> list[int]:
        """Bytes of slices, of all samples, that are live before each call of a phase."""
        order = self.order[phase]
        where = {node: at for at, node in enumerate(order)}
        last = dict[fx.Node, int]()
        for at, node in enumerate(order):
            if node in self.batch.rules:
                for source in node.all_input_nodes:
                    last[self.values.root(source)] = at
        lives = [
            (where[self.values.maker(root)] + 1, at, storage_bytes(root))
            for root, at in last.items()
            if root in self.batch.rules and root in where and not self.batch.is_sum(root)
        ]
        return live_bytes(lives, len(order) + 1)

    # Stages

    def stages(self, cuts: Iterable[NodeName]) -> Stages:
        """The stages that begin at the cuts, and where they must."""
        forward = self._staged(Phase.FORWARD, frozenset(cuts))
        number = {node: n for n, stage in enumerate(forward) for node in stage.nodes}
        saved = self._saved(number)
        again = {
            node: self._repeated(node, saved)
            for node in self.order[Phase.BACKWARD]
            if node in self.batch.rules
        }
        touched = {node: {number[n] for n in found} for node, found in again.items()}
        readers = self._weight_readers(number)
        for node, stages in touched.items():
            for source in node.all_input_nodes:
                mine = readers.get(self.values.root(source), ())
                stages |= set(mine) if len(mine) == 1 else set()
        backward = self._staged(Phase.BACKWARD, self._backward_cuts(touched))
        where = {node: at for at, node in enumerate(self.order[Phase.FORWARD])}

        def with_forward(stage: Stage) -> Stage:
            nodes = {n for node in stage.nodes for n in again[node]}
            return Stage(stage.before, stage.nodes, tuple(sorted(nodes, key=where.__getitem__)))

        return Stages(tuple(forward), tuple(map(with_forward, backward)), saved)

    def _weight_readers(self, number: dict[fx.Node, int]) -> dict[fx.Node, set[int]]:
        """Weight -> the stages of forward that read it."""
        found: dict[fx.Node, set[int]] = {}
        for node, stage in number.items():
            for source in node.all_input_nodes:
                if source in self.values.gathered:
                    found.setdefault(self.values.root(source), set()).add(stage)
        return found

    def _staged(self, phase: Phase, cuts: frozenset[str]) -> list[Stage]:
        """The calls of a phase in stages.

        cuts  names of calls before which a stage begins
        """
        rules, batch = self.batch.rules, self.batch
        now, drawn = 0, 0
        at = dict[fx.Node, int]()  # stage of a call of slices, or before which another call comes
        for node in self.order[phase]:
            if node.name in cuts and any(stage == now for n, stage in at.items() if n in rules):
                now += 1
            sources = [n for n in node.all_input_nodes if n in at]
            if node in rules:
                (several,) = sources if not is_value_of(node, sources) else (None,)
                if several is not None:
                    at[node] = at[several]
                    continue
                now = max([now, *(at[n] + batch.is_sum(n) for n in sources)])
                at[node] = now
                continue
            at[node] = max([now, *(at[n] + (n in rules) for n in sources)])
            if node.target in ops.OURS or not isinstance(node.target, Dispatched):
                continue
            if is_random(node):  # in the order in which eager draws
                at[node] = drawn = max(drawn, at[node])
            if writes(node):  # after all that reads what was there
                at[node] = now = max([now, *at.values()]) + 1
        count = max(at.values(), default=0) + 1
        before: list[list[fx.Node]] = [[] for _ in range(count + 1)]
        nodes: list[list[fx.Node]] = [[] for _ in range(count + 1)]
        for node, stage in at.items():
            (nodes if node in rules else before)[stage].append(node)
        made = [Stage(tuple(b), tuple(n)) for b, n in zip(before, nodes, strict=True)]
        return [stage for stage in made if stage.before or stage.nodes]

    def _saved(self, number: dict[fx.Node, int]) -> frozenset[fx.Node]:
        """Storages of forward that a later stage, or a call for the whole batch, reads; and those
        that are not computed twice."""
        values, found = self.values, set[fx.Node]()
        for node, stage in number.items():
            if not is_value(node):
                continue
            root = values.root(node)
            if any(number.get(user, stage) != stage for user in node.users):
                found.add(root)
            if any(user not in self.batch.rules for user in node.users):
                found.add(root)
            maker = values.maker(node)
            wishes = {wish_of(node), wish_of(maker)}
            if (maker is node and not values.may_repeat(node)) or not wishes.isdisjoint(
                NEVER_RECOMPUTED
            ):
                found.add(root)
        return frozenset(found)

    def _repeated(self, node: fx.Node, saved: frozenset[fx.Node]) -> list[fx.Node]:
        """The calls of forward that are computed again for a call of backward."""

        def hidden(reader: fx.Node) -> list[fx.Node]:
            return [
                n
                for n in reader.all_input_nodes
                if n in self.batch.rules
                and phase_of(n) is Phase.FORWARD
                and not (is_value(n) and self.values.root(n) in saved)
            ]

        return list(reached_from(hidden(node), hidden))

    def _backward_cuts(self, touched: dict[fx.Node, set[int]]) -> frozenset[str]:
        """Calls of backward before which a stage begins: between those that belong to one stage of
        forward and those that belong to another, where fewest bytes are live.

        touched  call -> stages of forward that it repeats a part of, or whose weights it reads
        """
        order, live = self.order[Phase.BACKWARD], self._live(Phase.BACKWARD)
        spans = dict[int, tuple[int, int]]()
        for at, node in enumerate(order):
            for stage in touched.get(node, ()):
                spans[stage] = (spans.get(stage, (at, at))[0], at)
        groups: list[tuple[int, int]] = []
        for begin, end in sorted(spans.values()):
            if groups and begin <= groups[-1][1]:
                groups[-1] = (groups[-1][0], max(end, groups[-1][1]))
            else:
                groups.append((begin, end))
        return frozenset(
            order[min(range(end + 1, begin + 1), key=lambda n: (live[n], -n))].name
            for (_, end), (begin, _) in pairwise(groups)
        )

    # Bytes

    def inside(self, stage: Stage) -> int:
        """Bytes of values inside a stage that are live at once, of all samples."""
        order = (*stage.again, *stage.nodes)
        roots = {self.values.root(n) for n in order if is_value(n)} & set(order)
        last = dict[fx.Node, int]()
        for at, node in enumerate(order):
            reads = {self.values.root(n) for n in (node, *node.all_input_nodes)} & roots
            last |= dict.fromkeys(reads, at)
        mine = [n for n in order if n in roots and not self.batch.is_sum(n)]
        where = {node: at for at, node in enumerate(order)}
        lives = [(where[n], last[n], storage_bytes(n)) for n in mine]
        return max(live_bytes(lives, len(order)), default=0)

    def left(self, stage: Stage) -> int:
        """Bytes of values that a stage reads and leaves in slices, of all samples."""
        mine = {*stage.again, *stage.nodes}
        given = {
            self.values.root(n)
            for node in mine
            for n in node.all_input_nodes
            if n not in mine and n in self.batch.axes and n not in self.values.gathered
        }
        made = {
            self.values.root(n)
            for n in stage.nodes
            if is_value(n) and not self.batch.is_sum(n) and any(u not in mine for u in n.users)
        }
        return sum(storage_bytes(n) for n in given | made if n.op != "placeholder")

    def name(self, stage: Stage) -> str:
        """The module of its largest weight, or else of its widest value."""
        weights = {
            root: node
            for node in stage.nodes
            for n in node.all_input_nodes
            if n in self.values.gathered and (root := self.values.root(n))
        }
        rooted = {n: n for n in stage.nodes if is_value(n)}
        largest = max(weights or rooted, key=storage_bytes)
        reader = (weights or rooted)[largest]
        return module_of(reader) or f"%{reader.name}"


def is_value_of(node: fx.Node, sources: Sequence[fx.Node]) -> bool:
    """Whether a call is more than a pick of one of several results."""
    return len(sources) != 1 or is_value(sources[0])


def batch_graph(graph: fx.Graph) -> BatchGraph | None:
    """The graph with its batch; None, if nothing of it can run in slices of one."""
    batch = batch_axes(SavedValues(graph))
    return None if batch is None else BatchGraph(graph, batch)


def _views_late(graph: fx.Graph) -> list[fx.Node]:
    """All calls; views that backward takes of forward stand right before their first readers.

    Tracing leaves some at the head of backward, as if all of forward were read there.
    """
    place = dict[fx.Node, tuple[int, int]]()
    nodes = list(graph.nodes)
    for at, node in reversed([*enumerate(nodes)]):
        place[node] = (at, 0)
        if SavedValues.is_backward(node) and phase_of(root_of(node)) is Phase.FORWARD:
            readers = [place[user] for user in node.users]
            if readers:
                first, before = min(readers)
                place[node] = (first, before - 1)
    return sorted((n for n in nodes if n.op == "call_function"), key=place.__getitem__)
