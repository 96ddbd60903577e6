"""Models that give their parameters to ops with graphs of their own, as `torch.cond`."""

import copy

import pytest
import torch
from pairs import same_training
from sampled import sampled
from torch import nn, optim
from torch._higher_order_ops.associative_scan import associative_scan

import zcompile

WIDTH = 16


@torch.compiler.nested_compile_region
def region(layer, x):
    return torch.tanh(layer(x))


@torch.compiler.nested_compile_region
def outer_region(layer, x):
    return region(layer, x) + x


def one_of_two(model, x):
    def then(x):
        return model.first(x).relu()

    def otherwise(x):
        return model.second(x).sin() + model.first(x)

    return torch.cond(x.sum() > 0, then, otherwise, (x,))


def branch_in_branch(model, x):
    def then(x):
        return torch.cond(x.mean() > 1, model.first, model.second, (x,))

    return torch.cond(x.sum() > 0, then, model.second, (x,))


def scanned(model, x):
    def joined(x, y):
        return x * y * model.first.bias

    return associative_scan(joined, x, dim=0, combine_mode="generic")


def branch_in_region(model, x):
    @torch.compiler.nested_compile_region
    def chosen(layer, other, x):
        return torch.cond(x.sum() > 0, layer, other, (x,))

    return chosen(model.second, model.first, chosen(model.first, model.second, x))


CALLS = {
    "cond": one_of_two,
    "a cond in a branch of another": branch_in_branch,
    "a scan": scanned,
    "one region for two layers": lambda m, x: region(m.second, region(m.first, x)),
    "a region in a region": lambda m, x: outer_region(m.second, outer_region(m.first, x)),
    "a cond in a region": branch_in_region,
}


class Between(nn.Module):
    """`call` between layers, the first of which reads a parameter that `call` reads, too."""

    def __init__(self, call) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.last = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.call = call

    def forward(self, x):
        return self.last(torch.tanh(self.call(self, self.first(x))))


def run(model, call):
    optimizer, losses = optim.AdamW(model.parameters(), lr=1e-2, fused=True), []
    for step in range(4):
        loss = call(torch.randn(8, WIDTH) + step % 2 - 0.5).square().mean()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    with torch.no_grad():
        return [*losses, call(torch.randn(8, WIDTH)).tolist()]


@pytest.mark.parametrize("name", sampled(CALLS, "cond"))
def test_an_op_with_graphs_of_its_own_reads_tiered_parameters(name, tmp_path):
    same_training(run, tmp_path, "compiled", lambda: Between(CALLS[name]))


def test_a_region_gathers_its_layers_one_by_one(tmp_path):
    """Each op of a region reads its own parameters, so that the tiles of one weight fit, where both
    weights, or one whole, do not."""
    torch._dynamo.reset()
    width = 256
    torch.manual_seed(0)
    plain = nn.ModuleList([nn.Linear(width, width) for _ in range(2)])
    layers = zcompile.offload(
        copy.deepcopy(plain), device="cpu", device_memory="200KiB", disk=tmp_path
    )

    def both(layers, x):
        return region(layers[1], region(layers[0], x))

    x = torch.randn(2, width)
    with torch.no_grad():
        assert torch.equal(torch.compile(both, backend="zinf")(layers, x), both(plain, x))
