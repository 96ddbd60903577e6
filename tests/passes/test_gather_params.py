"""One gather per parameter and phase, before its first reader; forward keeps nothing full."""

from collections import Counter

import pytest
import torch
from joint import Joint, captured

from zcompile.ir import ops
from zcompile.ir.graph import CASTS, aliases_of, bases_of, find, output_of, phase_of
from zcompile.ir.types import Phase
from zcompile.passes.gather_params import GatherParams

aten = torch.ops.aten


def gathered(model: str) -> Joint:
    return captured(model).through(GatherParams())


def fetches(joint: Joint) -> Counter:
    """How often each parameter is fetched in each phase."""
    return Counter(
        (str(joint.plan.params[n.args[0].name].name), phase_of(n).value)
        for n in find(joint.graph, ops.fetch)
    )


def test_a_parameter_is_fetched_before_its_first_reader_and_again_in_backward(golden):
    assert gathered("mlp").text == golden


def test_what_forward_and_backward_share_of_a_parameter_is_its_handle():
    for model in ("mlp", "transformer block", "tied embeddings", "bf16 autocast", "convolution"):
        for wait in find(gathered(model).graph, ops.wait):
            for alias in aliases_of(wait):
                assert {phase_of(user) for user in alias.users} == {phase_of(wait)}


@pytest.mark.parametrize(
    "model", ["tied embeddings", "module called twice", "parameter in two places"]
)
def test_a_parameter_that_is_read_twice_is_fetched_once_per_phase(model):
    joint = gathered(model)
    assert len(find(captured(model).graph, ops.gather)) > len(joint.plan.params)
    assert set(fetches(joint).values()) == {1}


def test_views_are_made_from_the_gathered_value_not_gathered():
    joint = gathered("module called twice")
    for wait in find(joint.graph, ops.wait):
        views = [n for n in aliases_of(wait) if n is not wait]
        assert all(bases_of(view) for view in views)
    assert find(joint.graph, ops.gather) == []


def test_a_view_stands_next_to_its_first_reader():
    joint = gathered("module called twice")
    for view in find(joint.graph, aten.t.default):
        if phase_of(view) is Phase.FORWARD:
            assert view.next in view.users


def test_a_cast_of_a_parameter_is_made_again_in_backward():
    joint = gathered("bf16 autocast")
    casts = [n for n in find(joint.graph, *CASTS) if n.args[0].target is ops.wait]
    weights = Counter(
        joint.plan.params[n.args[0].args[0].args[0].name].name
        for n in casts
        if phase_of(n) is Phase.BACKWARD
    )
    assert weights == {"inner.2.weight": 1}
    assert all({phase_of(user) for user in cast.users} == {phase_of(cast)} for cast in casts)


def test_a_result_that_views_a_parameter_is_copied(golden):
    joint = gathered("returns a view")
    (results,) = output_of(joint.graph).args
    assert results[1].target is aten.clone.default
    assert joint.text == golden


def test_backward_that_does_not_read_a_parameter_does_not_fetch_it():
    assert ("0.weight", "backward") not in fetches(gathered("mlp"))
    assert ("2.bias", "backward") not in fetches(gathered("mlp"))
