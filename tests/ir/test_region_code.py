"""Results of kernels lie as tracing told when what was traced behind them reads them."""

import gc
import logging
import weakref
from operator import getitem

import pytest
import torch
from sampled import sampled
from torch import Tensor, fx, library, nn

import zcompile
from zcompile.ir import region_code
from zcompile.ir.eager_layouts import LAYOUTS
from zcompile.ir.graph import is_compute
from zcompile.ir.region_code import RegionCode
from zcompile.ir.regions import Link, compile_region, join

aten = torch.ops.aten
SIZE = 2, 3, 4, 4
PLAIN = torch.empty(SIZE)
LAST = torch.empty(SIZE, memory_format=torch.channels_last)
NAMES = iter(range(1000))


@library.custom_op("region_code::doubled", mutates_args=())
def doubled(value: Tensor) -> Tensor:
    return (value * 2).contiguous()


@doubled.register_fake
def _(value):
    return torch.empty_like(value)  # with the strides of `value`, which the kernel does not keep


@library.custom_op("region_code::both", mutates_args=())
def both(value: Tensor) -> tuple[Tensor, Tensor]:
    return value.contiguous() + 1, (value - 1).contiguous(memory_format=torch.channels_last)


@both.register_fake
def _(value):
    return torch.empty_like(value), torch.empty_like(value)


DOUBLED, BOTH = torch.ops.region_code.doubled.default, torch.ops.region_code.both.default


@pytest.fixture(autouse=True)
def _anew(monkeypatch):
    monkeypatch.setattr(region_code, "_told", set())


def region(write, *told):
    """The region of the ops that `write` adds to a graph; each returns its node and what is told
    of its result. `told` are the inputs."""
    graph = fx.Graph()
    inputs = []
    for value in told:
        inputs.append(graph.placeholder(f"input_{next(NAMES)}"))
        inputs[-1].meta["val"] = value

    def op(target, *args, told):
        node = graph.call_function(target, args)
        node.meta["val"] = told
        return node

    graph.output(tuple(write(op, *inputs)))
    return compile_region([n for n in graph.nodes if is_compute(n)], {})


def twice(call, *values):
    """What a region gives, of which its first and its second run agree."""
    first, second = call([*values]), call([*values])
    for one, other in zip(first, second, strict=True):
        assert one.stride() == other.stride()
        assert torch.equal(one, other)
    return second


def value_of(like):
    return torch.arange(float(like.numel())).view(like.shape).clone(memory_format=last_of(like))


def last_of(like):
    last = like.is_contiguous(memory_format=torch.channels_last)
    return torch.channels_last if last else torch.contiguous_format


@pytest.mark.parametrize("told", [PLAIN, LAST])
def test_a_result_lies_as_tracing_told(told):
    made = region(lambda op, x: [op(DOUBLED, x, told=told)], LAST)
    value = value_of(LAST)
    (result,) = twice(made.call, value)
    assert result.stride() == told.stride()
    assert torch.equal(result, value * 2)


def test_what_reads_it_within_the_region_reads_the_copy():
    def write(op, x):
        stray = op(DOUBLED, x, told=LAST)
        return [op(aten.as_strided.default, stray, [96], [1], told=torch.empty(96))]

    value = value_of(LAST)
    (result,) = twice(region(write, LAST).call, value)
    assert torch.equal(result, (value * 2).permute(0, 2, 3, 1).reshape(96))


def test_of_several_results_those_are_copied_that_lie_otherwise():
    def write(op, x):
        made = op(BOTH, x, told=(LAST, LAST))
        return [op(getitem, made, at, told=LAST) for at in (0, 1)]

    made = region(write, LAST)
    value = value_of(LAST)
    one, other = twice(made.call, value)
    assert one.stride() == other.stride() == LAST.stride()
    assert torch.equal(one, value + 1)
    assert torch.equal(other, value - 1)
    assert other.data_ptr() != one.data_ptr()


def test_a_joined_region_looks_for_itself():
    first = region(lambda op, x: [op(DOUBLED, x, told=LAST)], LAST)
    second = region(lambda op, x: [op(aten.neg.default, x, told=LAST)], LAST)
    joined = join((Link(first, (0,), (1,)), Link(second, (1,), (2,))), (0,), (1, 2))
    value = value_of(LAST)
    doubled, negative = twice(joined.call, value)
    assert doubled.stride() == negative.stride() == LAST.stride()
    assert torch.equal(negative, -2 * value)


