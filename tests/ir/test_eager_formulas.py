"""What is traced of ops that torch takes apart has the bits of eager PyTorch."""

import pytest
import torch
from offloaded import twins
from torch import nn
from torch.nn import functional as F

from zcompile.ir.eager_formulas import LEFT_WHOLE


class Headed(nn.Module):
    """A convolution, and on what it gives each of some ops; their results are summed."""

    def __init__(self, heads):
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3, padding=1)
        self.heads = heads

    def forward(self, x):
        y = self.conv(x)
        return sum(head(y).float().square().mean() for head in self.heads)


RESIZED = {
    "linear": lambda y: F.interpolate(y.flatten(2), size=17, mode="linear"),
    "bilinear": lambda y: F.interpolate(y, scale_factor=1.7, mode="bilinear"),
    "bilinear, corners aligned": lambda y: F.interpolate(
        y, size=(13, 11), mode="bilinear", align_corners=True
    ),
    "trilinear": lambda y: F.interpolate(y[:, None], size=(3, 7, 7), mode="trilinear"),
    "bicubic": lambda y: F.interpolate(y, scale_factor=1.7, mode="bicubic"),
}
LOSSES = {
    "multi margin": lambda y: F.multi_margin_loss(y.mean((2, 3)), torch.tensor([1, 2])),
    "multilabel margin": lambda y: F.multilabel_margin_loss(
        y.mean((2, 3)), torch.tensor([[1, 2, -1, 0]] * 2)
    ),
}
DROPPED = {f"dropout {p}": lambda y, p=p: F.dropout(y, p) for p in (0.1, 0.15, 0.5, 0.9)}


def bits(model, run, x, narrow):
    torch.manual_seed(1)
    with torch.autocast("cpu", torch.bfloat16, enabled=narrow):
        loss = run(x)
    loss.backward()
    return [loss.item(), *(param.grad.tolist() for param in model.parameters())]


@pytest.mark.parametrize("narrow", [False, True], ids=["float32", "autocast"])
@pytest.mark.parametrize("heads", [RESIZED, LOSSES, DROPPED], ids=["resized", "losses", "dropped"])
def test_ops_that_torch_takes_apart_have_the_bits_of_eager_pytorch(heads, narrow):
    torch.manual_seed(0)
    pair = twins(Headed(list(heads.values())))
    x = torch.randn(2, 3, 8, 8)
    expected = bits(pair.plain, pair.plain, x, narrow)
    assert bits(pair.model, pair.call, x, narrow) == expected


def test_sizes_of_images_may_change_from_call_to_call():
    torch.manual_seed(0)
    pair = twins(Headed([RESIZED["bilinear"], RESIZED["bicubic"]]), dynamic=True)
    for size in (8, 9, 10):
        x = torch.randn(2, 3, size, size)
        expected = bits(pair.plain, pair.plain, x, False)
        assert bits(pair.model, pair.call, x, False) == expected


def test_ops_are_taken_apart_again_once_a_graph_is_compiled():
    torch.compile(nn.Linear(2, 2), backend="zinf")(torch.ones(2))
    assert all(op.py_kernels for op in LEFT_WHOLE)
