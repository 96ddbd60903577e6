"""Wraps every private torch API that zcompile relies on, in one place, each with a contract test.

What stands here may change between torch releases without notice; `tests/ir/test_torch_compat.py`
says for each name what we rely on. The tested range is `ir.version.TESTED`.

A list for code that is not ours, which asks of every node of a graph whether it is in a sum of
lists: a walk over thousands each time, where a set says it at once.
"""

import ctypes
import gc
import inspect
import logging
import os
import platform
import sys
import traceback
import weakref
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass
from datetime import timedelta
from functools import cache, partial, wraps
from importlib.util import find_spec
from itertools import zip_longest
from types import MappingProxyType, SimpleNamespace
from typing import Any, TypeVar, cast

import torch
from sympy import Integer  # type: ignore[import-untyped]  # it brings no annotations
from torch import Tensor, fx, library
from torch._C import DispatchKey
from torch._C._dynamo.eval_frame import set_eval_frame as _set_eval_frame
from torch._dynamo import convert_frame as _convert_frame
from torch._dynamo.backends.common import aot_autograd as _aot_autograd
from torch._dynamo.decorators import skip as _skip_frames_of
from torch._dynamo.eval_frame import skip_code as _skip_code
from torch._dynamo.exc import BackendCompilerFailed as BackendFailed
from torch._dynamo.exc import SkipFrame as _SkipFrame
from torch._dynamo.exc import TensorifyScalarRestartAnalysis as _Restart
from torch._dynamo.exc import TorchDynamoException as _TracingFailed
from torch._dynamo.exc import exceptions_allowed_to_be_fallback as _falls_back
from torch._functorch import config as _functorch_config
from torch._functorch._aot_autograd import runtime_wrappers as _runtime_wrappers
from torch._functorch._aot_autograd.descriptors import (
    GradAOTOutput,
    InputMutationAOTOutput,
    PlainAOTInput,
    SubclassGetAttrAOTInput,
    TangentAOTInput,
)
from torch._functorch._aot_autograd.schemas import PlainTensorMeta as _PlainTensorMeta
from torch._functorch.partitioners import _extract_fwd_bwd_modules
from torch._guards import CompileContext, TracingContext
from torch._guards import tracing as _tracing
from torch._prims_common import compute_elementwise_output_logical_to_physical_perm as _perm_of
from torch._prims_common import suggest_memory_format as _suggest_memory_format
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.fake_tensor import FakeTensorMode as _FakeTensorMode
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.fx import traceback as _fx_traceback
from torch.fx.experimental.symbolic_shapes import ShapeEnv as _ShapeEnv
from torch.fx.experimental.symbolic_shapes import statically_known_true as surely
from torch.nn.utils import parametrize
from torch.optim.optimizer import _foreach_supported_types as _foreach_optimizers
from torch.utils import _pytree as trees
from torch.utils._foreach_utils import _foreach_supported_types as _foreach_lists
from torch.utils._python_dispatch import TorchDispatchMode as DispatchMode
from torch.utils._python_dispatch import _disable_current_modes as without_modes
from torch.utils._python_dispatch import _get_current_dispatch_mode as _current_mode
from torch.utils._python_dispatch import _pop_mode_temporarily as _without_current_mode
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils.checkpoint import CheckpointPolicy as _CheckpointPolicy

from zcompile.ir.types import CheckpointPolicy

Dispatched = torch._ops.OpOverload
Partition = Callable[..., tuple[fx.GraphModule, fx.GraphModule]]
Compiler = Callable[[fx.GraphModule, Sequence[Any]], Callable[..., Any]]

__all__ = [
    "BackendFailed",
    "DispatchMode",
    "Dispatched",
    "LateStorage",
    "aot_backend",
    "boxed",
    "grad_of",
    "is_traceable_wrapper_subclass",
    "set_grad",
    "surely",
    "trees",
    "without_modes",
]

_GRAD: Any = vars(torch._C.TensorBase)["grad"]
_GRAD_FN: Any = vars(torch._C.TensorBase)["grad_fn"]
_ACCUMULATES: Any = vars(torch._C._functions)["AccumulateGrad"]
_sequence_number: Any = vars(torch.autograd)["_get_sequence_nr"]

_FIRST_LOOK: Any = getattr(_runtime_wrappers, "_AnalyzeCustomOpInputOutputMode", ())

no_torch_function = torch._C._disabled_torch_function_impl
"""`__torch_function__` of a subclass that acts at dispatch only."""


def stop_tracing() -> Any:
    """From here on, let `torch.compile` leave alone whatever this thread calls within the compiled
    function that it is in, if it is in one.

    Called in a function under `torch.compiler.disable(recursive=False)`; ends with that compiled
    function, or with `resume_tracing`. A compiled function that is called meanwhile is traced.
    returns  what `resume_tracing` takes
    """
    return _set_eval_frame(None)


def resume_tracing(stopped: Any) -> None:
    """Undo `stop_tracing`, which returned `stopped`, in the same compiled function."""
    _set_eval_frame(stopped)


F = TypeVar("F", bound=Callable[..., Any])


def untraced(function: F) -> F:
    """A function that runs as it stands, with all that it calls, also within compiled code.

    For what is no part of a model: a training loop that is compiled as a whole is traced wherever
    its calls lead, into the runtime as well. `torch.compiler.disable(function)` would take ten
    times as long a call, of which there is one for each gradient.
    """

    @wraps(function)
    def called(*args: Any, **kwargs: Any) -> Any:
        stopped = _set_eval_frame(None)
        try:
            return function(*args, **kwargs)
        finally:
            _set_eval_frame(stopped)

    return cast("F", _skip_frames_of(called))


def is_profiling() -> bool:
    """Whether a torch.profiler, or torch.autograd.profiler, records now, in any thread."""
    return bool(torch.autograd.profiler._is_profiler_enabled)


def wrapper(
    cls: type[Tensor],
    size: Sequence[int],
    stride: Sequence[int],
    offset: int,
    dtype: torch.dtype,
    device: torch.device,
    requires_grad: bool,
    conj: bool = False,
    neg: bool = False,
) -> Tensor:
    """A tensor of class `cls` with the given metadata and no storage. Code in C++ that asks for its
    memory gets an error.

    conj, neg  torch's own marks of lazy views. With one, every op but views, clones and copies
               arrives with a clone in its place, and what is written to that is copied back
    """
    # Saying it takes a fifth of the time, and it is nearly always zero.
    more: dict[str, Any] = {"storage_offset": offset} if offset else {}
    made: Tensor = torch.Tensor._make_wrapper_subclass(
        cls, size, strides=stride, dtype=dtype, device=device, requires_grad=requires_grad, **more
    )
    # Else it would be given the address 0, as `torch.utils.dlpack.to_dlpack` was.
    torch._C._set_throw_on_mutable_data_ptr(made)
    if conj or neg:
        mark(made, conj, neg)
    return made


def mark(tensor: Tensor, conj: bool, neg: bool) -> None:
    """`tensor` says of itself that it is a lazy conjugate, a lazy negative, or neither."""
    torch._C._set_conj(tensor, conj)
    torch._C._set_neg(tensor, neg)


def is_traced(tensor: Tensor) -> bool:
    """True for the stand-ins that tracing uses; False for a tensor that has bytes."""
    return type(tensor) is not Tensor


@dataclass(frozen=True)
class Argument:
    """What the schema of an op says of one of its arguments.

    writes  whether the op writes to it
    is_out  whether it is an `out=`
    """

    name: str
    writes: bool
    is_out: bool


@cache
def arguments_of(op: Dispatched) -> tuple[Argument, ...]:
    """The arguments of an op in their order. Torch makes its own answer anew each time, which
    takes as long as making a tensor."""
    return tuple(
        Argument(a.name, a.alias_info is not None and a.alias_info.is_write, a.is_out)
        for a in op._schema.arguments
    )


def support_foreach(cls: type[Tensor]) -> None:
    """Let stock optimizers choose for `cls` what they choose for plain tensors.

    Without it `foreach=None` means the for-loop for a subclass and the fused list kernels for a
    plain tensor on CUDA, which round differently. Optimizers ask one list of types, clipping asks
    another.
    """
    for types in (_foreach_lists, _foreach_optimizers):
        if cls not in types:
            types.append(cls)


