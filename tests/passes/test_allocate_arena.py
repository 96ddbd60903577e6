"""Every fetched value has an address; the two phases share the arena."""

from dataclasses import replace

import pytest
from programs import blocks, least_window, programs
from sampled import sampled
from small_models import SMALL_MODELS, UNALIKE

from zcompile.errors import BudgetExceeded, more_device_memory
from zcompile.ir.schedule import RegionProgram
from zcompile.ir.types import ALIGNMENT
from zcompile.memory.allocator import live_peak
from zcompile.passes.allocate_arena import allocate_arena
from zcompile.passes.arrange import arrange
from zcompile.passes.schedule_prefetch import schedule_prefetch


def allocated(program: RegionProgram, budget: int | None, lead: int = 8) -> RegionProgram:
    return allocate_arena(schedule_prefetch(replace(program, budget_bytes=budget), lead))


def end_of(program: RegionProgram) -> int:
    return max(value.slot.end for value in program.fetched)


def test_addresses_of_a_two_layer_model(golden):
    rows = (
        f"{program.outline.phase.value:<10}{v.name:<12} [{v.slot.address}, {v.slot.end})"
        for program in programs("mlp")
        for v in allocated(program, None).fetched
    )
    assert "\n".join(rows) + "\n" == golden


@pytest.mark.parametrize("model", sampled(SMALL_MODELS, *UNALIKE))
def test_what_is_alive_together_lies_apart(model):
    for program in programs(model):
        values = allocated(program, None).fetched
        for i, one in enumerate(values):
            assert one.slot.address % ALIGNMENT == 0
            assert one.slot.nbytes >= one.nbytes
            for other in values[:i]:
                together = one.start <= other.last and other.start <= one.last
                assert not (together and one.slot.overlaps(other.slot))


def test_forward_and_backward_use_the_same_bytes():
    for program in programs("mlp"):
        assert min(v.slot.address for v in allocated(program, None).fetched) == 0


@pytest.mark.parametrize("model", sampled(SMALL_MODELS, *UNALIKE))
def test_in_the_smallest_arena_everything_has_an_address(model):
    for program in programs(model):
        least = least_window(program)
        made = allocated(program, least)
        assert live_peak(blocks(made)) <= end_of(made) <= least


def test_an_arena_one_byte_too_small_is_refused_and_the_sentence_says_what_is_needed():
    for program in programs("mlp"):
        least = least_window(program)
        with pytest.raises(BudgetExceeded, match=more_device_memory(least)):
            arrange(program, least - 1, 8)
        assert arrange(program, least, 8).arena_bytes <= least


@pytest.mark.slow
def test_what_is_read_in_place_takes_no_address():
    for program in programs("gpt"):
        resident = frozenset(v.entry for v in program.values[::2])
        made = arrange(program, least_window(program), 8, resident).program
        assert [v.slot is None for v in made.values] == [v.entry in resident for v in made.values]
