"""Gradients over memory that others hold: a user's stays a user's, autograd's goes home."""

import gc
import weakref

import pytest
import torch
from pairs import assert_equal, plain_of
from torch import nn

import zcompile
from zcompile.frontend.offload import session_behind
from zcompile.runtime.eager.tensor import TieredTensor


class Three(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.q, self.k, self.v = (nn.Parameter(torch.randn(8, 8)) for _ in range(3))


def twins():
    tiered = zcompile.offload(Three(), device_memory="4MiB", host_memory="32MiB")
    return Three(), tiered


VIEWS = {
    "flat": lambda w: w.view(-1),
    "turned twice": lambda w: w.t().t().view(64),
    "a view of a view": lambda w: w.view(4, 16).view(64),
}


@pytest.mark.parametrize("view", VIEWS)
def test_a_gradient_that_backward_was_given_stays_there(view):
    found = []
    for model in twins():
        given = torch.ones(64)
        VIEWS[view](model.q).backward(given)
        model.q.grad.mul_(3)
        seen = given.clone()
        given[:8] = 5.0
        model.q.view(-1).backward(torch.full((64,), 2.0))
        found.append((seen, given, plain_of(model.q.grad)))
    for plain, tiered in zip(*found, strict=True):
        assert_equal(plain, tiered)


def test_it_is_what_the_optimizer_takes():
    found = []
    for model in twins():
        optimizer = torch.optim.SGD([model.q], lr=0.5)
        given = torch.ones(64)
        model.q.view(-1).backward(given)
        given.mul_(4)
        optimizer.step()
        found.append(plain_of(model.q))
    assert_equal(*found)


def joined(model):
    return torch.cat([model.q, model.k, model.v])


def joined_in_part(model):
    return torch.cat([torch.ones(8, 8, requires_grad=True) * 2, model.q, model.k])


def stacked(model):
    return torch.stack([model.v, model.q, model.k])


@pytest.mark.parametrize("join", [joined, joined_in_part, stacked])
def test_parts_of_what_autograd_made_go_home(join):
    found = []
    for model in twins():
        for _ in range(2):
            join(model).square().sum().backward()
        found.append([p.grad for p in model.parameters() if p.grad is not None])
    for plain, tiered in zip(*found, strict=True):
        assert isinstance(tiered, TieredTensor)
        assert_equal(plain, tiered)


def test_they_go_home_before_the_pass_is_over():
    _, model = twins()
    seen = []

    class Last(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            seen.extend(type(p.grad) for p in (model.q, model.k))
            return grad

    start = Last.apply(torch.ones(1, requires_grad=True))
    (torch.cat([model.q, model.k]) * (start * 2)).square().sum().backward()
    assert seen == [TieredTensor, TieredTensor]


def test_a_memory_that_two_gradients_are_is_one_as_in_torch():
    found = []
    for model in twins():
        (model.q + model.k.view(64).view(8, 8)).square().sum().backward()
        model.q.grad.mul_(2)
        found.append([plain_of(p.grad) for p in (model.q, model.k)])
    for plain, tiered in zip(*found, strict=True):
        assert_equal(plain, tiered)


def test_a_pass_that_failed_leaves_nothing_to_decide():
    _, model = twins()

    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            raise ValueError("here")

    given = torch.ones(64)
    start = Fails.apply(torch.ones((), requires_grad=True))
    with pytest.raises(ValueError, match="here"):
        torch.autograd.backward([model.q.view(-1), start], [given, torch.ones(())])
    model.q.grad = None
    model.q.view(-1).backward(given)
    given.zero_()
    assert not model.q.grad.any()
    model.q.grad = None
    (model.q * 2).sum().backward()
    assert isinstance(model.q.grad, TieredTensor)


def test_who_waits_is_not_kept():
    _, model = twins()
    model.q.view(-1).backward(torch.ones(64))
    session = weakref.ref(session_behind(model))
    param = weakref.ref(model.q)
    del model
    gc.collect()
    assert param() is None
    assert session() is None