def aot_backend(
    forward: Compiler,
    backward: Compiler,
    inference: Compiler,
    partition: Partition,
    formulas: Mapping[Dispatched, Callable[..., Any]] | None = None,
) -> Callable[..., Any]:
    """A Dynamo backend: AOTAutograd with our partitioner and compilers.

    formulas  op -> what is traced in its place; a backend can be copied, as what wraps
              torch.compile may do with its arguments
    """
    backend: Callable[..., Any] = _aot_autograd(
        fw_compiler=forward,
        bw_compiler=backward,
        inference_compiler=inference,
        partition_fn=partition,
        decompositions=dict(formulas or {}),
    )
    return backend


_left_out: ContextVar[frozenset[int] | None] = ContextVar("_left_out", default=None)
"""Which gradients of results are left out of the joint graph that is traced on this thread."""


@cache
def _install_left_out() -> None:
    """Let what AOTAutograd traces as a joint graph differentiate some of its results only."""
    from torch._functorch._aot_autograd import graph_capture

    capture: Any = graph_capture  # what it imports is no export of it
    create = capture.create_joint

    def create_joint(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        left_out = _left_out.get()
        if left_out is None:
            return create(forward, *args, **kwargs)

        @wraps(forward)
        def differentiating_fewer(*primals: Any) -> Any:
            (outs, takes_gradient), descs = forward(*primals)
            number, mask = 0, []
            for takes in takes_gradient:
                mask.append(bool(takes) and number not in left_out)
                number += bool(takes)
            return (outs, mask), descs

        joint = create(differentiating_fewer, *args, **kwargs)

        @wraps(joint)
        def with_fewer(primals: Any, tangents: Sequence[Any]) -> Any:
            return joint(primals, [t for i, t in enumerate(tangents) if i not in left_out])

        with_fewer.handle = joint.handle  # type: ignore[attr-defined]  # torch's, of its function
        return with_fewer

    capture.create_joint = create_joint


TELLS_OF_GUARDS = hasattr(_ShapeEnv, "error_on_new_guards")
"""Whether torch says where tracing assumes more of dynamic sizes than before; 2.11 does not."""


@contextmanager
def traced_again(inputs: Sequence[Any], left_out: Collection[int]) -> Iterator[None]:
    """Within, on this thread, AOTAutograd traces graphs of Dynamo from the values `inputs` of an
    earlier tracing; in the joint graph the results at the positions `left_out`, among those that
    take gradients, have none: their gradients are inputs that nothing reads.

    raises  RuntimeError, within, where tracing would assume more of dynamic sizes than before
    """
    _install_left_out()
    (mode,) = {value.fake_mode for value in _fakes(inputs)}
    outside = _left_out.set(frozenset(left_out))
    try:
        with ExitStack() as stack:
            if TELLS_OF_GUARDS and mode.shape_env is not None:
                stack.enter_context(mode.shape_env.error_on_new_guards())
            stack.enter_context(_tracing(TracingContext(mode)))
            yield
    finally:
        _left_out.reset(outside)


def traced_inputs(gm: fx.GraphModule) -> list[Any] | None:
    """What the inputs of a graph of Dynamo are traced as; None where that is not known, or nothing
    could be traced again from it."""
    places = gm.graph.find_nodes(op="placeholder")
    inputs = [place.meta.get("example_value") for place in places]
    if any(value is None for value in inputs) or len({v.fake_mode for v in _fakes(inputs)}) != 1:
        return None
    sizes = [n for value in _fakes(inputs) for n in (*value.size(), *value.stride())]
    (mode,) = {value.fake_mode for value in _fakes(inputs)}
    watched = TELLS_OF_GUARDS and mode.shape_env is not None
    return inputs if watched or all(isinstance(n, int) for n in sizes) else None


def _fakes(values: Iterable[Any]) -> Iterator[Any]:
    """The fake tensors among values, and those within tensors of a subclass."""
    for value in values:
        if isinstance(value, FakeTensor):
            yield value
        elif isinstance(value, Tensor) and is_traceable_wrapper_subclass(value):
            names, _ = value.__tensor_flatten__()
            yield from _fakes(getattr(value, name) for name in names)


def let_backward_run_again() -> None:
    """Let the backward of the graph that is being compiled run several times, as with
    `retain_graph=True`; to be called while its forward is compiled.

    AOTAutograd lists what of the saved values Inductor may overwrite, and refuses such a backward
    wherever that list is not empty, whatever backend runs it. We overwrite none of them.
    """
    context = TracingContext.try_get()
    metadata = None if context is None else context.fw_metadata
    if metadata is not None and metadata.bw_donated_idxs:
        metadata.bw_donated_idxs.clear()  # in place: several descriptions of a graph share the list


_unheard = ContextVar("_unheard", default=False)
"""Whether nobody is to hear of graphs on this thread."""


@cache
def _install_unheard_graphs() -> None:
    """Let what writes AOTAutograd's graphs down ask first whether somebody listens."""
    from torch._functorch._aot_autograd import graph_compile

    def asking(write: Callable[..., Any], nothing: Any) -> Callable[..., Any]:
        def ask(*args: Any, **kwargs: Any) -> Any:
            heard = (
                graph_compile.aot_graphs_log.isEnabledFor(logging.INFO)
                or graph_compile.aot_joint_log.isEnabledFor(logging.INFO)
                or torch._logging._internal.trace_log.handlers
            )
            return nothing if _unheard.get() and not heard else write(*args, **kwargs)

        return ask

    graph_compile._log_joint_graph = asking(graph_compile._log_joint_graph, None)
    graph_compile._log_fw_bw_graphs = asking(graph_compile._log_fw_bw_graphs, (None, None))


@contextmanager
def unheard_graphs() -> Iterator[None]:
    """Within the context AOTAutograd does not write down its graphs for logs that nobody reads,
    which it does at any level of logging: three times the whole graph, as long as a pass takes."""
    _install_unheard_graphs()
    outside = _unheard.set(True)
    try:
        yield
    finally:
        _unheard.reset(outside)


@contextmanager
def without_python_kernels(
    ops: Iterable[Dispatched],
    instead: Mapping[Dispatched, Callable[..., Any]] = MappingProxyType({}),
) -> Iterator[None]:
    """Within, tracing meets the kernels that run in eager PyTorch, where torch has registered
    functions in Python that it prefers while it traces.

    instead  ops of which tracing meets other functions in their place
    """
    taken = [
        (op, key, op.py_kernels.pop(key))
        for op in (*ops, *instead)
        for key in (DispatchKey.Autograd, DispatchKey.CompositeImplicitAutograd)
        if key in op.py_kernels
    ]
    for op, key, _ in taken:
        op._dispatch_cache.clear()
        if op in instead:
            op.py_kernels[key] = instead[op]
    try:
        yield
    finally:
        for op, key, kernel in taken:
            op.py_kernels[key] = kernel
            op._dispatch_cache.clear()


def give_meta_kernel(op: Dispatched, meta: Callable[..., Any]) -> None:
    """From here on whoever traces takes the result of an op from `meta`, for which torch has a
    kernel in C++ that takes no symbolic sizes (isIntList() INTERNAL ASSERT FAILED)."""
    if DispatchKey.Meta not in op.py_kernels:
        op.py_impl(DispatchKey.Meta)(meta)


def suggested_memory_format(x: Tensor) -> torch.memory_format:
    """The format by which kernels lay out what they make of a tensor of 4 or 5 dimensions."""
    return _suggest_memory_format(x)


def elementwise_order(*tensors: Tensor) -> list[int]:
    """The dimensions of what a kernel computes of each element of some tensors, the one with the
    largest stride first."""
    order, _ = _perm_of(*tensors)
    return order


@cache
def is_made_of_others(op: Dispatched) -> bool:
    """Whether torch has one kernel for an op, for all devices, that calls other ops, and makes that
    of it where autograd is not skipped."""
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    composite = has(op.name(), "CompositeImplicitAutograd")
    return composite and not any(has(op.name(), key) for key in ("CPU", "CUDA"))


def boxed(function: Callable[[list[Any]], Any]) -> Callable[..., Any]:
    """`function` takes one list, which it may empty: the boxed calling convention."""
    function._boxed_call = True  # type: ignore[attr-defined]  # the convention's marker
    return function


def without_first_look(function: Callable[[list[Any]], Any]) -> Callable[..., Any]:
    """A boxed `function` that is called without the mode in which torch looks for aliases among the
    results of custom ops, in the first call of a graph.

    Under any mode an op of complex numbers reads below conjugate views that it makes itself
    (`resolving_views`), so that the first call of a graph had other numbers than the second
    (pytorch/pytorch#198118).
    """

    def call(args: list[Any]) -> Any:
        if not isinstance(_current_mode(), _FIRST_LOOK):
            return function(args)
        with _without_current_mode():
            return function(args)

    return boxed(call)


def handle_input(node: fx.Node) -> int | None:
    """Position of the tiered input whose handle a placeholder is; None for other placeholders."""
    desc = node.meta.get("desc")
    if isinstance(desc, SubclassGetAttrAOTInput) and isinstance(desc.base, PlainAOTInput):
        return desc.base.idx
    return None


def gradient_of(desc: object) -> int | None:
    """Position of the plain input whose gradient an output is; None for any other output."""
    if isinstance(desc, GradAOTOutput) and isinstance(desc.grad_of, PlainAOTInput):
        return desc.grad_of.idx
    return None


def pin_phase(node: fx.Node, backward: bool) -> None:
    """Tell torch's extraction on which side of the cut a node belongs."""
    node.meta["partitioner_tag"] = "must_be_in_backward" if backward else "must_be_in_forward"


class SetBackedList(list[Any]):
    """A list whose sum with other lists knows its members, as long as nobody changes it.

    For torch's partitioner, which asks of every node of a graph whether it is in a sum of lists:
    without a set that walks over thousands of nodes each time.
    """

    def __add__(self, other: Iterable[Any]) -> "SetBackedList":
        return _Sum([*self, *other])


class _Sum(SetBackedList):
    def __init__(self, values: Iterable[Any]) -> None:
        super().__init__(values)
        self._held = frozenset(self)

    def __contains__(self, value: object) -> bool:
        return value in self._held


def cut(
    joint: fx.GraphModule, saved: list[fx.Node], saved_symbols: list[fx.Node], forward_outputs: int
) -> tuple[fx.GraphModule, fx.GraphModule]:
    """Forward and backward modules of a joint graph, saving exactly the nodes named.

    Every node must carry its phase (`pin_phase`), so that nothing is computed twice.
    """
    # Each node is looked for in the sum of these and others, which begins with the symbols.
    forward, backward = _extract_fwd_bwd_modules(
        joint, SetBackedList(saved), SetBackedList(saved_symbols), num_fwd_outputs=forward_outputs
    )
    return forward, backward


def hooks_of(param: Tensor) -> tuple[Mapping[int, Any], Mapping[int, Any]]:
    """Tensor hooks and post-accumulate hooks that a user registered on a leaf."""
    return param._backward_hooks or {}, param._post_accumulate_grad_hooks or {}


def has_hooks(param: Tensor) -> bool:
    """Whether a user registered a tensor hook on a leaf."""
    return bool(param._backward_hooks)


def current_pass() -> int:
    """Which backward pass is running on this thread; -1 outside of any."""
    return torch._C._current_graph_task_id()


def wish_of(node: fx.Node) -> CheckpointPolicy | None:
    """The user's wish for a value through torch.utils.checkpoint; None outside of any
    checkpoint."""
    mark = node.meta.get("recompute")
    if not isinstance(mark, _CheckpointPolicy):
        return None
    return CheckpointPolicy.__members__.get(mark.name)


def keep_wish(node: fx.Node, copy: fx.Node) -> None:
    """Give a copy of a node the wish that the user has for its value."""
    if (mark := node.meta.get("recompute")) is not None:
        copy.meta["recompute"] = mark


def mutated_inputs(graph: fx.Graph) -> frozenset[fx.Node]:
    """The placeholders whose tensors hold something else after forward than before it."""
    (output,) = graph.find_nodes(op="output")
    descs = output.meta.get("desc") or ()
    changed = [d.mutated_input for d in descs if isinstance(d, InputMutationAOTOutput)]
    return frozenset(
        node
        for node in graph.find_nodes(op="placeholder")
        if node.meta.get("desc") in changed
        or any(
            isinstance(user.target, Dispatched) and user.target._schema.is_mutable
            for user in node.users
        )
    )


def mutated_positions(graph: fx.Graph) -> frozenset[int]:
    """Positions of the mutated inputs among the plain inputs of the traced function."""
    descs = (node.meta.get("desc") for node in mutated_inputs(graph))
    return frozenset(desc.idx for desc in descs if isinstance(desc, PlainAOTInput))


def region_called(node: fx.Node) -> tuple[str, tuple[Any, ...]] | None:
    """Where the module has the graph of a `torch.compiler.nested_compile_region` that Dynamo wrote
    a call of, and what it is called with; None for any other node."""
    if node.target is not torch.ops.higher_order.invoke_subgraph:
        return None
    graph, _, *operands = node.args
    assert isinstance(graph, fx.Node)
    return str(graph.target), tuple(operands)


def stays_one_op(target: object) -> bool:
    """Whether AOTAutograd writes a call of a higher-order op into its graph, as of `torch.cond`: it
    traces into others, as that of a checkpoint."""
    return (
        isinstance(target, torch._ops.HigherOrderOperator)
        and DispatchKey.Functionalize in target.py_kernels
    )


def let_higher_order_ops_read_wrappers() -> None:
    """Let Dynamo trace a higher-order op of which an operand is of a wrapper subclass.

    It looks for aliases among the operands, and asks each for its storage. Torch 2.11 fails at a
    wrapper, which has none; later releases ask the tensors inside, as is done here.
    """
    from torch._higher_order_ops import utils

    if hasattr(utils, "is_traceable_wrapper_subclass"):
        return
    collect: Callable[[Sequence[Any]], list[Any]] = utils._collect_fake_inputs

    def collect_inside(operands: Sequence[Any]) -> list[Any]:
        found: list[Any] = []
        for operand in operands:
            node = operand.node if isinstance(operand, fx.Proxy) else operand
            value = node.meta.get("example_value") if isinstance(node, fx.Node) else None
            if is_traceable_wrapper_subclass(value):
                found += [getattr(value, name) for name in value.__tensor_flatten__()[0]]
            else:
                found += collect([operand])
        return found

    utils._collect_fake_inputs = collect_inside


def let_wrappers_come_as_plain_inputs(cls: type[Tensor]) -> None:
    """Let a compiled graph be called with a tensor of `cls`, a wrapper subclass, where a plain one
    was traced, as a view of a tiered parameter is: its ops take it as it is.

    Torch 2.11 refuses that where another input is a wrapper, and still does for other subclasses;
    later releases do not look.
    """
    if find_spec("torch._functorch._aot_autograd.subclass_codegen") is not None:
        return
    torchs: Any = _runtime_wrappers
    unwrap: Callable[..., list[Any]] = torchs.runtime_unwrap_tensor_subclasses

    def unwrap_as_traced(
        args: Sequence[Any], *, append_symints: bool, subclass_metas: Sequence[Any] | None = None
    ) -> list[Any]:
        if subclass_metas is None:
            return unwrap(args, append_symints=append_symints)
        found: list[Any] = []
        for value, meta in zip_longest(args, subclass_metas):
            metas = [] if meta is None else [meta]  # none: of what comes behind
            if isinstance(value, cls) and (meta is None or isinstance(meta, _PlainTensorMeta)):
                found.append(value)
            else:
                found += unwrap([value], append_symints=append_symints, subclass_metas=metas)
        return found

    torchs.runtime_unwrap_tensor_subclasses = unwrap_as_traced


def is_flex_attention(node: fx.Node) -> bool:
    """Whether a node calls `flex_attention`, or its gradient: attention that is given graphs, of
    what becomes of a score and of which pairs there are."""
    flex = torch.ops.higher_order
    return node.target in (flex.flex_attention, flex.flex_attention_backward)


def is_random(node: fx.Node) -> bool:
    """Whether a call draws random numbers, or may give other bits when it is called again.

    Attention is marked as random for its dropout, also where its dropout is 0.
    """
    assert isinstance(node.target, Dispatched)
    if getattr(torch.Tag, "nondeterministic_bitwise", None) in node.target.tags:
        return True
    for position, argument in enumerate(arguments_of(node.target)):
        if argument.name == "dropout_p":
            default = node.target._schema.arguments[position].default_value
            given = (
                node.args[position]
                if position < len(node.args)
                else node.kwargs.get(argument.name, default)
            )
            return bool(given != 0.0)
    return torch.Tag.nondeterministic_seeded in node.target.tags


def save_unchecked(node: fx.Node) -> None:
    """Let autograd save a value without a check for later in-place changes, which do not matter to
    backward."""
    node.meta["saved_tensor_with_no_vc_check"] = True


def is_written_in_graph(traced: Tensor) -> bool:
    """Whether the graph that was traced writes to `traced`, a value of it that functionalization
    stands for, or to a view of it."""
    return isinstance(traced, FunctionalTensor) and bool(
        torch._functionalize_has_data_mutation(traced.elem)  # type: ignore[attr-defined]  # no stub
    )


def line_being_traced() -> str:
    """The innermost line of the user's code of which torch traces what it computes, and where it
    stands; "" if nobody knows."""
    trace = str(_fx_traceback.get_current_meta().get("stack_trace", ""))
    lines = [line.strip() for line in trace.splitlines() if line.strip(" ^~")]
    return ": ".join(lines[-2:])


def forget_hooks(param: Tensor) -> None:
    """Drop the hooks of a leaf that is about to be swapped.

    `swap_tensors` exchanges what calls the hooks, but not the dicts that later ones are put into.
    """
    param._backward_hooks = None
    param._post_accumulate_grad_hooks = None  # type: ignore[assignment]  # as before the first one


_Function = TypeVar("_Function", bound=Callable[..., Any])


def traced_only_within_others(function: _Function) -> _Function:
    """Let Dynamo trace `function` where what it traces calls it, and make no graph of it alone, as
    it does of what runs between two graphs."""
    _skip_code(function.__code__)
    return function


def is_applied_by_a_module() -> bool:
    """Whether `nn.Module._apply`, which `to` and `float` of a module call, is running here."""
    frame = inspect.currentframe()
    while frame is not None:
        if frame.f_code is torch.nn.Module._apply.__code__:
            return True
        frame = frame.f_back
    return False


def target_of(
    name: str, args: Sequence[Any], kwargs: dict[str, Any]
) -> tuple[torch.device | None, torch.dtype | None]:
    """Device and dtype that `Tensor.<name>`, one of `to`, `cuda` and `cpu`, is called with."""
    if name == "to":
        device, dtype, *_ = torch._C._nn._parse_to(*args, **kwargs)
        return device, dtype
    index = args[0] if args else kwargs.get("device")
    if isinstance(index, int):
        return torch.device(name, index), None
    return torch.device(index or name), None


@contextmanager
def without_weak_references(model: torch.nn.Module) -> Iterator[None]:
    """Within the context, recurrent modules hold no weak references to their parameters."""
    recurrent = [m for m in model.modules() if isinstance(m, torch.nn.RNNBase)]
    for module in recurrent:
        module._flat_weight_refs = []
    try:
        yield
    finally:
        for module in recurrent:
            module._flat_weight_refs = [
                None if weight is None else weakref.ref(weight) for weight in module._flat_weights
            ]


def set_by(cls: type[Tensor], put: Callable[[Any, Tensor], None]) -> None:
    """Let a parametrization call `put(tensor, value)` instead of swapping tensors of `cls`.

    `tensor` is one that a parametrization is registered on, or the original of one.
    """
    torchs: Any = parametrize
    stock = torchs._maybe_set

    def maybe_set(tensor: Tensor, value: Tensor) -> None:
        if isinstance(tensor, cls):
            put(tensor, value)
        else:
            stock(tensor, value)

    torchs._maybe_set = maybe_set


_RUNS_PASS = torch.autograd.graph._engine_run_backward.__code__
_CALLS_FUNCTION = torch.autograd.function.BackwardCFunction.apply.__code__
"""By which autograd calls the backward of a `torch.autograd.Function`."""


def is_within_another_pass() -> bool:
    """Whether the backward pass that runs on this thread was begun by a node of another, as the
    recomputation of a reentrant checkpoint does; its end is not the end of that."""
    is_begun = False
    frame = sys._getframe(1)
    while frame is not None:
        if is_begun and frame.f_code in (_RUNS_PASS, _CALLS_FUNCTION):
            return True
        is_begun = is_begun or frame.f_code is _RUNS_PASS
        frame = frame.f_back  # type: ignore[assignment]
    return False


@untraced
def _called(callback: Callable[[], None]) -> None:
    """What is called when a pass has ended, which it may have within compiled code."""
    callback()


def after_backward(callback: Callable[[], None]) -> None:
    """Run `callback` when the backward pass that is running now has ended."""
    torch.autograd.Variable._execution_engine.queue_callback(partial(_called, callback))


def is_tangent(node: fx.Node) -> bool:
    """Whether a placeholder carries a gradient into the backward half."""
    return isinstance(node.meta.get("desc"), TangentAOTInput)


def tangent_of(node: fx.Node) -> object:
    """What the output whose gradient a placeholder carries is described by; None of any other."""
    desc = node.meta.get("desc")
    return desc.output if isinstance(desc, TangentAOTInput) else None


def is_part_of_tangent(node: fx.Node) -> bool:
    """Whether a placeholder carries a part of a gradient that is of a subclass."""
    desc = node.meta.get("desc")
    while isinstance(desc, SubclassGetAttrAOTInput):
        desc = desc.base
        if isinstance(desc, TangentAOTInput):
            return True
    return False


def hand_on_undefined(node: Any) -> None:
    """Let the backward of a compiled call, which `node` of autograd will run, be called with None
    for the gradients that are undefined; with zeros otherwise.

    As a custom function asks for it in its forward; autograd looks it up when it runs the node.
    """
    node.set_materialize_grads(False)


def keeps_tangents() -> bool:
    """Whether the gradients that a compiled backward is called with stay alive until it is over.

    Torch 2.11 calls it with a tuple, which its caller holds; later releases with a list, which is
    emptied.
    """
    return not hasattr(torch.autograd.Function, "boxed_grads_call")


def hint(value: int | torch.SymInt) -> int:
    """A size as an int; a dynamic one as it was when the graph was traced. Adds no guard."""
    if isinstance(value, torch.SymInt):
        found = value.node.hint
        return int(found) if found is not None else 1
    return int(value)


def symbols_of(value: int | torch.SymInt) -> frozenset[str]:
    """Names of the dynamic sizes that a size is computed from. Adds no guard."""
    if not isinstance(value, torch.SymInt):
        return frozenset()
    return frozenset(symbol.name for symbol in value.node.expr.free_symbols)


def is_bare(value: int | torch.SymInt) -> bool:
    """Whether a size is one dynamic size itself, and not computed from such.

    The ragged size of a nested tensor is none: a symbol stands for it, and no number.
    """
    if not isinstance(value, torch.SymInt) or value.node.is_nested_int():
        return False
    return bool(value.node.expr.is_symbol)


def size_at(value: int | torch.SymInt, sizes: Mapping[str, int]) -> int:
    """A size as an int, with `sizes` for the dynamic sizes, by name; others count as in `hint`.
    Adds no guard."""
    if not isinstance(value, torch.SymInt):
        return int(value)
    term = value.node.expr
    known = {s: Integer(sizes[s.name]) for s in term.free_symbols if s.name in sizes}
    found = term.xreplace(known)
    return int(found) if found.is_number else hint(value)


def grad_fn_of(tensor: Tensor) -> Any:
    """`tensor.grad_fn`, past a property of that name that a subclass has."""
    return _GRAD_FN.__get__(tensor)


grad_of: Callable[[Tensor], Tensor | None] = _GRAD.__get__
"""`tensor.grad`, past a property of that name that a subclass has. It is torch's own, in C: a step
asks each parameter six times."""

set_grad: Callable[[Tensor, Tensor | None], None] = _GRAD.__set__
"""`tensor.grad = grad`, past a property of that name that a subclass has. Autograd sets it past any
property."""


def next_sequence_number() -> int:
    """Sequence number of the next autograd node that this thread makes; earlier nodes have smaller
    ones."""
    number: int = _sequence_number()
    return number


def node_of_call(values: Sequence[Any], since: int) -> Any | None:
    """The node by which autograd will run the backward of a compiled call; None without one.

    values  results of the call, and the inputs it wrote
    since   `next_sequence_number()` before the call: older nodes are those of its inputs
    """
    seen = [grad_fn_of(value) for value in values if isinstance(value, Tensor)]
    while seen:
        node = seen.pop()
        if node is None or node.name() == "torch::autograd::AccumulateGrad":
            continue
        if node._sequence_nr() >= since:
            if node.name() == "CompiledFunctionBackward":
                return node
            seen.extend(before for before, _ in node.next_functions)  # of a view of a result
    return None


def will_run(node: Any) -> bool:
    """Whether the backward pass that is running now comes to `node`, or has been there.

    Of the one node that a pass begins with torch knows it only while it runs.
    """
    if node is torch._C._current_autograd_node():
        return True
    return torch._C._will_engine_execute_node(node)


def accumulates_into(grad: Tensor) -> Tensor | None:
    """The leaf to whose `.grad`, which is this tensor, autograd adds now, or hooks of that leaf are
    called now; None otherwise."""
    node: Any = torch._C._current_autograd_node()
    if node is None or node.name() != "torch::autograd::AccumulateGrad":
        return None
    leaf: Tensor = node.variable
    return leaf if grad_of(leaf) is grad else None


def will_accumulate(param: Tensor) -> bool:
    """Whether the backward pass that is running now is to add to `param.grad`."""
    # As `torch.autograd.graph.get_gradient_edge` finds it, but past `__torch_dispatch__`.
    with torch.enable_grad(), torch._C._DisableTorchDispatch():
        view: Any = param.view_as(param)
    return will_run(grad_fn_of(view).next_functions[0][0])


def will_accumulate_each(params: Sequence[Tensor]) -> list[bool]:
    """`will_accumulate` of each of `params`: a backward asks that of hundreds at once."""
    here, is_executed = torch._C._current_autograd_node(), torch._C._will_engine_execute_node
    # The node of a parameter is one that the node which runs goes on to, as a rule.
    ahead: dict[int, Any] = {}
    following: Any = () if here is None else here.next_functions
    for node, _ in following:
        if type(node) is _ACCUMULATES:
            ahead[id(node.variable)] = node
    return [
        will_accumulate(param)
        if (node := ahead.get(id(param))) is None
        else node is here or is_executed(node)
        for param in params
    ]


def with_kept_nodes(params: Iterable[Tensor]) -> list[Tensor]:
    """Those of `params` whose AccumulateGrad node somebody keeps, as hooks on it need."""
    held: list[Any] = [*params]
    held = [param for param in held if param._use_count() > 1]  # a graph, or a node
    if not held:
        return []
    nodes = (found for found in gc.get_objects() if type(found).__name__ == "AccumulateGrad")
    kept = {id(node.variable) for node in nodes}
    return [param for param in held if id(param) in kept]


def is_saved_by_graphs(param: Any) -> bool:
    """Whether an autograd graph saved `param`, so that `swap_tensors` refuses it.

    Its Python object holds a parameter, and its AccumulateGrad node may; who else does is a graph.
    """
    return bool(param._use_count() > 2)


def resolving_views() -> Any:
    """A context: what is called in it computes with the values of conjugate and negative views.

    An op that makes such a view of a plain tensor on its way (`pinv` of complex numbers) relies on
    that. Within `__torch_dispatch__` torch takes it from all that is called, since operands have
    passed it, and then the next kernel reads the memory below the view: other numbers, no error.
    """
    excluded = torch._C._dispatch_tls_local_exclude_set()
    for key in (DispatchKey.Conjugate, DispatchKey.Negative):
        excluded = excluded.remove(key)
    included = torch._C._dispatch_tls_local_include_set()
    return torch._C._ForceDispatchKeyGuard(included, excluded)


def is_lazy(tensor: Tensor) -> bool:
    """Whether the memory of `tensor` does not hold its values.

    True of a lazy conjugate, a lazy negative, and a zero that autograd made without memory.
    """
    return torch._is_zerotensor(tensor) or tensor.is_conj() or tensor.is_neg()


def materialised(tensor: Tensor) -> Tensor:
    """`tensor`, or a tensor with the same values in memory, if it is lazy."""
    if torch._is_zerotensor(tensor):
        return torch.zeros(tensor.size(), dtype=tensor.dtype, device=tensor.device)
    return tensor.resolve_conj().resolve_neg()


def counted_with(other: Tensor, value: Tensor) -> Tensor:
    """A tensor over the memory of `value` that shares the version counter of `other`.

    Autograd refuses a backward that saved either, if one of them was written since.
    """
    made = other.detach()
    made.data = value  # which leaves the count as it is
    return made


def storage_of(tensor: Tensor) -> torch.UntypedStorage:
    """`tensor.untyped_storage()`, past what a subclass makes of that.

    The storage of a wrapper has no bytes, and says only which tensors share it.
    """
    return torch.Tensor.untyped_storage(tensor)


def allocator_settings() -> str:
    """What the user has set of torch's allocator of device memory: "" for nothing.

    By torch's environment variables or, as far as torch tells, by a call; torch 2.11 tells of none.
    """
    told: Callable[[], str] | None = getattr(torch._C, "_accelerator_getAllocatorSettings", None)
    if told is not None:
        return told()
    names = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
    return next((os.environ[name] for name in names if os.environ.get(name)), "")


def use_expandable_segments() -> bool:
    """Have torch's allocator of CUDA memory map pages as they are needed, in one range of addresses
    that grows (`expandable_segments:True`), in all of this process.

    Without, it asks CUDA for pieces of sizes that were needed once, and what is free in them has
    other sizes than what is needed next.

    returns  whether that was set: not where the user has set anything of the allocator, and not
             where drivers cannot do it (WSL, whose first allocation may fail then, and ROCm)
    """
    is_wsl = "microsoft" in platform.release().lower()
    if is_wsl or torch.version.hip is not None or allocator_settings():
        return False
    torch._C._accelerator_setAllocatorSettings("expandable_segments:True")
    return True


def spin(cycles: int) -> None:
    """Enqueue a kernel that does nothing for so many cycles of the card's clock, on the current
    stream of the current device."""
    torch.cuda._sleep(cycles)


class LateStorage:
    """A storage that `torch.save` writes: its bytes are read when it writes them, and not before.

    Torch first pickles all that it saves, and notes each storage; then it writes one after the
    other, and asks those that are not on the CPU for `.cpu()`.

    key   names the bytes: torch writes storages of one key once
    read  gives the bytes, uint8 [nbytes] on the host
    """

    device = SimpleNamespace(type="tiered")

    def __init__(self, key: int, nbytes: int, read: Callable[[], Tensor]) -> None:
        self._cdata = -key  # which is no address: storages of torch have theirs
        self._nbytes, self._read = nbytes, read

    def data_ptr(self) -> int:
        return self._cdata

    def nbytes(self) -> int:
        return self._nbytes

    def cpu(self) -> torch.UntypedStorage:
        return self._read().untyped_storage()

    def _write_file(self, *how: Any) -> None:  # by torch.save in its old format
        self.cpu()._write_file(*how)


class _LateTyped(torch.TypedStorage):
    """A late storage where a pickled tensor has its own, which is called by a type.

    like  the storage in whose place it stands
    """

    def __new__(cls, *_: object) -> "_LateTyped":
        return object.__new__(cls)

    def __init__(self, storage: LateStorage, like: Any) -> None:
        plain = isinstance(like, torch.UntypedStorage)
        self.dtype = torch.uint8 if plain else like.dtype
        self._name = "UntypedStorage" if plain else like._pickle_storage_type()
        self._untyped_storage: Any = storage

    def _pickle_storage_type(self) -> str:
        return self._name

    def __reduce__(self) -> Any:
        """By a pickler that is not torch's: with all bytes, at once."""
        whole = self._untyped_storage.cpu()
        if self._name == "UntypedStorage":
            return whole.__reduce__()
        return torch.TypedStorage(wrap_storage=whole, dtype=self.dtype, _internal=True).__reduce__()


def reduced_late(plain: Tensor, storage: LateStorage, protocol: Any) -> Any:
    """What `plain.__reduce_ex__` gives, with `storage` in place of its own."""
    rebuild, (own, *others) = plain.__reduce_ex__(protocol)
    return rebuild, (_LateTyped(storage, own), *others)


torch.serialization.register_package(
    7919,  # no two may be equal
    lambda storage: "cpu" if isinstance(storage, LateStorage) else None,
    lambda storage, location: None,
)


def is_within_transform(tensor: Tensor) -> bool:
    """Whether a tensor is the wrapper that a function under `torch.func` sees, as that of `vmap` or
    `grad`: it stands for another tensor, and has no storage."""
    return bool(torch._C._functorch.is_functorch_wrapped_tensor(tensor))


def memory_of(tensor: Tensor) -> int:
    """A key that names the memory of `tensor` among all that live."""
    key: int = storage_of(tensor)._cdata
    return key


def is_asked_by_tracing() -> bool:
    """Whether torch's tracing called the function that calls this one.

    Tracing, and what it puts around a traced graph, asks tensors for their storage to see which of
    them share one, and never for bytes.
    """
    caller = sys._getframe(2).f_globals.get("__name__", "")
    return str(caller).startswith(("torch._dynamo.", "torch._functorch.", "torch._subclasses."))


def holders_of_memory(tensor: Tensor) -> int:
    """How many tensors hold the memory of `tensor`, this one included.

    Counts one more, if somebody holds the storage itself (`tensor.untyped_storage()`).
    """
    named = _references_to_storage(tensor) > _references_to_own_storage()
    storage = tensor.untyped_storage()  # which counts too
    uses: int = torch._C._storage_Use_Count(storage._cdata)
    return uses - 1 + named


def is_sole_holder(tensor: Tensor) -> bool:
    """Whether nothing but `tensor` reaches its memory: no other tensor, no array of numpy, no
    mapped file, no other process that shares memory of the host.

    Who holds the tensor itself is not seen: a capsule of DLPack, a graph that has saved it. Callers
    make another of it by `swap_tensors`, which refuses these.
    """
    storage = tensor.untyped_storage()
    ours = storage.resizable() and not (tensor.is_cpu and storage.is_shared())
    del storage  # it would count
    return ours and holders_of_memory(tensor) == 1


def _references_to_storage(tensor: Tensor) -> int:
    storage = tensor.untyped_storage()
    return sys.getrefcount(storage)


@cache
def _references_to_own_storage() -> int:
    return _references_to_storage(torch.zeros(1))


def is_held_by(owner: object, name: str) -> bool:
    """Whether only an attribute of `owner` holds a tensor and its memory: no name, no list, no
    graph that waits for its backward."""
    if _references_to_attribute(owner, name) > _references_to_own_attribute():
        return False
    tensor: Any = vars(owner)[name]
    alone = tensor._use_count() == 1
    return alone and holders_of_memory(tensor) == 1


def _references_to_attribute(owner: object, name: str) -> int:
    tensor = vars(owner)[name]
    return sys.getrefcount(tensor)


@cache
def _references_to_own_attribute() -> int:
    return _references_to_attribute(SimpleNamespace(value=torch.zeros(())), "value")


def others_hold_gradient(param: Tensor) -> bool:
    """Whether somebody else holds the gradient of `param`, or its memory.

    That is who gave the gradient, the gradient of another parameter, or autograd, as long as it
    runs.
    """
    if is_gradient_named(param):  # asked first: a name here would count
        return True
    return holders_of_memory(param.grad) > 1  # type: ignore[arg-type]  # there is one


def is_gradient_named(param: Tensor) -> bool:
    """Whether the gradient of `param` has another name in Python."""
    return _references_to_gradient(param) > _references_to_own_gradient()


def _references_to_gradient(param: Tensor) -> int:
    grad = param.grad
    return sys.getrefcount(grad)


@cache
def _references_to_own_gradient() -> int:
    leaf = torch.zeros(())
    leaf.grad = torch.zeros(())
    return _references_to_gradient(leaf)


def owns_memory(tensor: Tensor) -> bool:
    """Whether torch allocated the memory of `tensor`.

    False for memory of an array, a file, a Python buffer or other processes.
    """
    return tensor.untyped_storage().resizable() and not is_shared_between_processes(tensor)


def is_shared_between_processes(tensor: Tensor) -> bool:
    """Whether `tensor` is in memory that other processes map, or in a file."""
    return tensor.is_cpu and tensor.is_shared()  # of CUDA tensors torch always says so


def held_outside_python(tensors: Sequence[Tensor]) -> list[bool]:
    """For each tensor, whether somebody other than Python's tensors and their views holds its
    memory.

    That is a graph, or another library that got the memory by DLPack and may write it unseen. Looks
    at all objects that Python knows, which takes a tenth of a second; where it cannot tell
    (`gc.freeze` hides objects), it says yes.
    """
    found: dict[int, dict[int, Tensor]] = {memory_of(tensor): {} for tensor in tensors}
    with torch._C.DisableTorchFunctionSubclass():
        for known in gc.get_objects():
            if Tensor not in type(known).__mro__:
                continue
            try:
                held = found.get(torch._C._storage_address(known))  # type: ignore[attr-defined]
            except (RuntimeError, NotImplementedError):
                # On purpose: a sparse tensor, or one of a subclass without storage, has no memory
                # that somebody could hold, and torch says so by either.
                continue
            if held is not None:
                held[id(known)] = known
                if known._base is not None:
                    held[id(known._base)] = known._base
        return [_is_held_beside(tensor, found[memory_of(tensor)]) for tensor in tensors]


def _is_held_beside(tensor: Tensor, known: Mapping[int, Any]) -> bool:
    """Whether the memory of `tensor` has more holders than the tensors `known`, by their ids."""
    storage = tensor.untyped_storage()  # which counts too
    if torch._C._storage_Use_Count(storage._cdata) - 1 > len(known):
        return True
    views = Counter(id(other._base) for other in known.values())
    return any(other._use_count() > 1 + views[key] for key, other in known.items())


def watch_memory(tensor: Tensor) -> bool:
    """Let `is_untouched(tensor)` say from here on whether the memory of `tensor` was written.

    Returns whether torch can tell: not of memory of an array, a file or a buffer. The memory is
    marked as one that a lazy clone shares (copy on write), and that clone is dropped: who writes it
    next, through any tensor or storage, or asks for its address, takes the mark away, and copies
    nothing.
    """
    if not owns_memory(tensor) or not tensor.untyped_storage().nbytes():
        return False
    if not is_untouched(tensor):
        try:
            torch._lazy_clone(tensor.detach())
        except RuntimeError:  # memory of an allocator that it does not know
            return False
    return is_untouched(tensor)


def is_untouched(tensor: Tensor) -> bool:
    """Whether nobody has written watched memory, or was given its address."""
    untouched: bool = torch._C._is_cow_tensor(tensor)  # type: ignore[attr-defined]  # private
    return untouched


def raw_bytes(tensor: Tensor) -> Any:
    """A buffer over the bytes of a contiguous tensor on the CPU, to be read only.

    As `numpy()`, but torch takes note of nothing: the memory can still be resized, and counts as
    untouched.
    """
    begin = int(tensor.storage_offset()) * tensor.element_size()
    nbytes = tensor.numel() * tensor.element_size()
    address: int = torch._C._data_address(tensor)  # type: ignore[attr-defined]  # of its storage
    return (ctypes.c_char * nbytes).from_address(address + begin)


def set_data(tensor: Tensor, value: Tensor) -> None:
    """`tensor.data = value` as for plain tensors, past what a subclass makes of that.

    `tensor` takes over size, strides, offset, and whether it is lazy.
    """
    torch.Tensor.data.__set__(tensor, value)  # type: ignore[attr-defined]  # torch's own
    lazy = value.is_conj(), value.is_neg()
    if lazy != (tensor.is_conj(), tensor.is_neg()):
        mark(tensor, *lazy)  # which torch leaves as it was


_ATEN = library.Library("aten", "IMPL")
_ASKED_FIRST = torch._C.DispatchKeySet(torch._C.DispatchKey.PythonTLSSnapshot)


def refuse_as_data(cls: type[Tensor], refuse: Callable[[Tensor, Tensor], None]) -> None:
    """Let `x.data = value`, with a `value` of `cls` and an x of another class, call `refuse(x,
    value)`.

    Torch takes a wrapper for any tensor of its device there: x would point to memory that does not
    exist, and its next read would end the process. Called once for the process.
    """

    def fits(x: Tensor, value: Tensor) -> bool:
        if isinstance(value, cls) and not isinstance(x, cls):
            refuse(x, value)
        with torch._C._ExcludeDispatchKeyGuard(_ASKED_FIRST):
            return torch._has_compatible_shallow_copy_type(x, value)

    _ATEN.impl("_has_compatible_shallow_copy_type", fits, "PythonTLSSnapshot")


def is_symbol(node: fx.Node) -> bool:
    """Whether the value of a node is a dynamic size or a flag of one, not a tensor."""
    return isinstance(node.meta.get("val"), torch.SymInt | torch.SymFloat | torch.SymBool)


def is_compiling_now() -> bool:
    """Whether torch traces or compiles on this thread."""
    return TracingContext.try_get() is not None


def failure_of(error: BaseException) -> tuple[BaseException, Sequence[traceback.FrameSummary]]:
    """The error behind a failed compiled call, and the stack of the traced code."""
    if isinstance(error, BackendFailed):
        inner: BaseException = error.inner_exception
        return inner, traceback.extract_tb(inner.__traceback__)
    reason = error
    while isinstance(reason, _TracingFailed):
        behind = reason.__cause__ or reason.__context__
        if behind is None:
            break
        reason = behind
    return reason, getattr(error, "real_stack", None) or traceback.extract_tb(error.__traceback__)


def ends_compiling(error: Exception) -> bool:
    """Whether Dynamo gives up on an error that a backend raises; else it takes another way, such as
    a graph break."""
    return not isinstance(error, (_TracingFailed, *_falls_back))


def dynamo_goes_on(error: Exception) -> bool:
    """Whether an error that a backend raises only tells Dynamo what to do next: analyse the frame
    anew, as where a float among its inputs becomes a tensor, skip it, or break the graph."""
    return isinstance(error, (_Restart, _SkipFrame, *_falls_back))


def says_not_resizable(error: RuntimeError) -> bool:
    """Whether an op failed because it would have to resize a tensor over foreign memory."""
    return "resize storage that is not resizable" in str(error)


def faked_at_once(lib: library.Library, name: str, fake: Callable[..., Tensor]) -> None:
    """Let tracing take the results of the op `name` of `lib` from `fake`, and ask nothing else of
    the op: going through what is registered as its fake takes several times as long. With
    tensors of another tracing, and with real ones, it goes that way.

    fake  is given the arguments of the op, of which the last is the device that the result shows;
          makes a tensor on that, which nobody else has
    """

    def rule(mode: Any, func: Dispatched, types: Any, args: Any, kwargs: Any) -> Any:
        given = [x for x in args if isinstance(x, Tensor)]
        if kwargs or not all(isinstance(x, FakeTensor) and x.fake_mode is mode for x in given):
            # A tensor that is not of what is traced: torch says so, or makes it a fake.
            return mode.__torch_dispatch__(func, types, args, kwargs)
        *rest, device = args
        return FakeTensor(mode, fake(*rest, torch.device("meta")), device)

    library.register_torch_dispatch(f"{lib.ns}::{name}", _FakeTensorMode, rule, lib=lib)


@contextmanager
def muted_tracing() -> Iterator[None]:
    """Within the context, tracing does not log the traceback of a failing op, which the caller
    reports."""
    log = logging.getLogger(FakeTensor.__module__)
    was, log.disabled = log.disabled, True
    try:
        yield
    finally:
        log.disabled = was


def tell_of_compiling(begins: Callable[[object], None], ends: Callable[[object], None]) -> None:
    """Let torch call `begins` when it starts to trace for `torch.compile`, and `ends` when it is
    done, whatever came of it. Asked for again it changes nothing; `torch._dynamo.reset` forgets it.
    """
    handler = torch._dynamo.callback.callback_handler
    if begins not in handler.start_callbacks:
        handler.register_start_callback(begins)
        handler.register_end_callback(ends)


def store_of_ranks(name: str) -> Any:
    """A connection of its own to the store through which the ranks of torch.distributed have found
    each other, for keys that begin with `name`."""
    from torch.distributed import distributed_c10d  # not every build of torch has it

    store: Any = distributed_c10d._get_default_store()
    return keys_below(name, store.clone())


def where_store_is() -> tuple[bool, str, int | None]:
    """Whether torchrun keeps the store through which the ranks of torch.distributed have found each
    other, and the host and port of the store; "" and None, if it has none."""
    from torch.distributed import distributed_c10d

    store: Any = distributed_c10d._get_default_store()
    while isinstance(store, distributed_c10d.PrefixStore):
        store = store.underlying_store
    port: int | None = getattr(store, "port", None)
    if port is None:
        return False, "", None
    # torch.distributed.rendezvous asks for this variable too.
    is_torchruns = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == str(True)
    is_torchruns &= os.environ.get("MASTER_PORT") == str(port)
    return is_torchruns, store.host, port


def keys_below(name: str, store: Any) -> Any:
    """A store of the keys of another store that begin with `name`."""
    from torch.distributed import distributed_c10d

    return distributed_c10d.PrefixStore(name, store)


def end_messages(group: Any, unused_tag: int) -> None:
    """End what waits in this process for messages of a gloo group, with a RuntimeError: all of it,
    at once. Connections of the group close, so other ranks see what they see when a process ends.

    `abort` and `shutdown` of a gloo group end no wait. But a message that does not come in time
    makes gloo close all connections of its group: so one is waited for that nobody sends.

    unused_tag  of which no rank sends anything in this group
    """
    never = torch.empty(1, dtype=torch.uint8, device="cpu")
    for peer in range(group.size()):
        if peer != group.rank():
            with suppress(RuntimeError):  # too late, as meant; or closed already
                group.recv([never], peer, unused_tag).wait(timedelta(milliseconds=1))


def store_of_torchrun() -> tuple[Any, int, int]:
    """The store through which processes that torchrun has started find each other, the rank of this
    one, and how many they are."""
    from torch.distributed.rendezvous import rendezvous

    store, rank, size = next(iter(rendezvous("env://")))
    return store, rank, size


def compiled_frame() -> int | None:
    """A number that names the function which torch compiles on this thread; None outside of
    that."""
    current = CompileContext.current_compile_id()
    return None if current is None else current.frame_id


def on_recompile_limit(tell: Callable[[int, str, int], None]) -> None:
    """Call `tell(function, limit, most)` from here on when torch would compile a function once more
    than a limit permits, and runs it eagerly instead, or refuses.

    function  as `compiled_frame`;  limit  its name in torch._dynamo.config;  most  its value
    """
    torchs: Any = _convert_frame
    stock = torchs.exceeds_recompile_limit

    def exceeds(cache_size: Any, compile_id: Any) -> tuple[bool, str]:
        hit, limit = stock(cache_size, compile_id)
        if hit and compile_id.frame_id is not None:
            tell(compile_id.frame_id, limit, getattr(torch._dynamo.config, limit))
        return hit, limit

    torchs.exceeds_recompile_limit = exceeds


def without_recompile_limit() -> Any:
    """Within the context, code may be compiled any number of times, and compiling does not collect
    garbage."""
    return torch._dynamo.config.patch(
        recompile_limit=_MANY, accumulated_recompile_limit=_MANY, run_gc_after_compile=False
    )


_MANY = 1 << 30


# --- Inductor ---


@dataclass(frozen=True)
class Compiled:
    """What Inductor made of a graph.

    call      values in, a sequence of results out
    artifact  what `save_compiled` writes; None: it cannot be saved
    facts     None, if torch had it in its cache and did not schedule it anew
    """

    call: Callable[..., Sequence[Any]]
    artifact: Any
    facts: "CompiledFacts | None"


@dataclass(frozen=True)
class CompiledFacts:
    """What is known of the code that Inductor wrote for a graph.

    nbytes   live at its peak, of what it makes
    kernels  that it runs
    strides  of each result; None where it is not known
    called   what it calls that is not its own code, the first; "": nothing
    shared   name of a result that is not a fresh buffer of its own; "": there is none
    """

    nbytes: int
    kernels: int
    strides: tuple[tuple[int, ...] | None, ...]
    called: str = ""
    shared: str = ""


def missing_compiler(device: torch.device) -> str:
    """What Inductor needs to compile for a device and does not find, with what to do; "": it has
    all."""
    if device.type == "cuda":
        from torch.utils._triton import has_triton

        return "" if has_triton() else "Triton for this GPU (pip install triton)"
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch._inductor.exc import InvalidCxxCompiler

    try:
        get_cpp_compiler()
    except InvalidCxxCompiler:
        return "a C++ compiler (apt-get install g++, or name one in the environment's CXX)"
    return ""


def compiled_for(device: torch.device) -> str:
    """What Inductor compiles for: code for one is not code for another."""
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
        return f"{name} {torch.cuda.get_device_capability(device)}"
    from torch._inductor.cpu_vec_isa import pick_vec_isa

    return f"{pick_vec_isa()} {torch.backends.cpu.get_cpu_capability()}"


def compile_by_inductor(
    gm: fx.GraphModule,
    layouts: Sequence[tuple[tuple[int, ...], tuple[int, ...], torch.dtype, torch.device]],
    threads: int,
    cached: bool = True,
) -> Compiled:
    """Compile a functional graph of static sizes, in a thread in which nothing is traced.

    No memory of the device is used for it.

    layouts  size, stride, dtype and device of each input
    threads  that the code for the CPU computes in
    cached   whether torch's caches of graphs may answer, and the result can be saved; C++ that was
             compiled before is loaded in any case
    raises   whatever Inductor raises of a graph that it cannot compile
    """
    from torch._inductor import config, standalone_compile

    watch = _schedule_watch()
    patches: dict[str, Any] = {
        "_post_fusion_custom_pass": watch,
        "cpp.threads": threads,
        "fallback_random": True,
        **({} if cached else dict.fromkeys(("fx_graph_cache", "fx_graph_remote_cache"), False)),
        "triton.cudagraphs": False,
    }
    if hasattr(config, "deterministic"):
        patches["deterministic"] = True  # kernels are not chosen by timing them
    shapes = _ShapeEnv()
    fake = _FakeTensorMode(shape_env=shapes)
    with torch.no_grad(), fake:
        inputs: list[Any] = [
            torch.empty_strided(size, stride, dtype=dtype, device=device)
            for size, stride, dtype, device in layouts
        ]
    # With `force_disable_caches` C++ would be compiled again as well, and before it the small
    # programs by which torch finds out what the processor has.
    of_autograd = ("enable_autograd_cache", "enable_remote_autograd_cache")
    caches = {} if cached else dict.fromkeys(of_autograd, False)
    with torch.no_grad(), _functorch_config.patch(caches), _tracing(TracingContext(fake)):
        artifact = standalone_compile(
            gm,
            inputs,
            dynamic_shapes="from_tracing_context",
            options={"config_patches": patches},
        )
    facts = None if watch.graph is None else _facts_of(watch.graph)
    return Compiled(artifact, artifact if _can_be_saved(artifact) else None, facts)


def _can_be_saved(artifact: Any) -> bool:
    saved = getattr(artifact, "_artifacts", None)
    return saved is not None and len(saved[1].aot_autograd_artifacts) == 1


def save_compiled(artifact: Any, path: str) -> None:
    """Write `Compiled.artifact` to a file. raises  OSError"""
    artifact.save(path=path, format="binary")


def load_compiled(path: str) -> Callable[..., Sequence[Any]]:
    """What `save_compiled` wrote, as a call. It unpickles: the file must be the user's own.

    raises  OSError, and whatever torch raises of a file that is no artifact of this torch
    """
    from torch._inductor.standalone_compile import CompiledArtifact

    call: Callable[..., Sequence[Any]] = CompiledArtifact.load(path=path, format="binary")
    return call


def inductor_folder() -> str:
    """The directory of torch's caches, which is made if it is not there."""
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    return str(cache_dir())


@cache
def _watch_class() -> Any:
    """The class of `_schedule_watch`: of a kind that torch's cache knows how to ask for its id."""
    from torch._inductor import custom_graph_pass
    from torch._inductor.virtualized import V

    kind = getattr(custom_graph_pass, "CustomSchedulerPass", custom_graph_pass.CustomGraphPass)

    class Watch(kind):  # type: ignore[misc, valid-type]  # which torch has
        """Remembers what is scheduled, and changes nothing."""

        graph: Any = None

        def __call__(self, nodes: Any) -> Any:
            self.graph = V.graph
            return nodes

        def uuid(self) -> bytes:
            return b"zcompile: looks, and changes nothing"

        def __reduce__(self) -> Any:  # torch's caches pickle it, as a part of their key
            return _schedule_watch, ()

    return Watch


def _schedule_watch() -> Any:
    return _watch_class()()


def _facts_of(graph: Any) -> CompiledFacts:
    """Read off the lines of the code that Inductor has written for a graph what it allocates, when
    that is freed, and what it calls."""
    results = list(graph.get_output_names())
    fresh = set[str]()
    live = most = kernels = 0
    sizes: dict[str, int] = {}
    called = ""
    for line in graph.wrapper_code.lines:
        kind = type(line).__name__
        if kind == "AllocateLine":
            name = line.node.get_name()
            sizes[name] = _allocated_bytes(line.node)
            fresh.add(name)
            live += sizes[name]
            most = max(most, live)
        elif kind == "ReuseLine":
            sizes[line.reused_as.get_name()] = sizes.pop(line.node.get_name())
            fresh.add(line.reused_as.get_name())
        elif kind in ("FreeIfNotReusedLine", "FreeLine") and not getattr(line, "is_reused", False):
            name = line.node.get_name()
            live -= 0 if name in results else sizes.pop(name, 0)
        elif kind == "KernelCallLine":
            kernels += 1
        elif kind.startswith("Extern") or kind.endswith("FallbackLine"):
            called = called or str(getattr(line.node, "python_kernel_name", kind))
    strides = tuple(_stride_of(x) for x in graph.graph_outputs)
    shared = next((name for name in results if name not in fresh or results.count(name) > 1), "")
    return CompiledFacts(most, kernels, strides, called, shared)


def _allocated_bytes(buffer: Any) -> int:
    """Bytes of the storage of a buffer whose sizes are numbers."""
    steps = zip(buffer.get_size(), buffer.get_stride(), strict=True)
    dims = [(int(n), int(step)) for n, step in steps]
    if any(n == 0 for n, _ in dims):
        return 0
    span = 1 + sum((n - 1) * step for n, step in dims)
    return span * int(buffer.get_dtype().itemsize)


def _stride_of(result: Any) -> tuple[int, ...] | None:
    found = getattr(result, "get_stride", lambda: None)()
    if found is None:
        return None
    return tuple(int(n) for n in found)
