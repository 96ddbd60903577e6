"""The graph of a backward without what is computed from undefined gradients."""

import pytest
import torch
from offloaded import twins
from torch import Tensor, fx, nn
from torch.nn import functional as F

from zcompile.frontend import undefined_gradients
from zcompile.ir import ops
from zcompile.ir.graph import find, insert, output_of, phase_of, region_of, root_of, set_region
from zcompile.ir.torch_compat import is_tangent
from zcompile.passes.undefined_gradients import without_undefined

aten = torch.ops.aten


class Sums(nn.Module):
    """Gradients of an input and of a parameter that are one value, where the loss alone is
    differentiated; one of them is a sum in the graph, or both are."""

    def __init__(self, sums):
        super().__init__()
        self.sums = sums
        self.p = nn.Parameter(torch.randn(64, 64))

    def forward(self, x):
        more = {"p": self.p * 2.0, "x": x * 3.0}
        return (x + self.p).cos().sum(), *(more[name] for name in self.sums)


def given_of(model: nn.Module, x: Tensor, monkeypatch) -> tuple[fx.Graph, set[str]]:
    """What the pass is given where the first result is differentiated: the graph of a backward, and
    the names of undefined gradients."""
    found = []

    def noted(graph, tangents):
        found.append((graph, tangents))
        return without_undefined(graph, tangents)

    monkeypatch.setattr(undefined_gradients, "without_undefined", noted)
    twins(model).call(x)[0].backward()
    (one,) = found
    return one


@pytest.fixture
def given(request, monkeypatch):
    """What the pass is given of `Sums`."""
    model = Sums(getattr(request, "param", "px"))
    return given_of(model, torch.randn(64, 64, requires_grad=True), monkeypatch)


def names_of(graph: fx.Graph) -> set[str]:
    return {node.name for node in graph.nodes}


def leaving(graph: fx.Graph) -> list[fx.Node]:
    """The value whose memory is sent home, and the one whose memory is returned."""
    sent = [root_of(sink.args[0]) for sink in find(graph, *ops.SINKS)]
    returned = [r for r in output_of(graph).all_input_nodes if r.target not in ops.SINKS]
    return [*sent, *map(root_of, returned)]


def test_nothing_is_computed_from_undefined_gradients(given):
    graph, tangents = given
    made = without_undefined(graph, tangents)
    assert len(tangents) == 2
    assert tangents <= names_of(graph)
    assert tangents.isdisjoint(names_of(made))
    assert find(graph, aten.add.Tensor)
    assert not find(made, aten.add.Tensor)
    assert [n.name for n in find(graph, *ops.OURS)] == [n.name for n in find(made, *ops.OURS)]


@pytest.mark.parametrize("given", ["px", "p", "x"], indirect=True)
def test_what_is_sent_home_is_not_returned_as_well(given):
    """A caller may write to what it is returned, and by then the other is still in flight."""
    sent, returned = leaving(without_undefined(*given))
    assert sent is not returned


@pytest.mark.parametrize("which", ["the sum", "its operand"])
def test_what_is_written_to_is_not_shared(given, which):
    """Sums over tiles write to what they are begun with."""
    graph, tangents = given
    total = find(graph, aten.add.Tensor)[0]
    (operand,) = (n for n in total.all_input_nodes if not from_any(n, tangents))
    written = total if which == "the sum" else operand
    with graph.inserting_after(total):
        write = insert(
            graph,
            aten.add_.Tensor,
            written,
            written,
            like=total,
            phase=phase_of(total),
            val=total.meta["val"],
        )
    set_region(write, region_of(total))
    made = without_undefined(graph, tangents)
    (write,) = find(made, aten.add_.Tensor)
    memory = root_of(write.args[0])
    if which == "the sum":
        assert memory.name != operand.name
    else:
        assert memory not in leaving(made)


def from_any(node: fx.Node, tangents: set[str]) -> bool:
    """Whether a node is computed from any of these."""
    return node.name in tangents or any(from_any(n, tangents) for n in node.all_input_nodes)


class Read(nn.Module):
    """A loss, and what else is computed from the same value."""

    def __init__(self, more):
        super().__init__()
        self.linear, self.more = nn.Linear(8, 8), more

    def forward(self, x):
        h = self.linear(x)
        return h.cos().sum(), *self.more(h)


MORE = {
    "parts": lambda h: [
        h[1:3] * 2,
        h[:, 2] * 2,
        h.diagonal() * 2,
        *(part * 2 for part in h.chunk(2)),
    ],
    "rows that are picked": lambda h: [
        h[h[:, 0].argsort()],
        h.gather(1, h.argsort(1)),
        h.index_select(0, torch.tensor([2, 1, 2])),
        h.max(1).values,
        h.sort().values,
        h.take_along_dim(h.argsort(0), 0),
    ],
    "masked": lambda h: [h.masked_fill(h > 0, 0.0), h.tril(), torch.where(h > 0, h, 0.0), h.relu()],
    "joined": lambda h: [torch.cat([h, h]), torch.stack([h, h * 2]), F.pad(h, (1, 1)), h.flip(0)],
    "sums": lambda h: [h.mean(0), h.cumsum(0), h.softmax(1), F.layer_norm(h, (8,)), h.roll(1, 0)],
    "products": lambda h: [h @ h, h[None] @ h[None], h @ h[0], h.half().float(), h / 3 - h],
    "images": lambda h: [F.interpolate(h[None, None], scale_factor=2, mode="bilinear")],
}


@pytest.mark.parametrize("more", MORE.values(), ids=MORE)
def test_what_ops_make_of_undefined_gradients_is_undefined(more, monkeypatch):
    graph, tangents = given_of(Read(more), torch.randn(8, 8), monkeypatch)
    assert len(tangents) == len(more(torch.randn(8, 8)))
    assert tangents.isdisjoint(names_of(without_undefined(graph, tangents)))


def test_a_tangent_that_is_read_all_the_same_stays(given):
    """By an op that is not known to make zeros of zeros."""
    graph, tangents = given
    scaled = find(graph, aten.mul.Tensor)
    first = next(n for n in scaled if from_any(n, tangents))
    first.target = aten.pow.Tensor_Scalar
    first.args = (first.args[0], 2)
    made = without_undefined(graph, tangents)
    kept = {n.name for n in made.find_nodes(op="placeholder") if is_tangent(n)}
    assert len(kept & tangents) == 1
