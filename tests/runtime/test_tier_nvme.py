"""The disk tier meets a bad day: every fault has a sentence, and none is silent."""

import errno
import fcntl
import os
import threading
import time
from pathlib import Path

import pytest
from border import Border
from rank_pool import forked

from zcompile.errors import DiskOwned, DiskUnusable, IOFault, TierFull
from zcompile.ir.units import MiB
from zcompile.runtime.device.pages import host_pages
from zcompile.runtime.io.files import Directory
from zcompile.runtime.io.trial import check_buffered, supports_direct
from zcompile.runtime.meter import Meter
from zcompile.runtime.tiers import directory_lock, disk
from zcompile.runtime.tiers.base import Buffer
from zcompile.runtime.tiers.directory_lock import LOCK_NAME, TRIAL_FILE
from zcompile.runtime.tiers.disk import DiskTier

UNIT = 4096


@pytest.fixture
def open_tier(tmp_path, own_threads):
    tiers, before = [], own_threads()

    def open_one(*directories: Path, **throttle: float) -> DiskTier:
        tiers.append(DiskTier(directories or (tmp_path,), throttle, Meter(), lambda error: None))
        return tiers[-1]

    yield open_one
    for tier in tiers:
        tier.close()
    assert own_threads() == before


def filled(nbytes: int, value: int) -> Buffer:
    return Buffer.over(host_pages(nbytes).fill_(value))


def tier_files(directory: Path) -> list[str]:
    return sorted(p.name for p in directory.glob("*.tier"))


def test_a_read_error_names_entry_file_and_offset(faults, open_tier, tmp_path):
    tier = open_tier()
    tier.reserve(UNIT, "first")
    extent = tier.reserve(2 * UNIT, "layers.3.weight")
    faults.fail("read")
    with pytest.raises(IOFault) as caught:
        tier.read(extent, UNIT, filled(UNIT, 0)).wait()
    assert caught.value.errno == errno.EIO
    assert "read of 'layers.3.weight' failed: Input/output error" in str(caught.value)
    assert f"(0 of 4096 bytes at offset 8192 of {tmp_path}" in str(caught.value)


def test_a_full_disk_shows_before_anything_is_written(open_tier, monkeypatch):
    tier = open_tier()

    def full(fd, offset, nbytes):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(TierFull, match=r"no tier has 1\.00 MiB left for 'w'"):
        tier.reserve(1 * MiB, "w")


def test_the_last_of_a_disk_is_used_when_a_generous_step_does_not_fit(open_tier, monkeypatch):
    tier = open_tier()
    really = os.posix_fallocate

    def nearly_full(fd, offset, nbytes):
        if offset + nbytes > 2 * MiB:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        really(fd, offset, nbytes)

    monkeypatch.setattr(os, "posix_fallocate", nearly_full)
    assert tier.reserve(2 * MiB, "w").nbytes == 2 * MiB
    with pytest.raises(TierFull):
        tier.reserve(1, "v")


def test_a_disk_without_room_for_one_block_is_unusable(tmp_path, monkeypatch):
    def full(fd, content, offset):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(DiskUnusable, match=r"takes no files \(No space left on device\); free"):
        DiskTier((tmp_path,), {}, Meter(), lambda error: None)
    assert list(tmp_path.iterdir()) == []


def test_without_o_direct_it_falls_back_with_a_note(open_tier, monkeypatch, caplog):
    really = os.open

    def no_direct(path, flags, mode=0o777, **rest):
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return really(path, flags, mode, **rest)

    monkeypatch.setattr(os, "open", no_direct)
    tier = open_tier()
    assert (tier.rings, tier.granule) == (("threads",), 1)
    notes = [r for r in caplog.records if r.name == "zcompile.runtime.tiers.disk"]
    assert len(notes) == 1
    assert "does not take O_DIRECT" in notes[0].getMessage()
    extent = tier.reserve(UNIT, "w")
    tier.write(extent, 0, filled(UNIT, 9)).wait()
    into = filled(UNIT, 0)
    tier.read(extent, 0, into).wait()
    assert into.memory.eq(9).all()


def test_a_second_model_of_this_process_is_refused(open_tier, tmp_path):
    open_tier()
    with pytest.raises(DiskOwned, match="in use by another model of this process"):
        open_tier()


