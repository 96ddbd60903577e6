"""Shows a run while it goes: `zinf watch`.

It reads what the run appends to steps.jsonl (`ir/step_log.py`), and nothing else: the process that
trains is not asked. On a terminal one picture is redrawn in its place, elsewhere a line is printed
now and then. Of a directory of runs one that lives is watched, the newest of several.
"""

import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console, RenderableType
from rich.live import Live

from zcompile.cli.format import Answer
from zcompile.cli.frame import Frame, drawn, frame_of, headline
from zcompile.errors import ConfigInvalid, RunUnreadable
from zcompile.ir.serialize import graph_number, plain, run_file, runs_in
from zcompile.ir.step_log import StepLog, is_alive

REDRAWN_S, PRINTED_S = 0.5, 10.0
"""Seconds between two pictures on a terminal, and between two lines elsewhere."""
ROWS = 27
"""Lines of a terminal from which a picture has empty ones."""
MOST_RUNS = 16
"""Of the runs of a directory only the newest are looked at."""
LEAVE = "Ctrl-C leaves; the run goes on"
TOKENS = "--tokens-per-step N shows tokens per second"


@dataclass
class Watcher:
    """Follows a directory of runs, or one run.

    path    of runs, or of one
    tokens  of a step
    """

    path: Path
    tokens: int | None = None

    def __post_init__(self) -> None:
        self._logs: dict[Path, StepLog] = {}
        self._shown: Path | None = None

    @property
    def follows(self) -> bool:
        """Whether runs are looked for, as they come."""
        return not (run_file(self.path).exists() or graph_number(self.path) is not None)

    def frame(self, now: float) -> Frame:
        """What there is to show. raises  RunUnreadable"""
        if not self.follows:
            run = self.path.resolve()
            log = self._read(run if graph_number(run) is None else run.parent)
            return frame_of(log, now, self.tokens)
        try:
            runs = [path for _, path in runs_in(self.path)[-MOST_RUNS:]]
        except (FileNotFoundError, NotADirectoryError) as error:
            runs = []
            if self.path.exists():
                raise RunUnreadable(self.path, "is not a directory") from error
        if not runs:
            said = "no run yet: one begins with the first call of a model that has dump=DIR"
            return Frame(str(self.path), "waiting", said)
        living = [run for run in runs if self._lives(run)]
        run = (living or runs)[-1]
        others = [other.name for other in living if other != run]
        return frame_of(self._read(run), now, self.tokens, others)

    def _read(self, run: Path) -> StepLog:
        log = self._logs.setdefault(run, StepLog(run))
        log.read()
        return log

    def _lives(self, run: Path) -> bool:
        """Whether a run goes on, as far as is known. One that is known to be over is not read
        again; nor do others matter that cannot be read."""
        log = self._logs.get(run)
        if log is None or log.ended is None:
            try:
                log = self._read(run)
            except RunUnreadable:
                return False
        if log.begun is None or log.ended is not None:
            return False
        return is_alive(log.begun.process) is not False


def watch(
    path: Path,
    *,
    once: bool = False,
    as_json: bool = False,
    every_s: float | None = None,
    tokens: int | None = None,
    console: Console | None = None,
    now: Callable[[], float] = time.time,
    sleep: Callable[[float], None] = time.sleep,
) -> Answer:
    """Show a run until it ends, or a directory of runs until Ctrl-C; the exit code is 1 if the run
    was killed or failed.

    once     one picture, at once
    as_json  one `Frame` a line instead of pictures
    every_s  seconds between two of them
    tokens   of a step, for tokens per second
    raises   ConfigInvalid, RunUnreadable
    """
    if every_s is not None and not every_s > 0:
        raise ConfigInvalid("every", every_s, "is no time between two pictures; give seconds")
    if tokens is not None and tokens <= 0:
        raise ConfigInvalid("tokens-per-step", tokens, "is no number of tokens; give 1 or more")
    watcher, console = Watcher(path, tokens), console or Console(highlight=False)
    if once:
        return _once(watcher, console, now())
    every_s = every_s or (REDRAWN_S if console.is_terminal and not as_json else PRINTED_S)
    frame = watcher.frame(now())
    try:
        if console.is_terminal and not as_json:
            frame = _redrawn(watcher, console, every_s, now, sleep, frame)
        else:
            frame = _printed(watcher, console, as_json, every_s, now, sleep, frame)
    except KeyboardInterrupt:
        pass
    return Answer("", frame, _code(frame), shown=True)


def _code(frame: Frame) -> int:
    return 1 if frame.state in ("failed", "gone") else 0


def _once(watcher: Watcher, console: Console, now: float) -> Answer:
    frame = watcher.frame(now)
    if frame.state == "waiting":
        raise RunUnreadable(watcher.path, f"cannot be watched: {frame.said}")
    with console.capture() as captured:
        console.print(drawn(frame, console.width, console.options.ascii_only))
    text = captured.get()
    if not console.is_terminal:
        text = "\n".join(line.rstrip() for line in text.splitlines())
    return Answer(text, frame, _code(frame))


def _redrawn(
    watcher: Watcher,
    console: Console,
    every_s: float,
    now: Callable[[], float],
    sleep: Callable[[float], None],
    frame: Frame,
) -> Frame:
    """Redraw a picture in its place until the run is over."""

    def picture(frame: Frame) -> RenderableType:
        hint = LEAVE if watcher.tokens or frame.step_s is None else f"{LEAVE}. {TOKENS}"
        if frame.over or frame.state == "waiting":
            hint = "waits for the next run; Ctrl-C leaves" if watcher.follows else ""
        tight = console.height < ROWS
        return drawn(frame, console.width, console.options.ascii_only, hint, tight)

    with Live(picture(frame), console=console, auto_refresh=False, transient=False) as live:
        while watcher.follows or not frame.over:
            sleep(every_s)
            frame = watcher.frame(now())
            live.update(picture(frame), refresh=True)
    return frame


def _printed(
    watcher: Watcher,
    console: Console,
    as_json: bool,
    every_s: float,
    now: Callable[[], float],
    sleep: Callable[[float], None],
    frame: Frame,
) -> Frame:
    """Print a line now and then, until the run is over."""
    before = None
    while True:
        line = json.dumps(plain(frame)) if as_json else headline(frame)
        if line != before:
            console.print(line, soft_wrap=True, markup=False)
        before = line
        if frame.over and not watcher.follows:
            return frame
        sleep(every_s)
        frame = watcher.frame(now())
