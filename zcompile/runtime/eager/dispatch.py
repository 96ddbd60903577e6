"""Dispatch decides what every op means on tiered tensors when it is called outside a compiled
graph.

There are four paths: views stay tiered; a few ops have a meaning of their own (copies, zeros,
clones); elementwise ops stream; everything else gathers whole tensors into the arena, computes, and
writes through what the op's schema says it wrote. Without that last step an optimizer would
"succeed" and change nothing.

Inside an optimizer's step the results of an op on whole tensors take memory that is set aside for
compiled graphs, which hold next to nothing then. So their bytes are known before the op runs
(`Session.begin_whole`), and count until the results die.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from zcompile.errors import Unsupported
from zcompile.ir.graph import UNANNOTATED_VIEWS
from zcompile.ir.torch_compat import (
    Dispatched,
    is_made_of_others,
    memory_of,
    resolving_views,
    says_not_resizable,
    storage_of,
    trees,
    without_modes,
)
from zcompile.ir.types import Layout
from zcompile.runtime.eager.clipping import (
    SCALES,
    defer_each,
    defer_scale,
    known_norm,
    known_norms,
    on_device_and_not,
)
from zcompile.runtime.eager.fillings import SPECIAL, new_like
from zcompile.runtime.eager.joined import (
    NOT_JOINED,
    agree_on_noted,
    computed,
    has_lazy_results,
    join,
)
from zcompile.runtime.eager.repeats import list_call
from zcompile.runtime.eager.rows import (
    UNANNOTATED_WRITES,
    Application,
    counts_writes_in_kernels,
    is_elementwise,
    leaves_of,
    rows_of,
    streamable,
)
from zcompile.runtime.eager.shared import (
    agree_on_found_inf,
    agree_on_op,
    check_exchanged,
    check_read_alone,
    fabric_of,
    norms_over_ranks,
)
from zcompile.runtime.eager.streaming import Learn, stream
from zcompile.runtime.ranks.fabric import Fabric, told_to_ranks
from zcompile.runtime.ranks.values import agreed_value
from zcompile.runtime.session import Session, session_of
from zcompile.runtime.store.store import Entry

aten = torch.ops.aten
CHANGES_MEMORY = frozenset({"aten::set_", "aten::resize_", "aten::resize_as_", "aten::set_data"})
"""Ops that give a tensor other memory, or more of it."""
OVERWRITES = frozenset(
    {
        aten.uniform_.default,
        aten.normal_.default,
        aten.fill_.Scalar,
        aten.fill_.Tensor,
        aten.zero_.default,
        aten.copy_.default,
        aten.exponential_.default,
        aten.eye.m_out,
        aten.random_.default,
        aten.random_.to,
        getattr(aten.random_, "from"),
        aten.bernoulli_.float,
    }
)
"""Ops that write every element without reading one: nothing need be fetched first."""


WHOLE = frozenset(
    op
    for packet in (aten.gru, aten.lstm, aten.rnn_tanh, aten.rnn_relu)
    for op in (packet.input, packet.data)
)
"""Ops whose kernel takes other ops, and makes other bits, by what it sees of all their operands."""
DROPOUTS = frozenset(
    {
        aten.dropout.default,
        aten.alpha_dropout.default,
        aten.feature_dropout.default,
        aten.feature_alpha_dropout.default,
    }
)
"""Ops that give back their operand itself where they change nothing."""


def _drops_nothing(input: object, p: float, train: bool) -> bool:
    return p == 0 or not train


def call(cls: type, func: Dispatched, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """`func(*args, **kwargs)` where at least one tensor is of `cls`, a tiered tensor class.

    raises  Unsupported for ops that change metadata in place; BudgetExceeded if a tensor does not
            fit the arena; what a transfer raises
    """
    # Under inference_mode, and within a mode of the user's, torch has not made others of an op: its
    # schema does not always say what it writes, or gives back a view of.
    if is_made_of_others(func) and func not in WHOLE:
        if func in DROPOUTS and _drops_nothing(*args, **kwargs):
            return args[0]
        return func.decompose(*args, **kwargs)
    if _is_view(func):
        return _view(cls, func, args, kwargs)
    if func is aten.add_.Tensor and _is_brought_by_autograd(cls, *args, **kwargs):
        return args[0]
    if torch.is_grad_enabled():
        _note_uses(cls, args, kwargs)
    fabric = fabric_of(cls, args, kwargs)
    if fabric is not None and fabric.lone_reads is not None:
        check_read_alone(fabric.lone_reads, cls, Application(func, tuple(args), kwargs))
    elif fabric is not None:
        check_exchanged(cls, leaves_of(args, kwargs))
        # What waits is agreed on later, all of it together, and before anything else.
        joined = _join(cls, func, args, kwargs)
        if joined is not NOT_JOINED:
            return joined
        agree_on_noted(cls, args, kwargs)
        agree_on_op(fabric, cls, func, leaves_of(args, kwargs), kwargs)
        if func in OVERWRITES and isinstance(args[0], cls):
            target: Any = args[0]
            if target.covers:  # in what it was before, the ranks need not have agreed
                session_of(target.entry).unlike.discard(target.entry.key)
        if (norms := norms_over_ranks(cls, fabric, func, args, kwargs)) is not None:
            return norms
    repeat = None if has_lazy_results(args, kwargs) else list_call(cls, func, args, kwargs)
    if repeat is not None and repeat.rerun():
        return None
    if torch.Tag.inplace_view in func.tags or func._schema.name in CHANGES_MEMORY:
        if func is aten.detach_.default or _keeps_size(func, args, kwargs):
            return args[0]
        if func is aten.resize_as_.default and not isinstance(args[0], cls):
            layout: Layout = args[1].entry_layout
            template = torch.empty_strided(layout.size, layout.stride, device="meta")
            return func(args[0], template, **kwargs)
        raise _reshape_error(func)
    if fabric is None:
        joined = _join(cls, func, args, kwargs)
        if joined is not NOT_JOINED:
            return joined
        if func in SCALES:
            args, kwargs = computed(args, kwargs)
            if (parts := on_device_and_not(cls, args)) is not None:
                near, far = parts
                _count_writes(cls, func, (far, *args[1:]), kwargs)
                defer_each(func, far, args[1])  # first: it computes nothing, and may fail
                return call(cls, func, (near, *args[1:]), kwargs)  # a repeat, in most steps
    if func._schema.is_mutable or func in UNANNOTATED_WRITES:
        _count_writes(cls, func, args, kwargs)
    args, kwargs = computed(args, kwargs)
    special = SPECIAL.get(func)
    if func in SCALES:
        special = defer_scale
    elif func is aten._foreach_norm.Scalar and fabric is None:
        special = known_norms
    if special is not None:
        done = special(cls, func, args, kwargs)
        if done is not NotImplemented:
            return done
    apps = rows_of(func, args, kwargs)
    results = _apply(cls, func, apps, None if repeat is None else repeat.learn, fabric)
    if fabric is not None:
        agree_on_found_inf(fabric, func, args)
    if func._schema.is_mutable and _returns_written(func):
        return apps[0].written()[0]
    if len(func._schema.returns) == 0:
        return None
    if apps and apps[0].args is not args and _is_list_op(func):
        return [r[0] for r in results]
    return results[0]


def _is_brought_by_autograd(cls: type, held: Any, grad: Any, **kwargs: Any) -> bool:
    """Whether an addition was that of autograd to a gradient, and is done as that is to be."""
    if kwargs or not isinstance(held, cls):
        return False
    if not isinstance(grad, Tensor) or isinstance(grad, cls):
        return False  # a number, or one that rests here too
    tiered: Any = held
    return session_of(tiered.entry).gradients.add(tiered, grad)


def _note_uses(cls: type, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
    """Note the parameters whose use in an op autograd records."""
    for tensor in leaves_of(args, kwargs):
        if isinstance(tensor, cls) and tensor.requires_grad:  # type: ignore[attr-defined]  # a tensor
            tiered: Any = tensor
            session_of(tiered.entry).gradients.note_use(tiered.entry)


def _join(cls: type, func: Dispatched, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """As `join`; what is noted counts as written."""
    joined = join(cls, func, args, kwargs)
    if joined is not NOT_JOINED and func._schema.is_mutable:
        _count_writes(cls, func, args, kwargs)
    return joined


def _reshape_error(func: Dispatched) -> Unsupported:
    """The error where an op would change the shape or the memory of a tiered tensor."""
    return Unsupported(
        f"{func} changes the shape or the memory of a tiered tensor in place",
        "assign .data for other values of the same shape; for another shape make a new "
        "parameter and offload the model again",
    )


def _keeps_size(func: Dispatched, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    """Whether an op resizes a tensor to the size it has, as kernels do with what they are given."""
    if kwargs.get("memory_format") not in (None, torch.preserve_format):
        return False
    if func is aten.resize_.default:
        return bool(args[0].size() == torch.Size(args[1]))
    return func is aten.resize_as_.default and bool(args[0].size() == args[1].size())


def _count_writes(cls: type, func: Dispatched, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
    """Count the writes of an op in the version counters of handles.

    A compiled graph saves handles for backward. Their version counters make autograd refuse a
    backward whose parameters were written since its forward, as it does for plain tensors. Those of
    the tensors themselves count too; but for what torch's own kernels of list ops write.
    """
    for tensor in Application(func, tuple(args), kwargs).written():
        if isinstance(tensor, cls):
            tiered: Any = tensor
            increment_version(tiered._handle)
            if counts_writes_in_kernels(func):
                increment_version(tensor)


def _returns_written(func: Dispatched) -> bool:
    """Whether an op returns the tensor that it wrote."""
    returns = func._schema.returns
    return (
        len(returns) == 1 and returns[0].alias_info is not None and returns[0].alias_info.is_write
    )


def _is_list_op(func: Dispatched) -> bool:
    """Whether an op takes lists of tensors, and returns a list where it returns something."""
    return func._schema.name.startswith(("aten::_foreach", "aten::_fused"))


# --- Views ---


def _is_view(func: Dispatched) -> bool:
    """Whether an op makes a view of its first argument."""
    schema = func._schema
    if func in UNANNOTATED_VIEWS:
        return True
    if schema.is_mutable or not schema.arguments or schema.arguments[0].alias_info is None:
        return False
    return any(r.alias_info is not None for r in schema.returns)


def _view(cls: Any, func: Dispatched, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Take a view of a stand-in without bytes, and wrap its layout as a tiered tensor over the same
    entry."""
    base = args[0]
    layout: Layout = base.entry_layout
    elements = layout.offset + layout.span
    stand_in = torch.empty(elements, dtype=layout.dtype, device="meta")
    stand_in = stand_in.as_strided(layout.size, layout.stride, layout.offset)
    made = func(layout.marked(stand_in), *args[1:], **kwargs)

    def wrap(view: Any) -> Any:
        if not isinstance(view, Tensor):
            return view
        layout = Layout(
            tuple(view.size()),
            tuple(view.stride()),
            int(view.storage_offset()),
            view.dtype,
            view.is_conj(),
            view.is_neg(),
        )
        if layout.end_bytes > base.entry.whole_bytes and layout.numel:
            raise RuntimeError(  # as torch says it
                f"setStorage: sizes {list(layout.size)}, strides {list(layout.stride)}, "
                f"storage offset {layout.offset}, and itemsize {layout.dtype.itemsize} requiring a "
                f"storage size of "
                f"{layout.end_bytes} are out of bounds for storage of size {base.entry.whole_bytes}"
            )
        return cls.sharing(base, layout)

    return trees.tree_map(wrap, made)


