"""Blocks over slices of tokens: their numbers within a tolerance, hidden values in slices only."""

import functools
import re

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from in_slices import PASSES, UNCUT, TokensInSlices
from joint import Joint, assert_same, catch, results
from sampled import crossed, sampled
from small_models import Block, batch_norm
from torch import Tensor, nn

from zcompile.errors import BudgetExceeded
from zcompile.ir import ops, printer
from zcompile.ir.graph import find
from zcompile.ir.units import KiB
from zcompile.memory.footprint import footprint
from zcompile.passes.base import Pass
from zcompile.passes.choose_tiles import ChooseTiles
from zcompile.passes.tile_tokens import TileTokens
from zcompile.passes.tile_tokens.regions import regions_of
from zcompile.passes.trial import Trial

WIDTH = 8
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 2**-6}
"""Largest difference in units of the largest number of a result. Gradients of weights are summed
slice by slice: some roundings of 6e-8 each. Under bf16 the part of each slice is rounded to 2^-9,
and products of fewer rows may come from another kernel, which rounds what follows anew."""
CONFIGURED = tuple(p for p in PASSES if p.name in (ChooseTiles.name, TileTokens.name))


class Mlp(nn.Module):
    """A norm, a product, a nonlinearity, a product, added to what came."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm, self.dropout = nn.LayerNorm(WIDTH), dropout
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        hidden = nn.functional.gelu(self.up(self.norm(x)))
        if self.dropout:
            hidden = nn.functional.dropout(hidden, self.dropout)
        return x + self.down(hidden)


class Gated(nn.Module):
    """As Llama has it: silu of one product times another."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(WIDTH)
        self.gate, self.up = (nn.Linear(WIDTH, 4 * WIDTH, bias=False) for _ in range(2))
        self.down = nn.Linear(4 * WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x)
        return self.down(nn.functional.silu(self.gate(x)) * self.up(x))


class Autocast(Mlp):
    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return super().forward(x)


MODELS = {
    "mlp": (Mlp, (2, 6, WIDTH)),
    "two blocks": (lambda: nn.Sequential(Mlp(), Mlp()), (2, 6, WIDTH)),
    "flat tokens": (Mlp, (12, WIDTH)),
    "gated": (Gated, (1, 12, WIDTH)),
    "transformer block": (lambda: Block(WIDTH), (2, 6, WIDTH)),
    "bf16 autocast": (Autocast, (2, 6, WIDTH)),
    "relu, square": (
        lambda: nn.Sequential(
            nn.Linear(WIDTH, 40), nn.ReLU(), nn.Linear(40, 40), nn.ReLU(), nn.Linear(40, WIDTH)
        ),
        (12, WIDTH),
    ),
}


def caught(name: str, grad: bool = True) -> Joint:
    build, size = MODELS[name]
    torch.manual_seed(0)
    return catch(build(), torch.randn(*size), grad=grad)


def assert_close(found: dict, expected: dict, tolerance: float) -> None:
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        if isinstance(value, Tensor) and value.is_floating_point():
            assert (found[key].dtype, found[key].shape) == (value.dtype, value.shape), key
            apart = (found[key].double() - value.double()).abs().max()
            assert apart <= tolerance * value.double().abs().max(), key


@pytest.mark.parametrize(("name", "grad", "slices"), crossed(MODELS, (True, False), (2, 4, 12)))
def test_slices_keep_the_numbers(name, grad, slices):
    joint = caught(name, grad)
    (region, *_) = regions_of(joint.graph)
    assert slices in region.demand.counts
    sliced = joint.through(TokensInSlices(slices))
    assert printer.text(sliced.graph) != printer.text(joint.graph)
    tolerance = TOLERANCE[torch.bfloat16 if "bf16" in name else torch.float32]
    assert_close(results(sliced), results(joint), tolerance)


@pytest.mark.parametrize("name", sampled(MODELS, "gated", "transformer block", "bf16 autocast"))
def test_the_rest_of_the_pipeline_keeps_the_numbers_of_the_slices(name):
    sliced = caught(name).through(TokensInSlices(4))
    assert_same(results(sliced.through(*UNCUT)), results(sliced))


