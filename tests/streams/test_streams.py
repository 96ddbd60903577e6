"""Every two accesses of the same bytes, one of them writing, are ordered on CUDA: in all modes, by
the device's own code over simulated streams, and with each order taken out the checker says so."""

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import planned_runs
import pytest
import torch
from moved import of_another_layout
from sampled import sampled
from streams.cuda import Event
from streams.modes import MODES, WARM, Training, plainly, training
from streams.mutants import EQUIVALENT, MUTANTS, Edit

from zcompile.ir.schedule import Left, Wait
from zcompile.runtime import profile
from zcompile.runtime.device.cuda import CudaDevice
from zcompile.runtime.executor import _Call
from zcompile.runtime.transfer.one_copy import OneCopy

FIRST = 3
"""Mutants of each mode that every change is tested with."""


EVERY = 4
"""Of the walks of a schedule the first and one in so many are timed here, so that few steps have
some of both kinds."""

ELSEWHERE = {"micro-batches", "all on the device"}
"""Modes of which "disk" has the order, with batches; or in which nothing moves."""
TIMED = sampled(MODES, *(MODES.keys() - ELSEWHERE - {"disk"}))
"""Modes in which walks are timed: a walk over a disk as one without, and it takes longest."""


@pytest.fixture(scope="module", params=sampled(MODES, *(MODES.keys() - ELSEWHERE)))
def run(request: pytest.FixtureRequest) -> Iterator[Training]:
    """A run of a mode that has come to rest, one for all tests of that mode."""
    with training(request.param) as made:
        made.steps(WARM)
        made.noted_steps(made.mode.steps)
        made.pairs = dict(made.simulation.memory.pairs)
        made.first_waits = made.waits
        yield made


def test_accesses_are_ordered_by_streams_events_and_promises(run):
    assert run.mode.looks(run.session), {e.name: e.home for e in run.session.entries()}
    assert run.simulation.memory.accesses > 100
    assert not run.pairs
    assert all(map(torch.equal, run.values(), plainly(run.name, run.number)))


def test_accesses_are_ordered_where_copies_are_over_at_once(run, monkeypatch):
    monkeypatch.setattr(Event, "answers", True)
    assert not pairs_of(run, ())


def test_a_value_whose_bytes_are_copied_to_leave_is_read_behind_that_copy(run, monkeypatch):
    if run.mode.moves is None:
        pytest.skip("no value leaves")  # on purpose: the test is of modes in which one does
    values = of_another_layout(monkeypatch)
    assert not pairs_of(run, ())
    assert values


def test_the_host_waits_for_nothing_that_an_event_can_stand_for(run):
    # Where a step has room beside the arena, that goes back to the device once, at its end.
    waits = [who for who in run.first_waits if " < leave < " not in who]
    assert bool(waits) == run.mode.by_host, waits


@pytest.mark.parametrize("run", TIMED, indirect=True)
def test_a_walk_that_is_not_timed_records_two_events_for_a_stopwatch(run, monkeypatch):
    walks, stamps, walk, stamp = [], [], _Call.run, CudaDevice.stamp

    def noting(call, others):
        before = len(stamps)
        walk(call, others)
        joins = any(isinstance(x, Wait | Left) for x in call.schedule.instructions)
        walks.append((call.walk.timed, joins, len(stamps) - before))

    monkeypatch.setattr(profile, "FIRST", 1)
    monkeypatch.setattr(profile, "EVERY", EVERY)
    monkeypatch.setattr(_Call, "run", noting)
    monkeypatch.setattr(CudaDevice, "stamp", lambda device: stamps.append(1) or stamp(device))
    run.steps(EVERY)
    run.begin_anew()
    untimed = {made for timed, _, made in walks if not timed}
    assert untimed == {2}, "where it begins, and where it ends"
    assert all(made > 2 for timed, joins, made in walks if timed and joins)


@dataclass(frozen=True)
class Second:
    """A stamp at the second it is called by."""

    at: float

    def until(self, later):
        return later.at - self.at


