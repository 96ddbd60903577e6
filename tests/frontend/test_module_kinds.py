"""Modules that do something of their own with their parameters train as in plain torch."""

import copy
import weakref
from itertools import product

import pytest
import torch
from pairs import ON_DISK, assert_equal, entries
from sampled import crossed, sampled_rows
from torch import nn
from torch.nn.utils import parametrizations, parametrize

import zcompile
from zcompile.errors import Unsupported
from zcompile.ir.types import EntryKind

MODES = pytest.mark.parametrize("mode", ["eager", "compiled"])


@pytest.fixture(autouse=True)
def _anew():
    torch._dynamo.reset()
    torch.manual_seed(0)


def called(model, mode, backend="zinf"):
    return torch.compile(model, backend=backend) if mode == "compiled" else model


def trained(model, call, inputs, loss=lambda out: out.square().sum()):
    torch.manual_seed(7)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for x in inputs:
        loss(call(x)).backward()
        optimizer.step()
        optimizer.zero_grad()


def assert_alike(plain, tiered):
    ours, theirs = tiered.state_dict(), plain.state_dict()
    assert list(ours) == list(theirs)
    for name, value in theirs.items():
        assert_equal(value, ours[name])


class Symmetric(nn.Module):
    def forward(self, x):
        return x.triu() + x.triu(1).transpose(-1, -2)

    def right_inverse(self, x):
        return x.triu()


class Doubled(nn.Module):
    """Its original has twice the rows."""

    def forward(self, x):
        return x[: x.shape[0] // 2]

    def right_inverse(self, x):
        return torch.cat([x, x])


PARAMETRIZATIONS = {
    "spectral_norm": parametrizations.spectral_norm,
    "weight_norm": parametrizations.weight_norm,
    "orthogonal": parametrizations.orthogonal,
    "own": lambda layer: parametrize.register_parametrization(layer, "weight", Symmetric()),
}


@pytest.mark.parametrize(
    ("name", "when", "mode"),
    sampled_rows(
        product(PARAMETRIZATIONS, ("before", "after"), ("eager", "compiled")),
        ("spectral_norm", "after", "eager"),
        ("weight_norm", "before", "compiled"),
        ("orthogonal", "after", "eager"),
        ("own", "before", "eager"),
    ),
)
def test_parametrizations_before_and_after_offload(name, when, mode, tmp_path):
    plain = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3))
    tiered = copy.deepcopy(plain)
    steps = [
        lambda model: PARAMETRIZATIONS[name](model[0]),
        lambda model: zcompile.offload(model, **ON_DISK, disk=tmp_path),
    ]
    torch.manual_seed(1)
    steps[0](plain)
    torch.manual_seed(1)
    for step in steps if when == "before" else reversed(steps):
        step(tiered)
    assert_alike(plain, tiered)
    inputs = [torch.randn(4, 8) for _ in range(3)]
    trained(plain, called(plain, mode, "aot_eager"), inputs)
    trained(tiered, called(tiered, mode), inputs)
    assert_alike(plain, tiered)
    assert hasattr(tiered[0].parametrizations.weight[0], "forward")


def test_a_value_that_is_assigned_goes_through_the_parametrization(tmp_path):
    model = zcompile.offload(nn.Sequential(nn.Linear(4, 4)), **ON_DISK, disk=tmp_path)
    parametrize.register_parametrization(model[0], "weight", Symmetric())
    value = torch.randn(4, 4)
    model[0].weight = value
    assert torch.equal(model[0].parametrizations.weight.original.cpu(), value.triu())
    parametrize.remove_parametrizations(model[0], "weight")
    assert torch.equal(model[0].weight.cpu(), Symmetric()(value.triu()))


def test_a_parametrization_of_another_shape_is_refused_after_offload(tmp_path):
    model = zcompile.offload(nn.Linear(4, 4), **ON_DISK, disk=tmp_path)
    before = model.weight.cpu()
    with pytest.raises(Unsupported, match=r"'weight' the shape \(8, 4\).* before zcompile.offload"):
        parametrize.register_parametrization(model, "weight", Doubled(), unsafe=True)
    assert torch.equal(model.weight.cpu(), before)


RECURRENT = {
    "rnn": lambda: nn.RNN(6, 5, num_layers=2),
    "gru": lambda: nn.GRU(6, 5, bidirectional=True),
    "lstm": lambda: nn.LSTM(6, 5, proj_size=3, batch_first=True),
}


