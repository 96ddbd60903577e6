"""Reads and writes the safetensors format, and spreads tensors over several files.

A file is eight bytes with the length of a header, the header in JSON, the data. The header says of
each tensor its dtype, its shape, and where its bytes lie in the data: row-major, one tensor after
the other without holes. Files written here are laid out so that large tensors begin at multiples of
a page; files are read so that nothing damaged is taken for a tensor.

Several files are named in the manner of Hugging Face: one is `model.safetensors`; several are
`model-00001-of-00003.safetensors` and so on, beside `model.safetensors.index.json`, which says
where each tensor is.
"""

import json
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from zcompile.checkpoint.file import OpenFile, checkpoint_errors
from zcompile.errors import CheckpointInvalid, Unsupported
from zcompile.runtime.io import sound_json
from zcompile.runtime.transfer.interrupts import uninterrupted

PAGE_BYTES = 4096
MOST_HEADER_BYTES = 100_000_000
"""The format's own limit."""
_LENGTH = struct.Struct("<Q")
_METADATA = "__metadata__"
MOST_DIMENSIONS = 64
"""Most dimensions of a tensor of PyTorch."""
MOST_DEPTH = 8
"""Most levels of a header: an object of objects, with lists in them."""
_NO_SIZE = 1 << 63
"""Upper bound of sizes and offsets, in PyTorch and in files."""

DTYPES: Mapping[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "C64": torch.complex64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True)
class Row:
    """One tensor: its bytes are [begin, end) of the file."""

    dtype: torch.dtype
    size: tuple[int, ...]
    begin: int
    end: int

    @property
    def nbytes(self) -> int:
        return self.end - self.begin

    @property
    def count(self) -> int:
        """Elements."""
        return self.nbytes // self.dtype.itemsize


@dataclass(frozen=True)
class Header:
    """The header of a file.

    rows      by name, in the order of their bytes
    metadata  texts that the writer added
    nbytes    of the whole file
    """

    rows: Mapping[str, Row]
    metadata: Mapping[str, str]
    nbytes: int


def nbytes_of(dtype: torch.dtype, size: Iterable[int]) -> int:
    """Bytes of a tensor."""
    count = 1
    for n in size:
        count *= n
    return count * dtype.itemsize


def arrange(
    tensors: Mapping[str, tuple[torch.dtype, tuple[int, ...]]], metadata: Mapping[str, str]
) -> tuple[bytes, Header]:
    """The first bytes of a file of these tensors, and its header.

    The data begins at a multiple of a page, and so does every tensor of whole pages, since these
    come first. Of the others the widest dtype comes first, so that each is aligned to its own.

    raises  Unsupported, for a dtype that the format does not have or a header too large for it
    """
    for name, (dtype, _) in tensors.items():
        if dtype not in _NAMES:
            raise Unsupported(
                f"{name!r} is of {dtype}, which safetensors does not have",
                f"convert it to one of {', '.join(DTYPES)}",
            )

    def place(name: str) -> tuple[bool, int]:
        dtype, size = tensors[name]
        return nbytes_of(dtype, size) % PAGE_BYTES != 0, -dtype.itemsize

    # Rows in the order of their bytes, with offsets from the beginning of the data.
    told: dict[str, Any] = {_METADATA: dict(metadata)} if metadata else {}
    rows, at = {}, 0
    for name in sorted(tensors, key=place):
        dtype, size = tensors[name]
        rows[name] = Row(dtype, size, at, at + nbytes_of(dtype, size))
        at = rows[name].end
        told[name] = {
            "dtype": _NAMES[dtype],
            "shape": list(size),
            "data_offsets": [rows[name].begin, at],
        }
    # The header, padded so that the data begins at a page.
    text = json.dumps(told, separators=(",", ":")).encode()
    text += b" " * (-(len(text) + _LENGTH.size) % PAGE_BYTES)
    if len(text) > MOST_HEADER_BYTES:
        raise Unsupported(
            f"a header for {len(tensors)} tensors has {len(text)} bytes, and safetensors allows "
            f"{MOST_HEADER_BYTES}",
            "split them over several files",
        )
    first = _LENGTH.pack(len(text)) + text
    return first, Header(_moved(rows, len(first)), dict(metadata), len(first) + at)


def _moved(rows: Mapping[str, Row], by: int) -> dict[str, Row]:
    """`rows` with all bytes `by` further on."""
    return {
        name: Row(row.dtype, row.size, row.begin + by, row.end + by) for name, row in rows.items()
    }


@uninterrupted
def read_header(file: OpenFile) -> Header:
    """The header of a file, checked against itself and against the file's length.

    raises  CheckpointInvalid, naming the file and the tensor
    """
    path, fd, system = file.path, file.fd, file.system
    with checkpoint_errors(path):
        nbytes = system.fstat(fd).st_size
        first = system.read_all(fd, _LENGTH.size)
        length = _LENGTH.unpack(first)[0] if len(first) == _LENGTH.size else 0
        if length > MOST_HEADER_BYTES:
            raise CheckpointInvalid(
                path, f"is no safetensors file: its header would have {length} bytes"
            )
        # A length that the file does not have is not asked for: it would be allocated first.
        whole = _LENGTH.size + length <= nbytes
        text = system.read_all(fd, length, _LENGTH.size) if whole else b""
    if length < 2 or len(text) < length:
        raise CheckpointInvalid(path, f"ends after {nbytes} bytes, within its header")
    told = _parsed(path, text)
    metadata = told.pop(_METADATA, {})
    if not isinstance(metadata, dict):
        raise CheckpointInvalid(path, f"has {_METADATA} that is no object")
    for key, value in metadata.items():
        if not isinstance(value, str):
            raise CheckpointInvalid(path, f"has {_METADATA} with {key!r:.80} that is no text")
    rows = {name: _row(path, name, row) for name, row in told.items()}
    return Header(_checked(path, rows, _LENGTH.size + length, nbytes), metadata, nbytes)


