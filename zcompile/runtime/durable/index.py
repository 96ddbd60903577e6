"""The index of a durable directory says where each tensor of the last commit lies. Text, never
pickle.

    zinf-index <format> <bytes of text> <bytes of tensors> <checksum's name> <checksum>
    {"run": ..., "step": 12, ..., "tensors": [      JSON, one tensor a line
    {"name": "blocks.0.up.weight", "file": 0, "offset": 4096, ...},
    ...]}
    raw bytes of the small tensors: biases, buffers, step counts, random number state

The checksum covers everything after the first line. Big tensors rest in the data files, and the
index holds a checksum for each piece of them: a piece is what one write brought, summed as it is
written. Whoever reads a piece back whole can tell whether a bit has changed.
"""

import json
import os
import re
import zlib
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

from zcompile.errors import DurableDamaged
from zcompile.ir.serialize import decode
from zcompile.runtime.io import sound_json
from zcompile.runtime.io.files import Directory
from zcompile.runtime.tiers.extents import WrittenRanges

try:
    import xxhash
except ImportError:  # pragma: no cover  # slower without it, by a factor of six; still right
    xxhash = None  # type: ignore[assignment]  # as any optional module


INDEX_NAME = "zinf.index"
NEW_INDEX_NAME = f"{INDEX_NAME}.new"
DATA_NAME = "zinf.tier"


# --- Checksums ---

Sum = Callable[[memoryview], int]


def _available_checksums() -> Mapping[str, Sum]:
    found: dict[str, Sum] = {"crc32": zlib.crc32}
    if xxhash is not None:
        found["xxh3_64"] = xxhash.xxh3_64_intdigest
    return found


SUMS = _available_checksums()
"""Name -> checksum function. Both release the GIL; XXH3 makes 22 GB/s and CRC-32 4 GB/s on a
core."""
BEST = "xxh3_64" if "xxh3_64" in SUMS else "crc32"
"""The checksum of new data."""


class RunningChecksum:
    """The checksum `name` of bytes that come in parts, in order."""

    def __init__(self, name: str) -> None:
        self._xxh3 = xxhash.xxh3_64() if name == "xxh3_64" else None
        self._crc = 0

    def update(self, part: memoryview) -> None:
        if self._xxh3 is not None:
            self._xxh3.update(part)
        else:
            self._crc = zlib.crc32(part, self._crc)

    def value(self) -> int:
        return self._crc if self._xxh3 is None else self._xxh3.intdigest()


@dataclass(frozen=True)
class Piece:
    """Bytes [begin, end) of an extent.

    checksum  of exactly these; None: not known, since a part of what was written was replaced
    """

    begin: int
    end: int
    checksum: int | None


class Pieces:
    """The checksums of an entry as it is now: disjoint pieces, ordered."""

    def __init__(self, pieces: tuple[Piece, ...] = ()) -> None:
        self._pieces = list(pieces)

    def all(self) -> tuple[Piece, ...]:
        return tuple(self._pieces)

    def add(self, begin: int, end: int) -> None:
        """Note a write of [begin, end), whose checksum comes by `set_checksum`."""
        first = bisect_right(self._pieces, begin, key=lambda p: p.end)
        last = bisect_left(self._pieces, end, key=lambda p: p.begin)
        kept = []
        for old in self._pieces[first:last]:
            if old.begin < begin:
                kept.append(Piece(old.begin, begin, None))
            if old.end > end:
                kept.append(Piece(end, old.end, None))
        kept.append(Piece(begin, end, None))
        self._pieces[first:last] = sorted(kept, key=lambda p: p.begin)

    def set_checksum(self, begin: int, end: int, checksum: int) -> None:
        """Note the checksum of [begin, end), unless that is no piece any more."""
        at = bisect_left(self._pieces, begin, key=lambda p: p.begin)
        if at < len(self._pieces):
            piece = self._pieces[at]
            if (piece.begin, piece.end) == (begin, end):
                self._pieces[at] = replace(piece, checksum=checksum)


# --- What an index says ---


