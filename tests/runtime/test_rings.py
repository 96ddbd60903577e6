"""Every ring does what the engine relies on, and the one that is used is one that works there."""

import errno
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from zcompile.ir.units import MiB
from zcompile.runtime.device.pages import host_pages
from zcompile.runtime.io import system_calls, trial
from zcompile.runtime.io.files import Directory
from zcompile.runtime.io.rings import Outcome, Request
from zcompile.runtime.io.system_calls import KERNEL
from zcompile.runtime.io.trial import direct_granule, nameless_file, supports_direct, try_ring
from zcompile.runtime.meter import Meter
from zcompile.runtime.tiers.disk import DiskTier

ROOT = Path(__file__).parents[2]
UNIT = 4096


@pytest.fixture(params=trial.RINGS)
def ring(request, own_threads):
    before = own_threads()
    try:
        ring = trial.RINGS[request.param]()
    except OSError as error:
        pytest.skip(f"{request.param} is refused: {error.strerror}")
    yield ring
    ring.close()
    ring.close()
    assert own_threads() == before


def takes(path: Path) -> bool:
    with Directory(path) as directory:
        return supports_direct(directory)


@contextmanager
def trial_file(path: Path, direct: bool) -> Iterator[int]:
    with Directory(path) as directory, nameless_file(directory, direct) as fd:
        yield fd


@pytest.fixture
def file(tmp_path, ring):
    """A descriptor as the ring's files have it: with O_DIRECT, if this disk has that."""
    with trial_file(tmp_path, direct=takes(tmp_path)) as fd:
        yield fd


def reaped(ring, count: int) -> dict[int, int]:
    """Results of `count` outcomes by key."""
    found: list[Outcome] = []
    while len(found) < count:
        found += ring.reap()
    assert len(found) == count
    return dict(found)


def test_what_is_written_is_read(ring, file):
    source, into = host_pages(64 * UNIT).random_(0, 255), host_pages(64 * UNIT)
    for write, memory in ((True, source), (False, into)):
        requests = [
            Request(n, write, file, memory.data_ptr() + n * UNIT, UNIT, n * UNIT) for n in range(64)
        ]
        while requests:
            requests = requests[ring.submit(requests) :]
        assert reaped(ring, 64) == dict.fromkeys(range(64), UNIT)
    assert torch.equal(into, source)


def test_offsets_beyond_four_gib_are_kept(ring, file):
    memory = host_pages(2 * UNIT)
    memory[:UNIT] = 7
    at = (5 << 30) + UNIT
    for key, write in ((1 << 40, True), (3, False)):
        ring.submit([Request(key, write, file, memory.data_ptr() + UNIT * (not write), UNIT, at)])
        assert reaped(ring, 1) == {key: UNIT}
    assert memory[UNIT:].eq(7).all()


def test_an_error_is_an_outcome(ring, file):
    memory = host_pages(UNIT)
    os.ftruncate(file, UNIT)
    closed = os.dup(file)
    os.close(closed)
    ring.submit([Request(1, False, file, memory.data_ptr(), UNIT, UNIT)])
    assert reaped(ring, 1) == {1: 0}  # the end of the file
    request = Request(2, False, closed, memory.data_ptr(), UNIT, 0)
    if ring.name == "aio":
        with pytest.raises(OSError, match="Bad file descriptor"):
            ring.submit([request])
    else:
        ring.submit([request])
        assert reaped(ring, 1) == {2: -errno.EBADF}


def test_a_call_that_is_cut_short_by_a_bad_request_starts_what_stands_before_it(ring, file):
    memory = host_pages(3 * UNIT)
    os.ftruncate(file, UNIT)
    closed = os.dup(file)
    os.close(closed)
    requests = [
        Request(n, False, fd, memory.data_ptr() + n * UNIT, UNIT, 0)
        for n, fd in enumerate((file, closed, file))
    ]
    started = ring.submit(requests)
    assert started >= 1
    found = reaped(ring, started)
    assert found[0] == UNIT
    if started > 1:
        assert (found[1], found[2]) == (-errno.EBADF, UNIT)


def test_one_thread_reaps_while_another_submits(ring, file):
    os.ftruncate(file, MiB)
    memory = host_pages(MiB)
    found: list[dict[int, int]] = []
    thread = threading.Thread(target=lambda: found.append(reaped(ring, 200)))
    ring.submit([Request(0, False, file, memory.data_ptr(), UNIT, 0)])
    thread.start()
    for n in range(1, 200):
        assert ring.submit([Request(n, False, file, memory.data_ptr(), UNIT, n * UNIT)]) == 1
    thread.join(30)
    assert found == [dict.fromkeys(range(200), UNIT)]


