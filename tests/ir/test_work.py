"""Work counted from a graph: FLOPs of products and attention, bytes of the rest, kernels."""

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from zcompile.ir.types import NO_WORK, Work
from zcompile.ir.work import work_of


def counted(function, *shapes, dtype=torch.float32, mode="fake"):
    """The work of all that `function` calls, on inputs of these shapes."""
    values = [torch.zeros(shape, dtype=dtype) for shape in shapes]
    graph = make_fx(function, tracing_mode=mode)(*values).graph
    return work_of([node for node in graph.nodes if node.op == "call_function"])


@pytest.mark.parametrize("mode", ["fake", "symbolic"])
def test_a_product_counts_two_flops_a_term_and_each_matrix_once(mode):
    work = counted(torch.mm, (3, 5), (5, 7), dtype=torch.bfloat16, mode=mode)
    assert work == Work(2 * 3 * 5 * 7, (3 * 5 + 5 * 7 + 3 * 7) * 2, 0, "bfloat16", 1)


def test_an_elementwise_op_counts_what_it_reads_and_makes():
    assert counted(torch.add, (4, 8), (4, 8)) == Work(nbytes=3 * 32 * 4, ops=1)


def test_an_operand_that_is_expanded_counts_once():
    assert counted(lambda x: x.expand(4, 8).exp(), (1, 8)).nbytes == (8 + 32) * 4


def test_a_view_costs_nothing():
    assert counted(lambda x: x.t().unsqueeze(0)[:, 1:], (4, 8)) == NO_WORK


def test_what_writes_in_place_is_no_view():
    assert counted(lambda x: x.mul_(2.0), (16,)).ops == 1


def test_attention_counts_both_products_on_the_cpu_too():
    def attention(q, k, v):
        return torch.nn.functional.scaled_dot_product_attention(q, k, v)

    assert counted(attention, *[(2, 3, 16, 8)] * 3).flops == 2 * (2 * 2 * 3 * 16 * 16 * 8)


def test_the_flops_of_a_backward_are_twice_those_of_the_forward():
    def trained(x, w):
        y = x @ w
        return torch.autograd.grad(y.sum(), (x, w))

    def step(x, w):
        return trained(x.requires_grad_(), w.requires_grad_())

    assert counted(step, (8, 8), (8, 8)).flops == 3 * 2 * 8**3
