"""Walks two training steps of a copy of a model whose parameters have no bytes.

The session walks schedules and computes nothing: each region only makes blanks of its results. A
step is forward and backward so many times, then the optimizer; the trace of the second is the one
that a real step would have, since in the first an optimizer makes its states. The caller's model is
not touched.
"""

import copy
import types
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from types import EllipsisType
from typing import Any

import torch
from torch import Tensor, nn

from zcompile.config import Config
from zcompile.errors import Running, Unsupported
from zcompile.frontend.backend import zinf
from zcompile.frontend.dry_run.device import blank, blank_like, is_blank, open_dry_run
from zcompile.frontend.no_sync import no_sync
from zcompile.frontend.offload import STAYING
from zcompile.ir.memory_curve import Memory
from zcompile.ir.schedule import Schedule
from zcompile.ir.torch_compat import (
    Dispatched,
    DispatchMode,
    failure_of,
    hint,
    is_compiling_now,
    muted_tracing,
    trees,
    without_modes,
    without_recompile_limit,
)
from zcompile.ir.types import EntryKind, Layout, Phase, Region
from zcompile.machine.cost import TransferModes
from zcompile.memory.step_footprint import StepFootprint
from zcompile.runtime.eager.tensor import TieredTensor, own
from zcompile.runtime.executor import Executor
from zcompile.runtime.norms import Norms
from zcompile.runtime.ranks.fabric import Fabric
from zcompile.runtime.session import Session
from zcompile.runtime.store.store import Entry
from zcompile.runtime.transfer.interrupts import uninterrupted
from zcompile.runtime.transfer.ticket import Ready, Ticket


class DryRunRegions(dict[str, Region], MutableMapping[str, Region]):
    """Compiled regions that make blanks of what the traced ones make."""

    def __setitem__(self, key: str, region: Region) -> None:
        blanks = isinstance(region.call, _BlankResults)  # a variant of one that is here
        call = region.call if blanks else _BlankResults(region)
        super().__setitem__(key, replace(region, call=call))


class _BlankResults:
    """Stands in for the call of a region; the results have the shapes that tracing saw."""

    def __init__(self, region: Region) -> None:
        (output,) = region.body.find_nodes(op="output")
        self._results = tuple(node.meta["val"] for node in output.args[0])

    def __call__(self, values: list[Any]) -> tuple[Any, ...]:
        values.clear()
        return tuple(trees.tree_map(_blank, result) for result in self._results)


def _blank(value: Any) -> Any:
    if isinstance(value, Tensor):
        return blank(
            [hint(n) for n in value.size()], [hint(n) for n in value.stride()], value.dtype
        )
    return hint(value) if isinstance(value, torch.SymInt) else value


class DryRunSession(Session):
    """A session whose transfers are over at once and whose regions make blanks.

    config        with a machine, so that nothing is measured
    device_bytes  of the device that graphs and schedules are planned for
    beside        tier other than the device -> bytes of it for entries
    ways          how bytes travel on the machine that is planned for
    fabric        of the ranks of which this is one; None: it trains alone
    tiles_by_kernels  whether kernels of our own compute tiles of a loss there
    """

    computes = False

    def __init__(
        self,
        config: Config,
        device_bytes: int,
        emulates: bool,
        beside: Mapping[str, int],
        ways: TransferModes,
        fabric: Fabric | None = None,
        tiles_by_kernels: bool = False,
    ) -> None:
        self._beside, self._ways, self._by_kernels = beside, ways, tiles_by_kernels
        self.memories: list[Memory] = []
        """What the values of each graph that was compiled hold of the device, in that order."""
        opening = partial(
            open_dry_run, device_bytes=device_bytes, emulates=emulates, has_disk="disk" in beside
        )
        others = replace(STAYING, norms=_NoNorms, executor=_DryRunExecutor)
        super().__init__(config, others, opening, fabric)
        self.regions = DryRunRegions()
        self.executor.recorder.start()

    def ways(self) -> TransferModes:
        return self._ways

    def tiles_by_kernels(self) -> bool:
        return self._by_kernels

    def any_on_device(self, operands: Sequence[Any]) -> bool:
        """Any tensor: here all are on the CPU, and what an optimizer hands over as a tensor, and
        not as a number, it has on the device."""
        return self._ways.asynchronous and any(isinstance(value, Tensor) for value in operands)

    def compiled(self, memory: Memory) -> None:
        self.memories.append(memory)

    @property
    def saved_bytes(self) -> int:
        """Bytes of activations, summed over the calls of backward."""
        assert isinstance(self.executor, _DryRunExecutor)
        return self.executor.saved_bytes

    def free_bytes(self) -> dict[str, int]:
        """Free bytes, as if parameters rested on the host as far as they find room, and on disk
        beyond."""
        left = sum(e.nbytes for e in self.entries() if e.kind is EntryKind.PARAM)
        free = {}
        for tier in ("host", "disk"):
            if tier in self._beside:
                taken = min(left, self._beside[tier])
                free[tier], left = self._beside[tier] - taken, left - taken
        return free

    def fetch(
        self,
        entry: Entry,
        target: Tensor,
        *,
        begin: int = 0,
        after: Sequence[Ticket] = (),
        ahead: bool = False,
    ) -> Ticket:
        self.enter(entry.name)
        self._prepare_read(entry, ahead)
        return Ready()

    def put(
        self, entry: Entry, source: Tensor, *, begin: int = 0, after: Sequence[Ticket] = ()
    ) -> Ticket:
        self.enter(entry.name)
        entry.written()
        return Ready()

    def add(
        self, entry: Entry, source: Tensor, *, begin: int = 0, after: Sequence[Ticket] = ()
    ) -> Ticket:
        return self.put(entry, source)

    def read(self, entry: Entry, target: Tensor, *, begin: int = 0) -> Ticket:
        self.enter(entry.name)
        return Ready()

    def read_to_host(self, entry: Entry) -> tuple[Tensor, Ticket]:
        return self.read_all(entry), Ready()

    def read_all(self, entry: Entry) -> Tensor:
        return blank((entry.nbytes,), (1,), torch.uint8)

    def borrow(
        self,
        entry: Entry,
        begin: int,
        nbytes: int,
        writes: bool,
        overwrites: bool = False,
        ahead: bool = False,
    ) -> Tensor:
        self.enter(entry.name)
        if writes:
            entry.written()
        return blank((nbytes,), (1,), torch.uint8)


