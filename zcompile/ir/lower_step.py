"""The step schedule: elementwise updates of entries, streamed through the device by chunks.

An optimizer step reads every state once and writes most of them. Whole tensors need not fit: a
row (one parameter with its gradient and states) is cut into chunks of elements, and while chunk k
computes, chunk k+1 arrives and chunk k-1 goes home. What rests where compute can reach it is
updated in place. Chunks that come from afar are spread among the others, so that every link is busy
all the time and none for all of the arena.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from zcompile.errors import BudgetExceeded
from zcompile.ir.schedule import (
    SERIALS,
    Borrow,
    Fetch,
    Free,
    Instruction,
    Register,
    Run,
    Schedule,
    Slot,
    Store,
    Ticket,
    Wait,
)
from zcompile.ir.specs import Layout, Phase, aligned
from zcompile.ir.step_chunks import CHUNK_ELEMENTS, StepRoom, chunk_elements, set_bytes
from zcompile.ir.step_rows import (
    ChunkFunction,
    Column,
    Row,
    chunk_region,
    joint_region,
    spread,
    together,
)


def lower_step(
    name: str,
    rows: Sequence[Row],
    inputs: int,
    entries: int,
    room: StepRoom,
) -> Schedule:
    """The schedule that computes `rows`, the chunks of each in order.

    inputs   how many registers the call fills
    entries  how many entries the call names
    room     where chunks lie: in the arena, or in the annex, which begins beyond it
    raises   BudgetExceeded, if not even the smallest chunk of a row fits
    """
    depth, sizes = _sizes(rows, room, name)
    lane_bytes = max(set_bytes(row, n) for row, n in zip(rows, sizes, strict=True))
    builder = _Builder(name, inputs, depth, lane_bytes, room.begin)
    for group in together(spread(rows, sizes)):
        if len(group) > 1:
            builder.add_joint([row for row, _, _ in group])
        else:
            builder.add(*group[0])
    builder.finish()
    return Schedule(
        phase=Phase.STEP,
        name=name,
        instructions=tuple(builder.instructions),
        handles=(),
        inputs=inputs,
        constants=(),
        outputs=(),
        registers=builder.registers,
        sinks=(),
        serial=next(SERIALS),
        arena_bytes=builder.arena_bytes,
        peak_bytes=builder.peak_bytes,
        budget_bytes=room.begin + room.nbytes,
        names=_names(rows, entries),
        rows=tuple(rows),
        annex_at=room.begin if builder.arena_bytes else 0,
    )


def _names(rows: Sequence[Row], entries: int) -> dict[int, str]:
    names = {int(c.entry): c.name for row in rows for c in row.columns}
    return {index: names.get(index, "") for index in range(entries)}


def _sizes(rows: Sequence[Row], room: StepRoom, name: str) -> tuple[int, list[int]]:
    """How many chunks are there at once, and the elements of a chunk of each row."""
    for depth in range(room.depth, 0, -1):
        share = room.nbytes // depth
        sizes = [chunk_elements(row, share, room.chunk_bytes) for row in rows]
        if None not in sizes:
            return depth, [n or 1 for n in sizes]
    smallest = [min(row.numel, CHUNK_ELEMENTS) for row in rows]
    row, elements = max(zip(rows, smallest, strict=True), key=lambda pair: set_bytes(*pair))
    least = set_bytes(row, elements)
    raise BudgetExceeded(
        "device",
        room.nbytes,
        least,
        f"one chunk of {name}",
        [(c.name, aligned(elements * c.dtype.itemsize)) for c in row.columns if not c.resident],
        f"give zcompile.offload device_memory={least} or more",
    )


@dataclass(frozen=True)
class _Chunk:
    """A chunk that was fetched and waits to be computed; no fetch for what is resident."""

    row: Row
    first: int
    last: int
    fetches: tuple[Fetch | None, ...]


@dataclass(frozen=True)
class _Joint:
    """Rows that are computed at once where they rest."""

    rows: tuple[Row, ...]


class _Builder:
    """Emits chunks as a software pipeline over `depth` lanes of the arena, taken in turn."""

    def __init__(self, name: str, inputs: int, depth: int, lane_bytes: int, begin: int) -> None:
        self._name, self._begin = name, begin
        self._depth = depth
        self._lane_bytes = lane_bytes
        self._chunks = 0
        self.instructions: list[Instruction] = []
        self.registers = inputs
        self.arena_bytes = self.peak_bytes = 0
        self._tickets = 0
        self._taken = 0
        self._waiting: list[_Chunk | _Joint] = []
        self._busy: dict[int, list[tuple[int, int, tuple[Ticket, ...]]]] = {}
        """Lane -> (begin, end, tickets) of what its bytes last served."""

    def add(self, row: Row, first: int, last: int) -> None:
        self._make_room()
        self._waiting.append(self._fetch(row, first, last))

    def add_joint(self, rows: Sequence[Row]) -> None:
        self._make_room()
        self._waiting.append(_Joint(tuple(rows)))

    def _make_room(self) -> None:
        if len(self._waiting) >= max(1, self._depth - 1):
            self._compute(self._waiting.pop(0))

    def finish(self) -> None:
        while self._waiting:
            self._compute(self._waiting.pop(0))

    def _ticket(self) -> Ticket:
        self._tickets += 1
        return Ticket(self._tickets - 1)

    def _fetch(self, row: Row, first: int, last: int) -> _Chunk:
        address = self._begin + self._chunks % self._depth * self._lane_bytes
        self._chunks += any(not column.resident for column in row.columns)
        fetches: list[Fetch | None] = []
        for column in row.columns:
            if column.resident:
                fetches.append(None)
                continue
            width = column.dtype.itemsize
            slot = Slot(address, aligned((last - first) * width))
            address = slot.end
            fetch = Fetch(
                column.entry,
                column.begin + first * width,
                (last - first) * width,
                slot,
                self._ticket(),
                self._after(slot),
                column.name,
                column.lasting,
            )
            fetches.append(fetch)
            self.instructions.append(fetch)
            self._taken += slot.nbytes
            self.arena_bytes = max(self.arena_bytes, slot.end)
        self.peak_bytes = max(self.peak_bytes, self._taken)
        return _Chunk(row, first, last, tuple(fetches))

    def _after(self, slot: Slot) -> tuple[Ticket, ...]:
        """What must be over before `slot` is overwritten: the last computes and stores over it."""
        tickets: dict[Ticket, None] = {}
        kept, low, high, lane = [], slot.address, slot.end, self._lane(slot)
        for begin, end, busy in self._busy.get(lane, ()):
            if begin < high and low < end:
                tickets |= dict.fromkeys(busy)
            if not (low <= begin and end <= high):
                kept.append((begin, end, busy))
        self._busy[lane] = kept
        return tuple(tickets)

    def _lane(self, slot: Slot) -> int:
        lane = (slot.address - self._begin) // max(1, self._lane_bytes)
        assert slot.end <= self._begin + (lane + 1) * self._lane_bytes, "a slot lies in one lane"
        return lane

    def _compute(self, chunk: _Chunk | _Joint) -> None:
        if isinstance(chunk, _Joint):
            self._compute_joint(chunk.rows)
            return
        registers = [self._operand(chunk, n) for n in range(len(chunk.fetches))]
        done = self._ticket()
        region = chunk_region(self._name, chunk.row, chunk.first, chunk.last)
        self.instructions.append(
            Run(region, (*registers, *chunk.row.plains), (), ticket=done, names=())
        )
        for column, fetch, register in zip(
            chunk.row.columns, chunk.fetches, registers, strict=True
        ):
            if fetch is not None:
                self._leave(column, fetch, register, done)

    def _compute_joint(self, rows: Sequence[Row]) -> None:
        inputs: list[Register] = []
        for row in rows:
            inputs += [self._borrow(column, 0, row.numel) for column in row.columns]
            inputs += row.plains
        region = joint_region(self._name, rows)
        self.instructions.append(Run(region, tuple(inputs), (), ticket=self._ticket()))

    def _operand(self, chunk: _Chunk, index: int) -> Register:
        """The register that holds a column of the chunk, once it is there."""
        column, fetch = chunk.row.columns[index], chunk.fetches[index]
        if fetch is None:
            return self._borrow(column, chunk.first, chunk.last)
        layout = Layout((chunk.last - chunk.first,), (1,), 0, column.dtype)
        register = self._register()
        self.instructions.append(Wait(fetch.ticket, fetch.slot, layout, register, column.name))
        return register

    def _borrow(self, column: Column, first: int, last: int) -> Register:
        layout = Layout((last - first,), (1,), 0, column.dtype)
        begin, register = column.begin + first * column.dtype.itemsize, self._register()
        self.instructions.append(
            Borrow(column.entry, begin, layout, register, column.writes, column.name)
        )
        return register

    def _register(self) -> Register:
        self.registers += 1
        return Register(self.registers - 1)

    def _leave(self, column: Column, fetch: Fetch, register: Register, done: Ticket) -> None:
        """After the compute: what was written goes home, and the slot is given back."""
        busy: tuple[Ticket, ...] = (done,)
        if column.writes:
            ticket = self._ticket()
            busy = (done, ticket)
            self.instructions.append(
                Store(
                    column.entry,
                    fetch.begin,
                    fetch.nbytes,
                    fetch.slot,
                    ticket,
                    (done,),
                    column.name,
                )
            )
        slot = fetch.slot
        self._busy.setdefault(self._lane(slot), []).append((slot.address, slot.end, busy))
        self.instructions.append(Free(fetch.slot, register, column.name))
        self._taken -= fetch.slot.nbytes
