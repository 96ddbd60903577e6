"""What we rely on of each private torch API: one contract per name, on the installed torch."""

import ast
import inspect
import os
import platform
import socket
import weakref
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from contracts_of_inductor import CONTRACTS, contract
from fresh_processes import in_fresh_process
from offloaded import twins
from torch import Tensor, fx, library
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch._subclasses.functional_tensor import dispatch_functionalize
from torch.nn.utils import parametrize
from torch.testing._internal.two_tensor import TwoTensor

import zcompile
from zcompile.ir import torch_compat as private
from zcompile.runtime.eager.tensor import TieredTensor


class Wrapped(Tensor):
    """A wrapper subclass of our own, to see what torch does with one."""

    __torch_function__ = private.no_torch_function

    @staticmethod
    def __new__(cls, inner: Tensor, requires_grad: bool = False) -> "Wrapped":
        made = private.wrapper(
            cls, inner.size(), inner.stride(), 0, inner.dtype, inner.device, requires_grad
        )
        made.inner = inner
        return made

    def __tensor_flatten__(self):
        return ["inner"], None

    @staticmethod
    def __tensor_unflatten__(inner, context, size, stride):
        return Wrapped(inner["inner"])

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        cls.seen = func
        return func(*[a.inner if isinstance(a, Wrapped) else a for a in args], **(kwargs or {}))


@contract
def Dispatched() -> None:
    assert isinstance(torch.ops.aten.mm.default, private.Dispatched)
    schema = torch.ops.aten.t.default._schema
    assert schema.arguments[0].alias_info is not None
    assert not schema.arguments[0].alias_info.is_write
    assert schema.returns[0].alias_info is not None
    assert torch.ops.aten.add_.Tensor._schema.arguments[0].alias_info.is_write
    assert torch.ops.aten.add_.Tensor._schema.is_mutable


@contract
def arguments_of() -> None:
    """Told once for each op, and as its schema says."""
    for op in (torch.ops.aten.add.out, torch.ops.aten._fused_adamw_.default):
        told = private.arguments_of(op)
        assert told is private.arguments_of(op)
        for known, argument in zip(told, op._schema.arguments, strict=True):
            alias = argument.alias_info
            assert known.name == argument.name
            assert known.writes == (alias is not None and alias.is_write)
            assert known.is_out == argument.is_out
    assert [a.is_out for a in private.arguments_of(torch.ops.aten.add.out)][-1]


@contract
def region_called() -> None:
    called = []

    @torch.compiler.nested_compile_region
    def region(x):
        return x.sin()

    def seen(gm, inputs):
        called.extend((gm, private.region_called(node)) for node in gm.graph.nodes)
        return gm

    x = torch.randn(3)
    torch.compile(lambda x: region(region(x)), backend=seen)(x)
    regions = [(gm.get_submodule(found[0]), found[1]) for gm, found in called if found is not None]
    assert len(regions) == 2
    for body, operands in regions:
        assert torch.equal(body(x)[0], x.sin())
        assert len(operands) == 1


@contract
def let_higher_order_ops_read_wrappers() -> None:
    """Told by the import of tiered tensors: what torch asks of an operand it asks of the tensor
    inside a wrapper, and of others as ever."""
    from torch._higher_order_ops.utils import _collect_fake_inputs

    with FakeTensorMode():
        inner = torch.empty(2)
    plain, wrapped = (fx.Graph().placeholder("x") for _ in range(2))
    plain.meta["example_value"], wrapped.meta["example_value"] = inner, Wrapped(inner)
    first, second, third = _collect_fake_inputs([plain, wrapped, 3])
    assert first is inner
    assert second is inner
    assert third == 3


@contract
def let_wrappers_come_as_plain_inputs() -> None:
    """Told by the import of tiered tensors: a view of one is plain where Dynamo traces it, and a
    tiered tensor where the graph is called."""
    (layer,) = twins(torch.nn.ModuleList([torch.nn.Linear(8, 8)])).model
    traced = []

    def seen(gm, inputs):
        places = gm.graph.find_nodes(op="placeholder")
        traced.append([type(node.meta["example_value"]) for node in places])
        return zcompile.frontend.backend.zinf(gm, inputs)

    rows = layer.weight.detach()[2:4]
    called = torch.compile(lambda bias, rows: bias + rows, backend=seen)(layer.bias, rows)
    assert type(rows) is TieredTensor
    assert traced == [[TieredTensor, FakeTensor]]
    assert torch.equal(called, layer.bias.detach().clone() + rows.clone())
    if hasattr(private._runtime_wrappers, "runtime_unwrap_tensor_subclasses"):
        _of_another_class_is_left_to_torch()


