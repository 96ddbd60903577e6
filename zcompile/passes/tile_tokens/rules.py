"""Says which ops treat every token by itself: their operands in slices of tokens, and their
results.

    rows        tokens come first: [tokens, ..], or [batch, length, ..]   y = x @ w, gelu(y)
    transposed  tokens come second: [.., tokens]                          t(dy)
    sum         over all tokens; those of slices add up                   dw = t(dy) @ x

Tokens are recognised by the sizes of the first dimensions. That is enough: an op that treats each
of so many rows by itself does so whatever they mean.
"""

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from zcompile.ir.graph import SIZED_VIEWS, UNTAGGED
from zcompile.ir.torch_compat import Dispatched

aten = torch.ops.aten

PRODUCTS = frozenset({aten.mm.default, aten.addmm.default})
ROWS, TRANSPOSED, SUM = "rows", "turned", "sum"
OVER_FEATURES = frozenset(
    {aten.mean.dim, aten.sum.dim_IntList, aten.amax.default, aten.amin.default}
)
"""Reductions over given dimensions, [tokens, ..] -> [tokens] where these are features."""
CUTS = frozenset({aten.split.Tensor, aten.split_with_sizes.default, aten.slice.Tensor})
"""Ops that take ranges of one dimension."""


@dataclass(frozen=True)
class Tokens:
    """The tokens of a graph.

    count  of all tokens: values are [count, ..]
    split  (batch, length), if they come as two dimensions somewhere: values are [batch, length, ..]
    """

    count: int
    split: tuple[int, int] | None = None

    def lead(self, node: object) -> int:
        """How many of a value's first dimensions are tokens: 0, 1 or 2."""
        value = node.meta.get("val") if isinstance(node, fx.Node) else None
        if not isinstance(value, torch.Tensor) or not value.dim():
            return 0
        if not all(isinstance(size, int) for size in value.shape):
            return 0
        if value.shape[0] == self.count:
            return 1
        return 2 if self.split is not None and tuple(value.shape[:2]) == self.split else 0


@dataclass(frozen=True)
class Rule:
    """How an op runs over slices.

    rows     operands that are read in slices; all others are read whole
    results  kind of each result: ROWS, TRANSPOSED or SUM
    """

    rows: frozenset[fx.Node]
    results: tuple[str, ...] = (ROWS,)


def rule_of(node: fx.Node, tokens: Tokens, known: Mapping[fx.Node, Rule]) -> Rule | None:
    """How a call runs over slices; None if it cannot.

    known  rules of its operands
    """
    if node.target is operator.getitem:
        parent, part = node.args
        of = known.get(parent)  # type: ignore[arg-type]  # a node, in a call of getitem
        if of is None or not isinstance(parent, fx.Node):
            return None
        return Rule(frozenset({parent}), (of.results[part if len(of.results) > 1 else 0],))  # type: ignore[index]  # a number
    rule = None
    if (special := SPECIAL.get(node.target)) is not None:
        rule = special(node, tokens)
    elif isinstance(node.target, Dispatched) and (
        torch.Tag.pointwise in node.target.tags or node.target in UNTAGGED
    ):
        rule = _elementwise(node, tokens)
    if rule is None or (node.target is aten.mm.default and rule.results == (SUM,)):
        return rule
    turned = any(is_transposed(row, tokens) for row in rule.rows)  # of as many features as tokens
    return None if turned else rule


def is_transposed(node: object, tokens: Tokens) -> bool:
    """Whether `node` is a transpose [.., tokens] of a value [tokens, ..]."""
    if not isinstance(node, fx.Node) or node.target is not aten.t.default:
        return False
    return tokens.lead(node.args[0]) == 1


def _rows(*nodes: object, results: tuple[str, ...] = (ROWS,)) -> Rule:
    """The rule that reads `nodes` in slices."""
    return Rule(frozenset(n for n in nodes if isinstance(n, fx.Node)), results)


def _elementwise(node: fx.Node, tokens: Tokens) -> Rule | None:
    """Any op of broadcast operands: those that have the tokens are sliced, the others [1, ..,
    features] are whole."""
    lead, out = tokens.lead(node), node.meta["val"]
    if not lead:
        return None
    rows = []
    for source in node.all_input_nodes:
        value = source.meta.get("val")
        if not isinstance(value, torch.Tensor):
            return None
        missing = out.dim() - value.dim()
        if missing == 0 and value.shape[:lead] == out.shape[:lead]:
            rows.append(source)
        elif any(size != 1 for size in value.shape[: max(0, lead - missing)]):
            return None
    return _rows(*rows) if rows else None


def _mm(node: fx.Node, tokens: Tokens) -> Rule | None:
    """[tokens, a] @ [a, b] by rows; [a, tokens] @ [tokens, b] is a sum over slices."""
    left, right = node.args
    if is_transposed(left, tokens):
        sums = tokens.lead(right) == 1 and not is_transposed(right, tokens)
        return _rows(left, right, results=(SUM,)) if sums else None
    return _rows(left) if tokens.lead(left) == 1 and left is not right else None


