"""Elementwise ops of an optimizer's step are joined: all that a step does to a parameter, its
gradient and its states is one row, whose operands come once and are stored once.

Torch's optimizers compute an update op by op, unless they are fused: Adam multiplies one state,
mixes the gradient into it, squares that into another, takes a root. Run one by one, each op brings
what it reads. Here an op is noted, and its result, where it makes one, is a `LazyResult`. Ops that
share an operand form a row; the rows of a step run as one schedule when the step ends, or before
anybody uses an operand or a result otherwise: the entries are marked, and every way to their bytes
asks for the mark first (`Entry.settle`). Chunk by chunk each op is called as it was, so that all
bits are those of the ops one by one.

Joined are the ops of torch's own optimizers: code of users may do with a result what only a tensor
with memory stands. Not joined are fused optimizers, of which an update is one op; lists of ops
whose operands all rest in reach, which run in one call, and any list over ranks; ops with a plain
operand of more than one element, which others may change meanwhile; and ops on part of an entry.
"""

import sys
import threading
import weakref
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.optim import optimizer as torch_optimizer

from zcompile.errors import BudgetExceeded, Unsupported, ZinfError
from zcompile.ir.optimizer_step import Column, Row, lower_step
from zcompile.ir.partition import Partition
from zcompile.ir.schedule import Register, Schedule
from zcompile.ir.torch_compat import Dispatched, no_torch_function, trees, wrapper
from zcompile.ir.types import EntryKind
from zcompile.runtime.eager.fillings import SPECIAL
from zcompile.runtime.eager.rows import (
    NO_CASTS,
    Application,
    CopyCasts,
    is_elementwise,
    leaves_of,
    rows_of,
    streamable,
)
from zcompile.runtime.eager.shared import Agreement, agreement_on
from zcompile.runtime.eager.streaming import (
    StreamedCall,
    Widened,
    changed,
    lent_for_reading,
    range_of,
    signature_of,
)
from zcompile.runtime.late import Broken
from zcompile.runtime.live_memory import LiveStorages
from zcompile.runtime.ranks.fabric import Fabric
from zcompile.runtime.session import Session, session_of
from zcompile.runtime.store.store import Deferred, as_they_rest
from zcompile.runtime.transfer.interrupts import deferred_interrupts, uninterrupted
from zcompile.runtime.transfer.ticket import Ready, Ticket

aten = torch.ops.aten

MOST_FRAMES = 24
"""Between an op and the code that calls it."""
PASSED_THROUGH = frozenset({"torch", "zcompile", "contextlib"})
"""Packages whose code stands between the two."""
NOT_JOINED = object()
"""The answer of `join` where an op is to run at once."""

# --- Results that are not there yet ---


