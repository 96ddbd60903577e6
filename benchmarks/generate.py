"""Tokens per second of `model.generate` with the weights on disk: zcompile beside accelerate.

    python -m benchmarks.generate --layers 8 --width 1024 --disk /mnt/nvme

A Llama in float32 with random values, one prompt, greedy, with the KV cache that `generate` makes.
Every round lets each variant write the same tokens, in turn, in one process; all must be those of
the plain model. `accelerate.disk_offload` maps its files, so a model that fits the page cache is
read from memory; "cold" drops its files from the page cache after each token, as they would be gone
if the model were larger than memory. Ours always reads past the page cache.
"""

import argparse
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import accelerate
import torch
import transformers
from torch import Tensor

import zcompile
from zcompile.ir.units import show_size


@dataclass
class Variant:
    """before  is called before each round"""

    name: str
    generate: Callable[[], Tensor]
    before: Callable[[], None] = lambda: None
    seconds: list[float] = field(default_factory=list)


def llama(args: argparse.Namespace) -> Any:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=args.width,
        intermediate_size=3 * args.width,
        num_hidden_layers=args.layers,
        num_attention_heads=args.width // 64,
        vocab_size=256,
    )
    return transformers.LlamaForCausalLM(config).eval()


def written(model: Any, tokens: int) -> Tensor:
    prompt = torch.arange(3, 11).view(1, 8)
    with torch.no_grad():
        found: Tensor = model.generate(
            prompt, max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False, pad_token_id=0
        )
    return found


def forget(directory: Path, *_: object) -> None:
    """Drops the files from the page cache."""
    for path in directory.glob("*.dat"):
        with path.open("rb") as file:
            os.fdatasync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def of_accelerate(args: argparse.Namespace, directory: Path, cold: bool) -> Variant:
    directory.mkdir()
    model = llama(args)
    accelerate.disk_offload(model, directory, execution_device=torch.device("cpu"))
    name = "accelerate.disk_offload"
    if not cold:
        return Variant(name, partial(written, model, args.tokens))
    model.register_forward_hook(lambda *_: forget(directory))
    return Variant(
        f"{name}, cold", partial(written, model, args.tokens), partial(forget, directory)
    )


def ours(args: argparse.Namespace, directory: Path, compiled: bool) -> tuple[Variant, Any]:
    directory.mkdir()
    model = zcompile.offload(
        llama(args),
        device="cpu",
        device_memory=args.device_memory,
        host_memory=args.host_memory,
        disk=directory,
    )
    if compiled:
        model.compile(backend="zinf")
    name = "zinf" if compiled else "zinf, not compiled"
    return Variant(name, partial(written, model, args.tokens)), model


def measure(variants: list[Variant], expected: Tensor, rounds: int) -> None:
    """The first round, in which graphs are compiled, does not count.

    raises  RuntimeError, if tokens differ
    """
    for index in range(rounds + 1):
        for one in variants:
            one.before()
            begin = time.perf_counter()
            found = one.generate()
            if index:
                one.seconds.append(time.perf_counter() - begin)
            else:
                print(f"{one.name}: first round {time.perf_counter() - begin:.1f} s", flush=True)
            if not torch.equal(found, expected):
                raise RuntimeError(f"{one.name} wrote other tokens than the plain model")


def table(variants: list[Variant], tokens: int) -> str:
    base = next(one for one in variants if one.name.endswith("cold"))
    rows = ["| variant | tokens/s | of accelerate's, cold |", "|---|---|---|"]
    for one in variants:
        pairs = zip(base.seconds, one.seconds, strict=True)
        ratio = statistics.median(a / b for a, b in pairs)
        rate = tokens / statistics.median(one.seconds)
        rows.append(f"| {one.name} | {rate:.2f} | {ratio:.2f} |")
    return "\n".join(rows)


def main() -> None:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    for name, default in (("layers", 8), ("width", 1024), ("tokens", 8), ("rounds", 7)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--device-memory", default="64MiB")
    parser.add_argument("--host-memory", default="32MiB")
    parser.add_argument("--disk", help="a directory on the disk to use")
    args = parser.parse_args()
    plain = llama(args)
    weights = sum(p.nbytes for p in plain.parameters())
    expected = written(plain, args.tokens)
    with tempfile.TemporaryDirectory(dir=args.disk) as temporary:
        where = Path(temporary)
        compiled, model = ours(args, where / "compiled", compiled=True)
        eager, other = ours(args, where / "eager", compiled=False)
        variants = [
            Variant("in memory", partial(written, plain, args.tokens)),
            of_accelerate(args, where / "cold", cold=True),
            of_accelerate(args, where / "cached", cold=False),
            eager,
            compiled,
        ]
        measure(variants, expected, args.rounds)
        read = zcompile.stats(model)["bytes"]["disk_read"]
        calls = args.tokens * (args.rounds + 1)
        print(
            f"\n{os.cpu_count()} cores ({platform.machine()}), torch {torch.__version__}, "
            f"{torch.get_num_threads()} threads, accelerate {accelerate.__version__}; weights "
            f"{show_size(weights)}, device {args.device_memory}, host {args.host_memory}; "
            f"{args.tokens} tokens, {args.rounds} rounds; zinf reads {show_size(read / calls)} "
            f"a token\n\n{table(variants, args.tokens)}"
        )
        zcompile.close(model)
        zcompile.close(other)


if __name__ == "__main__":
    main()
