"""The benchmark beside others that take states off the device, without a card and without timm."""

import json

import pytest
import torch
from torch import nn

from benchmarks import offload_peers as bench

SMALL = [
    *("--device", "cpu", "--batch", "2", "--image", "8", "--rounds", "2", "--warm-up", "3"),
    *("--device-memory", "16MiB", "--host-memory", "16MiB"),
]


def small(args):
    torch.manual_seed(0)
    side = 3 * args.image**2
    return nn.Sequential(nn.Flatten(), nn.Linear(side, 64), nn.GELU(), nn.Linear(64, 1000)).to(
        torch.bfloat16
    )


def test_a_row_is_kept_as_soon_as_it_is_known(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(bench, "vision_model", small)
    out = tmp_path / "rows.json"
    assert bench.main([*SMALL, "--only", "eager", "torchao", "zinf", "--out", str(out)]) == 0
    eager, zinf = json.loads(out.read_text())["rows"]
    assert (eager["variant"], zinf["variant"]) == ("eager", "zinf")
    assert zinf["loss"] == eager["loss"], "bit by bit, after five steps"
    assert len(eager["seconds"]) == 2
    told = capsys.readouterr()
    assert told.out.count("\n| ") == 3
    assert "torchao is left out: " in told.err


def test_without_timm_every_variant_is_left_out(monkeypatch, capsys):
    def missing(args):
        raise ImportError("no timm here")

    monkeypatch.setattr(bench, "vision_model", missing)
    assert bench.main([*SMALL, "--only", "eager", "zinf"]) == 0
    assert capsys.readouterr().err.count("is left out: no timm here") == 2


def test_times_stand_beside_those_of_the_compiled_model():
    row = {"variant": "zinf", "median": 0.3, "first step": 2.0, "loss": 1.5, "peak": 3 << 30}
    assert bench.line(row, 0.2) == "| zinf | 0.3000 | 1.50 | 3.00 GiB | 2.0 | 1.5000 |"
    assert bench.line(row, None).startswith("| zinf | 0.3000 |  | 3.00 GiB |")


@pytest.mark.slow
def test_fsdp_trains_its_one_rank_from_the_host(monkeypatch, capsys):
    class Blocks(nn.Module):
        def __init__(self, args):
            super().__init__()
            self.blocks = nn.ModuleList([small(args)])

        def forward(self, images):
            return self.blocks[0](images)

    monkeypatch.setattr(bench, "vision_model", Blocks)
    assert bench.main([*SMALL, "--only", "FSDP2"]) == 0
    assert "| FSDP2 |" in capsys.readouterr().out