def _parsed(path: Path, text: bytes) -> dict[str, Any]:
    try:
        told = sound_json.loads_sizes(text, MOST_DEPTH)
    except ValueError as error:  # also what is not UTF-8
        raise CheckpointInvalid(path, f"has a header that is not sound: {error}") from error
    if not isinstance(told, dict):
        raise CheckpointInvalid(path, "has a header that is no object")
    return told


def _row(path: Path, name: str, told: Any) -> Row:
    """The row of one tensor, with offsets from the beginning of the data."""
    try:
        dtype, size, (begin, end) = told["dtype"], told["shape"], told["data_offsets"]
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointInvalid(
            path, f"has {name!r:.200} without dtype, shape and two data_offsets"
        ) from error
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise CheckpointInvalid(
            path,
            f"has {name!r:.200} of dtype {dtype!r:.80}, which is not one of {', '.join(DTYPES)}",
            "convert it first",
        )
    if not isinstance(size, list) or not all(
        type(n) is int and 0 <= n < _NO_SIZE for n in (*size, begin, end)
    ):
        raise CheckpointInvalid(
            path,
            f"has {name!r:.200} with shape {size!s:.200} and data_offsets {[begin, end]!s:.200}",
        )
    if len(size) > MOST_DIMENSIONS:
        raise CheckpointInvalid(path, f"has {name!r:.200} with {len(size)} dimensions")
    row = Row(DTYPES[dtype], tuple(size), begin, end)
    if row.nbytes != nbytes_of(row.dtype, row.size):
        raise CheckpointInvalid(
            path, f"gives {name!r:.200} {row.nbytes} bytes, which {dtype}{size} does not fill"
        )
    return row


def _checked(path: Path, rows: Mapping[str, Row], data: int, nbytes: int) -> dict[str, Row]:
    """The rows with offsets from the beginning of the file, one after the other up to the file's
    end."""
    at = 0
    ordered = dict(sorted(rows.items(), key=lambda item: (item[1].begin, item[1].end)))
    for name, row in ordered.items():
        if row.begin != at:
            raise CheckpointInvalid(
                path,
                f"has {name!r} begin at byte {row.begin} of the data, "
                f"and what comes before ends at {at}",
            )
        at = row.end
        if data + at > nbytes:
            raise CheckpointInvalid(
                path, f"ends after {nbytes} bytes, and {name!r} needs {data + at}"
            )
    if data + at != nbytes:
        raise CheckpointInvalid(path, f"has {nbytes - data - at} bytes more than its header tells")
    return _moved(ordered, data)


@dataclass(frozen=True)
class Shard:
    """A file to be written. first, header: as `arrange` returns them.

    prefix  with it, the name of a tensor is the one that it has in the state
    """

    prefix: str
    file: str
    tensors: Mapping[str, Tensor]
    first: bytes
    header: Header

    @property
    def content(self) -> tuple[bytes, Header, Mapping[str, Tensor]]:
        """What is written."""
        return self.first, self.header, self.tensors


class Place(NamedTuple):
    """The file and row of a tensor."""

    file: OpenFile
    row: Row


def shards_of(
    kind: str,
    tensors: Mapping[str, Tensor],
    most_bytes: int,
    metadata: Mapping[str, str],
    prefix: str = "",
) -> list[Shard]:
    """Files of at most so many bytes, or of one tensor; at least one file.

    prefix  of each: see `Shard`
    raises  Unsupported
    """
    parts: list[dict[str, Tensor]] = [{}]
    room = most_bytes
    for name, tensor in tensors.items():
        nbytes = nbytes_of(tensor.dtype, tensor.size())
        if nbytes > room and parts[-1]:
            parts.append({})
            room = most_bytes
        parts[-1][name] = tensor
        room -= nbytes
    shards = []
    for number, part in enumerate(parts, 1):
        facts = {name: (tensor.dtype, tuple(tensor.size())) for name, tensor in part.items()}
        several = f"-{number:05}-of-{len(parts):05}" if len(parts) > 1 else ""
        file = f"{kind}{several}.safetensors"
        shards.append(Shard(prefix, file, part, *arrange(facts, metadata)))
    return shards


def index_of(shards: Iterable[Shard]) -> dict[str, Any]:
    """The content of `<kind>.safetensors.index.json`."""
    names = {name: shard.file for shard in shards for name in shard.header.rows}
    total = sum(row.nbytes for shard in shards for row in shard.header.rows.values())
    return {"metadata": {"total_size": total}, "weight_map": names}


@uninterrupted
def read_json(file: OpenFile) -> dict[str, Any]:
    """The object in a JSON file.

    raises  CheckpointInvalid
    """
    path, system = file.path, file.system
    with checkpoint_errors(path):
        content = system.read_all(file.fd, system.fstat(file.fd).st_size)
    try:
        told = sound_json.loads(content)
    except ValueError as error:
        raise CheckpointInvalid(path, f"is not sound: {error}") from error
    if not isinstance(told, dict):
        raise CheckpointInvalid(path, "holds no object")
    return told
