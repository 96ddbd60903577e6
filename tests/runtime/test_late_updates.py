"""Late updates: computed in the next forward, and nobody can tell but by what moves.

Plans that are forced to update late train beside plain PyTorch, with whatever a user may do between
a step and the next forward.
"""

import gc
from collections import Counter
from contextlib import contextmanager

import pytest
import torch
from between_steps import BETWEEN, FIRST, printed
from planned_runs import (
    LITTLE_HOST,
    PLANNED,
    STEPS,
    THROTTLE,
    WEIGHT_BYTES,
    adamw,
    expected,
    gpt,
    held_bytes,
    ids,
    let_all_be_late,
    loss_of,
    offloaded,
    same,
    train,
    values,
)
from sampled import sampled
from torch import nn

import zcompile
from zcompile.errors import UpdateBroken
from zcompile.frontend import rescheduling
from zcompile.frontend.offload import session_behind
from zcompile.ir.schedule import Borrow, Fetch, Run
from zcompile.ir.types import HELD, EntryRef, Phase
from zcompile.ir.units import Bytes, MiB
from zcompile.passes.arrange import rearrange
from zcompile.planner import step_plan
from zcompile.runtime import executor
from zcompile.runtime import late as late_updates
from zcompile.runtime.device.cpu import CpuDevice
from zcompile.runtime.executor import _Call


@pytest.fixture(autouse=True)
def forced(monkeypatch):
    let_all_be_late(monkeypatch)


def budget(tmp_path, where: str) -> dict[str, object]:
    fields: dict[str, object] = {"device_memory": Bytes(WEIGHT_BYTES + held_bytes())}
    if where == "disk":
        return fields | {"disk": tmp_path, "host_memory": LITTLE_HOST}
    return fields | {"throttle": THROTTLE}


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9, fused=True)


def amsgrad(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=1e-2, amsgrad=True, fused=True)


def adagrad(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adagrad(model.parameters(), lr=1e-2, fused=True)


def plain_sgd(model: nn.Module) -> torch.optim.Optimizer:
    """Without states, one op for each parameter."""
    return torch.optim.SGD(model.parameters(), lr=1e-2, foreach=False)


def nesterov(model: nn.Module) -> torch.optim.Optimizer:
    """As lists of ops, one of which writes the gradients."""
    return torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9, nesterov=True, foreach=True)


class Pair:
    """A model that trains late, and the same model in plain PyTorch, step by step."""

    def __init__(self, make=adamw, **fields):
        self.plain, (self.model, self.compiled) = gpt(), offloaded(**fields)
        self.optimizers = make(self.plain), make(self.model)
        self.session = session_behind(self.model)
        self.number = 0

    @property
    def both(self):
        return zip((self.plain, self.model), self.optimizers, strict=True)

    def forward(self):
        tokens = ids(self.number)
        loss_of(self.plain, tokens).backward()
        loss_of(self.compiled, tokens).backward()
        self.number += 1

    def step(self, steps: int = 1) -> "Pair":
        for _ in range(steps):
            self.forward()
            for model, optimizer in self.both:
                nn.utils.clip_grad_norm_(model.parameters(), 0.5)
                optimizer.step()
                optimizer.zero_grad()
        return self

    def equal(self) -> bool:
        return same(self.model, values(self.plain))


@contextmanager
def trained_pair(tmp_path):
    made = Pair(**budget(tmp_path, "throttled")).step(PLANNED + 1)
    assert made.session.late.rows > 0
    yield made
    zcompile.close(made.model)


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        let_all_be_late(patch)
        with trained_pair(tmp_path_factory.mktemp("shared")) as made:
            yield made


@pytest.fixture
def pair(shared):
    """Some steps into a run in which updates are late. Tests share it, and go on from where the
    one before ended; they stand together, since what compiles another model makes this one's graph
    anew."""
    assert shared.equal(), "the test before this one left the two apart"
    shared.step(2)  # what was compared is updated
    assert shared.session.late.rows > 0
    return shared


@pytest.fixture
def own_pair(tmp_path):
    """As `pair`, for a test that spoils it."""
    with trained_pair(tmp_path) as made:
        yield made


# Trained whole


