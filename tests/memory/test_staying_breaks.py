"""Gradients that stay, where a run does not go on as it was planned: nothing is lost."""

import copy

import pytest
import torch
from planned_runs import (
    LITTLE_HOST,
    WEIGHT_BYTES,
    adamw,
    gpt,
    loss_of,
    review_no_plan,
    same,
    values,
)
from sampled import sampled
from staying_runs import (
    STEPS,
    begun,
    gradients,
    held_bytes,
    held_gradients,
    many,
    plainly_trained,
    train,
)

import zcompile
from zcompile.errors import BudgetExceeded
from zcompile.frontend.offload import session_behind
from zcompile.ir.types import HELD
from zcompile.runtime.tiers.device import HeldTier


@pytest.fixture(autouse=True)
def one_plan(monkeypatch):
    """Each run keeps the plan that it made first."""
    review_no_plan(monkeypatch)


def loop_of(model, forward, optimizer, begin=4):
    """Trains as planned, then without setting gradients to None."""
    train(forward, optimizer, 0, begin)
    for number in range(begin, STEPS):
        loss_of(forward, many(10 * number)).backward()
        optimizer.step()


@pytest.mark.parametrize("where", sampled(["host", "disk"], "disk"))
@pytest.mark.slow
def test_gradients_that_nobody_drops_go_home_before_the_next_forward(caplog, tmp_path, where):
    """A loop that forgets to set them to None sums them up, as eager does, within the budget."""
    plain = gpt()
    loop_of(plain, plain, adamw(plain))
    budget = held_bytes() + WEIGHT_BYTES // 2
    room = {"disk": tmp_path, "host_memory": LITTLE_HOST} if where == "disk" else {}
    model, compiled, optimizer = begun(budget, 0, **room)
    with caplog.at_level("INFO", "zcompile.frontend.replan"):
        loop_of(model, compiled, optimizer)
    assert caplog.text.count("a forward needs their room") == 1
    assert HELD not in gradients(model)
    assert zcompile.stats(model)["peak"]["together"] <= budget
    assert same(model, values(plain))
    summed = [
        torch.equal(p.grad.on_host(), q.grad)
        for p, q in zip(model.parameters(), plain.parameters(), strict=True)
    ]
    assert all(summed)
    optimizer.zero_grad()
    loss_of(compiled, many(3)).backward()
    assert HELD in gradients(model), "they stay again once they are dropped"


@pytest.mark.slow
def test_where_they_are_in_the_way_of_every_forward_none_stays_any_more(caplog):
    def loop(model, forward, optimizer):
        train(forward, optimizer, 0, 4)
        for number in range(4, STEPS + 2):
            loss = loss_of(forward, many(10 * number))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    plain = gpt()
    loop(plain, plain, adamw(plain))
    budget = held_bytes() + WEIGHT_BYTES // 2
    model, compiled, optimizer = begun(budget, 0)
    with caplog.at_level("INFO", "zcompile.frontend.replan"):
        loop(model, compiled, optimizer)
    assert caplog.text.count("the next plan lets none stay") == 1
    assert not session_behind(model).controller.plan.placement.stay
    assert zcompile.stats(model)["peak"]["together"] <= budget
    assert same(model, values(plain))


