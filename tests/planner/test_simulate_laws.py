"""What must hold of every simulated step, whatever it does: bounds, order, monotony."""

from dataclasses import replace
from itertools import pairwise
from math import isclose

from hypothesis import given, settings
from hypothesis import strategies as st
from small_steps import (
    ENTRIES,
    GRADIENTS,
    a_call,
    computing,
    fetching,
    freeing,
    machine,
    reducing,
    step_of,
    storing,
    waiting,
)

from zcompile.ir.schedule import Fetch, Slot, Wait
from zcompile.ir.types import Phase
from zcompile.machine.cost import Costs, TransferModes
from zcompile.machine.model import Link
from zcompile.planner.links import MOST_PIECES, RING_BLOCK, LinkSimulator, SimTransfer
from zcompile.planner.simulator import SimulatedSteps, simulate, step_seconds

LANES = 3
"""Slots of an arena that chunks take in turn."""
CLOSE = 1e-9

rows = st.lists(
    st.tuples(st.integers(0, 3), st.integers(1, 4000), st.floats(0.0, 4.0), st.booleans()),
    min_size=1,
    max_size=8,
)
"""(entry, bytes, seconds of compute, whether the result goes home)."""
homes = st.fixed_dictionaries(
    {ref: st.sampled_from(["device", "host", "disk"]) for ref in (*ENTRIES, *GRADIENTS)}
)
ways = st.builds(
    TransferModes,
    asynchronous=st.booleans(),
    straight_read=st.booleans(),
    straight_write=st.booleans(),
    behind_bytes=st.integers(0, 1000),
    chunk_bytes=st.integers(100, 4000),
    ring_bytes=st.integers(1000, 100_000),
    backlog_bytes=st.integers(0, 10_000),
)
rates = st.fixed_dictionaries(
    {
        name: st.sampled_from([250, 500, 1000, 4000])
        for name in ("h2d", "d2h", "disk_read", "disk_write")
    }
)


HOST = dict.fromkeys((*ENTRIES, *GRADIENTS), "host")


def streamed(chunks, phase=Phase.STEP):
    """Each chunk is brought, computed with and, if asked for, stored; the next is on its way."""
    busy = [()] * LANES
    bringing, body, ticket = [], [], 0
    for number, (entry, nbytes, seconds, leaves) in enumerate(chunks):
        lane = number % LANES
        slot = Slot(lane * 4096, 4096)
        come, done, home = ticket, ticket + 1, ticket + 2
        ticket += 3
        bringing.append(fetching(entry, come, *busy[lane], nbytes=nbytes, slot=slot, lasting=False))
        part = [waiting(come, slot), computing(seconds, done)]
        part += [storing(entry, home, done, nbytes=nbytes, slot=slot)] if leaves else []
        body.append([*part, freeing(slot)])
        busy[lane] = (done, home) if leaves else (done,)
    out = []
    for number, part in enumerate(body):
        first = number == 0
        out += bringing[: LANES - 1] if first else bringing[number + LANES - 2 :][:1]
        out += part
    return a_call(*out, phase=phase)


def backward(chunks):
    out = []
    for number, (entry, nbytes, seconds, _) in enumerate(chunks):
        out += [computing(seconds, number), reducing(entry, nbytes, (number,))]
    return a_call(*out, phase=Phase.BACKWARD)


read_only = rows.map(lambda found: [(*row[:3], False) for row in found])
steps = st.builds(
    lambda one, two, three: step_of(streamed(one, Phase.FORWARD), backward(two), streamed(three)),
    read_only,
    rows,
    rows,
)
links = st.sampled_from(["h2d", "d2h", "disk_read", "disk_write"])


@settings(max_examples=40, deadline=None)
@given(steps, homes, ways, rates, st.booleans())
def test_nothing_is_done_faster_than_compute_and_every_lane_allow(step, homes, ways, rates, turns):
    costs = Costs(machine(half_duplex=turns, **rates), ways)
    found = simulate(step, costs, homes, repeats=1)
    assert SimulatedSteps(step, costs, homes, tells=False).seconds() == found.step_s
    settled = simulate(step, costs, homes).step_s
    assert isclose(step_seconds(step, costs, homes), settled, rel_tol=1e-6)
    ended = max(m.arrived_s or m.end_s for m in found.moments)
    assert found.step_s >= found.compute_s - CLOSE
    lanes = [found.busy_s[name] for name in ("h2d", "d2h", "disk_read", "disk_write")]
    assert ended >= max(lanes) - CLOSE
    if turns:
        assert ended >= sum(lanes[2:]) - CLOSE


@settings(max_examples=40, deadline=None)
@given(steps, homes, ways, rates)
def test_compute_and_stalls_fill_the_step_of_a_host_that_costs_nothing(step, homes, ways, rates):
    found = simulate(step, Costs(machine(**rates), replace(ways, asynchronous=False)), homes)
    assert abs(found.compute_s + found.stall_s - found.step_s) < 1e-6
    assert abs(sum(found.phases.values()) - found.step_s) < 1e-6


@settings(max_examples=40, deadline=None)
@given(steps, homes, ways, rates)
def test_compute_goes_on_in_order_and_waits_for_what_it_needs(step, homes, ways, rates):
    found = simulate(step, Costs(machine(**rates), ways), homes)
    work = [m for m in found.moments if m.is_work]
    assert all(a.end_s <= b.begin_s + CLOSE for a, b in pairwise(work))
    arrived = {
        (m.call, m.instruction.ticket): m.arrived_s
        for m in found.moments
        if isinstance(m.instruction, Fetch)
    }
    for m in found.moments:
        if isinstance(m.instruction, Wait):
            assert m.end_s >= arrived[m.call, m.instruction.ticket] - CLOSE