def _of_another_class_is_left_to_torch() -> None:
    """Where a plain tensor was traced, torch still refuses a wrapper that is not ours."""
    unwrap = private._runtime_wrappers.runtime_unwrap_tensor_subclasses
    metas = [private._PlainTensorMeta(0), private._PlainTensorMeta(1)]
    plain, other = torch.ones(2), TwoTensor(torch.ones(2), torch.zeros(2))
    assert unwrap([plain, plain], append_symints=True, subclass_metas=metas) == [plain, plain]
    with pytest.raises(AssertionError, match="expected SubclassCreationMeta"):
        unwrap([plain, other], append_symints=True, subclass_metas=metas)


@contract
def stays_one_op() -> None:
    """As AOTAutograd's graphs are: `cond` is in them, and a checkpoint is what it calls."""
    seen = []

    def noted(gm, inputs):
        seen.append([node.target for node in gm.graph.nodes])
        return private.boxed(lambda args: gm(*args))

    def given(x):
        y = torch.cond(x.sum() > 0, torch.sin, torch.cos, (x,))
        return torch.utils.checkpoint.checkpoint(torch.tanh, y, use_reentrant=False)

    def outer(gm, inputs):
        seen.append([node.target for node in gm.graph.nodes])
        return private._aot_autograd(fw_compiler=noted, bw_compiler=noted)(gm, inputs)

    with torch.no_grad():
        torch.compile(given, backend=outer)(torch.ones(3))
    higher, traced = (
        [t for t in targets if isinstance(t, torch._ops.HigherOrderOperator)] for targets in seen
    )
    assert len(higher) == 2
    assert [t for t in higher if private.stays_one_op(t)] == traced == [torch.ops.higher_order.cond]
    assert not private.stays_one_op(torch.ops.aten.sin.default)


@contract
def is_within_transform() -> None:
    seen = []

    def noted(x):
        seen.append((private.is_within_transform(x), private.is_within_transform(x.view(-1))))
        return x.sum()

    torch.vmap(noted)(torch.ones(2, 3))
    torch.func.grad(noted)(torch.ones(3))
    assert seen == [(True, True), (True, True)]
    assert not private.is_within_transform(torch.ones(3))


@contract
def faked_at_once() -> None:
    """Torch makes the fake of such an op by one call, and it traces as any other."""
    asked = []
    lib = library.Library("zinf_contract", "FRAGMENT")
    lib.define("twice(Tensor x, Device device) -> Tensor")
    lib.impl("twice", lambda x, device: 2 * x, "CompositeExplicitAutograd")

    def fake(x, device):
        asked.append(x)
        return torch.empty_strided(x.size(), x.stride(), dtype=x.dtype, device=device)

    private.faked_at_once(lib, "twice", fake)
    op = torch.ops.zinf_contract.twice.default
    cpu = torch.device("cpu")
    assert op(torch.ones(3), cpu).tolist() == [2.0, 2.0, 2.0]
    assert not asked
    with private._FakeTensorMode() as mode:
        x = torch.ones(3, 2).t()
        made = op(x, cpu)
    assert asked
    assert (made.device, made.size(), made.stride()) == (cpu, x.size(), x.stride())
    assert made.fake_mode is mode
    with private._FakeTensorMode(), pytest.raises(Exception, match="Mixing fake modes"):
        op(x, cpu)
    real = torch.ones(3)
    with private._FakeTensorMode(), pytest.raises(Exception, match="convert all Tensors to Fake"):
        op(real, cpu)

    def call(x):
        return op(x, cpu) + 1

    graph = torch.fx.experimental.proxy_tensor.make_fx(call, tracing_mode="fake")(torch.ones(2))
    assert [n.target for n in graph.graph.find_nodes(op="call_function", target=op)] == [op]
    assert graph(torch.ones(2)).tolist() == [3.0, 3.0]


