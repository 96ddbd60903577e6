"""Writes through views of tiered tensors change what the view shows, and nothing beside it."""

import pytest
import torch
from pairs import Holder, assert_equal, mlp, on_disk, parameter_pair, plain_of
from sampled import crossed
from torch import nn, optim
from torch.nn import functional as F
from torch.nn.utils import clip_grad_norm_
from torch.utils._python_dispatch import TorchDispatchMode

from zcompile.errors import Unsupported, ValueUnset
from zcompile.ir.types import Layout

HOMES = {"host": {"host_memory": "4MiB", "disk": None}, "disk": {}}
"""Where the entry rests: the host tier has room for all, or for staging only."""


def square():
    return torch.randn(64, 64)


def odd():
    return torch.randn(63, 65)


def kernels():
    return torch.randn(8, 6, 3, 3).to(memory_format=torch.channels_last)


def nine():
    return torch.randn(9)


VIEWS = {
    "diagonal": (square, lambda w: w.diagonal()),
    "diagonal above": (square, lambda w: w.diagonal(1)),
    "diagonal of the transposed": (square, lambda w: w.t().diagonal()),
    "first and last row": (square, lambda w: w[::63]),
    "first and last column": (square, lambda w: w[:, ::63]),
    "corners": (square, lambda w: w[::63, ::63]),
    "every other of an odd number": (odd, lambda w: w.view(-1)[::2]),
    "diagonal of an oblong": (odd, lambda w: w.diagonal()),
    "every other row and column": (odd, lambda w: w[::2, ::2]),
    "rows within": (odd, lambda w: w[3:5]),
    "the last row": (odd, lambda w: w[-1]),
    "all but the first": (odd, lambda w: w.view(-1)[1:]),
    "a column": (odd, lambda w: w[:, 7]),
    "as other strides": (square, lambda w: w.as_strided((16, 2), (4, 4032))),
    "as integers": (square, lambda w: w.view(torch.int32).diagonal()),
    "as halves": (square, lambda w: w.view(torch.int16)[:, ::127]),
    "all of it": (square, lambda w: w.view(8, 8, 64)),
    "all of it transposed": (odd, lambda w: w.t()),
    "outer taps": (kernels, lambda w: w[:, :, ::2, ::2]),
    "first and last channels": (kernels, lambda w: w[::7, ::5]),
    "taps in memory order": (kernels, lambda w: w.permute(0, 2, 3, 1).flatten(1)[:, ::53]),
    "windows that overlap": (odd, lambda w: w.view(-1).unfold(0, 3, 2)),
    "steps that overlap": (nine, lambda w: w.as_strided((3, 3), (2, 2))),
}


def values_like(view):
    return (torch.arange(view.numel()) % 7 + 1).reshape(view.shape).to(view.dtype)


WRITES = {
    "zero": lambda v: v.zero_(),
    "fill": lambda v: v.fill_(2),
    "fill by a tensor": lambda v: v.fill_(torch.tensor(3)),
    "copy": lambda v: v.copy_(values_like(v)),
    "copy of one": lambda v: v.copy_(torch.tensor(5)),
    "copy of itself flipped": lambda v: v.copy_(v.flip(0)),
    "multiply": lambda v: v.mul_(3),
    "add": lambda v: v.add_(values_like(v)),
    "clamp": lambda v: v.clamp_(0, 1),
    "normal": lambda v: v.normal_() if v.is_floating_point() else v.random_(),
    "uniform": lambda v: v.uniform_() if v.is_floating_point() else v.random_(5),
    "bernoulli": lambda v: v.bernoulli_(0.5),
    "set item": lambda v: v.__setitem__(0, 4),
}


def with_others_in_the_arena(tiered):
    """A sum of other values has just been computed, so that the arena is full of them."""
    torch.full_like(tiered, 777).norm()


