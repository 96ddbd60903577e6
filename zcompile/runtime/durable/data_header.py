"""The first block of a durable data file: whose it is, so that two runs are never mixed."""

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path

from zcompile.errors import DurableDamaged
from zcompile.ir.serialize import decode
from zcompile.runtime.durable.index import DATA_NAME
from zcompile.runtime.io import sound_json
from zcompile.runtime.io.directory import Directory

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
        if not (0 <= header.number < header.of and header.first.startswith("/")
                and "\0" not in header.first and header.run.isalnum()):  # fmt: skip
            raise ValueError(f"file {header.number} of {header.of}, run {header.run!r:.40}")
        return header
    except ValueError as error:
        raise DurableDamaged(path, "the data file", f"has a first block that cannot be "
                             f"understood: {error}") from error  # fmt: skip


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
        raise DurableDamaged(directory.path / DATA_NAME, "the data file",
                             "is gone; the index names it")  # fmt: skip
    return found.st_size
