"""Which tensor stands in which file, in the manner of Hugging Face.

One file is `model.safetensors`; several are `model-00001-of-00003.safetensors` and so on, beside
`model.safetensors.index.json`, which says where each tensor is.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor

from zcompile.checkpoint.file import Folder, OpenFile, told_of
from zcompile.checkpoint.safetensors_file import Header, Row, arrange, nbytes_of, read_header
from zcompile.errors import CheckpointInvalid
from zcompile.runtime.io import sound_json
from zcompile.runtime.transfer.interrupts import uninterrupted


@dataclass(frozen=True)
class Shard:
    """A file to be written. `first`, `header`: as `arrange` returns them."""

    file: str
    tensors: Mapping[str, Tensor]
    first: bytes
    header: Header


class Place(NamedTuple):
    """Where a tensor can be read."""

    file: OpenFile
    row: Row


def shards_of(
    kind: str, tensors: Mapping[str, Tensor], most_bytes: int, metadata: Mapping[str, str]
) -> list[Shard]:
    """Files of at most so many bytes, or of one tensor; at least one. raises Unsupported"""
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
        shards.append(Shard(f"{kind}{several}.safetensors", part, *arrange(facts, metadata)))
    return shards


def index_of(shards: Iterable[Shard]) -> dict[str, Any]:
    """What `<kind>.safetensors.index.json` says."""
    names = {name: shard.file for shard in shards for name in shard.header.rows}
    total = sum(row.nbytes for shard in shards for row in shard.header.rows.values())
    return {"metadata": {"total_size": total}, "weight_map": names}


def read_index(folder: Folder, kind: str) -> list[OpenFile]:
    """The files of `kind` in a directory. raises CheckpointInvalid"""
    index, single = f"{kind}.safetensors.index.json", f"{kind}.safetensors"
    if not folder.holds(index):
        if not folder.holds(single):
            raise CheckpointInvalid(folder.path, f"holds neither {single} nor {index}",
                                    "name the directory that does")  # fmt: skip
        return [folder.file(single)]
    names = read_json(folder.file(index)).get("weight_map")
    if not isinstance(names, dict) or not all(_is_name(name) for name in names.values()):
        raise CheckpointInvalid(folder.path / index, "has no weight_map of names to files")
    files: dict[str, OpenFile] = {}
    for file in sorted(set(names.values())):
        if not folder.holds(file):
            name = next(name for name, there in names.items() if there == file)
            raise CheckpointInvalid(folder.path / file, f"does not exist, and {index} has {name!r} "
                                    "stand there", "copy it again")  # fmt: skip
        files[file] = folder.file(file)
    found = {(name, file) for file, there in files.items() for name in read_header(there).rows}
    for name, file in names.items():
        if (name, file) not in found:
            raise CheckpointInvalid(folder.path / file, f"lacks {name!r}, which {index} has "
                                    "stand there")  # fmt: skip
    return list(files.values())


def places(files: Iterable[OpenFile]) -> dict[str, Place]:
    """Every tensor of some files. raises CheckpointInvalid"""
    found: dict[str, Place] = {}
    for file in files:
        for name, row in read_header(file).rows.items():
            if name in found:
                other = found[name].file.path
                raise CheckpointInvalid(file.path, f"has {name!r}, and so has {other}",
                                        "name files that share no tensor")  # fmt: skip
            found[name] = Place(file, row)
    return found


@uninterrupted
def read_json(file: OpenFile) -> dict[str, Any]:
    """The object in a file. raises CheckpointInvalid"""
    path, system = file.path, file.system
    with told_of(path):
        content = system.read_all(file.fd, system.fstat(file.fd).st_size)
    try:
        told = sound_json.loads(content)
    except ValueError as error:
        raise CheckpointInvalid(path, f"is not sound: {error}") from error
    if not isinstance(told, dict):
        raise CheckpointInvalid(path, "holds no object")
    return told


def _is_name(name: object) -> bool:
    return isinstance(name, str) and not set("/\0") & set(name) and name not in ("", ".", "..")