@pytest.mark.parametrize("run", TIMED, indirect=True)
def test_a_walk_that_is_not_timed_is_divided_as_the_last_timed_one_of_its_schedule(
    run, monkeypatch
):
    walks, walk, meter = [], _Call.run, run.session.meter
    span, seconds = meter.span, meter.seconds

    def noting(call, others):
        before = seconds()
        walk(call, others)
        parts = {activity: total - before[activity] for activity, total in seconds().items()}
        walks.append((call.walk, parts))

    # Every span is of one second.
    monkeypatch.setattr(meter, "span", lambda what, _, __, of: span(what, Second(0), Second(1), of))
    monkeypatch.setattr(profile, "FIRST", 1)
    monkeypatch.setattr(profile, "EVERY", EVERY)
    monkeypatch.setattr(_Call, "run", noting)
    run.steps(EVERY + 1)
    run.begin_anew()
    last, divided = {}, 0
    for of, parts in walks:
        if of.timed:
            last[of.schedule] = parts
            continue
        assert sum(parts.values()) == pytest.approx(1)
        if (known := last.get(of.schedule)) is not None:
            divided += 1
            whole = sum(known.values())
            assert parts == pytest.approx({what: s / whole for what, s in known.items()})
            assert (parts["stall"] > 0) == (known["stall"] > 0)
    assert divided, "a schedule is timed, and then is not"
    if run.name == "streaming":
        assert any(parts["stall"] > 0 for parts in last.values()), "it waits for what it fetches"


@pytest.mark.parametrize("name", sampled(["streaming", "part on the device"], "streaming"))
@pytest.mark.slow
def test_training_goes_on_after_a_large_batch_in_inference_mode(name):
    """It needs an arena of another size, so that the memory is made in that mode."""
    with training(name) as run:
        run.steps(WARM)
        tokens = torch.randint(0, planned_runs.VOCABULARY, (16, 9))
        with torch.inference_mode():
            planned_runs.loss_of(run.compiled, tokens)
        run.steps(1)
        assert all(map(torch.equal, run.values(), plainly(name, run.number)))


def lag_of(run: Training) -> tuple[int, int]:
    """How often copies were asked for in a step, and the most bytes that sources held then beyond
    what was told."""
    session, seen = run.session, []

    def look() -> None:
        seen.append(run.simulation.source_bytes(session.arena) - session.live_memory.nbytes)

    run.begin_anew()
    run.simulation.asked = look
    run.steps(1)
    run.simulation.asked = lambda: None
    return len(seen), max(seen, default=0)


def test_what_copies_hold_that_lag_behind_the_host_is_told(run):
    asked, beyond = lag_of(run)
    assert (asked > 0) == (run.name != "all on the device")
    assert beyond <= 0
    if run.name == "offloaded activations":
        with Edit(OneCopy, "release", "self._drop_memory()", "pass").made():
            assert lag_of(run)[1] > 0


def test_no_more_of_the_host_is_needed_than_is_planned(run):
    # Extents of entries that are dead count no more, though what is in flight on them holds them.
    (host, *_), planned = run.session.homes._tiers, run.session.meter.planned_host
    if run.mode.disk:
        return  # there, what has no room on the host rests elsewhere
    planned.reset()
    run.steps(1)
    # What a step makes has one hole for it, so that no more is needed than its bytes.
    run.model.zero_grad(set_to_none=True)
    run.rest()
    assert run.session.homes.compact([entry.place for entry in run.session.entries()])
    _, used, capacity = host.usage()
    needed = planned.peak - (planned.now - used)
    beyond = host.reserve(capacity - needed, "the rest of the host")
    try:
        run.steps(2)
    finally:
        host.release(beyond)


def pairs_of(run: Training, edits: Sequence[Edit]) -> int:
    """How many pairs there are in a step of the mutant."""
    with contextlib.ExitStack() as broken:
        for edit in edits:
            broken.enter_context(edit.made())
        run.noted_steps()
        found = sum(run.simulation.memory.pairs.values())
    run.begin_anew()
    return found


@pytest.mark.parametrize("among", sampled(["first", "others"], "first"))
def test_without_one_of_its_orders_the_runtime_is_found_out(run, among):
    of_mode = [(name, edits) for name, (mode, edits) in MUTANTS.items() if mode == run.name]
    if not of_mode:
        run.simulation.transfers.clear()
        run.steps(1)
        assert not run.simulation.transfers, "what moves can be broken"
    needed = of_mode[:FIRST] if among == "first" else of_mode[FIRST:]
    assert [name for name, edits in needed if not pairs_of(run, edits)] == []


def test_what_is_said_to_be_needless_is(run):
    for mode, edits in EQUIVALENT.values():
        assert mode != run.name or not pairs_of(run, edits)


def test_each_mutant_names_a_mode():
    assert {mode for mode, _ in (MUTANTS | EQUIVALENT).values()} <= set(MODES)
    assert len(MUTANTS) >= 12
