"""Trains durably: each optimizer step ends in a commit, and a killed run resumes from the last.

A step commits what `state.describe` describes; where the bytes lie is the business of the runtime.
Resuming moves nothing that rests on disk: entries take the extents that the index names.
"""

import copy
import logging
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version

from zcompile.checkpoint.directory import STATE_FILE
from zcompile.checkpoint.late_rows import LATE, RowsToCome, UpdatesToCome, rows_to_come
from zcompile.checkpoint.state import (
    Fact,
    describe_here,
    fabric_behind,
    restore,
    with_random_states,
)
from zcompile.checkpoint.together import Meetings
from zcompile.errors import DurableDamaged, NothingCommitted, Unsupported, ZinfError
from zcompile.ir.partition import Partition
from zcompile.ir.types import EntryKind, Layout
from zcompile.ir.units import show_size
from zcompile.runtime.closing import open_stores
from zcompile.runtime.durable.check import bytes_to_check, check_all
from zcompile.runtime.durable.commit import CommitLog, Named
from zcompile.runtime.durable.directory import check_data
from zcompile.runtime.durable.index import INDEX_NAME, Index, SmallTensor, StoredTensor
from zcompile.runtime.durable.recover import Copier, Recovery
from zcompile.runtime.durable.worlds import World, held_in, newest_in, sharing_of
from zcompile.runtime.eager.tensor import TieredTensor
from zcompile.runtime.io.files import (
    Directory,
    close_or_warn,
    is_directory,
    is_regular,
    open_directory,
    stat_through_links,
    unusable_error,
)
from zcompile.runtime.io.system_calls import KERNEL, SystemCalls
from zcompile.runtime.progress import working
from zcompile.runtime.ranks.fabric import Fabric, told_to_ranks
from zcompile.runtime.session import Session, session_of
from zcompile.runtime.store.store import Entry
from zcompile.runtime.tiers.directory_lock import DirectoryLock
from zcompile.runtime.transfer.interrupts import deferred_interrupts

Optimizer = torch.optim.Optimizer

EXTRA_STEP = "extra_step"
"""Key in the meta of a commit: the step after which `extra` was given."""

logger = logging.getLogger("zcompile.checkpoint.durable")

ALONE = Meetings()
"""Of one process."""


def commit_log_of(path: str | os.PathLike[str], model: nn.Module) -> CommitLog | None:
    """The commit log of `model`, if `path` is its own durable directory, or one of them."""
    tiered = (p for p in model.parameters() if isinstance(p, TieredTensor))
    for param in tiered:
        commit_log = session_of(param.entry).commit_log
        if commit_log is None:
            return None
        own = any(directory.is_at(Path(path)) for directory in commit_log.files.directories)
        return commit_log if own or _names(path, commit_log.given) else None
    return None


def _names(path: str | os.PathLike[str], given: Path) -> bool:
    """Whether `path` names the directory `given`."""
    return os.path.realpath(path) == os.path.realpath(given)


def check_step(session: Session, optimizer: Optimizer) -> None:
    """Check that a durable step can be committed, while nothing is written yet.

    raises  DurableHeld, TierFull, CommitFailed, Unsupported; the other ranks are told
    """
    if session.commit_log is not None:
        with told_to_ranks(session.fabric):
            _check_step(session, session.commit_log, optimizer)


def _check_step(session: Session, commit_log: CommitLog, optimizer: Optimizer) -> None:
    _check_trained(_model_of(session), optimizer)
    commit_log.check(_changing(session, optimizer))
    _check_resumed(commit_log)
    known = commit_log.optimizer() if commit_log.optimizer is not None else None
    if known is not None and known is not optimizer:
        raise Unsupported(
            f"a second optimizer ({type(optimizer).__name__}) steps on a durable model",
            "a commit holds the state of one optimizer; use one with several groups, or "
            "durable=False and zcompile.save",
        )
    commit_log.follow(optimizer)


