"""Moves parameters to their home tier: of a finished model (`offload`), or as it is built (`init`).

Parameters that are in the same memory, as after `a.weight.data = b.weight.data`, are several
parameters, each with a gradient of its own, that show the same values.
"""

import logging
import os
import weakref
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)
from torch.utils import swap_tensors

from zcompile.config import Config, build
from zcompile.errors import BudgetExceeded, ModelWrapped, ParameterChanged, Unsupported
from zcompile.frontend import optimizer_hooks
from zcompile.frontend.fusions import check_compiler
from zcompile.frontend.movable import (
    check_kept_results,
    check_model,
    check_movable,
    check_nodes,
    first_in_memory,
    wrapper_of,
)
from zcompile.frontend.owners import open_owned
from zcompile.frontend.ranks import (
    agree_on,
    check_stage,
    config_of_rank,
    open_fabric,
    ready_together,
)
from zcompile.frontend.replan import StepController
from zcompile.frontend.rescheduling import Rescheduling
from zcompile.ir.handles import REBUILD_ADVICE, disown
from zcompile.ir.torch_compat import (
    forget_hooks,
    holders_of_memory,
    is_sole_holder,
    set_by,
    tell_of_compiling,
    untraced,
    without_weak_references,
)
from zcompile.ir.types import EntryKind, Layout
from zcompile.ir.units import show_size
from zcompile.runtime.durable.settle import agreed_training, settle
from zcompile.runtime.eager.data_assignment import shown_already
from zcompile.runtime.eager.fillings import write
from zcompile.runtime.eager.rows import make_copy
from zcompile.runtime.eager.streaming import apply_deferred
from zcompile.runtime.eager.tensor import TieredTensor, own
from zcompile.runtime.io.files import make_directory
from zcompile.runtime.open import Opening, open_resources
from zcompile.runtime.profile import COMPILING
from zcompile.runtime.progress import compiling_begins, compiling_ends, working
from zcompile.runtime.ranks.fabric import Fabric, told_to_ranks
from zcompile.runtime.ranks.values import (
    agree_on_buffers,
    agree_on_parameters,
    agreed_value,
    tell_of_other_values,
)
from zcompile.runtime.session import Collaborators, Session, session_of
from zcompile.runtime.store.sources import MemorySource, let_go
from zcompile.runtime.transfer.interrupts import (
    cleanup,
    deferred_interrupts,
    deliver_interrupts,
    uninterrupted,
)

log = logging.getLogger(__name__)

optimizer_hooks.watch()


@uninterrupted
def _take_place(module: nn.Module, name: str, param: Tensor | None) -> None:
    """Make a parameter tiered that is put where a tiered one was.

    `load_state_dict(assign=True)` and `layer.weight = nn.Parameter(...)` would leave it in memory.
    """
    old = module._parameters.get(name)
    if not isinstance(old, TieredTensor) or param is None or param is old:
        return
    if not isinstance(param, TieredTensor):
        check_movable(name, param)
        session = session_of(old.entry)
        first = shown_already(session, param)
        _become_tiered(session, old._name_in_store(), param, first)
        if not session.births:  # else it is asked once the model is built
            _tell_unlike(session, [(old._name_in_store(), param)])
    elif not param.sink and param.store_key == old.store_key and type(param) is TieredTensor:
        own(param)  # made of what a `state_dict` of this very model holds
        param.set_title(old._name_in_store())


register_module_parameter_registration_hook(_take_place)


def _give_value(param: TieredTensor, value: Tensor) -> None:
    """Write the value that a parametrization gives its original, when it is registered or
    assigned."""
    if value is param:
        return
    if value.shape != param.shape or value.dtype != param.dtype:
        raise Unsupported(
            f"a parametrization gives {param.entry.name!r} the shape {tuple(value.shape)} in "
            f"{value.dtype}, which was {tuple(param.shape)} in {param.dtype}",
            "register it before zcompile.offload",
        )
    param.copy_(value)


