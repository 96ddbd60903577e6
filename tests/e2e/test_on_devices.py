"""Each way in which bytes travel, on the CPU device and on a card: the bits of eager there.

Where sums are taken in other pieces than eager's, numbers are close.
"""

import copy
import re

import pytest
import torch
from device_runs import DEVICES, STEPS, WAYS, plain, session_of, the_same_plan_each_time, tiered
from e2e import test_batch_slices, test_token_slices
from e2e.test_token_slices import LIKE_A_GPU
from torch import Tensor, nn
from vocabularies import Head, flat

import zcompile
from zcompile.frontend.backend import zinf
from zcompile.ir.units import Bytes
from zcompile.sparse_attention import Fixed, Pattern, attend

CLOSE = {"rtol": 1e-4, "atol": 1e-5}
"""Of losses of a few steps in float32."""


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", WAYS)
def test_a_training_has_the_bits_of_eager_on_the_same_device(name, device, tmp_path):
    way = WAYS[name]
    with the_same_plan_each_time(way):
        wanted = plain(way, device).steps(0, STEPS)
        run = tiered(way, device, tmp_path if way.disk else None).steps(0, STEPS)
        assert way.looks(session_of(run)), "it happened that way"
        losses, found = run.told(), run.values()
        zcompile.close(run.model)
    if device in way.rounds:
        torch.testing.assert_close(losses, wanted.told(), **CLOSE)
        return
    assert losses == wanted.told()
    assert_same(wanted.model, found, wanted.values())


def assert_same(model: nn.Module, found: list[Tensor], wanted: list[Tensor]) -> None:
    for (name, _), mine, other in zip(model.named_parameters(), found, wanted, strict=True):
        assert torch.equal(mine, other), name


# --- What goes on ---


@pytest.mark.parametrize("device", DEVICES)
def test_a_durable_run_goes_on_from_its_last_step(device, tmp_path):
    way = WAYS["durable"]
    with the_same_plan_each_time(way):
        wanted = plain(way, device).steps(0, STEPS)
        zcompile.close(tiered(way, device, tmp_path).steps(0, 4).model)
        again = tiered(way, device, tmp_path)
        assert zcompile.resume(tmp_path, again.model, again.optimizer) == {"step": 4}
        again.steps(4, STEPS)
        assert_same(wanted.model, again.values(), wanted.values())
        zcompile.close(again.model)


@pytest.mark.parametrize("device", DEVICES)
def test_what_was_saved_goes_on_elsewhere(device, tmp_path):
    """Saved where half of it is on the device; resumed where all of it streams, and plainly."""
    saved = tmp_path / "saved"
    with the_same_plan_each_time(WAYS["dropout"]):
        wanted = plain(WAYS["dropout"], device).steps(0, STEPS)
        run = tiered(WAYS["dropout"], device, None).steps(0, 4)
        zcompile.save(saved, run.model, run.optimizer, step=4)
        zcompile.close(run.model)
        streaming = tiered(WAYS["attention by products"], device, None)
        for other in (streaming, plain(WAYS["dropout"], device)):
            assert zcompile.resume(saved, other.model, other.optimizer) == {"step": 4}
            other.steps(4, STEPS)
            assert_same(wanted.model, other.values(), wanted.values())
        zcompile.close(streaming.model)


@pytest.mark.parametrize("device", DEVICES)
def test_a_state_dict_is_read_by_plain_torch(device, tmp_path):
    way = WAYS["half on the device"]
    with the_same_plan_each_time(way):
        wanted = plain(way, device).steps(0, 4)
        run = tiered(way, device, None).steps(0, 4)
        torch.save(run.model.state_dict(), tmp_path / "model.pt")
        zcompile.close(run.model)
    other = plain(way, device)
    other.model.load_state_dict(torch.load(tmp_path / "model.pt"))
    assert_same(wanted.model, other.values(), wanted.values())


# --- What no budget holds whole ---


def sample(*size: int, device: str) -> Tensor:
    return torch.randn(*size, generator=torch.Generator().manual_seed(1)).to(device)


SLICED = {
    "tile-tokens": (
        test_token_slices.Stack,
        (test_token_slices.BATCH, test_token_slices.LENGTH, test_token_slices.WIDTH),
        test_token_slices.ONE,
    ),
    "slice-batch": (
        test_batch_slices.Stack,
        (test_batch_slices.BATCH, test_batch_slices.LENGTH, test_batch_slices.WIDTH),
        test_batch_slices.BUDGET,
    ),
}
"""Pass -> a model, the size of its input, and a budget that does not hold its values whole."""


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", SLICED)
def test_values_that_the_device_does_not_hold_are_made_in_slices(name, device):
    build, size, budget = SLICED[name]
    torch.manual_seed(0)
    model, x = build(), sample(*size, device=device)
    twin = copy.deepcopy(model).to(device)
    zcompile.offload(
        model,
        device=device,
        device_memory=Bytes(budget),
        host_memory="64MiB",
        machine=LIKE_A_GPU,
    )
    torch._dynamo.reset()
    found = test_token_slices.trained(model, torch.compile(model, backend=zinf), x)
    wanted = test_token_slices.trained(twin, twin, x)
    for mine, others in zip(found, wanted, strict=True):
        for value, other in zip(mine, others, strict=True):
            apart = (torch.as_tensor(value).cpu() - other.cpu()).abs().max()
            assert apart <= test_token_slices.LATER * other.abs().max()
    stats = zcompile.stats(model)
    assert {row["by"] for row in stats["inexact"]} == {name}
    assert stats["peak"]["together"] <= budget
    zcompile.close(model)


