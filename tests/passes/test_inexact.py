"""Where tiles and slices give up eager's last bits: told once in the log, and by `stats`."""

import logging

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import zcompile
from zcompile.ir.units import KiB

SUMMED = "added up one after the other"


def seeded(seed):
    return torch.Generator().manual_seed(seed)


def mlp():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 48), nn.GELU(), nn.Linear(48, 40))


class Head(nn.Module):
    """A loss over a vocabulary."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.hidden = nn.Linear(16, 16)
        self.head = nn.Linear(16, 500, bias=False)

    def forward(self, x):
        logits = self.head(torch.tanh(self.hidden(x)))
        return F.cross_entropy(logits, torch.arange(len(x)) % 500)


class Lookup(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(64, 16)

    def forward(self, ids):
        return self.table(ids)


def compared(model, x, caplog, **fields):
    """What `stats` and the log say after two calls, and whether results and gradients of the first
    have eager's bits."""
    twin = type(model)() if type(model) is not nn.Sequential else mlp()
    twin.load_state_dict(model.state_dict())
    zcompile.offload(model, device="cpu", host_memory="64MiB", **fields)
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="zinf")
    with caplog.at_level(logging.INFO, logger="zcompile.frontend.backend"):
        found, expected = compiled(x), twin(x)
        found.square().sum().backward()
        expected.square().sum().backward()
        same = torch.equal(found, expected) and all(
            torch.equal(mine.grad.cpu(), other.grad)
            for mine, other in zip(model.parameters(), twin.parameters(), strict=True)
        )
        compiled(x).square().sum().backward()
    lines = [r.getMessage() for r in caplog.records if "bit-equal" in r.getMessage()]
    return zcompile.stats(model)["inexact"], lines, same


def test_with_room_for_everything_all_bits_are_eagers_and_nothing_is_said(caplog):
    x = torch.randn(6, 64, generator=seeded(1))
    told, lines, same = compared(mlp(), x, caplog, device_memory="16MiB")
    assert same
    assert told == lines == []


def test_rows_that_are_looked_up_in_tiles_keep_their_bits(caplog):
    ids = torch.randint(0, 64, (3, 4), generator=seeded(1))
    told, lines, same = compared(Lookup(), ids, caplog, device_memory="1MiB", tile_bytes=1 * KiB)
    assert same
    assert told == lines == []


def test_weights_whose_products_are_summed_over_tiles_are_named_once(caplog):
    x = torch.randn(6, 64, generator=seeded(1)).requires_grad_()
    told, lines, same = compared(mlp(), x, caplog, device_memory="1MiB", tile_bytes=2 * KiB)
    assert not same, "else the test says nothing"
    assert {row["where"] for row in told} == {"0.weight", "2.weight"}
    assert all(row["by"] == "tile-matmuls" and SUMMED in row["why"] for row in told)
    (line,) = lines
    assert "0.weight" in line
    assert "tile-matmuls" in line


def test_a_weight_that_is_only_cut_along_its_results_may_have_other_bits(caplog):
    """The gradient of x, which is summed over tiles, is not asked for here."""
    x = torch.randn(6, 64, generator=seeded(1))
    told, _, _ = compared(mlp(), x, caplog, device_memory="1MiB", tile_bytes=2 * KiB)
    why = {row["where"]: row["why"] for row in told}
    assert SUMMED in why["2.weight"]
    assert SUMMED not in why["0.weight"]
    assert "only where the library computes them alike" in why["0.weight"]


@pytest.mark.slow  # weights are named below
def test_a_loss_in_tiles_names_the_head(caplog):
    x = torch.randn(64, 16, generator=seeded(1))
    told, lines, _ = compared(Head(), x, caplog, device_memory="1MiB", tile_bytes=4 * KiB)
    (row,) = [row for row in told if row["by"] == "tile-loss"]
    assert row["where"] == "head.weight"
    assert "pieces of its logits" in row["why"]
    assert any("head.weight" in line for line in lines)
