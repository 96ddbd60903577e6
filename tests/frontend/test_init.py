"""`zcompile.init`: a model born in its tiers, with the values it would have had."""

import gc

import pytest
import torch
from e2e.models import gpt2
from pairs import (
    ON_DISK,
    Holder,
    assert_same,
    entries,
    mlp,
)
from torch import nn

import zcompile
from zcompile.runtime.closing import wait_for_dead_stores


class Aliased(nn.Module):
    """Parameters that their maker goes on using under another name."""

    def __init__(self) -> None:
        super().__init__()
        weight = nn.Parameter(torch.empty(4, 4))
        self.first = weight
        nn.init.normal_(weight)
        self.inner = nn.Linear(4, 4, bias=False)
        self.inner.weight = weight
        self.frozen = nn.Parameter(torch.randn(3), requires_grad=False)
        self.register_buffer("steps", torch.arange(3))
        self.layers = nn.ModuleList(nn.Linear(3, 3) for _ in range(2))
        self.layers[1] = nn.Linear(3, 2)


BUILDS = {
    "linear": lambda: nn.Linear(16, 8),
    "conv": lambda: nn.Conv2d(3, 8, 3),
    "embedding": lambda: nn.Embedding(10, 4, padding_idx=2),
    "layer norm": lambda: nn.LayerNorm(8),
    "batch norm": lambda: nn.BatchNorm1d(4),
    "attention": lambda: nn.MultiheadAttention(8, 2),
    "lstm": lambda: nn.LSTM(8, 4),
    "encoder": lambda: nn.TransformerEncoder(
        nn.TransformerEncoderLayer(16, 2, 32), 2, enable_nested_tensor=False
    ),
    "weight norm": lambda: nn.utils.parametrizations.weight_norm(nn.Linear(4, 4)),
    "parameter list": lambda: nn.ParameterList([nn.Parameter(torch.randn(3))]),
    "aliased": Aliased,
    "gpt2": gpt2,
}


@pytest.mark.parametrize("name", BUILDS)
def test_init_gives_the_values_and_names_of_a_plain_model(name, tmp_path):
    torch.manual_seed(0)
    plain, after = BUILDS[name](), torch.rand(1)
    torch.manual_seed(0)
    with zcompile.init(**ON_DISK, disk=tmp_path):
        model = BUILDS[name]()
    assert torch.equal(torch.rand(1), after)
    assert_same(plain, model)
    assert [p.entry.name for p in model.parameters()] == [n for n, _ in plain.named_parameters()]
    assert [p.entry.home for p in model.parameters()] == ["disk"] * len(entries(model))
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        assert p.requires_grad == q.requires_grad
    assert zcompile.offload(model) is model


def test_a_recurrent_model_built_under_init_trains(tmp_path):
    torch.manual_seed(0)
    plain = nn.LSTM(8, 4)
    torch.manual_seed(0)
    with zcompile.init(**ON_DISK, disk=tmp_path):
        model = nn.LSTM(8, 4)
    x = torch.randn(3, 2, 8)
    for m in (plain, model):
        optimizer = torch.optim.AdamW(m.parameters(), lr=1e-2)
        for _ in range(2):
            m(x)[0].square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert_same(plain, model)


def test_an_exception_inside_init_leaves_nothing_behind(tmp_path):
    def build():
        with zcompile.init(**ON_DISK, disk=tmp_path):
            mlp()
            raise KeyError("x")

    with pytest.raises(KeyError):
        build()
    assert type(nn.Linear(2, 2).weight) is nn.Parameter
    gc.collect()
    wait_for_dead_stores()
    assert [p for p in tmp_path.iterdir() if p.suffix == ".tier"] == []
    zcompile.offload(mlp(), **ON_DISK, disk=tmp_path)


def test_a_model_built_under_init_never_exists_whole(tmp_path):
    with zcompile.init(**ON_DISK, disk=tmp_path):
        model = nn.Sequential(*(Holder(torch.zeros(256, 64)) for _ in range(40)))
    peak = zcompile.stats(model)["peak"]
    assert sum(p.nbytes for p in model.parameters()) == 40 * 65536
    assert peak["host"] <= 256 * 1024
    assert peak["device"] <= 1024 * 1024
