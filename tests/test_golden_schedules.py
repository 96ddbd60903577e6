"""The schedules that calls really walk, before a whole step is planned and under its plan, as text.

Each case trains with costs that are given and not measured, so that its plans are the same on every
machine. A change of the compiler or of the runtime's planning shows here as a difference of text;
one that was meant is accepted with `pytest --accept`.
"""

import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from sampled import sampled
from small_models import GPT, SMALL_MODELS, mlp
from torch import Tensor, nn

import zcompile
from zcompile.frontend import replan
from zcompile.frontend.offload import session_behind
from zcompile.ir import printer
from zcompile.ir.schedule import Schedule
from zcompile.ir.serialize import open_run
from zcompile.ir.types import Phase
from zcompile.machine.cost import Costs, TransferModes
from zcompile.runtime import probe
from zcompile.runtime.probe import machine_for
from zcompile.runtime.session import Session

SEEN = 2
"""Steps before a whole step is planned."""


@dataclass(frozen=True)
class Case:
    """A model, its inputs, and the budgets that it trains within."""

    make: Callable[[], nn.Module]
    inputs: Callable[[], tuple[Any, ...]]
    fields: dict[str, Any]
    disk: bool = False
    batches: int = 1


def gpt(layers: int, width: int, vocabulary: int = 64) -> Callable[[], nn.Module]:
    return lambda: GPT(layers, width, vocabulary)


def ids(batch: int, length: int, vocabulary: int = 64) -> Callable[[], tuple[Tensor, ...]]:
    return lambda: (torch.randint(0, vocabulary, (batch, length)),)


def small(name: str, **fields: Any) -> Case:
    make, inputs = SMALL_MODELS[name]
    return Case(make, inputs, fields)


class WithLoss(nn.Module):
    """A GPT that returns its loss, so that the loss is part of the graph."""

    def __init__(self, *args: int) -> None:
        super().__init__()
        self.inner = GPT(*args)

    def forward(self, tokens: Tensor) -> Tensor:
        logits = self.inner(tokens[:, :-1])
        return nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


THROTTLE = {"h2d": "500MB/s", "d2h": "500MB/s"}
"""With a link between, compute does not reach the host: what rests there is fetched."""

CASES = {
    "mlp": small("mlp", device_memory="1MiB"),
    "dropout": small("dropout", device_memory="1MiB", throttle=THROTTLE),
    "convolution": small("convolution", device_memory="20KiB", throttle=THROTTLE),
    "module called twice": small("module called twice", device_memory="6KiB", throttle=THROTTLE),
    "view in two places": small("view in two places", device_memory="1MiB", throttle=THROTTLE),
    "gpt with room": Case(gpt(2, 32), ids(2, 8), {"device_memory": "8MiB", "throttle": THROTTLE}),
    "gpt in little": Case(gpt(2, 32), ids(2, 8), {"device_memory": "160KiB", "throttle": THROTTLE}),
    "gpt of four layers": Case(gpt(4, 32), ids(2, 8), {"device_memory": "260KiB"}, batches=2),
    "gpt on disk": Case(
        gpt(2, 32), ids(2, 8), {"device_memory": "160KiB", "host_memory": "512KiB"}, disk=True
    ),
    "wide mlp in tiles": Case(
        lambda: mlp(64),
        lambda: (torch.randn(4, 64),),
        {"device_memory": "72KiB", "throttle": THROTTLE},
    ),
    "activations elsewhere": Case(
        gpt(2, 32), ids(8, 32), {"device_memory": "420KiB", "throttle": THROTTLE}
    ),
    "large vocabulary": Case(
        lambda: WithLoss(1, 16, 1024),
        ids(2, 17, 1024),
        {"device_memory": "128KiB", "throttle": THROTTLE},
    ),
}