@pytest.mark.parametrize(
    ("where", "make", "clip"),
    [
        ("disk", adamw, True),
        pytest.param("throttled", amsgrad, False, marks=pytest.mark.slow),
        pytest.param("throttled", nesterov, True, marks=pytest.mark.slow),
        pytest.param("throttled", adamw, False, marks=pytest.mark.slow),
        pytest.param("throttled", sgd, True, marks=pytest.mark.slow),
        pytest.param("throttled", adagrad, False, marks=pytest.mark.slow),
        pytest.param("throttled", plain_sgd, False, marks=pytest.mark.slow),
    ],
)
def test_a_run_whose_updates_are_late_trains_bit_equal(tmp_path, where, make, clip):
    model, compiled = offloaded(**budget(tmp_path, where))
    optimizer = make(model)
    train(model, compiled, optimizer, 0, PLANNED, clip=clip)
    waiting = session_behind(model).late.rows
    assert waiting > 0
    train(model, compiled, optimizer, PLANNED, STEPS, clip=clip)
    assert session_behind(model).late.rows == waiting
    assert same(model, expected(make, clip=clip))


@pytest.mark.parametrize("infinite", sampled([None, PLANNED + 1], PLANNED + 1))
@pytest.mark.slow
def test_gradients_that_a_fused_optimizer_unscales_are_updated_late(tmp_path, infinite):
    """It writes them: `GradScaler` leaves that to the optimizer, and skips a step with an inf."""
    plain, (model, compiled) = gpt(), offloaded(**budget(tmp_path, "throttled"))
    found = []
    for m, forward in ((plain, plain), (model, compiled)):
        optimizer, scaler = adamw(m), torch.amp.GradScaler("cpu", init_scale=8.0)
        for number in range(STEPS + 1):
            loss = loss_of(forward, ids(number)) * (float("inf") if number == infinite else 1.0)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            if number == STEPS:
                found.append([p.grad.sum().item() for p in m.parameters()])
            elif number < STEPS:
                optimizer.zero_grad()
            if m is model and number == STEPS - 1:
                assert session_behind(model).late.rows > 0
        found[-1].append(scaler.get_scale())
    assert found[0] == found[1]
    assert same(model, values(plain))


@pytest.mark.slow
def test_the_norm_of_a_gradient_that_waits_to_be_written_is_that_of_what_it_becomes(tmp_path):
    pair = Pair(nesterov, **budget(tmp_path, "throttled")).step(PLANNED)
    pair.forward()
    norms = []
    for model, optimizer in pair.both:
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1e9)
        optimizer.step()
        after = nn.utils.clip_grad_norm_(model.parameters(), 1e9)
        assert norm != after
        norms.append((norm.item(), after.item()))
        optimizer.zero_grad()
    assert norms[0] == norms[1]
    assert pair.step(2).equal()


@pytest.mark.slow
def test_the_first_of_several_micro_batches_computes_what_waits(tmp_path):
    model, compiled = offloaded(**budget(tmp_path, "throttled"))
    optimizer, late = adamw(model), session_behind(model).late
    train(model, compiled, optimizer, 0, PLANNED, batches=2)
    assert late.rows > 0
    loss_of(compiled, ids(10 * PLANNED)).backward()
    assert late.rows == 0
    loss_of(compiled, ids(10 * PLANNED + 1)).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    optimizer.step()
    optimizer.zero_grad()
    train(model, compiled, optimizer, PLANNED + 1, STEPS, batches=2)
    assert same(model, expected(batches=2))


@pytest.mark.slow
def test_gradients_may_be_dropped_behind_the_forward(tmp_path):
    """As many loops do: they live while the forward computes, and are read by nobody after it."""
    model, compiled = offloaded(**budget(tmp_path, "throttled"))
    optimizer = adamw(model)
    for number in range(STEPS):
        loss = loss_of(compiled, ids(10 * number))
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
    assert session_behind(model).late.rows > 0
    assert same(model, expected())


def brought(tmp_path) -> tuple[dict[EntryRef, int], Counter, bool]:
    """Of a planned step: the size of each parameter that moves; bytes that each phase
    brings of each entry; whether updates are late."""
    model, compiled = offloaded(**budget(tmp_path, "throttled"))
    session, optimizer = session_behind(model), adamw(model)
    recorder = session.executor.recorder
    recorder.keep_walks(True)
    train(model, compiled, optimizer, 0, PLANNED + 3)
    entries = [p.entry for p in model.parameters()]
    moving = {EntryRef(entry.key): entry.nbytes for entry in entries if entry.home != "device"}
    bytes_of: Counter = Counter()
    for call in recorder.last_walked.calls:
        for x in call.schedule.instructions:
            if isinstance(x, Fetch):
                bytes_of[call.phase, call.entries[x.entry]] += x.nbytes
    late = bool(session.controller.plan.late)
    zcompile.close(model)
    return moving, bytes_of, late