@contract
def unheard_graphs() -> None:
    """AOTAutograd writes its graphs down whoever listens, and not within the context; who does
    listen hears them."""
    from torch._functorch._aot_autograd import graph_compile

    written = []
    readable = torch.fx.GraphModule.print_readable

    def noted(module, *args, **how):
        written.append(module)
        return readable(module, *args, **how)

    def traced(aot):
        torch._dynamo.reset()
        torch.compile(lambda x: (x * 2).sin(), backend=aot)(torch.ones(2, requires_grad=True))

    def plain(gm, inputs):
        return private.boxed(lambda args: gm(*args))

    backend = private._aot_autograd(fw_compiler=plain, bw_compiler=plain)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.fx.GraphModule, "print_readable", noted)
        traced(backend)
        assert len(written) == 3
        with private.unheard_graphs():
            traced(backend)
        assert len(written) == 3
        traced(backend)
        assert len(written) == 6
        patch.setattr(graph_compile.aot_graphs_log, "level", 10)
        graph_compile.aot_graphs_log.manager._clear_cache()
        with private.unheard_graphs():
            traced(backend)
        assert len(written) >= 9
    graph_compile.aot_graphs_log.manager._clear_cache()


@contract
def stop_tracing() -> None:
    """What a compiled function calls after that is not traced, until it is resumed or returns."""
    traced = []

    def backend(gm, inputs):
        traced.append(next(n.target for n in gm.graph.nodes if n.op == "call_function").__name__)
        return gm

    stopped = []

    @torch.compiler.disable(recursive=False)
    def stop():
        stopped.append(private.stop_tracing())

    @torch.compiler.disable(recursive=False)
    def resume():
        private.resume_tracing(stopped.pop())

    @torch.compile(backend=backend)
    def compiled(x, resumes):
        x = x + 1
        stop()
        x = torch.compile(torch.neg, backend=backend)(x * 2)
        if resumes:
            resume()
        return after(x)

    def after(x):
        torch._dynamo.graph_break()
        return x / 2

    assert compiled(torch.ones(2), True).tolist() == [-2, -2]
    assert traced == ["add", "neg", "truediv"]
    torch._dynamo.reset()
    assert compiled(torch.ones(2), False).tolist() == [-2, -2]
    assert traced[3:] == ["add", "neg"]
    assert torch.compile(lambda x: x - 3, backend=backend)(torch.ones(())) == -2
    assert traced[5:] == ["sub"]
    assert (lambda x: x - 4)(torch.ones(())) == -3
    assert traced[6:] == []
    assert private.stop_tracing() is None, "outside of a compiled function"
    torch._dynamo.reset()


@contract
def untraced() -> None:
    """Nothing that it calls is traced, and what comes after it is; also when it fails."""
    traced = []

    def backend(gm, inputs):
        traced.extend(n.target.__name__ for n in gm.graph.nodes if n.op == "call_function")
        return gm

    def within(x):
        return x * 2

    @private.untraced
    def doubled(x, fails=False):
        """A docstring."""
        if fails:
            raise ValueError("no")
        return within(x)

    @torch.compile(backend=backend)
    def compiled(x, fails):
        x = doubled(x, fails)
        return x + 1

    assert doubled.__doc__ == "A docstring."
    assert compiled(torch.ones(()), False) == 3
    assert traced == ["add"]
    with pytest.raises(ValueError, match="no"):
        compiled(torch.ones(()), True)
    assert (lambda x: x - 4)(torch.ones(())) == -3
    assert traced == ["add"]
    torch._dynamo.reset()


@contract
def resume_tracing() -> None:
    """As `stop_tracing`; what stopped outside of a compiled function changes nothing."""
    private.resume_tracing(private.stop_tracing())
    stop_tracing()