def test_granules_are_what_the_disk_says(tmp_path):
    if not takes(tmp_path):
        pytest.skip("this disk has no O_DIRECT")
    with trial_file(tmp_path, direct=True) as fd:
        granule = direct_granule(KERNEL, fd)
        assert granule in (512, 1024, 2048, 4096)
        memory = host_pages(2 * granule)
        assert os.pwritev(fd, [memoryview(memory.numpy())[granule:]], granule) == granule


def test_a_kernel_that_does_not_say_is_given_whole_blocks(tmp_path, monkeypatch):
    class OldLibrary:
        def __init__(self, name):
            pass

    monkeypatch.setattr(system_calls.ctypes, "CDLL", OldLibrary)
    with trial_file(tmp_path, direct=False) as fd:
        assert direct_granule(KERNEL, fd) == UNIT


def test_a_ring_that_loses_bytes_is_not_used(tmp_path):
    class Losing(trial.ThreadRing):
        def submit(self, requests):
            return super().submit(
                [r for r in requests if not r.write] or [requests[0]._replace(write=False)]
            )

    ring = Losing()
    with trial_file(tmp_path, direct=takes(tmp_path)) as fd:
        os.ftruncate(fd, UNIT)
        with pytest.raises(OSError, match="a block did not come back as it was written"):
            try_ring(ring, fd)
    ring.close()


@pytest.mark.parametrize(
    ("refused", "used"),
    [
        ((), "aio"),
        (("aio",), "threads"),
    ],
)
def test_the_first_that_works_is_used(tmp_path, monkeypatch, refused, used):
    if not takes(tmp_path):
        pytest.skip("this disk has no O_DIRECT")

    def no() -> None:
        raise OSError(errno.EPERM, os.strerror(errno.EPERM))

    for name in refused:
        monkeypatch.setitem(trial.RINGS, name, no)
    with Directory(tmp_path) as directory:
        trials = trial.try_rings(directory, direct=True)
    assert next(t.ring for t in trials if t.refused is None) == used
    assert {t.ring: t.refused for t in trials if t.ring in refused} == dict.fromkeys(
        refused, "Operation not permitted"
    )
    tier = DiskTier((tmp_path,), {}, Meter(), lambda error: None)
    assert tier.rings == (used,)
    tier.close()
    assert list(tmp_path.iterdir()) == []


FORBID = """
import ctypes, struct, sys
from pathlib import Path
import torch
directory, *numbers = sys.argv[1:]
libc = ctypes.CDLL(None, use_errno=True)
code = struct.pack("HBBI", 0x20, 0, 0, 0)  # load the number of the system call
for number in numbers:
    code += struct.pack("HBBI", 0x15, 0, 1, int(number))  # if it is this one
    code += struct.pack("HBBI", 0x06, 0, 0, 0x00050001)  # fail with EPERM
code += struct.pack("HBBI", 0x06, 0, 0, 0x7FFF0000)  # allow
held = ctypes.create_string_buffer(code)
program = ctypes.create_string_buffer(struct.pack("HxxxxxxQ", len(code) // 8,
                                                  ctypes.addressof(held)))
if libc.prctl(38, 1, 0, 0, 0) or libc.prctl(22, 2, program):
    sys.exit("skip")
from zcompile.runtime.meter import Meter
from zcompile.runtime.device.pages import host_pages
from zcompile.runtime.tiers.disk import DiskTier
from zcompile.runtime.tiers.base import Buffer
tier = DiskTier([Path(directory)], {}, Meter(), print)
extent = tier.reserve(1 << 20, "w")
tier.write(extent, 0, Buffer.over(host_pages(1 << 20).fill_(3))).wait()
into = Buffer.over(host_pages(1 << 20))
tier.read(extent, 0, into).wait()
assert into.memory.eq(3).all()
tier.close()
sys.stdout.write(tier.rings[0])
"""


@pytest.mark.slow
@pytest.mark.skipif(os.uname().machine != "x86_64", reason="numbers of system calls differ")
@pytest.mark.parametrize(
    ("numbers", "used"),
    [
        (("206",), "threads"),  # io_setup
        (("209",), "threads"),  # io_submit: set up, but of no use
    ],
)
def test_what_a_container_forbids_is_not_used(tmp_path, numbers, used):
    if not takes(tmp_path):
        pytest.skip("this disk has no O_DIRECT")
    done = subprocess.run(
        [sys.executable, "-c", FORBID, str(tmp_path), *numbers],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=600,  # it imports torch, beside others
        check=False,
    )
    if done.stderr == "skip\n":
        pytest.skip("one may not filter system calls here")
    assert (done.returncode, done.stdout) == (0, used), done.stderr
    assert list(tmp_path.iterdir()) == []
