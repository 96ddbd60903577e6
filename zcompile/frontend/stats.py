"""`zcompile.stats`: what was measured of a model, as a dict that people can read."""

from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from zcompile.frontend.offload import session_behind
from zcompile.ir.torch_compat import untraced
from zcompile.ir.types import EntryKind
from zcompile.ir.units import show_seconds, show_size
from zcompile.runtime.session import Session


class Stats(dict[str, Any]):
    """A plain dict that shows itself line by line."""

    def __repr__(self) -> str:
        return "\n".join(f"{key:<16} {_shown(key, value)}" for key, value in self.items())


_SHOWN: Mapping[str, Callable[[Any], str]] = {
    "bytes": show_size,
    "peak": show_size,
    "planned_peak": show_size,
    "seconds": show_seconds,
    "phases": show_seconds,
    "busy": show_seconds,
}
"""How the numbers under a key of `Stats` are shown to people; one that ends in _s is of seconds."""


def _shown(key: str, value: Any) -> str:
    """A value of `Stats`, or of a dict in it, for people."""
    if value is None:
        return "-"
    if isinstance(value, dict):
        inner = {name: _shown(key if key in _SHOWN else name, v) for name, v in value.items()}
        parts = (f"{name} {text}" for name, text in inner.items())
        return ", ".join(f"({part})" if "," in part else part for part in parts)
    if isinstance(value, list):
        return "; ".join(_shown(key, row) for row in value) or "none"
    return _SHOWN.get("seconds" if key.endswith("_s") else key, str)(value)


@untraced
def stats(model: nn.Module, *, reset: bool = False) -> dict[str, Any]:
    """What was measured since the model was offloaded, or since the last `reset=True`: a dict.

    bytes         `disk_read`, `disk_write`, `h2d`, `d2h`
    seconds       `compute`, `stall` (compute waited for a transfer), `optimizer`
    peak          bytes on `device` (the arena), `host`, `disk`, as measured; `activations`: values
                  of compiled graphs, beside the arena; `together`: the most of both at once
    planned_peak  the same, as decided before the first step
    step_s        seconds from one step to the next, of late; None before there were two
    predicted     None until a whole step was planned; then what it should take: `step_s`,
                  `seconds`, `phases`, `bytes`, `busy`, `peak`; `bound_s` of this very plan;
                  `least_s`, `least_compute_s` and `binding` (compute, or a link) of plans that
                  compute what this one does, at the seconds measured for it, and have the same
                  arena for weights and states; `floor_s`, `floor_compute_s` and `floor_binding`
                  of all plans within these budgets: the busiest of compute as it was traced,
                  with links idle, and of each link at its rate for the bytes that have to move
    inexact       where results may round otherwise than eager's, since tiles or slices are summed
                  up, or results that nobody differentiates have gradients of zeros: `where` (a
                  weight, module or graph), `by` which pass, `why`; empty: nowhere. What
                  torch.compile itself computes otherwise than eager is not listed
    fusions       with regions="inductor": how many `distinct` ones there are, those that were
                  `compiled` (or taken from torch's caches), those `loaded` from beside the run,
                  and what was `refused` and is run eagerly: its ops -> a list of reasons. None
                  with eager regions
    fabric        only where several ranks train the model: `rank` of `ranks`, `replicas`: how many
                  groups of them hold all of the model each, `bytes` that this one has sent
                  (`gather`, `exchange`, `agree`; `replicate`: sums of a group, to others), and
                  `seconds` that those took. `bytes` and `seconds` above then have `rank_to_rank`
                  too (between nodes, `node_to_node`): what has come to this rank in gathers,
                  exchanges and sums, and the seconds in which some of it was on its way, until the
                  rank took note that it had come
    plan          only there: `stage` of ZeRO that is in force, 2 or 3; `gathered`: parameters of
                  which ranks hold shares, and `whole`: those of them that are kept whole on the
                  device of every rank, which take `whole_bytes`
    steps, graphs, regions, distinct_regions, gathers, updates_on_host   counts; the last of
                  updates of parameters that the host computed, where they rest
    raises  Unsupported, if the model was not offloaded
    """
    session = session_behind(model)
    session.drain()
    measured = Stats(session.meter.snapshot())
    measured["inexact"] = [
        {"where": where, "by": by, "why": why} for (where, by), why in session.inexact.items()
    ]
    measured["fusions"] = None if session.fusions is None else session.fusions.as_stats()
    measured["step_s"] = session.executor.clocks.step_s()
    measured["predicted"] = session.controller.prediction()
    if session.fabric is not None:
        for link in session.fabric.links.distinct():
            for key, total in zip(("bytes", "seconds"), link.totals(reset), strict=True):
                measured[key] = {**measured[key], link.name: total}
        measured["fabric"] = session.fabric.totals(reset)
        measured["plan"] = _stage(session)
    if reset:
        session.meter.reset()
    return measured


def _stage(session: Session) -> dict[str, Any]:
    """Which parameters that ranks hold shares of are whole on this one.

    Between the stages, where some are, it is the third.
    """
    shared = [e for e in session.entries() if e.kind is EntryKind.PARAM and e.partition]
    wholes = [entry.whole.entry for entry in shared if entry.whole is not None]
    return {
        "stage": 2 if shared and len(wholes) == len(shared) else 3,
        "gathered": len(shared),
        "whole": len(wholes),
        "whole_bytes": sum(whole.nbytes for whole in wholes),
    }
