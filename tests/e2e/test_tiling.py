"""Models with weights that the device cannot hold whole: they train, as eager would."""

import pytest
import torch
from offloaded import twins
from sampled import sampled
from small_models import Tied
from torch import nn
from torch.nn import functional as F

import zcompile
from examples.train_gpt import Block, Shape
from zcompile.errors import BudgetExceeded
from zcompile.ir.units import Bytes, KiB

CLOSE = {"rtol": 1e-4, "atol": 2e-6}
"""Three steps in float32: input gradients are sums over tiles, and clipping has norms of norms."""


class Conv1D(nn.Module):
    """As GPT-2's: the weight is [in, out], so that tiles are summed over in forward."""

    def __init__(self, inside, outside):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(inside, outside) / inside**0.5)
        self.bias = nn.Parameter(torch.zeros(outside))

    def forward(self, x):
        return torch.addmm(self.bias, x, self.weight)


class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Parameter(torch.randn(16, 32, 40) / 6)
        self.down = nn.Parameter(torch.randn(16, 40, 32) / 6)

    def forward(self, x):
        return torch.bmm(F.gelu(torch.bmm(x, self.up)), self.down)


def seeded(seed):
    return torch.Generator().manual_seed(seed)


MODELS = {
    "mlp": lambda: (
        nn.Sequential(nn.Linear(128, 192), nn.GELU(), nn.Linear(192, 128)),
        torch.randn(5, 128, generator=seeded(1)),
    ),
    "transposed": lambda: (
        nn.Sequential(Conv1D(128, 192), nn.GELU(), Conv1D(192, 128)),
        torch.randn(5, 128, generator=seeded(1)),
    ),
    "embedding": lambda: (Tied(320, 64), torch.randint(0, 320, (2, 3), generator=seeded(1))),
    "convolution": lambda: (
        nn.Sequential(nn.Conv2d(32, 96, 3, padding=1), nn.ReLU(), nn.Conv2d(96, 32, 3)),
        torch.randn(1, 32, 4, 4, generator=seeded(1)),
    ),
    "experts": lambda: (Experts(), torch.randn(16, 2, 32, generator=seeded(1))),
}
BUDGET = 40 * KiB
"""Half of the largest weight of each model, or less; what is computed has to fit beside it."""


def train(model, call, x, steps=3, micro=1, clip=None, lr=1e-2):
    """The losses of a loop with a stock optimizer.

    By its usual `eps`, 1e-8, a gradient that is nearly zero moves its parameter as far as one that
    is not, by the sign that rounding gave it.
    """
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, eps=1e-4, fused=True)
    losses = []
    for step in range(steps):
        for _ in range(micro):
            torch.manual_seed(step)
            loss = call(x).square().mean() / micro
            loss.backward()
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def both(name, tmp_path=None, **how):
    torch.manual_seed(0)
    model, x = MODELS[name]()
    disk = {} if tmp_path is None else {"disk": tmp_path}
    pair = twins(model, device_memory=Bytes(BUDGET), **disk)
    losses = train(pair.model, pair.call, x, **how), train(pair.plain, pair.plain, x, **how)
    assert torch.allclose(*map(torch.tensor, losses), **CLOSE)
    for tiered, plain in zip(pair.model.parameters(), pair.plain.parameters(), strict=True):
        assert torch.allclose(tiered.detach().cpu(), plain.detach(), **CLOSE)
    return pair


# The others are cut in tests/passes/test_tile_matmuls.py; some train below.
@pytest.mark.parametrize("name", sampled(MODELS, "experts"))
def test_a_model_trains_whose_weights_do_not_fit(name):
    pair = both(name)
    assert max(p.nbytes for p in pair.plain.parameters()) >= 2 * BUDGET


@pytest.mark.parametrize("name", sampled(["mlp", "embedding"], "embedding"))
def test_over_micro_batches_with_clipping_and_a_disk(name, tmp_path):
    both(name, tmp_path, micro=2, clip=0.05)


