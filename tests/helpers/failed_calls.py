"""Calls on files that fail, one a run, in every way that they can; and what must not be left."""

import errno
import os
import re
import threading
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path

READS = ("EIO", "EINTR", "EAGAIN", "short")
WRITES = ("EIO", "ENOSPC", "EDQUOT", "EINTR", "EAGAIN", "short", "nothing")
FAULTS = {
    "open": ("EIO", "ENOSPC", "EDQUOT", "EMFILE", "EACCES"),
    "close": ("EIO", "EINTR", "ENOSPC", "EDQUOT"),
    "dup2": ("EIO", "EMFILE"),
    "pread": ("EIO", "short"),
    "pwrite": ("EIO", "ENOSPC", "EDQUOT", "short", "nothing"),
    "fsync": ("EIO", "ENOSPC", "EDQUOT"),
    "fdatasync": ("EIO", "ENOSPC", "EDQUOT"),
    "allocate": ("EIO", "ENOSPC", "EDQUOT", "EOPNOTSUPP"),
    "truncate": ("EIO", "ENOSPC"),
    "punch": ("EIO", "EINTR", "EOPNOTSUPP"),
    "clone": ("EIO", "ENOSPC", "EOPNOTSUPP", "EXDEV"),
    "fstat": ("EIO",),
    "statvfs": ("EIO",),
    "flock": ("EIO", "ENOLCK"),
    "flags": ("EIO",),
    "set_flags": ("EIO",),
    "direct_alignment": ("unknown",),
    "stat": ("EIO",),
    "names": ("EIO",),
    "rename": ("EIO", "ENOSPC"),
    "exchange": ("EIO", "ENOSYS"),
    "unlink": ("EIO",),
    "mkdir": ("EIO", "ENOSPC", "EDQUOT"),
    "rmdir": ("EIO", "ENOTEMPTY"),
    "readlink": ("EIO",),
    "symlink": ("EIO", "ENOSPC", "EPERM"),
    "chmod": ("EIO", "EPERM"),
    "utime": ("EIO",),
    "attributes": ("EIO", "ENOTSUP"),
    "attribute": ("EIO", "ENODATA"),
    "set_attribute": ("EIO", "ENOSPC", "ENOTSUP"),
    "ring": ("EIO", "ENOSYS", "EAGAIN"),
    "ring_read": READS,
    "ring_write": WRITES,
}
"""What each call can do. EINTR of calls that Python makes itself never comes to us (PEP 475)."""

CHECKPOINTS_ONLY = frozenset(
    (
        "exchange",
        "rmdir",
        "readlink",
        "symlink",
        "chmod",
        "utime",
        "attributes",
        "attribute",
        "set_attribute",
    )
)
"""Calls that the disk tier does not make; each of the others it does, and is failed there."""

Spot = tuple[str, str, int]
"""Name of a call, the file below the test's directory, and the how manyth of these it is."""


class Once:
    """Fails one call, `at`, in the way `fault`; `seen` are all, `commits` those that gave an index
    its name."""

    def __init__(self, root, at=None, fault=None):
        self.root, self.at, self.fault = root, at, fault
        self.counts, self.seen, self.hit = Counter(), [], False
        self.commits = 0
        self.lock = threading.Lock()

    def __call__(self, call, go):
        with self.lock:
            where = str(call.of).replace(str(self.root), "")
            where = re.sub(r"(partial|trial)-[0-9a-f]+", r"\1", where)
            named = call.name, re.sub(r"zinf-[0-9]+-[0-9]+\.tier", "scratch.tier", where)
            spot = (*named, self.counts[named])
            self.counts[named] += 1
            self.seen.append(spot)
            struck = spot == self.at
            self.hit = self.hit or struck
        result = self.fail(call, go) if struck else go()
        self.commits += named == ("rename", "/disk/zinf.index.new")
        return result

    def fail(self, call, go):
        given = call.arguments
        if self.fault == "unknown":
            return None
        if self.fault == "nothing":
            return 0
        if self.fault == "short" and call.name.startswith("ring_"):
            return go(max(given["nbytes"] // 2 // 512, 1) * 512)
        if self.fault == "short":
            view = memoryview(given["source" if call.name == "pwrite" else "into"])
            view = view[: max(len(view) // 2, 1)]
            if call.name == "pwrite":
                return os.pwrite(given["fd"], view, given["offset"])
            return os.preadv(given["fd"], [view], given["offset"])
        if call.name == "close":
            go()  # Linux gives the descriptor back, whatever it says
        code = getattr(errno, self.fault)
        raise OSError(code, os.strerror(code))


def open_below(root):
    found = []
    for fd in os.listdir("/proc/self/fd"):
        try:
            found.append(os.readlink(f"/proc/self/fd/{fd}"))
        except FileNotFoundError:  # that of the listing itself
            continue
    return [name for name in found if name.startswith(str(root))]


def running():
    return sorted(t.name for t in threading.enumerate() if t.name.startswith("zinf-"))


def kernel_threads():
    """Names of all threads of this process, but those that the kernel keeps for a ring."""
    names = []
    for task in os.listdir("/proc/self/task"):
        with suppress(OSError):  # it has ended meanwhile
            names.append(Path(f"/proc/self/task/{task}/comm").read_text(encoding="utf-8").strip())
    return [name for name in names if not name.startswith("iou-")]


def ended(most):
    """Whether no more threads are left: one that was joined is listed for a moment longer."""
    for _ in range(5000):
        if len(kernel_threads()) <= most:
            return True
        time.sleep(0.001)
    return False
