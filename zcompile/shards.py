"""Which tensor stands in which file, in the manner of Hugging Face.

One file is `model.safetensors`; several are `model-00001-of-00003.safetensors` and so on, beside
`model.safetensors.index.json`, which says where each tensor is.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from zcompile import sound_json
from zcompile.checkpoint_file import reading, told_of
from zcompile.errors import CheckpointInvalid
from zcompile.runtime.interrupts import uninterrupted
from zcompile.runtime.regular_file import found_at
from zcompile.runtime.system_calls import SystemCalls
from zcompile.safetensors_file import Header, Row, arrange, nbytes_of, read_header


@dataclass(frozen=True)
class Shard:
    """A file to be written. `first`, `header`: as `arrange` returns them."""

    file: str
    tensors: Mapping[str, Tensor]
    first: bytes
    header: Header


class Place(NamedTuple):
    """Where a tensor can be read."""

    path: Path
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


def read_index(directory: Path, kind: str, system: SystemCalls) -> list[Path]:
    """The files of `kind` in a directory. raises CheckpointInvalid"""

    def is_there(path: Path) -> bool:
        with told_of(path):
            return found_at(system, path) is not None

    index, single = directory / f"{kind}.safetensors.index.json", directory / f"{kind}.safetensors"
    if not is_there(index):
        if not is_there(single):
            raise CheckpointInvalid(directory, f"holds neither {single.name} nor {index.name}",
                                    "name the directory that does")  # fmt: skip
        return [single]
    names = read_json(index, system).get("weight_map")
    if not isinstance(names, dict) or not all(_is_name(name) for name in names.values()):
        raise CheckpointInvalid(index, "has no weight_map of names to files")
    paths = [directory / name for name in sorted(set(names.values()))]
    for path in paths:
        if not is_there(path):
            name = next(name for name, file in names.items() if file == path.name)
            raise CheckpointInvalid(path, f"does not exist, and {index.name} has "
                                    f"{name!r} stand there")  # fmt: skip
    found = {(name, path.name) for path in paths for name in read_header(path, system).rows}
    for name, file in names.items():
        if (name, file) not in found:
            raise CheckpointInvalid(directory / file, f"lacks {name!r}, which {index.name} has "
                                    "stand there")  # fmt: skip
    return paths


def places(paths: Iterable[Path], system: SystemCalls) -> dict[str, Place]:
    """Every tensor of some files. raises CheckpointInvalid"""
    found: dict[str, Place] = {}
    for path in paths:
        for name, row in read_header(path, system).rows.items():
            if name in found:
                raise CheckpointInvalid(path, f"has {name!r}, and so has {found[name].path}",
                                        "name files that share no tensor")  # fmt: skip
            found[name] = Place(path, row)
    return found


@uninterrupted
def read_json(path: Path, system: SystemCalls) -> dict[str, Any]:
    """The object in a file. raises CheckpointInvalid"""
    with reading(path, system) as fd:
        content = system.read_all(fd, system.fstat(fd).st_size)
    try:
        told = sound_json.loads(content)
    except ValueError as error:
        raise CheckpointInvalid(path, f"is not sound: {error}") from error
    if not isinstance(told, dict):
        raise CheckpointInvalid(path, "holds no object")
    return told


def _is_name(name: object) -> bool:
    return isinstance(name, str) and "/" not in name and name not in ("", ".", "..")