@contract
def tell_of_compiling() -> None:
    told = []
    begins, ends = lambda _: told.append("begins"), lambda _: told.append("ends")
    for _ in range(2):
        private.tell_of_compiling(begins, ends)

    def backend(gm, inputs):
        told.append("compiles")
        if len(told) > 3:
            raise RuntimeError("cannot")
        return gm

    def call(x):
        return x + 1

    torch.compile(call, backend=backend)(torch.ones(2))
    assert told == ["begins", "compiles", "ends"]
    with pytest.raises(BaseException, match="cannot"):
        torch.compile(lambda x: x + 2, backend=backend)(torch.ones(2))
    assert told[3:] == ["begins", "compiles", "ends"]
    torch._dynamo.reset()
    private.tell_of_compiling(begins, ends)
    torch.compile(call, backend=lambda gm, inputs: gm)(torch.ones(2))
    assert told[6:] == ["begins", "ends"]
    torch._dynamo.reset()


@contract
def no_torch_function() -> None:
    torch.add(Wrapped(torch.ones(2)), 1)
    assert Wrapped.seen is torch.ops.aten.add.Tensor, "acts at dispatch, with overloads resolved"


@contract
def wrapper() -> None:
    made = private.wrapper(Wrapped, (3, 2), (1, 3), 5, torch.float16, torch.device("cpu"), True)
    assert type(made) is Wrapped
    assert (tuple(made.shape), made.stride(), made.storage_offset()) == ((3, 2), (1, 3), 5)
    assert (made.dtype, made.device.type, made.requires_grad) == (torch.float16, "cpu", True)
    with pytest.raises(RuntimeError, match="Cannot access data pointer"):
        torch.utils.dlpack.to_dlpack(made)


@contract
def is_traceable_wrapper_subclass() -> None:
    assert private.is_traceable_wrapper_subclass(Wrapped(torch.ones(2)))
    assert not private.is_traceable_wrapper_subclass(torch.ones(2))


@contract
def is_traced() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    assert not private.is_traced(torch.ones(()))
    with FakeTensorMode():
        assert private.is_traced(torch.ones(()))


@contract
def support_foreach() -> None:
    from torch.optim import optimizer
    from torch.utils._foreach_utils import _foreach_supported_types

    private.support_foreach(TieredTensor)
    for types in (_foreach_supported_types, optimizer._foreach_supported_types):
        assert types.count(TieredTensor) == 1
        assert Tensor in types


@contract
def has_hooks() -> None:
    leaf = torch.ones(2, requires_grad=True)
    assert not private.has_hooks(leaf)
    taken = leaf.register_hook(lambda grad: None)
    assert private.has_hooks(leaf)
    taken.remove()
    leaf.register_post_accumulate_grad_hook(lambda leaf: None)
    assert not private.has_hooks(leaf)


@contract
def hooks_of() -> None:
    leaf = torch.ones(2, requires_grad=True)
    assert private.hooks_of(leaf) == ({}, {})
    leaf.register_hook(print)
    leaf.register_post_accumulate_grad_hook(repr)
    before, after = private.hooks_of(leaf)
    assert list(before.values()) == [print]
    assert list(after.values()) == [repr]


@contract
def is_written_in_graph() -> None:
    """Also by a view; a plain tensor is none that a graph writes to."""
    told: list[bool] = []

    def traced(read: Tensor, written: Tensor) -> None:
        told.append(private.is_written_in_graph(written))
        read.t().mul(2).add_(1)
        written.t()[0].mul_(2)
        told.extend(map(private.is_written_in_graph, (read, written)))

    dispatch_functionalize(traced)(torch.ones(2, 2), torch.ones(2, 2))
    assert told == [False, False, True]
    assert not private.is_written_in_graph(torch.ones(2).mul_(2))


@contract
def line_being_traced() -> None:
    assert private.line_being_traced() == ""
    lines: list[str] = []

    @library.custom_op("zinfcontract::line", mutates_args=())
    def line(x: Tensor) -> Tensor:
        return x.clone()

    @line.register_fake
    def _(x: Tensor) -> Tensor:
        lines.append(private.line_being_traced())
        return torch.empty_like(x)

    torch.compile(lambda x: line(x) + 1, backend="aot_eager")(torch.ones(2))
    assert any("in <lambda>: torch.compile(lambda x: line(x) + 1" in found for found in lines)


