"""Results that the caller does not differentiate: there are the gradients that eager PyTorch has.

Where it has none, stock torch.compile computes with zeros.
"""

import copy
import gc
import random
import weakref
from unittest.mock import MagicMock

import pytest
import torch
import torch.nn.functional as F
from offloaded import twins
from sampled import sampled
from torch import library, nn

import zcompile
from zcompile.frontend import backend, undefined_gradients
from zcompile.frontend.undefined_gradients import Tracing
from zcompile.ir.torch_compat import TELLS_OF_GUARDS
from zcompile.runtime.gradients.gradients import Gradients
from zcompile.runtime.profile import COMPILING

DYNAMIC = [
    False,
    pytest.param(
        True,
        marks=pytest.mark.skipif(
            not TELLS_OF_GUARDS, reason="graphs with dynamic sizes need a torch above 2.11 for this"
        ),
    ),
]


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
@pytest.mark.parametrize("dynamic", DYNAMIC, ids=["static", "dynamic"])
@pytest.mark.parametrize("more", MORE.values(), ids=MORE)
def test_gradients_keep_the_memory_format_that_they_have_in_eager(more, dynamic):
    x = torch.randn(4, 16, 16, 16).contiguous(memory_format=torch.channels_last)
    pair = twins(Resized(more), device_memory="16MiB", dynamic=dynamic)
    pair.plain(x)[0].backward()
    pair.call(x)[0].backward()
    assert pair.same()
    assert_traced_again(pair)


def assert_traced_again(pair):
    """No gradient was taken for zeros."""
    assert zcompile.stats(pair.model)["inexact"] == []


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


def test_nothing_multiplies_zeros_by_infinity_and_heads_that_are_not_read_get_no_gradient():
    pair, x = twins(Heads()), torch.randn(4, 8)
    pair.plain(x)["first"].backward()
    pair.call(x)["first"].backward()
    assert pair.same()
    assert pair.model.second.weight.grad is None
    assert pair.model.scale.grad is None


@pytest.mark.parametrize("dynamic", DYNAMIC, ids=["static", "dynamic"])
def test_each_call_may_differentiate_other_results(dynamic):
    pair, x = twins(Heads(), dynamic=dynamic), torch.randn(4, 8)
    reads = [["first"], ["second"], ["first", "running"], ["running"], ["second", "first"]]
    for names in reads:
        for model in (pair.plain, pair.call):
            results = model(x)
            loss = sum(results[name].mean() for name in names)
            loss.backward(retain_graph=True)
            loss.backward()
    assert pair.same()
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
            read = "first" if step % 3 else "second"
            called(torch.randn(4, 8))[read].backward()
            optimizer.step()
            optimizer.zero_grad()
    for name, p in plain.named_parameters():
        assert torch.equal(p, model.get_parameter(name).cpu())


def test_hooks_are_called_for_parameters_that_get_a_gradient():
    """autograd comes to all parameters that the graph reads; those of the other head have none."""
    pair, x = twins(Heads()), torch.randn(4, 8)
    called = {}
    for model, call in ((pair.plain, pair.plain), (pair.model, pair.call)):
        told = called[model] = []
        for name, p in model.named_parameters():
            p.register_hook(lambda grad, name=name, told=told: told.append((name, grad.sum())))
            p.register_post_accumulate_grad_hook(
                lambda p, name=name, told=told: told.append((name, "whole", p.grad.sum()))
            )
        for read in ("first", "second", "second"):
            call(x)[read].backward()
    assert pair.same()
    assert {*map(str, called[pair.model])} == {*map(str, called[pair.plain])}
    assert len(called[pair.model]) == len(called[pair.plain])


