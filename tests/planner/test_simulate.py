"""Simulated steps: small ones worked out by hand, and what must hold of any."""

import random
from dataclasses import replace

import pytest
import torch
from small_steps import (
    ENTRIES,
    GRADIENTS,
    ONE,
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
from written import FLOATS, HIGH, LOW

from zcompile.errors import Unsupported
from zcompile.ir.schedule import (
    Borrow,
    EntryIndex,
    Fetch,
    Left,
    Offload,
    Reduce,
    Register,
    Run,
    Slot,
    Ticket,
)
from zcompile.ir.types import HELD, EntryKind, Layout, Phase
from zcompile.machine.cost import Costs, TransferModes
from zcompile.planner.links import LinkSimulator, SimTransfer
from zcompile.planner.paths import LinkPaths
from zcompile.planner.simulator import (
    InFlight,
    Leaving,
    SimulatedSteps,
    simulate,
    step_seconds,
)

BLOCK = 4096
"""Of the staging ring."""


def first(step, costs=None, homes=None, **ways):
    """The first step, which finds nothing ahead."""
    return simulate(step, costs or Costs(machine(), TransferModes(**ways)), homes, repeats=1)


def times(timeline, kind):
    """Begin and end of each instruction of a kind."""
    return [(m.begin_s, m.end_s) for m in timeline.moments if isinstance(m.instruction, kind)]


def travelled(timeline):
    return [(m.sent_s, m.arrived_s) for m in timeline.moments if m.sent_s is not None]


LOADED = a_call(fetching(0, 0), waiting(0), computing(3), freeing())


def test_compute_waits_for_its_fetch():
    found = first(step_of(LOADED))
    assert travelled(found) == [(0.0, 1.0)]
    assert times(found, Run) == [(1.0, 4.0)]
    assert (found.step_s, found.compute_s, found.stall_s) == (4.0, 3.0, 1.0)


def test_bytes_and_busy_seconds_are_those_of_one_step():
    found = simulate(step_of(LOADED), Costs(machine()))
    assert (found.nbytes["h2d"], found.busy_s["h2d"]) == (ONE, 1.0)


def test_the_first_fetch_of_the_next_step_hides_behind_this_one():
    low = (fetching(0, 0), waiting(0), computing(3), freeing())
    high = (fetching(1, 1, slot=HIGH), waiting(1, HIGH), computing(3), freeing(HIGH))
    over = a_call(*low, *high)
    cold, warm = first(step_of(over)), simulate(step_of(over), Costs(machine()))
    assert (cold.step_s, warm.step_s) == (8.0, 7.0)
    assert warm.stall_s == 1.0
    assert min(sent for sent, _ in travelled(warm)) < 0


@pytest.mark.parametrize(("written", "passed"), [(1, True), (0, False)])
def test_a_fetch_of_a_forward_is_handed_over_past_a_step_in_place_that_does_not_write_it(
    written, passed
):
    forward = a_call(fetching(0, 0), waiting(0), computing(3), freeing())
    backward = a_call(
        fetching(2, 0, slot=HIGH), waiting(0, HIGH), computing(3), phase=Phase.BACKWARD
    )
    changed = Borrow(EntryIndex(written), 0, FLOATS, Register(1), True, "w")
    in_place = a_call(changed, computing(1), phase=Phase.STEP)
    step = step_of(forward, backward, in_place)
    ahead = LinkPaths(step, Costs(machine()), {}).handovers(step.calls)
    assert [then for then, _ in ahead] == [
        backward,
        forward if passed else in_place,
        None if passed else forward,
    ]
    begins = simulate(step, Costs(machine())).moments[0].sent_s
    assert begins == (-4.0 if passed else 0.0)


def test_what_a_step_leaves_to_write_counts_where_steps_are_compared():
    """The first step finds nothing on its way home; any other waits for what the one before
    wrote."""
    rows = (fetching(0, 0), waiting(0), computing(1, 3), storing(0, 4, 3), freeing())
    step, costs = step_of(a_call(*rows, phase=Phase.STEP)), Costs(machine())
    assert first(step).step_s == 2.0
    assert step_seconds(step, costs) == simulate(step, costs).step_s == 3.0


def test_of_a_step_that_is_compared_forward_is_walked_once(monkeypatch):
    """It comes behind what the step before leaves, which is what that does after its forward."""
    walked, walk = [], SimulatedSteps._walk

    def noted(steps, number, call):
        walked.append(number)
        walk(steps, number, call)

    monkeypatch.setattr(SimulatedSteps, "_walk", noted)
    rows = (fetching(0, 0), waiting(0), computing(1, 3), storing(0, 4, 3), freeing())
    step = step_of(a_call(computing(0.25)), a_call(*rows, phase=Phase.STEP))
    told, cold = simulate(step, Costs(machine())).step_s, first(step).step_s
    walked.clear()
    assert step_seconds(step, Costs(machine())) == told > cold
    assert walked == [1, 0, 1]


def test_a_fetch_that_is_early_enough_costs_nothing():
    found = first(step_of(a_call(fetching(0, 0), computing(3), waiting(0), computing(1))))
    assert (found.step_s, found.stall_s) == (4.0, 0.0)


def test_one_link_carries_one_transfer_after_the_other():
    found = first(
        step_of(a_call(fetching(0, 0), fetching(1, 1, slot=HIGH), waiting(1), computing(1)))
    )
    assert travelled(found) == [(0.0, 1.0), (1.0, 2.0)]


def test_latency_delays_a_transfer_and_not_those_behind_it():
    costs = Costs(machine(latency_s=0.5))
    found = first(step_of(a_call(fetching(0, 0), fetching(1, 1, slot=HIGH), waiting(1))), costs)
    assert travelled(found) == [(0.0, 1.5), (1.0, 2.5)]


def test_a_fetch_waits_for_the_compute_that_it_names():
    found = first(step_of(a_call(computing(2), computing(1, 7), fetching(0, 0, 7), waiting(0))))
    assert travelled(found) == [(3.0, 4.0)]


def test_from_the_disk_bytes_pass_both_links_chunk_by_chunk():
    fetched = step_of(a_call(fetching(0, 0, nbytes=4 * ONE), waiting(0), computing(1)), home="disk")
    assert first(fetched, chunk_bytes=ONE).stall_s == 5.0
    assert first(fetched, chunk_bytes=4 * ONE).stall_s == 8.0
    assert first(fetched, Costs(machine(h2d=500), TransferModes(chunk_bytes=ONE))).stall_s == 9.0


def test_straight_from_the_disk_they_take_its_link_only():
    fetched = step_of(a_call(fetching(0, 0), waiting(0), computing(1)), home="disk")
    costs = Costs(machine(h2d=10), TransferModes(straight_read=True, granule=500))
    assert first(fetched, costs).stall_s == 1.0
    found = simulate(fetched, costs)
    assert (found.nbytes["disk_read"], found.nbytes["h2d"], found.busy_s["h2d"]) == (ONE, ONE, 0)


def test_what_rests_on_the_device_is_there():
    found = simulate(step_of(LOADED), Costs(machine()), {ENTRIES[0]: "device"})
    assert (found.step_s, found.nbytes["h2d"]) == (3.0, 0)


def test_disk_traffic_is_counted_in_whole_granules():
    fetched = step_of(a_call(fetching(0, 0, begin=100, nbytes=600), waiting(0)), home="disk")
    assert simulate(fetched, Costs(machine())).nbytes["disk_read"] == 1024


def test_half_duplex_links_take_turns_and_reads_go_first():
    late = fetching(2, 0, slot=HIGH, lasting=False)
    rows = (storing(0, 5), storing(1, 6), late, waiting(0), computing(1))
    stored = step_of(a_call(*rows, phase=Phase.STEP), home="disk")
    ways = TransferModes(straight_read=True, straight_write=True)
    assert first(stored, Costs(machine(), ways)).stall_s == 1.0
    found = first(stored, Costs(machine(half_duplex=True), ways))
    assert travelled(found) == [(0.0, 1.0), (2.0, 3.0), (1.0, 2.0)]


def test_a_slot_that_is_still_leaving_is_not_overwritten():
    rows = (fetching(0, 0), waiting(0), computing(1, 3), storing(0, 4, 3), freeing())
    after = a_call(fetching(1, 0), waiting(0), computing(1), freeing())
    found = first(step_of(a_call(*rows, phase=Phase.STEP), after))
    assert travelled(found) == [(0.0, 1.0), (2.0, 3.0), (3.0, 4.0)]


@pytest.mark.parametrize(
    ("behind_bytes", "stored", "next_fetch"),
    [(ONE - 1, (2.0, 3.0), (3.0, 4.0)), (ONE, (2.0, 3.25), (2.25, 3.25))],
)
def test_a_slot_that_is_written_behind_is_free_before_the_disk_has_its_bytes(
    behind_bytes, stored, next_fetch
):
    rows = (fetching(0, 0), waiting(0), computing(1, 3), storing(0, 4, 3), freeing())
    after = a_call(fetching(1, 0), waiting(0), computing(1), freeing())
    ways = TransferModes(
        straight_read=True,
        straight_write=True,
        behind_bytes=behind_bytes,
        chunk_bytes=ONE,
        ring_bytes=2 * ONE,
    )
    step = step_of(a_call(*rows, phase=Phase.STEP), after, home="disk")
    assert travelled(first(step, Costs(machine(d2h=4 * ONE), ways)))[1:] == [stored, next_fetch]


def most_waited_for(chunks, monkeypatch):
    """Transfers that one transfer is told to wait for at most, of a step of so many chunks in one
    lane, of which the host starts all before the first has come; and the seconds of the step."""
    start, most, rows = LinkSimulator.start, [0], []

    def counted(self, transfer, at_s, after=(), *others):
        after = list(after)
        most[0] = max(most[0], len([other for other in after if other.over_s is None]))
        return start(self, transfer, at_s, after, *others)

    for n in range(chunks):
        part, ticket = {"nbytes": 64, "begin": 64 * n}, 3 * n
        before = (ticket - 1,) if n else ()
        rows += fetching(0, ticket, *before, **part), waiting(ticket), computing(1, ticket + 1)
        rows += storing(0, ticket + 2, ticket + 1, **part), freeing()
    with monkeypatch.context() as patched:
        patched.setattr(LinkSimulator, "start", counted)
        found = first(step_of(a_call(*rows, phase=Phase.STEP)), asynchronous=True)
    return most[0], found.step_s


def test_a_chunk_waits_for_the_last_that_left_its_lane_and_not_for_all(monkeypatch):
    few, of_few_s = most_waited_for(4, monkeypatch)
    many, of_many_s = most_waited_for(40, monkeypatch)
    assert few == many
    assert of_many_s == pytest.approx(10 * of_few_s, rel=0.05)


def test_what_leaves_a_slot_that_was_filled_anew_stands_for_what_left_it_before():
    low, all_of_it = Slot(0, 64), Slot(0, 128)
    old, new, beside = SimTransfer(1), SimTransfer(2), SimTransfer(3)
    leaving = Leaving()
    leaving.start(low, old)
    leaving.start(Slot(64, 64), beside)
    assert leaving.overwritten(32, 64) == [old]
    leaving.start(low, new)  # of which only a part was filled: what it moves may be of before
    assert leaving.behind(0) == [old, beside, new]
    assert leaving.overwritten(0, 128) == [old, beside, new]
    leaving.start(all_of_it, last := SimTransfer(4))
    assert leaving.behind(0) == [old, beside, new, last]
    leaving.start(low, again := SimTransfer(5))
    assert leaving.behind(0) == [beside, last, again]


def test_a_value_is_read_back_once_it_is_home():
    before = a_call(computing(1, 3), storing(0, 4, 3, slot=HIGH), phase=Phase.STEP)
    found = first(step_of(before, LOADED, home="disk"), straight_read=True)
    sent, arrived = travelled(found)
    assert sent == (1.0, 3.0), "down to the host, then to the disk"
    assert arrived == (3.0, 4.0)


def test_a_gradient_leaves_while_backward_goes_on():
    rows = (computing(1, 0), reducing(0, after=(0,)), computing(2, 1), reducing(1, after=(1,)))
    found = first(step_of(a_call(*rows, phase=Phase.BACKWARD)))
    assert travelled(found) == [(1.0, 2.0), (3.0, 4.0)]
    assert (found.step_s, found.stall_s) == (3.0, 0.0)


def test_a_second_gradient_on_disk_is_added_to_the_first():
    grads = {GRADIENTS[0]: "disk"}
    once = a_call(computing(1, 0), reducing(0, after=(0,)), phase=Phase.BACKWARD)
    found = simulate(step_of(once, once), Costs(machine()), grads, repeats=1)
    assert (found.nbytes["disk_read"], found.nbytes["disk_write"]) == (1024, 2048)


@pytest.mark.parametrize(
    ("home", "begun"), [("disk", [1.0, 2.0, 6.0, 12.0]), ("host", [1.0, 2.0, 3.0, 5.0])]
)
def test_what_is_added_takes_its_bytes_twice_of_the_ring(home, begun):
    """The ring has room for two gradients that leave, or for one that is added."""
    rates = dict.fromkeys(("d2h", "disk_read", "disk_write"), BLOCK)
    ways = TransferModes(chunk_bytes=2 * BLOCK, ring_bytes=3 * BLOCK)
    rows = (computing(1, 0), *(reducing(n, BLOCK, (0,)) for n in range(2)))
    once = a_call(*rows, phase=Phase.BACKWARD)
    homes = dict.fromkeys(GRADIENTS[:2], home)
    found = first(step_of(once, once), Costs(machine(latency_s=1.0, **rates), ways), homes)
    assert [sent for sent, _ in travelled(found)] == begun


def test_gradients_that_pile_up_make_backward_wait():
    rows = [computing(1, 0), *(reducing(n, after=(0,)) for n in range(4)), computing(1)]
    step = step_of(a_call(*rows, phase=Phase.BACKWARD))
    assert first(step, backlog_bytes=4 * ONE).stall_s == 2.0, "two are under way at once"
    assert first(step, backlog_bytes=ONE).stall_s == 3.0


@pytest.mark.parametrize("home", ["device", HELD])
def test_a_gradient_at_home_where_it_is_made_waits_for_none_that_leaves(home):
    rows = computing(1, 0), reducing(0, after=(0,)), reducing(1, after=(0,)), computing(1)
    step = step_of(a_call(*rows, phase=Phase.BACKWARD))
    assert first(step, backlog_bytes=ONE).stall_s == 1.0
    assert first(step, homes={GRADIENTS[1]: home}, backlog_bytes=ONE).stall_s == 0.0


def test_compute_on_an_entry_waits_for_what_moves_it():
    lent = Borrow(EntryIndex(0), 0, FLOATS, Register(1), False)
    rows = (computing(1, 0), storing(0, 4, 0), lent, computing(1))
    assert first(step_of(a_call(*rows, phase=Phase.STEP))).stall_s == 1.0


def test_what_a_step_makes_anew_is_not_brought():
    rows = (fetching(0, 0), waiting(0), computing(1), freeing())
    step = step_of(
        a_call(*rows, phase=Phase.STEP), kinds=(EntryKind.COPY,) + (EntryKind.PARAM,) * 3
    )
    assert first(step).nbytes["h2d"] == 0


def test_the_peak_is_what_is_taken_at_once_and_what_stays():
    found = simulate(step_of(LOADED), Costs(machine()), {ENTRIES[1]: "device"})
    assert found.peak_bytes == LOW.nbytes + 4096


def test_seconds_are_told_by_phase():
    step = step_of(
        LOADED, a_call(computing(2), phase=Phase.BACKWARD), a_call(computing(4), phase=Phase.STEP)
    )
    found = first(step)
    assert found.phases == {Phase.FORWARD: 4.0, Phase.BACKWARD: 2.0, Phase.STEP: 4.0}
    assert sum(found.phases.values()) == found.step_s


def test_beside_the_host_compute_lags_and_transfers_start_early():
    rows = (computing(5), fetching(0, 0), waiting(0), computing(1))
    assert first(step_of(a_call(*rows))).step_s == 7.0
    found = first(step_of(a_call(*rows)), asynchronous=True)
    assert travelled(found) == [(0.0, 1.0)]
    assert (found.step_s, found.stall_s) == (6.0, 0.0)


def test_beside_the_host_a_copy_that_waits_holds_up_those_behind_it_on_its_stream():
    rows = (computing(2, 0), fetching(0, 1, 0), fetching(1, 2, slot=HIGH))
    step = step_of(a_call(*rows, waiting(2, HIGH), computing(1)))
    assert travelled(first(step)) == [(2.0, 3.0), (3.0, 4.0)]
    found = first(step, asynchronous=True)
    assert travelled(found) == [(2.0, 3.0), (3.0, 4.0)]
    assert (found.step_s, found.moments[-1].begin_s) == (5.0, 4.0)


def test_a_stream_carries_on_before_what_it_carried_has_come():
    costs = Costs(machine(latency_s=0.5), TransferModes(asynchronous=True))
    found = first(step_of(a_call(fetching(0, 0), fetching(1, 1, slot=HIGH), waiting(1))), costs)
    assert travelled(found) == [(0.0, 1.5), (1.0, 2.5)]


def test_a_copy_that_waits_for_an_event_holds_up_none_of_the_other_stream():
    rows = (computing(2, 0), fetching(0, 1, 0), computing(1, 3), storing(1, 4, slot=HIGH))
    step = step_of(a_call(computing(1), *rows, phase=Phase.STEP))
    found = first(step, asynchronous=True)
    assert travelled(found) == [(3.0, 4.0), (0.0, 1.0)]


def test_a_copy_that_is_not_enqueued_yet_holds_up_none():
    """The host has to hear that the sum is formed before it enqueues what reads it."""
    back = a_call(computing(1, 0), reducing(0, after=(0,)), phase=Phase.BACKWARD)
    rows = (fetching(0, 0, slot=HIGH, lasting=False), fetching(1, 5, lasting=False))
    reads = replace(a_call(*rows, phase=Phase.STEP), entries=GRADIENTS)
    found = first(step_of(back, back, reads), asynchronous=True)
    late, free = travelled(found)[-2:]
    assert free[0] < late[0]


def test_beside_compute_a_region_that_waits_for_what_is_not_enqueued_stalls():
    """The host waits until bytes from disk are copied, and compute has nothing to do meanwhile."""
    region = computing(3)
    vars(region)["effects"] = region.effects._replace(after=(Ticket(0),))
    step = step_of(a_call(fetching(0, 0), region), home="disk")
    found = first(step, asynchronous=True)
    (ran,) = times(found, Run)
    assert ran[0] > 0
    assert found.stall_s == pytest.approx(ran[0])


VALUE = Layout((ONE,), (1,), 0, torch.uint8)


def offloading(tier, ticket, *after):
    return Offload(Register(1), tier, VALUE, Register(2), 0, Ticket(ticket), after)


def leaving(ticket):
    return Left(Ticket(ticket), Register(1), ONE)


def forward_of(*rows, made):
    """A step of a forward that makes entries, which are of no other call."""
    return step_of(replace(a_call(*rows), made=made))


@pytest.mark.parametrize(("beside", "fetched"), [(False, (2.0, 3.0)), (True, (0.0, 1.0))])
def test_compute_waits_until_a_value_has_left_and_the_host_if_it_computes(beside, fetched):
    rows = (computing(1, 0), offloading("host", 1, Ticket(0)), computing(0.5), leaving(1))
    step = forward_of(*rows, fetching(0, 2), computing(1), made=(4,))
    found = first(step, asynchronous=beside)
    assert times(found, Run) == [(0.0, 1.0), (1.0, 1.5), (2.0, 3.0)]
    assert found.stall_s == 0.5
    assert travelled(found) == [(1.0, 2.0), fetched]


@pytest.mark.parametrize(("beside", "goes_on"), [(False, 4.0), (True, 0.0)])
def test_gradients_that_pile_up_make_compute_wait_and_the_host_if_it_computes(beside, goes_on):
    """Two may be under way: compute has the memory of the first once that has left."""
    rows = [computing(1, 0), *(reducing(n, after=(0,)) for n in range(4)), computing(1)]
    step = step_of(a_call(*rows, fetching(0, 9), phase=Phase.BACKWARD))
    found = first(step, asynchronous=beside, backlog_bytes=4 * ONE)
    assert times(found, Run) == [(0.0, 1.0), (3.0, 4.0)]
    assert (found.stall_s, found.moments[-1].begin_s) == (2.0, goes_on)


def begun(found):
    """When the host, or compute, came to each gradient."""
    return [m.begin_s for m in found.moments if isinstance(m.instruction, Reduce)]


def test_beside_compute_the_host_waits_for_room_in_the_backlog():
    rows = [computing(1, 0), *(reducing(n, after=(0,)) for n in range(2)), computing(1)]
    step = step_of(a_call(*rows, phase=Phase.BACKWARD))
    wide, tight = (first(step, asynchronous=True, backlog_bytes=n * ONE) for n in (2, 1))
    assert (begun(wide), times(wide, Run)[1], wide.stall_s) == ([0.0, 0.0], (1.0, 2.0), 0.0)
    assert (begun(tight), times(tight, Run)[1]) == ([0.0, 2.0], (2.0, 3.0))


def test_beside_compute_what_compute_has_joined_leaves_the_backlog_at_once():
    """Of four, two under way: the third is sent when compute has joined the first, which is still
    on its way."""
    rows = [computing(1, 0), *(reducing(n, after=(0,)) for n in range(4)), fetching(0, 9)]
    step = step_of(a_call(*rows, phase=Phase.BACKWARD))
    found = first(step, asynchronous=True, backlog_bytes=2 * ONE)
    assert found.moments[-1].begin_s == 0.0, "the host never waited"


@pytest.mark.parametrize(("home", "goes_on"), [("host", 0.0), ("disk", 4.0)])
def test_beside_compute_the_host_waits_for_what_only_it_can_put_in_order(home, goes_on):
    """A copy of what is on its way to the host comes after an event; what is on its way to disk
    has to be there before it is read back, and read before its copy is enqueued."""
    rows = (computing(1, 3), storing(0, 4, 3), fetching(0, 0, slot=HIGH), waiting(0, HIGH))
    other = fetching(1, 5, slot=Slot(HIGH.end, 4096))
    step = step_of(a_call(*rows, computing(1), other, phase=Phase.STEP))
    found = first(step, homes={ENTRIES[0]: home}, asynchronous=True)
    assert found.moments[-1].begin_s == goes_on
    assert times(found, Run)[-1] == (goes_on + (3.0 if home == "host" else 1.0), found.step_s)


@pytest.mark.parametrize("passes", [1, 2])
@pytest.mark.parametrize("then", [(), (fetching(1, 5, 0, slot=HIGH, lasting=False),)])
def test_beside_compute_the_host_waits_for_sums_that_it_forms_itself(passes, then):
    """So does what comes after a copy that waits for one."""
    back = a_call(computing(1, 0), reducing(0, after=(0,)), phase=Phase.BACKWARD)
    waits = waiting(5 if then else 0, HIGH), fetching(2, 6, lasting=False)
    rows = (fetching(0, 0, slot=HIGH, lasting=False), *then, *waits)
    reads = replace(a_call(*rows, phase=Phase.STEP), entries=GRADIENTS)
    found = first(step_of(*[back] * passes, reads), asynchronous=True)
    assert found.moments[-1].begin_s == (0.0 if passes == 1 else 3.0)


def test_beside_compute_the_host_goes_on_while_a_link_is_busy():
    rows = (fetching(0, 0, nbytes=4 * ONE), fetching(1, 1, slot=HIGH), waiting(1, HIGH))
    found = first(step_of(a_call(*rows, fetching(2, 2))), asynchronous=True)
    assert found.moments[-1].begin_s == 0.0


def test_beside_compute_nobody_waits_for_what_compute_itself_moves():
    lent = Borrow(EntryIndex(0), 0, FLOATS, Register(1), False)
    rows = (computing(1, 0), storing(0, 4, 0), lent, computing(1), fetching(1, 1))
    step = step_of(a_call(*rows, phase=Phase.STEP))
    found = first(step, homes={ENTRIES[0]: "device"}, asynchronous=True)
    assert (found.moments[-1].begin_s, found.stall_s) == (0.0, 0.0)


def test_beside_compute_memory_that_goes_back_for_good_makes_the_host_wait():
    scratch = Slot(1 << 20, 4096)
    rows = (fetching(0, 0, slot=scratch), waiting(0, scratch), computing(1, 1))
    step = a_call(*rows, storing(0, 2, 1, slot=scratch), phase=Phase.STEP)
    step = replace(step, schedule=replace(step.schedule, scratch_at=scratch.address))
    after = a_call(fetching(1, 0), waiting(0), computing(1))
    found = first(step_of(step, after), asynchronous=True)
    (fetch,) = (m for m in found.moments if m.call == 1 and isinstance(m.instruction, Fetch))
    assert fetch.begin_s == 3.0


def test_what_was_measured_counts_before_what_is_predicted():
    known = {"3 s": 0.5}
    found = first(step_of(LOADED), Costs(machine(), regions=known, issues={("fetch", ONE): 0.25}))
    assert times(found, Run) == [(1.25, 1.75)]
    gaps = {("forward test", "forward test"): 2.0}
    assert first(step_of(LOADED), Costs(machine(), gaps=gaps)).step_s == 6.0


def test_a_link_that_is_not_there_is_named():
    bare = replace(machine(), links={})
    with pytest.raises(Unsupported, match="over 'h2d', which 'paper' does not have"):
        first(step_of(LOADED), Costs(bare))


def test_the_same_step_takes_the_same_time_again():
    step = step_of(LOADED, a_call(computing(2), phase=Phase.BACKWARD))
    assert simulate(step, Costs(machine())) == simulate(step, Costs(machine()))


def test_who_waits_for_what_a_slot_stands_for_waits_for_all_that_left_it():
    draw, leaving = random.Random(1), Leaving()
    came: list[tuple[int, int, SimTransfer]] = []
    behind: dict[int, set[int]] = {}
    """Of a transfer: those that have ended once it has."""
    for _ in range(300):
        begin, nbytes = 64 * draw.randrange(8), 64 * draw.randrange(1, 4)
        waited = leaving.overwritten(begin, begin + nbytes)
        known = set().union(*(behind[id(t)] for t in waited)) if waited else set()
        there = {id(t) for first, last, t in came if first < begin + nbytes and begin < last}
        assert known >= there, "all of those that left bytes of it"
        leaving.start(Slot(begin, nbytes), transfer := SimTransfer(nbytes))
        behind[id(transfer)] = {id(transfer)} | known
        came.append((begin, begin + nbytes, transfer))


def test_what_is_in_flight_is_found_by_its_bytes_in_the_order_in_which_it_came():
    """However much of it is over by then, and not looked through each time."""
    draw, leaving, on_entry = random.Random(0), Leaving(), InFlight()
    came: list[tuple[int, int, bool, SimTransfer]] = []
    for _ in range(300):
        begin, nbytes = 64 * draw.randrange(8), 64 * draw.randrange(1, 4)
        writes, transfer = draw.random() < 0.5, SimTransfer(nbytes)
        leaving.start(Slot(begin, nbytes), transfer)
        on_entry.start("entry", begin, begin + nbytes, writes, transfer)
        came.append((begin, begin + nbytes, writes, transfer))
        if draw.random() < 0.9:
            draw.choice(came)[3].over_s = 1.0
        for *_, other in came:
            other.home_s = other.over_s
        first, last = 64 * draw.randrange(8), 64 * draw.randrange(8, 12)
        live = [row for row in came if row[3].over_s is None]
        there = [row for row in live if row[0] < last and first < row[1]]
        assert leaving.behind(first) == [row[3] for row in live if row[0] >= first]
        assert on_entry.blockers("entry", first, last, True) == [row[3] for row in there]
        assert on_entry.blockers("entry", first, last, False) == [r[3] for r in there if r[2]]