@dataclass(frozen=True)
class StoredTensor:
    """One tensor of a commit and where its bytes rest.

    name           dotted name of the parameter, or that and the key of an optimizer state
    kind           one of `KINDS`
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
class SmallTensor:
    """A tensor whose bytes [begin, end) follow the text: plain, or a small one of the host tier."""

    name: str
    dtype: str
    size: tuple[int, ...]
    begin: int
    end: int


@dataclass(frozen=True)
class Index:
    """One commit.

    run          the run that the commit belongs to; the data files say the same
    step         optimizer steps that are in the commit
    serial       commits of this run before it
    written_at   for people
    granule      bytes of which transfers were multiples when the commit was written
    directories  as they were given; the index lies in the first
    meta         what is no tensor: parameter groups, what the user added
    """

    run: str
    step: int
    serial: int
    written_at: str
    granule: int
    directories: tuple[str, ...]
    tensors: tuple[StoredTensor, ...]
    smalls: tuple[SmallTensor, ...]
    meta: Mapping[str, object]

    @property
    def nbytes(self) -> int:
        """Bytes reserved by the tensors of the commit."""
        return sum(tensor.room for tensor in self.tensors)


# --- Text and back ---

MAGIC = "zinf-index"
FORMAT = 1
FORMAT_TO_COME = 2
"""Of an index with gradients, which names updates that are still to come: who knows only the first
format would take parameters for those of its step."""
KINDS = ("parameter", "optimizer state", "gradient")
MOST_HEADER_BYTES = 256
BLOCK_BYTES = 4096
"""Extents begin and end at multiples of this."""
_RUN = re.compile("[0-9a-f]{1,64}")
_NUMBERS = re.compile("[0-9]{1,18} [0-9]{1,18} [0-9a-f]{16}")


def encode(index: Index, smalls: bytes) -> bytes:
    """The content of an index file."""
    names = ("run", "step", "serial", "written_at", "granule", "directories", "meta")
    head = {name: getattr(index, name) for name in names}
    head["smalls"] = [vars(small) for small in index.smalls]
    rows = ",\n".join(_row(tensor) for tensor in index.tensors)
    text = f'{json.dumps(head)[:-1]},\n"tensors": [\n{rows}\n]}}\n'.encode()
    checksum = SUMS[BEST](memoryview(text + smalls))
    to_come = any(tensor.kind == "gradient" for tensor in index.tensors)
    form = FORMAT_TO_COME if to_come else FORMAT
    header = f"{MAGIC} {form} {len(text)} {len(smalls)} {BEST} {checksum:016x}\n".encode()
    return header + text + smalls


def _row(tensor: StoredTensor) -> str:
    # By `vars`, since `dataclasses.asdict` copies deeply: 15 ms for the 450 tensors of GPT-2.
    return json.dumps({**vars(tensor), "pieces": [vars(piece) for piece in tensor.pieces]})


def parse(path: Path, content: bytes) -> tuple[Index, bytes]:
    """An index and the bytes of its small tensors. raises DurableDamaged"""
    header, newline, body = content[:MOST_HEADER_BYTES].partition(b"\n")
    words = header.decode("ascii", errors="replace").split()
    if not newline or len(words) != 6 or words[0] != MAGIC:
        raise DurableDamaged(path, "the index", "does not begin as an index does")
    if words[1] not in (str(FORMAT), str(FORMAT_TO_COME)):
        raise DurableDamaged(
            path,
            "the index",
            f"has format {words[1]}, this version of zcompile reads formats {FORMAT} and "
            f"{FORMAT_TO_COME}",
        )
    if words[4] not in SUMS:
        raise DurableDamaged(
            path, "the index", f"has checksums of kind {words[4]}, which needs the package xxhash"
        )
    # The first line gives length and checksum of the body; then the text must make sense.
    body = content[len(header) + 1 :]
    if not _NUMBERS.fullmatch(" ".join((*words[2:4], words[5]))):
        raise DurableDamaged(path, "the index", "has a first line that is not one")
    text_bytes, small_bytes, checksum = int(words[2]), int(words[3]), int(words[5], 16)
    if len(body) != text_bytes + small_bytes:
        raise DurableDamaged(
            path,
            "the index",
            f"has {len(body)} bytes after its first line, and "
            f"had {text_bytes + small_bytes} when it was written",
        )
    if SUMS[words[4]](memoryview(body)) != checksum:
        raise DurableDamaged(path, "the index", "does not have the checksum it was written with")
    try:
        index = decode(Index, sound_json.loads(body[:text_bytes]))
        _check_plausible(index, small_bytes)
    except ValueError as error:
        raise DurableDamaged(path, "the index", f"cannot be understood: {error}") from error
    return index, body[text_bytes:]


def _check_plausible(index: Index, small_bytes: int) -> None:
    """Check that all that an index says can be, whatever lies in its files: anybody may have
    written it.

    raises  ValueError
    """
    _require(_RUN.fullmatch(index.run), f"run {index.run!r:.40}")
    _require(_are_counts(index.step, index.serial), f"step {index.step}, serial {index.serial}")
    _require(index.written_at.isprintable() and len(index.written_at) < 64, "when it was written")
    _require(
        _is_count(index.granule) and index.granule > 0 and BLOCK_BYTES % index.granule == 0,
        f"granule {index.granule}",
    )
    _require(index.directories, "directories: there are none")
    for name in index.directories:
        _require(name.startswith("/") and "\0" not in name, f"directory {name!r:.80}")
    names = [t.name for t in index.tensors] + [small.name for small in index.smalls]
    _require(len(set(names)) == len(names), "tensors: two have one name")
    at = 0
    for small in index.smalls:
        _require(
            small.dtype.isidentifier()
            and _are_counts(*small.size)
            and _are_counts(small.begin, small.end)
            and at <= small.begin <= small.end <= small_bytes,
            f"{small.name!r:.80}: a row that cannot be",
        )
        at = small.end
    for tensor in index.tensors:
        for what, holds in _claims_of(index, tensor):
            _require(holds, f"{tensor.name!r:.80}: {what}")


def _claims_of(index: Index, tensor: StoredTensor) -> Iterator[tuple[str, bool]]:
    """What the index says of a tensor, and whether that can be; later claims may rely on earlier
    ones."""
    counts = (tensor.start, tensor.nbytes, tensor.file, tensor.offset, tensor.room, tensor.step)
    yield "a number that is none", _are_counts(*counts, *tensor.size, *tensor.stride)
    yield f"kind {tensor.kind!r:.40}", tensor.kind in KINDS
    yield f"dtype {tensor.dtype!r:.40}", tensor.dtype.isidentifier()
    yield f"size {tensor.size}, stride {tensor.stride}", len(tensor.size) == len(tensor.stride)
    yield f"step {tensor.step}", tensor.step <= index.step
    yield f"file {tensor.file}", tensor.file < len(index.directories)
    # The first block of a data file is its header.
    aligned = tensor.offset % BLOCK_BYTES == tensor.room % BLOCK_BYTES == 0
    yield f"offset {tensor.offset}, room {tensor.room}", aligned and tensor.offset >= BLOCK_BYTES
    yield f"{tensor.nbytes} bytes in {tensor.room}", tensor.nbytes <= tensor.room
    ranges = [*tensor.written, *((piece.begin, piece.end) for piece in tensor.pieces)]
    yield "a range that is none", all(len(r) == 2 and _are_counts(*r) for r in ranges)
    yield "what was written", _are_ordered(tensor.written, tensor.nbytes)
    pieces = [(piece.begin, piece.end) for piece in tensor.pieces]
    yield "pieces", _are_ordered(pieces, tensor.room)
    yield "pieces off granules", all(end % index.granule == 0 for pair in pieces for end in pair)
    sums = [piece.checksum for piece in tensor.pieces]
    yield "a checksum that is none", all(type(s) is int and 0 <= s < 1 << 64 for s in sums)
    summed = WrittenRanges()
    for begin, end in pieces:
        summed.add(begin, end)
    yield "bytes without a checksum", all(summed.covers(*pair) for pair in tensor.written)


def _are_ordered(ranges: Iterable[Sequence[int]], most: int) -> bool:
    """Whether (begin, end) come in order, apart, none of them empty, all before `most`."""
    at = 0
    for begin, end in ranges:
        if not at <= begin < end <= most:
            return False
        at = end
    return True


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 63


def _are_counts(*values: object) -> bool:
    return all(map(_is_count, values))


def _require(holds: object, what: str) -> None:
    if not holds:
        raise ValueError(what)


def check_extents(index: Index, path: Path, capacities: Sequence[int]) -> None:
    """Check that all extents of the index lie inside their files, and do not overlap.

    capacities  bytes of the data file of each directory
    raises      DurableDamaged
    """
    taken: dict[int, list[tuple[int, int, str]]] = {}
    for tensor in index.tensors:
        end = tensor.offset + tensor.room
        if not (0 <= tensor.file < len(capacities) and end <= capacities[tensor.file]):
            raise DurableDamaged(
                path,
                repr(tensor.name),
                f"lies at [{tensor.offset}, {end}) of its data file, which ends before that",
            )
        taken.setdefault(tensor.file, []).append((tensor.offset, end, tensor.name))
    for rows in taken.values():
        rows.sort()
        for (_, end, name), (begin, _, other) in pairwise(rows):
            if begin < end:
                raise DurableDamaged(path, repr(name), f"shares bytes with {other!r}")


# --- Files ---


def read_index(directory: Directory) -> tuple[Index, bytes] | None:
    """The last commit in `directory`; None if there is none.

    raises  DurableDamaged, DiskUnusable, OSError
    """
    path = directory.path / INDEX_NAME
    try:
        content = directory.read(INDEX_NAME)
        return None if content is None else parse(path, content)
    except MemoryError:
        raise DurableDamaged(path, "the index", "is larger than memory") from None


def write_new_index(directory: Directory, content: bytes) -> None:
    """Write an index beside the last commit, and bring it to the device. raises OSError"""
    fd = directory.open(NEW_INDEX_NAME, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
    try:
        directory.system.write_all(fd, content)
        directory.system.fsync(fd)
    finally:
        directory.system.close(fd)


def switch_index(directory: Directory) -> None:
    """Make the new index the last commit: the rename is the commit; after it the name is on the
    device.

    raises  OSError; then the new index is the last commit, or it is not
    """
    directory.rename(NEW_INDEX_NAME, INDEX_NAME)
    directory.sync()


def has_new_index(directory: Directory) -> bool:
    """Whether there is still an index beside the last commit. raises OSError"""
    return directory.stat(NEW_INDEX_NAME) is not None
