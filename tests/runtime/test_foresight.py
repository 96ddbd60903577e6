"""What may start before the next call begins, and what becomes of it if another call comes."""

import copy
import gc

import pytest
import torch
from pairs import Holder, on_disk, plain_of
from planned_runs import (
    PLANNED,
    adamw,
    begun,
    gpt,
    let_all_be_late,
    review_no_plan,
    same,
    streaming,
    train,
    values,
)
from torch import nn
from written import HIGH, LOW, borrow, fetch, free, run, schedule, wait

import zcompile
from zcompile.frontend.offload import session_behind
from zcompile.ir.handover import handover, passes_by
from zcompile.ir.types import Phase
from zcompile.planner import late_step
from zcompile.runtime.foresight import Foresight


@pytest.fixture(autouse=True)
def _leave_no_store():
    """The tests of stores beside this file count threads."""
    yield
    gc.collect()


def one_use(slot):
    """Fetch, compute, free: instructions 0 to 3."""
    return schedule(fetch(slot, 0), wait(slot, 0, 1), run(1, out=(2,)), free(slot, 1))


def test_a_fetch_into_free_bytes_starts_after_the_last_fetch():
    assert list(handover(one_use(LOW), one_use(HIGH)).starts) == [0]


def test_a_fetch_over_used_bytes_starts_when_they_are_given_back():
    assert list(handover(one_use(LOW), one_use(LOW)).starts) == [3]


def test_what_is_still_written_is_not_brought_before():
    then = one_use(HIGH)
    (fetch,) = then.fetches()
    assert list(handover(one_use(LOW), then, {fetch.ticket: 2}).starts) == [2]


def test_only_what_opens_the_next_call_is_handed_over():
    then = schedule(
        fetch(LOW, 0),
        wait(LOW, 0, 1),
        run(1, out=(2,)),
        fetch(HIGH, 1),
        wait(HIGH, 1, 3),
        run(3, out=(4,)),
        free(LOW, 1),
        free(HIGH, 3),
    )
    (fetches,) = handover(one_use(LOW), then).starts.values()
    assert [f.slot for f in fetches] == [LOW]


def test_what_is_new_in_every_call_is_not_foreseen():
    passing = fetch(HIGH, 0)
    passing = type(passing)(**{**vars(passing), "lasting": False})
    then = schedule(passing, wait(HIGH, 0, 1), run(1, out=(2,)), free(HIGH, 1))
    assert handover(one_use(LOW), then).starts == {}


def test_the_joint_peak_counts_both_calls():
    assert handover(one_use(LOW), one_use(HIGH)).peak_bytes == LOW.nbytes + HIGH.nbytes
    assert handover(one_use(LOW), one_use(LOW)).peak_bytes == LOW.nbytes


def changes(phase=Phase.STEP):
    return schedule(borrow(1), run(1), phase=phase)


OPENS = one_use(HIGH)
(BROUGHT,) = OPENS.fetches()


@pytest.mark.parametrize(
    ("call", "written", "passes"),
    [
        (changes(), {}, True),
        (changes(), {BROUGHT.ticket: 1}, False),
        (changes(Phase.BACKWARD), {}, False),
        (one_use(LOW), {}, False),
        (
            schedule(
                fetch(LOW, 0), borrow(2), wait(LOW, 0, 1), run(1, 2), free(LOW, 1), phase=Phase.STEP
            ),
            {},
            False,
        ),
        (schedule(run(0), phase=Phase.STEP), {}, False),
    ],
)
def test_only_steps_that_change_where_it_rests_what_is_not_brought_are_passed_by(
    call, written, passes
):
    assert passes_by(call, OPENS, written) is passes


