"""A directory that is replaced as a whole: at every instant a complete one stands.

A new one is written beside the old, as `<path>.partial-<pid>`, synced, and exchanged with it in one
call of the system. Where there is no such call the old one is `<path>.previous` for a moment. What
a killed process left behind is nobody's, since the system has dropped its lock, and is removed.
"""

import ctypes
import errno
import fcntl
import logging
import os
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from zcompile.errors import CheckpointUnwritable
from zcompile.runtime.claim import LOCK_NAME, TIER_FILE
from zcompile.runtime.index import DATA_NAME, INDEX_NAME

STATE_FILE = "training.json"
"""Written last; a directory that has it is a checkpoint."""
_OURS = re.compile(
    r"(model|optimizer|training)(-\d{5}-of-\d{5})?\.safetensors(\.index\.json)?\Z|training\.json\Z"
)
_AT_FDCWD = -100
_RENAME_EXCHANGE = 2
"""Of linux/fcntl.h and linux/fs.h."""

logger = logging.getLogger("zcompile.checkpoint")


def standing(path: Path) -> Path:
    """Where the checkpoint `path` stands now; says so, if a save was killed in the wrong moment."""
    previous = _previous(path)
    if not path.exists() and (previous / STATE_FILE).exists():
        logger.warning("a save to %s did not end; %s is the checkpoint before it", path, previous)
        return previous
    return path


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A new directory, which is `path` once the block has ended well, and gone if it has not.

    Files of others in the old directory come along.
    raises  CheckpointUnwritable; then, and whatever the block raises, the old one is as it was
    """
    path = Path(os.path.realpath(path))
    _check_replaceable(path)
    partial = path.with_name(f"{path.name}.partial-{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _sweep(path)
        partial.mkdir()
        lock = _locked(partial)
    except OSError as error:
        raise _unwritable(path, error) from error
    try:
        yield partial
        _bring_along(path, partial)
        sync(partial)
        _check_no_disk(path)  # a model may have been offloaded to it since
        _take_place(partial, path)
    except OSError as error:
        shutil.rmtree(partial, ignore_errors=True)
        if isinstance(error, CheckpointUnwritable):
            raise
        raise _unwritable(path, error) from error
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    finally:
        if lock is not None:
            os.close(lock)


def sync(path: Path) -> None:
    """The file or directory is on the disk. raises OSError"""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def exchange(one: Path, other: Path) -> bool:
    """Each becomes the other, at once; False where the system cannot. raises OSError"""
    call: Callable[..., int] | None = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if call is None:
        return False
    paths = [ctypes.c_char_p(os.fsencode(path)) for path in (one, other)]
    if call(_AT_FDCWD, paths[0], _AT_FDCWD, paths[1], ctypes.c_uint(_RENAME_EXCHANGE)) == 0:
        return True
    code = ctypes.get_errno()
    if code in (errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP):
        return False
    raise OSError(code, os.strerror(code), os.fspath(one))


def _take_place(new: Path, path: Path) -> None:
    previous = _previous(path)
    old = None
    if not path.exists():
        new.rename(path)
    elif exchange(new, path):
        old = new
    else:
        shutil.rmtree(previous, ignore_errors=True)
        path.rename(previous)
        new.rename(path)
    sync(path.parent)
    for left in (old, previous):
        if left is not None:
            shutil.rmtree(left, ignore_errors=True)


def _bring_along(old: Path, new: Path) -> None:
    """What others keep in the directory, such as a config.json, is not for us to remove."""
    for item in sorted(old.iterdir()) if old.is_dir() else ():
        if _OURS.match(item.name):
            continue
        if item.is_dir() and not item.is_symlink():
            shutil.copytree(item, new / item.name, symlinks=True)
        else:
            shutil.copy2(item, new / item.name, follow_symlinks=False)


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


def _sweep(path: Path) -> None:
    """Remove what saves to `path` left that were killed."""
    for left in path.parent.glob(f"{_escaped(path.name)}.partial-*"):
        if (lock := _locked(left)) is not None:
            logger.info("removing %s, which a killed save left", left)
            shutil.rmtree(left, ignore_errors=True)
            os.close(lock)


def _locked(directory: Path) -> int | None:
    """The lock on a directory; None if another process, or another save of this one, holds it."""
    try:
        fd = os.open(directory, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(fd)
        return None
    return fd


def _previous(path: Path) -> Path:
    return path.with_name(f"{path.name}.previous")


def _escaped(name: str) -> str:
    return re.sub(r"([*?\[])", r"[\1]", name)


def _unwritable(path: Path, error: OSError) -> CheckpointUnwritable:
    why = str(error) if error.strerror is None else error.strerror
    return CheckpointUnwritable(
        error.errno or errno.EIO, path, why, "give a directory with room that one may write to"
    )
