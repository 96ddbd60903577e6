"""Training on CUDA against eager on CUDA: streams, events and pinned memory for real."""

import pytest
import torch
from torch import nn

import zcompile
from zcompile.frontend.backend import zinf

pytestmark = pytest.mark.gpu


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = (
            nn.LayerNorm(width),
            nn.Linear(width, 4 * width),
            nn.Linear(4 * width, width),
        )

    def forward(self, x):
        return x + self.down(torch.nn.functional.gelu(self.up(self.norm(x))))


class Model(nn.Module):
    """Tied ends, dropout, and a graph break between layers if asked for."""

    def __init__(self, width: int = 256, layers: int = 6, breaks: bool = False) -> None:
        super().__init__()
        self.inputs = nn.Embedding(512, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(layers))
        self.drop = nn.Dropout(0.1)
        self.head = nn.Linear(width, 512, bias=False)
        self.head.weight = self.inputs.weight
        self.breaks = breaks

    def forward(self, ids, targets):
        x = self.drop(self.inputs(ids))
        for block in self.blocks:
            x = block(x)
            if self.breaks:
                torch._dynamo.graph_break()
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), targets.flatten())


def train(model, run, steps, form):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, **form)
    generator = torch.Generator().manual_seed(1)
    torch.manual_seed(2)
    losses = []
    for step in range(steps):
        for _ in range(2):
            ids = torch.randint(0, 512, (4, 32 + step), generator=generator).cuda()
            loss = run(ids, ids.roll(1, 1))
            loss.backward()
            losses.append(loss.item())
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return losses


@pytest.mark.parametrize(
    "form", [{"fused": True}, {"foreach": True}, {}], ids=["fused", "foreach", "default"]
)
@pytest.mark.parametrize("breaks", [False, True], ids=["whole", "broken"])
@pytest.mark.parametrize("host", ["2MiB", "256MiB"], ids=["disk", "host"])
def test_every_bit_is_that_of_eager_on_the_same_gpu(host, breaks, form, tmp_path):
    torch._dynamo.reset()
    torch.manual_seed(0)
    plain = Model(breaks=breaks).cuda()
    torch.manual_seed(0)
    model = Model(breaks=breaks)
    zcompile.offload(model, device="cuda", device_memory="8MiB", host_memory=host, disk=tmp_path)
    run = torch.compile(model, backend=zinf)
    assert train(model, run, 6, form) == train(plain, plain, 6, form)
    for (name, p), q in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert torch.equal(p.detach().cpu(), q.detach().cpu()), name
    stats = zcompile.stats(model)
    assert stats["peak"]["device"] <= 8 * 2**20
