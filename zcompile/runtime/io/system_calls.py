"""One object makes every system call on files and directories of the disk tier and of checkpoints.

Whoever opens the tier hands that object down (`open_resources`), so that a test can put another in
its place which records calls, refuses them, or does less than they ask. The requests of transfers
do not pass here one by one: they go through rings, and `SystemCalls.ring` is where a ring is
opened. What a call means is the kernel's business; here are no decisions and no messages.
"""

import ctypes
import errno
import fcntl
import os
import struct
from collections.abc import Callable, Sequence
from pathlib import Path

from zcompile.runtime.io.rings import Ring

Bytes = bytes | bytearray | memoryview
Name = str | Path
"""The name of a file: a path, or a name in the directory whose descriptor is given."""
_AT_FDCWD = -100
_RENAME_EXCHANGE = 2
_KEEP_SIZE, _PUNCH_HOLE = 1, 2
"""Constants of linux/fcntl.h, linux/fs.h and linux/falloc.h."""
_FICLONERANGE = 0x4020940D
_CLONE = struct.Struct("qQQQ")
"""linux/fs.h: struct file_clone_range."""
_AT_EMPTY_PATH = 0x1000
_STATX_DIOALIGN = 0x2000
_DIOALIGN = struct.Struct("<II")
"""stx_dio_mem_align, stx_dio_offset_align at byte 152 of struct statx (linux/stat.h)."""