# --- Elementwise ops, streamed ---


def _apply(
    cls: type,
    func: Dispatched,
    apps: Sequence[Application],
    learn: Learn | None,
    fabric: Fabric | None,
) -> list[Any]:
    """Run rows: consecutive streamable rows of one session as one schedule, the others one by one.

    learn   is told, if there is one schedule for all
    fabric  of the ranks that hold shares; None, if there are none
    """
    results: list[Any] = [None] * len(apps)
    batch: list[int] = []
    written: set[int] = set()  # by the batch; a later row must not fetch before that is stored
    touched: set[int] = set()  # nor store before what an earlier one reads was fetched
    session: Session | None = None

    def flush() -> None:
        if batch:
            whole = len(batch) == len(apps)
            _stream(cls, func, apps, batch, results, learn if whole else None)
            for seen in (batch, written, touched):
                seen.clear()

    for index, app in enumerate(apps):
        tiered: Any = next((t for t in app.tensors() if isinstance(t, cls)), None)
        if tiered is None:
            results[index] = app.func(*app.args, **app.kwargs)
        elif (
            is_elementwise(func)
            and streamable(app, cls)
            and (fabric is None or _streams_over_ranks(cls, app, fabric))
            # A compiled call that got a view of a parameter: what streams is a call itself.
            and not (owner := session_of(tiered.entry)).executor.walks_here
        ):
            keys, writes = _entry_keys(cls, app.tensors()), _entry_keys(cls, app.written())
            if owner is not session or not (
                written.isdisjoint(keys) and touched.isdisjoint(writes)
            ):
                flush()
            session = owner
            batch.append(index)
            written |= writes
            touched |= keys
        elif (known := known_norm(cls, app.func, app.args, app.kwargs)) is not None:
            results[index] = known
        else:
            flush()
            results[index] = _gather_and_run(cls, app)
    flush()
    return results


