"""Every two accesses of the same bytes, one of them writing, are ordered on CUDA: in all modes, by
the device's own code over simulated streams, and with each order taken out the checker says so."""

import contextlib
from collections.abc import Iterator, Sequence

import pytest
import torch
from streams.modes import MODES, WARM, Training, plainly, training
from streams.mutants import EQUIVALENT, MUTANTS, Edit


@pytest.fixture(scope="module", params=MODES)
def run(request: pytest.FixtureRequest) -> Iterator[Training]:
    """A run of a mode that has come to rest, one for all tests of that mode."""
    with training(request.param) as made:
        made.steps(WARM)
        made.begin_anew()
        yield made


def test_accesses_are_ordered_by_streams_events_and_promises(run):
    assert run.mode.looks(run.session), {e.name: e.home for e in run.session.entries()}
    run.steps(1)
    memory = run.simulation.memory
    assert memory.accesses > 100
    assert not memory.pairs, memory.pairs.most_common(5)
    assert all(map(torch.equal, run.values(), plainly(run.name, WARM + 1)))


def pairs_of(run: Training, edits: Sequence[Edit]) -> int:
    """How many pairs there are in a step of the mutant."""
    with contextlib.ExitStack() as broken:
        for edit in edits:
            broken.enter_context(edit.made())
        run.begin_anew()
        run.steps(1)
        found = sum(run.simulation.memory.pairs.values())
    run.begin_anew()
    return found


def test_without_one_of_its_orders_the_runtime_is_found_out(run):
    needed = {name: edits for name, (mode, edits) in MUTANTS.items() if mode == run.name}
    if not needed:
        run.simulation.transfers.clear()
        run.steps(1)
        assert not run.simulation.transfers, "what moves can be broken"
    assert [name for name, edits in needed.items() if not pairs_of(run, edits)] == []


def test_what_is_said_to_be_needless_is(run):
    for mode, edits in EQUIVALENT.values():
        assert mode != run.name or not pairs_of(run, edits)


def test_each_mutant_names_a_mode():
    assert {mode for mode, _ in (MUTANTS | EQUIVALENT).values()} <= set(MODES)
    assert len(MUTANTS) >= 12