def test_an_optimizer_in_backward_leaves_the_head_that_is_not_read():
    pair, x = twins(Heads()), torch.randn(4, 8)
    for model, call in ((pair.plain, pair.plain), (pair.model, pair.call)):
        steps = {p: torch.optim.AdamW([p], lr=0.1) for p in model.parameters()}

        def step(p, steps=steps):
            steps[p].step()
            p.grad = None

        for p in model.parameters():
            p.register_post_accumulate_grad_hook(step)
        for read in ("first", "first", "second", "first"):
            call(x)[read].backward()
    assert pair.same()


class Residual(nn.Module):
    """Heads after blocks with residuals."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64)) for _ in range(3)
        )
        self.heads = nn.ModuleList(nn.Linear(64, count) for count in (5, 5, 5, 1))

    def forward(self, x):
        for block in self.blocks:
            x = x + block(x)
        return [*(head(x) for head in self.heads), x]


@pytest.mark.parametrize("device_memory", sampled(["600KiB", "64MiB"]))
def test_a_backward_of_fewer_gradients_may_hold_more_than_that_of_all(device_memory):
    """What it computes is in another order. So it is one more graph, with which the device is
    shared anew."""
    pair = twins(Residual(), device_memory=device_memory)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.01) for m in (pair.plain, pair.model)]
    held = []
    for reads in ((0,), (0, 3), (0, 3), (4,), (0,)):
        x = torch.randn(8, 64)
        for call, optimizer in zip((pair.plain, pair.call), optimizers, strict=True):
            results = call(x)
            held.append(pair.session.split.expected_bytes)
            sum(results[read].square().mean() for read in reads).backward()
            optimizer.step()
        assert pair.same()
        for optimizer in optimizers:
            optimizer.zero_grad()
    assert held[-1] > held[1], "another model is needed, of which a backward holds more"
    assert_traced_again(pair)


class Twice(nn.Module):
    """Reads one weight for both results, and one for each."""

    def __init__(self):
        super().__init__()
        self.both, self.each = nn.Linear(8, 8), nn.ModuleList(nn.Linear(8, 8) for _ in range(2))

    def forward(self, x):
        h = self.both(x)
        return [part(h).cos().mean() for part in self.each]


@pytest.mark.parametrize("reads", [(0, 1), (0, 0), (1, 0, 1)])
def test_calls_that_feed_one_loss_may_leave_out_different_parameters(reads):
    """What one call leaves out another brings: hooks see the sum once."""
    pair = twins(Twice())
    called = {}
    xs = [torch.randn(4, 8) for _ in reads]
    for model, call in ((pair.plain, pair.plain), (pair.model, pair.call)):
        told = called[model] = []
        for name, p in model.named_parameters():
            p.register_post_accumulate_grad_hook(
                lambda p, name=name, told=told: told.append((name, p.grad.sum().item()))
            )
        for _ in range(2):
            sum(call(x)[read] for x, read in zip(xs, reads, strict=True)).backward()
    assert pair.same()
    assert sorted(called[pair.model]) == sorted(called[pair.plain])


def test_what_one_call_leaves_out_another_brings_alone(monkeypatch):
    """Nothing is added up for a parameter of which the rest of a pass brings one contribution."""
    pair, x = twins(Twice()), torch.randn(4, 8)
    collected = []
    collect = Gradients._collect

    def noting(gradients, key, name, *others):
        collected.append(name)
        collect(gradients, key, name, *others)

    monkeypatch.setattr(Gradients, "_collect", noting)
    first, second = (pair.call(x)[read] for read in (0, 1))
    (first + second).backward()
    # autograd comes to the second call first, which does not know yet what the first leaves out.
    assert {name.rpartition(".")[0] for name in collected} == {"both", "each.1"}


@pytest.mark.parametrize("given", [False, True], ids=["none", "a plain tensor"])
def test_what_code_outside_of_the_graph_brings_to_a_parameter_that_it_leaves_out(given):
    pair, x = twins(Heads()), torch.randn(4, 8)
    called, kept = {}, {}
    for model, call in ((pair.plain, pair.plain), (pair.model, pair.call)):
        told = called[model] = []
        weight = model.second.weight
        if given:
            weight.grad = kept[model] = torch.ones(3, 8)  # which is added to in place
        weight.register_post_accumulate_grad_hook(
            lambda p, told=told: told.append(p.grad.sum().item())
        )
        (call(x)["first"] + weight.square().sum()).backward()
        call(x)["first"].backward()
    assert pair.same()
    assert called[pair.model] == called[pair.plain]
    assert len(called[pair.model]) == 1


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


# --- What reads memory as it lies, and what decides by whether there is a gradient ---


@library.custom_op("zinf_tests::as_it_lies", mutates_args=())
def as_it_lies(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous() * 2


@as_it_lies.register_fake
def _(x):
    return torch.empty(x.shape)


@library.custom_op("zinf_tests::as_it_lies_backward", mutates_args=())
def as_it_lies_backward(gradient: torch.Tensor) -> torch.Tensor:
    """Of zeros no zeros, and of memory that is turned another result."""
    flat = torch.as_strided(gradient, (gradient.numel(),), (1,))
    return flat.view(gradient.shape) * 2 + 1


@as_it_lies_backward.register_fake
def _(gradient):
    return torch.empty(gradient.shape)


as_it_lies.register_autograd(
    lambda ctx, g: torch.ops.zinf_tests.as_it_lies_backward(g.contiguous())
)


class Two(torch.autograd.Function):
    """Its backward is given zeros where one of its results is not differentiated."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.sin(), x.cos()

    @staticmethod
    def backward(ctx, first, second):
        (x,) = ctx.saved_tensors
        return first * x.cos() - second.exp() * x.sin()


