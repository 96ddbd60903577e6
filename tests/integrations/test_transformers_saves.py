"""`save_pretrained` and `Trainer` of transformers, unmodified, on models that rest on disk: files,
losses and parameters are those of the same plain model."""

import errno
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from e2e.models import CAUSAL, gpt2, llama
from host_copies import Copies
from pairs import assert_same, on_disk
from sampled import crossed, sampled
from saved import content, pair
from torch import nn
from trainers import log, trained

import zcompile

pytestmark = [
    pytest.mark.usefixtures("quiet_transformers"),
    pytest.mark.filterwarnings("ignore:Dynamo detected a call to a .functools.lru_cache."),
    pytest.mark.filterwarnings("ignore:`gradient_checkpointing` is deprecated"),
]

KB = 1000


def stepped(models: tuple[Any, Any]) -> tuple[Any, Any]:
    """Both, after a step of stock AdamW."""
    for model in models:
        torch.manual_seed(1)
        ids = torch.randint(3, 96, (2, 8))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
    return models


# --- save_pretrained ---


@pytest.mark.parametrize(("build", "max_shard_size"), crossed([gpt2, llama], ["5GB", "20KB"]))
def test_save_pretrained_writes_the_files_of_the_plain_model(build, max_shard_size, tmp_path):
    plain, tiered = stepped(pair(build, tmp_path))
    for model, name in ((plain, "plain"), (tiered, "tiered")):
        model.save_pretrained(tmp_path / name, max_shard_size=max_shard_size)
    found = content(tmp_path / "tiered")
    assert found == content(tmp_path / "plain")
    assert (len(found) > 5) is (max_shard_size == "20KB")
    loaded = type(plain).from_pretrained(tmp_path / "tiered")
    assert_same(loaded, tiered)
    assert len({id(p) for p in loaded.parameters()}) == len(list(tiered.parameters()))


def test_a_save_needs_the_host_memory_of_one_shard(monkeypatch, tmp_path):
    _, model = pair(llama, tmp_path)
    copies = Copies(monkeypatch)
    model.save_pretrained(tmp_path / "saved", max_shard_size="20KB")
    files = [p.stat().st_size for p in (tmp_path / "saved").glob("*.safetensors")]
    assert copies.read_bytes == sum(p.nbytes for p in model.parameters())
    assert copies.most_bytes <= min(max(files), 20 * KB) < copies.read_bytes / 4
    assert copies.left_bytes() == 0


