"""Runs of a small GPT long enough to be planned, and what they must come to."""

import functools
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from small_models import GPT
from torch import Tensor, nn

import zcompile
from zcompile.frontend import replan
from zcompile.frontend.offload import session_behind
from zcompile.ir.units import Bytes, KiB
from zcompile.machine.cost import Costs
from zcompile.machine.model import Compute, Link, Machine
from zcompile.planner import late_step, step_plan

WIDTH, VOCABULARY = 32, 64
STEPS = 5
PLANNED = 3
"""Steps after which a plan is in force."""
THROTTLE = {"h2d": "200MB/s", "d2h": "200MB/s"}
"""Links over which what rests on the host moves, and is not computed where it lies."""


MACHINE = Machine(
    "given",
    {},
    {name: Link(name, 200e6, 100e-6) for name in ("h2d", "d2h")},
    Compute({"float32": 50e9}, 10e9),
)
"""With links as `THROTTLE` leaves them. Their latency has the smallest entries rest on the device:
these take least of it for each transfer that they save."""


def gpt(layers: int = 1) -> nn.Module:
    """One layer has every kind of entry; most of the time of such a run is torch's, tracing layer
    after layer."""
    torch.manual_seed(0)
    return GPT(layers, WIDTH, VOCABULARY)


def weight_bytes(layers: int) -> int:
    return sum(p.nbytes for p in gpt(layers).parameters())


WEIGHT_BYTES = weight_bytes(1)
LITTLE_HOST = Bytes(256 * KiB + 5 * WEIGHT_BYTES // 2)
"""Beside the ring, for five eighths of all entries: weights, gradients and two moments."""


def ids(number: int) -> Tensor:
    return torch.randint(0, VOCABULARY, (2, 9), generator=torch.Generator().manual_seed(number))


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)


def loss_of(forward, tokens: Tensor) -> Tensor:
    logits = forward(tokens[:, :-1])
    return nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def train(model, forward, optimizer, begin=0, end=STEPS, batches=1, clip=True, ids=ids):
    for number in range(begin, end):
        for batch in range(batches):
            loss_of(forward, ids(10 * number + batch)).backward()
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()


def offloaded(layers=1, **fields):
    torch._dynamo.reset()
    model = zcompile.offload(gpt(layers), device="cpu", **{"host_memory": "64MiB", **fields})
    return model, torch.compile(model, backend="zinf")


@functools.cache
def held_bytes(layers: int = 1) -> int:
    """What the graphs of such a run hold of the device beside the arena: values between ops."""
    model, compiled = offloaded(layers, device_memory="16MiB")
    train(model, compiled, adamw(model), 0, 2)
    return session_behind(model).split.held_bytes


def begun(steps: int, batches=1, **fields):
    """A model some AdamW steps into its run; with two of them the third will plan."""
    model, compiled = offloaded(**fields)
    optimizer = adamw(model)
    train(model, compiled, optimizer, 0, steps, batches)
    return model, compiled, optimizer


def values(model: nn.Module) -> list[Tensor]:
    return [p.on_host() if hasattr(p, "on_host") else p.detach() for p in model.parameters()]


@functools.cache
def expected(make=adamw, layers=1, **how) -> list[Tensor]:
    """What plain eager training comes to; once for all tests that ask for the same."""
    model = gpt(layers)
    train(model, model, make(model), **how)
    return values(model)


def same(model: nn.Module, want: list[Tensor]) -> bool:
    return all(map(torch.equal, values(model), want))


@contextmanager
def made_on(device: str) -> Iterator[None]:
    """Tensors that name no device are made on this one."""
    torch.set_default_device(device)
    try:
        yield
    finally:
        torch.set_default_device(None)


def homes(model: nn.Module) -> set[str]:
    return {p.entry.home for p in model.parameters()}


def review_no_plan(monkeypatch) -> None:
    """Keep the plan of a run in force: whether a review finds a better one depends on what was
    measured, and so on how busy the machine is."""
    monkeypatch.setattr(replan, "REVIEW", 1000)


def plan_at_given_costs(monkeypatch) -> None:
    """Plan for `MACHINE`, whatever regions and links of this one are seen to take: the same
    entries rest on the same tiers in every run."""
    monkeypatch.setattr(replan, "costs_of", lambda session: Costs(MACHINE, session.ways()))


def let_all_be_late(monkeypatch) -> None:
    """Plan as late whatever may be, also what is small and what does not pay."""
    monkeypatch.setattr(step_plan, "LATE_PAYS", 0.0)
    monkeypatch.setattr(late_step, "SMALL_BYTES", 0)


def streaming() -> dict[str, object]:
    """Fields with which states stream: the device has no room but for weights and values."""
    return {"device_memory": Bytes(WEIGHT_BYTES + held_bytes()), "throttle": THROTTLE}