CLASSES = 2048


@pytest.mark.parametrize(
    ("device", "kernels"),
    [
        pytest.param("cpu", "stock", marks=pytest.mark.slow),
        pytest.param("cuda", "stock", marks=pytest.mark.gpu),
        pytest.param("cuda", "triton", marks=pytest.mark.gpu),
    ],
)
def test_a_loss_over_a_vocabulary_is_made_in_tiles(device, kernels, tmp_path):
    """With kernels of ours its tiles are computed by them, and so are the steps of AdamW."""
    ids = torch.randint(CLASSES, (2, 4, 32), generator=torch.Generator().manual_seed(1)).to(device)

    def trained(model: nn.Module, call: nn.Module) -> list[float]:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
        losses = []
        for _ in range(STEPS):
            loss = call(*ids)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses

    torch.manual_seed(0)
    model = Head(flat(label_smoothing=0.1), bias=False, tied=True, classes=CLASSES)
    twin = copy.deepcopy(model).to(device)
    zcompile.offload(
        model,
        device=device,
        device_memory="1MiB",
        host_memory="16MiB",
        kernels=kernels,
        dump=tmp_path,
    )
    torch._dynamo.reset()
    losses = trained(model, torch.compile(model, backend=zinf))
    torch.testing.assert_close(losses, trained(twin, twin), **CLOSE)
    assert {row["by"] for row in zcompile.stats(model)["inexact"]} == {"tile-loss"}
    told = "".join(text.read_text() for text in tmp_path.rglob("*.txt"))
    assert bool(re.search(r"triton_kernels\.tile_gradient_", told)) is (kernels == "triton")
    zcompile.close(model)


@pytest.mark.parametrize("device", DEVICES)
def test_a_loss_under_autocast_is_tiled(device):
    class Model(Head):
        def forward(self, *given: Tensor) -> Tensor:
            with torch.autocast(device, torch.bfloat16):
                return super().forward(*given)

    torch.manual_seed(0)
    model = Model(flat(), bias=False, tied=False, classes=4096)
    targets = torch.randint(4096, (4, 64))
    twin = copy.deepcopy(model).to(device)
    zcompile.offload(model, device=device, device_memory="1MiB", host_memory="16MiB")
    torch._dynamo.reset()
    given = [value.to(device) for value in (targets, targets.flip(0))]
    losses = [call(*given) for call in (torch.compile(model, backend=zinf), twin)]
    for loss in losses:
        loss.backward()
    torch.testing.assert_close(*losses, rtol=2**-8, atol=0)
    for mine, other in zip(model.parameters(), twin.parameters(), strict=True):
        apart = (mine.grad.cpu() - other.grad.cpu()).abs().max()
        assert apart <= 2**-6 * other.grad.abs().max().cpu()
    assert {row["by"] for row in zcompile.stats(model)["inexact"]} == {"tile-loss"}
    zcompile.close(model)


# --- Block-sparse attention ---


class Sparse(nn.Module):
    """Attention of 2 heads, as narrow as torch has kernels for on a card, between two products."""

    def __init__(self, pattern: Pattern, by: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.qkv, self.out = nn.Linear(32, 96), nn.Linear(32, 32)
        self.pattern, self.by = pattern, by

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (2, 16)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        y = attend(q, k, v, self.pattern, by=self.by)
        return self.out(y.transpose(1, 2).flatten(2))


@pytest.mark.gpu
@pytest.mark.parametrize("regions", ["eager", "inductor"])
def test_block_sparse_attention_trains_as_the_dense_reference(regions):
    """`flex_attention` has a backward on a card alone."""
    pattern = Pattern(Fixed(window=2, causal=True), 2, tokens=256, block=128, device="cuda")
    x = sample(2, 256, 32, device="cuda")
    twin, model = Sparse(pattern, "dense").cuda(), Sparse(pattern, "flex")
    zcompile.offload(
        model, device="cuda", device_memory="32MiB", host_memory="16MiB", regions=regions
    )
    torch._dynamo.reset()
    call = torch.compile(model, backend=zinf)
    for forward in (twin, call):
        forward(x).square().mean().backward()
    for mine, other in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(mine.grad.cpu(), other.grad.cpu(), rtol=1e-3, atol=1e-5)
    if regions == "inductor":
        assert zcompile.stats(model)["fusions"]["refused"] == {}
    zcompile.close(model)
