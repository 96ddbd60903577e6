"""Which data files belong together, which are of nobody, and what is refused."""

import errno
import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from committed import check_all, read_header

from zcompile.config import Config
from zcompile.errors import CommitFailed, DiskOwned, DurableDamaged, DurableHeld
from zcompile.frontend.offload import open_session
from zcompile.ir.types import EntryKind, Layout
from zcompile.runtime.durable.commit import CommitLog
from zcompile.runtime.durable.directory import DataHeader
from zcompile.runtime.durable.directory import read_header as header_in
from zcompile.runtime.io.files import Directory
from zcompile.runtime.session import Session


def opened(*disks: Path) -> Session:
    config = Config(
        device="cpu", device_memory="1MiB", host_memory="256KiB", disk=disks, durable=True
    )
    return open_session(config)


def committed(*disks: Path, tensors: int = 2) -> None:
    """A run over `disks` that ended after its first commit."""
    session = opened(*disks)
    named = {}
    for number in range(tensors):
        values = torch.full((80_000,), float(number))
        entry = session.create(f"w{number}", EntryKind.PARAM, values.nbytes)
        session.put(entry, values.view(torch.uint8)).wait()
        named[entry.name] = (entry, Layout.of(values))
    try:
        ledger_of(session).commit(named, {}, {}, 1)
    finally:
        session.close()


def ledger_of(session: Session) -> CommitLog:
    assert session.commit_log is not None
    return session.commit_log


@pytest.fixture
def disks(tmp_path):
    paths = [tmp_path / name for name in "ab"]
    for path in paths:
        path.mkdir()
    return paths


def names(path: Path) -> list[str]:
    return sorted(each.name for each in path.iterdir())


def test_a_run_without_a_commit_leaves_nothing(tmp_path):
    session = opened(tmp_path)
    assert names(tmp_path) == ["zinf.lock", "zinf.tier"]
    session.close()
    assert names(tmp_path) == []


def test_a_commit_outlives_its_run(tmp_path):
    committed(tmp_path)
    assert names(tmp_path) == ["zinf.index", "zinf.tier"]
    session = opened(tmp_path)
    assert ledger_of(session).files.index.step == 1
    session.close()
    assert names(tmp_path) == ["zinf.index", "zinf.tier"]


@pytest.mark.parametrize("error", [OSError(errno.EIO, "no luck"), KeyboardInterrupt()], ids=repr)
def test_data_that_an_index_names_stays_whatever_follows_the_rename(disks, monkeypatch, error):
    def renamed(old, new, rename=os.rename, **where):
        rename(old, new, **where)
        raise error

    monkeypatch.setattr(os, "rename", renamed)
    with pytest.raises((CommitFailed, KeyboardInterrupt)):
        committed(*disks)
    monkeypatch.undo()
    assert names(disks[0]) == ["zinf.index", "zinf.tier"]
    session = opened(*disks)
    check_all(ledger_of(session).files.index, disks)
    session.close()


def test_what_a_commit_names_is_reserved_when_it_is_opened(tmp_path):
    committed(tmp_path)
    session = opened(tmp_path)
    index = ledger_of(session).files.index
    taken = {(t.offset, t.offset + t.room) for t in index.tensors}
    entry = session.create("new", EntryKind.PARAM, 80_000 * 4)
    begin = session.durable.versions_of(entry.place.extent).current.offset
    assert all(begin >= high or begin + 80_000 * 4 <= low for low, high in taken)
    session.close()


def test_the_data_file_of_a_run_that_died_before_its_first_commit_is_removed(tmp_path, caplog):
    session = opened(tmp_path)
    header = read_header(tmp_path)
    session.close()
    (tmp_path / "zinf.tier").write_bytes(header.block() + bytes(8192))
    session = opened(tmp_path)
    session.close()
    assert "ended before its first commit" in caplog.text
    assert names(tmp_path) == []


@pytest.mark.parametrize("nbytes", [0, 4096])
def test_the_data_file_of_a_run_that_died_while_it_made_it_is_removed(tmp_path, nbytes):
    (tmp_path / "zinf.tier").write_bytes(bytes(nbytes))
    opened(tmp_path).close()
    assert names(tmp_path) == []


