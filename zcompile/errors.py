"""Defines every error that a user can meet, and its sentence: what, where, why, and what to do.

All inherit `ZinfError` and also the built-in class that Python programmers expect, so that `except
ZinfError` catches ours and `except OSError` keeps working. `Running` turns errors of code that
zcompile runs for a user into sentences.
"""

import traceback
from collections.abc import Callable, Iterable, Sequence
from difflib import get_close_matches
from importlib.util import find_spec
from pathlib import Path
from traceback import FrameSummary

from zcompile.ir.units import show_size, write_budget


class ZinfError(Exception):
    """The root of every error zcompile raises on purpose."""

    def put_notes_into_sentence(self) -> None:
        """Make lines of the sentence of what was added by `add_note`, for a reader who is shown the
        sentence alone: Dynamo puts it into an error of its own, and lets the notes go. An OSError
        keeps its notes: it shows its errno and file, and not what it was made with."""
        if isinstance(self, OSError) or not self.args:
            return
        sentence, *others = self.args
        notes = self.__dict__.pop("__notes__", ())
        self.args = ("\n  note: ".join((str(sentence), *notes)), *others)


class ConfigInvalid(ZinfError, ValueError):
    """A field of `Config` cannot be used as given."""

    def __init__(self, field: str, value: object, why: str) -> None:
        super().__init__(f"{field}={value!r} {why}")
        self.field = field


class LayoutInvalid(ZinfError, ValueError):
    """A layout of block-sparse attention cannot be, or does not fit what it is for."""

    def __init__(self, what: str, given: str, why: str) -> None:
        super().__init__(f"{what}: {given} {why}")


OTHER_WORDS = {
    **dict.fromkeys(("nvme", "nvme_path", "ssd", "offload_dir", "directory", "path"), "disk"),
    **dict.fromkeys(("gpu_memory", "vram", "gpu_budget", "memory"), "device_memory"),
    **dict.fromkeys(("cpu_memory", "ram", "dram", "host_budget"), "host_memory"),
    **dict.fromkeys(("gpu", "cuda"), "device"),
}
"""What others call a field."""


class UnknownOption(ZinfError, TypeError):
    """A key names no field; the one of that meaning, or the nearest known one, is offered."""

    def __init__(self, key: str, known: Iterable[str], where: str) -> None:
        known = sorted(known)
        near = get_close_matches(key, known, n=1, cutoff=0.5)
        if (meant := OTHER_WORDS.get(key)) in known:
            near = [meant]
        hint = f"; did you mean {near[0]!r}?" if near else ""
        super().__init__(f"{where} does not know {key!r}{hint} (known: {', '.join(known)})")


class BudgetExceeded(ZinfError, MemoryError):
    """Something must be on a tier at once and the tier's budget is smaller."""

    def __init__(
        self,
        tier: str,
        budget_bytes: int,
        needed_bytes: int,
        where: str,
        alive: Iterable[tuple[str, int]],
        todo: str,
    ) -> None:
        alive = sorted(alive, key=lambda row: -row[1])
        total = show_size(sum(nbytes for _, nbytes in alive))
        rows = [f"    {show_size(nbytes):>10}  {name}" for name, nbytes in alive[:8]]
        if len(alive) > 8:
            rest = sum(nbytes for _, nbytes in alive[8:])
            rows.append(f"    {show_size(rest):>10}  ... {len(alive) - 8} more")
        super().__init__(
            "\n".join(
                (
                    f"{where} needs {show_size(needed_bytes)} on the {tier}, "
                    f"the budget is {show_size(budget_bytes)}",
                    *((f"  at the peak these are alive, {total} in all:", *rows) if rows else ()),
                    f"  to fit: {todo}",
                )
            )
        )
        self.tier, self.needed_bytes, self.budget_bytes = tier, needed_bytes, budget_bytes
        self.where, self.alive = where, tuple(alive)


def quoted(name: str) -> str:
    """`name`, of a parameter or module, as each sentence shows it; a node stands as in a graph,
    `%mm`."""
    return name if name.startswith("%") else repr(str(name))


