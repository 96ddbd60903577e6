"""Runs with so many tokens that gradients find room in what activations leave."""

import functools

import planned_runs
import torch
from planned_runs import VOCABULARY, adamw, gpt, values

import zcompile
from zcompile.frontend.offload import session_behind
from zcompile.ir.units import Bytes

STEPS = 7
THROTTLE = {"h2d": "200MB/s", "d2h": "200MB/s"}


def many(number):
    """So many tokens that activations take many times what gradients do."""
    generator = torch.Generator().manual_seed(number)
    tokens = torch.randint(0, VOCABULARY, (16, 33), device="cpu", generator=generator)
    return tokens.to(torch.get_default_device())


def train(forward, optimizer, begin, end, **how):
    planned_runs.train(None, forward, optimizer, begin, end, clip=False, ids=many, **how)


def begun(device, steps, make=adamw, **fields):
    torch._dynamo.reset()
    fields = {"host_memory": "64MiB", "throttle": THROTTLE, **fields}
    model = zcompile.offload(gpt(), device="cpu", device_memory=Bytes(device), **fields)
    compiled = torch.compile(model, backend="zinf")
    optimizer = make(model)
    train(compiled, optimizer, 0, steps)
    return model, compiled, optimizer


@functools.cache
def plainly_trained():
    model = gpt()
    train(model, adamw(model), 0, STEPS)
    return values(model)


@functools.cache
def held_bytes():
    model, *_ = begun(1 << 26, 1)
    return session_behind(model).split.held_bytes


def gradients(model):
    """Where they rest."""
    return [p.grad.entry.home for p in model.parameters()]


def held_gradients(model):
    """Bytes of those that stay."""
    session_behind(model).entries()  # buries the dead
    return session_behind(model).homes.held.usage()[1]
