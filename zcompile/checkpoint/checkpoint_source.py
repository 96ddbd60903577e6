"""A checkpoint as a source of state; checked as a whole before anything is read of it."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from zcompile.checkpoint.directory import STATE_FILE
from zcompile.checkpoint.file import Folder, OpenFile
from zcompile.checkpoint.model_state import Fact
from zcompile.checkpoint.plain_values import unpack
from zcompile.checkpoint.safetensors_file import read_header
from zcompile.checkpoint.shards import Place, read_json
from zcompile.checkpoint.tensor_loader import Loader
from zcompile.errors import CheckpointInvalid

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

    def __init__(self, folder: Folder, loader: Loader) -> None:
        self.where = str(folder.path)
        self._loader = loader
        if not folder.holds(STATE_FILE):
            raise _without_state(folder)
        state = folder.file(STATE_FILE)
        told = read_json(state)
        self.meta = _state(state.path, told)
        self._places: dict[str, Place] = {}
        for file in told["files"]:
            self._take(folder.file(file), told.get("checkpoint"))
        for name in _tensors_of(self.meta):
            if name not in self._places:
                raise CheckpointInvalid(state.path, f"needs the tensor {name!r}, and "
                                        "none of its files has it")  # fmt: skip

    def facts(self) -> Mapping[str, Fact]:
        return {name: fact_in(place) for name, place in self._places.items()}

    def fill(self, name: str, target: Tensor) -> None:
        place = self._places[name]
        self._loader.fill(place.file, name, place.row, target)

    def _take(self, file: OpenFile, checkpoint: object) -> None:
        path, header = file.path, read_header(file)
        if header.metadata.get("checkpoint") != checkpoint:
            raise CheckpointInvalid(path, f"is not of the same checkpoint as {STATE_FILE}",
                                    "copy the whole directory again")  # fmt: skip
        kind = next((kind for kind in NAMED if path.name.startswith(kind)), None)
        start = "" if kind is None else f"{kind}."
        for name, row in header.rows.items():
            if start + name in self._places:
                raise CheckpointInvalid(path, f"has {name!r}, which another of its files has too")
            self._places[start + name] = Place(file, row)


def fact_in(place: Place) -> Fact:
    return Fact(place.row.dtype, place.row.size)


def _without_state(folder: Folder) -> CheckpointInvalid:
    """What a directory is that is no checkpoint. raises CheckpointInvalid too"""
    files = [name for name in folder.names() if name.endswith(".safetensors")]
    if any(not name.startswith("model") for name in files):
        return CheckpointInvalid(folder.path, f"lacks {STATE_FILE}, which is written last: it was "
                                 "not copied as a whole", "copy it again")  # fmt: skip
    if files:
        return CheckpointInvalid(folder.path, f"holds weights, and no {STATE_FILE}",
                                 "zcompile.load(model, path) reads weights alone")  # fmt: skip
    return CheckpointInvalid(folder.path, f"holds no {STATE_FILE}, so it is no checkpoint",
                             "name the directory that zcompile.save wrote")  # fmt: skip


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
    if not all(isinstance(file, str) and not set("/\0") & set(file) for file in files):
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
