"""A model with tied ends, dropout and graph breaks, on a card against eager there, and its regions
by Inductor; the bodies run on the CPU device too."""

import pytest
import torch
from device_runs import DEVICES
from torch import nn

import zcompile
from zcompile.frontend.backend import zinf
from zcompile.ir.units import Bytes, MiB


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


def train(model, run, steps, form, device, grows=True):
    """The losses. Where batches grow from step to step, sizes are dynamic from the second on."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, **form)
    generator = torch.Generator().manual_seed(1)
    torch.manual_seed(2)
    losses = []
    for step in range(steps):
        for _ in range(2):
            length = 32 + step if grows else 32
            ids = torch.randint(0, 512, (4, length), generator=generator).to(device)
            loss = run(ids, ids.roll(1, 1))
            loss.backward()
            losses.append(loss.item())
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return losses


def gradients(model, run, device):
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(0, 512, (4, 64), generator=generator).to(device)
    torch.manual_seed(4)
    loss = run(ids, ids.roll(1, 1))
    loss.backward()
    found = {"loss": loss.detach().double().cpu()}
    for name, p in model.named_parameters():
        found[name] = torch.empty(p.shape, dtype=p.dtype).copy_(p.grad).double()
    model.zero_grad()
    return found


def seeded():
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = Model()
    model.drop.p = 0.0
    return model


def inductor(model, **fields):
    known = {"device_memory": "64MiB", "host_memory": "256MiB"}
    zcompile.offload(model, **{**known, "regions": "inductor", **fields})
    return torch.compile(model, backend=zinf)


@pytest.mark.parametrize("device", DEVICES)
def test_regions_by_inductor_err_as_torch_compile_does(device):
    """By Triton on a card: every gradient against float64, relative to its norm."""
    model, other, exact = seeded(), seeded().to(device), seeded().to(device).double()
    ours = gradients(model, inductor(model, device=device), device)
    found = zcompile.stats(model)["fusions"]
    assert found["distinct"] > 5
    assert found["refused"] == {}
    stock = gradients(other, torch.compile(other), device)
    truth = gradients(exact, exact, device)
    for name, wanted in truth.items():
        errors = [((given[name] - wanted).norm() / wanted.norm()).item() for given in (ours, stock)]
        assert errors[0] <= 1.1 * errors[1] + 1e-7, name


@pytest.mark.parametrize("device", DEVICES)
def test_where_bytes_rest_changes_no_bit_of_regions_by_inductor(device, tmp_path):
    found = []
    for fields in (
        {},
        {"device_memory": "8MiB", "residency": False},
        {"device_memory": "8MiB", "host_memory": "2MiB", "disk": tmp_path},
    ):
        model = seeded()
        run = inductor(model, device=device, **fields)
        found.append(train(model, run, 4, {"fused": True}, device, grows=False))
        assert zcompile.stats(model)["fusions"]["distinct"] > 5
        zcompile.close(model)
    assert found[0] == found[1] == found[2]


@pytest.mark.parametrize("device", DEVICES)
def test_a_planned_step_of_regions_by_inductor_holds_what_was_predicted(device):
    model = seeded()
    run = inductor(model, device=device)
    train(model, run, 5, {"fused": True}, device, grows=False)
    stats = zcompile.stats(model)
    assert stats["peak"]["together"] <= 64 * MiB
    assert stats["peak"]["activations"] == stats["predicted"]["peak"]["activations"]


@pytest.mark.parametrize(
    "form", [{"fused": True}, {"foreach": True}, {}], ids=["fused", "foreach", "default"]
)
@pytest.mark.parametrize("breaks", [False, True], ids=["whole", "broken"])
@pytest.mark.parametrize("host", ["2MiB", "256MiB"], ids=["disk", "host"])
@pytest.mark.parametrize("device", DEVICES)
def test_every_bit_is_that_of_eager_on_the_same_device(device, host, breaks, form, tmp_path):
    # Of several graphs none knows that others keep values too, so that nothing is made again.
    budget = (12 if breaks else 8) * MiB
    torch._dynamo.reset()
    torch.manual_seed(0)
    plain = Model(breaks=breaks).to(device)
    torch.manual_seed(0)
    model = Model(breaks=breaks)
    zcompile.offload(
        model, device=device, device_memory=Bytes(budget), host_memory=host, disk=tmp_path
    )
    run = torch.compile(model, backend=zinf)
    assert train(model, run, 6, form, device) == train(plain, plain, 6, form, device)
    for (name, p), q in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert torch.equal(p.detach().cpu(), q.detach().cpu()), name
    stats = zcompile.stats(model)
    assert stats["peak"]["together"] <= budget
