"""Clipping moves no gradient: norms are known when they are asked for, scales wait for the step."""

import pytest
import torch
from pairs import assert_equal, assert_same, batches, mlp, same_training
from torch import nn, optim
from torch.nn.utils import clip_grad_norm_, clip_grad_value_

import zcompile


def plain(value):
    """Every tensor within as nested lists, which compare as a whole."""
    if isinstance(value, list):
        return [plain(v) for v in value]
    return value.detach().tolist() if isinstance(value, torch.Tensor) else value


def gradients(model):
    return [p.grad.tolist() for p in model.parameters()]


def clipped(clip, make=lambda m: optim.AdamW(m.parameters(), lr=1e-2, fused=True), steps=4,
            micro=1, to_none=True):  # fmt: skip
    def run(model, call):
        optimizer, seen = make(model), []
        for n, (x, y) in enumerate(batches(steps * micro)):
            nn.functional.cross_entropy(call(x), y).backward()
            if (n + 1) % micro == 0:
                seen.append(plain(clip(model)))
                optimizer.step()
                seen.append(gradients(model))
                optimizer.zero_grad(set_to_none=to_none)
        return seen

    return run


HOW = {
    "default": lambda m: clip_grad_norm_(m.parameters(), 0.1),
    "loop": lambda m: clip_grad_norm_(m.parameters(), 0.1, foreach=False),
    "inf": lambda m: clip_grad_norm_(m.parameters(), 0.1, norm_type=torch.inf),
    "l1": lambda m: clip_grad_norm_(m.parameters(), 0.1, norm_type=1),
    "twice": lambda m: [clip_grad_norm_(m.parameters(), c) for c in (0.1, 0.01)],
    "value": lambda m: clip_grad_value_(m.parameters(), 0.01),
    "by hand": lambda m: [p.grad.mul_(0.5) for p in m.parameters()] and None,
    "many times": lambda m: [p.grad.mul_(0.9) for p in m.parameters() for _ in range(6)] and None,
}


@pytest.mark.parametrize("mode", ["eager", "compiled"])
@pytest.mark.parametrize("how", HOW)
def test_clipping_gives_the_same_bits(how, mode, tmp_path):
    same_training(clipped(HOW[how]), tmp_path, mode)


@pytest.mark.parametrize("make", [
    lambda m: optim.AdamW(m.parameters(), foreach=True),
    lambda m: optim.SGD(m.parameters(), lr=0.1, momentum=0.9, foreach=False),
    lambda m: optim.SGD(m.parameters(), lr=0.1, fused=True),
    lambda m: optim.Adafactor(m.parameters()),
], ids=["foreach", "loop", "fused sgd", "adafactor"])  # fmt: skip
def test_every_optimizer_sees_clipped_gradients(make, tmp_path):
    same_training(clipped(HOW["default"], make), tmp_path, "compiled")


@pytest.mark.parametrize("to_none", [True, False])
@pytest.mark.parametrize("mode", ["eager", "compiled"])
def test_accumulated_gradients_are_measured_as_they_are(mode, to_none, tmp_path):
    same_training(clipped(HOW["default"], micro=3, to_none=to_none), tmp_path, mode)


@pytest.mark.parametrize("mode", ["eager", "compiled"])
def test_gradients_that_are_kept_after_clipping_are_added_to_as_clipped(mode, tmp_path):
    def run(model, call):
        for x, y in batches(3):
            nn.functional.cross_entropy(call(x), y).backward()
            clip_grad_norm_(model.parameters(), 0.1)
        return gradients(model)

    same_training(run, tmp_path, mode)


def disk_bytes(tmp_path, clip):
    """Bytes per step from and to disk, of a model whose gradients rest there too."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 256))
    model = zcompile.offload(model, device="cpu", device_memory="4MiB", host_memory="256KiB",
                             disk=tmp_path)  # fmt: skip
    optimizer = optim.AdamW(model.parameters(), fused=True)
    compiled = torch.compile(model, backend="zinf")
    for n in range(4):
        if n == 3:
            zcompile.stats(model, reset=True)
        compiled(torch.randn(4, 256)).square().sum().backward()
        if clip:
            clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()
    moved = zcompile.stats(model)["bytes"]
    return moved["disk_read"], moved["disk_write"]


def test_clipping_costs_no_byte_of_the_disk(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    assert disk_bytes(tmp_path / "a", clip=True) == disk_bytes(tmp_path / "b", clip=False)


def test_a_clipped_gradient_is_read_as_clipped(tmp_path):
    def run(model, call):
        for x, y in batches(1):
            nn.functional.cross_entropy(call(x), y).backward()
        clip_grad_norm_(model.parameters(), 0.1)
        first = next(iter(model.parameters())).grad
        return plain([repr(first), first.norm(), first[0], (first + 1).sum(), first.sum(0)])

    same_training(run, tmp_path, "compiled")


def test_what_is_written_over_is_not_scaled_afterwards(tmp_path):
    def run(model, call):
        x, y = next(batches(1))
        nn.functional.cross_entropy(call(x), y).backward()
        clip_grad_norm_(model.parameters(), 0.1)
        for n, param in enumerate(model.parameters()):
            if n % 2:
                param.grad.fill_(3)
            else:
                param.grad.zero_()
        return gradients(model)

    same_training(run, tmp_path, "compiled")


def test_a_step_that_fails_leaves_the_gradient_as_it_was():
    eager, tiered = mlp(), zcompile.offload(mlp(), device="cpu", device_memory="1MiB")
    for model in (eager, tiered):
        x, y = next(batches(1))
        nn.functional.cross_entropy(model(x), y).backward()
        clip_grad_norm_(model.parameters(), 0.1)
    with pytest.raises(RuntimeError):
        torch._fused_adamw_([tiered[0].weight], [tiered[0].weight.grad], [], [], [], [], lr=1.0,
                            beta1=0.9, beta2=0.9, weight_decay=0.0, eps=1e-8, amsgrad=False,
                            maximize=False)  # fmt: skip
    assert_equal(eager[0].weight.grad, tiered[0].weight.grad)
    assert_same(eager, tiered)