@pytest.mark.slow  # tests/planner/test_late_step.py, of each arrangement
def test_an_update_brings_its_parameter_once_for_forward_and_step(tmp_path, monkeypatch):
    moving, bytes_of, late = brought(tmp_path)
    assert late
    assert moving
    for param, nbytes in moving.items():
        assert bytes_of[Phase.FORWARD, param] <= nbytes, "for the update and the forward together"
        assert bytes_of[Phase.STEP, param] == 0
    monkeypatch.setattr(step_plan, "LATE_PAYS", 1e9)
    moving, bytes_of, late = brought(tmp_path)
    assert not late
    assert sum(bytes_of[Phase.STEP, param] for param in moving) > 0


# Whatever comes between a step and the next forward


@pytest.mark.parametrize(
    "asking", [FIRST, pytest.param(BETWEEN, marks=pytest.mark.slow)], ids=["first", "all"]
)
def test_whoever_asks_before_the_next_forward_finds_the_update_done(pair, asking):
    for between in asking:
        pair.step(2)  # what was compared is updated
        assert pair.session.late.rows, between.__name__
        found = [between(model, optimizer) for model, optimizer in pair.both]
        assert found[0] == found[1], between.__name__
        pair.step(2)
        assert pair.equal(), between.__name__


@pytest.mark.slow  # clipped ones are, below
def test_gradients_that_are_used_again_are_as_the_step_left_them(pair):
    """`zero_grad(set_to_none=False)` and a second step on the same gradients."""
    pair.forward()
    for _, optimizer in pair.both:
        optimizer.step()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
    assert pair.step(2).equal()


def test_clipped_gradients_that_are_used_again_are_clipped_once(pair):
    pair.forward()
    for model, optimizer in pair.both:
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        optimizer.step()
    found = [
        [p.grad.abs().sum().item() for p in model.parameters()]
        for model in (pair.plain, pair.model)
    ]
    assert found[0] == found[1]
    for model, optimizer in pair.both:
        for p in model.parameters():
            p.grad.add_(0.01)
        optimizer.step()
        optimizer.zero_grad()
    assert pair.step(2).equal()


def test_parameters_that_share_a_gradient_are_updated_at_once(pair):
    for model, optimizer in pair.both:
        block = model.blocks[0]
        block.norm2.weight.grad = block.norm1.weight.grad = torch.ones_like(block.norm1.weight)
        optimizer.step()
        optimizer.zero_grad()
    assert pair.step(2).equal()


@pytest.mark.slow  # tests/runtime/test_late_narrow.py evaluates
def test_an_evaluation_computes_with_updated_parameters(pair):
    tokens = ids(77)
    with torch.no_grad():
        assert torch.equal(loss_of(pair.plain, tokens), loss_of(pair.compiled, tokens))
    assert pair.session.late.rows == 0
    assert pair.step(2).equal()


@pytest.mark.slow  # whoever reads one finds it updated, above
def test_an_eager_call_computes_with_updated_parameters(pair):
    tokens = ids(78)
    assert torch.equal(loss_of(pair.plain, tokens), loss_of(pair.model, tokens))
    assert pair.step(2).equal()


@pytest.mark.slow  # those in a list do, below
def test_gradients_that_are_kept_beyond_a_forward_make_room_for_it(pair):
    """They were let go before, in every step that was planned."""
    pair.step()
    kept = [p.grad for p in pair.model.parameters()]
    assert kept == [None] * len(kept)
    pair.forward()
    for _, optimizer in pair.both:
        optimizer.step()
    for model, forward in ((pair.plain, pair.plain), (pair.model, pair.compiled)):
        loss = loss_of(forward, ids(60))
        model.zero_grad()
        loss.backward()
    for _, optimizer in pair.both:
        optimizer.step()
        optimizer.zero_grad()
    stats, budget = zcompile.stats(pair.model), pair.session.device_budget
    assert stats["peak"]["together"] <= budget
    assert pair.step(2).equal()


