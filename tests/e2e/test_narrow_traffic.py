"""Under autocast weights travel in the dtype that they are read in, and gradients in the one they
are made in; every bit is eager's."""

from dataclasses import replace

import pytest
import torch
from narrow_runs import (
    BF16,
    FP16,
    STEPS,
    TIGHT,
    WIDTH,
    Run,
    adamw,
    copies,
    crossed_by,
    let_all_move,
    loss_of,
    mlp,
    offloaded,
    values,
)
from sampled import sampled, sampled_rows
from torch import nn, optim

import zcompile
from zcompile.cli import main
from zcompile.frontend import replan
from zcompile.frontend.offload import session_behind
from zcompile.frontend.replan import plan_in_force
from zcompile.frontend.session_plan import costs_of, seconds_at
from zcompile.ir.units import Bytes, KiB
from zcompile.machine.model import Compute, Link
from zcompile.planner import step_plan
from zcompile.planner.placement import Room
from zcompile.runtime import relocate
from zcompile.runtime.foresight import Foresight


@pytest.fixture(autouse=True)
def at_once(monkeypatch, request):
    """Let copies be kept where they may be, whether they pay on this machine or not, and no update
    be late, but in tests of those: a late one moves as much, in other phases."""
    monkeypatch.setattr(step_plan, "NARROW_PAYS", 0.0)
    if "late" not in request.node.name:
        monkeypatch.setattr(step_plan, "LATE_PAYS", float("inf"))


PLANNED = 3
"""Steps after which a plan is in force."""


def pair(between=None, make_model=mlp, steps=STEPS, fields=None, prepare=None, **how):
    """The tiered run, after it was found equal to eager's in losses and weights."""
    model = make_model()
    tiered, call = offloaded(make_model(), **(fields or {}))
    for each in (model, tiered) if prepare is not None else ():
        prepare(each)
    plain = Run(model, model, **how).steps(0, steps, between)
    run = Run(tiered, call, **how).steps(0, steps, between)
    assert run.losses == plain.losses
    assert all(map(torch.equal, values(model), values(tiered)))
    return run


