"""Values without memory of their own, results of another dtype, and outputs of another shape."""

import ctypes

import numpy
import pytest
import torch
from pairs import Holder, assert_equal, mlp, on_disk, parameter_pair, plain_of
from torch import nn, optim
from torch.nn import functional as F

from zcompile.errors import Unsupported
from zcompile.runtime.device.pages import address_of, clear_bytes, copy_bytes

ROWS = torch.arange(96.0).reshape(12, 8)
ZEROS = torch._efficientzerotensor  # what autograd makes of a gradient that is zero everywhere


def rows():
    return torch.randn(12, 8)


DOUBLES = {
    "softmax": lambda p: F.softmax(p, 0, dtype=torch.float64),
    "log softmax": lambda p: F.log_softmax(p, 1, dtype=torch.float64),
    "to": lambda p: p.to(torch.float64),
    "to, copied": lambda p: p.to(torch.float64, copy=True),
    "to the device, copied": lambda p: p.to("cpu", torch.float64, copy=True),
    "to the device as it is, copied": lambda p: p.to("cpu", copy=True),
    "to the device, not waiting": lambda p: p.to("cpu", torch.float64, non_blocking=True),
    "type as": lambda p: p.type_as(torch.zeros(1, dtype=torch.float64)),
    "type": lambda p: p.type(torch.DoubleTensor),
    "copied by the op": lambda p: torch.ops.aten._to_copy(p, dtype=torch.float64, device="cpu"),
    "sum": lambda p: p.sum(dtype=torch.float64),
    "product with doubles": lambda p: p * torch.full((), 2.0, dtype=torch.float64),
    "sum with doubles": lambda p: p + torch.ones(12, 8, dtype=torch.float64),
    "narrow": lambda p: p.to("cpu", torch.bfloat16, copy=True),
}


@pytest.mark.parametrize("name", DOUBLES)
def test_a_result_of_another_dtype_is_that_of_a_plain_parameter(name, tmp_path):
    plain, tiered = parameter_pair(rows, tmp_path)
    expected, result = DOUBLES[name](plain), DOUBLES[name](tiered)
    assert_equal(expected, result)
    assert result.requires_grad == expected.requires_grad
    for each in (expected, result):
        each.sum().backward()
    assert_equal(plain.grad, tiered.grad)


NO_SLOPE = {
    "sgn": torch.sgn,
    "sign": torch.sign,
    "floor": torch.floor,
    "round": torch.round,
    "sgn, then a product": lambda p: torch.sgn(p) * 2,
}


@pytest.mark.parametrize("home", [{}, {"host_memory": "4MiB", "disk": None}], ids=["disk", "host"])
@pytest.mark.parametrize("name", NO_SLOPE)
def test_a_gradient_that_is_zero_everywhere_comes_home(name, home, tmp_path):
    plain, tiered = parameter_pair(rows, tmp_path, **home)
    for param in (plain, tiered):
        optimizer = optim.AdamW([param], lr=0.1)
        for _ in range(2):
            NO_SLOPE[name](param).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        (param * param).sum().backward()
        NO_SLOPE[name](param).sum().backward()
    assert_equal(plain.grad, tiered.grad)
    assert_equal(plain, tiered)


