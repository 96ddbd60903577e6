"""Small models that train on a simulated card, each in one of the ways in which bytes travel."""

import contextlib
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import narrow_runs
import planned_runs
import pytest
import torch
from moved import forced
from planned_runs import LITTLE_HOST, adamw, let_all_be_late
from streams.clocks import Pair
from streams.cuda import Event, Simulation
from streams.knowledge import simulated
from torch import Tensor, nn

import zcompile
from zcompile.frontend.offload import session_behind
from zcompile.ir.units import Bytes, KiB
from zcompile.planner import step_plan
from zcompile.runtime.session import Session

WARM = 4
"""Steps until a plan is in force, if there is to be one, and calls are foreseen."""


@dataclass(frozen=True)
class Mode:
    """A way to train.

    fields   of the config
    looks    is true of a session in which that is really what happens
    batches  micro-batches in a step
    steps    that accesses are noted in: what one leaves in flight, the next one may meet
    moves    the tier that all activations which may move are moved to
    late     updates are late, narrow: copies in bf16 are kept, wherever they may be
    disk     there is one
    by_host  the host itself moves or adds bytes, and has to be waited for
    """

    fields: dict[str, Any]
    looks: Callable[[Session], bool]
    batches: int = 1
    steps: int = 1
    moves: str | None = None
    late: bool = False
    narrow: bool = False
    disk: bool = False
    by_host: bool = False
    layers: int = 1


def _homes(session: Session) -> set[str]:
    return {entry.home for entry in session.entries()}


MODES = {
    "streaming": Mode(
        {"device_memory": Bytes(192 * KiB), "residency": False},
        lambda s: _homes(s) == {"host"},
        layers=2,
    ),
    "micro-batches": Mode(
        {"device_memory": Bytes(160 * KiB), "residency": False},
        lambda s: _homes(s) == {"host"},
        batches=2,
        by_host=True,
    ),
    "offloaded activations": Mode(
        {"device_memory": Bytes(160 * KiB), "residency": False},
        lambda s: _homes(s) == {"host"},
        moves="host",
    ),
    "part on the device": Mode(
        {"device_memory": Bytes(384 * KiB)},
        layers=2,
        looks=lambda s: {"device", "host"} <= _homes(s),
    ),
    "all on the device": Mode({"device_memory": "16MiB"}, lambda s: "host" not in _homes(s)),
    "disk": Mode(
        {"device_memory": Bytes(160 * KiB), "host_memory": LITTLE_HOST, "residency": False},
        lambda s: _homes(s) == {"host", "disk"},
        batches=2,
        steps=2,
        disk=True,
        by_host=True,
    ),
    "late updates": Mode({"device_memory": Bytes(224 * KiB)}, lambda s: s.late.rows > 0, late=True),
    "narrow copies": Mode(
        {"device_memory": narrow_runs.TIGHT}, lambda s: bool(_copies(s)), narrow=True
    ),
}


def _copies(session: Session) -> list[Any]:
    return [entry for entry in session.entries() if entry.copies]


@dataclass
class Training:
    """A model that trains, step by step.

    compiled     calls the model
    waits        of the main thread in the last step, by who waited
    first_waits  in the first steps of which accesses were noted; pairs: what was found in them
    """

    name: str
    model: nn.Module
    compiled: Callable[..., Tensor]
    mode: Mode
    simulation: Simulation
    act: Callable[[int], None]
    number: int = 0
    waits: dict[str, int] = field(default_factory=dict)
    first_waits: dict[str, int] = field(default_factory=dict)
    pairs: dict[Pair, int] = field(default_factory=dict)

    @property
    def session(self) -> Session:
        return session_behind(self.model)

    def steps(self, count: int) -> None:
        for _ in range(count):
            Event.waits.clear()
            self.act(self.number)
            self.number += 1
            self.waits = dict(Event.waits)

    def values(self) -> list[Tensor]:
        return planned_runs.values(self.model)

    def noted_steps(self, count: int = 1) -> None:
        """Steps of which accesses are noted, until nothing of them is in flight."""
        self.begin_anew()
        self.steps(count)
        self.rest()

    def rest(self) -> None:
        """Let all that is in flight end."""
        self.session.executor.wait_for_in_flight()
        self.session.drain()

    def begin_anew(self) -> None:
        """The same, and forget what came before."""
        self.rest()
        self.simulation.compute.synchronize()
        self.simulation.memory.forget()
        self.simulation.records = True


@contextlib.contextmanager
def training(name: str) -> Iterator[Training]:
    """A run of a mode, from its first step on."""
    mode = MODES[name]
    with contextlib.ExitStack() as inside:
        simulation = inside.enter_context(simulated())
        simulation.records = False
        patch = inside.enter_context(pytest.MonkeyPatch.context())
        directory = Path(inside.enter_context(tempfile.TemporaryDirectory()))
        fields = {"host_memory": "64MiB", **mode.fields}
        if mode.disk:
            fields["disk"] = directory
        patch.setattr(step_plan, "NARROW_PAYS", 0.0 if mode.narrow else float("inf"))
        if mode.late:
            let_all_be_late(patch)
        else:
            patch.setattr(step_plan, "LATE_PAYS", float("inf"))
        if mode.moves:
            inside.enter_context(forced(mode.moves))
        torch._dynamo.reset()
        if mode.narrow:
            # As on CUDA, which the streams stand for.
            model = zcompile.offload(narrow_runs.mlp(), device="cpu", updates="device", **fields)
            compiled = torch.compile(model, backend="zinf")
            act = narrow_runs.Run(model, compiled).steps
            made = Training(name, model, compiled, mode, simulation, lambda n: act(n, n + 1))
        else:
            model = zcompile.offload(
                planned_runs.gpt(mode.layers), device="cpu", updates="device", **fields
            )
            compiled, optimizer = torch.compile(model, backend="zinf"), adamw(model)
            made = Training(
                name,
                model,
                compiled,
                mode,
                simulation,
                lambda n: planned_runs.train(model, compiled, optimizer, n, n + 1, mode.batches),
            )
        try:
            yield made
        finally:
            made.session.close()


def plainly(name: str, steps: int) -> list[Tensor]:
    """What plain PyTorch comes to."""
    mode = MODES[name]
    if mode.narrow:
        model = narrow_runs.mlp()
        narrow_runs.Run(model, model).steps(0, steps)
        return narrow_runs.values(model)
    return planned_runs.expected(layers=mode.layers, end=steps, batches=mode.batches)
