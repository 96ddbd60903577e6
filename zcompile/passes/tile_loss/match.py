"""Matches a loss over a vocabulary in a joint graph, with its gradients.

The loss is a product with a weight of one row per class, log-softmax over the classes, the negative
log-likelihood of targets, and the gradients of these. Between the product and the log-softmax may
stand ops that treat every row of logits alike: views, slices of tokens, casts. Behind the
log-softmax may stand views of all rows, and casts to a wider dtype: under autocast on CUDA,
cross-entropy takes the log-softmax in the narrow dtype and the likelihood in float32. All that is
not understood to the last reader is named in `NoMatch`.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import fx

from zcompile.ir.graph import CASTS, RESHAPES, TRANSPOSES, output_of, positions, root_of

aten = torch.ops.aten

PICKS = frozenset({aten.slice.Tensor, aten.select.int})
"""Ops that take some of the tokens; never of the classes."""
UNPICKS = frozenset({aten.slice_backward.default, aten.select_backward.default})
"""Gradients of `PICKS`."""
KEEP_ROWS = RESHAPES | {aten.clone.default} | CASTS
"""Ops that treat every row of logits alike."""
THE_SAME = frozenset({aten.detach.default, aten.alias.default})
"""Ops that give what they are given."""
LIKELIHOOD = aten.nll_loss_forward.default
LIKELIHOOD_BACKWARD = aten.nll_loss_backward.default
SOFTMAX = aten._log_softmax.default
SOFTMAX_BACKWARD = aten._log_softmax_backward_data.default


class NoMatch(Exception):
    """Why a log-softmax is not the middle of a loss that can be tiled; for a note."""


@dataclass(frozen=True)
class Gradients:
    """The backward half: from the gradient of the log-softmax to those of product and weight.

    top                 gradient of the log-softmax's input
    likelihood          term of `top`: gradient of the picked log-probability
    spreads             terms of `top`: [tokens, 1] values that every class gets (label smoothing)
    chain               from `top` (excluded) to the gradient of the product, which is its last
    rows, weight, bias  the node of each gradient, if it is computed
    """

    top: fx.Node
    likelihood: fx.Node | None
    spreads: tuple[fx.Node, ...]
    chain: tuple[fx.Node, ...]
    rows: fx.Node | None
    weight: fx.Node | None
    bias: fx.Node | None


@dataclass(frozen=True)
class Loss:
    """The forward half; `product` is rows [T, H] times the transposed weight [V, H], plus bias [V].

    chain  from the product (excluded) to the log-softmax (excluded)
    sums   sums of the log-probabilities over the classes (label smoothing)
    """

    product: fx.Node
    rows: fx.Node
    weight: fx.Node
    bias: fx.Node | None
    chain: tuple[fx.Node, ...]
    softmax: fx.Node
    likelihood: fx.Node
    sums: tuple[fx.Node, ...]
    gradients: Gradients | None

    @property
    def classes(self) -> int:
        """V."""
        return int(self.product.meta["val"].shape[1])

    @property
    def width(self) -> int:
        """H."""
        return int(self.rows.meta["val"].shape[1])


def match_loss(graph: fx.Graph, softmax: fx.Node) -> Loss:
    """The loss around a log-softmax.

    raises  NoMatch
    """
    value = softmax.meta["val"]
    if softmax.args[1] not in (-1, value.dim() - 1):
        raise NoMatch(f"the classes of %{softmax.name} are not its last dimension")
    product, chain = _product_of(graph, softmax)
    rows, weight, bias = _factors(product)
    likelihood, sums, picked_backward, top = _readers(graph, softmax)
    _check_likelihood(likelihood)
    where = positions(graph)
    first = min((likelihood, *sums))
    if where[_node(likelihood.args[1])] > where[first]:
        raise NoMatch(f"the targets come after %{first.name} has read the log-probabilities")
    gradients = None
    if top is not None:
        gradients = _gradients(top, picked_backward, weight, rows)
    elif picked_backward is not None:
        raise NoMatch(f"%{picked_backward.name} has no gradient of the log-softmax above it")
    return Loss(product, rows, weight, bias, chain, softmax, likelihood, sums, gradients)


def picks(chain: tuple[fx.Node, ...]) -> bool:
    """Whether a chain takes some of the tokens only, so that its ends differ in rows."""
    return any(node.target in PICKS | UNPICKS for node in chain)


def _product_of(graph: fx.Graph, softmax: fx.Node) -> tuple[fx.Node, tuple[fx.Node, ...]]:
    """The product that makes the logits, and the ops between it and the log-softmax."""
    chain: list[fx.Node] = []
    reader, node = softmax, _node(softmax.args[0])
    while True:
        for user in node.users:
            if user is output_of(graph):
                raise NoMatch(f"the graph returns the logits (%{node.name})")
            if user is not reader:
                raise NoMatch(f"%{user.name} reads the logits too (%{node.name})")
        if node.target in (aten.mm.default, aten.addmm.default):
            return node, tuple(reversed(chain))
        if not _keeps_rows(node, PICKS):
            raise NoMatch(
                f"%{node.name}, between the product with the weight and %{softmax.name}, is not "
                "known to treat every token alike"
            )
        chain.append(node)
        reader, node = node, _node(node.args[0])


def _keeps_rows(node: fx.Node, others: frozenset[object]) -> bool:
    """Whether `node` is of `KEEP_ROWS` or `others`, and leaves the last dimension as it is."""
    if node.op != "call_function" or node.target not in KEEP_ROWS | others:
        return False
    source, value = _node(node.args[0]).meta["val"], node.meta["val"]
    if value.dim() == 0 or source.dim() == 0 or value.shape[-1] != source.shape[-1]:
        return False
    if node.target in CASTS:
        return bool(value.dtype.is_floating_point and value.device == source.device)
    if node.target in PICKS:
        return node.args[1] not in (-1, source.dim() - 1)
    return node.target not in UNPICKS or node.args[2] not in (-1, value.dim() - 1)


def _factors(product: fx.Node) -> tuple[fx.Node, fx.Node, fx.Node | None]:
    """Rows [T, H], weight [V, H] and bias [V] of a product."""
    bias = None
    if product.target is aten.addmm.default:
        bias = _node(product.args[0])
        if product.kwargs or bias.meta["val"].dim() != 1:
            raise NoMatch(f"%{product.name} is more than a product plus a bias")
    rows, transposed = (_node(argument) for argument in product.args[-2:])
    if transposed.target not in TRANSPOSES:
        raise NoMatch(f"the weight (%{transposed.name}) has one column per class, not one row")
    return rows, _node(transposed.args[0]), bias


def _readers(
    graph: fx.Graph, softmax: fx.Node
) -> tuple[fx.Node, tuple[fx.Node, ...], fx.Node | None, fx.Node | None]:
    """The likelihood, sums over the classes, and the gradients of likelihood and log-softmax."""
    found: dict[object, list[fx.Node]] = {}
    family = dict.fromkeys(_same_rows(softmax))
    for alias in family:
        for user in alias.users:
            if user is output_of(graph):
                raise NoMatch(f"the graph returns the log-probabilities (%{alias.name})")
            if user not in family:
                found.setdefault(user.target, []).append(user)
    # The readers that a loss has, and no other.
    likelihoods = found.pop(LIKELIHOOD, [])
    backward = found.pop(LIKELIHOOD_BACKWARD, [])
    tops = found.pop(SOFTMAX_BACKWARD, [])
    sums = found.pop(aten.sum.dim_IntList, [])
    for others in found.values():
        raise NoMatch(f"%{others[0].name} reads the log-probabilities too (%{softmax.name})")
    if len(likelihoods) != 1 or len(backward) > 1 or len(tops) > 1:
        raise NoMatch(f"%{softmax.name} serves {len(likelihoods)} losses, not one")
    for total in sums:
        flat = _node(total.args[0]).meta["val"].dim() == 2
        plain = len(total.args) == 2 and total.kwargs.keys() <= {"dtype"} and _wide(total, softmax)
        if not flat or not plain or list(total.args[1]) not in ([1], [-1]):  # type: ignore[arg-type]  # op schema
            raise NoMatch(f"%{total.name} is not a plain sum over the classes")
    return (
        likelihoods[0],
        tuple(sums),
        next(iter(backward), None),
        next(iter(tops), None),
    )


def _same_rows(softmax: fx.Node) -> list[fx.Node]:
    """The log-softmax, and whatever has all of its rows, in their order, in a dtype that has all of
    its numbers. A view of some tokens or classes is a reader like any other."""
    found = [softmax]
    for member in found:
        for user in member.users:
            whole = user.target in THE_SAME or _keeps_rows(user, frozenset())
            if whole and user.args[0] is member and _wide(user, softmax) and user not in found:
                found.append(user)
    return found


def _wide(node: fx.Node, softmax: fx.Node) -> bool:
    """Whether the dtype of a value has all numbers of that of the log-softmax."""
    dtype, narrow = node.meta["val"].dtype, softmax.meta["val"].dtype
    if not dtype.is_floating_point or dtype.itemsize < narrow.itemsize:
        return False  # before torch is asked, which refuses to promote float8
    return bool(torch.promote_types(dtype, narrow) == dtype)


def _check_likelihood(likelihood: fx.Node) -> None:
    """Refuse a likelihood that weighs its classes, is of one token, or has odd targets.

    raises  NoMatch
    """
    log_probs, target, weight = (likelihood.args[i] for i in range(3))
    if weight is not None:
        raise NoMatch(f"%{likelihood.name} weighs its classes")
    if _node(log_probs).meta["val"].dim() != 2:
        raise NoMatch(f"%{likelihood.name} is of one token")
    if _node(target).meta["val"].dtype is not torch.int64:
        raise NoMatch(f"the targets of %{likelihood.name} are not int64")


def _gradients(top: fx.Node, picked: fx.Node | None, weight: fx.Node, rows: fx.Node) -> Gradients:
    """The gradients that begin with `top`.

    raises  NoMatch
    """
    # Terms of the gradient of the log-probabilities.
    spreads, picks_found = [], []
    for term in _terms(_node(top.args[0]), top, top):
        if term is picked:
            picks_found.append(term)
        elif term.target is aten.expand.default and _one_per_row(_node(term.args[0]), term):
            spreads.append(_node(term.args[0]))
        else:
            raise NoMatch(f"%{term.name} is an unknown part of the gradient")
    if picked is not None and picks_found != [picked]:
        raise NoMatch(f"%{picked.name} goes elsewhere than to the log-softmax")
    # From the gradient of the logits on to that of the product, and what that is read by.
    chain: list[fx.Node] = []
    end = top
    while len(end.users) == 1 and _keeps_rows(following := next(iter(end.users)), UNPICKS):
        chain.append(following)
        end = following
    found = dict(_consumers(end, weight, rows))
    return Gradients(
        top,
        picked,
        tuple(spreads),
        tuple(chain),
        found.get("rows"),
        found.get("weight"),
        found.get("bias"),
    )


def _terms(node: fx.Node, reader: fx.Node, top: fx.Node) -> Iterator[fx.Node]:
    """The terms of the gradient that `top` is given; nobody else may read it, and no cast in it is
    to a narrower dtype than the last."""
    if set(node.users) != {reader}:
        raise NoMatch(f"%{node.name}, a gradient of the log-probabilities, has other readers")
    if node.target is aten.add.Tensor and not node.kwargs:
        for argument in node.args:
            yield from _terms(_node(argument), node, top)
    elif (
        node.target in RESHAPES | CASTS
        and _keeps_rows(node, frozenset())
        and _wide(node, _node(top.args[0]))
    ):
        yield from _terms(_node(node.args[0]), node, top)
    else:
        yield node


def _one_per_row(node: fx.Node, spread: fx.Node) -> bool:
    """Whether a value is [n, 1], of which `spread` is [n, V]."""
    value, rows = node.meta["val"], spread.meta["val"].shape[0]
    return bool(value.dim() == 2 and value.shape[1] == 1 and value.shape[0] == rows)


def _consumers(end: fx.Node, weight: fx.Node, rows: fx.Node) -> Iterator[tuple[str, fx.Node]]:
    """Gradients that the gradient of the product is multiplied for: ("rows", node) and so on."""
    for user in end.users:
        if user.target is aten.mm.default and user.args[0] is end and _same(user.args[1], weight):
            yield "rows", user
        elif user.target is aten.sum.dim_IntList and tuple(user.args[1:]) == ([0], True):
            yield "bias", user
        elif user.target in TRANSPOSES and len(user.users) == 1:
            (product,) = user.users
            if product.target is not aten.mm.default or product.args[0] is not user:
                raise NoMatch(f"%{product.name} reads the gradient of the logits")
            if not _same(product.args[1], rows):
                raise NoMatch(f"%{product.name} is no gradient of the weight")
            yield "weight", product
        else:
            raise NoMatch(f"%{user.name} reads the gradient of the logits")


def _same(one: object, other: fx.Node) -> bool:
    """Whether both are views of the same bytes, in the same shape."""
    return (
        isinstance(one, fx.Node)
        and root_of(one) is root_of(other)
        and one.meta["val"].shape == other.meta["val"].shape
    )


def _node(argument: object) -> fx.Node:
    if not isinstance(argument, fx.Node):
        raise NoMatch(f"{argument} is no node")
    return argument