def test_a_data_file_that_lost_its_header_is_left_as_it_is(tmp_path):
    (tmp_path / "zinf.tier").write_bytes(bytes(8192))
    assert "does not begin as one of ours" in refused(tmp_path)


def test_a_commit_that_did_not_happen_is_removed(tmp_path):
    committed(tmp_path)
    (tmp_path / "zinf.index.new").write_bytes(b"half")
    opened(tmp_path).close()
    assert names(tmp_path) == ["zinf.index", "zinf.tier"]


def refused(*disks: Path) -> str:
    before = [(path, path.stat().st_size) for disk in disks for path in sorted(disk.iterdir())]
    with pytest.raises((DurableDamaged, DurableHeld)) as caught:
        opened(*disks)
    after = [(path, path.stat().st_size) for disk in disks for path in sorted(disk.iterdir())]
    assert after == before, "files are left as they are"
    held = [
        os.readlink(f"/proc/self/fd/{fd}")
        for fd in os.listdir("/proc/self/fd")
        if os.path.lexists(f"/proc/self/fd/{fd}")
    ]
    ours = [path for path in held if any(Path(path).is_relative_to(disk) for disk in disks)]
    assert not ours, "nor held open"
    return str(caught.value)


def test_an_index_that_vanished_is_missed(tmp_path):
    committed(tmp_path)
    (tmp_path / "zinf.index").unlink()
    assert "zinf.index: the index is gone" in refused(tmp_path)


def test_a_data_file_that_vanished_is_missed(disks):
    committed(*disks)
    (disks[1] / "zinf.tier").unlink()
    assert f"{disks[1] / 'zinf.tier'}: the data file is gone" in refused(*disks)


def test_a_truncated_data_file_names_the_tensor(tmp_path):
    committed(tmp_path)
    os.truncate(tmp_path / "zinf.tier", 4096 + 80_000 * 4 + 4096)
    told = refused(tmp_path)
    assert "'w1' lies at" in told
    assert "which ends before that" in told


def test_the_data_file_of_another_run_is_not_taken(disks):
    committed(disks[0])
    committed(disks[1])
    (disks[1] / "zinf.tier").replace(disks[0] / "zinf.tier")
    assert "of run" in refused(disks[0])


def test_directories_are_given_in_the_order_of_the_run_and_all_of_them(disks):
    committed(*disks)
    a, b = disks
    assert "has to be given first" in refused(b, a)
    assert "over 2 directories" in refused(a)
    assert "has to be given first" in refused(b)
    opened(a, b).close()


def test_a_directory_with_a_commit_is_not_taken_as_the_second_one(disks):
    committed(disks[1])
    assert "holds step 1 of another run" in refused(*disks)


def test_directories_may_be_moved_together(disks, tmp_path):
    committed(*disks)
    moved = [path.rename(tmp_path / f"moved-{path.name}") for path in disks]
    opened(*moved).close()


def test_a_second_process_is_told_who_is_there(tmp_path):
    session = opened(tmp_path)
    with pytest.raises(DiskOwned, match="another model of this process"):
        opened(tmp_path)
    session.close()


def test_what_a_dead_scratch_run_left_is_told_and_removed(tmp_path, caplog):
    (tmp_path / "zinf-4242-1.tier").write_bytes(bytes(4096))
    opened(tmp_path).close()
    assert "process 4242, which last wrote at" in caplog.text
    assert names(tmp_path) == []


def test_a_process_that_ended_without_closing_is_named_by_the_next_one(tmp_path, caplog):
    committed(tmp_path)
    (tmp_path / "zinf.lock").write_text("4242 since 2026-01-02 03:04:05\n")
    opened(tmp_path).close()
    assert "process 4242 since 2026-01-02 03:04:05, ended without closing" in caplog.text


@pytest.mark.parametrize("length", range(380, 440, 3))
def test_a_header_that_is_torn_when_it_is_marked_can_still_be_read(tmp_path, length):
    """In whatever sector of it the mark lies."""
    header = DataHeader("1" * 16, 0, 1, "/" + "d" * length)
    marked = replace(header, committed=True)
    blocks = [header.block(), marked.block()]
    with Directory(tmp_path) as directory:
        for sector in (512, 1024):
            for first, rest in (blocks, blocks[::-1]):
                (tmp_path / "zinf.tier").write_bytes(first[:sector] + rest[sector:])
                assert header_in(directory) in (header, marked)
