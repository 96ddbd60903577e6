"""Blocks over slices of the batch: which values have one, how stages lie, the same numbers."""

import re
from itertools import product

import pytest
import torch
from batch_models import BATCH, BATCH_MODELS, LENGTH, WIDTH, Loss, batch_model
from in_slices import PASSES, UNCUT, BatchInSlices
from joint import Joint, assert_same, catch, results
from sampled import crossed, sampled, sampled_rows
from small_models import GPT
from torch import Tensor, nn

from zcompile.errors import BudgetExceeded
from zcompile.ir import ops
from zcompile.ir.graph import bases_of, find, phase_of, writes
from zcompile.ir.types import Phase
from zcompile.memory.footprint import footprint
from zcompile.passes.choose_tiles import ChooseTiles
from zcompile.passes.plan_activations.rewrite import sink_views
from zcompile.passes.slice_batch import SliceBatch, axes
from zcompile.passes.slice_batch.axes import Axis
from zcompile.passes.slice_batch.rewrite import ranges
from zcompile.passes.slice_batch.stages import batch_graph, counts_of
from zcompile.passes.tile_tokens import TileTokens
from zcompile.passes.trial import Trial

TOLERANCE = {"float32": 2e-6, "bfloat16": 2**-6}
"""Largest difference in units of the largest number of a result, as of slices of tokens: some
roundings more of 6e-8 each. Under bf16 the part of each slice is rounded to 2^-9, and products of
fewer rows may come from another kernel, which rounds what follows anew."""
CONFIGURED = tuple(
    p for p in PASSES if p.name in (ChooseTiles.name, TileTokens.name, SliceBatch.name)
)


@pytest.fixture(scope="module")
def caught():
    found: dict[str, Joint] = {}

    def of(name: str) -> Joint:
        if name not in found:
            model, inputs = batch_model(name)
            found[name] = catch(model, *inputs)
        return found[name]

    return of


def assert_close(found: dict, expected: dict, tolerance: float) -> None:
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        if isinstance(value, Tensor):
            other = found[key]
            assert (other.dtype, other.shape) == (value.dtype, value.shape), key
            assert other.stride() == value.stride(), key
            if value.numel() and value.is_floating_point():
                apart = (other.double() - value.double()).abs().max()
                assert apart <= tolerance * value.double().abs().max(), key
            else:
                assert torch.equal(other, value), key


@pytest.mark.parametrize(
    ("name", "slices", "level"),
    sampled_rows(
        product(BATCH_MODELS, (2, 3, LENGTH), (0, 1, 2, 9)),
        *(
            (name, (2, 3, LENGTH)[at % 3], (0, 1, 2, 9)[at % 4])
            for at, name in enumerate(BATCH_MODELS)
            if name not in {"gpt", "weights of words", "bert", "vit"}  # as a llama is
        ),
    ),
)
def test_slices_keep_the_numbers(name, slices, level, caught):
    joint = caught(name)
    sliced = joint.through(BatchInSlices(slices, level))
    assert len(sliced.graph.nodes) > len(joint.graph.nodes)
    tolerance = TOLERANCE["bfloat16" if name == "autocast" else "float32"]
    assert_close(results(sliced), results(joint), tolerance)


@pytest.mark.parametrize("name", sampled(BATCH_MODELS, "weights of words", "vit", "returned"))
def test_the_rest_of_the_pipeline_keeps_the_numbers_of_the_slices(name, caught):
    sliced = caught(name).through(BatchInSlices(3, 1))
    assert_same(results(sliced.through(*UNCUT)), results(sliced))


HEAVY_MODELS = ["gpt", "llama", "vit", "bert", "experts", "sequence first"]


@pytest.mark.parametrize("name", sampled(HEAVY_MODELS, "bert", "sequence first"))
def test_inference_runs_in_slices_too(name):
    model, inputs = batch_model(name)
    joint = catch(model.eval(), *inputs, grad=False)
    sliced = joint.through(BatchInSlices(3, 1))
    assert_close(results(sliced), results(joint), TOLERANCE["float32"])


