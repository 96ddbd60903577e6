"""A small MLP that trains under autocast, planned, over links on which all that moves shows."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import zcompile
from zcompile.frontend.offload import session_behind
from zcompile.ir.types import EntryKind
from zcompile.ir.units import Bytes, KiB
from zcompile.runtime.store.store import Entry

BF16, FP16 = torch.bfloat16, torch.float16
WIDTH, LAYERS, STEPS = 160, 4, 5
"""Each weight is larger than what rests on the device in any case."""
THROTTLE = {"h2d": "200MB/s", "d2h": "200MB/s"}
TIGHT = Bytes(660 * KiB)
"""Of the device: room for some of what moves, beside what graphs hold."""


def mlp() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        *(m for _ in range(LAYERS) for m in (nn.Linear(WIDTH, WIDTH, bias=False), nn.Tanh()))
    )


def batch(number: int) -> tuple[Tensor, Tensor]:
    made = torch.Generator().manual_seed(number)
    return torch.randn(32, WIDTH, generator=made), torch.randint(WIDTH, (32,), generator=made)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    trained = [p for p in model.parameters() if p.requires_grad]
    return torch.optim.AdamW(trained, lr=1e-2, fused=True)


def loss_of(call: Any, number: int, dtype: torch.dtype = BF16) -> Tensor:
    x, y = batch(number)
    x.requires_grad_()  # so that backward reads the first weight too
    with torch.autocast("cpu", dtype):
        return nn.functional.cross_entropy(call(x).float(), y)


class Run:
    """Trains a model by its compiled form, step by step."""

    def __init__(
        self,
        model: nn.Module,
        call: Any,
        make: Callable[[nn.Module], Any] = adamw,
        dtype: torch.dtype = BF16,
        micro: int = 1,
        clip: float | None = None,
        scaled: bool = False,
    ) -> None:
        self.model, self.call, self.dtype, self.micro, self.clip = model, call, dtype, micro, clip
        self.optimizer = make(model)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12, enabled=scaled)
        self.losses: list[float] = []

    def backward(self, number: int) -> None:
        for n in range(self.micro):
            loss = loss_of(self.call, 10 * number + n, self.dtype)
            self.losses.append(loss.item())
            self.scaler.scale(loss).backward()

    def step(self) -> None:
        if self.clip is not None:
            self.scaler.unscale_(self.optimizer)
            nn.utils.clip_grad_norm_(self.model.parameters(), self.clip)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()

    def steps(
        self, begin: int, end: int, between: Callable[["Run", int], None] | None = None
    ) -> "Run":
        for number in range(begin, end):
            self.backward(number)
            self.step()
            if between is not None:
                between(self, number)
        return self


def offloaded(model: nn.Module, **fields: Any) -> tuple[nn.Module, Any]:
    torch._dynamo.reset()
    known = {"device_memory": TIGHT, "host_memory": "64MiB", "throttle": THROTTLE}
    tiered = zcompile.offload(model, device="cpu", **{**known, **fields})
    return tiered, torch.compile(tiered, backend="zinf")


def let_all_move(model: nn.Module) -> None:
    """Let the plan of a model leave all of the arena to stream through, and no gradient stay."""
    controller = session_behind(model).controller
    controller._least_window, controller._may_stay = 1 << 30, False


def values(model: nn.Module) -> list[Tensor]:
    return [p.on_host() if hasattr(p, "on_host") else p.detach() for p in model.parameters()]


def copies(model: nn.Module) -> list[Entry]:
    return [e for e in session_behind(model).entries() if e.kind is EntryKind.COPY]


def crossed_by(model: nn.Module, act: Callable[[], object]) -> dict[str, float]:
    """Bytes per parameter of the model that cross each link while `act` runs."""
    session = session_behind(model)

    def passed() -> dict[str, int]:
        session.executor.wait_for_in_flight()
        session.drain()
        return {link: nbytes for link, (nbytes, _) in session.meter.traffic().items()}

    before = passed()
    act()
    count = sum(p.numel() for p in model.parameters())
    return {link: (n - before.get(link, 0)) / count for link, n in passed().items()}
