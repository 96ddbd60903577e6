"""Replaces a directory as a whole: at every instant a complete one stands.

A new one is written beside the old, as `<path>.zinf-partial-<pid>` and more, synced, and exchanged
with it in one call of the system. Where there is no such call the old one is
`<path>.zinf-previous` for a moment. Nobody else gives such names, so that leftovers of a killed
process are known, and removed; the system has dropped the lock on a partial directory. The path may
lead through links; names inside, or of such a directory, are not followed if they are links.
"""

import errno
import fcntl
import logging
import os
import re
import stat
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import NamedTuple, ParamSpec, TypeVar

from zcompile.errors import CheckpointUnwritable
from zcompile.ir.units import MiB
from zcompile.runtime.durable.index import DATA_NAME, INDEX_NAME
from zcompile.runtime.io.files import (
    directory_fd,
    is_directory,
    is_regular,
    kind_of,
    list_directory,
    open_regular,
    remove_tree,
    stat_through_links,
    walk_tree,
)
from zcompile.runtime.io.system_calls import SystemCalls
from zcompile.runtime.tiers.directory_lock import LOCK_NAME, TIER_FILE
from zcompile.runtime.transfer.interrupts import (
    deferred_interrupts,
    deliver_interrupts,
    uninterrupted,
)

COPY_BYTES = 1 * MiB
STATE_FILE = "training.json"
"""Written last; a directory that has it is a checkpoint."""
_PARTIAL = ".zinf-partial-"
_PREVIOUS = ".zinf-previous"
_OURS = re.compile(
    r"(model|optimizer|training)(-\d{5}-of-\d{5})?\.safetensors(\.index\.json)?\Z|training\.json\Z"
)
_NO_ATTRIBUTES = (errno.ENOTSUP, errno.ENODATA, errno.EINVAL, errno.EPERM, errno.EACCES)
"""Errors of a filesystem, or a user, that keeps fewer extended attributes: as `shutil.copystat`."""

P = ParamSpec("P")
R = TypeVar("R")

logger = logging.getLogger("zcompile.checkpoint.directory")


def standing(path: Path, system: SystemCalls) -> Path:
    """The path where the checkpoint `path` stands now; logs it, if a save was killed in the wrong
    moment.

    raises  OSError
    """
    if stat_through_links(system, path) is not None:
        return path
    previous = _previous(Path(os.path.realpath(path)))
    if not _is_left(previous, system):
        return path
    logger.warning("a save to %s did not end; %s is the checkpoint before it", path, previous)
    return previous


def _is_left(previous: Path, system: SystemCalls) -> bool:
    """Whether `previous` is a checkpoint, and no link: zcompile makes no links."""
    try:
        found = system.stat(previous)
    except FileNotFoundError:
        return False
    return is_directory(found) and stat_through_links(system, previous / STATE_FILE) is not None


class Made(NamedTuple):
    """A new directory: its path, and the descriptor by which it is written and locked."""

    path: Path
    fd: int


@contextmanager
def replacing(path: Path, system: SystemCalls, name: str = "") -> Iterator[Made]:
    """A context with a new directory, which becomes `path` once the block has ended well, and else
    is removed.

    Files of others in the old directory come along.

    system  makes all calls
    name    ends the name of the new directory, where other machines are to see it: they may still
            know that there was none by a name that was used before
    raises  CheckpointUnwritable; then, and whatever the block raises, the old one is as it was
    """
    made: Made | None = None
    try:
        with deferred_interrupts():
            # A new directory beside the old one, after leftovers of killed saves are gone.
            path = Path(os.path.realpath(path))
            _check_elsewhere(path)
            _check_replaceable(path, system)
            _make(path.parent, system)
            _sweep(path, system)
            made = _made(path, system, f"-{name}" if name else "")
        yield made
        with deferred_interrupts():
            # The new directory takes the place of the old one, with files of others in it.
            _bring_along_others(standing(path, system), made, system)
            system.fsync(made.fd)
            _check_inside(path, system)  # a model may have been offloaded to it since
            _check_named(made, path, system)
            _take_place(made.path, path, system)
    except OSError as error:
        if made is not None:
            _clear(made.path, system, made.fd)
        if isinstance(error, CheckpointUnwritable):
            raise
        raise unwritable(path, error) from error
    except BaseException:
        if made is not None:
            _clear(made.path, system, made.fd)
        raise
    finally:
        if made is not None:
            with suppress(OSError):  # nothing was written by it, and it is given back anyway
                system.close(made.fd)


def _made(path: Path, system: SystemCalls, ending: str) -> Made:
    """Make a new directory beside `path`, and lock it.

    ending  of its name
    raises  OSError
    """
    new = Path(f"{path}{_PARTIAL}{os.getpid()}{ending}")
    system.mkdir(new)
    try:
        lock = _locked(new, system)
    except OSError:
        with suppress(OSError):  # what is in it would not be ours
            system.rmdir(new)
        raise
    if lock is None:  # another save took it for one that was killed, and removes it
        raise CheckpointUnwritable(
            errno.EBUSY,
            path,
            "another save to it is under way",
            "wait until it has ended, or name another path",
        )
    return Made(new, lock)


