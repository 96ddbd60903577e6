"""Optimizers whose ops gather whole tensors stay within the device budget, or are refused."""

import copy

import pytest
import torch
from sampled import crossed
from torch import nn

import zcompile
from zcompile.errors import BudgetExceeded, ParameterChanged
from zcompile.frontend.offload import session_behind
from zcompile.ir import torch_compat as private
from zcompile.ir.units import Bytes, KiB
from zcompile.runtime.eager.dispatch import new_results

WIDE = 128
WEIGHT_BYTES = WIDE * WIDE * 4
REFUSED = 120 * KiB
"""A call fits, a gradient with a product as large as that does not."""


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDE, WIDE), nn.ReLU(), nn.Linear(WIDE, 8))


def trained(budget, make, steps=4):
    torch._dynamo.reset()
    model = net()
    twin = copy.deepcopy(model)
    zcompile.offload(model, device="cpu", device_memory=Bytes(budget), host_memory="64MiB")
    compiled = torch.compile(model, backend="zinf")
    optimizers = [make(m.parameters()) for m in (model, twin)]
    holding, most = session_behind(model).live_memory, []
    for step in range(steps):
        x = torch.randn(4, WIDE, generator=torch.Generator().manual_seed(step))
        for m, optimizer in zip((compiled, twin), optimizers, strict=True):
            optimizer.zero_grad()
            m(x).square().mean().backward()
            if m is compiled:
                session_behind(model).executor.wait_for_in_flight()
                zcompile.stats(model, reset=True)
                before = holding.nbytes
            optimizer.step()
        peak = zcompile.stats(model)["peak"]
        most.append((peak["together"], peak["activations"] - before))
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(p.on_host(), q)
    optimizers[0].zero_grad()
    session_behind(model).entries()  # gradients that died are gone
    assert holding.nbytes == 0, "what a step made is dead"
    return most


def adafactor(params):
    return torch.optim.Adafactor(params, lr=1e-2)


def muon(params):
    return torch.optim.Muon([p for p in params if p.dim() == 2], lr=1e-2)


class Whitened(torch.optim.Optimizer):
    """Multiplies gradients with each other, so that what it makes of them is made whole."""

    def __init__(self, params):
        super().__init__(params, {})

    @torch.no_grad()
    def step(self):
        for p in self.param_groups[0]["params"]:
            if p.dim() == 2:
                p.sub_((p.grad @ p.grad.t()) @ p.grad)


@pytest.mark.parametrize(
    ("make", "budget"),
    crossed([adafactor, muon, Whitened], [256 * KiB, 320 * KiB, 1024 * KiB]),
)
def test_what_whole_ops_take_is_counted_and_within_the_budget(make, budget):
    peaks = trained(budget, make)
    assert all(together <= budget for together, _ in peaks)
    before_a_plan = peaks[:2]  # which may let gradients stay, to leave for the update
    assert all(made >= WEIGHT_BYTES for _, made in before_a_plan), "the update is as large as that"


def test_an_op_that_needs_more_is_refused_before_it_gathers():
    torch._dynamo.reset()
    model = zcompile.offload(net(), device="cpu", device_memory=Bytes(REFUSED), host_memory="64MiB")
    compiled = torch.compile(model, backend="zinf")
    x = torch.randn(4, WIDE)
    compiled(x).square().mean().backward()
    before = [p.on_host().clone() for p in model.parameters()]
    with pytest.raises(BudgetExceeded, match=r"aten\.mm\.default of Whitened") as error:
        Whitened(model.parameters()).step()
    assert error.value.needed_bytes > REFUSED
    assert "0.weight" in str(error.value)
    assert "AdamW" in str(error.value)
    assert all(torch.equal(p.on_host(), q) for p, q in zip(model.parameters(), before, strict=True))
    adamw = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    adamw.step()
    adamw.zero_grad()
    compiled(x).square().mean().backward()
    assert not torch.equal(model[0].weight.on_host(), before[0])


class Product(torch.optim.Optimizer):
    """Adds a product of plain matrices, so that a weight is gathered whole."""

    def __init__(self, params):
        super().__init__(params, {})

    @torch.no_grad()
    def step(self):
        plain = torch.ones(WIDE, WIDE)
        for p in self.param_groups[0]["params"]:
            p.addmm_(plain, plain)


def test_an_op_that_fails_before_it_runs_leaves_nothing_counted():
    model = nn.Linear(WIDE, WIDE, bias=False)
    zcompile.offload(model, device="cpu", device_memory="4MiB", host_memory="64MiB")
    optimizer, holding = Product(model.parameters()), session_behind(model).live_memory
    for _ in range(3):
        value = torch.eye(WIDE)
        other = value.view(-1)
        model.weight.data = value
        other.mul_(2)
        with pytest.raises(ParameterChanged):
            optimizer.step()
        assert holding.nbytes == 0


def test_results_without_elements_are_made_by_an_op_and_memory_stays_watched():
    watched, made = torch.zeros(4), torch.zeros(0)
    assert private.watch_memory(watched)
    found = new_results([made, watched[1:]], [watched, torch.zeros(0)])
    assert [id(t) for t in found] == [id(made)]
    assert private.is_untouched(watched)
