"""Every prefix of the pipeline keeps the meaning: same outputs, same gradients, bit by bit."""

import pytest
from joint import Joint, assert_same, captured, catch, least_budget, results
from sampled import sampled
from small_models import SMALL_MODELS, small

from zcompile.config import Config
from zcompile.ir import ops
from zcompile.ir.graph import find
from zcompile.passes.gather_params import GatherParams
from zcompile.passes.pipeline import pipeline
from zcompile.passes.release_params import ReleaseParams

PASSES = pipeline(Config(device="cpu"))


@pytest.fixture(scope="module")
def expected():
    """What the graph of a model gives before the first pass."""
    found: dict[str, dict[str, object]] = {}

    def of(name: str) -> dict[str, object]:
        if name not in found:
            found[name] = results(captured(name))
        return found[name]

    return of


def assert_each_keeps(joint: Joint, wanted: dict[str, object]) -> None:
    for name, found in joint.through_each(*PASSES):
        try:
            assert_same(found, wanted)
        except AssertionError as error:
            raise AssertionError(f"{name}: {error}") from error


NOT_DEEP = sampled(SMALL_MODELS, *(model for model in SMALL_MODELS if model != "gpt"))
"""A GPT has what the transformer block has, several times."""


@pytest.mark.parametrize("model", NOT_DEEP)
def test_every_pass_keeps_the_meaning(model, expected):
    assert_each_keeps(captured(model), expected(model))


@pytest.mark.parametrize("model", NOT_DEEP)
def test_the_smallest_budget_keeps_the_meaning(model, expected):
    joint = captured(model)
    tight = joint.copy(budget_bytes=least_budget(joint)).through(*PASSES)
    assert_same(results(tight), expected(model))


@pytest.mark.parametrize("model", ["mlp", "transformer block", "batch norm", "tied embeddings"])
def test_inference_keeps_its_meaning_too(model):
    module, inputs = small(model)
    joint = catch(module.eval(), *inputs, grad=False)
    wanted = results(joint)
    assert not any(key.startswith("grad") for key in wanted)
    assert_each_keeps(joint, wanted)


@pytest.mark.parametrize("model", SMALL_MODELS)
def test_every_parameter_has_a_gradient_in_the_results(model, expected):
    names = {name for name, _ in captured(model).model.named_parameters()}
    assert {key.removeprefix("grad of ") for key in expected(model) if "grad of" in key} == names


def early(joint: Joint) -> Joint:
    """The seeded bug: the first release stands before the last reader."""
    (release, *_) = find(joint.graph, ops.release)
    compute = release.prev
    while compute.target in ops.OURS:
        compute = compute.prev
    compute.prepend(release)
    return joint


@pytest.mark.parametrize("model", ["mlp", "tied embeddings", "dropout", "bf16 autocast"])
def test_a_release_one_line_too_early_does_not_stay_hidden(model, expected):
    broken = early(captured(model).through(GatherParams(), ReleaseParams()))
    with pytest.raises(AssertionError, match="changed"):
        assert_same(results(broken), expected(model))