def check_plain(optimizer: Optimizer) -> None:
    """Refuse an optimizer without tiered parameters, if it trains what was added to a durable
    model: its steps would not be committed.

    raises  Unsupported
    """
    trained = {id(param) for group in optimizer.param_groups for param in group["params"]}
    for store in open_stores():
        root = store.root() if store.commit_log is not None and store.root is not None else None
        if root is not None and any(id(param) in trained for param in root.parameters()):
            raise Unsupported(
                f"{type(optimizer).__name__} trains parameters that were added to the durable "
                f"{type(root).__name__} after zcompile.offload, and no commit would hold them",
                "call zcompile.offload(model) once more, without budgets: it takes them in",
            )


def _check_trained(model: nn.Module, optimizer: Optimizer) -> None:
    """Refuse an optimizer that changes what a commit of `model` would not hold.

    raises  Unsupported
    """
    held = set(map(id, model.parameters()))
    params = [param for group in optimizer.param_groups for param in group["params"]]
    others = [param for param in params if id(param) not in held]
    if others:
        raise Unsupported(
            f"{type(optimizer).__name__} trains {len(others)} of {len(params)} parameters that are "
            f"not those of the durable {type(model).__name__}, and a commit would lose them",
            "make one module of all that is trained, and offload that, or build it as one under "
            "zcompile.init",
        )


def _check_resumed(commit_log: CommitLog) -> None:
    """Refuse a commit that would lose the states of an optimizer.

    raises  Unsupported
    """
    if commit_log.unresumed is not None:
        home = str(commit_log.files.home.path)
        raise Unsupported(
            f"disk={home!r} was resumed without an optimizer, and the commit holds states of an "
            f"optimizer ({commit_log.unresumed}), which the next one would lose",
            f"build the model again and call zcompile.resume({home!r}, model, optimizer)",
        )


def _changing(session: Session, optimizer: Optimizer) -> Iterator[Entry]:
    """Entries that a step writes: parameters with a gradient, and their states."""
    for group in optimizer.param_groups:
        for param in group["params"]:
            if param.grad is not None:
                for tensor in (param, *optimizer.state.get(param, {}).values()):
                    if isinstance(tensor, TieredTensor) and tensor.store_key == session.key:
                        yield tensor.entry


def commit_step(session: Session, optimizer: Optimizer) -> None:
    """Commit the step that has just ended: a killed run resumes from it.

    raises  what `CommitLog.commit` raises; the other ranks are told
    """
    if (commit_log := session.commit_log) is not None:
        with told_to_ranks(session.fabric):
            commit(commit_log, _model_of(session), optimizer, step=commit_log.step + 1)


def _to_come(session: Session, named: Named) -> RowsToCome | None:
    """The late updates that wait, for a commit; None where they are rather computed: a commit
    cannot name them, or the disk has no room for their gradients beside new versions of what the
    next step changes, and for the gradients of that."""
    session.run_noted_ops()
    found = rows_to_come(session.late, named)
    if found is None or session.commit_log is None:
        return None
    changing = (entry for entry, _ in named.values())
    more = 2 * found.gradient_bytes
    return found if session.commit_log.has_room(changing, more) else None


def commit(
    commit_log: CommitLog,
    model: nn.Module,
    optimizer: Optimizer | None,
    extra: Mapping[str, Any] | None = None,
    step: int | None = None,
    ready: Callable[[], object] | None = None,
) -> None:
    """Commit the state as it is.

    extra   values that the user adds; they stay in later commits until others are given
    step    optimizer steps in this state; None: as many as in the last commit
    ready   is called when this rank has found nothing to refuse, before ranks do anything together
    raises  what `CommitLog.commit` raises; Unsupported, for what cannot be kept
    """
    if extra is not None and "step" in extra:
        raise Unsupported(
            "'step' is what zcompile.resume calls the optimizer steps of a commit",
            "give it to zcompile.save over a durable directory by another name",
        )
    _check_resumed(commit_log)
    if optimizer is None and commit_log.optimizer is not None:
        optimizer = commit_log.optimizer()
    step = commit_log.step if step is None else step
    given = commit_log.extra_step if extra is None else step
    here = describe_here(model, optimizer, commit_log.extra if extra is None else extra)
    if ready is not None:
        ready()
    state = with_random_states(here)
    kept = commit_log.extra if extra is None else copy.deepcopy(dict(extra))  # as it is now
    named = {name: (tensor.entry, tensor.entry_layout) for name, tensor in state.tiered.items()}
    meta = {**state.meta, EXTRA_STEP: given}
    session = next((session_of(entry) for entry, _ in named.values()), None)
    late = None if session is None else _to_come(session, named)
    if late is None:
        commit_log.complete()
        commit_log.commit(named, state.plain, meta, step)
    else:
        meta |= {LATE: late.rows} if late.rows else {}
        plain = {**state.plain, **late.plain}
        commit_log.commit({**named, **late.gradients}, plain, meta, step)
    commit_log.keep_extra(kept, given)


