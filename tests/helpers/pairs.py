"""A plain model and its tiered twin, trained side by side; and what equal means."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import zcompile
from zcompile.frontend.offload import session_behind
from zcompile.ir.types import EntryKind

ON_DISK = {"device": "cpu", "device_memory": "1MiB", "host_memory": "256KiB"}
"""The host budget is the least there is, and all of it staging: every entry rests on disk."""

Run = Callable[[nn.Module, Any], Any]
"""Trains a model by its compiled form; returns what should be the same for plain and tiered."""


def on_disk(model: nn.Module, tmp_path: Path, **fields: Any) -> nn.Module:
    """`model`, offloaded to a directory of its own."""
    disk = tmp_path / f"disk{len(list(tmp_path.iterdir()))}"
    disk.mkdir()
    return zcompile.offload(model, **{**ON_DISK, "disk": disk, **fields})


def mlp() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))


class Holder(nn.Module):
    """One parameter, named w."""

    def __init__(self, value: Tensor) -> None:
        super().__init__()
        trains = value.is_floating_point() or value.is_complex()
        self.w = nn.Parameter(value, requires_grad=trains)


def parameter_pair(make: Callable[[], Tensor], tmp_path: Path, **fields: Any) -> tuple[Any, Any]:
    """A plain parameter and a tiered one of the same value."""
    torch.manual_seed(0)
    plain = Holder(make()).w
    torch.manual_seed(0)
    tiered = on_disk(Holder(make()), tmp_path, **fields).w
    return plain, tiered


def plain_of(tensor: Tensor) -> Tensor:
    """The value as an ordinary tensor."""
    tensor = tensor.detach()
    return tensor.on_host() if hasattr(tensor, "on_host") else tensor


def assert_equal(plain: Tensor, tiered: Tensor) -> None:
    """Size, dtype, strides and every bit; NaN equals NaN."""
    value = plain_of(tiered)
    assert (value.size(), value.dtype) == (plain.size(), plain.dtype)
    assert value.stride() == plain.stride()
    assert torch.equal(_bits(plain.detach()), _bits(value))


def _bits(tensor: Tensor) -> Tensor:
    return tensor.resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)


def assert_same(plain: nn.Module, tiered: nn.Module) -> None:
    """Parameters and buffers, by name; every parameter of `tiered` is still tiered."""
    ours, theirs = tiered.state_dict(), plain.state_dict()
    assert list(ours) == list(theirs)
    for name, value in theirs.items():
        assert_equal(value, ours[name])
    assert all(hasattr(param, "entry") for param in tiered.parameters())


def batches(steps: int, width: int = 16, classes: int = 4) -> Iterator[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        x = torch.randn(8, width, generator=generator)
        yield x, torch.randint(classes, (8,), generator=generator)


def train(
    call: Any,
    optimizer: Any,
    steps: int = 3,
    before: Callable[[], Any] | None = None,
    data: Any = None,
) -> list[float]:
    """A plain loop; `before` comes between backward and step. Returns the losses."""
    losses = []
    for x, y in data or batches(steps):
        loss = nn.functional.cross_entropy(call(x), y)
        loss.backward()
        if before is not None:
            before()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def same_training(
    run: Run, tmp_path: Path, mode: str, make: Callable[[], nn.Module] = mlp, **fields: Any
) -> tuple[nn.Module, nn.Module]:
    """Runs `run` on both twins and compares what it returns, and the models afterwards.

    mode  "eager": called plainly; "compiled": through backend="zinf", beside plain eager
    """
    torch._dynamo.reset()
    plain, tiered = make(), on_disk(make(), tmp_path, **fields)
    torch.manual_seed(7)
    expected = run(plain, plain)
    torch.manual_seed(7)
    call = torch.compile(tiered, backend="zinf") if mode == "compiled" else tiered
    assert run(tiered, call) == expected
    assert_same(plain, tiered)
    return plain, tiered


def entries(model: nn.Module, kind: EntryKind | None = None) -> list[str]:
    """Names of the entries that the model's store holds, of a kind or all."""
    store = session_behind(model)
    store.enter("a test")
    return sorted(e.name for e in store._entries.values() if kind in (None, e.kind))


def other(model: nn.Module) -> nn.Module:
    """The same kind of model, with other values."""
    torch.manual_seed(99)
    with torch.no_grad():
        for value in (*model.parameters(), *model.buffers()):
            value.copy_(torch.ones(()).expand(value.shape))
    return model


def assert_alike(a: nn.Module, b: nn.Module) -> None:
    ours, theirs = a.state_dict(), b.state_dict()
    assert list(ours) == list(theirs)
    for name in ours:
        plain = theirs[name].cpu() if hasattr(theirs[name], "entry") else theirs[name]
        assert_equal(plain, ours[name])


def backward(param, *steps, expect=1):
    """Runs `steps` within a backward pass that expects so many contributions to a gradient."""
    gradients = param.entry.store.gradients

    class Backward(torch.autograd.Function):
        @staticmethod
        def forward(ctx, p):
            return torch.zeros(())

        @staticmethod
        def backward(ctx, _):
            gradients.count_contributions()
            for step in steps:
                step()

    result = Backward.apply(param)
    gradients.expect([param.entry] * expect)
    gradients.expect_from(lambda: result.grad_fn)
    result.backward()