def more_device_memory(nbytes: int) -> str:
    """What to do where the device needs so many bytes."""
    return f"give zcompile.offload device_memory={write_budget(nbytes)} or more"


KEEP_LESS = "stage='auto', which keeps what there is room for, or stage=3"
"""What else to do where the device has no room for all of each parameter."""


class SlotsOverlap(ZinfError, AssertionError):
    """Two values were given bytes of the device that overlap: a defect of zcompile.

    wanted, held  (begin, end, name of the value)
    """

    def __init__(self, wanted: tuple[int, int, str], held: tuple[int, int, str]) -> None:
        begin, end, name = wanted
        low, high, holder = held
        super().__init__(
            f"{name!r} was to be brought to bytes [{begin}, {end}) of the device, where {holder!r} "
            f"still holds [{low}, {high}); nothing was overwritten, but this is a defect of "
            "zcompile: report it with this line and what was called before, and build the model "
            "anew to go on"
        )


class TierFull(ZinfError, MemoryError):
    """No tier has room left for an entry.

    tiers  name of each, bytes in use, bytes in all
    whole  what the model needs with its states, in a sentence
    """

    def __init__(
        self,
        name: str,
        nbytes: int,
        tiers: Iterable[tuple[str, int, int]],
        more: str = "",
        whole: str = "",
    ) -> None:
        self.tiers, self.whole = list(tiers), whole
        rows = [
            f"    {tier}: {show_size(used)} used of {show_size(budget)}"
            for tier, used, budget in self.tiers
        ]
        what = f"no tier has {show_size(nbytes)} left for {name!r}"
        fit = "  to fit: raise host_memory, give a directory as disk, or free space on it"
        told = [f"  {whole}"] if whole else []
        super().__init__("\n".join((what, *rows, *told, fit + more)))


class RanksDiffer(ZinfError, RuntimeError):
    """Ranks that train one model together do not do the same: each of them raises this.

    said  rank -> what it was about to do
    """

    def __init__(self, what: str, said: Sequence[tuple[int, str]], todo: str) -> None:
        groups: dict[str, list[int]] = {}
        for rank, text in said:
            groups.setdefault(text, []).append(rank)
        rows = []
        for text, ranks in groups.items():
            several = "ranks" if len(ranks) > 1 else "rank"
            rows.append(f"    {several} {', '.join(map(str, ranks))}: {text}")
        super().__init__("\n".join((f"the ranks differ in {what}", *rows, f"  to fix: {todo}")))


class RankFailed(ZinfError, RuntimeError):
    """Another rank that trains the model ended, or never came, so this one cannot go on.

    rank, host  which it was
    """

    def __init__(self, rank: int, host: str, why: str, todo: str) -> None:
        super().__init__(f"rank {rank} on {host} {why}; {todo}")
        self.rank, self.host = rank, host


class RankZeroFailed(ZinfError, RuntimeError):
    """Rank 0 has failed while it alone read (`zcompile.rank_zero_reads`): raised on the others."""

    def __init__(self, host: str, why: str) -> None:
        super().__init__(
            f"rank 0 on {host} has failed while it alone read: {why}. No value has changed, and "
            "the run can go on: mend that, and do it again on all ranks"
        )


class CallChanged(ZinfError, RuntimeError):
    """A call would make other collectives than those that all ranks have agreed on for it: a defect
    of zcompile. The rank that finds it raises this, and the others `RankFailed` with its sentence.

    agreed, found  digests of the collectives
    """

    def __init__(self, call: str, collectives: int, agreed: bytes, found: bytes) -> None:
        super().__init__(
            f"{call} would make {collectives} collectives with digest {found.hex()[:8]}, and all "
            f"ranks have agreed on those with digest {agreed.hex()[:8]} for this call; bytes of "
            "one tensor would be taken for those of another, so all ranks end. This is a defect of "
            "zcompile: report it with this line and the config, and start all ranks again from a "
            "checkpoint to go on"
        )


