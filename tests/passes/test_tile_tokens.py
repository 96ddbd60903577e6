"""Blocks over slices of tokens: their numbers within a tolerance, hidden values in slices only."""

import re

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from joint import Joint, assert_same, catch, results
from sampled import crossed
from small_models import Block, batch_norm
from torch import Tensor, nn

from zcompile.config import Config
from zcompile.errors import BudgetExceeded
from zcompile.ir import ops, printer
from zcompile.ir.graph import find
from zcompile.ir.units import KiB
from zcompile.memory.footprint import footprint
from zcompile.passes.pipeline import pipeline
from zcompile.passes.tile_matmuls import TileMatmuls
from zcompile.passes.tile_tokens import TileTokens
from zcompile.passes.tile_tokens.regions import regions_of

WIDTH = 8
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 2**-6}
"""Largest difference in units of the largest number of a result. Gradients of weights are summed
slice by slice: some roundings of 6e-8 each. Under bf16 the part of each slice is rounded to 2^-9,
and products of fewer rows may come from another kernel, which rounds what follows anew."""
PASSES = pipeline(Config(device="cpu"))
LATER = tuple(p for p in PASSES if p.name != TileTokens.name)
(CONFIGURED,) = (p for p in PASSES if p.name == TileTokens.name)


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
    sliced = joint.through(TileTokens(None, slices))
    assert printer.text(sliced.graph) != printer.text(joint.graph)
    tolerance = TOLERANCE[torch.bfloat16 if "bf16" in name else torch.float32]
    assert_close(results(sliced), results(joint), tolerance)


@pytest.mark.parametrize("name", MODELS)
def test_the_rest_of_the_pipeline_keeps_the_numbers_of_the_slices(name):
    sliced = caught(name).through(TileTokens(None, 4))
    assert_same(results(sliced.through(*LATER)), results(sliced))


@settings(max_examples=5, deadline=None)
@given(batch=st.integers(1, 4), length=st.integers(1, 9), pick=st.integers(0, 9))
def test_slices_keep_the_numbers_of_every_shape(batch, length, pick):
    torch.manual_seed(batch)
    joint = catch(Mlp(), torch.randn(batch, length, WIDTH))
    regions = regions_of(joint.graph)
    assert len(regions) == (batch * length > 1)
    for region in regions:
        slices = region.demand.counts[pick % len(region.demand.counts)]
        made = results(joint.through(TileTokens(None, slices)))
        assert_close(made, results(joint), TOLERANCE[torch.float32])


def test_a_parameter_is_still_gathered_once_in_each_phase():
    joint = caught("mlp")
    sliced = joint.through(TileTokens(None, 4), *LATER)
    assert (
        len(find(sliced.graph, ops.fetch)) == len(find(joint.through(*LATER).graph, ops.fetch)) + 1
    )  # backward reads the bias of what it computes again


def test_hidden_values_exist_in_slices_only():
    sliced = caught("mlp").through(TileTokens(None, 4))
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
    sliced = joint.through(TileTokens(None, 4))

    def draws(j):
        return sum("dropout" in n.name and "backward" not in n.name for n in j.graph.nodes)

    assert draws(sliced) == draws(joint) > 0
    assert_close(results(sliced), results(joint), TOLERANCE[torch.float32])


def test_what_mixes_tokens_is_no_region():
    joint = catch(batch_norm(), torch.randn(12, 8))
    for region in regions_of(joint.graph):
        assert not any("batch_norm" in n.name for n in region.nodes)


class Anything:
    """A cutter that says of every budget that all fits it, or that nothing does."""

    def __init__(self, fits: bool) -> None:
        self.fits = fits

    def upper_bound(self, graph, plan) -> int:
        return plan.budget_bytes + 1

    def fitting(self, graph, plan, most=None) -> dict[str, int]:
        if not self.fits:
            raise BudgetExceeded("device", plan.budget_bytes, 10**6, "a test", [], "give it up")
        return {"primals_1": 7}


class Refusing(Anything):
    """A cutter with which nothing fits: a part of the budget more is needed each time it is asked.

    asked  for so many cuts; None: for all
    """

    def __init__(self, *needed: float) -> None:
        super().__init__(False)
        self.needed, self.asked = iter(needed), []

    def fitting(self, graph, plan, most=None) -> dict[str, int]:
        self.asked.append(most)
        needed = int(next(self.needed) * plan.budget_bytes)
        raise BudgetExceeded("device", plan.budget_bytes, needed, "a test", [], "give it up")


