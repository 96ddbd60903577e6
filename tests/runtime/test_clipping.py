"""Clipping moves no gradient: norms are known when they are asked for, scales wait for the step."""

import os
import signal

import pytest
import torch
from pairs import assert_equal, assert_same, batches, mlp, on_disk, same_training
from planned_runs import begun, expected, ids, loss_of, same, train
from sampled import crossed
from torch import nn, optim
from torch.nn.utils import clip_grad_norm_, clip_grad_value_

import zcompile
from zcompile.runtime.eager import streaming
from zcompile.runtime.norms import CLIPPING, Measure, Norms


def plain(value):
    """Every tensor within as nested lists, which compare as a whole."""
    if isinstance(value, list):
        return [plain(v) for v in value]
    return value.detach().tolist() if isinstance(value, torch.Tensor) else value


def gradients(model):
    return [p.grad.tolist() for p in model.parameters()]


def clipped(
    clip,
    make=lambda m: optim.AdamW(m.parameters(), lr=1e-2, fused=True),
    steps=4,
    micro=1,
    to_none=True,
):
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


@pytest.mark.parametrize(("how", "mode"), crossed(HOW, ("compiled", "eager")))
def test_clipping_gives_the_same_bits(how, mode, tmp_path):
    same_training(clipped(HOW[how]), tmp_path, mode)


@pytest.mark.parametrize(
    "make",
    [
        lambda m: optim.AdamW(m.parameters(), foreach=True),
        lambda m: optim.SGD(m.parameters(), lr=0.1, momentum=0.9, foreach=False),
        lambda m: optim.SGD(m.parameters(), lr=0.1, fused=True),
        lambda m: optim.Adafactor(m.parameters()),
    ],
    ids=["foreach", "loop", "fused sgd", "adafactor"],
)
def test_every_optimizer_sees_clipped_gradients(make, tmp_path):
    same_training(clipped(HOW["default"], make), tmp_path, "compiled")


@pytest.mark.parametrize(("mode", "to_none"), crossed(["eager", "compiled"], [True, False]))
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


