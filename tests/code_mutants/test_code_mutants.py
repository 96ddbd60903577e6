"""The search for mutants tells a change that no test notices from those that one does."""

import json
import os
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path

import pytest
from code_mutants.__main__ import AREAS, as_key, equivalents, report, targets
from code_mutants.books import Coverage, Timed, Verdicts, chosen, quickest
from code_mutants.mutate import Mutant, mutants
from code_mutants.server import Job

TESTS = Path(__file__).parent.parent

TOY = '''\
def fits(nbytes, room):
    return nbytes <= room


def padded(nbytes, unit):
    """The next multiple of a unit."""
    return -(-nbytes // unit) * unit


def counted(rows):
    total = 0
    while rows:
        rows.pop()
        total += 1
    return total


def nobody_calls(begin, end):
    return begin - end
'''

TESTS_OF_TOY = """\
from toy import counted, fits, padded


def test_what_is_as_large_as_the_room_fits():
    assert fits(3, 3)
    assert not fits(4, 3)


def test_whole_units_stay_as_they_are():
    assert padded(8, 4) == 8


def test_rows_are_counted():
    assert counted([1, 2]) == 2


def test_that_fails_unchanged():
    assert fits(1, 0)
"""


@pytest.fixture(scope="module")
def judged(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Job, str]:
    """A toy, all of whose mutants were judged, the job and what was told."""
    work = tmp_path_factory.mktemp("mutants")
    tree = work / "tree"
    (tree / "tests").mkdir(parents=True)
    (tree / "toy.py").write_text(TOY)
    (tree / "tests" / "test_toy.py").write_text(TESTS_OF_TOY)
    (tree / "pyproject.toml").write_text('[tool.pytest.ini_options]\nmarkers = ["slow: long"]\n')
    judged = {"(nbytes < room)", "(nbytes // unit)", "(begin + end)"}
    only = [m.name for m in mutants("toy.py", TOY) if m.becomes in judged or m.was == "rows.pop()"]
    job = Job(
        str(tree),
        str(work),
        ["toy.py"],
        ["toy.py"],
        [],
        100,
        5.0,
        10,
        time.time() + 300,
        0,
        60.0,
        [],
        only,
        patience=3.0,
    )
    return work, job, _served(work, job)