class Walked(dict[str, Any]):
    """Hears of every schedule of a session, also of an optimizer's; those of a dump hear too."""

    def __init__(self) -> None:
        super().__init__({"": self})
        self.schedules: list[tuple[Schedule, tuple[str, ...]]] = []

    def get(self, name: str, default: object = None) -> "Walked":
        return self

    def walked(self, schedule: Schedule, placement: int, homes: tuple[str, ...]) -> None:
        self.schedules.append((schedule, homes))
        if (other := super().get(schedule.name)) is not None:
            other.walked(schedule, placement, homes)

    def told(self) -> str:
        """Each schedule in the order it was walked; one that was walked before by its number."""
        numbers: dict[object, int] = {}
        rows = []
        for schedule, homes in self.schedules:
            if (same := (schedule.serial, homes)) in numbers:
                rows.append(f"# {numbers[same]} again\n")
                continue
            numbers[same] = number = len(numbers)
            rows.append(f"# {number}\n{printer.schedule_text(schedule, homes)}")
        return "\n".join(rows)


def given_costs(session: Session) -> Costs:
    return Costs(machine_for(session.config, session.device), TransferModes(straight_read=True))


def train(case: Case, tmp_path: Path, **more: Any) -> Iterator[Walked]:
    """After each step, what was walked since."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    fields = {"host_memory": "64MiB", "device": "cpu", "machine": "desktop-24gb", **case.fields}
    fields |= more
    if case.disk:
        fields["disk"] = tmp_path / "disk"
    model = zcompile.offload(case.make(), **fields)
    compiled = torch.compile(model, backend="zinf", dynamic=False)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    session = session_behind(model)
    session.executor._listeners = walked = Walked()
    for _ in range(SEEN + 2):
        for _ in range(case.batches):
            compiled(*case.inputs()).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        yield walked
        walked.schedules.clear()
    assert session.controller.plan is not None
    zcompile.close(model)


@pytest.fixture
def given(monkeypatch):
    """Costs that nobody measures: the same in every run."""
    monkeypatch.setattr(replan, "costs_of", given_costs)
    monkeypatch.setattr(Session, "ways", lambda session: TransferModes(straight_read=True))
    monkeypatch.setattr(probe, "_pacing_s", lambda device: 1e-5)


SLOW = {
    "gpt of four layers",
    "activations elsewhere",
    "gpt with room",
    "view in two places",
    "dropout",
    "gpt in little",
    "large vocabulary",
}


@pytest.mark.parametrize("name", sampled(CASES, *(CASES.keys() - SLOW)))
def test_what_is_walked(name, tmp_path, given, golden):
    texts = [walked.told() for walked in train(CASES[name], tmp_path)]
    seen, planned = texts[SEEN - 1], texts[-1]
    assert f"before a plan\n\n{seen}\n\nunder the plan\n\n{planned}" == golden


@pytest.mark.parametrize(
    "name", sampled(["gpt with room", "module called twice"], "module called twice")
)
def test_a_dump_holds_what_the_last_calls_walked(name, tmp_path, given):
    root = tmp_path / "dump"
    for walked in train(CASES[name], tmp_path, dump=root):
        graphs = [row for row in walked.schedules if row[0].phase is not Phase.STEP]
        (graph,) = open_run(root).graphs
        for kind in ("forward", "backward"):
            want = {printer.schedule_text(*row) for row in graphs if row[0].call_kind == kind}
            assert {graph.schedule_text(kind, n) for n in graph.arrangements(kind)} == want


def test_a_dump_that_cannot_be_written_to_any_more_stops_no_training(tmp_path, given, caplog):
    root, steps = tmp_path / "dump", 0
    for _ in train(CASES["mlp"], tmp_path, dump=root):
        steps += 1
        if steps == 1:
            shutil.rmtree(root)
    assert steps == SEEN + 2
    told = [r.getMessage() for r in caplog.records if r.name == "zcompile.passes"]
    assert len([line for line in told if "is not written to any more" in line]) == 1