def test_what_is_written_behind_the_opening_fetches_is_passed_by():
    later = schedule(
        fetch(LOW, 0),
        wait(LOW, 0, 1),
        run(1, out=(2,)),
        fetch(HIGH, 1),
        wait(HIGH, 1, 3),
        run(3, out=(4,)),
        free(LOW, 1),
        free(HIGH, 3),
    )
    first, second = later.fetches()
    assert not passes_by(changes(), later, {first.ticket: 1})
    assert passes_by(changes(), later, {second.ticket: 1})


@pytest.fixture
def chain(tmp_path):
    """Parameters that are multiplied one after the other, a call each."""
    return on_disk(nn.Sequential(*(Holder(torch.ones(64)) for _ in range(3))), tmp_path)


@torch.no_grad()
def around(chain, *order):
    for index in order:
        chain[index].w.mul_(2)


def powers(chain):
    return [plain_of(layer.w).unique().tolist() for layer in chain]


def test_an_order_that_repeats_and_then_changes_gives_the_same_powers(chain):
    around(chain, *[0, 1, 2] * 3, 0, 2, 1, 1, 0, 0, 2)
    assert powers(chain) == [[2.0**6], [2.0**5], [2.0**5]]


def test_what_was_written_in_between_is_fetched_again(chain):
    around(chain, *[0, 1, 2] * 3, 0)
    with torch.no_grad():
        chain[1].w.copy_(torch.full((64,), 3.0))
    around(chain, 1)
    assert powers(chain)[1] == [6.0]


def test_a_follower_that_died_is_not_fetched(chain):
    branch = copy.deepcopy(chain)
    for _ in range(3):
        around(chain, 0)
        around(branch, 0)
    del branch
    gc.collect()
    around(chain, 0, 0, 0)
    session_behind(chain).drain()
    copies = [copy.deepcopy(chain[0]) for _ in range(4)]
    with torch.no_grad():
        for number, layer in enumerate(copies):
            layer.w.fill_(number)
    assert [plain_of(layer.w).unique().tolist() for layer in copies] == [[0.0], [1.0], [2.0], [3.0]]


def test_nothing_stays_in_the_arena(chain):
    around(chain, *[0, 1, 2] * 3)
    session = session_behind(chain)
    session.executor.foresight.abandon()
    assert session.arena.used_bytes == 0


@pytest.fixture
def handed_over(monkeypatch):
    """(phase of the call that is walked, phase of the call that it is for) of each fetch that
    starts ahead."""
    walked, found = [Phase.FORWARD], []
    begin, passed = Foresight.begin, Foresight.passed

    def begins(self, call, others):
        walked[0] = call.schedule.phase
        return begin(self, call, others)

    def passes(self, index):
        fetches, then = self._ready.get(index, ()), self._next
        passed(self, index)
        if then is not None:
            found.extend((walked[0], then.schedule.phase) for _ in fetches)

    monkeypatch.setattr(Foresight, "begin", begins)
    monkeypatch.setattr(Foresight, "passed", passes)
    return found


def test_fetches_of_a_forward_start_in_backward_past_a_step_that_moves_nothing(
    monkeypatch, handed_over
):
    let_all_be_late(monkeypatch)
    review_no_plan(monkeypatch)
    monkeypatch.setattr(late_step, "SMALL_BYTES", 512)  # smaller ones are updated in the step
    model, compiled, optimizer = begun(PLANNED + 2, **streaming())
    session, steps = session_behind(model), PLANNED + 3
    assert session.controller.plan.late
    rest = [c.schedule for c in session.controller.plan.step.calls if c.phase is Phase.STEP]
    assert all(schedule.changed_in_place for schedule in rest)
    assert rest, "else nothing is passed by"
    handed_over.clear()
    train(model, compiled, optimizer, PLANNED + 2, steps)
    assert (Phase.BACKWARD, Phase.FORWARD) in handed_over
    train(model, compiled, optimizer, steps, steps + 2)
    plain = gpt()
    train(plain, plain, adamw(plain), end=steps + 2)
    assert same(model, values(plain))
    zcompile.close(model)
