"""Hooks of every kind on tiered parameters see, change and order what they do in plain torch.

Each program trains a plain model and a tiered one; the log of all hooks, with every value that they
saw, and every gradient at the end must be the same to the bit. Beside a compiled model stands plain
torch under `backend="aot_eager"`: in which order autograd comes to parameters, and in which the
gradients of a weight used twice are added up, is no matter of tiers.
"""

import copy
import gc
import itertools

import pytest
import torch
from pairs import ON_DISK, assert_equal, plain_of
from sampled import crossed, sampled
from torch import nn

import zcompile
from zcompile.errors import ParameterChanged, Unsupported
from zcompile.ir.torch_compat import current_pass
from zcompile.runtime.gradients import gradients

MODES = pytest.mark.parametrize("mode", ["eager", "compiled"])


class Tied(nn.Module):
    """A weight that is used twice, between two that are used once."""

    def __init__(self):
        super().__init__()
        self.first, self.shared = nn.Linear(8, 8), nn.Linear(8, 8)
        self.last = nn.Linear(8, 3)

    def forward(self, x):
        return self.last(self.shared(torch.tanh(self.shared(self.first(x)))))


class Log(list):
    """What hooks saw, in order."""

    def saw(self, name, *values):
        self.append((name, [None if v is None else plain_of(v).clone() for v in values]))

    def assert_same(self, other, rtol=0.0):
        assert [name for name, _ in self] == [name for name, _ in other]
        for (_, mine), (_, theirs) in zip(self, other, strict=True):
            assert [v is None for v in mine] == [v is None for v in theirs]
            for a, b in zip(mine, theirs, strict=True):
                assert a is None or torch.allclose(a, b, rtol, rtol / 10)


def accumulator(param):
    return param.view_as(param).grad_fn.next_functions[0][0]


def pre_hook(log, name, param, kept):
    kept.append(node := accumulator(param))
    node.register_prehook(lambda grads: log.saw(f"pre {name}", *grads))


def scaling_pre_hook(log, name, param, kept):
    kept.append(node := torch.autograd.graph.get_gradient_edge(param).node)
    node.register_prehook(lambda grads: tuple(g * 0.5 for g in grads))
    node.register_prehook(lambda grads: log.saw(f"pre {name}", *grads))


def node_hook(log, name, param, kept):
    kept.append(node := accumulator(param))
    node.register_hook(lambda inputs, outputs: log.saw(f"node {name}", *outputs, param.grad))


def tensor_hook(log, name, param, kept):
    param.register_hook(lambda g: log.saw(f"tensor {name}", g))
    param.register_hook(lambda g: g.clamp(-0.1, 0.1))


def post_accumulate_hook(log, name, param, kept):
    param.register_post_accumulate_grad_hook(lambda p: log.saw(f"post {name}", p.grad))


def all_of_them(log, name, param, kept):
    for register in (node_hook, tensor_hook, pre_hook, post_accumulate_hook, scaling_pre_hook):
        register(log, name, param, kept)


KINDS = (pre_hook, scaling_pre_hook, node_hook, tensor_hook, post_accumulate_hook)


def data():
    generator = torch.Generator().manual_seed(5)
    return [torch.randn(4, 8, generator=generator) * 3**i for i in range(4)]


def once(model, call, x):
    call(x[0]).square().sum().backward()


def accumulated(model, call, x):
    for batch in x[:3]:
        call(batch).square().sum().backward()


def steps(model, call, x):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for number, batch in enumerate(x):
        call(batch).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=number != 1)


def two_calls(model, call, x):
    """Both contribute within one pass, and once more onto what is there."""
    for _ in range(2):
        (call(x[0]).square().sum() + call(x[1]).square().sum()).backward()


def kept_graph(model, call, x):
    loss = call(x[0]).square().sum()
    loss.backward(retain_graph=True)
    (loss + call(x[1]).square().sum()).backward()


def passes_that_cross(model, call, x):
    first, second = (call(batch).square().sum() for batch in x[:2])
    first.backward()
    (second + call(x[2]).square().sum()).backward()


def some_leaves(model, call, x):
    call(x[0]).square().sum().backward(inputs=[model.shared.weight, model.last.bias])


def chained(model, call, x):
    """The node that the pass begins with is that of a call, and another call comes before it."""
    for _ in range(2):
        torch.autograd.backward(call(call(x[0]).repeat(1, 3)[:, :8]), torch.ones(4, 3))


