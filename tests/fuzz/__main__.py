"""`make fuzz`: programs are drawn and run until one fails, the time is up, or somebody says stop.

Of the kinds of programs, under each of the budgets and in slices, some are drawn by turns.

The work is done by a child, so that a crash is told too, with the program that crashed.
"""

import argparse
import itertools
import logging
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from pathlib import Path

from fuzz.hunt import hunt
from fuzz.program import Program
from fuzz.rules import NOT_YET
from fuzz.setting import BUDGETS
from fuzz.slices import check as slices
from fuzz.slices.program import Program as SlicedProgram

CHUNK = 6
"""Programs of one seed; the first of each is the simplest that there is."""


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m fuzz", description=__doc__)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="how long; default: on")
    parser.add_argument("--seed", type=int, default=None, help="the first seed; default: the time")
    only = parser.add_mutually_exclusive_group()
    only.add_argument("--budget", choices=sorted(BUDGETS), default=None, help="default: by turns")
    only.add_argument("--slices", action="store_true", help="only models in slices")
    parser.add_argument("--compiled", action="store_true", help="also calls the compiled model")
    parser.add_argument("--keep-going", action="store_true", help="tells a failure and goes on")
    parser.add_argument("--without", nargs="*", default=(), help="steps with this are left out")
    parser.add_argument("--child", type=Path, default=None, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.seed is None:
        given.seed = int(time.time()) % 1_000_000
    return work(given) if given.child else watch(given)


def watch(given: argparse.Namespace) -> int:
    """The child works; where it crashes, its last program is told."""
    with tempfile.NamedTemporaryFile(prefix="fuzz-", suffix=".py") as file:
        asked = [*sys.argv[1:], f"--seed={given.seed}", f"--child={file.name}"]
        child = subprocess.Popen([sys.executable, "-W", "ignore", "-m", "fuzz", *asked])
        while True:
            try:
                code = child.wait()
                break
            except KeyboardInterrupt:  # the child was told too, and says how far it got
                continue
        if code < 0:
            print(f"killed by {signal.Signals(-code).name}, seed {given.seed}; not shrunk:")
            print(Path(file.name).read_text(encoding="utf-8"))
    return int(code != 0)


def work(given: argparse.Namespace) -> int:
    logging.disable(logging.WARNING)
    began, counts, failed = time.monotonic(), {"programs": 0, "steps": 0, "refused": 0}, 0

    def told(program: Program, step: str) -> None:
        counts["programs"] += not program.steps
        counts["steps"] += 1
        counts["refused"] += program.was_refused
        given.child.write_text(f"{program.text('the last step crashed')}{step}\n", encoding="utf-8")

    def told_of_slices(program: SlicedProgram) -> None:
        counts["programs"] += 1
        counts["steps"] += len(program.lines)
        given.child.write_text(f"{program.text('it crashed')}\n", encoding="utf-8")

    turns = [None] if given.slices else [given.budget] if given.budget else [*BUDGETS, None]
    try:
        for number, budget in zip(itertools.count(given.seed), itertools.cycle(turns)):
            if time.monotonic() - began > given.seconds or (failed and not given.keep_going):
                break
            found: Exception | None
            if budget is None:
                found = slices.hunt(number, CHUNK, told_of_slices)
            else:
                past = (*NOT_YET, *given.without)
                found = hunt(budget, number, CHUNK, told, compiled=given.compiled, without=past)
            if found is not None:
                failed += 1
                print(f"seed {number}:", found, sep="\n")
                traceback.print_exception(found.__cause__, limit=-4, chain=False)
    except KeyboardInterrupt:
        pass
    took = time.monotonic() - began
    ran = f"{counts['programs']} programs, {counts['steps']} steps ({counts['refused']} refused)"
    print(f"seeds {given.seed} to {number}: {ran}, {took:.0f} s, {failed or 'none'} failed")
    return int(bool(failed))


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.exit(main())