@contract
def forget_hooks() -> None:
    leaf, other = (torch.nn.Parameter(torch.ones(2)) for _ in range(2))
    told: list[Tensor] = []
    leaf.register_post_accumulate_grad_hook(repr)
    private.forget_hooks(leaf)
    torch.utils.swap_tensors(leaf, other)
    assert private.hooks_of(leaf) == ({}, {})
    leaf.register_post_accumulate_grad_hook(told.append)
    leaf.sum().backward()
    assert len(told) == 1


@contract
def trees() -> None:
    leaves, spec = private.trees.tree_flatten(([1, 2], {"a": None}))
    assert leaves == private.trees.tree_leaves(([1, 2], {"a": None}))
    assert private.trees.tree_unflatten([2, 3, None], spec) == ([2, 3], {"a": None})
    assert private.trees.tree_map(str, [1, (2,)]) == ["1", ("2",)]
    assert hash(spec) == hash(private.trees.tree_flatten(([5, 6], {"a": 7}))[1])


@contract
def after_backward() -> None:
    said: list[str] = []

    class Watch(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            private.after_backward(lambda: said.append("after"))
            said.append("within")
            return grad

    leaf = torch.ones(2, requires_grad=True)
    leaf.register_hook(lambda grad: said.append("leaf"))
    Watch.apply(leaf).sum().backward()
    assert said == ["within", "leaf", "after"]


@contract
def is_within_another_pass() -> None:
    """The backward of a `torch.autograd.Function` may begin a pass, of which torch runs what it
    does on the same thread."""
    said: list[bool] = []
    leaf = torch.ones(2, requires_grad=True)
    leaf.register_hook(lambda grad: said.append(private.is_within_another_pass()))
    leaf.sum().backward()
    for reentrant in (False, True):
        run = torch.utils.checkpoint.checkpoint(torch.sin, leaf * 1, use_reentrant=reentrant)
        run.sum().backward()

    def inner(x):
        return x * leaf

    torch.utils.checkpoint.checkpoint(inner, leaf * 1, use_reentrant=True).sum().backward()
    assert said == [False, False, False, True, False]
    assert not private.is_within_another_pass()


@contract
def current_pass() -> None:
    """A number of its own for each backward pass, the same all through it."""
    seen: list[int] = []
    for _ in range(2):
        one, two = (torch.ones(2, requires_grad=True) for _ in range(2))
        for leaf in (one, two):
            leaf.register_hook(lambda grad: seen.append(private.current_pass()))
        (one * two).sum().backward()
    assert seen[0] == seen[1] != seen[2] == seen[3]
    assert min(seen) >= 0
    assert private.current_pass() == -1


@contract
def accumulates_into() -> None:
    """Autograd adds to a `.grad` that is there in place, where a subclass sees it, and calls hooks
    of the leaf before it goes on."""
    said: list[object] = []

    class Gradient(torch.Tensor):
        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))

        @classmethod
        def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
            if func is torch.ops.aten.add_.Tensor:
                said.append(private.accumulates_into(args[0]))
            with torch._C._DisableTorchDispatch():
                return func(*args, **(kwargs or {}))

    leaf, other = (torch.ones(2, requires_grad=True) for _ in range(2))
    grad = torch.Tensor._make_subclass(Gradient, torch.ones(2))
    leaf.grad = grad

    def more(leaf: torch.Tensor) -> None:
        leaf.grad.add_(torch.ones(2))

    leaf.register_post_accumulate_grad_hook(more)
    (leaf * other).sum().backward()
    grad.add_(torch.ones(2))
    assert said == [leaf, leaf, None]
    assert leaf.grad is grad
    assert private.accumulates_into(grad) is None