set_by(TieredTensor, _give_value)


def _refuse_wrapper(outer: nn.Module, name: str, inner: nn.Module | None) -> None:
    """Refuse to put an offloaded model into a wrapper, which would look for gradients where none
    are."""
    wrapper = wrapper_of(outer)
    if (
        wrapper
        and inner is not None
        and any(isinstance(p, TieredTensor) for p in inner.parameters())
    ):
        raise ModelWrapped(wrapper)


register_module_module_registration_hook(_refuse_wrapper)


def offload(model: nn.Module, config: Config | None = None, **fields: Any) -> nn.Module:
    """Move every parameter of `model` to its home tier, in place, and return `model`.

    Buffers go to the compute device. The parameter objects stay the same, so an optimizer made
    before holds the tiered ones. On a model on `meta` the values come later, by
    `load_state_dict` or `zcompile.load`. After `zcompile.init` it changes nothing but names. A
    model that was offloaded, and got further parameters since (adapters, another head), is given
    once more, without budgets: it takes them in.

    config, fields  a `Config`, or its fields, or both (fields win)
    raises  ConfigInvalid, UnknownOption, DiskUnusable, DiskOwned, DeviceTooSmall, TierFull,
            ModelWrapped, Unsupported, CompilerMissing
    """
    check_model(model)
    tiered = [p for p in model.parameters() if isinstance(p, TieredTensor)]
    if tiered and (config is not None or fields):
        todo = "call zcompile.offload once, or only zcompile.init; for other budgets "
        todo += f"{REBUILD_ADVICE}; zcompile.offload(model), without budgets, takes in parameters "
        todo += "that were added since"
        raise Unsupported("the model is offloaded already, or was until it was closed", todo)
    if len({param.store_key for param in tiered}) > 1:
        raise Unsupported(
            "parts of the model were offloaded one by one, each with budgets of its own",
            "build it anew, and offload the whole model once, from its root",
        )
    with deferred_interrupts(), without_weak_references(model):
        if tiered:
            return move_in(session_of(tiered[0].entry), model)
        return move_in(open_session(build(config, fields, "zcompile.offload")), model)


@uninterrupted
def move_in(session: Session, model: nn.Module) -> nn.Module:
    """Move the plain parameters of `model` to the tiers of `session`.

    If one cannot move, all stay plain, and the session is closed if it has no others. Several ranks
    first find out, and tell each other, whether each has room for all; what fails after that ends
    the session of all, since no rank has all of what was moved.
    raises  as `offload`; Unsupported, if another rank has no room, or refuses a parameter
    """
    plain = [(name, p) for name, p in model.named_parameters() if not isinstance(p, TieredTensor)]
    sole = len(plain) == len(list(model.parameters()))
    moved: list[tuple[nn.Parameter, torch.device]] = []
    rooms: dict[int, TieredTensor] = {}
    first: dict[int, Any] = {}
    foreseen = 0, 0
    given = None if session.owners is None else session.owners.nbytes
    try:
        with ready_together(session.fabric, "take in parameters"):
            for name, param in plain:
                check_movable(name, param)
            check_kept_results(model, plain)
            check_nodes(plain)
            first.update(first_in_memory(plain))
            sizes = [(Layout.of(p).nbytes, p) for _, p in plain]
            foreseen = (
                sum(nbytes for nbytes, p in sizes if id(p) not in first),
                sum(nbytes for nbytes, p in sizes if p.requires_grad),
            )
            session.homes.foresee(*foreseen)
            if session.fabric is not None:
                once = [row for row in model.named_parameters() if id(row[1]) not in first]
                of_entries = _of_entries(once)
                check_stage(session.config, of_entries, session.device_budget, session.fabric)
                for name, param in plain:
                    if id(param) not in first:
                        rooms[id(param)] = _blank(session, name, param)
        nbytes = sum(nbytes for nbytes, _ in sizes)
        told = told_to_ranks(session.fabric)
        with told, working("offloading the model", nbytes, show_size) as work:
            if session.fabric is not None:
                held = None if session.owners is None else session.owners.nbytes
                agree_on_parameters(session.fabric, plain, held)
            for name, param in plain:
                deliver_interrupts()
                work.begin(name)
                moved.append((param, param.device))
                room = rooms.pop(id(param), None)
                _become_tiered(session, name, param, first.get(id(param)), room)
                del room
                work.add(Layout.of(param).nbytes, name)
            _tell_unlike(session, plain)
    except BaseException:
        rooms.clear()  # a traceback would keep them
        if session.owners is not None and given is not None and not moved:
            session.owners.go_back_to(given)
        if session.fabric is None:
            _undo(moved)
        if sole:
            session.close()
        elif session.fabric is None or not moved:
            session.homes.foresee(-foreseen[0], -foreseen[1])
        raise
    with told_to_ranks(session.fabric):
        _log_other_holders(model)
        _move_buffers(model, session.device.torch_device)
        if session.fabric is not None:
            agree_on_buffers(session.fabric, model)
        session.belong_to(model)
    return model


