"""Seconds of work on a device, and bytes per second of copies between it and the host."""

import statistics
import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from zcompile.ir.units import MiB

WINDOW_BYTES = 256 * MiB
"""Of either memory in which copies lie: more than any cache holds."""


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def seconds_of(
    call: Callable[[], object], device: torch.device, least: int = 3, span_s: float = 0.15
) -> float:
    """Median of repeated calls, the first of which does not count."""
    found: list[float] = []
    call()
    ends = time.perf_counter() + span_s
    while len(found) < least or time.perf_counter() < ends:
        synchronize(device)
        began = time.perf_counter()
        call()
        synchronize(device)
        found.append(time.perf_counter() - began)
    return statistics.median(found)


class Copies:
    """Copies between pinned host memory and a card, one direction or both at once."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._host = [torch.ones(WINDOW_BYTES, dtype=torch.uint8).pin_memory() for _ in range(2)]
        self._card = [torch.ones(WINDOW_BYTES, dtype=torch.uint8, device=device) for _ in range(2)]
        self._streams = [torch.cuda.Stream(device) for _ in range(2)]

    def rate(self, nbytes: int, directions: Sequence[str]) -> float:
        """Bytes per second each way, in copies of `nbytes` that follow each other.

        directions  "h2d", "d2h" or both
        """
        count = min(64, max(4, WINDOW_BYTES // nbytes))
        places = [n * nbytes % (WINDOW_BYTES - nbytes + 1) for n in range(count)]

        def copy() -> None:
            for place in places:
                for way in directions:
                    self._copy(way, place, nbytes)

        return count * nbytes / seconds_of(copy, self._device, span_s=0.1)

    def _copy(self, way: str, place: int, nbytes: int) -> None:
        number = 0 if way == "h2d" else 1

        def part(memory: Tensor) -> Tensor:
            return memory[place : place + nbytes]

        host, card = part(self._host[number]), part(self._card[number])
        target, source = (card, host) if way == "h2d" else (host, card)
        with torch.cuda.stream(self._streams[number]):
            target.copy_(source, non_blocking=True)


def link_rates(device: torch.device) -> dict[str, float]:
    """Bytes per second of "h2d" and "d2h", each while the other is at rest; none without a card."""
    if device.type != "cuda":
        return {}
    copies = Copies(device)
    return {way: copies.rate(64 * MiB, [way]) for way in ("h2d", "d2h")}
