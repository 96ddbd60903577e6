"""The least of a step: closed forms by hand, and what holds of every plan."""

from dataclasses import replace

import pytest
from bounded_steps import B, F, P, S, links, schedule, training
from hypothesis import given, settings
from hypothesis import strategies as st

from zcompile.ir.schedule import Fetch, Reduce, Run, Slot, Store
from zcompile.ir.step import EntryFact, StepCall, StepTrace
from zcompile.ir.types import EntryKind, EntryRef, Region
from zcompile.machine.model import Link
from zcompile.planner import bounds
from zcompile.planner.bounds import (
    Demand,
    Segment,
    bound,
    demand_of,
    least_of_segment,
    least_seconds,
)
from zcompile.planner.placement import Room


def plain(demand, links_, room, monkeypatch):
    """The bound of a step with more segments than the program is asked for."""
    monkeypatch.setattr(bounds, "MOST_SEGMENTS", 0)
    return bound(demand, links_, room)


def test_without_room_everything_a_segment_reads_comes_and_what_it_writes_leaves(monkeypatch):
    found = plain(training(), links(), Room({"device": 0, "host": 10**9}), monkeypatch)
    assert found.nbytes == {"h2d": 6 * P, "d2h": 4 * P}
    assert found.seconds == pytest.approx((P + P + 4 * P) / 100)
    assert found.binding == "h2d"


def test_a_byte_of_the_device_saves_a_transfer_in_every_segment(monkeypatch):
    found = plain(training(), links(), Room({"device": 300, "host": 10**9}), monkeypatch)
    assert found.nbytes == {"h2d": 6 * P - 3 * 300, "d2h": 4 * P - 2 * 300}


def test_compute_bounds_a_segment_whose_transfers_are_shorter(monkeypatch):
    found = plain(training((50.0, 60.0, 0.0)), links(), Room({"device": 0}), monkeypatch)
    assert found.phases == {F: 50.0, B: 60.0, S: pytest.approx(40.0)}
    assert found.binding == "compute"


def test_links_that_take_turns_add_up(monkeypatch):
    both = {"h2d": Link("h2d", 100.0, shares="d2h"), "d2h": Link("d2h", 100.0, shares="h2d")}
    found = plain(training(), both, Room({"device": 0}), monkeypatch)
    assert found.seconds == pytest.approx((P + 2 * P + 7 * P) / 100)


def test_the_disk_sees_only_what_neither_device_nor_host_holds(monkeypatch):
    room = Room({"device": 500, "host": 1_500, "disk": 10**9})
    found = plain(training(), links(disk_read=10.0, disk_write=10.0), room, monkeypatch)
    assert found.nbytes["disk_read"] == 4 * P - 2_000
    assert found.nbytes["disk_write"] == 3 * P - 2_000


def test_where_compute_reaches_the_host_a_step_needs_no_bus(monkeypatch):
    room = Room({"device": 0, "host": 10**9}, reach=True)
    assert plain(training(), links(), room, monkeypatch).nbytes == {"h2d": 2 * P, "d2h": P}


def test_gradients_and_states_compete_for_the_device():
    # 4 P fit, and weights, gradients and states are 4 P: the program moves nothing. With P less,
    # the plain bound lets gradients and weights share what is left; the program does not.
    enough = bound(training(), links(), Room({"device": 4 * P}))
    assert enough.seconds == pytest.approx(3.0)
    demand, room = training((0.0, 0.0, 0.0)), Room({"device": 3 * P})
    sharper = bound(demand, links(), room)
    assert sharper.seconds == pytest.approx(P / 100, rel=1e-6)


def test_what_two_segments_need_in_turn_does_not_come_to_the_device_by_itself():
    ahead = Segment(F, 0.0, (P, 0), (0, 0), (True, True))
    after = Segment(B, 0.0, (0, P), (0, 0), (True, True))
    room = Room({"device": P, "host": 10**9})  # one of the two can stay
    found = bound(Demand((P, P), (ahead, after)), links(), room)
    assert found.seconds == pytest.approx(P / 100, rel=1e-6)


