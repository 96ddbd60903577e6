"""Saves, resumes and loads checkpoints: the state of a training in a directory of plain files.

    model.safetensors, or shards of it and model.safetensors.index.json   parameters and buffers
    optimizer.safetensors, likewise                                        "<parameter>.<key>"
    training.safetensors                                   tensors of `extra`, random states
    training.json                                          all that is not a tensor

PyTorch reads them with `safetensors` alone, and Hugging Face's `from_pretrained` reads the model;
`load` takes weights out of anybody's files. Bytes stream between tiers and files; no second copy of
the model exists. A checkpoint is checked as a whole before anything is read of it.
"""

import errno
import json
import logging
import os
import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from zcompile.checkpoint.directory import STATE_FILE, Made, replacing, standing
from zcompile.checkpoint.durable import (
    commit,
    commit_log_of,
    is_durable,
    resume_copy,
    resume_durable,
)
from zcompile.checkpoint.file import Folder, OpenFile, OpenFiles, checkpoint_errors
from zcompile.checkpoint.meta_buffers import buffers_of, memory_for, why_without_value
from zcompile.checkpoint.plain_values import unpack
from zcompile.checkpoint.safetensors import (
    Header,
    Place,
    Shard,
    index_of,
    read_header,
    read_json,
    shards_of,
)
from zcompile.checkpoint.shares import (
    Own,
    Plan,
    check_held_alike,
    make_files,
    plan_of,
    write_own,
)
from zcompile.checkpoint.state import (
    Fact,
    ModelState,
    TrainingState,
    describe,
    describe_here,
    device_behind,
    fabric_behind,
    fact_of,
    model_state,
    restore,
    session_behind,
    with_random_states,
)
from zcompile.checkpoint.stream import (
    MOST_IN_FLIGHT,
    Loader,
    NewFile,
    ReportBytes,
    is_shared,
    parts_of,
)
from zcompile.checkpoint.together import Meetings, Together, reading
from zcompile.checkpoint.torch_file import Held, TorchFile
from zcompile.checkpoint.weights import weights_in
from zcompile.errors import CheckpointInvalid, CheckpointMismatch, CheckpointUnwritable, Unsupported
from zcompile.ir.torch_compat import untraced
from zcompile.ir.units import show_size
from zcompile.runtime.io.files import is_directory, kind_of, stat_through_links
from zcompile.runtime.io.system_calls import KERNEL, SystemCalls
from zcompile.runtime.progress import Work, working
from zcompile.runtime.ranks.fabric import Fabric
from zcompile.runtime.session import session_of
from zcompile.runtime.transfer.interrupts import deferred_interrupts, uninterrupted

NAMED = ("model", "optimizer")
"""Kinds of files whose tensors are named without the kind, as others name them."""
OTHERS = "training"
"""The kind of file for all other tensors."""
_FIELDS = {"aliases": dict, "modules": dict, "rng": dict, "extra": dict, "device": str}


