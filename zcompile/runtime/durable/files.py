"""The data files of a durable run are made new, or found with the last commit.

A file outlives its process once a commit names it. Files without a commit, of a run that died
before its first one, are removed when the next run opens the directory.
"""

import logging
import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from zcompile.errors import DiskUnusable, DurableDamaged, DurableHeld
from zcompile.runtime.durable.directory import (
    HEADER_BYTES,
    DataHeader,
    check_original,
    committed_elsewhere,
    data_bytes,
    index_gone,
    is_unfinished,
    read_header,
    write_header,
)
from zcompile.runtime.durable.index import (
    DATA_NAME,
    INDEX_NAME,
    NEW_INDEX_NAME,
    Index,
    check_extents,
    has_new_index,
    read_index,
    switch_index,
    write_new_index,
)
from zcompile.runtime.io.files import Directory
from zcompile.runtime.tiers.disk import TierFile

logger = logging.getLogger("zcompile.runtime.durable.files")


class DurableFile(TierFile):
    """`zinf.tier` in a directory; stays after `close` if a commit names it.

    found   the file is there already, with tensors that a commit names
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
        """Return when what was written is on the device. raises OSError"""
        self.system.fdatasync(self._fd)

    def _begin(self, header: DataHeader) -> None:
        """Write the header of a new file."""
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
    """The data files of one run over the directories `paths`, which are locked when `open` is
    called.

    directories      those that were opened
    named            the directories, as files name them to others
    index, smalls    the last commit and the bytes of its small tensors; None if there was none
    outcome_unknown  the last `switch` raised, and may have made its commit nevertheless
    """

    def __init__(self, paths: Sequence[Path]) -> None:
        self.directories: list[Directory] = []
        self.named = tuple(str(path.absolute()) for path in paths)
        self.index: Index | None = None
        self.smalls = b""
        self.run = os.urandom(8).hex()
        self.files: list[DurableFile] = []
        self.outcome_unknown = False
        self._marked = False

    @property
    def home(self) -> Directory:
        """The directory that holds the index."""
        return self.directories[0]

    def open(self, directory: Directory) -> DurableFile:
        """Open the next file, in the order of the directories.

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

    def switch(self, content: bytes, agree: Callable[[], None] | None = None) -> None:
        """Make `content` the index of the last commit.

        agree   of several ranks: returns when all have written theirs, and raises if one has not
        raises  OSError; then it is that (see `outcome_unknown`), or still the one before, and the
                files of both are kept
        """
        self.outcome_unknown = False
        if not self.files[0].keep:
            for directory in self.directories:
                directory.sync()  # the names of the data files
        write_new_index(self.home, content)
        self.outcome_unknown = True
        if agree is not None:
            for file in self.files:
                file.keep = True  # another rank may make it the last before this one hears of that
            self.home.sync()  # the name beside the last one
            agree()
        try:
            switch_index(self.home)
        except BaseException:  # also an interrupt
            self.outcome_unknown = not self._rename_was_not_made()
            raise
        finally:
            named = self._may_have_index()
            for file in self.files:
                file.keep = file.keep or named
        if not self._marked:
            for number, file in enumerate(self.files):
                write_header(file.directory, self._header(number, committed=True))
        self._marked, self.outcome_unknown = True, False

    def _may_have_index(self) -> bool:
        """Whether there is an index, or may be: what it names is not to be removed."""
        try:
            return self.home.stat(INDEX_NAME) is not None
        except OSError:
            return True

    def _rename_was_not_made(self) -> bool:
        """Whether the new index certainly did not become the last commit."""
        try:
            return has_new_index(self.home)
        except OSError:
            return False

    def _header(self, number: int, committed: bool) -> DataHeader:
        return DataHeader(self.run, number, len(self.named), self.named[0], committed)

    def _find_index(self) -> None:
        """Read the last commit, if there is one. raises  DurableHeld, DurableDamaged"""
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
        """raises  DurableDamaged, if the data file is not the one that the index names"""
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
        """Remove a data file that no commit names. raises  DurableHeld, if it is of another run"""
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
        """Take the extents of the last commit in the files. raises  DurableDamaged"""
        check_extents(index, self.home.path / INDEX_NAME, [data_bytes(d) for d in self.directories])
        for tensor in index.tensors:
            if not self.files[tensor.file].extents.take_at(tensor.offset, tensor.room):
                raise DurableDamaged(
                    self.home.path / INDEX_NAME,
                    repr(tensor.name),
                    "lies at an offset where no tensor can lie",
                )
