"""A checkpoint as a source of state; checked as a whole before anything is read of it."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from zcompile.checkpoint_directory import STATE_FILE
from zcompile.errors import CheckpointInvalid
from zcompile.model_state import Fact
from zcompile.plain_values import unpack
from zcompile.safetensors_file import read_header
from zcompile.shards import Place, read_json
from zcompile.tensor_loader import Loader

NAMED = ("model", "optimizer")
"""Kinds of files whose tensors are named without the kind, as others name them."""
OTHERS = "training"
"""The kind of file for all other tensors."""
_FIELDS = {"aliases": dict, "modules": dict, "rng": dict, "extra": dict, "device": str}


def of_kind(kind: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Those of a state that stand in the files of `kind`, by the names that they have there."""
    if kind == OTHERS:
        return {n: t for n, t in tensors.items() if n.partition(".")[0] not in NAMED}
    start = f"{kind}."
    return {n.removeprefix(start): t for n, t in tensors.items() if n.startswith(start)}


class CheckpointSource:
    """What `zcompile.save` wrote to a directory. raises CheckpointInvalid, naming the file"""

    def __init__(self, directory: Path, loader: Loader) -> None:
        self.where = str(directory)
        self._loader = loader
        told = read_json(directory / STATE_FILE, loader.system)
        self.meta = _state(directory / STATE_FILE, told)
        self._places: dict[str, Place] = {}
        for file in told["files"]:
            self._take(directory / file, told.get("checkpoint"))
        for name in _tensors_of(self.meta):
            if name not in self._places:
                raise CheckpointInvalid(directory / STATE_FILE, f"needs the tensor {name!r}, and "
                                        "none of its files has it")  # fmt: skip

    def facts(self) -> Mapping[str, Fact]:
        return {name: fact_in(place) for name, place in self._places.items()}

    def fill(self, name: str, target: Tensor) -> None:
        place = self._places[name]
        self._loader.fill(place.path, name, place.row, target)

    def _take(self, path: Path, checkpoint: object) -> None:
        header = read_header(path, self._loader.system)
        if header.metadata.get("checkpoint") != checkpoint:
            raise CheckpointInvalid(path, f"is not of the same checkpoint as {STATE_FILE}",
                                    "copy the whole directory again")  # fmt: skip
        kind = next((kind for kind in NAMED if path.name.startswith(kind)), None)
        start = "" if kind is None else f"{kind}."
        for name, row in header.rows.items():
            if start + name in self._places:
                raise CheckpointInvalid(path, f"has {name!r}, which another of its files has too")
            self._places[start + name] = Place(path, row)


def fact_in(place: Place) -> Fact:
    return Fact(place.row.dtype, place.row.size)


def _state(path: Path, told: dict[str, Any]) -> dict[str, Any]:
    state, files = told.get("state"), told.get("files")
    if not isinstance(state, dict) or not isinstance(files, list):
        raise CheckpointInvalid(path, "lacks what zcompile.save writes to it",
                                "zcompile.load reads weights of others")  # fmt: skip
    for field, kind in _FIELDS.items():
        if not isinstance(state.get(field), kind):
            raise CheckpointInvalid(path, f"lacks {field!r}, or it is damaged")
    try:
        unpack(state, lambda name, on: torch.empty(0))
    except (ValueError, TypeError, AttributeError) as error:
        raise CheckpointInvalid(path, f"has values that are not sound: {error}") from error
    if not all(isinstance(file, str) and "/" not in file for file in files):
        raise CheckpointInvalid(path, "has a list of files that is damaged")
    return state


def _tensors_of(value: Any) -> Iterator[str]:
    """Names of tensors that packed values refer to."""
    if isinstance(value, dict):
        if isinstance(value.get("$tensor"), str):
            yield value["$tensor"]
        for inner in value.values():
            yield from _tensors_of(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from _tensors_of(inner)