def _check_named(made: Made, path: Path, system: SystemCalls) -> None:
    """Check that the directory that was written is the one that will take the place of `path`.

    raises  OSError
    """
    if not os.path.samestat(system.stat(made.path), system.fstat(made.fd)):
        raise CheckpointUnwritable(
            errno.EBUSY,
            path,
            f"{made.path} was replaced by something else meanwhile",
            "look who did that, and save again",
        )


def _check_elsewhere(path: Path) -> None:
    """Refuse to replace the working directory: the process would find no relative path any more."""
    try:
        here = Path(os.path.realpath("."))
    except FileNotFoundError:
        return  # it is gone already
    if here.is_relative_to(path):
        raise CheckpointUnwritable(
            errno.EBUSY,
            path,
            "this process works in it, and a save replaces the whole directory",
            "name another path, such as a new directory in it",
        )


@uninterrupted
def sync(path: Path, system: SystemCalls) -> None:
    """Bring the names in a directory to the disk.

    raises  OSError
    """
    fd = system.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        system.fsync(fd)
    finally:
        system.close(fd)


def exchange(one: Path, other: Path, system: SystemCalls) -> bool:
    """Exchange two paths in one call; False where the system cannot.

    raises  OSError
    """
    try:
        system.exchange(one, other)
    except OSError as error:
        if error.errno in (errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP):
            return False
        raise
    return True


def _take_place(new: Path, path: Path, system: SystemCalls) -> None:
    """Put `new` in the place of `path`, for certain; where that fails, all is as it was.

    raises  OSError
    """
    previous = _previous(path)
    with ExitStack() as undo:
        if stat_through_links(system, path) is None:
            system.rename(new, path)
            undo.callback(system.rename, path, new)
        elif exchange(new, path, system):
            undo.callback(system.exchange, new, path)
        else:
            _make_way(previous, path, system)
            system.rename(path, previous)
            undo.callback(system.rename, previous, path)
            system.rename(new, path)
            undo.callback(system.rename, path, new)
        sync(path.parent, system)
        undo.pop_all()
    for left in (new, previous):
        _clear(left, system)


def _make_way(previous: Path, path: Path, system: SystemCalls) -> None:
    """Remove the leftover of an earlier save, which is not needed, since `path` stands.

    raises  OSError
    """
    try:
        found = system.stat(previous)
    except FileNotFoundError:
        return
    if not is_directory(found):
        raise CheckpointUnwritable(
            errno.EEXIST,
            path,
            f"{previous} is {kind_of(found)}, which no save made",
            "remove it, or name another path",
        )
    remove_tree(system, previous)


@uninterrupted
def _clear(left: Path, system: SystemCalls, lock: int | None = None) -> None:
    """Remove a directory that nobody needs, if it is one; log what stays behind.

    lock  only if it is the directory of this descriptor: another may have its name
    """
    try:
        found = system.stat(left)
        if lock is not None and not os.path.samestat(found, system.fstat(lock)):
            logger.warning("%s stays behind: it was not made by this save", left)
        elif is_directory(found):
            remove_tree(system, left)
    except FileNotFoundError:
        return
    except OSError as error:
        logger.warning("%s stays behind: %s", left, error.strerror or error)


def _make(directory: Path, system: SystemCalls) -> None:
    """Make a directory and its parents; each name is on the disk before anything is below it."""
    lacking = [p for p in (directory, *directory.parents) if stat_through_links(system, p) is None]
    for missing in reversed(lacking):
        with suppress(FileExistsError):  # another process was quicker
            system.mkdir(missing)
        sync(missing.parent, system)


def _bring_along_others(old: Path, new: Made, system: SystemCalls) -> None:
    """Copy the files that others keep in the directory, such as a config.json."""
    if is_directory(stat_through_links(system, old)):
        with directory_fd(system, old) as source:
            _bring_along(system, source, new.fd, old, _OURS)


def _bring_along(
    system: SystemCalls, old: int, new: int, path: Path, but: re.Pattern[str] | None = None
) -> None:
    """Copy the content of the directory `old` to `new`.

    path  of `old`, for people
    but   names that stay behind
    """
    for name, found in list_directory(system, old):
        deliver_interrupts()
        if but is not None and but.match(name):
            continue
        if stat.S_ISLNK(found.st_mode):
            system.symlink(system.readlink(name, dir_fd=old), name, dir_fd=new)
        elif is_regular(found):
            _copy(system, name, old, new)
        elif is_directory(found):
            system.mkdir(name, dir_fd=new)
            with (
                directory_fd(system, name, dir_fd=old) as source,
                directory_fd(system, name, dir_fd=new) as to,
            ):
                _bring_along(system, source, to, path / name)
                _make_alike(system, source, to)
                system.fsync(to)
        else:
            raise _uncopied(path, name, found)