def _of_entries(params: Iterable[tuple[str, Tensor]]) -> list[tuple[str, Tensor]]:
    """These parameters, and of those that show the same entry one."""
    found = {p.entry.key if isinstance(p, TieredTensor) else p: (name, p) for name, p in params}
    return list(found.values())


def _log_other_holders(model: nn.Module) -> None:
    """Log that memory of parameters is held by others, who do not see later writes."""
    left = [
        name
        for name, p in model.named_parameters()
        if isinstance(p, TieredTensor) and p.entry.sources
    ]
    if left:
        log.info(
            "%d parameters, %r first, left memory that others hold, as a state_dict from before "
            "does: what is written to them from now on is not seen there",
            len(left),
            left[0],
        )


@cleanup
def _undo(moved: list[tuple[nn.Parameter, torch.device]]) -> None:
    """Make parameters plain again."""
    for param, device in moved:
        _become_plain(param, device)


@contextmanager
def offloaded(model: nn.Module, config: Config | None = None, **fields: Any) -> Iterator[nn.Module]:
    """Offload `model` as `offload` does, and close it at the end of the `with` block.

        with zcompile.offloaded(GPT(cfg), device_memory="20GiB", disk="/mnt/nvme") as model:
            ...

    raises  as `offload`
    """
    session = session_behind(offload(model, config, **fields))
    try:
        yield model
    finally:
        session.close()


@contextmanager
def init(config: Config | None = None, **fields: Any) -> Iterator[None]:
    """Parameters created inside go to their tier one at a time.

    The whole model never exists in memory, and its values are the ones it would have had: random
    ops run where the parameter was created. A parameter on `meta` stays there until another one
    with a value takes its place, as the loaders of libraries do; one that is left becomes tiered at
    the end, without a value.

        with zcompile.init(device_memory="1GiB", disk="/mnt/nvme"):
            model = GPT(cfg)  # or AutoModelForCausalLM.from_pretrained(path)

    raises  as `offload`
    """
    session = open_session(build(config, fields, "zcompile.init"))
    with told_to_ranks(session.fabric):
        with _taking_in(session) as modules:
            yield
        alive = [module for ref in modules.values() if (module := ref()) is not None]
        _finish(session, alive)
    _check_stage(session, alive)


