"""A tiered tensor read, written, viewed, copied and saved: as the plain tensor it stands for."""

import gc
import math

import numpy
import pytest
import torch
from pairs import assert_equal, parameter_pair, plain_of
from torch import nn
from torch.nn import functional as F

ROWS = torch.arange(96.0).reshape(12, 8)


def rows():
    return torch.randn(12, 8)


READS = {
    "norm": lambda p: p.norm(),
    "item": lambda p: p[0, 0].item(),
    "float": lambda p: float(p.detach()[1, 1]),
    "index": lambda p: p[2],
    "index by list": lambda p: p[[1, 2]],
    "index by mask": lambda p: p[p > 0],
    "add": lambda p: p + 1,
    "subtracted from": lambda p: 1 - p,
    "broadcast": lambda p: p + torch.ones(1, 1, 1),
    "matmul": lambda p: p @ p.t(),
    "compare": lambda p: p > 0,
    "equal": lambda p: torch.equal(p, p),
    "allclose": lambda p: torch.allclose(p, p),
    "cat": lambda p: torch.cat([p, p]),
    "as a vector": lambda p: nn.utils.parameters_to_vector([p]),
    "double": lambda p: p.double(),
    "half": lambda p: p.half(),
    "float32": lambda p: p.float(),
    "bfloat16": lambda p: p.to(torch.bfloat16),
    "cpu": lambda p: p.cpu(),
    "numpy": lambda p: p.detach().numpy().sum().item(),
    "array": lambda p: numpy.asarray(p.detach()).tolist(),
    "list": lambda p: p.tolist(),
    "length": len,
    "iterate": lambda p: [row.sum().item() for row in p],
    "max": lambda p: p.max(0).indices,
    "topk": lambda p: p.topk(2).values,
    "clone": lambda p: p.clone(),
    "contiguous": lambda p: p.t().contiguous(),
    "reshape": lambda p: p.t().reshape(-1),
    "permute": lambda p: p.permute(1, 0),
    "expand": lambda p: p[:1].expand(4, 8),
    "einsum": lambda p: torch.einsum("ij,kj->ik", p, p),
    "embedding": lambda p: F.embedding(torch.tensor([1, 2]), p),
    "random like": lambda p: torch.randn_like(p),
    "new": lambda p: p.new_full((2, 3), 4.0),
    "zeros like": lambda p: torch.zeros_like(p),
    "ones like": lambda p: torch.ones_like(p, dtype=torch.float64),
    "full like": lambda p: torch.full_like(p, 3.0),
    "svd": lambda p: torch.linalg.svdvals(p),
    "sparse": lambda p: p.detach().to_sparse().values(),
    "type": lambda p: (p.type(), p.dtype, p.layout, p.is_leaf, p.nbytes, str(p.device)),
    "contains": lambda p: 5.0 in p,
    "vmap": lambda p: torch.vmap(lambda row: row.sum())(p.detach()),
    "gradient": lambda p: torch.autograd.grad(p.square().sum(), p)[0],
    "functional gradient": lambda p: torch.func.grad(lambda w: (w * w).sum())(p.detach()),
    "functional call": lambda p: torch.func.functional_call(
        nn.Linear(8, 12, bias=False), {"weight": p * 2}, torch.ones(1, 8)
    ),
}


@pytest.mark.parametrize("name", READS)
def test_reading_gives_what_a_plain_parameter_gives(name, tmp_path):
    plain, tiered = parameter_pair(rows, tmp_path)
    results = []
    for param in (plain, tiered):
        torch.manual_seed(5)
        results.append(READS[name](param))
    expected, result = results
    if isinstance(expected, torch.Tensor):
        assert_equal(expected, result)
        assert result.requires_grad == expected.requires_grad
    else:
        assert result == expected


LIKE = {
    "zeros": torch.zeros_like,
    "empty": torch.empty_like,
    "ones": torch.ones_like,
    "full": lambda p, **kwargs: torch.full_like(p, 3.0, **kwargs),
}


@pytest.mark.parametrize("name", LIKE)
def test_what_is_made_like_a_parameter_rests_beside_it(name, tmp_path):
    """Such is the state of an optimizer, for which there may be no other room."""
    _, tiered = parameter_pair(rows, tmp_path)
    store = tiered.entry.store
    for asked in ({}, {"dtype": torch.float64}, {"device": tiered.device}):
        assert LIKE[name](tiered.detach(), **asked).entry.store is store
    elsewhere = LIKE[name](tiered.detach(), device="meta")
    assert (elsewhere.device.type, hasattr(elsewhere, "entry")) == ("meta", False)


def test_printing_shows_the_values(tmp_path):
    plain, tiered = parameter_pair(rows, tmp_path)
    assert repr(tiered) == repr(plain)
    assert str(tiered.detach()) == str(plain.detach())
    assert f"{tiered.detach().sum():.3f}" == f"{plain.detach().sum():.3f}"
    tiered.grad = torch.ones(12, 8)
    assert repr(tiered.grad) == repr(torch.ones(12, 8))


