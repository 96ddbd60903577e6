"""Shares units of work out among child processes, and tells which case killed one."""

import json
import os
import select
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch_tables.telling import ANSWERS

PATIENCE_S = 1200
"""So long a child may say nothing: most is seconds of compute, and the machine may be busy."""


@dataclass
class Told:
    """What came of one unit.

    rows  of cases that were not equal: case, way, kind, why; a kind may also be "crash" or "hang"
    """

    unit: dict[str, Any]
    counts: Counter[str] = field(default_factory=Counter)
    cases: int = 0
    seconds: float = 0.0
    rows: list[dict[str, str]] = field(default_factory=list)

    def add(self, row: dict[str, str]) -> None:
        """A case that began is not equal."""
        self.rows.append(row)
        self.counts[row["kind"]] += 1
        self.counts["equal"] -= 1


class Child:
    def __init__(self, module: str) -> None:
        self.errors = tempfile.TemporaryFile("w+")  # noqa: SIM115  # closed by `end`
        read, write = os.pipe()
        here = Path(__file__).parents[2]
        path = os.pathsep.join(map(str, (here, here / "tests", here / "tests" / "helpers")))
        self.process = subprocess.Popen(
            [
                "bash",
                "-c",
                f'exec {ANSWERS}>&{write}; exec "$0" "$@"',
                sys.executable,
                "-X",
                "faulthandler",
                "-m",
                module,
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=self.errors,
            text=True,
            pass_fds=(write,),
            env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        )
        os.close(write)
        self._read, self._rest = read, b""
        self.at, self.begun = "at the start", 0

    def fileno(self) -> int:
        return self._read

    def give(self, unit: dict[str, Any]) -> None:
        assert self.process.stdin is not None
        self.at, self.begun = "before the first case", 0
        self.process.stdin.write(json.dumps(unit) + "\n")
        self.process.stdin.flush()

    def heard(self) -> list[dict[str, Any]] | None:
        """Lines that came; None: the child is dead."""
        data = os.read(self._read, 1 << 16)
        if not data:
            return None
        *lines, self._rest = (self._rest + data).split(b"\n")
        return [json.loads(line) for line in lines]

    def end(self) -> str:
        """Ends the child; what it said last on stderr."""
        assert self.process.stdin is not None
        self.process.kill()
        self.process.wait()
        self.process.stdin.close()
        os.close(self._read)
        self.errors.seek(0)
        text = self.errors.read()
        self.errors.close()
        return text.partition("Extension modules:")[0].strip()[-8000:]


def work(
    units: Iterable[dict[str, Any]],
    module: str = "torch_tables.child",
    workers: int = 1,
    tell: Callable[[Told], None] = lambda told: None,
    patience_s: float = PATIENCE_S,
) -> list[Told]:
    """Works off all units; a case that kills a child, or says nothing for `patience_s`, is skipped
    by the next one."""
    todo = [dict(unit, skip=unit.get("skip", 0)) for unit in units][::-1]
    children = [Child(module) for _ in range(min(workers, len(todo)))]
    doing: dict[Child, Told] = {}
    found: list[Told] = []
    kept: dict[str, Told] = {}

    def next_for(child: Child) -> None:
        if not todo:
            child.end()
            children.remove(child)
            return
        unit = todo.pop()
        name = json.dumps({k: v for k, v in unit.items() if k != "skip"})
        doing[child] = kept.setdefault(name, Told(unit))
        doing[child].unit = unit
        child.give(unit)

    def lost(child: Child, kind: str) -> None:
        if kind == "hang":
            child.process.send_signal(signal.SIGABRT)  # it says first where its threads are
            child.process.wait()
        said = child.end()
        code = child.process.returncode
        children.remove(child)
        told = doing.pop(child, None)
        if told is None:
            raise RuntimeError(f"a child did not start, exit {code}:\n{said}")
        why = f"exit {code}: {said}"
        told.add({"case": child.at, "way": "", "kind": kind, "why": why})
        if child.begun:
            todo.append(dict(told.unit, skip=told.unit["skip"] + child.begun))
        else:
            finish(told)
        if todo:
            children.append(Child(module))

    def finish(told: Told) -> None:
        found.append(told)
        tell(told)

    try:
        while children:
            ready, _, _ = select.select(children, [], [], patience_s)
            for child in list(ready) or list(doing):
                if child not in ready:
                    lost(child, "hang")
                    continue
                lines = child.heard()
                if lines is None:
                    lost(child, "crash")
                    continue
                for line in lines:
                    if "ready" in line:
                        next_for(child)
                    elif "begin" in line:
                        child.at, child.begun = line["begin"], child.begun + 1
                        doing[child].counts["equal"] += 1  # until it is told otherwise
                    elif "case" in line:
                        doing[child].add(line)
                    else:
                        told = doing.pop(child)
                        told.cases = line["cases"]
                        told.seconds += line["seconds"]
                        finish(told)
                        next_for(child)
    finally:
        for child in children:  # none is left, unless this was broken off
            child.end()
    return found