def one_by_one(*programs):
    """Programs that follow each other on one model, whose hooks are put in place once; gradients
    go on where the one before has left them."""

    def all_in_one(model, call, x):
        for program in programs:
            program(model, call, x)

    return all_in_one


PROGRAMS = (accumulated, steps, two_calls, kept_graph, passes_that_cross, some_leaves, chained)


def both(program, register, mode, tmp_path, make=Tied, rtol=0.0, **fields):
    torch._dynamo.reset()
    torch.manual_seed(0)
    plain = make()
    tiered = zcompile.offload(copy.deepcopy(plain), **{**ON_DISK, "disk": tmp_path, **fields})
    logs = Log(), Log()
    for model, log in zip((plain, tiered), logs, strict=True):
        kept = []
        register(log, model, kept)
        call = model
        if mode == "compiled":
            call = torch.compile(model, backend="zinf" if model is tiered else "aot_eager")
        program(model, call, data())
    logs[0].assert_same(logs[1], rtol)
    for a, b in zip(plain.parameters(), tiered.parameters(), strict=True):
        assert_equal(a, b)
        assert (a.grad is None) == (b.grad is None)
        if a.grad is not None and rtol:
            torch.testing.assert_close(a.grad, b.grad.cpu(), rtol=rtol, atol=rtol / 10)
        elif a.grad is not None:
            assert_equal(a.grad, b.grad)
    return logs[0]


def on_some(kind):
    """Hooks of a kind on three parameters of four; the weight used twice is among them."""

    def register(log, model, kept):
        for name in ("first.weight", "shared.weight", "last.bias"):
            kind(log, name, model.get_parameter(name), kept)

    return register


@MODES
@pytest.mark.parametrize("program", sampled(PROGRAMS, two_calls, passes_that_cross))
def test_gradients_without_any_hook_are_those_of_torch(program, mode, tmp_path):
    both(program, lambda *_: None, mode, tmp_path)


@pytest.mark.parametrize(("kind", "mode"), crossed(KINDS, ("compiled", "eager")))
def test_hooks_see_what_they_see_in_torch(kind, mode, tmp_path):
    assert both(one_by_one(once, two_calls), on_some(kind), mode, tmp_path)


@pytest.mark.parametrize(("program", "mode"), crossed(PROGRAMS, ("eager", "compiled")))
def test_hooks_of_all_kinds_together_are_called_in_the_order_of_torch(program, mode, tmp_path):
    assert both(program, on_some(all_of_them), mode, tmp_path)


def test_hooks_at_the_node_of_a_gradient_that_comes_in_tiles(tmp_path):
    def first(log, model, kept):
        all_of_them(log, "weight", model.weight, kept)

    def rows():
        return nn.Linear(8, 32)

    near = {"rtol": 1e-3, "tile_bytes": 512}  # products of tiles round otherwise
    assert both(accumulated, first, "compiled", tmp_path, make=rows, **near)


def test_hooks_are_called_in_the_first_pass_of_a_process(tmp_path, monkeypatch):
    """Torch numbers the passes of a process from 0."""
    monkeypatch.setattr(gradients, "current_pass", lambda: min(current_pass(), 0))
    assert both(once, on_some(all_of_them), "compiled", tmp_path)


def test_hooks_see_nothing_of_a_call_that_failed(tmp_path, monkeypatch):
    """What a call had brought for sums that autograd takes is gone with the call."""
    receive, numbers = gradients.Gradients.receive, itertools.count()

    def fails_once(self, *args, **kwargs):
        receive(self, *args, **kwargs)
        if next(numbers) == 3:
            raise InterruptedError("a disk, say")

    def twice(model, call, x):
        if hasattr(model.last.bias, "entry"):
            with pytest.raises(InterruptedError):
                once(model, call, x)
            model.zero_grad()
        once(model, call, x)

    monkeypatch.setattr(gradients.Gradients, "receive", fails_once)
    assert both(twice, on_some(all_of_them), "compiled", tmp_path)


def test_hooks_at_the_node_of_a_gradient_whose_tiles_come_twice(tmp_path):
    """Both uses of a weight in tiles: their sum is taken at home, after the call that brings it."""
    near = {"rtol": 1e-3, "tile_bytes": 128}
    assert both(accumulated, on_some(all_of_them), "compiled", tmp_path, **near)


