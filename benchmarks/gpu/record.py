"""A record of what was measured: printed at once, and written as JSON after every row.

A part is one table with a share of the time. What raises within a part, or within a row of it, is
told with its traceback, and what comes after goes on.
"""

import json
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

Row = dict[str, Any]
Cell = tuple[str, str, Callable[[Any], str]]
"""Of a table: the key of a row, the head of its column, and how a value is written."""


def digits(count: int) -> Callable[[Any], str]:
    """Numbers with so many digits behind the point."""
    return lambda value: f"{value:.{count}f}"


class Part:
    """A table, and the time by which it ends.

    rows  as they are in the JSON
    ends  when the part ends, on the clock of the record
    """

    def __init__(self, record: "Record", name: str, columns: Sequence[Cell], ends: float) -> None:
        self.rows: list[Row] = []
        self._longest = dict[str, float]()
        self.ends = ends
        self._record, self._name, self._columns = record, name, columns
        self._under_head = False
        self.written: Row = {"rows": self.rows, "notes": []}
        record.parts[name] = self.written

    def note(self, text: str) -> None:
        """A line of text, with the time; in the JSON too."""
        self.written["notes"].append(text)
        self._under_head = False
        self._record.say(f"{self._name}: {text}")
        self._record.write()

    def left(self) -> float:
        """Seconds until the part ends."""
        return self.ends - self._record.clock()

    def has_time(self, row: str, kind: str = "", until: float | None = None) -> bool:
        """Whether a row may begin, if it takes as long as the longest of its kind so far; else that
        is told.

        until  on the record's clock; None: the end of the part
        """
        needs = self._longest.get(kind, 0.0)
        left = (self.ends if until is None else until) - self._record.clock()
        if needs < left:
            return True
        took = f"; its like took {needs:.1f} s" if needs else ""
        self.note(f"not begun: {row}{took}, and {max(left, 0.0):.1f} s are left")
        return False

    @contextmanager
    def row(self, name: str, kind: str = "") -> Iterator[Row]:
        """A row, to be filled. It is written at the end, whatever happens; an error of what fills
        it is told, and goes into the JSON."""
        row: Row = {"name": name}
        self.rows.append(row)
        since = self._record.clock()
        try:
            yield row
        except Exception:  # noqa: BLE001  # on purpose: told, and the next row is measured
            self.failed(row)
        row["took_s"] = round(self._record.clock() - since, 2)
        self._longest[kind] = max(self._longest.get(kind, 0.0), row["took_s"])
        self.show(row)

    def failed(self, row: Row) -> None:
        """Put the error that is being handled into a row, and tell it."""
        row["error"] = traceback.format_exc()
        self.note(f"{row.get('name', self._name)} failed:\n{row['error']}")

    def show(self, row: Mapping[str, Any]) -> None:
        """Print a row, and write all."""
        if not self._under_head:
            heads = [head for _, head, _ in self._columns]
            print(f"\n| {' | '.join(heads)} |\n|{'---|' * len(heads)}", flush=True)
            self._under_head = True
        cells = [how(row[key]) if row.get(key) is not None else "" for key, _, how in self._columns]
        if "error" in row:
            cells[0] += f", failed: {row['error'].splitlines()[-1]}".replace("|", "/")
        print(f"| {' | '.join(cells)} |", flush=True)
        self._record.write()

    def write(self) -> None:
        """Write the JSON as it is by now."""
        self._record.write()


class Record:
    """All parts of a run, and what they ran on.

    about  facts of the machine and of the command
    ends   when the last part ends, on `clock`
    """

    def __init__(
        self,
        about: Mapping[str, Any],
        seconds: float,
        out: Path | None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.clock, self.parts = clock, dict[str, Row]()
        self._about, self._out, self._began = dict(about), out, clock()
        self.ends = self._began + seconds
        self.say(", ".join(f"{key} {value}" for key, value in about.items()))
        self.write()

    def say(self, text: str) -> None:
        print(f"[{self.clock() - self._began:6.1f} s] {text}", flush=True)

    def write(self) -> None:
        if self._out is None:
            return
        whole = {**self._about, "parts": self.parts}
        beside = self._out.with_name(f"{self._out.name}.new")
        beside.write_text(json.dumps(whole, indent=1))
        beside.replace(self._out)  # who is killed while it writes leaves what was there

    def run(
        self,
        name: str,
        columns: Sequence[Cell],
        share: float,
        measure: Callable[[Part, Any], None],
        given: object,
    ) -> None:
        """Run a part, which has `share` of the time that is left, and tell what it raises."""
        now = self.clock()
        seconds = share * (self.ends - now)
        part = Part(self, name, columns, now + seconds)
        if seconds <= 0:
            part.note("not begun: the time is up")
            return
        self.say(f"{name}: has {seconds:.0f} s")
        try:
            measure(part, given)
        except Exception:  # noqa: BLE001  # on purpose: told, and the next part goes on
            part.failed(part.written)
        self.write()
