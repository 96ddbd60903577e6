"""The device budget holds at the sizes of every call, not at those that a graph was traced with."""

import copy

import pytest
import torch
from planned_runs import WIDTH, adamw, gpt, ids, loss_of, offloaded, same, values
from sampled import sampled
from torch import nn

import zcompile
from zcompile.errors import BudgetExceeded
from zcompile.frontend.offload import session_behind
from zcompile.ir.units import Bytes, KiB

BUDGET = 320 * KiB
GROWING = [(2, 4), (3, 5), (8, 8), (12, 12), (30, 30)]
RANDOM = [(5, 7), (16, 4), (40, 9), (2, 2), (3, 30), (64, 2), (3, 4)]
SIZES = [*GROWING, *reversed(GROWING[:-1]), *RANDOM]


class Net(nn.Module):
    """Every way in which a call changes something: a statistic, random numbers, gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.ModuleList(nn.Linear(WIDTH, 4 * WIDTH) for _ in range(2))
        self.down = nn.ModuleList(nn.Linear(4 * WIDTH, WIDTH) for _ in range(2))
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x):
        for up, down in zip(self.up, self.down, strict=True):
            x = x + nn.functional.dropout(down(nn.functional.gelu(up(x))), 0.1, self.training)
        return self.norm(x.flatten(0, 1))


def net() -> nn.Module:
    torch.manual_seed(0)
    return Net()


def tokens(batch, length):
    seed = torch.Generator().manual_seed(100 * batch + length)
    return torch.randn(batch, length, WIDTH, generator=seed)


def square(model, x):
    torch.manual_seed(5)
    return model(x).square().mean()


def pair(activations="auto", make=net, budget=BUDGET, **fields):
    """A model that is offloaded, its compiled face, and its eager twin."""
    torch._dynamo.reset()
    model = make()
    twin = copy.deepcopy(model)
    zcompile.offload(
        model,
        device="cpu",
        device_memory=Bytes(budget),
        host_memory="64MiB",
        activations=activations,
        **fields,
    )
    return model, torch.compile(model, backend="zinf"), twin


def told_within(model, budget=BUDGET):
    stats = zcompile.stats(model, reset=True)
    assert stats["peak"]["together"] <= budget
    assert stats["peak"]["activations"] <= stats["planned_peak"]["activations"]
    return stats["peak"]["activations"]


def buffers(model):
    return {name: value.clone() for name, value in model.named_buffers()}


def unchanged(model, before):
    return all(torch.equal(value, before[name]) for name, value in model.named_buffers())


@pytest.mark.parametrize(
    "activations", sampled(["auto", "keep", "recompute", "offload"], "recompute")
)
def test_calls_of_any_size_stay_within_the_budget_or_change_nothing(activations):
    model, compiled, twin = pair(activations)
    mine, theirs = adamw(model), adamw(twin)
    ran, refused = 0, 0
    for size in SIZES:
        before = buffers(model)
        try:
            loss = square(compiled, tokens(*size))
        except BudgetExceeded:
            refused += 1
            assert unchanged(model, before)
            assert all(p.grad is None for p in model.parameters())
            told_within(model)
            continue
        ran += 1
        other = square(twin, tokens(*size))
        assert torch.equal(loss, other)
        loss.backward()
        other.backward()
        del loss, other
        for optimizer in (mine, theirs):
            optimizer.step()
            optimizer.zero_grad()
        told_within(model)
        assert same(model, values(twin))
    assert zcompile.stats(model)["graphs"] <= 3, "sizes were dynamic"
    assert ran >= 8
    assert refused >= 1


@pytest.mark.slow
def test_evaluations_count_at_their_sizes():
    model, compiled, twin = pair()
    model.eval(), twin.eval()
    refused = 0
    with torch.no_grad():
        for size in [*SIZES, (200, 40), (2, 3)]:
            try:
                found = compiled(tokens(*size))
            except BudgetExceeded:
                refused += 1
                told_within(model)
                continue
            assert torch.equal(found, twin(tokens(*size)))
            del found
            told_within(model)
    assert refused >= 1


@pytest.mark.slow
def test_several_forwards_before_a_backward_count_each_at_its_size():
    model, compiled, twin = pair()
    for size in GROWING[:2]:
        square(compiled, tokens(*size)).backward()
        square(twin, tokens(*size)).backward()
    losses, others = [], []
    for length in range(4, 40):
        try:
            losses.append(square(compiled, tokens(6, length)))
        except BudgetExceeded:
            break
        others.append(square(twin, tokens(6, length)))
    told_within(model)
    for loss, other in zip(losses, others, strict=True):
        loss.backward()
        other.backward()
        told_within(model)
    assert 1 < len(losses) < 20
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(p.grad.cpu(), q.grad), "of all that were not refused"


@pytest.mark.slow
def test_a_batch_that_is_refused_among_micro_batches_leaves_the_gradients_of_the_others():
    model, compiled, twin = pair()
    for size in ((2, 4), (3, 5)):
        square(compiled, tokens(*size)).backward()
        square(twin, tokens(*size)).backward()
    with pytest.raises(BudgetExceeded):
        square(compiled, tokens(60, 60))
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(p.grad.cpu(), q.grad)
    square(compiled, tokens(4, 4)).backward()
    square(twin, tokens(4, 4)).backward()
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(p.grad.cpu(), q.grad)


@pytest.mark.slow
def test_a_size_is_not_counted_too_high():
    """Or calls would be refused that fit."""
    model, compiled, _ = pair(budget=4096 * KiB, residency=False)
    session = session_behind(model)
    for size in ((2, 4), (3, 5), *RANDOM):
        session.executor.wait_for_in_flight()
        session.meter.reset()
        session.meter.planned_activations.peak = 0
        square(compiled, tokens(*size)).backward()
        peak = session.meter.activations.peak
        assert peak == session.meter.planned_activations.peak
        model.zero_grad()


@pytest.mark.slow
def test_a_language_model_of_any_length_stays_within_the_budget():
    budget = 512 * KiB
    model, compiled = offloaded(device_memory=Bytes(budget))
    twin = gpt()
    mine, theirs = adamw(model), adamw(twin)
    refused = 0
    for number, repeats in enumerate([1, 2, 3, 8, 2, 30, 1, 5, 60, 4]):
        batch = ids(number).repeat(repeats, 1)
        try:
            loss = loss_of(compiled, batch)
        except BudgetExceeded:
            refused += 1
            told_within(model, budget)
            continue
        loss.backward()
        loss_of(twin, batch).backward()
        del loss
        for optimizer in (mine, theirs):
            optimizer.step()
            optimizer.zero_grad()
        told_within(model, budget)
        assert same(model, values(twin))
    assert 1 <= refused <= 5
