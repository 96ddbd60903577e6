"""Offloaded models saved by the code of safetensors and huggingface_hub, unmodified: the files are
those of the same plain model."""

import pytest
import safetensors.torch
import torch
from e2e.models import gpt2, llama
from host_copies import Copies
from huggingface_hub import load_torch_model, save_torch_model, split_torch_state_dict_into_shards
from pairs import assert_same, on_disk
from sampled import crossed
from saved import content, pair
from torch import nn


class Parts(nn.Module):
    """A scalar, one without elements, one of two bytes each, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Parameter(torch.tensor(1.5))
        self.none = nn.Parameter(torch.zeros(0, 3))
        self.short = nn.Parameter(torch.randn(3, 5, dtype=torch.bfloat16))
        self.register_buffer("steps", torch.arange(3))


@pytest.mark.parametrize("build", [gpt2, llama, Parts])
def test_save_model_writes_what_it_writes_of_a_plain_model(build, tmp_path):
    models = pair(build, tmp_path)
    for model, name in zip(models, ("plain", "tiered"), strict=True):
        safetensors.torch.save_model(model, str(tmp_path / f"{name}.safetensors"))
    plain, tiered = (content(tmp_path / f"{name}.safetensors") for name in ("plain", "tiered"))
    assert list(plain.values()) == list(tiered.values())
    ((header, _),) = tiered.values()
    dropped = {"transformer.wte.weight"} if build is gpt2 else set()
    assert models[0].state_dict().keys() - header.keys() == dropped


@pytest.mark.parametrize("build", [gpt2, llama])
def test_load_model_fills_a_model_on_disk(build, tmp_path):
    plain, _ = pair(build, tmp_path)
    torch.manual_seed(1)
    other = on_disk(build(), tmp_path)
    safetensors.torch.save_model(plain, str(tmp_path / "saved.safetensors"))
    missing, unexpected = safetensors.torch.load_model(other, tmp_path / "saved.safetensors")
    assert not missing
    assert not unexpected
    assert_same(plain, other)


def test_a_state_dict_is_saved_as_a_file_and_as_bytes(tmp_path):
    plain, tiered = pair(llama, tmp_path)
    safetensors.torch.save_file(tiered.state_dict(), tmp_path / "saved.safetensors")
    found = safetensors.torch.load_file(tmp_path / "saved.safetensors")
    assert found.keys() == plain.state_dict().keys()
    for name, value in plain.state_dict().items():
        assert torch.equal(value, found[name])
    as_bytes = [safetensors.torch.save(model.state_dict()) for model in (plain, tiered)]
    assert as_bytes[0] == as_bytes[1]


def test_parameters_themselves_and_gradients_are_saved(tmp_path):
    plain, tiered = pair(lambda: nn.Linear(4, 3), tmp_path)
    found = []
    for model in (plain, tiered):
        model(torch.ones(2, 4)).square().sum().backward()
        values = dict(model.named_parameters())
        values |= {f"{name}.grad": param.grad for name, param in model.named_parameters()}
        found.append(safetensors.torch.save(values))
    assert found[0] == found[1]


@pytest.mark.parametrize(
    "values",
    [
        lambda model: model.state_dict(),  # tied
        lambda model: {"w": model.transformer.wte.weight.detach().t()},  # not contiguous
        lambda model: {
            "low": model.lm_head.weight.detach()[:50],
            "all": model.lm_head.weight.detach(),
        },
    ],
)
def test_what_safetensors_refuses_of_plain_tensors_it_refuses_of_tiered_ones(values, tmp_path):
    told = []
    for model in pair(gpt2, tmp_path):
        with pytest.raises((RuntimeError, ValueError)) as refused:
            safetensors.torch.save_file(values(model), tmp_path / "saved.safetensors")
        told.append((refused.type, sorted(str(refused.value))))  # names are told in any order
    assert told[0] == told[1]
    assert not (tmp_path / "saved.safetensors").exists()


def test_parts_that_do_not_overlap_are_saved_each(tmp_path):
    """As of a plain model: they lie in one storage, and nothing is dropped."""
    found = []
    for model in pair(gpt2, tmp_path):
        weight = model.lm_head.weight.detach()
        parts = {"low": weight[:40], "high": weight[40:], "row": weight[3]}
        with pytest.raises(RuntimeError, match="share memory"):
            safetensors.torch.save(parts)
        del parts["row"]
        found.append(safetensors.torch.save(parts))
    assert found[0] == found[1]


@pytest.mark.parametrize(
    ("build", "max_shard_size", "safe"), crossed([gpt2, llama], ["5GB", "20KB"], [True, False])
)
def test_huggingface_hub_saves_and_loads_it_in_shards(build, max_shard_size, safe, tmp_path):
    plain, tiered = pair(build, tmp_path)
    for model, name in ((plain, "plain"), (tiered, "tiered")):
        (tmp_path / name).mkdir()
        save_torch_model(
            model, tmp_path / name, max_shard_size=max_shard_size, safe_serialization=safe
        )
    if safe:
        assert content(tmp_path / "plain") == content(tmp_path / "tiered")
    else:  # the names of archives, which pickles bear, are those of their files
        ours, theirs = content(tmp_path / "tiered"), content(tmp_path / "plain")
        assert {k: len(v) for k, v in ours.items()} == {k: len(v) for k, v in theirs.items()}
    torch.manual_seed(1)
    other = on_disk(build(), tmp_path)
    load_torch_model(other, tmp_path / "tiered", safe=safe)
    assert_same(plain, other)


@pytest.mark.parametrize("values", [nn.Module.state_dict, lambda m: dict(m.named_parameters())])
def test_a_save_needs_the_host_memory_of_one_file_and_keeps_none(values, monkeypatch, tmp_path):
    _, tiered = pair(llama, tmp_path)
    copies = Copies(monkeypatch)
    held = values(tiered)
    for _ in range(2):
        safetensors.torch.save_file(held, tmp_path / "saved.safetensors")
        assert copies.left_bytes() == 0
    assert copies.read_bytes == 2 * copies.most_bytes
    (tmp_path / "shards").mkdir()
    whole, copies.most_bytes = copies.most_bytes, 0
    save_torch_model(tiered, tmp_path / "shards", max_shard_size="20KB")
    assert copies.most_bytes < 20_000 < whole / 4
    assert copies.left_bytes() == 0


def test_shards_are_split_by_the_sizes_of_tensors(tmp_path):
    _, tiered = pair(llama, tmp_path)
    split = split_torch_state_dict_into_shards(tiered.state_dict(), max_shard_size=20_000)
    assert split.metadata["total_size"] == sum(v.nbytes for v in tiered.state_dict().values())
    assert len(split.filename_to_tensors) > 3
