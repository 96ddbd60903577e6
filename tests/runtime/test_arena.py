"""The device arena: slots at planned addresses, gathers where there is room, both counted."""

import gc

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from marking import Marked, Marking

from zcompile.errors import BudgetExceeded, SlotsOverlap
from zcompile.ir.optimizer_step import StepRoom
from zcompile.ir.types import Layout
from zcompile.ir.units import KiB, MiB
from zcompile.runtime.device.arena import ALIGNMENT, Arena, StepScratch, lies_in
from zcompile.runtime.device.cpu import CpuDevice
from zcompile.runtime.meter import Gauge, Meter


@pytest.fixture(scope="module")
def device():
    device = CpuDevice({}, Meter(), lambda error: None)
    yield device
    device.close()


def arena_of(device, nbytes):
    return Arena(device, nbytes, Gauge(), lambda: None)


def address(arena, tensor):
    return tensor.data_ptr() - arena.slot(0, 1).data_ptr()


def test_slots_are_views_of_one_memory(device):
    arena = arena_of(device, 64 * KiB)
    arena.slot(1024, 512).fill_(7)
    assert arena.slot(1000, 40).tolist() == [0] * 24 + [7] * 16


def test_memory_that_inference_needed_first_is_written_by_training(device):
    with torch.inference_mode():
        memory = arena_of(device, 64 * KiB).slot(0, 64)
        taken = device.owning_view(memory, lambda _: None)
    for made in (memory, taken):
        made.add_(1)
        assert made.tolist() == [1] * 64
        made.zero_()


def test_a_view_that_inference_met_first_is_written_by_training(device):
    """As an evaluation right after the second step, in which the step is planned, does."""
    arena, bias = arena_of(device, 64 * KiB), Layout((8,), (1,), 0, torch.float32)
    with torch.inference_mode():
        arena.view(1024, bias)
    arena.view(1024, bias).add_(1)
    assert arena.slot(1024, 32).view(torch.float32).tolist() == [1] * 8


def test_a_mode_of_the_user_leaves_none_of_its_tensors_in_the_arena(device):
    arena, floats = arena_of(device, 64 * KiB), Layout((8,), (1,), 0, torch.float32)
    with Marking():
        assert type(torch.ones(8)[:4]) is Marked
        made = arena.slot(0, 64), arena.view(1024, floats)
    assert [*map(type, made)] == [torch.Tensor] * 2
    assert arena.slot(0, 64) is made[0]
    assert arena.view(1024, floats) is made[1]


def test_memory_of_another_size_has_other_views(device):
    """Also where a schedule had been lent them: they would lie in memory that is gone."""
    arena, floats = arena_of(device, 64 * KiB), Layout((8,), (1,), 0, torch.float32)
    view = arena.view(1024, floats)
    arena.views_of(7, 1)[0] = ("a borrow", "an extent", view)
    arena.set_outside_bytes(0)
    assert arena.views_of(7, 1) == [("a borrow", "an extent", view)], "nothing has changed"
    arena.set_outside_bytes(16 * KiB)
    assert arena.views_of(7, 1) == [None]
    assert not arena.holds(view)
    assert arena.holds(arena.view(1024, floats))


def test_a_slot_is_the_same_object_each_time_and_lies_in_the_memory_there_is(device):
    arena = arena_of(device, 64 * KiB)
    with torch.inference_mode():
        slot = arena.slot(1024, 512)
    assert arena.slot(1024, 512) is slot
    slot.fill_(7)  # by training
    arena.set_outside_bytes(16 * KiB)
    assert not arena.holds(slot)
    assert arena.slot(1024, 512).tolist() == [0] * 512


def test_a_slot_is_refused_where_a_gather_lies_that_came_after_others_had_left(device):
    arena = arena_of(device, 64 * KiB)
    first = arena.take(4 * KiB, "the first")
    at = address(arena, first)
    with pytest.raises(BudgetExceeded, match="the first"):
        arena.take_slot(at, 4 * KiB)
    del first
    arena.take_slot(at, 4 * KiB)
    arena.give_slot(at, 4 * KiB)
    second = arena.take(4 * KiB, "the second")
    arena.take_slot(0, 4 * KiB)
    with pytest.raises(BudgetExceeded, match="the second"):
        arena.take_slot(address(arena, second), 4 * KiB)


def test_a_slot_beyond_the_budget_is_refused(device):
    with pytest.raises(BudgetExceeded, match="raise device_memory"):
        arena_of(device, 4 * KiB).slot(4 * KiB, 1)