@settings(max_examples=5, deadline=None)
@given(batch=st.integers(1, 4), length=st.integers(1, 9), pick=st.integers(0, 9))
@pytest.mark.slow
def test_slices_keep_the_numbers_of_every_shape(batch, length, pick):
    torch.manual_seed(batch)
    joint = catch(Mlp(), torch.randn(batch, length, WIDTH))
    regions = regions_of(joint.graph)
    assert len(regions) == (batch * length > 1)
    for region in regions:
        slices = region.demand.counts[pick % len(region.demand.counts)]
        made = results(joint.through(TokensInSlices(slices)))
        assert_close(made, results(joint), TOLERANCE[torch.float32])


def test_a_parameter_is_still_gathered_once_in_each_phase():
    joint = caught("mlp")
    sliced = joint.through(TokensInSlices(4), *UNCUT)
    assert (
        len(find(sliced.graph, ops.fetch)) == len(find(joint.through(*UNCUT).graph, ops.fetch)) + 1
    )  # backward reads the bias of what it computes again


def test_hidden_values_exist_in_slices_only():
    sliced = caught("mlp").through(TokensInSlices(4))
    sizes = {
        n.name: n.meta["val"].numel()
        for n in sliced.graph.nodes
        if isinstance(n.meta.get("val"), Tensor)
    }
    weight, narrow = 4 * WIDTH * WIDTH, 12 * WIDTH
    wide = [name for name, size in sizes.items() if size > narrow and size != weight]
    assert not wide
    joint = caught("mlp")
    assert (
        footprint(sliced.graph, sliced.plan.params).peak
        < footprint(joint.graph, joint.plan.params).peak
    )


def test_random_ops_are_not_repeated():
    torch.manual_seed(0)
    joint = catch(Mlp(0.5), torch.randn(2, 6, WIDTH))
    sliced = joint.through(TokensInSlices(4))

    def draws(j):
        return sum("dropout" in n.name and "backward" not in n.name for n in j.graph.nodes)

    assert draws(sliced) == draws(joint) > 0
    assert_close(results(sliced), results(joint), TOLERANCE[torch.float32])


def test_what_mixes_tokens_is_no_region():
    joint = catch(batch_norm(), torch.randn(12, 8))
    for region in regions_of(joint.graph):
        assert not any("batch_norm" in n.name for n in region.nodes)


class Needs(Pass):
    """Says of each trial how many times the budget it needs; from the last on always the same.

    seen  of each trial: whether the graph is in slices of tokens, its budget, its cuts
    batch  of each trial of a graph in slices of the batch, these
    """

    name, needs, gives = "needs", frozenset(), frozenset()

    def __init__(self, *parts: float) -> None:
        self.parts, self.seen, self.batch = list(parts), [], []

    def rewrite(self, graph, plan):
        sliced = len(graph.nodes) > len(many_tokens().graph.nodes)
        if plan.batch is None:
            self.seen.append((sliced, plan.budget_bytes, tuple((plan.cuts or {}).items())))
        else:
            self.batch.append(plan.batch)
        part = self.parts.pop(0) if len(self.parts) > 1 else self.parts[0]
        if part <= 1:
            return plan
        needed = int(part * plan.budget_bytes)
        raise BudgetExceeded("device", plan.budget_bytes, needed, "a test", [], "give it up")


def tried_with(needs: Needs) -> Joint:
    """What is chosen under a budget that an estimate does not find enough."""
    joint = many_tokens()
    budget = footprint(joint.graph, joint.plan.params).peak
    return joint.copy(budget_bytes=budget).through(ChooseTiles(trial=Trial((needs,))))