def test_outputs_and_gradients_of_weights_are_exact_where_tiles_are_outputs():
    torch.manual_seed(0)
    pair = twins(nn.Linear(64, 96), device_memory=Bytes(BUDGET))
    assert pair.train(torch.randn(5, 64))


@pytest.mark.parametrize("bias", sampled([False, True], True))
def test_equal_tiles_are_compiled_once(bias):
    torch.manual_seed(0)
    pair = twins(nn.Linear(64, 512, bias=bias), device_memory=Bytes(BUDGET))
    assert pair.train(torch.randn(5, 64))
    counts = zcompile.stats(pair.model)
    assert counts["distinct_regions"] <= 8 < counts["regions"]


def trained_block(width, budget):
    """Bytes that a transformer block took at most, and of its largest weight: with attention, and
    nothing said of tiles."""
    torch.manual_seed(0)
    block = Block(Shape(layers=1, width=width, heads=4))
    pair = twins(
        block, device_memory=Bytes(budget), host_memory="1GiB", residency=False, max_lead=1
    )
    x = torch.randn(1, 8, width, generator=seeded(1))
    # By 1e-2 the wide one would go to a loss of 16,000, and make much of last bits.
    losses = [train(pair.model, pair.call, x, lr=1e-4)]
    peak = pair.session.meter.peak()["together"]
    losses.append(train(pair.plain, pair.plain, x, lr=1e-4))
    assert torch.allclose(*map(torch.tensor, losses), **CLOSE)
    return peak, max(p.nbytes for p in pair.plain.parameters())


@pytest.mark.slow  # each tiled layer within its budget is above
@pytest.mark.parametrize(
    ("narrow", "wide"),
    [
        (128, 256),
        pytest.param(128, 1024, marks=pytest.mark.slow),  # Figure 6b of ZeRO-Infinity, scaled down
    ],
)
def test_a_block_trains_in_what_a_narrower_one_takes_untiled(narrow, wide):
    budget, _ = trained_block(narrow, "1GiB")
    peak, largest = trained_block(wide, budget)
    assert peak <= budget < largest


def test_a_hook_sees_the_whole_gradient():
    torch.manual_seed(0)
    pair = twins(nn.Linear(64, 96), device_memory=Bytes(BUDGET))
    seen = []
    pair.model.weight.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.shape))
    assert pair.train(torch.randn(5, 64))
    assert seen == [torch.Size([96, 64])]


@pytest.mark.slow
def test_what_was_saved_resumes(tmp_path):
    torch.manual_seed(0)
    pair = both("mlp")
    zcompile.save(tmp_path / "run", pair.model)
    again = MODELS["mlp"]()[0]
    zcompile.offload(again, device="cpu", device_memory=Bytes(BUDGET), host_memory="16MiB")
    zcompile.resume(tmp_path / "run", again)
    for p, q in zip(again.parameters(), pair.model.parameters(), strict=True):
        assert torch.equal(p.detach().cpu(), q.detach().cpu())


def test_where_not_even_a_row_fits_the_error_says_what_would():
    def run(budget):
        model = nn.Linear(8192, 4, bias=False)
        zcompile.offload(model, device="cpu", device_memory=Bytes(budget), host_memory="16MiB")
        torch._dynamo.reset()
        torch.compile(model, backend="zinf")(torch.ones(1, 8192)).sum().backward()

    with pytest.raises(Exception, match="device_memory=") as caught:
        run(BUDGET)
    refused = caught.value.__cause__ or caught.value.__context__
    assert isinstance(refused, BudgetExceeded)
    assert refused.needed_bytes >= 4 * 8192, "a row at least"
    run(refused.needed_bytes)


def test_a_limit_of_the_user_cuts_what_would_fit():
    torch.manual_seed(0)
    pair = twins(nn.Linear(64, 96), tile_bytes=8192)
    assert pair.train(torch.randn(5, 64))