class DiskUnusable(ZinfError, OSError):
    """The directory given as `disk` cannot serve as the disk tier."""

    def __init__(self, path: Path, why: str, todo: str) -> None:
        super().__init__(f"disk={str(path)!r} {why}; {todo}")


class DiskOwned(ZinfError, RuntimeError):
    """Another store holds the directory."""

    HOW_TO_FREE = (
        "give each model a directory of its own, or end that process, or call zcompile.close on "
        "the other model"
    )

    def __init__(self, path: Path, owner: str, todo: str = HOW_TO_FREE) -> None:
        super().__init__(f"disk={str(path)!r} is in use by {owner}; {todo}")


class IOFault(ZinfError, OSError):
    """A read or write of the disk tier failed; nothing was changed behind the caller's back."""

    def __init__(
        self,
        errno: int,
        operation: str,
        file: Path,
        name: str,
        offset: int,
        done: int,
        wanted: int,
        why: str,
    ) -> None:
        super().__init__(
            errno,
            f"{operation} of {name!r} failed: {why} "
            f"({done} of {wanted} bytes at offset {offset} of {file})",
        )
        self.file = file
        self.name = name


class DeviceTooSmall(ZinfError, MemoryError):
    """The device does not have the memory that the budget asks for."""

    def __init__(self, device: str, asked_bytes: int, free_bytes: int) -> None:
        super().__init__(
            f"device_memory asks for {show_size(asked_bytes)} on {device}, which has "
            f"{show_size(free_bytes)} free; lower device_memory or free the device"
        )


class ModelWrapped(ZinfError, TypeError):
    """The model is inside a wrapper that shards or replicates by itself."""

    def __init__(self, wrapper: str) -> None:
        super().__init__(
            f"the model is wrapped in {wrapper}; remove the wrapper and give zcompile.offload the "
            "plain module: placing and sharding parameters is done here. Where a library wraps it, "
            "take what zcompile.integrations has for that library"
        )


class TorchUnsupported(ZinfError, ImportError):
    """The installed torch is outside the range the tests cover."""

    def __init__(self, version: str, tested: str) -> None:
        super().__init__(
            f"torch {version} is installed, zcompile is tested with {tested}: it relies on torch "
            "internals that may differ; install a tested version"
        )


class ParameterChanged(ZinfError, RuntimeError):
    """A tiered parameter is no longer what the store holds for it.

    name  of the parameter; "" for all of the model
    """

    def __init__(self, name: str, why: str, todo: str) -> None:
        what = f"parameter {name!r}" if name else "the model"
        super().__init__(f"{what} {why}; {todo}")


class UpdateBroken(ZinfError, RuntimeError):
    """The update of a parameter failed half-way, when it was computed after its optimizer's step.

    step   number of steps of optimizers before it
    begun  whether it had begun to write; False: something before it failed
    cause  what it failed with, where that was raised by nobody
    """

    def __init__(
        self,
        name: str,
        step: int,
        why: str,
        begun: bool = True,
        cause: BaseException | None = None,
    ) -> None:
        failed = (
            "broke off while it was computed, so that it and its states are neither the old nor "
            f"the new ones: {why}"
            if begun
            else f"was not computed, or not all of it, since what comes before it failed: {why}; "
            "so it and its states are not what the step makes of them, while others are"
        )
        super().__init__(
            f"the update of {name!r} by optimizer step {step} {failed}; "
            "go back to a checkpoint: build model and optimizer again and call zcompile.resume"
        )
        self.name = name
        if cause is not None:
            self.__cause__ = cause


class ValueUnset(ZinfError, RuntimeError):
    """An entry made from a `meta` tensor is read before it was given a value."""

    def __init__(self, name: str) -> None:
        super().__init__(
            f"{name!r} has no value yet: its model was on the meta device when it was offloaded; "
            "zcompile.load(model, path) gives it one from a file, model.load_state_dict(...) from "
            "memory"
        )


