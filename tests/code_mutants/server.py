"""A process that has imported torch, the product and all tests, and forks a child per mutant.

It is pytest itself, with the plugin below in place of the loop over tests: by then everything is
imported and collected. A child puts the mutant into force and runs a few tests, until one fails.
"""

import contextlib
import ctypes
import gc
import json
import mmap
import os
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NoReturn

import pytest
from code_mutants.books import Coverage, Timed, Verdict, Verdicts, chosen, quickest
from code_mutants.cover import Places
from code_mutants.mutate import Mutant, mutants
from code_mutants.patch import Patcher

TIMES = 10
"""A test that takes so many times as long as it took unchanged, and `patience`, hangs."""
CHILD_BYTES = 12 << 30
PR_SET_PDEATHSIG = 1


@dataclass(frozen=True)
class Job:
    """What a server is to do; written as JSON by whoever starts it.

    tree      an isolated copy of the repository, which mutants are written into
    work      where books are kept
    covered   sources below the tree of which is found out who executes them
    files     those of them to mutate
    tests     files of tests, or parts of their paths; all those that were collected if empty
    per_file  mutants of each source, at most
    seconds   of tests for each mutant, about, and at most `most` tests
    until     when no further mutant is begun, as `time.time` tells it
    cover_seconds  for a file of tests whose coverage is not known; 0: do without
    again     verdicts that are not believed: their mutants are judged anew
    only      names of mutants, if not all
    patience  seconds that a test may take in any case
    """

    tree: str
    work: str
    covered: list[str]
    files: list[str]
    tests: list[str]
    per_file: int
    seconds: float
    most: int
    until: float
    seed: int
    cover_seconds: float
    again: list[str]
    only: list[str]
    patience: float = 15