def test_gradients_in_a_list_of_the_user_make_room_for_the_forward(pair, monkeypatch):
    """Nobody's `.grad` any more, and yet not let go when their update is done."""
    pair.forward()
    kept = [[p.grad for p in model.parameters()] for model, _ in pair.both]
    for _, optimizer in pair.both:
        optimizer.step()
        optimizer.zero_grad()
    late = pair.session.late
    held = [entry for g in late._waiting for row in g.rows for entry in g.entries_of(row)]
    held = [entry for entry in held if entry.home == HELD]
    assert held
    assert not any(map(late.alone_keep, held))
    plain, let_go = late_updates.LateUpdates.held_bytes, []

    def counted(self, schedule, entries):
        let_go.append(plain(self, schedule, entries))
        return let_go[-1]

    monkeypatch.setattr(late_updates.LateUpdates, "held_bytes", counted)
    pair.forward()
    assert let_go
    assert not any(let_go)
    stats, budget = zcompile.stats(pair.model), pair.session.device_budget
    assert stats["peak"]["together"] <= budget
    assert all(torch.equal(a, b.on_host()) for a, b in zip(*kept, strict=True))
    del kept
    for _, optimizer in pair.both:
        optimizer.step()
        optimizer.zero_grad()
    assert pair.step(2).equal()


# Failures


def patched(monkeypatch, run) -> None:
    """Let calls carry out regions and chunks by `run`."""
    monkeypatch.setattr(executor, "ACTIONS", {**executor.ACTIONS, Run: run})


def failing_at(monkeypatch, share: float) -> None:
    """Let a forward with late updates fail before a region, so far into it."""
    plain, done = _Call._run, Counter()

    def run(self, instruction):
        if self.schedule.updates_late:
            runs = sum(isinstance(x, Run) for x in self.schedule.instructions)
            if done["runs"] == int(share * runs):
                raise RuntimeError("injected")
            done["runs"] += 1
        plain(self, instruction)

    patched(monkeypatch, run)


@pytest.mark.parametrize(
    "shares", sampled([(0.0, 0.4, 0.99), (0.1, 0.25, 0.6, 0.8)], (0.0, 0.4, 0.99))
)
@pytest.mark.slow
def test_a_forward_that_fails_has_done_whole_chunks_and_the_others_wait(pair, monkeypatch, shares):
    for share in shares:
        pair.step(2)  # what was compared is updated
        before = pair.session.late.rows
        with monkeypatch.context() as patch:
            failing_at(patch, share)
            with pytest.raises(RuntimeError, match="injected"):
                loss_of(pair.compiled, ids(pair.number))
        gc.collect()  # the values of the call live as long as its error
        assert share or pair.session.late.rows == before
        assert same(pair.model, values(pair.plain)), share
        assert pair.step(2).equal(), share


def chunk_failing(monkeypatch, number: int, in_place: bool) -> None:
    """Let the `number`-th chunk of those that change no operand where it rests, or of all, fail
    when it has changed its operands."""
    plain, seen = _Call._run, Counter()

    def run(self, instruction):
        rows = self.schedule.instructions
        written = {x.register for x in rows if isinstance(x, Borrow) and x.writes}
        plain(self, instruction)
        if instruction.late is not None and (in_place or written.isdisjoint(instruction.inputs)):
            seen["chunks"] += 1
            if seen["chunks"] == number:
                self.progress.chunks -= 1
                self.progress.begins()
                raise RuntimeError("injected")

    patched(monkeypatch, run)


@pytest.mark.parametrize("number", sampled([1, 3], 3))
def test_a_chunk_that_fails_is_computed_again_from_what_rests_at_home(pair, monkeypatch, number):
    with monkeypatch.context() as patch:
        chunk_failing(patch, number, in_place=False)
        with pytest.raises(RuntimeError, match="injected"):
            loss_of(pair.compiled, ids(pair.number))
    gc.collect()
    assert same(pair.model, values(pair.plain))
    assert pair.step(2).equal()


# Runs of their own


def test_forwards_are_arranged_with_chunks_that_the_device_asks_for(tmp_path, monkeypatch):
    """How many chunks there are then: tests/planner/test_late_step.py, of larger parameters."""
    asked = []

    def arranged(schedule, *given):
        if schedule.program is not None:
            asked.append(schedule.program.late)
        return rearrange(schedule, *given)

    monkeypatch.setattr(CpuDevice, "late_chunk_bytes", 3 * MiB)
    monkeypatch.setattr(rescheduling, "rearrange", arranged)
    with trained_pair(tmp_path) as run:
        assert run.equal()
    late = [rows for rows in asked if rows is not None and rows.updates]
    assert late
    assert {rows.least_bytes for rows in late} == {3 * MiB}


