"""Stands in for the other ranks in a dry run: what crosses is over at once, and brings no bytes.

The step that is walked is that of rank 0, which never holds less than another; with
`partition="owner"` it was given the first tensor, and holds within one tensor as much. What its
collectives take is up to the simulator (`planner/paths.py`).
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from zcompile.frontend.dry_run.device import blank
from zcompile.ir.partition import Partition, SharedRange
from zcompile.ir.rank_mesh import RankMesh
from zcompile.runtime.device.base import Device
from zcompile.runtime.ranks.fabric import Exchanged, Fabric, Marked, received
from zcompile.runtime.transfer.ticket import Promise, Ticket


def _done() -> Promise:
    made = Promise()
    made.finish()
    return made


class DryRunFabric(Fabric):
    """Rank 0 of those of a mesh, the others of which are nowhere."""

    def __init__(self, mesh: RankMesh) -> None:
        self.rank, self.shard, self.size, self.mesh = 0, 0, mesh.ranks, mesh

    @property
    def ranks_on_this_host(self) -> int:
        return 1

    def carry_for(self, device: Device) -> None:
        return

    def compare(self, what: str, value: bytes, *detail: object, text: str = "") -> list[bytes]:
        return [value] * self.size

    def begin_agreement(self, what: str, detail: bytes, text: str, marks: bytes = b"") -> Marked:
        return Marked(torch.tensor([list(marks)], dtype=torch.uint8), _done())

    def rows(self, own: Tensor) -> Tensor:
        return own.reshape(1, -1).expand(self.size, -1)

    def gather(
        self,
        whole: Tensor,
        name: str,
        after: Sequence[Ticket],
        tile: SharedRange | None = None,
    ) -> Promise:
        return _done()

    def exchange(
        self,
        flat: Tensor,
        partition: Partition | None,
        name: str,
        after: Sequence[Ticket],
        tile: SharedRange | None = None,
        dtype: torch.dtype | None = None,
    ) -> Exchanged:
        of_groups = dtype is not None and partition is not None and self.mesh.replicas > 1
        made = _parts(received(flat, partition, tile), flat.dtype)
        return made._replace(of_groups=of_groups)

    def exchange_all(self, flats: Sequence[Tensor], after: Sequence[Ticket]) -> list[Exchanged]:
        return [_parts(flat.numel(), flat.dtype) for flat in flats]

    def add_here(self, total: Tensor, more: Tensor, after: Sequence[Ticket]) -> Promise:
        return _done()

    def added(self, exchanged: Exchanged, more: Exchanged, dtype: torch.dtype) -> Exchanged:
        return _parts(exchanged.parts.shape[1], dtype)

    def blank(self, count: int, dtype: torch.dtype) -> Exchanged:
        return _parts(count, dtype)

    def placed(
        self, sums: Exchanged, tile: Exchanged, first: int, dtype: torch.dtype, adds: bool
    ) -> Exchanged:
        return _parts(sums.parts.shape[1], dtype)

    def scaled(self, exchanged: Exchanged, dtype: torch.dtype) -> Exchanged:
        return _parts(exchanged.parts.shape[1], dtype)

    def folded(self, exchanged: Exchanged, dtype: torch.dtype) -> Exchanged:
        return _parts(exchanged.parts.shape[1], dtype)

    def failed_here(self, error: BaseException) -> None:
        return

    def check(self) -> None:
        return

    def finish(self) -> None:
        return

    def close(self, error: BaseException) -> None:
        return

    def totals(self, reset: bool = False) -> dict[str, Any]:
        return {
            "rank": self.rank,
            "ranks": self.size,
            "replicas": self.mesh.replicas,
            "bytes": {},
            "seconds": {},
        }


def _parts(count: int, dtype: torch.dtype) -> Exchanged:
    """What all ranks make of a gradient, as parts of one: [1, count]."""
    return Exchanged(blank((1, count), (count, 1), dtype), _done())
