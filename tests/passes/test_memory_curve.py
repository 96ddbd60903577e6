"""The memory curve: what values of a graph hold, before and after activations are chosen."""

import json

import pytest
import torch
from planned_runs import STEPS, begun, train
from sampled import sampled

import zcompile
from zcompile.cli import main
from zcompile.cli.format import CURVE_HEIGHT, CURVE_WIDTH, curve_lines
from zcompile.ir.memory_curve import Memory, MemoryCurve
from zcompile.ir.serialize import open_run
from zcompile.ir.units import Bytes, KiB

BUDGETS = {"keep": Bytes(256 * KiB), "recompute": Bytes(108 * KiB), "offload": Bytes(96 * KiB)}
"""Of the device: no weight is cut in any, so that only what becomes of activations differs."""


def run_of(dump, choice):
    """The plan of the one graph of a run that was dumped, and what was measured."""
    model, compiled, optimizer = begun(
        4, 1, layers=2, device_memory=BUDGETS[choice], activations=choice, dump=dump
    )
    zcompile.stats(model, reset=True)
    train(model, compiled, optimizer, 4, STEPS + 1, 1)
    stats = zcompile.stats(model)
    (graph,) = open_run(dump, None).graphs
    zcompile.close(model)
    torch._dynamo.reset()
    return graph.plan(), stats


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Runs by choice, with where they were dumped; each is made when it is first asked for."""

    class Runs(dict):
        def __missing__(self, choice):
            dump = tmp_path_factory.mktemp(choice)
            self[choice] = (*run_of(dump, choice), dump)
            return self[choice]

    return Runs()


@pytest.mark.parametrize("choice", sampled(BUDGETS, "keep"))
def test_the_curve_as_chosen_peaks_at_what_is_measured(runs, choice):
    plan, stats, _ = runs[choice]
    assert plan.memory.after.peak == stats["peak"]["activations"]


@pytest.mark.parametrize("choice", sampled(BUDGETS, "keep"))
def test_every_peak_is_the_predicted_one_whatever_becomes_of_activations(runs, choice):
    _, stats, _ = runs[choice]
    for what, nbytes in stats["predicted"]["peak"].items():
        assert stats["peak"][what] == nbytes, what
    assert stats["peak"]["together"] <= BUDGETS[choice]


@pytest.mark.parametrize("choice", sampled(["recompute", "offload"], "recompute"))
def test_the_curve_before_is_that_of_a_run_that_keeps_everything(runs, choice):
    plan, _, _ = runs[choice]
    kept, stats, _ = runs["keep"]
    peak = stats["peak"]
    assert kept.memory.before == kept.memory.after
    assert plan.memory.before.peak == peak["activations"] > plan.memory.after.peak
    assert plan.memory.before.nbytes == kept.memory.after.nbytes


@pytest.mark.parametrize("choice", sampled(BUDGETS, "keep", "recompute"))
def test_the_holders_at_the_peak_and_others_are_what_is_held(runs, choice):
    for curve in (runs[choice][0].memory.before, runs[choice][0].memory.after):
        assert sum(curve.holders.values()) <= curve.peak
        assert list(curve.holders.values()) == sorted(curve.holders.values(), reverse=True)
        assert len(curve.nodes) == len(curve.nbytes) > curve.backward
        assert "backward" in curve.where


def test_what_is_done_again_costs_what_its_values_cost_together(runs):
    plan, _, _ = runs["recompute"]
    again = [row for row in plan.activations if row.action == "again"]
    assert again
    assert all(row.seconds > 0 and row.nbytes > 0 and row.name for row in again)
    kept = [row for row in plan.activations if row.action == "keep"]
    assert all(row.seconds == 0 for row in kept)
    told = sum(row.seconds for row in again)
    assert 0 < told <= plan.activation_cost.again_s * (1 + 1e-9)
    assert plan.activation_cost.exposed_s == 0


@pytest.mark.slow  # tests/passes/test_activation_evaluation.py has such times without a run
def test_what_moves_costs_its_time_on_the_links(runs):
    plan, _, _ = runs["offload"]
    away = [row for row in plan.activations if row.action == "host"]
    assert away
    assert all(row.seconds > 0 for row in away)
    assert plan.activation_cost.again_s == 0
    assert plan.activation_cost.exposed_s > 0


def test_explain_draws_both_curves(runs, capsys):
    plan, _, dump = runs["recompute"]
    assert main(["explain", str(dump), "memory"]) == 0
    out = capsys.readouterr().out
    assert "were everything kept: at most" in out
    assert f"%{plan.memory.after.peak_node}" in out
    rows = [line for line in out.splitlines() if " |" in line]
    assert len(rows) == CURVE_HEIGHT
    assert "." in rows[0]
    assert "#" not in rows[0], "the highest row is that of what was not chosen"
    assert rows[-1].count("#") > CURVE_WIDTH // 2
    assert max(map(len, rows)) <= 80
    assert main(["explain", str(dump), "activations"]) == 0
    assert rows[0] in capsys.readouterr().out


@pytest.mark.parametrize("choice", sampled(["recompute", "offload"], "recompute"))
def test_explain_tells_the_curves_to_a_program(runs, capsys, choice):
    plan, _, dump = runs[choice]
    assert main(["explain", str(dump), "memory", "--json"]) == 0
    (told,) = json.loads(capsys.readouterr().out)
    assert tuple(told["memory"]["after"]["nbytes"]) == plan.memory.after.nbytes
    assert told["cost"]["exposed_s"] == plan.activation_cost.exposed_s


def test_a_graph_of_inference_keeps_everything(tmp_path, capsys):
    torch._dynamo.reset()
    model = zcompile.offload(
        torch.nn.Linear(4, 4), device="cpu", device_memory="1MiB", host_memory="1MiB", dump=tmp_path
    )
    with torch.no_grad():
        torch.compile(model, backend="zinf")(torch.ones(2, 4))
    (graph,) = open_run(tmp_path, None).graphs
    assert graph.plan().memory.before == graph.plan().memory.after
    assert main(["explain", str(tmp_path), "memory"]) == 0
    assert "everything is kept" in capsys.readouterr().out


def curve(nodes, nbytes, backward):
    return MemoryCurve(tuple(nodes), backward, tuple(nbytes), "backward pass of it", {})


def test_a_curve_is_laid_over_another_by_its_nodes():
    before = curve("abcd", (1, 3, 5, 2), 2)
    after = curve("abrd", (1, 3, 4, 2), 2)
    assert before.laid_over(after) == (1, 5, 5, 2), "c counts to b, and r holds what is before it"
    assert before.laid_over(before) == before.nbytes
    assert before.laid_over(curve("", (), 0)) == ()


def test_the_picture_shows_the_highest_of_what_a_column_holds():
    names = [f"n{number}" for number in range(1000)]
    spike = curve(names, [900 if number == 707 else 100 for number in range(1000)], 500)
    rows = [line for line in curve_lines(Memory(spike, spike)) if " |" in line]
    assert [row.count("#") for row in rows[:-1]] == [1] * (CURVE_HEIGHT - 1)
    assert len(rows[-1]) <= 80


def test_more_than_keeping_everything_is_drawn_as_such():
    before, after = curve("ab", (2, 2), 1), curve("ab", (1, 4), 1)
    lines = list(curve_lines(Memory(before, after)))
    assert any("+" in line for line in lines if " |" in line)
    assert "more than if it were" in lines[-1]
