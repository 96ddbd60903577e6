"""Parses the `zinf` command: what this machine offers, how to read a dump, what a disk directory
holds.

Each command is a function from its arguments to an `Answer`; this file parses, prints once, and
turns errors into exit codes: 0, 1 (a finding, a difference, an error), 2 (usage).
"""

import argparse
import os
import sys
from collections.abc import Sequence
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from zcompile.cli import disk, doctor, explain, perfetto, plan, show, timeline, watch
from zcompile.cli.format import Answer
from zcompile.cli.report import report
from zcompile.errors import ConfigInvalid, UnknownOption, UserCodeFailed, ZinfError
from zcompile.ir.serialize import PHASES
from zcompile.machine.files import MachineUnknown, MachineUnreadable
from zcompile.machine.model import MachineInvalid

USAGE = (
    ConfigInvalid,
    UnknownOption,
    MachineInvalid,
    MachineUnknown,
    MachineUnreadable,
    UserCodeFailed,
)
"""Errors about arguments that cannot be meant; all other errors are findings."""
RUN_HELP = "a dump: DIR (its newest run), DIR/run-3, or DIR/run-3/graph0"


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code; usage errors leave through argparse with 2."""
    args = _parser().parse_args(argv)
    try:
        answer: Answer = args.command(args)
    except ZinfError as error:
        print(f"zinf: {error}", file=sys.stderr)
        return 2 if isinstance(error, USAGE) else 1
    if not answer.shown:
        _write(answer.json() if args.json else answer.text)
    return answer.code


def _write(text: str) -> None:
    try:
        print(text.rstrip("\n"), flush=True)
    except BrokenPipeError:
        # The reader (`| head`) has seen enough. Python flushes stdout once more when it ends,
        # and would complain there.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="zinf", description="Look at a machine, dump or disk.")
    parser.add_argument("--version", action="version", version=f"zcompile {_version()}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    add = partial(_add_command, commands)
    _add_doctor(
        add("doctor", "what this machine offers, and what would stop zcompile from working")
    )
    asked = add("show", "one line per pass; with PASS the graph after it", "RUN")
    asked.add_argument("stage", metavar="PASS", nargs="?", help=_HELP["A"])
    asked.set_defaults(command=lambda args: show.show(args.run, args.graph, args.stage))
    asked = add(
        "diff", "compare the graphs after two passes; exit 1 if they differ", "RUN", "A", "B"
    )
    asked.set_defaults(command=lambda args: show.diff(args.run, args.graph, args.a, args.b))
    asked = add("schedule", "the instructions that the runtime walks", "RUN")
    asked.add_argument("--phase", choices=PHASES, help="only this phase")
    asked.add_argument(
        "--regions", action="store_true", help="by region: what is fetched, read, and leaves"
    )
    asked.set_defaults(
        command=lambda args: show.schedule(args.run, args.graph, args.phase, args.regions)
    )
    asked = add("timeline", "the last step that was written: measured beside predicted", "RUN")
    asked.add_argument(
        "--perfetto",
        type=Path,
        metavar="FILE",
        help="write it as trace events, which Perfetto opens, in place of printing it",
    )
    asked.set_defaults(
        command=lambda args: (
            timeline.timeline(args.run)
            if args.perfetto is None
            else perfetto.write(args.run, args.perfetto)
        )
    )
    asked = add("report", "write one page for a browser: times, memory, links, passes", "RUN")
    asked.add_argument(
        "-o", "--output", type=Path, metavar="FILE", default=Path("report.html"), help="the page"
    )
    asked.set_defaults(command=lambda args: report(args.run, args.graph, args.output))
    _add_watch(add("watch", "a run while it goes: step time, tiers, links, stalls", "RUN"))
    asked = add(
        "explain",
        "the life of one parameter, what became of activations, or slices",
        "RUN",
        "TENSOR",
    )
    asked.set_defaults(command=lambda args: explain.explain(args.run, args.graph, args.tensor))
    asked = add("plan", "what training a model would take, here or on a machine one has not")
    plan.add_arguments(asked)
    asked.set_defaults(command=plan.plan)
    _add_disk(commands.add_parser("disk", help="what a directory of the disk tier holds"))
    return parser


def _add_command(
    commands: Any, name: str, summary: str, *arguments: str
) -> argparse.ArgumentParser:
    """Add a command.

    arguments  keys of `_HELP`; a RUN may be narrowed to one of its graphs
    """
    command: argparse.ArgumentParser = commands.add_parser(name, help=summary, description=summary)
    command.add_argument("--json", action="store_true", help="the same, for a program")
    for argument in arguments:
        command.add_argument(
            argument.lower(),
            metavar=argument,
            help=_HELP[argument],
            type=Path if argument == "RUN" else str,
        )
    if "RUN" in arguments:
        command.add_argument("--graph", type=int, metavar="K", help="only graph K of the run")
    return command


def _add_doctor(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--disk",
        action="append",
        default=[],
        type=Path,
        metavar="DIR",
        help="probe a directory for the disk tier; may be repeated",
    )
    parser.add_argument("--measure", action="store_true", help="measure rates anew")
    parser.add_argument(
        "--machine",
        metavar="NAME",
        nargs="?",
        const="",
        help="what a machine that comes along offers, or one of a file; without "
        "NAME, which ones there are",
    )
    parser.set_defaults(
        command=lambda args: (
            doctor.doctor(args.disk, args.measure)
            if args.machine is None
            else doctor.described(args.machine)
        )
    )


def _add_watch(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--once", action="store_true", help="one picture, at once")
    parser.add_argument(
        "--every",
        type=float,
        metavar="SECONDS",
        help="between two pictures (0.5 on a terminal, else 10)",
    )
    parser.add_argument(
        "--tokens-per-step",
        type=int,
        metavar="N",
        help="tokens of a step, over all its batches: for tokens per second",
    )
    parser.set_defaults(
        command=lambda args: watch.watch(
            args.run,
            once=args.once,
            as_json=args.json,
            every_s=args.every,
            tokens=args.tokens_per_step,
        )
    )


def _add_disk(parser: argparse.ArgumentParser) -> None:
    verbs = parser.add_subparsers(metavar="VERB", required=True)
    for name, summary in _DISK.items():
        verb = verbs.add_parser(name, help=summary, description=summary)
        verb.add_argument("--json", action="store_true", help="the same, for a program")
        verb.add_argument("dir", metavar="DIR", type=Path, help="as given to disk=")
        if name == "gc":
            verb.add_argument("--all", action="store_true", help="the last commit too")
    verbs.choices["ls"].set_defaults(command=lambda args: disk.ls(args.dir))
    verbs.choices["verify"].set_defaults(command=lambda args: disk.verify(args.dir))
    verbs.choices["gc"].set_defaults(command=lambda args: disk.gc(args.dir, args.all))


_DISK = {
    "ls": "the tensors of the last commit: bytes, step, offset, name",
    "verify": "read all of the last commit and compare checksums; exit 1 if it is damaged, or if "
    "nothing of a run lies there",
    "gc": "free what no commit needs, and what dead processes left; with --all everything",
}
_HELP = {
    "RUN": RUN_HELP,
    "A": "a pass, by number or by name",
    "B": "another pass",
    "TENSOR": "dotted name of a parameter, as in layers.3.mlp.up.weight; or of a value that "
    "backward needs; or activations, for all of these; or memory, for the bytes they take; or "
    "slices, for the regions that run over slices of tokens",
}


def _version() -> str:
    try:
        return version("zcompile")
    except PackageNotFoundError:
        return "(not installed)"