def _streams_over_ranks(cls: type, app: Application, fabric: Fabric) -> bool:
    """Whether each rank computes an elementwise op over what it holds, as all do: over shares, if
    the result is tiered, or there is none."""
    if fabric.lone_reads is not None:
        return False
    return _keeps_result(app.func) or not _has_shares(cls, app)


def _keeps_result(func: Dispatched) -> bool:
    """Whether the result of an op that streams is tiered, or it has none."""
    if func._schema.is_mutable or _is_list_op(func):
        return True
    return func is aten.clone.default and not torch.is_grad_enabled()


def _has_shares(cls: type, app: Application) -> bool:
    """Whether ranks hold shares of an operand, so that a plain result would be a part."""
    tiered: list[Any] = [t for t in app.tensors() if isinstance(t, cls)]
    return any(t.entry.partition is not None for t in tiered)


def _entry_keys(cls: Any, tensors: Sequence[Tensor]) -> set[int]:
    """Keys of the entries behind the tiered ones of `tensors`."""
    return {t.entry.key for t in tensors if isinstance(t, cls)}


def _stream(
    cls: type,
    func: Dispatched,
    apps: Sequence[Application],
    batch: list[int],
    results: list[Any],
    learn: Learn | None,
) -> None:
    """Stream the rows of `batch`; their results go into `results`."""
    chosen = [apps[i] for i in batch]
    targets: list[Tensor | None] = [None] * len(chosen)
    if not func._schema.is_mutable:
        lists = _is_list_op(func)
        targets = [_target(cls, app, tiered=lists) for app in chosen]
        for index, target in zip(batch, targets, strict=True):
            results[index] = [target] if lists else target
            if lists:
                made: Any = target
                of_lists = session_of(made.entry).executor.recorder.list_results
                of_lists.made(made._handle, made.entry.nbytes)
    if len(chosen) == 1 and not _is_list_op(func):
        _stream_one(cls, chosen[0], targets)
    else:
        stream(func, chosen, targets, cls, learn)


