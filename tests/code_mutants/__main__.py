"""`python -m code_mutants`: mutate the files that move bytes, and list what no test notices."""

import argparse
import difflib
import json
import os
import shutil
import subprocess
import sys
import time
import tomllib
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

from code_mutants.books import Verdict, Verdicts
from code_mutants.mutate import Mutant, mutants
from code_mutants.server import Job

HERE = Path(__file__).parent
ROOT = HERE.parent.parent

AREAS = {
    "dispatch": "runtime/eager/dispatch runtime/eager/fillings runtime/eager/rows"
    " runtime/eager/tensor runtime/eager/unbacked",
    "streaming": "runtime/eager/streaming runtime/eager/repeats ir/optimizer_step",
    "transfers": "runtime/transfer/transfer runtime/transfer/queue runtime/transfer/staging"
    " runtime/store/resident runtime/store/placement runtime/gradients/on_device"
    " runtime/io/engine runtime/tiers/disk",
    "extents": "runtime/tiers/base runtime/tiers/extents runtime/device/arena",
    "gradients": "runtime/gradients/gradients runtime/gradients/leaves",
    "commit": "runtime/durable/commit runtime/durable/index runtime/durable/tier"
    " runtime/durable/files runtime/durable/recover checkpoint/durable",
}


def targets(wanted: list[str]) -> dict[str, list[str]]:
    """Files by area; of all, those whose path has one of these parts."""
    found = {
        area: [f"zcompile/{name}.py" for name in names.split()] for area, names in AREAS.items()
    }
    return {
        area: [f for f in files if not wanted or any(part in f for part in wanted)]
        for area, files in found.items()
    }


def copied(tree: Path, work: Path) -> Path:
    """A copy of what git knows or would know of the tree; what is the same is not written again."""
    target = work / "tree"
    listed = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard"],
        cwd=tree,
        check=True,
        capture_output=True,
        text=True,
    ).stdout.splitlines()
    kept = {name for name in listed if (tree / name).is_file()}
    for path in list(target.rglob("*")) if target.exists() else ():
        name = str(path.relative_to(target))
        if path.is_file() and "__pycache__" not in name and name not in kept:
            path.unlink()
    for name in kept:
        source, to = tree / name, target / name
        if not to.exists() or to.read_bytes() != source.read_bytes():
            to.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source, to)
    return target


def equivalents(path: Path) -> dict[tuple[str, str, str, str, str], str]:
    """The reasons of mutants that were looked at and change nothing, by what they change."""
    rows = tomllib.loads(path.read_text("utf-8")).get("mutant", []) if path.exists() else []
    return {
        (r["file"], r["function"], r["statement"], r["was"], r["becomes"]): r["reason"]
        for r in rows
    }


def as_key(mutant: Mutant) -> tuple[str, str, str, str, str]:
    return mutant.file, mutant.function, mutant.statement, mutant.was, mutant.becomes


def difference(mutant: Mutant, source: str) -> str:
    before, after = source.splitlines(), mutant.of(source).splitlines()
    lines = difflib.unified_diff(before, after, n=0, lineterm="")
    return "\n".join("    " + line for line in lines if not line.startswith(("---", "+++", "@@")))


def report(
    tree: Path,
    areas: dict[str, list[str]],
    verdicts: Verdicts,
    same: dict[tuple[str, str, str, str, str], str],
) -> Iterator[str]:
    yield "| file | mutants | judged | killed | timed out | equivalent | open | share killed |"
    yield "|---|---|---|---|---|---|---|---|"
    open_ones: list[str] = []
    total: Counter[str] = Counter()
    for area, files in areas.items():
        of_area: Counter[str] = Counter()
        for file in files:
            source = (tree / file).read_text("utf-8")
            found = mutants(file, source)
            count = Counter(mutants=len(found))
            for mutant in found:
                verdict = verdicts.all.get(mutant.name)
                if verdict is None:
                    continue
                told = _told(mutant, verdict, same)
                count += Counter({"judged": 1, told: 1})
                if told == "open":
                    files = Counter(test.partition("::")[0] for test in verdict.tests)
                    ran = ", ".join(f"{name} ({n})" for name, n in sorted(files.items()))
                    open_ones.append(
                        f"{file}:{mutant.line} in {mutant.function} [{mutant.name}]\n"
                        f"{difference(mutant, source)}\n  passed: {ran}"
                    )
            of_area += count
            yield _row(file, count)
        yield _row(f"**{area}**", of_area)
        total += of_area
    yield _row("**all**", total)
    yield ""
    yield from open_ones


def _told(mutant: Mutant, verdict: Verdict, same: dict) -> str:
    if verdict.verdict == "survived":
        return "equivalent" if as_key(mutant) in same else "open"
    return "timed out" if verdict.verdict == "timed out" else "killed"


def _row(name: str, count: Counter[str]) -> str:
    different = count["judged"] - count["equivalent"]
    caught = count["killed"] + count["timed out"]
    share = f"{100 * caught / different:.0f} %" if different else ""
    cells = [
        name,
        count["mutants"],
        count["judged"],
        count["killed"],
        count["timed out"],
        count["equivalent"],
        count["open"],
        share,
    ]
    return "| " + " | ".join(map(str, cells)) + " |"


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="code_mutants", description=__doc__)
    parser.add_argument("files", nargs="*", help="parts of paths; all if none")
    parser.add_argument("--work", type=Path, default=ROOT / ".mutants", help="where books are kept")
    parser.add_argument("--tests", nargs="*", default=[], help="parts of paths of tests to run")
    parser.add_argument("--per-file", type=int, default=20)
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--seconds", type=float, default=15, help="of tests for each mutant")
    parser.add_argument("--most", type=int, default=40, help="tests for each mutant")
    parser.add_argument("--cover-seconds", type=float, default=600, help="for each file of tests")
    parser.add_argument("--patience", type=float, default=15, help="seconds for any test")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--again",
        nargs="*",
        default=[],
        help="verdicts to be found anew: survived, timed out, killed",
    )
    parser.add_argument("--only", nargs="*", default=[], help="mutants by their names")
    parser.add_argument("--report", action="store_true", help="tell what was found, judge nothing")
    given = parser.parse_args(argv)
    work = given.work.resolve()
    work.mkdir(parents=True, exist_ok=True)
    areas = targets(given.files)
    tree = ROOT if given.report else copied(ROOT, work)
    if not given.report:
        covered = [f for files in targets([]).values() for f in files]
        mutated = [f for files in areas.values() for f in files]
        job = Job(
            str(tree),
            str(work),
            covered,
            mutated,
            given.tests,
            given.per_file,
            given.seconds,
            given.most,
            time.time() + 60 * given.minutes,
            given.seed,
            given.cover_seconds,
            given.again,
            given.only,
            given.patience,
        )
        (work / "job.json").write_text(json.dumps(asdict(job)), "utf-8")
        environment = {
            **os.environ,
            "PYTHONPATH": f"{tree}:{HERE.parent}:{HERE.parent / 'helpers'}",
            "OMP_NUM_THREADS": "1",
        }
        server = [sys.executable, "-m", "code_mutants.server", str(work / "job.json")]
        code = subprocess.run(server, cwd=tree, env=environment).returncode
        if code:
            return code
    lines = report(
        tree, areas, Verdicts(work / "verdicts.jsonl"), equivalents(HERE / "equivalent.toml")
    )
    sys.stdout.write("\n".join(lines) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
