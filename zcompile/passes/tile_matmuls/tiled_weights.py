"""The weights of a graph and who reads them, through views, as tiles would be read."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import torch
from torch import fx

from zcompile.ir import ops
from zcompile.ir.graph import CASTS, find, phase_of, use_of
from zcompile.ir.plan import Plan, fetched
from zcompile.ir.rewrite import VIEWS, moved, shape
from zcompile.ir.types import NodeName, ParamSpec, Phase, row_major
from zcompile.passes.tile_matmuls.sizes import Held
from zcompile.passes.tile_matmuls.tiled_uses import Use, rule_of

aten = torch.ops.aten
Chain = tuple[tuple[fx.Node, int], ...]
"""Views and casts, each with its dimension that is tiled."""


@dataclass(frozen=True)
class Reader:
    """gather  whose value is read
    use     by which node, as which operand; its `sizes` are not known yet
    chain   views and casts from the gather to the operand, each with the dimension that is tiled
    rows    the first row of the weight that the operand has, and how many it has
    row     that a select takes; None: all are read
    """

    gather: fx.Node
    use: Use
    chain: Chain
    rows: tuple[int, int]
    row: int | None = None


@dataclass(frozen=True)
class Weight:
    """name     of the parameter, for people
    readers  of its gathers, in no order
    others   who reads them and cannot be computed over tiles, and through which cast
    whole    why it cannot be cut; "": it can
    """

    handle: fx.Node
    name: str
    rows: int
    nbytes: int
    readers: tuple[Reader, ...]
    others: tuple[tuple[fx.Node, fx.Node | None], ...]
    whole: str

    def held(self, where: Mapping[fx.Node, int], number: int, count: int) -> Iterator[Held]:
        """What is in the arena of it, by phase: what is read in both is gathered in each.

        number  of this weight, of `count`: tells places apart that are before the same node
        """
        row = 0 if self.whole or self.rows < 2 else self.nbytes // self.rows
        nodes = [*((r.use.node, _cast_of(r.chain)) for r in self.readers), *self.others]
        for phase in (Phase.FORWARD, Phase.BACKWARD):
            reads = set()
            for node, cast in nodes:
                if node.op == "output" or phase_of(node) is not phase:
                    continue
                if cast is None:
                    reads.add(where[node] * (count + 1))
                elif phase_of(cast) is phase:
                    reads.add(where[cast] * (count + 1))
                else:  # the cast is made again, right before
                    reads.add(where[node] * (count + 1) - 1 - number)
            if reads:
                yield Held(self.handle.name, tuple(sorted(reads)), self.nbytes, row)


def _cast_of(chain: Chain) -> fx.Node | None:
    """The first cast on the way from a gather: what follows does not read the gathered bytes."""
    return next((view for view, _ in chain if view.target in CASTS), None)


def weights_of(graph: fx.Graph, plan: Plan) -> Iterator[Weight]:
    """What is gathered, but for what is gathered for one use alone: that was cut already."""
    gathers: dict[fx.Node, list[fx.Node]] = {}
    for gather in find(graph, ops.gather):
        if not use_of(gather):
            handle = gather.args[0]
            assert isinstance(handle, fx.Node)
            gathers.setdefault(handle, []).append(gather)
    for handle, made in gathers.items():
        spec = plan.params[NodeName(handle.name)]
        readers: list[Reader] = []
        others: list[tuple[fx.Node, fx.Node | None]] = []
        for gather in made:
            found, rest = _readers(gather)
            readers += found
            others += rest
        rows = spec.layout.size[0] if spec.layout.size else 1
        whole = "" if all(_is_row_major(g, spec) for g in made) else "it is not row-major"
        if others and not whole:
            whole = f"%{others[0][0].name} cannot be computed over tiles of it"
        why = f"{spec.name} is gathered whole: {whole}" if whole else ""
        nbytes = max(fetched(g).nbytes for g in made)
        yield Weight(handle, str(spec.name), rows, nbytes, tuple(readers), tuple(others), why)


def _is_row_major(gather: fx.Node, spec: ParamSpec) -> bool:
    brings = fetched(gather)
    plain = brings.offset == 0 and brings.stride == row_major(brings.size)
    return plain and brings == spec.layout


def _readers(gather: fx.Node) -> tuple[list[Reader], list[tuple[fx.Node, fx.Node | None]]]:
    """Who reads a gather, or a view of it: those that can be computed over tiles, and others."""
    seen = {gather: _Member((), (0, shape(gather)[0] if shape(gather) else 1))}
    queue = [gather]
    found: list[Reader] = []
    others: list[tuple[fx.Node, fx.Node | None]] = []
    while queue:
        node = queue.pop()
        for user in node.users:
            if (view := _carried(user, node, seen[node])) is not None:
                seen[user] = view
                queue.append(user)
            elif (reader := _reader(gather, user, node, seen[node])) is not None:
                found.append(reader)
            else:
                others.append((user, _cast_of(seen[node].chain)))
    return found, others


@dataclass(frozen=True)
class _Member:
    """A view of a weight. chain, rows  as in `Reader`"""

    chain: Chain
    rows: tuple[int, int]

    @property
    def dim(self) -> int:
        """Its dimension that counts rows of the weight."""
        return self.chain[-1][1] if self.chain else 0


def _carried(user: fx.Node, node: fx.Node, member: _Member) -> _Member | None:
    """What `user` is of the weight, if it is a view that tiles carry along."""
    if user.op != "call_function" or user.args[0] is not node:
        return None
    if user.target is aten.slice.Tensor and len(user.args) > 1 and user.args[1] == member.dim:
        low, high, step = _range(user, member.rows[1])
        fits = step == 1 and high > low
        return replace(member, rows=(member.rows[0] + low, high - low)) if fits else None
    if user.target not in VIEWS:
        return None
    now = moved(user, member.dim)
    if now is None or shape(user)[now] != shape(node)[member.dim]:
        return None
    return replace(member, chain=(*member.chain, (user, now)))


def _range(user: fx.Node, count: int) -> tuple[int, int, int]:
    """First row, one past the last, and step of a slice; no rows, if only a call knows them."""
    given: list[object] = [*user.args[2:], None, None, None]
    known = [n for n in given if n is None or isinstance(n, int)]
    if len(known) < len(given):
        return 0, 0, 1
    start, end, step, *_ = known
    return slice(start, end, step).indices(count)


def _reader(gather: fx.Node, user: fx.Node, node: fx.Node, member: _Member) -> Reader | None:
    if user.op != "call_function" or node not in user.args:
        return None
    use = Use(user, user.args.index(node), member.dim, ())
    if user.target is aten.select.int and user.args[1] == member.dim:
        index = user.args[2]
        if not isinstance(index, int):
            return None
        return Reader(gather, use, member.chain, member.rows, index % member.rows[1])
    known = rule_of(use) is not None
    return Reader(gather, use, member.chain, member.rows) if known else None
