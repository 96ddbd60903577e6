"""Which units of work there are, and what may come of them."""

import tomllib
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from importlib import import_module
from pathlib import Path
from typing import Any

from torch_tables.pool import Told

LISTED = Path(__file__).parent / "listed.toml"


@dataclass(frozen=True)
class Listed:
    """Something that need not come out equal, and why.

    kind    "refused": with an error of ours; "rounded": sums are taken in another order;
            "different": torch itself is wrong with any subclass, or a defect that is known
    table   "ops", "modules" or "optimizers"
    names   patterns of what it concerns in that table
    ways    patterns of how it is called: `Case.way`, `Training.way`
    says    a part of the error's first line; "" of what is rounded
    reason  why that is right, or why it cannot be helped
    """

    kind: str
    table: str
    names: tuple[str, ...]
    ways: tuple[str, ...]
    says: str
    reason: str

    def covers(self, told: Told, row: dict[str, str]) -> bool:
        return (
            row["kind"] == self.kind
            and told.unit["table"] == self.table
            and any(fnmatchcase(told.unit["name"], name) for name in self.names)
            and any(fnmatchcase(row["way"], way) for way in self.ways)
            and self.says in row["why"]
        )


def listed() -> list[Listed]:
    """What `listed.toml` holds."""
    kinds = tomllib.loads(LISTED.read_text(encoding="utf-8"))
    return [
        Listed(
            kind,
            row["table"],
            tuple(row["names"]),
            tuple(row.get("ways", ["*"])),
            row.get("says", ""),
            row["reason"],
        )
        for kind, rows in kinds.items()
        for row in rows
    ]


def units(
    table: str,
    tiers: Iterable[str],
    names: Sequence[str] | None = None,
    dtypes: Iterable[str] = ("float32",),
    most: int | None = None,
    calls: Iterable[str] = ("eager", "compiled"),
) -> list[dict[str, Any]]:
    """Units of one table, as `child.py` takes them; a name that this torch lacks has no cases.

    names  None: all of the table
    """
    if names is None:
        names = names_of(table)
    ways = [(dtype, False) for dtype in dtypes]
    if table != "ops":
        ways = [("float32", call == "compiled") for call in calls]
    return [
        {
            "table": table,
            "name": name,
            "tier": tier,
            "dtype": dtype,
            "compiled": compiled,
            "most": most,
        }
        for tier in tiers
        for dtype, compiled in ways
        for name in names
    ]


def names_of(table: str) -> list[str]:
    """All that torch's table holds. It is imported where it is needed, since that takes seconds."""
    listed = import_module("torch_tables.ops" if table == "ops" else "torch_tables.training")
    return list(getattr(listed, f"{table.removesuffix('s')}_names")())


def wrong(found: Iterable[Told]) -> list[str]:
    """Everything that is neither equal nor listed; where torch raises, or draws other numbers each
    time, there is nothing to compare. At least one case of each unit has to be."""
    known, found = listed(), list(found)
    return [
        f"{told.unit['table']} on {told.unit['tier']}: nothing of {told.unit['name']} was compared"
        for told in found
        if told.cases and told.counts["raises"] + told.counts["random"] == told.cases
    ] + [
        f"{told.unit['table']} on {told.unit['tier']}: {row['case']}: {row['kind']}: {row['why']}"
        for told in found
        for row in told.rows
        if row["kind"] not in ("raises", "random") and not any(r.covers(told, row) for r in known)
    ]


def idle(found: Sequence[Told], tables: Sequence[str]) -> list[Listed]:
    """What is listed of these tables, and was not met; but for sums in another order, which give
    the same bits on some processors."""
    return [
        one
        for one in listed()
        if one.table in tables
        and one.kind != "rounded"
        and not any(one.covers(told, row) for told in found for row in told.rows)
    ]


def summary(found: Iterable[Told]) -> str:
    """A table: a row for each table of torch, tier and way of calling."""
    rows: dict[tuple[str, ...], Counter[str]] = {}
    kinds = ("equal", "raises", "random", "refused", "rounded", "different", "crash", "hang")
    for told in found:
        unit = told.unit
        call = "compiled" if unit["compiled"] else "eager"
        row = rows.setdefault((unit["table"], unit["tier"], unit["dtype"], call), Counter())
        row["names"] += 1
        row["cases"] += told.cases
        row.update(told.counts)
    columns = ("names", "cases", *kinds)
    lines = [
        f"{'table':11}{'tier':8}{'dtype':11}{'call':10}" + "".join(f"{c:>10}" for c in columns)
    ]
    lines += [
        f"{key[0]:11}{key[1]:8}{key[2]:11}{key[3]:10}" + "".join(f"{row[c]:>10}" for c in columns)
        for key, row in rows.items()
    ]
    return "\n".join(lines)
