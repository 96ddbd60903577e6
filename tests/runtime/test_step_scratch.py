"""What activations leave of the device serves an optimizer's step, and only that."""

from dataclasses import replace
from itertools import product

import planned_runs
import pytest
import torch
from planned_runs import (
    LITTLE_HOST,
    VOCABULARY,
    WEIGHT_BYTES,
    adamw,
    gpt,
    loss_of,
    made_on,
    same,
    values,
)
from sampled import sampled_rows

import zcompile
from zcompile.errors import DeviceTooSmall, ScheduleInvalid
from zcompile.frontend.backend import zinf
from zcompile.frontend.offload import session_behind
from zcompile.ir.handover import handover
from zcompile.ir.optimizer_step import (
    CHUNK_ELEMENTS,
    LEAST_PACED_BYTES,
    Column,
    Row,
    StepRoom,
    lower_step,
    paced_bytes,
)
from zcompile.ir.schedule import EntryIndex
from zcompile.ir.types import ALIGNMENT, Phase
from zcompile.ir.units import Bytes, KiB, MiB
from zcompile.planner import step_plan
from zcompile.runtime.device.arena import StepScratch
from zcompile.verify.schedule import verify_schedule

STEPS = 6
THROTTLE = {"h2d": "200MB/s", "d2h": "200MB/s"}
AT = 64 * KiB


def many(number):
    """So many tokens that activations take many times what gradients do."""
    generator = torch.Generator().manual_seed(number)
    tokens = torch.randint(0, VOCABULARY, (16, 33), device="cpu", generator=generator)
    return tokens.to(torch.get_default_device())


def train(forward, optimizer, begin, end, batches=1):
    planned_runs.train(None, forward, optimizer, begin, end, batches, clip=False, ids=many)


def held_bytes(device="cpu"):
    model = zcompile.offload(gpt().cpu(), device=device, device_memory="64MiB", host_memory="64MiB")
    compiled = torch.compile(model, backend=zinf)
    train(compiled, adamw(model), 0, 1)
    return session_behind(model).split.held_bytes


@pytest.fixture(autouse=True)
def planned(monkeypatch):
    """A plan without a step scratch is not tried: whether one pays is a question of measured
    times."""
    monkeypatch.setattr(step_plan, "_refined", lambda *_: ())


@pytest.fixture(scope="module")
def budget():
    """Of a device whose arena holds the weights, and that only."""
    return held_bytes() + WEIGHT_BYTES


@pytest.fixture(scope="module")
def expected():
    model = gpt()
    train(model, adamw(model), 0, STEPS)
    return values(model)


def begun(budget, steps, make=adamw, batches=1, **fields):
    torch._dynamo.reset()
    fields = {"host_memory": "64MiB", "throttle": THROTTLE, **fields}
    model = zcompile.offload(gpt(), device="cpu", device_memory=Bytes(budget), **fields)
    compiled = torch.compile(model, backend="zinf")
    optimizer = make(model)
    train(compiled, optimizer, 0, steps, batches)
    return model, compiled, optimizer


def step_schedules(session):
    return [made for made in session.steps.values() if made.phase is Phase.STEP]


def test_a_step_streams_beside_the_arena_and_takes_what_was_predicted(budget, expected):
    model, compiled, optimizer = begun(budget, 4)
    session = session_behind(model)
    zcompile.stats(model, reset=True)
    train(compiled, optimizer, 4, STEPS)
    (made,) = step_schedules(session)
    assert made.scratch_at >= session.arena.budget_bytes
    assert all(fetch.slot.address >= made.scratch_at for fetch in made.fetches())
    stats = zcompile.stats(model)
    peak, predicted = stats["peak"], stats["predicted"]["peak"]
    assert peak == {**peak, **predicted}
    assert peak["device"] == stats["planned_peak"]["device"] > session.arena.budget_bytes
    assert peak["together"] <= budget
    assert same(model, expected)


@pytest.mark.slow
def test_whatever_plan_is_fastest_the_bits_are_those_of_eager(budget, expected, monkeypatch):
    monkeypatch.undo()
    model, *_ = begun(budget, STEPS)
    assert zcompile.stats(model)["peak"]["together"] <= budget
    assert same(model, expected)


def foreach(model):
    return torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=True)


def momentum(model):
    return torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9, foreach=False)


@pytest.mark.parametrize(
    ("make", "batches"),
    sampled_rows(product((adamw, foreach, momentum), (1, 2)), (foreach, 2)),
)
def test_every_optimizer_steps_there_with_the_bits_of_eager(budget, tmp_path, make, batches):
    """A list op after the other, or parameter by parameter; states and gradients on disk too."""
    plain = gpt()
    train(plain, make(plain), 0, STEPS, batches)
    disk = {"disk_read": "50MB/s", "disk_write": "50MB/s"}
    model, compiled, optimizer = begun(
        budget,
        4,
        make,
        batches,
        host_memory=LITTLE_HOST,
        disk=tmp_path,
        throttle={**THROTTLE, **disk},
    )
    assert session_behind(model).arena.scratch.pieces
    train(compiled, optimizer, 4, STEPS, batches)
    assert same(model, values(plain))


@pytest.mark.gpu
def test_on_a_gpu_too_the_bits_are_those_of_eager_there():
    with made_on("cuda"):
        plain = gpt().cuda()
        train(plain, adamw(plain), 0, STEPS)
        torch._dynamo.reset()
        room = {"host_memory": "64MiB", "device_memory": held_bytes("cuda") + WEIGHT_BYTES}
        torch._dynamo.reset()
        model = zcompile.offload(gpt().cpu(), device="cuda", **room)
        train(torch.compile(model, backend=zinf), adamw(model), 0, STEPS)
        for mine, theirs in zip(values(model), plain.parameters(), strict=True):
            assert torch.equal(mine.cpu(), theirs.cpu())
        assert zcompile.stats(model)["peak"]["together"] <= room["device_memory"]