@pytest.mark.parametrize("needs", [(9,), (9, 9, 9, 8), (2, 1.5, 1.4)])
def test_a_choice_that_cannot_help_is_not_tried_and_none_is_tried_twice(needs):
    trial = Needs(*needs)
    with pytest.raises(BudgetExceeded):
        tried_with(trial)
    assert 0 < sum(sliced for sliced, *_ in trial.seen) <= 4
    whole = [row for row in trial.seen if not row[0]]
    assert len(whole) == len(set(whole)) > 1
    assert {(batch.slices, batch.cuts) for batch in trial.batch} <= {
        (slices, cuts) for slices in (2, 4) for cuts in {b.cuts for b in trial.batch}
    }
    assert 0 < len(trial.batch) <= 4


def test_what_fits_without_slices_is_not_sliced_and_its_cuts_are_handed_on():
    made = tried_with(Needs(1))
    assert (made.plan.slices, made.plan.notes) == ({}, ())
    assert made.plan.cuts is not None
    assert printer.text(made.graph) == printer.text(many_tokens().graph)


def test_with_room_nothing_changes():
    joint = caught("mlp")
    left = joint.through(*CONFIGURED)
    assert printer.text(left.graph) == printer.text(joint.graph)
    assert (left.plan.notes, left.plan.cuts) == ((), {})


@functools.cache
def many_tokens(dropout: float = 0.0) -> Joint:
    """A block whose hidden values are much larger than its weights; rewrite copies of it."""
    torch.manual_seed(0)
    return catch(Mlp(dropout), torch.randn(4, 48, WIDTH))


def test_the_fewest_slices_with_which_all_fits_are_taken_and_told():
    joint = many_tokens()
    whole = joint.copy(budget_bytes=2**30).through(*UNCUT).plan
    budget = (whole.beside.nbytes + whole.least_bytes) * 3 // 4
    sliced = joint.copy(budget_bytes=budget).through(*CONFIGURED)
    assert printer.text(sliced.graph) == printer.text(joint.through(TokensInSlices(2)).graph)
    assert [n.text for n in sliced.plan.notes] == [
        "'up' runs over 2 slices of its 192 tokens: 72.0 KiB of values inside become 36.0 KiB"
    ]
    (region,) = sliced.plan.sliced
    assert (region.name, region.slices, region.sliced_bytes) == ("up", 2, 36 * KiB)
    after = sliced.through(*UNCUT).plan
    assert after.beside.nbytes + after.least_bytes <= budget
    with pytest.raises(BudgetExceeded):
        joint.copy(budget_bytes=budget).through(*UNCUT)


def test_it_is_told_why_hidden_values_run_whole():
    joint = many_tokens(dropout=0.5)
    held = footprint(joint.graph, joint.plan.params).peak
    with pytest.raises(BudgetExceeded) as refused:
        joint.copy(budget_bytes=held // 2).through(*CONFIGURED)
    said = [text for text in refused.value.__notes__ if "random" in text]
    assert said
    whole = r"24.0 KiB of \S+ are not cut into slices of "
    tokens, batch = (
        [text for text in said if re.fullmatch(whole + what, text)]
        for what in (
            r"tokens: %\w+ draws random numbers, which is not repeated",
            r"the batch: %\w+ draws random numbers, of all samples at once as eager does",
        )
    )
    assert tokens
    assert batch
    assert len(tokens) + len(batch) == len(said)


def test_tokens_of_a_number_that_changes_stay_whole_and_that_is_told():
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(8, 64), nn.GELU(), nn.Linear(64, 8)), torch.randn(24, 8)
    torch._dynamo.mark_dynamic(x, 0)
    joint = catch(model, x)
    assert not regions_of(joint.graph)
    held = footprint(joint.graph, joint.plan.params).peak
    with pytest.raises(BudgetExceeded) as refused:
        joint.copy(budget_bytes=held // 2).through(*CONFIGURED)
    assert refused.value.__notes__ == [
        "6.00 KiB of '0' are not cut into slices of tokens: how many there are is known at run "
        "time only"
    ]


def test_forward_and_backward_of_a_block_in_two_slices(golden):
    assert caught("mlp").through(TokensInSlices(2)).text == golden
