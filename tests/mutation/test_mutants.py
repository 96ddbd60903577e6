"""No small change that makes a schedule mean something else goes through unseen.

A mutant that the verifier accepts is run on a model machine in friendly and in mean orders, and
gives what the schedule gave, bit for bit. The first tests look at a sample, the slow ones at every
instruction of every schedule.
"""

from collections import Counter
from collections.abc import Mapping

import pytest
from mutation.judge import Verdict, changed, meaning, verdicts
from mutation.mutants import MUTATIONS
from mutation.samples import (
    MOVED,
    OF_RANKS,
    OPTIMIZERS,
    PARTS,
    TILED,
    of_model,
    of_ranks,
    of_step,
)
from races import faults
from sampled import sampled
from small_models import SMALL_MODELS, UNALIKE

from zcompile.ir.schedule import Fetch, Free, Reduce, Schedule, Store, Wait
from zcompile.verify.schedule import verify_schedule

ALL = (*SMALL_MODELS, *MOVED, *TILED, PARTS, OF_RANKS, *OPTIMIZERS)
QUICK = (
    *UNALIKE,
    *(name for name in (*MOVED, *TILED) if "block" not in name),
    PARTS,
    OF_RANKS,
    "sgd",
)
"""Of each kind; those that are long have a shorter one of their kind here."""
OF_LATE = "compute earlier than an update"
"""A mutation of schedules with late updates alone."""
OF_SHARES = "read all before a share is updated"
"""A mutation of those that update shares late."""
SAMPLE = 8
"""Mutants of each mutation and schedule, about, where there are so many."""


def all_of(name: str) -> Mapping[str, Schedule]:
    if name == OF_RANKS:
        return of_ranks()
    return of_step(name) if name in OPTIMIZERS else of_model(name)


@pytest.mark.parametrize("name", sampled(ALL, *QUICK))
def test_what_is_mutated_is_safe_and_means_the_same_in_every_order(name):
    for schedule in all_of(name).values():
        verify_schedule(schedule)
        assert not list(faults(schedule))
        assert meaning(schedule)


@pytest.mark.parametrize("name", sampled(ALL, *QUICK))
def test_a_sample_of_mutants_is_caught_or_means_the_same(name):
    for told, schedule in all_of(name).items():
        for verdict in verdicts(schedule, about=SAMPLE):
            assert verdict.rule or not verdict.changed, f"{told}: {verdict}"


@pytest.mark.slow
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("name", ALL)
def test_every_mutant_is_caught_or_means_the_same(name, record_property):
    found: list[Verdict] = []
    for told, schedule in all_of(name).items():
        for verdict in verdicts(schedule, run_all=True):
            assert verdict.rule or not verdict.changed, f"{told}: {verdict}"
            found.append(verdict)
    late = any(schedule.updates_late for schedule in all_of(name).values())
    others = {OF_LATE: late, OF_SHARES: name == OF_RANKS}
    absent = {mutation for mutation, there in others.items() if not there}
    assert {v.mutation for v in found} == set(MUTATIONS) - absent
    assert all(v.rule for v in found if v.mutation == "drop a wait"), "no wait is superfluous"
    for (mutation, rule, told), count in kills(found).items():
        record_property(f"{mutation}: {rule or 'accepted'}: {told}", count)


@pytest.mark.parametrize("name", TILED)
def test_tiles_come_and_their_gradients_leave_one_by_one(name):
    rows = [x for schedule in all_of(name).values() for x in schedule.instructions]
    assert any(isinstance(x, Fetch) and x.begin for x in rows)
    assert any(isinstance(x, Reduce) and x.begin for x in rows)


def test_late_updates_come_in_parts_over_which_compute_waits():
    schedule = all_of(PARTS)["forward 0 with late updates"]
    taken, over = set(), []
    for x in schedule.instructions:
        if isinstance(x, Fetch):
            taken.add(x.slot)
        elif isinstance(x, Free):
            taken.remove(x.slot)
        elif isinstance(x, Wait) and x.slot not in taken:
            over.append(sum(x.slot.overlaps(part) for part in taken))
    assert over == [3, 3], "both weights are read over their chunks"


def kills(found: list[Verdict]) -> Counter[tuple[str, str, str]]:
    """How often which rule caught which mutation, and whether that changed anything."""
    return Counter((v.mutation, v.rule, "changed" if v.changed else "equal") for v in found)


@pytest.mark.slow
def test_the_machine_tells_mutants_apart():
    """Every kind of mutation makes some mutant that gives something else when it is run, and
    dropped events show in an order, not in what the host says."""
    step = of_step("momentum")["2 lanes, resident nothing"]
    assert any(isinstance(x, Store) for x in step.instructions)
    others = {
        OF_LATE: of_model(PARTS)["forward 0 with late updates"],
        OF_SHARES: of_ranks()["forward with late updates, tight"],
    }
    for mutation, mutants in MUTATIONS.items():
        schedule = others.get(mutation, step)
        expected = meaning(schedule)
        shown = [changed(schedule, make(), expected) for _, make in list(mutants(schedule))[::9]]
        assert any(shown), mutation
        if mutation == "drop an event":
            assert set(shown) >= {"early", ""}
