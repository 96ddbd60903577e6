"""A plan that meets what it did not foresee, or breaks off: the same numbers, and a way on."""

import copy
import signal
from functools import partial
from itertools import product
from unittest.mock import MagicMock

import pytest
import torch
from planned_runs import (
    STEPS,
    WEIGHT_BYTES,
    adamw,
    begun,
    expected,
    gpt,
    held_bytes,
    homes,
    ids,
    made_on,
    offloaded,
    review_no_plan,
    same,
    train,
    weight_bytes,
)
from sampled import sampled, sampled_rows
from torch import nn

import zcompile
from zcompile.errors import BudgetExceeded, TierFull
from zcompile.frontend import replan
from zcompile.frontend.offload import session_behind
from zcompile.ir.types import EntryKind, Phase
from zcompile.ir.units import Bytes, KiB, MiB
from zcompile.planner import step_plan
from zcompile.planner.step_plan import StepPlan
from zcompile.runtime import executor, relocate
from zcompile.runtime.relocate import move
from zcompile.runtime.store.placement import Tiers

OPTIMIZERS = {
    "sgd": lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
    "momentum": lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, fused=True),
    "adagrad": lambda model: torch.optim.Adagrad(model.parameters(), lr=0.1),
    "loop": lambda model: torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False),
}


@pytest.mark.parametrize(
    ("name", "share"),
    sampled_rows(product(OPTIMIZERS, (0.4, 1.7, 1.0, 2.5)), ("loop", 0.4)),
)
def test_other_optimizers_train_bit_equal_at_every_budget(name, share):
    """Their first two steps use the same entries, so fetches are handed over when a step is
    planned."""
    model, compiled = offloaded(
        device_memory=Bytes(int(share * WEIGHT_BYTES) + 32 * KiB + held_bytes())
    )
    train(model, compiled, OPTIMIZERS[name](model))
    assert session_behind(model).controller.plan is not None
    assert same(model, expected(OPTIMIZERS[name]))


@pytest.mark.slow  # below, another's entry fills it
def test_copies_that_fill_the_host_leave_the_plan_in_force():
    model, compiled, optimizer = begun(
        3,
        device_memory=Bytes(5 * WEIGHT_BYTES + held_bytes()),
        host_memory=Bytes(5 * WEIGHT_BYTES + 256 * KiB),
    )
    averages = [copy.deepcopy(model) for _ in range(2)]
    train(model, compiled, optimizer, 3, 4)
    state, optimizer = optimizer.state_dict(), adamw(model)
    optimizer.load_state_dict(state)  # other states, so that a step is planned anew
    train(model, compiled, optimizer, 4, STEPS)
    assert same(model, expected())
    assert len(averages) == 2


def gathered(model: nn.Module, nbytes: int) -> None:
    """An eager op needs so much of the arena at once, for a moment."""
    session = session_behind(model)
    session.executor.foresight.abandon()  # as any eager gather does
    session.arena.take(nbytes, "a large value")


@pytest.mark.slow  # the next one gives up for good
def test_a_plan_after_a_relief_leaves_as_much_free():
    model, compiled, optimizer = begun(3, device_memory="4MiB")
    for number in range(3, 6):
        gathered(model, 4 * MiB - 200 * KiB)
        train(model, compiled, optimizer, number, number + 1)
    assert homes(model) >= {"device"}
    gathered(model, 4 * MiB - 200 * KiB)
    assert homes(model) >= {"device"}, "nothing had to go back"
    assert same(model, expected(end=6))


def test_what_needs_the_room_again_and_again_gets_it_for_good(caplog, monkeypatch):
    monkeypatch.setattr(replan, "MOST_RECLAIMS", 1)
    model, compiled, optimizer = begun(3, device_memory="4MiB")
    gathered(model, 4 * MiB - 200 * KiB)
    train(model, compiled, optimizer, 3, STEPS)
    assert "this keeps happening" in caplog.text
    assert homes(model) == {"host"}
    assert same(model, expected())


def test_an_interrupt_while_entries_move_leaves_a_run_that_goes_on(monkeypatch):
    model, compiled, optimizer = begun(2, device_memory="16MiB")
    moved = []

    def interrupted(session, entry, home):
        moved.append(entry)
        if len(moved) == 3:
            signal.raise_signal(signal.SIGINT)
        return move(session, entry, home)

    monkeypatch.setattr(relocate, "move", interrupted)
    with pytest.raises(KeyboardInterrupt):
        train(model, compiled, optimizer, 2, 3)
    monkeypatch.undo()
    goes_on(model, compiled, optimizer)


def goes_on(model, compiled, optimizer):
    """The third step is taken again, and those after it, as if nothing had been."""
    optimizer.zero_grad()
    train(model, compiled, optimizer, 2, STEPS)
    assert same(model, expected())


