"""Residency: the table of what rests where, and the least that is possible."""

import itertools
from collections.abc import Mapping
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zcompile.ir.schedule import EntryIndex, Fetch, Reduce, Register, Schedule, Slot, Store, Ticket
from zcompile.ir.step import EntryFact, StepCall, StepTrace
from zcompile.ir.types import EntryKind, EntryRef, Phase
from zcompile.ir.units import GiB, MiB
from zcompile.machine.model import Compute, Link, Machine
from zcompile.machine.staging import lane_bytes
from zcompile.planner.placement import (
    WHOLE_GAP,
    Placement,
    Room,
    evaluate,
    group,
    place,
    with_late_writes,
)

LAYERS = 4
NOTHING: Mapping[Phase, float] = {}
PHASES = (Phase.FORWARD, Phase.BACKWARD, Phase.STEP)


def machine(disk: float = 1e9, bus: float = 10e9, shares: str | None = None) -> Machine:
    links = {
        "h2d": Link("h2d", bus),
        "d2h": Link("d2h", bus),
        "disk_read": Link("disk_read", disk, 0.0, shares),
        "disk_write": Link("disk_write", disk, 0.0, None if shares is None else "disk_read"),
    }
    return Machine("small", {}, links, Compute({"float32": 1e12}, 1e11))


Sizes = dict[EntryRef, int]


def call(phase: Phase, reads: Sizes, writes: Sizes, grads: Sizes):
    """A schedule of `phase` that reads, writes and makes gradients of so many bytes."""
    refs = tuple(dict.fromkeys((*reads, *writes, *grads)))
    at = {ref: EntryIndex(n) for n, ref in enumerate(refs)}
    rows = [Fetch(at[k], 0, n, Slot(0, n), Ticket(0)) for k, n in reads.items()]
    rows += [Store(at[k], 0, n, Slot(0, n), Ticket(0)) for k, n in writes.items()]
    rows += [Reduce(Register(0), at[k], (), True, "", n) for k, n in grads.items()]
    schedule = Schedule(phase, "g", tuple(rows), (), 0, (), (), 0, (), 0, 0, 0, 1, {})
    return StepCall(schedule, refs)


def step(sizes: list[int], micro_batches: int = 1, states: int = 2) -> StepTrace:
    """Adam over parameters of these sizes; number of a state: 100 and more."""
    params = {EntryRef(n + 1): size for n, size in enumerate(sizes)}
    moments = {
        EntryRef(100 * (s + 1) + ref.number): n for s in range(states) for ref, n in params.items()
    }
    grads = {ref.gradient: n for ref, n in params.items()}
    batch = [
        call(Phase.FORWARD, params, {}, {}),
        call(Phase.BACKWARD, dict(reversed(params.items())), {}, params),
    ]
    update = call(Phase.STEP, {**params, **grads, **moments}, {**params, **moments}, {})
    kinds = {k: EntryKind.PARAM for k in params} | {k: EntryKind.STATE for k in moments}
    kinds |= {k: EntryKind.GRAD for k in grads}
    nbytes = {**params, **moments, **grads}
    facts = {k: EntryFact(k, str(k), kinds[k], n, "host") for k, n in nbytes.items()}
    return StepTrace((*batch * micro_batches, update), facts, micro_batches)


def room(device: int, host: int = GiB, disk: int | None = None, **how: bool) -> Room:
    tiers = {"device": device, "host": host} | ({} if disk is None else {"disk": disk})
    return Room(tiers, **how)


def bytes_on(placement: Placement, made: StepTrace, tier: str, kind: EntryKind) -> int:
    return sum(
        made.facts[key].nbytes
        for key, home in placement.homes.items()
        if home == tier and made.facts[key].kind is kind
    )


SIZES = [MiB] * LAYERS


def test_with_room_for_everything_everything_rests_on_the_device():
    made = step(SIZES)
    placement = place(made, machine(), room(16 * MiB), NOTHING)
    assert set(placement.homes.values()) == {"device"}
    assert placement.seconds == 0


@pytest.mark.parametrize("batches", [1, 4])
def test_weights_come_first_since_they_are_read_in_every_phase(batches):
    made = step(SIZES, batches)
    placement = place(made, machine(), room(2 * MiB), NOTHING)
    assert bytes_on(placement, made, "device", EntryKind.PARAM) == 2 * MiB


def test_what_is_left_after_the_weights_is_filled_too():
    made = step(SIZES)
    placement = place(made, machine(), room(7 * MiB), NOTHING)
    assert bytes_on(placement, made, "device", EntryKind.PARAM) == 4 * MiB
    assert sum(home == "device" for home in placement.homes.values()) == 7


def test_a_phase_that_compute_binds_gives_its_room_to_one_that_a_link_binds():
    """Forward and backward hide their transfers, the step hides none: all bytes are worth the same
    there, and what the step reads and writes is worth more than what it only reads."""
    made = step(SIZES)
    compute = {Phase.FORWARD: 10.0, Phase.BACKWARD: 10.0}
    placement = place(made, machine(), room(2 * MiB), compute)
    assert bytes_on(placement, made, "device", EntryKind.GRAD) == 0