@MODES
def test_a_hook_whose_node_nobody_keeps_is_gone_as_in_torch(mode, tmp_path):
    def forgotten(log, model, kept):
        pre_hook(log, "first.weight", model.first.weight, [])

    assert not both(accumulated, forgotten, mode, tmp_path)


@MODES
def test_a_hook_that_was_removed_is_not_called(mode, tmp_path):
    def removed(log, model, kept):
        kept.append(node := accumulator(model.first.weight))
        node.register_prehook(lambda grads: log.saw("pre", *grads)).remove()
        model.first.weight.register_hook(lambda g: log.saw("tensor", g)).remove()

    assert not both(accumulated, removed, mode, tmp_path)


@pytest.mark.parametrize(("place", "mode"), crossed((0, 1, 2), ("compiled", "eager")))
def test_hooks_at_a_node_that_a_list_op_leads_to(place, mode, tmp_path):
    def through_a_list(log, model, kept):
        params = [model.first.weight, model.shared.weight, model.last.bias]
        with torch.enable_grad():
            made = torch._foreach_mul(params, 2.0)
        node = made[2].grad_fn
        kept.append(node := node.next_functions[place if len(node.next_functions) > 1 else 0][0])
        node.register_prehook(lambda grads: log.saw("pre", *grads))
        node.register_hook(lambda inputs, outputs: log.saw("node", *outputs))

    assert both(one_by_one(once, accumulated), through_a_list, mode, tmp_path)


@pytest.mark.parametrize(("kind", "mode"), crossed(("all", "any"), ("eager", "compiled")))
def test_hooks_of_several_tensors(kind, mode, tmp_path):
    def several(log, model, kept):
        tensors = [model.first.weight, model.shared.weight, model.last.bias]

        def hook(grads):
            grads = grads if kind == "all" else [grads]
            log.saw("several", *grads)

        torch.autograd.graph.register_multi_grad_hook(tensors, hook, mode=kind)

    assert both(one_by_one(once, accumulated, two_calls), several, mode, tmp_path)


@pytest.mark.parametrize(("kind", "mode"), crossed(("full", "pre"), ("eager", "compiled")))
def test_hooks_of_modules(kind, mode, tmp_path):
    def of_modules(log, model, kept):
        for name in ("first", "shared", "last"):
            module = model.get_submodule(name)
            if kind == "full":
                module.register_full_backward_hook(
                    lambda m, inputs, outputs, name=name: log.saw(name, *inputs, *outputs)
                )
            else:
                module.register_full_backward_pre_hook(
                    lambda m, outputs, name=name: log.saw(name, *outputs)
                )

    assert both(one_by_one(once, accumulated), of_modules, mode, tmp_path)


def test_hooks_that_were_at_the_node_before_are_refused(tmp_path):
    model = Tied()
    kept = []
    pre_hook(Log(), "first.weight", model.first.weight, kept)
    with pytest.raises(Unsupported, match=r"'first\.weight'"):
        zcompile.offload(model, **ON_DISK, disk=tmp_path)
    assert not hasattr(model.first.weight, "entry")


def keep(tensor):
    return tensor


PACKS = {
    "as they are": (keep, keep),
    "copied": (torch.clone, keep),
}


@pytest.mark.parametrize(
    ("how", "mode"), crossed(["on cpu", "as they are", "copied"], ["compiled", "eager"])
)
def test_hooks_on_saved_tensors(how, mode, tmp_path):
    """A compiled call saves handles of parameters and gathers them again in backward."""

    def hooked(model, call, x):
        for batch in x[:2]:
            on_cpu = how == "on cpu"
            context = (
                torch.autograd.graph.save_on_cpu()
                if on_cpu
                else torch.autograd.graph.saved_tensors_hooks(*PACKS[how])
            )
            with context:
                loss = call(batch).square().sum()
            gc.collect()
            loss.backward()

    both(hooked, lambda *_: None, mode, tmp_path)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.int32])
def test_hooks_that_change_a_handle_are_found_out(dtype, tmp_path):
    torch._dynamo.reset()
    model = zcompile.offload(Tied(), **ON_DISK, disk=tmp_path)

    def pack(tensor):
        return tensor.dtype, tensor.to(dtype)

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda kept: kept[1].to(kept[0])):
        loss = torch.compile(model, backend="zinf")(data()[0]).sum()
    with pytest.raises(ParameterChanged, match="saved_tensors_hooks leave integers as they are"):
        loss.backward()
    assert all(param.grad is None for param in model.parameters())
