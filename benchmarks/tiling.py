"""A transformer block, attention and perceptron, too wide for its device budget, trains in tiles
(Figure 6b of ZeRO-Infinity, scaled down), and what weights take of the device as tiles get smaller.

    python -m benchmarks.tiling --hidden 256 --times 1 2 4 8

The budget is what the block of hidden size `--hidden` takes untiled, activations and gradients
included; wider blocks train in it by tiles. Device memory is what was counted: in the arena, and
together with what the graph holds beside it. The first step plans and compiles. On a machine
without a GPU the device is emulated: seconds say how tiles compare with each other, not more.
"""

import argparse
import time
from dataclasses import dataclass

import torch

import zcompile
from examples.train_gpt import Block, Shape
from zcompile.frontend.offload import session_behind

HEADS, TOKENS = 4, 8
ROOM = 1 << 30
"""Bytes: for everything."""


@dataclass(frozen=True)
class Ran:
    """hidden     size of the block
    weight_bytes  of its largest weight
    arena_bytes   the most that weights took of the device at once
    device_bytes  the most that they took together with what the graph held
    first_s       of the first step
    step_s        the fastest of the others
    differs       the largest difference of a parameter from eager's, after them
    """

    hidden: int
    weight_bytes: int
    arena_bytes: int
    device_bytes: int
    first_s: float
    step_s: float
    differs: float


def train(hidden: int, budget: int, steps: int, tile_bytes: int | None = None) -> Ran:
    """raises  BudgetExceeded, if it does not fit"""
    torch.manual_seed(0)
    model, plain = (Block(Shape(1, hidden, HEADS)) for _ in range(2))
    plain.load_state_dict(model.state_dict())
    x = torch.randn(1, TOKENS, hidden)
    torch._dynamo.reset()
    zcompile.offload(model, device="cpu", device_memory=budget, residency=False)
    options = {"max_lead": 1} | ({} if tile_bytes is None else {"tile_bytes": tile_bytes})
    meter = session_behind(model).meter
    peak: dict[str, int] = {}
    calls = ((model, torch.compile(model, backend="zinf", options=options)), (plain, plain))
    seconds = []
    for each, call in calls:
        optimizer = torch.optim.SGD(each.parameters(), lr=1e-3)
        for _ in range(steps):
            begun = time.perf_counter()
            call(x).square().mean().backward()
            if each is model:
                seconds.append(time.perf_counter() - begun)
                peak = peak or meter.peak()  # before a step of the optimizer
            optimizer.step()
            optimizer.zero_grad()
    pairs = zip(model.parameters(), plain.parameters(), strict=True)
    differs = max(float((p.detach().cpu() - q.detach()).abs().max()) for p, q in pairs)
    largest = max(q.nbytes for q in plain.parameters())
    first, *others = seconds
    return Ran(
        hidden,
        largest,
        peak["device"],
        peak["together"],
        first,
        min(others, default=first),
        differs,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--times", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--tiles", type=int, nargs="+", default=[1, 2, 4, 8, 16])
    parser.add_argument("--steps", type=int, default=3)
    given = parser.parse_args()
    budget = train(given.hidden, ROOM, 1).device_bytes
    print(f"Budget {budget} bytes, which is what hidden {given.hidden} takes untiled.\n")
    print(
        "| hidden | largest weight, bytes | arena, bytes | arena and values, bytes "
        "| first step, s | step, s | differs from eager |"
    )
    print("| ---: | ---: | ---: | ---: | ---: | ---: | ---: |")
    for times in given.times:
        ran = train(times * given.hidden, budget, given.steps)
        print(
            f"| {ran.hidden} | {ran.weight_bytes} | {ran.arena_bytes} | {ran.device_bytes} "
            f"| {ran.first_s:.1f} | {ran.step_s:.4f} | {ran.differs:.1e} |"
        )
    hidden = max(given.times) * given.hidden
    whole = 4 * hidden * hidden * 4
    print(f"\nWorking memory at hidden {hidden}, with room for everything:\n")
    print("| tiles | arena, bytes | arena and values, bytes | step, s | differs from eager |")
    print("| ---: | ---: | ---: | ---: | ---: |")
    for tiles in given.tiles:
        limit = 4 * whole if tiles == 1 else 2 * whole // tiles
        ran = train(hidden, ROOM, given.steps, limit)
        print(
            f"| {tiles} | {ran.arena_bytes} | {ran.device_bytes} | {ran.step_s:.4f} "
            f"| {ran.differs:.1e} |"
        )


if __name__ == "__main__":
    main()
