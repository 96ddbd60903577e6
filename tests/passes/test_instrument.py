"""A dump of a real run: its files, the commands that read them, and that off costs nothing."""

import json
import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from offloaded import SMALL
from small_models import mlp

import zcompile
from zcompile.cli import main
from zcompile.config import Config
from zcompile.errors import DiskUnusable
from zcompile.ir import serialize as form
from zcompile.ir.serialize import Graph, open_run
from zcompile.passes import instrument
from zcompile.passes.instrument import Watcher
from zcompile.passes.pipeline import pipeline

PASSES = [form.CAPTURED, *(p.name for p in pipeline(Config(device="cpu")))]
ROOT = Path(__file__).parents[2]


def dumped(root: Path) -> Path:
    """One training step and one call without gradients, dumped: a run of two graphs."""
    torch._dynamo.reset()
    model = zcompile.offload(mlp(), **SMALL)
    compiled = torch.compile(model, backend="zinf", options={"dump": str(root)})
    compiled(torch.ones(2, 8)).sum().backward()
    with torch.no_grad():
        compiled(torch.ones(2, 8))
    return root


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return dumped(tmp_path_factory.mktemp("dump"))


@pytest.fixture
def graphs(root) -> tuple[Graph, ...]:
    return open_run(root).graphs


@pytest.fixture
def zinf(capsys):
    """What a command prints as JSON; its exit code must be 0."""

    def run(*argv: object):
        assert main([*map(str, argv), "--json"]) == 0
        return json.loads(capsys.readouterr().out)

    return run


def test_a_run_says_what_made_it(root):
    record = open_run(root).record
    assert (record.zcompile, record.torch) == (zcompile.__version__, torch.__version__)
    assert record.config["device"] == "cpu"
    assert record.config["device_memory"] == 1 << 20
    assert record.graphs == ("graph0", "graph1")


def test_every_file_of_the_format_is_there_and_no_other(root):
    run = open_run(root).path
    training, inference = run / "graph0", run / "graph1"
    stages = [f"{i:02d}-{name}.{kind}" for i, name in enumerate(PASSES) for kind in ("json", "txt")]
    for graph, phases in ((training, ("forward", "backward")), (inference, ("inference",))):
        schedules = [f"schedule-{phase}.{kind}" for phase in phases for kind in ("json", "txt")]
        programs = [f"program-{phase}.txt" for phase in phases]
        wanted = {*stages, *schedules, *programs, "passes.json", "plan.json"}
        assert {path.name for path in graph.iterdir()} == wanted
    assert (run / "run.json").is_file()


def test_every_file_is_readable(graphs):
    for graph in graphs:
        passes = graph.passes()
        assert [row.name for row in passes] == PASSES
        for row in passes:
            assert graph.text(row).startswith("forward:")
            assert graph.nodes(row)
        assert graph.plan().params
        for phase in graph.phases():
            assert graph.schedule(phase)
            assert graph.schedule_text(phase)
    assert [graph.phases() for graph in graphs] == [("forward", "backward"), ("inference",)]


def test_a_pass_record_says_what_the_pass_did(graphs):
    rows = {row.name: row for row in graphs[0].passes()}
    assert rows["gather-params"].did == {
        "zinf.gather": -4,
        "zinf.fetch": 5,
        "zinf.wait": 5,
        "aten.t": 1,
    }
    assert rows["release-params"].did == {"zinf.release": 5}
    assert rows["reduce-grads"].did == {"zinf.reduce_grad": 4, "aten.t": -4}
    assert rows["split-budget"].did == {}
    assert rows["release-params"].peak_after > 0


def test_nodes_know_their_parameter(graphs):
    nodes = graphs[0].nodes(graphs[0].passes()[-1])
    owned = {(n.target, n.param) for n in nodes if n.param}
    for target in ("zinf.fetch", "zinf.wait", "zinf.release", "zinf.reduce_grad"):
        assert (target, "0.weight") in owned
    assert all(n.param is None for n in nodes if n.target.startswith("aten."))


def test_the_plan_names_the_parameters_and_the_schedules_fetch_them(graphs):
    graph = graphs[0]
    names = {row.name for row in graph.plan().params}
    assert names == {"0.weight", "0.bias", "2.weight", "2.bias"}
    for phase in graph.phases():
        rows = [row for row in graph.schedule(phase) if row.kind == "fetch"]
        assert {row.name for row in rows} <= names
        text = graph.program_text(phase)
        for row in rows:
            assert f"  fetches  {row.name} into [{row.address}, " in text


