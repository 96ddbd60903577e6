"""Optimizers that step in hooks, one parameter at a time as its gradient arrives: what they update
is late too, to the bit."""

import pytest
import torch
from planned_runs import (
    PLANNED,
    STEPS,
    adamw,
    gpt,
    ids,
    let_all_be_late,
    loss_of,
    offloaded,
    same,
    streaming,
    values,
)
from sampled import sampled
from torch import nn

import zcompile
from zcompile.frontend.offload import session_behind


@pytest.fixture(autouse=True)
def forced(monkeypatch):
    let_all_be_late(monkeypatch)


def adamw_of(params):
    return torch.optim.AdamW(params, lr=1e-2, fused=True)


def momentum_of(params):
    return torch.optim.SGD(params, lr=1e-2, momentum=0.9, fused=True)


def plain_sgd_of(params):
    return torch.optim.SGD(params, lr=1e-2, foreach=False)


class InBackward:
    """Gives every parameter of a model an optimizer, which steps in a hook.

    before, after  called with the parameter, in the hook: before the step and behind it
    """

    def __init__(self, model, make=adamw_of, before=None, after=None):
        self.optimizers = {p: make([p]) for p in model.parameters()}
        self.before, self.after = before, after
        for p in model.parameters():
            p.register_post_accumulate_grad_hook(self.hook)

    def hook(self, p):
        if self.before is not None:
            self.before(p)
        self.optimizers[p].step()
        if self.after is not None:
            self.after(p)
        self.optimizers[p].zero_grad()


def trained(model, forward, steps, begin=0, **how):
    """The model's hooks, some steps on."""
    hooks = InBackward(model, **how)
    for number in range(begin, begin + steps):
        loss_of(forward, ids(number)).backward()
    return hooks


def planned(**fields):
    return offloaded(**streaming(), **fields)


@pytest.mark.parametrize("make", sampled([adamw_of, momentum_of, plain_sgd_of], adamw_of))
def test_a_loop_that_steps_in_hooks_updates_late_and_trains_bit_equal(make):
    plain, (model, compiled) = gpt(), planned()
    trained(plain, plain, STEPS, make=make)
    trained(model, compiled, STEPS, make=make)
    late = session_behind(model).late
    assert late.rows > 0
    # An error would name the step of the loop, and not that of an optimizer, of which there are
    # as many as parameters.
    assert {group.step for group in late._waiting} == {STEPS - 1}
    assert same(model, values(plain))


@pytest.mark.slow
def test_a_hook_may_clip_the_gradient_of_its_parameter():
    def clipped(p):
        nn.utils.clip_grad_norm_([p], 0.1)

    plain, (model, compiled) = gpt(), planned()
    trained(plain, plain, STEPS, before=clipped)
    trained(model, compiled, STEPS, before=clipped)
    assert session_behind(model).late.rows > 0
    assert same(model, values(plain))


@pytest.mark.slow  # tests/runtime/test_late_updates.py
def test_a_hook_that_reads_what_it_has_stepped_finds_the_update_done():
    sums = {}

    def read(p):
        sums.setdefault(id(p), []).append(p.detach().sum().item())

    plain, (model, compiled) = gpt(), planned()
    trained(plain, plain, STEPS, after=read)
    trained(model, compiled, STEPS, after=read)
    of = [[sums[id(p)] for p in m.parameters()] for m in (plain, model)]
    assert of[0] == of[1]
    assert same(model, values(plain))


@pytest.mark.slow
def test_a_hook_that_raises_leaves_the_others_as_they_are():
    """What was stepped before it is updated, what comes after it is not, and training goes on."""

    def refuses(p):
        calls.append(p)
        if len(calls) == fails_at:
            raise ValueError("not now")

    plain, (model, compiled) = gpt(), planned()
    stepped = []
    for m, forward in ((plain, plain), (model, compiled)):
        calls, fails_at = [], 0
        hooks = trained(m, forward, PLANNED, before=refuses)
        calls, fails_at = [], 3
        with pytest.raises(ValueError, match="not now"):
            loss_of(forward, ids(20)).backward()
        names = {p: name for name, p in m.named_parameters()}
        stepped.append({names[p] for p in calls})
        hooks.before = None
        m.zero_grad()
        for p, optimizer in hooks.optimizers.items():
            optimizer.param_groups[0]["lr"] = 0.5e-2 if p is calls[0] else 1e-2
    assert len(stepped[0]) == len(stepped[1]) == 3
    if stepped[0] == stepped[1]:  # in which order hooks are called is autograd's
        assert same(model, values(plain))
    for number in range(2):
        loss_of(compiled, ids(30 + number)).backward()
    zcompile.close(model)


@pytest.mark.slow
def test_optimizers_in_hooks_and_behind_backward_take_turns():
    """A second loop on the same model, with one optimizer of all, finds what the hooks left."""
    plain, (model, compiled) = gpt(), planned()
    for m, forward in ((plain, plain), (model, compiled)):
        trained(m, forward, PLANNED)
        for p in m.parameters():
            p._post_accumulate_grad_hooks.clear()
        optimizer = adamw(m)
        for number in range(2):
            loss_of(forward, ids(50 + number)).backward()
            optimizer.step()
            optimizer.zero_grad()
    assert same(model, values(plain))
