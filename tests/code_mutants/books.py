"""What is kept between runs: which test executes which statement, and how mutants were judged."""

import hashlib
import json
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path

from code_mutants.cover import Place
from code_mutants.mutate import Mutant


@dataclass(frozen=True)
class Timed:
    """A test that passes as the source is, the seconds it took, and the statements it executes."""

    name: str
    seconds: float
    statements: int = 1

    @property
    def dear(self) -> float:
        """What is quick and about little comes first: it says more about the little."""
        return self.seconds * self.statements

    @property
    def file(self) -> str:
        return self.name.partition("::")[0]


@dataclass
class Coverage:
    """Tests by the statements that they execute, kept as one file for each file of tests."""

    directory: Path
    by_place: dict[Place, list[Timed]] = field(default_factory=lambda: defaultdict(list))
    files: set[str] = field(default_factory=set)

    def knows(self, tests: Path, name: str, changed: bool = False) -> bool:
        """Whether the file of tests was run as it is, or as it was before it was `changed`; takes
        in what was found."""
        if name in self.files:
            return True
        try:
            kept = json.loads(self._path(name).read_text("utf-8"))
        except FileNotFoundError:
            return False
        if kept["digest"] != _digest(tests) and not changed:
            return False
        self._take(name, kept)
        return True

    def add(self, tests: Path, name: str, places: list[Place], found: Iterable[dict]) -> None:
        used: dict[int, int] = {}
        rows = {}
        for row in found:
            met = [used.setdefault(at, len(used)) for at in row["met"]]
            if row["passed"]:
                rows[row["test"]] = [row["seconds"], met]
        kept = {"digest": _digest(tests), "places": [places[at] for at in used], "tests": rows}
        self.directory.mkdir(parents=True, exist_ok=True)
        self._path(name).write_text(json.dumps(kept), "utf-8")
        self._take(name, kept)

    def _take(self, name: str, kept: dict) -> None:
        self.files.add(name)
        places = [tuple(place) for place in kept["places"]]
        for test, (seconds, met) in kept["tests"].items():
            for at in met:
                self.by_place[places[at]].append(Timed(test, seconds, len(met)))

    def _path(self, name: str) -> Path:
        return self.directory / (name.replace("/", "-") + ".json")


@dataclass(frozen=True)
class Verdict:
    """What became of a mutant: "killed", "crashed", "timed out" or "survived".

    tests   that ran, or would have if none before had failed
    why     the test that failed, and with what
    """

    mutant: str
    verdict: str
    seconds: float
    tests: tuple[str, ...]
    why: str = ""

    @property
    def caught(self) -> bool:
        return self.verdict != "survived"


class Verdicts:
    """A file of verdicts, one in a line; of one mutant the last counts."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.all: dict[str, Verdict] = {}
        for line in path.read_text("utf-8").splitlines() if path.exists() else ():
            row = json.loads(line)
            self.all[row["mutant"]] = Verdict(**{**row, "tests": tuple(row["tests"])})

    def add(self, verdict: Verdict) -> None:
        self.all[verdict.mutant] = verdict
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(asdict(verdict)) + "\n")


def chosen(found: Iterable[Mutant], seed: int) -> Iterator[Mutant]:
    """Mutants in an order that the seed decides, those of functions and kinds taking turns; where a
    source changes, the others keep their order."""
    groups: dict[tuple[str, str], list[Mutant]] = defaultdict(list)
    for mutant in sorted(found, key=lambda m: _draw(seed, m.name)):
        groups[mutant.function, mutant.kind].append(mutant)
    queues = sorted(groups.values(), key=lambda queue: _draw(seed, queue[0].name))
    for turn in range(max(map(len, queues), default=0)):
        yield from (queue[turn] for queue in queues if turn < len(queue))


def quickest(coverage: Coverage, mutant: Mutant, seconds: float, most: int) -> list[Timed]:
    """The fastest tests that execute the changed statement and little else, in turn by files."""
    of_file: dict[str, list[Timed]] = defaultdict(list)
    place = (mutant.file, mutant.function, mutant.statement)
    for test in sorted(coverage.by_place.get(place, ()), key=lambda test: test.dear):
        of_file[test.file].append(test)
    picked: list[Timed] = []
    for turn in range(max(map(len, of_file.values()), default=0)):
        for test in sorted(
            (tests[turn] for tests in of_file.values() if turn < len(tests)),
            key=lambda test: test.dear,
        ):
            if len(picked) < most and (
                not picked or sum(t.seconds for t in picked) + test.seconds <= seconds
            ):
                picked.append(test)
    # Those of one file stand together: they share what the file sets up.
    first = {}
    for test in sorted(picked, key=lambda test: test.dear):
        first.setdefault(test.file, test.dear)
    return sorted(picked, key=lambda test: (first[test.file], test.file, test.dear))


def _digest(path: Path) -> str:
    return hashlib.sha1(path.read_bytes()).hexdigest()


def _draw(seed: int, name: str) -> bytes:
    return hashlib.sha1(f"{seed} {name}".encode()).digest()