C, N = 4, 6
"""Channels, and places in a row of an image."""


LAYERS = {
    "conv": lambda: nn.Conv2d(C, C, 3, padding=1),
    "group norm": lambda: nn.GroupNorm(2, C),
    "weight norm": lambda: nn.utils.parametrizations.weight_norm(nn.Conv2d(C, C, 1)),
    "layer norm": lambda: nn.LayerNorm(N),
    "transposed": lambda: nn.ConvTranspose2d(C, C, 1),
}
OPS = {
    "sum": lambda p, q: p + q,
    "product": lambda p, q: p * q.tanh(),
    "cat": lambda p, q: torch.cat([p[:, :2], q[:, 2:]], 1),
    "stack": lambda p, q: torch.stack([p, q, torch.zeros_like(p)]).sum(0),
    "cat of zeros": lambda p, q: torch.cat([p, torch.zeros_like(q)], 1)[:, 1:-3],
    "zeros": lambda p, q: p + torch.zeros_like(q),
    "relu": lambda p, q: F.relu(p),
    "resized": lambda p, q: F.interpolate(
        F.interpolate(p, scale_factor=2, mode="bilinear"), size=N, mode="bilinear"
    ),
    "channels last": lambda p, q: p.contiguous(memory_format=torch.channels_last),
    "contiguous": lambda p, q: p.contiguous(),
    "turned": lambda p, q: p.transpose(2, 3),
    "softmax": lambda p, q: p.softmax(1),
    "as it lies": lambda p, q: torch.ops.zinf_tests.as_it_lies(p),
    "first of two": lambda p, q: Two.apply(p)[0],
    "both": lambda p, q: sum(Two.apply(p)),
    "chunks": lambda p, q: torch.cat([p.chunk(2, 1)[1], p.chunk(2, 1)[0].sin()], 1),
    "where": lambda p, q: torch.where(p > 0, p, q),
    "written": lambda p, q: p.clone().add_(q).mul_(2),
    "means": lambda p, q: p.mean((2, 3), keepdim=True).expand_as(p) + 0 * q,
    "root": lambda p, q: p.abs().sqrt(),
    "detached": lambda p, q: p + q.detach(),
    "checkpointed": lambda p, q: torch.utils.checkpoint.checkpoint(
        lambda t: F.gelu(t).cos(), p, use_reentrant=False
    ),
}
LOSSES = (
    lambda t: F.mse_loss(t, torch.ones_like(t)),
    lambda t: F.cross_entropy(t, torch.arange(2 * N * N).reshape(2, N, N) % C),
    lambda t: t.square().mean(),
    lambda t: (t * torch.linspace(-1, 1, N)).sum(),
)


