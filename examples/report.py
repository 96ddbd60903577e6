"""What the examples print: a progress bar, and tables of what was planned and measured."""

import shutil
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TextIO

from torch import nn

import zcompile
from examples.loop import Comparison
from zcompile.ir.units import show_size

LINES = 12
"""Lines of progress where a line cannot be overwritten, as in a file or a pipe."""


@dataclass
class Progress:
    """One line per step: overwritten on a terminal, elsewhere printed about LINES times.

    tokens  per step
    tiered  its links are shown too; None for a plain model
    """

    title: str
    steps: int
    tokens: int
    tiered: nn.Module | None = None
    out: TextIO = field(default_factory=lambda: sys.stdout)
    moved: Mapping[str, int] = field(default_factory=dict)

    def __call__(self, step: int, loss: float, seconds: float) -> None:
        """A `loop.Watch`: step `step`, from 0 on, is done."""
        done = step + 1
        facts = [f"loss {loss:.4f}", f"{self.tokens / seconds:,.0f} tokens/s", *self._links()]
        text = "  ".join(facts)
        counted = f"{self.title} {done:>{len(str(self.steps))}}/{self.steps}"
        if self.out.isatty():
            bar = "#" * (20 * done // self.steps)
            room = shutil.get_terminal_size().columns - 1
            end = "\n" if done == self.steps else ""
            self.out.write(f"\r{f'{counted} [{bar:.<20}] {text}'[:room]:<{room}}{end}")
        elif done in (1, self.steps) or done % -(-self.steps // LINES) == 0:
            self.out.write(f"{counted}  {text}\n")
        self.out.flush()

    def _links(self) -> list[str]:
        """Bytes per link since the last call."""
        if self.tiered is None:
            return []
        before, self.moved = self.moved, zcompile.stats(self.tiered)["bytes"]
        return [
            f"{link} {show_size(total - before.get(link, 0))}" for link, total in self.moved.items()
        ]


def opening(model: nn.Module, config: zcompile.Config, ranks: int = 1) -> str:
    """What is trained, and within which budgets, by how many ranks."""
    count = sum(param.numel() for param in model.parameters())
    weights = sum(param.numel() * param.element_size() for param in model.parameters())
    directories = ", ".join(str(path) for path in config.disk or ())
    shared = f", shared by {ranks} ranks" if ranks > 1 else ""
    each = "each " if ranks > 1 else ""
    return (
        f"{count / 1e6:.1f} M parameters: {show_size(weights)} of weights, "
        f"{show_size(4 * weights)} with gradients and the states of AdamW{shared}\n"
        f"{each}on {config.device}: device {_shown(config.device_memory)}, "
        f"host {_shown(config.host_memory)}, disk {directories}"
    )


def _shown(budget: object) -> str:
    """A budget: bytes, or a percentage of the tier as it was asked for."""
    return show_size(budget) if isinstance(budget, int) else str(budget)


def closing(losses: Sequence[float], measured: Mapping[str, Any], config: zcompile.Config) -> str:
    """The tables at the end of a training.

    measured  what `zcompile.stats` returned
    """
    budgets = {"device": config.device_memory, "host": config.host_memory}
    steps = len(losses)
    peaks = [
        (
            tier,
            (
                show_size(measured["planned_peak"][tier]),
                show_size(nbytes),
                _shown(budgets[tier]) if tier in budgets else "-",
            ),
        )
        for tier, nbytes in measured["peak"].items()
    ]
    links = [
        (link, (show_size(nbytes / steps), show_size(nbytes)))
        for link, nbytes in measured["bytes"].items()
    ]
    seconds = [
        (what, (f"{spent / steps:.3f}", f"{spent:.2f}"))
        for what, spent in measured["seconds"].items()
    ]
    code = [
        (name.replace("_", " "), (str(measured[name]),))
        for name in ("graphs", "regions", "distinct_regions", "gathers")
    ]
    return "\n".join(
        (
            f"loss {losses[0]:.4f} at the first step, {losses[-1]:.4f} at the last of {steps}",
            _table("peak", ("planned", "measured", "budget"), peaks),
            _table("bytes", ("per step", "in all"), links),
            _table("seconds", ("per step", "in all"), seconds),
            _table("compiled", ("count",), code),
        )
    )


def peaks(model: nn.Module) -> str:
    """What an offloaded model had in each tier at most."""
    peak = zcompile.stats(model)["peak"]
    return ", ".join(f"{tier} {show_size(nbytes)}" for tier, nbytes in peak.items()) + " at most"


def verdict(found: Comparison) -> str:
    """How the training and its eager twin agree, in sentences."""
    lines = [
        _agreement("losses", found.steps_in_all, len(found.steps)),
        _agreement("parameters", found.parameters_in_all, len(found.parameters)),
    ]
    lines += [
        f"  step {step}: loss {ours!r}, eager {theirs!r}"
        for step, (ours, theirs) in list(found.steps.items())[:5]
    ]
    lines += [
        f"  {name}: differs by up to {most:.3g}"
        for name, most in list(found.parameters.items())[:5]
    ]
    return "\n".join(lines)


def _agreement(what: str, count: int, apart: int) -> str:
    if apart:
        return f"{what}: {apart} of {count} DIFFER from eager"
    return f"{what}: all {count} bit-equal to eager"


def _table(title: str, columns: Sequence[str], rows: Iterable[tuple[str, Sequence[str]]]) -> str:
    lines = ["", f"{title:<18}" + "".join(f"{column:>12}" for column in columns)]
    lines += [f"  {name:<16}" + "".join(f"{cell:>12}" for cell in cells) for name, cells in rows]
    return "\n".join(lines)
