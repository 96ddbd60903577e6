"""A GPT, written plainly, learns from real text while all its states rest on disk.

    python examples/train_gpt.py            # the sources of Python's standard library
    python examples/train_gpt.py --data book.txt --steps 200 --disk /mnt/nvme
    python examples/train_gpt.py --check    # the same steps in eager: equal to the last bit?
    python examples/train_gpt.py --save kept --save-every 8     # and, once interrupted:
    python examples/train_gpt.py --resume kept --save kept
    torchrun --nproc-per-node 2 examples/train_gpt.py --check       # two ranks train one model

A byte is a token, so no tokenizer is needed. Only the lines that name zcompile, and the backend,
differ from an ordinary program.
"""

import argparse
import sys
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

import zcompile
from examples import options, report
from examples.loop import Task, train
from examples.text import VOCABULARY, InputInvalid


@dataclass(frozen=True)
class Shape:
    """Sizes of a GPT; by default 25.4 M parameters.

    context     most tokens of a sequence
    vocabulary  how many tokens there are
    """

    layers: int = 8
    width: int = 512
    heads: int = 8
    context: int = 128
    vocabulary: int = VOCABULARY


class Block(nn.Module):
    """Attention, then a perceptron, each on a normalized copy of the stream."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.heads = shape.heads
        self.attention_norm = nn.LayerNorm(shape.width)
        self.attention_in = nn.Linear(shape.width, 3 * shape.width)
        self.attention_out = nn.Linear(shape.width, shape.width)
        self.mlp_norm = nn.LayerNorm(shape.width)
        self.mlp_in = nn.Linear(shape.width, 4 * shape.width)
        self.mlp_out = nn.Linear(4 * shape.width, shape.width)

    def attend(self, x: Tensor) -> Tensor:
        """x  [batch, sequence, width]"""
        batch, sequence, width = x.shape
        split = (batch, sequence, self.heads, width // self.heads)
        query, key, value = (
            part.view(split).transpose(1, 2) for part in self.attention_in(x).chunk(3, dim=-1)
        )
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.attention_out(mixed.transpose(1, 2).reshape(batch, sequence, width))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attend(self.attention_norm(x))
        return x + self.mlp_out(functional.gelu(self.mlp_in(self.mlp_norm(x))))


class GPT(nn.Module):
    """Bytes in; the loss out if there are targets, else what may follow each byte."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.bytes = nn.Embedding(shape.vocabulary, shape.width)
        self.places = nn.Embedding(shape.context, shape.width)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = nn.LayerNorm(shape.width)
        self.head = nn.Linear(shape.width, shape.vocabulary, bias=False)
        for name, param in self.named_parameters():
            if param.dim() == 2:
                deep = name.endswith(("attention_out.weight", "mlp_out.weight"))
                nn.init.normal_(param, std=0.02 / (2 * shape.layers) ** 0.5 if deep else 0.02)

    def forward(self, ids: Tensor, targets: Tensor | None = None) -> Tensor:
        """ids, targets: int64 [batch, sequence]; logits: f32 [batch, sequence, vocabulary]"""
        places = torch.arange(ids.shape[1], device=ids.device)
        x = self.bytes(ids) + self.places(places)
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        if targets is None:
            return logits
        return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def model(shape: Shape | None = None) -> GPT:
    """A GPT with random values; `examples.train_gpt:model` names it for other programs."""
    return GPT(shape or Shape())


def gpt3() -> GPT:
    """The shape of GPT-3, 175 B parameters: for `zinf plan`, which makes it without memory."""
    return GPT(Shape(layers=96, width=12288, heads=96, context=2048, vocabulary=50257))


@torch.no_grad()
def continue_text(
    gpt: nn.Module, start: bytes, count: int, context: int, device: torch.device, choices: int = 20
) -> Iterator[bytes]:
    """`count` bytes after `start`, each drawn from the `choices` likeliest."""
    gpt.eval()
    generator = torch.Generator().manual_seed(0)
    ids = torch.tensor([list(start)], device=device)
    for _ in range(count):
        logits = gpt(ids[:, -context:])[0, -1].float().cpu()
        likely, which = logits.topk(choices)
        drawn = which[torch.multinomial(likely.softmax(-1), 1, generator=generator)]
        ids = torch.cat((ids, drawn.view(1, 1).to(device)), dim=1)
        yield bytes(drawn.tolist())


def parser() -> argparse.ArgumentParser:
    made = options.parser(
        __doc__ or "",
        steps=24,
        batch=4,
        sequence=128,
        lr=3e-4,
        device_memory="24MiB",
        host_memory="16MiB",
    )
    made.add_argument("--layers", type=options.positive, default=8, help="default 8")
    made.add_argument("--width", type=options.positive, default=512, help="default 512")
    made.add_argument("--heads", type=options.positive, default=8, help="default 8")
    made.add_argument(
        "--sample",
        type=options.natural,
        default=48,
        metavar="BYTES",
        help="length of the text written at the end; default 48",
    )
    return made


def task_of(args: argparse.Namespace) -> Task:
    """raises  InputInvalid, if the options do not fit each other or the text"""
    if args.width % args.heads:
        raise InputInvalid(
            f"--width {args.width} cannot be split over --heads {args.heads}; "
            "give a width that is a multiple of the heads"
        )
    shape = Shape(args.layers, args.width, args.heads, args.seq)
    return options.task(args, lambda: model(shape), lambda gpt, b: gpt(b.ids, b.targets))


def write_sample(gpt: nn.Module, count: int, context: int, device: torch.device) -> None:
    start = b"def "
    drawn = continue_text(gpt, start, count, context, device)
    print("\nthe trained model writes:", (start + b"".join(drawn)).decode(errors="replace"))


def run(args: argparse.Namespace) -> int:
    """Train, tell, write a sample, compare; the exit code.

    raises  InputInvalid, and what `zcompile` raises
    """
    task = task_of(args)
    with options.config(args) as config:
        device = torch.device(str(config.device))
        torch.manual_seed(task.seed)
        with zcompile.init(config):
            gpt = task.build()
        compiled = torch.compile(gpt, backend="zinf")
        with options.ranks() as ranks:
            print(report.opening(gpt, config, ranks.size))
            tokens = task.tokens_per_step * ranks.size
            progress = report.Progress("step", task.steps, tokens, gpt)
            losses = train(task, compiled, device, progress, options.keeping(args), ranks)
            print(report.closing(losses, zcompile.stats(gpt), config))
            if args.sample:
                write_sample(compiled, args.sample, task.sequence, device)
            return options.check(task, gpt, losses, device, ranks) if args.check else 0


if __name__ == "__main__":
    sys.exit(options.main(parser(), run))