class Server:
    def __init__(self, job: Job) -> None:
        self.job = job
        self.tree, self.work = Path(job.tree), Path(job.work)
        self.coverage = Coverage(self.work / "coverage")
        self.verdicts = Verdicts(self.work / "verdicts.jsonl")
        self._failed: list[tuple[str, str]] = []
        self._sound: dict[str, bool] = {}
        """Test that failed -> whether it passes without a mutant."""
        self._shared: dict[str, set[int]] | None = None
        self._places = Places()

    # -- what pytest calls

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        self._items = {item.nodeid: item for item in session.items}
        self._patcher = Patcher({name: self.tree / name for name in self.job.covered})
        gc.collect()
        gc.freeze()
        self._sources = {name: (self.tree / name).read_text("utf-8") for name in self.job.covered}
        self._instrumented = {
            name: self._places.instrumented(name, source) for name, source in self._sources.items()
        }
        self._cover(session)
        self._judge()
        return True

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            lines = str(report.longrepr).strip().splitlines() or [""]
            told = [line for line in lines if line.startswith("E ")] or lines[-1:]
            self._failed.append((report.nodeid, f"{report.when}: {told[0][:200]}"))

    @pytest.hookimpl(hookwrapper=True)
    def pytest_fixture_setup(self, fixturedef) -> Iterator[None]:  # type: ignore[no-untyped-def]
        if self._shared is None or fixturedef.scope == "function":
            yield
            return
        before = self._places.take()
        yield
        self._shared[fixturedef.argname] |= self._places.take()
        self._before |= before

    # -- coverage

    def _cover(self, session: pytest.Session) -> None:
        of_file: dict[str, list[pytest.Item]] = defaultdict(list)
        for item in session.items:
            of_file[item.nodeid.partition("::")[0]].append(item)
        for name in self._in_order(of_file):
            path = self.tree / name
            covers = bool(self.job.cover_seconds)
            known = self.coverage.knows(path, name, changed=not covers)
            if known or not covers or time.time() > self.job.until:
                continue
            out = self.work / "met.jsonl"
            out.unlink(missing_ok=True)
            run = partial(self._run_covered, of_file[name], out)
            ended, seconds = self._forked(run, [self.job.cover_seconds], self.work / "cache")
            rows = (
                [json.loads(line) for line in out.read_text().splitlines() if line.endswith("}")]
                if out.exists()
                else []
            )
            self.coverage.add(path, name, self._places.all, rows)
            failed = [row["test"] for row in rows if not row["passed"]]
            say(
                f"{name}: {len(rows)} of {len(of_file[name])} tests in {seconds:.0f} s, {ended}"
                + "".join(f"\n  fails unchanged: {test}" for test in failed)
            )

    def _in_order(self, of_file: Mapping[str, Sequence[pytest.Item]]) -> list[str]:
        """Files of tests as they were asked for; of those asked for at once the shortest first."""
        files = sorted(of_file, key=lambda name: len(of_file[name]))
        asked = [name for part in self.job.tests for name in files if part in name]
        return list(dict.fromkeys(asked)) if self.job.tests else files

    def _run_covered(self, items: list[pytest.Item], out: Path) -> None:
        for name, source in self._instrumented.items():
            self._patcher.put(name, source)
        self._places.listen()
        self._shared = defaultdict(set)
        with out.open("w", encoding="utf-8") as file:
            for item, after in zip(items, [*items[1:], None], strict=True):
                self._places.take()
                self._before: set[int] = set()
                self._failed.clear()
                since = time.perf_counter()
                item.config.hook.pytest_runtest_protocol(item=item, nextitem=after)
                seconds = time.perf_counter() - since
                met = self._places.take() | self._before
                for fixture in getattr(item, "fixturenames", ()):
                    met |= self._shared.get(fixture, set())
                row = {
                    "test": item.nodeid,
                    "seconds": round(seconds, 3),
                    "passed": not self._failed,
                    "met": sorted(met),
                }
                file.write(json.dumps(row) + "\n")
                file.flush()

    # -- judging

    def _judge(self) -> None:
        queues = [list(self._queue(name)) for name in self.job.files]
        for turn in range(max(map(len, queues), default=0)):
            for queue in queues:
                if turn < len(queue):
                    if time.time() > self.job.until:
                        say("the time is over")
                        return
                    mutant, tests = queue[turn]
                    verdict = self._verdict(mutant, tests)
                    self.verdicts.add(verdict)
                    change = f"{mutant.file}:{mutant.line} {mutant.was} -> {mutant.becomes}"
                    say(f"{change}: {verdict.verdict} in {verdict.seconds:.1f} s {verdict.why}")

    def _queue(self, name: str) -> Iterator[tuple[Mutant, list[Timed]]]:
        """The mutants of one source that are still to be judged."""
        taken = 0
        for mutant in chosen(mutants(name, self._sources[name]), self.job.seed):
            if self.job.only and mutant.name not in self.job.only:
                continue
            found = quickest(self.coverage, mutant, self.job.seconds, self.job.most)
            tests = [test for test in found if test.name in self._items]
            if not tests:
                continue
            if taken == self.job.per_file:
                return
            taken += 1
            known = self.verdicts.all.get(mutant.name)
            if known is None or known.verdict in self.job.again:
                yield mutant, tests
            elif not known.caught:  # by tests that ran; there may be more by now
                ran = set(known.tests)
                if more := [test for test in tests if test.name not in ran]:
                    yield mutant, more

    def _verdict(self, mutant: Mutant, tests: list[Timed]) -> Verdict:
        ended, seconds, failed = self._ran(mutant, tests)
        while failed and not self._passes_unchanged(failed[0], tests):
            tests = [test for test in tests if test.name != failed[0]]
            ended, seconds, failed = self._ran(mutant, tests)
        names = [test.name for test in tests]
        known = self.verdicts.all.get(mutant.name)
        if known is not None and not known.caught:
            names = list(dict.fromkeys([*known.tests, *names]))
        if ended == "ended":
            ended = "killed" if failed else "survived"
        return Verdict(mutant.name, ended, seconds, tuple(names), " ".join(failed))

    def _passes_unchanged(self, name: str, tests: Sequence[Timed]) -> bool:
        """Whether a test that failed may be believed: it may have changed, or be flaky."""
        if name not in self._sound:
            test = next((test for test in tests if test.name == name), None)
            if test is None:
                return True  # the mutant does not load
            ended, _, failed = self._ran(None, [test])
            self._sound[name] = ended == "ended" and not failed
            if not self._sound[name]:
                say(f"  fails unchanged: {name}")
        return self._sound[name]

    def _ran(self, mutant: Mutant | None, tests: Sequence[Timed]) -> tuple[str, float, list[str]]:
        """How a child came to its end, when, and the test that failed in it with what, if any."""
        out = self.work / "failed.json"
        out.unlink(missing_ok=True)
        limits = [self.job.patience + TIMES * test.seconds for test in tests] or [60.0]
        with contextlib.ExitStack() as stack:
            if mutant is not None:  # processes that tests start import what lies on disk
                stack.enter_context(self._on_disk(mutant))
            ended, seconds = self._forked(partial(self._run_mutant, mutant, tests, out), limits)
        failed = json.loads(out.read_text("utf-8")) if ended == "ended" else []
        return ended, seconds, failed[0] if failed else []

    @contextlib.contextmanager
    def _on_disk(self, mutant: Mutant) -> Iterator[None]:
        path, source = self.tree / mutant.file, self._sources[mutant.file]
        stat = path.stat()
        path.write_text(mutant.of(source), "utf-8")
        try:
            yield
        finally:
            path.write_text(source, "utf-8")
            os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))

    def _run_mutant(self, mutant: Mutant | None, tests: Sequence[Timed], out: Path) -> None:
        self._failed.clear()
        items = [self._items[test.name] for test in tests]
        try:
            if mutant is not None:
                self._patcher.put(mutant.file, mutant.of(self._sources[mutant.file]))
        except ValueError as error:
            self._failed.append((str(error), "does not load"))
            items = []
        for item, after in zip(items, [*items[1:], None][: len(items)], strict=True):
            item.config.hook.pytest_runtest_protocol(item=item, nextitem=after)
            if self._failed:
                break
            self._over[:4] = (int.from_bytes(self._over[:4]) + 1).to_bytes(4)
        out.write_text(json.dumps(self._failed), "utf-8")

    # -- children

    def _forked(
        self, run: Callable[[], None], limits: Sequence[float], cache: Path | None = None
    ) -> tuple[str, float]:
        """How a child that did this came to an end ("ended", "crashed", "timed out"), and when.

        limits  seconds that pass until `_over` goes on from 0 to 1, and so on
        """
        tmp = self.work / "tmp"
        shutil.rmtree(tmp, ignore_errors=True)
        tmp.mkdir(parents=True)
        if cache is None:
            cache = tmp / "cache"
            if (self.work / "cache").exists():
                shutil.copytree(self.work / "cache", cache)
        self._over = mmap.mmap(-1, mmap.PAGESIZE)  # shared; its first four bytes count
        over, began = 0, time.perf_counter()
        since = began
        child = os.fork()
        if child == 0:
            self._in_child(run, tmp, cache)
        while os.waitpid(child, os.WNOHANG | os.WUNTRACED)[0] == 0:
            now = time.perf_counter()
            if (done := int.from_bytes(self._over[:4])) > over:
                over, since = done, now
            if now - since > limits[min(over, len(limits) - 1)]:
                _end_group(child)
                os.waitpid(child, 0)
                return "timed out", now - began
            time.sleep(0.01)
        _end_group(child)  # what it started and left
        seconds = time.perf_counter() - began
        return ("ended" if (tmp / "ended").exists() else "crashed"), seconds

    def _in_child(self, run: Callable[[], None], tmp: Path, cache: Path) -> NoReturn:
        os.setpgid(0, 0)
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # nobody else would end it
        log = os.open(self.work / "child.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(log, 1)
        os.dup2(log, 2)
        resource.setrlimit(resource.RLIMIT_DATA, (CHILD_BYTES, CHILD_BYTES))
        os.environ |= {
            "XDG_CACHE_HOME": str(cache),
            "TMPDIR": str(tmp),
            "PYTHONDONTWRITEBYTECODE": "1",
        }
        tempfile.tempdir = str(tmp)
        try:
            run()
            (tmp / "ended").touch()
        except BaseException:  # noqa: BLE001, whatever it is, this process ends here
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            os._exit(0)


def _end_group(leader: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(leader, signal.SIGKILL)


def say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def main(job: Path) -> int:
    from hypothesis import Phase, settings

    # The first example that fails will do.
    phases = (Phase.explicit, Phase.generate, Phase.target)
    settings.register_profile("mutants", derandomize=True, database=None, phases=phases)
    settings.load_profile("mutants")
    server = Server(Job(**json.loads(job.read_text("utf-8"))))
    options = [
        "-p",
        "no:cacheprovider",
        "-p",
        "no:xdist",
        "-s",
        "-o",
        "timeout=0",
        "--disable-warnings",
    ]
    options += ["-m", "not slow", f"--basetemp={server.work / 'tmp' / 'pytest'}"]
    options += ["--rootdir", str(server.tree)]
    return int(pytest.main([*options, *_collected(server)], plugins=[server]))


def _collected(server: Server) -> list[str]:
    """The files of tests to import: all, or those asked for, as far as they are of use."""
    every = sorted(
        str(path.relative_to(server.tree)) for path in (server.tree / "tests").rglob("test_*.py")
    )
    wanted, covers = server.job.tests, bool(server.job.cover_seconds)
    asked = [path for path in every if not wanted or any(part in path for part in wanted)]
    return [
        path
        for path in asked
        if covers or server.coverage.knows(server.tree / path, path, changed=True)
    ]


if __name__ == "__main__":
    raise SystemExit(main(Path(sys.argv[1])))
