"""What a durable directory holds, asked of a path: no store has it open."""

from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from zcompile.runtime.durable import check, files, index
from zcompile.runtime.io.files import Directory


def read_index(path: Path) -> tuple[index.Index, bytes] | None:
    """The last commit; None if there is none."""
    with Directory(path) as directory:
        return index.read_index(directory)


def read_header(path: Path) -> files.DataHeader | None:
    with Directory(path) as directory:
        return files.read_header(directory)


def check_all(found: index.Index, paths: Sequence[Path]) -> int:
    """Every checksum of a commit; how many bytes were read."""
    with ExitStack() as stack:
        return check.check_all(found, [stack.enter_context(Directory(p)) for p in paths])
