"""Elementwise ops of an optimizer's step run as one row of each parameter, and nobody can tell but
by what moves."""

import copy
import io
import pickle
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from itertools import product

import pytest
import torch
from planned_runs import (
    STEPS,
    THROTTLE,
    expected,
    gpt,
    ids,
    let_all_be_late,
    loss_of,
    offloaded,
    same,
    streaming,
    train,
    values,
)
from sampled import sampled, sampled_rows
from torch import nn, optim

import zcompile
from zcompile.errors import Unsupported, UpdateBroken
from zcompile.frontend.offload import session_behind
from zcompile.ir.schedule import Run
from zcompile.runtime import executor
from zcompile.runtime.eager import joined
from zcompile.runtime.eager.joined import JoinedOps, LazyResult
from zcompile.runtime.executor import _Call


def adamw(model, **how):
    return optim.AdamW(model.parameters(), lr=1e-2, **how)


def momentum(model, **how):
    return optim.SGD(model.parameters(), lr=1e-2, momentum=0.9, **how)


def streamed(**fields):
    return offloaded(device_memory="4MiB", residency=False, throttle=THROTTLE, **fields)


def bytes_of_a_step(make, **how):
    model, compiled = streamed()
    optimizer = make(model, **how)
    train(model, compiled, optimizer, 0, 2, clip=False)
    loss_of(compiled, ids(20)).backward()
    before = zcompile.stats(model)["bytes"]
    optimizer.step()
    after = zcompile.stats(model)["bytes"]
    zcompile.close(model)
    return {kind: after[kind] - before[kind] for kind in ("h2d", "d2h")}


@pytest.mark.parametrize(
    ("make", "lists"), sampled_rows(product([adamw, momentum], [False, True]), (adamw, False))
)
@pytest.mark.slow
def test_ops_move_what_a_fused_update_moves(make, lists):
    assert bytes_of_a_step(make, foreach=lists) == bytes_of_a_step(make, fused=True)


class Own(optim.Optimizer):
    """An optimizer of a user: `update` is all that it does to a parameter."""

    def __init__(self, params, update):
        super().__init__(params, {})
        self.update = update

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self.update(p, p.grad, self.state[p])