def test_the_host_takes_weights_before_states_and_the_disk_takes_the_rest():
    made = step(SIZES)
    placement = place(made, machine(), room(0, 6 * MiB, GiB), NOTHING)
    assert bytes_on(placement, made, "host", EntryKind.PARAM) == 4 * MiB
    assert bytes_on(placement, made, "disk", EntryKind.STATE) >= 6 * MiB


def test_gradients_of_many_micro_batches_go_before_states():
    """A sum on disk is read and written for each."""
    made = step(SIZES, 4)
    placement = place(made, machine(), room(0, 8 * MiB, GiB), NOTHING)
    assert bytes_on(placement, made, "host", EntryKind.GRAD) == 4 * MiB


def test_where_a_step_reaches_the_host_the_device_serves_weights_and_gradients():
    made = step(SIZES)
    placement = place(made, machine(), room(8 * MiB, reach=True), NOTHING)
    assert bytes_on(placement, made, "device", EntryKind.STATE) == 0
    assert placement.seconds == 0


def test_small_entries_rest_on_the_device_as_long_as_all_of_them_take_little_of_it():
    made = step([MiB] * 4 + [512] * 20)
    placement = place(made, machine(), room(2 * MiB), NOTHING)
    small = [k for k, fact in made.facts.items() if fact.nbytes == 512]
    assert {placement.homes[k] for k in small} == {"device"}
    tight = place(made, machine(), room(10 * 512), NOTHING)
    assert sum(home == "device" for home in tight.homes.values()) == 10


def capacities_hold(made: StepTrace, placement: Placement, given: Room) -> bool:
    used: dict[str, int] = {}
    for key, home in placement.homes.items():
        used[home] = used.get(home, 0) + made.facts[key].nbytes
    return all(used.get(tier, 0) <= n for tier, n in given.nbytes.items())


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.integers(1, 64), min_size=1, max_size=8),
    st.integers(0, 200),
    st.integers(1, 3),
    st.sampled_from([None, "disk_write"]),
)
def test_budgets_hold_and_no_placement_is_below_the_least(sizes, device, batches, shares):
    made = step([n * 128 * 1024 for n in sizes], batches)
    given_room = room(device * 128 * 1024, 64 * MiB, GiB)
    placement = place(made, machine(shares=shares), given_room, {Phase.BACKWARD: 0.01})
    assert set(placement.homes) == set(made.facts)
    assert capacities_hold(made, placement, given_room)
    assert placement.least_seconds <= placement.seconds * (1 + 1e-9)


@pytest.mark.parametrize("device", [0, 1, 2, 3, 5])
def test_no_placement_of_whole_entries_is_below_the_least(device):
    made = step([MiB, 2 * MiB], states=1)
    given_room, links = room(device * MiB), machine().links
    groups = group(made, machine(), given_room)
    least = place(made, machine(), given_room, NOTHING).least_seconds
    keys = list(made.facts)
    for homes in itertools.product(("device", "host"), repeat=len(keys)):
        some = Placement(dict(zip(keys, homes, strict=True)), 0.0, 0.0)
        if capacities_hold(made, some, given_room):
            assert evaluate(groups, some.homes, NOTHING, links)[0] >= least * (1 - 1e-6)


UNLIKE = [3 * MiB, 5 * MiB, 7 * MiB]
"""Weights of which a share is no number of whole ones."""


def groups_of(made: StepTrace, on: Machine, links: Mapping[str, Link], given: Room):
    """The groups of a step on a machine with other links."""
    return group(made, replace(on, links=links), given)


def best_by_trial(made: StepTrace, slowly: Machine, given: Room, compute, late: int) -> float:
    """Seconds of the best placement of whole entries, by trying all that fit."""
    groups, keys, best = group(made, slowly, given), list(made.facts), float("inf")
    for tiers in itertools.product(given.nbytes, repeat=len(keys)):
        some = Placement(dict(zip(keys, tiers, strict=True)), 0.0, 0.0)
        if capacities_hold(made, some, given):
            takes = with_late_writes(groups, some.homes, compute, slowly.links, late)
            best = min(best, takes)
    return best


@pytest.mark.parametrize("device", [6, 10, 17])
def test_whole_numbers_find_the_best_placement_where_rounding_misses_it(device):
    made, compute = step(UNLIKE, states=1), {Phase.FORWARD: 2e-3, Phase.BACKWARD: 3e-3}
    given = room(device * MiB, GiB)
    best = best_by_trial(made, machine(), given, compute, 0)
    rounded = place(made, machine(), given, compute)
    whole = place(made, machine(), given, compute, whole=True)
    assert capacities_hold(made, whole, given)
    assert best <= whole.rounded_seconds <= best * (1 + WHOLE_GAP)
    assert rounded.least_seconds <= best * (1 + 1e-6)
    assert rounded.rounded_seconds >= whole.rounded_seconds
    if device == 10:
        assert rounded.rounded_seconds > best * (1 + WHOLE_GAP), "else nothing is shown"