def _stream_one(cls: type, app: Application, targets: Sequence[Tensor | None]) -> None:
    """Stream one row; in an optimizer's step its plain operands and its plain result count."""
    made = [t for t in targets if t is not None and not isinstance(t, cls)]
    plain = [t for t in app.tensors() if not isinstance(t, cls) and t.numel() > 1]
    first: Any = next(t for t in app.tensors() if isinstance(t, cls))
    session = session_of(first.entry)
    if not (made or plain) or not session.in_step:
        stream(app.func, [app], targets, cls)
        return
    rows = session.begin_whole(str(app.func), [], [*plain, *made], 0)
    try:
        stream(app.func, [app], targets, cls)
    finally:
        session.end_whole(rows)
    session.count_until_dead(made)


def _target(cls: type, app: Application, tiered: bool) -> Tensor:
    """The tensor that takes the result of an op that makes a new tensor.

    A list op makes one result per parameter, all alive at once, so they are tiered as their
    operands are. A single result is a plain tensor, as any activation. A clone is tiered when
    gradients are off, as in an optimizer that keeps one.
    """
    first: Any = next(t for t in app.tensors() if isinstance(t, cls))
    metas = trees.tree_map(
        lambda t: (
            torch.empty_strided((1,), (1,), dtype=t.dtype, device="meta")
            if isinstance(t, Tensor) and t.dim()
            else t
        ),
        (app.args, app.kwargs),
    )
    metas = trees.tree_map(lambda t: t.to("meta") if isinstance(t, Tensor) else t, metas)
    # The device is that of the operands, or the op would not be streamed.
    named = {name: value for name, value in metas[1].items() if name != "device"}
    result = app.func(*metas[0], **named)
    dtype = (result[0] if isinstance(result, list | tuple) else result).dtype
    layout = Layout(tuple(first.size()), tuple(first.stride()), 0, dtype)
    keep = app.func is aten.clone.default and not torch.is_grad_enabled()
    if tiered or keep:
        return new_like(cls, first, layout)
    return torch.empty_strided(layout.size, layout.stride, dtype=dtype, device=first.device)


