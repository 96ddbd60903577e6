"""The first block of a durable data file: whose it is, so that two runs are never mixed."""

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path

from zcompile.errors import DurableDamaged
from zcompile.records import decode
from zcompile.runtime.index import DATA_NAME

HEADER_BYTES = 4096
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
        text = f"{MAGIC}\n{json.dumps(asdict(self))}\n".encode()
        if len(text) > HEADER_BYTES:
            raise DurableDamaged(Path(self.first), "the name of the directory", "is too long")
        return text.ljust(HEADER_BYTES, b"\0")


def read_header(directory: Path) -> DataHeader | None:
    """Of the data file in `directory`; None if there is none. raises DurableDamaged, OSError"""
    path = directory / DATA_NAME
    try:
        with path.open("rb") as file:
            block = file.read(HEADER_BYTES)
    except FileNotFoundError:
        return None
    magic, _, rest = block.partition(b"\n")
    text = rest.partition(b"\n")[0]
    if magic != MAGIC.encode():
        raise DurableDamaged(path, "the data file", "does not begin as one of ours")
    try:
        return decode(DataHeader, json.loads(text))
    except ValueError as error:
        raise DurableDamaged(path, "the data file", f"has a first block that cannot be "
                             f"understood: {error}") from error  # fmt: skip


def is_blank(directory: Path) -> bool:
    """Whether the data file in `directory` holds nothing at all: its run died while it was made.

    Nothing is written to such a file before its header. raises  OSError
    """
    try:
        with (directory / DATA_NAME).open("rb") as file:
            return not file.read(HEADER_BYTES + 1).strip(b"\0") and file.tell() <= HEADER_BYTES
    except FileNotFoundError:
        return False


def write_header(directory: Path, header: DataHeader) -> None:
    """raises  OSError"""
    fd = os.open(directory / DATA_NAME, os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.pwrite(fd, header.block(), 0)
        os.fsync(fd)
    finally:
        os.close(fd)


def data_bytes(directory: Path) -> int:
    """Size of the data file. raises DurableDamaged if there is none"""
    path = directory / DATA_NAME
    try:
        return os.stat(path).st_size
    except FileNotFoundError:
        raise DurableDamaged(path, "the data file", "is gone; the index names it") from None
