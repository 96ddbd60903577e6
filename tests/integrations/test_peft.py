"""`peft` on an offloaded base: adapters train, are saved, loaded and merged as on a plain model."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from pairs import on_disk, plain_of
from peft import (
    IA3Config,
    LoraConfig,
    OFTConfig,
    PeftConfig,
    PeftModel,
    get_peft_model,
)
from sampled import sampled_rows
from saved import content
from small_models import GPT
from torch import Tensor, nn

import zcompile
from zcompile.errors import ParameterChanged

LORA = LoraConfig(r=2, lora_alpha=4, lora_dropout=0.1, target_modules=["qkv", "up"])
KINDS: dict[str, PeftConfig] = {
    "lora": LORA,
    "dora": LoraConfig(r=2, use_dora=True, target_modules=["qkv"]),
    "pissa, which changes the base": LoraConfig(
        r=2, init_lora_weights="pissa", target_modules=["qkv"]
    ),
    "biases of the base": LoraConfig(r=2, bias="all", target_modules=["qkv"]),
    "a module of the base": LoraConfig(r=2, modules_to_save=["norm"], target_modules=["up"]),
    "a parameter": LoraConfig(r=2, target_modules=[], target_parameters=["qkv.weight"]),
    "ia3": IA3Config(target_modules=["qkv", "down"], feedforward_modules=["down"]),
}
IDS = torch.arange(16).view(2, 8)


def base() -> nn.Module:
    torch.manual_seed(0)
    return GPT(layers=1)


def adapted(model: nn.Module, config: PeftConfig) -> Any:
    torch.manual_seed(1)
    return get_peft_model(model, copy.deepcopy(config))  # they write the names into it


def train(model: nn.Module, call: Any, steps: int = 3) -> list[float]:
    torch.manual_seed(2)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-2)
    losses = []
    for _ in range(steps):
        loss = nn.functional.cross_entropy(call(IDS).flatten(0, 1), IDS.flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(trained, 0.5)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def kinds_of(model: nn.Module) -> set[tuple[bool, bool]]:
    """Of each parameter: whether it is of an adapter, and whether it is tiered."""
    return {("lora_" in name, hasattr(p, "entry")) for name, p in model.named_parameters()}


def same(plain: nn.Module, model: nn.Module) -> bool:
    """Every bit of every parameter, adapters included."""
    ours = dict(model.named_parameters())
    return all(torch.equal(p.detach(), plain_of(ours[n])) for n, p in plain.named_parameters())


def offloaded_before(tmp_path: Path) -> Any:
    return adapted(on_disk(base(), tmp_path), LORA)


def offloaded_after(tmp_path: Path) -> Any:
    return on_disk(adapted(base(), LORA), tmp_path)


def taken_in(tmp_path: Path) -> Any:
    return zcompile.offload(offloaded_before(tmp_path))


@pytest.mark.parametrize(
    ("make", "adapters_tiered"),
    sampled_rows(
        [(offloaded_before, False), (offloaded_after, True), (taken_in, True)],
        (offloaded_before, False),
        (offloaded_after, True),
    ),
)
def test_lora_trains_and_is_saved_as_on_a_plain_model(make, adapters_tiered, tmp_path):
    plain, model = adapted(base(), LORA), make(tmp_path)
    assert kinds_of(model) == {(False, True), (True, adapters_tiered)}
    assert train(model, model) == train(plain, plain)
    assert same(plain, model)
    for name, each in ("plain", plain), ("ours", model):
        each.save_pretrained(tmp_path / name)
    assert content(tmp_path / "ours") == content(tmp_path / "plain")


def test_lora_on_a_compiled_frozen_base_is_planned(tmp_path):
    torch._dynamo.reset()
    plain, model = adapted(base(), LORA), offloaded_before(tmp_path)
    assert train(model, torch.compile(model, backend="zinf")) == train(plain, plain)
    assert same(plain, model)
    stats = zcompile.stats(model)
    assert stats["steps"] == 3
    assert stats["predicted"] is not None


@pytest.mark.parametrize("kind", KINDS)
def test_an_adapter_is_loaded_on_an_offloaded_base_and_merged(kind, tmp_path):
    plain, model = adapted(base(), KINDS[kind]), adapted(on_disk(base(), tmp_path), KINDS[kind])
    assert train(model, model, 2) == train(plain, plain, 2)
    model.save_pretrained(tmp_path / "adapter")
    found = [
        PeftModel.from_pretrained(each, tmp_path / "adapter")
        for each in (base(), on_disk(base(), tmp_path))
    ]
    outputs: list[list[Tensor]] = []
    for each in (plain, model, *found):
        with torch.no_grad():
            made = [each.eval()(IDS)]
            with each.disable_adapter():
                made.append(each(IDS))
            outputs.append([*made, each.merge_and_unload()(IDS)])
    for ours, theirs in (outputs[1], outputs[0]), (outputs[3], outputs[2]):
        assert all(torch.equal(plain_of(a), b) for a, b in zip(ours, theirs, strict=True))
    merged = [each.merge_and_unload() for each in (plain, model)]
    assert same(*merged)
    assert kinds_of(merged[1]) == {(False, True)}


def test_a_weight_that_would_lie_otherwise_is_refused(tmp_path):
    """OFT unmerges by giving the base a transposed weight."""
    config = OFTConfig(r=0, oft_block_size=4, target_modules=["qkv"])
    model = adapted(on_disk(base(), tmp_path), config)
    model.merge_adapter()
    with pytest.raises(ParameterChanged, match=r"qkv.* strides .* change shape, dtype or strides"):
        model.unmerge_adapter()