def stepped(model, forward, update, steps=2):
    optimizer = Own(model.parameters(), update)
    for number in range(steps):
        loss_of(forward, ids(number)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return optimizer


def read_in_the_middle(p, grad, state):
    p.add_(grad, alpha=-0.1)
    state["seen"] = [*state.get("seen", ()), p.sum().item(), (grad * 2).max().item()]
    p.mul_(0.9)


def result_kept(p, grad, state):
    state["last"] = grad * 0.5 + 1
    p.sub_(state["last"], alpha=0.01)


def result_replaced(p, grad, state):
    state["mean"] = state["mean"] * 0.9 + grad if "mean" in state else grad * 1.0
    p.sub_(state["mean"].sign(), alpha=0.01)


def norm_in_the_middle(p, grad, state):
    step = grad / (grad.abs() + 1e-3)
    p.sub_(step / step.norm(), alpha=0.1)


def no_elementwise_op_of_it(p, grad, state):
    """Rows that are sorted, an op with `out=`, a masked write."""
    step = grad.abs().add_(1e-3)
    torch.maximum(step, grad.square(), out=step)
    step[step > 1] = 1.0
    p.sub_(step.flatten().sort().values.view_as(p), alpha=0.01)


def gradient_changed(p, grad, state):
    p.add_(grad, alpha=-0.1)
    grad.mul_(0.5).add_(p, alpha=0.01)
    p.add_(grad)


def itself(p, grad, state):
    p.mul_(p).sub_(p, alpha=0.5)
    p.addcmul_(grad, grad, value=-0.1)


def with_a_plain_tensor(p, grad, state):
    noise = torch.full_like(p, 0.25, device="cpu") if "noise" not in state else state["noise"]
    state["noise"] = noise
    plain = torch.arange(p.numel(), dtype=p.dtype).view(p.shape) / p.numel()
    p.add_(grad, alpha=-0.1).add_(plain, alpha=0.01)
    plain.zero_()
    p.mul_(0.5)


def counted_by_a_tensor(p, grad, state):
    """What is one number counts as it was when the op was called."""
    scale = state.setdefault("scale", torch.tensor(1.0))
    p.sub_(grad * scale, alpha=0.1)
    scale.add_(1)
    p.div_(scale)


def seen_as_ints(p, grad, state):
    p.mul_(0.9)
    p.view(torch.int32).add_(1)
    p.sub_(grad, alpha=0.1)


def one_number_of_many_dims(p, grad, state):
    p.mul_(torch.full((1,) * p.dim(), 0.5))
    made = (grad * 2.0) * torch.ones((1,) * (p.dim() + 1))
    assert made.dim() == p.dim() + 1
    p.sub_(made[0], alpha=0.1)


def other_dtypes(p, grad, state):
    sign = grad.to(torch.bfloat16).sign()
    p.sub_(sign.float() * (grad > 0), alpha=0.01)


UPDATES = [
    read_in_the_middle,
    result_kept,
    result_replaced,
    norm_in_the_middle,
    no_elementwise_op_of_it,
    gradient_changed,
    itself,
    with_a_plain_tensor,
    counted_by_a_tensor,
    other_dtypes,
    seen_as_ints,
    one_number_of_many_dims,
]


def states_of(optimizer):
    def plain(value):
        return value.tolist() if isinstance(value, torch.Tensor) else value

    return [{k: plain(v) for k, v in state.items()} for state in optimizer.state.values()]


@pytest.fixture
def by_anybody(monkeypatch):
    """Ops of users are joined too: more than torch's optimizers do."""
    monkeypatch.setattr(joined, "_is_called_by_torchs_optimizers", lambda: True)


def each_in_turn(updates):
    """These updates on one model, each from the same values: the session, once it was compared."""
    plain, (model, compiled) = gpt(), streamed()
    begin = [value.clone() for value in values(plain)]
    for update in updates:
        with torch.no_grad():
            for of in (plain, model):
                for param, value in zip(of.parameters(), begin, strict=True):
                    param.copy_(value)
        first, second = stepped(plain, plain, update), stepped(model, compiled, update)
        assert same(model, values(plain)), update.__name__
        assert states_of(first) == states_of(second), update.__name__
    return session_behind(model)


@pytest.mark.parametrize(
    "updates",
    [UPDATES[:5], pytest.param(UPDATES[5:], marks=pytest.mark.slow)],
    ids=["first", "rest"],
)
@pytest.mark.slow
def test_an_optimizer_of_ones_own_runs_op_by_op(updates):
    assert each_in_turn(updates).noted_ops is None


@pytest.mark.usefixtures("by_anybody")
def test_whatever_an_optimizer_computes_has_the_bits_of_plain_tensors():
    each_in_turn(UPDATES)


@pytest.mark.usefixtures("by_anybody")
def test_ops_that_share_nothing_are_one_schedule_and_run_when_the_step_ends():
    model, compiled = streamed()
    waiting = []

    def update(p, grad, state):
        made = grad * 0.1
        assert isinstance(made, LazyResult)
        p.sub_(made)
        waiting.append(p.entry.waits is not None)

    stepped(model, compiled, update, steps=1)
    assert all(waiting)
    assert not any(p.entry.waits for p in model.parameters())
    steps = [s for s in session_behind(model).steps.values() if s.name == "Own"]
    assert [len(s.rows) for s in steps] == [len(list(model.parameters()))]


@pytest.mark.usefixtures("by_anybody")
@pytest.mark.slow
def test_a_result_that_outlives_the_step_is_a_tensor_as_any_other():
    model, compiled = streamed()
    kept = []

    def update(p, grad, state):
        kept.append((grad * 3, grad.detach().clone()))
        p.sub_(grad, alpha=0.1)

    stepped(model, compiled, update, steps=1)
    for made, grad in kept:
        want = grad.cpu() * 3
        assert torch.equal(made, want)
        assert made.numpy().tolist() == want.tolist() == made.tolist()
        assert torch.equal(copy.deepcopy(made), want)
        assert torch.equal(pickle.loads(pickle.dumps(made)), want)
        torch.save({"made": made}, file := io.BytesIO())
        file.seek(0)
        assert torch.equal(torch.load(file)["made"], want)
        assert made.data_ptr() != 0
        assert made.add_(1) is made
        assert torch.equal(made, want + 1)
        assert str(made) == str(want + 1)
        assert torch.equal(made.t() if made.dim() == 2 else made, (want + 1).T)


@pytest.mark.usefixtures("by_anybody")
def test_a_step_that_raises_has_done_what_came_before():
    def fails(p, grad, state):
        p.sub_(grad, alpha=0.1)
        if p.dim() == 1:
            raise ValueError("enough")
        p.mul_(0.5)

    plain, (model, compiled) = gpt(), streamed()
    for m, forward in ((plain, plain), (model, compiled)):
        with pytest.raises(ValueError, match="enough"):
            stepped(m, forward, fails)
    assert same(model, values(plain))
    train(plain, plain, adamw(plain), 1, 3)
    train(model, compiled, adamw(model), 1, 3)
    assert same(model, values(plain))


@pytest.mark.usefixtures("by_anybody")
def test_an_op_that_torch_refuses_is_refused_where_it_is_called():
    def refused(p, grad, state):
        p.sub_(grad, alpha=0.1)
        with pytest.raises(RuntimeError, match="result type"):
            (grad > 0).mul_(0.5)
        with pytest.raises(RuntimeError):
            p.bitwise_and_(p)
        p.mul_(0.5)

    plain, (model, compiled) = gpt(), streamed()
    stepped(plain, plain, refused)
    stepped(model, compiled, refused)
    assert same(model, values(plain))


@pytest.mark.slow  # a step that raises has done it, too
@pytest.mark.usefixtures("by_anybody")
def test_a_closure_finds_what_the_step_did_before_it():
    class Twice(Own):
        @torch.no_grad()
        def step(self, closure):
            super().step()
            with torch.enable_grad():
                loss = closure()
            super().step()
            return loss

    def update(p, grad, state):
        p.sub_(grad / (grad.abs() + 1), alpha=0.1)

    plain, (model, compiled) = gpt(), streamed()
    losses = []
    for m, forward in ((plain, plain), (model, compiled)):
        optimizer = Twice(m.parameters(), update)

        def closure(forward=forward, optimizer=optimizer):
            optimizer.zero_grad()
            loss = loss_of(forward, ids(1))
            loss.backward()
            return loss

        loss_of(forward, ids(0)).backward()
        losses.append([optimizer.step(closure).item() for _ in range(2)])
    assert losses[0] == losses[1]
    assert same(model, values(plain))


@pytest.mark.parametrize("lists", sampled([False, True], False))
@pytest.mark.slow
def test_an_update_op_by_op_may_wait_for_the_next_forward(monkeypatch, lists):
    let_all_be_late(monkeypatch)

    def make(model):
        return adamw(model, foreach=lists)

    model, compiled = offloaded(**streaming())
    train(model, compiled, make(model), 0, STEPS)
    assert session_behind(model).late.rows > 0
    plain = gpt()
    train(plain, plain, make(plain), 0, STEPS)
    assert same(model, values(plain))


@pytest.mark.slow
def test_a_step_of_what_rests_in_reach_joins_too():
    """Nothing moves: ops are called where the operands rest."""
    model, compiled = offloaded(device_memory="64MiB")
    train(model, compiled, adamw(model, foreach=False), 0, STEPS)
    plain = gpt()
    train(plain, plain, adamw(plain, foreach=False), 0, STEPS)
    assert same(model, values(plain))


@pytest.mark.slow
def test_a_gradient_that_was_clipped_is_scaled_before_its_ops():
    model, compiled = streamed()
    train(model, compiled, momentum(model), 0, STEPS)
    assert same(model, expected(momentum))


def test_parameters_without_a_device_of_their_own_are_left_alone():
    """Ops of plain parameters in the same step."""
    model, compiled = streamed()
    extra = nn.Parameter(torch.ones(8, 8))
    extra.grad = torch.full((8, 8), 0.5)
    optimizer = optim.AdamW([*model.parameters(), extra], lr=1e-2, foreach=False)
    loss_of(compiled, ids(0)).backward()
    optimizer.step()
    alone = nn.Parameter(torch.ones(8, 8))
    alone.grad = torch.full((8, 8), 0.5)
    optim.AdamW([alone], lr=1e-2, foreach=False).step()
    assert torch.equal(extra, alone)


class Complex(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(40, 40, dtype=torch.complex64))


@pytest.mark.parametrize("lists", [False, True])
@pytest.mark.parametrize(
    "make",
    [
        lambda ps, how: optim.AdamW(ps, lr=0.1, weight_decay=0.1, foreach=how),
        lambda ps, how: optim.RMSprop(ps, lr=0.1, centered=True, momentum=0.9, foreach=how),
        lambda ps, how: optim.SGD(ps, lr=0.1, momentum=0.9, weight_decay=0.1, foreach=how),
    ],
)
def test_complex_parameters_are_seen_as_pairs_of_numbers(make, lists):
    models = []
    for offloads in (False, True):
        torch.manual_seed(0)
        model = Complex()
        if offloads:
            model = zcompile.offload(model, device="cpu", device_memory="4MiB", throttle=THROTTLE)
        optimizer = make(model.parameters(), lists)
        for _ in range(3):
            model.weight.abs().square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        models.append(model)
    assert torch.equal(models[0].weight, models[1].weight.on_host())


def zeroed(optimizer, p):
    optimizer.state[p]["exp_avg"].zero_()


def read(optimizer, p):
    SEEN.append(p.detach().numpy().sum().item())


SEEN: list[float] = []


@pytest.mark.slow  # read_in_the_middle asks, above
@pytest.mark.parametrize("asks", sampled([zeroed, read], read))
def test_who_asks_within_a_step_finds_what_it_did_and_no_update_that_waits(monkeypatch, asks):
    """Though the plan wants these updates late."""
    let_all_be_late(monkeypatch)

    class Asking(optim.AdamW):
        def step(self, closure=None):
            super().step()
            for p in self.param_groups[0]["params"]:
                asks(self, p)

    model, compiled = offloaded(**streaming())
    plain, seen = gpt(), []
    for m, forward in ((plain, plain), (model, compiled)):
        SEEN.clear()
        train(m, forward, Asking(m.parameters(), lr=1e-2, foreach=False), 0, STEPS + 1, clip=False)
        seen.append([*SEEN])
    assert seen[0] == seen[1]
    assert same(model, values(plain))


def test_ops_that_fail_on_their_way_leave_nothing_that_is_used_without_a_word(monkeypatch):
    """They were called, so that who goes on after the error takes them for done."""
    model, compiled = streamed()
    optimizer = adamw(model, foreach=False)
    train(model, compiled, optimizer, 0, 2, clip=False)
    loss_of(compiled, ids(20)).backward()
    plain, runs = _Call._run, []

    def fails(self, instruction):
        runs.append(instruction)
        if len(runs) == 2:
            raise OSError("injected")
        plain(self, instruction)

    with monkeypatch.context() as patch:
        patch.setattr(executor, "ACTIONS", {**executor.ACTIONS, Run: fails})
        with pytest.raises(OSError, match="injected"):
            optimizer.step()
    for p in model.parameters():
        with pytest.raises(UpdateBroken, match="injected") as refused:
            p.detach().sum()
        assert p._name_in_store() in str(refused.value)
        with pytest.raises(UpdateBroken):
            optimizer.state[p]["exp_avg"].sum()
    with pytest.raises(UpdateBroken):
        loss_of(compiled, ids(21))


@pytest.mark.slow  # so are the parameters of such ops, above
def test_a_result_whose_ops_failed_is_refused(monkeypatch):
    model, compiled = streamed()

    optimizer = adamw(model, foreach=False)
    train(model, compiled, optimizer, 0, 1, clip=False)
    loss_of(compiled, ids(20)).backward()
    noted = []
    note = JoinedOps.note

    def watched(self, app, dtype):
        made = note(self, app, dtype)
        noted.append(made)
        return made

    def fails(self, instruction):
        raise OSError("injected")

    with monkeypatch.context() as patch:
        patch.setattr(JoinedOps, "note", watched)
        patch.setattr(executor, "ACTIONS", {**executor.ACTIONS, Run: fails})
        with pytest.raises(OSError, match="injected"):
            optimizer.step()
    made_by_ops = [made for made in noted if made is not None]
    assert made_by_ops
    for made in made_by_ops:
        with pytest.raises(UpdateBroken):
            made.sum()


def by_a_thread(read):
    (thread := threading.Thread(target=read)).start()
    thread.join()


def by_a_signal_handler(read):
    usual = signal.signal(signal.SIGUSR1, lambda *_: read())
    try:
        signal.raise_signal(signal.SIGUSR1)
    finally:
        signal.signal(signal.SIGUSR1, usual)


@pytest.mark.parametrize("who", [by_a_thread, by_a_signal_handler])
def test_who_reads_while_an_op_is_noted_is_refused_and_no_op_is_lost(monkeypatch, who):
    """The row that was found for the op would run without it, and the op never."""
    model, compiled = streamed()
    optimizer = adamw(model, foreach=False)
    train(model, compiled, optimizer, 0, 1)
    found, asked, met = JoinedOps._row_of, [], []

    def reads():
        try:
            next(model.parameters()).detach().sum()
        except Unsupported as error:
            met.append(str(error))

    def row_of(self, tensors):
        row = found(self, tensors)
        if row.written and not asked:
            asked.append(who(reads))
        return row

    with monkeypatch.context() as patch:
        patch.setattr(JoinedOps, "_row_of", row_of)
        train(model, compiled, optimizer, 1, 2)
    train(model, compiled, optimizer, 2)
    assert same(model, expected(adamw))
    assert len(met) == 1
    assert "a step of AdamW is used while that step is running" in met[0]


def ready_to_step():
    """A model whose second step is due."""
    model, compiled = streamed()
    optimizer = adamw(model, foreach=False)
    train(model, compiled, optimizer, 0, 1)
    loss_of(compiled, ids(10)).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    return model, compiled, optimizer


def test_a_step_that_broke_off_in_a_thread_that_lives_on_keeps_nobody_else_out(monkeypatch):
    """As in a pool of threads, whose future has raised."""
    model, compiled, optimizer = ready_to_step()
    with ThreadPoolExecutor(1) as pool, monkeypatch.context() as patch:
        patch.setattr(JoinedOps, "end_step", fail)
        with pytest.raises(RuntimeError, match="breaks off"):
            pool.submit(optimizer.step).result()
        patch.undo()
        assert session_behind(model).noted_ops.has_any
        assert all(torch.isfinite(p.detach().sum()) for p in model.parameters())
        optimizer.zero_grad()
        train(model, compiled, optimizer, 2)
    assert same(model, expected(adamw))


def fail(ops):
    raise RuntimeError("the step breaks off")


def test_ops_noted_by_a_step_of_a_thread_that_has_ended_are_run_by_whoever_reads(monkeypatch):
    model, compiled, optimizer = ready_to_step()
    with monkeypatch.context() as patch:
        patch.setattr(JoinedOps, "end_step", lambda self: None)
        by_a_thread(optimizer.step)
    assert session_behind(model).noted_ops.has_any
    optimizer.zero_grad()
    train(model, compiled, optimizer, 2)
    assert same(model, expected(adamw))