@pytest.mark.parametrize(
    ("needed", "asked"),
    [
        ((9, 8, 8), [None, 1, 1]),  # far too much, and more slices need no less
        ((9, 8, 7, 7), [None, 1, 1, 1]),
        ((2, 1.5, 1.4, 1.5, 1.4), [None, 1, 2, 1, 2]),  # so little that finer tiles may do
    ],
)
def test_slices_and_cuts_that_cannot_help_are_not_tried(needed, asked):
    cutter = Refusing(*needed)
    joint = many_tokens()
    joint.copy(budget_bytes=footprint(joint.graph, joint.plan.params).peak).through(
        TileTokens(cutter)
    )
    assert cutter.asked == asked


def test_what_was_tried_out_without_slices_is_not_tried_out_again(monkeypatch):
    tried, try_out = [], TileMatmuls._try_out

    def noted(self, graph, plan, cuts):
        tried.append((graph, plan.budget_bytes, tuple(cuts.items())))
        return try_out(self, graph, plan, cuts)

    monkeypatch.setattr(TileMatmuls, "_try_out", noted)
    with pytest.raises(BudgetExceeded):
        caught("mlp").copy(budget_bytes=600).through(*PASSES)
    assert len(tried) == len(set(tried)) > 1


def test_with_room_nothing_changes():
    joint = caught("mlp")
    for pass_ in (TileTokens(), CONFIGURED):
        left = joint.through(pass_)
        assert printer.text(left.graph) == printer.text(joint.graph)
        assert (left.plan.notes, left.plan.cuts) == ((), None)


@pytest.mark.parametrize("fits", [True, False])
def test_what_fits_without_slices_or_not_even_with_them_stays_node_for_node(fits):
    joint = caught("mlp").copy(budget_bytes=6000)
    left = joint.through(TileTokens(Anything(fits)))
    assert printer.text(left.graph) == printer.text(joint.graph)
    assert left.plan.cuts == ({"primals_1": 7} if fits else None), "what was tried out is handed on"
    assert [n.text for n in left.plan.notes] == (
        [] if fits else ["slices of tokens do not make it fit 5.86 KiB"]
    )


def many_tokens(dropout: float = 0.0) -> Joint:
    """A block whose hidden values are much larger than its weights."""
    torch.manual_seed(0)
    return catch(Mlp(dropout), torch.randn(4, 48, WIDTH))


def test_the_fewest_slices_with_which_all_fits_are_taken_and_told():
    joint = many_tokens()
    whole = joint.copy(budget_bytes=2**30).through(*LATER).plan
    budget = (whole.beside.nbytes + whole.least_bytes) * 3 // 4
    sliced = joint.copy(budget_bytes=budget).through(CONFIGURED)
    assert printer.text(sliced.graph) == printer.text(joint.through(TileTokens(None, 2)).graph)
    assert [n.text for n in sliced.plan.notes] == [
        "up runs over 2 slices of its 192 tokens: 72.0 KiB of values inside become 36.0 KiB"
    ]
    (region,) = sliced.plan.sliced
    assert (region.name, region.slices, region.sliced_bytes) == ("up", 2, 36 * KiB)
    after = sliced.through(*LATER).plan
    assert after.beside.nbytes + after.least_bytes <= budget
    with pytest.raises(BudgetExceeded):
        joint.copy(budget_bytes=budget).through(*LATER)


def test_it_is_told_why_hidden_values_run_whole():
    joint = many_tokens(dropout=0.5)
    held = footprint(joint.graph, joint.plan.params).peak
    notes = joint.copy(budget_bytes=held // 2).through(CONFIGURED).plan.notes
    said = [n.text for n in notes if "random" in n.text]
    assert said
    for text in said:
        assert re.fullmatch(
            r"24.0 KiB of \S+ are not cut into slices of tokens: %\w+ draws random numbers, "
            r"which is not repeated",
            text,
        )


def test_tokens_of_a_number_that_changes_stay_whole_and_that_is_told():
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(8, 64), nn.GELU(), nn.Linear(64, 8)), torch.randn(24, 8)
    torch._dynamo.mark_dynamic(x, 0)
    joint = catch(model, x)
    assert not regions_of(joint.graph)
    held = footprint(joint.graph, joint.plan.params).peak
    left = joint.copy(budget_bytes=held // 2).through(CONFIGURED)
    assert printer.text(left.graph) == printer.text(joint.graph)
    assert [n.text for n in left.plan.notes] == [
        "6.00 KiB of 0 are not cut into slices of tokens: how many there are is known at run time "
        "only"
    ]


def test_forward_and_backward_of_a_block_in_two_slices(golden):
    assert caught("mlp").through(TileTokens(None, 2)).text == golden
