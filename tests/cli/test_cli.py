"""Every command of `zinf`: what a person reads, what a program reads, and the exit code."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import small_run
from border import Border
from failed_calls import Once, open_below

from zcompile.cli import doctor, main
from zcompile.cli.doctor import probe_disk
from zcompile.errors import DiskUnusable
from zcompile.ir import serialize as rf
from zcompile.machine.files import find
from zcompile.runtime.hardware import mount_type
from zcompile.runtime.io import trial

ROOT = Path(__file__).parents[2]


@pytest.fixture
def root(tmp_path):
    small_run.write_run(tmp_path)
    return tmp_path


@pytest.fixture
def installed(monkeypatch, tmp_path_factory):
    """As after `pip install`, also from a bare checkout; rates are looked up, not measured."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
    monkeypatch.setattr("zcompile.runtime.probe.probe", lambda *given: find("desktop-24gb"))
    monkeypatch.setattr("zcompile.cli.doctor._backends", lambda: {"zinf"})


def test_show_gives_one_line_per_pass(zinf, root):
    code, out, _ = zinf("show", root)
    lines = out.splitlines()
    assert code == 0
    assert lines[:2] == ["run-0: zcompile 0.1.0, torch 2.13.0", "graph0: frame 0"]
    assert [line.split()[:2] for line in lines[2:5]] == [
        ["00", "captured"],
        ["01", "gather-params"],
        ["02", "cut-regions"],
    ]
    assert "as captured" in lines[2]
    assert "zinf.fetch +1, zinf.gather -1, zinf.release +1, zinf.wait +1" in lines[3]
    assert "order only" in lines[4]
    assert lines[5].strip() == "note: a note"


def test_show_of_a_pass_gives_the_graph_after_it(zinf, root):
    code, out, _ = zinf("show", root, "gather-params")
    assert (code, out) == (0, small_run.text(small_run.stage_nodes(1)))
    assert zinf("show", root, "1") == (0, out, "")


def test_several_graphs_are_told_apart(zinf, tmp_path):
    small_run.write_run(tmp_path, graphs=2)
    assert "# graph0\n" in (out := zinf("show", tmp_path, "0")[1])
    assert "# graph1\n" in out
    assert "#" not in zinf("show", tmp_path, "0", "--graph", 1)[1]


def test_show_as_json_holds_the_records(zinf, root):
    told = json.loads(zinf("show", root, "--json")[1])
    assert told["run"]["config"] == {"device": "cpu", "disk": ["/data"]}
    assert told["graphs"][0]["passes"][1]["did"]["zinf.fetch"] == 1
    (stage,) = json.loads(zinf("show", root, "2", "--json")[1])
    assert [node["name"] for node in stage["nodes"]][2:5] == ["pending", "clone", "full"]


def test_diff_shows_what_moved_and_exits_1(zinf, root):
    code, out, _ = zinf("diff", root, "1", "2")
    assert code == 1
    assert out.startswith("--- graph0/01-gather-params.txt\n+++ graph0/02-cut-regions.txt\n")
    assert "\n+%pending = zinf.fetch(%up_weight)\n" in out


def test_diff_of_a_stage_with_itself_exits_0(zinf, root):
    assert zinf("diff", root, "1", "gather-params") == (0, "no difference\n", "")
    (told,) = json.loads(zinf("diff", root, "1", "1", "--json")[1])
    assert told["same"] is True
    assert told["lines"] == []


def test_schedule_lists_the_instructions(zinf, root):
    code, out, _ = zinf("schedule", root, "--phase", "forward")
    assert code == 0
    assert out.splitlines()[0].split() == ["0", "h2d", "fetch", "up.weight"]
    (told,) = json.loads(zinf("schedule", root, "--json")[1])
    assert [row["kind"] for row in told["instructions"]] == ["fetch", "run", "wait", "run", "free"]


def test_schedule_of_a_phase_that_was_not_planned_is_a_finding(zinf, root):
    code, out, err = zinf("schedule", root, "--phase", "step")
    assert (code, out) == (1, "")
    assert "has no schedule of phase 'step'; it has forward" in err


def test_explain_tells_the_life_of_a_parameter(zinf, root, golden):
    code, out, _ = zinf("explain", root, "up.weight")
    assert code == 0
    assert out == golden


def test_explain_as_json_says_when_and_what_each_pass_did(zinf, root):
    (life,) = json.loads(zinf("explain", root, "up.weight", "--json")[1])
    (forward,) = life["phases"]
    assert [event["what"] for event in forward["events"]] == [
        "its handle",
        "fetch starts",
        "waited for",
        "a view of it",
        "reads it",
        "released",
    ]
    assert forward["ahead"] == [1]
    assert [row["kind"] for row in forward["instructions"]] == ["fetch", "wait", "free"]
    gathered, moved = life["passes"]
    assert gathered["did"]["zinf.gather"] == -1
    assert moved["did"] == {}


def test_explain_of_an_unknown_name_offers_the_nearest(zinf, root):
    code, out, err = zinf("explain", root, "up.weigth")
    assert (code, out) == (1, "")
    assert "no parameter 'up.weigth'; did you mean up.weight?" in err


