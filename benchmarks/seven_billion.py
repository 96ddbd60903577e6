"""The plan of a Llama of 7 B parameters in a part of one card, beside its compute alone.

    python -m benchmarks.seven_billion
    python -m benchmarks.seven_billion --layers 4

Under bfloat16 autocast, AdamW, 32 samples of 2048 tokens a step, on "h200-141gb" with 40 GiB of its
device and 256 GiB of host: nothing is run, the figures are `zcompile.plan`'s. "compute" is that of
the step as planned, with what backward computes again; "kept" that of the same step with room for
all activations, which is what a machine would take on which everything fits. The trace of 32 layers
takes minutes.
"""

import argparse

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, LlamaConfig

import zcompile


class Autocast(nn.Module):
    """The loss of a causal model under autocast."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        config = LlamaConfig(
            vocab_size=32000,
            hidden_size=4096,
            intermediate_size=11008,
            num_hidden_layers=layers,
            num_attention_heads=32,
            max_position_embeddings=2048,
        )
        self.inner = AutoModelForCausalLM.from_config(config)

    def forward(self, ids: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            loss: Tensor = self.inner(input_ids=ids, labels=ids, use_cache=False).loss
        return loss


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--device-memory", default="40GiB")
    parser.add_argument("--host-memory", default="256GiB")
    parser.add_argument("--machine", default="h200-141gb")
    args = parser.parse_args()
    with torch.device("meta"):
        model, ids = Autocast(args.layers), torch.zeros(args.batch, 2048, dtype=torch.int64)
    host = {"machine": args.machine, "host_memory": args.host_memory}
    kept = zcompile.plan(model, ids, **host)
    report = zcompile.plan(model, ids, device_memory=args.device_memory, **host)
    print(report)
    print("\n| layers | step s | compute s | kept s | compute / step | kept / step |")
    print("|---|---|---|---|---|---|")
    seconds, alone = report.step_seconds, kept.compute_seconds
    print(
        f"| {args.layers} | {seconds:.3g} | {report.compute_seconds:.3g} | {alone:.3g} | "
        f"{report.compute_seconds / seconds:.2f} | {alone / seconds:.2f} |"
    )


if __name__ == "__main__":
    main()
