"""The budgets are kept as the operating system sees it: resident memory, read from outside.

A child builds and trains a model whose parameters and AdamW states are several times its budgets.
Its parent takes the high-water mark of the child's resident memory between two moments.
"""

import contextlib
import gc
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import zcompile
from examples.train_gpt import Shape, model
from zcompile.ir.units import Bytes, KiB, MiB, show_size

ROOT = Path(__file__).parents[2]
STEPS = 2
TOKENS = 32
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
"""One thread: in each further one MKL keeps scratch memory for its products, 0.8 MiB here for the
second. It is torch's, belongs to no tier, and grows with the processors of the machine."""


@dataclass(frozen=True)
class Trial:
    """A model of some width, and what it may use of each tier.

    warm_up           another width: as deep, so that compiling takes as much memory, and every
                      tensor far smaller
    activation_bytes  what one step keeps for its backward
    """

    build: Callable[[int], nn.Module]
    loss: Callable[[nn.Module, int], Tensor]
    width: int
    warm_up: int
    activation_bytes: int
    tier_bytes: int


def perceptron(width: int) -> nn.Module:
    layers = [layer for _ in range(22) for layer in (nn.Linear(width, width), nn.GELU())]
    return nn.Sequential(*layers)


def gpt(width: int) -> nn.Module:
    return model(Shape(layers=8, width=width, heads=4, context=TOKENS))


def square(called: nn.Module, width: int) -> Tensor:
    return called(torch.ones(TOKENS, width)).square().mean()


def next_byte(called: nn.Module, width: int) -> Tensor:
    ids = torch.arange(TOKENS).view(1, TOKENS)
    return called(ids, ids)


TRIALS = {
    # A layer keeps what goes into it and into its gelu.
    "perceptron": Trial(perceptron, square, 1024, 32, 4 * TOKENS * 22 * 2 * 1024, 32 * MiB),
    # A block keeps 16 widths of a token: what goes into the norms (2) and comes out of them (2),
    # q, k, v (3) and what attention makes of them (1), and the inside of its perceptron before and
    # after gelu (8). The head keeps three times the logits.
    "gpt": Trial(gpt, next_byte, 512, 32, 4 * TOKENS * (8 * 16 * 512 + 3 * 256), 32 * MiB),
}


def train(trial: Trial, width: int, disk: str) -> None:
    """Stock AdamW on a model that never exists whole."""
    torch.manual_seed(0)
    with zcompile.init(
        device="cpu",
        device_memory=Bytes(trial.tier_bytes),
        host_memory=Bytes(trial.tier_bytes),
        disk=disk,
    ):
        built = trial.build(width)
    compiled = torch.compile(built, backend="zinf")
    optimizer = torch.optim.AdamW(built.parameters(), lr=1e-4, fused=True)
    for _ in range(STEPS):
        trial.loss(compiled, width).backward()
        nn.utils.clip_grad_norm_(built.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()


def child(trial: Trial) -> None:
    """Waits for a line, trains, says so in a line; twice."""
    for width in (trial.warm_up, trial.width):
        input()
        with tempfile.TemporaryDirectory(prefix="zcompile-") as disk:
            train(trial, width, disk)
        torch.compiler.reset()
        gc.collect()
        sys.stdout.write(f"{width}\n")
        sys.stdout.flush()


@contextlib.contextmanager
def a_child(name: str) -> Iterator[tuple[int, Callable[[], str]]]:
    """A process, and what makes it train once more: its id, and a call that blocks until then."""
    command = [sys.executable, __file__, name]
    with subprocess.Popen(
        command, cwd=ROOT, env=ENVIRONMENT, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        into, out = process.stdin, process.stdout

        def train_next() -> str:
            into.write("\n")
            into.flush()
            return out.readline().strip()

        try:
            yield process.pid, train_next
        finally:
            process.kill()


def status_bytes(pid: int, field: str) -> int:
    """VmRSS, resident now, or VmHWM, its high-water mark."""
    lines = Path(f"/proc/{pid}/status").read_text(encoding="ascii").splitlines()
    (kib,) = (line.split()[1] for line in lines if line.startswith(f"{field}:"))
    return int(kib) * KiB


def state_bytes(trial: Trial) -> int:
    """Parameters and the two moments of AdamW."""
    with torch.device("meta"):
        built = trial.build(trial.width)
    return 3 * sum(param.numel() * param.element_size() for param in built.parameters())


@pytest.mark.parametrize("name", ["perceptron", pytest.param("gpt", marks=pytest.mark.slow)])
def test_resident_memory_stays_within_budgets_and_activations(name: str) -> None:
    trial = TRIALS[name]
    budgets = 2 * trial.tier_bytes
    assert state_bytes(trial) >= 4 * budgets
    with a_child(name) as (pid, train_next):
        assert train_next() == str(trial.warm_up)
        Path(f"/proc/{pid}/clear_refs").write_text("5", encoding="ascii")  # resets VmHWM
        before = status_bytes(pid, "VmRSS")
        assert train_next() == str(trial.width)
        grown = status_bytes(pid, "VmHWM") - before
    allowed = (budgets + trial.activation_bytes) * 5 // 4
    assert grown <= allowed, f"grew by {show_size(grown)}, {show_size(allowed)} are allowed"
    assert grown >= trial.tier_bytes // 4, "less than any training takes: nothing was measured"


if __name__ == "__main__":
    child(TRIALS[sys.argv[1]])
