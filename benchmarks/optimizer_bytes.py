"""Bytes that an optimizer's step moves for each parameter, with all entries on the host.

    python -m benchmarks.optimizer_bytes

A GPT of two layers and width 256 behind links that are throttled, so that nothing is computed where
it rests; nothing is planned. Bytes are counted over one `optimizer.step()`, the third, and do not
hang on how fast the machine is.
"""

from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn, optim

import zcompile
from examples.train_gpt import Shape
from examples.train_gpt import model as gpt

SHAPE = Shape(layers=2, width=256, heads=4, context=32, vocabulary=256)
WARM_UP = 2
THROTTLE = {"h2d": "8GB/s", "d2h": "8GB/s"}
Make = Callable[[Iterable[nn.Parameter]], optim.Optimizer]


def adamw(**how: bool) -> Make:
    return lambda params: optim.AdamW(params, **how)


def momentum(**how: bool) -> Make:
    return lambda params: optim.SGD(params, lr=0.1, momentum=0.9, **how)


OPTIMIZERS = {
    "AdamW, fused=True": adamw(fused=True),
    "AdamW, foreach=False": adamw(foreach=False),
    "AdamW, foreach=True": adamw(foreach=True),
    "SGD with momentum, fused=True": momentum(fused=True),
    "SGD with momentum, foreach=False": momentum(foreach=False),
    "SGD with momentum, foreach=True": momentum(foreach=True),
}


def moved(make: Make) -> tuple[float, float]:
    """Bytes a parameter to the device, and from it, in one step."""
    torch._dynamo.reset()
    model = zcompile.offload(
        gpt(SHAPE), device="cpu", device_memory="32MiB", residency=False, throttle=THROTTLE
    )
    run, optimizer = torch.compile(model, backend="zinf"), make(model.parameters())
    ids: Tensor = torch.randint(0, SHAPE.vocabulary, (2, 1, SHAPE.context))
    count = sum(p.numel() for p in model.parameters())
    for _ in range(WARM_UP + 1):
        run(ids[0], ids[1]).backward()
        before = zcompile.stats(model)["bytes"]
        optimizer.step()
        after = zcompile.stats(model)["bytes"]
        optimizer.zero_grad()
    zcompile.close(model)
    return (after["h2d"] - before["h2d"]) / count, (after["d2h"] - before["d2h"]) / count


def main() -> None:
    print("| optimizer | to the device | from it |\n|---|---|---|")
    for name, make in OPTIMIZERS.items():
        there, back = moved(make)
        print(f"| {name} | {there:.1f} | {back:.1f} |")


if __name__ == "__main__":
    main()