def _addmm(node: fx.Node, tokens: Tokens) -> Rule | None:
    """bias + [tokens, a] @ [a, b] by rows; a bias [tokens, b] is sliced too."""
    bias, left, right = node.args
    if tokens.lead(left) != 1 or left is right or bias is right:
        return None
    value = bias.meta["val"]  # type: ignore[union-attr]  # a node, in a call of addmm
    if value.dim() == 2 and value.shape[0] != 1:
        return _rows(bias, left)
    return _rows(left)


def _view(node: fx.Node, tokens: Tokens) -> Rule | None:
    """[tokens, ..] from [tokens, ..], or [batch, length, ..] from either."""
    source = node.args[0]
    lead, out = tokens.lead(source), tokens.lead(node)
    if not lead or not out:
        return None
    if node.target is aten.expand.default:
        before, after = (n.meta["val"].dim() for n in (source, node))  # type: ignore[union-attr]  # it has rows
        if before != after:
            return None  # its dimensions are others now
    return _rows(source)


def _t(node: fx.Node, tokens: Tokens) -> Rule | None:
    """The transpose [features, tokens] of [tokens, features]."""
    return _rows(node.args[0], results=(TRANSPOSED,)) if is_transposed(node, tokens) else None


def _reduced(node: fx.Node, tokens: Tokens) -> Rule | None:
    """A reduction over features, by rows; or a sum over all tokens."""
    source, dims = node.args[0], node.args[1] if len(node.args) > 1 else None
    lead = tokens.lead(source)
    if not lead or not isinstance(dims, Sequence) or not dims:
        return None
    given: Sequence[Any] = dims
    count = source.meta["val"].dim()  # type: ignore[union-attr]  # it has rows
    over = {dim % count for dim in given}
    if min(over) >= lead:
        return _rows(source)
    if over == set(range(lead)) and node.target is aten.sum.dim_IntList:
        return _rows(source, results=(SUM,))
    return None


def _cut(node: fx.Node, tokens: Tokens) -> Rule | None:
    """Ranges of features [tokens, a:b]."""
    source = node.args[0]
    at = node.args[2 if node.target not in (aten.slice.Tensor,) else 1 :]
    return _rows(source) if _over_features(source, at[0] if at else 0, tokens) else None


def _cat(node: fx.Node, tokens: Tokens) -> Rule | None:
    """Features side by side: [tokens, a], [tokens, b] -> [tokens, a + b]."""
    parts, lead = node.args[0], tokens.lead(node)
    given = list(parts) if isinstance(parts, list | tuple) else []
    dim = node.args[1] if len(node.args) > 1 else 0
    if not _over_features(node, dim, tokens) or any(tokens.lead(n) != lead for n in given):
        return None
    return _rows(*given)


def _softmax(node: fx.Node, tokens: Tokens) -> Rule | None:
    """Softmax, and its backward, over features."""
    backward = node.target is aten._softmax_backward_data.default
    given = node.args[: 2 if backward else 1]
    dim = node.args[len(given)]
    return _rows(*given) if all(_over_features(n, dim, tokens) for n in given) else None


def _over_features(node: object, dim: object, tokens: Tokens) -> bool:
    """Whether dimension `dim` of `node` is none of its tokens."""
    lead = tokens.lead(node)
    if not lead or not isinstance(dim, int) or not isinstance(node, fx.Node):
        return False
    return bool(dim % node.meta["val"].dim() >= lead)


def _norm(*rows: int, results: tuple[str, ...]) -> Callable[[fx.Node, Tokens], Rule | None]:
    """Norms over the last dimensions.

    rows  positions of the operands that are sliced; their first dimensions are tokens, and the
          normalised sizes are the first list among the arguments
    """

    def rule(node: fx.Node, tokens: Tokens) -> Rule | None:
        sizes: Any = next(a for a in node.args if isinstance(a, list | tuple))
        given = [node.args[n] for n in rows]
        leads = {tokens.lead(n) for n in given}
        value = given[0].meta["val"]  # type: ignore[union-attr]  # a node, by the schema
        if len(leads) > 1 or leads == {0} or value.dim() - len(sizes) != max(leads):
            return None
        return _rows(*given, results=results)

    return rule


SPECIAL: dict[object, Callable[[fx.Node, Tokens], Rule | None]] = {
    aten.mm.default: _mm,
    aten.addmm.default: _addmm,
    aten.t.default: _t,
    aten.cat.default: _cat,
    aten._softmax.default: _softmax,
    aten._softmax_backward_data.default: _softmax,
    aten.native_layer_norm.default: _norm(0, results=(ROWS, ROWS, ROWS)),
    aten.native_layer_norm_backward.default: _norm(0, 1, 3, 4, results=(ROWS, SUM, SUM)),
    aten._fused_rms_norm.default: _norm(0, results=(ROWS, ROWS)),
    aten._fused_rms_norm_backward.default: _norm(0, 1, 3, results=(ROWS, SUM)),
    **dict.fromkeys(SIZED_VIEWS, _view),
    **dict.fromkeys(OVER_FEATURES, _reduced),
    **dict.fromkeys(CUTS, _cut),
}
"""Op -> how it runs over slices, where it is not elementwise."""
