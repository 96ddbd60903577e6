"""A small GPT with its loss, whose step is traced for a device that holds it all."""

import functools
from dataclasses import replace

import torch
from dry_runs import SMALL
from small_models import GPT
from torch import nn

from zcompile.config import Config
from zcompile.frontend.dry_run.plan import terms_of, trace
from zcompile.ir.step import StepTrace
from zcompile.ir.units import GiB, MiB

WIDTH = 160
"""Whose matrices are larger than what rests on the device before anything else."""


class Mean(nn.Module):
    """A GPT and its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.gpt = GPT(1, WIDTH, 512)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        logits = self.gpt(ids)
        return nn.functional.cross_entropy(logits.flatten(0, 1), ids.flatten())


def adamw(params):
    return torch.optim.AdamW(params, fused=True)


def adamw_by_foreach(params):
    return torch.optim.AdamW(params, foreach=True)


@functools.cache
def traced(make=adamw, micro_batches: int = 1) -> StepTrace:
    torch._dynamo.reset()
    machine = replace(SMALL, tiers={**SMALL.tiers, "device": 64 * MiB, "host": GiB})
    terms = replace(terms_of(Config(device="cpu"), machine), bounded=True)
    ids = torch.randint(0, 512, (4, 16))
    return trace(Mean(), (ids,), terms, make, micro_batches).step


def named(step: StepTrace, refs) -> set[str]:
    return {step.facts[ref].name for ref in refs}
