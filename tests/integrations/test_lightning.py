"""`lightning` on offloaded models: `Trainer.fit`, its checkpoints and its resuming, unchanged."""

import logging
import os
from pathlib import Path
from typing import Any
from unittest.mock import patch

import lightning
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from pairs import ON_DISK, assert_same, mlp, on_disk
from sampled import sampled_rows
from torch import Tensor, nn
from torch.utils.data import DataLoader

import zcompile
from zcompile.errors import ModelWrapped, ParameterChanged, Unsupported
from zcompile.integrations.lightning import OffloadStrategy

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
    pytest.mark.filterwarnings("ignore:.*Checkpoint directory"),
    pytest.mark.filterwarnings("ignore:.*LeafSpec"),
]
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)


class Lit(lightning.LightningModule):
    def __init__(self, model: nn.Module | None) -> None:
        super().__init__()
        if model is not None:
            self.model = model
        self.seen: list[float] = []

    def loss(self, x: Tensor) -> Tensor:
        loss = self.model(x).float().square().mean()
        self.seen.append(loss.item())
        return loss

    def training_step(self, x: Tensor) -> Tensor:
        return self.loss(x)

    def validation_step(self, x: Tensor) -> None:
        self.log("val_loss", self.loss(x))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 1 / (epoch + 1))
        return {"optimizer": optimizer, "lr_scheduler": scheduler}


def fit(lit: Lit, directory: Path, resume: Path | None = None, **options: Any) -> Any:
    keeper = ModelCheckpoint(directory, "{epoch}", monitor="val_loss", save_top_k=-1)
    options = {"gradient_clip_val": 0.1, "accumulate_grad_batches": 2, **options}
    trainer = lightning.Trainer(
        max_epochs=2,
        accelerator="cpu",
        devices=1,
        num_sanity_val_steps=0,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[keeper],
        **options,
    )
    data = torch.randn(16, 16, generator=torch.Generator().manual_seed(4))
    trainer.fit(lit, DataLoader(data, 4), DataLoader(data, 8), ckpt_path=resume)
    return trainer


def same(a: Any, b: Any) -> bool:
    """Whether two checkpoints hold the same values, as plain tensors."""
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, Tensor):
        return type(a) is type(b) and torch.equal(a, b)
    return bool(a == b)


def checkpoint(directory: Path, epoch: int = 0) -> dict[str, Any]:
    held = torch.load(directory / f"epoch={epoch}.ckpt", weights_only=False)
    del held["callbacks"]  # the paths of the checkpoints
    return held


@pytest.mark.parametrize(
    ("precision", "compiled"),
    sampled_rows(
        [("32-true", ""), ("32-true", "wrapped"), ("bf16-mixed", "in place")],
        ("bf16-mixed", "in place"),
    ),
)
def test_fit_and_its_checkpoints_are_those_of_a_plain_model(precision, compiled, tmp_path):
    torch._dynamo.reset()
    plain, model = Lit(mlp()), Lit(on_disk(mlp(), tmp_path))
    inner = model.model
    if compiled == "in place":
        inner.compile(backend="zinf")
    elif compiled:
        plain.model = torch.compile(plain.model, backend="eager")
        model.model = torch.compile(inner, backend="zinf")
    for name, lit in ("plain", plain), ("ours", model):
        fit(lit, tmp_path / name, precision=precision)
    assert model.seen == plain.seen
    assert_same(plain, model)
    assert all(hasattr(p, "entry") for p in inner.parameters())
    assert zcompile.stats(inner)["steps"] == 4
    for epoch in (0, 1):
        assert same(*(checkpoint(tmp_path / name, epoch) for name in ("plain", "ours")))


