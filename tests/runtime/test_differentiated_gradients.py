"""Gradients that are to be differentiated in turn (`create_graph=True`): as in eager PyTorch where
the model is not compiled, and refused where it is."""

import pytest
import torch
from pairs import assert_equal, mlp, on_disk

from zcompile.errors import Unsupported


def trained_with_penalty(model, accumulate):
    """Two steps whose loss has the norm of a gradient in it; .grad before each."""
    optimizer, seen = torch.optim.AdamW(model.parameters(), lr=1e-2), []
    for step in range(2):
        x = torch.randn(4, 16, generator=torch.Generator().manual_seed(step))
        if accumulate:  # to a .grad that has no graph
            model(x + 1).square().sum().backward()
        loss = model(x).square().sum()
        loss.backward(create_graph=True)
        penalty = sum(p.grad.square().sum() for p in model.parameters())
        if not accumulate:
            optimizer.zero_grad()
        (loss + 0.1 * penalty).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        seen += [p.grad.detach().clone() for p in model.parameters()]
        optimizer.step()
        optimizer.zero_grad()
    return seen


@pytest.mark.parametrize("accumulate", [False, True])
def test_a_penalty_on_gradients_trains_a_model_that_is_not_compiled(accumulate, tmp_path):
    torch.manual_seed(3)
    plain = mlp()
    torch.manual_seed(3)
    tiered = on_disk(mlp(), tmp_path)
    seen = [trained_with_penalty(model, accumulate) for model in (tiered, plain)]
    for ours, torchs in zip(*seen, strict=True):
        assert_equal(torchs, ours)
    for ours, torchs in zip(tiered.parameters(), plain.parameters(), strict=True):
        assert_equal(torchs, ours)


def trained_with_penalty_of_inputs(model, call, uncompiled):
    """As a critic is: the norm of the gradient of what lies between two batches, beside losses."""
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    torch.manual_seed(1)
    for _ in range(3):
        x, y = torch.randn(4, 16), torch.randn(4, 16)
        between = (x + torch.rand(4, 1) * (y - x)).requires_grad_()
        out = uncompiled(between).sum()
        (slope,) = torch.autograd.grad(out, between, create_graph=True)
        penalty = (slope.norm(2, dim=1) - 1).square().mean()
        (call(x).mean() - call(y).mean() + 10 * penalty).backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("in_place", [False, True])
def test_a_penalty_is_of_a_call_of_the_model_itself_beside_compiled_ones(in_place, tmp_path):
    torch._dynamo.reset()
    torch.manual_seed(3)
    plain = mlp()
    torch.manual_seed(3)
    tiered = on_disk(mlp(), tmp_path)
    trained_with_penalty_of_inputs(plain, plain, plain)
    if in_place:
        tiered.compile(backend="zinf")
        trained_with_penalty_of_inputs(tiered, tiered, tiered.forward)
    else:
        call = torch.compile(tiered, backend="zinf")
        trained_with_penalty_of_inputs(tiered, call, tiered)
    for ours, torchs in zip(tiered.parameters(), plain.parameters(), strict=True):
        assert_equal(torchs, ours)


def test_gradients_of_a_compiled_model_are_not_taken_for_constants(tmp_path):
    torch._dynamo.reset()
    model = on_disk(mlp(), tmp_path)
    run = torch.compile(model, backend="zinf")
    with pytest.raises(Unsupported, match=r"create_graph=True.*\n?.*call the model without"):
        run(torch.randn(4, 16)).square().sum().backward(create_graph=True)
    assert all(p.grad is None for p in model.parameters())
    run(torch.randn(4, 16)).square().sum().backward()  # the next one goes on
    x = torch.randn(4, 16, requires_grad=True)
    (slope,) = torch.autograd.grad(run(x).square().sum(), x, create_graph=True)  # of no parameter
    with pytest.raises(RuntimeError, match="double backward"):
        slope.sum().backward()