def dry_run_backend(gm: Any, inputs: Sequence[Any]) -> Callable[..., Any]:
    """`backend="zinf"`, without the current `DryRunMode`, which would slow tracing down."""
    with without_modes():
        return zinf(gm, inputs)


class _DryRunExecutor(Executor):
    """Walks graphs as a real executor; of an optimizer's step only notes which entries are written.

    saved_bytes  given to backward calls of the last step: activations that their forward saved, and
                 tangents
    """

    saved_bytes = 0
    _held: StepFootprint | None = None

    def _end_step(self, schedule: Schedule) -> None:
        if self.recorder.ends_with(schedule):
            self.saved_bytes = 0
        super()._end_step(schedule)

    def run(
        self,
        schedule: Schedule,
        args: list[Any],
        entries: Sequence[Entry] | None = None,
        of: Schedule | EllipsisType | None = ...,
    ) -> list[Any]:
        if schedule.phase is Phase.BACKWARD:
            handles = set(schedule.handles)
            self.saved_bytes += sum(
                x.nbytes for n, x in enumerate(args) if isinstance(x, Tensor) and n not in handles
            )
        if schedule.phase is not Phase.STEP or entries is None:
            return super().run(schedule, args, entries, of)
        self._prepare_memory(schedule, entries)
        args.clear()
        self.recorder.note(schedule, entries)
        for x in schedule.effects:
            home = x.home
            if home is not None and x.writes_home:
                entries[home.entry].written()
        return []

    def _prepare_memory(self, schedule: Schedule, entries: Sequence[Entry]) -> None:
        """Make room for the live bytes of a call of `schedule` as they are predicted: blanks that
        are views of each other look as if each had memory of its own.

        raises  BudgetExceeded
        """
        held = self._held
        if held is None:
            held = self._held = StepFootprint()
        else:
            held.end(schedule.phase)
        held.begin(schedule)
        if schedule.phase is not Phase.STEP:
            self._make_room(held.others + schedule.holds.needed_bytes, schedule)
        held.through(schedule)