def test_an_error_of_a_disk_that_is_let_go_does_not_keep_it(tmp_path, monkeypatch, caplog):
    tier = DiskTier((tmp_path,), {}, Meter(), lambda error: None)

    def failing(path, **rest):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    with monkeypatch.context() as broken:
        broken.setattr(os, "unlink", failing)
        tier.close()
    told = [(r.name.removeprefix("zcompile.runtime."), r.getMessage()) for r in caplog.records]
    assert [name for name, _ in told] == ["tiers.disk", "io.files"]
    assert "stays behind: Read-only file system" in told[0][1]
    DiskTier((tmp_path,), {}, Meter(), lambda error: None).close()
    assert list(tmp_path.iterdir()) == []


def hold(directory, told):
    """Own the directory until this process is killed."""
    tier = DiskTier([directory], {}, Meter(), print)
    tier.reserve(4096, "w")
    told.send("held")
    told.recv()


@pytest.fixture
def holder(tmp_path):
    """Another process that owns the directory until it is killed."""
    context = forked()
    ours, theirs = context.Pipe()
    process = context.Process(target=hold, args=(tmp_path, theirs))
    process.start()
    theirs.close()
    assert ours.recv() == "held"
    yield process
    process.kill()
    process.join()


@pytest.mark.slow  # so is it below, before that process is killed
def test_another_process_is_refused_with_its_pid(open_tier, holder):
    with pytest.raises(DiskOwned, match=f"in use by process {holder.pid}"):
        open_tier()


def looked_at(directory):
    """As `zinf disk ls` asks who uses it. A process that is no more says that it does."""
    (directory / LOCK_NAME).write_text("999999 since 2026-01-02 03:04:05\n")
    fd = os.open(directory / LOCK_NAME, os.O_RDONLY)
    fcntl.flock(fd, fcntl.LOCK_SH)
    return fd


@pytest.mark.timeout(60)
def test_who_only_asks_who_uses_a_directory_does_not_use_it(open_tier, tmp_path):
    timer = threading.Timer(0.1, os.close, [looked_at(tmp_path)])
    timer.start()
    open_tier()
    timer.join()


def test_a_lock_that_is_always_shared_is_not_waited_for_for_ever(open_tier, tmp_path, monkeypatch):
    monkeypatch.setattr(directory_lock, "RETRY_SECONDS", 0.0)
    fd = looked_at(tmp_path)
    with pytest.raises(DiskOwned, match="in use by programs that keep asking"):
        open_tier()
    os.close(fd)
    open_tier()


def test_files_of_a_killed_process_are_reclaimed(open_tier, holder, tmp_path):
    (left,) = tier_files(tmp_path)
    with pytest.raises(DiskOwned, match=f"in use by process {holder.pid}"):
        open_tier()
    holder.kill()
    holder.join()
    open_tier()
    (own,) = tier_files(tmp_path)
    assert own != left
    assert own.startswith(f"zinf-{os.getpid()}-")


def test_foreign_files_are_left_alone(open_tier, tmp_path):
    foreign = tmp_path / "zinf-notes.tier"
    foreign.write_text("mine")
    open_tier().close()
    assert foreign.read_text() == "mine"
    assert [p.name for p in tmp_path.iterdir()] == ["zinf-notes.tier"]


def test_files_are_private(open_tier, tmp_path):
    open_tier()
    assert {p.stat().st_mode & 0o777 for p in tmp_path.iterdir()} == {0o600}


def test_when_one_of_several_directories_is_taken_none_stays_open(open_tier, tmp_path):
    first, second = tmp_path / "a", tmp_path / "b"
    first.mkdir()
    second.mkdir()
    open_tier(second)
    with pytest.raises(DiskOwned):
        open_tier(first, second)
    assert list(first.iterdir()) == []


def test_entries_are_spread_over_directories_by_bytes(open_tier, tmp_path):
    first, second = tmp_path / "a", tmp_path / "b"
    first.mkdir()
    second.mkdir()
    tier = open_tier(first, second)
    sizes = [4, 1, 1, 1, 1, 4, 4]
    assert [tier.reserve(n * UNIT, "w").file for n in sizes] == [0, 1, 1, 1, 1, 0, 1]


