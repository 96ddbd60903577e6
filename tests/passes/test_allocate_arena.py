"""Every gathered parameter has an address; the two phases share the arena; the peak is proven."""

from dataclasses import replace

import pytest
from joint import Joint, captured, least_budget
from small_models import SMALL_MODELS

from zcompile.config import Config
from zcompile.errors import BudgetExceeded
from zcompile.ir import ops
from zcompile.ir.types import ALIGNMENT
from zcompile.memory.allocator import Block, live_peak
from zcompile.memory.footprint import Storage, footprint
from zcompile.passes.allocate_arena import AllocateArena
from zcompile.passes.pipeline import pipeline

PASSES = pipeline(Config(device="cpu"))


def gathered(joint: Joint) -> list[Storage]:
    held = footprint(joint.graph, joint.plan.params, slots=True)
    return [s for s in held.values if s.maker.target in (ops.gather, ops.fetch)]


def test_addresses_of_a_two_layer_model(golden):
    plan = captured("mlp").through(*PASSES).plan
    rows = (f"{name:<24} [{s.address}, {s.end})" for name, s in plan.slots.items())
    assert "\n".join(rows) + "\n" == golden


@pytest.mark.parametrize("model", SMALL_MODELS)
def test_what_is_alive_together_lies_apart(model):
    joint = captured(model).through(*PASSES)
    ranges = [(s, joint.plan.slots[s.maker.name]) for s in gathered(joint)]
    for i, (one, slot) in enumerate(ranges):
        assert slot.address % ALIGNMENT == 0
        assert slot.nbytes >= one.nbytes
        for other, taken in ranges[:i]:
            together = one.first <= other.last and other.first <= one.last
            assert not (together and slot.overlaps(taken))


def test_forward_and_backward_use_the_same_bytes():
    plan = captured("mlp").through(*PASSES).plan
    assert min(slot.address for name, slot in plan.slots.items() if name.endswith("_1")) == 0


@pytest.mark.parametrize("model", SMALL_MODELS)
def test_the_arena_is_hardly_larger_than_what_is_alive(model, record_property):
    joint = captured(model)
    for budget in (None, least_budget(joint)):
        packed = joint.copy(budget_bytes=budget).through(*PASSES)
        ranges = gathered(packed)
        alive = live_peak([Block(r.first, r.last, r.nbytes) for r in ranges])
        ratio = packed.plan.arena_bytes / alive
        record_property("packed over alive", round(ratio, 3))
        assert 1 <= ratio <= 1.02


def test_a_budget_one_byte_too_small_is_refused_and_the_sentence_says_what_is_needed():
    joint = captured("mlp").through(*PASSES[:7])
    needed = AllocateArena().rewrite(joint.graph, joint.plan).arena_bytes
    with pytest.raises(BudgetExceeded, match=f"device_memory={needed} or more"):
        AllocateArena().rewrite(joint.graph, replace(joint.plan, budget_bytes=needed - 1))
    plan = AllocateArena().rewrite(joint.graph, replace(joint.plan, budget_bytes=needed))
    assert plan.arena_bytes == needed
