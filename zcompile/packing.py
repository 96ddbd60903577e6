"""Addresses from live ranges: which buffer lies where, so that nothing alive overlaps.

Offline first fit, largest first: each block goes to the lowest address that is free of every
block alive at the same time. Sizes are rounded up to `ALIGNMENT`; times are closed intervals of
ints. Pure: same blocks, same addresses.
"""

from bisect import insort
from collections.abc import Sequence
from dataclasses import dataclass

ALIGNMENT = 512
"""Bytes. What CUDA's own allocator aligns to; enough for every vector width."""


@dataclass(frozen=True)
class Block:
    """first, last  the closed interval of times the bytes are taken
    nbytes          size before rounding
    """

    first: int
    last: int
    nbytes: int


def aligned(nbytes: int) -> int:
    return -(-max(nbytes, 1) // ALIGNMENT) * ALIGNMENT


def live_peak(blocks: Sequence[Block]) -> int:
    """The largest sum of bytes alive at one time: no packing can need less."""
    changes: list[tuple[int, int, int]] = []
    for block in blocks:
        changes.append((block.first, 1, aligned(block.nbytes)))
        changes.append((block.last, 2, -aligned(block.nbytes)))
    now = peak = 0
    for _, _, change in sorted(changes):
        now += change
        peak = max(peak, now)
    return peak


def pack(blocks: Sequence[Block]) -> tuple[int, ...]:
    """The address of each block, in the order given."""
    order = sorted(
        range(len(blocks)), key=lambda i: (-aligned(blocks[i].nbytes), blocks[i].first, i)
    )
    addresses = [0] * len(blocks)
    placed: list[tuple[int, int]] = []  # (address, index), by address
    for index in order:
        block = blocks[index]
        size = aligned(block.nbytes)
        address = 0
        for other_address, other in placed:
            if blocks[other].first > block.last or blocks[other].last < block.first:
                continue
            if other_address - address >= size:
                break
            address = max(address, other_address + aligned(blocks[other].nbytes))
        addresses[index] = address
        insort(placed, (address, index))
    return tuple(addresses)


def packed_bytes(blocks: Sequence[Block], addresses: Sequence[int]) -> int:
    """End of the highest block."""
    return max((a + aligned(b.nbytes) for a, b in zip(addresses, blocks, strict=True)), default=0)