def test_what_is_written_late_counts_where_forward_has_time_for_it():
    made, hidden = step(SIZES), {Phase.FORWARD: 100.0, Phase.BACKWARD: 100.0, Phase.STEP: 0.0}
    given = Room({"device": MiB, "host": 8 * MiB, "disk": GiB}, ring_bytes=64 * MiB)
    links = machine().links | {"disk_write": Link("disk_write", MiB / 4)}
    slowly = replace(machine(), links=links)
    placement = place(made, slowly, given, hidden)
    assert placement.least_seconds <= placement.rounded_seconds < placement.seconds
    groups = group(made, slowly, given)
    for late, seconds in (
        (0, placement.seconds),
        (lane_bytes(64 * MiB), placement.rounded_seconds),
    ):
        takes = with_late_writes(groups, placement.homes, hidden, links, late)
        assert takes == pytest.approx(seconds)
    # All that the step writes to disk, and then no more, may be written while others compute.
    most = with_late_writes(groups, placement.homes, hidden, links, GiB)
    writes = links["disk_write"]
    without = links | {"disk_write": replace(writes, bytes_per_s=1e15)}
    assert most == pytest.approx(
        evaluate(groups_of(made, slowly, without, given), placement.homes, hidden, without)[0]
    )


@pytest.mark.parametrize("number", range(1, LAYERS + 1))
def test_of_entries_that_are_alike_those_rest_on_the_device_that_are_pinned(number):
    made = step(SIZES)
    pinned = EntryRef(number)
    facts = {**made.facts, pinned: replace(made.facts[pinned], pinned=True)}
    found = place(replace(made, facts=facts), machine(), room(MiB), NOTHING)
    assert {ref for ref, home in found.homes.items() if home == "device"} == {pinned}


def test_shares_are_spread_over_the_layers():
    made = step([MiB] * 16)
    placement = place(made, machine(), room(8 * MiB), NOTHING)
    params = [ref for ref in made.facts if ref.number < 100 and not ref.is_gradient]
    at = sorted(ref.number for ref in params if placement.homes[ref] == "device")
    assert len(at) == 8
    assert all(b - a <= 3 for a, b in itertools.pairwise(at))


def test_where_the_tiers_have_no_room_for_all_the_nearest_are_filled_and_the_rest_is_told():
    made = step(SIZES)
    given_room = room(2 * MiB, 3 * MiB)
    placement = place(made, machine(), given_room, NOTHING)
    assert set(placement.homes) == set(made.facts)
    assert bytes_on(placement, made, "device", EntryKind.PARAM) == 2 * MiB
    assert not capacities_hold(made, placement, given_room)
    assert placement.least_seconds == placement.seconds


@pytest.mark.parametrize("device", range(0, 40, 9))
def test_a_placement_does_not_depend_on_how_entries_are_numbered(device):
    """Ranks number theirs by themselves; one that made another model before counts on from it."""
    made = step([n * MiB for n in range(1, 9)] * 2)
    refs = sorted(ref for ref in made.facts if not ref.is_gradient)
    other = {ref: EntryRef(1000 + 7 * n % len(refs)) for n, ref in enumerate(refs)}
    other |= {ref.gradient: other[ref].gradient for ref in refs}
    renumbered = StepTrace(
        tuple(replace(c, entries=tuple(other[ref] for ref in c.entries)) for c in made.calls),
        {other[ref]: replace(fact, ref=other[ref]) for ref, fact in made.facts.items()},
    )
    first = place(made, machine(), room(device * MiB, 64 * MiB, GiB), NOTHING)
    again = place(renumbered, machine(), room(device * MiB, 64 * MiB, GiB), NOTHING)
    assert again.homes == {other[ref]: home for ref, home in first.homes.items()}
    assert again.seconds == first.seconds


def test_what_the_ring_writes_late_hides_behind_the_next_forward_and_states_go_to_disk_for_it():
    made, hidden = step(SIZES), {Phase.FORWARD: 100.0, Phase.BACKWARD: 100.0, Phase.STEP: 0.0}
    tiers = {"device": MiB, "host": 10 * MiB, "disk": GiB}
    slow = machine().links | {"disk_write": Link("disk_write", MiB / 4)}
    slowly = replace(machine(), links=slow)
    at_once = place(made, slowly, Room(tiers), hidden)
    late = place(made, slowly, Room(tiers, ring_bytes=64 * MiB), hidden)
    assert bytes_on(at_once, made, "disk", EntryKind.GRAD) == 4 * MiB, "backward hides those"
    assert bytes_on(late, made, "disk", EntryKind.GRAD) == 0
    assert late.least_seconds < at_once.least_seconds
