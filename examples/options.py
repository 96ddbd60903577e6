"""What the training examples can be told, and what follows from it."""

import argparse
import io
import math
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import torch
from torch import Tensor, nn
from torch._dynamo.exc import BackendCompilerFailed

import zcompile
from examples import report
from examples.loop import Keeping, Task, compare_with_eager, values_of
from examples.ranks import Ranks, known_ranks
from examples.text import Batch, InputInvalid, read_text
from zcompile.config import PACED

Result = TypeVar("Result")


def positive(text: str) -> int:
    """raises  argparse.ArgumentTypeError, if it is not an int of 1 or more"""
    return _int(text, 1)


def natural(text: str) -> int:
    """raises  argparse.ArgumentTypeError, if it is not an int of 0 or more"""
    return _int(text, 0)


def _int(text: str, least: int) -> int:
    if not text.strip().isdecimal() or int(text) < least:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of {least} or more")
    return int(text)


def rate(text: str) -> float:
    """raises  argparse.ArgumentTypeError, if it is not a finite number above zero"""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above zero")
    return value


def throttle(text: str) -> tuple[str, str]:
    """LINK=RATE; whether both make sense is for `zcompile.Config` to say."""
    link, equals, speed = text.partition("=")
    if not equals:
        raise argparse.ArgumentTypeError(f"{text!r} is not LINK=RATE, as in disk_read=300MB/s")
    return link, speed


def parser(
    about: str,
    *,
    steps: int,
    batch: int,
    sequence: int,
    lr: float,
    device_memory: str,
    host_memory: str,
) -> argparse.ArgumentParser:
    """The options of the examples that train on bytes; the arguments are defaults."""
    made = parser_of_tiers(about, device_memory=device_memory, host_memory=host_memory)
    made.add_argument("--steps", type=positive, default=steps, help=f"default {steps}")
    made.add_argument("--batch", type=positive, default=batch, help=f"sequences; default {batch}")
    made.add_argument("--seq", type=positive, default=sequence, help=f"bytes; default {sequence}")
    made.add_argument(
        "--accumulate", type=positive, default=1, help="batches per step, on each rank; default 1"
    )
    made.add_argument("--lr", type=rate, default=lr, help=f"default {lr}")
    made.add_argument("--seed", type=natural, default=0)
    made.add_argument(
        "--data",
        type=Path,
        nargs="+",
        default=[],
        metavar="FILE",
        help="text to learn; by default Python's standard library",
    )
    made.add_argument("--save", type=Path, metavar="DIR", help="write a checkpoint at the end")
    made.add_argument("--save-every", type=positive, metavar="STEPS", help="and as often before")
    made.add_argument("--resume", type=Path, metavar="DIR", help="go on from a checkpoint")
    made.add_argument(
        "--check", action="store_true", help="train the same in eager; exit code 1 if a bit differs"
    )
    return made


def parser_of_tiers(about: str, *, device_memory: str, host_memory: str) -> argparse.ArgumentParser:
    """The options that `config` reads; the arguments are defaults."""
    made = argparse.ArgumentParser(
        description=about, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("--device", help="cpu or cuda; by default cuda if there is one")
    made.add_argument("--device-memory", default=device_memory, help=f"default {device_memory}")
    made.add_argument("--host-memory", default=host_memory, help=f"default {host_memory}")
    made.add_argument("--disk", type=Path, help="a directory; by default one that is removed")
    made.add_argument(
        "--throttle",
        type=throttle,
        nargs="+",
        default=[],
        metavar="LINK=RATE",
        help=f"paces the CPU device; links: {', '.join(PACED)}",
    )
    made.add_argument("--dump", type=Path, help="a directory for what every pass did")
    return made


def plain_too(made: argparse.ArgumentParser, *, steps: int) -> argparse.ArgumentParser:
    """Adds what the examples have that others' libraries run; `steps` is a default."""
    made.add_argument("--steps", type=positive, default=steps, help=f"default {steps}")
    made.add_argument("--seed", type=natural, default=0)
    made.add_argument(
        "--plain", action="store_true", help="the same in memory, without zcompile, to compare"
    )
    return made


@contextmanager
def config(args: argparse.Namespace) -> Iterator[zcompile.Config]:
    """What the options ask for; a temporary directory for the disk is removed at the end."""
    with tempfile.TemporaryDirectory(prefix="zcompile-") as temporary:
        yield zcompile.Config(
            device=args.device,
            device_memory=args.device_memory,
            host_memory=args.host_memory,
            disk=args.disk or temporary,
            throttle=dict(args.throttle),
            dump=args.dump,
        )


@contextmanager
def built(args: argparse.Namespace, build: Callable[[], Any]) -> Iterator[tuple[Any, torch.device]]:
    """What `build` returns, and its device; with --plain in memory, else on the tiers that the
    options ask for, and closed at the end."""
    with config(args) as asked:
        device = torch.device(str(asked.device))
        torch.manual_seed(args.seed)
        if args.plain:
            yield build().to(device), device
        else:
            with zcompile.init(asked):
                model = build()
            yield model, device
            print(report.peaks(model))
            zcompile.close(model)


def task(
    args: argparse.Namespace,
    build: Callable[[], nn.Module],
    loss: Callable[[nn.Module, Batch], Tensor],
) -> Task:
    """The training that the options ask for. raises InputInvalid"""
    text = read_text(args.data, args.seq + 1)
    return Task(
        build, loss, text, args.steps, args.accumulate, args.batch, args.seq, args.lr, args.seed
    )


@contextmanager
def ranks() -> Iterator[Ranks]:
    """The ranks that train together, once the model is there; the first of them prints."""
    known = known_ranks()
    if known.first:
        yield known
    else:
        with redirect_stdout(io.StringIO()):
            yield known


def check(
    task: Task, model: nn.Module, losses: list[float], device: torch.device, known: Ranks
) -> int:
    """Compare a training with its eager twin, and print how they agree; the exit code.

    With several ranks the model is closed: the first of them trains the twin by itself.
    """
    values = values_of(model, known)
    if known.size > 1:
        zcompile.close(model)
    if not known.first:
        return 0
    tokens = task.tokens_per_step * known.size
    progress = report.Progress("eager step", task.steps, tokens)
    found = compare_with_eager(task, values, losses, device, progress, known)
    print(report.verdict(found))
    return 0 if found.equal else 1


def keeping(args: argparse.Namespace) -> Keeping:
    """Where the options have the training kept. raises InputInvalid"""
    if args.save_every is not None and args.save is None:
        raise InputInvalid("--save-every says when, and nothing says where; give --save DIR too")
    return Keeping(args.save, args.save_every, args.resume)


def main(
    made: argparse.ArgumentParser,
    run: Callable[[argparse.Namespace], Result],
    given: Sequence[str] | None = None,
) -> Result:
    """Parse the command line, or `given`, and run; what the user can mend is told in a sentence,
    exit code 2."""
    args = made.parse_args(given)
    try:
        return run(args)
    except (InputInvalid, zcompile.ZinfError) as error:
        _tell(made, error)
    except BackendCompilerFailed as error:  # what zcompile raises while torch compiles
        if not isinstance(error.inner_exception, zcompile.ZinfError):
            raise
        _tell(made, error.inner_exception)


def _tell(made: argparse.ArgumentParser, error: Exception) -> NoReturn:
    made.exit(2, f"{made.prog}: error: {error}\n")