@pytest.mark.parametrize(
    ("at", "device"),
    sampled_rows(
        product((1, 3, 6), (WEIGHT_BYTES, 2 * WEIGHT_BYTES, 16 * MiB)), (3, 2 * WEIGHT_BYTES)
    ),
)
def test_a_move_that_fails_leaves_its_entry_where_it_was(monkeypatch, at, device):
    model, compiled, optimizer = begun(2, device_memory=Bytes(device + held_bytes()))
    session = session_behind(model)
    moving, transfers = [], []

    def moved(*args):
        moving.append(args)
        try:
            return move(*args)
        finally:
            moving.pop()

    def failing(transfer, *args, **kwargs):
        if moving:
            transfers.append(transfer)
            if len(transfers) == at:
                raise TierFull("a test", 1, [])
        return transfer(*args, **kwargs)

    monkeypatch.setattr(relocate, "move", moved)
    for name in ("fetch", "put"):  # to the device, and off it
        monkeypatch.setattr(session, name, partial(failing, getattr(session, name)))
    with pytest.raises(TierFull):
        train(model, compiled, optimizer, 2, 3)
    monkeypatch.undo()
    goes_on(model, compiled, optimizer)


def test_entries_reach_the_device_and_leave_it_without_memory_beside(monkeypatch):
    """They would take as much of the host again, which on a machine with a card was slow, too."""
    model, compiled, optimizer = begun(2, device_memory="4MiB")
    session = session_behind(model)
    with monkeypatch.context() as patch:
        patch.setattr(session, "read_here", MagicMock(side_effect=AssertionError("memory beside")))
        train(model, compiled, optimizer, 2, 3)
        assert "device" in homes(model)
        gathered(model, 4 * MiB - 200 * KiB)
        assert homes(model) == {"host"}
    train(model, compiled, optimizer, 3, STEPS)
    assert same(model, expected())


def many_ids(number):
    return ids(number).repeat(4, 4)[:, :33]


@pytest.mark.slow
def test_a_forward_that_failed_is_no_part_of_the_step_that_is_planned(monkeypatch):
    """It has made none of the entries that it was to offload."""
    model, compiled = offloaded(layers=2, device_memory="500KiB", machine="desktop-24gb")
    optimizer = adamw(model)
    train(model, compiled, optimizer, 0, 1, ids=many_ids)
    tokens = many_ids(10)[:, :-1]
    with monkeypatch.context() as patch:
        patch.setattr(executor, "compute", MagicMock(side_effect=RuntimeError("out of memory")))
        with pytest.raises(RuntimeError, match="out of memory"):
            compiled(tokens)
    train(model, compiled, optimizer, 1, 3, ids=many_ids)
    plan = session_behind(model).controller.plan
    assert [call.phase for call in plan.step.calls].count(Phase.FORWARD) == 1
    assert any(call.made for call in plan.step.calls), "values are offloaded"
    assert same(model, expected(layers=2, end=3, ids=many_ids))


@pytest.mark.slow
def test_another_default_device_changes_nothing():
    model, compiled, optimizer = begun(2, device_memory="16MiB")
    tokens = [ids(20), ids(30), ids(40)]
    with made_on("meta"):
        for batch in tokens:
            logits = compiled(batch[:, :-1])
            nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten()).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
    assert same(model, expected())


@pytest.mark.slow
def test_evaluations_between_steps_are_no_part_of_the_plan():
    model, compiled, optimizer = begun(1, device_memory="16MiB")
    with torch.no_grad():
        for number in range(20):
            compiled(ids(number))
    train(model, compiled, optimizer, 1, 3)
    phases = [call.phase for call in session_behind(model).controller.plan.step.calls]
    assert phases.count(Phase.FORWARD) <= 2


def crowded(monkeypatch, fill) -> list[StepPlan]:
    """Plans that are put into force while `fill(session)` holds room; the plans as they were made.

    Without clipping, which reads some gradients again: that is no part of a step's schedules.
    No plan is reviewed: another would be put into force in the midst of what is measured.
    """
    review_no_plan(monkeypatch)
    apply, made = replan.StepController.apply, []

    def beside(planner, plan):
        made.append(plan)
        held = fill(planner.session)
        apply(planner, plan)
        del held

    monkeypatch.setattr(replan.StepController, "apply", beside)
    return made


def trains_as_predicted(made, layers=1, **fields):
    """Three steps under such a plan move what is predicted of them and take what is predicted of
    the arena, to the byte; where entries rest is not where they were planned.

    Before them come two under the plan: from the second on a step begins the fetches of the next,
    once it is known what follows it.
    """
    model, compiled = offloaded(layers, throttle=THROTTLE, **fields)
    optimizer = adamw(model)
    train(model, compiled, optimizer, 0, 5, clip=False)
    plan = session_behind(model).controller.plan
    assert plan.placement.homes != made[-1].placement.homes
    zcompile.stats(model, reset=True)
    train(model, compiled, optimizer, 5, 8, clip=False)
    stats = zcompile.stats(model)
    predicted = stats["predicted"]
    assert stats["peak"]["device"] == predicted["peak"]["device"]
    assert stats["bytes"] == {link: 3 * predicted["bytes"].get(link, 0) for link in stats["bytes"]}
    assert same(model, expected(layers=layers, end=8, clip=False))