@contextmanager
def full_disk(nbytes: int) -> Iterator[None]:
    """No file grows beyond so many bytes: what writes more gets the error of a disk that is full,
    but for its number."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_save_onto_a_full_disk_leaves_the_old_file_and_the_model(tmp_path):
    plain, tiered = pair(gpt2, tmp_path)
    tiered.save_pretrained(tmp_path / "saved")
    before = content(tmp_path / "saved")
    stepped((plain, tiered))
    with full_disk(20 * KB), pytest.raises(Exception, match="File too large"):
        tiered.save_pretrained(tmp_path / "saved")
    assert content(tmp_path / "saved") == before
    assert_same(plain, tiered)
    tiered.save_pretrained(tmp_path / "saved")
    assert_same(type(plain).from_pretrained(tmp_path / "saved"), tiered)


def test_a_save_whose_values_cannot_be_read_touches_no_file(monkeypatch, tmp_path):
    from zcompile.runtime.store.store import Store

    plain, tiered = pair(gpt2, tmp_path)
    tiered.save_pretrained(tmp_path / "saved")
    before = content(tmp_path / "saved")

    def fail(*_: object) -> None:
        raise zcompile.errors.IOFault(
            errno.EIO, "read", tmp_path, "weight", 0, 0, 4, "it cannot be read"
        )

    with monkeypatch.context() as broken:
        broken.setattr(Store, "read_all", fail)
        with pytest.raises(Exception, match="cannot be read"):
            tiered.save_pretrained(tmp_path / "saved")
    assert content(tmp_path / "saved") == before
    assert_same(plain, tiered)


# --- Trainer ---


SETTINGS: dict[str, dict[str, Any]] = {
    "accumulated, clipped, evaluated": {
        "gradient_accumulation_steps": 2,
        "max_grad_norm": 0.1,
        "eval_strategy": "steps",
        "eval_steps": 1,
    },
    "bf16, recomputed": {"bf16": True, "gradient_checkpointing": True},
    "unfused, scheduled": {"optim": "adamw_torch", "lr_scheduler_type": "cosine"},
}


@pytest.mark.parametrize("setting", sampled(SETTINGS, "accumulated, clipped, evaluated"))
def test_trainer_trains_it_as_it_trains_the_plain_model(setting, tmp_path):
    options = SETTINGS[setting]
    plain, tiered = pair(gpt2, tmp_path)
    expected, found = (trained(model, tmp_path / "out", **options) for model in (plain, tiered))
    assert log(found) == log(expected)
    assert len(log(found)) > 3
    assert_same(plain, tiered)
    assert zcompile.stats(tiered)["bytes"]["disk_write"] > 0


@pytest.mark.parametrize(
    ("options", "backend"),
    [
        pytest.param({"gradient_checkpointing": True}, None, marks=pytest.mark.slow),
        pytest.param({"bf16": True}, "aot_eager", marks=pytest.mark.slow),
    ],
    ids=["recomputed", "bf16"],
)
def test_a_model_compiled_in_place_is_trained_saved_and_evaluated(options, backend, tmp_path):
    """Under autocast, gradients differ from eager's by any backend: there it is held against that
    of torch which changes nothing."""
    torch._dynamo.reset()
    plain, tiered = pair(one_layer, tmp_path)
    if backend is not None:
        plain.compile(backend=backend)
    tiered.compile(backend="zinf")
    # Batches of an evaluation are as large as the others, so that no size is traced as a symbol.
    same_size = {"per_device_eval_batch_size": 2}
    options = {"max_steps": 2, "save_strategy": "steps", "save_steps": 2, **same_size, **options}
    expected = trained(plain, tmp_path / "plain", **options)
    found = trained(tiered, tmp_path / "tiered", **options)
    assert log(found) == log(expected)
    assert found.evaluate()["eval_loss"] == expected.evaluate()["eval_loss"]
    assert_same(plain, tiered)
    assert weights_and_states(tmp_path / "tiered") == weights_and_states(tmp_path / "plain")


def one_layer() -> nn.Module:
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(**{**CAUSAL, "num_hidden_layers": 1})
    )


def weights_and_states(output: Path) -> dict[str, Any]:
    """What the checkpoints of a run hold, but for times and the path of the run."""
    ours = ("safetensors", "optimizer.pt", "scheduler.pt", "rng_state.pth", "config.json")
    return {name: held for name, held in content(output).items() if name.endswith(ours)}


CHECKPOINTS = {
    "max_steps": 4,
    "save_strategy": "steps",
    "save_steps": 1,
    "save_total_limit": 2,
    "eval_strategy": "steps",
    "eval_steps": 1,
    "load_best_model_at_end": True,
}


@pytest.mark.slow  # a new model goes on from one, below
@pytest.mark.parametrize("build", sampled([gpt2, llama], gpt2))
def test_checkpoints_are_those_of_the_plain_model_and_the_best_is_loaded(build, tmp_path):
    plain, tiered = pair(build, tmp_path)
    expected = trained(plain, tmp_path / "plain", **CHECKPOINTS)
    found = trained(tiered, tmp_path / "tiered", **CHECKPOINTS)
    assert log(found) == log(expected)
    assert len(list((tmp_path / "tiered").iterdir())) == 2
    assert weights_and_states(tmp_path / "tiered") == weights_and_states(tmp_path / "plain")
    assert Path(found.state.best_model_checkpoint).name == (
        Path(expected.state.best_model_checkpoint).name
    )
    assert_same(plain, tiered)


@pytest.mark.parametrize("build", sampled([gpt2, llama], llama))
def test_a_new_model_goes_on_from_a_checkpoint_to_the_last_bit(build, tmp_path):
    """Whoever wrote the checkpoint, and whoever reads it: a plain model or one on disk."""
    straight, first = pair(build, tmp_path)
    trained(straight, tmp_path / "straight", max_steps=2)
    trained(first, tmp_path / "out", max_steps=2, save_strategy="steps", save_steps=1)
    assert_same(straight, first)
    torch.manual_seed(7)
    for other in (build(), on_disk(build(), tmp_path)):
        trained(other, tmp_path / "out", tmp_path / "out" / "checkpoint-1", max_steps=2)
        for name, value in straight.state_dict().items():
            assert torch.equal(other.state_dict()[name].cpu(), value), name


def test_a_checkpoint_that_fails_leaves_the_one_before_it(monkeypatch, tmp_path):
    straight, tiered = pair(gpt2, tmp_path)
    trained(straight, tmp_path / "straight", max_steps=2)
    options = {"max_steps": 2, "save_strategy": "steps", "save_steps": 1, "save_total_limit": 1}
    save, before = torch.save, dict[str, Any]()

    def no_space(obj: Any, file: Any, *args: Any, **kwargs: Any) -> None:
        if str(file).endswith("checkpoint-2/optimizer.pt"):
            before.update(content(tmp_path / "out" / "checkpoint-1"))
            raise OSError(errno.ENOSPC, "No space left on device", str(file))
        save(obj, file, *args, **kwargs)

    with monkeypatch.context() as full:
        full.setattr(torch, "save", no_space)
        with pytest.raises(OSError, match="No space left"):
            trained(tiered, tmp_path / "out", **options)
    assert content(tmp_path / "out" / "checkpoint-1") == before
    trained(tiered, tmp_path / "out", tmp_path / "out" / "checkpoint-1", **options)
    assert_same(straight, tiered)


@pytest.mark.slow  # a save of shards is above
def test_checkpoints_in_shards_need_the_host_memory_of_one_and_are_gone_on_from(
    monkeypatch, tmp_path
):
    """By the lines that docs/integrations/transformers.md tells: weights are saved by the shard,
    and states are mapped instead of read. That states are saved one by one takes no line."""
    straight, tiered = pair(llama, tmp_path)
    other = on_disk(llama(), tmp_path)
    trained(straight, tmp_path / "straight", max_steps=2)
    for model in (tiered, other):
        model.save_pretrained = partial(model.save_pretrained, max_shard_size="20KB")
    trainer = trained(tiered, tmp_path / "out", max_steps=2, save_strategy="steps", save_steps=1)
    copies = Copies(monkeypatch)
    trainer._save_checkpoint(tiered, trial=None)
    assert copies.read_bytes == 3 * sum(p.nbytes for p in tiered.parameters())
    assert copies.most_bytes < 20 * KB
    assert copies.left_bytes() == 0
    assert len(list((tmp_path / "out" / "checkpoint-1").glob("model-*.safetensors"))) > 3
    # What monkeypatch takes back of this module is gone for good.
    monkeypatch.setattr(torch, "load", partial(torch.load, mmap=True))
    trained(other, tmp_path / "out", tmp_path / "out" / "checkpoint-1", max_steps=2)
    assert_same(straight, other)


def test_the_backend_is_given_to_the_model_since_accelerate_knows_its_own_alone(tmp_path):
    """The sentence that docs/integrations/index.md tells."""
    with pytest.raises(ValueError, match="'ZINF' is not a valid DynamoBackend"):
        trained(
            pair(one_layer, tmp_path)[1],
            tmp_path / "out",
            torch_compile=True,
            torch_compile_backend="zinf",
        )


def test_a_compiled_wrapper_is_no_model_to_a_trainer(tmp_path):
    """The sentence that docs/integrations/index.md tells; it is the same of a plain model."""
    for model in pair(one_layer, tmp_path):
        with pytest.raises(ValueError, match="The batch received was empty"):
            trained(torch.compile(model, backend="zinf"), tmp_path / "out")