class Unsupported(ZinfError, NotImplementedError):
    """Something cannot be done exactly, so it is not done at all.

    A `NotImplementedError` too, on purpose: torch raises that for an op that a kind of tensor does
    not have, and callers that have another way then take it.
    """

    def __init__(self, what: str, todo: str) -> None:
        super().__init__(f"{what}; {todo}")


class CompilerMissing(ZinfError, RuntimeError):
    """Regions were to be compiled by Inductor, and what it compiles with is not there."""

    def __init__(self, device: str, missing: str) -> None:
        super().__init__(
            f"regions='inductor' compiles for the {device} device with {missing}, which this "
            "machine lacks; install it, or give regions='eager', which needs no compiler"
        )


class PassOrder(ZinfError, RuntimeError):
    """A pass was asked to run before the facts it needs hold."""

    def __init__(self, name: str, missing: Iterable[str], order: Iterable[str]) -> None:
        super().__init__(
            f"{name} needs {', '.join(sorted(missing))}, which no earlier pass gives "
            f"(order: {' > '.join(order)})"
        )


class GraphInvalid(ZinfError, RuntimeError):
    """A pass left a graph that breaks a rule; the graph is shown."""

    def __init__(self, after: str, why: str, excerpt: str = "") -> None:
        super().__init__(f"after {after}, {why}" + (f"\n{excerpt}" if excerpt else ""))
        self.why = why


class ScheduleInvalid(ZinfError, RuntimeError):
    """A schedule is not safe to run; the offending instructions are shown."""

    def __init__(self, why: str, excerpt: str = "") -> None:
        super().__init__(f"the schedule is not safe: {why}" + (f"\n{excerpt}" if excerpt else ""))
        self.why = why


class RunUnreadable(ZinfError, ValueError):
    """The inspection commands cannot read a dump."""

    def __init__(self, path: Path, why: str) -> None:
        super().__init__(f"{path} {why}; write one with ZINF_DUMP=DIR or Config(dump=DIR)")


class NotInRun(ZinfError, LookupError):
    """A dump holds no pass, graph, phase or tensor of that name; the nearest ones are offered."""

    def __init__(self, path: Path, what: str, key: str, known: Iterable[str]) -> None:
        known = list(known)
        near = get_close_matches(key, known, n=5, cutoff=0.3)
        hint = f"did you mean {', '.join(near)}?" if near else f"it has {', '.join(known[:8])}"
        super().__init__(
            f"{path} has no {what} {key!r}; {hint}"
            if known
            else f"{path} has no {what} {key!r}, nor any other"
        )
        self.near = tuple(near)


class CheckpointInvalid(ZinfError, ValueError):
    """A file of a checkpoint cannot be what it should be."""

    def __init__(self, path: Path, why: str, todo: str = "copy it again, or use another") -> None:
        super().__init__(f"{path} {why}; {todo}")
        self.path = path


class CheckpointMismatch(ZinfError, RuntimeError):
    """A checkpoint and the model or optimizer that takes it differ; all differences are listed."""

    def __init__(self, where: str, rows: Iterable[str]) -> None:
        rows = list(rows)
        shown = [f"    {row}" for row in rows[:16]]
        if len(rows) > 16:
            shown.append(f"    ... {len(rows) - 16} more")
        super().__init__("\n".join((f"{where} does not fit:", *shown)))
        self.rows = tuple(rows)


class DurableDamaged(ZinfError, OSError):
    """The content of a durable directory is not what was written; nothing was changed."""

    def __init__(self, path: Path, what: str, why: str) -> None:
        self.told = f"{path}: {what} {why}"
        super().__init__(
            f"{self.told}; the files are left as they are: look with "
            f"`zinf disk verify {path.parent}`, or start anew after `zinf disk gc --all "
            f"{path.parent}`"
        )
        self.path = path


