"""What a training takes of a card, as torch's allocator has it: a process of its own, since what
others did in one stays reserved.

    python reserved_run.py NAME DISK      prints a JSON object: what `Taken` has
"""

import gc
import json
import sys
import time
from dataclasses import asdict, dataclass
from typing import Any

import torch
from small_models import GPT
from torch import Tensor, nn

import zcompile
from zcompile.frontend.backend import zinf
from zcompile.frontend.offload import session_behind
from zcompile.frontend.replan import REVIEW, WARM_UP
from zcompile.ir.units import MiB

DEVICE_BYTES = 384 * MiB
TOKENS, BATCH, WIDTH, VOCABULARY, LAYERS = 256, 8, 512, 2048, 6
"""Weights, gradients and states take 304 MiB, values that backward needs a good 700 MiB, and those
of a block a good 100 MiB: the least that such a budget has to hold at once."""
WARM = WARM_UP * REVIEW + 2
"""Steps until nothing of the next ones is new: a plan is made of WARM_UP steps, and reviewed in the
first step after WARM_UP * REVIEW, which may arrange the arena anew; one more walks as that says."""
STEPS = WARM + 5
"""No second review is among them."""

FIELDS: dict[str, dict[str, Any]] = {
    "streaming": {"residency": False},
    "planned": {},
    "disk": {"host_memory": "128MiB"},
    "recomputing": {"activations": "recompute"},
    "moving activations": {"activations": "offload"},
    "Inductor": {"regions": "inductor"},
}


@dataclass(frozen=True)
class Taken:
    """before    reserved before the model is there: torch's own, as workspaces of products
    reserved    at most, from then on
    asked       of CUDA for memory: how often, until the warm steps are over, and until the end
    freed       likewise, given back to CUDA
    allocated   of it at most, beyond what was allocated before; others are pieces that nobody has
    told        peaks of `stats`, of what is on the device
    held        set aside for values of graphs
    scratch     that steps may stream through there, at most, and in how many pieces
    seconds     of each step
    """

    before: int
    reserved: int
    asked: tuple[int, int]
    freed: tuple[int, int]
    allocated: int
    told: dict[str, int]
    held: int
    scratch: tuple[int, int]
    seconds: list[float]


class WithLoss(nn.Module):
    """A GPT that returns its loss: the logits are in no budget, where eager code makes it."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.gpt = GPT(layers, WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        logits = self.gpt(tokens[:, :-1])
        return nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def step(model: nn.Module, call: Any, optimizer: torch.optim.Optimizer, number: int) -> None:
    made = torch.Generator().manual_seed(number)
    tokens = torch.randint(0, VOCABULARY, (BATCH, TOKENS + 1), generator=made).cuda()
    call(tokens).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()


def _warm_up() -> None:
    """Have torch make its own workspaces, in the threads of forward and of backward."""
    model = WithLoss(1).cuda()
    step(model, model, torch.optim.AdamW(model.parameters(), fused=True), 0)


def _calls() -> tuple[int, int]:
    found = torch.cuda.memory_stats()
    return found["num_device_alloc"], found["num_device_free"]


def taken(fields: dict[str, Any], disk: str) -> Taken:
    _warm_up()
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before, allocated = torch.cuda.memory_reserved(), torch.cuda.memory_allocated()
    torch.manual_seed(0)
    model = WithLoss(LAYERS)
    known = {"device_memory": DEVICE_BYTES, "host_memory": "2GiB", "disk": disk}
    zcompile.offload(model, device="cuda", **{**known, **fields})
    call = torch.compile(model, backend=zinf)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    session, scratch = session_behind(model), (0, 0)
    seconds, calls = [], [(0, 0)] * 2
    for number in range(STEPS):
        if number == WARM:
            calls[0] = _calls()
        began = time.perf_counter()
        step(model, call, optimizer, number)
        pieces = [memory.numel() for _, memory in session.arena.scratch.pieces]
        scratch = max(scratch, (sum(pieces), len(pieces)))
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - began)
    calls[1] = _calls()
    (asked, freed), (asked_later, freed_later) = calls
    found = Taken(
        before,
        torch.cuda.max_memory_reserved(),
        (asked, asked_later),
        (freed, freed_later),
        torch.cuda.max_memory_allocated() - allocated,
        zcompile.stats(model)["peak"],
        session.split.held_bytes,
        scratch,
        seconds,
    )
    zcompile.close(model)
    return found


if __name__ == "__main__":
    sys.stdout.write(json.dumps(asdict(taken(FIELDS[sys.argv[1]], sys.argv[2]))) + "\n")
    sys.stdout.flush()