@pytest.mark.parametrize(("name", "mode"), crossed(RECURRENT, ("compiled", "eager")))
def test_recurrent_modules_that_were_built_before(name, mode, tmp_path):
    plain = RECURRENT[name]()
    tiered = zcompile.offload(copy.deepcopy(plain), **ON_DISK, disk=tmp_path)
    refs = [ref() for ref in tiered._flat_weight_refs]
    assert all(a is b for a, b in zip(refs, tiered._flat_weights, strict=True))
    assert len(entries(tiered, EntryKind.PARAM)) == len(list(plain.parameters()))
    inputs = [torch.randn(4, 3, 6) for _ in range(3)]
    trained(plain, plain, inputs, lambda out: out[0].square().sum())
    trained(tiered, called(tiered, mode), inputs, lambda out: out[0].square().sum())
    assert_alike(plain, tiered)
    assert_alike(plain, copy.deepcopy(tiered))


@pytest.mark.slow  # quick are the recurrent ones, and autocast with gradients in tests/e2e
def test_an_encoder_layer_that_is_one_op_to_torch_casts_as_aot_eager_does(tmp_path):
    plain = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True).eval()
    tiered = zcompile.offload(copy.deepcopy(plain), **ON_DISK, disk=tmp_path)
    x = torch.randn(4, 8, 32)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        ours = called(tiered, "compiled")(x)
        torch._dynamo.reset()
        assert torch.equal(ours, called(plain, "compiled", "aot_eager")(x))
        assert torch.equal(ours, tiered(x))


def test_weak_references_of_others_are_refused_and_those_of_the_module_are_still_there(tmp_path):
    model = nn.Sequential(nn.LSTM(4, 4))
    other = weakref.ref(model[0].bias_hh_l0)
    with pytest.raises(Unsupported, match="referred to weakly, as by a compiled graph"):
        zcompile.offload(model, **ON_DISK, disk=tmp_path)
    assert other() is model[0].bias_hh_l0
    assert [ref() for ref in model[0]._flat_weight_refs] == model[0]._flat_weights
    assert not any(hasattr(param, "entry") for param in model.parameters())


class Words(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.last = nn.Embedding(16, 8, sparse=True), nn.Linear(8, 3)

    def forward(self, ids):
        return self.last(self.table(ids))


def test_sparse_gradients_in_a_graph_are_refused_with_a_way_that_works(tmp_path):
    plain = Words()
    tiered = zcompile.offload(copy.deepcopy(plain), **ON_DISK, disk=tmp_path)
    ids = [torch.randint(0, 16, (4, 5)) for _ in range(3)]
    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed, match=r"torch\.compiler\.disable"):
        called(tiered, "compiled")(ids[0])
    torch._dynamo.reset()
    tiered.table.forward = torch.compiler.disable(tiered.table.forward)
    for model, call in ((plain, plain), (tiered, called(tiered, "compiled"))):
        sparse = torch.optim.SparseAdam([model.table.weight], lr=0.1)
        dense = torch.optim.SGD(model.last.parameters(), lr=0.1)
        for words in ids:
            call(words).square().sum().backward()
            assert model.table.weight.grad.is_sparse
            for optimizer in (sparse, dense):
                optimizer.step()
                optimizer.zero_grad()
    assert_alike(plain, tiered)


def test_batch_norm_in_training_is_that_of_aot_eager_to_the_bit(tmp_path):
    plain = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 3))
    tiered = zcompile.offload(copy.deepcopy(plain), **ON_DISK, disk=tmp_path)
    reference = called(plain, "compiled", "aot_eager")
    call = called(tiered, "compiled")
    for _ in range(3):
        x = torch.randn(12, 8)
        for run in (reference, call):
            run(x).square().sum().backward()
        for a, b in zip(plain.parameters(), tiered.parameters(), strict=True):
            assert_equal(a.grad, b.grad)
    assert_alike(plain, tiered)


class PseudoInverse(nn.Module):
    """An op of complex numbers that makes conjugate views on its way."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(5, 4, dtype=torch.complex64))

    def forward(self, x):
        return torch.linalg.pinv(self.weight * x).abs().sum()


@MODES
def test_complex_numbers_are_those_of_plain_torch_from_the_first_call_on(mode, tmp_path):
    """Which torch looks at by a mode, under which it computes others (pytorch/pytorch#198118)."""
    plain = PseudoInverse()
    tiered = zcompile.offload(copy.deepcopy(plain), disk=tmp_path, **ON_DISK)
    call, inputs = called(tiered, mode), [torch.tensor(1.0), torch.tensor(2.0)]
    for x in inputs:
        assert torch.equal(call(x), plain(x))
    trained(plain, plain, inputs, lambda loss: loss)
    trained(tiered, call, inputs, lambda loss: loss)
    assert_alike(plain, tiered)