class DurableHeld(ZinfError, RuntimeError):
    """A directory holds a commit that nobody resumed, and would lose it."""

    def __init__(self, directory: Path, what: str) -> None:
        super().__init__(
            f"disk={str(directory)!r} {what}: continue it with zcompile.resume({str(directory)!r}, "
            f"model, optimizer) before the first step, or remove it with `zinf disk gc --all "
            f"{directory}`"
        )


class NothingCommitted(ZinfError, FileNotFoundError):
    """There is no commit to resume in a directory."""

    def __init__(self, directory: Path, why: str) -> None:
        super().__init__(f"disk={str(directory)!r} {why}; there is nothing to resume: train on")


class CommitFailed(ZinfError, OSError):
    """A step could not be committed, or it is not known whether it was; no earlier step is lost.

    step    that was to be committed
    last    the step of the commit before; 0 if there was none
    unsure  the disk failed when the commit may have had its name: `resume` finds `step`, or `last`
    """

    def __init__(
        self, directory: Path, step: int, last: int, error: OSError, unsure: bool = False
    ) -> None:
        self.step, self.last, self.outcome_unknown = step, last, unsure
        what = f"step {step}" if step != last else f"what was saved after step {step}"
        told = "may or may not have been committed" if unsure else "was not committed"
        kept = f"step {last} is intact" if last else "nothing was committed before"
        todo = "see to the disk, start again and resume" + (", which tells" if unsure else "")
        super().__init__(
            error.errno,
            f"disk={str(directory)!r}: {what} {told} ({error.strerror or error}); {kept}: {todo}",
        )


class CheckpointUnwritable(ZinfError, OSError):
    """A checkpoint cannot be written where it should be; what stood there still stands."""

    def __init__(self, errno: int, path: Path, why: str, todo: str) -> None:
        super().__init__(errno, f"no checkpoint can be written to {path}: {why}; {todo}")
        self.path = path


Frames = Sequence[FrameSummary]
Failure = Callable[[BaseException], tuple[BaseException, Frames]]
"""Exception that was raised -> the error behind it, and the stack of the code then, innermost
last."""


class UserCodeFailed(ZinfError, RuntimeError):
    """A model, or what makes one, failed by itself while zcompile ran it; `__cause__` says how."""

    def __init__(self, what: str, at: str, error: BaseException, todo: str) -> None:
        why = str(error).strip().partition("\n")[0].rstrip(".")
        told = f"{type(error).__name__}: {why}" if why else type(error).__name__
        super().__init__(f"{what} failed{at}: {told}; {todo}")


def as_raised(error: BaseException) -> tuple[BaseException, Frames]:
    """The `Failure` of code that is run as it stands."""
    return error, traceback.extract_tb(error.__traceback__)


class Running:
    """A context in which any error of code that is not ours becomes a `UserCodeFailed`.

    Nothing is swallowed: the error goes on as the cause. Our errors stay what they are, also where
    they are found behind the one that was raised; any other error that our own code raises is a
    bug, and shows itself.
    """

    def __init__(self, what: str, todo: str, failure: Failure = as_raised) -> None:
        self._what, self._todo, self._failure = what, todo, failure

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if not isinstance(error, Exception) or isinstance(error, ZinfError):
            return
        reason, frames = self._failure(error)
        if isinstance(reason, ZinfError):
            raise reason from error
        if frames and _is_within(frames[-1], "zcompile"):
            return
        raise UserCodeFailed(self._what, _at(frames), reason, self._todo) from error


def _at(frames: Frames) -> str:
    """Place of the innermost frame that is neither torch's nor ours."""
    theirs = [f for f in frames if not _is_within(f, "torch") and not _is_within(f, "zcompile")]
    if not theirs:
        return ""
    frame = theirs[-1]
    line = f" (`{frame.line}`)" if frame.line else ""
    return f" at {frame.filename}:{frame.lineno}{line}"


def _is_within(frame: FrameSummary, package: str) -> bool:
    spec = find_spec(package)
    return (
        spec is not None
        and spec.origin is not None
        and Path(frame.filename).is_relative_to(Path(spec.origin).parent)
    )
