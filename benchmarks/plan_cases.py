"""Plans of eight cases that no pass was tuned on: machines, budgets, models, optimizers.

    python -m benchmarks.plan_cases
    python -m benchmarks.plan_cases rtx3090 GQA

Nothing is run: the figures are `zcompile.plan`'s, and seconds of planning those of this process.
Words choose the cases that have one of them in their name. For a table before and after a change
run it at both commits.
"""

import argparse
import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel, LlamaConfig

import zcompile


class Loss(nn.Module):
    """The loss of a causal model, under bfloat16 autocast or in float32."""

    def __init__(self, inner: nn.Module, autocast: bool) -> None:
        super().__init__()
        self.inner, self.autocast = inner, autocast

    def forward(self, ids: Tensor) -> Tensor:
        under = torch.autocast("cpu", torch.bfloat16) if self.autocast else contextlib.nullcontext()
        with under:
            loss: Tensor = self.inner(input_ids=ids, labels=ids, use_cache=False).loss
        return loss


def llama(layers: int, width: int, inside: int, key_heads: int | None = None) -> nn.Module:
    config = LlamaConfig(
        vocab_size=32000,
        hidden_size=width,
        intermediate_size=inside,
        num_hidden_layers=layers,
        num_attention_heads=width // 128,
        num_key_value_heads=key_heads,
        max_position_embeddings=2048,
    )
    made: nn.Module = AutoModelForCausalLM.from_config(config)
    return made


def gpt2(layers: int, width: int) -> nn.Module:
    config = GPT2Config(
        n_embd=width,
        n_layer=layers,
        n_head=width // 64,
        use_cache=False,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
    )
    made: nn.Module = GPT2LMHeadModel(config)
    return made


@dataclass(frozen=True)
class Case:
    """What is planned, and for what.

    shape  samples of a micro-batch and tokens of each
    """

    make: Callable[[], nn.Module]
    shape: tuple[int, int]
    machine: str
    device_memory: str
    host_memory: str
    autocast: bool = True
    optimizer: str = "adamw"
    micro_batches: int = 1


CASES = {
    "Llama, 4 layers, batch 16": Case(
        lambda: llama(4, 4096, 11008), (16, 2048), "h200-141gb", "16GiB", "64GiB"
    ),
    "Llama, 4 layers, batch 4": Case(
        lambda: llama(4, 4096, 11008), (4, 2048), "rtx3090-24gb", "8GiB", "48GiB"
    ),
    "GQA, 6 layers, batch 16": Case(
        lambda: llama(6, 2048, 8192, 4), (16, 2048), "h100-pcie-80gb", "10GiB", "32GiB"
    ),
    "GPT-2, 6 layers of 1024, batch 16, f32": Case(
        lambda: gpt2(6, 1024), (16, 1024), "a100-80gb", "5GiB", "24GiB", autocast=False
    ),
    "GPT-2, 6 layers of 768, batch 8": Case(
        lambda: gpt2(6, 768), (8, 1024), "desktop-24gb", "2GiB", "16GiB"
    ),
    "Llama, 3 layers, batch 16, SGD": Case(
        lambda: llama(3, 4096, 11008), (16, 2048), "l40s-48gb", "12GiB", "64GiB", optimizer="sgd"
    ),
    "GPT-2, 6 layers of 1024, 2 x 8, f32": Case(
        lambda: gpt2(6, 1024),
        (8, 1024),
        "dgx-spark-128gb",
        "4GiB",
        "24GiB",
        autocast=False,
        micro_batches=2,
    ),
    "Llama, 3 layers, batch 8": Case(
        lambda: llama(3, 4096, 11008), (8, 2048), "rtx5090-32gb", "10GiB", "48GiB"
    ),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("words", nargs="*", help="of the names or machines of some cases; else all")
    words = parser.parse_args().words
    print("| case | machine | device, host | step s | compute s | planning, CPU s |")
    print("|---|---|---|---|---|---|")
    for name, case in CASES.items():
        if words and not any(word in f"{name} {case.machine}" for word in words):
            continue
        torch._dynamo.reset()
        began = time.process_time()
        with torch.device("meta"):
            model = Loss(case.make(), case.autocast)
            ids = torch.zeros(*case.shape, dtype=torch.int64)
        report = zcompile.plan(
            model,
            ids,
            machine=case.machine,
            device_memory=case.device_memory,
            host_memory=case.host_memory,
            optimizer=case.optimizer,
            micro_batches=case.micro_batches,
        )
        print(
            f"| {name} | {case.machine} | {case.device_memory}, {case.host_memory} | "
            f"{report.step_seconds:.4g} | {report.compute_seconds:.4g} | "
            f"{time.process_time() - began:.0f} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