@pytest.fixture(scope="module")
def planned():
    """A run with copies that tests look at."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(step_plan, "NARROW_PAYS", 0.0)
        patch.setattr(step_plan, "LATE_PAYS", float("inf"))
        return pair()


@pytest.fixture
def each_alone(monkeypatch):
    """No call starts fetches of the next one, so that what a call moves is its own."""
    monkeypatch.setattr(Foresight, "passed", lambda self, index: None)


def moving(**how):
    """A run in which all moves, each call for itself."""

    def prepare(model):
        if hasattr(model[0].weight, "entry"):
            let_all_move(model)

    return pair(prepare=prepare, **{"fields": {"max_lead": 0}, **how})


def test_forward_and_backward_move_four_bytes_in_and_two_out(each_alone):
    run = moving(fields={"max_lead": 0, "updates": "device"})
    moved = crossed_by(run.model, lambda: run.backward(STEPS))
    assert moved["h2d"] == pytest.approx(4.0, abs=0.05)
    assert moved["d2h"] == pytest.approx(2.0, abs=0.05)
    moved = crossed_by(run.model, run.step)
    assert moved["h2d"] == pytest.approx(4 + 2 + 8, abs=0.05)
    assert moved["d2h"] == pytest.approx(4 + 8 + 2, abs=0.05)


@pytest.mark.parametrize(
    ("bytes_per_s", "pays"), sampled_rows([(4e6, True), (200e9, False)], (200e9, False))
)
@pytest.mark.slow
def test_copies_are_kept_where_they_pay(monkeypatch, bytes_per_s, pays):
    """By rates that are given: those of a busy machine would say that any byte less pays."""
    monkeypatch.setattr(step_plan, "NARROW_PAYS", 1.01)
    unmeasured = {"regions": {}, "alike": {}, "launches": {}, "issues": {}, "gaps": {}, "idle": {}}

    def given(session):
        costs = costs_of(session)
        links = {name: Link(name, bytes_per_s) for name in costs.machine.links}
        compute = Compute({"float32": 50e9}, 1e15)  # casts, which copies save, take no time
        machine = replace(costs.machine, links=links, compute=compute)
        return replace(costs, machine=machine, **unmeasured)

    monkeypatch.setattr(replan, "costs_of", given)
    run = pair(steps=PLANNED)
    assert bool(copies(run.model)) is pays


@pytest.mark.slow
def test_copies_are_in_the_plan_and_counted_on_their_tier(planned):
    run = planned
    plan, kept = plan_in_force(session_behind(run.model)), copies(run.model)
    assert len(plan.copies) == len(kept) == 4
    assert {e.ref for e in kept} == set(plan.copies)
    assert [e.home for e in kept] == [plan.placement.homes[e.ref] for e in kept]
    assert sum(e.place.nbytes for e in kept) == 2 * sum(p.numel() for p in run.model.parameters())


def test_what_is_counted_is_what_was_predicted(planned):
    run = planned
    run.steps(STEPS, STEPS + 2)
    predicted = zcompile.stats(run.model)["predicted"]
    moved = crossed_by(run.model, lambda: run.steps(STEPS + 2, STEPS + 3))
    count = sum(p.numel() for p in run.model.parameters())
    for link in ("h2d", "d2h"):
        assert moved[link] == pytest.approx(predicted["bytes"][link] / count, abs=0.05)


@pytest.mark.slow
def test_explain_shows_when_a_copy_is_fetched(tmp_path, capsys):
    run = moving(fields={"dump": tmp_path / "run"})
    zcompile.close(run.model)
    assert main(["explain", str(tmp_path / "run"), "2.weight"]) == 0
    assert "fetch (its copy in bfloat16)" in capsys.readouterr().out


def evaluated(run, number):
    run.model.eval()
    with torch.no_grad():
        run.losses.append(loss_of(run.call, 99).item())
    run.model.train()


def written(run, number):
    with torch.no_grad():
        next(run.model.parameters()).mul_(0.5)


def assigned(run, number):
    weight = next(run.model.parameters())
    weight.data = torch.full((WIDTH, WIDTH), 0.01 * number)


def loaded(run, number):
    state = {name: value.clone() for name, value in run.model.state_dict().items()}
    run.model.load_state_dict({name: value + 0.001 for name, value in state.items()})


def read(run, number):
    run.losses.append(float(sum(p.detach().float().sum() for p in run.model.parameters())))


def forward_twice(run, number):
    run.losses.append(loss_of(run.call, 50 + number).item())


BETWEEN = [evaluated, written, assigned, loaded, read, forward_twice]


@pytest.mark.slow
@pytest.mark.parametrize("between", BETWEEN)
def test_whatever_is_done_between_steps(between):
    assert copies(pair(between).model)


@pytest.mark.slow
def test_all_that_is_done_between_steps_in_turn():
    def between(run, number):
        if number >= PLANNED:
            BETWEEN[(number - PLANNED) % len(BETWEEN)](run, number)

    assert copies(pair(between, steps=PLANNED + len(BETWEEN) + 1).model)


class Average:
    """An exponential moving average that reads each weight after each step."""

    def __init__(self):
        self.held = None

    def __call__(self, run, number):
        now = [v.clone() for v in values(run.model)]
        self.held = (
            now
            if self.held is None
            else [a.lerp(b, 0.1) for a, b in zip(self.held, now, strict=True)]
        )
        run.losses.append(float(sum(v.sum() for v in self.held)))


@pytest.mark.slow
def test_an_average_of_weights_is_eagers():
    model = mlp()
    plain = Run(model, model).steps(0, STEPS, Average())
    tiered, call = offloaded(mlp())
    assert Run(tiered, call).steps(0, STEPS, Average()).losses == plain.losses


OPTIMIZERS = {
    "adamw, unfused": lambda m: optim.AdamW(m.parameters(), lr=1e-2),
    "adamw, foreach": lambda m: optim.AdamW(m.parameters(), lr=1e-2, foreach=True),
    "sgd": lambda m: optim.SGD(m.parameters(), lr=1e-2, momentum=0.9, weight_decay=0.1),
}


@pytest.mark.parametrize("make", sampled(OPTIMIZERS, "adamw, unfused"))
@pytest.mark.slow
def test_other_optimizers_write_copies_along(make, each_alone):
    run = moving(make=OPTIMIZERS[make])
    assert copies(run.model)
    moved = crossed_by(run.model, lambda: run.backward(STEPS))
    assert moved["h2d"] == pytest.approx(4.0, abs=0.05)


HOW = {
    "clipped": {"clip": 0.1},
    "micro-batches": {"micro": 2},
    "micro-batches, clipped": {"micro": 3, "clip": 0.1},
    "fp16, scaled": {"dtype": FP16, "scaled": True},
    "fp16, scaled and clipped": {"dtype": FP16, "scaled": True, "clip": 0.1},
}


@pytest.mark.parametrize("how", sampled(HOW, "micro-batches, clipped"))
@pytest.mark.slow
def test_other_loops(how):
    assert copies(pair(**HOW[how]).model)


def test_a_step_that_overflows_is_skipped_as_in_eager():
    def overflowing(run, number):
        if number == 3:
            run.scaler._scale.fill_(2.0**60)

    run = pair(overflowing, dtype=FP16, scaled=True, steps=6)
    assert run.scaler.get_scale() < 2.0**60


def frozen():
    model = mlp()
    model[0].weight.requires_grad_(False)
    return model


@pytest.mark.slow
def test_a_frozen_weight_has_its_copy_made_once():
    run = pair(make_model=frozen)
    kept = next(e for e in copies(run.model) if e.name.startswith("0.weight"))
    version = kept.version
    run.steps(STEPS, STEPS + 2)
    assert kept.version == version


def tied():
    model = mlp()
    model[4].weight = model[0].weight
    return model


@pytest.mark.slow
def test_tied_weights_have_one_copy():
    # Eager autocast keeps a cast for both uses, and sums their gradients in bfloat16; traced code
    # does not, whoever compiles it.
    torch._dynamo.reset()
    model = tied()
    plain = Run(model, torch.compile(model, backend="aot_eager")).steps(0, STEPS)
    tiered, call = offloaded(tied(), device_memory=Bytes(TIGHT + 64 * KiB))
    assert Run(tiered, call).steps(0, STEPS).losses == plain.losses
    assert len(copies(tiered)) == 3


@pytest.mark.slow  # tests/runtime/test_late_narrow.py trains so
def test_late_updates_and_copies_are_planned_together_or_apart():
    run = pair(fields={"device_memory": Bytes(TIGHT + 128 * KiB)}, steps=8)
    assert plan_in_force(session_behind(run.model)) is not None


@pytest.mark.slow
def test_no_window_for_late_updates_is_as_large_as_the_whole_arena():
    # which must be left here, and is no multiple of what entries are aligned to
    run = moving(fields={"device_memory": Bytes(TIGHT + 100)})
    assert plan_in_force(session_behind(run.model)) is not None


def test_where_there_is_no_room_for_copies_none_is_kept(planned):
    model = planned.model
    session = session_behind(model)
    plan, base = plan_in_force(session), session.controller._base
    least = sum(fact.nbytes for fact in base.facts.values())

    def kept(room_bytes):
        room = Room({"device": 0, "host": room_bytes})
        made = replace(plan, reads={}, step=base)
        found = step_plan.plan_narrow_or_not(
            base, made, lambda *_: plan, session.reading_copies, room
        )
        return bool(found.reads)

    copied = sum(e.nbytes for e in copies(model))
    assert kept(least + 2 * copied)
    assert not kept(least + copied // 2)


def test_a_plan_with_copies_is_told_as_it_rests_where_an_entry_found_no_room(planned):
    session = session_behind(planned.model)
    plan, base = plan_in_force(session), session.controller._base
    assert plan.reads
    astray = next(ref for ref, home in plan.placement.homes.items() if home == "host")
    window, seconds = session.window_bytes, seconds_at(costs_of(session))
    found = step_plan.at_rest(plan, base, {astray: "device"}, window, seconds)
    assert found.placement.homes == {**plan.placement.homes, astray: "device"}
    assert found.reads == plan.reads
    assert [c.entries for c in found.step.calls] == [c.entries for c in plan.step.calls]


def test_nothing_is_copied_where_weights_rest_on_the_device():
    assert not copies(pair(fields={"device_memory": "64MiB"}).model)


@pytest.mark.slow  # tests/runtime/test_narrowing.py
def test_without_autocast_weights_are_read_as_they_are():
    model = mlp()
    tiered, call = offloaded(mlp())
    for run in (Run(model, model), Run(tiered, call)):
        run.dtype = torch.float32
        x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(1))
        for _ in range(4):
            run.call(x).sum().backward()
            run.step()
    assert all(map(torch.equal, values(model), values(tiered)))
    assert not copies(tiered)


def test_a_checkpoint_holds_weights_as_they_are(tmp_path, planned):
    run = planned
    torch.save(run.model.state_dict(), tmp_path / "model.pt")
    saved = torch.load(tmp_path / "model.pt")
    assert all(map(torch.equal, saved.values(), values(run.model)))
    assert {v.dtype for v in saved.values()} == {torch.float32}


def test_a_gradient_reads_as_eagers_between_backward_and_step():
    model = mlp()
    plain = Run(model, model).steps(0, PLANNED)
    tiered, call = offloaded(mlp())
    run = Run(tiered, call).steps(0, PLANNED)
    plain.backward(PLANNED)
    run.backward(PLANNED)
    entries = [p.grad.entry for p in tiered.parameters()]
    assert all(e.narrow is not None and e.place.nbytes == e.nbytes // 2 for e in entries)
    for wide, narrow in zip(model.parameters(), tiered.parameters(), strict=True):
        assert narrow.grad.dtype is torch.float32
        assert torch.equal(narrow.grad.on_host(), wide.grad)
    assert all(e.narrow is None and e.place.nbytes == e.nbytes for e in entries)
    plain.step()
    run.step()
    assert all(map(torch.equal, values(model), values(tiered)))


@pytest.mark.slow  # who reads .grad sees it so, above
def test_a_hook_sees_the_gradient_in_the_dtype_of_its_parameter():
    seen = []

    def halve(grad):
        seen.append(grad.dtype)
        return grad * 0.5

    pair(prepare=lambda model: model[2].weight.register_hook(halve))
    assert set(seen) == {torch.float32}


def test_a_model_of_bfloat16_trains_as_before(each_alone):
    def narrow():
        return mlp().to(BF16)

    run = moving(make_model=narrow)
    moved = crossed_by(run.model, lambda: run.backward(STEPS))
    assert moved["h2d"] <= 4.05
    assert moved["d2h"] <= 2.05
    assert not copies(run.model)


def test_gradients_leave_narrow_without_a_plan_too():
    run = pair(fields={"residency": False})
    moved = crossed_by(run.model, lambda: run.backward(STEPS))
    assert moved["d2h"] == pytest.approx(2.0, abs=0.05)


def test_a_gradient_that_the_optimizer_writes_is_seen_as_it_wrote_it():
    """Nesterov as lists adds to gradients: what rests narrow is widened before."""

    def gradients(model, call):
        made = Run(
            model, call, lambda m: optim.SGD(m.parameters(), 1e-2, 0.9, nesterov=True, foreach=True)
        )
        made.backward(0)
        made.optimizer.step()
        grads = [p.grad for p in model.parameters()]
        return [g.on_host() if hasattr(g, "on_host") else g for g in grads]

    plain = mlp()
    found = gradients(*offloaded(mlp()))
    assert all(map(torch.equal, gradients(plain, plain), found))


@pytest.mark.slow  # tests/frontend/test_replan.py replans without copies
def test_a_plan_is_made_anew_over_copies():
    def another(run, number):
        if number == PLANNED:
            run.optimizer = optim.AdamW(run.model.parameters(), lr=1e-3, fused=True)

    run = pair(another, steps=2 * PLANNED + 4)
    assert copies(run.model)


@pytest.mark.slow
def test_gradients_move_with_a_clip_factor_that_is_still_to_be_applied(monkeypatch):
    """An evaluation of many rows before `zero_grad` needs the room of gradients that stayed,
    as they do where the device updates."""
    moved = []
    plain_move = relocate._move

    def noted(session, entry, home):
        moved.append(bool(deferred_before.get(entry.key)))
        return plain_move(session, entry, home)

    monkeypatch.setattr(relocate, "_move", noted)
    deferred_before: dict[int, object] = {}

    def trained(model, call):
        optimizer, found = adamw(model), []
        for number in range(8):
            loss_of(call, number).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.01)
            optimizer.step()
            if hasattr(model[0].weight, "entry"):
                entries = [p.grad.entry for p in model.parameters()]
                deferred_before.update({e.key: e.narrow and e.deferred for e in entries})
            if number > PLANNED + 1:
                rows = torch.randn(300, WIDTH, generator=torch.Generator().manual_seed(number))
                with torch.no_grad(), torch.autocast("cpu", BF16):
                    found.append(float(call(rows).float().sum()))
            optimizer.zero_grad()
        return [*found, *values(model)]

    plain = mlp()
    expected, found = trained(plain, plain), trained(*offloaded(mlp(), updates="device"))
    assert any(moved), "narrow ones were moved, with a factor to come"
    assert all(
        torch.equal(torch.as_tensor(a), torch.as_tensor(b))
        for a, b in zip(expected, found, strict=True)
    )


def test_gradients_are_widened_where_wide_ones_just_fit():
    """The second micro-batch adds to the first one's: the narrow bytes give room for the wide."""
    torch.manual_seed(0)
    layers = [m for _ in range(2) for m in (nn.Linear(256, 256, bias=False), nn.Tanh())]
    model, call = offloaded(
        nn.Sequential(*layers),
        device_memory="3MiB",
        host_memory=Bytes(1280 * KiB),
        throttle={},
        residency=False,
    )
    for number in range(4):
        rows = torch.randn(32, 256, generator=torch.Generator().manual_seed(number))
        with torch.autocast("cpu", BF16):
            call(rows).float().square().mean().backward()
    assert all(p.grad.entry.narrow is None for p in model.parameters())
