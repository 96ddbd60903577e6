"""Training of blocks whose attention no budget holds for all samples at once: in slices of the
batch, and below it."""

import copy
import re

import pytest
import torch
from e2e.test_token_slices import assert_close, offloaded, trained
from torch import Tensor, nn
from torch._dynamo.exc import BackendCompilerFailed

import zcompile
from zcompile.cli import main
from zcompile.errors import BudgetExceeded
from zcompile.passes import choose_tiles

WIDTH, BATCH, LENGTH = 16, 16, 128
ONE = BATCH * LENGTH * LENGTH * 4
"""Bytes of the scores of a block: a softmax holds two of them, its backward three."""
BUDGET = 2 * ONE
"""Which a softmax of all samples fills, to the byte; with any weight beside it is exceeded."""


class Attentive(nn.Module):
    """Attention whose scores are written out: no slices of tokens make them smaller."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        scores = self.q(y) @ self.k(y).transpose(-1, -2)
        return x + self.o(scores.softmax(-1) @ self.v(y))


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(Attentive(), Attentive())

    def forward(self, x: Tensor) -> Tensor:
        return self.blocks(x).square().mean()


def test_blocks_train_in_slices_of_the_batch_where_their_scores_do_not_fit(tmp_path, capsys):
    torch.manual_seed(0)
    model, x = Stack(), torch.randn(BATCH, LENGTH, WIDTH)
    twin = copy.deepcopy(model)
    found = trained(model, offloaded(model, BUDGET, dump=tmp_path), x)
    assert_close(found, trained(twin, twin, x))
    peak, planned = zcompile.stats(model)["peak"], zcompile.stats(model)["planned_peak"]
    assert 0 < peak["activations"] < peak["together"] <= planned["together"] <= BUDGET
    assert main(["show", str(tmp_path)]) == 0
    told = re.findall(r"runs over (\d+) slices of its 16 samples: ", capsys.readouterr().out)
    assert told
    assert len(set(told)) == 1, "one number for all stages"
    assert {row["by"] for row in zcompile.stats(model)["inexact"]} == {"slice-batch"}


def test_without_slices_of_the_batch_such_a_budget_is_refused(monkeypatch):
    monkeypatch.setattr(choose_tiles, "batch_graph", lambda graph: None)
    torch.manual_seed(0)
    model, x = Stack(), torch.randn(BATCH, LENGTH, WIDTH)
    with pytest.raises(BackendCompilerFailed) as caught:
        offloaded(model, BUDGET)(x)
    refused = caught.value.inner_exception
    assert isinstance(refused, BudgetExceeded)
    assert refused.needed_bytes > BUDGET


def test_who_is_refused_reads_why_large_values_are_not_made_in_slices():
    """Dynamo shows the sentence of an error, and none of its notes."""
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, WIDTH))
    with pytest.raises(BackendCompilerFailed) as caught:
        offloaded(model, ONE // 8)(torch.randn(BATCH * LENGTH, WIDTH))
    said = str(caught.value)
    assert "to fit: give zcompile.offload device_memory=" in said
    assert re.search(r"^  note: .*statistics over the batch$", said, re.MULTILINE)