INITS = {
    "uniform": nn.init.uniform_,
    "normal": nn.init.normal_,
    "trunc normal": nn.init.trunc_normal_,
    "constant": lambda p: nn.init.constant_(p, 0.3),
    "ones": nn.init.ones_,
    "zeros": nn.init.zeros_,
    "eye": nn.init.eye_,
    "xavier uniform": nn.init.xavier_uniform_,
    "xavier normal": nn.init.xavier_normal_,
    "kaiming uniform": lambda p: nn.init.kaiming_uniform_(p, a=math.sqrt(5)),
    "kaiming normal": nn.init.kaiming_normal_,
    "orthogonal": nn.init.orthogonal_,
    "sparse": lambda p: nn.init.sparse_(p, 0.3),
    "dirac": lambda p: nn.init.dirac_(p.view(4, 3, 8)),
}
WRITES = {
    "a row": lambda p: p[0].fill_(1),
    "a column": lambda p: p.__setitem__((slice(None), 1), 0),
    "rows by list": lambda p: p.__setitem__(torch.tensor([1, 3]), ROWS[:2]),
    "a mask": lambda p: p.__setitem__(p > 0, 0.5),
    "transposed": lambda p: p.t().mul_(2),
    "a flat range": lambda p: p.view(-1)[3:5].zero_(),
    "a diagonal": lambda p: p.diagonal().fill_(9),
    "data": lambda p: p.data.copy_(ROWS),
    "data assigned": lambda p: setattr(p, "data", ROWS.clone()),
    "data of itself": lambda p: setattr(p, "data", p.data),
    "data from another": lambda p: setattr(p, "data", p.data * 2),
    "from a vector": lambda p: nn.utils.vector_to_parameters(torch.arange(96.0), [p]),
    "scatter": lambda p: p.scatter_(0, torch.zeros(1, 8, dtype=torch.long), 1.0),
    "index fill": lambda p: p.index_fill_(0, torch.tensor([1, 3]), 7.0),
    "bernoulli": lambda p: p.bernoulli_(0.5),
    "random": lambda p: p.random_(),
    "exponential": lambda p: p.exponential_(),
    "normal rows": lambda p: p[2:4].normal_(),
    "addmm": lambda p: p.addmm_(ROWS, torch.eye(8)),
    "renorm": lambda p: p.renorm_(2, 0, 1.0),
}


@pytest.mark.parametrize("name", [*INITS, *WRITES])
def test_writing_writes_through(name, tmp_path):
    plain, tiered = parameter_pair(rows, tmp_path)
    for param in (plain, tiered):
        torch.manual_seed(5)
        with torch.no_grad():
            {**INITS, **WRITES}[name](param)
    assert_equal(plain, tiered)


LAYOUTS = {
    "channels last": lambda: torch.randn(4, 6, 3, 3).to(memory_format=torch.channels_last),
    "transposed": lambda: torch.randn(5, 7).t(),
    "expanded": lambda: torch.randn(5, 1).expand(5, 4),
    "gaps": lambda: torch.randn(6, 8)[:, :5],
    "every other": lambda: torch.randn(20)[::2],
    "offset": lambda: torch.randn(10)[3:7],
    "overlapping": lambda: torch.randn(10).as_strided((4, 4), (2, 1)),
    "scalar": lambda: torch.randn(()),
    "one": lambda: torch.randn(1),
    "one by one": lambda: torch.randn(1, 1),
    "empty": lambda: torch.empty(0, 3),
}
TRAINABLE = [name for name in LAYOUTS if name not in ("expanded", "overlapping")]


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_parameter_keeps_its_layout(name, tmp_path):
    plain, tiered = parameter_pair(LAYOUTS[name], tmp_path)
    assert_equal(plain, tiered)
    for param in (plain, tiered):
        (param * param).sum().backward()
    assert_equal(plain.grad, tiered.grad)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("name", TRAINABLE)
def test_a_parameter_of_any_layout_trains(name, fused, tmp_path):
    plain, tiered = parameter_pair(LAYOUTS[name], tmp_path)
    for param in (plain, tiered):
        optimizer = torch.optim.AdamW([param], lr=0.1, fused=fused)
        for keep in (True, False, True):
            (param * param).sum().backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=keep)
    assert_equal(plain, tiered)


DTYPES = [
    torch.float64,
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.int64,
    torch.int32,
    torch.uint8,
    torch.int8,
    torch.bool,
    torch.complex64,
    torch.complex128,
    torch.float8_e4m3fn,
]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_parameter_of_any_dtype_is_kept_printed_and_saved(dtype, tmp_path):
    value = (torch.arange(24.0).reshape(4, 6) % 5 - 2).to(dtype)
    plain, tiered = parameter_pair(value.clone, tmp_path)
    with torch.no_grad():
        plain[1], tiered[1] = 1, 1
    assert_equal(plain, tiered)
    assert repr(tiered.detach()) == repr(plain.detach())
    torch.save({"w": tiered.detach()}, tmp_path / "w.pt")
    assert_equal(plain, torch.load(tmp_path / "w.pt")["w"])