def resume_durable(
    commit_log: CommitLog,
    model: nn.Module,
    optimizer: Optimizer | None = None,
    meetings: Meetings = ALONE,
) -> dict[str, Any]:
    """Put the last commit back, after every checksum of it was found right.

    It may be of another number of ranks, below the directory that was given: then it is copied, and
    stays as it is.

    returns  what `zcompile.save` was given last, and "step"
    raises   NothingCommitted, DurableDamaged, CheckpointMismatch
    """
    found = commit_log.files.index
    if commit_log.serial or commit_log.recovering:
        raise Unsupported(
            f"{commit_log.files.home.path} holds what this very model committed",
            "resume once, before the first step; to go back to an earlier state, resume in a new "
            "process",
        )
    newest = commit_log.newest()
    meetings.found()
    ranks = fabric_behind(model)
    if ranks is not None:
        last = found if newest is None else newest.index
        text = "nothing" if last is None else f"step {last.step} in {commit_log.given}"
        # Not on the path: each may have its part on a disk of its own.
        which = None if last is None else _which(last, commit_log.given / INDEX_NAME)
        ranks.agree("resume", which, newest is None, text=text)
    if newest is not None:
        return _continue_from(commit_log, newest, model, optimizer, ranks, meetings)
    if found is None:
        raise _nothing_in(commit_log.files.home, commit_log.given)
    _check_own(commit_log, found, ranks)
    _check_owners(commit_log.files.home.path, found, model)
    _check_sums(found, commit_log.files.directories)
    adopter = Recovery(commit_log, found)
    source = DurableSource(commit_log.files.home.path, found, commit_log.files.smalls, adopter)
    extra = restore(source, model, optimizer, meetings.ready)
    unresumed = _optimizer_in(found) if optimizer is None else None
    commit_log.resume(found, adopter.untaken(), unresumed)
    commit_log.keep_extra(extra, _extra_step(found))
    commit_log.follow(optimizer)
    logger.info("%s: resumed at step %d", commit_log.files.home.path, found.step)
    _warn_of_age(commit_log.files.home.path, extra, found)
    return {**extra, "step": found.step}


def _which(index: Index, path: Path) -> tuple[int, int, str]:
    """Which commit it is, of which training: the same on all ranks that go on from one.

    raises  DurableDamaged
    """
    sharing = sharing_of(index, path)
    return index.step, index.serial, index.run if sharing is None else sharing.training


def _check_own(commit_log: CommitLog, found: Index, ranks: Fabric | None) -> None:
    """Refuse the part of one rank where another is resumed. raises  Unsupported, DurableDamaged"""
    home = commit_log.files.home.path
    part = sharing_of(found, home / INDEX_NAME)
    whose = "what one process" if part is None else f"what rank {part.rank} of {part.mesh}"
    here = "what one process" if ranks is None else f"what rank {ranks.rank} of {ranks.mesh}"
    if whose != here:
        raise Unsupported(
            f"disk={str(home)!r} holds {whose} has committed, and not {here} has",
            f"give the directory that holds the parts of all ranks ({home.parent}) as disk",
        )


