"""A model larger than memory writes text: `generate` with its KV cache, the weights on disk.

    python examples/generate.py                          # a small Llama with random values
    python examples/generate.py --model DIRECTORY --prompt "Once upon a time" --tokens 100

The weights pass through the device for every token, fetched ahead of the layer that reads them.
The first tokens take long: one graph is compiled for the prompt, and two for what follows.
Random values write nonsense; a byte is a token, unless the directory holds a tokenizer.
"""

import argparse
import time
from pathlib import Path
from typing import Any

import torch

import zcompile
from examples import options
from examples.finetune_trainer import pretrained
from examples.text import InputInvalid


class Bytes:
    """The tokenizer of models without one: a byte is a token."""

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, ids: list[int]) -> str:
        return bytes(ids).decode(errors="replace")


def tokenizer_in(path: Path | None) -> Any:
    if path is None or not (path / "tokenizer.json").exists():
        return Bytes()
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(path, local_files_only=True)


def parser() -> argparse.ArgumentParser:
    made = options.parser_of_tiers(__doc__ or "", device_memory="8MiB", host_memory="1MiB")
    made.add_argument("--model", type=Path, metavar="DIR", help="as save_pretrained writes")
    made.add_argument("--prompt", default="def ", help="what the text begins with")
    made.add_argument("--tokens", type=options.positive, default=32, help="default 32")
    made.add_argument("--seed", type=options.natural, default=0)
    made.add_argument("--sample", action="store_true", help="draw tokens; else the likeliest")
    made.add_argument("--plain", action="store_true", help="the same in memory, to compare")
    return made


def run(args: argparse.Namespace) -> list[int]:
    """All tokens: those of the prompt, and those that were generated.

    raises  InputInvalid, and what `zcompile` raises
    """
    if not args.prompt:
        raise InputInvalid("--prompt is empty; give the text to go on from")
    with options.built(args, lambda: pretrained(args.model)) as (model, device):
        tokenizer = tokenizer_in(args.model)
        prompt = torch.tensor([tokenizer.encode(args.prompt)], device=device)
        if not args.plain:
            model.compile(backend="zinf")
            zcompile.stats(model, reset=True)  # building it has moved weights too
        torch.manual_seed(args.seed)
        begin = time.perf_counter()
        with torch.no_grad():
            ids = model.eval().generate(
                prompt,
                attention_mask=torch.ones_like(prompt),
                max_new_tokens=args.tokens,
                do_sample=args.sample,
                use_cache=True,
                pad_token_id=0,
            )
        seconds = time.perf_counter() - begin
        found: list[int] = ids[0].tolist()
        print(tokenizer.decode(found))
        print(f"{len(found) - prompt.shape[1]} tokens in {seconds:.1f} s")
        if not args.plain:
            weights = sum(param.nbytes for param in model.parameters())
            read = zcompile.stats(model)["bytes"]["disk_read"]
            print(f"{weights / 2**20:.1f} MiB of weights, read {read / weights:.1f} times")
        return found


if __name__ == "__main__":
    options.main(parser(), run)
