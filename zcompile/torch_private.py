"""Every private torch API that zcompile relies on, in one place, each with a contract test.

What stands here may change between torch releases without notice; `tests/test_torch_private.py`
says for each name what we rely on. The tested range is `TESTED`.
"""

import logging
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, fx
from torch._dynamo.backends.common import aot_autograd as _aot_autograd
from torch._dynamo.exc import BackendCompilerFailed as BackendFailed
from torch._dynamo.exc import TorchDynamoException as _TracingFailed
from torch._functorch._aot_autograd.descriptors import (
    GradAOTOutput,
    InputMutationAOTOutput,
    PlainAOTInput,
    SubclassGetAttrAOTInput,
    TangentAOTInput,
)
from torch._functorch.partitioners import _extract_fwd_bwd_modules
from torch._guards import TracingContext
from torch._subclasses.fake_tensor import FakeTensor
from torch.optim.optimizer import _foreach_supported_types as _foreach_optimizers
from torch.utils import _pytree as trees
from torch.utils._foreach_utils import _foreach_supported_types as _foreach_lists
from torch.utils._python_dispatch import TorchDispatchMode as DispatchMode
from torch.utils._python_dispatch import _disable_current_modes as without_modes
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from zcompile.errors import TorchUnsupported
from zcompile.listed import Listed

TESTED = ((2, 11), (2, 13))
"""First and last torch minor release under test; the CPU suite runs on the last one."""

Dispatched = torch._ops.OpOverload
Partition = Callable[..., tuple[fx.GraphModule, fx.GraphModule]]
Compiler = Callable[[fx.GraphModule, Sequence[Any]], Callable[..., Any]]

__all__ = [
    "BackendFailed",
    "DispatchMode",
    "Dispatched",
    "aot_backend",
    "boxed",
    "is_traceable_wrapper_subclass",
    "trees",
    "without_modes",
]

no_torch_function = torch._C._disabled_torch_function_impl
"""`__torch_function__` of a subclass that acts at dispatch only."""


def check_torch() -> None:
    """raises  TorchUnsupported, if the installed torch is outside `TESTED`"""
    major, minor = (int(part) for part in torch.__version__.split(".")[:2])
    first, last = TESTED
    if not first <= (major, minor) <= last:
        raise TorchUnsupported(torch.__version__, f"{first[0]}.{first[1]} to {last[0]}.{last[1]}")


def wrapper(
    cls: type[Tensor],
    size: Sequence[int],
    stride: Sequence[int],
    offset: int,
    dtype: torch.dtype,
    device: torch.device,
    requires_grad: bool,
) -> Tensor:
    """A tensor of class `cls` with the given metadata and no storage."""
    made: Tensor = torch.Tensor._make_wrapper_subclass(
        cls,
        size,
        strides=stride,
        storage_offset=offset,
        dtype=dtype,
        device=device,
        requires_grad=requires_grad,
    )
    return made


def is_traced(tensor: Tensor) -> bool:
    """True for the stand-ins that tracing uses; False for a tensor that has bytes."""
    return type(tensor) is not Tensor


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
    forward: Compiler, backward: Compiler, inference: Compiler, partition: Partition
) -> Callable[..., Any]:
    """A Dynamo backend: AOTAutograd with our partitioner and compilers."""
    backend: Callable[..., Any] = _aot_autograd(
        fw_compiler=forward,
        bw_compiler=backward,
        inference_compiler=inference,
        partition_fn=partition,
    )
    return backend


def boxed(function: Callable[[list[Any]], Any]) -> Callable[..., Any]:
    """`function` takes one list, which it may empty: the boxed calling convention."""
    function._boxed_call = True  # type: ignore[attr-defined]  # the convention's marker
    return function


def handle_input(node: fx.Node) -> int | None:
    """If a placeholder is the handle inside a tiered input: that input's position, else None."""
    desc = node.meta.get("desc")
    if isinstance(desc, SubclassGetAttrAOTInput) and isinstance(desc.base, PlainAOTInput):
        return desc.base.idx
    return None


def gradient_of(desc: object) -> int | None:
    """If an output is the gradient of a plain input: that input's position, else None."""
    if isinstance(desc, GradAOTOutput) and isinstance(desc.grad_of, PlainAOTInput):
        return desc.grad_of.idx
    return None


def pin_phase(node: fx.Node, backward: bool) -> None:
    """Tell torch's extraction on which side of the cut a node belongs."""
    node.meta["partitioner_tag"] = "must_be_in_backward" if backward else "must_be_in_forward"


