"""Regions between which nothing moves are one: the same compute, the same bytes, proven safe."""

import functools
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from joint import schedules_of
from offloaded import SMALL
from planned_runs import WEIGHT_BYTES, adamw, same
from sampled import sampled
from small_models import GPT, SMALL_MODELS, UNALIKE, small
from staying_runs import STEPS, begun, held_bytes, plainly_trained, train

import zcompile
from zcompile.frontend.offload import session_behind
from zcompile.ir import printer
from zcompile.ir.schedule import EntryIndex, Reduce, RegionProgram, Run, Schedule
from zcompile.ir.types import LiveBytes, Phase
from zcompile.memory.step_footprint import StepFootprint, device_peak, held_peak
from zcompile.passes import arrange as arranging
from zcompile.passes.arrange import arrange, rearrange
from zcompile.passes.join_regions import join_regions
from zcompile.runtime import executor
from zcompile.verify.schedule import verify_schedule

NONE: frozenset[EntryIndex] = frozenset()
ROOMY = {"device": "cpu", "device_memory": "64MiB", "host_memory": "64MiB"}


@functools.cache
def schedules(name: str) -> tuple[Schedule, ...]:
    """Of forward and backward of a small model, as the passes made them."""
    module, inputs = small(name)
    torch._dynamo.reset()
    zcompile.offload(module, **SMALL)
    with schedules_of() as made:
        out = torch.compile(module, backend="zinf")(*inputs)
        (out if isinstance(out, torch.Tensor) else out[0]).sum().backward()
    return tuple(s for s in made if s.program is not None)


def everything(schedule: Schedule) -> frozenset[EntryIndex]:
    return frozenset(v.entry for v in schedule.program.values)


def may_stay(schedule: Schedule) -> frozenset[EntryIndex]:
    """Entries whose one gradient is whole, and in memory of its own."""
    levels = schedule.level_at
    return frozenset(
        x.home.entry
        for at, x in enumerate(schedule.effects)
        if x.is_gradient and levels[at].alone and x.home.entry in schedule.lone_gradients
    )


