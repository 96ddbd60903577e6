"""Bytes that training moves for each parameter by the dtype of autocast, with all entries on the
host.

    python -m benchmarks.narrow_traffic

A GPT of two layers and width 256 behind links that are throttled, so that nothing is computed where
it rests, and a plan that lets nothing rest on the device, as of a model much larger than that.
"Unplanned" is the second step, before copies are kept; "planned" a step under the plan. Bytes are
counted, and do not hang on how fast the machine is: copies are kept whether they pay here or not,
and no call starts fetches of the next. No update is late, since a late one moves its bytes in the
forward.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor, nn

import zcompile
from examples.train_gpt import Shape
from examples.train_gpt import model as gpt
from zcompile.frontend.offload import session_behind
from zcompile.planner import step_plan

SHAPE = Shape(layers=2, width=256, heads=4, context=32, vocabulary=256)
THROTTLE = {"h2d": "8GB/s", "d2h": "8GB/s"}
UNPLANNED, PLANNED = 1, 5
"""Steps, from 0 on, that are counted."""
LINKS = ("h2d", "d2h")

Cast = Callable[[], AbstractContextManager[object]]
LOOPS: dict[str, tuple[Cast, torch.dtype]] = {
    "float32": (nullcontext, torch.float32),
    "bfloat16 autocast": (lambda: torch.autocast("cpu", torch.bfloat16), torch.float32),
    "float16 autocast": (lambda: torch.autocast("cpu", torch.float16), torch.float32),
    "a model of bfloat16": (nullcontext, torch.bfloat16),
}


def moved(cast: Cast, dtype: torch.dtype) -> dict[int, tuple[float, ...]]:
    """Bytes a parameter of some steps: to the device and from it in forward and backward, then in
    the step of the optimizer."""
    torch._dynamo.reset()
    model: nn.Module = gpt(SHAPE).to(dtype)
    count = sum(p.numel() for p in model.parameters())
    model = zcompile.offload(model, device="cpu", device_memory="10MiB", throttle=THROTTLE)
    run, session = torch.compile(model, backend="zinf"), session_behind(model)
    session.controller._least_window, session.controller._may_stay = 1 << 40, False
    session.executor.foresight.passed = lambda index: None
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    ids: Tensor = torch.randint(0, SHAPE.vocabulary, (2, 1, SHAPE.context))

    def passed() -> list[int]:
        session.executor.wait_for_in_flight()
        return [zcompile.stats(model)["bytes"][link] for link in LINKS]

    found: dict[int, tuple[float, ...]] = {}
    for number in range(PLANNED + 1):
        before = passed()
        with cast():
            loss = run(ids[0], ids[1])
        loss.backward()
        between = passed()
        optimizer.step()
        after = passed()
        optimizer.zero_grad()
        sums = ((before, between), (between, after))
        found[number] = tuple((b[n] - a[n]) / count for a, b in sums for n in range(len(LINKS)))
    zcompile.close(model)
    return found


def main() -> None:
    step_plan.LATE_PAYS, step_plan.NARROW_PAYS = float("inf"), 0.0
    print("| loop | step | forward and backward: in | out | optimizer: in | out |")
    print("|---|---|---|---|---|---|")
    for name, (cast, dtype) in LOOPS.items():
        found = moved(cast, dtype)
        for number, said in ((UNPLANNED, "unplanned"), (PLANNED, "planned")):
            print(f"| {name} | {said} | {' | '.join(f'{n:.1f}' for n in found[number])} |")


if __name__ == "__main__":
    main()