@pytest.mark.parametrize(("name", "home"), crossed(VIEWS, HOMES))
def test_a_write_changes_the_view_and_nothing_beside_it(name, home, tmp_path):
    make, view = VIEWS[name]
    plain, tiered = parameter_pair(make, tmp_path, **HOMES[home])
    with torch.no_grad():
        for title, write in WRITES.items():
            torch.manual_seed(3)
            try:
                write(view(plain))
            except RuntimeError:  # more than one element in one place
                assert "overlap" in name, title
                continue
            with_others_in_the_arena(tiered)
            torch.manual_seed(3)
            write(view(tiered))
            assert torch.equal(plain, tiered.on_host()), title


@pytest.mark.parametrize("home", HOMES)
def test_fill_diagonal_keeps_what_is_off_the_diagonal(home, tmp_path):
    plain, tiered = parameter_pair(square, tmp_path, **HOMES[home])
    for param in (plain, tiered):
        (param * param).sum().backward()
        with torch.no_grad():
            param.fill_diagonal_(0.0)
            param.grad.fill_diagonal_(0.0)
            param.grad[::63].zero_()
    assert_equal(plain, tiered)
    assert_equal(plain.grad, tiered.grad)


@pytest.mark.parametrize("home", HOMES)
@pytest.mark.parametrize("view", ["diagonal", "first and last row", "outer taps"])
def test_a_state_of_an_optimizer_is_written_through_a_view(view, home, tmp_path):
    make, view = VIEWS[view]
    plain, tiered = parameter_pair(make, tmp_path, **HOMES[home])
    states = []
    for param in (plain, tiered):
        optimizer = optim.AdamW([param], lr=0.1)
        for _ in range(2):
            (param * param).sum().backward()
            optimizer.step()
            view(optimizer.state[param]["exp_avg"]).zero_()
            view(optimizer.state[param]["exp_avg_sq"]).fill_(1.0)
        states.append(optimizer.state[param])
    assert_equal(plain, tiered)
    for key in ("exp_avg", "exp_avg_sq"):
        assert_equal(states[0][key], states[1][key])


@pytest.mark.parametrize("view", ["diagonal", "first and last row", "rows within"])
def test_what_waits_for_the_step_is_done_before_a_view_is_written(view, tmp_path):
    view = VIEWS[view][1]
    plain, tiered = parameter_pair(square, tmp_path)
    for param in (plain, tiered):
        (param * param).sum().backward()
        clip_grad_norm_([param], 0.5)
        view(param.grad).fill_(1.0)
        clip_grad_norm_([param], 0.1)
        view(param.grad).zero_()
        optim.SGD([param], lr=0.1).step()
    assert_equal(plain.grad, tiered.grad)
    assert_equal(plain, tiered)


def test_what_waits_for_complex_numbers_is_done_before_their_parts_are_read(tmp_path):
    plain, tiered = parameter_pair(lambda: torch.randn(64, 64, dtype=torch.complex64), tmp_path)
    found = []
    for param in (plain, tiered):
        (param * param.conj()).abs().sum().backward()
        with torch.no_grad():
            param.grad[0, 0] = complex(1.0, float("inf"))
            param.grad.mul_(torch.tensor(0.5))  # of complex numbers: the real part is no number now
            parts = torch.view_as_real(param.grad)
            found.append(parts + 1)
            parts.mul_(torch.tensor(0.25))
            param.grad.mul_(torch.tensor(3.0))
    assert_equal(found[0], found[1])
    assert_equal(plain.grad, tiered.grad)


def test_a_gradient_that_is_part_of_an_entry_is_added_to_where_it_lies(tmp_path):
    torch._dynamo.reset()
    found = []
    for offloaded in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 24, bias=False))
        call = model
        if offloaded:
            on_disk(model, tmp_path)
            call = torch.compile(model, backend="zinf")
        flat = torch.zeros_like(model[1].weight).detach()
        for _ in range(2):
            loss = call(torch.ones(2, 8)).sum()
            model[0].weight.grad = flat[8:16]
            loss.backward()
            model[0].weight.grad = None
        found.append(plain_of(flat))
    assert found[0][8:16].any()
    assert torch.equal(found[0], found[1])