def placements(schedule: Schedule) -> Iterator[tuple[frozenset, frozenset]]:
    """What rests on the device, and which gradients stay there."""
    resident, stay = everything(schedule), may_stay(schedule)
    some, last = frozenset(sorted(resident)[::2]), frozenset(sorted(stay)[: len(stay) // 2])
    yield resident, stay
    yield resident, last
    yield some, stay
    yield some, last
    yield resident, NONE
    yield NONE, stay
    yield NONE, NONE


def apart(schedule: Schedule, resident, stay) -> Schedule:
    """`schedule` arranged without joining."""
    assert schedule.program is not None
    made = arrange(schedule.program, schedule.budget_bytes, 4, resident, stay)
    return replace(made, holds=schedule.holds)


def together(schedule: Schedule, resident, stay) -> Schedule:
    return rearrange(schedule, schedule.budget_bytes, 4, resident, stay)


def live_after_leaving(schedule: Schedule) -> list[tuple[str, int]]:
    """Live bytes after each departure that is not a gradient that stays, and at the end."""
    walk, found = StepFootprint(), []
    walk.begin(schedule)
    for x in schedule.effects:
        if x.changes_live:
            walk.rise()
            if x.is_gradient:
                walk.leave(x)
            if x.region is None and not (x.is_gradient and x.home.in_place):
                found.append((x.name, walk.now))
    return [*found, ("the end", walk.now)]


@pytest.mark.parametrize("name", sampled(SMALL_MODELS, *UNALIKE))
def test_every_joined_schedule_is_proven_and_takes_the_same_bytes(name):
    for schedule in schedules(name):
        for resident, stay in placements(schedule):
            made, parts = together(schedule, resident, stay), apart(schedule, resident, stay)
            verify_schedule(made)
            assert len(made.levels) == sum(x.changes_live for x in made.effects)
            assert held_peak(made) == held_peak(parts)
            assert device_peak(made) == device_peak(parts)
            assert made.peak_bytes == parts.peak_bytes
            assert live_after_leaving(made) == live_after_leaving(parts)
            assert (
                rearrange(made, schedule.budget_bytes, 4).instructions
                == together(schedule, NONE, NONE).instructions
            )


@pytest.mark.parametrize("name", sampled(SMALL_MODELS, *UNALIKE))
def test_a_phase_is_one_region_if_nothing_moves(name):
    for schedule in schedules(name):
        made = together(schedule, everything(schedule), may_stay(schedule))
        moves = [
            n
            for n, leaving in enumerate(made.program.departures)
            if not all(isinstance(x, Reduce) and x.stays for x in leaving)
        ]
        inner = {n for n in moves if 0 < n < len(made.program.regions)}
        copied = {v.entry for v in made.program.values if v.cast is not None}
        if not copied:
            assert len(made.regions()) <= 1 + len(inner)


@pytest.mark.parametrize("name", sampled(SMALL_MODELS, *UNALIKE))
def test_the_regions_keep_their_order_and_read_and_make_what_they_did(name):
    for schedule in schedules(name):
        for resident, stay in placements(schedule):
            made, parts = together(schedule, resident, stay), apart(schedule, resident, stay)
            assert [p for r in made.regions() for p in r.parts or (r,)] == parts.regions()
            read = {r for x in parts.instructions if isinstance(x, Run) for r in x.inputs}
            there = {r for x in parts.instructions if isinstance(x, Run) for r in x.outputs}
            assert {r for x in runs(made) for r in x.inputs} | there >= read
            sent = [x.value for x in made.instructions if isinstance(x, Reduce)]
            assert sent == [x.value for x in parts.instructions if isinstance(x, Reduce)]


def runs(schedule: Schedule) -> list[Run]:
    return [x for x in schedule.instructions if isinstance(x, Run)]


@pytest.mark.parametrize(
    "name", sampled(SMALL_MODELS, "transformer block", "module called twice", "bf16 autocast")
)
def test_a_joined_region_computes_the_bits_of_its_parts(name, monkeypatch):
    """Each time one runs in training, its parts have run on copies of its inputs before."""
    parts_of: dict[tuple, list[Run]] = {}
    compared = 0

    def join(program: RegionProgram, levels) -> RegionProgram:
        made, regions = join_regions(program, levels), iter(program.regions)
        for run in made.regions:
            parts = [next(regions) for _ in run.region.parts or (run,)]
            parts_of[run.region, run.outputs] = parts
        return made

    def compute(run, values, targets=()):
        nonlocal compared
        if not run.region.parts:
            return executor_compute(run, values, targets)
        random = torch.get_rng_state()
        copies = {r: copied(values[r]) for r in run.inputs}
        for part in parts_of[run.region, run.outputs]:
            results = part.region.call([copies[r] for r in part.inputs])
            copies |= zip(part.outputs, results, strict=True)
        torch.set_rng_state(random)
        executor_compute(run, values, targets)
        for register in (*run.inputs, *run.outputs):
            if register not in run.drops:
                assert equal(values[register], copies[register])
                compared += 1
        for register in run.drops:
            assert values[register] is None

    executor_compute = executor.compute
    monkeypatch.setattr(arranging, "join_regions", join)
    monkeypatch.setattr(executor, "compute", compute)
    module, inputs = small(name)
    torch._dynamo.reset()
    model = zcompile.offload(module, **ROOMY)
    compiled, optimizer = torch.compile(model, backend="zinf"), adamw(model)
    for _ in range(4):
        out = compiled(*inputs)
        (out if isinstance(out, torch.Tensor) else out[0]).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    plan = session_behind(model).controller.plan
    calls = () if plan is None else plan.step.calls
    assert compared or not any(r.parts for call in calls for r in call.schedule.regions())


def copied(value):
    if isinstance(value, torch.Tensor):
        return value.detach().clone(memory_format=torch.preserve_format)
    return tuple(map(copied, value)) if isinstance(value, list | tuple) else value


def equal(one, other) -> bool:
    if isinstance(one, torch.Tensor):
        return one.stride() == other.stride() and torch.equal(
            one.reshape(-1).view(torch.uint8), other.reshape(-1).view(torch.uint8)
        )
    if isinstance(one, list | tuple):
        return all(map(equal, one, other))
    return one == other


def test_equal_blocks_share_a_region():
    """Between one weight that is fetched and the same one of the next block lies an equal block."""
    with torch.random.fork_rng():
        model = zcompile.offload(GPT(4, 32, 64), **SMALL)
    torch._dynamo.reset()
    with schedules_of() as made:
        torch.compile(model, backend="zinf")(torch.randint(0, 64, (2, 8)))
    (forward, *_) = made
    moved = {v.entry for v in forward.program.values if v.name.endswith("qkv.weight")}
    joined = together(forward, everything(forward) - moved, NONE)
    keys = [run.region.key for run in runs(joined) if run.region.parts]
    assert len(moved) == 4
    assert len(keys) == 2 * len(moved), "before and behind the region that reads what is fetched"
    assert len({*keys[1:-1]}) == 2


@pytest.mark.slow
def test_a_planned_run_walks_one_region_per_phase_and_holds_what_was_predicted():
    model, compiled, optimizer = begun(held_bytes() + 8 * WEIGHT_BYTES, 4)
    session = session_behind(model)
    session.executor.recorder.keep_walks(True)
    zcompile.stats(model, reset=True)
    train(compiled, optimizer, 4, STEPS)
    stats = zcompile.stats(model)
    assert same(model, plainly_trained())
    walked = session.executor.recorder.last_walked
    for call in walked.calls:
        assert len(call.schedule.regions()) == 1, call.phase
        if call.phase is not Phase.STEP:
            assert call.schedule.regions()[0].parts
    assert stats["peak"] == {**stats["peak"], **stats["predicted"]["peak"]}
    assert sum(stats["bytes"].values()) == 0


def test_the_text_of_a_joined_schedule(golden):
    made = [together(s, everything(s), may_stay(s)) for s in schedules("mlp")]
    assert "\n".join(printer.schedule_text(s) for s in made) == golden


def test_levels_without_any_known_are_none():
    for schedule in schedules("mlp"):
        blank = replace(schedule, holds=replace(schedule.holds, levels=()))
        made = together(blank, everything(schedule), may_stay(schedule))
        assert made.level_order
        assert made.levels == ()
        assert set(made.level_at.values()) <= {LiveBytes()}
