"""How many ranks were started, and the refusal of more than one.

A model is trained by one process. Several that know of each other would each train a model of their
own, and nothing would tell: the losses fall in all of them.
"""

import os
from collections.abc import Iterator

import torch.distributed as dist

from zcompile.errors import Unsupported

LAUNCHERS = ("WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE")
"""What torchrun and those like it, Open MPI, and MPICH tell each process of how many they started.
SLURM is not among them: it says the same to a script that runs once."""


def refuse_ranks(mesh: bool | None) -> None:
    """raises  Unsupported, if there are several ranks and `mesh` does not say that each is alone"""
    if mesh is False:
        return
    told = next((text for text, size in _sizes() if size > 1), None)
    if told is not None:
        raise Unsupported(
            f"several ranks were started ({told}), and each would train a model of its own: they "
            "do not train one model together yet",
            "start one process; or say mesh=False to zcompile.offload or zcompile.init if a model "
            "per rank is what you want, each with a disk directory of its own",
        )


def _sizes() -> Iterator[tuple[str, int]]:
    if dist.is_available() and dist.is_initialized():
        size = dist.get_world_size()
        yield f"torch.distributed has a world of {size}", size
    for name in LAUNCHERS:
        text = os.environ.get(name, "")
        if text.isdecimal():
            yield f"{name}={text} in the environment", int(text)
