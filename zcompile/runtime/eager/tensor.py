"""A `TieredTensor` is a tensor whose bytes rest in the store.

It has the full logical shape, stride, dtype and the compute device, and no storage. Its one inner
tensor is a 0-dim int64 CPU handle. Under tracing each use becomes a `zinf.gather` in the graph;
called plainly, `dispatch.py` says what an op means.

`torch.save` sees one storage for all tensors that lie in an entry: tied weights are saved once, and
what is loaded is tied as it was. It reads the bytes of each entry when it writes them, so no more
than one is in memory (`LateStorage`).
"""

import copy
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor

from zcompile.errors import Unsupported
from zcompile.ir import ops
from zcompile.ir.handles import claimed, shows
from zcompile.ir.torch_compat import (
    Dispatched,
    LateStorage,
    arguments_of,
    grad_fn_of,
    grad_of,
    is_applied_by_a_module,
    is_traced,
    let_higher_order_ops_read_wrappers,
    let_wrappers_come_as_plain_inputs,
    no_torch_function,
    reduced_late,
    refuse_as_data,
    set_grad,
    support_foreach,
    target_of,
    traced_only_within_others,
    trees,
    untraced,
    wrapper,
)
from zcompile.ir.types import Layout
from zcompile.runtime.changes import CHANGES
from zcompile.runtime.eager import dispatch, distributed_checkpoint
from zcompile.runtime.eager.data_assignment import assign_data
from zcompile.runtime.eager.identity import FLATTENS, is_asked_by
from zcompile.runtime.eager.joined import run_noted_ops
from zcompile.runtime.eager.repeats import call_as_before
from zcompile.runtime.eager.rows import leaves_of
from zcompile.runtime.eager.unbacked import Unbacked
from zcompile.runtime.eager.written_views import note_gathered
from zcompile.runtime.session import session_of
from zcompile.runtime.store.store import Entry
from zcompile.runtime.transfer.interrupts import deferred_interrupts, uninterrupted

aten = torch.ops.aten


@dataclass(frozen=True)
class Context:
    """What Dynamo guards on: everything about a tiered tensor but whose bytes it stands for.

    store  which store, since a plan is made for one arena
    sink   a parameter whose gradient is stored by the runtime, not by autograd
    """

    layout: Layout
    device: torch.device
    store: int
    sink: bool
    requires_grad: bool

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, Context) and self._fields() == other._fields())

    def __hash__(self) -> int:
        return hash(self._fields())

    def _fields(self) -> tuple[object, ...]:
        return self.layout, self.device, self.store, self.sink, self.requires_grad

    def __deepcopy__(self, memo: object) -> "Context":
        return self  # so that what a guard keeps is what it is compared with


@lru_cache(maxsize=4096)
def _context(
    layout: Layout, device: torch.device, store: int, sink: bool, requires_grad: bool
) -> Context:
    """One object for equal contexts: the guards of a compiled call ask each parameter for its own,
    and gradients have the same ones in each step."""
    return Context(layout, device, store, sink, requires_grad)