def of_kind(kind: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of a state that stand in the files of `kind`, by the names that they have
    there."""
    if kind == OTHERS:
        return {n: t for n, t in tensors.items() if n.partition(".")[0] not in NAMED}
    start = f"{kind}."
    return {n.removeprefix(start): t for n, t in tensors.items() if n.startswith(start)}


class CheckpointSource:
    """A checkpoint that `zcompile.save` wrote, as a source of state.

    raises  CheckpointInvalid, naming the file
    """

    def __init__(self, folder: Folder, loader: Loader) -> None:
        self.where = str(folder.path)
        self._loader = loader
        if not folder.holds(STATE_FILE):
            raise _without_state(folder)
        state = folder.file(STATE_FILE)
        self._told = told = read_json(state)
        self.meta = _state(state.path, told)
        self._places: dict[str, Place] = {}
        self._files: list[Header] = []
        for file in told["files"]:
            self._take(folder.file(file), told.get("checkpoint"))
        for name in _tensors_of(self.meta):
            if name not in self._places:
                raise CheckpointInvalid(
                    state.path, f"needs the tensor {name!r}, and none of its files has it"
                )

    def agree(self, fabric: Fabric) -> None:
        """Check that all ranks have the same checkpoint: each of its files has the name that
        `save` gave it, and no other has.

        raises  RanksDiffer, RankFailed
        """
        name, files = self._told.get("checkpoint"), self._files
        said = json.dumps(self._told, sort_keys=True)
        fabric.agree("resume", said, *files, text=f"from checkpoint {name} in {self.where}")

    def facts(self) -> Mapping[str, Fact]:
        return {name: fact_in(place) for name, place in self._places.items()}

    def fill(self, name: str, target: Tensor) -> None:
        place = self._places[name]
        self._loader.fill(place.file, name, place.row, target)

    def _take(self, file: OpenFile, checkpoint: object) -> None:
        path, header = file.path, read_header(file)
        self._files.append(header)
        if header.metadata.get("checkpoint") != checkpoint:
            raise CheckpointInvalid(
                path,
                f"is not of the same checkpoint as {STATE_FILE}",
                "copy the whole directory again",
            )
        kind = next((kind for kind in NAMED if path.name.startswith(kind)), None)
        start = "" if kind is None else f"{kind}."
        for name, row in header.rows.items():
            if start + name in self._places:
                raise CheckpointInvalid(path, f"has {name!r}, which another of its files has too")
            self._places[start + name] = Place(file, row)


def fact_in(place: Place | Held) -> Fact:
    """Dtype and size of a tensor in a file."""
    return Fact(place.row.dtype, place.row.size)


def _without_state(folder: Folder) -> CheckpointInvalid:
    """The error about a directory that is no checkpoint.

    raises  CheckpointInvalid too
    """
    files = [name for name in folder.names() if name.endswith(".safetensors")]
    if any(not name.startswith("model") for name in files):
        return CheckpointInvalid(
            folder.path,
            f"lacks {STATE_FILE}, which is written last: it was not copied as a whole",
            "copy it again",
        )
    if files:
        return CheckpointInvalid(
            folder.path,
            f"holds weights, and no {STATE_FILE}",
            "zcompile.load(model, path) reads weights alone",
        )
    return CheckpointInvalid(
        folder.path,
        f"holds no {STATE_FILE}, so it is no checkpoint",
        "name the directory that zcompile.save wrote",
    )


def _state(path: Path, told: dict[str, Any]) -> dict[str, Any]:
    state, files = told.get("state"), told.get("files")
    if not isinstance(state, dict) or not isinstance(files, list):
        raise CheckpointInvalid(
            path, "lacks what zcompile.save writes to it", "zcompile.load reads weights of others"
        )
    for field, kind in _FIELDS.items():
        if not isinstance(state.get(field), kind):
            raise CheckpointInvalid(path, f"lacks {field!r}, or it is damaged")
    try:
        unpack(state, lambda name, on: torch.empty(0))
    except (ValueError, TypeError, AttributeError) as error:
        raise CheckpointInvalid(path, f"has values that are not sound: {error}") from error
    if not all(isinstance(file, str) and not set("/\0") & set(file) for file in files):
        raise CheckpointInvalid(path, "has a list of files that is damaged")
    return state


def _tensors_of(value: Any) -> Iterator[str]:
    """Names of tensors that packed values refer to."""
    if isinstance(value, dict):
        if isinstance(value.get("$tensor"), str):
            yield value["$tensor"]
        for inner in value.values():
            yield from _tensors_of(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from _tensors_of(inner)


SHARD_BYTES = 5 * 10**9
"""Most bytes of a shard, as in `save_pretrained` of Hugging Face."""
KINDS = (*NAMED, OTHERS)
"""Kinds of files."""

Progress = Callable[[int, int], None]
"""Is told bytes done, and bytes in all."""
Paths = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]

logger = logging.getLogger("zcompile.checkpoint.checkpoint")


class Loaded(NamedTuple):
    """What `load` did not find; the fields are those of `load_state_dict`."""

    missing_keys: list[str]
    unexpected_keys: list[str]


@untraced
def save(
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    progress: Progress | None = None,
    **extra: Any,
) -> None:
    """Write a checkpoint: parameters, buffers, optimizer, torch's random states, `extra`.

    A checkpoint that stands at `path` is replaced when the new one is complete, and not before.
    If `path` is the model's own durable directory, this is one small commit; later commits keep
    `extra`.

    Several ranks call it together, with the same path, and each writes its shares; of all else, as
    of `extra`, rank 0 writes its own. A shared tensor that is not row-major is gathered, at the
    end, on every rank; one that fails to read then ends the session of all. Where a rank does not
    see the directory that rank 0 writes to, rank 0 writes all, and a warning says so.

    progress  told bytes done and bytes in all, after every few MiB; on each rank, of its own
    extra     JSON-able values, tensors, and dicts, lists and tuples of them, such as
              `scheduler=scheduler.state_dict()`
    raises    CheckpointUnwritable, Unsupported, IOFault; then nothing has changed, and where one
              rank fails, all raise, and say which. RanksDiffer, RankFailed
    """
    _check_order("save(path, model, optimizer)", path, model)
    if (flaw := _flaw_of(path)) is not None:
        raise CheckpointUnwritable(errno.EINVAL, Path(ascii(str(path))), flaw, "name a directory")
    fabric = fabric_behind(model)
    if (commit_log := commit_log_of(path, model)) is not None:
        if fabric is None:
            commit(commit_log, model, optimizer, extra)
            return
        together = Together(fabric, commit_log.given, "the durable directory")
        with together.telling():
            commit(commit_log, model, optimizer, extra, ready=together.meet_last)
        return
    since = time.perf_counter()
    path, system = Path(path), _system_of(model)
    if fabric is None:
        state = describe(model, optimizer, extra)
        _drain(state)
        total = _save_alone(path, state, system, progress)
    else:
        together = Together(fabric, path)
        with together.telling():
            here = describe_here(model, optimizer, extra)
            check_held_alike(fabric, here.tensors)
            together.meet()
            state = with_random_states(here)
            _drain(state)
            total = _save_together(together, state, system, progress)
            together.meet()
    if fabric is None or fabric.rank == 0:
        seconds = time.perf_counter() - since
        logger.info("%s: %s saved in %.1f s", path, show_size(total), seconds)


def _drain(state: TrainingState) -> None:
    """What is still under way to a file cannot be shared with another."""
    for session in {session_of(tensor.entry) for tensor in state.tiered.values()}:
        session.drain()


def _save_alone(
    path: Path, state: TrainingState, system: SystemCalls, progress: Progress | None
) -> int:
    """Save a state; returns the bytes of all files."""
    with _new_checkpoint(path, state, system) as new, ExitStack() as stack:
        files = []
        for shard in new.shards:
            to, parts = new.made.path / shard.file, parts_of(*shard.content)
            with deferred_interrupts():  # one after it was opened would leave it open
                files.append(NewFile(to, new.made.fd, parts, shard.header.nbytes, system))
                stack.callback(files[-1].close)
        for file in files:
            file.reserve()
        told = _reporting(new.work, progress, new.total)
        for file in files:
            file.stream(told)
    return new.total


def _save_together(
    together: Together, state: TrainingState, system: SystemCalls, progress: Progress | None
) -> int:
    """Save the state of several ranks, each of which calls this; returns the bytes of all files,
    on rank 0."""
    fabric, path, telling = together.fabric, together.path, "tell where a checkpoint is written"
    shared = {name: tensor for name, tensor in state.tiered.items() if is_shared(tensor)}
    if fabric.rank > 0:
        with working(f"saving {path}", None, show_size) as work:
            together.meet()
            plan = Plan.unpacked(fabric.told(telling, b""))
            told = partial(_reporting, work, progress)
            write_own(together, plan, None, Own(shared, ()), system, told)
        return 0
    # Inside of it ranks are told of a failure before the new directory is removed.
    with _new_checkpoint(path, state, system, of_ranks=True) as new, together.telling():
        plan = plan_of(new.shards, new.made.path.name, f"of-{new.name}")
        make_files(new.shards, new.made, plan.mark, system)
        together.meet()
        fabric.told(telling, plan.packed())
        told = partial(_reporting, new.work, progress)
        write_own(together, plan, new.made, Own(shared, new.shards), system, told)
    return new.total


class _New(NamedTuple):
    """A checkpoint that is being written.

    name   the same in all of its files, and in no other checkpoint
    total  bytes of all files
    """

    name: str
    shards: list[Shard]
    total: int
    made: Made
    work: Work


@contextmanager
def _new_checkpoint(
    path: Path, state: TrainingState, system: SystemCalls, of_ranks: bool = False
) -> Iterator[_New]:
    """A context in which the files of `state` are written; at its end they become a checkpoint,
    and stand at `path`.

    of_ranks  other ranks look for the directory in which they are written
    """
    name = secrets.token_hex(8)
    shards = _shards(state, {"format": "pt", "checkpoint": name})
    total = sum(shard.header.nbytes for shard in shards)
    with (
        working(f"saving {path}", total, show_size) as work,
        replacing(path, system, name[:8] if of_ranks else "") as made,
    ):
        # Also for what is shared: the next step writes other values, and takes room for them then.
        _check_room(made, path, total, system)
        yield _New(name, shards, total, made, work)
        for kind in KINDS:
            several = [shard for shard in shards if shard.file.startswith(f"{kind}-")]
            if several:
                index = f"{kind}.safetensors.index.json"
                _write_json(made, index, index_of(several), system)
        files = [shard.file for shard in shards]
        told_state = {"checkpoint": name, "files": files, "state": state.meta}
        _write_json(made, STATE_FILE, told_state, system)


def _reporting(work: Work, progress: Progress | None, total: int) -> ReportBytes:
    """Who is told of bytes that are written, of `total`."""
    done = 0

    def told(nbytes: int) -> None:
        nonlocal done
        done += nbytes
        work.at(done)
        if progress is not None:
            progress(done, total)

    work.total = total
    return told


@untraced
def resume(
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
) -> dict[str, Any]:
    """Continue from a checkpoint, bit by bit; returns the `extra` it was given.

    If `path` is a durable directory, from its last commit, with "step" in `extra`; if it is the
    model's own, what rests on disk is not moved.
    The model may be offloaded, offloaded on `meta`, or plain. Nothing changes before everything is
    known to fit. `extra`'s tensors come back on the device where they were, else on the CPU.

    Several ranks call it together. What one of them cannot read, or refuses, raises on all of them
    before anything changes, and the run can go on; what fails later, as a disk in the middle of a
    tensor does, ends the session of all.

    raises  CheckpointInvalid, naming file and tensor, or the rank that could not read its part;
            CheckpointMismatch, listing what differs; RanksDiffer, RankFailed
    """
    _check_order("resume(path, model, optimizer)", path, model)
    with reading(fabric_behind(model), str(path)) as meetings:
        return _resume(path, model, optimizer, meetings)


def _resume(
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    meetings: Meetings,
) -> dict[str, Any]:
    _check_path(path)
    if (commit_log := commit_log_of(path, model)) is not None:
        return resume_durable(commit_log, model, optimizer, meetings)
    system = _system_of(model)
    with checkpoint_errors(Path(path)):
        durable = is_durable(path, system)
        directory = standing(Path(path), system)
        found = stat_through_links(system, directory)
    if durable:
        return resume_copy(path, model, optimizer, system, meetings)
    if found is not None and not is_directory(found):
        raise CheckpointInvalid(
            directory,
            f"is {kind_of(found)}, and a checkpoint is a directory",
            "name the one that zcompile.save wrote; zcompile.load reads weights from files",
        )
    with OpenFiles(system) as files, Loader() as loader:
        source = CheckpointSource(files.folder(directory), loader)
        meetings.found()
        if (fabric := fabric_behind(model)) is not None:
            source.agree(fabric)
        return restore(source, model, optimizer, meetings.ready)


@untraced
def load(
    model: nn.Module,
    paths: Paths,
    *,
    strict: bool = True,
) -> Loaded:
    """Stream exported weights straight into the tiers, tensor by tensor.

    A value is cast to the dtype of its parameter, as `load_state_dict` casts; only a complex one
    does not become real. Returns the names that were missing and
    those that the model does not have, as `load_state_dict` does.

    paths   a file of safetensors or of `torch.save`, several, or a directory with
            model.safetensors or pytorch_model.bin, or shards of one of them; of `torch.save` only
            tensors are read (`weights_only`)
    strict  all parameters and buffers are there, and nothing else; tied ones under any name
    raises  CheckpointInvalid; CheckpointMismatch for shapes and casts too, and for a tied weight of
            which the files have several values, whatever `strict`; then nothing has changed, and
            of several ranks all raise if one does, as in `resume`. IOFault and what transfers
            raise: a note of it says which tensors were loaded
    """
    _check_order("load(model, paths)", paths, model)
    shown = ", ".join(map(str, _as_given(paths)))
    with reading(fabric_behind(model), shown) as meetings:
        for path in _as_given(paths):
            _check_path(path)
        with OpenFiles(_system_of(model)) as files:
            return _load(model, paths, strict, weights_in(_listed(paths), files), meetings)


def _as_given(paths: Paths) -> Sequence[str | os.PathLike[str]]:
    return [paths] if isinstance(paths, str | os.PathLike) else paths


def _load(
    model: nn.Module,
    paths: Paths,
    strict: bool,
    found: Mapping[str, Place | Held],
    meetings: Meetings,
) -> Loaded:
    held, session = model_state(model), session_behind(model)
    wanted = {name: held.aliases.get(name, name) for name in found}
    missing = sorted(held.tensors.keys() - set(wanted.values()))
    unexpected = sorted(name for name in found if wanted[name] not in held.tensors)
    buffers = frozenset[int]() if session is None else buffers_of(model)
    rows = _unloadable(found, wanted, held, buffers)
    if strict:
        rows += [
            f"{name}: missing, the model has {fact_of(held.tensors[name])}" for name in missing
        ]
        rows += [f"{name}: {fact_in(found[name])}, the model has none" for name in unexpected]
    shown = ", ".join(str(p) for p in _listed(paths))
    if rows:
        raise CheckpointMismatch(shown, rows)
    done: list[str] = []

    def whole() -> set[str]:
        """Names of what has come; of the last that were asked for, values may be there in part."""
        return {wanted[name] for name in done[: max(0, len(done) - MOST_IN_FLIGHT)]}

    brought = {name: held.tensors[name] for name in wanted.values() if name in held.tensors}
    with memory_for(model, brought, device_behind(model), whole):
        held = model_state(model)
        targets = {n: held.tensors[first] for n, first in wanted.items() if first in held.tensors}
        one_of = _one_of(targets)
        due = {name: found[name] for name, one in one_of.items() if name == one}
        total = sum(place.row.nbytes for place in due.values())
        if rows := _differing(found, targets, one_of):
            raise CheckpointMismatch(shown, rows)
        fabric, seen = fabric_behind(model), list(_seen_of(found))
        meetings.found()
        if fabric is not None:
            fabric.agree("load", *seen, text=f"the files {shown}")
        meetings.ready()
        with working(f"loading {shown}", total, show_size) as work:
            try:
                with Loader() as loader:
                    for name, place in due.items():
                        work.begin(name)
                        loader.fill(place.file, name, place.row, targets[name].detach())
                        work.add(place.row.nbytes, name)
                        done.append(name)
            except BaseException as error:
                if fabric is None:
                    error.add_note(_left_after(list(due), len(done)))
                raise
    return Loaded(missing, unexpected)


def _seen_of(found: Mapping[str, Place | Held]) -> Iterator[object]:
    """By what ranks see that they have the same files before they look into the values: what the
    headers say, the name of a checkpoint of ours among it."""
    yield [(name, place.row) for name, place in found.items()]
    for file in dict.fromkeys(place.file for place in found.values()):
        if isinstance(file, OpenFile):
            yield read_header(file)


def _left_after(names: Sequence[str], done: int) -> str:
    """In which state a model is, of whose tensors `done` were read before the load failed."""
    few = names[max(0, done - MOST_IN_FLIGHT) : done + 1]
    return (
        f"the load ended after {done} of {len(names)} tensors: what comes before {few[0]!r} in the "
        f"files has its new value, from there to {few[-1]!r} it may be in part, all else is as it "
        "was; call zcompile.load again before the model is used"
    )


def _system_of(model: nn.Module) -> SystemCalls:
    """The calls on files that the model's session was opened with."""
    session = session_behind(model)
    return KERNEL if session is None else session.system


def _check_order(call: str, path: object, model: object) -> None:
    """Refuse a path where the model belongs, or the reverse.

    raises  Unsupported
    """
    if isinstance(path, nn.Module) or not isinstance(model, nn.Module):
        raise Unsupported(
            f"{type(model).__name__} was given as the model, {type(path).__name__} as the path",
            f"call zcompile.{call}",
        )


def _flaw_of(path: str | os.PathLike[str]) -> str | None:
    """Why no file can have this path, whatever the disk holds; None if one can."""
    try:
        raw = os.fsencode(path)
    except UnicodeEncodeError:
        return "the path has characters that no name of a file has"
    if b"\0" in raw:
        return "the path has a NUL in it"
    return None if raw else "the path is empty"


def _check_path(path: str | os.PathLike[str]) -> None:
    """Refuse a path that no file can have.

    raises  CheckpointInvalid
    """
    if (flaw := _flaw_of(path)) is not None:
        shown = Path(ascii(str(path)))
        raise CheckpointInvalid(shown, f"cannot be read: {flaw}", "name one that exists")


def _shards(state: TrainingState, metadata: Mapping[str, str]) -> list[Shard]:
    shards = []
    for kind in KINDS:
        tensors = of_kind(kind, {**state.tiered, **state.plain})
        if tensors or kind != "optimizer":
            prefix = f"{kind}." if kind in NAMED else ""
            shards += shards_of(kind, tensors, SHARD_BYTES, metadata, prefix)
    return shards


def _check_room(made: Made, path: Path, total: int, system: SystemCalls) -> None:
    disk = system.statvfs(made.fd)
    free = disk.f_bavail * disk.f_frsize
    if total > free:
        raise CheckpointUnwritable(
            errno.ENOSPC,
            path,
            f"it needs {show_size(total)}, and {show_size(free)} are free",
            "free space, or give another directory",
        )


@uninterrupted
def _write_json(made: Made, name: str, value: object, system: SystemCalls) -> None:
    text = json.dumps(value, indent=1, allow_nan=False) + "\n"
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
    fd = system.open(name, flags, 0o666, dir_fd=made.fd)
    try:
        system.write_all(fd, text.encode())
        system.fsync(fd)
    finally:
        system.close(fd)


def _listed(paths: Paths) -> list[Path]:
    return [Path(paths)] if isinstance(paths, str | os.PathLike) else [Path(p) for p in paths]


def _unloadable(
    found: Mapping[str, Place | Held],
    wanted: Mapping[str, str],
    held: ModelState,
    buffers: frozenset[int],
) -> list[str]:
    """Sentences on what cannot be loaded, strictly or not: another shape, complex numbers for
    real ones, or no memory to take it.

    buffers  that are given memory, by `id`
    """
    rows = []
    for name, place in found.items():
        target = held.tensors.get(wanted[name])
        if target is None:
            continue
        if tuple(target.size()) != place.row.size:
            rows.append(f"{name}: {fact_in(place)}, the model has {fact_of(target)}")
        elif place.row.dtype.is_complex and not target.is_complex():
            rows.append(
                f"{name}: {fact_in(place)} would lose its imaginary part, the model has "
                f"{fact_of(target)}"
            )
        elif (why := why_without_value(target, buffers)) is not None:
            rows.append(f"{name}: has no value, {why}")
    return rows


def _one_of(targets: Mapping[str, Tensor]) -> dict[str, str]:
    """For each name in the files the first of those whose values go to the same bytes."""
    firsts: dict[object, str] = {}
    return {
        name: firsts.setdefault((to.data_ptr(), to.size(), to.stride(), to.dtype), name)
        for name, to in targets.items()
    }


def _differing(
    found: Mapping[str, Place | Held], targets: Mapping[str, Tensor], one_of: Mapping[str, str]
) -> list[str]:
    """Sentences on tied weights that have several values in the files."""
    twins = {
        name: one
        for name, one in one_of.items()
        if name != one and not _is_stored_once(found, name, one)
    }
    if not twins:
        return []
    read = sorted({*twins, *twins.values()}, key=list(found).index)
    digests = dict[str, bytes]()
    total = sum(found[name].row.nbytes for name in read)
    with working("comparing tied weights", total, show_size) as work, Loader() as loader:
        for name in read:
            (file, row), dtype = found[name], targets[name].dtype
            work.begin(name)
            digests[name] = loader.digest(file, name, row, dtype)
            work.add(row.nbytes, name)
    return [
        f"{name}: has other values than {one}, and the model has one tensor for both; load into a "
        "model that does not tie them, or leave one out of the file"
        for name, one in twins.items()
        if digests[name] != digests[one]
    ]


def _is_stored_once(found: Mapping[str, Place | Held], name: str, other: str) -> bool:
    file = found[name].file
    return isinstance(file, TorchFile) and file is found[other].file and file.shows_one(name, other)
