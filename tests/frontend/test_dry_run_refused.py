"""What no plan can be made of says why: models, machines, and runs whose entries stay."""

from dataclasses import replace

import pytest
import torch
from dry_runs import SMALL
from torch import nn

import zcompile
from zcompile.config import Config
from zcompile.errors import ConfigInvalid, Unsupported
from zcompile.ir.units import GiB


@pytest.mark.parametrize(
    ("changed", "error", "says"),
    [
        ({"optimizer": "adam"}, ConfigInvalid, "is none of adamw, sgd"),
        ({"micro_batches": 0}, ConfigInvalid, "must be an int of at least 1"),
        ({"model": nn.ReLU()}, Unsupported, "has no parameters"),
        ({"model": "gpt"}, Unsupported, "is not a torch.nn.Module"),
        ({"model": nn.Linear(8, 8).requires_grad_(False)}, Unsupported, "requires a gradient"),
        ({"machine": replace(SMALL, tiers={"device": GiB})}, ConfigInvalid, "has no tier 'host'"),
        (
            {"residency": False},
            Unsupported,
            "with residency=False they stay where they are put first",
        ),
        ({"param_dtype": torch.bfloat16}, Unsupported, "a run with param_dtype=torch.bfloat16"),
        (
            {"config": Config(device="cpu", param_dtype=torch.float16), "residency": False},
            Unsupported,
            "with residency=False they stay",
        ),
    ],
)
def test_what_cannot_be_planned_says_why(changed, error, says):
    given = {"model": nn.Linear(8, 8), "machine": SMALL, **changed}
    with pytest.raises(error, match=says):
        zcompile.plan(given.pop("model"), torch.empty(4, 8), **given)


def test_a_durable_run_is_not_planned(tmp_path):
    with pytest.raises(Unsupported, match="durable=True, whose commits it does not count"):
        zcompile.plan(
            nn.Linear(8, 8), torch.empty(4, 8), machine=SMALL, disk=tmp_path, durable=True
        )
