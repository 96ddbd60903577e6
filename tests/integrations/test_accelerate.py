"""`accelerate` on offloaded models: it prepares, trains, saves and resumes as with plain ones."""

import logging
from collections.abc import Iterator
from itertools import product
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState, PartialState
from accelerate.utils import set_seed
from pairs import ON_DISK, assert_same, on_disk
from sampled import crossed, sampled_rows
from saved import content, pair
from small_models import GPT
from torch import nn
from torch.utils.data import DataLoader

import zcompile
from zcompile.errors import ModelWrapped, Unsupported


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    """Accelerate keeps what it found in its classes."""

    def forget() -> None:
        AcceleratorState._reset_state(True)
        PartialState._reset_state()
        GradientState._reset_state()

    forget()
    yield
    forget()


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.2), nn.ReLU(), nn.Linear(16, 4))


class Run:
    """A training as the documentation of accelerate shows it."""

    def __init__(self, model: nn.Module, precision: str = "no") -> None:
        AcceleratorState._reset_state(True)
        GradientState._reset_state()
        set_seed(3)
        self.accelerator = Accelerator(
            gradient_accumulation_steps=2, mixed_precision=precision, cpu=True
        )
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (step + 1))
        generator = torch.Generator().manual_seed(4)
        loader = DataLoader(torch.randn(16, 8, generator=generator), batch_size=4, shuffle=True)
        prepared = self.accelerator.prepare(model, optimizer, loader, scheduler)
        self.model, self.optimizer, self.loader, self.scheduler = prepared

    def epoch(self) -> list[float]:
        """Losses, norms of gradients and learning rates."""
        seen = []
        for x in self.loader:
            with self.accelerator.accumulate(self.model):
                loss = self.model(x).float().square().mean()
                self.accelerator.backward(loss)
                if self.accelerator.sync_gradients:
                    norm = self.accelerator.clip_grad_norm_(self.model.parameters(), 0.1)
                    seen.append(float(norm))
                self.optimizer.step()
                self.scheduler.step()
                self.optimizer.zero_grad()
            seen += [loss.item(), self.scheduler.get_last_lr()[0]]
        return seen


@pytest.mark.parametrize(
    ("precision", "compiled"),
    sampled_rows([("no", ""), ("no", "in place"), ("bf16", "wrapped")], ("bf16", "wrapped")),
)
def test_training_is_that_of_a_plain_model(precision, compiled, tmp_path):
    torch._dynamo.reset()
    plain, model = net(), on_disk(net(), tmp_path)
    call: Any = model
    if compiled == "in place":
        model.compile(backend="zinf")
    elif compiled:
        call = torch.compile(model, backend="zinf")
    expected = Run(plain, precision)
    losses = expected.epoch() + expected.epoch()
    run = Run(call, precision)
    assert run.epoch() + run.epoch() == losses
    assert_same(plain, model)
    assert zcompile.stats(model)["steps"] == 4
    unwrapped = run.accelerator.unwrap_model(run.model, keep_torch_compile=False)
    assert unwrapped is model


def test_prepare_moves_nothing(tmp_path):
    model = on_disk(net(), tmp_path)
    zcompile.stats(model, reset=True)
    prepared = Run(model).model
    assert prepared is model
    assert sum(zcompile.stats(model)["bytes"].values()) == 0
    assert all(p.entry.home == "disk" for p in model.parameters())


@pytest.mark.parametrize(
    ("ways", "safe"),
    sampled_rows(product(["oo", "op", "po"], [True, False]), ("oo", True), ("op", False)),
)
def test_a_state_that_was_saved_goes_on_bit_for_bit(ways, safe, tmp_path):
    """Offloaded (o) and plain (p) models take each other's; random numbers go on too."""
    saves, resumes = ways

    def make(kind: str) -> nn.Module:
        return on_disk(net(), tmp_path) if kind == "o" else net()

    first = Run(make(saves))
    first.epoch()
    first.accelerator.save_state(str(tmp_path / "state"), safe_serialization=safe)
    rest = first.epoch()
    second = Run(make(resumes))
    second.accelerator.load_state(str(tmp_path / "state"))
    assert second.epoch() == rest
    for a, b in zip(first.model.parameters(), second.model.parameters(), strict=True):
        assert torch.equal(a.detach().cpu(), b.detach().cpu())


@pytest.mark.parametrize(("build", "size"), crossed([GPT, net], ["10GB", "8KB"]))
def test_save_model_writes_the_files_of_the_plain_model(build, size, tmp_path, caplog):
    """Weights of the GPT are tied; those of the other are not, and nothing is removed."""
    plain, model = pair(build, tmp_path)
    accelerator = Accelerator(cpu=True)
    with caplog.at_level(logging.WARNING):
        accelerator.save_model(accelerator.prepare(model), tmp_path / "ours", max_shard_size=size)
    assert ("Removed shared tensor" in caplog.text) == (build is GPT)
    accelerator.save_model(plain, tmp_path / "plain", max_shard_size=size)
    assert content(tmp_path / "ours") == content(tmp_path / "plain")


def test_two_processes_are_refused(tmp_path, monkeypatch):
    from torch.testing._internal.distributed.fake_pg import FakeStore

    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(Unsupported, match=r"several ranks .* say mesh=False"):
        on_disk(net(), tmp_path)
    model = zcompile.offload(net(), **ON_DISK, disk=tmp_path / "own", mesh=False)
    launched = {"RANK": "0", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2", "MASTER_PORT": "29500"}
    for name, value in launched.items():
        monkeypatch.setenv(name, value)
    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        accelerator = Accelerator(cpu=True)
        assert accelerator.num_processes == 2
        with pytest.raises(ModelWrapped, match="wrapped in DistributedDataParallel; remove"):
            accelerator.prepare(model)
    finally:
        torch.distributed.destroy_process_group()