class Early(nn.Module):
    """Layers that are given, beside their input, rows that are summed before the first of them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(*(nn.Linear(64, 64) for _ in range(3)))

    def forward(self, x, rows):
        return self.layers(x + rows.sum(0)).square().mean()


@pytest.mark.parametrize(
    "part",
    [slice(0, 4), pytest.param(slice(None), marks=pytest.mark.slow)],
    ids=["rows", "whole"],
)
def test_a_parameter_among_the_inputs_is_updated_before_it_is_read(part):
    """It is gathered while the forward goes on, which has more than one name for its entry."""
    plain, model = Early(), Early()
    fields = {"device_memory": Bytes(320 * 1024), "host_memory": "64MiB", "throttle": THROTTLE}
    torch._dynamo.reset()
    zcompile.offload(model, device="cpu", **fields)
    compiled = torch.compile(model, backend="zinf")
    optimizers = adamw(plain), adamw(model)
    for number in range(PLANNED + 3):
        x = torch.randn(8, 64, generator=torch.Generator().manual_seed(number))
        for net, forward, optimizer in (
            (plain, plain, optimizers[0]),
            (model, compiled, optimizers[1]),
        ):
            forward(x, net.layers[1].weight.detach()[part]).backward()
            optimizer.step()
            optimizer.zero_grad()
    assert same(model, values(plain))
    zcompile.close(model)


@pytest.mark.slow
def test_the_last_step_is_done_though_its_optimizer_is_gone(own_pair):
    want = values(own_pair.plain)
    own_pair.optimizers = ()
    gc.collect()
    assert same(own_pair.model, want)


@pytest.mark.slow  # tests/checkpoint/test_durable_late.py
def test_a_checkpoint_has_what_the_step_made(own_pair, tmp_path):
    zcompile.save(tmp_path / "at", own_pair.model, own_pair.optimizers[1])
    model, compiled = offloaded(device_memory="16MiB")
    optimizer = adamw(model)
    zcompile.resume(tmp_path / "at", model, optimizer)
    assert same(model, values(own_pair.plain))
    for number in range(2):
        for forward, of in ((own_pair.plain, own_pair.optimizers[0]), (compiled, optimizer)):
            loss_of(forward, ids(50 + number)).backward()
            of.step()
            of.zero_grad()
    assert same(model, values(own_pair.plain))


@pytest.mark.slow
def test_what_is_asked_for_step_after_step_is_updated_at_once_from_then_on(own_pair, caplog):
    caplog.set_level("INFO")
    for _ in range(late_updates.OFTEN + 3):
        own_pair.step()
        printed(own_pair.model, None)
    assert own_pair.session.late.rows == 0
    assert not own_pair.session.controller.plan.late
    assert "lets no update wait" in caplog.text
    assert own_pair.step().equal()


@pytest.mark.slow
def test_a_chunk_that_fails_where_its_operands_rest_is_refused_from_then_on(own_pair, monkeypatch):
    monkeypatch.setattr(late_updates.Progress, "is_torn", lambda self, n: self.within and n == 0)
    chunk_failing(monkeypatch, 1, in_place=True)
    waiting = own_pair.session.late._waiting[0]
    broken = waiting.weight(waiting.rows[0])
    with pytest.raises(RuntimeError, match="injected"):
        loss_of(own_pair.compiled, ids(own_pair.number))
    (param,) = (p for p in own_pair.model.parameters() if p.entry is broken)
    with pytest.raises(UpdateBroken, match="go back to a checkpoint") as refused:
        param.detach().sum()
    assert broken.name in str(refused.value)
    with pytest.raises(UpdateBroken):
        loss_of(own_pair.compiled, ids(own_pair.number))


@pytest.mark.slow
def test_where_the_others_of_a_call_fail_those_that_wait_wait_on(own_pair, monkeypatch):
    """As small parameters do, which are updated at once."""
    own_pair.forward()
    wanted = own_pair.session.late.wanted
    first = next(iter(wanted))
    waiting = {ref: at for ref, at in wanted.items() if ref != first}
    own_pair.session.late.want(waiting)

    def fails(self, instruction):
        raise OSError("injected")

    with monkeypatch.context() as patch:
        patched(patch, fails)
        with pytest.raises(OSError, match="injected"):
            own_pair.optimizers[1].step()
    assert own_pair.session.late.rows == len(waiting)
    own_pair.optimizers[0].step()
    for plain, param in zip(own_pair.plain.parameters(), own_pair.model.parameters(), strict=True):
        if param.entry.ref in waiting:
            assert torch.equal(plain.detach(), param.on_host())


@pytest.mark.slow
def test_nothing_waits_where_no_plan_says_so():
    model, compiled = offloaded(device_memory="16MiB")
    train(model, compiled, adamw(model), 0, PLANNED + 1)
    late = session_behind(model).late
    assert not late.wanted
    assert late.rows == 0
