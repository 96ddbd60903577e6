"""Which updates may be late, what a step with them moves, and that its bound is no higher."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import inf

import pytest
import torch
from sampled import crossed, sampled
from traced_steps import adamw, adamw_by_foreach, named, traced

from zcompile.errors import BudgetExceeded
from zcompile.frontend.replan import summary
from zcompile.ir.effects import IN
from zcompile.ir.late_updates import is_update
from zcompile.ir.optimizer_step import LEAST_PACED_BYTES, Column
from zcompile.ir.schedule import (
    Cast,
    Drop,
    EntryIndex,
    Free,
    Register,
    Run,
    Schedule,
    Slot,
    Store,
    Wait,
)
from zcompile.ir.step import StepCall, StepTrace
from zcompile.ir.types import SMALL_BYTES, EntryKind, EntryRef, Phase, aligned
from zcompile.ir.units import GiB, KiB, MiB
from zcompile.machine.cost import Costs, TransferModes
from zcompile.machine.model import Compute, Link, Machine
from zcompile.machine.staging import lane_bytes
from zcompile.passes.arrange import ArenaShare, apply_placement, arranged, wider_than
from zcompile.passes.late_updates import with_late_updates
from zcompile.passes.schedule_prefetch import schedule_prefetch
from zcompile.planner import late_step, step_plan
from zcompile.planner.bounds import bound, demand_of
from zcompile.planner.late_step import with_all_late, with_late_step
from zcompile.planner.placement import PLACED, Room, place
from zcompile.planner.simulator import step_seconds
from zcompile.planner.step_plan import (
    LATE_PAYS,
    LEAST_WINDOW,
    SMALL_WINDOW_PART,
    WIDE_PART,
    StepPlan,
    as_planned,
    plan_late_or_not,
    plan_step,
)
from zcompile.verify.schedule import verify_schedule

BF16 = torch.bfloat16
CHUNK = 64 * KiB


def updates(schedule: Schedule) -> list[Run]:
    return [x for x in schedule.instructions if isinstance(x, Run) and x.late is not None]


# Which may be late


@pytest.mark.slow
def test_large_parameters_are_updated_late_and_small_ones_at_once():
    step = traced()
    late = with_late_step(step, CHUNK)
    weights = [f for f in step.facts.values() if f.kind is EntryKind.PARAM]
    large = {f.name for f in weights if f.nbytes > SMALL_BYTES}
    assert named(step, late.forwards) == large
    (rest,) = (call for call in late.step.calls if call.phase is Phase.STEP)
    assert len(rest.schedule.rows) == len(weights) - len(large)


def test_only_the_first_of_several_micro_batches_updates():
    step = with_late_step(traced(micro_batches=2), CHUNK).step
    late = [call.schedule.updates_late for call in step.calls if call.phase is Phase.FORWARD]
    assert late == [True, False]


@pytest.mark.slow
def test_an_update_of_several_ops_is_late_as_one_op_is():
    """They are one row of the step."""
    fused, by_ops = (with_late_step(traced(make), CHUNK) for make in (adamw, adamw_by_foreach))
    assert by_ops is not None
    assert fused is not None
    assert len(by_ops.forwards) == len(fused.forwards) > 0


def test_a_step_of_too_many_chunks_is_planned_without(monkeypatch):
    monkeypatch.setattr(late_step, "MOST_CHUNKS", 3)
    assert with_late_step(traced(), CHUNK) is None


def test_nothing_is_late_where_optimizers_take_turns():
    step = traced()
    assert with_late_step(replace(step, calls=(*step.calls, *step.calls)), CHUNK) is None


def test_a_parameter_that_something_else_reads_before_is_not_late():
    """The update would be computed for that already."""
    step = traced()
    forward = step.calls[0]
    other = replace(forward, schedule=replace(forward.schedule, trains=False, serial=-7))
    assert with_late_step(replace(step, calls=(other, *step.calls)), CHUNK) is None


@pytest.mark.parametrize(
    ("kinds", "writes", "may"),
    [
        ("pgss", "1011", True),
        ("pg", "10", True),
        ("pgs", "100", True),
        ("ps", "11", False),  # no gradient: an average of weights, say
        ("pgs", "111", True),  # a gradient that is unscaled on the way
        ("pg", "11", True),
        ("pg", "01", False),  # clipping
        ("ppg", "110", False),
        ("ppg", "100", False),
        ("pgc", "101", True),  # a low-precision copy is written along
        ("pgcc", "1011", False),
        ("pgc", "100", False),
        ("g", "1", False),
    ],
)
def test_an_update_writes_one_parameter_and_reads_its_gradient(kinds, writes, may):
    of = {"p": EntryKind.PARAM, "g": EntryKind.GRAD, "s": EntryKind.STATE, "c": EntryKind.COPY}
    (_, row), *_ = [
        (call, row)
        for call in traced().calls
        if call.phase is Phase.STEP
        for row in call.schedule.rows
    ]
    column = row.columns[0]
    columns = tuple(replace(column, writes=flag == "1") for flag in writes)
    assert is_update([of[kind] for kind in kinds], replace(row, columns=columns)) is may


# What a step with them is


def arrangements():
    """Tight and roomy, with nothing, every second entry or the states on the device."""
    step = with_late_step(traced(), CHUNK).step
    refs = list(step.facts)
    states = [ref for ref in refs if step.facts[ref].kind is EntryKind.STATE]
    for window in (MiB, 4 * MiB):
        for resident in ([], refs[::2], states):
            yield step, dict.fromkeys(resident, "device"), window


@pytest.mark.parametrize("case", sampled(range(6), 1, 3, 5))
def test_each_arrangement_is_proven_and_moves_each_operand_once(case):
    step, homes, window = list(arrangements())[case]
    made = arranged(
        step, {**dict.fromkeys(step.facts, "disk"), **homes}, ArenaShare(window, 8, CHUNK)
    )
    (forward,) = (call for call in made.calls if call.schedule.updates_late)
    verify_schedule(forward.schedule)
    late = with_late_step(traced(), CHUNK).forwards
    stored: dict[EntryRef, int] = {}
    for x in forward.schedule.instructions:
        if isinstance(x, Store):
            ref = forward.entries[x.entry]
            stored[ref] = stored.get(ref, 0) + x.nbytes
    for ref in stored:
        assert stored[ref] == step.facts[ref].nbytes
    assert {ref for ref in late if homes.get(ref) != "device"} <= stored.keys()
    dropped = {
        forward.entries[x.entry] for x in forward.schedule.instructions if isinstance(x, Drop)
    }
    assert dropped == {ref.gradient for ref in late}


@dataclass
class Read:
    """A parameter that a region of the forward reads: its bytes, and how many of them updates had
    written by then, and had sent home; in how many parts."""

    name: str
    nbytes: int
    written: int
    sent: int
    parts: int


def reads_of_updated(forward: StepCall) -> Iterator[Read]:
    lies: dict[Register, Wait] = {}
    written, sent = set[Slot](), set[Slot]()
    for x in forward.schedule.instructions:
        if isinstance(x, Wait):
            lies[x.register] = x
        elif isinstance(x, Store):
            sent.add(x.slot)
        elif isinstance(x, Free):
            written.discard(x.slot)
            sent.discard(x.slot)
        elif isinstance(x, Run):
            waits = [lies[r] for r in x.inputs if r in lies]
            if x.late is not None:
                written |= {wait.slot for wait in waits}
                continue
            for wait in waits:
                inside, home = (
                    [s for s in some if wait.slot.address <= s.address < wait.slot.end]
                    for some in (written, sent)
                )
                both = (sum(s.nbytes for s in some) for some in (inside, home))
                yield Read(wait.name, wait.slot.nbytes, *both, len(inside))


def test_an_update_comes_before_the_first_region_that_reads_its_parameter():
    (forward,) = (c for c in with_late_step(traced(), CHUNK).step.calls if c.schedule.updates_late)
    reads = [r for r in reads_of_updated(forward) if r.name in named_late(forward)]
    assert {r.name for r in reads} == named_late(forward)
    assert all(r.written == r.nbytes for r in reads)


def test_what_an_update_has_written_is_sent_before_others_read_it():
    """Chunk by chunk: each is a part of what is read then."""
    step = with_late_step(traced(), CHUNK).step
    homes = dict.fromkeys(step.facts, "host")
    made = arranged(step, homes, ArenaShare(4 * MiB, 8, CHUNK))
    (forward,) = (call for call in made.calls if call.schedule.updates_late)
    reads = [r for r in reads_of_updated(forward) if r.name in named_late(forward)]
    assert reads
    assert all(r.sent == r.nbytes for r in reads)
    assert any(r.parts > 1 for r in reads)


def test_a_part_comes_with_the_other_operands_of_its_chunk():
    """And so not before most chunks that come first: nothing waits for a whole parameter."""
    program = with_late_step(traced(), CHUNK).step.calls[0].schedule.program
    program = schedule_prefetch(with_late_updates(replace(program, budget_bytes=MiB), MiB), 8)
    parts = [v for v in program.values if v.part_of is not None]
    wholes = {v.register: v for v in program.values if v.in_parts}
    assert len(parts) > len(wholes)
    for part in parts:
        beside = [v.start for v in program.slotted if v.first == part.first]
        assert part.start == max(wholes[part.part_of].start, min(beside))
    assert any(part.start > wholes[part.part_of].start for part in parts)


def test_a_part_with_nothing_beside_it_comes_with_the_whole():
    """All else rests on the device: the slot of the whole is there, so waiting gains nothing."""
    program = with_late_step(traced(), CHUNK).step.calls[0].schedule.program
    program = with_late_updates(replace(program, budget_bytes=MiB), MiB)
    whole = {v.entry for v in program.values if v.in_parts}
    others = frozenset(v.entry for v in program.values if v.entry not in whole)
    program = schedule_prefetch(apply_placement(program, others, frozenset()), 8)
    wholes = {v.register: v for v in program.values if v.in_parts}
    alone = [
        part
        for part in program.values
        if part.part_of is not None
        and not any(v.first == part.first for v in program.slotted if v.part_of is None)
    ]
    assert alone
    assert all(part.start == wholes[part.part_of].start for part in alone)


def named_late(forward) -> set[str]:
    return {run.region.text for run in updates(forward.schedule)}


def test_chunks_are_small_where_room_is():
    step = with_late_step(traced(), GiB).step
    counts = []
    for window in (MiB, 8 * MiB):
        made = arranged(step, dict.fromkeys(step.facts, "disk"), ArenaShare(window, 8, GiB))
        counts.append(len(updates(made.calls[0].schedule)))
    assert counts[0] > counts[1]


def test_chunks_are_large_where_the_device_asks_for_it_and_room_is():
    """Of a window, a chunk takes a sixteenth by itself, and a quarter where that pays."""
    counts = {}
    for least in (LEAST_PACED_BYTES, 16 * MiB):
        step = with_late_step(traced(), GiB, least_bytes=least).step
        for window in (MiB, 4 * MiB, 64 * MiB):
            made = arranged(step, dict.fromkeys(step.facts, "disk"), ArenaShare(window, 8, GiB))
            counts[least, window] = len(updates(made.calls[0].schedule))
    assert counts[16 * MiB, 4 * MiB] < counts[LEAST_PACED_BYTES, 4 * MiB]
    assert counts[16 * MiB, MiB] > counts[16 * MiB, 4 * MiB], "no more than a quarter of the window"
    assert counts[16 * MiB, 64 * MiB] == counts[LEAST_PACED_BYTES, 64 * MiB]


def test_what_no_chunk_fits_is_refused():
    step = with_late_step(traced(), CHUNK).step
    with pytest.raises(BudgetExceeded):
        arranged(step, dict.fromkeys(step.facts, "disk"), ArenaShare(100 * KiB, 8, CHUNK))


@pytest.mark.parametrize("late", [False, True])
def test_what_is_wider_than_a_window_cannot_pass_it(late):
    """With its update it is wider by a chunk of the other operands."""
    step = with_late_step(traced(), CHUNK).step if late else traced()
    counts = []
    for window in (128 * KiB, 300 * KiB, 320 * KiB, 512 * KiB, MiB):
        wide = wider_than(step, window)
        counts.append(len(wide))
        homes = {ref: "device" if ref in wide else "host" for ref in step.facts}
        arena = ArenaShare(window, 8, CHUNK)
        for ref in wide:
            with pytest.raises(BudgetExceeded):
                arranged(step, {**homes, ref: "host"}, arena)
    arranged(step, homes, arena)  # in the last
    assert counts == ([4, 4, 4, 2, 0] if late else [4, 3, 2, 0, 0])


# Placed


def test_what_late_updates_write_hides_behind_backward_as_far_as_the_ring_holds_it():
    """So much less is promised, and the step is placed as before."""
    step, ring, rates = with_all_late(traced(), CHUNK), 64 * KiB, {"disk_write": 1e6}
    links = {name: Link(name, rates.get(name, 1e12)) for name in machine(1.0).links}
    slow, tiers = replace(machine(1.0), links=links), {"device": 0, "host": 0, "disk": GiB}
    # What is left of the optimizer's step, of small parameters, was told so before.
    left = sum(x.written_bytes for c in step.calls if c.phase is Phase.STEP for x in c.uses())
    hidden = lane_bytes(ring) + min(lane_bytes(ring), left)
    for backward_s, hidden_s in ((100.0, hidden / 1e6), (0.0, 0.0)):
        at_once, behind = (
            place(step, slow, Room(tiers, ring_bytes=nbytes), {Phase.BACKWARD: backward_s})
            for nbytes in (0, ring)
        )
        assert behind.homes == at_once.homes
        for seconds in ("least_seconds", "rounded_seconds"):
            less_s = getattr(at_once, seconds) - getattr(behind, seconds)
            assert less_s == pytest.approx(hidden_s, rel=1e-3, abs=1e-5)


# Planned and bounded


def machine(rate: float) -> Machine:
    links = {name: Link(name, rate) for name in ("h2d", "d2h", "disk_read", "disk_write")}
    return Machine("one rate", {}, links, Compute({"float32": 2e9}, 1e12))


def room(device: int, **more: int) -> Room:
    return Room({"device": device, "host": GiB}, **more)


def planned(
    step: StepTrace,
    costs: Costs,
    where: Room,
    commits: float | None = None,
    plain: StepPlan | None = None,
) -> tuple[StepPlan, StepPlan]:
    """The plan of the step as it is, and the faster of it and one with late updates.

    plain  the former, where it was made already
    """

    def seconds(made, homes):
        return step_seconds(made, costs, homes)

    def plan(given, kept, windows, below_s=inf):
        if given is step and windows is None and plain is not None:
            return plain
        compute = demand_of(given, costs.region_seconds).phases_s
        arena = ArenaShare(0, 8, CHUNK)
        return plan_step(given, costs.machine, where, arena, compute, seconds, wanted=windows)

    plain = plan(step, frozenset(), None)
    return plain, plan_late_or_not(
        step, plan, frozenset(), where, CHUNK, seconds, commit_bytes_per_s=commits
    )


@pytest.fixture(scope="module")
def fast() -> tuple[Costs, StepPlan, StepPlan]:
    """Where late updates pay: the costs, and both plans."""
    costs = Costs(machine(1e9), TransferModes(asynchronous=True))
    return costs, *planned(traced(), costs, room(4 * MiB))


def test_a_plan_updates_late_where_that_is_faster(fast):
    step, (_, plain, best) = traced(), fast
    assert best.late
    assert best.late_s is None
    assert best.seconds < plain.seconds
    again = as_planned(step, best)
    assert named(step, with_late_step(step, CHUNK, best.late).forwards) == named(step, best.late)
    assert [c.schedule.updates_late for c in again.calls] == [
        c.schedule.updates_late for c in best.step.calls
    ]


def test_a_plan_tells_what_late_updates_would_take_where_they_do_not_pay(fast):
    """Links are so fast that nothing waits for them."""
    costs = replace(fast[0], machine=machine(1e15))
    plain, best = planned(traced(), costs, room(4 * MiB))
    assert best == replace(plain, late_s=best.late_s)
    assert best.late_s > plain.seconds / LATE_PAYS
    assert summary(best, 0).count(f"a step would take {best.late_s:.3g} s") == 1
    assert "would take" not in summary(fast[2], 0)


@pytest.mark.parametrize(("device", "tried"), [(4 * MiB, True), (MiB, False)])
def test_late_updates_are_tried_in_a_window_that_weights_do_not_pass(fast, device, tried):
    """Where there is room for all of these beside it."""
    step, (costs, plain, _) = traced(), fast
    asked = []

    def plan(given, kept, windows, below_s=inf):
        pinned = {ref for ref, fact in given.facts.items() if fact.pinned}
        asked.append((pinned, windows))
        return replace(plain, seconds=plain.seconds / 2 if pinned else plain.seconds)

    def seconds(made, homes):
        return step_seconds(made, costs, homes)

    found = plan_late_or_not(step, plan, frozenset(), room(device), CHUNK, seconds)
    window = device // SMALL_WINDOW_PART
    wide = wider_than(with_late_step(step, CHUNK).step, window)
    expected = [(wide, [window])] if tried else []
    assert [(pinned, windows) for pinned, windows in asked if pinned] == expected
    assert (found.seconds == plain.seconds / 2) is tried


@pytest.mark.slow
def test_what_a_commit_writes_of_gradients_is_weighed_against_what_late_updates_save(fast):
    """They are inputs of updates that are still to come, and do not lie on disk here."""
    step, (costs, plain, _) = traced(), fast
    _, quick = planned(step, costs, room(4 * MiB), 1e12, plain)
    assert quick.late
    gradients = sum(step.facts[ref.gradient].nbytes for ref in quick.late)
    saved = plain.seconds - quick.seconds
    _, slow = planned(step, costs, room(4 * MiB), gradients / (2 * saved), plain)
    assert len(slow.late) < len(quick.late)


@pytest.mark.slow
def test_what_is_committed_either_way_is_not_held_against_late_updates(fast):
    """Weights and states that rest off the disk are, whether their updates are late or not."""
    step, (costs, plain, free) = traced(), fast
    gradients = sum(step.facts[ref.gradient].nbytes for ref in free.late)
    saved = plain.seconds - free.seconds
    _, found = planned(step, costs, room(4 * MiB), 4 * gradients / saved, plain)
    assert found.late


@pytest.mark.parametrize("device", [4 * MiB, 5 * MiB // 4])
def test_no_arrangement_with_late_updates_is_tried_twice(fast, device, monkeypatch):
    """In the smaller room the search for late updates finds the placement of the step without."""
    costs, plain, _ = fast
    plain = plain if device == 4 * MiB else None
    late, make = [], step_plan._planned

    def noted(*given):
        plan = make(*given)
        if any(call.schedule.updates_late for call in plan.step.calls):
            rows = (x for call in plan.step.calls for x in call.schedule.effects)
            late.append(tuple((x.kind, x.nbytes, x.takes, x.gives_back, x.home) for x in rows))
        return plan

    monkeypatch.setattr(step_plan, "_planned", noted)
    _, best = planned(traced(), costs, room(device), plain=plain)
    assert best.late
    assert len(set(late)) == len(late) > 1


def test_what_rests_on_the_device_is_updated_late_too_unless_its_gradients_cannot_stay(
    fast, monkeypatch
):
    step, (costs, plain, _) = traced(), fast
    every = with_late_step(step, CHUNK).forwards
    moving = step_plan._moving(step, every, plain.placement, reach=False)
    assert 0 < len(moving) < len(every)
    monkeypatch.setattr(step_plan, "_windows_beside", lambda *given: [])
    monkeypatch.setattr(step_plan, "_with_wide_pinned", lambda *given: None)
    monkeypatch.setattr(step_plan, "LATE_PAYS", 0.5)  # which are late, not whether
    _, best = planned(step, costs, room(4 * MiB), plain=plain)
    assert set(best.late) == set(every)
    answers = iter([False, True])
    monkeypatch.setattr(step_plan, "can_stay", lambda *given: next(answers))
    _, best = planned(step, costs, room(4 * MiB), plain=plain)
    assert set(best.late) == set(moving)


@pytest.mark.parametrize("rest", [0, 1, 2])
def test_a_window_is_tried_beside_which_wide_entries_leave_nothing_idle(fast, rest):
    late, (_, plain, _) = with_all_late(traced(), CHUNK), fast
    sizes = [aligned(fact.nbytes) for fact in late.facts.values() if fact.kind in PLACED]
    widest, small = max(sizes), sum(size for size in sizes if size <= SMALL_BYTES)
    homes = dict.fromkeys(late.facts, "device")  # with which a forward needs next to nothing
    least = step_plan._needed(late, homes, 0)
    whole = small + least + rest * widest + aligned(widest // 2)
    assert whole <= WIDE_PART * widest
    expected = {whole - small - rest * widest}
    assert step_plan._beside_whole_entries(late, homes, whole) == expected
    there = replace(plain, placement=replace(plain.placement, homes=homes))
    assert expected <= set(step_plan._windows_beside(late, there, whole, 0))
    assert not step_plan._beside_whole_entries(late, homes, small + least - 1)
    assert not step_plan._beside_whole_entries(late, homes, WIDE_PART * widest + 1)


def test_no_window_is_tried_in_which_a_forward_is_mostly_chunks(monkeypatch):
    """Where weights rest on the device, all that a forward needs is room for the least chunks."""
    costs = Costs(machine(1e9), TransferModes(asynchronous=True))
    make, windows = step_plan._planned, []

    def noted(step, placement, arena, *how):
        if any(call.schedule.updates_late for call in step.calls):
            windows.append(arena.window_bytes)
        return make(step, placement, arena, *how)

    monkeypatch.setattr(step_plan, "_planned", noted)
    device = 5 * MiB
    plain, _ = planned(traced(), costs, room(device))
    late = with_late_step(traced(), CHUNK).step
    assert step_plan._needed(late, plain.placement.homes, 1) < LEAST_WINDOW
    assert windows
    assert min(windows) >= LEAST_WINDOW < device // 8


def test_where_nothing_moves_nothing_is_late():
    costs = Costs(machine(1e9), TransferModes(asynchronous=True))
    _, best = planned(traced(), costs, room(64 * MiB))
    assert not best.late


@pytest.mark.parametrize(
    ("rate", "device", "reach"), crossed([1e8, 1e9, 1e10], [2 * MiB, 3 * MiB], [False, True])
)
def test_the_bound_of_late_updates_is_no_higher_and_below_both_plans(rate, device, reach):
    costs, step = Costs(machine(rate), TransferModes(asynchronous=True)), traced()
    where = room(device, reach=reach)
    late = with_late_step(step, CHUNK).step
    least = [
        bound(demand_of(s, costs.region_seconds, together=True), costs.machine.links, where).seconds
        for s in (step, late)
    ]
    assert least[1] <= least[0] * (1 + 1e-6)
    for plan in planned(step, costs, where):
        assert least[1] <= plan.seconds * (1 + 1e-6)


def narrow(step: StepTrace, number: int) -> StepTrace:
    """The step, with the weight of row `number` read in bf16, and a copy in that dtype written
    along with it."""
    (call,) = (c for c in step.calls if c.phase is Phase.STEP)
    row = call.schedule.rows[number]
    refs = [call.entries[column.entry] for column in row.columns]
    (ref,) = (r for r in refs if not r.is_gradient and step.facts[r].kind is EntryKind.PARAM)
    copy = EntryRef(max(r.number for r in step.facts) + 1)
    wide = step.facts[ref]
    facts = {
        **step.facts,
        copy: replace(
            wide,
            ref=copy,
            name=f"{wide.name} in bfloat16",
            kind=EntryKind.COPY,
            nbytes=wide.nbytes // 2,
        ),
    }
    made = Column(EntryIndex(len(call.entries)), 0, BF16, True, False, "copy", blank=True)
    rows = [*call.schedule.rows]
    rows[number] = replace(row, columns=(*row.columns, made))
    stepping = replace(
        call, schedule=replace(call.schedule, rows=tuple(rows)), entries=(*call.entries, copy)
    )
    calls = []
    for other in step.calls:
        if other is call:
            calls.append(stepping)
            continue
        program = other.schedule.program
        values = [
            v._replace(
                cast=Cast(torch.float32, BF16),
                layout=replace(v.layout, dtype=BF16),
                begin=v.begin // 2,
                nbytes=v.nbytes // 2,
            )
            if other.entries[v.entry] == ref
            else v
            for v in program.values
        ]
        schedule = replace(other.schedule, program=program.with_values(values))
        calls.append(replace(other, schedule=schedule))
    return replace(step, calls=tuple(calls), facts=facts)


def test_a_copy_that_the_forward_reads_is_written_by_the_update_and_not_fetched_for_it():
    step = traced()
    plain = with_late_step(step, CHUNK)
    (call,) = (c for c in step.calls if c.phase is Phase.STEP)
    number = next(
        n
        for n, row in enumerate(call.schedule.rows)
        if {call.entries[c.entry] for c in row.columns} & plain.forwards.keys()
    )
    late = with_late_step(narrow(step, number), CHUNK)
    assert late.forwards.keys() == plain.forwards.keys()
    (forward, *_) = late.step.calls
    assert not forward.schedule.casts
    copy = max(late.step.facts, key=lambda ref: ref.number)
    stored = {
        forward.entries[x.entry] for x in forward.schedule.instructions if isinstance(x, Store)
    }
    assert copy in stored
    verify_schedule(forward.schedule)


def test_a_forward_reads_what_its_updates_read():
    late = with_late_step(traced(), CHUNK).step
    (forward, *_) = late.calls
    brought = {forward.entry_of(x.home) for x in forward.schedule.effects if x.lane is IN}
    facts = traced().facts
    for ref in with_late_step(traced(), CHUNK).forwards:
        assert {ref, ref.gradient} <= brought
    assert {facts[ref].kind for ref in brought} == {
        EntryKind.PARAM,
        EntryKind.GRAD,
        EntryKind.STATE,
    }
