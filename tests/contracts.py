"""Contracts of the private torch APIs that are about graphs and modes, and where all are kept."""

from collections.abc import Callable

import pytest
import torch
from joint import captured, catch, copied
from offloaded import SMALL
from small_models import GPT, mlp
from torch import Tensor, fx
from torch.utils.checkpoint import checkpoint

import zcompile
from zcompile import torch_private as private

CONTRACTS: dict[str, Callable[[], None]] = {}
"""Name in `torch_private` -> a function that says what we rely on."""


def as_it_stands(gm: fx.GraphModule) -> Callable[[list[object]], object]:
    return private.boxed(lambda args: gm(*args))


def contract(function: Callable[[], None]) -> Callable[[], None]:
    """Of the name that the function is called after."""
    CONTRACTS[function.__name__] = function
    return function


@contract
def aot_backend() -> None:
    """AOTAutograd asks for a cut once, then for forward; for inference without gradients."""
    asked: list[str] = []

    def compiler(name: str) -> private.Compiler:
        def compile_(gm, inputs):
            asked.append(name)
            return as_it_stands(gm)

        return compile_

    def partition(joint, inputs, *, num_fwd_outputs, **_):
        asked.append("partition")
        assert num_fwd_outputs == 1
        from functorch.compile import default_partition

        return default_partition(joint, inputs, num_fwd_outputs=num_fwd_outputs)

    backend = private.aot_backend(
        compiler("forward"), compiler("backward"), compiler("inference"), partition
    )
    model = mlp()
    compiled = torch.compile(model, backend=backend)
    compiled(torch.ones(2, 8)).sum().backward()
    assert asked == ["partition", "forward", "backward"]
    with torch.no_grad():
        compiled(torch.ones(2, 8))
    assert asked[3:] == ["inference"]


@contract
def boxed() -> None:
    assert private.boxed(lambda args: args)._boxed_call is True


@contract
def handle_input() -> None:
    joint = captured("mlp")
    places = joint.graph.find_nodes(op="placeholder")
    handles = [n for n in places if private.handle_input(n) is not None]
    assert [joint.names[private.handle_input(n)] for n in handles] == [
        "0.weight", "0.bias", "2.weight", "2.bias",
    ]  # fmt: skip
    assert all(n.meta["val"].dtype is torch.int64 and n.meta["val"].dim() == 0 for n in handles)
    assert len(places) == len(handles) + 2


@contract
def gradient_of() -> None:
    joint = captured("mlp")
    (output,) = joint.graph.find_nodes(op="output")
    sources = [private.gradient_of(desc) for desc in output.meta["desc"]]
    assert sources[0] is None, "the result of the model comes first"
    assert [joint.names.get(source) for source in sources[1:]] == [
        "0.weight", "0.bias", None, "2.weight", "2.bias",
    ]  # fmt: skip


@contract
def is_tangent() -> None:
    places = captured("mlp").graph.find_nodes(op="placeholder")
    assert [n for n in places if private.is_tangent(n)] == [places[-1]]


@contract
def pin_phase() -> None:
    """Extraction keeps a node on the side it was pinned to, and computes nothing twice."""
    forward, backward = _cut_square()
    count = [sum(n.op == "call_function" for n in g.graph.nodes) for g in (forward, backward)]
    assert count == [1, 3]


@contract
def cut() -> None:
    forward, backward = _cut_square()
    (output,) = forward.graph.find_nodes(op="output")
    assert len(output.args[0]) == 2, "the result, then what is saved"
    assert len(backward.graph.find_nodes(op="placeholder")) == 2, "what is saved, then tangents"


def _cut_square(joint: fx.GraphModule | None = None) -> tuple[fx.GraphModule, fx.GraphModule]:
    """y = x * x and its gradient, x saved."""
    joint = joint or _square()[0]
    places = joint.graph.find_nodes(op="placeholder")
    backward: set[fx.Node] = set()
    for node in joint.graph.nodes:
        if private.is_tangent(node) or backward & set(node.all_input_nodes):
            backward.add(node)
        private.pin_phase(node, node in backward)
    return private.cut(joint, [places[0]], [], 1)


def _square(unchecked: bool = False) -> tuple[fx.GraphModule, Tensor, Tensor]:
    """The joint graph of x * x, cut as above; x and the sum of the result."""
    caught: list[fx.GraphModule] = []

    def partition(joint, inputs, *, num_fwd_outputs, **_):
        caught.append(copied(joint))
        if unchecked:
            private.save_unchecked(joint.graph.find_nodes(op="placeholder")[0])
        return _cut_square(joint)

    def compiler(gm, inputs):
        return as_it_stands(gm)

    torch._dynamo.reset()
    backend = private.aot_backend(compiler, compiler, compiler, partition)
    x = torch.ones(2, requires_grad=True)
    total = torch.compile(lambda x: x * x, backend=backend)(x).sum()
    return caught[0], x, total


