"""Lists, verifies and cleans a directory of the disk tier: `zinf disk ls|verify|gc DIR`.

Without torch: only the files are looked at.
"""

import errno
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import Concatenate, ParamSpec

from zcompile.checkpoint.directory import STATE_FILE
from zcompile.cli.format import Answer
from zcompile.errors import DiskOwned, DiskUnusable, DurableDamaged, DurableHeld, ZinfError
from zcompile.ir.units import show_size
from zcompile.runtime.durable.check import DataReader
from zcompile.runtime.durable.directory import (
    check_data,
    committed_elsewhere,
    data_bytes,
    free_ranges,
    index_gone,
    is_own,
    is_unfinished,
    read_header,
    remove_all,
    trim,
)
from zcompile.runtime.durable.index import (
    DATA_NAME,
    INDEX_NAME,
    Index,
    SmallTensor,
    StoredTensor,
    read_index,
)
from zcompile.runtime.durable.worlds import given_for, prepared_in
from zcompile.runtime.io.files import (
    Directory,
    close_or_warn,
    is_directory,
    open_directory,
    stat_through_links,
    unusable_error,
)
from zcompile.runtime.io.system_calls import KERNEL, SystemCalls
from zcompile.runtime.tiers.directory_lock import (
    LOCK_NAME,
    TIER_FILE,
    DirectoryLock,
    holder_of,
    remove_leftovers,
    scratch_files,
)

P = ParamSpec("P")
_READ_ONLY = (errno.EROFS, errno.EACCES, errno.EPERM)


@dataclass(frozen=True)
class Tensor:
    """A tensor of the last commit.

    directory, offset  of its bytes in its data file; None: small, in the index itself
    step               at which its bytes were written
    """

    name: str
    dtype: str
    size: tuple[int, ...]
    nbytes: int
    directory: str
    offset: int | None
    step: int


@dataclass(frozen=True)
class Listing:
    """The content of a directory.

    step, run, written_at   of the last commit; None if there is none
    owner                   who uses the directory now
    file_bytes, free_bytes  of the data files: their size, and bytes of them that no tensor takes
    scratch                 files of stores that are not durable
    """

    directory: str
    owner: str | None
    step: int | None
    run: str | None
    written_at: str | None
    file_bytes: int
    free_bytes: int
    scratch: tuple[str, ...]
    tensors: tuple[Tensor, ...]


@dataclass(frozen=True)
class Verdict:
    """The result of a verification: step of the commit, bytes that were read, a sentence for each
    damage."""

    directory: str
    step: int | None
    read_bytes: int
    damages: tuple[str, ...]


@dataclass(frozen=True)
class Freed:
    """Bytes and files that were freed."""

    directory: str
    freed_bytes: int
    removed: tuple[str, ...]


def _disk_errors(
    verb: Callable[Concatenate[Path, P], Answer],
) -> Callable[Concatenate[Path, P], Answer]:
    """What the system refuses is an error of the directory. raises DiskUnusable"""

    @wraps(verb)
    def told(path: Path, /, *args: P.args, **kwargs: P.kwargs) -> Answer:
        try:
            return verb(path, *args, **kwargs)
        except ZinfError:
            raise
        except OSError as error:
            raise unusable_error(path, error) from error

    return told


@_disk_errors
def ls(path: Path, system: SystemCalls = KERNEL) -> Answer:
    """List the tensors of the last commit.

    raises  DiskUnusable, DurableDamaged
    """
    with _opened([path], system) as (directory,):
        index = _index(directory)
        owner, scratch = holder_of(directory), tuple(scratch_files(directory))
        if index is None:
            listing = Listing(str(path), owner, None, None, None, 0, 0, scratch, ())
            return Answer(_listed(listing), listing)
        with _opened(_others(index), system) as others:
            sizes = [data_bytes(place) for place in (directory, *others)]
    places = [path, *_others(index)]
    free = sum(
        end - begin
        for number, size in enumerate(sizes)
        for begin, end in free_ranges(index, number, size)
    )
    tensors = (
        *(_row(tensor, places) for tensor in index.tensors),
        *(_small(small, index, path) for small in index.smalls),
    )
    listing = Listing(
        str(path),
        owner,
        index.step,
        index.run,
        index.written_at,
        sum(sizes),
        free,
        scratch,
        tensors,
    )
    return Answer(_listed(listing), listing)