@contextmanager
def _taking_in(session: Session) -> Iterator[dict[int, weakref.ref[nn.Module]]]:
    """A context in which parameters that are registered become tiered; the modules that are made
    in it."""
    modules: dict[int, weakref.ref[nn.Module]] = {}
    lent: list[TieredTensor] = []
    """Parameters whose values were in memory that others held."""

    @uninterrupted
    def register(module: nn.Module, name: str, param: Tensor | None) -> Any:
        modules[id(module)] = weakref.ref(module)
        if param is None or isinstance(param, TieredTensor) or param.is_meta:
            return None
        lent[:] = [before for before in lent if not let_go(before.entry)]
        born = param.device
        _take_in(session, name, param)  # the object itself: others may hold it already
        tiered: Any = param
        session.births[tiered.entry.key] = born
        if tiered.entry.sources:
            lent.append(tiered)
        work.add(tiered.entry.nbytes, f"{type(module).__name__}.{name}")
        return None

    def note(module: nn.Module, name: str, child: nn.Module | None) -> None:
        modules[id(module)] = weakref.ref(module)

    # Parameters are registered with modules: that is where they become tiered.
    hooks = ExitStack()
    try:
        with deferred_interrupts():
            hooks.callback(session.births.clear)
            hooks.callback(register_module_parameter_registration_hook(register).remove)
            hooks.callback(register_module_module_registration_hook(note).remove)
            hooks.enter_context(one_weight_at_a_time())
            work = hooks.enter_context(working("building the model", unit=show_size))
        yield modules
    finally:
        with deferred_interrupts():
            hooks.close()


ONE_AT_A_TIME = "HF_DEACTIVATE_ASYNC_LOAD"
"""With it in the environment, `from_pretrained` of transformers reads a weight when the one before
has its place. Threads would read them all ahead, into memory."""


@contextmanager
def one_weight_at_a_time() -> Iterator[None]:
    """A context in which loaders of other libraries do not read ahead of what goes to the tiers."""
    before = os.environ.get(ONE_AT_A_TIME)
    os.environ[ONE_AT_A_TIME] = "1"
    try:
        yield
    finally:
        if before is None:
            os.environ.pop(ONE_AT_A_TIME, None)
        else:
            os.environ[ONE_AT_A_TIME] = before


@uninterrupted
def open_session(config: Config, opening: Opening = open_resources) -> Session:
    """A session with what only this package knows.

    raises  as `opening`; Unsupported, RanksDiffer, RankFailed, where there are several ranks;
            CompilerMissing
    """
    if config.regions == "inductor":
        check_compiler(torch.device(config.device or "cpu"))
    tell_of_compiling(compiling_begins, compiling_ends)
    tell_of_compiling(COMPILING.begins, COMPILING.ends)
    if config.emulates_unasked:
        _tell_that_the_device_is_emulated()
    fabric = open_fabric(config)
    if fabric is not None:
        return _open_with_ranks(config, opening, fabric)
    others = STAYING if config.stays_because else PLANNING
    given = config.disk if isinstance(config.disk, tuple) else ()
    directories = tuple(Path(path) for path in given)
    return open_owned(lambda: Session(config, others, opening), directories)


def _open_with_ranks(config: Config, opening: Opening, fabric: Fabric) -> Session:
    """A session of one of several ranks that train one model."""
    try:
        config = config_of_rank(config, fabric)
        disks = tuple(Path(p) for p in config.disk) if isinstance(config.disk, tuple) else ()
        if config.durable:
            make_directory(disks[0]).close()
            settle(disks[0], fabric)
        others = STAYING if config.stays_because else PLANNING
        made = open_owned(lambda: Session(config, others, opening, fabric), disks)
        agree_on(config, made.device_budget, fabric)
        if (commits := made.commit_log) is not None:
            home = commits.files.home.path
            index, run = commits.files.index, commits.files.run
            commits.take_name(agreed_training(fabric, index, run, home))
        log.info("rank %d of %d holds a share of each tensor", fabric.rank, fabric.size)
    except BaseException as error:
        fabric.failed_here(error)
        fabric.close(error)
        raise
    return made


@cache
def _tell_that_the_device_is_emulated() -> None:
    """Once for a process, since it is easily overlooked."""
    log.warning(
        "torch sees no CUDA device, and no device was asked for: device='cpu' stands in, a part of "
        "this machine's memory used as if it were a device's"
    )


STAYING = Collaborators(TieredTensor.over, make_copy, apply_deferred, Rescheduling)
"""Of a session that plans no steps: entries rest where they were put first."""
PLANNING = replace(STAYING, controller=StepController)


