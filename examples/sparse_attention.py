"""Block-sparse attention: a model of long sequences trains and infers by one of four layouts.

    python examples/sparse_attention.py --layout bigbird --tokens 1024
    python examples/sparse_attention.py --regions inductor      # skips what nobody reads

On CUDA both go by `flex_attention`; on the CPU, where that has no backward, training goes by the
dense reference, and what is inferred afterwards by `flex_attention` is compared with it.
"""

import argparse
import warnings

import torch
from torch import Tensor, nn

import zcompile
from examples.text import VOCABULARY, batches, read_text
from zcompile.sparse_attention import BigBird, Fixed, Longformer, Pattern, Variable, attend

LAYOUTS = {
    "fixed": Fixed(window=4, shared=1, causal=True),
    "variable": Variable(windows=(2, 4), shared=(0,), random=1, causal=True),
    "bigbird": BigBird(shared=1, window=3, random=1, causal=True),
    "longformer": Longformer(window=3, shared=(0,), causal=True),
}
HEADS = 4


class Block(nn.Module):
    """A transformer block whose attention reads what its pattern says."""

    def __init__(self, width: int, pattern: Pattern) -> None:
        super().__init__()
        self.pattern, self.by = pattern, "flex"
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        parts = self.qkv(self.norms[0](x)).chunk(3, -1)
        heads = (part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in parts)
        found = attend(*heads, self.pattern, by=self.by)
        x = x + self.out(found.transpose(1, 2).flatten(2))
        return x + self.mlp(self.norms[1](x))


class Model(nn.Module):
    """Bytes in, logits of the next byte out: [batch, tokens] -> [batch, tokens, 256]."""

    def __init__(self, width: int, layers: int, pattern: Pattern) -> None:
        super().__init__()
        self.embed, self.places = (nn.Embedding(n, width) for n in (VOCABULARY, pattern.tokens))
        self.blocks = nn.ModuleList(Block(width, pattern) for _ in range(layers))
        self.head = nn.Linear(width, VOCABULARY)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids) + self.places.weight
        for block in self.blocks:
            x = block(x)
        return self.head(x)

    def attends_by(self, by: str) -> None:
        """Compute attention by `flex_attention` ("flex") or by the reference ("dense")."""
        for block in self.blocks:
            block.by = by


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--layout", choices=LAYOUTS, default="bigbird")
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--block", type=int, default=64, help="tokens of a block")
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--regions", choices=("eager", "inductor"), default="eager")
    args = parser.parse_args()
    # In eager regions flex_attention computes all pairs under a mask, and warns of it.
    warnings.filterwarnings("ignore", message="flex_attention called without torch.compile")
    torch.manual_seed(0)
    pattern = Pattern(LAYOUTS[args.layout], HEADS, args.tokens, args.block, args.device)
    print(f"{args.layout}: {pattern.share:.0%} of the pairs of blocks are read")
    model = Model(args.width, args.layers, pattern)
    memory = {"device_memory": "256MiB", "host_memory": "256MiB"}
    zcompile.offload(model, device=args.device, regions=args.regions, **memory)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, fused=True)
    compiled = torch.compile(model, backend="zinf")
    model.attends_by("dense" if args.device == "cpu" else "flex")
    text = read_text([], args.tokens + 1)
    source = batches(text, 2, args.tokens, 0, torch.device(args.device))
    for step in range(args.steps):
        batch = next(source)
        logits = compiled(batch.ids)
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), batch.targets.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(f"step {step}  loss {loss.item():.4f}")
    found = {}
    with torch.no_grad():
        for by in ("flex", "dense"):
            model.attends_by(by)
            found[by] = compiled(batch.ids)
    apart = (found["flex"] - found["dense"]).abs().max().item()
    print(f"flex_attention and the reference are {apart:.0e} apart")


if __name__ == "__main__":
    main()
