"""Which ring serves a directory: the first of a list that works there, chosen once, at start."""

import errno
import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import NamedTuple

from zcompile.runtime.io.aio import KernelAio
from zcompile.runtime.io.directory import Directory
from zcompile.runtime.io.disk_trial import nameless_file, try_ring
from zcompile.runtime.io.io_threads import ThreadRing
from zcompile.runtime.io.ring import Ring
from zcompile.runtime.io.uring import IoUring

logger = logging.getLogger("zcompile.runtime.io.ring_choice")

RINGS: Mapping[str, Callable[[], Ring]] = {
    "aio": KernelAio,
    "io_uring": IoUring,
    "threads": ThreadRing,
    "buffered": partial(ThreadRing, direct=False),
}
DIRECT = ("aio", "io_uring", "threads")
"""In the order in which they are tried. benchmarks/disk.py compares them."""
BUFFERED = ("buffered",)
"""For files without O_DIRECT, on which the kernel's rings would block whoever submits."""


class Trial(NamedTuple):
    """refused  why this ring cannot be used in a directory; None if it can"""

    ring: str
    refused: str | None


def try_all(directory: Directory, direct: bool) -> tuple[Trial, ...]:
    """How every ring fares in `directory`; the first that is not refused would be used."""
    return tuple(_trial(name, directory, direct) for name in (DIRECT if direct else BUFFERED))


def choose(
    directories: Sequence[tuple[Directory, bool]], names: Sequence[str] = DIRECT
) -> list[Ring]:
    """One ring for each (directory, whether direct), shared by those that choose the same.

    raises  OSError of the last one tried, if none works; then nothing stays open
    """
    opened: dict[str, Ring] = {}
    try:
        return [_first(directory, names if direct else BUFFERED, direct, opened)
                for directory, direct in directories]  # fmt: skip
    except BaseException:  # a thread that cannot be started is none of the system's
        for ring in opened.values():
            ring.close()
        raise


def _first(directory: Directory, names: Sequence[str], direct: bool,
           opened: dict[str, Ring]) -> Ring:  # fmt: skip
    refusal = OSError(errno.ENOSYS, "there is no way to read and write")
    for name in names:
        try:
            ring = opened.get(name) or directory.system.ring(RINGS[name])
        except OSError as error:
            refusal = error
            continue
        try:
            with nameless_file(directory, direct) as fd:
                try_ring(ring, fd)
        except OSError as error:
            refusal = error
            if name not in opened:
                ring.close()
            continue
        opened[name] = ring
        logger.info("%s is reached through %s", directory.path, name)
        return ring
    raise refusal


def _trial(name: str, directory: Directory, direct: bool) -> Trial:
    try:
        choose([(directory, direct)], (name,))[0].close()
    except OSError as error:
        return Trial(name, error.strerror or str(error))
    return Trial(name, None)