# --- Ops on whole tensors ---


def _gather_and_run(cls: type, app: Application) -> Any:
    """Gather every tiered operand, compute, write back what was written.

    raises  Unsupported, if the op does not say what it writes
    """
    if app.func.namespace == "c10d":  # their schemas do not, and an asynchronous one writes later
        raise Unsupported(
            f"torch.distributed would work on a copy of a tiered tensor ({app.func}), and what it "
            "writes there would be lost",
            "give it a plain tensor: value = grad.cpu(); all_reduce(value); grad.copy_(value)",
        )
    held: dict[int, tuple[Entry, Tensor]] = {}
    written = app.written()
    read = _entry_keys(cls, app.read())
    operands: list[Any] = [t for t in app.tensors() if isinstance(t, cls)]
    # Before any is gathered, since this takes room in the arena too.
    for store in dict.fromkeys(operand.entry.store for operand in operands):
        store.settle()
    for entry in dict.fromkeys(operand.entry for operand in operands):
        entry.settle()  # which nothing waits with by now, but one that is broken raises
        entry.store.deferrals.apply(entry)
    session = session_of(operands[0].entry)
    counted = session.in_step
    if counted:
        entries = {t.entry.key: t.entry for t in operands}
        plain = [t for t in app.tensors() if not isinstance(t, cls)]
        rows = session.begin_whole(
            str(app.func), list(entries.values()), plain, result_bytes(cls, app)
        )

    def full(value: Any) -> Any:
        if not isinstance(value, cls):
            return value
        tiered: Any = value
        entry: Entry = tiered.entry
        if tiered.numel() > 1:
            session_of(entry).note_whole(str(app.func))
        if entry.key not in held:
            covered = app.func in OVERWRITES and (tiered.covers or _is_unset_parameter(tiered))
            blank = covered and entry.key not in read
            held[entry.key] = (entry, _bytes_of(entry, fetch=not blank))
            if blank and not tiered.entry_layout.dense:
                held[entry.key][1].zero_()  # what is between the elements goes home too
        return tiered.entry_layout.view(held[entry.key][1])

    try:
        args, kwargs = trees.tree_map(full, (app.args, app.kwargs))
        is_complex = any(tensor.is_complex() for tensor in app.tensors())
        with resolving_views() if is_complex else nullcontext():
            result = app.func(*args, **kwargs)
    except RuntimeError as error:
        if not says_not_resizable(error):
            raise
        raise _reshape_error(app.func) from error
    finally:
        if counted:
            session.end_whole(rows)
    if counted:
        given = Application(app.func, args, kwargs).tensors()
        session.count_until_dead(new_results(result, given))
    for tensor, made in zip(written, Application(app.func, args, kwargs).written(), strict=True):
        if isinstance(tensor, cls) and made.size() != tensor.size():
            raise _reshape_error(app.func)  # what `out=` names is resized
    for tensor in written:
        if isinstance(tensor, cls):
            entry, bytes_ = held[tensor.entry.key]  # type: ignore[attr-defined]  # of cls
            store = entry.store
            if store.fabric is not None and entry.key in session.births:
                noted = partial(session.unlike.add, entry.key)
                bytes_ = agreed_value(store.fabric, entry.name, bytes_, noted)
            ticket = store.put_whole(entry, bytes_, after=[store.device.mark()])
            if bytes_.device.type == "cpu" and store.device.torch_device.type != "cpu":
                ticket.wait()
    return result


