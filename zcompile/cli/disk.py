"""`zinf disk ls|verify|gc DIR`: what a directory of the disk tier holds, whether it is sound, and
what of it nobody needs. Without torch: only the files are looked at.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from zcompile.cli.answer import Answer
from zcompile.errors import DiskUnusable, DurableDamaged, DurableHeld
from zcompile.runtime.claim import Claim, owner_of, reclaim, scratch_files
from zcompile.runtime.data_check import DataReader
from zcompile.runtime.data_header import data_bytes, read_header
from zcompile.runtime.index import (
    DATA_NAME,
    INDEX_NAME,
    Index,
    Resting,
    Small,
    checked,
    read_index,
)
from zcompile.runtime.reclaim import (
    check_original,
    committed_elsewhere,
    free_ranges,
    index_gone,
    own_directories,
    remove_all,
    trim,
)
from zcompile.units import show_size


@dataclass(frozen=True)
class Tensor:
    """A tensor of the last commit.

    directory, offset  where in its data file it lies; None: small, in the index itself
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
    """step, run, written_at: of the last commit; None if there is none

    owner       who uses the directory now
    file_bytes, free_bytes   of the data files: their size, and what in them no tensor takes
    scratch     files of stores that are not durable
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
    """step of the commit; bytes that were read; a sentence for each damage"""

    directory: str
    step: int | None
    read_bytes: int
    damages: tuple[str, ...]


@dataclass(frozen=True)
class Freed:
    directory: str
    freed_bytes: int
    removed: tuple[str, ...]


def ls(directory: Path) -> Answer:
    """raises  DiskUnusable, DurableDamaged"""
    _check(directory)
    index = _index(directory)
    owner, scratch = owner_of(directory), tuple(path.name for path in scratch_files(directory))
    if index is None:
        listing = Listing(str(directory), owner, None, None, None, 0, 0, scratch, ())
        return Answer(_listed(listing), listing)
    places = _directories(index, directory)
    sizes = [data_bytes(place) for place in places]
    free = sum(end - begin for number, size in enumerate(sizes)
               for begin, end in free_ranges(index, number, size))  # fmt: skip
    tensors = (*(_row(tensor, places) for tensor in index.tensors),
               *(_small(small, index, directory) for small in index.smalls))  # fmt: skip
    listing = Listing(str(directory), owner, index.step, index.run, index.written_at, sum(sizes),
                      free, scratch, tensors)  # fmt: skip
    return Answer(_listed(listing), listing)


def verify(directory: Path) -> Answer:
    """raises  DiskUnusable, DiskOwned, DurableDamaged"""
    _check(directory)
    with _claimed([directory]):
        index = _index(directory)
        if index is None:
            return _unverified(directory)
        places = _directories(index, directory)
        with _claimed(places[1:]):
            read, damages = _verified(index, directory, places)
    verdict = Verdict(str(directory), index.step, read, damages)
    count = len(index.tensors) + len(index.smalls)
    sound = f"step {index.step}, {count} tensors, {show_size(read)} read"
    text = "\n".join((f"{directory}: {sound}: {'damaged' if damages else 'sound'}", *damages))
    return Answer(text, verdict, code=1 if damages else 0)


def gc(directory: Path, everything: bool) -> Answer:
    """raises  DiskUnusable, DiskOwned, DurableDamaged, DurableHeld"""
    _check(directory)
    with _claimed([directory]):
        index = _readable(directory) if everything else _index(directory)
        places = _directories(index, directory) if index else [directory]
        if index is not None and everything:
            places = own_directories(directory, index, places)
        with _claimed(places[1:]):
            if not everything:  # nothing is touched where something is wrong
                _check_sound(index, directory, places)
            removed = [path.name for place in places for path in scratch_files(place)]
            freed = sum(reclaim(place) for place in places)
            if index is not None and not everything:
                freed += sum(trim(index, number, place) for number, place in enumerate(places))
            if index is None or everything:
                removed += [name for place in places for name in (INDEX_NAME, DATA_NAME)
                            if (place / name).exists()]  # fmt: skip
                freed += sum(remove_all(place) for place in places)
    answer = Freed(str(directory), freed, tuple(removed))
    text = f"{directory}: {show_size(freed)} freed"
    return Answer(text + (f", removed {', '.join(removed)}" if removed else ""), answer)


def _verified(index: Index, directory: Path,
              places: Sequence[Path]) -> tuple[int, tuple[str, ...]]:  # fmt: skip
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


def _unverified(directory: Path) -> Answer:
    """There is no index. raises DurableDamaged, if there has to be one"""
    other = committed_elsewhere(directory)
    if other is None:
        _check_uncommitted(directory)
        told = "no commit, nothing to verify"
    else:
        told = f"a file of the run in {other.first}: `zinf disk verify {other.first}` reads it"
    return Answer(f"{directory}: {told}", Verdict(str(directory), None, 0, ()))


def _check_sound(index: Index | None, directory: Path, places: Sequence[Path]) -> None:
    """All but the checksums of the data. raises DurableHeld, DurableDamaged, DiskUnusable"""
    if index is None:
        _check_uncommitted(directory)
        return
    _check_headers(index, directory, places)
    checked(index, directory / INDEX_NAME, [data_bytes(place) for place in places])


def _check_uncommitted(directory: Path) -> None:
    """raises  DurableHeld, DurableDamaged, if the data file belongs to a commit"""
    if (header := committed_elsewhere(directory)) is not None:
        raise DurableHeld(directory, f"holds a file of the run in {header.first}")
    found = read_header(directory)
    if found is not None and found.committed:
        raise index_gone(directory, found)


def _check_headers(index: Index, directory: Path, places: Sequence[Path]) -> None:
    for number, place in enumerate(places):
        header = read_header(place)
        if number > 0:
            check_original(directory, index, number, place)
        if header is None or (header.run, header.number) != (index.run, number):
            raise DurableDamaged(place / DATA_NAME, "the data file", "is gone, or of another run "
                                 f"than {directory / INDEX_NAME}")  # fmt: skip


def _directories(index: Index, directory: Path) -> list[Path]:
    """The first may have been moved since the commit; it is where we found the index."""
    return [directory, *map(Path, index.directories[1:])]


def _index(directory: Path) -> Index | None:
    found = read_index(directory)
    return None if found is None else found[0]


def _readable(directory: Path) -> Index | None:
    try:
        return _index(directory)
    except DurableDamaged:
        return None


def _check(directory: Path) -> None:
    if not directory.is_dir():
        raise DiskUnusable(directory, "is not a directory", "give one that a model used as disk")


@contextmanager
def _claimed(directories: Sequence[Path]) -> Iterator[None]:
    with ExitStack() as stack:
        for directory in directories:
            _check(directory)
            stack.callback(Claim(directory, reclaiming=False).release)
        yield


def _row(tensor: Resting, places: Sequence[Path]) -> Tensor:
    return Tensor(tensor.name, tensor.dtype, tensor.size, tensor.nbytes, str(places[tensor.file]),
                  tensor.offset, tensor.step)  # fmt: skip


def _small(small: Small, index: Index, directory: Path) -> Tensor:
    return Tensor(small.name, small.dtype, small.size, small.end - small.begin, str(directory),
                  None, index.step)  # fmt: skip


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
        lines.append(f"{show_size(tensor.nbytes):>10}  step {tensor.step:<6} {where:>14}  "
                     f"{tensor.name}  {shape}")  # fmt: skip
    return "\n".join(lines)
