"""The ranks that torchrun starts, and their part of a training; one process is a rank alone.

What a rank takes of a step's batches is up to a script: here, of each `size` batches in turn, the
ranks take one each, so that the text is read in the same order however many they are.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

import torch
import torch.distributed as dist
from torch import Tensor, nn

from examples.text import Batch


@dataclass(frozen=True)
class Ranks:
    """Whose batches this process takes.

    size   ranks in all
    taken  of them, whose batches are taken here: of one, or, by the eager twin, of all
    """

    size: int
    taken: range

    @property
    def first(self) -> bool:
        """Whether this process is the one that prints."""
        return 0 in self.taken

    @property
    def twin(self) -> "Ranks":
        """One process that takes the batches of all."""
        return Ranks(self.size, range(self.size))

    @property
    def is_twin(self) -> bool:
        """Whether one process stands for several ranks."""
        return len(self.taken) > 1

    def rounds(self, data: Iterator[Batch]) -> Iterator[list[Batch]]:
        """What this process takes of each `size` batches."""
        while one := list(islice(data, self.size)):
            yield [one[rank] for rank in self.taken]

    def mean(self, losses: Sequence[float]) -> float:
        """The mean over ranks of the sums of their losses, added batch by batch, rank by rank.

        losses  of the batches that this process took, in order
        """
        rows = torch.tensor([losses], dtype=torch.float64)
        if self.size > 1 and not self.is_twin:
            found = [torch.empty_like(rows) for _ in range(self.size)]
            dist.all_gather(found, rows)
            rows = torch.cat(found)
        total = 0.0
        for loss in rows.t().flatten().tolist():
            total += loss / self.size
        return total


ALONE = Ranks(1, range(1))


def known_ranks() -> Ranks:
    """The ranks of torch.distributed, which `zcompile.init` makes under torchrun."""
    if not dist.is_available() or not dist.is_initialized():
        return ALONE
    rank = dist.get_rank()
    return Ranks(dist.get_world_size(), range(rank, rank + 1))


def train_as(ranks: Ranks, model: nn.Module) -> None:
    """Let an eager model take each batch's gradient as a mean over ranks would: in its order."""
    part = 1.0 / ranks.size

    def of_all(grad: Tensor) -> Tensor:
        return grad * part

    for param in model.parameters():
        param.register_hook(of_all)


Clip = Callable[[Iterable[Tensor], float], object]


def clip_as_ranks_do(params: Iterable[Tensor], most: float) -> None:
    """As `clip_grad_norm_`, with each norm summed in float64, as ranks sum it over their shares."""
    held = list(params)
    grads = [param.grad for param in held if param.grad is not None]
    norms = [grad.double().square().sum().sqrt().to(grad.dtype) for grad in grads]
    nn.utils.clip_grads_with_norm_(held, most, torch.linalg.vector_norm(torch.stack(norms)))
