"""The data files of a durable directory, or of several: made new, or found with the last commit.

A file outlives its process once a commit names it. Files without a commit, of a run that died
before its first one, are removed when the next one opens the directory.

The first block of a durable data file: whose it is, so that two runs are never mixed.

Space that no commit names goes back to the filesystem; or everything does. Without a store.
"""

import errno
import json
import logging
import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from zcompile.errors import DiskUnusable, DurableDamaged, DurableHeld
from zcompile.ir.serialize import decode
from zcompile.runtime.durable.index import (
    DATA_NAME,
    INDEX_NAME,
    NEW_INDEX_NAME,
    Index,
    checked,
    lies_beside,
    read_index,
    switch_index,
    write_beside,
)
from zcompile.runtime.io import sound_json
from zcompile.runtime.io.files import Directory
from zcompile.runtime.tiers.disk import TierFile

HEADER_BYTES = 4096
SECTOR_BYTES = 512
"""What a disk writes whole, at least."""
MAGIC = "zinf-tier 1"


@dataclass(frozen=True)
class DataHeader:
    """run    that the file belongs to
    number    of its directory, from 0
    of        how many directories the run has
    first     the directory that holds the index
    committed  an index has named this file, so it is never taken for one of a run that died early
    """

    run: str
    number: int
    of: int
    first: str
    committed: bool = False

    def block(self) -> bytes:
        """The mark of a commit changes no other byte, and lies in the first sector.

        So a power loss that tears the block, which is written again in place, leaves one of both.
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
    """Of the data file in `directory`; None if there is none. raises DurableDamaged, OSError"""
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


def write_header(directory: Directory, header: DataHeader) -> None:
    """raises  OSError"""
    fd = directory.open(DATA_NAME, os.O_WRONLY)
    try:
        directory.system.write_all(fd, header.block())
        directory.system.fsync(fd)
    finally:
        directory.system.close(fd)


def data_bytes(directory: Directory) -> int:
    """Size of the data file. raises DurableDamaged if there is none"""
    found = directory.stat(DATA_NAME)
    if found is None:
        raise DurableDamaged(
            directory.path / DATA_NAME, "the data file", "is gone; the index names it"
        )
    return found.st_size


def free_ranges(index: Index, number: int, size: int) -> list[tuple[int, int]]:
    """What of a data file of `size` bytes the commit does not name: (begin, end), ordered."""
    taken = sorted((t.offset, t.offset + t.room) for t in index.tensors if t.file == number)
    free, at = [], HEADER_BYTES
    for begin, end in [*taken, (size, size)]:
        if at < begin:
            free.append((at, begin))
        at = max(at, end)
    return free


def trim(index: Index, places: Sequence[Directory]) -> int:
    """Give free space of the data files in `places` back; the bytes. raises OSError"""
    # The commit before this one must not come back when what it named is gone.
    places[0].sync()
    return sum(_trim(index, number, place) for number, place in enumerate(places))


def _trim(index: Index, number: int, directory: Directory) -> int:
    """What is at the end is cut off."""
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
    """No commit and no data file any more; the bytes they took. The commit goes first."""
    freed = 0
    for name in (INDEX_NAME, NEW_INDEX_NAME, DATA_NAME):
        if (found := directory.stat(name)) is not None:
            freed += found.st_blocks * 512
            directory.unlink(name)
            directory.sync()
    return freed


def committed_elsewhere(directory: Directory) -> DataHeader | None:
    """The header of a data file that a commit in another directory names.

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