HEAVY = ("mm.default", "convolution", "attention", "softmax", "layer_norm", "rms_norm", "embedding")


@pytest.mark.parametrize("name", HEAVY_MODELS)
def test_all_that_is_heavy_runs_in_slices_forward_and_backward(name, caught):
    joint = caught(name)
    batch = batch_graph(joint.graph).batch
    heavy = [n for n in joint.graph.nodes if any(word in str(n.target) for word in HEAVY)]
    assert len(heavy) > 10
    assert [n.name for n in heavy if n not in batch.rules] == []


def test_images_are_resized_in_slices_forward_and_backward(caught):
    joint = caught("resized")
    batch = batch_graph(joint.graph).batch
    resizes = [n for n in joint.graph.nodes if "upsample" in str(n.target)]
    assert {n.target for n in resizes} == {*axes.RESIZES, *axes.RESIZES_BACKWARD}
    assert [n.name for n in resizes if n not in batch.rules] == []


# Where the batch is


def axes_of(joint: Joint) -> dict[str, object]:
    found = batch_graph(joint.graph)
    return {} if found is None else {n.name: axis for n, axis in found.batch.axes.items()}


def test_the_batch_is_followed_and_not_recognised_by_its_size():
    """As many tokens, heads and features as samples: sizes say nothing."""
    torch.manual_seed(0)
    joint = catch(GPT(1, width=8), torch.randint(0, 32, (8, 8)))
    axes = axes_of(joint)
    forward = {n.name: n for n in joint.graph.nodes if phase_of(n) is Phase.FORWARD}
    flat = [name for name, n in forward.items() if "addmm" in name]
    assert flat
    assert all(axes[name] == Axis(0, 8) for name in flat)
    (turned, *_) = [name for name, n in forward.items() if "transpose" in name]
    assert axes[turned] == Axis(0)
    sliced = joint.through(BatchInSlices(4))
    assert_close(results(sliced), results(joint), TOLERANCE["float32"])


def test_samples_that_come_second_are_told_from_tokens(caught):
    found = batch_graph(caught("sequence first").graph)
    assert found.batch.count == BATCH
    (flat, *_) = [n for n in found.batch.rules if "addmm" in n.name]
    assert found.batch.axis(flat) == Axis(0)
    assert found.batch.outer(flat, Axis(0)) == LENGTH


def test_a_buffer_with_as_many_rows_as_samples_is_no_batch(caught):
    """As the angles of a rotary embedding, and the statistics of a batch normalisation."""
    for name in ("llama", "batch norm"):
        found = batch_graph(caught(name).graph)
        assert found.batch.count == BATCH
        assert len(found.batch.rules) > 40