class LazyResult(Tensor):
    """The result of an op that was noted and has not run: a tensor as any other, computed when it
    is used for more than another elementwise op.

    ops     where it was noted
    number  of the result there; negative once it was computed
    """

    ops: "JoinedOps"
    number: int
    _value: Tensor | None = None
    _share: "_Share | None" = None
    _broken: Broken | None = None

    __torch_function__ = no_torch_function  # type: ignore[assignment]  # torch's own recipe

    @staticmethod
    def __new__(cls, ops: "JoinedOps", number: int, like: Tensor, dtype: torch.dtype) -> Any:
        return wrapper(cls, like.size(), like.stride(), 0, dtype, like.device, False)

    def __init__(self, ops: "JoinedOps", number: int, like: Tensor, dtype: torch.dtype) -> None:
        self.ops, self.number = ops, number

    def computed(self) -> Tensor:
        """The plain tensor; where ranks hold shares of it, all of them ask for it.

        raises  what a transfer raises; UpdateBroken, if its ops failed; RanksDiffer, RankFailed
        """
        if self.is_noted:
            self.ops.settle()
        if self._broken is not None:
            self._broken.settle()
        if self._share is not None:
            self.ops.agree()
            self._value, self._share = self._gathered(self._share), None
        assert self._value is not None, "a result that is alive is computed with its ops"
        return self._value

    def _gathered(self, share: "_Share") -> Tensor:
        """All of it. raises  BudgetExceeded, before it is gathered; RanksDiffer, RankFailed"""
        session = self.ops.session
        whole = _target(self, None)
        counted = session.begin_whole("a result", [], [whole], 0)
        try:
            share.gather_into(whole)
        finally:
            session.end_whole(counted)
        session.count_until_dead([whole])
        return whole

    def give(self, value: "Tensor | _Share") -> None:
        """`value` was computed."""
        self.number = -1
        if isinstance(value, _Share):
            self._share = value
        else:
            self._value = value

    def give_up(self, broken: Broken) -> None:
        """It will not be computed: its ops failed."""
        self._broken = broken

    @property
    def is_noted(self) -> bool:
        """Whether it waits to be computed."""
        return self._value is None and self._share is None and self._broken is None

    @classmethod
    @torch.compiler.disable  # type: ignore[untyped-decorator]  # as of TieredTensor
    def __torch_dispatch__(
        cls,
        func: Dispatched,
        types: Any,
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        first = next(x for x in leaves_of(args, kwargs) if isinstance(x, LazyResult))
        try:
            with deferred_interrupts():
                made = join(first.ops.cls, func, args, kwargs)
                if made is not NOT_JOINED:
                    return made
                first.ops.agree()
                plain_args, plain_kwargs = computed(args, kwargs)
        except BaseException:
            run_noted_ops(first.ops.cls, [first])
            raise
        result = func(*plain_args, **plain_kwargs)
        if func._schema.is_mutable and args and result is plain_args[0]:
            return args[0]
        return result

    # What torch reads of memory itself.

    def numpy(self, *, force: bool = False) -> Any:
        return self.computed().numpy(force=force)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        return self.computed().__array__(dtype)

    def tolist(self) -> Any:
        return self.computed().tolist()

    def __dlpack__(self, **how: Any) -> Any:
        return self.computed().__dlpack__(**how)

    def data_ptr(self) -> int:
        return self.computed().data_ptr()

    def untyped_storage(self) -> Any:
        return self.computed().untyped_storage()

    def __repr__(self, *, tensor_contents: Any = None) -> Any:  # type: ignore[override]  # untyped in torch
        return repr(self.computed())

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.computed().__reduce_ex__(protocol)

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        return self.computed().__deepcopy__(memo)  # type: ignore[no-any-return]  # untyped in torch


@dataclass(frozen=True)
class _Share:
    """What this rank has of a result: [partition.count] of its elements in the order of storage."""

    partition: Partition
    elements: Tensor
    name: str
    fabric: Fabric

    def gather_into(self, whole: Tensor) -> None:
        """Fill `whole`, which is dense, with what all ranks have; each of them calls this."""

        def bring(into: Tensor) -> Ticket:
            into.copy_(self.elements.view(torch.uint8))
            return Ready()

        itemsize = self.elements.element_size()
        flat = self.fabric.gathered(self.name, self.partition, itemsize, bring)
        values = flat.view(self.elements.dtype)
        whole.copy_(values.as_strided(whole.size(), whole.stride()))


def has_lazy_results(args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    """Whether an operand was noted, or was computed of what was."""
    return any(isinstance(leaf, LazyResult) for leaf in leaves_of(args, kwargs))


def computed(args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[Sequence[Any], dict[str, Any]]:
    """The arguments of an op, with the values of lazy results in their place."""
    if not has_lazy_results(args, kwargs):
        return args, kwargs

    def plain(value: Any) -> Any:
        return value.computed() if isinstance(value, LazyResult) else value

    made: tuple[Sequence[Any], dict[str, Any]] = trees.tree_map(plain, (tuple(args), kwargs))
    return made


# --- What was noted ---


@dataclass
class _NotedRow:
    """Ops that share operands, in their order.

    ops      (number in the order of all ops, op, the result that it makes or None)
    tiered   key of an entry -> the tensor over it
    written  keys of those that are written
    results  numbers of the lazy results
    """

    ops: list[tuple[int, Application, int | None]] = field(default_factory=list)
    tiered: dict[int, Any] = field(default_factory=dict)
    written: set[int] = field(default_factory=set)
    results: set[int] = field(default_factory=set)

    @property
    def partition(self) -> Partition | None:
        """How all its operands are divided over ranks; None, if they are not."""
        first = next(iter(self.tiered.values()))
        part: Partition | None = first.entry.partition
        return part

    def take(self, other: "_NotedRow") -> None:
        """An op has operands of both."""
        self.ops = sorted((*self.ops, *other.ops), key=lambda op: op[0])
        self.tiered |= other.tiered
        self.written |= other.written
        self.results |= other.results


def _is_in_step(thread: int) -> bool:
    """Whether a thread is within the step of an optimizer of torch."""
    frame = sys._current_frames().get(thread)
    while frame is not None and frame.f_code.co_filename != torch_optimizer.__file__:
        frame = frame.f_back
    return frame is not None


class JoinedOps:
    """The ops of one session's optimizers that were noted and have not run.

    cls  of tiered tensors
    """

    def __init__(self, session: Session, cls: Any) -> None:
        self._session = weakref.ref(session)
        self.cls = cls
        self._next = 0
        self._of_entry: dict[int, _NotedRow] = {}
        self._of_result: dict[int, _NotedRow] = {}
        self._lazy: dict[int, weakref.ref[LazyResult]] = {}
        self._untold = Agreement()
        """On which ranks have not agreed yet."""
        self._thread = 0
        """That of the step which noted the last op."""
        self._noting = False
        """Whether an op is being noted."""

    @property
    def has_any(self) -> bool:
        """Whether any op waits."""
        return bool(self._of_entry)

    def partition_of(self, lazy: LazyResult) -> Partition | None:
        """How a result that waits is divided over ranks; None, if it is not."""
        return self._of_result[lazy.number].partition

    def tell(self, func: Dispatched, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        """Before an op is noted: where ranks hold shares, they will agree on it."""
        if self.session.fabric is not None:
            args, kwargs = trees.tree_map(_as_told, (tuple(args), kwargs))
            self._untold.add(agreement_on(self.cls, func, leaves_of(args, kwargs), kwargs))

    def agree(self) -> None:
        """Let ranks that hold shares agree on what was noted since they last did.

        Called where all of them come to in the same order: when a step ends, and before anything
        else on which they agree. When noted ops run, each decides by itself.
        raises  RanksDiffer, RankFailed
        """
        fabric, untold = self.session.fabric, self._untold
        if fabric is not None and untold.details:
            untold.reach(fabric, f"call ops of {self._name}")
            self._untold = Agreement()

    @property
    def session(self) -> Session:
        session = self._session()
        assert session is not None, "a tensor of it is there"
        return session

    def make_way(self, app: Application) -> None:
        """Before an op is noted: settle what else its operands wait for, and what was noted of one
        of them as a tensor of another layout, or in its rows."""
        for tensor in app.tensors():
            if isinstance(tensor, self.cls):
                tiered: Any = tensor
                entry = tiered.entry
                row = self._of_entry.get(entry.key)
                if row is None:
                    entry.settle_updates()
                elif row.tiered[entry.key].entry_layout != tiered.entry_layout:
                    self.settle()

    def widen_written(self, app: Application) -> None:
        """Let what an op writes rest in its own dtype: what passes by is widened to be read.

        That changes no value, so what is noted of it need not run before.
        """
        for tensor in app.written():
            if isinstance(tensor, self.cls):
                tiered: Any = tensor
                entry = tiered.entry
                if entry.narrow is not None:
                    waits = entry.waits
                    entry.wait_for(None)
                    try:
                        entry.store.widen(entry)
                    finally:
                        entry.wait_for(waits)

    def __enter__(self) -> None:
        """Within, this thread notes ops: who would run them meanwhile, as a signal handler that
        reads a parameter, is refused, since what is just being noted would be lost."""
        self._refuse_others()
        self._thread, self._noting = threading.get_ident(), True

    def __exit__(self, *_: object) -> None:
        self._noting = False

    def _refuse_others(self) -> None:
        """Raise Unsupported where another thread's step is noting ops, or this thread's is right
        now. What a step has left that is over, or broke off, is anybody's."""
        if not self._noting:
            if self._thread == threading.get_ident() or not self.has_any:
                return
            if not _is_in_step(self._thread):
                return
        raise Unsupported(
            f"a tensor of a step of {self._name} is used while that step is running, by another "
            "thread or by a signal handler",
            "wait until optimizer.step() has returned, and let a handler set a flag for the loop",
        )

    def note(self, app: Application, dtype: torch.dtype | None) -> LazyResult | None:
        """Within the context of this: let an op wait. Returns the tensor that it makes.

        dtype  of the tensor that it makes; None: it writes its first operand
        """
        tensors = app.tensors()
        row = self._row_of(tensors)
        for tensor in tensors:
            if isinstance(tensor, self.cls):
                tiered: Any = tensor
                entry = tiered.entry
                if entry.key not in row.tiered:
                    entry.wait_for(self)
                    row.tiered[entry.key] = tiered
                    self._of_entry[entry.key] = row
        for tensor in app.written():
            if isinstance(tensor, self.cls):
                tiered = tensor
                row.written.add(tiered.entry.key)
                if tiered.entry.kind is EntryKind.GRAD:
                    tiered.entry.written()  # what was measured of it is of before
        number = self._next
        self._next += 1
        made = None if dtype is None else number
        row.ops.append((number, _as_noted(app), made))
        if dtype is None:
            return None
        like = next(t for t in tensors if t.numel() != 1)
        lazy = LazyResult(self, number, like, dtype)
        row.results.add(number)
        self._of_result[number], self._lazy[number] = row, weakref.ref(lazy)
        return lazy

    def _row_of(self, tensors: Iterable[Tensor]) -> _NotedRow:
        """The row of these operands; rows that had nothing in common become one."""
        found: list[_NotedRow] = []
        for tensor in tensors:
            row = None
            if isinstance(tensor, LazyResult):
                row = self._of_result[tensor.number]
            elif isinstance(tensor, self.cls):
                tiered: Any = tensor
                row = self._of_entry.get(tiered.entry.key)
            if row is not None and all(row is not other for other in found):
                found.append(row)
        first, *others = found or [_NotedRow()]
        for other in others:
            first.take(other)
            self._of_entry |= dict.fromkeys(other.tiered, first)
            self._of_result |= dict.fromkeys(other.results, first)
        return first

    def end_step(self) -> None:
        """Run all that was noted; updates that the plan wants late may wait for the forward.

        raises  as `settle`
        """
        self.agree()
        self._run(may_wait=True)

    def settle(self) -> None:
        """Run all that was noted, at once: somebody uses an operand or a result.

        raises  BudgetExceeded, before anything ran; Unsupported, if they are of a step that another
                thread runs; what a transfer raises: from then on each use of what the ops write
                raises UpdateBroken
        """
        self._run(may_wait=False)

    @uninterrupted
    def _run(self, may_wait: bool) -> None:
        rows = list({id(row): row for row in self._of_entry.values()}.values())
        if not rows:
            return
        self._refuse_others()
        alive = {n: lazy for n, ref in self._lazy.items() if (lazy := ref()) is not None}
        noted = self._of_entry, self._of_result, self._lazy
        self._of_entry, self._of_result, self._lazy = {}, {}, {}
        self._mark(rows, None)
        with torch.no_grad():  # as the step ran that noted them
            parts = {number: noted[1][number].partition for number in alive}
            targets = {number: _target(x, parts[number]) for number, x in alive.items()}
            try:
                counted = self._count(list(targets.values()))
                try:
                    schedule, call = self._lowered(rows, targets)
                except BaseException:
                    self.session.end_whole(counted)
                    raise
            except (BudgetExceeded, Unsupported):  # before anything was computed
                self._of_entry, self._of_result, self._lazy = noted
                self._mark(rows, self)
                raise
            try:
                with as_they_rest(call.entries):
                    self.session.late.run(
                        schedule, call.inputs, call.entries, call.changing, may_wait, call.copying
                    )
            except (BudgetExceeded, Unsupported):
                if self.session.late.has(call.entries):  # others of the call were computed
                    self._give(alive, targets, parts)
                    raise
                self._of_entry, self._of_result, self._lazy = noted  # as above
                self._mark(rows, self)
                raise
            except BaseException as error:
                self._break(rows, list(alive.values()), error)
                raise
            finally:
                self.session.end_whole(counted)
            if targets:
                self.session.count_until_dead(list(targets.values()))
        self._give(alive, targets, parts)

    def _give(
        self,
        alive: dict[int, LazyResult],
        targets: dict[int, Tensor],
        parts: dict[int, Partition | None],
    ) -> None:
        """Give results their values, by their numbers; or what this rank has of them."""
        for number, lazy in alive.items():
            made, part, fabric = targets[number], parts[number], self.session.fabric
            if part is None or fabric is None:
                lazy.give(made)
            else:
                lazy.give(_Share(part, made, f"result {number} of {self._name}", fabric))

    def _break(
        self, rows: Sequence[_NotedRow], lazy: Sequence[LazyResult], error: BaseException
    ) -> None:
        """Rows failed on their way: what they write, and what they make, is refused from then on.

        Which of their chunks went home is not known; an op that was called must not be lost."""
        written = {}
        for row in rows:
            entries = [row.tiered[key].entry for key in sorted(row.written)]
            named = [*(e for e in entries if e.kind is EntryKind.PARAM), *entries]
            if named:
                written[named[0].name] = entries
        broken = self.session.late.broke_off(written, error)
        for result in lazy:
            result.give_up(broken)

    @staticmethod
    def _mark(rows: Sequence[_NotedRow], waits: "JoinedOps | None") -> None:
        """Let the entries of rows wait for this to be settled, or for nothing."""
        for row in rows:
            for tiered in row.tiered.values():
                tiered.entry.wait_for(waits)

    def _lowered(
        self, rows: Sequence[_NotedRow], targets: dict[int, Tensor]
    ) -> tuple[Schedule, "_JoinedCall"]:
        session = self.session
        call, name = _JoinedCall(self.cls), self._name
        made = [call.joined(row, targets) for row in rows]
        room = session.step_room
        key = (room, name, *call.signature)
        build = partial(lower_step, name, made, len(call.inputs), len(call.entries), room)
        try:
            schedule = session.step(key, build)
        except BudgetExceeded as error:
            if not session.reclaim(error.needed_bytes):
                where = f"one chunk of {name}"
                raise session.split.too_small(error, where, "its operands") from error
            return self._lowered(rows, targets)  # anew, since operands rest elsewhere now
        if not session.scratch_use.open(schedule):
            return self._lowered(rows, targets)  # anew, through the window
        return schedule, call

    @property
    def _name(self) -> str:
        return self.session.stepping or "an optimizer"

    def _count(self, made: Sequence[Tensor]) -> list[LiveStorages]:
        """Count results that somebody holds, before the ops that make them are lowered."""
        return self.session.begin_whole("ops", [], made, 0) if made else []


def _target(lazy: LazyResult, part: Partition | None) -> Tensor:
    """Memory for a result that somebody holds; or for what this rank has of it."""
    if part is not None:
        return torch.zeros(part.count, dtype=lazy.dtype, device=lazy.device)
    return torch.empty_strided(lazy.size(), lazy.stride(), dtype=lazy.dtype, device=lazy.device)


@dataclass(frozen=True)
class _ResultOf:
    """Stands for a lazy result among the operands of an op, and does not keep it alive."""

    number: int


def _as_told(value: Any) -> Any:
    """A lazy result by its number, and a tensor of one number by value: as an op is noted."""
    if isinstance(value, LazyResult):
        return value.number
    plain = type(value) in (Tensor, torch.nn.Parameter) and value.numel() == 1 and value.is_cpu
    return value.item() if plain else value


def _as_noted(app: Application) -> Application:
    """The op with lazy results by number, and with tensors of one number by value: a count of
    steps changes in place."""

    def kept(value: Any) -> Any:
        if isinstance(value, LazyResult):
            return _ResultOf(value.number)
        plain = type(value) in (Tensor, torch.nn.Parameter) and value.numel() == 1
        return value.detach().clone() if plain else value

    args, kwargs = trees.tree_map(kept, (app.args, app.kwargs))
    return replace(app, args=args, kwargs=kwargs)


def run_noted_ops(cls: Any, leaves: Iterable[Any]) -> None:
    """After an error or an interrupt, which may end a step: what it did before is done then, and
    waits for nothing.

    leaves  operands of the op that failed
    """
    with suppress(ZinfError, OSError):
        for leaf in leaves:
            if isinstance(leaf, LazyResult):
                leaf.ops.settle()
            elif isinstance(leaf, cls):
                tiered: Any = leaf
                session_of(tiered.entry).run_noted_ops()


def agree_on_noted(cls: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
    """Before ranks agree on an op of its own: let them agree on those that were noted before.

    raises  RanksDiffer, RankFailed
    """
    tiered: Any = next(leaf for leaf in leaves_of(args, kwargs) if isinstance(leaf, cls))
    if (noted := session_of(tiered.entry).noted_ops) is not None:
        noted.agree()


# --- Which ops wait ---


def join(cls: Any, func: Dispatched, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Note an op of an optimizer's step, and return what it returns; `NOT_JOINED` for others."""
    schema = func._schema
    if func in SPECIAL or func is aten.clone.default or not is_elementwise(func):
        return NOT_JOINED
    if schema.name.startswith(("aten::_fused", "aten::_amp")):
        return NOT_JOINED  # an update as one op
    if any(argument.is_out for argument in schema.arguments):
        return NOT_JOINED
    if not _is_called_by_torchs_optimizers():
        return NOT_JOINED
    apps = rows_of(func, args, kwargs)
    sessions = {_session_for(app, cls) for app in apps}
    session = next(iter(sessions), None)
    if session is None or len(sessions) != 1:
        return NOT_JOINED
    lists = schema.name.startswith("aten::_foreach")
    if lists and session.fabric is not None:
        return NOT_JOINED  # plans differ by rank, and with them whether any operand moves
    if lists and not any(_moves(tensor, cls) for app in apps for tensor in app.tensors()):
        return NOT_JOINED  # what rests in reach is computed in one call
    dtypes = [_made_dtype(app) for app in apps]  # raises what torch raises
    ops = session.noted_ops or session.note_ops_by(JoinedOps(session, cls))
    if session.fabric is not None and not ops.has_any:
        session.late.settle()  # which are late differs too: none is to settle what is noted
    for app in apps:
        ops.make_way(app)
        ops.widen_written(app)
    with ops:
        if not all(_is_noted(tensor) for app in apps for tensor in app.tensors()):
            return NOT_JOINED  # results were computed just now
        ops.tell(func, args, kwargs)
        if schema.is_mutable:
            for app in apps:
                ops.note(app, None)
            return None if lists else args[0]
        made = [ops.note(app, dtype) for app, dtype in zip(apps, dtypes, strict=True)]
    if lists:
        for lazy in made:
            session.executor.recorder.list_results.made(lazy, lazy.numel() * lazy.itemsize)
    return made if lists else made[0]


def _is_called_by_torchs_optimizers() -> bool:
    """Whether an op is called by code of torch.optim, which does nothing with what it makes that a
    `LazyResult` does not stand. What users write may."""
    frame: FrameType | None = sys._getframe(1)
    for _ in range(MOST_FRAMES):
        if frame is None:
            return False
        module = frame.f_globals.get("__name__", "")
        if module.startswith("torch.optim."):
            return True
        if module.split(".")[0] not in PASSED_THROUGH:
            return False
        frame = frame.f_back
    return False


def _is_noted(tensor: Tensor) -> bool:
    """Whether a tensor is no lazy result that was computed."""
    return not isinstance(tensor, LazyResult) or tensor.is_noted


def _moves(tensor: Tensor, cls: Any) -> bool:
    """Whether an operand has to be brought, or waits with others that have."""
    if not isinstance(tensor, cls):
        return isinstance(tensor, LazyResult)
    tiered: Any = tensor
    return not tiered.entry.store.can_view_in_place(tiered.entry)


def _session_for(app: Application, cls: Any) -> Session | None:
    """The session whose optimizer asks for an op that may be noted."""
    found: set[Session] = set()
    parts: set[Partition | None] = set()
    wide: list[Tensor] = []
    for tensor in app.tensors():
        if isinstance(tensor, LazyResult):
            if not tensor.is_noted:
                return None
            found.add(tensor.ops.session)
            parts.add(tensor.ops.partition_of(tensor))
            wide.append(tensor)
        elif isinstance(tensor, cls):
            tiered: Any = tensor
            entry = tiered.entry
            if not tiered.covers or tiered.numel() == 1:
                return None
            found.add(session_of(entry))
            parts.add(entry.partition)
            wide.append(tensor)
        elif tensor.numel() != 1 or tensor.requires_grad:
            return None
    if len(found) != 1 or len(parts) != 1:
        return None
    (session,) = found
    if not session.is_updating or session.executor.walks_here:
        return None
    if app.func._schema.is_mutable and not _writes_first(app):
        return None
    if any(isinstance(t, cls) for t in wide):
        if not streamable(app, cls, (LazyResult,)):
            return None
    elif any(t.size() != wide[0].size() or t.stride() != wide[0].stride() for t in wide):
        return None
    elif any(t.dim() > wide[0].dim() for t in app.tensors()):
        return None  # one element of more dimensions gives the result its own
    return session


def _writes_first(app: Application) -> bool:
    """Whether an op writes its first operand, and no other."""
    written, first = app.written(), app.args[0]
    return len(written) == 1 and written[0] is (first[0] if isinstance(first, list) else first)


def _made_dtype(app: Application) -> torch.dtype:
    """The dtype of what an op makes or writes. raises  what torch raises of these operands"""
    leaves, spec = trees.tree_flatten((app.args, app.kwargs))
    return _dtype_of(app.func, spec, tuple(map(_kind_of, leaves)))


def _kind_of(leaf: object) -> object:
    """What the dtype of a result depends on of an operand."""
    if isinstance(leaf, Tensor):
        return (leaf.dtype, leaf.numel() != 1, leaf.dim())
    return type(leaf) if isinstance(leaf, int | float | complex) else leaf


@lru_cache(maxsize=1024)
def _dtype_of(func: Dispatched, spec: Any, kinds: tuple[object, ...]) -> torch.dtype:
    """The dtype of what an op makes, or writes, asked with ones in place of its operands."""

    def stand_in(kind: object) -> object:
        if isinstance(kind, tuple):
            dtype, wide, dims = kind
            return torch.ones((2 if wide else 1,) * dims, dtype=dtype)
        return kind(1) if isinstance(kind, type) else kind

    args, kwargs = trees.tree_unflatten([stand_in(kind) for kind in kinds], spec)
    result = func(*args, **kwargs)
    if result is None:  # a list op that writes
        result = args[0]
    found: Tensor = result[0] if isinstance(result, list | tuple) else result
    return found.dtype


# --- Computing ---


class _JoinedCall(StreamedCall):
    """Collects the entries and plain inputs of the rows of joined ops."""

    def joined(self, row: _NotedRow, targets: dict[int, Tensor]) -> Row:
        """targets  of results that somebody holds: their number -> the tensor to write them to"""
        index: dict[int, int] = {}
        columns: list[Column] = []
        for key, tiered in row.tiered.items():
            index[key] = len(columns)
            columns.append(self._column(tiered, key in row.written))
        plains: list[Register] = []
        changes = self._deferred_changes(columns, plains)
        kinds: list[object] = []
        first = row.ops[0][0]
        ops: list[JoinedOp] = []
        for _, app, made in row.ops:
            leaves, spec = trees.tree_flatten((app.args, app.kwargs))
            places: list[tuple[str, int]] = []
            for leaf in leaves:
                if isinstance(leaf, self._cls):
                    operand: Any = leaf
                    places.append(("column", index[operand.entry.key]))
                elif isinstance(leaf, _ResultOf):
                    places.append(("result", leaf.number - first))
                else:
                    places.append(("plain", len(plains)))
                    plains.append(self.input(leaf))
                    kinds.append(signature_of(leaf))
            ops.append(
                JoinedOp(app.func, spec, tuple(places), None if made is None else made - first)
            )
        held = []
        for number in sorted(row.results & targets.keys()):
            held.append((number - first, len(plains)))
            plains.append(self.input(targets[number]))
            kinds.append(signature_of(targets[number]))
        ops = _with_drops(ops, {number for number, _ in held})
        part = row.partition
        numel = next(iter(row.tiered.values())).numel() if part is None else part.own_count
        wide = self._widened(columns)
        narrowed = self._narrow(columns, numel)
        copies = len(narrowed.pairs)
        on_host = self._is_for_host(columns, plains)
        lent = lent_for_reading(columns) if on_host else ()
        compute = JoinedChunk(tuple(ops), len(columns), changes, tuple(held), narrowed, wide, lent)
        return self._row(numel, columns, plains, compute, copies, kinds, on_host)


@dataclass(frozen=True)
class JoinedOp:
    """One op of a row.

    places  of each operand: a column, the result of an op before, or a plain operand, by number
    made    number of its result; None: it writes its first operand
    drops   results that nobody reads any more
    """

    func: Dispatched
    spec: Any
    places: tuple[tuple[str, int], ...]
    made: int | None
    drops: tuple[int, ...] = ()


def _with_drops(ops: Sequence[JoinedOp], held: set[int]) -> list[JoinedOp]:
    """The ops, each with what it is the last to read; but for what is held."""
    last: dict[int, int] = {}
    for at, op in enumerate(ops):
        if op.made is not None:
            last[op.made] = at
        last |= {number: at for where, number in op.places if where == "result"}
    drops: dict[int, list[int]] = {}
    for number, at in last.items():
        if number not in held:
            drops.setdefault(at, []).append(number)
    return [replace(op, drops=tuple(drops.get(at, ()))) for at, op in enumerate(ops)]


@dataclass(frozen=True)
class JoinedChunk:
    """Applies the ops of a row to a range of its elements.

    changes   deferred changes to apply before: (column, which plain is the operand, change)
    held      (result, plain operand that it is written to)
    narrowed  casts to make afterwards
    widened   columns that are narrower than they are computed with, and the dtypes of that
    lent      columns that are read where they rest: changes are made in a copy of the chunk
    """

    ops: tuple[JoinedOp, ...]
    columns: int
    changes: tuple[tuple[int, int, Deferred], ...]
    held: tuple[tuple[int, int], ...]
    narrowed: CopyCasts = NO_CASTS
    widened: Widened = ()
    lent: tuple[int, ...] = ()

    def __call__(self, first: int, last: int, values: Sequence[Any]) -> None:
        values = changed(values, self.columns, self.widened, self.changes, self.lent)
        results: dict[int, Tensor] = {}

        def operand(place: tuple[str, int]) -> Any:
            where, number = place
            if where == "column":
                return values[number]
            if where == "result":
                return results[number]
            return range_of(values[self.columns + number], first, last)

        for op in self.ops:
            args, kwargs = trees.tree_unflatten([operand(p) for p in op.places], op.spec)
            made = op.func(*args, **kwargs)
            if op.made is not None:
                results[op.made] = made[0] if isinstance(made, list | tuple) else made
            del args, kwargs, made
            for number in op.drops:
                del results[number]
        for result, plain in self.held:
            range_of(values[self.columns + plain], first, last).copy_(results[result])
        self.narrowed(first, last, values)
