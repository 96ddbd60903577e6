"""Training in a part of what eager takes: the same bits, and the device never holds more."""

import copy
from collections import Counter
from functools import partial

import pytest
import torch
import transformers as hf
from joint import refused_after_trials
from small_models import Mean
from torch import nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

import zcompile
from zcompile.cli import main
from zcompile.ir.serialize import open_run
from zcompile.ir.units import Bytes, KiB
from zcompile.machine.model import Compute, Link, Machine

STEPS = 3
LIKE_A_GPU = Machine(
    "test",
    {"device": 1 << 30, "host": 1 << 32},
    {"h2d": Link("h2d", 4e9, 1e-5), "d2h": Link("d2h", 4e9, 1e-5)},
    Compute({"float32": 1e11}, 2e10, 5e-6),
)
SIZE = {"hidden": 64, "layers": 6, "heads": 4, "tokens": 48, "batch": 4}


FEW = 2
"""Layers, where depth does not matter."""


def gpt(layers: int = SIZE["layers"]) -> nn.Module:
    return Mean(
        hf.GPT2Model(
            hf.GPT2Config(
                vocab_size=64,
                n_positions=SIZE["tokens"],
                n_embd=SIZE["hidden"],
                n_layer=layers,
                n_head=SIZE["heads"],
            )
        )
    )


def llama() -> nn.Module:
    return Mean(
        hf.LlamaModel(
            hf.LlamaConfig(
                vocab_size=64,
                hidden_size=SIZE["hidden"],
                intermediate_size=3 * SIZE["hidden"],
                num_hidden_layers=SIZE["layers"],
                num_attention_heads=SIZE["heads"],
                num_key_value_heads=SIZE["heads"],
                max_position_embeddings=64,
            )
        )
    )


class Checkpointed(nn.Module):
    """Blocks with dropout, each inside torch.utils.checkpoint, or not."""

    def __init__(self, width: int = 32, blocks: int = 4, asks: bool = True) -> None:
        super().__init__()
        self.asks = asks
        self.blocks = nn.ModuleList(
            nn.Sequential(
                nn.Linear(width, 4 * width), nn.GELU(), nn.Dropout(0.5), nn.Linear(4 * width, width)
            )
            for _ in range(blocks)
        )

    def forward(self, x):
        for block in self.blocks:
            x = x + (checkpoint(block, x, use_reentrant=False) if self.asks else block(x))
        return x.square().mean()


ASKED = {
    torch.ops.aten.gelu.default: "again",
    torch.ops.aten.tanh.default: "host",
    torch.ops.aten.addmm.default: "keep",
}
"""What becomes of the results of ops where a policy asks for it."""
POLICIES = {"again": "MUST_RECOMPUTE", "host": "MUST_CPU_OFFLOAD", "keep": "MUST_SAVE"}


def policy(context, op, *args, **kwargs):
    return getattr(CheckpointPolicy, POLICIES[ASKED.get(op, "again")])


class Choosing(nn.Module):
    """A block inside torch.utils.checkpoint with a policy for each op, or without."""

    def __init__(self, width: int = 32, asks: bool = True) -> None:
        super().__init__()
        self.asks = asks
        self.block = nn.Sequential(
            nn.Linear(width, 2 * width),
            nn.GELU(),
            nn.Linear(2 * width, 3 * width),
            nn.Tanh(),
            nn.Linear(3 * width, width),
            nn.GELU(),
        )

    def forward(self, x):
        if not self.asks:
            return self.block(x).square().mean()
        contexts = partial(create_selective_checkpoint_contexts, policy)
        made = checkpoint(self.block, x, use_reentrant=False, context_fn=contexts)
        return made.square().mean()