@untraced
def close(model: nn.Module) -> None:
    """Give back what an offloaded model holds: memory, threads, files, its directory.

    Its parameters have no values afterwards, and its optimizer no states: save what is needed
    before. What a durable model committed stays. `with zcompile.offloaded(...) as model:` closes by
    itself, and so is a model that is dropped, once nothing refers to its parameters, a loss
    included; a notebook often does.
    raises  Unsupported, if the model was not offloaded, or within `zcompile.rank_zero_reads`
    """
    for param in model.parameters():
        if isinstance(param, TieredTensor):
            with suppress(ParameterChanged):  # closed already
                session = session_of(param.entry)
                if session.fabric is not None:
                    session.fabric.check_together("close a model")
                session.close()
            return
    raise _not_offloaded()


def _not_offloaded() -> Unsupported:
    return Unsupported("the model has no tiered parameters", "call zcompile.offload(model) first")


def session_behind(model: nn.Module) -> Session:
    """The session of an offloaded model.

    raises  Unsupported, if no parameter of the model is tiered
    """
    for param in model.parameters():
        if isinstance(param, TieredTensor):
            return session_of(param.entry)
    raise _not_offloaded()


def _blank(session: Session, name: str, param: Tensor) -> TieredTensor:
    """A tiered tensor with room for `param`, or for this rank's share; unset for one on meta.

    raises  TierFull
    """
    layout = Layout.of(param)
    entry = session.create_for(name, EntryKind.PARAM, layout, unset=param.is_meta)
    return TieredTensor.over(entry, layout)


def _tiered(
    session: Session,
    name: str,
    param: Tensor,
    room: TieredTensor | None = None,
    given: bool = False,
) -> TieredTensor:
    """A tiered tensor with the value of `param`; unset for one on meta. room: made for it.

    given  nobody writes to the memory of `param` any more
    """
    made = _blank(session, name, param) if room is None else room
    entry, layout = made.entry, made.entry_layout
    if session.fabric is not None:
        param = agreed_value(session.fabric, name, param, partial(session.unlike.add, entry.key))
    if not param.is_meta:
        write(entry, layout, param, agreed=True, given=given)
    return made


@uninterrupted
def _become_tiered(
    session: Session, name: str, param: Any, first: Any = None, room: TieredTensor | None = None
) -> None:
    """Turn the parameter object itself into a tiered one; whoever holds it holds the tiered one.

    first  a tiered parameter that showed the same memory, and shows the same entry
    room   for its value; None: it is made now
    """
    # Memory that nobody else reaches needs no copy that is safe from writes while it is read.
    given = session.fabric is None and not param.is_meta and is_sole_holder(param)
    grad, marks, value = param.grad, dict(vars(param)), param.detach()
    tiered = (
        _tiered(session, name, value, room, given)
        if first is None
        else TieredTensor.sharing(first, Layout.of(value))
    )
    # The two objects are swapped, so that whoever holds the parameter has the tiered one.
    made = nn.Parameter(tiered, param.requires_grad)
    param.grad = None
    try:
        swap_tensors(param, made)
    except (RuntimeError, AttributeError) as error:  # the latter of what inference_mode made
        param.grad = grad
        raise Unsupported(
            f"parameter {name!r} cannot be moved, since something beside Python's variables refers "
            "to it: a view of it, an autograd graph that saved it, or an array or tensor that was "
            "made of it by DLPack (numpy.from_dlpack, torch.from_dlpack)",
            "drop that first, or make it of a copy (p.detach().clone())",
        ) from error
    vars(param).update(marks)
    own(param)
    del made
    # What others hold stays theirs: the memory, and the gradient.
    alone = session.fabric is None  # a share is no copy of what others hold
    held = not given and not value.is_meta and holders_of_memory(value) > 1
    if first is None and alone and held:
        MemorySource(param.entry, value)  # whoever holds it may write
    if grad is not None:
        param.grad = grad.to(session.device.torch_device)
        del grad  # what others hold is left to them
        session.gradients.adopt(param)