class Signs(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.w = nn.Parameter(torch.randn(16, 16))

    def forward(self, x):
        return x * torch.sgn(self.w)


def test_a_compiled_gradient_that_is_zero_everywhere_comes_home(tmp_path):
    torch._dynamo.reset()
    plain, tiered = Signs(), on_disk(Signs(), tmp_path, host_memory="4MiB", disk=None)
    call = torch.compile(tiered, backend="zinf")
    for model, forward in ((plain, plain), (tiered, call)):
        optimizer = optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        for _ in range(5):  # the last of them planned, with gradients where they are made
            forward(torch.ones(16, 16)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert_equal(plain.w, tiered.w)


LAZY = {
    "zeros": lambda: ZEROS((12, 8)),
    "transposed zeros": lambda: ZEROS((8, 12)).t(),
    "negative": lambda: torch.complex(ROWS, ROWS + 1).conj().imag,
    "expanded": lambda: ROWS[:1].expand(12, 8),
    "negative in a row": lambda: torch._neg_view(ROWS.clone()),
    "part": lambda: torch.arange(200.0)[3:99].view(12, 8),
}
WAYS = {
    "copy": lambda p, x: p.detach().copy_(x),
    "part": lambda p, x: p.detach()[2:].copy_(x[2:]),
    "add": lambda p, x: p.detach().add_(x),
    "multiply": lambda p, x: p.detach().mul_(x),
    "addcmul": lambda p, x: p.detach().addcmul_(x, x),
    "data": lambda p, x: setattr(p, "data", x),
    "gradient": lambda p, x: step_with(p, x),
    "state": lambda p, x: step_with(p, torch.ones(12, 8), x),
    "load": lambda p, x: holder_of(p).load_state_dict({"w": x}),
    "list": lambda p, x: torch._foreach_add_([p.detach()], [x]),
}


def step_with(param, grad, state=None):
    param.grad = grad
    optimizer = optim.SGD([param], lr=0.1, momentum=0.9)
    if state is not None:
        optimizer.state[param]["momentum_buffer"] = state
    optimizer.step()


def holder_of(param):
    model = Holder(torch.zeros(1))
    model._parameters["w"] = param
    return model


NOT_SO = {
    ("zeros", "state"),
    ("transposed zeros", "state"),
    ("expanded", "state"),
    ("transposed zeros", "data"),
    ("expanded", "data"),
    ("negative", "data"),
}
"""What plain torch refuses to write to, and data of other strides, which is refused here."""


@pytest.mark.parametrize(
    ("name", "way"), [(name, way) for name in LAZY for way in WAYS if (name, way) not in NOT_SO]
)
def test_values_that_do_not_lie_in_memory_as_they_read_come_in(name, way, tmp_path):
    plain, tiered = parameter_pair(rows, tmp_path)
    for param in (plain, tiered):
        WAYS[way](param, LAZY[name]())
    assert torch.equal(plain.detach(), plain_of(tiered))


OUTPUTS = {
    "addbmm_ of one": (
        lambda: torch.ones(1, 1),
        lambda p: p.addbmm_(torch.ones(2, 5, 3), torch.ones(2, 3, 5)),
    ),
    "larger": (rows, lambda p: torch.mm(torch.ones(13, 3), torch.ones(3, 8), out=p)),
    "smaller": (rows, lambda p: torch.mm(torch.ones(3, 3), torch.ones(3, 8), out=p)),
    "of a sort": (
        rows,
        lambda p: torch.sort(torch.ones(3, 8), out=(p, torch.empty(0, dtype=torch.long))),
    ),
}


@pytest.mark.filterwarnings("ignore:An output with one or more elements was resized")
@pytest.mark.parametrize("name", OUTPUTS)
def test_an_output_of_another_shape_is_refused_and_keeps_its_values(name, tmp_path):
    make, write = OUTPUTS[name]
    plain, tiered = parameter_pair(make, tmp_path)
    with pytest.raises(Unsupported, match="changes the shape"):
        write(tiered.detach())
    assert_equal(plain, tiered)


def test_an_output_of_the_shape_is_written(tmp_path):
    plain, tiered = parameter_pair(rows, tmp_path)
    for param in (plain, tiered):
        w = param.detach()
        torch.mm(torch.ones(12, 3), torch.ones(3, 8), out=w)
        w.addbmm_(torch.ones(2, 12, 3), torch.ones(2, 3, 8), beta=0.5)
        torch.sort(w, 1, out=(w, torch.empty(0, dtype=torch.long)))
    assert_equal(plain, tiered)


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: ZEROS((8,)),
        lambda: torch.empty(8, device="meta"),
        lambda: torch.ones(7),
        lambda: torch.ones(9)[2:],
    ],
    ids=["zeros without memory", "meta", "too short", "not so much left"],
)
def test_a_copy_by_address_looks_where_it_goes(wrong):
    right = torch.ones(8)
    for copy in (
        lambda: copy_bytes(right, wrong(), 32),
        lambda: copy_bytes(wrong(), right, 32),
        lambda: clear_bytes(wrong(), 32),
    ):
        with pytest.raises(RuntimeError, match="no memory"):
            copy()
    assert torch.equal(right, torch.ones(8))
    copy_bytes(right, ZEROS((8,)), 0)
    assert ctypes.c_float.from_address(address_of(right, 32)).value == 1


@pytest.mark.parametrize(
    "wrong",
    [lambda: ZEROS((96,)), lambda: torch.ones(192)[::2]],
    ids=["zeros without memory", "gaps"],
)
def test_the_doors_of_the_store_look_too(wrong, tmp_path):
    plain, tiered = parameter_pair(rows, tmp_path)
    entry, value = tiered.entry, wrong()
    raw = value.view(torch.uint8) if value.is_contiguous() else torch.ones(768).byte()[::2]
    for use in (
        lambda: entry.store.put(entry, raw),
        lambda: entry.store.add(entry, value),
        lambda: entry.store.read(entry, raw),
    ):
        with pytest.raises(RuntimeError, match="no memory"):
            use()
    assert_equal(plain, tiered)


def test_an_array_of_a_tiered_tensor_cannot_be_written_in_vain(tmp_path):
    _, tiered = parameter_pair(rows, tmp_path)
    w = tiered.detach()
    arrays = (w.numpy(), tiered.numpy(force=True), numpy.asarray(w), numpy.asarray(w, "float64"))
    for array in arrays:
        assert numpy.array_equal(array, plain_of(tiered).numpy())
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 1
        with pytest.raises(ValueError, match="read-only"):
            array += 1
    assert torch.equal(plain_of(tiered), plain_of(w))


def test_an_array_that_was_asked_for_as_a_copy_may_be_written(tmp_path):
    plain, tiered = parameter_pair(rows, tmp_path)
    w = tiered.detach()
    for array in (numpy.array(w), w.__array__(copy=True), w.__array__("float64", copy=True)):
        array[0] = 1
        assert array[0, 0] == 1
    assert w.__array__("float64").dtype == numpy.float64
    with pytest.raises(ValueError, match="a copy cannot be avoided"):
        w.__array__(copy=False)
    with pytest.raises(TypeError):
        memoryview(w)
    assert_equal(plain, tiered)


def test_states_are_arrays_of_the_same_kind(tmp_path):
    model = on_disk(mlp(), tmp_path)
    optimizer = optim.AdamW(model.parameters())
    model(torch.ones(1, 16)).sum().backward()
    optimizer.step()
    for value in (model[0].weight.grad, optimizer.state[model[0].weight]["exp_avg"]):
        assert not value.numpy().flags.writeable
