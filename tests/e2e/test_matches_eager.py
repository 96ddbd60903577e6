"""Stock training code on a tiered model, called plainly and compiled: the bits of plain eager."""

from functools import partial

import pytest
import torch
from pairs import batches, entries, mlp, same_training, train
from sampled import crossed
from torch import optim
from torch.nn import functional as F
from torch.nn import utils

from zcompile.ir.types import EntryKind

MODES = pytest.mark.parametrize("mode", ["eager", "compiled"])


def adamw(model, **options):
    return optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=1e-2, **options)


def clip_in_two(params):
    params = list(params)
    total = utils.get_total_norm([p.grad for p in params])
    utils.clip_grads_with_norm_(params, 0.1, total)


CLIPS = {
    "norm": lambda p: utils.clip_grad_norm_(p, 0.1),
    "norm, foreach": lambda p: utils.clip_grad_norm_(p, 0.1, foreach=True),
    "norm, loop": lambda p: utils.clip_grad_norm_(p, 0.1, foreach=False),
    "largest": lambda p: utils.clip_grad_norm_(p, 0.01, norm_type=float("inf")),
    "one norm": lambda p: utils.clip_grad_norm_(p, 0.1, norm_type=1.0, error_if_nonfinite=True),
    "value": lambda p: utils.clip_grad_value_(p, 0.01),
    "value, loop": lambda p: utils.clip_grad_value_(p, 0.01, foreach=False),
    "in two": clip_in_two,
}


@pytest.mark.parametrize(("clip", "mode"), crossed(CLIPS, ("compiled", "eager")))
def test_gradients_are_clipped_alike(clip, mode, tmp_path):
    def run(model, call):
        return train(call, adamw(model), before=lambda: CLIPS[clip](model.parameters()))

    same_training(run, tmp_path, mode)


@MODES
@pytest.mark.parametrize("to_none", [True, False])
def test_gradients_accumulate(to_none, mode, tmp_path):
    def run(model, call):
        optimizer, seen = adamw(model, fused=True), []
        for _ in range(2):
            for x, y in batches(3):
                (F.cross_entropy(call(x), y) / 3).backward()
            seen.append([p.grad.sum().item() for p in model.parameters()])
            optimizer.step()
            optimizer.zero_grad(set_to_none=to_none)
            seen.append([p.grad is None or p.grad.any().item() for p in model.parameters()])
        return seen

    _, tiered = same_training(run, tmp_path, mode)
    assert len(entries(tiered, EntryKind.GRAD)) == (0 if to_none else 4)


@MODES
def test_gradients_can_be_read_changed_and_replaced(mode, tmp_path):
    def run(model, call):
        def change():
            for p in model.parameters():
                p.grad.mul_(0.5)
                p.grad = p.grad * 2
                p.grad.data.add_(1e-3)
                seen.append((p.grad.norm().item(), repr(p.grad)))
                p.grad = p.grad.detach().cpu()

        seen = []
        return train(call, adamw(model), before=change), seen

    same_training(run, tmp_path, mode)


@MODES
def test_hooks_see_and_change_each_gradient_once(mode, tmp_path):
    def run(model, call):
        seen = []
        for name, p in model.named_parameters():
            p.register_hook(lambda g: g * 0.5)
            p.register_hook(lambda g, name=name: seen.append((name, g.sum().item())))
        removed = model[0].weight.register_hook(lambda g: g * 0)
        removed.remove()
        return train(call, adamw(model)), sorted(seen)

    same_training(run, tmp_path, mode)


@MODES
def test_the_optimizer_may_run_in_backward(mode, tmp_path):
    def run(model, call):
        own = {p: optim.AdamW([p], lr=1e-2) for p in model.parameters()}
        steps = []

        def hook(p):
            own[p].step()
            own[p].zero_grad()
            steps.append(1)

        for p in model.parameters():
            p.register_post_accumulate_grad_hook(hook)
        for x, y in batches(3):
            F.cross_entropy(call(x), y).backward()
        return len(steps), [p.grad is None for p in model.parameters()]

    _, tiered = same_training(run, tmp_path, mode)
    assert entries(tiered, EntryKind.GRAD) == []


@MODES
def test_autocast_computes_in_bfloat16(mode, tmp_path):
    def run(model, call):
        def narrow(x):
            with torch.autocast("cpu", torch.bfloat16):
                return call(x)

        return train(narrow, adamw(model, fused=True))

    same_training(run, tmp_path, mode)


@MODES
def test_parameters_may_be_bfloat16(mode, tmp_path):
    data = [(x.bfloat16(), y) for x, y in batches(3)]
    run = partial(lambda data, model, call: train(call, adamw(model), data=data), data)
    same_training(run, tmp_path, mode, lambda: mlp().bfloat16())


@MODES
def test_frozen_parameters_stay_and_may_thaw(mode, tmp_path):
    def run(model, call):
        model[0].requires_grad_(False)
        optimizer = optim.AdamW(model.parameters(), lr=1e-2)
        losses = train(call, optimizer, 2)
        model[0].requires_grad_(True)
        x, y = next(batches(1))
        F.cross_entropy(call(x), y).backward()
        return losses, [p.grad.sum().item() for p in model.parameters()]

    _, tiered = same_training(run, tmp_path, mode)
    assert len(entries(tiered, EntryKind.GRAD)) == 4


@MODES
def test_a_graph_may_be_walked_twice(mode, tmp_path):
    def run(model, call):
        x, y = next(batches(1))
        loss = F.cross_entropy(call(x), y)
        loss.backward(retain_graph=True)
        loss.backward()
        return [p.grad.sum().item() for p in model.parameters()]

    same_training(run, tmp_path, mode)


@MODES
def test_inputs_have_gradients_and_inference_needs_none(mode, tmp_path):
    def run(model, call):
        x, y = next(batches(1))
        x.requires_grad_()
        F.cross_entropy(call(x), y).backward()
        with torch.no_grad():
            quiet = call(x).sum().item()
        with torch.inference_mode():
            inferred = call(x.detach()).sum().item()
        return x.grad.sum().item(), quiet, inferred

    same_training(run, tmp_path, mode)


def test_checkpointing_recomputes_alike(tmp_path):
    def run(model, call):
        def recomputed(x):
            return torch.utils.checkpoint.checkpoint(call, x, use_reentrant=False)

        return train(recomputed, adamw(model))

    same_training(run, tmp_path, "eager")