def disk_bytes(tmp_path, clip, host_memory):
    """Bytes read and written per parameter and step, of a model whose weights rest on disk."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(512, 512, bias=False), nn.ReLU(), nn.Linear(512, 512, bias=False)
    )
    model = on_disk(model, tmp_path, device_memory="8MiB", host_memory=host_memory, residency=False)
    optimizer = optim.AdamW(model.parameters(), fused=True)
    compiled = torch.compile(model, backend="zinf")
    for n in range(4):
        if n == 3:
            zcompile.stats(model, reset=True)
        compiled(torch.randn(4, 512, requires_grad=True)).square().sum().backward()
        if clip:
            clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()
    moved = zcompile.stats(model)["bytes"]
    return moved["disk_read"] / 2 / 512**2, moved["disk_write"] / 2 / 512**2


@pytest.mark.parametrize("clip", [True, False])
def test_a_step_moves_the_least_that_weights_and_states_on_disk_allow(clip, tmp_path):
    # Forward, backward and the step read the weights, 12 B; the step reads 8 B of states, and
    # writes weights and states, 12 B. Gradients fit the host; or come and go, 4 B each way.
    assert disk_bytes(tmp_path, clip, host_memory="3MiB") == (20, 12)
    assert disk_bytes(tmp_path, clip, host_memory="256KiB") == (24, 16)


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
        torch._fused_adamw_(
            [tiered[0].weight],
            [tiered[0].weight.grad],
            [],
            [],
            [],
            [],
            lr=1.0,
            beta1=0.9,
            beta2=0.9,
            weight_decay=0.0,
            eps=1e-8,
            amsgrad=False,
            maximize=False,
        )
    assert_equal(eager[0].weight.grad, tiered[0].weight.grad)
    assert_same(eager, tiered)


def twin_gradients(tmp_path, change):
    """Gradients of a plain and of a tiered model, clipped, after `change` of both."""
    found = []
    for model in (mlp(), on_disk(mlp(), tmp_path)):
        x, y = next(batches(1))
        nn.functional.cross_entropy(model(x), y).backward()
        clip_grad_norm_(model.parameters(), 0.1)
        change([p.grad for p in model.parameters()])
        found.append(gradients(model))
    return found


def test_writing_a_part_of_a_clipped_gradient_leaves_the_rest_clipped(tmp_path):
    plain_ones, tiered = twin_gradients(tmp_path, lambda grads: grads[0][3:7].mul_(2.0))
    assert tiered == plain_ones


def test_a_clipped_gradient_that_is_read_before_it_is_written_is_scaled_once(tmp_path):
    def change(grads):
        other = torch.zeros_like(grads[0])
        torch._foreach_add_([other, grads[0]], [grads[0], grads[0] * 0])

    plain_ones, tiered = twin_gradients(tmp_path, change)
    assert tiered == plain_ones


def test_an_interrupt_while_a_gradient_is_scaled_does_not_scale_it_twice(tmp_path, monkeypatch):
    ease = streaming._apply_changes

    def interrupted(*args):
        os.kill(os.getpid(), signal.SIGINT)
        ease(*args)

    def change(grads):
        if hasattr(grads[0], "entry"):
            monkeypatch.setattr(streaming, "_apply_changes", interrupted)
            with pytest.raises(KeyboardInterrupt):
                grads[0].sum()
            monkeypatch.undo()

    plain_ones, tiered = twin_gradients(tmp_path, change)
    assert tiered == plain_ones


def test_a_clipped_gradient_is_gathered_where_an_unclipped_one_is(tmp_path):
    torch.manual_seed(0)
    model = on_disk(nn.Linear(400, 400, bias=False), tmp_path)  # more than half of the arena
    model(torch.ones(2, 400)).sum().backward()
    grad = model.weight.grad
    before = grad @ torch.ones(400, 1)
    grad.mul_(0.5)
    assert torch.equal(grad @ torch.ones(400, 1), before * 0.5)


@pytest.mark.parametrize("order", [2.0, 2, 1.0, 0.0, torch.inf])
def test_norms_of_a_list_of_gradients_have_the_same_bits(order, tmp_path):
    def run(model, call):
        optimizer, seen = optim.SGD(model.parameters(), lr=0.01), []

        def measure(grads, **how):
            norms = torch._foreach_norm(grads, order, **how)
            seen.append([plain(list(norms)), [norm.dtype for norm in norms]])
            return norms

        for n, (x, y) in enumerate(batches(4)):
            nn.functional.cross_entropy(call(x), y).backward()
            grads = [p.grad for p in model.parameters()]
            norms = measure(grads)
            torch._foreach_mul_(norms, 3.0)  # they are the caller's
            norms[0].add_(1)
            seen.append(plain(norms))
            measure(grads)
            measure(grads, dtype=torch.float64)
            measure([*grads[1:], grads[0], grads[0]])
            measure([grads[0].t(), grads[2][1], grads[1]])
            seen.append(plain(clip_grad_norm_(model.parameters(), 0.3, norm_type=order)))
            measure(grads)
            grads[0].mul_(2)
            measure(grads)
            grads[1][0] = 5
            measure(grads)
            nn.functional.cross_entropy(call(x + 1), y).backward()  # a sum
            measure([p.grad for p in model.parameters()])
            optimizer.step()
            optimizer.zero_grad(set_to_none=n % 2 == 0)
        return seen

    same_training(run, tmp_path, "compiled")


def test_clipping_looks_each_gradient_up_once_and_none_by_itself(tmp_path, monkeypatch):
    torch._dynamo.reset()
    model = on_disk(mlp(), tmp_path)
    compiled = torch.compile(model, backend="zinf")
    together, alone, kept, of = [], [], Norms.kept_of_each, Norms.of

    def kept_of_each(norms, entries, *how):
        together.extend(entry.key for entry in entries)
        return kept(norms, entries, *how)

    monkeypatch.setattr(Norms, "kept_of_each", kept_of_each)
    monkeypatch.setattr(Norms, "of", lambda *asked: alone.append(1) or of(*asked))
    for steps, (x, y) in enumerate(batches(3), start=1):
        nn.functional.cross_entropy(compiled(x), y).backward()
        clip_grad_norm_(model.parameters(), 0.1)
        assert (len(together), len(alone)) == (steps * len(list(model.parameters())), 0)
        assert len({*together}) == len(together)
        model.zero_grad()


def test_norms_of_gradients_that_rest_on_the_device_are_taken_at_once(monkeypatch):
    model, compiled, optimizer = begun(4, device_memory="16MiB")
    lists, alone = [], []
    of_each, of_one = Measure.of_each, Measure.__call__
    monkeypatch.setattr(Measure, "of_each", lambda m, gs: lists.append(len(gs)) or of_each(m, gs))
    monkeypatch.setattr(Measure, "__call__", lambda m, g: alone.append(1) or of_one(m, g))
    loss_of(compiled, ids(0)).backward()
    assert lists == [len(list(model.parameters()))]
    assert not alone
    model.zero_grad()
    monkeypatch.undo()
    train(model, compiled, optimizer, 4, 6)
    assert same(model, expected(end=6))


def test_measures_of_many_are_those_of_each():
    grads = [torch.arange(float(n)).to(dtype) for n in (1, 7, 70_000) for dtype in DTYPES]
    kwargs = (("dtype", torch.float64),)
    norm_of_one = Measure(torch.ops.aten.linalg_vector_norm.default, (2,), (), False)
    for measure in (CLIPPING, Measure(CLIPPING.func, (1.0,), kwargs, True), norm_of_one):
        found = measure.of_each(grads)
        assert plain(found) == plain([measure(grad) for grad in grads])
        assert type(found[0]) is (list if measure.lists else torch.Tensor)
    asked = []
    Measure(lambda many: asked.append(len(many)) or many, (), (), True).of_each(grads)
    assert asked == [3, 3], "those of one dtype together"
    assert not CLIPPING.of_each([])


DTYPES = torch.float32, torch.bfloat16


def test_a_norm_is_its_callers_own(tmp_path):
    def run(model, call):
        seen = []
        for x, y in batches(3):
            nn.functional.cross_entropy(call(x), y).backward()
            for _ in range(2):  # the first norm is what the others are added to
                total, *others = [p.grad.norm() for p in model.parameters()]
                for norm in others:
                    total += norm
                seen.append(total.item())
            total, *_ = torch._foreach_norm([p.grad for p in model.parameters()], 2.0)
            total.zero_()
            seen.append(plain(torch._foreach_norm([p.grad for p in model.parameters()], 2.0)))
            optim.SGD(model.parameters(), lr=0.1).step()
            model.zero_grad()
        return seen

    same_training(run, tmp_path, "compiled")