def trained(model: nn.Module, compiled, inputs) -> list[torch.Tensor]:
    """The loss of every step."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for step in range(STEPS):
        torch.manual_seed(step)
        loss = compiled(*inputs)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return losses


def inputs_of(name: str) -> tuple[torch.Tensor, ...]:
    torch.manual_seed(1)
    return (torch.randint(0, 64, (SIZE["batch"], SIZE["tokens"])),)


def eager_peak(model: nn.Module, inputs) -> int:
    """Bytes of eager training: parameters, gradients and two states of each, and activations."""
    held = []

    def pack(tensor):
        held.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model(*inputs)
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in held}
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}
    saved = sum(nbytes for at, nbytes in storages.items() if at not in own)
    return 4 * sum(p.nbytes for p in model.parameters()) + saved


@pytest.mark.slow
@pytest.mark.parametrize("part", [1, 4, 12])
@pytest.mark.parametrize("build", [gpt, llama])
def test_a_transformer_trains_in_a_part_of_what_eager_takes(build, part, tmp_path):
    torch.manual_seed(0)
    model = build()
    twin, inputs = copy.deepcopy(model), inputs_of(build.__name__)
    budget = eager_peak(twin, inputs) // part
    zcompile.offload(
        model,
        device="cpu",
        device_memory=Bytes(budget),
        host_memory="256MiB",
        machine=LIKE_A_GPU,
        dump=tmp_path,
    )
    torch._dynamo.reset()
    losses = trained(model, torch.compile(model, backend="zinf"), inputs)
    for mine, other in zip(losses, trained(twin, twin, inputs), strict=True):
        assert torch.equal(mine, other)
    for (name, mine), other in zip(model.named_parameters(), twin.parameters(), strict=True):
        assert torch.equal(mine.cpu(), other), name
    peak, planned = zcompile.stats(model)["peak"], zcompile.stats(model)["planned_peak"]
    assert peak["device"] < peak["together"] <= planned["together"] <= budget
    told = Counter(row.action for row in decided(tmp_path))
    if part == 1:
        assert set(told) == {"keep"}, "with room for everything nothing changes"
    if part >= 8:
        assert told["host"] + told["again"] > told["keep"]


def decided(dump):
    """What the first graph of a run says of each value that backward needs."""
    return open_run(dump, None).graphs[0].plan().activations


@pytest.mark.slow
@pytest.mark.parametrize("activations", ["recompute", "offload"])
def test_only_what_was_asked_for_is_done(activations, tmp_path):
    torch.manual_seed(0)
    model = gpt(FEW)
    twin, inputs = copy.deepcopy(model), inputs_of("gpt")
    zcompile.offload(
        model,
        device="cpu",
        device_memory=Bytes(eager_peak(twin, inputs) // 2),
        host_memory="256MiB",
        machine=LIKE_A_GPU,
        dump=tmp_path,
        activations="keep",
    )
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="zinf", options={"activations": activations})
    losses = trained(model, compiled, inputs)
    assert all(map(torch.equal, losses, trained(twin, twin, inputs)))
    told = {row.action for row in decided(tmp_path)}
    assert told <= {"recompute": {"keep", "again"}, "offload": {"keep", "host"}}[activations]


def told_of(model: nn.Module, twin: nn.Module, dump):
    """What is decided of each value, once both have trained to the same bits."""
    x = torch.randn(16, 32)
    zcompile.offload(
        model,
        device="cpu",
        device_memory="64MiB",
        host_memory="64MiB",
        machine=LIKE_A_GPU,
        dump=dump,
    )
    torch._dynamo.reset()
    losses = trained(model, torch.compile(model, backend="zinf"), (x,))
    assert all(map(torch.equal, losses, trained(twin, twin, (x,))))
    for mine, other in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(mine.cpu(), other)
    return decided(dump)


def test_a_checkpoint_is_made_again_with_the_same_dropout(tmp_path):
    torch.manual_seed(0)
    model = Checkpointed()
    told = told_of(model, copy.deepcopy(model), tmp_path)
    asked = [row for row in told if "checkpoint" in row.why]
    assert {row.action for row in asked} == {"again"}
    assert len(asked) >= 4, "the hidden values of each block"
    kept = [row for row in told if row.action == "keep"]
    assert any("mask" in row.name or row.nbytes < 16 * 128 * 4 for row in kept), "what is random"


def test_what_a_policy_asks_for_is_done(tmp_path):
    torch.manual_seed(0)
    model = Choosing()
    twin = copy.deepcopy(model)
    twin.asks = False
    rows = told_of(model, twin, tmp_path)
    told = {(row.name.split()[0].rstrip("_0123456789"), row.action) for row in rows}
    asked = {op.overloadpacket.__name__: action for op, action in ASKED.items()}
    assert {(name, action) for name, action in told if name in asked} == set(asked.items())


@pytest.mark.slow  # tests/passes/test_memory_curve.py asks for the same text
def test_what_was_decided_is_told(tmp_path, capsys):
    torch.manual_seed(0)
    model = gpt(FEW)
    inputs = inputs_of("gpt")
    budget = eager_peak(model, inputs) // 4
    zcompile.offload(
        model,
        device="cpu",
        device_memory=Bytes(budget),
        host_memory="256MiB",
        machine=LIKE_A_GPU,
        dump=tmp_path,
    )
    torch._dynamo.reset()
    torch.compile(model, backend="zinf")(*inputs).backward()
    assert main(["explain", str(tmp_path), "activations"]) == 0
    out = capsys.readouterr().out
    assert "moved to the host" in out or "made again in backward" in out
    gone = next(row for row in decided(tmp_path) if row.action != "keep")
    assert main(["explain", str(tmp_path), gone.name]) == 0
    assert gone.why in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize(("activations", "phase"), [("auto", "backward"), ("keep", "backward")])
def test_a_budget_that_cannot_work_says_which_would(activations, phase):
    def run(budget: int) -> int:
        torch._dynamo.reset()
        torch.manual_seed(0)
        model = gpt(FEW)
        zcompile.offload(
            model,
            device="cpu",
            device_memory=Bytes(budget),
            host_memory="256MiB",
            machine=LIKE_A_GPU,
            activations=activations,
        )
        torch.compile(model, backend="zinf")(*inputs_of("gpt")).backward()
        return zcompile.stats(model)["peak"]["together"]

    refused = refused_after_trials(run, 64 * KiB)
    assert "device_memory=" in str(refused)
    where = refused.where.removeprefix("without slices, ")
    assert where.startswith(f"{phase} pass of 'inner.h.")
    assert 64 * KiB < run(refused.needed_bytes) <= refused.needed_bytes
