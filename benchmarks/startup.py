"""What one waits for from the building of a model to the end of its third step, phase by phase.

    python -m benchmarks.startup
    python -m benchmarks.startup --device cuda --gigabytes 4 8 --layers 8 16 --rounds 1

A Llama is built by `zcompile.init`, compiled, and trained by a fused AdamW with few tokens, so that
what is left is not compute. Host memory holds all of it, the device half of its weights. Bytes of
weights grow with one count of layers, and layers with one number of bytes, so that it is seen with
which of the two a phase grows. Each case is a process of its own. A phase is told without what
others take within it: "forward 1" is without tracing, passes, proofs and host memory. Seconds are
on the clock, and "of CPU" what the process computed, all its threads together, which hangs less on
what else the machine does.
"""

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch

import zcompile
from benchmarks.gpu.llama import Llama, LlamaShape
from zcompile.frontend import backend, offload, replan, session_plan
from zcompile.ir.torch_compat import tell_of_compiling
from zcompile.runtime.eager import fillings
from zcompile.runtime.tiers.host import HostTier

GB = 10**9
STEPS = 3
"""The step is planned when the third begins."""
HEAD_SIZE = 64
Timed = tuple[float, float]
"""Seconds on the clock, and of CPU."""

INSIDE: list[tuple[str, Any, str]] = [
    ("to their tier", offload, "_take_in"),
    ("host memory", HostTier, "_make_blocks"),
    ("passes", backend._Graph, "_passes"),
    ("schedule", backend._Graph, "_scheduled"),
    ("prove schedules", backend, "verify_schedule"),
    ("measure the machine", backend, "machine_for"),
    ("measure the machine", session_plan, "machine_for"),
    ("make states", fillings, "new_like"),
    ("plan the step", replan.StepController, "planned"),
    ("move what is planned", replan.StepController, "apply"),
]
"""Phases that lie within others, and the functions that they are."""