class TieredTensor(Unbacked):
    """See the file's docstring. Made by `zcompile.offload`, never by hand."""

    store_key: int
    sink: bool
    _context: Context
    """What guards were told of it last."""
    reached: bool = False
    """Somebody got hold of the node by which autograd adds to its gradient."""
    grad_given: bool = False
    """Its gradient is a plain tensor that was assigned: others may hold it, or its memory."""
    _title: str | None = None
    """The name of a parameter whose `.data` was assigned; else it is that of its entry."""

    __torch_function__ = no_torch_function  # type: ignore[assignment]  # torch's own recipe

    @staticmethod
    def __new__(cls, handle: Tensor, context: Context) -> "TieredTensor":
        layout = context.layout
        made = wrapper(
            cls,
            layout.size,
            layout.stride,
            layout.offset,
            layout.dtype,
            context.device,
            context.requires_grad,
            layout.conj,
            layout.neg,
        )
        return made  # type: ignore[return-value]  # of class cls

    def __init__(self, handle: Tensor, context: Context) -> None:
        self._handle, self._context = handle, context
        self.entry_layout = context.layout
        self.store_key = context.store
        self.sink = context.sink

    @classmethod
    def over(cls, entry: Entry, layout: Layout) -> "TieredTensor":
        """A new tiered tensor; the entry is freed when the last use of its handle has died."""
        device = entry.store.device.torch_device
        store = entry.store
        made = cls(store.handle(entry), _context(layout, device, store.key, False, False))
        made._store, made._known = store, weakref.ref(entry)
        return made

    @classmethod
    def sharing(cls, base: "TieredTensor", layout: Layout) -> "TieredTensor":
        """Another view of the bytes behind `base`."""
        if torch.is_inference_mode_enabled() and not base.is_inference():
            # Torch counts the writes of both together; what is new in that mode has no count.
            with torch.inference_mode(False):
                return cls.named_by(base._handle, layout, base)
        return cls.named_by(base._handle, layout, base)

    @classmethod
    def named_by(cls, handle: Tensor, layout: Layout, like: "TieredTensor") -> "TieredTensor":
        """A tensor over the entry that `handle` names, in the store of `like`."""
        made = cls(handle, _context(layout, like.device, like.store_key, False, False))
        made._store = like._store
        return made

    def _name_by(self, handle: Tensor, layout: Layout) -> None:
        """Show what `handle` names, in `layout`, from here on."""
        self._handle, self.entry_layout, self._known = handle, layout, None
        CHANGES.note()

    def set_title(self, name: str) -> None:
        """Let this parameter be called `name`, whatever others call its entry."""
        self._title = name
        CHANGES.note()

    def _name_in_store(self) -> str:
        return self._title or self.entry.name

    @property
    @traced_only_within_others
    def data(self) -> Tensor:
        if is_traced(self._handle):
            return self.detach()
        # Not detach(), which shares its version counter with self: what is written through .data
        # is not for autograd to know.
        return _another_view(self)

    @data.setter
    @untraced
    def data(self, value: Tensor) -> None:
        assign_data(TieredTensor, self, value)

    def __tensor_flatten__(self) -> tuple[list[str], Context]:
        base = self._base
        if base is not None and base.is_complex() != self.is_complex():
            # Torch takes the view twice when it traces one whose base has no memory.
            raise Unsupported(
                f"a compiled function is called with a {self.dtype} view of a {base.dtype} tensor",
                "call it with the tensor itself, and take the view (.real, .imag) in the function",
            )
        # The handle is torch's part. Who asks each part where it lies, and how large it is, is
        # shown the tensor as one that has no parts.
        parts = ["_whole"] if is_asked_by(FLATTENS) else ["_handle"]
        known, layout, requires_grad = self._context, self.entry_layout, self.requires_grad
        same = known.layout is layout and known.requires_grad is requires_grad
        if not same or known.sink is not self.sink or known.store != self.store_key:
            known = self._context = _context(
                layout, self.device, self.store_key, self.sink, requires_grad
            )
        return parts, known

    @property
    def _whole(self) -> Tensor:
        return Unmoved(self._handle, self.__tensor_flatten__()[1])

    @staticmethod
    def __tensor_unflatten__(
        inner: dict[str, Tensor], context: Context, outer_size: object, outer_stride: object
    ) -> "TieredTensor":
        return TieredTensor(inner["_handle"], context)

    @classmethod
    @torch.compiler.disable  # type: ignore[untyped-decorator]  # Dynamo would trace this method where a model graph-breaks
    def __torch_dispatch__(
        cls,
        func: Dispatched,
        types: Any,
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        leaves = leaves_of(args, kwargs)
        again = call_as_before(TieredTensor, func, args, kwargs, leaves)
        if again is None and any(
            isinstance(x, TieredTensor) and is_traced(x._handle) for x in leaves
        ):
            return _gather_in_graph(func, args, kwargs)
        try:
            with deferred_interrupts():
                if again is not None and again.rerun():
                    return None
                return dispatch.call(TieredTensor, func, args, kwargs)
        except BaseException:
            run_noted_ops(TieredTensor, leaves)
            raise

    @property
    def grad_fn(self) -> Any:  # type: ignore[override]  # a property there too, but not in Python
        """As of any tensor. Through it one gets from a view of a parameter to the node that adds to
        the parameter's gradient, where hooks can be put that autograd alone calls."""
        node = grad_fn_of(self)
        if node is not None and not is_traced(self._handle):
            self._reach(node)
        return node

    def _give_gradient(self, value: Tensor | None) -> None:
        set_grad(self, value)
        self.grad_given = value is not None and not isinstance(value, TieredTensor)

    def _take_gradient(self) -> None:
        self._give_gradient(None)

    # As of any tensor, which says nothing of who set it: autograd does so past this property.
    grad = property(grad_of, _give_gradient, _take_gradient)

    def _reach(self, node: Any) -> None:
        """Mark the parameters whose nodes can be reached from `node`: a list op has one for all."""
        seen, ahead = set(), [node]
        while ahead:
            node = ahead.pop()
            if node is None or node in seen:
                continue
            seen.add(node)
            param = getattr(node, "variable", None)
            if isinstance(param, TieredTensor):
                param.reached = True
            ahead.extend(before for before, _ in node.next_functions)

    def register_hook(self, hook: Callable[[Tensor], Tensor | None]) -> Any:
        """As for any tensor. A compiled graph brings gradients home itself and leaves None to
        autograd, which would hand that to the hook."""
        register: Any = super().register_hook  # untyped in torch
        return register(partial(_call_unless_none, hook))

    def register_post_accumulate_grad_hook(self, hook: Callable[[Tensor], None]) -> Any:
        """As for any tensor. autograd comes to each parameter that a compiled graph reads, also if
        nobody differentiates what the graph computes of it."""
        register: Any = super().register_post_accumulate_grad_hook  # untyped in torch
        return register(partial(_call_if_brought, hook))

    @untraced
    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickles as the plain tensor or parameter it stands for, on the CPU."""
        entry = self.entry
        # Nobody touches this memory, so it takes none.
        plain = self.entry_layout.view(
            torch.empty(entry.whole_bytes, dtype=torch.uint8, device="cpu")
        )
        if getattr(self, "_is_param", False):
            whole = torch.nn.Parameter(plain.detach(), self.requires_grad)
            rebuild, (_, *others) = whole.__reduce_ex__(protocol)
            return rebuild, (TieredTensor.sharing(self, self.entry_layout), *others)
        # It holds this tensor, and thereby the entry, until it is written.
        storage = LateStorage(
            entry.key, entry.whole_bytes, lambda: self.entry.store.read_all(self.entry)
        )
        return reduced_late(plain.requires_grad_(self.requires_grad), storage, protocol)

    # What torch.distributed.checkpoint asks; one process alone is asked as for any tensor.
    def __create_write_items__(self, name: str, tensor: object) -> list[Any]:
        return distributed_checkpoint.write_items(self, name)

    def __create_chunk_list__(self) -> list[Any]:
        return distributed_checkpoint.chunk_list(self)

    def __get_tensor_shard__(self, index: Any) -> Tensor:
        return distributed_checkpoint.tensor_shard(self, index)

    @untraced
    def __copy__(self) -> Tensor:
        """Another tensor over the same bytes, as torch makes; a parameter of its own, if this is
        one."""
        made: Tensor = TieredTensor.sharing(self, self.entry_layout)
        if getattr(self, "_is_param", False):
            return own(torch.nn.Parameter(made, self.requires_grad))
        return made.requires_grad_(self.requires_grad)

    @untraced
    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        if id(self) in memo:
            found: Tensor = memo[id(self)]
            return found
        if not self.is_leaf:
            raise RuntimeError(
                "Only Tensors created explicitly by the user (graph leaves) "
                "support the deepcopy protocol at the moment"
            )
        made: Tensor
        if getattr(self, "_is_param", False):
            made = _copy_of_parameter(self)
        else:
            # As torch: tensors that share their bytes share them in the copy too.
            shared = memo.setdefault("zcompile", {})  # type: ignore[call-overload]  # ids elsewhere
            if self.entry.key not in shared:
                shared[self.entry.key] = _copy_of(self)
            made = TieredTensor.sharing(shared[self.entry.key], self.entry_layout)
            made.requires_grad_(self.requires_grad)
            if self.grad is not None:
                made.grad = copy.deepcopy(self.grad, memo)
        memo[id(self)] = made
        return made


def _converting(name: str) -> Callable[..., Tensor]:
    """`Tensor.<name>`, except that `Module._apply` gets what it can assign to `.data`.

    A module that is moved stays where it was offloaded to. A forward that moves one breaks its
    graph there, and Dynamo would take this function for the next graph: `compiling` would be true.
    """
    plainly = getattr(TieredTensor, name)

    @traced_only_within_others
    def convert(self: TieredTensor, *args: Any, **kwargs: Any) -> Tensor:
        if torch.compiler.is_compiling() or torch.is_grad_enabled():
            given: Tensor = plainly(self, *args, **kwargs)
        else:
            given = _converted(self, name, plainly, args, kwargs)
        return given

    return convert


@torch.compiler.disable  # type: ignore[untyped-decorator]  # torch's own
def _converted(
    self: TieredTensor,
    name: str,
    plainly: Callable[..., Tensor],
    args: Sequence[Any],
    kwargs: dict[str, Any],
) -> Tensor:
    if name in MOVES and not is_traced(self._handle) and is_applied_by_a_module():
        device, dtype = target_of(name, args, kwargs)
        if device is not None and device.type != "meta" and dtype in (None, self.dtype):
            _check_move(self, device)
            return self._whole
    result = plainly(self, *args, **kwargs)
    if result is not self or isinstance(self, Unmoved) or is_traced(self._handle):
        return result
    if not is_applied_by_a_module():
        return result  # the tensor itself: gradients go to it
    return self._whole


MOVES = frozenset({"to", "cuda", "cpu"})


def _check_move(tensor: TieredTensor, device: torch.device) -> None:
    """raises  Unsupported, if a module is moved to an accelerator that it does not compute on"""
    here = tensor.device
    if device.type != "cpu" and (device.type, device.index or 0) != (here.type, here.index or 0):
        raise Unsupported(
            f"a model that was offloaded to compute on {str(here)!r} is moved to {str(device)!r}",
            f"give zcompile.offload device={str(device)!r}, and leave the move out",
        )


for _name in (*sorted(MOVES), "float", "double", "half", "bfloat16"):
    setattr(TieredTensor, _name, _converting(_name))


class Unmoved(TieredTensor):
    """The same bytes, written through, by a tensor without parts; what `.to` answers where there is
    nothing to do.

    `Module.to` would swap a traceable subclass with its parameter, and thereby its hooks. This one
    is not traceable, so `Module.to` sets `.data` instead.
    """

    @property
    def __tensor_flatten__(self) -> Any:
        raise AttributeError("__tensor_flatten__")


support_foreach(TieredTensor)
let_higher_order_ops_read_wrappers()
let_wrappers_come_as_plain_inputs(TieredTensor)


@untraced
def _another_view(tensor: TieredTensor) -> TieredTensor:
    """All of a tensor once more, over the same bytes."""
    return TieredTensor.sharing(tensor, tensor.entry_layout)


def _refuse(plain: Tensor, value: Any) -> None:
    """raises  Unsupported, where a plain tensor is given the .data of a tiered one"""
    name = "a parameter" if is_traced(value._handle) else f"{value._name_in_store()!r}"
    raise Unsupported(
        f"a plain tensor is given .data of a tiered one ({name}), which has no memory to share",
        "copy the values (x.data.copy_(p)), or offload both as one module",
    )


refuse_as_data(TieredTensor, _refuse)


def _call_unless_none(
    hook: Callable[[Tensor], Tensor | None], grad: Tensor | None
) -> Tensor | None:
    return None if grad is None else hook(grad)


def _call_if_brought(hook: Callable[[Tensor], None], param: TieredTensor) -> None:
    if session_of(param.entry).gradients.brings_to(param):
        hook(param)


@uninterrupted
def _copy_of(tensor: TieredTensor) -> TieredTensor:
    """A tensor with the layout of `tensor` in a copy of its entry, in the same store."""
    old = tensor.entry
    entry = old.store.create(old.name, old.kind, old.nbytes, partition=old.partition)
    made = TieredTensor.over(entry, tensor.entry_layout)
    old.store.put(made.entry, old.store.read_here(old))
    return made


@uninterrupted
def _copy_of_parameter(param: TieredTensor) -> Tensor:
    """A parameter with the value of `param`, as torch copies one: without gradient and hooks."""
    if param.covers:
        made = _copy_of(param)
    else:  # torch copies the elements, not what lies between them
        layout, old = param.entry_layout, param.entry
        gaps = torch.empty_strided(layout.size, layout.stride, dtype=layout.dtype, device="meta")
        layout = Layout.of(torch.empty_like(gaps))
        made = TieredTensor.over(old.store.create(old.name, old.kind, layout.nbytes), layout)
        made.copy_(param.detach())
    return own(torch.nn.Parameter(made, param.requires_grad))


@uninterrupted
def own(param: torch.nn.Parameter) -> torch.nn.Parameter:
    """Let the runtime store the gradient of this tiered parameter from here on."""
    tiered: Any = param
    tiered.sink = True
    tiered._handle = claimed(tiered._handle, param)
    shows(tiered, tiered.entry_layout)
    if param.is_floating_point() or param.is_complex():
        trained = param.requires_grad
        param.requires_grad_()  # a frozen one may be trained later
        come_to = session_of(tiered.entry).gradients.come_to
        register: Any = torch.Tensor.register_post_accumulate_grad_hook  # untyped in torch
        register(param, untraced(come_to))  # also if nothing is brought
        param.requires_grad_(trained)
    return param


def _gather_in_graph(func: Dispatched, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Under tracing: every tiered argument becomes a gather in the graph."""
    if func in (aten.detach.default, aten.alias.default):
        (base,) = args
        return TieredTensor.sharing(base, base.entry_layout)

    def full(value: Any) -> Any:
        if not isinstance(value, TieredTensor):
            return value
        layout = value.entry_layout
        gathered = ops.gather(
            value._handle, layout.size, layout.stride, layout.offset, layout.dtype, value.device
        )
        note_gathered(gathered)
        return layout.marked(gathered)

    for position, argument in enumerate(arguments_of(func)):
        if not argument.writes:
            continue
        value = args[position] if position < len(args) else kwargs.get(argument.name)
        if any(isinstance(v, TieredTensor) for v in trees.tree_leaves(value)):
            raise Unsupported(
                f"{func} writes to a tiered parameter inside a compiled function",
                "move the write outside, or into a function under torch.compiler.disable",
            )
    args, kwargs = trees.tree_map(full, (tuple(args), kwargs))
    return hand_on(func, args, kwargs)


def hand_on(func: Dispatched, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Let torch trace an op on gathered parameters. What is raised below is torch's error."""
    return func(*args, **kwargs)