class Drawn(nn.Module):
    """Random layers over images, of which some losses and values on the way are returned."""

    def __init__(self, rng):
        super().__init__()
        self.layers = nn.ModuleList([nn.Conv2d(C, C, 1)])
        self.steps = []
        for number in range(1, rng.randint(5, 12)):
            first, second = rng.randrange(max(0, number - 3), number), rng.randrange(number)
            if rng.random() < 0.4:
                self.layers.append(LAYERS[rng.choice([*LAYERS])]())
                self.steps.append((first, len(self.layers) - 1))
            else:
                self.steps.append((first, second, rng.choice([*OPS])))
        number = len(self.steps)
        losses = [
            (rng.randint(max(1, number - 3), number), rng.randrange(4))
            for _ in range(rng.randint(1, 3))
        ]
        self.losses = list(dict.fromkeys(losses))
        self.more = rng.sample(range(1, number + 1), rng.randint(1, 3))

    def forward(self, x):
        values = [self.layers[0](x)]
        for first, *rest in self.steps:
            if len(rest) == 1:
                values.append(self.layers[rest[0]](values[first]))
            else:
                values.append(OPS[rest[1]](values[first], values[rest[0]]))
        losses = [LOSSES[kind](values[at]) for at, kind in self.losses]
        return *losses, *(values[at] for at in self.more)


class Detached(nn.Module):
    """A model of which some results alone are differentiable."""

    def __init__(self, model, kept):
        super().__init__()
        self.model, self.kept = model, kept

    def forward(self, x):
        results = self.model(x)
        return [r if i in self.kept else r.detach() for i, r in enumerate(results)]


def gradients(call, model, x, kept):
    for p in model.parameters():
        p.grad = None
    x = x.detach().clone().requires_grad_()
    results = call(x)
    ones = [torch.ones_like(results[i]) for i in kept]
    torch.autograd.backward([results[i] for i in kept], ones)
    found = {name: p.grad for name, p in model.named_parameters()}
    return {"x": x.grad} | {n: None if g is None else g.detach().cpu() for n, g in found.items()}


def unequal(some, others):
    """Names of gradients that differ; one that is not there counts as zeros."""

    def differs(x, y):
        x, y = (torch.zeros_like(y) if x is None else x), (torch.zeros_like(x) if y is None else y)
        return not torch.equal(x.nan_to_num(7), y.nan_to_num(7))

    pairs = {name: (some[name], others[name.removeprefix("model.")]) for name in some}
    return [n for n, (x, y) in pairs.items() if (x, y) != (None, None) and differs(x, y)]


SEEDS = [pytest.param(s, marks=[] if s < 1 else pytest.mark.slow) for s in range(100)]


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("seed", SEEDS)
def test_random_results_of_random_models_are_differentiated_alone(seed):
    """As if the others were detached; and with the bits of eager PyTorch, where that is so."""
    rng = random.Random(seed)
    torch.manual_seed(seed)
    model = Drawn(rng)
    layout = rng.choice([torch.channels_last, torch.contiguous_format])
    x = torch.randn(2, C, N, N).contiguous(memory_format=layout)
    kept = [0, *(i for i in range(1, len(model(x))) if rng.random() < 0.3)]
    pair, other = twins(copy.deepcopy(model)), twins(Detached(model, kept))
    found = gradients(pair.call, pair.model, x, kept)
    expected = gradients(other.call, other.model, x, kept)
    eager = gradients(pair.plain, pair.plain, x, kept)
    assert_traced_again(pair)
    assert unequal(expected, found) == []
    assert unequal(expected, eager) == unequal({f"model.{n}": g for n, g in found.items()}, eager)


