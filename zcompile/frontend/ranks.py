"""Refuses to train with several ranks.

A model is trained by one process. Several that know of each other would each train a model of their
own, and nothing would tell: the losses fall in all of them.
"""

import os
from collections.abc import Iterator

import torch.distributed as dist

from zcompile.errors import Unsupported

LAUNCHERS = ("WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE")
"""Environment variables in which torchrun and the like, Open MPI, and MPICH give the number of
processes. SLURM's is not among them: it says the same to a script that runs once."""


def refuse_ranks(mesh: bool | None) -> None:
    """Refuse several ranks, unless `mesh` says that each trains alone.

    raises  Unsupported
    """
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
    """Known numbers of ranks, each with a text that says where it comes from."""
    if dist.is_available() and dist.is_initialized():
        size = dist.get_world_size()
        yield f"torch.distributed has a world of {size}", size
    for name in LAUNCHERS:
        text = os.environ.get(name, "")
        if text.isdecimal():
            yield f"{name}={text} in the environment", int(text)