def test_an_unreadable_run_is_one_sentence_and_exit_1(zinf, tmp_path):
    code, out, err = zinf("show", tmp_path / "nothing")
    assert (code, out) == (1, "")
    assert (
        err == f"zinf: {tmp_path}/nothing does not exist; write one with ZINF_DUMP=DIR "
        "or Config(dump=DIR)\n"
    )


@pytest.mark.parametrize(
    "argv",
    [
        [],
        ["sow"],
        ["show"],
        ["schedule", "x", "--phase", "sideways"],
        ["diff", "x", "1"],
        ["show", "x", "--graph", "one"],
    ],
)
def test_wrong_usage_exits_2(argv, capsys):
    with pytest.raises(SystemExit) as left:
        main(argv)
    assert left.value.code == 2
    assert "usage: zinf" in capsys.readouterr().err


def test_a_reader_that_stops_early_is_no_error(root):
    graph = rf.graph_dir(root / "run-0", 0)
    rf.text_file(graph, 1, "gather-params").write_text("a line of the graph\n" * 100_000)
    told = subprocess.run(
        f"{sys.executable} -m zcompile.cli show {root} 1 | head -1",
        shell=True,
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert (told.stdout, told.stderr) == ("a line of the graph\n", "")


def test_doctor_measures_a_directory_and_leaves_nothing_behind(zinf, tmp_path, installed):
    code, out, _ = zinf("doctor", "--disk", tmp_path, "--json")
    told = json.loads(out)
    (disk,) = told["disks"]
    assert code == 0
    assert disk["write_bytes_per_s"] > 0
    assert disk["free_bytes"] > 0
    assert os.listdir(tmp_path) == []
    assert told["devices"][-1]["name"] == "cpu"
    assert not [row for row in told["findings"] if row["stops"]]


def test_doctor_speaks_to_a_person(zinf, installed, monkeypatch):
    monkeypatch.setattr("triton_kernels.missing", lambda device: "there are none")
    code, out, _ = zinf("doctor")
    told = {row.split()[0] for row in out.splitlines()}
    assert code == 0
    assert {"python", "torch", "triton", "kernels", "cores", "device"} <= told
    assert "kernels     none: there are none" in out


def test_doctor_stops_at_a_directory_that_is_not_there(zinf, tmp_path, installed):
    code, out, _ = zinf("doctor", "--disk", tmp_path / "nothing")
    assert code == 1
    assert "STOP        disk=" in out
    assert "does not exist; create it or give another directory" in out


def test_doctor_stops_if_torch_compile_does_not_know_the_backend(zinf, installed, monkeypatch):
    monkeypatch.setattr("zcompile.cli.doctor._backends", set)
    code, out, _ = zinf("doctor")
    assert code == 1
    assert "torch.compile does not know backend='zinf'" in out


def test_a_directory_without_direct_io_is_a_note(zinf, tmp_path, installed, monkeypatch):
    monkeypatch.setattr("zcompile.runtime.io.trial.supports_direct", lambda path: False)
    code, out, _ = zinf("doctor", "--disk", tmp_path)
    assert code == 0
    assert "has no O_DIRECT" in out
    assert probe_disk(tmp_path).read_bytes_per_s is None


def test_doctor_says_which_ways_to_the_disk_are_open(zinf, tmp_path, installed, monkeypatch):
    def refused():
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr("zcompile.runtime.io.trial.supports_direct", lambda path: True)
    monkeypatch.setattr("zcompile.runtime.io.trial.DIRECT", ("aio", "threads", "buffered"))
    monkeypatch.setitem(trial.RINGS, "aio", refused)
    _, out, _ = zinf("doctor", "--disk", tmp_path)
    assert "aio: refused (Operation not permitted), threads: used, buffered: works" in out


def test_the_probe_of_a_disk_passes_the_border_and_tells_what_fails(tmp_path, monkeypatch):
    monkeypatch.setattr(doctor, "PROBE_BYTES", 4096)
    monkeypatch.setattr(doctor, "REQUEST_BYTES", 4096)
    once = Once(tmp_path)
    probe_disk(tmp_path, Border(once))
    spots = dict.fromkeys(once.seen)
    assert {name for name, _, _ in spots} >= {"stat", "statvfs", "pwrite", "pread", "fdatasync"}
    for at in spots:
        if at[0] in ("stat", "statvfs", "fdatasync"):
            with pytest.raises(DiskUnusable, match=f"{tmp_path}.*Input/output error"):
                probe_disk(tmp_path, Border(Once(tmp_path, at, "EIO")))
    assert open_below(tmp_path) == []
    assert list(tmp_path.iterdir()) == []


def test_the_deepest_mount_decides_the_filesystem():
    mounts = [
        "1 0 8:1 / / rw,relatime - ext4 /dev/sda1 rw",
        "2 1 0:5 / /data rw shared:1 - xfs /dev/nvme0n1 rw",
        "3 1 0:6 / /database rw - tmpfs tmpfs rw",
    ]
    assert mount_type(Path("/data/a"), mounts) == "xfs"
    assert mount_type(Path("/home"), mounts) == "ext4"
    assert mount_type(Path("/home"), []) == "unknown"