def test_a_throttled_link_takes_its_time(open_tier):
    tier = open_tier(disk_read=40e6, disk_write=20e6)
    extent = tier.reserve(1 * MiB, "w")
    began = time.perf_counter()
    for promise in [tier.write(extent, n * MiB // 4, filled(MiB // 4, n)) for n in range(4)]:
        promise.wait()
    wrote = time.perf_counter()
    for promise in [tier.read(extent, n * MiB // 4, filled(MiB // 4, n)) for n in range(4)]:
        promise.wait()
    assert wrote - began >= MiB / 20e6
    assert time.perf_counter() - wrote >= MiB / 40e6


def test_a_slow_link_holds_no_other_back(open_tier):
    tier = open_tier(disk_write=1e6)
    extent = tier.reserve(2 * MiB, "w")
    slow = tier.write(extent, 0, filled(1 * MiB, 1))
    for _ in range(20):
        tier.read(extent, 1 * MiB, filled(UNIT, 0)).wait()
    assert not slow.done()


def test_directories_that_are_reached_alike_share_an_engine(open_tier, tmp_path):
    for name in "ab":
        (tmp_path / name).mkdir()
    tier = open_tier(tmp_path / "a", tmp_path / "b")
    extents = [tier.reserve(UNIT, "w") for _ in range(2)]
    assert [extent.file for extent in extents] == [0, 1]
    assert tier._engines[0] is tier._engines[1]
    for n, extent in enumerate(extents):
        tier.write(extent, 0, filled(UNIT, n + 1)).wait()
    for n, extent in enumerate(extents):
        into = filled(UNIT, 0)
        tier.read(extent, 0, into).wait()
        assert into.memory.eq(n + 1).all()


def test_one_directory_may_be_direct_and_another_not(open_tier, tmp_path, monkeypatch):
    for name in "ab":
        (tmp_path / name).mkdir()
    monkeypatch.setattr(disk, "supports_direct", lambda directory: directory.path.name == "a")
    tier = open_tier(tmp_path / "a", tmp_path / "b")
    assert tier._engines[0] is not tier._engines[1]
    assert tier.rings[1] == "threads"
    for _ in range(2):
        extent, into = tier.reserve(UNIT, "w"), filled(UNIT, 0)
        tier.write(extent, 0, filled(UNIT, 5)).wait()
        tier.read(extent, 0, into).wait()
        assert into.memory.eq(5).all()


def test_a_forked_child_does_not_own_the_directory(open_tier):
    tier = open_tier()
    held, release = os.pipe()
    ready, forked = os.pipe()
    pid = os.fork()
    if pid == 0:  # outlives its parent
        os.close(release)
        os.write(forked, b"y")
        os.read(held, 1)
        os._exit(0)
    try:
        os.read(ready, 1)
        for lock in tier._locks:
            lock.drop()  # as if this process had been killed
        open_tier()
    finally:
        for fd in (release, held, ready, forked):
            os.close(fd)
        os.waitpid(pid, 0)


def open_and_named(tmp_path, refused=()):
    """A trial in which some flags are refused: what bore a name after any of its calls."""
    seen = set()

    def around(call, go):
        flags = call.arguments.get("flags", 0)
        if any(flags & flag == flag for flag in refused):
            raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))
        result = go()
        seen.update(tmp_path.iterdir())
        return result

    with Directory(tmp_path, Border(around)) as directory:
        check_buffered(directory)
        works = supports_direct(directory)
    assert list(tmp_path.iterdir()) == []
    return works, seen


def test_the_file_of_a_trial_never_has_a_name(tmp_path):
    assert open_and_named(tmp_path) == (True, set())


def test_a_trial_goes_on_where_every_file_has_a_name(tmp_path):
    works, seen = open_and_named(tmp_path, [os.O_TMPFILE])
    assert works
    assert len(seen) == 2
    assert all(TRIAL_FILE.match(path.name) for path in seen)


def test_a_trial_that_was_killed_leaves_nothing_for_long(open_tier, tmp_path, caplog):
    left = tmp_path / "zinf-trial-0123456789abcdef"
    left.write_bytes(bytes(4096))
    open_tier()
    assert not left.exists()
    assert "was left when it was tried" in caplog.text
