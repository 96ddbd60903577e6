"""Contracts of the private torch APIs that are about graphs and modes, and where all are kept."""

import copy
import functools
import io
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from functorch.compile import default_partition
from joint import captured, catch, copied
from offloaded import SMALL
from small_models import GPT, mlp
from torch import Tensor, fx
from torch._C import DispatchKey
from torch._dispatch.python import enable_python_dispatcher
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import CheckpointPolicy as TorchPolicy
from torch.utils.checkpoint import checkpoint

import zcompile
from zcompile.errors import Unsupported
from zcompile.ir import torch_compat as private
from zcompile.ir.types import CheckpointPolicy

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
    compiled = torch.compile(model, backend=copy.deepcopy(backend))
    compiled(torch.ones(2, 8)).sum().backward()
    assert asked == ["partition", "forward", "backward"]
    with torch.no_grad():
        compiled(torch.ones(2, 8))
    assert asked[3:] == ["inference"]


@contract
def let_backward_run_again() -> None:
    """Torch compiles a backward that may run once, if its first run is one, and refuses another."""

    def saves_its_own(x: torch.Tensor) -> torch.Tensor:
        return x.sin().cos().sum()  # sin(x) is nobody's but backward's

    def trained(when_forward_is_compiled: Callable[[], None]) -> torch.Tensor | None:
        from functorch.compile import default_partition

        def forward(gm: fx.GraphModule, inputs: Any) -> Callable[..., Any]:
            when_forward_is_compiled()
            return as_it_stands(gm)

        def backward(gm: fx.GraphModule, inputs: Any) -> Callable[..., Any]:
            return as_it_stands(gm)

        backend = private.aot_backend(forward, backward, forward, default_partition)
        compiled = torch.compile(saves_its_own, backend=backend)
        compiled(torch.ones(3, requires_grad=True)).backward()
        x = torch.ones(3, requires_grad=True)
        loss = compiled(x)
        loss.backward(retain_graph=True)
        loss.backward()
        return x.grad

    once = torch.ones(3, requires_grad=True)
    saves_its_own(once).backward()
    with torch._functorch.config.patch(donated_buffer=True):  # torch's default
        with pytest.raises(RuntimeError, match="non-empty donated buffers"):
            trained(lambda: None)
        torch.compiler.reset()
        assert torch.equal(trained(private.let_backward_run_again), 2 * once.grad)


@contract
def without_python_kernels() -> None:
    """Tracing prefers functions in Python to the kernels of an op, as long as they are there."""

    def ops_of(resize: Callable[..., Any]) -> set[object]:
        return {node.target for node in make_fx(resize)(torch.ones(1, 1, 4, 4)).graph.nodes}

    def resize(x: torch.Tensor) -> torch.Tensor:
        with enable_python_dispatcher():
            return torch.nn.functional.interpolate(x, scale_factor=2.0, mode="bilinear")

    vec, op = torch.ops.aten.upsample_bilinear2d.vec, torch.ops.aten.upsample_bilinear2d.default
    assert op not in ops_of(resize)
    with private.without_python_kernels([vec, op]):
        assert op in ops_of(resize)
    asked = []
    with private.without_python_kernels([op], {vec: lambda *args: asked.append(args)}):
        ops_of(lambda x: [resize(x), x][1])
    assert len(asked) == 1
    assert op not in ops_of(resize)