def _check_owners(home: Path, found: Index, model: nn.Module) -> None:
    """Refuse a commit of which other ranks hold the parameters than of the model.

    home    the directory of this rank
    raises  Unsupported, DurableDamaged
    """
    sharing = sharing_of(found, home / INDEX_NAME)
    for name, param in model.named_parameters():
        part = param.entry.partition if isinstance(param, TieredTensor) else None
        if sharing is None or part is None or (key := f"model.{name}") not in sharing.shares:
            continue
        owner = sharing.owners.get(key)
        if owner != part.owner:
            raise Unsupported(
                f"disk={str(home)!r} holds {_held_by(owner)} {name!r}, and the model "
                f"{_held_by(part.owner)} it",
                "give the partition= with which it was committed, and build the model as it was "
                "built; to change that, resume it without durable=True, and zcompile.save it",
            )


def _held_by(owner: int | None) -> str:
    return "a slice on each rank of" if owner is None else f"on rank {owner} alone all of"


def _continue_from(
    commit_log: CommitLog,
    world: World,
    model: nn.Module,
    optimizer: Optimizer | None,
    ranks: Fabric | None,
    meetings: Meetings,
) -> dict[str, Any]:
    """Put back what another number of ranks has committed last; the next commit is ours."""
    system = commit_log.files.home.system
    extra, index = _copied(world, model, optimizer, system, ranks, meetings)
    commit_log.continue_from(index, _optimizer_in(index) if optimizer is None else None)
    commit_log.keep_extra(extra, _extra_step(index))
    commit_log.follow(optimizer)
    logger.info(
        "%s: resumed at step %d, of %d ranks", commit_log.given, index.step, len(world.paths)
    )
    return {**extra, "step": index.step}


def _check_sums(found: Index, directories: Sequence[Directory]) -> None:
    """Compare every checksum of a commit. It may take long, and longer on one rank than on
    another: a rank is busy meanwhile.

    raises  DurableDamaged, DiskUnusable
    """
    total = bytes_to_check(found)
    with working(f"checking {directories[0].path}", total, show_size) as work:
        check_all(found, directories, lambda read, _: work.at(read))


def _nothing_in(home: Directory, directory: Path) -> ZinfError:
    """The error about a directory without a commit."""
    try:
        if stat_through_links(home.system, directory / STATE_FILE) is None:
            return NothingCommitted(directory, "holds no commit")
    except OSError as error:
        return unusable_error(directory, error)
    return Unsupported(  # whoever trains on after NothingCommitted would not go on from it
        f"disk={str(directory)!r} holds no commit, but a checkpoint that zcompile.save wrote, and "
        "a durable run does not continue from one in its own directory",
        f"give another directory as disk, and call zcompile.resume({str(directory)!r}, model, "
        "optimizer) to continue from the checkpoint",
    )


def _optimizer_in(found: Index) -> str | None:
    """Class of the optimizer whose states a commit holds."""
    kept: Any = found.meta["optimizer"]
    holds = kept is not None and (kept["states"] or kept["shared"])
    return kept["class"] if holds else None


def _extra_step(found: Index) -> int:
    """Step after which `extra` was given; that of the commit, where an earlier version did not
    say."""
    given = found.meta.get(EXTRA_STEP)
    return given if isinstance(given, int) else found.step


def _warn_of_age(directory: Path, extra: Mapping[str, Any], found: Index) -> None:
    """Warn of an `extra` that is older than the commit."""
    if extra and (given := _extra_step(found)) < found.step:
        logger.warning(
            "%s: extra (%s) is of step %d, the commit is step %d: bring it up to date, or call "
            "zcompile.save(%r, model, optimizer, ...) with it after each step",
            directory,
            ", ".join(extra),
            given,
            found.step,
            str(directory),
        )


def is_durable(path: str | os.PathLike[str], system: SystemCalls) -> bool:
    """Whether a commit lies in the directory `path`, or those of several ranks.

    raises  OSError, DurableDamaged, Unsupported
    """
    given = Path(path)
    if is_regular(stat_through_links(system, given / INDEX_NAME)):
        return True
    if stat_through_links(system, given / STATE_FILE) is not None:
        return False  # `zcompile.save` wrote it
    found = stat_through_links(system, given)
    return is_directory(found) and newest_in(given, system) is not None