def test_part_of_what_has_no_value_cannot_be_written(tmp_path):
    with torch.device("meta"):
        model = nn.Linear(64, 64)
    on_disk(model, tmp_path)
    for view in (lambda w: w.diagonal(), lambda w: w[::63], lambda w: w[1:3]):
        for write in ("zero", "fill", "copy"):
            with torch.no_grad(), pytest.raises(ValueUnset):
                WRITES[write](view(model.weight))
    with torch.no_grad():
        model.weight.t().fill_(1)
        model.weight.diagonal().zero_()
    assert torch.equal(model.weight.on_host(), 1 - torch.eye(64))


def test_a_parameter_with_gaps_gets_its_first_value(tmp_path):
    with torch.device("meta"):
        model = Holder(torch.empty(6, 8)[:, :5])
    on_disk(model, tmp_path)
    with_others_in_the_arena(on_disk(mlp(), tmp_path)[0].weight)
    value = torch.randn(6, 5)
    model.load_state_dict({"w": value})
    assert torch.equal(model.w.on_host(), value)


def test_a_copy_in_another_dtype_follows_a_write_through_a_view(tmp_path):
    torch._dynamo.reset()
    found = []
    for offloaded in (False, True):
        torch.manual_seed(0)
        model = nn.Linear(64, 64, bias=False)
        call = torch.compile(model, backend="aot_eager")
        if offloaded:
            on_disk(model, tmp_path, param_dtype=torch.bfloat16, device_memory="4MiB")
            call = torch.compile(model, backend="zinf")
        for _ in range(2):
            with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
                found.append(call(torch.ones(2, 64)))
            with torch.no_grad():
                model.weight.diagonal().zero_()
    assert torch.equal(found[0], found[2])
    assert torch.equal(found[1], found[3])


@pytest.mark.parametrize(
    ("size", "stride", "dense"),
    [
        ((3, 3), (3, 1), True),
        ((3, 3), (1, 3), True),
        ((3, 3), (2, 2), False),  # as many elements as its span, of which it touches five
        ((2, 2, 2), (1, 2, 4), True),
        ((2, 2, 2), (1, 1, 5), False),
        ((1, 4), (0, 1), True),
        ((4, 1), (1, 77), True),
        ((4,), (0,), False),
        ((0, 3), (3, 1), True),
        ((), (), True),
    ],
)
def test_dense_means_each_element_of_the_span_once(size, stride, dense):
    assert Layout(size, stride, 0, torch.float32).dense == dense
    lies = torch.empty_strided(size, stride, device="meta")
    assert dense == torch._prims_common.is_non_overlapping_and_dense_or_false(lies) or not size


def test_what_covers_an_entry_has_each_byte_of_it_once():
    def covers(size, stride, offset=0, dtype=torch.float32):
        return Layout(size, stride, offset, dtype).covers(64)

    assert covers((4, 4), (4, 1))
    assert covers((4, 4), (1, 4))
    assert covers((32,), (1,), dtype=torch.int16)
    assert not covers((4,), (5,))  # the diagonal: from the first byte to the last
    assert not covers((2, 4), (12, 1))
    assert not covers((15,), (1,))
    assert not covers((15,), (1,), offset=1)
    assert not covers((8,), (2,))


@pytest.mark.parametrize("make", [lambda: torch.randn(()), lambda: torch.randn(1), square])
def test_what_is_copied_to_itself_keeps_its_value(make, tmp_path):
    plain, tiered = parameter_pair(make, tmp_path)
    for param in (plain, tiered):
        (param * param).sum().backward()
        torch.full((64,), 777.0).norm()
        with torch.no_grad():
            param.copy_(param)
            param.grad.copy_(param.grad)
            column = param.view(-1)[:1]
            column.copy_(column)
    assert_equal(plain, tiered)
    assert_equal(plain.grad, tiered.grad)


