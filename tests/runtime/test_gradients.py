"""Gradients on their way home: how often, in which order, in which layout, and who is told."""

import gc
from functools import partial

import pytest
import torch
from pairs import Holder, assert_equal, backward, entries, mlp, on_disk, parameter_pair
from torch import nn

from zcompile.errors import Unsupported
from zcompile.frontend.offload import session_behind
from zcompile.ir.torch_compat import current_pass
from zcompile.ir.types import EntryKind, EntryRef
from zcompile.runtime.gradients.leaves import autograd_always_calls_post_hooks, in_layout_of


@pytest.fixture(autouse=True)
def _leave_no_store():
    """The tests of stores beside this file count threads."""
    yield
    gc.collect()


def received(param, *grads, expect=1):
    """Hands gradients over as a compiled backward does, from within a backward pass."""
    receive = param.entry.store.gradients.receive
    backward(param, *(partial(receive, param.entry, grad) for grad in grads), expect=expect)


@pytest.fixture
def param(tmp_path):
    return on_disk(Holder(torch.zeros(4, 6)), tmp_path).w


def rows(seed):
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(seed))


def test_a_gradient_becomes_a_tiered_tensor_of_its_own(param):
    received(param, rows(1))
    assert_equal(rows(1), param.grad)
    assert param.grad.entry.kind is EntryKind.GRAD
    assert param.grad.entry.name == "w.grad"


def test_a_gradient_has_another_key_in_every_step_and_the_same_name(param):
    received(param, rows(1))
    first = param.grad.entry
    param.grad = None
    received(param, rows(2))
    then = param.grad.entry
    assert then.key != first.key
    assert then.ref == first.ref == param.entry.ref.gradient
    assert then.ref.owner == param.entry.ref == param.entry.ref.owner


def test_what_was_a_gradient_is_named_by_its_own_key_once_a_parameter_shows_it(tmp_path):
    model = on_disk(Holder(torch.zeros(4, 6)), tmp_path)
    received(model.w, rows(1))
    shown, model.w.grad = model.w.grad, None
    model.w.data = shown
    assert_equal(rows(1), model.w)
    assert (model.w.entry.ref, model.w.entry.of) == (EntryRef(model.w.entry.key), None)


def test_what_was_there_is_added_to_in_place(param):
    received(param, rows(1))
    first = param.grad
    received(param, rows(2))
    assert param.grad is first
    assert_equal(rows(1) + rows(2), param.grad)


@pytest.mark.parametrize("first", [False, True], ids=["a later pass", "the first of a process"])
@pytest.mark.parametrize("expect", [1, 2])
def test_only_what_comes_alone_does_not_wait_for_the_end_of_its_pass(
    param, expect, first, monkeypatch
):
    """Torch numbers the passes of a process from 0."""
    if first:
        monkeypatch.setattr(
            "zcompile.runtime.gradients.gradients.current_pass", lambda: min(current_pass(), 0)
        )
    came = []
    receive = partial(param.entry.store.gradients.receive, param.entry)
    more = [partial(receive, rows(2))] if expect == 2 else []
    backward(
        param,
        partial(receive, rows(1)),
        lambda: came.append(param.grad is not None),
        *more,
        expect=expect,
    )
    assert came == [expect == 1]
    assert_equal(rows(1) + rows(2) if more else rows(1), param.grad)


def test_contributions_of_one_backward_are_summed_before_they_are_added(param):
    """(1 + (1e-8 + ... )) and ((1 + 1e-8) + ...) round differently; eager does the former."""
    received(param, torch.ones(4, 6))
    small = torch.full((4, 6), 4e-8)
    received(param, small, small, small, expect=3)
    assert_equal(torch.ones(4, 6) + ((small + small) + small), param.grad)
    assert not torch.equal(param.grad.cpu(), ((torch.ones(4, 6) + small) + small) + small)


def test_a_contribution_that_never_comes_is_not_waited_for(param):
    received(param, rows(1), expect=3)
    assert_equal(rows(1), param.grad)
    received(param, rows(2))
    assert_equal(rows(1) + rows(2), param.grad)