@pytest.mark.parametrize(("saves", "resumes"), sampled_rows(["oo", "op", "po"], "oo"))
def test_a_run_is_resumed_bit_for_bit(saves, resumes, tmp_path):
    """Offloaded (o) and plain (p) models take each other's checkpoints."""

    def make(kind: str) -> Lit:
        return Lit(on_disk(mlp(), tmp_path) if kind == "o" else mlp())

    whole, rest = make(saves), make(resumes)
    fit(whole, tmp_path / "first")
    fit(rest, tmp_path / "second", tmp_path / "first/epoch=0.ckpt")
    assert rest.seen == whole.seen[len(whole.seen) // 2 :]
    assert same(*(checkpoint(tmp_path / name, 1) for name in ("first", "second")))


def test_the_end_of_a_fit_reads_no_weights(tmp_path):
    """Lightning moves the model to the CPU then."""
    lit = Lit(on_disk(mlp(), tmp_path))
    trainer = fit(lit, tmp_path / "run")
    zcompile.stats(lit, reset=True)
    trainer.strategy.teardown()
    assert sum(zcompile.stats(lit)["bytes"].values()) == 0


def test_a_model_is_built_where_it_rests(tmp_path):
    class Built(Lit):
        def configure_model(self) -> None:
            with zcompile.init(**ON_DISK, disk=tmp_path / "disk"):
                self.model = mlp()

    plain, model = Lit(mlp()), Built(None)
    for name, lit in ("plain", plain), ("ours", model):
        fit(lit, tmp_path / name)
    assert model.seen == plain.seen
    assert all(p.entry.home == "disk" for p in model.model.parameters())


def test_another_dtype_of_all_weights_is_refused(tmp_path):
    lit = Lit(on_disk(mlp(), tmp_path))
    with pytest.raises(ParameterChanged, match=r"bfloat16 .* dtype or strides before zcompile"):
        fit(lit, tmp_path / "run", precision="bf16-true")


def test_ddp_is_refused(tmp_path):
    lit = Lit(on_disk(mlp(), tmp_path))
    try:
        with (
            patch.dict(os.environ),  # where it says to child processes who they are
            pytest.raises(ModelWrapped, match="wrapped in DistributedDataParallel; remove"),
        ):
            fit(lit, tmp_path / "run", strategy="ddp")
    finally:
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()


class Random(Lit):
    """With dropout and shuffled batches: what only random states bring back."""

    def loss(self, x: Tensor) -> Tensor:
        return super().loss(
            nn.functional.dropout(x[torch.randperm(len(x))], training=self.training)
        )


def strategic() -> dict[str, Any]:
    return {"strategy": OffloadStrategy("cpu")}


def test_a_streamed_checkpoint_goes_on_with_random_numbers(tmp_path):
    torch.manual_seed(1)
    whole, rest = (Random(on_disk(mlp(), tmp_path)) for _ in range(2))
    fit(whole, tmp_path / "first", **strategic())
    assert (tmp_path / "first/epoch=0.ckpt/model.safetensors").is_file()
    trainer = fit(rest, tmp_path / "second", tmp_path / "first/epoch=0.ckpt", **strategic())
    assert rest.seen == whole.seen[len(whole.seen) // 2 :]
    assert trainer.current_epoch == 2
    states = [v for s in trainer.optimizers[0].state.values() for v in s.values() if v.dim()]
    assert states
    assert all(hasattr(value, "entry") for value in states)
    plain = Lit(mlp())
    zcompile.load(plain, tmp_path / "second/epoch=1.ckpt")
    assert_same(plain, rest)


@pytest.mark.slow  # it goes on from a directory, above
def test_a_streaming_trainer_resumes_from_a_file_and_validates_a_directory(tmp_path):
    whole, rest = (Lit(on_disk(mlp(), tmp_path)) for _ in range(2))
    fit(whole, tmp_path / "first")
    trainer = fit(rest, tmp_path / "second", tmp_path / "first/epoch=0.ckpt", **strategic())
    assert rest.seen == whole.seen[len(whole.seen) // 2 :]
    again = Lit(on_disk(mlp(), tmp_path))
    data = DataLoader(torch.ones(8, 16), 8)
    options = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    other = lightning.Trainer(**strategic(), **options)
    other.validate(again, data, ckpt_path=tmp_path / "second/epoch=1.ckpt", verbose=False)
    trainer.validate(rest, data, verbose=False)
    assert again.seen == rest.seen[-1:]


def test_the_end_of_a_streaming_fit_leaves_states_in_place(tmp_path, monkeypatch):
    """Elsewhere than on the emulated device Lightning would copy them to the host, whole."""

    def moved(*_: object) -> None:
        raise AssertionError("moved")

    monkeypatch.setattr("lightning.pytorch.core.LightningModule.cpu", moved)
    fit(Lit(on_disk(mlp(), tmp_path)), tmp_path / "run", **strategic())


class Filtered(Lit):
    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        del checkpoint["state_dict"]["model.0.bias"]


class Several(Lit):
    automatic_optimization = False

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(layer.parameters(), lr=0.1) for layer in self.model[::2]]

    def training_step(self, x: Tensor) -> None:
        for optimizer in self.optimizers():
            optimizer.step()


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        (Filtered, "on_save_checkpoint changed which weights .* leave the strategy out"),
        (Several, "holds one optimizer, and there are 2; use one with several groups"),
    ],
)
def test_what_a_streamed_checkpoint_cannot_hold_is_refused(kind, why, tmp_path):
    lit = kind(on_disk(mlp(), tmp_path))
    options = {"gradient_clip_val": None, "accumulate_grad_batches": 1} if kind is Several else {}
    with pytest.raises(Unsupported, match=why):
        fit(lit, tmp_path / "run", **strategic(), **options)
    assert not list((tmp_path / "run").glob("*.ckpt"))
