"""Results that the caller does not differentiate: gradients of all else are those of eager PyTorch.

Where eager PyTorch has no gradient, torch.compile computes with zeros.
"""

import copy

import pytest
import torch
import torch.nn.functional as F
from offloaded import twins
from torch import nn

import zcompile


@pytest.fixture
def one_thread():
    """By one thread kernels add up in another order where memory is laid out otherwise."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


class Resized(nn.Module):
    """A loss of an image that is made larger, and more of what is on the way.

    Of an image in channels_last, `interpolate` has a gradient that is contiguous.
    """

    def __init__(self, more):
        super().__init__()
        self.conv = nn.Conv2d(16, 5, 1)
        self.more = more

    def forward(self, x):
        h = self.conv(x)
        large = F.interpolate(h, size=(64, 64), mode="bilinear")
        loss = F.cross_entropy(large, torch.arange(64 * 64).reshape(1, 64, 64).tile(4, 1, 1) % 5)
        return loss, *self.more(h, large)


MORE = {
    "the image": lambda h, large: [h],
    "both images": lambda h, large: [h, large],
    "computed from it": lambda h, large: [h.cos(), F.relu(h).mean(1), h],
}


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("more", MORE.values(), ids=MORE)
def test_gradients_keep_the_memory_format_that_they_have_in_eager(more, dynamic):
    x = torch.randn(4, 16, 16, 16).contiguous(memory_format=torch.channels_last)
    pair = twins(Resized(more), device_memory="16MiB", dynamic=dynamic)
    pair.plain(x)[0].backward()
    pair.call(x)[0].backward()
    assert pair.same()


class Turned(nn.Module):
    """A result that lies turned in memory, where the gradient from within does not."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 6)
        self.weights = nn.Buffer(torch.randn(4, 6, 5))

    def forward(self, x):
        h = self.linear(x).transpose(1, 2)
        return (h * self.weights).sum(), h


def test_a_view_that_the_memory_format_of_eager_does_not_have_is_of_a_copy():
    pair, x = twins(Turned()), torch.randn(4, 5, 8)
    pair.plain(x)[0].backward()
    pair.call(x)[0].backward()
    assert pair.same()


class Heads(nn.Module):
    """Two losses of one trunk, a logarithm of zeros, and a running sum of exponentials, whose
    backward is ops that are not known to make zeros of zeros."""

    def __init__(self):
        super().__init__()
        self.trunk = nn.Linear(8, 8)
        self.first, self.second = nn.Linear(8, 3), nn.Linear(8, 3)
        self.scale = nn.Parameter(torch.zeros(8))

    def forward(self, x):
        h = self.trunk(x)
        return {
            "first": self.first(h).square().mean(),
            "second": self.second(h).cos().mean(),
            "log": (h * self.scale).log(),
            "running": h.logcumsumexp(0),
        }


def assert_same_but_for_zeros(pair):
    """Gradients are bit-equal; ours are zeros, where eager PyTorch has none."""
    for ours, plain in zip(pair.model.parameters(), pair.plain.parameters(), strict=True):
        expected = torch.zeros_like(plain) if plain.grad is None else plain.grad
        assert torch.equal(ours.grad.cpu(), expected)


def test_nothing_multiplies_zeros_by_infinity_and_heads_that_are_not_read_get_zeros():
    pair, x = twins(Heads()), torch.randn(4, 8)
    pair.plain(x)["first"].backward()
    pair.call(x)["first"].backward()
    assert_same_but_for_zeros(pair)
    assert pair.plain.second.weight.grad is None
    assert pair.plain.scale.grad is None


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_each_call_may_differentiate_other_results(dynamic):
    pair, x = twins(Heads(), dynamic=dynamic), torch.randn(4, 8)
    reads = [["first"], ["second"], ["first", "running"], ["running"], ["second", "first"]]
    for names in reads:
        for model in (pair.plain, pair.call):
            results = model(x)
            loss = sum(results[name].mean() for name in names)
            loss.backward(retain_graph=True)
            loss.backward()
    assert_same_but_for_zeros(pair)
    assert len(pair.graphs) == 1


def test_training_that_alternates_between_heads_is_bit_equal_under_plans(tmp_path):
    torch.manual_seed(0)
    plain = Heads()
    model = copy.deepcopy(plain)
    zcompile.offload(
        model, device="cpu", device_memory="64KiB", host_memory="256KiB", disk=tmp_path
    )
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="zinf")
    for called, trained in ((plain, plain), (compiled, model)):
        torch.manual_seed(1)
        optimizer = torch.optim.AdamW(trained.parameters(), lr=1e-2, fused=True)
        for step in range(8):
            read, other = ("first", "second")[:: 1 if step % 3 else -1]
            called(torch.randn(4, 8))[read].backward()
            for p in trained.get_submodule(other).parameters():
                p.grad = None  # as in eager
            optimizer.step()
            optimizer.zero_grad()
    for name, p in plain.named_parameters():
        assert torch.equal(p, model.get_parameter(name).cpu())


def test_an_input_that_only_an_undefined_gradient_reaches_gets_none():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x, y):
            return self.linear(x).mean(), self.linear(y).sin()

    pair = twins(Two())
    x, y = (torch.randn(4, 8, requires_grad=True) for _ in range(2))
    pair.call(x, y)[0].backward()
    found, x.grad = x.grad, None
    assert y.grad is None
    pair.plain(x, y)[0].backward()
    assert torch.equal(found, x.grad)
    assert pair.same()


def test_results_of_a_subclass_are_differentiated_with_zeros_as_torch_does():
    class Ragged(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x):
            h = self.linear(x)
            return h.values().square().mean(), h.sin(), h.values().cos()

    rows = [torch.randn(n, 8) for n in (2, 5, 3)]
    pair = twins(Ragged())
    for model in (pair.plain, pair.call):
        model(torch.nested.nested_tensor(rows, layout=torch.jagged))[0].backward()
    assert pair.same()