@pytest.mark.slow
def test_graphs_have_all_of_it_back(budget, monkeypatch):
    """Also where much of it is still on its way home."""
    model, compiled, optimizer = begun(budget, 4, throttle=dict.fromkeys(THROTTLE, "5MB/s"))
    session = session_behind(model)
    scratch = session.arena.scratch
    assert scratch.pieces
    seen = []
    enter = session.executor._make_room

    def make_room(nbytes, schedule):
        enter(nbytes, schedule)
        pending = [session._pending_reads.of(memory) for _, memory in lately]
        seen.append(not scratch.pieces and not any(pending))

    monkeypatch.setattr(session.executor, "_make_room", make_room)
    for number in (4, 5):
        lately = scratch.pieces
        train(compiled, optimizer, number, number + 1)
    assert seen == [True] * 4


@pytest.mark.slow
def test_what_a_forward_without_backward_holds_is_left_alone(budget, expected):
    """Its values fill the device until its backward comes: the step goes through the window."""
    model, compiled, optimizer = begun(budget, 4)
    session = session_behind(model)
    loss_of(compiled, many(40)).backward()
    kept = loss_of(compiled, many(990))
    assert session.live_memory.nbytes > session.scratch_use.free_bytes
    zcompile.stats(model, reset=True)
    optimizer.step()
    assert session.step_room.begin == 0
    assert zcompile.stats(model)["peak"]["together"] <= budget
    assert any(made.scratch_at == 0 for made in step_schedules(session))
    del kept
    optimizer.zero_grad()
    train(compiled, optimizer, 5, STEPS)
    assert session.step_room.begin
    assert same(model, expected)


@pytest.mark.slow
def test_a_step_that_broke_off_leaves_nothing_behind(budget, monkeypatch):
    model, compiled, optimizer = begun(budget, 4)
    session = session_behind(model)
    loss_of(compiled, many(40)).backward()
    put = session.put

    def fail(*args, **how):
        raise OSError("the bus is on strike")

    monkeypatch.setattr(session, "put", fail)
    with pytest.raises(OSError, match="on strike"):
        optimizer.step()
    monkeypatch.setattr(session, "put", put)
    optimizer.zero_grad()
    train(compiled, optimizer, 5, STEPS)
    session.executor.foresight.abandon()
    assert session.arena.used_bytes == session.homes.device.planned_bytes


def made_at(begin: int, nbytes: int = MiB):
    columns = tuple(Column(EntryIndex(n), 0, torch.float32, n < 1, True, f"e{n}") for n in range(2))
    rows = [Row(8 * CHUNK_ELEMENTS, columns, (), lambda first, last, values: None)]
    return lower_step("step", rows, 0, 2, StepRoom(begin, nbytes))


def test_nothing_is_handed_over_into_it():
    assert handover(made_at(0), made_at(0)).starts
    assert not handover(made_at(0), made_at(AT)).starts


def test_a_slot_before_it_is_not_proven():
    made = made_at(AT)
    verify_schedule(made)
    with pytest.raises(ScheduleInvalid, match="before the step scratch"):
        verify_schedule(replace(made, scratch_at=AT + ALIGNMENT))


def test_the_same_chunks_lie_elsewhere():
    here, there = made_at(0), made_at(AT)
    moved = [(f.slot.address + AT, f.slot.nbytes, f.begin) for f in here.fetches()]
    assert moved == [(f.slot.address, f.slot.nbytes, f.begin) for f in there.fetches()]
    assert (there.arena_bytes, there.budget_bytes) == (here.arena_bytes + AT, MiB + AT)
    assert there.peak_bytes == here.peak_bytes


def test_without_a_fetch_there_is_no_scratch():
    column = Column(EntryIndex(0), 0, torch.float32, True, True, "w", resident=True)
    row = Row(CHUNK_ELEMENTS, (column,), (), lambda first, last, values: None)
    assert lower_step("step", [row], 0, 1, StepRoom(AT, MiB)).scratch_at == 0


@pytest.mark.slow
def test_a_device_without_the_memory_leaves_the_step_to_the_window(budget, expected, monkeypatch):
    model, compiled, optimizer = begun(budget, 4)
    session = session_behind(model)

    def refuse(scratch):
        raise DeviceTooSmall("cpu", 1, 0)

    monkeypatch.setattr(StepScratch, "open", refuse)
    train(compiled, optimizer, 4, STEPS)
    assert session.step_room.begin == 0
    assert same(model, expected)


@pytest.mark.slow
def test_waiting_for_it_is_a_stall_and_no_gap(budget):
    """What the host waits for before a forward is told, and not taken for the user's own time."""
    model, *_ = begun(budget, 4, throttle=dict.fromkeys(THROTTLE, "5MB/s"))
    session = session_behind(model)
    clocks = session.executor.clocks
    stalled, aside = session.meter.seconds()["stall"], clocks._aside_s
    session.scratch_use.leave()
    waited = session.meter.seconds()["stall"] - stalled
    assert waited > 0
    assert clocks._aside_s - aside == pytest.approx(waited), "that is no part of a gap"


@pytest.mark.parametrize(
    ("links", "most", "chunk"),
    [
        ((22e6, 187e6), 16 * MiB, 440_000),
        ((6e9, 50e9), 32 * MiB, 32 * MiB),
        ((1e3,), 16 * MiB, LEAST_PACED_BYTES),
        ((1e3,), 4 * KiB, 4 * KiB),
        ((), 16 * MiB, 16 * MiB),
    ],
)
def test_a_chunk_suits_the_slowest_link(links, most, chunk):
    assert paced_bytes(links, most) == chunk
