"""Finds weights that anybody exported: in files, in directories, in shards that an index names.

A directory holds `model.safetensors` or `pytorch_model.bin`, or shards of one of them beside
`<it>.index.json`, in the manner of Hugging Face. Where it holds both, safetensors is read.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from zcompile.checkpoint.directory import standing
from zcompile.checkpoint.durable import is_durable
from zcompile.checkpoint.file import Folder, OpenFile, OpenFiles, checkpoint_errors
from zcompile.checkpoint.safetensors import Place, read_header, read_json
from zcompile.checkpoint.torch_file import Held, TorchFile, is_torch_file
from zcompile.errors import CheckpointInvalid
from zcompile.runtime.io.files import directory_fd, is_directory, stat_through_links
from zcompile.runtime.io.system_calls import SystemCalls
from zcompile.runtime.transfer.interrupts import uninterrupted

SINGLES = ("model.safetensors", "pytorch_model.bin")
"""Files of a directory, the first that is there; an index adds `.index.json`."""
_WEIGHTS = re.compile(r"model.*\.safetensors|pytorch_model.*\.bin")


class _Listed(NamedTuple):
    """A file, and the tensors that an index has stand there; none, if there is no index."""

    file: OpenFile
    names: Sequence[str] = ()
    listed_in: str = ""


def weights_in(paths: Sequence[Path], opened: OpenFiles) -> dict[str, Place | Held]:
    """Every tensor of some files and directories, in the order of the files.

    raises  CheckpointInvalid
    """
    found: dict[str, Place | Held] = {}
    for file, names, listed_in in _files(paths, opened):
        there = _places(file)
        for name in names:
            if name not in there:
                raise CheckpointInvalid(
                    file.path, f"lacks {name!r}, which {listed_in} has stand there"
                )
        for name in (name for name in there if name in found):
            raise CheckpointInvalid(
                file.path,
                f"has {name!r}, and so has {found[name].file.path}",
                "name files that share no tensor",
            )
        found |= there
    return found


def _places(file: OpenFile) -> Mapping[str, Place | Held]:
    if is_torch_file(file):
        held = TorchFile(file)
        return {name: Held(held, row) for name, row in held.rows.items()}
    return {name: Place(file, row) for name, row in read_header(file).rows.items()}


def _files(paths: Sequence[Path], opened: OpenFiles) -> Iterator[_Listed]:
    """The files behind paths.

    raises  CheckpointInvalid
    """
    system = opened.system
    for path in paths:
        with checkpoint_errors(path):
            found = stat_through_links(system, path)
            if is_durable(path, system) and not _holds_weights(path, system):
                raise CheckpointInvalid(
                    path,
                    "is the directory of a durable run, and holds no safetensors files",
                    f"zcompile.resume({str(path)!r}, model) reads its last commit",
                )
            if found is not None and not is_directory(found):
                yield _Listed(opened.file(path))
                continue
            folder = opened.folder(standing(path, system))
            single = next((s for s in SINGLES if _has(folder, s)), None)
            if single is None:
                raise CheckpointInvalid(
                    folder.path,
                    f"holds neither {' nor '.join(SINGLES)}, nor an index of shards of one",
                    "name the directory that does",
                )
            yield from _shards(folder, single)


def _has(folder: Folder, single: str) -> bool:
    return folder.holds(f"{single}.index.json") or folder.holds(single)


def _shards(folder: Folder, single: str) -> list[_Listed]:
    """The file of a directory, or all that its index names.

    raises  CheckpointInvalid
    """
    index = f"{single}.index.json"
    if not folder.holds(index):
        return [_Listed(folder.file(single))]
    names = read_json(folder.file(index)).get("weight_map")
    if not isinstance(names, dict) or not all(_is_name(name) for name in names.values()):
        raise CheckpointInvalid(folder.path / index, "has no weight_map of names to files")
    files = []
    for file in sorted(set(names.values())):
        there = [name for name, other in names.items() if other == file]
        if not folder.holds(file):
            raise CheckpointInvalid(
                folder.path / file,
                f"does not exist, and {index} has {there[0]!r} stand there",
                "copy it again",
            )
        files.append(_Listed(folder.file(file), there, index))
    return files


@uninterrupted
def _holds_weights(directory: Path, system: SystemCalls) -> bool:
    with directory_fd(system, directory, follow=True) as fd:
        return any(_WEIGHTS.match(name) for name in system.names(fd))


def _is_name(name: object) -> bool:
    return isinstance(name, str) and not set("/\0") & set(name) and name not in ("", ".", "..")