class Contrast(nn.Module):
    """Every sample is compared with every other."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 64), nn.Linear(64, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = self.down(torch.relu(self.up(x)))
        return (y @ y.t()).logsumexp(1).mean()


class Cumulative(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 64)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.up(x)).cumsum(0).flip(0).square().sum()


@pytest.mark.parametrize("build", [Contrast, Cumulative])
def test_what_mixes_samples_runs_whole_between_slices(build):
    torch.manual_seed(0)
    joint = catch(build(), torch.randn(12, WIDTH))
    found = batch_graph(joint.graph)
    assert found.batch.refused
    sliced = joint.through(BatchInSlices(3))
    assert_close(results(sliced), results(joint), TOLERANCE["float32"])


class Masked(nn.Module):
    """Attention with one mask for all samples, of as many rows as there are tokens."""

    def __init__(self, length: int) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.register_buffer("mask", torch.randn(length, length))

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = (
            t.view(batch, length, 4, -1).transpose(1, 2) for t in self.qkv(x).split(width, 2)
        )
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=self.mask)
        return self.out(mixed.transpose(1, 2).reshape(batch, length, width))


@pytest.mark.parametrize(("length", "slices"), crossed([BATCH, 2 * BATCH], [2, BATCH]))
def test_a_mask_of_tokens_by_tokens_has_no_batch(length, slices):
    """However many tokens there are for each sample."""
    torch.manual_seed(0)
    joint = catch(Masked(length), torch.randn(BATCH, length, WIDTH))
    assert any("attention" in node.name for node in batch_graph(joint.graph).batch.rules)
    assert_close(
        results(joint.through(BatchInSlices(slices))), results(joint), TOLERANCE["float32"]
    )


class Squeezed(nn.Module):
    """Takes away dimensions of one element, told by `dims` or not told."""

    def __init__(self, *dims: int | tuple[int, ...]) -> None:
        super().__init__()
        self.up, self.down, self.dims = nn.Linear(WIDTH, 64), nn.Linear(64, WIDTH), dims

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.relu(self.up(x).mean(1, keepdim=True)).squeeze(*self.dims))


@pytest.mark.parametrize(("dims", "slices"), crossed([(), (0,), (1,), ((0, 1),)], [2, BATCH]))
def test_a_slice_of_one_sample_keeps_its_batch_where_ones_are_squeezed(dims, slices):
    torch.manual_seed(0)
    joint = catch(Squeezed(*dims), torch.randn(BATCH, LENGTH, WIDTH))
    assert batch_graph(joint.graph).batch.refused == []
    assert_close(
        results(joint.through(BatchInSlices(slices))), results(joint), TOLERANCE["float32"]
    )


class EmptyBeside(nn.Module):
    """Puts values beside what is empty, as a cache of keys that has none yet does."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 64), nn.Linear(64, WIDTH)
        self.register_buffer("nothing", torch.empty(0))

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.cat([self.nothing, torch.relu(self.up(x))], -2))


@pytest.mark.parametrize("slices", [2, BATCH])
def test_what_is_empty_beside_values_has_no_batch(slices):
    torch.manual_seed(0)
    joint = catch(EmptyBeside(), torch.randn(BATCH, LENGTH, WIDTH))
    assert any(node.target is torch.ops.aten.cat.default for node in joint.graph.nodes)
    assert_close(
        results(joint.through(BatchInSlices(slices))), results(joint), TOLERANCE["float32"]
    )


