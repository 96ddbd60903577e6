"""A durable directory says in the header of its data file which run it belongs to.

So the directories of two runs are never mixed. Commands that look at a directory without a store
check here whether its files belong together, and give back space that no commit names. Without
torch: such commands do not import it.
"""

import errno
import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from zcompile.errors import DiskUnusable, DurableDamaged
from zcompile.ir.serialize import decode
from zcompile.runtime.durable.index import (
    DATA_NAME,
    INDEX_NAME,
    NEW_INDEX_NAME,
    Index,
    check_extents,
    read_index,
)
from zcompile.runtime.io import sound_json
from zcompile.runtime.io.files import Directory

# --- The header of a data file ---

HEADER_BYTES = 4096
SECTOR_BYTES = 512
"""The least that a disk writes whole."""
MAGIC = "zinf-tier 1"


@dataclass(frozen=True)
class DataHeader:
    """The first block of a data file.

    run        the run that the file belongs to
    number     of its directory, from 0
    of         how many directories the run has
    first      the directory that holds the index
    committed  an index has named this file, so it is never taken for one of a run that died early
    """

    run: str
    number: int
    of: int
    first: str
    committed: bool = False

    def block(self) -> bytes:
        """The bytes of the header.

        The mark of a commit changes no other byte, and lies in the first sector. So a power loss
        that tears the block, which is written again in place, leaves one of both.
        """
        told = {"committed": self.committed, **asdict(self)}
        json_text = json.dumps(told)
        if self.committed:
            json_text = json_text.replace("true", "true ", 1)  # as long as `false`
        text = f"{MAGIC}\n{json_text}\n".encode()
        if len(text) > HEADER_BYTES:
            raise DurableDamaged(Path(self.first), "the name of the directory", "is too long")
        return text.ljust(HEADER_BYTES, b"\0")


def read_header(directory: Directory) -> DataHeader | None:
    """The header of the data file in `directory`; None if there is none. raises DurableDamaged,
    OSError"""
    path = directory.path / DATA_NAME
    block = directory.read(DATA_NAME, HEADER_BYTES)
    if block is None:
        return None
    magic, _, rest = block.partition(b"\n")
    text = rest.partition(b"\n")[0]
    if magic != MAGIC.encode():
        raise DurableDamaged(path, "the data file", "does not begin as one of ours")
    try:
        header = decode(DataHeader, sound_json.loads(text))
        if not (
            0 <= header.number < header.of
            and header.first.startswith("/")
            and "\0" not in header.first
            and header.run.isalnum()
        ):
            raise ValueError(f"file {header.number} of {header.of}, run {header.run!r:.40}")
        return header
    except ValueError as error:
        raise DurableDamaged(
            path, "the data file", f"has a first block that cannot be understood: {error}"
        ) from error


def write_header(directory: Directory, header: DataHeader) -> None:
    """Write the header of the data file, and bring it to the device. raises  OSError"""
    fd = directory.open(DATA_NAME, os.O_WRONLY)
    try:
        directory.system.write_all(fd, header.block())
        directory.system.fsync(fd)
    finally:
        directory.system.close(fd)


def is_unfinished(directory: Directory) -> bool:
    """Whether the run of the data file in `directory` died while it was made.

    Nothing is written to such a file before its header is on the device. A power loss leaves that
    blank, or, where the name of a directory is long, with some of its sectors blank; when it is
    marked as committed, all of them are there. raises  OSError
    """
    block = directory.read(DATA_NAME, HEADER_BYTES + 1)
    if block is None or len(block) > HEADER_BYTES:
        return False
    text = block.rstrip(b"\0")
    if not text:
        return True
    sectors = [text[at : at + SECTOR_BYTES] for at in range(0, len(text), SECTOR_BYTES)]
    first, blank = sectors[0], bytes(SECTOR_BYTES)
    ours = first == blank or first.startswith(f"{MAGIC}\n".encode())
    cut = len(sectors[-1]) == SECTOR_BYTES and not text.endswith(b"}\n")
    torn = cut or blank in sectors
    return len(block) == HEADER_BYTES and ours and torn and b'"committed": true' not in first


def data_bytes(directory: Directory) -> int:
    """Size of the data file. raises DurableDamaged if there is none"""
    found = directory.stat(DATA_NAME)
    if found is None:
        raise DurableDamaged(
            directory.path / DATA_NAME, "the data file", "is gone; the index names it"
        )
    return found.st_size


# --- Which files belong together ---


def check_data(index: Index, home: Directory, directories: Sequence[Directory]) -> None:
    """Check that the data files are those that the index names, and hold all that it says.

    directories  or the first of them: only these are looked at
    raises       DurableDamaged, DiskUnusable
    """
    for number, other in enumerate(directories):
        header = read_header(other)
        if header is None or (header.run, header.number) != (index.run, number):
            raise DurableDamaged(
                other.path / DATA_NAME,
                "the data file",
                f"is gone, or of another run than {home.path / INDEX_NAME}",
            )
        if number > 0:
            check_original(home, index, number, other)
    if len(directories) == len(index.directories):
        sizes = [data_bytes(directory) for directory in directories]
        check_extents(index, home.path / INDEX_NAME, sizes)


