"""`zinf timeline --perfetto`: trace events of the structure that Perfetto reads."""

import json
from itertools import pairwise

import pytest
from written_steps import HOSTILE, step, write_step

from zcompile.cli.tracks import sides
from zcompile.ir import serialize as rf


@pytest.fixture
def trace(zinf, tmp_path):
    def written(record):
        target = tmp_path / "out.json"
        code, out, _ = zinf("timeline", write_step(tmp_path, record), "--perfetto", target)
        assert code == 0
        assert str(target) in out
        return json.loads(target.read_text())["traceEvents"]

    return written


def named(events, what):
    rows = (e for e in events if e["ph"] == "M" and e["name"] == what)
    return {(e["pid"], e["tid"]): e["args"]["name"] for e in rows}


def test_predicted_and_measured_are_two_processes_with_a_thread_for_each_lane(trace):
    events = trace(step())
    assert named(events, "process_name") == {(1, 0): "predicted", (2, 0): "measured"}
    lanes = ["calls", "compute", "waits", "h2d", "d2h", "disk_read", "disk_write"]
    threads = named(events, "thread_name")
    for pid in (1, 2):
        assert [threads[pid, tid] for tid in range(1, 8)] == lanes


def test_every_event_has_what_its_kind_asks_for(trace):
    asked = {
        "M": {"name", "pid", "args"},
        "X": {"name", "cat", "pid", "tid", "ts", "dur", "args"},
        "C": {"name", "pid", "ts", "args"},
        "s": {"name", "cat", "id", "pid", "tid", "ts"},
        "f": {"name", "cat", "id", "pid", "tid", "ts", "bp"},
    }
    events = trace(step())
    assert {e["ph"] for e in events} == set(asked)
    for event in events:
        assert asked[event["ph"]] <= event.keys()
        assert event.get("ts", 0) >= 0
        assert event.get("dur", 0) >= 0


def test_slices_of_one_thread_do_not_overlap(trace):
    events = trace(step())
    for thread in named(events, "thread_name"):
        mine = [e for e in events if e["ph"] == "X" and (e["pid"], e["tid"]) == thread]
        mine.sort(key=lambda e: e["ts"])
        for one, other in pairwise(mine):
            assert one["ts"] + one["dur"] <= other["ts"] + 1e-3


def test_times_are_microseconds(trace):
    runs = [e for e in trace(step()) if e["ph"] == "X" and e["name"] == "run t mm"]
    assert [e["dur"] for e in runs] == pytest.approx([10_000] * 6)


def test_a_flow_leads_from_the_passage_to_the_first_instruction_that_reads_it(trace):
    events = trace(step())
    slices = [e for e in events if e["ph"] == "X"]

    def around(flow):
        (found,) = (
            e
            for e in slices
            if (e["pid"], e["tid"]) == (flow["pid"], flow["tid"])
            and e["ts"] <= flow["ts"] < e["ts"] + e["dur"]
        )
        return found

    starts = {e["id"]: e for e in events if e["ph"] == "s"}
    ends = {e["id"]: e for e in events if e["ph"] == "f"}
    assert len(starts) == 6
    assert starts.keys() == ends.keys()
    for key, start in starts.items():
        assert start["ts"] <= ends[key]["ts"]
        layer = around(start)["name"].split(".")[1]
        used = around(ends[key])
        assert (used["name"], used["args"]["number"]) == ("run t mm", 4 * int(layer) + 3)


def test_a_step_of_an_older_run_has_only_its_instructions(trace):
    now = step()
    old = rf.TimelineRecord(now.step, now.measured, None, now.moments)
    events = trace(old)
    assert set(named(events, "process_name").values()) == {"measured"}
    assert not [e for e in events if e["ph"] in "sf"]


def test_hostile_names_are_data(trace):
    assert any(HOSTILE in e["name"] for e in trace(step(name=HOSTILE)))


def test_a_trace_that_cannot_be_written_is_refused(zinf, tmp_path):
    run = write_step(tmp_path, step())
    code, _, err = zinf("timeline", run, "--perfetto", tmp_path / "no" / "out.json")
    assert code == 2
    assert "perfetto" in err
    assert "No such file" in err


def test_what_was_fetched_ahead_in_another_step_belongs_to_no_instruction_of_this_one():
    now = step(layers=2)
    late = rf.PassageRecord("h2d", "blocks.0.weight", 10**6, 0.039, 0.0395)
    ahead = rf.TimelineRecord(
        now.step, now.measured, None, now.moments, rf.FORMAT, (now.passages[1], late)
    )
    (side,) = sides(ahead)
    assert [(h.name, h.sender, h.user) for h in side.hops] == [
        ("blocks.1.weight", 4, 7),
        ("blocks.0.weight", None, None),
    ]


def test_what_leaves_belongs_to_the_store_before_it():
    now = step(layers=1)
    store = rf.MomentRecord(
        0, "step", 4, "store", "s", 0.02, 0.021, 0.0, entry="s", stream="disk_write", nbytes=8
    )
    rows = (
        rf.PassageRecord("disk_write", "s", 8, -0.001, 0.001),
        rf.PassageRecord("d2h", "s", 8, 0.021, 0.022),
        rf.PassageRecord("disk_write", "s", 4, 0.022, 0.023),
        rf.PassageRecord("disk_write", "s", 4, 0.023, 0.024),
    )
    record = rf.TimelineRecord(1, now.measured, None, (*now.moments, store), rf.FORMAT, rows)
    (side,) = sides(record)
    assert [h.sender for h in side.hops] == [None, 4, 4, 4]