@pytest.mark.slow
def test_an_evaluation_now_and_then_does_not_stop_it(caplog):
    def loop(model, forward, optimizer):
        train(forward, optimizer, 0, 4)
        for number in range(4, STEPS + 3):
            optimizer.zero_grad()
            loss_of(forward, many(10 * number)).backward()
            optimizer.step()
            if number % 2:
                losses.append(
                    float(loss_of(forward, many(number)).detach())
                )  # holds as much as a step
        optimizer.zero_grad()

    losses = []
    plain = gpt()
    loop(plain, plain, adamw(plain))
    want, losses = losses, []
    model, compiled, optimizer = begun(held_bytes() + WEIGHT_BYTES // 2, 0)
    with caplog.at_level("INFO", "zcompile.frontend.replan"):
        loop(model, compiled, optimizer)
    assert "a forward needs their room" in caplog.text
    assert "lets none stay" not in caplog.text
    assert session_behind(model).controller.plan.placement.stay
    assert losses == want
    assert same(model, values(plain))


def test_a_forward_that_finds_no_room_for_them_elsewhere_is_refused_and_nothing_is_lost(
    monkeypatch,
):
    model, compiled, optimizer = begun(held_bytes() + WEIGHT_BYTES // 2, 4)
    loss_of(compiled, many(40)).backward()
    assert HELD in gradients(model)
    kept = [p.grad.on_host() for p in model.parameters()]
    homes = session_behind(model).homes
    with monkeypatch.context() as full:
        full.setattr(homes, "move", lambda *how: None)
        with pytest.raises(BudgetExceeded, match="values of compiled graphs"):
            loss_of(compiled, many(50))
    now = [p.grad.on_host() for p in model.parameters()]
    assert all(map(torch.equal, kept, now))
    optimizer.step()
    optimizer.zero_grad()
    train(compiled, optimizer, 5, STEPS)
    assert same(model, plainly_trained())


@pytest.mark.slow
def test_accumulation_under_a_plan_without_it_is_eagers():
    def loop(model, forward, optimizer):
        train(forward, optimizer, 0, 4)
        train(forward, optimizer, 4, STEPS, batches=3)

    plain = gpt()
    loop(plain, plain, adamw(plain))
    budget = held_bytes() + WEIGHT_BYTES // 2
    model, compiled, optimizer = begun(budget, 0)
    loop(model, compiled, optimizer)
    assert zcompile.stats(model)["peak"]["together"] <= budget
    assert same(model, values(plain))


@pytest.mark.parametrize("drops", sampled([True, False], True))
@pytest.mark.slow
def test_an_optimizer_within_backward_reads_them_where_they_are(drops):
    """Each parameter is updated as soon as its gradient is there, which is then dropped, or not."""

    def loop(model, forward):
        optimizers = {p: torch.optim.SGD([p], lr=1e-2, momentum=0.9) for p in model.parameters()}

        def update(param):
            optimizers[param].step()
            if drops:
                param.grad = None

        for param in model.parameters():
            param.register_post_accumulate_grad_hook(update)
        for number in range(STEPS):
            loss_of(forward, many(10 * number)).backward()
            model.zero_grad()

    plain = gpt()
    loop(plain, plain)
    budget = held_bytes() + WEIGHT_BYTES
    model, compiled = begun(budget, 0)[:2]
    loop(model, compiled)
    assert zcompile.stats(model)["peak"]["together"] <= budget
    assert held_gradients(model) == 0
    assert same(model, values(plain))


@pytest.mark.slow
def test_two_optimizers_that_take_turns_within_a_step():
    def loop(model, forward):
        params = list(model.parameters())
        both = [
            torch.optim.AdamW(params[:5], lr=1e-2, fused=True),
            torch.optim.SGD(params[5:], lr=1e-2, momentum=0.9, foreach=True),
        ]
        for number in range(STEPS):
            loss_of(forward, many(10 * number)).backward()
            for optimizer in both:
                optimizer.step()
                optimizer.zero_grad()

    plain = gpt()
    loop(plain, plain)
    model, compiled = begun(held_bytes() + WEIGHT_BYTES, 0)[:2]
    loop(model, compiled)
    assert session_behind(model).controller.plan.placement.stay
    assert same(model, values(plain))


@pytest.mark.slow  # it is read and changed in test_staying.py
def test_one_that_stays_can_be_copied_zeroed_and_given_away():
    model, compiled, optimizer = begun(held_bytes() + WEIGHT_BYTES, 4)
    loss_of(compiled, many(40)).backward()
    param = next(p for p in model.parameters() if p.grad.entry.home == HELD)
    value = param.grad.on_host()
    other = copy.deepcopy(param.grad)
    param.grad.zero_()
    assert torch.equal(other.on_host(), value)
    assert not param.grad.on_host().any()
    param.grad = other
    assert torch.equal(param.grad.on_host(), value)
    optimizer.zero_grad()
    del other
    assert held_gradients(model) == 0


@pytest.mark.slow
def test_a_hook_that_comes_later_sees_each_gradient_and_it_goes_home():
    model, compiled, optimizer = begun(held_bytes() + WEIGHT_BYTES, 4)
    assert session_behind(model).controller.plan.placement.stay
    seen = []
    hook = next(model.parameters()).register_hook(lambda grad: seen.append(grad.numel()))
    loss_of(compiled, many(40)).backward()
    assert seen
    assert HELD not in gradients(model)
    optimizer.step()
    optimizer.zero_grad()
    hook.remove()
    train(compiled, optimizer, 5, STEPS)
    assert same(model, plainly_trained())


@pytest.mark.slow  # so do those that nobody drops, above
def test_what_somebody_holds_besides_leaves_no_room_and_they_go_home():
    """A forward without its backward holds what it kept; a call after it is within the budget."""
    budget = 2 * held_bytes() + WEIGHT_BYTES
    model, compiled, optimizer = begun(budget, 4)
    pending = loss_of(compiled, many(7))
    loss_of(compiled, many(40)).backward()
    optimizer.step()
    optimizer.zero_grad()
    assert zcompile.stats(model)["peak"]["together"] <= budget
    assert session_behind(model).controller.plan is None
    del pending
    train(compiled, optimizer, 5, STEPS)
    assert same(model, plainly_trained())


@pytest.mark.slow
def test_a_backward_that_fails_leaves_no_gradient_and_no_bytes(monkeypatch):
    model, compiled, optimizer = begun(held_bytes() + WEIGHT_BYTES, 4)
    take, left = HeldTier.take, [3]

    def failing(self, *how):
        left[0] -= 1
        if not left[0]:
            raise RuntimeError("the third gradient")
        return take(self, *how)

    monkeypatch.setattr(HeldTier, "take", failing)
    with pytest.raises(RuntimeError, match="the third gradient"):
        loss_of(compiled, many(40)).backward()
    monkeypatch.undo()
    optimizer.zero_grad()
    assert held_gradients(model) == 0
    assert session_behind(model).live_memory.nbytes == 0
    train(compiled, optimizer, 4, STEPS)
    assert same(model, plainly_trained())


@pytest.mark.slow
def test_they_move_where_the_device_has_to_have_the_room_back():
    """A longer batch holds more than was set aside: what stays goes home, and nothing is lost."""
    model, compiled, optimizer = begun(2 * held_bytes() + 2 * WEIGHT_BYTES, 4)
    loss_of(compiled, many(40)).backward()
    assert HELD in gradients(model)
    kept = [p.grad.on_host() for p in model.parameters()]
    with torch.no_grad():
        compiled(torch.zeros(64, 32, dtype=torch.int64))
    assert all(
        torch.equal(a, p.grad.on_host()) for a, p in zip(kept, model.parameters(), strict=True)
    )
    optimizer.step()
    optimizer.zero_grad()
    train(compiled, optimizer, 5, STEPS)
    assert same(model, plainly_trained())
