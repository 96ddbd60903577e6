"""What we rely on of each private torch API: one contract per name, on the installed torch."""

import ast
import inspect

import pytest
import torch
from contracts_of_failures import CONTRACTS, contract
from offloaded import twins
from torch import Tensor

import zcompile
from zcompile import torch_private as private
from zcompile.errors import TorchUnsupported
from zcompile.tiered import TieredTensor


class Wrapped(Tensor):
    """A wrapper subclass of our own, to see what torch does with one."""

    __torch_function__ = private.no_torch_function

    @staticmethod
    def __new__(cls, inner: Tensor, requires_grad: bool = False) -> "Wrapped":
        made = private.wrapper(cls, inner.size(), inner.stride(), 0, inner.dtype, inner.device,
                               requires_grad)  # fmt: skip
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
def check_torch() -> None:
    private.check_torch()
    first, last = private.TESTED
    assert first <= tuple(int(n) for n in torch.__version__.split(".")[:2]) <= last


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
def no_torch_function() -> None:
    torch.add(Wrapped(torch.ones(2)), 1)
    assert Wrapped.seen is torch.ops.aten.add.Tensor, "acts at dispatch, with overloads resolved"


@contract
def wrapper() -> None:
    made = private.wrapper(Wrapped, (3, 2), (1, 3), 5, torch.float16, torch.device("cpu"), True)
    assert type(made) is Wrapped
    assert (tuple(made.shape), made.stride(), made.storage_offset()) == ((3, 2), (1, 3), 5)
    assert (made.dtype, made.device.type, made.requires_grad) == (torch.float16, "cpu", True)


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
def hooks_of() -> None:
    leaf = torch.ones(2, requires_grad=True)
    assert private.hooks_of(leaf) == ({}, {})
    leaf.register_hook(print)
    leaf.register_post_accumulate_grad_hook(repr)
    before, after = private.hooks_of(leaf)
    assert list(before.values()) == [print]
    assert list(after.values()) == [repr]


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


PUBLIC = {
    node.name
    for node in ast.parse(inspect.getsource(private)).body
    if isinstance(node, ast.FunctionDef) and not node.name.startswith("_")
} | {"Dispatched", "no_torch_function", *private.__all__}


@pytest.mark.parametrize("name", sorted(CONTRACTS))
def test_torch_keeps_its_side(name):
    torch._dynamo.reset()
    CONTRACTS[name]()


def test_every_name_has_a_contract():
    assert set(CONTRACTS) == PUBLIC


@pytest.mark.parametrize("version", ["2.10.1", "2.14.0a0+git", "1.13.1", "3.0.0"])
def test_a_torch_outside_the_range_is_refused(version, monkeypatch):
    monkeypatch.setattr(torch, "__version__", version)
    with pytest.raises(TorchUnsupported, match=r"zcompile is tested with 2\.11 to 2\.13"):
        private.check_torch()


@pytest.mark.parametrize("version", ["2.11.0", "2.12.1+cu128", "2.13.0+cpu"])
def test_a_torch_within_the_range_is_taken(version, monkeypatch):
    monkeypatch.setattr(torch, "__version__", version)
    private.check_torch()


def test_a_guard_does_not_look_at_the_handle():
    """One graph serves tensors of other entries: Dynamo guards on the metadata alone."""
    pair = twins(torch.nn.ModuleList([torch.nn.Linear(8, 8) for _ in range(3)]))
    count = []

    def layer(weight, bias, x):
        return torch.nn.functional.linear(x, weight, bias)

    def counting(gm, inputs):
        count.append(gm)
        return zcompile.backend.zinf(gm, inputs)

    compiled = torch.compile(layer, backend=counting)
    rows = torch.randn(2, 8)
    for one, plain in zip(pair.model, pair.plain, strict=True):
        assert torch.equal(compiled(one.weight, one.bias, rows), plain(rows))
    assert len(count) == 1
