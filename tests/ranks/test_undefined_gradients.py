"""Ranks that differentiate other results than each other: what crosses is the same."""

import torch
from rank_models import Means, adamw, state_of
from torch import Tensor, nn

import zcompile

FIELDS = {"device": "cpu", "device_memory": "4MiB", "host_memory": "64MiB"}
STEPS = 3


class Heads(nn.Module):
    """Two losses of one trunk, whose weights rest in shares."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Linear(96, 200)
        self.heads = nn.ModuleList(nn.Linear(200, 96) for _ in range(2))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = self.trunk(x).tanh()
        first, second = (head(h) for head in self.heads)
        return first.square().mean(), second.cos().mean()


def heads() -> Heads:
    torch.manual_seed(0)
    return Heads()


def batch(step: int, rank: int) -> Tensor:
    return torch.randn(5, 96, generator=torch.Generator().manual_seed(10 * step + rank))


def read_by(step: int, rank: int) -> int:
    """The result that a rank differentiates: both the same in one step, and others in others."""
    return rank if step else 0


def trained(mesh):
    rank, model = mesh.get_local_rank(), zcompile.offload(heads(), mesh=mesh, **FIELDS)
    optimizer, run = adamw(model.parameters()), torch.compile(model, backend="zinf")
    for step in range(STEPS):
        run(batch(step, rank))[read_by(step, rank)].backward()
        optimizer.step()
        optimizer.zero_grad()
    found = state_of(model, optimizer)
    zcompile.close(model)
    return found


def in_one_process(mesh, ranks):
    """With zeros where a rank has no gradient."""
    model = heads()
    optimizer, means = adamw(model.parameters()), Means(model, ranks)
    for step in range(STEPS):
        for rank in range(ranks):
            model(batch(step, rank))[read_by(step, rank)].backward()
            for param in model.parameters():
                param.grad = torch.zeros_like(param) if param.grad is None else param.grad
            means.take()
        means.give()
        optimizer.step()
        optimizer.zero_grad()
    return state_of(model, optimizer)


def test_ranks_may_differentiate_other_results(pool):
    assert pool.run(trained, 2) == pool.run(in_one_process, 1, 2) * 2