def check_data(index: Index, home: Directory, directories: Sequence[Directory]) -> None:
    """Whether the data files are those that the index names, and hold all that it says.

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
        checked(index, home.path / INDEX_NAME, sizes)


def check_original(home: Directory, index: Index, number: int, other: Directory) -> None:
    """Whether data file `number` of the commit in `home` is its own, in `other`.

    raises  DiskUnusable, if `home` is a copy, and `other` is what the original goes on with
    """
    if (original := _original(home, index, number, other)) is not None:
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
    return same and _original(home, index, number, other) is None


def _original(home: Directory, index: Index, number: int, other: Directory) -> Path | None:
    """The directory that `home` is a copy of, if that has a commit which names `other`."""
    try:
        header = read_header(other)
        if header is None or header.run != index.run or home.is_at(Path(header.first)):
            return None
        with Directory(Path(header.first), home.system) as first:
            found = read_index(first)
    except OSError:  # there is no sound commit any more: moved, or removed
        return None
    named = found is not None and found[0].run == index.run and _names(found[0], number, other)
    return Path(header.first) if named else None


def _names(index: Index, number: int, directory: Directory) -> bool:
    return number < len(index.directories) and directory.is_at(Path(index.directories[number]))


logger = logging.getLogger("zcompile.runtime.durable.files")


class DurableFile(TierFile):
    """`zinf.tier` in a directory; stays after `close` if a commit names it.

    found   it is there already, with what a commit names
    raises  DiskUnusable
    """

    def __init__(self, directory: Directory, header: DataHeader, found: bool) -> None:
        self.keep = found
        self.new = 0 if found else os.O_CREAT | os.O_EXCL
        super().__init__(directory, DATA_NAME)
        if found:
            unit, size = self.extents.alignment, self._size()
            with suppress(OSError):  # `zinf disk gc` made holes; where they cannot be filled now,
                self.system.allocate(self._fd, 0, size)  # the write that needs them will say so
            self.extents.grow(size // unit * unit)
        else:
            self._begin(header)
        began = self.extents.take_at(0, HEADER_BYTES)
        assert began, "a data file begins with its header"

    def _size(self) -> int:
        try:
            return self.system.fstat(self._fd).st_size
        except OSError:
            self.close()  # whoever asked for it never gets it
            raise

    def sync(self) -> None:
        """What was written is on the device. raises OSError"""
        self.system.fdatasync(self._fd)

    def _begin(self, header: DataHeader) -> None:
        try:
            write_header(self.directory, header)
        except DiskUnusable:
            self.close()
            raise
        except OSError as error:
            self.close()
            raise DiskUnusable(
                self.directory.path,
                f"takes no files ({error.strerror or error})",
                "free space on it or give another directory",
            ) from error
        self.extents.grow(HEADER_BYTES)

    def close(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            try:
                self.system.close(fd)
            finally:
                if not self.keep:
                    self.directory.unlink(self.name)


class DurableFiles:
    """The data files of one run over the directories `paths`; claimed when `open` is called.

    directories  those that were opened
    named  the directories, as files name them to others
    index, smalls  the last commit and the bytes of its small tensors; None if there was none
    unsure  of the last `switch`: it raised, and may have done what it was to do
    """

    def __init__(self, paths: Sequence[Path]) -> None:
        self.directories: list[Directory] = []
        self.named = tuple(str(path.absolute()) for path in paths)
        self.index: Index | None = None
        self.smalls = b""
        self.run = os.urandom(8).hex()
        self.files: list[DurableFile] = []
        self.unsure = False
        self._marked = False

    @property
    def home(self) -> Directory:
        """The directory that holds the index."""
        return self.directories[0]

    def open(self, directory: Directory) -> DurableFile:
        """The next file, in the order of the directories.

        raises  DurableDamaged, DurableHeld, DiskUnusable
        """
        number = len(self.files)
        self.directories.append(directory)
        if number == 0:
            self._find_index()
        header = self._header(number, committed=False)
        if self.index is None:
            self._remove_uncommitted(directory)
        else:
            self._check_header(directory, header)
            if number > 0:
                check_original(self.home, self.index, number, directory)
        file = DurableFile(directory, header, found=self.index is not None)
        self.files.append(file)
        if number == len(self.named) - 1 and self.index is not None:
            try:
                self._reserve(self.index)
            except OSError:  # DurableDamaged is one
                file.close()  # whoever asked for it never gets it
                raise
        return file

    def sync(self) -> None:
        for file in self.files:
            file.sync()

    def switch(self, content: bytes) -> None:
        """`content` is the last commit from here on.

        raises  OSError; then it is that (see `unsure`), or still the one before, and the files of
                both are kept
        """
        self.unsure = False
        if not self.files[0].keep:
            for directory in self.directories:
                directory.sync()  # the names of the data files
        write_beside(self.home, content)
        self.unsure = True
        try:
            switch_index(self.home)
        except BaseException:  # it may have been interrupted, too
            self.unsure = not self._lies_beside()
            raise
        finally:
            named = self._is_named()
            for file in self.files:
                file.keep = file.keep or named
        if not self._marked:
            for number, file in enumerate(self.files):
                write_header(file.directory, self._header(number, committed=True))
        self._marked, self.unsure = True, False

    def _is_named(self) -> bool:
        """Whether there is an index, or may be: what it names is not to be removed."""
        try:
            return self.home.stat(INDEX_NAME) is not None
        except OSError:
            return True

    def _lies_beside(self) -> bool:
        """Whether the rename was certainly not made."""
        try:
            return lies_beside(self.home)
        except OSError:
            return False

    def _header(self, number: int, committed: bool) -> DataHeader:
        return DataHeader(self.run, number, len(self.named), self.named[0], committed)

    def _find_index(self) -> None:
        self.home.unlink(NEW_INDEX_NAME)  # a commit that did not happen
        # A run that was killed within a commit may not have come to this; were the one before it to
        # come back, what we write from here on would lie where that has its data.
        self.home.sync()
        found = read_index(self.home)
        if found is None:
            return
        self.index, self.smalls = found
        if len(self.index.directories) != len(self.named):
            raise DurableHeld(
                self.home.path,
                f"holds step {self.index.step} of a run over "
                f"{len(self.index.directories)} directories "
                f"({', '.join(self.index.directories)}), and "
                f"{len(self.named)} are given",
            )
        self.run = self.index.run

    def _check_header(self, directory: Directory, wanted: DataHeader) -> None:
        found = read_header(directory)
        if found is None:
            raise DurableDamaged(
                directory.path / DATA_NAME,
                "the data file",
                f"is gone; {self.home.path / INDEX_NAME} names it",
            )
        if (found.run, found.number) != (wanted.run, wanted.number):
            raise DurableDamaged(
                directory.path / DATA_NAME,
                "the data file",
                f"is file {found.number} of run {found.run}, and not file {wanted.number} of run "
                f"{wanted.run} that the index names",
            )

    def _remove_uncommitted(self, directory: Directory) -> None:
        """What lies there is of no use, or it is of another run, which is refused."""
        if directory is not self.home and (other := read_index(directory)) is not None:
            raise DurableHeld(directory.path, f"holds step {other[0].step} of another run")
        if is_unfinished(directory):
            directory.unlink(DATA_NAME)
            return
        found = read_header(directory)
        if found is None:
            return
        if committed_elsewhere(directory) is not None:
            raise DurableHeld(
                directory.path,
                f"holds file {found.number} of the run that is committed in {found.first}, which "
                "has to be given first",
            )
        if found.committed:
            raise index_gone(directory, found)
        logger.warning(
            "%s: a run ended before its first commit; what it kept there is lost, %s is removed",
            directory.path,
            DATA_NAME,
        )
        directory.unlink(DATA_NAME)

    def _reserve(self, index: Index) -> None:
        checked(index, self.home.path / INDEX_NAME, [data_bytes(d) for d in self.directories])
        for tensor in index.tensors:
            if not self.files[tensor.file].extents.take_at(tensor.offset, tensor.room):
                raise DurableDamaged(
                    self.home.path / INDEX_NAME,
                    repr(tensor.name),
                    "lies at an offset where no tensor can lie",
                )