def cut(
    joint: fx.GraphModule, saved: list[fx.Node], saved_symbols: list[fx.Node], forward_outputs: int
) -> tuple[fx.GraphModule, fx.GraphModule]:
    """Forward and backward modules of a joint graph, saving exactly the nodes named.

    Every node must carry its phase (`pin_phase`), so that nothing is computed twice.
    """
    # Each node is looked for in the sum of these and others, which begins with the symbols.
    forward, backward = _extract_fwd_bwd_modules(
        joint, Listed(saved), Listed(saved_symbols), num_fwd_outputs=forward_outputs
    )
    return forward, backward


def hooks_of(param: Tensor) -> tuple[Mapping[int, Any], Mapping[int, Any]]:
    """Tensor hooks and post-accumulate hooks that a user registered on a leaf."""
    return param._backward_hooks or {}, param._post_accumulate_grad_hooks or {}


def current_pass() -> int:
    """Which backward pass is running on this thread; -1 outside of any."""
    return torch._C._current_graph_task_id()


def wish_of(node: fx.Node) -> str:
    """What the user asked for a value through torch.utils.checkpoint: the name of a
    `CheckpointPolicy`, "PREFER_RECOMPUTE" inside a plain checkpoint; "" outside of any."""
    return str(getattr(node.meta.get("recompute"), "name", ""))


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


def is_random(node: fx.Node) -> bool:
    """Whether a call draws random numbers, or may give other bits when it is called again.

    Attention is marked as random for its dropout, also where it drops nothing.
    """
    assert isinstance(node.target, Dispatched)
    if getattr(torch.Tag, "nondeterministic_bitwise", None) in node.target.tags:
        return True
    for position, argument in enumerate(node.target._schema.arguments):
        if argument.name == "dropout_p":
            given = node.args[position] if position < len(node.args) else node.kwargs.get(
                argument.name, argument.default_value)  # fmt: skip
            return bool(given != 0.0)
    return torch.Tag.nondeterministic_seeded in node.target.tags


def save_unchecked(node: fx.Node) -> None:
    """A saved value whose later in-place changes do not matter to backward."""
    node.meta["saved_tensor_with_no_vc_check"] = True


def forget_hooks(param: Tensor) -> None:
    """Drop the hooks of a leaf that is about to be swapped.

    `swap_tensors` exchanges what calls the hooks, but not the dicts that later ones are put into.
    """
    param._backward_hooks = None
    param._post_accumulate_grad_hooks = None  # type: ignore[assignment]  # as before the first one


def after_backward(callback: Callable[[], None]) -> None:
    """Run `callback` when the backward pass that is running now has ended."""
    torch.autograd.Variable._execution_engine.queue_callback(callback)


def is_tangent(node: fx.Node) -> bool:
    """A placeholder that carries a gradient into the backward half."""
    return isinstance(node.meta.get("desc"), TangentAOTInput)


def hint(value: int | torch.SymInt) -> int:
    """A size as an int; a dynamic one as it was when the graph was traced. Adds no guard."""
    if isinstance(value, torch.SymInt):
        found = value.node.hint
        return int(found) if found is not None else 1
    return int(value)


def will_accumulate(param: Tensor) -> bool:
    """Whether the backward pass that is running now is to add to `param.grad`."""
    # As `torch.autograd.graph.get_gradient_edge` finds it, but past `__torch_dispatch__`.
    with torch.enable_grad(), torch._C._DisableTorchDispatch():
        view: Any = param.view_as(param)
    return torch._C._will_engine_execute_node(view.grad_fn.next_functions[0][0])


def is_symbol(node: fx.Node) -> bool:
    """A node whose value is a dynamic size or a flag of one, not a tensor."""
    return isinstance(node.meta.get("val"), torch.SymInt | torch.SymFloat | torch.SymBool)


def is_compiling_now() -> bool:
    """Whether torch traces or compiles on this thread."""
    return TracingContext.try_get() is not None


def failure_of(error: BaseException) -> tuple[BaseException, Sequence[traceback.FrameSummary]]:
    """The error behind what a compiled call raised, and where the traced code was then."""
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


@contextmanager
def muted_tracing() -> Iterator[None]:
    """Tracing does not log the traceback of an op that cannot be, for a caller that tells it."""
    log = logging.getLogger(FakeTensor.__module__)
    was, log.disabled = log.disabled, True
    try:
        yield
    finally:
        log.disabled = was


def without_recompile_limit() -> Any:
    """A context in which code may be compiled however often it was before, and no garbage is looked
    for afterwards."""
    return torch._dynamo.config.patch(
        recompile_limit=_MANY, accumulated_recompile_limit=_MANY, run_gc_after_compile=False
    )


_MANY = 1 << 30