def _copy(system: SystemCalls, name: str, old: int, new: int) -> None:
    """Copy a file with its mode and times, to the disk."""
    source = open_regular(system, name, os.O_RDONLY, dir_fd=old)
    try:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
        made = system.open(name, flags, dir_fd=new)
        try:
            block, at = memoryview(bytearray(COPY_BYTES)), 0
            while moved := system.pread(source, block, at):
                system.write_all(made, block[:moved], at)
                at += moved
                deliver_interrupts()
            _make_alike(system, source, made)
            system.fsync(made)
        finally:
            system.close(made)
    finally:
        system.close(source)


def _make_alike(system: SystemCalls, old: int, new: int) -> None:
    """Copy extended attributes, then the mode, which may forbid to set them, and times."""
    for key in _if_kept(system.attributes, old) or ():
        if (value := _if_kept(system.attribute, old, key)) is not None:
            _if_kept(system.set_attribute, new, key, value)
    found = system.fstat(old)
    system.chmod(new, stat.S_IMODE(found.st_mode))
    system.utime(new, found.st_atime_ns, found.st_mtime_ns)


def _if_kept(call: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R | None:
    """The result of a call on extended attributes; None where they are not kept.

    raises  OSError
    """
    try:
        return call(*args, **kwargs)
    except OSError as error:
        if error.errno not in _NO_ATTRIBUTES:
            raise
        return None


def _check_replaceable(path: Path, system: SystemCalls) -> None:
    """Refuse to replace anything but a checkpoint or an empty directory."""
    there = stat_through_links(system, path)
    if there is None:
        return
    if is_directory(there):
        with directory_fd(system, path) as fd:
            empty = not system.names(fd)
        if empty or stat_through_links(system, path / STATE_FILE) is not None:
            _check_inside(path, system)
            return
    what = "a directory that holds no checkpoint" if is_directory(there) else kind_of(there)
    raise CheckpointUnwritable(
        errno.EEXIST,
        path,
        f"there is {what}",
        "name a path that does not exist, or a checkpoint to be replaced",
    )


def _check_inside(path: Path, system: SystemCalls) -> None:
    """Check that everything in the directory may go, or can come along.

    A run whose files are moved away goes on in files that nobody finds again.
    """

    def look(at: Path, found: os.stat_result) -> None:
        name = at.name
        if not is_directory(found) and (
            name in (LOCK_NAME, DATA_NAME, INDEX_NAME) or TIER_FILE.match(name)
        ):
            raise CheckpointUnwritable(
                errno.EEXIST,
                path,
                f"{at} is of the disk tier of a model, which would lose it",
                "name another path",
            )
        known = is_directory(found) or is_regular(found) or stat.S_ISLNK(found.st_mode)
        if not known and not (at.parent == path and _OURS.match(name)):
            raise _uncopied(at.parent, name, found)

    if is_directory(stat_through_links(system, path)):
        with directory_fd(system, path) as fd:
            walk_tree(system, fd, path, look)


def _uncopied(path: Path, name: str, found: os.stat_result) -> CheckpointUnwritable:
    return CheckpointUnwritable(
        errno.EEXIST,
        path,
        f"{path / name} is {kind_of(found)}, which cannot come along",
        "move it elsewhere, or name another path",
    )


def _sweep(path: Path, system: SystemCalls) -> None:
    """Remove the leftovers of killed saves to `path`."""
    with directory_fd(system, path.parent) as fd:
        names = [name for name in system.names(fd) if name.startswith(f"{path.name}{_PARTIAL}")]
    if names:
        sync(path.parent, system)  # an exchange may have come before the end, and be lost otherwise
    for left in map(path.with_name, sorted(names)):
        if (lock := _locked(left, system)) is not None:
            logger.info("removing %s, which a killed save left", left)
            try:
                _clear(left, system, lock)
            finally:
                system.close(lock)


def _locked(directory: Path, system: SystemCalls) -> int | None:
    """Lock a directory; None if there is none by now, or another save holds the lock.

    raises  OSError
    """
    try:
        fd = system.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except (FileNotFoundError, NotADirectoryError):
        return None
    try:
        system.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # It may have been removed, by who held the lock, since it was opened.
        if os.path.samestat(system.stat(directory), system.fstat(fd)):
            return fd
    except (FileNotFoundError, BlockingIOError):
        pass
    except OSError:
        system.close(fd)
        raise
    system.close(fd)
    return None


def _previous(path: Path) -> Path:
    return Path(f"{path}{_PREVIOUS}")


def unwritable(path: Path, error: OSError) -> CheckpointUnwritable:
    """The error about a path at which the system refused to write a checkpoint."""
    why = str(error) if error.strerror is None else error.strerror
    return CheckpointUnwritable(
        error.errno or errno.EIO, path, why, "give a directory with room that one may write to"
    )
