"""A small GPT that trains on any device, in each of the ways in which bytes travel, and what plain
PyTorch makes of the same loop on the same device.

Every op of it is deterministic on a card too: few enough tokens that gradients of the embedding are
summed by one warp and those of attention in one block. So all bits can be asked for.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import planned_runs
import pytest
import torch
from host_runs import let_host_update_all
from moved import forced
from planned_runs import THROTTLE, let_all_be_late, plan_at_given_costs, review_no_plan, values
from small_models import GPT
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import zcompile
from zcompile.frontend.backend import zinf
from zcompile.frontend.offload import session_behind
from zcompile.planner import step_plan
from zcompile.runtime.session import Session

DEVICES = [
    pytest.param("cpu", marks=pytest.mark.slow),  # as tests of each way alone
    pytest.param("cuda", marks=pytest.mark.gpu),
]
WIDTH, VOCABULARY, LAYERS = 128, 256, 2
STEPS = 6
HALF_STREAMS, ALL_STREAMS = "4MiB", "2MiB"
"""Of the device: weights, gradients and states take 7 MiB, of which that is a part, or as good as
nothing; values between two ops take half a MiB."""


class Noisy(nn.Module):
    """The GPT, with dropout between embedding and blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.gpt, self.drop = GPT(LAYERS, WIDTH, VOCABULARY), nn.Dropout(0.1)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.drop(self.gpt.embed(ids))
        for block in self.gpt.blocks:
            x = self.drop(block(x))
        return self.gpt.head(self.gpt.norm(x))


def adamw(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=1e-2, fused=True)


def stock(params: Any) -> torch.optim.Optimizer:
    """By what torch takes if nobody says: lists of ops on a card, a loop elsewhere."""
    return torch.optim.AdamW(params, lr=1e-2)


def sgd(params: Any) -> torch.optim.Optimizer:
    """Where numbers are close: steps of AdamW are as large for gradients that are but rounding."""
    return torch.optim.SGD(params, lr=0.1, momentum=0.9, fused=True)


@dataclass(frozen=True)
class Way:
    """A way to train.

    fields   of the config, beside the device's
    looks    is true of a session in which that is really what happened
    within   called with a monkeypatch: a context in which all of it takes place, eager too
    batches  micro-batches in a step
    dtype    of autocast, if there is any
    scale    that a GradScaler begins with, if there is one
    clip     the norm that gradients are clipped to
    hooks    each parameter is updated in backward, by an optimizer of its own
    disk     there is one
    rounds   devices on which sums or kernels are others than eager's, so that numbers are close
    """

    fields: Mapping[str, Any] = field(default_factory=dict)
    looks: Callable[[Session], bool] = lambda session: True
    within: Callable[[pytest.MonkeyPatch], contextlib.AbstractContextManager[Any]] = lambda patch: (
        contextlib.nullcontext()
    )
    build: Callable[[], nn.Module] = lambda: GPT(LAYERS, WIDTH, VOCABULARY)
    make: Callable[[Any], torch.optim.Optimizer] = adamw
    batches: int = 1
    dtype: torch.dtype | None = None
    scale: float | None = None
    clip: float | None = 0.5
    hooks: bool = False
    disk: bool = False
    rounds: tuple[str, ...] = ()


@contextlib.contextmanager
def on_a_stream() -> Iterator[None]:
    """All compute on a stream of the user's own, where the device has any."""
    if not torch.cuda.is_available():
        yield
        return
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        yield
    torch.cuda.current_stream().wait_stream(stream)


def _patched(change: Callable[[Any], object]) -> Callable[[Any], Any]:
    def within(patch: pytest.MonkeyPatch) -> Any:
        change(patch)
        return contextlib.nullcontext()

    return within


def _homes(session: Session) -> set[str]:
    return {entry.home for entry in session.entries()}


def _lies_on(*tiers: str) -> Callable[[Session], bool]:
    return lambda session: set(tiers) <= _homes(session)


