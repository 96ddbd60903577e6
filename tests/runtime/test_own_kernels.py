"""The kernel of AdamW in the rows of a step, where it is asked for: structure, and its formula.

There is no GPU here: the kernel is asked for as if the CPU device ran it, and the op is its formula
there, which is what `tests/kernels` holds the kernel against.
"""

import pytest
import torch
from pairs import mlp, on_disk, train
from torch import optim

from zcompile.config import Config
from zcompile.errors import ConfigInvalid
from zcompile.runtime.eager import own_kernels
from zcompile.runtime.eager.own_kernels import FUSED_ADAMW, computes, fused_adamw
from zcompile.runtime.eager.rows import Application

TOLERANCE = 2e-6
"""Torch's op on the CPU rounds otherwise; some roundings of a parameter."""


@pytest.fixture
def counted(monkeypatch):
    """As if kernels ran here; how many rows each call of the kernel took."""
    calls: list[int] = []

    def adamw(params: list[torch.Tensor], *others: object) -> None:
        calls.append(len(params))
        torch.ops.triton_kernels.adamw(params, *others)

    monkeypatch.setattr("zcompile.config.missing", lambda device: "")
    monkeypatch.setattr(own_kernels, "adamw", adamw)
    return calls


def row(**changes: object) -> Application:
    """One row of `_fused_adamw_`, as torch.optim calls it."""
    p, g, m, v = (torch.rand(5) for _ in range(4))
    lists = {"params": [p], "grads": [g], "exp_avgs": [m], "exp_avg_sqs": [v], "most": []}
    rates = {"lr": 1e-3, "beta1": 0.9, "beta2": 0.99, "weight_decay": 0.1, "eps": 1e-8}
    kwargs = {**rates, "amsgrad": False, "maximize": False, "grad_scale": None, "found_inf": None}
    func = changes.pop("func", FUSED_ADAMW)
    lists |= {k: v for k, v in changes.items() if k in lists}
    kwargs |= {k: v for k, v in changes.items() if k in kwargs}
    return Application(func, (*lists.values(), [torch.tensor(3.0)]), kwargs)


@pytest.mark.parametrize(
    ("changes", "ours"),
    [
        ({}, True),
        ({"maximize": True}, True),
        ({"found_inf": torch.zeros(1)}, True),
        ({"grads": [torch.rand(5).bfloat16()]}, True),
        ({"func": torch.ops.aten._fused_adam_.default}, False),
        ({"most": [torch.rand(5)]}, False),
        ({"grad_scale": torch.ones(1)}, False),
        ({"params": [torch.rand(5).double()]}, False),
        ({"exp_avgs": [torch.rand(5).bfloat16()]}, False),
        ({"lr": torch.tensor(1e-3)}, False),
    ],
)
def test_which_rows_the_kernel_computes(changes, ours):
    app = row(**changes)
    assert (computes(app, True) is fused_adamw) is ours
    assert computes(app, False) is app.func


def test_the_kernel_computes_what_the_op_does():
    mine, stock = row(), row()
    for a, b in zip(mine.tensors(), stock.tensors(), strict=True):
        a.copy_(b)
    fused_adamw(*mine.args, **mine.kwargs)
    FUSED_ADAMW(*stock.args, **stock.kwargs)
    for a, b in zip(mine.tensors(), stock.tensors(), strict=True):
        torch.testing.assert_close(a, b, rtol=TOLERANCE, atol=1e-7)


@pytest.mark.parametrize("device_memory", ["64KiB", "1MiB"])
def test_steps_are_computed_by_the_kernel_in_chunks_or_whole(counted, tmp_path, device_memory):
    plain = mlp()
    tiered = on_disk(mlp(), tmp_path, kernels="triton", device_memory=device_memory)
    first, second = (optim.AdamW(m.parameters(), lr=0.01, fused=True) for m in (plain, tiered))
    losses = [train(model, step, 3) for model, step in ((plain, first), (tiered, second))]
    assert counted
    torch.testing.assert_close(*(torch.tensor(x) for x in losses), rtol=1e-4, atol=0)
    for a, b in zip(plain.parameters(), tiered.parameters(), strict=True):
        torch.testing.assert_close(b.detach().cpu(), a.detach(), rtol=1e-4, atol=1e-5)


class Turned(torch.nn.Module):
    """A parameter that is not row-major, and one of a single element."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.weight = torch.nn.Parameter(torch.randn(6, 4).t())
        self.scale = torch.nn.Parameter(torch.ones(1))

    def forward(self, x):
        return x @ self.weight * self.scale


@pytest.mark.parametrize("compiled", [True, False])
def test_parameters_of_any_layout_are_given_to_the_kernel(counted, tmp_path, compiled):
    plain, tiered = Turned(), on_disk(Turned(), tmp_path, kernels="triton", device_memory="1MiB")
    torch._dynamo.reset()
    calls = (plain, torch.compile(tiered, backend="zinf") if compiled else tiered)
    for model, call in zip((plain, tiered), calls, strict=True):
        optimizer = optim.AdamW(model.parameters(), lr=0.01, fused=True)
        for _ in range(4):
            call(torch.ones(3, 4)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert counted
    for a, b in zip(plain.parameters(), tiered.parameters(), strict=True):
        torch.testing.assert_close(b.detach().cpu(), a.detach(), rtol=1e-5, atol=1e-6)


def test_stock_computes_the_steps_unless_the_kernel_is_asked_for(counted, tmp_path):
    model = on_disk(mlp(), tmp_path)
    train(model, optim.AdamW(model.parameters(), fused=True), 2)
    assert not counted


def test_who_asks_for_kernels_where_none_run_is_told_what_is_missing():
    with pytest.raises(ConfigInvalid, match="kernels='triton' cannot be had: kernels run on CUDA"):
        Config(device="cpu", kernels="triton")
    with pytest.raises(ConfigInvalid, match="kernels='cuda' is not one of auto, stock, triton"):
        Config(device="cpu", kernels="cuda")