def resume_copy(
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: Optimizer | None = None,
    system: SystemCalls = KERNEL,
    meetings: Meetings = ALONE,
) -> dict[str, Any]:
    """As `resume_durable`, for a model that rests elsewhere, or nowhere; the commit stays as it is.

    system  makes all calls on the files of the commit
    raises  DiskOwned, DiskUnusable, DurableDamaged, CheckpointMismatch, Unsupported
    """
    world = newest_in(Path(path), system)
    if world is None:
        raise NothingCommitted(Path(path), "holds no commit")
    meetings.found()
    extra, index = _copied(world, model, optimizer, system, fabric_behind(model), meetings)
    return {**extra, "step": index.step}


def _copied(
    world: World,
    model: nn.Module,
    optimizer: Optimizer | None,
    system: SystemCalls,
    ranks: Fabric | None,
    meetings: Meetings,
) -> tuple[dict[str, Any], Index]:
    """Put back what lies in directories of others, which nobody may write meanwhile; what
    `zcompile.save` was given last, and the part of the first rank.

    raises  DiskOwned, DiskUnusable, DurableDamaged, CheckpointMismatch
    """
    locking = ranks is None or ranks.rank == 0  # for all: they read beside each other
    with ExitStack() as stack:
        sources = [
            _source(stack, path, commit[0].serial, system, locking)
            for path, commit in zip(world.paths, world.commits, strict=True)
        ]
        source = sources[0] if len(sources) == 1 else SharedSource(sources)

        def all_ready() -> None:
            meetings.ready()
            if ranks is not None:
                which = _which(world.index, world.paths[0] / INDEX_NAME)
                text = f"step {world.index.step} in {world.paths[0]}"
                ranks.agree("read what was committed", which, text=text)

        extra = restore(source, model, optimizer, all_ready)
        if ranks is not None:  # before any of them gives its lock back
            ranks.agree("have read what was committed", world.index.serial)
        index = sources[0].index
        _warn_of_age(world.paths[0], extra, index)
    return extra, index


def _source(
    stack: ExitStack, path: Path, serial: int, system: SystemCalls, locking: bool
) -> "DurableSource":
    """The part of a commit that lies in `path`, every checksum of which is right.

    stack    keeps its directories open
    locking  they are locked as long
    raises   NothingCommitted, DiskOwned, DiskUnusable, DurableDamaged
    """
    try:
        with deferred_interrupts():  # one between a lock and its callback would leave it held
            directories, index, smalls = _claimed(stack, path, serial, system, locking)
    except ZinfError:
        raise
    except OSError as error:
        raise unusable_error(path, error) from error
    _check_sums(index, directories)
    return DurableSource(directories[0].path, index, smalls, Copier(directories))


def _claimed(
    stack: ExitStack, path: Path, serial: int, system: SystemCalls, locking: bool
) -> tuple[Sequence[Directory], Index, bytes]:
    """The directories of commit `serial` in `path`, open until `stack` ends, and the index there.

    raises  NothingCommitted, DiskOwned, DiskUnusable, DurableDamaged, OSError
    """

    def claim(directory: Directory) -> None:
        if locking:
            lock = DirectoryLock(directory, reclaiming=False)
            stack.callback(close_or_warn, directory.path, lock.release)

    home = stack.enter_context(open_directory(path, system))
    claim(home)
    found = held_in(home).numbered(serial)
    if found is None:
        raise NothingCommitted(home.path, "holds no commit any more")
    index, smalls = found
    others = [
        stack.enter_context(open_directory(Path(name), system)) for name in index.directories[1:]
    ]
    directories = [home, *others]
    check_data(index, home, directories)  # before anything is made where the index says
    for other in others:
        claim(other)
    check_data(index, home, directories)
    return directories, index, smalls


def _model_of(session: Session) -> nn.Module:
    model = session.root() if session.root is not None else None
    if model is None:
        raise Unsupported(
            "a durable step whose model is not known",
            "build one model inside zcompile.init, or call zcompile.offload(model)",
        )
    return model