def _has_copies(session: Session) -> bool:
    return any(entry.copies for entry in session.entries())


@contextlib.contextmanager
def _saved_values(how: str) -> Iterator[None]:
    """All values that backward needs, and may be, are moved or made again; as `forced`."""
    with forced(how) as decided:
        yield
    again, moved = (sum(counts) for counts in zip(*decided, strict=True))
    assert bool(again) is ("again" in how)
    assert bool(moved) is (how != "again")


STREAMING = {"device_memory": ALL_STREAMS, "residency": False}
STATES_STREAM = {"device_memory": "2560KiB", "updates": "device"}

WAYS: dict[str, Way] = {
    "all on the device": Way(
        {"device_memory": "64MiB"}, lambda session: "host" not in _homes(session)
    ),
    "gradients stay": Way(
        {"device_memory": "64MiB"},
        lambda session: bool(session.controller.plan.placement.stay),
        clip=None,
    ),
    "half on the device": Way({"device_memory": HALF_STREAMS}, _lies_on("device", "host")),
    "streaming": Way(STREAMING, lambda session: _homes(session) == {"host"}),
    "streaming, torch's own choice of ops": Way(STREAMING, make=stock),
    "disk": Way({**STREAMING, "host_memory": "3MiB"}, _lies_on("disk"), batches=2, disk=True),
    "disk, planned": Way(
        {"device_memory": HALF_STREAMS, "host_memory": "3MiB"}, _lies_on("disk"), disk=True
    ),
    "durable": Way(
        {"device_memory": HALF_STREAMS, "host_memory": "64MiB", "durable": True},
        _lies_on("device", "host"),
        disk=True,
    ),
    "attention by products": Way(
        STREAMING, within=lambda patch: sdpa_kernel(SDPBackend.MATH), build=Noisy
    ),
    "dropout": Way({"device_memory": HALF_STREAMS}, build=Noisy),
    "micro-batches": Way({"device_memory": HALF_STREAMS}, batches=3),
    "micro-batches, streaming": Way(STREAMING, batches=3),
    "activations on the host": Way(
        STREAMING, within=lambda patch: _saved_values("host"), build=Noisy
    ),
    "activations on disk": Way(
        STREAMING, within=lambda patch: _saved_values("disk"), build=Noisy, disk=True
    ),
    "activations made again": Way(
        STREAMING, within=lambda patch: _saved_values("again"), build=Noisy
    ),
    "activations by turns": Way(
        {"device_memory": HALF_STREAMS},
        within=lambda patch: _saved_values("host or again"),
        build=Noisy,
    ),
    "late updates": Way(
        STATES_STREAM,
        lambda session: session.late.rows > 0,
        _patched(let_all_be_late),
    ),
    "updates in backward": Way(STREAMING, clip=None, hooks=True),
    "late updates in backward": Way(
        STATES_STREAM,
        lambda session: session.late.rows > 0,
        _patched(let_all_be_late),
        clip=None,
        hooks=True,
    ),
    "updates by the host": Way(
        {**STATES_STREAM, "updates": "fastest"},
        lambda session: session.meter.snapshot()["updates_on_host"] > 0,
        _patched(let_host_update_all),
        rounds=("cuda",),
    ),
    "weights in tiles": Way(
        {**STREAMING, "tile_bytes": "64KiB"}, make=sgd, rounds=("cpu", "cuda"), clip=None
    ),
    "bfloat16": Way(STREAMING, dtype=torch.bfloat16),
    "bfloat16, planned": Way({"device_memory": HALF_STREAMS}, dtype=torch.bfloat16),
    "narrow copies": Way(
        {"device_memory": HALF_STREAMS},
        _has_copies,
        _patched(lambda patch: patch.setattr(step_plan, "NARROW_PAYS", 0.0)),
        dtype=torch.bfloat16,
    ),
    "param_dtype": Way(
        {**STREAMING, "host_memory": "3MiB", "param_dtype": torch.bfloat16},
        _has_copies,
        dtype=torch.bfloat16,
        disk=True,
    ),
    "float16, scaled": Way({"device_memory": HALF_STREAMS}, dtype=torch.float16, scale=2.0**12),
    "float16, scaled, unclipped": Way(STREAMING, dtype=torch.float16, scale=2.0**12, clip=None),
    "float16, a step skipped": Way(
        {"device_memory": HALF_STREAMS}, dtype=torch.float16, scale=2.0**40, clip=None
    ),
    "another stream": Way(
        {"device_memory": HALF_STREAMS}, within=lambda patch: on_a_stream(), build=Noisy
    ),
}


