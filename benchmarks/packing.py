"""Addresses: how much more than what is alive they need, and how long it takes to find them.

    python -m benchmarks.packing --blocks 10000
    python -m benchmarks.packing --models

Random blocks that live for a short, a middling and a long time, and the weights of a transformer
streaming through arenas of several sizes; or models of `transformers`, as they are planned for
devices that are a part of their weights. "Orders" is `pack` without its search through time. Bytes
are the same on every machine; seconds are not.
"""

import argparse
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from random import Random
from unittest import mock

import torch
from torch import Tensor, nn

import zcompile
from zcompile.ir.types import aligned
from zcompile.ir.units import KiB
from zcompile.memory.allocator import Block, fits, live_peak, pack, packed_bytes
from zcompile.memory.window import Need
from zcompile.passes.schedule_prefetch import choose_starts

LAYER = (2, 24, 8, 2, 32, 32, 1)
"""Weights of a block of a transformer, relative to each other, in the order they are read."""


def random_blocks(count: int, span: int) -> list[Block]:
    """Lives of up to `span` times, sizes of up to 9 MB, most of them small."""
    source = Random(count + span)
    firsts = [source.randrange(count) for _ in range(count)]
    return [
        Block(f, f + source.randrange(span), 1 + int(source.random() ** 3 * 9e6)) for f in firsts
    ]


def streamed_blocks(layers: int, room: float, lead: int) -> list[Block]:
    """Weights of so many layers, fetched as early as `room` times the least arena permits."""
    sizes = [40, *LAYER * layers, 40]
    needs = [Need(f"p{i}", i // 2, i // 2, n * 8 * KiB) for i, n in enumerate(sizes)]
    starts = choose_starts(needs, int(64 * 8 * KiB * room), lead, "forward")
    return [Block(start, n.last, n.nbytes) for start, n in zip(starts, needs, strict=True)]


Instance = tuple[str, list[list[Block]]]
"""Name, and blocks of each phase: the phases share the arena one after the other."""


def instances(count: int) -> Iterator[Instance]:
    for span in (40, 1000, count):
        yield f"random, {count:,} blocks, lives up to {span:,}", [random_blocks(count, span)]
    for layers in (12, 96):
        for room in (1.3, 2.0, 3.7):
            blocks = streamed_blocks(layers, room, 8)
            yield f"{layers} layers through {room} times the least", [blocks]


def models(layers: int) -> Iterator[tuple[str, nn.Module, Mapping[str, Tensor]]]:
    """On `meta`, of the usual widths, with a batch."""
    import transformers as hf

    tokens = torch.zeros(1, 64, dtype=torch.int64)
    text = {"input_ids": tokens, "labels": tokens}
    llama = hf.LlamaConfig(
        hidden_size=2048,
        intermediate_size=5504,
        num_hidden_layers=layers,
        num_attention_heads=16,
        num_key_value_heads=4,
        use_cache=False,
    )
    made: dict[str, Callable[[], nn.Module]] = {
        "GPT-2": lambda: hf.GPT2LMHeadModel(hf.GPT2Config(n_layer=layers, use_cache=False)),
        "Llama": lambda: hf.LlamaForCausalLM(llama),
        "BERT": lambda: hf.BertForMaskedLM(hf.BertConfig(num_hidden_layers=layers)),
    }
    for name, make in made.items():
        with torch.device("meta"):
            model = make().train()
        yield name, model, text


def planned_blocks(model: nn.Module, batch: Mapping[str, Tensor], device: int) -> list[list[Block]]:
    """Forward's and backward's, of the last graph with weights, as it is for such a device."""
    met: list[list[Block]] = []

    def kept(blocks: Sequence[Block]) -> tuple[int, ...]:
        met.extend([list(blocks)] if blocks else [])
        return pack(blocks)

    with mock.patch("zcompile.passes.allocate_arena.pack", kept):
        zcompile.plan(
            model, batch, machine="desktop-24gb", device_memory=device, host_memory="64GiB"
        )
    return met[-2:]


def model_instances(layers: int) -> Iterator[Instance]:
    for name, model, batch in models(layers):
        weights = sum(p.numel() * p.element_size() for p in model.parameters())
        for part in (8, 5, 3, 2):
            phases = planned_blocks(model, batch, weights // part)
            yield f"{name}, {layers} layers, device 1/{part} of weights", phases


Pack = Callable[[list[Block]], Sequence[int]]


def arena_bytes(phases: Sequence[list[Block]], packing: Pack) -> int:
    return max(packed_bytes(blocks, packing(blocks)) for blocks in phases)


def pack_by_orders(blocks: list[Block]) -> tuple[int, ...]:
    with mock.patch("zcompile.memory.allocator._search"):
        return pack(blocks)


def first_fit_bytes(blocks: list[Block]) -> int:
    """What `pack` did before: largest first, each as low as it can be."""
    placed: list[tuple[int, int, Block]] = []  # address, end, block; by address
    for block in sorted(blocks, key=lambda b: (-aligned(b.nbytes), b.first)):
        address = 0
        for other, end, b in placed:
            if b.first <= block.last and block.first <= b.last:
                if other - address >= aligned(block.nbytes):
                    break
                address = max(address, end)
        placed.append((address, address + aligned(block.nbytes), block))
        placed.sort(key=lambda p: p[0])
    return max(end for _, end, _ in placed)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--blocks", type=int, default=10_000)
    parser.add_argument("--models", action="store_true", help="models of `transformers` instead")
    parser.add_argument("--layers", type=int, default=3, help="of those")
    args = parser.parse_args()
    found = model_instances(args.layers) if args.models else instances(args.blocks)
    print("| blocks | first fit / alive | orders / alive | pack / alive | pack s | fits s |")
    print("|---|---|---|---|---|---|")
    for name, phases in found:
        alive = max(live_peak(blocks) for blocks in phases)
        since = time.perf_counter()
        needed = arena_bytes(phases, pack)
        packed = time.perf_counter()
        for blocks in phases:
            fits(blocks, needed + needed // 100)
        done = time.perf_counter()
        before = max(first_fit_bytes(blocks) for blocks in phases) / alive
        orders = arena_bytes(phases, pack_by_orders) / alive
        print(
            f"| {name} | {before:.3f} | {orders:.3f} | {needed / alive:.3f} "
            f"| {packed - since:.2f} | {done - packed:.2f} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