class DryRunMode(DispatchMode):
    """A mode in which ops on plain tensors give blanks of the right shape.

    Views are taken as ever, and tracing is left alone.
    """

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def __torch_dispatch__(
        self,
        func: Dispatched,
        types: Any,
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if is_compiling_now() or not _computes(func, args, kwargs):
            return func(*args, **kwargs)
        if func._schema.is_mutable:
            return _written(func, args, kwargs)
        if "device" in kwargs:
            kwargs = {**kwargs, "device": torch.device("meta")}
        made = func(*_as_meta(args), **_as_meta(kwargs))
        return trees.tree_map(lambda x: blank_like(x) if isinstance(x, Tensor) else x, made)


def _computes(func: Dispatched, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    """Whether an op would touch a blank's bytes.

    raises  Unsupported, if it asks for a value
    """
    if func is torch.ops.aten.set_.source_Storage_storage_offset:
        return False  # how a blank is made
    tensors = [x for x in trees.tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
    if not any(_is_plain(t) and is_blank(t) for t in tensors):
        return False
    if any(type(t) not in (Tensor, nn.Parameter) or t.is_meta for t in tensors):
        return False
    returns = func._schema.returns
    if func._schema.is_mutable:
        return True
    if not any("Tensor" in str(r.type) for r in returns):
        raise Unsupported(
            f"the model asks for the value of a tensor ({func}), and in a dry run there is none",
            "plan a model whose shapes and branches do not depend on values, or give inputs of "
            "whole numbers on the CPU, which are kept",
        )
    return not any(r.alias_info is not None for r in returns)


def _is_plain(tensor: Tensor) -> bool:
    return type(tensor) in (Tensor, nn.Parameter) and tensor.device.type == "cpu"


def _written(func: Dispatched, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """The result of an op that writes: the tensors it wrote, as they were."""
    names = [a.name for a in func._schema.arguments]
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    written = [
        given[a.name]
        for a in func._schema.arguments
        if a.alias_info is not None and a.alias_info.is_write and a.name in given
    ]
    if not func._schema.returns:
        return None
    return written[0] if len(func._schema.returns) == 1 else tuple(written)


def _as_meta(value: Any) -> Any:
    return trees.tree_map(lambda x: x.to("meta") if isinstance(x, Tensor) else x, value)


class _NoNorms(Norms):
    """Norms of a dry run, in which nothing is measured."""

    def note(self, entry: Entry, grad: Tensor) -> None:
        return

    def note_tile(self, entry: Entry, offset: int, tile: Tensor) -> None:
        return

    def note_whole(self, entry: Entry, layout: Layout) -> None:
        return


def copy_without_bytes(model: nn.Module, session: DryRunSession) -> nn.Module:
    """A copy of `model` in `session`: parameters without bytes, buffers without values.

    Tied parameters stay tied. All else in the modules is copied.
    """
    memo: dict[int, Any] = {}
    for name, param in model.named_parameters():
        memo[id(param)] = _param(session, name, param)
    for buffer in model.buffers():
        memo[id(buffer)] = blank_like(buffer)
    return copy.deepcopy(model, memo)


@uninterrupted
def _param(session: DryRunSession, name: str, param: nn.Parameter) -> nn.Parameter:
    layout = Layout.of(param)
    entry = session.create_for(name, EntryKind.PARAM, layout)
    made = nn.Parameter(TieredTensor.over(entry, layout), param.requires_grad)
    return own(made)


STEPS = 2
"""Of which the last is the one that is planned."""
REMEDY = (
    "a plan runs the model as it is: give it inputs that it takes, and see that it runs with them"
)


def run_steps(
    model: nn.Module,
    inputs: Sequence[Any],
    optimizer: torch.optim.Optimizer,
    times: int,
    exchanges_once: bool = False,
) -> None:
    """Run forward and backward `times` times, then the optimizer; and all of it once more.

    exchanges_once  all but the last of the `times` are within `no_sync`

    The first step of an optimizer differs from all others: it makes states, which become entries
    when the second begins, of what it has computed (SGD's momentum of a gradient with decay, say).

    raises  Unsupported, UserCodeFailed
    """

    def loss_of(*given: Any) -> Tensor:
        named = len(given) == 1 and isinstance(given[0], Mapping)
        return _loss(model(**given[0]) if named else model(*given))

    # Dynamo keeps what it compiled with the code, and would come to its limit after some plans.
    # What lies behind a graph break is the model's own code, which is not ours to make anew.
    fresh = types.FunctionType(
        loss_of.__code__.replace(), globals(), "loss_of", None, loss_of.__closure__
    )
    compiled = torch.compile(fresh, backend=dry_run_backend, dynamic=False)
    for _ in range(STEPS):
        optimizer.zero_grad()
        _run_step(model, compiled, inputs, optimizer, times, exchanges_once)


def _run_step(
    model: nn.Module,
    compiled: Callable[..., Tensor],
    inputs: Sequence[Any],
    optimizer: torch.optim.Optimizer,
    times: int,
    exchanges_once: bool,
) -> None:
    """One step by `compiled`, which gives the loss. raises  Unsupported, UserCodeFailed"""
    name, given = type(model).__name__, ", ".join(_describe(inputs))
    for n in range(times):
        with (
            Running(f"forward of {name} with ({given})", REMEDY, failure_of),
            muted_tracing(),
            without_recompile_limit(),
        ):
            loss = compiled(*inputs)
        if not loss.requires_grad:
            raise Unsupported(
                "the model's output does not depend on what it trains",
                "let forward return the loss",
            )
        later = no_sync(model) if exchanges_once and n < times - 1 else nullcontext()
        with Running(f"backward of {name} with ({given})", REMEDY, failure_of), later:
            loss.backward()
    with Running(f"a step of {type(optimizer).__name__}", REMEDY, failure_of):
        optimizer.step()


def _loss(result: Any) -> Tensor:
    """The loss of a call: its result, its `.loss`, or else a mean that stands for one."""
    if isinstance(result, Tensor) and result.dim() == 0:
        return result
    loss = getattr(result, "loss", None)
    if isinstance(loss, Tensor):
        return loss
    tensors = [x for x in trees.tree_leaves(result) if isinstance(x, Tensor)]
    if not tensors:
        raise Unsupported(
            f"the model's forward returned {type(result).__name__} without a tensor",
            "let it return the loss, or what a loss can be made of",
        )
    return tensors[0].float().mean()


def _describe(inputs: Sequence[Any]) -> Iterator[str]:
    """Dtype and sizes of each tensor."""
    for x in trees.tree_leaves(inputs):
        if isinstance(x, Tensor):
            yield f"{str(x.dtype).removeprefix('torch.')}[{', '.join(map(str, x.shape))}]"
        else:
            yield repr(x)