def test_what_is_copied_from_elsewhere_in_a_tensor_is_copied(tmp_path):
    """As many elements of one entry are not yet the same ones."""
    plain, tiered = parameter_pair(lambda: torch.randn(3, 3, 3), tmp_path)
    for param in (plain, tiered):
        with torch.no_grad():
            flat = param.view(-1)
            flat[:1].copy_(flat[1:2])
            flat[9:10].copy_(flat[8:9])
            flat[12:16].copy_(flat[20:24])
            with pytest.raises(RuntimeError, match="single memory location"):
                param.permute(2, 1, 0).copy_(param.permute(1, 0, 2))
    assert_equal(plain, tiered)


def test_an_op_that_writes_one_thing_returns_another(tmp_path):
    """`rrelu` notes in a tensor of its own by what it multiplied."""
    results = []
    for param in parameter_pair(square, tmp_path):
        torch.manual_seed(3)
        results.append(torch.nn.functional.rrelu(param, training=True))
    assert_equal(*results)


@pytest.mark.parametrize("size", [(), (1,), (64, 1)])
def test_what_out_names_is_not_resized(size, tmp_path):
    plain, tiered = parameter_pair(square, tmp_path)
    narrow = torch.ones(size)
    with torch.no_grad():
        for source in (narrow, torch.zeros_like(tiered).flatten()[:1].view(1)):
            with pytest.raises(Unsupported, match="changes the shape"):
                torch.add(source, source, out=tiered)
            with pytest.raises(Unsupported, match="changes the shape"):
                torch.cumsum(source.reshape(-1), 0, out=tiered)
        torch.add(torch.ones(64), torch.ones(64, 1), out=tiered)
        torch.add(torch.ones(64), torch.ones(64, 1), out=plain)
    assert_equal(plain, tiered)


LIKE = {
    "rows": (lambda: torch.randn(6, 8), {}),
    "columns": (lambda: torch.randn(6, 8).t(), {}),
    "channels last": (
        lambda: torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last),
        {"memory_format": torch.preserve_format},
    ),
}


@pytest.mark.parametrize("like", LIKE)
def test_a_plain_tensor_takes_the_size_of_a_tiered_one(like, tmp_path):
    make, how = LIKE[like]
    sizes = []
    for param in parameter_pair(make, tmp_path):
        plain = torch.zeros(2)
        assert plain.resize_as_(param.detach(), **how) is plain
        sizes.append((plain.size(), plain.stride()))
    assert sizes[0] == sizes[1]
    with pytest.raises(Unsupported, match="changes the shape"):
        param.detach().resize_as_(torch.zeros(2))


INPUTS = {
    "transposed": lambda p: p.t(),
    "row": lambda p: p[1],
    "reshaped": lambda p: p.view(16, 4),
    "detached": lambda p: p.detach().t(),
    "data": lambda p: p.data[2:],
    "diagonal": lambda p: p.diagonal(),
    "expanded": lambda p: p[None].expand(3, 8, 8),
}


@pytest.mark.parametrize("view", INPUTS.values(), ids=INPUTS)
def test_a_compiled_function_takes_a_view_of_a_parameter(view, tmp_path):
    torch._dynamo.reset()
    pair = parameter_pair(lambda: torch.randn(8, 8), tmp_path)
    results = []
    for param in pair:
        call = torch.compile(lambda v: v * v * 2 + v.sum(), backend="zinf")
        result = call(view(param))
        if result.requires_grad:
            result.sum().backward()
            with torch.no_grad():
                late = call(view(param))
            result = call(view(param))
            with torch.no_grad():
                param.add_(1)
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                result.sum().backward()
            results += [late, param.grad]
        results.append(result.detach())
    half = len(results) // 2
    for a, b in zip(results[:half], results[half:], strict=True):
        assert_equal(a, b)


