"""Pretraining from a text file: a tokenizer of its own, a mapped file of tokens, a DataLoader.

    python examples/pretrain.py                      # the sources of Python's standard library
    python examples/pretrain.py --data book.txt --keep prepared --steps 500 --disk /mnt/nvme

A byte-level BPE tokenizer is trained on the text (`tokenizers`), the text is written as tokens of
two bytes each, and a GPT learns from windows of that file, in random order. What --keep holds is
taken from there. The file is mapped, so it may be larger than memory, and worker processes of a
`DataLoader` read it ahead. They are forked while weights are on their way, and touch none of them.
"""

import argparse
import tempfile
from collections.abc import Iterable, Iterator
from itertools import chain
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from examples import loop, options
from examples.text import InputInvalid, own_sources
from examples.train_gpt import GPT, Shape

TOKEN = np.dtype("<u2")
LINES = 1000
"""Lines that are tokenized at once."""


class Windows(Dataset[tuple[Tensor, Tensor]]):
    """Window i of a file of tokens, and the tokens that follow each of its: int64 [length] both."""

    def __init__(self, path: Path, length: int) -> None:
        self.path, self.length = path, length
        self.count = (path.stat().st_size // TOKEN.itemsize - 1) // length

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        start = index * self.length
        tokens = np.memmap(self.path, TOKEN, mode="r")[start : start + self.length + 1]
        window = torch.from_numpy(tokens.astype(np.int64))
        return window[:-1], window[1:]


def lines_of(files: Iterable[Path]) -> Iterator[str]:
    """raises  InputInvalid, if a file cannot be read"""
    try:
        for path in files:
            with path.open(encoding="utf-8", errors="replace") as text:
                yield from text
    except OSError as error:
        raise InputInvalid(
            f"cannot read {path}: {error.strerror}; give --data files that exist and may be read"
        ) from error


def prepare(files: list[Path], vocabulary: int, where: Path) -> tuple[Path, int]:
    """The file of tokens, and how many kinds of tokens there are; made where they are missing.

    raises  InputInvalid
    """
    try:
        from tokenizers import ByteLevelBPETokenizer, Tokenizer
    except ImportError as error:
        raise InputInvalid("this example needs tokenizers: pip install tokenizers") from error
    where.mkdir(parents=True, exist_ok=True)
    saved, tokens = where / "tokenizer.json", where / "tokens.bin"
    if not tokens.exists():
        made = ByteLevelBPETokenizer()
        made.train_from_iterator(lines_of(files), vocab_size=vocabulary, show_progress=False)
        made.save(str(saved))
        partial = tokens.with_suffix(".partial")
        with partial.open("wb") as out:
            lines = lines_of(files)
            while batch := [line for line, _ in zip(lines, range(LINES), strict=False)]:
                ids = chain.from_iterable(found.ids for found in made.encode_batch(batch))
                out.write(np.fromiter(ids, TOKEN).tobytes())
        partial.rename(tokens)
    return tokens, Tokenizer.from_file(str(saved)).get_vocab_size()


def parser() -> argparse.ArgumentParser:
    made = options.parser_of_tiers(__doc__ or "", device_memory="24MiB", host_memory="8MiB")
    options.plain_too(made, steps=20)
    made.add_argument("--data", type=Path, nargs="+", default=[], metavar="FILE", help="text")
    made.add_argument("--keep", type=Path, metavar="DIR", help="for tokenizer and tokens")
    made.add_argument("--vocabulary", type=options.positive, default=4096, help="default 4096")
    made.add_argument("--layers", type=options.positive, default=4, help="default 4")
    made.add_argument("--width", type=options.positive, default=256, help="default 256")
    made.add_argument("--batch", type=options.positive, default=4, help="sequences; default 4")
    made.add_argument("--seq", type=options.positive, default=128, help="tokens; default 128")
    made.add_argument("--workers", type=options.natural, default=2, help="processes; default 2")
    return made


def run(args: argparse.Namespace) -> list[float]:
    """The loss of each step.

    raises  InputInvalid, and what `zcompile` raises
    """
    if not 256 <= args.vocabulary <= 2**16:
        raise InputInvalid(
            f"--vocabulary {args.vocabulary} is not within 256 (the bytes) and 65536 (two bytes a "
            "token)"
        )
    with tempfile.TemporaryDirectory() as temporary:
        files = args.data or own_sources()
        tokens, kinds = prepare(files, args.vocabulary, args.keep or Path(temporary))
        windows = Windows(tokens, args.seq)
        if len(windows) < args.batch:
            raise InputInvalid(
                f"the text makes {len(windows)} windows of {args.seq} tokens and a batch needs "
                f"{args.batch}; give longer files, or a smaller --seq or --batch"
            )
        loader = DataLoader(
            windows,
            batch_size=args.batch,
            shuffle=True,
            drop_last=True,
            num_workers=args.workers,
            persistent_workers=args.workers > 0,
            generator=torch.Generator().manual_seed(args.seed),
        )
        shape = Shape(args.layers, args.width, max(1, args.width // 64), args.seq, kinds)
        with options.built(args, lambda: GPT(shape)) as (model, device):
            if not args.plain:
                model.compile(backend="zinf")

            def losses() -> Iterator[Tensor]:
                while True:
                    for ids, targets in loader:
                        yield model(ids.to(device), targets.to(device))

            return loop.learn(model, losses(), args.steps, lr=3e-4)


if __name__ == "__main__":
    options.main(parser(), run)