def _become_plain(param: Any, device: torch.device) -> None:
    """Undo `_become_tiered`, if it got so far."""
    if not isinstance(param, TieredTensor):
        return
    ours = (
        "_handle",
        "_known",
        "_store",
        "_title",
        "lies",
        "store_key",
        "sink",
        "reached",
        "grad_given",
    )
    marks = {key: value for key, value in vars(param).items() if key not in ours}
    value = torch.empty_like(param, device="meta") if param.entry.unset else param.on_host()
    grad, param.grad = param.grad, None
    disown(param._handle)  # swap_tensors refuses what is referred to weakly
    forget_hooks(param)
    swap_tensors(param, nn.Parameter(value.to(device), param.requires_grad))
    vars(param).update(marks)
    if grad is not None:
        param.grad = grad.cpu().to(device)


def _move_buffers(model: nn.Module, device: torch.device) -> None:
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and not buffer.is_meta:
                module._buffers[name] = buffer.to(device)


def _tell_unlike(session: Session, params: Iterable[tuple[str, Tensor]]) -> None:
    """Say once for all of these of which the ranks had other values. While a model is built such a
    value may be what `torch.empty` found in memory, so only what no op has replaced is told."""
    found = [(n, p.entry.key) for n, p in params if isinstance(p, TieredTensor)]
    unlike = [(name, key) for name, key in found if key in session.unlike]
    session.unlike.difference_update(key for _, key in unlike)
    if unlike:
        tell_of_other_values([name for name, _ in unlike])


def _take_in(session: Session, name: str, param: Tensor) -> None:
    """Make a parameter tiered of a model that is not complete yet.

    raises  as `offload`
    """
    check_movable(name, param)
    nbytes = Layout.of(param).nbytes
    session.homes.foresee(nbytes, nbytes if param.requires_grad else 0, more_to_come=True)
    _become_tiered(session, name, param)


@uninterrupted
def _finish(session: Session, modules: list[nn.Module]) -> None:
    """Set names and move buffers, once the whole model stands."""
    # What is left on meta has no value; what has one was put past `register`.
    past = 0
    for module in modules:
        for name, param in module._parameters.items():
            if param is None or isinstance(param, TieredTensor):
                continue
            past += 0 if param.is_meta else Layout.of(param).nbytes
            _take_in(session, name, param)
    if past:
        log.warning(
            "%s of parameters were in memory until zcompile.init ended: what made them gave their "
            "values past torch's register_parameter; to fill the tiers piece by piece, build the "
            "model from its config inside zcompile.init, and call zcompile.load(model, path)",
            show_size(past),
        )
    session.homes.foresee(0, 0)
    # Names are those of the whole model.
    children = {id(child) for module in modules for child in module.children()}
    for root in modules:
        if id(root) in children:
            continue
        for name, param in root.named_parameters():
            if isinstance(param, TieredTensor):
                param.entry.rename(name)
                param.set_title(name)
        _move_buffers(root, session.device.torch_device)
        if session.fabric is not None:
            agree_on_buffers(session.fabric, root)
        if session.root is None:
            session.belong_to(root)
        _tell_unlike(session, root.named_parameters())
    session.unlike.clear()  # also of what is in no module any more


def _check_stage(session: Session, modules: list[nn.Module]) -> None:
    """Close the session if the device cannot hold what it is to keep whole of a model that is
    built; each rank finds that by itself.

    raises  BudgetExceeded
    """
    if session.fabric is not None:
        built = (p for module in modules for p in module._parameters.values() if p is not None)
        named = [(p.entry.name, p) for p in built if isinstance(p, TieredTensor)]
        try:
            check_stage(session.config, _of_entries(named), session.device_budget, session.fabric)
        except BudgetExceeded:
            session.close()
            raise