@contract
def give_meta_kernel() -> None:
    """Torch prefers what an op is given to its kernel in C++, for sizes that are symbols."""
    op = torch.ops.aten.upsample_bilinear2d_backward.default
    asked = []

    def meta(gradient: torch.Tensor, size: Any, input_size: Any, *given: Any) -> torch.Tensor:
        asked.append(input_size)
        return gradient.new_empty(input_size)

    def resize(gradient: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return op(gradient, gradient.shape[2:], x.shape, False)

    def traced() -> None:
        make_fx(resize, tracing_mode="symbolic")(torch.ones(1, 2, 5, 6), torch.ones(1, 2, 3, 4))

    ours = op.py_kernels.pop(DispatchKey.Meta)
    op._dispatch_cache.clear()
    try:
        with pytest.raises(RuntimeError, match="isIntList"):
            traced()
        private.give_meta_kernel(op, meta)
        traced()
        assert asked, "and else no kernel would be needed"
        private.give_meta_kernel(op, ours)
        assert op.py_kernels[DispatchKey.Meta] is meta, "what torch has is kept"
    finally:
        op.py_kernels[DispatchKey.Meta] = ours
        op._dispatch_cache.clear()


@contract
def suggested_memory_format() -> None:
    plain = torch.ones(2, 3, 4, 5)
    last = plain.contiguous(memory_format=torch.channels_last)
    assert private.suggested_memory_format(plain) == torch.contiguous_format
    assert private.suggested_memory_format(last) == torch.channels_last


@contract
def elementwise_order() -> None:
    """Of the kernels: by the first that has strides, dense whatever gaps they have."""
    plain, gaps = torch.ones(2, 3, 4, 5), torch.ones(2, 3, 4, 10)[..., ::2]
    last = plain.contiguous(memory_format=torch.channels_last)
    for tensors in [(plain, last), (last, plain), (last[:1].expand(2, 3, 4, 5), plain), (gaps.mT,)]:
        result = tensors[0].mul(tensors[-1])
        ours = result.permute(*private.elementwise_order(*tensors))
        assert ours.is_contiguous()


@contract
def surely() -> None:
    """True of symbols only where no value of theirs makes it false; nothing is assumed of them."""

    def known(sizes: Any) -> list[bool]:
        rows, columns = sizes
        pairs = [(rows * columns, columns * rows), (rows, columns), (rows, 1), (rows, 5)]
        return [private.surely(a == b) for a, b in pairs]

    found = []

    def look(x: torch.Tensor) -> torch.Tensor:
        found.extend(known(x.shape))
        return x.sin()

    graph = make_fx(look, tracing_mode="symbolic")(torch.ones(5, 6))
    assert found == [True, False, False, False]
    assert known((5, 6)) == [True, False, False, True]
    assert graph(torch.ones(7, 8)).shape == (7, 8)


@contract
def boxed() -> None:
    assert private.boxed(lambda args: args)._boxed_call is True


@contract
def handle_input() -> None:
    joint = captured("mlp")
    places = joint.graph.find_nodes(op="placeholder")
    handles = [n for n in places if private.handle_input(n) is not None]
    assert [joint.names[private.handle_input(n)] for n in handles] == [
        "0.weight",
        "0.bias",
        "2.weight",
        "2.bias",
    ]
    assert all(n.meta["val"].dtype is torch.int64 and n.meta["val"].dim() == 0 for n in handles)
    assert len(places) == len(handles) + 2


@contract
def gradient_of() -> None:
    joint = captured("mlp")
    (output,) = joint.graph.find_nodes(op="output")
    sources = [private.gradient_of(desc) for desc in output.meta["desc"]]
    assert sources[0] is None, "the result of the model comes first"
    assert [joint.names.get(source) for source in sources[1:]] == [
        "0.weight",
        "0.bias",
        None,
        "2.weight",
        "2.bias",
    ]


@contract
def is_tangent() -> None:
    places = captured("mlp").graph.find_nodes(op="placeholder")
    assert [n for n in places if private.is_tangent(n)] == [places[-1]]


@contract
def tangent_of() -> None:
    """A tangent says of which result it is the gradient, as that result itself says it."""
    graph = captured("mlp").graph
    (output,) = graph.find_nodes(op="output")
    places = graph.find_nodes(op="placeholder")
    assert private.tangent_of(places[-1]) == output.meta["desc"][0]
    assert private.tangent_of(places[0]) is None


@contract
def is_part_of_tangent() -> None:
    """Of a jagged tensor that a model returns the gradient comes in parts, of a plain one whole."""
    graphs: list[fx.Graph] = []

    def partition(joint: fx.GraphModule, *args: Any, **kwargs: Any) -> Any:
        graphs.append(joint.graph)
        return default_partition(joint, *args, **kwargs)

    def run(gm: fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        return as_it_stands(gm)

    backend = private.aot_backend(run, run, run, partition)
    parts = [torch.ones(2, 4), torch.ones(3, 4)]
    rows = torch.nested.nested_tensor(parts, layout=torch.jagged, requires_grad=True)
    weight = torch.ones(4, requires_grad=True)
    torch.compile(lambda x: (x * 3, weight.sin()), backend=backend)(rows)
    places = graphs[0].find_nodes(op="placeholder")
    assert any(private.is_part_of_tangent(place) for place in places)
    assert any(private.is_tangent(place) for place in places)
    assert not any(private.is_part_of_tangent(p) for p in places if private.is_tangent(p))


@contract
def hand_on_undefined() -> None:
    """Asked for behind a compiled call: its backward then gets None for what is undefined."""
    given: list[list[bool]] = []

    def forward(gm: fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        return as_it_stands(gm)

    def backward(gm: fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        places = gm.graph.find_nodes(op="placeholder")
        tangents = [i for i, place in enumerate(places) if private.is_tangent(place)]

        def run(args: list[Any]) -> Any:
            given.append([args[i] is None for i in tangents])
            return gm(*[torch.zeros(3) if value is None else value for value in args])

        return private.boxed(run)

    backend = private.aot_backend(forward, backward, forward, default_partition)
    call = torch.compile(lambda x: (x * 3, x.sin()), backend=backend)
    for asks in (False, True):
        x = torch.ones(3, requires_grad=True)
        first, _ = call(x)
        if asks:
            private.hand_on_undefined(private.grad_fn_of(first))
        first.sum().backward()
        assert torch.equal(x.grad, torch.full((3,), 3.0))
    assert given == [[False, False], [False, True]]


class _Ended(Exception):
    """A joint graph was traced; nothing is compiled."""


def _traced_jointly(run: Callable[[Callable[..., Any]], Any]) -> list[fx.Graph]:
    """The joint graphs that a backend is given, where `run` lets it trace."""
    found: list[fx.Graph] = []

    def partition(joint: fx.GraphModule, *args: Any, **kwargs: Any) -> Any:
        found.append(joint.graph)
        raise _Ended

    with pytest.raises(_Ended):
        run(private.aot_backend(as_it_is, as_it_is, as_it_is, partition))
    return found


def as_it_is(gm: fx.GraphModule, inputs: Any) -> Callable[..., Any]:
    return as_it_stands(gm)


@contract
def traced_again() -> None:
    """A graph of Dynamo is traced once more, from the values it was traced from, behind its
    compiling: in its joint graph nothing reads the gradient of a result that is left out, and all
    else is as before. Sizes stay dynamic, and no more is assumed of them; where torch does not tell
    that, nothing is traced again that has some."""
    kept: list[fx.GraphModule] = []

    def keeping(gm: fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        kept.append(gm)
        return private.aot_backend(as_it_is, as_it_is, as_it_is, default_partition)(gm, inputs)

    def traced(dynamic: bool) -> list[Any] | None:
        torch._dynamo.reset()
        call = torch.compile(lambda x: (x * 3, x.sin(), x.cos()), backend=keeping, dynamic=dynamic)
        call(torch.ones(5, 3, requires_grad=True))
        return private.traced_inputs(kept[-1])

    dynamic = private.TELLS_OF_GUARDS
    assert dynamic or traced(dynamic=True) is None
    inputs = traced(dynamic)
    assert inputs is not None
    reads = {}
    for left_out in ([], [1], [0, 2]):

        def trace(backend: Callable[..., Any], left_out: Sequence[int] = left_out) -> None:
            with private.traced_again(inputs, left_out):
                backend(kept[-1], list(inputs))

        (graph,) = _traced_jointly(trace)
        places = [n for n in graph.find_nodes(op="placeholder") if private.is_tangent(n)]
        reads[tuple(left_out)] = [bool(place.users) for place in places]
        sizes = places[0].meta["val"].size()
        assert any(isinstance(n, torch.SymInt) for n in sizes) == dynamic
    assert reads == {
        (): [True, True, True],
        (1,): [True, False, True],
        (0, 2): [False, True, False],
    }
    if not dynamic:
        return
    (x,) = (value for value in inputs if isinstance(value, torch.Tensor))
    with private.traced_again(inputs, []), pytest.raises(RuntimeError):
        bool(x.shape[0] == 7)
    assert x.shape[0] != 7, "and outside it is asked as ever"


@contract
def traced_inputs() -> None:
    """Not of a graph that no Dynamo traced."""
    graph = fx.Graph()
    graph.output((graph.placeholder("x"),))
    assert private.traced_inputs(fx.GraphModule(torch.nn.Module(), graph)) is None


@contract
def keeps_tangents() -> None:
    """As it is: whoever runs the backward lets go of the gradient that it was called with, and
    looks whether that is alive."""
    kept: list[bool] = []

    def forward(gm: fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        return as_it_stands(gm)

    def backward(gm: fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        def run(args: list[Any]) -> Any:
            results = gm(*args)
            tangent = weakref.ref(args.pop())
            kept.append(tangent() is not None)
            return results

        return private.boxed(run)

    backend = private.aot_backend(forward, backward, forward, default_partition)
    made = torch.compile(lambda x: x * 3, backend=backend)(torch.ones(3, requires_grad=True))
    made.sin().sum().backward()
    assert kept == [private.keeps_tangents()]


@contract
def keep_wish() -> None:
    """A copy that is given the mark of checkpointing has the wish that it stands for."""
    graph = fx.Graph()
    marked, plain, copy = (graph.placeholder(name) for name in "abc")
    marked.meta["recompute"] = TorchPolicy.MUST_SAVE
    private.keep_wish(plain, copy)
    assert private.wish_of(copy) is None
    private.keep_wish(marked, copy)
    assert private.wish_of(copy) is CheckpointPolicy.MUST_SAVE


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
    """Checkpointing leaves its mark on the nodes of a joint graph; plain code leaves none. We have
    a name for each mark that there may be."""
    assert {policy.name for policy in TorchPolicy} <= set(CheckpointPolicy.__members__)

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
    assert found == [{None}, {None, CheckpointPolicy.PREFER_RECOMPUTE}]


@contract
def mutated_inputs() -> None:
    """Running statistics change in forward, parameters and inputs do not."""
    changed = private.mutated_inputs(captured("batch norm").graph)
    assert changed
    assert all(private.handle_input(node) is None for node in changed)
    assert not private.mutated_inputs(captured("mlp").graph)


@contract
def mutated_positions() -> None:
    """They count as the inputs of the traced function do; inputs that are not written are none."""
    graph = captured("batch norm").graph
    assert len(private.mutated_positions(graph)) == len(private.mutated_inputs(graph))
    x, seen = torch.zeros(3), []

    def note(gm: fx.GraphModule, inputs: object) -> Callable[..., Any]:
        seen.append(private.mutated_positions(gm.graph))
        return private.boxed(lambda args: gm(*args))

    backend = private.aot_backend(note, note, note, private._extract_fwd_bwd_modules)
    torch.compile(lambda a, b: (a * 2, b.add_(1))[0], backend=backend)(x, x.clone())
    assert seen == [frozenset({1})]  # in the order in which they are used


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
    nodes = dynamic_graph().nodes
    sizes = {private.hint(n.meta["val"]) for n in nodes if private.is_symbol(n)}
    assert {3, 7} <= sizes
    assert private.hint(5) == 5


@contract
def symbols_of() -> None:
    """A size tells the dynamic ones that it is computed from."""
    sizes = dynamic_sizes()
    assert all(len(private.symbols_of(size)) == 1 for size in sizes)
    first, second = sizes
    assert private.symbols_of(first * second) == private.symbols_of(first) | private.symbols_of(
        second
    )
    assert private.symbols_of(5) == frozenset()


@contract
def is_bare() -> None:
    for size in dynamic_sizes():
        assert private.is_bare(size)
        assert not private.is_bare(2 * size)
    assert not private.is_bare(5)
    rows = torch.nested.nested_tensor([torch.ones(2, 3), torch.ones(1, 3)], layout=torch.jagged)
    ragged: Any = rows.size(1)
    assert isinstance(ragged, torch.SymInt)
    assert not private.is_bare(ragged)


@contract
def size_at() -> None:
    """A computed size is known for other dynamic ones, and asking does not guard."""
    first, second = dynamic_sizes()
    names = [next(iter(private.symbols_of(size))) for size in (first, second)]
    at = dict(zip(names, (11, 13), strict=True))
    assert private.size_at(first, at) == 11
    assert private.size_at(first * second // 2 + 1, at) == 11 * 13 // 2 + 1
    assert private.size_at(first, {}) == private.hint(first)
    assert private.size_at(5, at) == 5


def dynamic_sizes() -> list[torch.SymInt]:
    """Of the batch and the length of a model's tokens."""
    placeholders = dynamic_graph().find_nodes(op="placeholder")
    nodes = [n for n in placeholders if private.is_symbol(n)]
    return [node.meta["val"] for node in nodes[:2]]


@contract
def is_saved_by_graphs() -> None:
    param, other = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)
    assert not private.is_saved_by_graphs(param)
    by_its_node_alone = param * 2
    assert not private.is_saved_by_graphs(param)
    by_its_value = param * other
    assert private.is_saved_by_graphs(param)
    del by_its_node_alone, by_its_value
    assert not private.is_saved_by_graphs(param)


@contract
def is_symbol() -> None:
    assert not any(private.is_symbol(n) for n in captured("mlp").graph.nodes)
    placeholders = dynamic_graph().find_nodes(op="placeholder")
    symbols = [n for n in placeholders if private.is_symbol(n)]
    assert len(symbols) >= 2


@functools.cache
def dynamic_graph() -> fx.Graph:
    """Of a model whose batch and length, 3 and 7, are dynamic; traced once, and only looked at."""
    torch.manual_seed(0)
    ids = torch.randint(0, 32, (3, 7))
    torch._dynamo.mark_dynamic(ids, (0, 1))
    return catch(GPT(1), ids, **SMALL).graph


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
def is_made_of_others() -> None:
    """An op that has one kernel, of other ops, is those others above autograd; below it comes
    whole, and can be taken apart."""
    seen = []

    class Seeing(private.DispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(func)
            return func(*args, **(kwargs or {}))

    value, aten = torch.ones(3), torch.ops.aten
    with Seeing():
        torch.atleast_2d(value)
        with torch.inference_mode():
            torch.atleast_2d(value)
    assert aten.atleast_2d.default not in seen[:-1]
    assert private.is_made_of_others(aten.atleast_2d.default)
    assert aten.atleast_2d.default.decompose(value).shape == (1, 3)
    assert not private.is_made_of_others(aten.add.Tensor)
    assert not private.is_made_of_others(aten.native_channel_shuffle.default)


@contract
def resolving_views() -> None:
    """Without it an op that is called within `__torch_dispatch__` reads below a conjugate view that
    it makes itself; with it, it does not, and what torch left out there is left out as before."""
    made: list[Tensor] = []

    class Calls(private.DispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            made.append(func(*args, **(kwargs or {})))
            before = torch._C._dispatch_tls_local_exclude_set()
            with private.resolving_views():
                made.append(func(*args, **(kwargs or {})))
            assert torch._C._dispatch_tls_local_exclude_set() == before
            return made[-1]

    value = torch.randn(3, 3, dtype=torch.complex64)
    expected = torch.linalg.pinv(value)
    with Calls():
        torch.linalg.pinv(value)
    below, resolved = made
    assert torch.equal(resolved, expected)
    assert not torch.allclose(below, expected)


@contract
def without_first_look() -> None:
    """The first call of a graph is under a mode of torch, and not what is called without it; modes
    of the user are there in both."""
    seen: list[tuple[str, bool]] = []

    def looks(what, args):
        stack = torch.utils._python_dispatch._get_current_dispatch_mode_stack()
        seen.append((what, any(isinstance(mode, private._FIRST_LOOK) for mode in stack)))
        assert any(isinstance(mode, Counting) for mode in stack)
        return gm.forward(*args)

    gm = fx.symbolic_trace(lambda x: (x.sin(),))
    plain = private.boxed(functools.partial(looks, "plain"))
    without = private.without_first_look(functools.partial(looks, "without"))
    for call in (plain, without):

        def compiler(gm, inputs, call=call):
            return call

        backend = private.aot_backend(compiler, compiler, compiler, private.cut)
        with Counting():
            torch.compile(lambda x: x.sin(), backend=backend)(torch.ones(2))
        torch._dynamo.reset()
    assert seen == [("plain", True), ("without", False)]


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


@contract
def ends_compiling() -> None:
    """An op whose shape depends on values makes Dynamo break the graph; any other error ends it."""
    from torch._subclasses.fake_tensor import DynamicOutputShapeException

    def raises(error: Exception) -> Callable[..., Any]:
        def backend(gm, inputs):
            raise error

        return backend

    other = DynamicOutputShapeException(torch.ops.aten.nonzero.default)
    assert not private.ends_compiling(other)
    broken = torch.compile(lambda x: x.sin(), backend=raises(other))
    assert broken(torch.zeros(2)).sum() == 0
    assert private.ends_compiling(KeyError("mine"))
    ended = torch.compile(lambda x: x.cos(), backend=raises(KeyError("mine")))
    with pytest.raises(private.BackendFailed):
        ended(torch.zeros(2))


@contract
def dynamo_goes_on() -> None:
    """A backend may ask for the frame to be analysed anew, or to be skipped."""
    from torch._dynamo.exc import SkipFrame, TensorifyScalarRestartAnalysis
    from torch._subclasses.fake_tensor import DynamicOutputShapeException

    for error, graphs in [
        (TensorifyScalarRestartAnalysis(), 2),
        (SkipFrame("mine"), 1),
        (DynamicOutputShapeException(torch.ops.aten.nonzero.default), 1),
    ]:
        compiled: list[fx.GraphModule] = []

        def backend(gm, inputs, error=error, compiled=compiled):
            compiled.append(gm)
            if len(compiled) == 1:
                raise error
            return gm.forward

        torch._dynamo.reset()
        assert torch.compile(lambda x: x.sin(), backend=backend)(torch.zeros(2)).sum() == 0
        assert len(compiled) == graphs, error
        assert private.dynamo_goes_on(error)
    assert not private.dynamo_goes_on(KeyError("mine"))


@contract
def is_applied_by_a_module() -> None:
    """True for what a module applies to its tensors, by any of the verbs that convert it."""
    asked: list[bool] = []

    def ask(tensor: Tensor) -> Tensor:
        asked.append(private.is_applied_by_a_module())
        return tensor

    torch.nn.Linear(2, 2)._apply(ask)
    torch.nn.LSTM(2, 2)._apply(ask)
    assert asked
    assert all(asked)
    assert not private.is_applied_by_a_module()


@contract
def traced_only_within_others() -> None:
    """Inlined where it is called in a graph; called as it is between two."""
    compiling: list[bool] = []

    @private.traced_only_within_others
    def doubled(x: Tensor) -> Tensor:
        return x * 4 if torch.compiler.is_compiling() else x * 2

    def within(x: Tensor) -> Tensor:
        return doubled(x)

    def between(x: Tensor) -> Tensor:
        torch._dynamo.graph_break()
        made: list[Tensor] = [*map(untraced_call, [x])]
        return made[0]

    @torch.compiler.disable(recursive=False)  # type: ignore[untyped-decorator]  # torch's own
    def untraced_call(x: Tensor) -> Tensor:
        made = doubled(x)
        compiling.append(torch.compiler.is_compiling())
        return made

    one = torch.ones(1)
    assert torch.compile(within, backend="eager", fullgraph=True)(one) == 4
    assert torch.compile(between, backend="eager")(one) == 2
    assert compiling == [False]


@contract
def target_of() -> None:
    """As a module calls them, and as people do."""
    half = torch.float16
    assert private.target_of("to", (torch.device("cpu"), None, False), {}) == (
        torch.device("cpu"),
        None,
    )
    assert private.target_of("to", ("cuda:1",), {"dtype": half}) == (torch.device("cuda:1"), half)
    assert private.target_of("to", (half,), {}) == (None, half)
    assert private.target_of("cpu", (), {}) == (torch.device("cpu"), None)
    assert private.target_of("cuda", (), {}) == (torch.device("cuda"), None)
    assert private.target_of("cuda", (1,), {}) == (torch.device("cuda:1"), None)
    assert private.target_of("cuda", (), {"device": "cuda:2"}) == (torch.device("cuda:2"), None)


@contract
def storage_of() -> None:
    """Past a subclass; torch keeps one object for each storage, and no bytes for a wrapper."""
    a = torch.zeros(4)
    assert private.storage_of(a) is a.untyped_storage() is private.storage_of(a[1:])

    class Without(Tensor):
        def untyped_storage(self):
            raise AssertionError("asked")

        @classmethod
        def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
            raise AssertionError(func)

    made = private.wrapper(Without, (4,), (1,), 0, torch.float32, a.device, False)
    assert private.storage_of(made).nbytes() == 16
    assert torch.Tensor.untyped_storage(made) is private.storage_of(made)


@contract
def is_asked_by_tracing() -> None:
    """Torch's modules of tracing have these names; others, and code of users, are not meant."""

    def asked() -> bool:
        return private.is_asked_by_tracing()

    said = {}
    for module in (
        torch._dynamo.utils,
        torch._functorch._aot_autograd.runtime_wrappers,
        torch._subclasses.meta_utils,
        torch._tensor,
    ):
        scope = {"__name__": module.__name__, "asked": asked}
        exec("said = asked()", scope)
        said[module.__name__.split(".")[1]] = scope["said"]
    assert said == {"_dynamo": True, "_functorch": True, "_subclasses": True, "_tensor": False}
    assert not asked()


@contract
def LateStorage() -> None:
    """Torch notes each storage when it pickles, and asks for bytes when it writes, one by one."""
    told = []

    def read(name: str, value: Tensor) -> Tensor:
        told.append(name)
        return value.view(torch.uint8)

    class Named:
        def __init__(self, name: str, key: int, value: Tensor) -> None:
            self.name, self.value = name, value
            self.late = private.LateStorage(key, value.nbytes, lambda: read(name, value))

        def __reduce_ex__(self, protocol):
            told.append(f"pickled {self.name}")
            return private.reduced_late(torch.zeros_like(self.value), self.late, protocol)

    a, b = (Named(name, key, torch.arange(3) + key) for name, key in (("a", 1), ("b", 2)))
    file = io.BytesIO()
    torch.save([a, b, a], file)
    assert told == ["pickled a", "pickled b", "a", "b"]
    file.seek(0)
    found = torch.load(file, weights_only=True, map_location="cpu")
    assert [x.tolist() for x in found] == [[1, 2, 3], [2, 3, 4], [1, 2, 3]]


@contract
def reduced_late() -> None:
    """All but the storage is as torch says; dtypes that have no typed storage have an untyped."""
    for dtype in (torch.float32, torch.float8_e4m3fn):
        plain = torch.ones(2, 3, dtype=torch.float32).to(dtype)[1:]
        late = private.LateStorage(1, 6 * dtype.itemsize, lambda: None)
        rebuild, (own, *others) = plain.__reduce_ex__(2)
        made, (storage, *same) = private.reduced_late(plain, late, 2)
        assert (made, same) == (rebuild, others)
        assert storage._untyped_storage is late
        assert isinstance(own, torch.UntypedStorage) is (dtype is torch.float8_e4m3fn)


@contract
def memory_of() -> None:
    """Views have one memory, a copy has another, and one of no elements has its own too."""
    a, none = torch.zeros(4), (torch.zeros(0), torch.zeros(0))
    assert private.memory_of(a) == private.memory_of(a[1:]) == private.memory_of(a.detach())
    assert private.memory_of(a) != private.memory_of(a.clone())
    assert private.memory_of(none[0]) != private.memory_of(none[1])


@contract
def holders_of_memory() -> None:
    """Every tensor over a memory counts, once."""
    a = torch.zeros(4)
    assert private.holders_of_memory(a) == 1
    b = a[1:]  # its base counts, which is `a`
    assert private.holders_of_memory(a) == private.holders_of_memory(b) == 2
    c = torch.nn.Parameter(a).data
    del b
    assert private.holders_of_memory(a) == 2
    del a
    assert private.holders_of_memory(c) == 1
    storage = c.untyped_storage()
    assert private.holders_of_memory(c) == 2
    del storage
    assert private.holders_of_memory(c) == 1


@contract
def is_sole_holder() -> None:
    """Another tensor, an array of numpy, or a memory of processes, is another holder."""
    a = torch.zeros(4)
    assert private.is_sole_holder(a)
    b = a[1:]
    assert not private.is_sole_holder(a)
    del b
    assert private.is_sole_holder(a)
    assert private.is_sole_holder(torch.nn.Parameter(a.clone()))
    assert not private.is_sole_holder(torch.from_numpy(a.numpy().copy()))
    assert not private.is_sole_holder(torch.zeros(4).share_memory_())


@contract
def counted_with() -> None:
    """Another number in another memory, one count, and neither keeps the other."""
    a, value = torch.zeros(()), torch.ones(())
    made = private.counted_with(a, value)
    assert made.item() == 1
    assert private.memory_of(made) == private.memory_of(value)
    torch.autograd.graph.increment_version(a)
    assert made._version == a._version == 1
    made.add_(1)
    assert made._version == a._version == 2
    assert (a.item(), value.item()) == (0, 2)
    del value
    assert private.holders_of_memory(made) == private.holders_of_memory(a) == 1


@contract
def watch_memory() -> None:
    """Whoever writes takes the mark away, by whatever way; whoever reads does not."""
    x = torch.ones(4, 4)
    before = x.data_ptr()
    ways = (
        lambda: x.add_(1),
        lambda: x.data.add_(1),
        lambda: x[0].zero_(),
        lambda: x.numpy(),
        lambda: x.untyped_storage().fill_(0),
        lambda: x.data_ptr(),
        lambda: torch.add(x, 1, out=x),
        lambda: x.untyped_storage().copy_(torch.ones(4, 4).untyped_storage()),
    )
    for write in ways:
        x = torch.ones(4, 4)
        before = x.data_ptr()
        assert private.watch_memory(x)
        assert private.watch_memory(x[1:])
        _ = x @ x.clone(), x[1:].sum(), torch.equal(x, x), x.tolist(), repr(x), x.data.view(-1)
        assert private.is_untouched(x)
        assert private.is_untouched(x[2:])
        write()
        assert not private.is_untouched(x)
        assert x.data_ptr() == before


@contract
def is_untouched() -> None:
    """Nothing counts as untouched that is not watched; what is not torch's own cannot be."""
    foreign = torch.frombuffer(bytearray(16), dtype=torch.float32)
    for x in (foreign, torch.zeros(0), torch.zeros(4)):
        assert not private.is_untouched(x)
        watched = private.watch_memory(x)
        assert watched is private.is_untouched(x) is (x.numel() > 0 and x is not foreign)


@contract
def is_shared_between_processes() -> None:
    """Of memory that was shared it says so, which can be resized all the same."""
    x = torch.ones(4)
    assert not private.is_shared_between_processes(x)
    x.share_memory_()
    assert private.is_shared_between_processes(x)
    assert not private.owns_memory(x)
    assert not private.watch_memory(x)


@contract
def held_outside_python() -> None:
    """DLPack and a graph are told from names, views, views of what is gone, and storages."""
    x, y = torch.ones(4, 4), torch.ones(4, 4)
    assert private.held_outside_python([x, y]) == [False, False]
    kept = [x.detach(), x.data, x[1:], x[0].view(2, 2), torch.nn.Parameter(x), x.untyped_storage()]
    of_none = torch.ones(4)[1:]
    assert private.held_outside_python([x, of_none]) == [False, False]
    other = torch.from_dlpack(x)
    assert private.held_outside_python([y, x, kept[0]]) == [False, True, True]
    del x
    assert private.held_outside_python([kept[0]]) == [True]
    del other
    assert private.held_outside_python([kept[0]]) == [False]
    loss = (torch.nn.Parameter(torch.ones(4, 4)) * y).sum()
    assert private.held_outside_python([y]) == [True]
    del loss
    assert private.held_outside_python([y]) == [False]


@contract
def raw_bytes() -> None:
    """The bytes of the tensor, also of a part of another; torch takes note of nothing."""
    x = torch.arange(8.0)
    private.watch_memory(x)
    assert bytes(private.raw_bytes(x[2:4])) == bytes(x[2:4].clone().numpy())
    assert private.is_untouched(x)
    assert private.owns_memory(x)


@contract
def is_held_by() -> None:
    """A name, a view and a graph that saved it are each seen, and seen to be gone."""

    class Owner:
        value = None

    class Keeps(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, value):
            ctx.save_for_backward(value)
            return x * 2

        @staticmethod
        def backward(ctx, grad):
            return grad, None

    owner = Owner()
    owner.value = torch.zeros(4)
    holders = (
        lambda: owner.value,
        lambda: owner.value[:2],
        lambda: Keeps.apply(torch.ones(4, requires_grad=True), owner.value),
    )
    assert private.is_held_by(owner, "value")
    for hold in holders:
        held = hold()
        assert not private.is_held_by(owner, "value")
        del held
        assert private.is_held_by(owner, "value")


@contract
def owns_memory() -> None:
    """What lies in a Python buffer cannot be resized, and is known by that."""
    assert private.owns_memory(torch.zeros(4)[1:])
    assert not private.owns_memory(torch.frombuffer(bytearray(16), dtype=torch.float32))


@contract
def mark() -> None:
    """A wrapper says that it is a conjugate: ops get a clone of it, copies and views itself."""
    asked = []

    class Lazy(Tensor):
        __torch_function__ = private.no_torch_function

        @classmethod
        def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
            asked.append((func, args[0].is_conj()))
            return torch.zeros(2, dtype=torch.complex64)

    made = private.wrapper(Lazy, (2,), (1,), 0, torch.complex64, torch.device("cpu"), False)
    private.mark(made, True, False)
    assert (made.is_conj(), made.is_neg()) == (True, False)
    made.mul_(2)
    aten = torch.ops.aten
    assert asked == [(aten.clone.default, True), (aten.copy_.default, True)], "mul_ is of the clone"


@contract
def set_data() -> None:
    """A wrapper without storage takes over strides and offset."""

    def made(stride, offset):
        cpu = torch.device("cpu")
        return private.wrapper(Bare, (2, 2), stride, offset, torch.float32, cpu, False)

    one, other = made((2, 1), 0), made((1, 2), 3)
    private.set_data(one, other)
    assert (one.stride(), one.storage_offset()) == ((1, 2), 3)


@contract
def refuse_as_data() -> None:
    """Torch asks, by an op that may be answered in its place, before x takes over memory; of other
    tensors than ours it hears what it would have heard."""
    param = next(iter(zcompile.offload(mlp(), **SMALL).parameters()))
    x = torch.zeros(param.size())
    with pytest.raises(Unsupported, match=r"given \.data of a tiered one"):
        x.data = param
    assert not x.any()
    cpu = torch.device("cpu")
    other = private.wrapper(Bare, (2, 2), (2, 1), 0, torch.float32, cpu, False)
    assert torch._has_compatible_shallow_copy_type(other, other)
    assert torch._has_compatible_shallow_copy_type(x, other), "it takes a wrapper for plain"
    assert not torch._has_compatible_shallow_copy_type(x.to_sparse(), other)


class Bare(Tensor):
    """Stands for nothing: no op on it is expected."""

    __torch_function__ = private.no_torch_function

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        raise AssertionError(func)


@contract
def is_lazy() -> None:
    """Zeros without memory, conjugates and negatives are told from values in memory."""
    z = torch.ones(2, dtype=torch.complex64)
    assert private.is_lazy(torch._efficientzerotensor((2, 3)))
    assert torch._efficientzerotensor((2, 3)).data_ptr() == 0
    assert private.is_lazy(z.conj())
    assert private.is_lazy(z.conj().imag)
    assert not private.is_lazy(z)
    assert not private.is_lazy(z.real)


@contract
def materialised() -> None:
    """What is lazy gets memory of its own; what is not stays as it is."""
    z = torch.complex(torch.ones(2), torch.ones(2))
    zero = private.materialised(torch._efficientzerotensor((2, 3)))
    assert zero.data_ptr()
    assert torch.equal(zero, torch.zeros(2, 3))
    for lazy in (z.conj(), z.conj().imag):
        made = private.materialised(lazy)
        assert not private.is_lazy(made)
        assert torch.equal(made, lazy)
    assert private.materialised(z) is z