class TwoWays(nn.Module):
    """A table with a row for each sample, and with a column."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, BATCH)
        self.register_buffer("table", torch.randn(BATCH, BATCH))

    def forward(self, x: Tensor) -> Tensor:
        y = torch.relu(self.up(x))
        return (y * self.table).sin() + (y.t() * self.table).cos().t()


@pytest.mark.parametrize("slices", [2, BATCH])
def test_of_a_value_without_a_batch_each_reader_has_its_own_part(slices):
    torch.manual_seed(0)
    joint = catch(TwoWays(), torch.randn(BATCH, WIDTH))
    assert_close(
        results(joint.through(BatchInSlices(slices))), results(joint), TOLERANCE["float32"]
    )


@pytest.mark.parametrize("slices", [2, 8])
def test_random_numbers_are_drawn_of_all_samples_in_the_order_of_eager(slices, caught):
    """Outputs to the last bits but few: a mask of other numbers would be far off."""
    joint = caught("dropout")
    sliced = joint.through(BatchInSlices(slices, 1))

    def draws(made: Joint) -> list[torch.Size]:
        return [
            n.meta["val"][0].shape
            for n in made.graph.nodes
            if "native_dropout.default" in str(n.target)
        ]

    assert draws(sliced) == draws(joint) == [torch.Size([BATCH, LENGTH, WIDTH])] * 3
    assert_close(results(sliced), results(joint), TOLERANCE["float32"])


class PartlyWhole(nn.Module):
    """A weight that is read in slices, and one that is read behind a sum over the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.sliced, self.whole = (nn.Parameter(torch.randn(WIDTH)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        return (torch.relu(x * self.sliced).sum(0) * self.whole).square().sum()


def test_a_gradient_that_is_not_summed_over_slices_has_the_bits_of_eager():
    torch.manual_seed(0)
    joint = catch(PartlyWhole(), torch.randn(12, WIDTH))
    expected, found = results(joint), results(joint.through(BatchInSlices(3)))
    assert torch.equal(found["output 0"], expected["output 0"])
    assert torch.equal(found["grad of whole"], expected["grad of whole"])
    assert_close(found, expected, TOLERANCE["float32"])


# Stages


@pytest.mark.slow
def test_a_weight_is_gathered_once_in_each_phase_whatever_the_slices(caught):
    joint = caught("gpt")
    whole, sliced = joint.through(*UNCUT), joint.through(BatchInSlices(8, 1), *UNCUT)
    read = {
        phase: [n for n in find(whole.graph, ops.fetch) if phase_of(n) is phase] for phase in Phase
    }
    for phase, fetches in read.items():
        mine = [n for n in find(sliced.graph, ops.fetch) if phase_of(n) is phase]
        params = {sliced.plan.spec_of(n).name for n in mine}
        assert len(mine) == len(params), "none twice in a phase"
        assert params >= {whole.plan.spec_of(n).name for n in fetches}


@pytest.mark.slow
def test_what_is_inside_of_a_stage_exists_in_slices_only(caught):
    joint = caught("gpt")
    peaks = [
        footprint(made.graph, made.plan.params).peak
        for made in (joint, joint.through(BatchInSlices(2, 1)), joint.through(BatchInSlices(8, 1)))
    ]
    assert peaks[0] > peaks[1] > peaks[2]


def test_backward_divides_where_forward_does(caught):
    found = batch_graph(caught("gpt").graph)
    levels = found.levels()
    assert [len(level) for level in levels] == [5, 7, 9], "at residuals; in attention; in an MLP"
    stages = found.stages(levels[0])
    again = [stage.again for stage in stages.backward if stage.nodes]
    assert len(again) == len([s for s in stages.forward if s.nodes]) - 1, "the embedding has none"
    seen = [node for nodes in again for node in nodes]
    assert len(seen) == len(set(seen)), "nothing is computed again twice"


def test_stages_are_joined_as_long_as_their_weights_permit(caught):
    found = batch_graph(caught("gpt").graph)
    narrowest, *_ = found.levels()
    assert found.merged(narrowest, 2**40) == ()
    assert found.merged(narrowest, 0) == narrowest
    some = found.merged(narrowest, 16 * 1024)
    assert 0 < len(some) < len(narrowest)
    assert set(some) < set(narrowest)


@pytest.mark.parametrize(
    ("count", "slices", "made"),
    [
        (8, 2, [(0, 4), (4, 8)]),
        (7, 3, [(0, 3), (3, 5), (5, 7)]),
        (3, 3, [(0, 1), (1, 2), (2, 3)]),
    ],
)
def test_slices_are_equal_but_for_one_sample(count, slices, made):
    assert ranges(count, slices) == made


@pytest.mark.parametrize(
    ("samples", "counts"),
    [(2, (2,)), (3, (2, 3)), (8, (2, 4, 8)), (12, (2, 4, 8, 12)), (100, (2, 4, 8, 16)), (1, ())],
)
def test_the_fewest_slices_are_tried_first(samples, counts):
    assert counts_of(samples) == counts


def test_what_adds_up_a_gradient_is_no_view_that_moves_to_its_reader(caught):
    """It would hold what each slice has made until the last is over."""
    sliced = caught("gpt").through(BatchInSlices(4, 1))

    def computes() -> list[str]:
        calls = [n for n in sliced.graph.nodes if n.op == "call_function"]
        return [n.name for n in calls if writes(n) or not bases_of(n)]

    assert any(writes(n) for n in sliced.graph.nodes)
    before = computes()
    sink_views(sliced.graph)
    assert computes() == before


# The choice


class Attentive(nn.Module):
    """Attention whose scores are written out: no slices of tokens make them smaller."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        scores = self.q(x) @ self.k(x).transpose(-1, -2)
        return x + self.o(scores.softmax(-1) @ self.v(x))


def attentive(batch: int = 8, length: int = 32) -> Joint:
    torch.manual_seed(0)
    return catch(nn.Sequential(Attentive(), Attentive()), torch.randn(batch, length, WIDTH))


def tight(joint: Joint) -> int:
    """Bytes that scores of the whole batch do not fit."""
    return footprint(joint.graph, joint.plan.params).peak * 2 // 3


def test_the_batch_runs_in_slices_where_nothing_else_fits():
    joint = attentive()
    held = footprint(joint.graph, joint.plan.params).peak
    assert joint.copy(budget_bytes=8 * held).through(*PASSES).plan.batch is None
    made = joint.copy(budget_bytes=tight(joint)).through(*PASSES)
    assert made.plan.batch is not None
    assert made.plan.beside.device_bytes == tight(joint)
    told = [n.text for n in made.plan.notes if n.by == SliceBatch.name]
    assert len(told) == len(made.plan.sliced) > 0
    for text, region in zip(told, made.plan.sliced, strict=True):
        assert f"runs over {made.plan.batch.slices} slices of its 8 samples" in text
        assert region.unit == "samples"
    assert {r.by for r in made.plan.roundings} == {SliceBatch.name}
    assert_close(results(made), results(joint), TOLERANCE["float32"])


def test_without_slices_such_a_budget_is_refused():
    joint = attentive()
    with pytest.raises(BudgetExceeded):
        joint.copy(budget_bytes=tight(joint)).through(*UNCUT)


def offered(refused: BudgetExceeded) -> int:
    return int(re.search(r"device_memory='?(\d+)", str(refused))[1])


def tried_in_slices(joint, budget, monkeypatch):
    """The budget that a refusal of this one offers, and those that were tried in slices for it."""
    tried: list[int] = []
    on_copy = Trial.on_copy

    def counted(trial, graph, plan):
        if plan.batch and plan.budget_bytes != budget:
            tried.append(plan.budget_bytes)
        return on_copy(trial, graph, plan)

    with monkeypatch.context() as counting:
        counting.setattr(Trial, "on_copy", counted)
        with pytest.raises(
            BudgetExceeded, match="runs in slices of tokens or the batch there"
        ) as refused:
            joint.copy(budget_bytes=budget).through(*PASSES)
    assert tried[-1] == offered(refused.value)
    return refused.value, tried


@pytest.mark.slow
def test_a_refusal_offers_a_budget_that_does_in_slices(monkeypatch):
    """Less than what does without, and not far from the least that does; found with few trials."""
    joint = attentive(4, 16)
    held = footprint(joint.graph, joint.plan.params).peak
    refused, tried = tried_in_slices(joint, held * 9 // 20, monkeypatch)
    offer = tried[-1]
    assert offer < refused.needed_bytes
    assert len(tried) <= 2  # the first guess does, and takes two cuts of weights
    assert joint.copy(budget_bytes=offer).through(*PASSES).plan.batch is not None
    with pytest.raises(BudgetExceeded):
        joint.copy(budget_bytes=offer * 3 // 4).through(*PASSES)


@pytest.mark.slow  # of a graph that is smaller, above
@pytest.mark.parametrize("percent", [30, 40])
def test_an_offer_in_slices_of_a_large_graph_costs_few_trials(percent, caught, monkeypatch):
    joint = caught("vit")
    budget = footprint(joint.graph, joint.plan.params).peak * percent // 100
    _, tried = tried_in_slices(joint, budget, monkeypatch)
    assert len(tried) <= 6  # three guesses, each with two cuts of weights
    assert joint.copy(budget_bytes=tried[-1]).through(*PASSES).plan.batch is not None


class OverSamples(nn.Module):
    """Adds up the samples, of a value that slices of the batch do not make any smaller."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(32, 32), nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(torch.cumsum(self.a(x).tanh(), 0).sin())


@pytest.mark.parametrize("percent", sampled([42, 70, 98], 70))
def test_a_refusal_offers_no_slices_where_the_graph_fits_whole(percent):
    torch.manual_seed(0)
    joint = catch(OverSamples(), torch.randn(64, 32))
    held = footprint(joint.graph, joint.plan.params).peak
    with pytest.raises(BudgetExceeded) as refused:
        joint.copy(budget_bytes=held * percent // 100).through(*PASSES)
    assert "slices" not in str(refused.value)
    offer = offered(refused.value)
    assert offer == refused.value.needed_bytes
    plan = joint.copy(budget_bytes=offer).through(*PASSES).plan
    assert not plan.sliced


def test_a_batch_whose_size_is_dynamic_stays_whole():
    torch.manual_seed(0)
    x = torch.randn(8, 32, WIDTH)
    torch._dynamo.mark_dynamic(x, 0)
    assert batch_graph(catch(Attentive(), x).graph) is None


class MeanSquare(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.a(x).tanh().square().mean()


def test_sizes_that_are_dynamic_beside_the_batch_are_of_no_sum_over_it():
    torch.manual_seed(0)
    x = torch.randn(BATCH, 32, WIDTH)
    torch._dynamo.mark_dynamic(x, 1)
    joint = catch(MeanSquare(), x)
    spread = [n for n in joint.graph.nodes if n.target is torch.ops.aten.expand.default]
    assert any(isinstance(size, torch.SymInt) for n in spread for size in n.meta["val"].shape)
    with pytest.raises(BudgetExceeded):
        joint.copy(budget_bytes=1).through(*PASSES)
    assert batch_graph(joint.graph) is None


def test_it_is_told_why_a_value_is_not_made_in_slices():
    model, _ = batch_model("batch norm")
    joint = catch(model, torch.randn(BATCH, 3, 16, 16))
    held = footprint(joint.graph, joint.plan.params).peak
    with pytest.raises(BudgetExceeded) as refused:
        joint.copy(budget_bytes=held // 4).through(*CONFIGURED)
    said = [note for note in refused.value.__notes__ if "slices of the batch" in note]
    assert any("statistics over the batch" in note for note in said)


@pytest.mark.slow
def test_the_bound_that_refuses_at_once_is_below_what_slices_need():
    """Down to it every budget is refused after trials, or fits."""
    joint = attentive(4, 16)
    low, high = 1, footprint(joint.graph, joint.plan.params).peak * 2
    while high - low > high // 8:
        middle = (low + high) // 2
        try:
            joint.copy(budget_bytes=middle).through(*PASSES)
        except BudgetExceeded:
            low = middle
        else:
            high = middle
    with pytest.raises(BudgetExceeded) as refused:
        joint.copy(budget_bytes=1).through(*CONFIGURED)
    assert refused.value.needed_bytes <= high


@pytest.mark.slow
def test_a_wish_of_checkpoint_is_kept_by_slices():
    class Kept(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Loss(GPT(1))

        def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
            return torch.utils.checkpoint.checkpoint(self.inner, ids, labels, use_reentrant=False)

    torch.manual_seed(0)
    model = Kept()
    ids, labels = (torch.randint(0, 32, (BATCH, LENGTH)) for _ in range(2))
    joint = catch(model, ids, labels)
    sliced = joint.through(BatchInSlices(2, 1))
    assert any("recompute" in n.meta for n in sliced.graph.nodes)
    assert_close(results(sliced), results(joint), TOLERANCE["float32"])