@settings(max_examples=40, deadline=None)
@given(steps, ways, rates, links)
def test_a_link_without_a_throttle_slows_by_no_more_than_is_on_its_way(step, ways, rates, link):
    """What comes earlier takes turns with more of what is on its way: a store that would have been
    hidden behind the next forward may make a gradient late for which the step waits."""
    freed = {**rates, link: 1e12}
    slow, fast = (simulate(step, Costs(machine(**r), ways), HOST) for r in (rates, freed))
    assert fast.step_s <= slow.step_s + sum(fast.busy_s.values()) + CLOSE
    assert fast.nbytes == slow.nbytes
    assert fast.peak_bytes == slow.peak_bytes


@settings(max_examples=40, deadline=None)
@given(steps, homes, ways, rates)
def test_without_any_throttle_only_compute_is_left(step, homes, ways, rates):
    free = simulate(step, Costs(machine(**dict.fromkeys(rates, 1e15)), ways), homes)
    assert free.step_s <= free.compute_s + 1e-6
    assert simulate(step, Costs(machine(**rates), ways), homes).step_s >= free.step_s - 1e-6


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.floats(0, 10), st.integers(1, 5000)), min_size=1, max_size=20))
def test_one_link_serves_in_the_order_in_which_transfers_come(asked):
    link = Link("h2d", 1000.0)
    traffic = LinkSimulator({"h2d": link}, 1 << 20, 1 << 22)
    sent = [(SimTransfer(nbytes, (link,), 1), at) for at, nbytes in asked]
    for transfer, at in sent:
        traffic.start(transfer, at)
    traffic.finish()
    served = [transfer for transfer, _ in sorted(sent, key=lambda pair: pair[1])]
    free = 0.0
    for transfer, (at, nbytes) in zip(served, sorted(asked, key=lambda a: a[0]), strict=True):
        assert transfer.begin_s == max(at, free)
        free = transfer.begin_s + nbytes / 1000.0
        assert transfer.home_s == transfer.over_s == free


@given(st.integers(1, 100_000), st.integers(100, 4000), st.integers(50, 2000))
def test_two_links_in_a_row_take_the_slower_one_and_a_piece_of_the_other(nbytes, chunk, rate):
    first, second = Link("disk_read", 1000.0), Link("h2d", float(rate))
    traffic = LinkSimulator({"disk_read": first, "h2d": second}, chunk, 100 * chunk)
    transfer = SimTransfer(nbytes, (first, second), 2)
    traffic.start(transfer, 0.0)
    took, least = traffic.finish(), nbytes / min(1000, rate)
    pieces = -(-nbytes // chunk)
    most = chunk * max(1, -(-pieces // MOST_PIECES)) / max(1000, rate)
    assert least <= took + CLOSE
    assert took <= least + most + chunk * -(-pieces // MOST_PIECES) / min(1000, rate) + CLOSE


def last_home(chunk_bytes, ring_bytes, writes, reads=0, nbytes=1000, adds=False, rate=1000.0):
    """When the last of `writes` over two links of `rate` bytes/s is home, beside `reads`."""
    rows = {name: Link(name, rate) for name in ("disk_read", "h2d", "d2h", "disk_write")}
    traffic = LinkSimulator(rows, chunk_bytes, ring_bytes)
    for _ in range(reads):
        traffic.start(SimTransfer(nbytes, (rows["disk_read"], rows["h2d"]), 2), 0.0)
    sent = [SimTransfer(nbytes, (rows["d2h"], rows["disk_write"]), 1) for _ in range(writes)]
    for transfer in sent:
        transfer.adds = adds
        traffic.start(transfer, 0.0)
    traffic.finish()
    return sent[-1].home_s


def test_a_small_transfer_takes_a_whole_buffer_of_the_ring():
    assert isclose(last_home(500, 4000, writes=8, nbytes=500), 9 * 0.5)  # both links are busy
    assert isclose(last_home(4000, 4000, writes=8, nbytes=500), 8 * 2 * 0.5)  # one at a time


def test_reads_leave_writes_one_buffer_of_four():
    assert isclose(last_home(1000, 4000, writes=8), 9.0)
    assert isclose(last_home(1000, 4000, writes=8, reads=100), 8 * 2.0)


def test_a_sum_takes_both_halves_of_a_buffer():
    block, rate = RING_BLOCK, float(RING_BLOCK)
    for adds, took in ((False, 9.0), (True, 8 * 2.0)):
        assert isclose(took, last_home(2 * block, 8 * block, 8, 100, block, adds, rate))


def test_a_sum_is_cut_at_half_a_buffer():
    link = Link("d2h", 1000.0, latency_s=100.0)
    for adds, pieces in ((False, 1), (True, 2)):
        traffic = LinkSimulator({"d2h": link, "disk_write": link}, 8192, 8192)
        transfer = SimTransfer(8192, (link, link), 1)
        transfer.adds = adds
        traffic.start(transfer, 0.0)
        took = traffic.finish()
        assert isclose(took, pieces * (200.0 + 2 * 8.192 / pieces)), "one after the other"