def _served(work: Path, job: Job) -> str:
    (work / "job.json").write_text(json.dumps(asdict(job)))
    done = subprocess.run(
        [sys.executable, "-m", "code_mutants.server", str(work / "job.json")],
        cwd=job.tree,
        env={**os.environ, "PYTHONPATH": f"{job.tree}:{TESTS}:{TESTS / 'helpers'}"},
        capture_output=True,
        text=True,
        timeout=250,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def _verdict(work: Path, function: str, becomes: str) -> str | None:
    found = mutants("toy.py", TOY)
    (mutant,) = [m for m in found if (m.function, m.becomes) == (function, becomes)]
    verdict = Verdicts(work / "verdicts.jsonl").all.get(mutant.name)
    return None if verdict is None else verdict.verdict


@pytest.mark.slow
def test_a_mutant_that_a_test_notices_is_killed(judged):
    assert _verdict(judged[0], "fits", "(nbytes < room)") == "killed"


def test_a_mutant_that_no_test_notices_survives(judged):
    work, job, _ = judged
    assert _verdict(work, "padded", "(nbytes // unit)") == "survived"
    told = "\n".join(
        report(Path(job.tree), {"toy": ["toy.py"]}, Verdicts(work / "verdicts.jsonl"), {})
    )
    assert "+    return (nbytes // unit) * unit" in told
    assert "passed: tests/test_toy.py (1)" in told


def test_a_mutant_that_hangs_is_ended_and_told_apart(judged):
    (mutant,) = [m for m in mutants("toy.py", TOY) if m.was == "rows.pop()"]
    assert Verdicts(judged[0] / "verdicts.jsonl").all[mutant.name].verdict == "timed out"


def test_what_no_test_executes_is_not_judged_and_what_fails_unchanged_is_told(judged):
    work, _, told = judged
    assert _verdict(work, "nobody_calls", "(begin + end)") is None
    assert "fails unchanged: tests/test_toy.py::test_that_fails_unchanged" in told


def test_the_copy_is_as_it_was_and_nothing_is_judged_twice(judged):
    work, job, _ = judged
    assert (Path(job.tree) / "toy.py").read_text() == TOY
    before = (work / "verdicts.jsonl").read_text()
    _served(work, job)
    assert (work / "verdicts.jsonl").read_text() == before


def test_an_equivalent_mutant_is_told_apart_from_open_ones(judged):
    work, job, _ = judged
    same = {
        (
            "toy.py",
            "padded",
            "return -(-nbytes // unit) * unit",
            "-(-nbytes // unit)",
            "(nbytes // unit)",
        ): "a reason"
    }
    lines = report(Path(job.tree), {"toy": ["toy.py"]}, Verdicts(work / "verdicts.jsonl"), same)
    assert next(lines for lines in lines if lines.startswith("| toy.py")).split(" | ")[5] == "1"


@pytest.mark.parametrize(
    ("was", "becomes", "kind"),
    [
        ("if a < b:\n        f()", "(a <= b)", "condition"),
        ("if a and b:\n        f()", "(a or b)", "condition"),
        ("if a:\n        f()", "True", "condition"),
        ("x = a if b else c", "(not (b))", "condition"),
        ("f(offset, nbytes)", "f(nbytes, offset)", "size"),
        ("x = -(-a // b)", "(a // b)", "size"),
        ("x = a * itemsize", "a", "size"),
        ("x = y[begin:end]", "end:begin", "size"),
        ("x = end", "(end - 1)", "size"),
        ("x.wait()", "pass", "removed"),
        ("x.version += 1", "pass", "removed"),
        ("x.version = y", "pass", "removed"),
        ("raise ValueError(a < b)", "pass", "removed"),
        ("return a", "None", "returned"),
        ("return True", "False", "returned"),
    ],
)
def test_a_statement_is_changed_so(was, becomes, kind):
    found = mutants("m.py", f"def f(a, b, c):\n    {was}\n")
    assert (becomes, kind) in [(m.becomes, m.kind) for m in found]


def test_what_only_tells_is_left_alone():
    source = 'def f(x):\n    """Says."""\n    assert x > 1, x\n    log.info("%d", x + 1)\n'
    assert mutants("m.py", source) == []


@pytest.mark.parametrize("file", [f for files in targets([]).values() for f in files])
def test_every_mutant_of_the_product_is_a_program_with_a_name_of_its_own(file):
    source = (TESTS.parent / file).read_text("utf-8")
    found = mutants(file, source)
    assert len({mutant.name for mutant in found}) == len(found) > 0
    for mutant in found[:: max(1, len(found) // 20)]:
        text = mutant.of(source)
        assert text != source
        compile(text, file, "exec")


def test_the_areas_name_files_that_exist():
    assert all((TESTS.parent / f).is_file() for files in targets([]).values() for f in files)
    assert len(AREAS) == len(targets([]))


def test_what_is_said_to_be_equivalent_is_a_mutant_of_the_product():
    """A row whose function has moved or whose statement has changed would excuse nothing."""
    told = equivalents(TESTS / "code_mutants" / "equivalent.toml")
    files = {file for file, *_ in told}
    sources = {file: (TESTS.parent / file).read_text("utf-8") for file in files}
    found = {as_key(mutant) for file in files for mutant in mutants(file, sources[file])}
    assert sorted(told.keys() - found) == []
    assert files <= {f for files in targets([]).values() for f in files}


def test_the_order_of_mutants_stays_where_another_function_changes():
    source = "def f(a, b):\n    return a < b\n\n\ndef g(a):\n    return a + 1\n"
    names = [m.name for m in chosen(mutants("m.py", source), 7) if m.function == "f"]
    other = source.replace("a + 1", "a - 2")
    assert names == [m.name for m in chosen(mutants("m.py", other), 7) if m.function == "f"]


def test_tests_of_a_mutant_are_the_fastest_of_each_file(tmp_path):
    coverage = Coverage(tmp_path)
    mutant = next(m for m in mutants("m.py", "def f(a, b):\n    return a < b\n"))
    assert isinstance(mutant, Mutant)
    place = (mutant.file, mutant.function, mutant.statement)
    coverage.by_place[place] = [
        Timed("a.py::slow", 9.0),
        Timed("a.py::quick", 1.0),
        Timed("b.py::t", 2.0),
        Timed("c.py::t", 30.0),
    ]
    names = [test.name for test in quickest(coverage, mutant, seconds=12.5, most=5)]
    assert names == ["a.py::quick", "a.py::slow", "b.py::t"]
    assert quickest(coverage, mutant, seconds=0.1, most=5) == [Timed("a.py::quick", 1.0)]
