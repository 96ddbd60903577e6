"""What ops make of traced values, worked out once: always what the op itself says."""

import gc
import weakref
from operator import getitem

import torch
from torch import fx
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from zcompile.ir.copies import copy_graph
from zcompile.ir.rewrite import traced

aten = torch.ops.aten


def lies(value):
    """All that is asked of a traced value."""
    if isinstance(value, list | tuple):
        return [lies(part) for part in value]
    return (
        value.dtype,
        value.device,
        value.size(),
        value.stride(),
        value.storage_offset(),
        value.untyped_storage().nbytes(),
        value.requires_grad,
    )


def fakes(*sizes, **how):
    with FakeTensorMode():
        return [torch.empty(size, **how) for size in sizes]


x, wide, narrow, small, taller = fakes((4, 6), (6, 8), (8,), (2, 6), (8, 6))
trained, elsewhere = fakes((2, 6), requires_grad=True)[0], fakes((2, 6), device="meta")[0]
half = fakes((4, 6), dtype=torch.bfloat16)[0]
CALLS = [
    (aten.mm.default, (x, wide), {}),
    (aten.addmm.default, (narrow, x, wide), {}),
    (aten.t.default, (x,), {}),
    (aten.t.default, (x[1:3],), {}),
    (aten.t.default, (x[2:4],), {}),
    (aten.t.default, (x[:2],), {}),
    (aten.t.default, (small,), {}),
    (aten.t.default, (elsewhere,), {}),
    (aten.t.default, (trained,), {}),
    (aten.t.default, (half,), {}),
    (aten._unsafe_view.default, (x[:2], [12]), {}),
    (aten._unsafe_view.default, (x[2:], [12]), {}),
    (aten._unsafe_view.default, (small, [12]), {}),
    (aten.slice_scatter.default, (x.t(), x.t()[:2], 0, 0, 2), {}),
    (aten.slice_scatter.default, (taller[:4].t(), x.t()[:2], 0, 0, 2), {}),
    (aten.cat.default, ([x, x], 0), {}),
    (aten.cat.default, ([x, x], 1), {}),
    (aten.sum.dim_IntList, (x, [0], True), {}),
    (aten.sum.dim_IntList, (x, [0], False), {}),
    (aten.split_with_sizes.default, (x, [1, 3]), {}),
    (aten.split_with_sizes.default, (x, [3, 1]), {}),
    (aten.split_with_sizes_copy.default, (x, [3, 1]), {}),
    (aten._to_copy.default, (x,), {"dtype": torch.float64}),
    (aten._to_copy.default, (x,), {"dtype": torch.bfloat16}),
    (aten.clone.default, (x.t(),), {"memory_format": torch.contiguous_format}),
    (aten.clone.default, (x.t(),), {}),
    (aten.new_zeros.default, (x, [2, 3]), {"dtype": torch.int64}),
    (getitem, ((x, half), 1), {}),
]


def test_what_was_found_before_is_what_the_op_makes():
    graph = fx.Graph()
    for _ in range(2):
        for op, args, kwargs in CALLS:
            assert lies(traced(graph, op, args, kwargs)) == lies(op(*args, **kwargs)), op


def test_it_is_worked_out_once_for_all_that_lie_alike():
    graph = fx.Graph()
    first = traced(graph, aten.mm.default, (x[:2], wide), {})
    assert traced(graph, aten.mm.default, (x[2:], wide), {}) is first, "new, wherever it is read"
    assert traced(fx.Graph(), aten.mm.default, (x[:2], wide), {}) is not first


def test_numbers_that_are_equal_are_not_alike():
    """1 + 1.0 is of another dtype."""
    (count,) = fakes((3,), dtype=torch.int64)
    graph = fx.Graph()
    for number in (1, 1.0, True):
        found = traced(graph, aten.add.Tensor, (count, number), {})
        assert lies(found) == lies(aten.add.Tensor(count, number))


def test_dynamic_sizes_are_asked_for_each_time():
    mode = FakeTensorMode(shape_env=ShapeEnv())
    torch._dynamo.decorators.mark_dynamic(real := torch.empty(5, 6), 0)
    value = mode.from_tensor(real, static_shapes=False)
    assert type(value.size(0)) is not int
    graph = fx.Graph()
    first = traced(graph, aten.neg.default, (value,), {})
    assert traced(graph, aten.neg.default, (value,), {}) is not first


def test_what_is_known_goes_with_its_graph():
    graph = fx.Graph()
    value = weakref.ref(traced(graph, aten.mm.default, (x, wide), {}))
    assert value() is not None
    del graph
    gc.collect()
    assert value() is None


def test_a_graph_and_its_copies_know_the_same():
    graph = fx.Graph()
    graph.output(graph.placeholder("x"))
    before = traced(graph, aten.mm.default, (x[:2], wide), {})
    copy = copy_graph(graph)[0]
    again = copy_graph(copy)[0]
    assert traced(again, aten.mm.default, (x[2:], wide), {}) is before
    after = traced(again, aten.mm.default, (x, wide), {})
    del again
    gc.collect()
    assert traced(graph, aten.mm.default, (x, wide), {}) is after, "which a copy found that is gone"
    found = weakref.ref(after)
    del graph, copy, after
    gc.collect()
    assert found() is None
