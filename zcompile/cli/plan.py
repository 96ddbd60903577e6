"""Prints what training a model would take, on a machine one need not have: `zinf plan MODEL`.

MODEL is a Python reference or a Hugging Face config; the model is made on `meta`, with inputs.
"""

import argparse
import importlib
import inspect
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from zcompile.cli.analytic import PREFIX, scale_answer
from zcompile.cli.fit import fit_answer
from zcompile.cli.format import (
    TERMINAL,
    Answer,
    Point,
    check_plot,
    curve_lines,
    curve_svg,
    read_size,
    read_sweep,
    write_plot,
)
from zcompile.cli.sweep import swept
from zcompile.errors import BudgetExceeded, ConfigInvalid, Running
from zcompile.frontend.gc_pause import gc_paused
from zcompile.ir.rank_mesh import RankMesh
from zcompile.ir.units import Bytes
from zcompile.machine.model import with_ranks, with_tier

SEQUENCE = 1024
"""Tokens of a sample, if neither the options nor the model say."""
CONFIG_FILE = "config.json"
TOKENS = ("ids", "input_ids", "tokens", "idx")
TARGETS = ("targets", "labels")


def find_model(name: str) -> Any:
    """The module that `name` stands for, on meta where it is made here.

    raises  ConfigInvalid
    """
    path = Path(name)
    if path.is_dir() or path.suffix == ".json":
        return _of_config(path / CONFIG_FILE if path.is_dir() else path)
    module, colon, attribute = name.partition(":")
    if not colon or not attribute:
        raise _invalid(
            name,
            "is neither module:name nor a config.json that is there; write it "
            "like examples.train_gpt:model",
        )
    return _made(name, _named(name, module, attribute))


def _named(name: str, module: str, attribute: str) -> Any:
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)  # as `python -m` does
    with Running(f"importing {module}", f"see that `python -c 'import {module}'` works"):
        try:
            found: Any = importlib.import_module(module)
        except ImportError as error:
            raise _invalid(
                name, f"cannot be imported: {error}; run zinf where {module} lies"
            ) from error
    for part in attribute.split("."):
        if not hasattr(found, part):
            known = ", ".join(sorted(n for n in vars(found) if not n.startswith("_"))[:12])
            raise _invalid(name, f"has no {part!r}; {module} has {known}")
        found = getattr(found, part)
    return found


def _made(name: str, found: Any) -> Any:
    import torch

    if isinstance(found, torch.nn.Module):
        return found
    if not callable(found):
        raise _invalid(name, f"is a {type(found).__name__}; name a module, or what makes one")
    needed = [
        p.name
        for p in inspect.signature(found).parameters.values()
        if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
    ]
    if needed:
        raise _invalid(
            name,
            f"needs arguments ({', '.join(needed)}); name a function without any, "
            "or one whose arguments have defaults",
        )
    todo = (
        "see that it makes its model, also under torch.device('meta'), where no tensor has values"
    )
    with Running(f"{name}()", todo), torch.device("meta"):
        made = found()
    if not isinstance(made, torch.nn.Module):
        raise _invalid(name, f"makes a {type(made).__name__}, which is no torch.nn.Module")
    return made


def _of_config(path: Path) -> Any:
    import torch

    if not path.is_file():
        raise _invalid(str(path), "is not there; give a config.json of Hugging Face")
    try:
        kind = json.loads(path.read_text(encoding="utf-8")).get("model_type")
    except (json.JSONDecodeError, UnicodeDecodeError, AttributeError) as error:
        raise _invalid(str(path), f"is no config: {error}") from error
    try:
        transformers: Any = importlib.import_module("transformers")
    except ImportError as error:
        raise _invalid(str(path), "needs transformers; `pip install transformers`") from error
    with Running(f"making a {kind} of {path}", "see that transformers makes a model of it"):
        try:
            config = transformers.AutoConfig.from_pretrained(str(path))
            with torch.device("meta"):
                made = transformers.AutoModelForCausalLM.from_config(config)
        except (ValueError, KeyError) as error:
            why = str(error).splitlines()[0]
            raise _invalid(
                str(path),
                f"of model_type {kind!r} is no causal language model that this transformers "
                f"knows: {why}",
            ) from error
    if getattr(made, "loss_type", "") is None:
        # Its class has no name that a loss goes by; transformers then warns, and takes this one.
        made.loss_type = "ForCausalLM"
    return made