# --- Under what torch keeps for a thread, and for a call ---


def test_autocast_around_forward_is_that_of_the_graph_that_is_traced_again():
    pair, x = twins(Heads()), torch.randn(4, 8)
    for model in (pair.plain, pair.call):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            result = model(x)["first"]
        result.backward()
    assert pair.same()
    assert_traced_again(pair)


class Conditional(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x):
        h = self.linear(x)
        wave = torch.cond(h.sum() > 0, lambda h: h.sin(), lambda h: h.cos(), (h,))
        return wave.mean(), h, (wave * 2).exp()


@pytest.mark.slow
def test_graphs_of_branches_are_differentiated_alone():
    pair, x = twins(Conditional()), torch.randn(4, 8)
    pair.plain(x)[0].backward()
    pair.call(x)[0].backward()
    assert pair.same()
    assert_traced_again(pair)


class Counted(nn.Module):
    """With a buffer that each call writes, random numbers, and a view of another result."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.calls = nn.Buffer(torch.zeros(()))

    def forward(self, x):
        self.calls.add_(1)
        h = F.dropout(self.linear(x), 0.5)
        return h.square().mean() * self.calls, h, h.flatten(), h.exp()


@pytest.mark.parametrize("read", [0, 2, 3])
def test_calls_that_write_and_draw_are_not_repeated(read):
    pair, x = twins(Counted()), torch.randn(4, 8)
    for model in (pair.plain, pair.call):
        torch.manual_seed(1)
        for _ in range(2):
            model(x)[read].mean().backward()
    assert pair.same()
    assert_traced_again(pair)


@pytest.mark.slow
def test_a_tight_budget_makes_again_and_offloads_what_it_did():
    """What forward saved was decided for the backward of all results."""

    class Deep(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(8))

        def forward(self, x):
            for layer in self.layers:
                x = layer(x).tanh()
            return x.square().mean(), x.exp().sum()

    pair, x = twins(Deep(), device_memory="96KiB", host_memory="1MiB"), torch.randn(64, 32)
    plans = []

    def noted(joint, plan, passes, **given):
        plans.append(plan)
        return run(joint, plan, passes, **given)

    run = backend.run
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(backend, "run", noted)
        for read in (0, 1, 0):
            for model in (pair.plain, pair.call):
                model(x)[read].backward()
    assert pair.same()
    assert_traced_again(pair)
    _, *again = plans
    assert len(again) == 2
    assert all({row.action for row in plan.activations} - {"keep"} for plan in again)


# --- Where there are zeros ---


CONSTANTS = {
    "picked": lambda h: h[:, torch.tensor([0, 3, 2])],
    "where": lambda h: torch.where(h > 0, h, torch.tensor(-1e9)),
    "bf16": lambda h: h * torch.as_tensor([1.5] * 6, dtype=torch.bfloat16),
    "conjugated": lambda h: (h * torch.tensor([1j] * 6).conj()).real + h,
}


class Constant(nn.Module):
    """Makes a tensor of numbers in each forward, as position ids and masks are made."""

    def __init__(self, use):
        super().__init__()
        self.linear = nn.Linear(8, 6)
        self.use = use

    def forward(self, x):
        h = self.linear(x)
        return self.use(h).cos().mean(), h


@pytest.mark.parametrize("use", CONSTANTS.values(), ids=CONSTANTS)
def test_graphs_with_tensors_of_numbers_are_differentiated_alone(use):
    pair = twins(Constant(use))
    x = torch.randn(4, 8)
    for call in (pair.plain, pair.call):
        call(x)[0].backward()
    assert pair.same()
    assert_traced_again(pair)


def test_a_graph_of_which_no_digest_can_be_made_has_zeros(monkeypatch):
    monkeypatch.setattr(
        backend.TracedJoint, "of", MagicMock(side_effect=AssertionError("no digest\nof this"))
    )
    pair, x = twins(Heads()), torch.randn(4, 8)
    for call in (pair.plain, pair.call):
        call(x)["first"].backward()
    assert_same_but_for_zeros_or_not_numbers(pair)
    (row,) = zcompile.stats(pair.model)["inexact"]
    assert row["why"].endswith("AssertionError: no digest")


def test_tracing_again_is_no_part_of_a_step(monkeypatch):
    working = []
    without = Tracing.without

    def noting(*args):
        before = COMPILING.seconds
        try:
            return without(*args)
        finally:
            working.append((COMPILING.works, before))

    monkeypatch.setattr(Tracing, "without", noting)
    pair = twins(Heads())
    x = torch.randn(4, 8)
    pair.call(x)["first"].backward()
    ((works, before),) = working
    assert works
    assert not COMPILING.works
    assert COMPILING.seconds > before


def test_what_fails_while_it_is_traced_again_is_told_and_has_zeros(monkeypatch, caplog):
    monkeypatch.setattr(Tracing, "without", lambda *_: ValueError("not today"))
    pair, x = twins(Heads()), torch.randn(4, 8)
    with caplog.at_level("INFO", "zcompile"):
        for _ in range(2):
            for model in (pair.plain, pair.call):
                model(x)["first"].backward()
    assert_same_but_for_zeros_or_not_numbers(pair)
    (row,) = zcompile.stats(pair.model)["inexact"]
    assert row["by"] == "undefined-gradients"
    assert row["why"].endswith("ValueError: not today")
    assert sum("not today" in line for line in caplog.messages) == 1


def assert_same_but_for_zeros_or_not_numbers(pair):
    """Ours are zeros where eager PyTorch has none. Zeros times infinity are no numbers: of the
    scale in `Heads`, and what it scales."""
    for (name, ours), plain in zip(
        pair.model.named_parameters(), pair.plain.parameters(), strict=True
    ):
        expected = torch.zeros_like(plain) if plain.grad is None else plain.grad
        if name.startswith(("first", "second")):
            assert torch.equal(ours.grad.cpu(), expected)


def test_beyond_a_number_of_choices_there_are_zeros(monkeypatch):
    monkeypatch.setattr(undefined_gradients, "MOST_SETS", 1)
    pair, x = twins(Two_()), torch.randn(4, 8)
    for read in (0, 1, 0, 1):
        for model in (pair.plain, pair.call):
            model(x)[read].backward()
        told = [row["why"] for row in zcompile.stats(pair.model)["inexact"]]
        assert len(told) == (0 if read == 0 and not told else 1)
    assert pair.same()


class Two_(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x):
        h = self.linear(x)
        return h.mean(), h.square().mean()


def test_a_graph_in_tiles_has_zeros(monkeypatch):
    """It is told already that sums over tiles may round otherwise."""

    class Wide(nn.Module):
        def __init__(self):
            super().__init__()
            self.wide = nn.Linear(64, 256)

        def forward(self, x):
            h = self.wide(x)
            return h.square().mean(), h.exp().mean()

    pair, x = twins(Wide(), tile_bytes="16KiB"), torch.randn(4, 64)
    for model in (pair.plain, pair.call):
        model(x)[0].backward()
    for ours, plain in zip(pair.model.parameters(), pair.plain.parameters(), strict=True):
        assert torch.allclose(ours.grad.cpu(), plain.grad)


def test_what_a_graph_is_traced_again_from_keeps_no_model_alive(tmp_path):
    pair, x = twins(Heads()), torch.randn(4, 8)
    pair.call(x)["first"].backward()
    session = weakref.ref(pair.session)
    plain = pair.plain
    del pair
    gc.collect()
    assert session() is None
    del plain