class Phases:
    """Seconds of each phase, without those of phases within it."""

    def __init__(self) -> None:
        self.taken: dict[str, list[float]] = {}
        self._open: list[str] = []
        self._since = self._now()

    @staticmethod
    def _now() -> Timed:
        return time.perf_counter(), time.process_time()

    def _tick(self) -> None:
        """What has passed belongs to the innermost phase."""
        now = self._now()
        if self._open:
            row = self.taken.setdefault(self._open[-1], [0.0, 0.0])
            row[0] += now[0] - self._since[0]
            row[1] += now[1] - self._since[1]
        self._since = now

    def begin(self, name: str) -> None:
        self._tick()
        self._open.append(name)

    def end(self) -> None:
        self._tick()
        self._open.pop()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        self.begin(name)
        try:
            yield
        finally:
            self.end()

    def timed(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        """`call`, as a phase."""

        def within(*given: Any, **named: Any) -> Any:
            with self.phase(name):
                return call(*given, **named)

        return within


def shape_of(nbytes: float, layers: int) -> LlamaShape:
    """A Llama of so many layers and about so many bytes of weights, in float32."""
    width = HEAD_SIZE
    while True:
        shape = LlamaShape(layers, width, width * 43 // 16, width // HEAD_SIZE, 1024, 32)
        if 4 * layers * width * (4 * width + 3 * shape.hidden) >= nbytes:
            return shape
        width += HEAD_SIZE


def sketch_of(shape: LlamaShape) -> Llama:
    """The model, without memory."""
    with torch.device("meta"):
        return Llama(shape)


def started(args: argparse.Namespace, nbytes: float, layers: int) -> tuple[int, Phases]:
    """Bytes of weights of a model that is built and trained, and the phases of that."""
    phases, device = Phases(), torch.device(args.device)
    shape = shape_of(nbytes, layers)
    nbytes = sum(p.numel() * p.element_size() for p in sketch_of(shape).parameters())
    budgets = {"device_memory": int(nbytes / 2), "host_memory": int(args.host * nbytes)}
    torch.manual_seed(0)
    with ExitStack() as patched:
        for name, owner, function in INSIDE:
            wrapped = phases.timed(name, getattr(owner, function))
            patched.enter_context(mock.patch.object(owner, function, wrapped))
        with (
            phases.phase("build, with random values"),
            zcompile.init(device=args.device, **budgets),
            torch.device(device),
        ):
            model = Llama(shape)
        tell_of_compiling(lambda _: phases.begin("trace"), lambda _: phases.end())
        count = sum(p.numel() * p.element_size() for p in model.parameters())
        run = torch.compile(model, backend="zinf")
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
        ids = torch.randint(0, shape.vocabulary, (1, shape.context + 1), device=device)
        for number in range(1, STEPS + 1):
            with phases.phase(f"forward {number}"):
                loss = run(ids[:, :-1], ids[:, 1:])
                synchronize(device)
            with phases.phase(f"backward {number}"):
                loss.backward()
                synchronize(device)
            with phases.phase(f"update {number}"):
                optimizer.step()
                optimizer.zero_grad()
                synchronize(device)
    zcompile.close(model)
    return count, phases


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def alone(nbytes: float, layers: int) -> dict[str, Any]:
    """`started` in a process of its own."""
    command = [sys.executable, "-m", "benchmarks.startup", *sys.argv[1:]]
    command += ["--one", str(nbytes), str(layers)]
    made = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    found: dict[str, Any] = json.loads(made.stdout.splitlines()[-1])
    return found


def show(title: str, rows: dict[str, list[Timed]], heads: list[str], per: list[float]) -> None:
    """A table of phases by cases, and, of several, seconds of CPU that each takes per unit of
    `per`."""
    compares = len(set(per)) > 1
    heads = [*heads, "more"] if compares else heads
    print(f"\n{title}; s, of CPU\n\n| phase | {' | '.join(heads)} |")
    print("|---|" + "---|" * len(heads))
    total = [
        (sum(t[0] for t in cells), sum(t[1] for t in cells))
        for cells in zip(*rows.values(), strict=True)
    ]
    for name, cells in {**rows, "all": total}.items():
        texts = [f"{wall:.2f}, {busy:.2f}" for wall, busy in cells]
        if compares:
            texts.append(f"{(cells[-1][1] - cells[0][1]) / (per[-1] - per[0]):.3f}")
        print(f"| {name} | {' | '.join(texts)} |", flush=True)


def show_gigabytes(held: Iterable[float]) -> str:
    """The GB of weights of models: of the smallest and the largest, where these differ."""
    ordered = sorted(held)
    told = dict.fromkeys(f"{nbytes:.2f}" for nbytes in (ordered[0], ordered[-1]))
    return f"{' to '.join(told)} GB"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--gigabytes", type=float, nargs="+", default=[0.2, 0.5, 1.0])
    parser.add_argument("--layers", type=int, nargs="+", default=[4, 8, 16, 24])
    parser.add_argument("--host", type=float, default=6.0, help="of the bytes of weights")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--one", type=float, nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        count, phases = started(args, args.one[0], int(args.one[1]))
        print(json.dumps({"bytes": count, "phases": phases.taken}))
        return
    first, few = args.gigabytes[0], args.layers[0]
    by_bytes = [(size, few) for size in args.gigabytes]
    by_layers = [(first, layers) for layers in args.layers]
    found: dict[tuple[float, int], list[dict[str, Any]]] = {}
    for _ in range(args.rounds):
        for case in dict.fromkeys((*by_bytes, *by_layers)):
            found.setdefault(case, []).append(alone(case[0] * GB, case[1]))

    def median(case: tuple[float, int], phase: str) -> Timed:
        taken = [run["phases"].get(phase, (0.0, 0.0)) for run in found[case]]
        return statistics.median(t[0] for t in taken), statistics.median(t[1] for t in taken)

    names = list(dict.fromkeys(name for runs in found.values() for name in runs[0]["phases"]))
    held = {case: runs[0]["bytes"] / GB for case, runs in found.items()}
    print(f"{args.device}, {torch.get_num_threads()} threads, torch {torch.__version__}", end="")
    print(f"; medians of {args.rounds}")
    of_layers = show_gigabytes(held[case] for case in by_layers)
    for title, cases, per in (
        (f"{few} layers, more: of CPU per GB", by_bytes, [held[case] for case in by_bytes]),
        (f"{of_layers}, more: of CPU per layer", by_layers, [float(n) for _, n in by_layers]),
    ):
        rows = {name: [median(case, name) for case in cases] for name in names}
        heads = [f"{held[case]:.2f} GB, {case[1]} layers" for case in cases]
        show(title, rows, heads, per)


if __name__ == "__main__":
    main()
