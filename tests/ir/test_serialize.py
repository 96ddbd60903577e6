"""A dump is read back as it was written, and what cannot be read says why."""

import dataclasses
import json

import pytest
import small_run

from zcompile.errors import NotInRun, RunUnreadable
from zcompile.ir import serialize as rf
from zcompile.ir.serialize import decode, encode, open_run


@pytest.fixture
def root(tmp_path):
    small_run.write_run(tmp_path, graphs=2)
    return tmp_path


def test_a_directory_of_runs_means_its_newest(root):
    for _ in range(10):  # so that 10 sorts after 9
        newest = small_run.write_run(root)
    assert newest.name == "run-10"
    assert open_run(root).path == newest


def test_a_run_can_be_named_by_itself_or_by_one_of_its_graphs(root):
    assert [g.index for g in open_run(root / "run-0").graphs] == [0, 1]
    assert [g.index for g in open_run(root / "run-0" / "graph1").graphs] == [1]
    assert [g.index for g in open_run(root, graph=0).graphs] == [0]


def test_what_was_written_is_read_back(root):
    graph = open_run(root, graph=0).graphs[0]
    last = graph.passes()[-1]
    assert graph.nodes(last) == small_run.stage_nodes(2)
    assert graph.text(last) == small_run.text(small_run.stage_nodes(2))
    assert list(graph.schedule("forward")) == small_run.instructions()
    assert graph.phases() == ("forward",)
    assert graph.plan().params[0].home == "disk"


@pytest.mark.parametrize("key", ["1", "01", "gather-params"])
def test_a_pass_is_found_by_number_or_name(root, key):
    assert open_run(root).graphs[0].find(key).step == 1


def test_an_unknown_pass_offers_the_nearest(root):
    with pytest.raises(NotInRun, match="no pass 'gather-param'; did you mean gather-params"):
        open_run(root).graphs[0].find("gather-param")


def test_an_unknown_graph_is_an_error(root):
    with pytest.raises(NotInRun, match="no graph '7'; it has 0, 1"):
        open_run(root, graph=7)


def test_a_missing_directory_says_how_to_write_a_dump(tmp_path):
    with pytest.raises(RunUnreadable, match=r"does not exist; write one with ZINF_DUMP=DIR"):
        open_run(tmp_path / "nothing")


def test_an_empty_directory_holds_no_run(tmp_path):
    with pytest.raises(RunUnreadable, match="holds no run"):
        open_run(tmp_path)


def test_a_run_without_graphs_is_not_ready(tmp_path):
    run = rf.new_run(tmp_path)
    rf.run_file(run).write_text(encode(rf.RunRecord("0", "2", {}, ())))
    with pytest.raises(RunUnreadable, match="holds no graph yet"):
        open_run(tmp_path)


@pytest.mark.parametrize(
    ("broken", "why"),
    [
        ("{", "is not what a dump writes"),
        ('[{"step": 1}]', r"the top\[0\] lacks 'name'"),
        ('[{"step": "1"}]', r"the top\[0\].step should be int, and is '1'"),
        ('{"step": 1}', "the top should be"),
    ],
)
def test_a_broken_file_says_which_and_where(root, broken, why):
    graph = open_run(root).graphs[0]
    rf.passes_file(graph.path).write_text(broken)
    with pytest.raises(RunUnreadable, match=rf"passes\.json.*{why}"):
        graph.passes()


def test_a_missing_file_says_which(root):
    graph = open_run(root).graphs[0]
    rf.plan_file(graph.path).unlink()
    with pytest.raises(RunUnreadable, match=r"plan\.json cannot be read: No such file"):
        graph.plan()


def test_a_reader_ignores_keys_it_does_not_know(root):
    graph = open_run(root).graphs[0]
    rows = json.loads(rf.passes_file(graph.path).read_text())
    rf.passes_file(graph.path).write_text(json.dumps([{**row, "later": 1} for row in rows]))
    assert len(graph.passes()) == 3


def test_two_writers_never_share_a_run(tmp_path):
    assert [rf.new_run(tmp_path).name for _ in range(3)] == ["run-0", "run-1", "run-2"]


def test_the_line_of_a_pass_reads_as_in_the_log():
    row = rf.PassRecord(2, "release-params", {"zinf.release": 3}, 2816, 3461)
    assert rf.pass_line(row).split("  ")[0] == "02 release-params"
    assert "zinf.release +3 " in rf.pass_line(row)
    assert rf.pass_line(row).endswith("peak 2.75 -> 3.38 KiB")
    moved = dataclasses.replace(row, did={}, peak_after=5 << 20)
    assert "order only" in rf.pass_line(moved)
    assert rf.pass_line(moved).endswith("peak 2.75 KiB -> 5.00 MiB")


def test_a_symbolic_size_and_an_absent_value_survive():
    node = dataclasses.replace(small_run.node("x", "x"), shape=("s0", 8), dtype=None)
    assert decode(rf.NodeRecord, json.loads(encode(node))) == node
    assert decode(rf.NodeRecord, json.loads(encode(dataclasses.replace(node, shape=None))))