@pytest.mark.parametrize("view", INPUTS.values(), ids=INPUTS)
def test_a_view_can_be_taken_in_inference_mode(view, tmp_path):
    plain, tiered = parameter_pair(lambda: torch.randn(8, 8), tmp_path)
    with torch.inference_mode():
        assert_equal(view(plain).clone(), view(tiered).clone())
        assert view(plain).is_inference() is view(tiered).is_inference()
    loss = tiered.square().sum()
    with torch.inference_mode():
        tiered.t().mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


class Reading(TorchDispatchMode):
    """What a mode of a user's reads of a tensor when an op comes by, where autograd is off."""

    def __init__(self, read):
        self.read, self.seen = read, []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen.append(self.read())
        return func(*args, **(kwargs or {}))


def within_a_mode(read):
    with Reading(read) as mode:
        torch.ones(1).add(1)
    return mode.seen[-1]


def in_inference(read):
    with torch.inference_mode():
        return read()


VIEWS_OR_COPIES = {
    "wider": lambda p: p.double(),
    "narrower": lambda p: p.to(torch.bfloat16),
    "the same": lambda p: p.to(p.dtype),
    "contiguous": lambda p: p.t().contiguous(),
    "contiguous already": lambda p: p.contiguous(),
    "reshaped": lambda p: p.t().reshape(-1),
    "flat": lambda p: p[:, :4].flatten(),
    "expanded": lambda p: p[0].expand_as(p),
    "as another": lambda p: torch.ones(64).view_as(p),
    "pieces": lambda p: p.chunk(3)[2],
}
"""Ops that torch itself makes of others, but for where it skips autograd."""


@pytest.mark.parametrize("where", [within_a_mode, in_inference], ids=lambda f: f.__name__)
@pytest.mark.parametrize("op", VIEWS_OR_COPIES)
def test_what_may_be_a_view_or_a_copy_has_its_values_where_autograd_is_skipped(op, where, tmp_path):
    plain, tiered = parameter_pair(lambda: torch.randn(8, 8), tmp_path)
    made, expected = (where(lambda p=p: VIEWS_OR_COPIES[op](p.detach())) for p in (tiered, plain))
    assert_equal(made.clone(), expected.clone())
    assert made.stride() == expected.stride()
    is_view = expected.untyped_storage().data_ptr() == plain.untyped_storage().data_ptr()
    assert is_view == (getattr(made, "entry", None) is tiered.entry)


WRITTEN = {
    "dropout": lambda p: F.dropout(p, 0.5, training=False),
    "two dimensions": lambda p: torch.atleast_2d(p[0]),
    "broadcast": lambda p: torch.broadcast_tensors(p, torch.ones(8))[0],
    "permuted": lambda p: torch.einsum("ij->ji", p),
    "as a type": lambda p: p.type_as(torch.ones(1)),
    "summed to its size": lambda p: p.sum_to_size(8, 8),
    "pieces": lambda p: p.unsafe_chunk(2)[1],
    "a copy": lambda p: torch.native_channel_shuffle(p[None, :, :, None], 2),
    "a product": lambda p: p.subtract(1),
}
"""Ops whose schema does not say that they may give back a view, or the operand itself."""


@pytest.mark.parametrize("where", [within_a_mode, in_inference], ids=lambda f: f.__name__)
@pytest.mark.parametrize("op", WRITTEN)
def test_what_is_written_to_a_result_reaches_the_operand_where_it_does_in_torch(
    op, where, tmp_path
):
    plain, tiered = parameter_pair(lambda: torch.randn(8, 8), tmp_path)
    before = plain.detach().clone()
    for p in (plain, tiered):
        where(lambda p=p: WRITTEN[op](p.detach()).mul_(2))
    assert torch.equal(plain, before) == (op in ("a copy", "a product"))
    assert_equal(plain, tiered)


