"""Elementwise ops in chunks: what an op writes, where operands meet, and how large they may be."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pairs import Holder, assert_equal, assert_same, mlp, on_disk, parameter_pair, plain_of
from torch.nn import functional as F

from zcompile.frontend.offload import session_behind

ROWS = torch.arange(96.0).reshape(12, 8) / 96
SAME = {
    "twice": lambda p: p.mul_(p),
    "thrice": lambda p: p.addcmul_(p, p, value=0.5),
    "scaled": lambda p: p.add_(p, alpha=0.5),
    "out": lambda p: torch.add(p, ROWS, out=p),
    "out of others": lambda p: torch.mul(ROWS, ROWS, out=p),
    "out, last": lambda p: torch.maximum(ROWS, p, out=p),
    "one element of more dimensions": lambda p: p.add_(torch.ones(1, 1)),
    "a row": lambda p: p.copy_(torch.arange(8.0)),
    "a row of the same strides": lambda p: p.copy_(torch.arange(8.0).reshape(1, 8)),
    "a column": lambda p: p.div_(p.norm(dim=1, keepdim=True)),
    "one of a list": lambda p: torch._foreach_add_([p, p], [ROWS, ROWS * 0.5]),
    "one of a list, in another order": lambda p: torch._foreach_copy_(
        [p, p], [ROWS, (ROWS * 2).t().contiguous().t()]
    ),
    "halves": lambda p: p[:6].add_(p[6:]),
    "neighbours": lambda p: p.chunk(2, 1)[1].add_(p.chunk(2, 1)[0]),
    "integers": lambda p: p.view(torch.int32)[1].fill_(1),
    "where": lambda p: p.copy_(torch.where(p > 0, p, ROWS)),
    "of itself": lambda p: p.copy_(p.sort(0).values),
    "dropout": lambda p: F.dropout(p, inplace=True),
    "rrelu": lambda p: F.rrelu_(p, training=True),
    "rrelu, not in place": lambda p: p.copy_(F.rrelu(p, training=True)),
    "a list made anew": lambda p: p.copy_(torch._foreach_add([p], [torch.ones(1, 1)])[0]),
    "transposed": lambda p: p.t().mul_(ROWS.t()),
    "a list of views": lambda p: torch._foreach_mul_([p[:4], p[4:]], 2.0),
}


@pytest.mark.parametrize("name", SAME)
def test_operands_may_meet(name, tmp_path):
    plain, tiered = parameter_pair(lambda: torch.randn(12, 8), tmp_path)
    for param in (plain, tiered):
        torch.manual_seed(5)
        with torch.no_grad():
            SAME[name](param)
    assert_equal(plain, tiered)


def test_one_element_may_have_more_dimensions_where_torch_lets_it(tmp_path):
    plain, tiered = parameter_pair(lambda: torch.randn(12, 8), tmp_path)
    one = torch.full((1, 1, 1), 2.0)
    with torch.no_grad():
        for param in (plain, tiered):
            with pytest.raises(RuntimeError, match="broadcast"):
                param.add_(one)
        (theirs,), (ours,) = (torch._foreach_mul([p], [one]) for p in (plain, tiered))
    assert_equal(theirs, ours)
    assert_equal(plain, tiered)


@pytest.mark.parametrize("host", ["256KiB", "64MiB"], ids=["disk", "host"])
def test_a_list_of_tensors_of_several_sizes_takes_plain_ones_and_a_scalar_for_each(host, tmp_path):
    plain, tiered = mlp(), on_disk(mlp(), tmp_path, host_memory=host)
    tiered.load_state_dict(plain.state_dict())
    for model in (plain, tiered):
        for backwards in (False, True):  # the smallest first, then last
            params = sorted(model.parameters(), key=lambda p: p.numel(), reverse=backwards)
            values = [torch.arange(1.0, 1 + p.numel()).reshape(p.shape) / 64 for p in params]
            with torch.no_grad():
                torch._foreach_add_(params, values)
                torch._foreach_addcdiv_(params, values, values[:], torch.arange(1.0, 5.0))
    assert_same(plain, tiered)


def test_out_is_what_comes_back(tmp_path):
    _, tiered = parameter_pair(lambda: torch.randn(12, 8), tmp_path)
    with torch.no_grad():
        assert torch.add(ROWS, ROWS, out=tiered) is tiered
        assert torch.mm(ROWS, torch.eye(8), out=tiered) is tiered


def test_two_answers_are_both_given(tmp_path):
    plain, tiered = parameter_pair(lambda: torch.randn(12, 8), tmp_path)
    for ours, theirs in zip(torch.frexp(tiered.detach()), torch.frexp(plain.detach()), strict=True):
        assert_equal(theirs, ours)


def test_a_copy_from_another_model_takes_its_values(tmp_path):
    plain, first = parameter_pair(lambda: torch.randn(12, 8), tmp_path)
    second = on_disk(Holder(torch.zeros(12, 8)), tmp_path).w
    with torch.no_grad():
        second.copy_(first)
        assert_equal(plain, second)
        second.t().mul_(first.t())
        torch._foreach_add_([second, first], [first, second])
    assert_equal(plain + plain * plain, second)


def test_overlapping_operands_are_refused_as_torch_refuses_them(tmp_path):
    _, tiered = parameter_pair(lambda: torch.randn(12, 8), tmp_path)
    with torch.no_grad(), pytest.raises(RuntimeError, match="single memory location"):
        tiered[1:].add_(tiered[:-1])


@pytest.mark.parametrize(
    "op",
    [
        lambda p: p.mul_(0.5),
        lambda p: p.copy_(p.new_full((), 3.0)),
        lambda p: p.fill_(2),
        lambda p: p.zero_(),
        lambda p: torch._foreach_sqrt_([p.abs_()]),
        lambda p: p.lerp_(p.detach().clone(), 0.5),
        lambda p: p.copy_(torch.linspace(0, 1, p.numel()).reshape(p.shape)),
        lambda p: p.add_(torch.linspace(0, 1, p.numel()).reshape(p.shape)),
    ],
    ids=["mul", "scalar", "fill", "zero", "foreach", "lerp", "copy", "add plain"],
)
def test_a_tensor_larger_than_the_arena_is_updated(op, tmp_path):
    plain, tiered = parameter_pair(lambda: torch.randn(300, 257), tmp_path, device_memory="64KiB")
    assert tiered.nbytes > 4 * 64 * 1024
    with torch.no_grad():
        op(plain)
        op(tiered)
    assert_equal(plain, tiered)
    measured = session_behind_tensor(tiered).meter.peak()
    assert measured["device"] <= 64 * 1024


def session_behind_tensor(tensor):
    return tensor.entry.store


def test_schedules_are_shared_by_parameters_of_one_shape(tmp_path):
    model = torch.nn.Sequential(*(Holder(torch.randn(64, 8)) for _ in range(6)))
    on_disk(model, tmp_path)
    with torch.no_grad():
        for layer in model:
            layer.w.mul_(2)
    assert len(session_behind(model).steps) == 1


def test_an_empty_tensor_takes_every_op(tmp_path):
    plain, tiered = parameter_pair(lambda: torch.empty(0, 3), tmp_path)
    with torch.no_grad():
        for param in (plain, tiered):
            param.mul_(2).add_(param).zero_()
    assert_equal(plain, tiered)
    assert_equal((plain * 2).detach(), tiered * 2)


VIEWS = {
    "whole": lambda p: p,
    "rows": lambda p: p[2:5],
    "column": lambda p: p[:, 3],
    "transposed": lambda p: p.t(),
    "flat": lambda p: p.view(-1)[3:40],
    "strided": lambda p: p[::2, 1::3],
    "diagonal": lambda p: p.diagonal(),
    "unsqueezed": lambda p: p.unsqueeze(1)[:, 0],
}
OPS = {
    "mul": lambda v: v.mul_(1.5),
    "fill": lambda v: v.fill_(0.25),
    "zero": lambda v: v.zero_(),
    "self": lambda v: v.mul_(v),
    "sum": lambda v: v.sub_(v.mean()),
    "clamp": lambda v: v.clamp_(-0.5, 0.5),
    "normal": lambda v: v.normal_(),
    "uniform": lambda v: v.uniform_(),
    "sort": lambda v: v.copy_(v.sort(0).values),
    "mask": lambda v: v.masked_fill_(v > 0.4, -1.0),
    "plain": lambda v: v.add_(torch.ones(v.shape)),
    "cumsum": lambda v: v.cumsum_(0),
    "reversed": lambda v: v.copy_(v.flip(0)),
    "foreach": lambda v: torch._foreach_mul_([v, v], 0.5),
}


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from(sorted(VIEWS)), st.sampled_from(sorted(OPS))), max_size=8)
)
def test_any_sequence_of_writes_leaves_the_same_bits(tmp_path_factory, steps):
    plain, tiered = parameter_pair(lambda: torch.randn(12, 8), tmp_path_factory.mktemp("any"))
    torch.manual_seed(3)
    with torch.no_grad():
        for view, op in steps:
            state = torch.get_rng_state()
            OPS[op](VIEWS[view](plain))
            torch.set_rng_state(state)
            OPS[op](VIEWS[view](tiered))
    assert torch.equal(plain.detach(), plain_of(tiered))
