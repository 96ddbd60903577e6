"""Training of blocks whose hidden values no budget holds: in slices of tokens, and below it."""

import copy
import re

import pytest
import torch
import transformers as hf
from sampled import sampled
from small_models import Mean
from torch import Tensor, nn
from torch._dynamo.exc import BackendCompilerFailed

import zcompile
from zcompile.cli import main
from zcompile.errors import BudgetExceeded
from zcompile.ir.units import Bytes, MiB
from zcompile.machine.model import Compute, Link, Machine
from zcompile.passes import choose_tiles

WIDTH, HIDDEN, BATCH, LENGTH = 16, 256, 4, 512
ONE = BATCH * LENGTH * HIDDEN * 4
"""Bytes of one hidden value: a nonlinearity holds two of them, its backward three."""
FIRST, LATER = 2e-6, 5e-5
"""Of the largest gradient: in the first step a sum over up to 2048 tokens, taken in other pieces;
then that of other parameters, too, and gradients are small differences of what norms read."""
GPT_BUDGET = 2 * MiB
LIKE_A_GPU = Machine(
    "test",
    {"device": 1 << 30, "host": 1 << 32},
    {"h2d": Link("h2d", 4e9, 1e-5), "d2h": Link("d2h", 4e9, 1e-5)},
    Compute({"float32": 1e11}, 2e10, 5e-6),
)


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(
                nn.LayerNorm(WIDTH), nn.Linear(WIDTH, HIDDEN), nn.GELU(), nn.Linear(HIDDEN, WIDTH)
            )
            for _ in range(2)
        )

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x.square().mean()


def trained(model: nn.Module, call, x: Tensor) -> list[list[Tensor]]:
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    found = []
    for _ in range(3):
        loss = call(x)
        loss.backward()
        found.append([loss.detach(), *(p.grad.clone() for p in model.parameters())])
        optimizer.step()
        optimizer.zero_grad()
    return found


def offloaded(model: nn.Module, budget: int, **config):
    zcompile.offload(
        model,
        device="cpu",
        device_memory=Bytes(budget),
        host_memory=Bytes(64 * MiB),
        machine=LIKE_A_GPU,
        **config,
    )
    torch._dynamo.reset()
    return torch.compile(model, backend="zinf")


def assert_close(found: list[list[Tensor]], expected: list[list[Tensor]]) -> None:
    assert torch.equal(torch.as_tensor(found[0][0]), expected[0][0]), "forward: the same bits"
    for step, (mine, others) in enumerate(zip(found, expected, strict=True)):
        for value, other in zip(mine, others, strict=True):
            apart = (torch.as_tensor(value) - other).abs().max()
            assert apart <= (LATER if step else FIRST) * other.abs().max()


@pytest.mark.parametrize("budget", sampled([3 * ONE, 2 * ONE, ONE], ONE))
def test_blocks_train_in_slices_where_a_hidden_value_does_not_fit(budget, tmp_path, capsys):
    torch.manual_seed(0)
    model, x = Stack(), torch.randn(BATCH, LENGTH, WIDTH)
    twin = copy.deepcopy(model)
    found = trained(model, offloaded(model, budget, dump=tmp_path), x)
    assert_close(found, trained(twin, twin, x))
    peak, planned = zcompile.stats(model)["peak"], zcompile.stats(model)["planned_peak"]
    assert 0 < peak["activations"] < peak["together"] <= planned["together"] <= budget
    assert main(["show", str(tmp_path)]) == 0
    told = re.findall(
        r"runs over (\d+) slices of its 2048 tokens: 6.00 MiB of values inside "
        r"become",
        capsys.readouterr().out,
    )
    assert len(told) == 2, "a region of each block"
    assert {int(slices) for slices in told} <= {2, 4, 8, 16}
    sliced = [row for row in zcompile.stats(model)["inexact"] if row["by"] == "tile-tokens"]
    assert len(sliced) == 2, "each of them may round otherwise"


def test_without_slices_such_a_budget_is_refused(monkeypatch):
    """Three values of hidden size are what backward of a nonlinearity reads and makes."""
    monkeypatch.setattr(choose_tiles, "regions_of", lambda graph: [])
    monkeypatch.setattr(choose_tiles, "batch_graph", lambda graph: None)
    torch.manual_seed(0)
    model, x = Stack(), torch.randn(BATCH, LENGTH, WIDTH)
    with pytest.raises(BackendCompilerFailed) as caught:
        offloaded(model, 3 * ONE)(x)
    refused = caught.value.inner_exception
    assert isinstance(refused, BudgetExceeded)
    assert refused.needed_bytes > 3 * ONE


@pytest.mark.slow  # every other model of these tests fits
def test_what_fits_without_slices_is_not_sliced():
    """As a step is without the pass: the same bits."""
    torch.manual_seed(0)
    model, x = Stack(), torch.randn(BATCH, LENGTH, WIDTH)
    twin = copy.deepcopy(model)
    found = trained(model, offloaded(model, 4 * ONE), x)
    for mine, others in zip(found, trained(twin, twin, x), strict=True):
        for value, other in zip(mine, others, strict=True):
            assert torch.equal(torch.as_tensor(value), other)


@pytest.mark.slow
def test_a_gpt_trains_in_slices_with_the_rest_of_it_whole():
    def build() -> nn.Module:
        config = hf.GPT2Config(
            vocab_size=64,
            n_positions=64,
            n_embd=64,
            n_layer=2,
            n_head=4,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
        )
        return Mean(hf.GPT2Model(config))

    torch.manual_seed(0)
    model, ids = build(), torch.randint(0, 64, (8, 48))
    twin = copy.deepcopy(model)
    found = trained(model, offloaded(model, GPT_BUDGET), ids)
    assert_close(found, trained(twin, twin, ids))
    assert zcompile.stats(model)["peak"]["together"] <= GPT_BUDGET
