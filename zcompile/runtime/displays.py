"""Shows lines of what is done where this process runs: a terminal, a notebook, a log, a stream.

On a terminal that is one line of `rich`, gone when the work is done; beside bars of `tqdm` it is
one more of them, so that neither draws over the other. In a notebook it is an output that is
updated. Elsewhere it is a plain line every two seconds in which something has changed, and every
ten in which nothing has: through `logging`, or on stderr where nobody has set logging up.
"""

import logging
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, TextIO

logger = logging.getLogger("zcompile.runtime.displays")

TICK_S = 0.25
"""Seconds between two lines where they take each other's place."""
AGAIN_S = 10.0
"""Seconds after which a plain line is written that says the same as the one before."""
BAR = 24
"""Width of a bar, in characters."""


@dataclass(frozen=True)
class Line:
    """What is shown of nested works.

    what   of the outermost
    text   of all of them
    share  of the innermost that has a total, 0 to 1; None: none has
    """

    what: str
    text: str
    share: float | None
    seconds: float


class Display(Protocol):
    """Where lines are shown.

    every_s  least seconds between two lines
    """

    every_s: float

    def show(self, line: Line) -> None:
        """Show a line in the place of the one before."""

    def end(self, line: Line) -> None:
        """The work is done: `line` is its last one."""

    def tell(self, text: str) -> None:
        """Show a text that stays."""


class PlainLines:
    """Lines through `logging`, or on a stream where nobody has set logging up.

    stream  None: stderr, as it is by then
    """

    every_s = 2.0

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream
        self._last: Line | None = None

    def show(self, line: Line) -> None:
        last = self._last
        if last is not None and last.text == line.text and line.seconds < last.seconds + AGAIN_S:
            return
        self._last = line
        self._write(f"{line.text} ({line.seconds:.0f} s)")

    def end(self, line: Line) -> None:
        self._write(f"{line.what}: ended after {line.seconds:.1f} s")

    def tell(self, text: str) -> None:
        if not logger.hasHandlers():  # else it is in the log
            self._write(text)

    def _write(self, text: str) -> None:
        if logger.hasHandlers():
            logger.info("%s", text)
        elif (stream := self._stream or sys.stderr) is not None:
            stream.write(f"zcompile: {text}\n")
            stream.flush()


class TerminalLine:
    """One line on a terminal, gone at the end."""

    every_s = TICK_S

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._live: Any = None

    def show(self, line: Line) -> None:
        console = self._console()
        if self._live is None:
            from rich.live import Live

            # Streams of the process stay as they are: others hold them.
            self._live = Live(
                console=console,
                auto_refresh=False,
                transient=True,
                redirect_stdout=False,
                redirect_stderr=False,
            )
            self._live.start()
        self._live.update(_row(line, console.width), refresh=True)

    def end(self, line: Line) -> None:
        live, self._live = self._live, None
        if live is not None:
            live.stop()

    def tell(self, text: str) -> None:
        self._console().print(f"zcompile: {text}", soft_wrap=True)

    def _console(self) -> Any:
        from rich.console import Console

        return Console(file=self._stream, highlight=False, markup=False)


class TqdmLine:
    """One more line below the bars of `tqdm` that are on the terminal, gone at the end."""

    every_s = TICK_S

    def __init__(self, tqdm: Any, stream: TextIO) -> None:
        self._tqdm, self._stream = tqdm, stream
        self._bar: Any = None

    def show(self, line: Line) -> None:
        if self._bar is None:
            self._bar = self._tqdm(bar_format="{desc}", leave=False, file=self._stream)
        self._bar.set_description_str(f"zcompile: {line.text} ({line.seconds:.0f} s)")

    def end(self, line: Line) -> None:
        bar, self._bar = self._bar, None
        if bar is not None:
            bar.close()

    def tell(self, text: str) -> None:
        self._tqdm.write(f"zcompile: {text}", file=self._stream)


class NotebookLine:
    """An output of a cell, updated as the work goes on and emptied at its end.

    display  `IPython.display.display`
    """

    every_s = 2 * TICK_S

    def __init__(self, display: Callable[..., Any]) -> None:
        self._display = display
        self._handle: Any = None

    def show(self, line: Line) -> None:
        if self._handle is None:
            self._handle = self._display(_row(line), display_id=True)
        else:
            self._handle.update(_row(line))

    def end(self, line: Line) -> None:
        handle, self._handle = self._handle, None
        if handle is not None:
            handle.update({"text/plain": ""}, raw=True)

    def tell(self, text: str) -> None:
        self._display({"text/plain": f"zcompile: {text}"}, raw=True)


def _row(line: Line, width: int | None = None) -> Any:
    """A line as `rich` shows it, on a terminal and in a notebook.

    width  columns that there are: where they are too few for all works, the inner ones are shown
    """
    from rich.progress_bar import ProgressBar
    from rich.table import Table

    row = Table.grid(padding=(0, 1))
    row.add_column(no_wrap=True, overflow="ellipsis")
    begin, text = f"zcompile ({line.seconds:.0f} s): ", line.text
    room = None if width is None else width - len(begin) - (0 if line.share is None else BAR + 1)
    while room is not None and len(text) > room and "; " in text:
        text = text.partition("; ")[2]
    cells: list[Any] = [begin + text]
    if line.share is not None:
        row.add_column(width=BAR)
        cells.append(ProgressBar(total=1.0, completed=line.share, width=BAR))
    row.add_row(*cells)
    return row


def display_here() -> Display:
    """The display for where this process runs."""
    if (display := _notebook_display()) is not None:
        return NotebookLine(display)
    stream = sys.stderr
    if stream is None or not stream.isatty() or os.environ.get("TERM") == "dumb":
        return PlainLines()
    tqdm = getattr(sys.modules.get("tqdm"), "tqdm", None)
    if tqdm is not None and any(not bar.disable for bar in list(getattr(tqdm, "_instances", ()))):
        return TqdmLine(tqdm, stream)
    return TerminalLine(stream)


def _notebook_display() -> Callable[..., Any] | None:
    """What displays in the notebook that this process is the kernel of; None if it is of none."""
    if "ipykernel" not in sys.modules or "IPython" not in sys.modules:
        return None
    ipython: Any = sys.modules["IPython"]
    if getattr(ipython.get_ipython(), "kernel", None) is None:
        return None
    from IPython.display import display  # type: ignore[import-not-found,unused-ignore]

    shown: Callable[..., Any] = display
    return shown