def example_inputs(model: Any, batch: int, seq: int | None, shape: str | None) -> tuple[Any, ...]:
    """Arguments for a call of `model`: tokens with targets, or floats of a shape.

    raises  ConfigInvalid, if they cannot be guessed
    """
    import torch

    if shape is not None:
        sizes = shape.split(",")
        if not all(size.strip().isdecimal() and int(size) for size in sizes):
            raise ConfigInvalid("shape", shape, "is not sizes as in 3,224,224")
        return (torch.empty(batch, *map(int, sizes), device="meta"),)
    parameters = inspect.signature(model.forward).parameters
    tokens = next((p for p in parameters if p in TOKENS), None)
    if tokens is None:
        raise ConfigInvalid(
            "MODEL",
            type(model).__name__,
            "takes "
            f"({', '.join(parameters)}), which cannot be guessed; give --shape for "
            "one tensor of floats, or call zcompile.plan",
        )
    most = _context(model)
    if seq is not None and not 0 < seq <= (most or seq):
        raise ConfigInvalid("seq", seq, f"is not within the {most} tokens that the model takes")
    ids = torch.zeros(batch, seq or min(most or SEQUENCE, SEQUENCE), dtype=torch.int64)
    named = {tokens: ids, **{p: ids for p in parameters if p in TARGETS}}
    if "use_cache" in parameters:
        named["use_cache"] = False  # type: ignore[assignment]  # a flag of transformers
    return (named,)


def _context(model: Any) -> int | None:
    """Most tokens of a sample, as far as the model says."""
    config = getattr(model, "config", None)
    found = [getattr(config, name, None) for name in ("max_position_embeddings", "n_positions")]
    if (shape := getattr(model, "shape", None)) is not None:
        found.append(getattr(shape, "context", None))
    return min((n for n in found if isinstance(n, int)), default=None)


def _invalid(name: str, why: str) -> ConfigInvalid:
    return ConfigInvalid("MODEL", name, why)


