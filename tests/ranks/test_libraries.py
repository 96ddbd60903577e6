"""Loops of accelerate, transformers and lightning over two ranks: what they train, and the files of
one process that they write, are those of the plain model that `DistributedDataParallel` trains."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import accelerate
import lightning
import pytest
import torch
import transformers
from accelerate.state import AcceleratorState, GradientState, PartialState
from accelerate.utils import ProjectConfiguration, set_seed
from e2e.models import CAUSAL
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.environments import TorchElasticEnvironment
from rank_models import digest
from rank_pool import RankPool
from saved import content
from torch import nn
from torch.utils.data import DataLoader
from trainers import data, log, trained

import zcompile
from zcompile.errors import Unsupported
from zcompile.integrations.accelerate import Accelerator
from zcompile.integrations.lightning import RanksStrategy
from zcompile.integrations.transformers import OverRanks, Trainer

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
    pytest.mark.filterwarnings("ignore:.*Checkpoint directory"),
]
BUDGETS = {"device": "cpu", "device_memory": "4MiB", "host_memory": "64MiB"}
"""Of each rank: shares of what is larger than 64 KiB, the rest on both."""


@pytest.fixture(scope="module")
def pair() -> Iterator[RankPool]:
    """A world of two, since libraries train over all ranks of the world."""
    made = RankPool(2)
    yield made
    made.close()


def word_model() -> nn.Module:
    """A Llama whose table and projections ranks hold shares of, and whose norms all have whole."""
    torch.manual_seed(0)
    wide = {"hidden_size": 64, "intermediate_size": 288, "num_hidden_layers": 1}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**{**CAUSAL, **wide}))


def launched(mesh: Any) -> None:
    """As torchrun starts a process; and accelerate forgets what it found in the case before."""
    rank, size = str(mesh.get_rank()), str(mesh.size())
    os.environ.update(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=size, LOCAL_WORLD_SIZE=size)
    for state in (AcceleratorState, PartialState, GradientState):
        state._shared_state.clear()


def model_of(kind: str, directory: str) -> Any:
    """A plain model, or one that ranks hold shares of; either may be compiled, which gives
    transformers another mask."""
    torch._dynamo.reset()
    model = word_model()
    if "tiered" in kind:
        model = zcompile.offload(model, disk=directory, **BUDGETS)
        assert any(p.entry.partition is not None for p in model.parameters())
    if "compiled" in kind:
        model.compile(backend="zinf" if "tiered" in kind else "eager")
    return model


def close(model: nn.Module, kind: str) -> None:
    if "tiered" in kind:
        zcompile.close(model)


# --- accelerate ---


class Loop:
    """A training as the documentation of accelerate shows it, over all ranks."""

    def __init__(self, model: nn.Module, micro_batches: int) -> None:
        set_seed(3)
        self.accelerator = Accelerator(gradient_accumulation_steps=micro_batches, cpu=True)
        assert self.accelerator.num_processes == 2
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (step + 1))
        rows = [row["input_ids"] for row in data()]
        prepared = self.accelerator.prepare(model, optimizer, DataLoader(rows, 1), scheduler)
        self.model, self.optimizer, self.loader, self.scheduler = prepared
        self.norms: list[float] = []

    def epoch(self) -> list[float]:
        """Losses of this rank."""
        losses = []
        for ids in self.loader:
            with self.accelerator.accumulate(self.model):
                loss = self.model(input_ids=ids, labels=ids).loss
                self.accelerator.backward(loss)
                if self.accelerator.sync_gradients:
                    norm = self.accelerator.clip_grad_norm_(self.model.parameters(), 1e3)
                    self.norms.append(norm.item())
                self.optimizer.step()
                self.scheduler.step()
                self.optimizer.zero_grad()
            losses.append(loss.item())
        return losses

    def weights(self) -> str:
        return digest(self.accelerator.unwrap_model(self.model).parameters())


def by_accelerate(mesh: Any, kind: str, directory: str, micro_batches: int = 1) -> Any:
    """Train, save, train on; then again from what was saved: the losses, a digest of the weights,
    and the norms of gradients."""
    launched(mesh)
    where = Path(directory, kind)
    first = Loop(model_of(kind, directory), micro_batches)
    begun = first.epoch()
    first.accelerator.save_state(str(where / "state"))
    first.accelerator.save_model(first.model, where / "model", max_shard_size="50KB")
    rest = first.epoch()
    after = first.weights()
    close(first.model, kind)
    launched(mesh)
    second = Loop(model_of(kind, directory), micro_batches)
    second.accelerator.load_state(str(where / "state"))
    assert second.epoch() == rest
    assert second.weights() == after
    close(second.model, kind)
    return begun + rest, after, first.norms


WAYS = ["", pytest.param("compiled ", marks=pytest.mark.slow)]


@pytest.mark.parametrize("way", WAYS)
def test_accelerate_trains_saves_and_resumes_as_a_wrapped_model(pair, way, tmp_path):
    expected = pair.run(by_accelerate, 2, f"{way}plain", str(tmp_path))
    found = pair.run(by_accelerate, 2, f"{way}tiered", str(tmp_path))
    assert [row[:2] for row in found] == [row[:2] for row in expected]
    # Ranks add up a norm in float64.
    assert [row[2] for row in found] == [pytest.approx(row[2], rel=1e-6) for row in expected]
    ours, plain = tmp_path / f"{way}tiered", tmp_path / f"{way}plain"
    for name in ("state/model.safetensors", "model"):
        assert content(ours / name) == content(plain / name)
    assert len(list((ours / "model").glob("*.safetensors"))) > 1


def test_accelerate_exchanges_micro_batches_once(pair, tmp_path):
    """As a wrapped model does, which adds up those of a rank first."""
    expected = pair.run(by_accelerate, 2, "plain", str(tmp_path), 2)
    found = pair.run(by_accelerate, 2, "tiered", str(tmp_path), 2)
    assert [row[:2] for row in found] == [row[:2] for row in expected]


# --- transformers ---


class Named(OverRanks, transformers.Trainer):
    """A trainer of somebody else's, made such a one."""


