"""Gradients that stay where backward made them: what that saves, and who takes them back."""

import planned_runs
import pytest
import torch
from planned_runs import VOCABULARY, WEIGHT_BYTES, adamw, gpt, loss_of, same, values
from torch import nn

import zcompile
from zcompile import step_plan
from zcompile.offloading import session_behind
from zcompile.runtime.store import Store
from zcompile.specs import HELD
from zcompile.steps import Kind

STEPS = 7
THROTTLE = {"h2d": "200MB/s", "d2h": "200MB/s"}


def many(number):
    """So many tokens that activations take many times what gradients do."""
    generator = torch.Generator().manual_seed(number)
    tokens = torch.randint(0, VOCABULARY, (16, 33), device="cpu", generator=generator)
    return tokens.to(torch.get_default_device())


def train(forward, optimizer, begin, end, **how):
    planned_runs.train(None, forward, optimizer, begin, end, clip=False, ids=many, **how)


@pytest.fixture(scope="module")
def expected():
    model = gpt()
    train(model, adamw(model), 0, STEPS)
    return values(model)


@pytest.fixture(scope="module")
def held():
    model, *_ = begun(1 << 26, 1)
    return session_behind(model).split.held_bytes


def begun(device, steps, make=adamw, **fields):
    torch._dynamo.reset()
    fields = {"host_memory": "64MiB", "throttle": THROTTLE, **fields}
    model = zcompile.offload(gpt(), device="cpu", device_memory=device, **fields)
    compiled = torch.compile(model, backend="zinf")
    optimizer = make(model)
    train(compiled, optimizer, 0, steps)
    return model, compiled, optimizer


def gradients(model):
    """Where they rest."""
    return [p.grad.entry.home for p in model.parameters()]


def held_gradients(model):
    return session_behind(model).homes.held.usage()[1]


@pytest.mark.parametrize("share", [8, 1, 0.5])
def test_a_step_moves_no_gradient_and_takes_what_was_predicted(held, expected, share):
    budget = held + int(share * WEIGHT_BYTES)
    model, compiled, optimizer = begun(budget, 4)
    zcompile.stats(model, reset=True)
    train(compiled, optimizer, 4, STEPS)
    stats = zcompile.stats(model)
    assert stats["peak"] == {**stats["peak"], **stats["predicted"]["peak"]}
    assert stats["planned_peak"]["activations"] >= stats["peak"]["activations"]
    assert stats["peak"]["together"] <= budget
    assert stats["bytes"]["d2h"] == 3 * stats["predicted"]["bytes"]["d2h"]
    plan = session_behind(model).planner.plan
    assert len(plan.placement.stay) > len(list(model.parameters())) // 2
    assert held_gradients(model) == 0, "they are gone with zero_grad"
    assert same(model, expected)


def test_without_them_the_same_step_moves_more(held, monkeypatch):
    def moved():
        model, compiled, optimizer = begun(held + WEIGHT_BYTES, 4)
        zcompile.stats(model, reset=True)
        train(compiled, optimizer, 4, STEPS)
        return sum(zcompile.stats(model)["bytes"].values())

    less = moved()
    monkeypatch.setattr(step_plan, "staying", lambda step, *nbytes: frozenset())
    assert less < moved()


def test_a_gradient_that_stays_is_read_changed_and_clipped_as_any(held):
    def loop(model, forward, optimizer):
        for number in range(STEPS):
            loss_of(forward, many(10 * number)).backward()
            norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            first = next(model.parameters()).grad
            with torch.no_grad():
                first.mul_(2)
                first.add_(1e-3)
            sums.append(float(norm) + float(first.sum()))
            optimizer.step()
            optimizer.zero_grad()

    sums: list[float] = []
    plain = gpt()
    loop(plain, plain, adamw(plain))
    want, sums = sums, []
    model, compiled = begun(held + WEIGHT_BYTES, 0)[:2]
    loop(model, compiled, adamw(model))
    assert session_behind(model).planner.plan.placement.stay
    assert sums == want
    assert same(model, values(plain))


def test_gradients_that_nobody_drops_go_home_before_the_next_forward(held, caplog):
    """A loop that forgets to set them to None sums them up, as eager does, within the budget."""

    def loop(model, forward, optimizer):
        train(forward, optimizer, 0, 4)
        for number in range(4, STEPS):
            loss_of(forward, many(10 * number)).backward()
            optimizer.step()

    plain = gpt()
    loop(plain, plain, adamw(plain))
    budget = held + WEIGHT_BYTES // 2
    model, compiled, optimizer = begun(budget, 0)
    with caplog.at_level("INFO", "zcompile.residency"):
        loop(model, compiled, optimizer)
    assert "kept into the next forward" in caplog.text
    assert HELD not in gradients(model)
    assert zcompile.stats(model)["peak"]["together"] <= budget
    assert same(model, values(plain))
    summed = [torch.equal(p.grad.on_host(), q.grad)
              for p, q in zip(model.parameters(), plain.parameters(), strict=True)]  # fmt: skip
    assert all(summed)
    optimizer.zero_grad()
    train(compiled, optimizer, STEPS, STEPS + 3)
    assert not session_behind(model).planner.plan.placement.stay, "and it is not tried again"