class DurableSource:
    """The last commit, as `state.restore` reads it; of several ranks the part of one.

    index    of the commit
    sharing  whose part it is; None: all of it
    """

    def __init__(self, directory: Path, index: Index, smalls: bytes, copier: Copier) -> None:
        self.where = str(directory)
        self.meta: Mapping[str, Any] = index.meta
        self._copier = copier
        self.index = index
        self._path = directory / INDEX_NAME
        self.sharing = sharing_of(index, self._path)
        self._smalls = {small.name: small for small in index.smalls}
        self._tensors = {tensor.name: tensor for tensor in index.tensors}
        self._bytes = smalls
        self._check_layouts()
        self._late = self._updates_to_come()

    def _check_layouts(self) -> None:
        """Check that each tensor finds its elements in its bytes.

        raises  DurableDamaged
        """
        for kept in self.index.tensors:
            layout = self.layout_of(kept)
            needed = (layout.offset + layout.span) * layout.dtype.itemsize
            if (part := self.part_of(kept)) is not None:
                if not layout.covers(layout.nbytes):
                    raise self._misfit(kept, layout.span, layout.numel)
                needed = part.count * layout.dtype.itemsize
            if needed > kept.nbytes:
                raise self._misfit(kept, needed, kept.nbytes)
        for small in self.index.smalls:
            needed = math.prod(small.size) * self._dtype(small.name, small.dtype).itemsize
            if needed != small.end - small.begin:
                raise self._misfit(small, needed, small.end - small.begin)

    def _updates_to_come(self) -> UpdatesToCome:
        """The updates that the commit names. raises  DurableDamaged"""
        try:
            return UpdatesToCome(
                self.meta.get(LATE, []),
                self._tensors,
                self._smalls,
                lambda name, on: self._small(name),
                self._copier.read,
                str(self.meta.get("device")),
            )
        except ValueError as error:
            raise DurableDamaged(
                self._path, "the updates that are to come", f"cannot be understood: {error}"
            ) from error

    def _misfit(self, row: StoredTensor | SmallTensor, needed: int, given: int) -> DurableDamaged:
        return DurableDamaged(
            self._path, repr(row.name), f"takes {needed} bytes by its size, and has {given}"
        )

    def facts(self) -> Mapping[str, Fact]:
        rows: list[StoredTensor | SmallTensor] = [
            *(t for t in self.index.tensors if t.kind != EntryKind.GRAD.value),
            *self.index.smalls,
        ]
        return {row.name: Fact(self._dtype(row.name, row.dtype), row.size) for row in rows}

    def fill(self, name: str, target: Tensor) -> None:
        with torch.no_grad():
            if name in self._smalls:
                give(target, self._small(name))
                return
            kept = self._tensors[name]
            layout = self.layout_of(kept)
            if name not in self._late and self._taken(kept, layout, target):
                return
            if self.part_of(kept) is None:
                give(target, layout.view(self.read(kept)))
            else:
                assert isinstance(target, TieredTensor), "this rank has opened its own directory"
                put_share(target, self.read(kept))

    def row(self, name: str) -> StoredTensor | None:
        """What is said of a tensor that rests in a data file; None of others."""
        return self._tensors.get(name)

    def read(self, kept: StoredTensor) -> Tensor:
        """The bytes of a tensor, or of this rank's share, with its update: uint8 [kept.nbytes]."""
        return self._late.value(kept.name) if kept.name in self._late else self._copier.read(kept)

    def forget(self) -> None:
        """Let what was computed last go, of which other ranks have parts as large."""
        self._late.forget()

    def layout_of(self, kept: StoredTensor) -> Layout:
        """Of the whole tensor. raises  DurableDamaged"""
        return Layout(kept.size, kept.stride, kept.start, self._dtype(kept.name, kept.dtype))

    def part_of(self, kept: StoredTensor) -> Partition | None:
        """Which elements of a tensor lie here; None: all."""
        sharing = self.sharing
        if sharing is None or kept.name not in sharing.shares:
            return None
        owner = sharing.owners.get(kept.name)
        shard, mesh = sharing.mesh.shard_of(sharing.rank), sharing.mesh
        return Partition(math.prod(kept.size), shard, mesh.shards, owner)

    def _taken(self, kept: StoredTensor, layout: Layout, target: Tensor) -> bool:
        """Whether `target` is tiered, and its entry could take over the extent."""
        if not isinstance(target, TieredTensor) or target.entry_layout != layout:
            return False
        return self._copier.adopt(kept, target.entry)

    def _small(self, name: str) -> Tensor:
        row = self._smalls[name]
        raw = bytearray(self._bytes[row.begin : row.end])
        dtype = self._dtype(name, row.dtype)
        flat = torch.frombuffer(raw, dtype=dtype) if raw else torch.empty(0, dtype=dtype)
        return flat.reshape(row.size)

    def _dtype(self, name: str, text: str) -> torch.dtype:
        dtype = getattr(torch, text, None)
        if not isinstance(dtype, torch.dtype):
            raise DurableDamaged(
                self._path, repr(name), f"has dtype {text}, which this torch does not have"
            )
        return dtype


