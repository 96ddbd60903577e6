"""The schedules that are mutated: of every small model, of optimizers' steps, and of one of several
ranks, in tight rooms.

A model is compiled once; other budgets and what rests on the device are arranged from that.
"""

import functools
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
from dry_runs import SMALL
from joint import captured, catch, held_bytes, least_budget, trained_schedules
from moved import forced
from small_models import mlp, small
from torch import nn

import zcompile
from zcompile.errors import BudgetExceeded
from zcompile.frontend.dry_run.plan import terms_of, trace
from zcompile.ir.late_updates import LateRows
from zcompile.ir.optimizer_step import CHUNK_ELEMENTS, Column, Row, StepRoom, lower_step
from zcompile.ir.schedule import Borrow, EntryIndex, Fetch, Register, Schedule
from zcompile.ir.types import ALIGNMENT, Phase, aligned
from zcompile.ir.units import Bytes, KiB, MiB
from zcompile.machine.model import Link, with_ranks
from zcompile.passes.arrange import rearrange
from zcompile.passes.late_updates import reads_once

UNSEEN = "100GB/s"
"""A throttle that holds nobody up, and makes an optimizer's step move what rests on the host."""

OPTIMIZERS = {
    "sgd": (("w", True), ("grad", False)),
    "momentum": (("w", True), ("grad", False), ("momentum", True)),
    "adam": (("w", True), ("grad", False), ("mean", True), ("square", True)),
}
ARENA_BYTES = 8 * KiB
"""Before the step scratch."""
SIZES = (5, 1024 * 7 + 3, 1024 * 2)
"""Elements of the parameters of a step: less than a chunk, several of them, whole ones."""


def _nothing(first: int, last: int, values: Sequence[Any]) -> None:
    """Stands for the arithmetic."""


MOVED = ("transformer block, moved", "dropout, moved", "view in two places, moved")
"""Small models all of whose saved values are offloaded to the host."""

PARTS = "mlp, updated in parts"
"""A small model whose weights are updated late in several chunks each."""

TILED = ("mlp, tiled", "transformer block, tiled")
"""Those whose weights are cut into tiles of so few bytes that there are several of each."""
TILE_BYTES = 512


@functools.cache
def compiled(name: str) -> tuple[Schedule, ...]:
    """Those of one training step of a small model, as tight as they come; AdamW, clipped."""
    name, _, how = name.partition(", ")
    if how == "updated in parts":
        model, inputs = mlp(PARTS_WIDTH), (torch.randn(4, PARTS_WIDTH),)
        joint = catch(mlp(PARTS_WIDTH), *inputs)
    else:
        (model, inputs), joint = small(name), captured(name)
    largest = max(aligned(spec.nbytes) for spec in joint.plan.params.values())
    budget = max(least_budget(joint), held_bytes(joint) + 4 * largest)
    zcompile.offload(
        model,
        device="cpu",
        device_memory=Bytes(budget),
        host_memory="8MiB",
        tile_bytes=TILE_BYTES if how == "tiled" else None,
        throttle={"h2d": UNSEEN, "d2h": UNSEEN},
    )
    with forced("host") if how == "moved" else nullcontext():
        return tuple(trained_schedules(model, inputs))


def of_model(name: str) -> dict[str, Schedule]:
    """As compiled; with room for everything; with every second parameter on the device."""
    found: dict[str, Schedule] = {}
    for n, schedule in enumerate(compiled(name)):
        told = f"{schedule.phase.value} {n}"
        found[f"{told} tight"] = schedule
        if schedule.phase is Phase.STEP or not any(schedule.fetches()):
            continue
        found[f"{told} roomy"] = rearrange(schedule, MiB, 8)
        half = frozenset(EntryIndex(k) for k in range(0, len(schedule.handles), 2))
        found[f"{told} half resident"] = rearrange(schedule, schedule.budget_bytes, 8, half)
        if name in LATE and (late := with_late_updates(schedule)) is not None:
            found[f"{told} with late updates, half resident"] = rearrange(late, MiB, 2, half)
            if name == PARTS:
                found[f"{told} with late updates"] = rearrange(late, schedule.budget_bytes, 2)
    return found


LATE = ("mlp", PARTS, "transformer block")
"""Models that are mutated with late updates as well."""
PARTS_WIDTH = 24
"""Of `PARTS`: a weight has two chunks and a bit."""
MOST_LATE = 3
"""Parameters that a forward updates late: its schedule is long enough with these."""