def test_show_names_every_pass(zinf, root, capsys):
    assert main(["show", str(root)]) == 0
    out = capsys.readouterr().out
    assert all(name in out for name in PASSES)
    assert main(["show", str(root / "run-0" / "graph0"), "release-params"]) == 0
    assert "zinf.release(%_0_weight_full)" in capsys.readouterr().out
    assert zinf("show", root)


def test_diff_shows_what_a_pass_added(root, capsys):
    graph = root / "run-0" / "graph0"
    assert main(["diff", str(graph), "gather-params", "release-params"]) in (0, 1)
    added = [row for row in capsys.readouterr().out.splitlines() if row.startswith("+")]
    assert sum("zinf.release" in row for row in added) == 5


def test_schedule_lists_every_instruction(root, capsys):
    graph = root / "run-0" / "graph0"
    assert main(["schedule", str(graph)]) == 0
    out = capsys.readouterr().out
    assert out.count(" fetch ") == 5
    assert out.count(" reduce ") == 4


def test_schedule_by_regions_says_what_each_of_them_reads(root, capsys):
    graph = root / "run-0" / "graph0"
    assert main(["schedule", str(graph), "--regions", "--phase", "forward"]) == 0
    out = capsys.readouterr().out
    assert "forward of graph0: 3 regions read 4 values, 4 of them fetched" in out
    assert out.count("  reads  ") == 4


def test_explain_tells_the_life_of_a_parameter(root, capsys):
    graph = root / "run-0" / "graph0"
    assert main(["explain", str(graph), "2.weight"]) == 0
    out = capsys.readouterr().out
    assert "2.weight" in out
    for word in ("fetch", "wait", "release", "backward"):
        assert word in out


def test_each_model_of_a_process_has_a_run_of_its_own(tmp_path):
    dumped(tmp_path)
    dumped(tmp_path)
    assert [name for _, name in form.runs_in(tmp_path)] == [tmp_path / "run-0", tmp_path / "run-1"]


def test_off_nothing_is_computed_and_nothing_is_written(tmp_path, monkeypatch):
    def forbidden(*args: object) -> None:
        raise AssertionError("somebody looks although nobody is told")

    for name in ("_census", "_nodes", "_plan", "_instruction", "footprint"):
        monkeypatch.setattr(instrument, name, forbidden)
    monkeypatch.chdir(tmp_path)
    torch._dynamo.reset()
    model = zcompile.offload(mlp(), **SMALL)
    torch.compile(model, backend="zinf")(torch.ones(2, 8)).sum().backward()
    assert list(tmp_path.iterdir()) == []
    assert Watcher("graph0")._idle


def test_the_environment_asks_for_a_dump_too(tmp_path, monkeypatch):
    monkeypatch.setenv("ZINF_DUMP", str(tmp_path / "here"))
    torch._dynamo.reset()
    model = zcompile.offload(mlp(), **SMALL)
    torch.compile(model, backend="zinf")(torch.ones(2, 8))
    assert (tmp_path / "here" / "run-0" / "graph0" / "plan.json").is_file()


def test_a_dump_that_cannot_be_written_says_so(tmp_path):
    (tmp_path / "file").write_text("not a directory")
    with pytest.raises(DiskUnusable, match="cannot take a dump"):
        instrument.open_run(Config(device="cpu", dump=tmp_path / "file"), {})


def test_the_log_has_one_line_per_pass(caplog):
    torch._dynamo.reset()
    model = zcompile.offload(mlp(), **SMALL)
    with caplog.at_level(logging.DEBUG, logger="zcompile.passes"):
        torch.compile(model, backend="zinf")(torch.ones(2, 8))
    lines = [r.getMessage() for r in caplog.records if r.name == "zcompile.passes"]
    assert [line.split()[:3] for line in lines] == [
        ["graph0", f"{i:02d}", name] for i, name in enumerate(PASSES)
    ]


SCRIPT = """
import torch, zcompile
model = zcompile.offload(torch.nn.Sequential(torch.nn.Linear(4, 4)), device="cpu",
                         device_memory="1MiB", host_memory="1MiB")
torch.compile(model, backend="zinf")(torch.ones(2, 4))
"""


@pytest.mark.slow
def test_torch_logs_shows_one_line_per_pass():
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "TORCH_LOGS": "+zcompile", "PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 0, done.stderr
    shown = [row for row in done.stderr.splitlines() if " peak " in row]
    assert len(shown) == len(PASSES)
    assert all(name in row for name, row in zip(PASSES, shown, strict=True))
