"""Directories of saved models, read for comparison, and the plain and tiered models saved to them.

The library that writes safetensors orders the metadata of a file by chance, so files are compared
by what they hold: the metadata as a mapping, and every byte of the tensors, where it lies.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from pairs import on_disk
from torch import nn


def pair(build: Callable[[], nn.Module], tmp_path: Path, **fields: Any) -> tuple[Any, Any]:
    """A model of `build`, and one with the same values that rests on disk."""
    torch.manual_seed(0)
    plain = build()
    torch.manual_seed(0)
    return plain, on_disk(build(), tmp_path, **fields)


def content(path: Path) -> dict[str, Any]:
    """What a file holds, or by their paths all files of a directory."""
    files = [path] if path.is_file() else sorted(p for p in path.rglob("*") if p.is_file())
    assert files, f"{path} is empty"
    return {str(file.relative_to(path)): _read(file) for file in files}


def _read(file: Path) -> Any:
    data = file.read_bytes()
    if file.suffix != ".safetensors":
        return data
    end = 8 + int.from_bytes(data[:8], "little")
    return json.loads(data[8:end]), data[end:]
