"""A directory that is replaced as a whole: at every instant a complete one stands.

A new one is written beside the old, as `<path>.zinf-partial-<pid>`, synced, and exchanged with it
in one call of the system. Where there is no such call the old one is `<path>.zinf-previous` for a
moment. Nobody else gives such names, so that what a killed process left behind is known, and is
removed; of what is partial the system has dropped the lock.
"""

import errno
import fcntl
import logging
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from zcompile.errors import CheckpointUnwritable
from zcompile.runtime.claim import LOCK_NAME, TIER_FILE
from zcompile.runtime.index import DATA_NAME, INDEX_NAME
from zcompile.runtime.interrupts import deferred_interrupts, uninterrupted
from zcompile.runtime.system_calls import SystemCalls
from zcompile.units import MiB

COPY_BYTES = 1 * MiB
STATE_FILE = "training.json"
"""Written last; a directory that has it is a checkpoint."""
_PARTIAL = ".zinf-partial-"
_PREVIOUS = ".zinf-previous"
_OURS = re.compile(
    r"(model|optimizer|training)(-\d{5}-of-\d{5})?\.safetensors(\.index\.json)?\Z|training\.json\Z"
)

logger = logging.getLogger("zcompile.checkpoint_directory")


def standing(path: Path) -> Path:
    """Where the checkpoint `path` stands now; says so, if a save was killed in the wrong moment."""
    previous = _previous(path)
    if not path.exists() and (previous / STATE_FILE).exists():
        logger.warning("a save to %s did not end; %s is the checkpoint before it", path, previous)
        return previous
    return path


@contextmanager
def replacing(path: Path, system: SystemCalls) -> Iterator[Path]:
    """A new directory, which is `path` once the block has ended well, and gone if it has not.

    Files of others in the old directory come along.

    system  makes the calls that change anything
    raises  CheckpointUnwritable; then, and whatever the block raises, the old one is as it was
    """
    path = Path(os.path.realpath(path))
    _check_replaceable(path)
    partial = path.with_name(f"{path.name}{_PARTIAL}{os.getpid()}")
    lock, mine = None, False
    try:
        with deferred_interrupts():
            _make(path.parent, system)
            _sweep(path, system)
            system.mkdir(partial)
            mine = True
            lock = _locked(partial, system)
        yield partial
        if (old := standing(path)).is_dir():
            _bring_along(old, partial, system, _OURS)
        sync(partial, system)
        _check_no_disk(path)  # a model may have been offloaded to it since
        with deferred_interrupts():
            _take_place(partial, path, system)
    except OSError as error:
        if mine:
            shutil.rmtree(partial, ignore_errors=True)
        if isinstance(error, CheckpointUnwritable):
            raise
        raise _unwritable(path, error) from error
    except BaseException:
        if mine:
            shutil.rmtree(partial, ignore_errors=True)
        raise
    finally:
        if lock is not None:
            with suppress(OSError):  # nothing was written by it, and it is given back anyway
                system.close(lock)


@uninterrupted
def sync(path: Path, system: SystemCalls) -> None:
    """The file or directory is on the disk. raises OSError"""
    fd = system.open(path, os.O_RDONLY)
    try:
        system.fsync(fd)
    finally:
        system.close(fd)


def exchange(one: Path, other: Path, system: SystemCalls) -> bool:
    """Each becomes the other, at once; False where the system cannot. raises OSError"""
    try:
        system.exchange(one, other)
    except OSError as error:
        if error.errno in (errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP):
            return False
        raise
    return True


def _take_place(new: Path, path: Path, system: SystemCalls) -> None:
    previous = _previous(path)
    old = None
    if not path.exists():
        system.rename(new, path)
    elif exchange(new, path, system):
        old = new
    else:
        shutil.rmtree(previous, ignore_errors=True)
        system.rename(path, previous)
        try:
            system.rename(new, path)
        except OSError:
            system.rename(previous, path)
            raise
    sync(path.parent, system)
    for left in (old, previous):
        if left is not None:
            shutil.rmtree(left, ignore_errors=True)


def _make(directory: Path, system: SystemCalls) -> None:
    """Also what it lies in; each name is on the disk before anything is below it."""
    for missing in reversed([p for p in (directory, *directory.parents) if not p.exists()]):
        with suppress(FileExistsError):  # another process was quicker
            system.mkdir(missing)
        sync(missing.parent, system)


def _bring_along(
    old: Path, new: Path, system: SystemCalls, but: re.Pattern[str] | None = None
) -> None:
    """What others keep in the directory, such as a config.json, is not for us to lose.

    but  names that stay behind
    """
    for item in sorted(old.iterdir()):
        to = new / item.name
        if but is not None and but.match(item.name):
            continue
        if item.is_symlink() or not (item.is_dir() or item.is_file()):
            shutil.copy2(item, to, follow_symlinks=False)
        elif item.is_file():
            _copy(item, to, system)
        else:
            system.mkdir(to)
            _bring_along(item, to, system)
            shutil.copystat(item, to)
            sync(to, system)


def _copy(item: Path, to: Path, system: SystemCalls) -> None:
    """A file with its mode and times; it is on the disk."""
    source = system.open(item, os.O_RDONLY)
    try:
        made = system.open(to, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW)
        try:
            block, at = memoryview(bytearray(COPY_BYTES)), 0
            while moved := system.pread(source, block, at):
                system.write_all(made, block[:moved], at)
                at += moved
            shutil.copystat(item, to)
            system.fsync(made)
        finally:
            system.close(made)
    finally:
        system.close(source)


def _check_replaceable(path: Path) -> None:
    if path.is_dir() and ((path / STATE_FILE).exists() or not any(path.iterdir())):
        _check_no_disk(path)
        return
    if path.exists():
        what = "a directory that holds no checkpoint" if path.is_dir() else "a file"
        raise CheckpointUnwritable(
            errno.EEXIST,
            path,
            f"there is {what}",
            "name a path that does not exist, or a checkpoint to be replaced",
        )


def _check_no_disk(path: Path) -> None:
    """A run whose files are moved away goes on in files that nobody finds again."""
    for folder, _, files in os.walk(path):
        for name in files:
            if name in (LOCK_NAME, DATA_NAME, INDEX_NAME) or TIER_FILE.match(name):
                raise CheckpointUnwritable(
                    errno.EEXIST,
                    path,
                    f"{Path(folder) / name} is of the disk tier of a model, which would lose it",
                    "name another path",
                )


def _sweep(path: Path, system: SystemCalls) -> None:
    """Remove what saves to `path` left that were killed."""
    for left in path.parent.glob(f"{_escaped(path.name)}{_PARTIAL}*"):
        if (lock := _locked(left, system)) is not None:
            logger.info("removing %s, which a killed save left", left)
            shutil.rmtree(left, ignore_errors=True)
            system.close(lock)


def _locked(directory: Path, system: SystemCalls) -> int | None:
    """The lock on a directory; None if it is none, or another save holds it. raises OSError"""
    try:
        fd = system.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except (FileNotFoundError, NotADirectoryError):
        return None
    try:
        system.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        system.close(fd)
        if isinstance(error, BlockingIOError):
            return None
        raise
    return fd


def _previous(path: Path) -> Path:
    return path.with_name(f"{path.name}{_PREVIOUS}")


def _escaped(name: str) -> str:
    return re.sub(r"([*?\[])", r"[\1]", name)


def _unwritable(path: Path, error: OSError) -> CheckpointUnwritable:
    why = str(error) if error.strerror is None else error.strerror
    return CheckpointUnwritable(
        error.errno or errno.EIO, path, why, "give a directory with room that one may write to"
    )