def give(target: Tensor, value: Tensor) -> None:
    """Give a tensor a value that every rank has; on this one alone, since what is small may have
    rested elsewhere on another."""
    if isinstance(target, TieredTensor) and target.entry.store.fabric is not None:
        layout, entry = target.entry_layout, target.entry
        if entry.partition is None and layout.covers(entry.nbytes):
            memory = torch.zeros(entry.nbytes, dtype=torch.uint8)
            layout.view(memory).copy_(value)
            put_share(target, memory)
            return
    target.copy_(value)


def put_share(target: TieredTensor, share: Tensor) -> None:
    """Give an entry the bytes that this rank holds of it.

    share  uint8 [n]; the rest is padding
    """
    entry = target.entry
    whole = torch.zeros(entry.nbytes, dtype=torch.uint8)
    whole[: share.numel()] = share
    entry.store.put(entry, whole).wait()
    increment_version(target._handle)


class SharedSource:
    """The last commit of several ranks, read by other ranks, or by one process: what it keeps of a
    tensor comes from the shares that have it."""

    def __init__(self, sources: Sequence[DurableSource]) -> None:
        self.where, self.meta = sources[0].where, sources[0].meta
        first = sources[0].sharing
        self._sources = sources if first is None else sources[: first.mesh.shards]
        """Of the ranks of the first group: they hold a whole together, as do those of each other
        one."""
        for number, source in enumerate(sources):
            sharing = source.sharing
            if (
                first is None
                or sharing is None
                or (sharing.rank, sharing.mesh) != (number, first.mesh)
                or sharing.ranks != len(sources)
            ):
                raise DurableDamaged(
                    Path(source.where), "the index", f"is not of rank {number} of {len(sources)}"
                )

    def facts(self) -> Mapping[str, Fact]:
        return self._sources[0].facts()

    def fill(self, name: str, target: Tensor) -> None:
        first = self._sources[0]
        kept = first.row(name)
        if kept is None or first.part_of(kept) is None:
            first.fill(name, target)
            return
        layout = first.layout_of(kept)
        with torch.no_grad():
            if (
                isinstance(target, TieredTensor)
                and target.entry.partition is not None
                and target.entry_layout == layout
            ):
                put_share(target, self._elements(name, layout, *target.entry.partition.own))
            else:
                target.copy_(layout.view(self._elements(name, layout, 0, layout.numel)))

    def _elements(self, name: str, layout: Layout, first: int, last: int) -> Tensor:
        """The bytes of elements [first, last), in the order of storage."""
        width = layout.dtype.itemsize
        found = torch.zeros((last - first) * width, dtype=torch.uint8)
        for source in self._sources:
            kept = source.row(name)
            part = None if kept is None else source.part_of(kept)
            if kept is None or part is None:
                raise DurableDamaged(
                    Path(source.where), repr(name), "is a share on other ranks, and none here"
                )
            begin, end = part.own
            low, high = max(first, begin), min(last, end)
            if low < high:
                share = source.read(kept)[(low - begin) * width : (high - begin) * width]
                found[(low - first) * width : (high - first) * width] = share
                source.forget()
        return found