def test_the_peak_is_what_was_in_use_at_once(device):
    arena = arena_of(device, 64 * KiB)
    arena.take_slot(0, 1000)
    gathered = arena.take(10_000, "w")
    arena.give_slot(0, 1000)
    del gathered
    arena.take_slot(0, 3000)
    assert arena.used_bytes == 3000
    assert arena.peak_bytes == 1000 + 20 * ALIGNMENT


def test_overlapping_slots_are_a_defect(device):
    arena = arena_of(device, 64 * KiB)
    arena.take_slot(1024, 1000, "a")
    for begin, nbytes in ((1536, 8), (1000, 25), (2000, 100), (0, 4096), (1024, 1000)):
        with pytest.raises(
            SlotsOverlap, match=r"'b' .* 'a' still holds \[1024, 2024\).* report it"
        ):
            arena.take_slot(begin, nbytes, "b")
    arena.take_slot(0, 1024, "before")
    arena.take_slot(2024, 8, "after")
    assert arena.used_bytes == 1024 + 1000 + 8


def test_gathers_come_from_the_top_and_return_when_their_storage_dies(device):
    arena = arena_of(device, 8 * KiB)
    first = arena.take(700, "first")
    second = arena.take(512, "second")
    assert address(arena, first) == 8 * KiB - 1024
    assert address(arena, second) == 8 * KiB - 1536
    view = first.view(torch.float32)[3:]
    del first
    assert arena.used_bytes == 1536
    del view
    assert arena.used_bytes == 512
    assert address(arena, arena.take(1000, "third")) == 8 * KiB - 1024


def test_a_gathered_tensor_has_a_storage_of_its_own(device):
    tensor = arena_of(device, 8 * KiB).take(700, "w")
    assert tensor.untyped_storage().nbytes() == 700
    assert tensor.storage_offset() == 0


def test_a_gather_that_does_not_fit_says_what_is_alive_and_what_to_do(device):
    arena = arena_of(device, 8 * KiB)
    kept = arena.take(6 * KiB, "layers.0.weight")
    with pytest.raises(BudgetExceeded) as caught:
        arena.take(4 * KiB, "layers.1.weight")
    text = str(caught.value)
    assert "gathering 'layers.1.weight' needs 10.0 KiB on the device, the budget is 8.00" in text
    assert "6.00 KiB  layers.0.weight" in text
    assert "give zcompile.offload device_memory='10240B' or more" in text
    assert kept.numel()


def test_room_in_pieces_is_told_as_such_and_what_would_do_does(device):
    def crowd(budget):
        arena = arena_of(device, budget)
        low = [arena.take(3 * KiB, "a"), arena.take(1 * KiB, "b"), arena.take(4 * KiB, "c")]
        return arena, low[1]

    arena, kept = crowd(8 * KiB)
    with pytest.raises(BudgetExceeded) as caught:
        arena.take(5 * KiB, "w")
    text = str(caught.value)
    assert "needs 9.00 KiB on the device, the budget is 8.00" in text
    assert "7.00 KiB  free, in pieces of 4.00 KiB or less" in text
    assert "device_memory='9216B' or more" in text
    more, also = crowd(9 * KiB)
    assert more.take(5 * KiB, "w").numel()
    assert kept.numel() == also.numel()


def test_a_slot_under_a_gather_names_the_holder(device):
    arena = arena_of(device, 8 * KiB)
    kept = arena.take(6 * KiB, "head.weight")
    with pytest.raises(BudgetExceeded, match=r"'head\.weight' overlaps"):
        arena.take_slot(0, 4 * KiB)
    del kept
    arena.take_slot(0, 4 * KiB)


def test_garbage_is_collected_before_a_gather_is_refused(device):
    arena = arena_of(device, 8 * KiB)
    cycle = [arena.take(6 * KiB, "w")]
    cycle.append(cycle)
    gc.disable()
    try:
        del cycle
        assert arena.take(6 * KiB, "v").numel() == 6 * KiB
    finally:
        gc.enable()


def test_room_that_was_held_is_held_again_once_it_is_let_go_of(device):
    arena = arena_of(device, 8 * KiB)
    begin = arena.reserve(8 * KiB, 0, "a")
    assert begin == 0
    assert arena.reserve(1, 0, "b") is None
    arena.unreserve(begin)
    assert arena.reserve(8 * KiB, 0, "b") == 0


