"""What `zcompile.plan` looks at: a plan near the bound, and models as users name them."""

import json
from pathlib import Path

import pytest
import small_models
import torch

import zcompile
from zcompile.cli import main
from zcompile.ir.units import GiB, MiB
from zcompile.machine.model import Compute, Link, Machine, with_tier
from zcompile.planner import outlook

DOCS = Path(__file__).parents[2] / "docs" / "planning.md"

SMALL = Machine(
    "small",
    {"device": 2 * MiB, "host": 8 * MiB, "disk": GiB},
    {name: Link(name, 1e9) for name in ("h2d", "d2h", "disk_read", "disk_write")},
    Compute({"float32": 1e11}, 1e10),
)


def test_the_search_for_a_plan_is_told_the_least(monkeypatch):
    least = []
    search = outlook.plan_step

    def noted(step, machine, room, arena, compute_s, seconds, least_s, *more):
        least.append(least_s)
        return search(step, machine, room, arena, compute_s, seconds, least_s, *more)

    monkeypatch.setattr(outlook, "plan_step", noted)
    with torch.device("meta"):
        model, ids = small_models.GPT(1, 64, 64), torch.zeros(2, 16, dtype=torch.int64)
    report = zcompile.plan(model, ids, machine=SMALL)
    assert set(least) == {report.bound_seconds}


def test_a_shadow_price_arranges_no_placement_twice(monkeypatch):
    """Nor one that would be found without more memory: of the host nobody needs more here."""
    machine = with_tier(SMALL, "device", MiB)
    found, arrange = [], outlook.arranged

    def noted(step, homes, arena, known):
        found.append(tuple(homes.items()))
        return arrange(step, homes, arena, known)

    monkeypatch.setattr(outlook, "arranged", noted)
    with torch.device("meta"):
        model, ids = small_models.GPT(2, 64, 64), torch.zeros(2, 16, dtype=torch.int64)
    report = zcompile.plan(model, ids, machine=machine)
    assert [shadow.tier for shadow in report.shadows] == ["device", "host"]
    assert len(found) == 1


@pytest.mark.slow
def test_the_example_is_planned_as_the_docs_do(capsys):
    said = "plan examples.train_gpt:model --machine h200-node --batch 32 --seq 128"
    assert f"\nzinf {said}\n" in DOCS.read_text()
    assert main([*said.split(), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    # It is one of the 8 ranks of that machine: the last gradients cross between them after
    # backward, which no plan can hide.
    assert told["gap"] == pytest.approx(1, abs=0.01)
    assert {row["tier"] for row in told["tiers"]} == {"device", "host", "disk"}
    assert main([*said.split(), "--ranks", "1", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["gap"] == pytest.approx(1), "one H200 holds it"


@pytest.mark.slow
def test_a_model_of_175_billion_parameters_is_planned(capsys):
    """By one H200 alone, with most of it on disk."""
    said = "plan examples.train_gpt:gpt3 --machine h200-node --ranks 1 --json"
    assert main(said.split()) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["parameters"] == pytest.approx(175e9, rel=0.01)
    assert told["gap"] < 1.02
