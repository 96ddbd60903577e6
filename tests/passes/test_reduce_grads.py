"""A gradient of a tiered parameter goes home as soon as it is made."""

from operator import getitem

import pytest
import torch
from joint import captured, catch
from sampled import sampled
from small_models import SMALL_MODELS, UNALIKE, mlp
from torch import nn

from zcompile.ir import ops
from zcompile.ir.graph import TRANSPOSES, find, output_of, phase_of
from zcompile.ir.torch_compat import gradient_of
from zcompile.ir.types import Phase
from zcompile.passes.gather_params import GatherParams
from zcompile.passes.reduce_grads import ReduceGrads


def test_a_gradient_goes_home_right_after_it_is_made(golden):
    joint = captured("mlp").through(GatherParams(), ReduceGrads())
    assert joint.text == golden


@pytest.mark.parametrize("model", sampled(SMALL_MODELS, *UNALIKE))
def test_every_parameter_has_one_reduction_and_it_is_backward(model):
    joint = captured(model).through(GatherParams(), ReduceGrads())
    reductions = find(joint.graph, ops.reduce_grad)
    names = [joint.plan.params[n.args[1].name].name for n in reductions]
    assert sorted(names) == sorted({name for name, _ in joint.model.named_parameters()})
    assert {phase_of(n) for n in reductions} == {Phase.BACKWARD}
    assert all(
        n.prev.target is ops.reduce_grad or n.prev is last_taken(n.args[0]) for n in reductions
    )


def last_taken(grad):
    """`grad`, or of a part of a tuple the last that is taken right behind it."""
    while grad.next.target is getitem and grad.next.args[0] is grad.args[0]:
        grad = grad.next
    return grad


@pytest.mark.parametrize("model", sampled(SMALL_MODELS, *UNALIKE))
def test_no_gradient_leaves_before_the_rest_of_its_tuple_is_taken(model):
    joint = captured(model).through(GatherParams(), ReduceGrads())
    parts = [n.args[0] for n in find(joint.graph, ops.reduce_grad) if n.args[0].target is getitem]
    for part in parts:
        taken = [user for user in part.args[0].users if user.target is getitem]
        sent = [user for n in taken for user in n.users if user.target is ops.reduce_grad]
        order = list(joint.graph.nodes)
        assert max(map(order.index, taken)) < min(map(order.index, sent))


def test_the_gradient_of_an_input_is_returned_as_ever():
    joint = catch(mlp(), torch.randn(3, 8, requires_grad=True))
    reduced = joint.through(GatherParams(), ReduceGrads())
    output = output_of(reduced.graph)
    for desc, result in zip(output.meta["desc"], output.args[0], strict=True):
        if gradient_of(desc) is not None:
            tiered = gradient_of(desc) in joint.names
            assert (result.target is ops.reduce_grad) == tiered


class Summed(nn.Module):
    """Two weights that are added: one product is the gradient of both."""

    def __init__(self):
        super().__init__()
        self.base, self.delta = (nn.Parameter(torch.ones(6, 8)) for _ in range(2))

    def forward(self, x):
        return nn.functional.linear(x, self.base + self.delta)


def test_one_product_may_go_home_twice():
    joint = catch(Summed(), torch.randn(3, 8)).through(GatherParams(), ReduceGrads())
    reductions = find(joint.graph, ops.reduce_grad)
    assert len(reductions) == 2
    assert len({n.args[0] for n in reductions}) == 1


def test_what_only_turns_a_gradient_and_back_is_left_out():
    joint = captured("mlp").through(GatherParams(), ReduceGrads())
    weights = [
        n.args[0] for n in find(joint.graph, ops.reduce_grad) if n.args[0].meta["val"].dim() == 2
    ]
    assert {n.target for n in weights} == {torch.ops.aten.mm.default}
    assert all(n.users for n in joint.graph.nodes if n.target in TRANSPOSES)