_TIERS = {
    "device": "bytes of the device, for entries and for what graphs hold, as 24GiB; what becomes "
    "of activations is chosen for it. By default what the machine has, with all of them kept",
    "host": "bytes of the host, staging within",
    "disk-bytes": "bytes of the disk",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `zinf plan`."""
    parser.add_argument(
        "model",
        metavar="MODEL",
        nargs="?",
        help=(
            "module:name of a torch module or of a function that makes one "
            "(examples.train_gpt:model); a config.json of Hugging Face, or a directory with one; "
            "or transformer:layers=...,hidden=...,heads=..."
        ),
    )
    parser.add_argument(
        "--paper",
        metavar="NAME",
        help="a table or figure of ZeRO-Infinity beside "
        "ours: figure-2a, table-3, figure-3, figure-5a, ...",
    )
    parser.add_argument(
        "--machine",
        metavar="NAME",
        action="append",
        help="a machine by name or file (`zinf doctor --machine` lists them); by default this one; "
        "with --fit it may be repeated, and is by default each that comes along with one rank",
    )
    parser.add_argument(
        "--fit",
        action="store_true",
        help="of a config.json: the largest batch, its step, and what to buy, machine by machine",
    )
    for tier in ("device", "host", "disk-bytes"):
        parser.add_argument(f"--{tier}", metavar="SIZE", help=_TIERS[tier])
    parser.add_argument("--batch", type=int, default=1, help="samples of a micro-batch; default 1")
    parser.add_argument("--seq", type=int, help="tokens of a sample; default: what the model takes")
    parser.add_argument(
        "--shape",
        metavar="N,N",
        help="of the input of a model that takes floats, without the batch: 3,224,224",
    )
    parser.add_argument("--optimizer", default="adamw", help="adamw (default) or sgd")
    parser.add_argument(
        "--micro-batches",
        type=int,
        default=1,
        metavar="N",
        help="passes per optimizer step; default 1",
    )
    parser.add_argument(
        "--no-sync",
        action="store_true",
        help="ranks exchange gradients once for all of those, within zcompile.no_sync",
    )
    parser.add_argument(
        "--ranks",
        metavar="N",
        help="so many ranks train the model together, of which one is planned; 2x4: two groups of "
        "four, each of which holds all of the model; default: those of the machine",
    )
    parser.add_argument(
        "--stage",
        choices=("auto", "2", "3"),
        default="auto",
        help="of ZeRO over several ranks: 3, weights are gathered for every use; 2, all of each "
        "rests on every rank; auto (default), whatever is faster for each",
    )
    parser.add_argument(
        "--partition",
        choices=("slices", "owner"),
        default="slices",
        help="what a rank holds of a large weight: slices (default), as much as any other; owner, "
        "all of it or nothing",
    )
    parser.add_argument(
        "--updates",
        choices=("auto", "device", "fastest"),
        default="auto",
        help="where updates are computed: fastest, by the host for what rests there, where a step "
        "is faster so; auto (default), the same where the bits are those of the device",
    )
    parser.add_argument(
        "--sweep",
        metavar="TIER=FROM..TO[:STEPS]",
        help="the step for sizes of a tier, as device=8GiB..80GiB:10",
    )
    parser.add_argument(
        "--plot",
        metavar="FILE.svg",
        type=Path,
        nargs="?",
        const=TERMINAL,
        help="a picture, into a file, or without its name below the answer: of the sweep, of the "
        "table, or of what the graph holds that holds most, node by node",
    )


def plan(args: argparse.Namespace) -> Answer:
    """Plan a model; exit code 1, if it does not fit.

    raises  ConfigInvalid (usage), and what `zcompile.plan` raises
    """
    check_plot(args.plot)
    by_shapes = args.paper is not None or (args.model or "").startswith(PREFIX)
    if args.ranks is not None and (args.fit or by_shapes):
        why = (
            "goes with the plan of a model alone; --fit is of one rank, and what is reckoned from "
        )
        given = int(args.ranks) if args.ranks.isdecimal() else args.ranks
        raise ConfigInvalid("ranks", given, why + "shapes takes the ranks of its --machine")
    if args.fit:
        return fit_answer(args)
    args = argparse.Namespace(**{**vars(args), "machine": _one(args.machine)})
    if by_shapes:
        return scale_answer(args)
    with gc_paused():  # also while torch and transformers are imported
        return _walked(args)


def _mesh_of(text: str) -> RankMesh:
    """The ranks that --ranks names. raises  ConfigInvalid"""
    sizes = text.split("x")
    if len(sizes) > 2 or not all(size.isdecimal() and int(size) for size in sizes):
        raise ConfigInvalid(
            "ranks",
            text,
            "is no number of ranks; give one, as 8, or groups x ranks of each, as 2x4",
        )
    replicas = int(sizes[0]) if len(sizes) == 2 else 1
    return RankMesh(replicas * int(sizes[-1]), replicas)


def _check_no_sync(args: argparse.Namespace, ranks: int) -> None:
    """raises  ConfigInvalid, if it is asked for where nothing would be exchanged fewer times"""
    alone = "one rank, which exchanges no gradients" if ranks == 1 else None
    once = "one micro-batch, whose gradients are exchanged once anyway"
    if args.no_sync and (why := once if args.micro_batches == 1 else alone):
        raise ConfigInvalid(
            "no-sync",
            True,
            f"means nothing with {why}; leave it out, or give --ranks and --micro-batches",
        )


def _walked(args: argparse.Namespace) -> Answer:
    """The plan of a step that is walked in a dry run."""
    if args.model is None:
        raise ConfigInvalid("MODEL", None, "is missing; name a model, or a figure by --paper")
    sweep = None if args.sweep is None else read_sweep(args.sweep)
    if args.batch < 1:
        raise ConfigInvalid("batch", args.batch, "must be at least 1")
    from zcompile.config import Config
    from zcompile.frontend.dry_run import plan  # torch takes seconds; usage errors do without
    from zcompile.planner.report import note_of_ranks

    stage = args.stage if args.stage == "auto" else int(args.stage)
    ranks = {"stage": stage, "partition": args.partition}
    config = Config(**_budgets(args), **ranks, updates=args.updates)
    terms = plan.terms_of(config, args.machine)
    if args.ranks is not None:
        mesh = _mesh_of(args.ranks)
        terms = terms.on(with_ranks(terms.machine, mesh.ranks, mesh.replicas))
    _check_no_sync(args, terms.machine.ranks)
    if args.disk_bytes is not None:
        terms = terms.on(with_tier(terms.machine, "disk", read_size("disk-bytes", args.disk_bytes)))
    model = find_model(args.model)
    inputs = example_inputs(model, args.batch, args.seq, args.shape)

    def trace(at: Any) -> Any:
        return plan.trace(model, inputs, at, args.optimizer, args.micro_batches, args.no_sync)

    if sweep is not None:
        points = tuple(_points(trace, terms, *sweep))
        capacity = terms.machine.tiers.get(sweep[0])
        return swept(points, args.plot, note_of_ranks(terms.machine.mesh), capacity)
    report = plan.report_of(trace(terms), terms)
    text, device = str(report), terms.machine.tiers["device"]
    if args.plot == TERMINAL and report.fullest is not None:
        text = "\n".join((text, "", *curve_lines(report.fullest, device)))
    elif args.plot is not None and report.fullest is not None:
        write_plot(args.plot, curve_svg(report.fullest, device))
    return Answer(text, report.to_dict(), 0 if report.fits else 1)


def _one(machines: list[str] | None) -> str | None:
    if machines is not None and len(machines) > 1:
        why = "are several; give one, or --fit for a table of them"
        raise ConfigInvalid("machine", ", ".join(machines), why)
    return machines[0] if machines else None


def _budgets(args: argparse.Namespace) -> dict[str, Any]:
    given = {"device_memory": ("device", args.device), "host_memory": ("host", args.host)}
    return {
        name: text if text.strip().endswith("%") else Bytes(read_size(option, text))
        for name, (option, text) in given.items()
        if text is not None
    }


def _points(
    trace: Callable[[Any], Any], terms: Any, tier: str, sizes: Sequence[int]
) -> Iterator[Point]:
    """The step planned for each size; traced once, unless the live bytes of graphs depend on the
    size."""
    from zcompile.frontend.dry_run import plan

    traced = None if terms.bounded else trace(terms)
    for nbytes in sizes:
        at = terms.on(with_tier(terms.machine, tier, nbytes))
        try:
            report = plan.report_of(traced or trace(at), at, prices=False)
        except BudgetExceeded as error:
            why = f"{error.tier} too small for {error.where}"
            yield Point(tier, nbytes, False, None, None, why)
        else:
            yield Point(
                tier,
                nbytes,
                report.fits,
                report.step_seconds,
                report.bound_seconds,
                report.bottleneck,
            )