@pytest.mark.parametrize("sharper", [True, False])
@pytest.mark.parametrize(("held", "moved"), [(0, P), (P // 4, P - P // 4), (P, 0), (10**6, 0)])
def test_gradients_that_are_held_when_backward_ends_need_not_travel(
    held, moved, sharper, monkeypatch
):
    last = Segment(S, 0.0, (P,), (0,), (False,))
    back = Segment(B, 0.0, (0,), (P,), (True,))
    demand = Demand((P,), (back, last), frozenset({0}))
    room = Room({"device": 0, "host": 0, "disk": 10**9}, held_bytes=held)
    ways = links(disk_read=50.0, disk_write=40.0)
    found = bound(demand, ways, room) if sharper else plain(demand, ways, room, monkeypatch)
    assert found.nbytes == pytest.approx(dict.fromkeys(ways, moved), abs=1e-3)
    assert found.seconds == pytest.approx(moved / 50 + moved / 40, abs=1e-3)


@pytest.mark.parametrize("held", [0, P // 2, 3 * P])
@pytest.mark.parametrize("device", [0, P // 2])
def test_a_disk_that_nobody_needs_raises_no_bound(held, device):
    """What is held between two micro-batches may go to the host, in the forward after it."""
    demand = replace(training(micro_batches=2), gradients=frozenset({1}))
    slow = links(disk_read=1.0, disk_write=1.0)
    tiers = {"device": device, "host": 10**9}
    without = bound(demand, links(), Room(tiers, held_bytes=held)).seconds
    beside = bound(demand, slow, Room({**tiers, "disk": 10**9}, held_bytes=held)).seconds
    assert beside == pytest.approx(without, rel=1e-6)


@pytest.mark.parametrize(
    ("ring", "least"), [(0, 20.0), (P // 2, 16.25), (P, 12.5), (2 * P, 10.0), (10**6, 10.0)]
)
def test_what_the_ring_holds_is_written_later_and_is_written(ring, least):
    """Of the ring three quarters: the last one is left for the other direction."""
    ahead = Segment(F, 10.0, (0,), (0,), (True,))
    last = Segment(S, 0.0, (P,), (P,), (True,))
    ways = links(disk_read=1e9, disk_write=100.0, h2d=1e9, d2h=1e9)
    room = Room({"device": 0, "host": 0, "disk": 10**9}, ring_bytes=ring)
    found = bound(Demand((P,), (ahead, last)), ways, room)
    assert found.seconds == pytest.approx(least, rel=1e-3)


def test_either_bound_leaves_a_quarter_of_the_ring_for_the_other_way():
    last = Segment(S, 0.0, (P,), (P,), (True,))
    demand = Demand((P,), (Segment(F, 10.0, (0,), (0,), (True,)), last))
    ways = links(disk_read=1e9, disk_write=100.0, h2d=1e9, d2h=1e9)
    room = Room({"device": 0, "host": 0, "disk": 10**9}, ring_bytes=P)
    assert least_of_segment(last, (), ways, room).nbytes["disk_write"] == P // 4
    found = least_seconds(demand, ways, room)
    assert found is not None
    assert found.seconds == pytest.approx(12.5, rel=1e-3)


@pytest.mark.parametrize(("forward_s", "least"), [(0.85, 4.597), (0.0, 4.115)])
def test_states_are_written_behind_forward_from_the_room_that_gradients_have(forward_s, least):
    # MB/s and MB of a GPT of 155 MB of weights, gradients and states, none of which stay.
    part = 38_800_000
    ahead = Segment(F, forward_s, (part, 0, 0), (0, 0, 0), (True, True, True))
    back = Segment(B, 1.6, (part, 0, 0), (0, part, 0), (True, True, True))
    last = Segment(S, 0.15, (part, part, 2 * part), (part, 0, 2 * part), (True, False, True))
    ways = links(h2d=187e6, d2h=187e6, disk_read=11.2e6, disk_write=6.1e6)
    tiers = {"device": 13_400_000, "host": 116_700_000, "disk": 10**12}
    room = Room(tiers, ring_bytes=2**22 // 3)  # 1 MiB each way
    found = bound(Demand((part, part, 2 * part), (ahead, back, last), frozenset({1})), ways, room)
    assert found.seconds == pytest.approx(least, abs=2e-3)


def test_where_disk_and_device_meet_two_ways_share_what_moves():
    demand = Demand((P,), (Segment(F, 0.0, (P,), (0,), (True,)),))
    ways = links(disk_read=300.0, disk_write=300.0)
    room = Room({"device": 0, "host": P, "disk": 10**9}, straight=True)
    assert bound(demand, ways, room).seconds == pytest.approx(P / 400)
    assert bound(demand, ways, Room(dict(room.nbytes))).seconds == pytest.approx(P / 100)


@settings(max_examples=40, deadline=None)
@given(
    st.integers(0, 5 * P),
    st.integers(0, 5 * P),
    st.integers(1, 3),
    st.booleans(),
    st.integers(0, 2 * P),
)
def test_the_program_is_never_below_the_plain_bound_and_falls_with_room(
    device, host, times, disk, held
):
    ways = links(disk_read=30.0, disk_write=20.0) if disk else links()
    demand = replace(training(micro_batches=times), gradients=frozenset({1}))

    def seconds(device, host, plainly=False, held=held):
        tiers = {"device": device, "host": host, **({"disk": 10**9} if disk else {})}
        with pytest.MonkeyPatch.context() as patch:
            if plainly:
                patch.setattr(bounds, "MOST_SEGMENTS", 0)
            return bound(demand, ways, Room(tiers, held_bytes=held)).seconds

    least = seconds(device, host)
    assert least >= seconds(device, host, plainly=True) * (1 - 1e-6)
    assert seconds(device + 100, host) <= least * (1 + 1e-6)
    assert seconds(device, host + 100) <= least * (1 + 1e-6)
    assert seconds(device, host, held=held + 100) <= least * (1 + 1e-6)


def fetch(entry, begin, nbytes):
    return Fetch(entry, begin, nbytes, Slot(0, nbytes), 0)


W = EntryRef(7)
RUN = Run(Region("r", "", lambda: ()), (), ())


def test_a_demand_counts_distinct_bytes_once_however_often_they_are_fetched():
    forward = schedule(F, fetch(0, 0, 64), fetch(0, 32, 64), fetch(0, 0, 64), RUN)
    facts = {W: EntryFact(W, "w", EntryKind.PARAM, 96, "host")}
    step = StepTrace((StepCall(forward, (W,)), StepCall(forward, (W,))), facts)
    found = demand_of(step, lambda region: 0.5)
    assert found.groups == (96,)
    assert found.segments == (Segment(F, 1.0, (96,), (0,), (True,)),)


def test_what_a_segment_makes_for_itself_costs_nothing():
    write = schedule(S, Store(0, 0, 64, Slot(0, 64), 0))
    read = schedule(S, fetch(0, 0, 64))
    assert demand_of(StepTrace((StepCall(write, (W,)), StepCall(read, (W,)))), len).groups == ()


def test_a_gradient_is_wanted_until_the_step_has_read_it():
    backward = schedule(B, Reduce(0, 0, nbytes=64))
    read = schedule(S, fetch(0, 0, 64))
    found = demand_of(StepTrace((StepCall(backward, (W,)), StepCall(read, (W.gradient,)))), len)
    assert found.groups == (64,)
    assert [(x.reads, x.writes, x.lives) for x in found.segments] == [
        ((0,), (64,), (True,)),
        ((64,), (0,), (False,)),
    ]


def test_a_gradient_is_wanted_until_a_late_update_has_read_it():
    activation = EntryRef(8)
    backward = schedule(B, Reduce(0, 0, nbytes=64))
    late = replace(fetch(0, 0, 64), lasting=False)
    reloaded = replace(fetch(1, 0, 32), lasting=False)
    forward = schedule(F, late, reloaded)
    calls = StepCall(forward, (W.gradient, activation)), StepCall(backward, (W,))
    found = demand_of(StepTrace(calls), len)
    assert found.groups == (64,)
    assert found.gradients == {0}
    assert [(x.reads, x.writes, x.lives) for x in found.segments] == [
        ((64,), (0,), (False,)),
        ((0,), (64,), (True,)),
    ]


def test_entries_that_rest_in_one_place_need_what_moving_ones_do_not():
    # P fit. What one segment writes the other reads, and both is P, at another border each.
    ahead = Segment(F, 0.0, (0, P), (P, 0), (True, False))
    after = Segment(B, 0.0, (P, 0), (0, P), (False, True))
    demand, room = Demand((P, P), (ahead, after)), Room({"device": P, "host": 10**9})
    free = bounds.least_seconds(demand, links(), room)
    fixed = bounds.least_seconds(demand, links(), room, one_place=True)
    assert free.seconds == pytest.approx(0.0, abs=1e-6)
    assert fixed.seconds == pytest.approx(P / 100, rel=1e-6)