def test_a_view_and_what_an_op_was_given_are_handed_on():
    def write(op, x):
        view = op(aten.permute.default, x, [0, 1, 3, 2], told=PLAIN)  # which is not true
        return [view, op(aten.add_.Tensor, x, 1, told=PLAIN)]

    value = value_of(LAST)
    view, changed = region(write, LAST).call([value])
    assert view.data_ptr() == value.data_ptr()
    assert changed is value


@pytest.mark.parametrize(
    "told",
    [
        torch.empty(2, 1, 1, 1).expand(SIZE),
        torch.empty(2, 3, 4, 8)[..., :4],
        torch.empty(96),
        torch.empty(SIZE).to_sparse(),
    ],
    ids=["shares memory", "gaps", "another shape", "no strides"],
)
def test_what_was_told_of_no_dense_tensor_is_left_as_it_is(told):
    (result,) = twice(region(lambda op, x: [op(DOUBLED, x, told=told)], LAST).call, value_of(LAST))
    assert result.stride() == PLAIN.stride()


def test_the_stride_of_one_element_says_nothing(caplog):
    told = torch.empty(2, 1, 4, 4, memory_format=torch.channels_last)
    value = torch.ones(2, 1, 4, 4)
    assert told.stride() != value.stride()
    twice(region(lambda op, x: [op(DOUBLED, x, told=told)], value).call, value)
    assert caplog.messages == []


def test_a_copy_that_was_traced_already_is_not_made_twice():
    """Of ops in `LAYOUTS`, whose real layout is known."""
    grad, rows = torch.ones(()), LAST

    def write(op, g, x, y):
        told = op(aten.mse_loss_backward.default, g, x, y, 1, told=LAST)
        return [op(aten.clone.default, told, told=PLAIN)]

    assert aten.mse_loss_backward.default in LAYOUTS
    made = region(write, grad, rows, rows)
    twice(made.call, grad, value_of(LAST), value_of(LAST) + 1)
    assert not made.body.find_nodes(op="call_function", target=region_code.as_told)


def read_by(target, *args):
    """A region with an op of torch's that was told to be contiguous, and what reads that."""

    def write(op, x):
        relu = op(aten.relu.default, x, told=PLAIN)
        turned = op(aten.permute.default, relu, [0, 1, 2, 3], told=PLAIN)
        return [
            op(target, turned, *args, told=torch.empty(96)),
            op(aten.neg.default, relu, told=PLAIN),
        ]

    return write


def test_of_torchs_ops_a_copy_is_for_those_who_take_the_layout_for_granted():
    """Others round by the layout that there is in eager PyTorch."""
    value = value_of(LAST)
    flat, negative = twice(region(read_by(aten.view.default, [96]), LAST).call, value)
    assert torch.equal(flat, value.reshape(96))
    assert negative.stride() == LAST.stride()
    made = region(read_by(aten.abs.default), LAST)
    assert not made.body.find_nodes(op="call_function", target=region_code.as_told)
    assert [result.stride() for result in twice(made.call, value)] == [LAST.stride()] * 2


def test_a_part_of_a_result_is_a_view_of_it():
    def write(op, x):
        relu = op(aten.relu.default, x, told=PLAIN)
        parts = op(aten.split.Tensor, relu, 1, told=tuple(PLAIN.split(1)))
        part = op(getitem, parts, 1, told=PLAIN[:1])
        return [op(aten.view.default, part, [48], told=torch.empty(48))]

    value = value_of(LAST)
    (flat,) = twice(region(write, LAST).call, value)
    assert torch.equal(flat, value[1].reshape(48))


@library.custom_op("region_code::by_size", mutates_args=())
def by_size(value: Tensor) -> Tensor:
    last = value.shape[-1] > 4
    return value.clone(memory_format=torch.channels_last if last else torch.contiguous_format)


by_size.register_fake(lambda value: torch.empty(value.shape))


def test_a_users_op_that_chooses_by_size_is_looked_at_in_each_call(caplog):
    op = torch.ops.region_code.by_size.default
    made = region(lambda write, x: [write(op, x, told=PLAIN)], PLAIN)
    for size in (4, 8, 4):
        value = torch.randn(2, 3, size, size)
        (result,) = made.call([value])
        assert result.is_contiguous()
        assert torch.equal(result, value)
    assert len(caplog.messages) == 1