OF_RANKS = "mlp, of ranks"
"""A small model of each of whose weights this rank holds a half, which it updates late in several
chunks."""
RANKS_WIDTH = 72
"""Its weights are just large enough to be divided."""
RANKS_CHUNK_BYTES = 16 * KiB


def of_ranks() -> dict[str, Schedule]:
    """A forward of the first of two ranks, with late updates of its shares: tight, and with room
    for everything. What rests on the device comes to be gathered as all else does."""
    two = with_ranks(
        replace(SMALL, links={**SMALL.links, "rank_to_rank": Link("rank_to_rank", 1e9)}), 2
    )
    model = nn.Sequential(*(layer for layer in mlp(RANKS_WIDTH)))
    for layer in model:
        layer.bias = None  # small entries are whole on each rank
    inputs = (torch.randn(4, RANKS_WIDTH),)
    step = trace(model, inputs, terms_of(zcompile.Config(device="cpu"), two)).step
    forward = next(call.schedule for call in step.calls if call.phase is Phase.FORWARD)
    late = with_late_updates(forward, RANKS_CHUNK_BYTES)
    assert late is not None
    return {
        "forward with late updates, tight": _tight(late),
        "forward with late updates, roomy": rearrange(late, MiB, 2),
    }


def _tight(schedule: Schedule) -> Schedule:
    """As it is arranged for little more than it needs: chunks grow with what there is."""
    budget = ALIGNMENT
    while True:
        try:
            return rearrange(schedule, budget, 2)
        except BudgetExceeded as error:
            budget = max(budget + ALIGNMENT, error.needed_bytes)


def with_late_updates(
    schedule: Schedule, chunk_bytes: int = CHUNK_ELEMENTS * torch.float32.itemsize
) -> Schedule | None:
    """A forward that updates its first parameters late, as Adam does; None of another call."""
    if schedule.phase is not Phase.FORWARD or not schedule.trains:
        return None
    late = LateRows(chunk_bytes=chunk_bytes)
    program, named = schedule.program, len(schedule.handles)
    for value in program.values:
        held = value.nbytes if value.share is None else value.share.nbytes
        numel = held // value.layout.dtype.itemsize
        columns = tuple(
            Column(EntryIndex(n), 0, torch.float32, writes, name != "grad", name)
            for n, (name, writes) in enumerate(OPTIMIZERS["adam"])
        )
        row = Row(numel, columns, (Register(0),), _nothing)
        if not reads_once(program, value.entry, row, columns[0]):
            continue
        of = [(value.entry, name) for name, _ in OPTIMIZERS["adam"]]
        call = [of[0] if n == value.entry else n for n in range(named)]
        late = late.with_rows("adam", [row], 1, of, call)
        if len(late.updates) == MOST_LATE:
            break
    return replace(schedule, program=replace(program, late=late)) if late.updates else None


def of_step(optimizer: str) -> dict[str, Schedule]:
    """Rows in one, two and three lanes of the arena, and in two beyond it, in a step scratch; all
    moving, states resident, weights."""
    found = {}
    for resident in ((), ("mean", "square", "momentum"), ("w",)):
        entry, rows = 0, []
        for numel in SIZES:
            columns = []
            for name, writes in OPTIMIZERS[optimizer]:
                columns.append(
                    Column(
                        EntryIndex(entry),
                        0,
                        torch.float32,
                        writes,
                        name != "grad",
                        name,
                        name in resident,
                    )
                )
                entry += 1
            rows.append(Row(numel, tuple(columns), (Register(0),), _nothing))
        least = _least(rows, entry)
        rooms = {f"{lanes} lanes": StepRoom(0, lanes * least) for lanes in (1, 2, 3)}
        rooms["2 lanes of a step scratch"] = StepRoom(ARENA_BYTES, 2 * least)
        for name, room in rooms.items():
            told = f"{name}, resident {'+'.join(resident) or 'nothing'}"
            found[told] = lower_step(optimizer, rows, 1, entry, room)
    return found


def _least(rows: Sequence[Row], entries: int) -> int:
    try:
        lower_step("step", rows, 1, entries, StepRoom(0, 1))
    except BudgetExceeded as error:
        return error.needed_bytes
    raise AssertionError("a step that moves nothing")


def moves(schedule: Schedule) -> bool:
    return any(isinstance(x, Fetch | Borrow) for x in schedule.instructions)
