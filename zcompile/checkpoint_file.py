"""Files of checkpoints that are there, opened for reading; anybody may have put them there.

A path that a user gives may lead through symbolic links, and what lies in a directory may be one
too: the cache of Hugging Face is made of them. What they lead to has to be a regular file.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from zcompile.errors import CheckpointInvalid, ZinfError
from zcompile.runtime.regular_file import open_regular
from zcompile.runtime.system_calls import SystemCalls


@contextmanager
def told_of(path: Path) -> Iterator[None]:
    """What the system refuses within is told as a checkpoint's. raises CheckpointInvalid"""
    try:
        yield
    except ZinfError:
        raise
    except FileNotFoundError as error:
        raise CheckpointInvalid(path, "does not exist", "name one that does") from error
    except OSError as error:
        raise CheckpointInvalid(path, f"cannot be read ({error.strerror or error})",
                                "look after the disk") from error  # fmt: skip
    except MemoryError as error:
        raise CheckpointInvalid(path, "has a part that is larger than memory") from error


@contextmanager
def reading(path: Path, system: SystemCalls) -> Iterator[int]:
    """A descriptor. raises CheckpointInvalid, also for what the system refuses within"""
    with told_of(path):
        fd = open_regular(system, path, os.O_RDONLY, follow=True)
        try:
            yield fd
        finally:
            system.close(fd)