@contract
def will_accumulate() -> None:
    said: list[bool] = []
    used, unused = (torch.ones(2, requires_grad=True) for _ in range(2))

    class Ask(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            said.extend(private.will_accumulate(leaf) for leaf in (used, unused))
            return grad

    Ask.apply(used).sum().backward()
    assert said == [True, False]
    with pytest.raises(RuntimeError):
        torch.autograd.grad(Ask.apply(used).sum(), used)


@contract
def will_accumulate_each() -> None:
    said: list[bool] = []
    used, unused, more = (torch.ones(2, requires_grad=True) for _ in range(3))

    class Ask(torch.autograd.Function):
        @staticmethod
        def forward(ctx, *given):
            return given[0] + given[1]

        @staticmethod
        def backward(ctx, grad):
            said.extend(private.will_accumulate_each([used, unused, more]))
            return grad, grad

    Ask.apply(used, more).sum().backward()
    Ask.apply(used, more).sum().backward(inputs=[more])
    assert said == [True, False, True, False, False, True]
    with pytest.raises(RuntimeError):
        torch.autograd.grad(Ask.apply(used, more).sum(), used)


@contract
def grad_fn_of() -> None:
    class Hidden(torch.Tensor):
        grad_fn = None

    leaf = torch.ones(2, requires_grad=True)
    assert private.grad_fn_of(leaf) is None
    view = leaf.view_as(leaf)
    assert private.grad_fn_of(view) is view.grad_fn
    assert view.grad_fn.next_functions[0][0].variable is leaf
    hidden = (leaf * 2).as_subclass(Hidden)
    assert hidden.grad_fn is None
    assert private.grad_fn_of(hidden) is not None


@contract
def next_sequence_number() -> None:
    before = private.next_sequence_number()
    made = torch.ones(2, requires_grad=True) * 2
    assert before <= made.grad_fn._sequence_nr() < private.next_sequence_number()


@contract
def node_of_call() -> None:
    def views(x):
        y = x.sin()
        return y.view(2, 2), y.view(4), x.view(2, 2), 3

    compiled = torch.compile(views, backend="aot_eager")
    leaf = torch.ones(4, requires_grad=True)
    found = []
    for _ in range(2):
        since = private.next_sequence_number()
        results = compiled(compiled(leaf)[1] if found else leaf)
        found.append(private.node_of_call(results, since))
        assert found[-1] is not None
        assert private.node_of_call(results, private.next_sequence_number()) is None
    assert found[0] is not found[1]
    assert private.node_of_call([leaf, leaf * 2, 3], 0) is None
    with torch.no_grad():
        assert private.node_of_call(compiled(leaf), 0) is None


@contract
def will_run() -> None:
    leaf, said = torch.ones(2, requires_grad=True), []

    class Ask(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.sum()

        @staticmethod
        def backward(ctx, grad):
            said.append([private.will_run(loss.grad_fn) for loss in (one, other)])
            return grad.expand(2)

    one, other = Ask.apply(leaf), Ask.apply(leaf)
    one.backward(retain_graph=True)
    (one + other).backward(retain_graph=True)
    torch.autograd.grad(other * 2, leaf)
    assert said == [[True, False], [True, True], [True, True], [False, True]]


@contract
def with_kept_nodes() -> None:
    leaf, other = (torch.nn.Parameter(torch.ones(2)) for _ in range(2))
    others = [leaf, leaf]
    assert private.with_kept_nodes([leaf, other]) == []
    loss = (leaf * 2).sum() + other.sum()
    assert private.with_kept_nodes([leaf, other]) == []
    loss.backward()
    node = leaf.view_as(leaf).grad_fn.next_functions[0][0]
    assert private.with_kept_nodes([other, leaf])[0] is others[0]
    assert len(private.with_kept_nodes([other, leaf])) == 1
    del node, loss
    assert private.with_kept_nodes([leaf, other]) == []


@contract
def without_weak_references() -> None:
    module = torch.nn.Sequential(torch.nn.LSTM(2, 3, num_layers=2, proj_size=1))
    assert all(weakref.getweakrefs(param) for param in module.parameters())
    with private.without_weak_references(module):
        assert not any(weakref.getweakrefs(param) for param in module.parameters())
    (lstm,) = module
    assert [ref() for ref in lstm._flat_weight_refs] == lstm._flat_weights


@contract
def set_by() -> None:
    class Own(torch.nn.Parameter):
        pass

    class Same(torch.nn.Identity):
        def right_inverse(self, value):
            return value.clone()

    stock, given = parametrize._maybe_set, []
    try:
        private.set_by(Own, lambda tensor, value: given.append(value))
        linear = torch.nn.Linear(2, 2)
        linear.weight = Own(torch.ones(2, 2))
        parametrize.register_parametrization(linear, "weight", Same())
        assert len(given) == 1
        linear.weight = torch.zeros(2, 2)
        assert len(given) == 2
        plain = torch.nn.Linear(2, 2)
        parametrize.register_parametrization(plain, "weight", Same())
        plain.weight = torch.zeros(2, 2)
        assert not plain.weight.any()
        assert len(given) == 2
    finally:
        parametrize._maybe_set = stock


@contract
def others_hold_gradient() -> None:
    """By a name, or by its memory: a part of a buffer, or of what autograd gives to several."""
    flat, seen = torch.zeros(8), []
    param = torch.nn.Parameter(torch.ones(4))
    param.register_post_accumulate_grad_hook(lambda p: seen.append(private.others_hold_gradient(p)))
    mine = torch.zeros(4)
    for grad in (mine, flat[:4], flat[4:].detach()):
        param.grad = grad
        del grad
        assert private.others_hold_gradient(param)
        (param * param).sum().backward()
    param.grad = None
    torch.cat([param, torch.ones(4, requires_grad=True)]).square().sum().backward()
    param.grad = torch.zeros(4)
    param.sum().backward()
    assert seen == [True, True, True, True, False]
    assert not private.others_hold_gradient(param)


class Hiding(torch.nn.Parameter):
    grad = None


@contract
def grad_of() -> None:
    """Autograd reads and sets it past a property too."""
    leaf = Hiding(torch.ones(2))
    (leaf * 3).sum().backward()
    assert leaf.grad is None
    assert private.grad_of(leaf).tolist() == [3, 3]


@contract
def set_grad() -> None:
    leaf = Hiding(torch.ones(2))
    private.set_grad(leaf, given := torch.ones(2))
    assert private.grad_of(leaf) is given
    (leaf * 3).sum().backward()
    assert given.tolist() == [4, 4]
    private.set_grad(leaf, None)
    assert private.grad_of(leaf) is None


@contract
def is_gradient_named() -> None:
    param = torch.nn.Parameter(torch.ones(4))
    param.grad = torch.zeros(4)
    assert not private.is_gradient_named(param)
    named = param.grad
    assert private.is_gradient_named(param)
    del named


@contract
def is_profiling() -> None:
    assert not private.is_profiling()
    for profiler in (torch.profiler.profile, torch.autograd.profiler.profile):
        with profiler():
            assert private.is_profiling()
        assert not private.is_profiling()


PUBLIC = {
    node.name
    for node in ast.parse(inspect.getsource(private)).body
    if isinstance(node, ast.FunctionDef) and not node.name.startswith("_")
} | {"Dispatched", "no_torch_function", *private.__all__}


@contract
def store_of_ranks() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        mine = private.store_of_ranks("mine")
        mine.set("a", "1")
        assert mine.check(["a"])
        assert not mine.check(["b"])
        assert mine.get("a") == b"1"
        assert not private.store_of_ranks("another").check(["a"])
        assert mine.compare_set("first", "", "told") == b"told"
        assert mine.compare_set("first", "", "late") == b"told"
    finally:
        dist.destroy_process_group()


@contract
def where_store_is() -> None:
    stores = dist.HashStore(), dist.TCPStore("localhost", 0, is_master=True)
    port = stores[1].port
    for store, told in zip(stores, [(False, "", None), (False, "localhost", port)], strict=True):
        below = dist.PrefixStore("below", store)
        dist.init_process_group("gloo", store=below, rank=0, world_size=1)
        try:
            assert private.where_store_is() == told
            env = {"TORCHELASTIC_USE_AGENT_STORE": "True", "MASTER_PORT": str(port)}
            with patch.dict(os.environ, env):
                assert private.where_store_is() == (store is stores[1], *told[1:])
        finally:
            dist.destroy_process_group()


@contract
def keys_below() -> None:
    store = dist.HashStore()
    below = private.keys_below("a", store)
    below.set("b", "1")
    assert below.get("b") == store.get("a/b") == b"1"
    assert not below.check(["a/b"])


@contract
def end_messages() -> None:
    """Whoever waits for a message of the group is told at once, whichever way it goes; another
    group of the same ranks works on."""
    store, patience = dist.HashStore(), timedelta(minutes=5)

    def groups_of(rank: int):
        names = ("ended", "other")
        return [
            dist.ProcessGroupGloo(dist.PrefixStore(name, store), rank, 2, patience)
            for name in names
        ]

    with ThreadPoolExecutor(4) as pool:
        (ended, other), (_, peer) = pool.map(groups_of, range(2))
        comes, goes = ended.recv([torch.zeros(1)], 1, 7), ended.send([torch.zeros(1)], 1, 8)
        waits = [pool.submit(work.wait, patience) for work in (comes, goes)]
        private.end_messages(ended, 9)
        for wait in waits:
            with pytest.raises(RuntimeError):
                wait.result(60)
        private.end_messages(ended, 9)  # once more: nothing is left to end
        came = torch.zeros(1)
        waits = [other.recv([came], 1, 7), peer.send([torch.ones(1)], 0, 7)]
        assert all(work.wait(patience) for work in waits)
        assert came.item() == 1.0


@contract
def store_of_torchrun() -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    told = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "RANK": "0", "WORLD_SIZE": "1"}
    with patch.dict(os.environ, told):
        store, rank, size = private.store_of_torchrun()
    store.set("a", "1")
    assert (store.get("a"), rank, size) == (b"1", 0, 1)


TELLS_OF_CALLS = hasattr(torch._C, "_accelerator_getAllocatorSettings")


def settings_told(*calls: str) -> list[object]:
    """What the settings of torch's allocator are after each of these calls, or what it returns."""
    told: list[object] = []
    for call in calls:
        if call == "set by a call":
            torch._C._accelerator_setAllocatorSettings("max_split_size_mb:32")
        elif call == "use":
            told.append(private.use_expandable_segments())
        told += [private.allocator_settings()] * (call == "told")
    return told


@contract
def allocator_settings() -> None:
    """Of either variable; and of a call, where torch tells of that."""
    for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):
        told = in_fresh_process(
            settings_told, "told", "set by a call", "told", **{name: "max_split_size_mb:64"}
        )
        assert told == [f"max_split_size_mb:{n}" for n in (64, 32 if TELLS_OF_CALLS else 64)]