@pytest.mark.parametrize(
    "read",
    [
        lambda p: p.conj() + 0,
        lambda p: p.mH @ p,
        lambda p: p.real,
        lambda p: p.imag,
        lambda p: (p * p.conj()).real,
        lambda p: p.conj().imag,
        lambda p: p.resolve_conj().angle(),
        torch.linalg.pinv,
    ],
    ids=["conj", "mH", "real", "imag", "abs", "conj imag", "angle", "pinv"],
)
def test_a_complex_parameter_keeps_its_sign(read, tmp_path):
    plain, tiered = parameter_pair(lambda: torch.randn(4, 3, dtype=torch.complex64), tmp_path)
    expected, result = read(plain), read(tiered)
    assert torch.equal(expected.detach().resolve_neg(), plain_of(result).resolve_neg())
    for param in (plain, tiered):
        (param * param.conj() * param).abs().sum().backward()
    assert_equal(plain.grad, tiered.grad)


@pytest.mark.parametrize(
    "write",
    [
        lambda w: w.conj().zero_(),
        lambda w: w.conj().copy_(torch.full((), 2 + 3j)),
        lambda w: w.copy_(w.conj()),
        lambda w: w.conj().mul_(2 + 1j),
        lambda w: w.conj()[1:].add_(1j),
        lambda w: w.mH[0].fill_(1j),
        lambda w: w.conj().conj_physical_(),
        lambda w: torch.mul(w, 2j, out=w.conj()),
        lambda w: w.real.zero_(),
        lambda w: w.imag.fill_(4),
        lambda w: w.conj().imag.add_(4),
        lambda w: torch.view_as_real(w)[..., 0].zero_(),
        lambda w: torch._neg_view(w).add_(3),
        lambda w: w[0].copy_(torch.tensor([1j, 2j, 3j]).conj()),
        lambda w: w.conj().resolve_conj().zero_(),
    ],
    ids=[
        "zero",
        "copy",
        "of itself",
        "mul",
        "part",
        "mH",
        "conj_physical",
        "out",
        "real",
        "imag",
        "conj imag",
        "view_as_real",
        "neg",
        "from a conj",
        "of a copy",
    ],
)
def test_what_is_written_through_a_view_of_complex_numbers_arrives(write, tmp_path):
    plain, tiered = parameter_pair(lambda: torch.randn(4, 3, dtype=torch.complex64), tmp_path)
    for param in (plain, tiered):
        write(param.detach())
    assert_equal(plain, tiered)
    assert plain._version == tiered._version


def test_a_parameter_can_be_the_conjugate_of_its_bytes(tmp_path):
    plain, tiered = parameter_pair(lambda: torch.randn(4, 3, dtype=torch.complex64), tmp_path)
    for param in (plain, tiered):
        param.data = param.data.conj()
        assert param.is_conj()
        (param * param).imag.sum().backward()
        torch.optim.SGD([param], lr=0.1).step()
    assert torch.equal(plain.detach(), plain_of(tiered).detach())
    assert torch.equal(plain.imag, plain_of(tiered.imag))
    value = torch.compile(lambda w: w.conj() * 2 + w.real, backend="aot_eager")(tiered)
    assert torch.equal(value, plain.conj() * 2 + plain.real)


@pytest.mark.parametrize(
    "view",
    [
        lambda w: w.real,
        lambda w: w.imag,
        lambda w: w[0].real[1:],
        lambda w: w.data.real,
        lambda w: torch.view_as_complex(torch.view_as_real(w)),
    ],
)
def test_a_compiled_function_takes_a_real_view_of_complex_numbers_itself(view, tmp_path):
    torch._dynamo.reset()
    plain, tiered = parameter_pair(lambda: torch.randn(4, 3, dtype=torch.complex64), tmp_path)
    assert torch.equal(
        torch.compile(lambda w: view(w) * 2, backend="zinf")(tiered), view(plain) * 2
    )
    call, given = torch.compile(lambda v: v * 2, backend="zinf"), view(tiered)
    if given.is_complex():
        assert torch.equal(call(given), view(plain) * 2)
        return
    with pytest.raises(Exception, match=r"is called with a torch.float32 view of a torch.complex"):
        call(given)
    assert torch.equal(call(given.detach()), view(plain) * 2)


def left_of_a_dropped_model(take, dtype, tmp_path):
    _, tiered = parameter_pair(lambda: torch.arange(24).reshape(4, 6).to(dtype), tmp_path)
    return take(tiered)


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64], ids=str)
@pytest.mark.parametrize(
    "take",
    [lambda w: w, lambda w: w.detach(), lambda w: w.detach()[1:].t(), torch.ones_like],
    ids=["parameter", "alias", "view", "state"],
)
def test_what_is_held_of_a_model_outlives_it(take, dtype, tmp_path):
    """A model is closed once nothing refers to its values; a view of one does."""
    held = left_of_a_dropped_model(take, dtype, tmp_path)
    gc.collect()
    expected = take(torch.arange(24).reshape(4, 6).to(dtype))
    assert torch.equal(held.detach() + 0, expected)
