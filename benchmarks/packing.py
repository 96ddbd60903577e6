"""Addresses: how much more than what is alive they need, and how long it takes to find them.

    python -m benchmarks.packing --blocks 10000

Random blocks that live for a short, a middling and a long time, and the weights of a transformer
streaming through arenas of several sizes. Bytes are the same on every machine; seconds are not.
"""

import argparse
import time
from collections.abc import Iterator
from random import Random

from zcompile.ir.types import aligned
from zcompile.ir.units import KiB
from zcompile.memory.allocator import Block, fits, live_peak, pack, packed_bytes
from zcompile.passes.schedule_prefetch import Need, choose_starts

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


def instances(count: int) -> Iterator[tuple[str, list[Block]]]:
    for span in (40, 1000, count):
        yield f"random, {count:,} blocks, lives up to {span:,}", random_blocks(count, span)
    for layers in (12, 96):
        for room in (1.3, 2.0, 3.7):
            blocks = streamed_blocks(layers, room, 8)
            yield f"{layers} layers through {room} times the least", blocks


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
    args = parser.parse_args()
    print("| blocks | first fit / alive | pack / alive | pack s | fits, 1 % above pack, s |")
    print("|---|---|---|---|---|")
    for name, blocks in instances(args.blocks):
        alive = live_peak(blocks)
        since = time.perf_counter()
        needed = packed_bytes(blocks, pack(blocks))
        packed = time.perf_counter()
        fits(blocks, needed + needed // 100)
        done = time.perf_counter()
        before = first_fit_bytes(blocks) / alive
        print(
            f"| {name} | {before:.3f} | {needed / alive:.3f} | {packed - since:.2f} "
            f"| {done - packed:.2f} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