def _is_unset_parameter(tiered: Any) -> bool:
    """Whether it is all of a parameter whose layout has gaps and that has no value yet."""
    entry: Entry = tiered.entry
    owner: Any = entry.owner() if entry.unset and entry.owner is not None else None
    return owner is not None and owner.entry_layout == tiered.entry_layout


def _bytes_of(entry: Entry, *, fetch: bool) -> Tensor:
    """All bytes of an entry where the op is to run: in the arena; at birth, where it was born."""
    session = session_of(entry)
    session.executor.foresight.abandon()
    if entry.key in session.births:
        return session.read_all(entry)
    if entry.partition is not None:  # gathered in memory of the host
        if session.device.streams is not None:  # which compute does not reach
            fabric = session.fabric
            assert fabric is not None, "ranks hold shares of it"
            # One may have room that another has not.
            told = nullcontext() if fabric.lone_reads is not None else told_to_ranks(fabric)
            with told:
                bytes_ = session.arena.take(entry.whole_bytes, entry.name)
            session.wait_for_readers(bytes_)
            return bytes_.copy_(session.whole(entry)) if fetch else bytes_
        blank = torch.empty(entry.whole_bytes, dtype=torch.uint8, device="cpu")
        return session.whole(entry) if fetch else blank
    bytes_ = session.arena.take(entry.nbytes, entry.name)
    if not fetch:
        session.wait_for_readers(bytes_)
    else:
        session.fetch(entry, bytes_, after=[session.device.mark()]).join_compute()
    return bytes_


def result_bytes(cls: type, app: Application) -> int:
    """Bytes of the results of an op that lie in memory of their own, asked of stand-ins without
    bytes.

    Where values decide how many they are, as many bytes as all operands have.

    cls  of the tiered tensors among the operands
    """
    returns = app.func._schema.returns
    if all(r.alias_info is not None or "Tensor" not in str(r.type) for r in returns):
        return 0

    def stand_in(value: Any) -> Any:
        if isinstance(value, cls):
            tiered: Any = value
            layout = tiered.entry_layout
            return torch.empty_strided(
                layout.size, layout.stride, dtype=layout.dtype, device="meta"
            )
        return value.to("meta") if isinstance(value, Tensor) else value

    args, kwargs = trees.tree_map(stand_in, (app.args, app.kwargs))
    try:
        with without_modes():
            results = app.func(*args, **kwargs)
    except (NotImplementedError, RuntimeError):
        # On purpose: an op that needs values, or is called wrongly, raises on "meta" too. What it
        # makes is then taken to be as large as its operands; the op itself says what is wrong.
        return sum(t.numel() * t.element_size() for t in app.tensors())
    return sum(storage_bytes for _, storage_bytes in _storages(results))


def new_results(results: object, operands: Iterable[Tensor]) -> list[Tensor]:
    """The results in memory that none of the operands lies in. Sparse ones have none to look at."""
    theirs = {memory_of(t) for t in operands if t.layout is torch.strided}
    return [t for t, _ in _storages(results) if memory_of(t) not in theirs]


def _storages(results: object) -> Iterator[tuple[Tensor, int]]:
    """A tensor over each storage of the results, and the bytes of that storage."""
    seen: set[int] = set()
    for value in trees.tree_leaves(results):
        if isinstance(value, Tensor) and value.layout is torch.strided:
            memory = memory_of(value)
            if memory not in seen:
                seen.add(memory)
                yield value, storage_of(value).nbytes()