def by_trainer(mesh: Any, kind: str, directory: str, trainer: type[transformers.Trainer]) -> Any:
    """Train with a checkpoint after each step, go on from the first, and save."""
    launched(mesh)
    where = Path(directory, kind)
    options = {
        "max_steps": 2,
        "save_strategy": "steps",
        "save_steps": 1,
        "eval_strategy": "steps",
        "eval_steps": 1,
        "per_device_eval_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "ddp_backend": "gloo",
    }
    found = []
    for resume in (None, where / "checkpoint-1"):
        model = model_of(kind, directory)
        made = trained(model, where, resume, trainer, **options)
        assert made.args.world_size == 2
        found.append((log(made), digest(model.parameters())))
        made.save_model(str(where / "model"))
        close(model, kind)
    assert found[0][1] == found[1][1]
    return found


@pytest.mark.parametrize(
    ("way", "trainer"), [("", Trainer), pytest.param("compiled ", Named, marks=pytest.mark.slow)]
)
def test_a_trainer_trains_saves_and_resumes_as_a_wrapped_model(pair, way, trainer, tmp_path):
    stock = transformers.Trainer
    expected = pair.run(by_trainer, 2, f"{way}plain", str(tmp_path), stock)
    assert pair.run(by_trainer, 2, f"{way}tiered", str(tmp_path), trainer) == expected
    ours, plain = tmp_path / f"{way}tiered", tmp_path / f"{way}plain"
    assert content(ours / "model" / "model.safetensors") == content(
        plain / "model" / "model.safetensors"
    )
    rows = [torch.load(made / "checkpoint-2" / "optimizer.pt") for made in (ours, plain)]
    assert rows[0]["param_groups"] == rows[1]["param_groups"]
    states = [digest(v for s in row["state"].values() for v in s.values()) for row in rows]
    assert states[0] == states[1]


class OwnAccelerator(accelerate.Accelerator):
    """Of somebody else's, and not of ours."""


class OfAnother(transformers.Trainer):
    def create_accelerator_and_postprocess(self) -> None:
        super().create_accelerator_and_postprocess()
        self.accelerator = OwnAccelerator(cpu=True)


class OverAnother(OverRanks, OfAnother):
    """Makes an accelerator that would wrap the model."""