@_disk_errors
def verify(path: Path, system: SystemCalls = KERNEL) -> Answer:
    """Read all of the last commit and compare checksums.

    raises  DiskUnusable, DiskOwned, DurableDamaged
    """
    with _claimed([path], system, reading=True) as (directory,):
        index = _index(directory)
        if index is None:
            return _unverified(directory)
        _check_named(index, directory)
        with _claimed(_others(index), system, reading=True) as others:
            read, damages = _verified(index, directory, [directory, *others])
        if damages and _index(directory) != index:  # it may not be ours alone
            raise DiskUnusable(path, "was written to while it was read", "verify it again")
    verdict = Verdict(str(path), index.step, read, damages)
    count = len(index.tensors) + len(index.smalls)
    sound = f"step {index.step}, {count} tensors, {show_size(read)} read"
    text = "\n".join((f"{path}: {sound}: {'damaged' if damages else 'sound'}", *damages))
    return Answer(text, verdict, code=1 if damages else 0)


@_disk_errors
def gc(path: Path, everything: bool, system: SystemCalls = KERNEL) -> Answer:
    """Free what no commit needs.

    raises  DiskUnusable, DiskOwned, DurableDamaged, DurableHeld
    """
    with _claimed([path], system) as (directory,):
        index = _readable(directory) if everything else _index(directory)
        if not everything and (prepared := prepared_in(directory)) is not None:
            raise DurableHeld(
                given_for(path),
                f"has step {prepared.step} prepared in {path.name}, which other ranks may have "
                "committed",
            )
        named = _others(index) if index else []
        if index is not None and everything:
            named = _own(index, directory, named)
        elif index is not None:
            _check_named(index, directory)
        with _claimed(named, system) as others:
            places = [directory, *others]
            if not everything:  # nothing is touched where something is wrong
                _check_sound(index, directory, places)
            removed = [name for place in places for name in scratch_files(place)]
            freed = sum(remove_leftovers(place) for place in places)
            if index is not None and not everything:
                freed += trim(index, places)
            if index is None or everything:
                removed += [
                    name
                    for place in places
                    for name in (INDEX_NAME, DATA_NAME)
                    if place.stat(name) is not None
                ]
                freed += sum(remove_all(place) for place in places)
    answer = Freed(str(path), freed, tuple(removed))
    text = f"{path}: {show_size(freed)} freed"
    return Answer(text + (f", removed {', '.join(removed)}" if removed else ""), answer)


def _verified(
    index: Index, directory: Directory, places: Sequence[Directory]
) -> tuple[int, tuple[str, ...]]:
    _check_sound(index, directory, places)
    read, damages = 0, []
    with DataReader(places) as data:
        for tensor in index.tensors:
            for piece in tensor.pieces:
                read += piece.end - piece.begin
                try:
                    data.check(tensor, piece)
                except DurableDamaged as error:
                    damages.append(error.told)
    return read, tuple(damages)


def _unverified(directory: Directory) -> Answer:
    """The verdict on a directory without an index.

    raises  DurableDamaged, if there has to be one
    """
    other = committed_elsewhere(directory)
    if other is None:
        _check_uncommitted(directory)
        foreign = _foreign_in(directory)
        told = f"no commit, nothing to verify{foreign and ': ' + foreign}"
    else:
        foreign = ""
        told = f"a file of the run in {other.first}: `zinf disk verify {other.first}` reads it"
    verdict = Verdict(str(directory.path), None, 0, ())
    return Answer(f"{directory.path}: {told}", verdict, code=1 if foreign else 0)


def _foreign_in(directory: Directory) -> str:
    """The content of a directory that no model used as disk; "" if one did.

    raises  OSError
    """
    names = [name for name in directory.names() if name != LOCK_NAME]
    if DATA_NAME in names or any(map(TIER_FILE.match, names)):
        return ""
    if STATE_FILE in names:
        return (
            "it is a checkpoint that zcompile.save wrote, which has no checksums; "
            "zcompile.resume finds what is missing or cut short"
        )
    return f"it holds {_shown(names[0])}, and nothing of a run" if names else "it is empty"


def _check_sound(index: Index | None, directory: Directory, places: Sequence[Directory]) -> None:
    """Check all but the checksums of the data.

    raises  DurableHeld, DurableDamaged, DiskUnusable
    """
    if index is None:
        _check_uncommitted(directory)
        return
    check_data(index, directory, places)


def _check_uncommitted(directory: Directory) -> None:
    """Refuse a data file that belongs to a commit.

    raises  DurableHeld, DurableDamaged
    """
    if is_unfinished(directory):
        return
    if (header := committed_elsewhere(directory)) is not None:
        raise DurableHeld(directory.path, f"holds a file of the run in {header.first}")
    found = read_header(directory)
    if found is not None and found.committed:
        raise index_gone(directory, found)


