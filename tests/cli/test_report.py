"""`zinf report`: what the page of a run holds, and what a run must be for one."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from small_run import write_run
from written_steps import HOSTILE, step, write_step

from zcompile.cli.report import SCRIPTS, page
from zcompile.ir import serialize as rf
from zcompile.ir.version import VERSION

HERE = Path(rf.__file__).parents[1] / "cli" / "report"


@pytest.fixture
def made(zinf, tmp_path):
    """Exit code, facts and text of the page of a run, and what was printed."""

    def report(run, *more):
        target = tmp_path / "report.html"
        code, out, err = zinf("report", run, "-o", target, *more)
        text = target.read_text() if target.exists() else ""
        return code, facts_in(text), text, out + err

    return report


def facts_in(text):
    found = re.search(r'<script type="application/json" id="facts">(.*?)</script>', text, re.S)
    return json.loads(found[1]) if found else None


def test_a_page_holds_the_step_and_the_passes(made, tmp_path):
    code, facts, _, out = made(write_step(tmp_path, step()))
    assert code == 0
    assert out.startswith(f"{tmp_path / 'report.html'}: run-0, ")
    assert facts["step"]["number"] == 8
    assert [side["name"] for side in facts["sides"]] == ["predicted", "measured"]
    for side in facts["sides"]:
        assert side["slices"]["begin"][:4] == [0.0, 1000.0, 8000.0, 8000.0]
        assert side["hops"]["h2d"]["sender"] == [0, 4, 8]
        assert side["hops"]["h2d"]["user"] == [3, 7, 11]
        assert side["hops"]["disk_read"]["begin"] == []
    captured, gathered, cut = facts["graphs"][0]["passes"]
    assert captured["diff"] == []
    assert "+%pending = zinf.fetch(%up_weight)" in gathered["diff"]
    assert cut["notes"] == ["a note"]


def test_levels_that_do_not_change_are_told_once(made, tmp_path):
    _, facts, _, _ = made(write_step(tmp_path, step()))
    memory = facts["sides"][1]["memory"]
    assert memory["until"] == [18_000.0, 38_000.0, 58_000.0]
    assert memory["device"] == [10**6, 2 * 10**6, 3 * 10**6]
    assert memory["disk"] == [3 * 10**6] * 3
    assert set(facts["sides"][0]["memory"]) == {"until", "device", "outside"}


def test_entries_say_what_moved_for_them(made, tmp_path):
    _, facts, _, _ = made(write_step(tmp_path, step()))
    entries, names = facts["entries"], facts["names"]
    assert names[entries["name"][0]] == "blocks.0.weight"
    assert entries["arrives"] == [10**6, 0] * 3
    assert entries["leaves"] == [0] * 6
    assert not entries["compiled"]


def test_a_page_warns_of_what_is_worth_knowing(made, tmp_path):
    record = step()
    slow = replace(
        record,
        measured=replace(record.measured, step_s=0.2, nbytes={"h2d": 1, "d2h": 5}),
        tiers=(rf.TierRecord("disk", 10, 20),),
        unplanned="No plan.",
    )
    _, facts, _, _ = made(write_step(tmp_path, slow))
    said = "\n".join(facts["warnings"])
    for words in (
        "No plan.",
        "The step took 200 ms, 3.33 times its prediction of 60.0 ms.",
        "The disk held 20 B, which is more than its 10 B.",
        "3 entries, 33 B, do not rest where the plan wants them.",
        "5 B moved over d2h without a time of their own",
        "w may round otherwise than eager's",
        "cut-regions, graph 0: a note",
    ):
        assert words in said
    _, facts, _, _ = made(write_step(tmp_path, step()))
    assert "Compute waited for transfers during 30% of the step." in facts["warnings"]


def test_a_page_says_which_version_wrote_the_run(made, tmp_path):
    run = write_step(tmp_path, step())
    told = json.loads((run / "run.json").read_text()) | {"zcompile": "0.0.9"}
    (run / "run.json").write_text(json.dumps(told))
    assert f"by zcompile 0.0.9; this page by {VERSION}" in made(run)[1]["warnings"][0]


def test_a_run_without_a_step_says_so(made, tmp_path):
    code, facts, _, _ = made(write_run(tmp_path))
    assert code == 0
    assert facts["step"] is None
    assert any("No step was measured yet" in row for row in facts["warnings"])
    assert facts["entries"]["compiled"]
    assert [facts["names"][n] for n in facts["entries"]["name"]] == ["up.weight"]


def test_a_step_of_an_older_run_says_what_is_missing(made, tmp_path):
    now = step()
    old = rf.TimelineRecord(now.step, now.measured, now.predicted, now.moments)
    code, facts, _, _ = made(write_step(tmp_path, old))
    assert code == 0
    assert facts["tiers"] == []
    assert any("before links, memory" in row for row in facts["warnings"])
    assert facts["entries"]["compiled"]


def test_one_graph_may_be_asked_for(made, tmp_path):
    run = write_step(tmp_path, step(), graphs=2)
    assert [g["index"] for g in made(run)[1]["graphs"]] == [0, 1]
    assert [g["index"] for g in made(run, "--graph", 1)[1]["graphs"]] == [1]


# --- Bad input ---


def test_what_is_no_run_is_refused(made, tmp_path):
    code, facts, _, said = made(tmp_path)
    assert (code, facts) == (1, None)
    assert "holds no run" in said
    assert made(tmp_path / "nowhere")[0] == 1


@pytest.mark.parametrize("file", ["run.json", "timeline.json"])
def test_a_run_of_a_newer_version_is_not_guessed_at(made, tmp_path, file):
    run = write_step(tmp_path, step())
    told = json.loads((run / file).read_text()) | {"format": rf.FORMAT + 1}
    (run / file).write_text(json.dumps(told))
    code, _, _, said = made(run)
    assert code == 1
    assert f"is written in format {rf.FORMAT + 1}" in said


@pytest.mark.parametrize(
    "file",
    ["timeline.json", "graph0/passes.json", "graph0/01-gather-params.txt", "graph0/plan.json"],
)
def test_what_is_damaged_is_named_and_the_rest_is_shown(made, tmp_path, file):
    run = write_run(tmp_path) if "plan" in file else write_step(tmp_path, step())
    text = (run / file).read_bytes()
    (run / file).write_bytes(text[: len(text) // 2] + b"\xff")
    code, facts, _, said = made(run)
    assert code == 1
    assert facts["title"] == "run-0"
    assert "damaged:" in said
    assert Path(file).name in facts["warnings"][0]


@pytest.mark.parametrize("number", ["NaN", "-Infinity", "1e999", "[" * 9_000])
def test_what_is_no_number_damages_a_file(made, tmp_path, number):
    run = write_step(tmp_path, step())
    text = (run / "timeline.json").read_text()
    (run / "timeline.json").write_text(text.replace('"stall_s": 0.0', f'"stall_s": {number}', 1))
    code, facts, _, said = made(run)
    assert (code, facts["step"]) == (1, None)
    assert "timeline.json is not what a dump writes" in said


def test_a_step_without_instructions_is_shown(made, tmp_path):
    empty = replace(step(), moments=(), passages=(), predicted_passages=())
    code, facts, _, _ = made(write_step(tmp_path, empty))
    assert code == 0
    assert [side["spans"] for side in facts["sides"]] == [[]]


def test_a_run_whose_record_is_cut_off_is_refused(made, tmp_path):
    run = write_step(tmp_path, step())
    (run / "run.json").write_text("{")
    code, facts, _, said = made(run)
    assert (code, facts) == (1, None)
    assert "is not what a dump writes" in said


@pytest.mark.parametrize("target", ["no/report.html", ".", "a\0b"])
def test_a_page_that_cannot_be_written_is_refused(zinf, tmp_path, target):
    run = write_step(tmp_path, step())
    code, _, err = zinf("report", run, "-o", tmp_path / target)
    assert code == 2
    assert "cannot be written" in err


def test_hostile_names_stay_data(made, tmp_path):
    run = write_step(tmp_path, step(name=HOSTILE))
    record = json.loads((run / "run.json").read_text())
    hostile = record | {"graphs": [HOSTILE], "config": {HOSTILE: HOSTILE}, "torch": "@SCRIPT@"}
    (run / "run.json").write_text(json.dumps(hostile))
    text = (run / "graph0" / "01-gather-params.txt").read_text()
    (run / "graph0" / "01-gather-params.txt").write_text(text + HOSTILE + "\n")
    code, facts, html, _ = made(run)
    assert code == 0
    assert "owned'" in html
    assert "<img" not in html.replace(script_of(html), "")
    assert html.count("<script") == 2
    assert html.count("</script>") == 2
    assert facts["graphs"][0]["name"] == HOSTILE
    assert facts["torch"] == "@SCRIPT@"


def script_of(html):
    return re.search(r"<script>(.*?)</script>", html, re.S)[1]


# --- The page itself ---


def test_a_page_asks_no_network():
    html = page({"title": "t"})
    assert "http://" not in html
    assert "https://" not in html
    assert not re.search(r"<(link|img|iframe|object)\b", html)
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', html)[1]
    assert policy.startswith("default-src &#x27;none&#x27;")
    assert "unsafe" not in policy
    assert "url(" not in html


def test_no_script_reads_markup():
    for name in SCRIPTS:
        text = (HERE / name).read_text()
        for way in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval("):
            assert way not in text, f"{name} uses {way}"


def test_what_a_page_is_made_of_is_installed():
    """setuptools takes along what pyproject.toml names."""
    told = (HERE.parents[2] / "pyproject.toml").read_text()
    for suffix in {path.suffix for path in HERE.iterdir() if path.suffix not in (".py", "")}:
        assert f'"cli/report/*{suffix}"' in told