def test_where_gradients_live_on_none_is_planned_to_stay(held):
    def loop(model, forward, optimizer):
        for number in range(STEPS):
            loss = loss_of(forward, many(10 * number))
            optimizer.zero_grad(set_to_none=False)
            loss.backward()
            optimizer.step()

    plain = gpt()
    loop(plain, plain, adamw(plain))
    model, compiled, optimizer = begun(held + WEIGHT_BYTES, 0)
    loop(model, compiled, optimizer)
    plan = session_behind(model).planner.plan
    assert plan is not None
    assert not plan.placement.stay
    assert same(model, values(plain))


def test_a_hook_that_comes_later_sees_each_gradient_and_it_goes_home(held, expected):
    model, compiled, optimizer = begun(held + WEIGHT_BYTES, 4)
    assert session_behind(model).planner.plan.placement.stay
    seen = []
    hook = next(model.parameters()).register_hook(lambda grad: seen.append(grad.numel()))
    loss_of(compiled, many(40)).backward()
    assert seen
    assert HELD not in gradients(model)
    optimizer.step()
    optimizer.zero_grad()
    hook.remove()
    train(compiled, optimizer, 5, STEPS)
    assert same(model, expected)


def test_what_somebody_holds_besides_leaves_no_room_and_they_go_home(held, expected):
    """A forward without its backward holds what it kept; a call after it is within the budget."""
    budget = 2 * held + WEIGHT_BYTES
    model, compiled, optimizer = begun(budget, 4)
    pending = loss_of(compiled, many(7))
    loss_of(compiled, many(40)).backward()
    optimizer.step()
    optimizer.zero_grad()
    assert zcompile.stats(model)["peak"]["together"] <= budget
    assert session_behind(model).planner.plan is None
    del pending
    train(compiled, optimizer, 5, STEPS)
    assert same(model, expected)


def test_a_backward_that_fails_leaves_no_gradient_and_no_bytes(held, expected, monkeypatch):
    model, compiled, optimizer = begun(held + WEIGHT_BYTES, 4)
    create, left = Store.create, [3]

    def failing(self, name, kind, nbytes, **how):
        if kind is Kind.GRAD:
            left[0] -= 1
            if not left[0]:
                raise RuntimeError("the third gradient")
        return create(self, name, kind, nbytes, **how)

    monkeypatch.setattr(Store, "create", failing)
    with pytest.raises(RuntimeError, match="the third gradient"):
        loss_of(compiled, many(40)).backward()
    monkeypatch.undo()
    optimizer.zero_grad()
    assert held_gradients(model) == 0
    assert session_behind(model).holding.nbytes == 0
    train(compiled, optimizer, 4, STEPS)
    assert same(model, expected)


def test_they_move_where_the_device_has_to_have_the_room_back(held, expected):
    """A longer batch holds more than was set aside: what stays goes home, and nothing is lost."""
    model, compiled, optimizer = begun(2 * held + 2 * WEIGHT_BYTES, 4)
    loss_of(compiled, many(40)).backward()
    assert HELD in gradients(model)
    kept = [p.grad.on_host() for p in model.parameters()]
    with torch.no_grad():
        compiled(torch.zeros(64, 32, dtype=torch.int64))
    assert all(torch.equal(a, p.grad.on_host())
               for a, p in zip(kept, model.parameters(), strict=True))  # fmt: skip
    optimizer.step()
    optimizer.zero_grad()
    train(compiled, optimizer, 5, STEPS)
    assert same(model, expected)


@pytest.mark.gpu
def test_on_a_gpu_too_the_bits_are_those_of_eager():
    torch.set_default_device("cuda")
    try:
        plain = gpt().cuda()
        train(plain, adamw(plain), 0, STEPS)
        torch._dynamo.reset()
        model = zcompile.offload(gpt().cpu(), device="cuda", device_memory="64MiB",
                                 host_memory="64MiB")  # fmt: skip
        train(torch.compile(model, backend="zinf"), adamw(model), 0, STEPS)
        assert session_behind(model).planner.plan.placement.stay
        assert all(torch.equal(mine.cpu(), theirs.cpu())
                   for mine, theirs in zip(values(model), values(plain), strict=True))  # fmt: skip
    finally:
        torch.set_default_device(None)
