"""Meshes of two dimensions, and what one process makes of the batches of their ranks."""

from functools import cache
from typing import Any

from rank_models import batch, optimizer_named, state_of, words
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh


@cache
def mesh_of(replicas: int, shards: int) -> DeviceMesh:
    """A mesh of groups, each of which holds all of the model; a collective of all ranks, once."""
    return init_device_mesh("cpu", (replicas, shards), mesh_dim_names=("replicate", "shard"))


class SumsOfGroups:
    """The gradients that one process makes of the batches of all ranks in turn: those of a group
    are added up, each times 1/ranks, then what groups come to, micro-batch by micro-batch. Where
    there is one group, its ranks are as groups of one."""

    def __init__(self, model: nn.Module, replicas: int, shards: int) -> None:
        self._params, self._ranks = list(model.parameters()), replicas * shards
        self._in_group = shards if replicas > 1 else 1
        self._group: dict[Tensor, Tensor] = {}
        self._sums: dict[Tensor, Tensor] = {}
        self._taken = 0

    def take(self) -> None:
        """Add what the backward of the next rank has made, and clear it."""
        self._taken += 1
        for param in self._params:
            assert param.grad is not None
            _add(self._group, param, param.grad.cpu() * (1.0 / self._ranks))
            param.grad = None
        if self._taken % self._in_group == 0:
            for param, part in self._group.items():
                _add(self._sums, param, part)
            self._group = {}

    def give(self) -> None:
        """Make the sums the gradients of an optimizer's step."""
        for param, total in self._sums.items():
            param.grad = total
        self._sums = {}


def _add(sums: dict[Tensor, Tensor], param: Tensor, part: Tensor) -> None:
    sums[param] = sums[param] + part if param in sums else part


def number_of(rank: int, micro: int, ranks: int) -> int:
    """The batch of a step that a rank takes as its micro-batch: ranks take neighbours."""
    return micro * ranks + rank


def trained_in_groups(
    shape: tuple[int, int],
    micros: int = 1,
    steps: int = 2,
    optimizer: str = "adamw",
    **kinds: Any,
) -> dict[str, str]:
    """What one process makes of all batches, in the order of sums that groups have."""
    model, (replicas, shards) = words(**kinds), shape
    made = optimizer_named(optimizer)(model.parameters())
    sums = SumsOfGroups(model, replicas, shards)
    for step in range(steps):
        for number in range(micros * replicas * shards):
            (model(*batch(step, number)) / micros).backward()
            sums.take()
        sums.give()
        made.step()
        made.zero_grad()
    return state_of(model, made)