class Run:
    """Trains a model by what it is called by, step by step; notes each loss."""

    def __init__(self, model: nn.Module, call: Any, way: Way, device: str) -> None:
        self.model, self.call, self.way, self.device = model, call, way, device
        self.losses: list[Tensor] = []
        params = [*model.parameters()]
        self.optimizer = None if way.hooks else way.make(params)
        self.scaler = torch.amp.GradScaler(
            device,
            init_scale=way.scale or 1.0,
            backoff_factor=2.0**-28,
            enabled=way.scale is not None,
        )
        if way.hooks:
            self._update_in_backward(params)

    def _update_in_backward(self, params: list[nn.Parameter]) -> None:
        optimizers = {p: self.way.make([p]) for p in params}

        def update(p: Tensor) -> None:
            optimizers[p].step()  # type: ignore[index]
            optimizers[p].zero_grad()  # type: ignore[index]

        for p in params:
            p.register_post_accumulate_grad_hook(update)

    def backward(self, number: int) -> None:
        for n in range(self.way.batches):
            tokens = planned_runs.ids(10 * number + n).to(self.device)
            with torch.autocast(self.device, self.way.dtype, enabled=self.way.dtype is not None):
                logits = self.call(tokens[:, :-1])
            loss = nn.functional.cross_entropy(
                logits.float().flatten(0, 1), tokens[:, 1:].flatten()
            )
            self.losses.append(loss.detach())
            self.scaler.scale(loss).backward()

    def step(self) -> None:
        if self.optimizer is None:
            return
        if self.way.clip is not None:
            self.scaler.unscale_(self.optimizer)
            nn.utils.clip_grad_norm_(self.model.parameters(), self.way.clip)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()

    def steps(self, begin: int, end: int) -> "Run":
        for number in range(begin, end):
            torch.manual_seed(number)  # dropout
            self.backward(number)
            self.step()
        return self

    def told(self) -> list[float]:
        return [loss.item() for loss in self.losses]

    def values(self) -> list[Tensor]:
        return [value.cpu() for value in values(self.model)]


def plain(way: Way, device: str) -> Run:
    """An eager run of it, not begun."""
    torch.manual_seed(0)
    model = way.build().to(device)
    return Run(model, model, way, device)


def tiered(way: Way, device: str, disk: Path | None, **fields: Any) -> Run:
    """Ours, not begun."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = way.build()
    links = {"throttle": THROTTLE} if device == "cpu" else {}  # on which all that moves shows
    known = {"host_memory": "64MiB", **links, **way.fields, **fields}
    if disk is not None:
        known["disk"] = disk
    zcompile.offload(model, device=device, **known)
    return Run(model, torch.compile(model, backend=zinf), way, device)


@contextlib.contextmanager
def the_same_plan_each_time(way: Way) -> Iterator[None]:
    """Plans do not depend on what this machine is measured to take, nor on who else is busy; what
    the way wants is patched in."""
    with pytest.MonkeyPatch.context() as patch, contextlib.ExitStack() as inside:
        plan_at_given_costs(patch)
        review_no_plan(patch)
        inside.enter_context(way.within(patch))
        yield


def session_of(run: Run) -> Session:
    return session_behind(run.model)