def test_who_takes_it_for_granted_may_be_in_another_region():
    graph = fx.Graph()
    place = graph.placeholder("given")
    place.meta["val"] = LAST
    relu = graph.call_function(aten.relu.default, (place,))
    turned = graph.call_function(aten.permute.default, (relu, [0, 1, 2, 3]))
    flat = graph.call_function(aten.view.default, (turned, [96]))
    for node in (relu, turned, flat):
        node.meta["val"] = torch.empty(96) if node is flat else PLAIN
    graph.output((flat,))
    compiled = {}
    first, second = (compile_region(nodes, compiled) for nodes in ([relu], [turned, flat]))
    value = value_of(LAST)
    for _ in range(2):
        (result,) = second.call([*first.call([value])])
        assert torch.equal(result, value.reshape(96))


def test_it_is_said_once_for_each_op_and_who_wrote_it_is_warned(caplog):
    caplog.set_level(logging.INFO, "zcompile.ir.region_code")
    for _ in range(2):
        region(lambda op, x: [op(DOUBLED, x, told=LAST)], LAST).call([value_of(LAST)])
        region(read_by(aten.view.default, [96]), LAST).call([value_of(LAST)])
    rows = [(row.levelname, row.getMessage()) for row in caplog.records]
    assert [level for level, _ in rows] == ["WARNING", "INFO"]
    assert "region_code.doubled gives a result with strides (48, 16, 4, 1)" in rows[0][1]
    assert "told of (48, 1, 12, 3)" in rows[0][1]
    assert "register_fake" in rows[0][1]
    assert "register_fake" not in rows[1][1]


class Held:
    """A value that says whether it is alive."""

    def __init__(self) -> None:
        self.value = torch.ones(4)
        self.alive = weakref.ref(self.value)


def test_values_die_in_the_first_run_as_in_the_next():
    """An input dies behind its last reader, a value that is made likewise."""
    seen = []
    held = Held()

    def look(value):
        gc.collect()
        seen.append(held.alive() is not None)
        return value

    graph = fx.Graph()
    given = graph.placeholder("given")
    first = graph.call_function(getitem, (given, 0))
    graph.call_method("clear", (given,))
    made = graph.call_function(torch.neg, (first,))
    graph.output((graph.call_function(look, (made,)),))
    code = RegionCode(graph)
    for _ in range(2):
        code([held.__dict__.pop("value")])
        held = Held()
    assert seen == [False, False]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(3, 8, 3, padding=1), nn.GroupNorm(2, 8)
        self.last = nn.Conv2d(8, 4, 3, padding=1)

    def forward(self, x):
        return self.last(self.norm(swish(self.first(x)))).square().mean()


@library.custom_op("region_code::swish", mutates_args=())
def swish(value: Tensor) -> Tensor:
    return nn.functional.silu(value).contiguous()


@library.custom_op("region_code::swish_backward", mutates_args=())
def swish_backward(grad: Tensor, value: Tensor) -> Tensor:
    return aten.silu_backward(grad.contiguous(), value.contiguous())


for op in (swish, swish_backward):
    op.register_fake(lambda *values: torch.empty_like(values[-1]))
swish.register_autograd(
    lambda context, grad: swish_backward(grad, *context.saved_tensors),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
)


@pytest.mark.parametrize("dynamic", sampled([False, True], False))
def test_gradients_are_right_behind_an_op_whose_fake_kernel_tells_of_other_strides(
    dynamic, tmp_path
):
    """Stock `aot_eager` has gradients that are off by as much as they are large."""

    def gradients(offloads):
        torch.manual_seed(0)
        model = run = Net().to(memory_format=torch.channels_last)
        if offloads:
            model = zcompile.offload(
                model, device="cpu", device_memory="16MiB", host_memory="64MiB", disk=tmp_path
            )
            run = torch.compile(model, backend="zinf", dynamic=dynamic)
        for number in range(3):
            model.zero_grad()
            rows = torch.randn(2 + number * dynamic, 3, 6, 6)
            run(rows.to(memory_format=torch.channels_last)).backward()
        return [p.grad.cpu().clone() for p in model.parameters()]

    for found, stock in zip(gradients(True), gradients(False), strict=True):
        torch.testing.assert_close(found, stock)