class SystemCalls:
    """The calls of this machine's kernel. All of them raise OSError."""

    def open(self, name: Name, flags: int, mode: int = 0o600, *, dir_fd: int | None = None) -> int:
        """Open a file; programs that we start do not inherit the descriptor."""
        return os.open(name, flags | os.O_CLOEXEC, mode, dir_fd=dir_fd)

    def close(self, fd: int) -> None:
        os.close(fd)

    def dup2(self, fd: int, onto: int) -> None:
        """Make the descriptor `onto` refer to the file of `fd`, and to its own no more."""
        os.dup2(fd, onto, inheritable=False)

    def pread(self, fd: int, into: bytearray | memoryview, offset: int) -> int:
        return os.preadv(fd, [into], offset)

    def pwrite(self, fd: int, source: Bytes, offset: int) -> int:
        return os.pwrite(fd, source, offset)

    def write_all(self, fd: int, content: Bytes, offset: int = 0) -> None:
        """Write all of `content`, by as many calls of `pwrite` as that takes."""
        done = 0
        with memoryview(content) as view:
            while done < len(view):
                if not (moved := self.pwrite(fd, view[done:], offset + done)):
                    raise OSError(errno.EIO, "the device takes no more")
                done += moved

    def read_all(self, fd: int, most: int, offset: int = 0) -> bytes:
        """The bytes of a file from `offset` on, `most` or as many as there are, by calls of
        `pread`."""
        content, done = bytearray(most), 0
        with memoryview(content) as view:
            while done < most and (moved := self.pread(fd, view[done:], offset + done)):
                done += moved
        return bytes(content[:done])

    def fsync(self, fd: int) -> None:
        os.fsync(fd)

    def fdatasync(self, fd: int) -> None:
        os.fdatasync(fd)

    def allocate(self, fd: int, offset: int, nbytes: int) -> None:
        """Reserve room on the disk for these bytes; a file that ended before them ends behind
        them."""
        os.posix_fallocate(fd, offset, nbytes)

    def truncate(self, fd: int, nbytes: int) -> None:
        os.ftruncate(fd, nbytes)

    def punch(self, fd: int, offset: int, nbytes: int) -> None:
        """Give the room of these bytes back; they read as zeros."""
        call = ctypes.CDLL(None, use_errno=True).fallocate
        call.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]
        if call(fd, _KEEP_SIZE | _PUNCH_HOLE, offset, nbytes) != 0:
            raise _last_error()

    def clone(self, fd: int, offset: int, source: int, begin: int, nbytes: int) -> None:
        """Let the file share, from `offset` on, `nbytes` of the file `source` from `begin` on."""
        fcntl.ioctl(fd, _FICLONERANGE, _CLONE.pack(source, begin, nbytes, offset))

    def fstat(self, fd: int) -> os.stat_result:
        return os.fstat(fd)

    def statvfs(self, of: int | Path) -> os.statvfs_result:
        return os.statvfs(of)

    def flock(self, fd: int, operation: int) -> None:
        fcntl.flock(fd, operation)

    def flags(self, fd: int) -> int:
        return fcntl.fcntl(fd, fcntl.F_GETFL)

    def set_flags(self, fd: int, flags: int) -> None:
        fcntl.fcntl(fd, fcntl.F_SETFL, flags)

    def direct_alignment(self, fd: int) -> tuple[int, int] | None:
        """The multiples in which memory and offset of a direct transfer come, if the kernel says
        so."""
        told = ctypes.create_string_buffer(256)
        statx = getattr(ctypes.CDLL(None), "statx", None)  # glibc 2.28
        if statx is None or statx(fd, b"", _AT_EMPTY_PATH, _STATX_DIOALIGN, told) != 0:
            return None
        if not int.from_bytes(told.raw[:4], "little") & _STATX_DIOALIGN:
            return None
        memory, offset = _DIOALIGN.unpack_from(told, 152)
        return (memory, offset) if memory and offset else None

    def stat(
        self, name: Name, *, dir_fd: int | None = None, follow: bool = False
    ) -> os.stat_result:
        """The `stat` result of what bears the name; of a symbolic link itself, unless told to
        `follow` it."""
        return os.stat(name, dir_fd=dir_fd, follow_symlinks=follow)

    def names(self, fd: int) -> Sequence[str]:
        """The names in a directory, in no order."""
        return os.listdir(fd)

    def rename(self, name: Name, new: Name, *, dir_fd: int | None = None) -> None:
        """Call `name` `new` from here on, in the place of what was called so.

        Both lie in one directory, if one is given.
        """
        os.rename(name, new, src_dir_fd=dir_fd, dst_dir_fd=dir_fd)

    def exchange(self, one: Name, other: Name) -> None:
        """Swap the names of two files, atomically."""
        call: Callable[..., int] | None
        call = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
        if call is None:
            raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
        names = [ctypes.c_char_p(os.fsencode(name)) for name in (one, other)]
        if call(_AT_FDCWD, names[0], _AT_FDCWD, names[1], ctypes.c_uint(_RENAME_EXCHANGE)) != 0:
            raise _last_error()

    def unlink(self, name: Name, *, dir_fd: int | None = None) -> None:
        os.unlink(name, dir_fd=dir_fd)

    def mkdir(self, name: Name, mode: int = 0o777, *, dir_fd: int | None = None) -> None:
        os.mkdir(name, mode, dir_fd=dir_fd)

    def rmdir(self, name: Name, *, dir_fd: int | None = None) -> None:
        """Remove an empty directory."""
        os.rmdir(name, dir_fd=dir_fd)

    def readlink(self, name: Name, *, dir_fd: int | None = None) -> str:
        return os.readlink(name, dir_fd=dir_fd)

    def symlink(self, target: str, name: Name, *, dir_fd: int | None = None) -> None:
        os.symlink(target, name, dir_fd=dir_fd)

    def chmod(self, fd: int, mode: int) -> None:
        os.fchmod(fd, mode)

    def utime(self, fd: int, read_ns: int, written_ns: int) -> None:
        """Set the times when a file was last read and written."""
        os.utime(fd, ns=(read_ns, written_ns))

    def attributes(self, fd: int) -> Sequence[str]:
        """The keys of the extended attributes of a file."""
        return os.listxattr(fd)

    def attribute(self, fd: int, key: str) -> bytes:
        return os.getxattr(fd, key)

    def set_attribute(self, fd: int, key: str, value: bytes) -> None:
        os.setxattr(fd, key, value)

    def ring(self, opened: Callable[[], Ring]) -> Ring:
        """The ring for the requests of transfers, which `opened` opens with calls of its own."""
        return opened()


def _last_error() -> OSError:
    """The OSError of a C function that just failed."""
    code = ctypes.get_errno()
    return OSError(code, os.strerror(code))


KERNEL = SystemCalls()
"""Makes the calls of everything that is not given another. It has no state."""
