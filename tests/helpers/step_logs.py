"""A log of steps as a run writes it, recorded here: its clock begins at 1000 and nothing waits."""

from pathlib import Path
from typing import Any

from zcompile.ir import step_log as form

GiB = 1 << 30
BEGAN = 1000.0
LINKS = {
    "h2d": form.Capacity(25e9),
    "d2h": form.Capacity(25e9),
    "disk_read": form.Capacity(3e9, "disk_write"),
    "disk_write": form.Capacity(2e9, "disk_read"),
}
BUDGETS = {"device": 20 * GiB, "host": 64 * GiB, "disk": 1600 * GiB}


def begun(**other: Any) -> form.Begun:
    told = {
        "format": form.FORMAT,
        "zcompile": "0.1.0",
        "model": "GPT",
        "device": "cuda:0",
        "process": form.this_process(),
        "time": BEGAN,
    }
    return form.Begun(**{**told, **other})


def observed() -> form.Planned:
    return form.Planned(0, "the first steps are observed", None, {}, {}, BUDGETS)


def planned(number: int = 1, step_s: float = 0.8) -> form.Planned:
    binding = {"forward": "disk_read", "backward": "compute", "step": "disk_read"}
    return form.Planned(number, "", step_s, binding, LINKS, BUDGETS)


def stepped(step: int, seconds: float | None = 1.0, count: int = 1, **other: Any) -> form.Stepped:
    """`count` steps, the last of which ended `step` seconds after the run began."""
    told = {
        "step": step,
        "count": count,
        "time": BEGAN + step,
        "seconds": seconds,
        "compute_s": 0.5 * count,
        "stall_s": 0.2 * count,
        "optimizer_s": 0.1 * count,
        "nbytes": {"disk_read": GiB * count, "disk_write": 0, "h2d": 3 * GiB * count, "d2h": 0},
        "busy_s": {"disk_read": 0.4 * count},
        "used": {"device": 15 * GiB, "host": 32 * GiB, "disk": 100 * GiB},
        "peak": {"device": 19 * GiB, "host": 48 * GiB, "disk": 120 * GiB},
    }
    return form.Stepped(**{**told, **other})


def usual(steps: int = 8) -> list[form.Record]:
    """A run whose second step is followed by a plan."""
    rest = [stepped(n) for n in range(3, steps + 1)]
    return [begun(), observed(), stepped(1, None), stepped(2, 4.0), planned(), *rest]


def write(run: Path, records: list[form.Record]) -> Path:
    """A run directory with the log of these records."""
    run.mkdir(parents=True, exist_ok=True)
    form.log_file(run).write_bytes(b"".join(map(form.line, records)))
    return run


def append(run: Path, *records: form.Record) -> None:
    with form.log_file(run).open("ab") as log:
        log.writelines(map(form.line, records))