THROTTLE = {"h2d": "200MB/s", "d2h": "200MB/s"}
"""So that all that moves shows: else what rests on the host is updated in place."""


@pytest.mark.slow  # of the host, below
@pytest.mark.parametrize("share", sampled([0.2, 0.5], 0.5))
def test_what_finds_no_berth_is_predicted_where_it_rests(monkeypatch, share):
    made = crowded(
        monkeypatch, lambda session: session.arena.take(int(share * WEIGHT_BYTES), "a large value")
    )
    trains_as_predicted(made, device_memory=Bytes(2 * WEIGHT_BYTES + held_bytes()))


@pytest.mark.parametrize("left", sampled([0, 16 * KiB, 64 * KiB], 16 * KiB))
@pytest.mark.slow
def test_what_finds_no_room_on_the_host_is_predicted_where_it_rests(monkeypatch, tmp_path, left):
    """Another's entry has it by the time that the plan is put into force."""
    others = []

    def fill(session):
        _, used, capacity = session.homes._tiers[0].usage()
        if (free := capacity - used - left) > 0:
            others.append(session.create("another's", EntryKind.GRAD, free))

    trains_as_predicted(
        crowded(monkeypatch, fill),
        layers=2,
        device_memory=Bytes(weight_bytes(2) // 2 + held_bytes(2)),
        host_memory="600KiB",
        disk=tmp_path,
    )
    assert others[0].home == "host"


@pytest.mark.slow  # tests/runtime/test_tiers.py closes holes
@pytest.mark.parametrize("closes", sampled([True, False], True))
def test_holes_of_the_host_are_closed_for_what_is_to_rest_there(monkeypatch, tmp_path, closes):
    """What the plan wants there has room enough, but not in one piece, before entries move."""
    monkeypatch.setattr(step_plan, "staying", lambda *how: frozenset())  # the host is to be full
    if not closes:
        monkeypatch.setattr(Tiers, "compact", lambda homes, places: False)
    made = crowded(monkeypatch, lambda session: None)
    model, compiled = offloaded(
        layers=2,
        throttle=THROTTLE,
        device_memory=Bytes(weight_bytes(2) // 2 + held_bytes(2)),
        host_memory="650KiB",
        disk=tmp_path,
    )
    optimizer = adamw(model)
    train(model, compiled, optimizer, 0, 4, clip=False)
    plan = session_behind(model).controller.plan
    assert (plan.placement.homes == made[-1].placement.homes) is closes
    train(model, compiled, optimizer, 4, 7, clip=False)
    assert same(model, expected(layers=2, end=7, clip=False))


def test_what_rests_on_the_device_stays_where_it_has_to_leave_and_cannot():
    """Two forwards before one backward hold more than was foreseen, and the host is full."""
    model, compiled, optimizer = begun(3, device_memory=Bytes(8 * WEIGHT_BYTES + held_bytes()))
    session = session_behind(model)
    assert homes(model) == {"device"}
    _, used, capacity = session.homes._tiers[0].usage()
    others = session.create("another's", EntryKind.GRAD, capacity - used)
    kept = compiled(ids(1)[:, :-1])
    with pytest.raises(BudgetExceeded, match="finds no room"):
        compiled(ids(2)[:, :-1])
    assert homes(model) == {"device"}
    del kept
    session.handle(others)  # whose death ends the entry
    train(model, compiled, optimizer, 3, STEPS)
    assert same(model, expected())


@pytest.mark.slow  # that it cannot leave is above
def test_what_rests_on_the_device_leaves_for_what_graphs_hold():
    model, compiled, optimizer = begun(3, device_memory=Bytes(8 * WEIGHT_BYTES + held_bytes()))
    session = session_behind(model)
    arena = session.arena.budget_bytes
    kept = [compiled(ids(number)[:, :-1]) for number in (1, 2, 3)]
    assert session.arena.budget_bytes < arena
    assert zcompile.stats(model)["peak"]["together"] <= 8 * WEIGHT_BYTES + held_bytes()
    del kept
    train(model, compiled, optimizer, 3, STEPS)
    assert homes(model) == {"device"}, "a step is planned anew for what is left"
    assert same(model, expected())


@pytest.mark.parametrize("residency", sampled([True, False], True))
@pytest.mark.slow
def test_a_second_forward_before_backward_has_its_room_on_a_tight_budget(residency):
    """Leads fill an arena that was planned for one; it becomes smaller, and bits stay."""
    budget = WEIGHT_BYTES + 2 * held_bytes()
    model, compiled, optimizer = begun(1, device_memory=Bytes(budget), residency=residency)
    plain = gpt()
    twin = adamw(plain)
    train(plain, plain, twin, 0, 1)
    for forward, list_of in ((compiled, optimizer), (plain, twin)):
        for number in (5, 6):
            for loss in [forward(ids(10 * number + n)).square().mean() for n in (0, 1)]:
                loss.backward()
            list_of.step()
            list_of.zero_grad()
    assert zcompile.stats(model)["peak"]["together"] <= budget
    assert same(model, [p.detach() for p in plain.parameters()])
