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
    ids,
    let_all_be_late,
    loss_of,
    plan_at_given_costs,
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
from zcompile.runtime import foresight
from zcompile.runtime.foresight import Foresight
from zcompile.runtime.session import session_of


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


def low_then_high():
    """A call of which one fetch opens it, and the other starts behind the first region."""
    return schedule(
        fetch(LOW, 0),
        wait(LOW, 0, 1),
        run(1, out=(2,)),
        fetch(HIGH, 1),
        wait(HIGH, 1, 3),
        run(3, out=(4,)),
        free(LOW, 1),
        free(HIGH, 3),
    )


def test_only_what_opens_the_next_call_is_handed_over():
    (fetches,) = handover(one_use(LOW), low_then_high()).starts.values()
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
    later = low_then_high()
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


@pytest.fixture
def given_back(monkeypatch):
    """The fetches that started ahead and were of no use."""
    found, give_back = [], Foresight._give_back

    def gives_back(self, fetch, ticket):
        found.append(fetch)
        give_back(self, fetch, ticket)

    monkeypatch.setattr(Foresight, "_give_back", gives_back)
    return found


def with_a_step_that_moves_nothing(monkeypatch):
    """A planned run: its model, the compiled model and the optimizer."""
    let_all_be_late(monkeypatch)
    review_no_plan(monkeypatch)
    plan_at_given_costs(monkeypatch)
    monkeypatch.setattr(late_step, "SMALL_BYTES", 512)  # smaller ones are updated in the step
    model, compiled, optimizer = begun(PLANNED + 2, **streaming())
    plan = session_behind(model).controller.plan
    rest = [call.schedule for call in plan.step.calls if call.phase is Phase.STEP]
    assert plan.late
    assert rest
    assert all(schedule.changes_in_place for schedule in rest)
    return model, compiled, optimizer


def test_fetches_of_a_forward_start_in_backward_past_a_step_that_moves_nothing(
    monkeypatch, handed_over, given_back
):
    model, compiled, optimizer = with_a_step_that_moves_nothing(monkeypatch)
    steps = PLANNED + 3
    handed_over.clear()
    given_back.clear()
    train(model, compiled, optimizer, PLANNED + 2, steps)
    assert (Phase.BACKWARD, Phase.FORWARD) in handed_over
    train(model, compiled, optimizer, steps, steps + 2)
    assert given_back == []
    plain = gpt()
    train(plain, plain, adamw(plain), end=steps + 2)
    assert same(model, values(plain))
    zcompile.close(model)


@torch.no_grad()
def test_calls_that_are_passed_by_do_not_pile_up(monkeypatch):
    monkeypatch.setattr(foresight, "MOST_PASSED", 4)
    fields = {"device": "cpu", "device_memory": "1MiB", "host_memory": "1MiB"}
    model = zcompile.offload(nn.Sequential(*(Holder(torch.ones(64)) for _ in range(6))), **fields)
    known = session_behind(model).executor.foresight
    around(model, *range(6), *range(6), *range(6))  # each where it rests, and nothing else
    assert len(known._passed) == 4
    latest = next(reversed(known._passed))
    known.begin(heeded := known.call(one_use(LOW), ()), 0)
    assert known._followers[latest] is heeded
    assert not known._passed
    zcompile.close(model)


def test_what_was_given_back_for_a_read_of_a_gradient_is_started_in_the_step(
    monkeypatch, handed_over
):
    model, compiled, optimizer = with_a_step_that_moves_nothing(monkeypatch)
    plain = gpt()
    theirs = adamw(plain)
    train(plain, plain, theirs, end=PLANNED + 2)
    for number in range(PLANNED + 2, PLANNED + 5):
        handed_over.clear()
        for trained, forward, steps in ((model, compiled, optimizer), (plain, plain, theirs)):
            loss_of(forward, ids(10 * number)).backward()
            for p in trained.parameters():
                p.grad.sum()
            steps.step()
            steps.zero_grad()
    assert (Phase.STEP, Phase.FORWARD) in handed_over
    assert same(model, values(plain))
    zcompile.close(model)


@pytest.fixture
def entries():
    """Of three parameters as long as the slots here."""
    made = nn.Sequential(*(Holder(torch.ones(128)) for _ in range(3)))
    model = zcompile.offload(made, device="cpu", device_memory="1MiB", host_memory="1MiB")
    yield [layer.w.entry for layer in model]
    zcompile.close(model)


def starting(*calls):
    """Indices of the calls of a step in which fetches for a later one start; the last starts those
    of the next step.

    calls  (schedule, the entry that it is about)
    """
    session, found = session_of(calls[0][1]), []
    known = session.executor.foresight
    for number, (called, entry) in enumerate(calls):
        given = known.begin(known.call(called, [entry]), 0)
        for opening in called.fetches():
            if opening.ticket in given:
                given[opening.ticket].wait()
                session.arena.give_slot(opening.slot.address, opening.slot.nbytes)
        before = known._prefetched
        for index in range(len(called.instructions)):
            known.passed(index)
        if known._prefetched is not before:
            found.append(number)
    return found


@pytest.mark.parametrize(("written", "starts"), [(1, [0, 2]), (2, [1, 2])])
def test_what_a_step_writes_is_brought_after_it_and_all_else_before(
    entries, given_back, written, starts
):
    rows = (one_use(LOW), entries[0]), (changes(), entries[written]), (one_use(HIGH), entries[2])
    for _ in range(2):
        starting(*rows)
    assert starting(*rows) == starts
    assert given_back == []


def test_whether_a_step_is_passed_by_is_asked_of_what_followed_it_last(entries):
    first, step = (one_use(LOW), entries[0]), (changes(), entries[2])
    then, later = (one_use(HIGH), entries[1]), (one_use(HIGH), entries[2])
    for _ in range(3):
        starts = starting(first, step, then)
    assert starts == [0, 2]
    for _ in range(3):
        starts = starting(first, step, later)
    assert starts == [1, 2]