@contract
def wish_of() -> None:
    """Checkpointing leaves its mark on the nodes of a joint graph; plain code leaves none."""

    def plain(x: Tensor) -> Tensor:
        return (x.sin() * x).cos()

    def checkpointed(x: Tensor) -> Tensor:
        return checkpoint(plain, x, use_reentrant=False)

    found = []
    for function in (plain, checkpointed):

        def partition(joint, inputs, **kwargs):
            from functorch.compile import default_partition

            found.append({private.wish_of(node) for node in joint.graph.nodes})
            return default_partition(joint, inputs, **kwargs)

        def compiler(gm, inputs):
            return as_it_stands(gm)

        torch._dynamo.reset()
        backend = private.aot_backend(compiler, compiler, compiler, partition)
        torch.compile(function, backend=backend)(torch.ones(2, requires_grad=True))
    assert found == [{""}, {"", "PREFER_RECOMPUTE"}]


@contract
def mutated_inputs() -> None:
    """Running statistics change in forward, parameters and inputs do not."""
    changed = private.mutated_inputs(captured("batch norm").graph)
    assert changed
    assert all(private.handle_input(node) is None for node in changed)
    assert not private.mutated_inputs(captured("mlp").graph)


@contract
def is_random() -> None:
    """By the tags of torch; attention that drops nothing is not."""
    graph = fx.Graph()
    x = graph.placeholder("x")
    aten = torch.ops.aten
    attention = aten._scaled_dot_product_flash_attention_for_cpu.default
    assert private.is_random(graph.call_function(aten.native_dropout.default, (x, 0.5, True)))
    assert private.is_random(graph.call_function(attention, (x, x, x, 0.5)))
    assert private.is_random(graph.call_function(aten.rand_like.default, (x,)))
    assert not private.is_random(graph.call_function(attention, (x, x, x)))
    assert not private.is_random(graph.call_function(aten.mm.default, (x, x)))


@contract
def save_unchecked() -> None:
    """Of two graphs whose saved value is written before backward, the marked one goes on."""
    for unchecked in (False, True):
        _, x, total = _square(unchecked)
        with torch.no_grad():
            x.add_(1)
        if unchecked:
            total.backward()
            assert x.grad.tolist() == [4.0, 4.0], "with what was written since"
        else:
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                total.backward()


@contract
def hint() -> None:
    """A dynamic size is known as it was traced, and asking does not guard."""
    torch.manual_seed(0)
    model = zcompile.offload(GPT(1), **SMALL)
    joint = catch_dynamic(model, torch.randint(0, 32, (3, 7)))
    sizes = {private.hint(n.meta["val"]) for n in joint.graph.nodes if private.is_symbol(n)}
    assert {3, 7} <= sizes
    assert private.hint(5) == 5


@contract
def is_symbol() -> None:
    assert not any(private.is_symbol(n) for n in captured("mlp").graph.nodes)
    model = zcompile.offload(GPT(1), **SMALL)
    graph = catch_dynamic(model, torch.randint(0, 32, (3, 7))).graph
    symbols = [n for n in graph.find_nodes(op="placeholder") if private.is_symbol(n)]
    assert len(symbols) >= 2


def catch_dynamic(model: torch.nn.Module, ids: Tensor) -> fx.GraphModule:
    torch._dynamo.mark_dynamic(ids, (0, 1))
    return catch(model, ids).gm


class Counting(private.DispatchMode):
    """Sees every op, within a compiled function too."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[object] = []

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen.append((func, private.is_compiling_now()))
        return func(*args, **(kwargs or {}))


@contract
def DispatchMode() -> None:
    """A mode that says so does not keep what runs under it from being compiled."""
    graphs: list[object] = []

    def backend(gm, inputs):
        graphs.append(gm)
        return gm.forward

    with Counting() as mode:
        torch.compile(lambda x: x.sin(), backend=backend)(torch.ones(2))
    assert len(graphs) == 1
    assert (torch.ops.aten.sin.default, False) in mode.seen


@contract
def without_modes() -> None:
    with Counting() as mode:
        with private.without_modes():
            torch.ones(2).cos()
        torch.ones(2).sin()
    seen = [func for func, _ in mode.seen]
    assert torch.ops.aten.cos.default not in seen
    assert torch.ops.aten.sin.default in seen


@contract
def is_compiling_now() -> None:
    """True where a backend is asked, in forward and when backward is compiled; False elsewhere."""
    said: list[bool] = []

    def backend(gm, inputs):
        said.append(private.is_compiling_now())
        return gm.forward

    torch.compile(lambda x: x.sin(), backend=backend)(torch.ones(2))
    assert said == [True]
    assert not private.is_compiling_now()


@contract
def BackendFailed() -> None:
    """What a backend raises is found inside."""

    def backend(gm, inputs):
        raise KeyError("mine")

    with pytest.raises(private.BackendFailed) as caught:
        torch.compile(lambda x: x.sin(), backend=backend)(torch.ones(2))
    assert isinstance(caught.value.inner_exception, KeyError)