def test_memory_is_exchanged_when_nothing_lies_in_it_and_not_before(device):
    arena = arena_of(device, 16 * MiB)

    def whole():
        return arena.slot(0, 1).untyped_storage().nbytes()

    arena.slot(0, 8).fill_(7)
    before = whole()
    arena.take_slot(0, 8)
    arena.set_outside_bytes(8 * MiB)
    assert arena.slot(0, 8).tolist() == [7] * 8
    assert whole() == before
    kept = arena.take(8, "w").fill_(9)
    arena.give_slot(0, 8)
    arena.set_outside_bytes(9 * MiB)
    assert kept.tolist() == [9] * 8
    assert whole() == before
    del kept
    arena.set_outside_bytes(10 * MiB)
    assert whole() < before - 7 * MiB


def test_memory_of_the_old_size_goes_back_to_the_system(device, monkeypatch):
    """On a card torch's allocator would keep it, beside that of the new size."""
    asked = []
    arena = arena_of(device, 16 * MiB)
    arena.slot(0, 8)
    monkeypatch.setattr(device, "give_back_unused", lambda: asked.append(arena._memory))
    arena.take_slot(0, 8)
    arena.set_outside_bytes(8 * MiB)
    assert not asked, "something lies in it"
    arena.give_slot(0, 8)
    arena.set_outside_bytes(9 * MiB)
    assert asked == [None]


def test_a_step_scratch_that_grows_has_what_activations_left_in_pieces(device, monkeypatch):
    """Not each time, since to ask the system for memory stops a card."""
    asked = []
    monkeypatch.setattr(device, "give_back_unused", lambda: asked.append(True))
    scratch = StepScratch(device)
    scratch.plan(StepRoom(0, MiB))
    for end, times in ((4 * KiB, 1), (4 * KiB, 1), (8 * KiB, 2), (KiB, 2)):
        scratch.need([(0, end)])
        scratch.open()
        scratch.close()
        assert len(asked) == times


def test_an_empty_value_needs_no_room(device):
    arena = arena_of(device, 1 * KiB)
    kept = arena.take(1024, "w")
    assert arena.take(0, "empty").numel() == 0
    assert kept.numel() == 1024


@settings(deadline=None, max_examples=60)
@given(
    st.lists(
        st.tuples(st.sampled_from(["take", "drop", "slot", "free"]), st.integers(0, 20 * KiB)),
        max_size=40,
    )
)
def test_holders_never_share_a_byte_and_every_byte_comes_back(device, steps):
    arena = arena_of(device, 32 * KiB)
    gathers: dict[int, torch.Tensor] = {}
    slots: list[tuple[int, int]] = []
    for verb, n in steps:
        ranges = [
            *((a, a + t.numel()) for a, t in gathers.items()),
            *((a, a + s) for a, s in slots),
        ]
        if verb == "take" and n:
            try:
                tensor = arena.take(n, "t")
            except BudgetExceeded:
                continue
            at = address(arena, tensor)
            assert at % ALIGNMENT == 0
            assert all(at + n <= a or b <= at for a, b in ranges)
            gathers[at] = tensor
            del tensor  # what is dropped below must really die
        elif verb == "drop" and gathers:
            del gathers[sorted(gathers)[n % len(gathers)]]
        elif verb == "slot" and all(n + 256 <= a or b <= n for a, b in slot_ranges(slots)):
            try:
                arena.take_slot(n, 256)
            except BudgetExceeded:
                assert any(
                    n < a + t.numel() + ALIGNMENT and a < n + 256 for a, t in gathers.items()
                )
            else:
                assert all(n + 256 <= a or b <= n for a, b in ranges)
                slots.append((n, 256))
        elif verb == "free" and slots:
            arena.give_slot(*slots.pop(n % len(slots)))
    gathers.clear()
    assert arena.used_bytes == 256 * len(slots)
    for slot in slots:
        arena.give_slot(*slot)
    assert arena.take(32 * KiB, "all").numel() == 32 * KiB


