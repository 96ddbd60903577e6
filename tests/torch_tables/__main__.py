"""The tables of torch, all or in part, and a summary of what became of them.

    PYTHONPATH=.:tests python -m torch_tables                       # everything: an hour or two
    PYTHONPATH=.:tests python -m torch_tables --table ops --tiers host --names add mul --most 5

The exit code is 1 where anything came out that is neither equal nor among the refusals.
"""

import argparse
import json
import sys
from pathlib import Path

from torch_tables import suite
from torch_tables.pool import Told, work
from torch_tables.tiers import TIERS


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m torch_tables", description=__doc__)
    parser.add_argument("--table", nargs="*", default=["ops", "modules", "optimizers"])
    parser.add_argument("--tiers", nargs="*", default=list(TIERS))
    parser.add_argument("--names", nargs="*", default=None, help="of ops, modules, optimizers")
    parser.add_argument("--after", default="", help="only names that come after this one")
    parser.add_argument("--dtypes", nargs="*", default=["float32"], help="of ops")
    parser.add_argument("--most", type=int, default=None, help="samples or settings of each")
    parser.add_argument("--calls", nargs="*", default=["eager", "compiled"])
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--report", type=Path, default=None, help="rows of JSON, as they come")
    given = parser.parse_args()
    units = [
        unit
        for table in given.table
        for unit in suite.units(table, given.tiers, given.names, given.dtypes, given.most,
                                given.calls)
        if unit["name"] > given.after
    ]  # fmt: skip
    report = given.report.open("w") if given.report else None

    def tell(told: Told) -> None:
        if report:
            for row in told.rows:
                report.write(json.dumps({**told.unit, **row}) + "\n")
            count = {"counts": told.counts, "cases": told.cases, "seconds": told.seconds}
            report.write(json.dumps({**told.unit, **count}) + "\n")
            report.flush()

    found = work(units, workers=given.workers, tell=tell)
    print(suite.summary(found))
    wrong = suite.wrong(found)
    for line in wrong:
        print(line)
    return 1 if wrong else 0


sys.exit(main())