def refused_by_libraries(mesh: Any, directory: str) -> list[str]:
    """What each that cannot be done over ranks is told, before anything is written."""
    launched(mesh)
    model, told = model_of("tiered", directory), []

    def attempt(act: Callable[[], object]) -> None:
        with pytest.raises(Unsupported) as caught:
            act()
        told.append(str(caught.value))

    each = ProjectConfiguration(save_on_each_node=True)
    on_each = Accelerator(cpu=True, project_config=each)
    on_each.prepare(model)
    attempt(lambda: on_each.save_state(directory))
    attempt(lambda: on_each.save_model(model, directory))
    attempt(lambda: trained(model, Path(directory), None, OverAnother))
    options = {"save_strategy": "steps", "save_steps": 1, "save_on_each_node": True}
    attempt(lambda: trained(model, Path(directory), None, Trainer, **options))
    close(model, "tiered")
    attempt(lambda: RanksStrategy(find_unused_parameters=True))
    return told


def test_what_cannot_be_done_over_ranks_is_refused(pair, tmp_path):
    found = pair.run(refused_by_libraries, 2, str(tmp_path))
    assert found[0] == found[1]
    for told, sentence in zip(
        found[0],
        [
            "save_on_each_node=True is asked for, and rank 0 alone reads",
            "save_on_each_node=True is asked for, and rank 0 alone reads",
            "the trainer makes an accelerator of its own class OwnAccelerator, which would wrap",
            "save_on_each_node=True is asked for, and rank 0 alone reads",
            "RanksStrategy was given find_unused_parameters, which tells",
        ],
        strict=True,
    ):
        assert told.startswith(sentence)
    assert not list(tmp_path.rglob("*.safetensors"))


# --- lightning ---


class Lit(lightning.LightningModule):
    """kind, directory  of the model, which is built where ranks know of each other"""

    def __init__(self, kind: str, directory: str) -> None:
        super().__init__()
        self.of, self.losses = (kind, directory), list[float]()

    def configure_model(self) -> None:
        if not hasattr(self, "model"):
            self.model = model_of(*self.of)

    def training_step(self, ids: torch.Tensor) -> torch.Tensor:
        loss = self.model(input_ids=ids, labels=ids).loss
        self.losses.append(loss.item())
        return loss

    def validation_step(self, ids: torch.Tensor) -> None:
        self.log("val_loss", self.model(input_ids=ids, labels=ids).loss, sync_dist=True)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def by_lightning(mesh: Any, kind: str, directory: str) -> Any:
    """Train two epochs, keep a checkpoint of each, and go on from the first."""
    launched(mesh)
    rows, found = [row["input_ids"] for row in data()], []
    for resume in (None, "epoch=0.ckpt"):
        keeper = ModelCheckpoint(Path(directory, kind), "{epoch}", monitor="val_loss", save_top_k=2)
        lightning.seed_everything(3, verbose=False)
        trainer = lightning.Trainer(
            max_epochs=2,
            accelerator="cpu",
            devices=2,
            strategy=RanksStrategy() if "tiered" in kind else "ddp",
            plugins=[TorchElasticEnvironment()],
            num_sanity_val_steps=0,
            accumulate_grad_batches=2,
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            callbacks=[keeper],
        )
        lit = Lit(kind, directory)
        where = None if resume is None else Path(directory, kind, resume)
        trainer.fit(lit, DataLoader(rows, 2), DataLoader(rows, 2), ckpt_path=where)
        assert trainer.world_size == 2
        found.append((lit.losses, float(trainer.callback_metrics["val_loss"])))
        found.append(digest(lit.model.parameters()))
        close(lit.model, kind)
    assert found[1] == found[3]
    return found


@pytest.mark.parametrize("way", WAYS)
def test_lightning_trains_saves_and_resumes_as_a_wrapped_model(pair, way, tmp_path):
    expected = pair.run(by_lightning, 2, f"{way}plain", str(tmp_path))
    assert pair.run(by_lightning, 2, f"{way}tiered", str(tmp_path)) == expected
    assert Path(tmp_path, f"{way}tiered", "epoch=1.ckpt").is_dir()


def a_plain_model_by_lightning(mesh: Any, directory: str) -> None:
    launched(mesh)
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=RanksStrategy(),
        plugins=[TorchElasticEnvironment()],
        logger=False,
        enable_checkpointing=False,
    )
    with pytest.raises(Unsupported, match="ranks do not share: each would train its own; build"):
        trainer.fit(Lit("plain", directory), DataLoader([row["input_ids"] for row in data()]))


def test_lightning_is_told_of_a_model_that_ranks_do_not_share(pair, tmp_path):
    pair.run(a_plain_model_by_lightning, 2, str(tmp_path))