def test_a_planned_slot_is_viewed_once_where_it_lies(device):
    """In the arena, and in the step scratch behind it as long as that is open."""
    arena, floats = arena_of(device, 64 * KiB), Layout((8,), (1,), 0, torch.float32)
    arena.scratch.plan(StepRoom(64 * KiB, MiB))
    assert arena.scratch.need([(64 * KiB, 2 * KiB)])
    arena.scratch.open()
    ((_, piece),) = arena.scratch.pieces
    for at, memory in ((KiB, arena.slot(0, 64 * KiB)), (65 * KiB, piece)):
        view = arena.slot_view(at, floats)
        view.fill_(at)
        assert arena.slot_view(at, floats) is view
        assert arena.slot(at, 32).view(torch.float32).tolist() == [at] * 8
        assert lies_in(view, memory)
    assert arena.slot_view(65 * KiB, Layout((4,), (2,), 0, torch.float32)).shape == (4,)
    held = arena.slot_view(65 * KiB, floats)
    arena.scratch.close()
    with pytest.raises(BudgetExceeded):
        arena.slot_view(65 * KiB, floats)
    arena.scratch.open()
    assert arena.slot_view(65 * KiB, floats) is not held
    arena.scratch.close()
    arena.slot_view(60 * KiB, floats)
    lives = arena.take(KiB, "a value, so that the memory stays")
    arena.set_outside_bytes(16 * KiB)
    with pytest.raises(BudgetExceeded):
        arena.slot_view(60 * KiB, floats)
    del lives


def slot_ranges(slots):
    return [(a, a + n) for a, n in slots]


def test_a_step_scratch_is_as_large_as_slots_need(device):
    at = 64 * KiB
    scratch = StepScratch(device)
    scratch.plan(StepRoom(at, MiB))
    assert scratch.need([(at, 4 * KiB)])
    assert not scratch.has(at, 1)
    scratch.open()
    scratch.slot(at + KiB, KiB).fill_(7)
    ((begin, memory),) = scratch.pieces
    assert (begin, memory.numel()) == (at, 4 * KiB)
    assert memory[KiB:].tolist() == [7] * KiB + [0] * 2 * KiB
    assert scratch.holds(scratch.slot(at, 1))
    assert not scratch.holds(torch.empty(1))
    assert not scratch.has(at - 1, 1)
    assert not scratch.has(at + 4 * KiB, 1)
    assert not scratch.need([(at, 8 * KiB)])
    scratch.close()
    scratch.open()
    assert scratch.slot(at + 7 * KiB, KiB).numel() == KiB
    scratch.close()
    assert not scratch.has(at, 1)


def test_slots_that_overlap_lie_in_one_piece_and_others_apart(device):
    """Pieces fit between what stays of a backward; and what lies between slots is not asked for."""
    scratch, asked = StepScratch(device), []
    scratch.plan(StepRoom(0, MiB))
    slots = [(0, 4), (4, 4), (16, 8), (20, 8), (24, 8), (64, 4), (60, 4), (0, 4)]
    assert scratch.need((a * KiB, n * KiB) for a, n in slots)
    scratch.open()
    ranges = [(begin // KiB, memory.numel() // KiB) for begin, memory in scratch.pieces]
    assert ranges == [(0, 4), (4, 4), (16, 16), (60, 4), (64, 4)]
    for number, (begin, nbytes) in enumerate(slots):
        assert scratch.has(begin * KiB, nbytes * KiB)
        slot = scratch.slot(begin * KiB, nbytes * KiB).fill_(number)
        assert scratch.holds(slot)
        asked.append(slot)
    assert [slot.unique().tolist() for slot in asked[:2]] == [[7], [1]]
    assert not scratch.has(0, 5 * KiB), "it would lie in two"
    assert not scratch.has(48 * KiB, KiB)
    assert scratch.need([(60 * KiB, KiB)])
    assert not scratch.need([(2 * KiB, 4 * KiB)]), "pieces become one"
    scratch.close()
    scratch.open()
    assert [begin // KiB for begin, _ in scratch.pieces] == [0, 16, 60, 64]
    scratch.close()


def test_a_scratch_knows_its_pieces_wherever_their_memory_lies(device, monkeypatch):
    whole = torch.zeros(64 * KiB, dtype=torch.uint8)
    order = [5, 1, 7, 3]
    memory = [whole[at * 8 * KiB :][: 4 * KiB] for at in order]
    monkeypatch.setattr(device, "allocate_each", lambda sizes: memory, raising=False)
    scratch = StepScratch(device)
    scratch.plan(StepRoom(0, MiB))
    assert scratch.need((n * 16 * KiB, 4 * KiB) for n in range(len(order)))
    assert not scratch.holds(memory[0])
    scratch.open()
    held = [at for at in range(16) if scratch.holds(whole[at * 4 * KiB :][:1])]
    assert held == [2 * at for at in sorted(order)]
    assert all(scratch.holds(piece[-1:]) for piece in memory)
    scratch.close()
    assert not scratch.holds(memory[0])
