"""What a card does, in minutes: one table a part, and JSON that is written after every row.

    python -m benchmarks.gpu --minutes 9 --parts machine kernels steps --out gpu.json
    python -m benchmarks.gpu --minutes 9 --parts seven-billion --blocks 4 24 --out gpu7.json
    python -m benchmarks.gpu --device cpu --parts steps --layers 2 --width 64 --held 64MiB

The time is shared out among the parts; what a part leaves goes to those after it. A row that would
begin too late is not begun, which is told; a part, or a row, that raises is told with its traceback
and leaves the others. Without a card (`--device cpu`) what needs one is left out.
"""

import argparse
import faulthandler
import platform
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu import kernels, machine, seven_billion, steps
from benchmarks.gpu.record import Cell, Part, Record
from zcompile.ir.units import show_size
from zcompile.runtime.device.pages import machine_bytes
from zcompile.runtime.hardware import cores, cpu_model

Measure = Callable[[Part, argparse.Namespace], None]

PARTS: dict[str, tuple[float, Sequence[Cell], Measure]] = {
    "machine": (1, machine.COLUMNS, machine.measure),
    "kernels": (3, kernels.COLUMNS, kernels.measure),
    "steps": (8, steps.COLUMNS, steps.measure),
    "seven-billion": (12, seven_billion.COLUMNS, seven_billion.measure),
}
"""Name -> its share of the time, among those that run; its columns; what measures it."""
GRACE_S = 60.0
"""After the time is up a row may go on so long; then all threads are shown, and all ends."""


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("--device", default="cuda")
    made.add_argument("--minutes", type=float, default=9.0, help="of all parts together")
    made.add_argument("--parts", nargs="+", choices=list(PARTS), default=list(PARTS))
    made.add_argument("--out", type=Path, help="a file for all that was measured, as JSON")
    made.add_argument("--disk", help="a directory on the disk that the machine part measures")
    of = made.add_argument_group("steps")
    for name, default in (
        ("layers", 16),
        ("width", 2048),
        ("batch", 8),
        ("sequence", 1024),
        ("warmup", 4),
        ("rounds", 4),
    ):
        of.add_argument(f"--{name}", type=int, default=default)
    of.add_argument("--dtypes", nargs="+", choices=list(steps.DTYPES), default=list(steps.DTYPES))
    of.add_argument("--only", nargs="+", choices=steps.NAMES, help="variants, beside eager")
    of.add_argument("--device-memory", default="4GiB", help="of streaming")
    of.add_argument("--host-memory", default="40GiB", help="of all that are offloaded")
    of.add_argument("--held", help="what eager holds at its peak, where no card tells that")
    of.add_argument("--trace", type=Path, metavar="DIR", help="where a profile of a step goes")
    of = made.add_argument_group("seven-billion")
    of.add_argument("--blocks", type=int, nargs="+", default=[4, 24], help="counts of layers")
    of.add_argument("--plan", type=int, nargs="*", default=[], help="layers that are planned alone")
    of.add_argument("--resident", type=int, default=4, help="layers of a model that fits; 0: none")
    of.add_argument("--resident-samples", type=int, default=8)
    of.add_argument("--steps", type=int, default=3, help="that count, behind those that do not")
    of.add_argument("--samples", type=int, default=32, help="a step")
    of.add_argument("--context", type=int, default=2048, help="tokens of a sample")
    for name, size in (
        ("hidden", 4096),
        ("intermediate", 11008),
        ("heads", 32),
        ("vocabulary", 32000),
    ):
        of.add_argument(f"--{name}", type=int, default=size)
    of.add_argument("--card", default="60GiB", help="of the device")
    of.add_argument("--host", default="104GiB", help="of the host")
    of.add_argument("--born", metavar="DEVICE", help="where values are drawn; default --device")
    of.add_argument("--disk-tier", help="a directory, where the host is too small")
    return made


def about(args: argparse.Namespace, argv: Sequence[str]) -> dict[str, Any]:
    on_card = torch.device(args.device).type == "cuda"
    return {
        "card": torch.cuda.get_device_name(args.device) if on_card else "none",
        "torch": torch.__version__,
        "python": platform.python_version(),
        "processor": f"{cpu_model()}, {cores()} cores, {show_size(machine_bytes())}",
        "command": " ".join(argv),
    }


def main(argv: Sequence[str] | None = None) -> int:
    given = list(sys.argv[1:] if argv is None else argv)
    args = parser().parse_args(given)
    if torch.device(args.device).type == "cuda" and not torch.cuda.is_available():
        print("nothing to measure: torch sees no CUDA device; try --device cpu", file=sys.stderr)
        return 1
    record = Record(about(args, given), 60 * args.minutes, args.out)
    left = {name: PARTS[name][0] for name in PARTS if name in args.parts}
    while left:
        name = next(iter(left))
        share, columns, measure = PARTS[name]
        record.run(name, columns, share / sum(left.values()), measure, args)
        del left[name]
    failed = [name for name, part in record.parts.items() if "error" in part]
    failed += [
        row["name"] for part in record.parts.values() for row in part["rows"] if "error" in row
    ]
    record.say(f"done; {f'failed: {failed}' if failed else 'nothing failed'}")
    return 1 if failed else 0


if __name__ == "__main__":
    minutes = parser().parse_known_args()[0].minutes
    faulthandler.dump_traceback_later(60 * minutes + GRACE_S, exit=True)
    sys.exit(main())
