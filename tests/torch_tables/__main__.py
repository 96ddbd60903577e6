"""The tables of torch, all or in part, and a summary of what became of them.

With PYTHONPATH=.:tests:tests/helpers:

    python -m torch_tables --report FILE         # everything: some hours
    python -m torch_tables --table ops --tiers host --names add mul --most 5

What FILE holds already is not done again, so that one may stop at any time. The exit code is 1
where anything came out that is neither equal nor among what is listed.
"""

import argparse
import json
import os
import sys
from collections import Counter
from pathlib import Path
from typing import Any

from torch_tables import suite
from torch_tables.pool import Told, work
from torch_tables.tiers import TIERS


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m torch_tables", description=__doc__)
    parser.add_argument("--table", nargs="*", default=["ops", "modules", "optimizers"])
    parser.add_argument("--tiers", nargs="*", default=list(TIERS))
    parser.add_argument("--names", nargs="*", default=None, help="of ops, modules, optimizers")
    parser.add_argument("--dtypes", nargs="*", default=["float32"], help="of ops")
    parser.add_argument("--most", type=int, default=None, help="samples or settings of each")
    parser.add_argument("--calls", nargs="*", default=["eager", "compiled"])
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--report", type=Path, default=None, help="a line of JSON for each unit")
    given = parser.parse_args()
    units = [
        unit
        for table in given.table
        for unit in suite.units(
            table, given.tiers, given.names, given.dtypes, given.most, given.calls
        )
    ]
    before = [told for told in reported(given.report) if _asked(told.unit) in units]
    done = [_asked(told.unit) for told in before]
    report = given.report.open("a") if given.report else None

    def tell(told: Told) -> None:
        if report:
            report.write(json.dumps(vars(told)) + "\n")
            report.flush()

    found = work([unit for unit in units if unit not in done], workers=given.workers, tell=tell)
    found = [*before, *found]
    print(suite.summary(found))
    wrong = suite.wrong(found)
    for line in wrong:
        print(line)
    return 1 if wrong else 0


def reported(report: Path | None) -> list[Told]:
    """What an earlier run wrote, if one did; a last line that was broken off is taken away."""
    if report is None or not report.exists():
        return []
    os.truncate(report, report.read_bytes().rfind(b"\n") + 1)
    rows = [json.loads(line) for line in report.read_text(encoding="utf-8").splitlines()]
    return [Told(**{**row, "counts": Counter(row["counts"])}) for row in rows]


def _asked(unit: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in unit.items() if key != "skip"}


if __name__ == "__main__":
    sys.exit(main())
