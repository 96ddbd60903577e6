"""Region programs of small models, as the backend builds them, before anything is decided."""

import functools

import torch
from joint import schedules_of
from offloaded import SMALL
from small_models import small

import zcompile
from zcompile.ir.schedule import RegionProgram
from zcompile.memory.allocator import Block, pack, packed_bytes
from zcompile.passes.arrange import NONE, apply_placement


@functools.cache
def programs(model: str) -> tuple[RegionProgram, ...]:
    """Of the phases that fetch anything."""
    module, inputs = small(model)
    torch._dynamo.reset()
    zcompile.offload(module, **SMALL)
    with schedules_of() as made:
        out = torch.compile(module, backend="zinf")(*inputs)
        (out if isinstance(out, torch.Tensor) else out[0]).sum().backward()
    undecided = (apply_placement(s.program, NONE, NONE) for s in made if any(s.fetches()))
    return tuple(undecided)


def blocks(program: RegionProgram) -> list[Block]:
    """The memory of what it fetches, from the start of each fetch on."""
    return [Block(v.start, v.last, v.nbytes) for v in program.fetched]


def least_window(program: RegionProgram) -> int:
    """Bytes of the smallest arena, with every fetch right before its first reader."""
    latest = [Block(v.first, v.last, v.nbytes) for v in program.fetched]
    return packed_bytes(latest, pack(latest))