@pytest.mark.parametrize("name", ["batch_norm", "instance_norm"])
def test_running_statistics_are_written_under_inference_mode(name, tmp_path):
    plain, tiered = parameter_pair(lambda: torch.zeros(4), tmp_path)
    x = torch.randn(6, 4, 5)
    norm = {
        "batch_norm": lambda p: F.batch_norm(x, p.detach(), torch.ones(4), training=True),
        "instance_norm": lambda p: F.instance_norm(x, p.detach(), torch.ones(4)),
    }[name]
    for p in (plain, tiered):
        in_inference(lambda p=p: norm(p))
    assert plain.abs().sum() > 0
    assert_equal(plain, tiered)


@pytest.mark.parametrize("view", [lambda w: w.detach()[1:], lambda w: w.data.t()])
def test_a_compiled_function_does_not_write_a_view_that_it_was_called_with(view, tmp_path):
    """It was traced as a tensor by itself, and the write as one that w does not show."""
    torch._dynamo.reset()
    plain, tiered = parameter_pair(lambda: torch.randn(8, 8), tmp_path)

    def call(x, w, part):
        part.mul_(0.5)
        return x @ w

    x = torch.ones(2, 8)
    with pytest.raises(Exception, match=r"writes to a view of 'w' that was taken outside"):
        torch.compile(call, backend="zinf")(x, tiered, view(tiered))
    assert_equal(plain, tiered)
    assert_equal(call(x, plain, view(plain)).detach(), call(x, tiered, view(tiered)).detach())
    assert_equal(plain, tiered)


def zero_a_row(w):
    w[1] = 0.0


WRITES_OF_VIEWS = {
    "item": zero_a_row,
    "data": lambda w: w.data.view(-1)[1:3].fill_(0.5),
    "transposed": lambda w: w.detach().t().mul_(2),
    "diagonal": lambda w: w.diagonal().copy_(w[0]),
}


@pytest.mark.parametrize("write", WRITES_OF_VIEWS.values(), ids=WRITES_OF_VIEWS)
def test_a_compiled_function_does_not_write_a_view_that_it_takes(write, tmp_path):
    """The graph would write to what it gathered, and w would not hear of it."""
    torch._dynamo.reset()
    plain, tiered = parameter_pair(lambda: torch.randn(8, 8), tmp_path)

    def call(x, w):
        write(w)
        return x @ w

    x = torch.ones(2, 8)
    with (
        torch.no_grad(),
        pytest.raises(Exception, match=r"writes to a view of a parameter \(the view .*: .*w.*\)"),
    ):
        torch.compile(call, backend="zinf")(x, tiered)
    assert_equal(plain, tiered)

    def broken(x, w):
        torch.compiler.disable(write)(w)
        return x @ w

    with torch.no_grad():  # as the error says
        assert_equal(call(x, plain), torch.compile(broken, backend="zinf")(x, tiered))
    assert_equal(plain, tiered)


def test_of_a_refused_write_is_told_where_the_view_is_taken_and_what_would_do(tmp_path):
    torch._dynamo.reset()
    _, tiered = parameter_pair(lambda: torch.randn(8, 8), tmp_path)

    def call(x, w):
        rows = w.view(4, 16)
        made = x @ w
        rows.zero_()
        return made

    taken = call.__code__.co_firstlineno + 1
    with torch.no_grad(), pytest.raises(Exception, match="writes to a view") as caught:
        torch.compile(call, backend="zinf")(torch.ones(2, 8), tiered)
    said = str(caught.value)
    assert f"the view is taken in File {__file__!r}, line {taken}".replace("'", '"') in said
    assert "rows = w.view(4, 16))" in said
    assert "takes the view from the parameter itself (one that is handed to it is a copy)" in said
