"""The index of a durable directory: which tensor of the last commit lies where. Text, never pickle.

    zinf-index 1 <bytes of text> <bytes of tensors> <checksum's name> <checksum>
    {"run": ..., "step": 12, ..., "tensors": [      JSON, one tensor a line
    {"name": "blocks.0.up.weight", "file": 0, "offset": 4096, ...},
    ...]}
    raw bytes of the small tensors: biases, buffers, step counts, random number state

The checksum covers everything after the first line. Big tensors rest in the data files, and the
index holds a checksum for each piece of them.
"""

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from zcompile.errors import DurableDamaged
from zcompile.records import decode
from zcompile.runtime.checksums import BEST, SUMS, Piece

INDEX_NAME = "zinf.index"
DATA_NAME = "zinf.tier"
MAGIC = "zinf-index"
FORMAT = 1
MOST_HEADER_BYTES = 256


@dataclass(frozen=True)
class Resting:
    """One tensor and where its bytes rest.

    name           dotted name of the parameter, or that and the key of an optimizer state
    kind           "parameter" or "optimizer state"
    dtype          as torch names it, without "torch."
    size, stride, start   in elements; `start` from the first byte of the entry
    nbytes         of the entry
    file, offset, room    directory number, and where in its data file `room` bytes are reserved
    step           at which these bytes were written
    written        byte ranges that hold a value; the others are zeros that were never written
    sum            name of the checksum of `pieces`
    pieces         what lies on disk, from `offset` on
    """

    name: str
    kind: str
    dtype: str
    size: tuple[int, ...]
    stride: tuple[int, ...]
    start: int
    nbytes: int
    file: int
    offset: int
    room: int
    step: int
    written: tuple[tuple[int, ...], ...]
    sum: str
    pieces: tuple[Piece, ...]


@dataclass(frozen=True)
class Small:
    """A tensor whose bytes [begin, end) follow the text: plain, or a small one of the host tier."""

    name: str
    dtype: str
    size: tuple[int, ...]
    begin: int
    end: int


@dataclass(frozen=True)
class Index:
    """One commit.

    run          of which it is; the data files say the same
    step         optimizer steps that are in it
    serial       commits of this run before it
    written_at   for people
    granule      what transfers came in multiples of when it was written
    directories  as they were given; the index lies in the first
    meta         what is no tensor: parameter groups, what the user added
    """

    run: str
    step: int
    serial: int
    written_at: str
    granule: int
    directories: tuple[str, ...]
    tensors: tuple[Resting, ...]
    smalls: tuple[Small, ...]
    meta: Mapping[str, object]

    @property
    def nbytes(self) -> int:
        """Bytes reserved by what it names."""
        return sum(tensor.room for tensor in self.tensors)


def encode(index: Index, smalls: bytes) -> bytes:
    """The whole file."""
    names = ("run", "step", "serial", "written_at", "granule", "directories", "meta")
    head = {name: getattr(index, name) for name in names}
    head["smalls"] = [vars(small) for small in index.smalls]
    rows = ",\n".join(_row(tensor) for tensor in index.tensors)
    text = f'{json.dumps(head)[:-1]},\n"tensors": [\n{rows}\n]}}\n'.encode()
    checksum = SUMS[BEST](memoryview(text + smalls))
    header = f"{MAGIC} {FORMAT} {len(text)} {len(smalls)} {BEST} {checksum:016x}\n".encode()
    return header + text + smalls


def _row(tensor: Resting) -> str:
    # By `vars`, since `dataclasses.asdict` copies deeply: 15 ms for the 450 tensors of GPT-2.
    return json.dumps({**vars(tensor), "pieces": [vars(piece) for piece in tensor.pieces]})


def parse(path: Path, content: bytes) -> tuple[Index, bytes]:
    """An index and the bytes of its small tensors. raises DurableDamaged"""
    header, newline, body = content[:MOST_HEADER_BYTES].partition(b"\n")
    words = header.decode("ascii", errors="replace").split()
    if not newline or len(words) != 6 or words[0] != MAGIC:
        raise DurableDamaged(path, "the index", "does not begin as an index does")
    if words[1] != str(FORMAT):
        raise DurableDamaged(path, "the index", f"has format {words[1]}, this version of zcompile "
                             f"reads format {FORMAT}")  # fmt: skip
    if words[4] not in SUMS:
        raise DurableDamaged(path, "the index", f"has checksums of kind {words[4]}, which needs "
                             "the package xxhash")  # fmt: skip
    body = content[len(header) + 1 :]
    try:
        text_bytes, small_bytes, checksum = int(words[2]), int(words[3]), int(words[5], 16)
    except ValueError:
        raise DurableDamaged(path, "the index", "has a first line that is not one") from None
    if len(body) != text_bytes + small_bytes:
        raise DurableDamaged(path, "the index", f"has {len(body)} bytes after its first line, and "
                             f"had {text_bytes + small_bytes} when it was written")  # fmt: skip
    if SUMS[words[4]](memoryview(body)) != checksum:
        raise DurableDamaged(path, "the index", "does not have the checksum it was written with")
    try:
        return decode(Index, json.loads(body[:text_bytes])), body[text_bytes:]
    except ValueError as error:
        raise DurableDamaged(path, "the index", f"cannot be understood: {error}") from error


def read_index(directory: Path) -> tuple[Index, bytes] | None:
    """The last commit in `directory`; None if there is none.

    raises  DurableDamaged, OSError
    """
    path = directory / INDEX_NAME
    try:
        return parse(path, path.read_bytes())
    except FileNotFoundError:
        return None


def switch_index(directory: Path, content: bytes) -> None:
    """`content` becomes the last commit, or the one before it stays. raises OSError

    The rename is the commit; before it the new file is on the device, after it the name is.
    """
    new = directory / f"{INDEX_NAME}.new"
    fd = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    try:
        view = memoryview(content)
        while view:
            view = view[os.write(fd, view) :]
        os.fsync(fd)
    finally:
        os.close(fd)
    os.rename(new, directory / INDEX_NAME)
    sync_directory(directory)


def sync_directory(directory: Path) -> None:
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def checked(index: Index, path: Path, capacities: Sequence[int]) -> None:
    """Whether all that the index names lies inside its files, and nothing lies on anything else.

    capacities  bytes of the data file of each directory
    raises      DurableDamaged
    """
    taken: dict[int, list[tuple[int, int, str]]] = {}
    for tensor in index.tensors:
        end = tensor.offset + tensor.room
        if not (0 <= tensor.file < len(capacities) and end <= capacities[tensor.file]):
            raise DurableDamaged(path, repr(tensor.name), f"lies at [{tensor.offset}, {end}) of "
                                 "its data file, which ends before that")  # fmt: skip
        taken.setdefault(tensor.file, []).append((tensor.offset, end, tensor.name))
    for rows in taken.values():
        rows.sort()
        for (_, end, name), (begin, _, other) in pairwise(rows):
            if begin < end:
                raise DurableDamaged(path, repr(name), f"shares bytes with {other!r}")
