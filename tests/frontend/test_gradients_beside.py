"""Gradients that come in part from compiled graphs and in part by autograd are added up as autograd
adds them: all of a pass first, and then their sum to what `.grad` was."""

import pytest
import torch
from gradients_beside import KINDS, built, called
from rank_models import adamw
from torch import nn

import zcompile
from zcompile.runtime.gradients.gradients import Gradients

MICRO_BATCHES = 3


def trained(kind, logs=False, **fields):
    """Gradients after each micro-batch of two steps, and the parameters at the end."""
    model = built(kind)
    if fields:
        torch._dynamo.reset()
        zcompile.offload(model, mesh=False, device="cpu", **fields)
    run = torch.compile(model, backend="zinf") if fields and kind != "eager" else model
    optimizer, found = adamw(model.parameters()), []
    for step in range(2):
        for micro in range(MICRO_BATCHES):
            loss = called(kind, model, run, 100 * step + micro)
            if logs:
                found.append([p.norm().item() for p in model.parameters()])
            loss.backward()
            found.append([p.grad.cpu() if not fields else p.grad.on_host() for p in params(model)])
            found[-1] = [grad.clone() for grad in found[-1]]
        nn.utils.clip_grad_norm_(model.parameters(), 1e9)
        optimizer.step()
        optimizer.zero_grad()
    found.append([p.detach().clone() if not fields else p.on_host() for p in params(model)])
    return found


def params(model):
    return list(model.parameters())


@pytest.mark.parametrize("kind", KINDS)
def test_they_have_the_bits_of_eager(kind):
    fields = {"device_memory": "1MiB", "host_memory": "64MiB"}
    for ours, plain in zip(trained(kind, **fields), trained(kind), strict=True):
        assert all(map(torch.equal, ours, plain))


def test_where_a_use_comes_to_nothing_contributions_are_added_as_they_come(monkeypatch):
    """To collect them for a norm that is logged would take room for all gradients once more."""
    collected = []
    monkeypatch.setattr(Gradients, "_collect", lambda self, *given: collected.append(given))
    trained("logged", True, device_memory="1MiB", host_memory="64MiB")
    assert not collected


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_so_they_have_from_disk_and_where_norms_are_logged(kind, tmp_path):
    """A norm that is logged is a use that autograd records, and brings nothing."""
    fields = {"device_memory": "1MiB", "host_memory": "512KiB", "disk": tmp_path}
    for ours, plain in zip(trained(kind, True, **fields), trained(kind, True), strict=True):
        if isinstance(ours[0], float):
            assert ours == plain
        else:
            assert all(map(torch.equal, ours, plain))