def check_original(home: Directory, index: Index, number: int, other: Directory) -> None:
    """Check that data file `number` of the commit in `home` is its own, in `other`.

    raises  DiskUnusable, if `home` is a copy, and `other` is what the original goes on with
    """
    if (original := _original_of(home, index, number, other)) is not None:
        raise DiskUnusable(
            home.path,
            f"is a copy of {original}, and {other.path / DATA_NAME} is a file of the original",
            f"copy {other.path} too, and give the copies as disk, in this order",
        )


def is_own(home: Directory, index: Index, number: int, other: Directory) -> bool:
    """Whether the data file in `other` is file `number` of the commit in `home`, and no other's."""
    try:
        header = read_header(other)
    except DurableDamaged:
        return False
    same = header is not None and (header.run, header.number) == (index.run, number)
    return same and _original_of(home, index, number, other) is None


def _original_of(home: Directory, index: Index, number: int, other: Directory) -> Path | None:
    """The directory that `home` is a copy of, if that has a commit which names `other`; else
    None."""
    try:
        header = read_header(other)
        if header is None or header.run != index.run or home.is_at(Path(header.first)):
            return None
        with Directory(Path(header.first), home.system) as first:
            found = read_index(first)
    except OSError:  # there is no sound commit any more: moved, or removed
        return None
    named = (
        found is not None
        and found[0].run == index.run
        and _names_directory(found[0], number, other)
    )
    return Path(header.first) if named else None


def _names_directory(index: Index, number: int, directory: Directory) -> bool:
    """Whether `directory` is number `number` of the index."""
    return number < len(index.directories) and directory.is_at(Path(index.directories[number]))


def committed_elsewhere(directory: Directory) -> DataHeader | None:
    """The header of a data file that a commit in another directory names, or None.

    raises  DiskUnusable, OSError
    """
    try:
        header = read_header(directory)
    except DurableDamaged:
        return None
    if header is None or header.number == 0:
        return None
    try:
        with Directory(Path(header.first), directory.system) as first:
            index = read_index(first)
    except (DurableDamaged, FileNotFoundError, NotADirectoryError):
        return None
    except PermissionError as error:
        raise DiskUnusable(
            directory.path,
            f"holds file {header.number} of a run in {header.first}, which cannot be looked into "
            f"({error.strerror})",
            "give a directory that is not of another run",
        ) from error
    return header if index is not None and index[0].run == header.run else None


def index_gone(directory: Directory, header: DataHeader) -> DurableDamaged:
    """The error for a directory that was given; a copy may name another one, which may be sound."""
    data = directory.path / DATA_NAME
    if header.number == 0:
        return DurableDamaged(
            directory.path / INDEX_NAME, "the index", f"is gone; {data} belongs to a commit"
        )
    return DurableDamaged(
        data,
        f"the commit in {header.first}",
        f"is gone or damaged, and this is file {header.number} of it",
    )


# --- Space that no commit names ---


def free_ranges(index: Index, number: int, size: int) -> list[tuple[int, int]]:
    """Ranges (begin, end) of a data file of `size` bytes that the commit does not name, ordered."""
    taken = sorted((t.offset, t.offset + t.room) for t in index.tensors if t.file == number)
    free, at = [], HEADER_BYTES
    for begin, end in [*taken, (size, size)]:
        if at < begin:
            free.append((at, begin))
        at = max(at, end)
    return free


def trim(index: Index, places: Sequence[Directory]) -> int:
    """Give free space of the data files in `places` back; returns the bytes. raises OSError"""
    # The commit before this one must not come back when what it named is gone.
    places[0].sync()
    return sum(_trim(index, number, place) for number, place in enumerate(places))


def _trim(index: Index, number: int, directory: Directory) -> int:
    """Punch holes into one data file, and cut it off where nothing follows."""
    system = directory.system
    fd = directory.open(DATA_NAME, os.O_RDWR)
    try:
        before = system.fstat(fd)
        size = before.st_size
        for begin, end in free_ranges(index, number, size):
            if end == size:
                system.truncate(fd, begin)
                continue
            try:
                system.punch(fd, begin, end - begin)
            except OSError as error:
                if error.errno != errno.EOPNOTSUPP:  # a filesystem that knows no holes
                    raise
        system.fsync(fd)
        return (before.st_blocks - system.fstat(fd).st_blocks) * 512
    finally:
        system.close(fd)


def remove_all(directory: Directory) -> int:
    """Remove the commit and then the data file; returns the bytes they took."""
    freed = 0
    for name in (INDEX_NAME, NEW_INDEX_NAME, DATA_NAME):
        if (found := directory.stat(name)) is not None:
            freed += found.st_blocks * 512
            directory.unlink(name)
            directory.sync()
    return freed