def _check_named(index: Index, directory: Directory) -> None:
    """Check that the directories that the index names are its own, before a lock is made there.

    raises  DiskUnusable, DurableDamaged
    """
    with _opened(_others(index), directory.system) as others:
        check_data(index, directory, [directory, *others])


def _others(index: Index) -> list[Path]:
    """The directories of an index without the first, which may have been moved since the commit."""
    return [Path(name) for name in index.directories[1:]]


def _own(index: Index, directory: Directory, others: Sequence[Path]) -> list[Path]:
    """Those of `others` that hold data of this commit and of no other; some may be gone."""
    there = [path for path in others if is_directory(stat_through_links(directory.system, path))]
    with _opened(there, directory.system) as found:
        numbers = {path: number for number, path in enumerate(others, 1)}
        return [o.path for o in found if is_own(directory, index, numbers[o.path], o)]


def _index(directory: Directory) -> Index | None:
    found = read_index(directory)
    return None if found is None else found[0]


def _readable(directory: Directory) -> Index | None:
    try:
        return _index(directory)
    except DurableDamaged:
        return None


def _open(path: Path, system: SystemCalls) -> Directory:
    """raises  DiskUnusable"""
    try:
        return open_directory(path, system)
    except DiskUnusable as error:
        if isinstance(error.__cause__, FileNotFoundError | NotADirectoryError):
            raise DiskUnusable(
                path, "is not a directory", "give one that a model used as disk"
            ) from error.__cause__
        raise


@contextmanager
def _opened(paths: Sequence[Path], system: SystemCalls) -> Iterator[list[Directory]]:
    with ExitStack() as stack:
        yield [stack.enter_context(_open(path, system)) for path in paths]


@contextmanager
def _claimed(
    paths: Sequence[Path], system: SystemCalls, reading: bool = False
) -> Iterator[list[Directory]]:
    """Lock directories.

    reading  where nothing can be made, it is enough that nobody else holds the lock
    """
    with _opened(paths, system) as directories, ExitStack() as stack:
        for directory in directories:
            try:
                stack.callback(
                    close_or_warn,
                    directory.path,
                    DirectoryLock(directory, reclaiming=False).release,
                )
            except DiskUnusable as error:
                why = error.__cause__
                if not reading or not isinstance(why, OSError) or why.errno not in _READ_ONLY:
                    raise
                if (owner := holder_of(directory)) is not None:
                    raise DiskOwned(directory.path, owner) from why
        yield directories


def _row(tensor: StoredTensor, places: Sequence[Path]) -> Tensor:
    return Tensor(
        tensor.name,
        tensor.dtype,
        tensor.size,
        tensor.nbytes,
        str(places[tensor.file]),
        tensor.offset,
        tensor.step,
    )


def _small(small: SmallTensor, index: Index, directory: Path) -> Tensor:
    return Tensor(
        small.name,
        small.dtype,
        small.size,
        small.end - small.begin,
        str(directory),
        None,
        index.step,
    )


def _listed(listing: Listing) -> str:
    state = f"; in use by {listing.owner}" if listing.owner else ""
    lines = [f"{listing.directory}: no commit{state}"]
    if listing.step is not None:
        nbytes = sum(tensor.nbytes for tensor in listing.tensors)
        lines = [
            f"{listing.directory}: step {listing.step} of run {listing.run}, committed at "
            f"{listing.written_at}{state}",
            f"{len(listing.tensors)} tensors, {show_size(nbytes)}; data files "
            f"{show_size(listing.file_bytes)}, of which {show_size(listing.free_bytes)} are free",
        ]
    lines += [f"scratch: {name}" for name in listing.scratch]
    several = len({tensor.directory for tensor in listing.tensors}) > 1
    for tensor in listing.tensors:
        shape = f"{tensor.dtype}{list(tensor.size)}"
        where = "index" if tensor.offset is None else str(tensor.offset)
        where = f"{tensor.directory}:{where}" if several else where
        lines.append(
            f"{show_size(tensor.nbytes):>10}  step {tensor.step:<6} {where:>14}  "
            f"{_shown(tensor.name)}  {shape}"
        )
    return "\n".join(lines)


def _shown(name: str) -> str:
    """A name for a terminal, which obeys characters that cannot be printed."""
    return name if name.isprintable() else ascii(name)