@contract
def use_expandable_segments() -> None:
    """Torch reads the word; what the user has set of the allocator stays."""
    able = "microsoft" not in platform.release().lower() and torch.version.hip is None
    told = "expandable_segments:True" if able and TELLS_OF_CALLS else ""
    assert in_fresh_process(settings_told, "told", "use", "told") == ["", able, told]
    off = "expandable_segments:False"
    set_off = in_fresh_process(settings_told, "use", "told", PYTORCH_ALLOC_CONF=off)
    assert set_off == [False, off]
    # What stands behind a key that torch does not know is not looked at.
    with pytest.raises(ValueError, match="True"):
        torch._C._accelerator_setAllocatorSettings("expandable_segments:perhaps")


@contract
def spin() -> None:
    with patch.object(torch._C, "_cuda_sleep", create=True) as sleep:
        private.spin(1000)
    sleep.assert_called_once_with(1000)


@pytest.mark.parametrize("name", sorted(CONTRACTS))
def test_torch_keeps_its_side(name):
    torch._dynamo.reset()
    CONTRACTS[name]()


def test_every_name_has_a_contract():
    assert set(CONTRACTS) == PUBLIC


def test_a_guard_does_not_look_at_the_handle():
    """One graph serves tensors of other entries: Dynamo guards on the metadata alone."""
    pair = twins(torch.nn.ModuleList([torch.nn.Linear(8, 8) for _ in range(3)]))
    count = []

    def layer(weight, bias, x):
        return torch.nn.functional.linear(x, weight, bias)

    def counting(gm, inputs):
        count.append(gm)
        return zcompile.frontend.backend.zinf(gm, inputs)

    compiled = torch.compile(layer, backend=counting)
    rows = torch.randn(2, 8)
    for one, plain in zip(pair.model, pair.plain, strict=True):
        assert torch.equal(compiled(one.weight, one.bias, rows), plain(rows))
    assert len(count) == 1
