"""Models that return several views of one value, written to by who gets them or not."""

import pytest
import torch
from pairs import same_training
from sampled import crossed
from torch import nn, optim

import zcompile


def _halves(y):
    return y[..., :4], y[..., 4:]


RESULTS = {
    "halves": _halves,
    "parts that overlap": lambda y: (y[:, :3], y[:, 1:]),
    "all of it, and a part": lambda y: (y, y[:, 0]),
    "a part that was written within": lambda y: (y.mul_(2)[0], y[:1]),
    "three that lie apart": lambda y: (y[..., :2], y[..., 2:5], y[..., 5:]),
    "of what vmap and grad made": lambda y: _halves(
        torch.vmap(torch.func.grad(lambda row: (row.sin() * row).sum()))(y)
    ),
    "beside others": lambda y: (y.square().sum(), y[0], y[:1], y.detach()),
}


class Returning(nn.Module):
    """Returns views of what a layer computes; of three dimensions that is a view within its op."""

    def __init__(self, results) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.results = nn.Linear(16, 8), results

    def forward(self, x):
        return self.results(self.layer(x))


@pytest.mark.parametrize(
    ("name", "size", "written"), crossed(RESULTS, [(6, 16), (3, 4, 16)], [True, False])
)
def test_views_of_one_value_are_returned_and_share_memory(name, size, written, tmp_path):
    def run(model, call):
        optimizer, told = optim.AdamW(model.parameters(), lr=1e-2, fused=True), []
        for _ in range(2):
            results = call(torch.randn(size))
            if written:
                results[0].mul_(3)  # the others see it, and so do gradients
            kept = [r for r in results if r.requires_grad]
            sum(n * r.square().sum() for n, r in enumerate(kept, start=1)).backward()
            told += [r.tolist() for r in (*results, model.layer.weight.grad)]
            optimizer.step()
            optimizer.zero_grad()
        return told

    same_training(run, tmp_path, "compiled", lambda: Returning(RESULTS[name]))


def without_record(y):
    with torch.no_grad():
        part = y.view(-1)
    return y[0], y[1:], part


REFUSED = {
    "a view of another": lambda y: ((t := y[1:]), y[:2], t[:2]),
    "three with a row in common": lambda y: (y[1:], y[:2], y[:3]),
    "without a record": without_record,
}


@pytest.mark.parametrize("name", REFUSED)
def test_views_whose_gradients_would_not_be_eagers_are_refused(name):
    model = zcompile.offload(Returning(REFUSED[name]), device="cpu", host_memory="1MiB")
    with pytest.raises(Exception, match="output aliasing"):
        torch.compile(model, backend="zinf")(torch.randn(6, 16))