@pytest.mark.parametrize(
    "grad",
    [
        rows(1).t().contiguous().t(),
        torch.ones(()).expand(4, 6),
        torch.randn(4, 12)[:, ::2],
    ],
    ids=["transposed", "expanded", "gaps"],
)
def test_a_gradient_takes_the_layout_of_its_parameter(grad, param):
    received(param, grad)
    assert_equal(grad.contiguous(), param.grad)


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.zeros(5, 1).expand(5, 4),
        lambda: torch.zeros(8, 8)[:, :3],
        lambda: torch.zeros(3, 5).t(),
    ],
)
def test_the_layout_of_a_gradient_is_the_one_autograd_chooses(make, tmp_path):
    plain, tiered = parameter_pair(make, tmp_path)
    grad = torch.ones(()).expand(plain.shape)
    (plain * 1).backward(grad)
    received(tiered, grad)
    assert_equal(plain.grad, tiered.grad)
    assert in_layout_of(plain, grad).stride() == plain.grad.stride()


def test_a_hook_sees_the_sum_once_and_may_change_it(param):
    seen = []
    param.register_hook(lambda g: seen.append(g.detach().cpu()))
    param.register_hook(lambda g: g * 2)
    received(param, rows(1), rows(2), expect=2)
    assert len(seen) == 1
    assert torch.equal(seen[0], rows(1) + rows(2))
    assert_equal((rows(1) + rows(2)) * 2, param.grad)


@pytest.mark.parametrize("before", [False, True])
def test_a_hook_that_would_see_one_of_two_parts_is_refused(param, before):
    """The other part comes from autograd itself, in place where there is a gradient already."""
    if before:
        received(param, rows(1))
    seen = []
    param.register_hook(seen.append)

    def come():
        param.entry.store.gradients.receive(param.entry, rows(2))
        with torch.no_grad():
            if before:
                param.grad.add_(rows(3))
            else:
                param.grad = rows(3)

    with pytest.raises(Unsupported, match="the hook cannot see their sum"):
        backward(param, come)
    assert seen == []


def test_who_waits_for_a_gradient_is_told_once(param):
    told = []
    param.register_post_accumulate_grad_hook(lambda p: told.append(p.grad.sum().item()))
    received(param, rows(1))
    received(param, rows(2), rows(3), expect=2)
    assert len(told) == 2


def test_who_waits_is_told_whether_or_not_autograd_does_it(param, monkeypatch):
    told = []
    param.register_post_accumulate_grad_hook(told.append)
    received(param, rows(1))
    once = len(told)
    monkeypatch.setattr(
        "zcompile.runtime.gradients.gradients.autograd_always_calls_post_hooks",
        lambda: not autograd_always_calls_post_hooks(),
    )
    received(param, rows(1))
    assert once == 1
    assert len(told) == (3 if autograd_always_calls_post_hooks() else 1)


def test_a_gradient_that_was_assigned_is_adopted_at_the_step(tmp_path):
    model = on_disk(mlp(), tmp_path)
    for p in model.parameters():
        p.grad = torch.ones(p.shape)
    assert entries(model, EntryKind.GRAD) == []
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    assert len(entries(model, EntryKind.GRAD)) == 4


def test_a_gradient_that_autograd_split_off_a_sum_goes_home(tmp_path):
    """What `cat` hands back is part of one tensor, to which autograd may have added in place."""
    model = on_disk(nn.ParameterList([nn.Parameter(rows(1)), nn.Parameter(rows(2))]), tmp_path)
    other = torch.ones(4, 6, requires_grad=True)

    def backward():
        joined = torch.cat([model[0], other, model[1]])
        (joined[1:] - joined[:-1]).square().sum().backward()

    backward()
    assert len(entries(model, EntryKind.GRAD)) == 2
    for param in model:
        param.grad = None
    buffer = torch.zeros(8, 6)
    model[0].grad, model[1].grad = buffer[:4], buffer[4:].detach()
    backward()
    assert entries(model, EntryKind.GRAD) == []
    assert torch.equal(model[0].grad, buffer[:4])
    assert buffer[:4].any()
    assert buffer[4:].any()
    for param in model:
        del param.grad
    del buffer
    backward()
    assert len(entries(model, EntryKind.GRAD)) == 2


def test_plain_and_received_gradients_add_up(param):
    (param * rows(1)).sum().backward()
    received(param, rows(2))
    (param * rows(3)).sum().backward()
    assert_equal((rows(1) + rows(2)) + rows(3), param.grad)


def test_a_parameter_that_died_takes_no_gradient(tmp_path):
    model = nn.Sequential(on_disk(Holder(torch.zeros(4, 6)), tmp_path))
    entry, gradients = model[0].w.entry, session_behind(model).gradients
    del model[0].w
    gradients.receive(entry, rows(1))
    assert [e for e in entry.store._entries.values() if e.kind is EntryKind.GRAD] == []
