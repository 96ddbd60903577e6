"""What others put into a directory of the disk tier, or under its path, is not followed."""

import json
import os
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from border import Border, offloaded
from committed import read_index
from durable_runs import Run, after_a_crash, same
from planted import PLANTED
from torch import nn

import zcompile
from zcompile.errors import (
    CheckpointMismatch,
    CommitFailed,
    DiskOwned,
    DiskUnusable,
    DurableDamaged,
)
from zcompile.runtime.durable.index import Piece, encode

FIELDS = {"device": "cpu", "device_memory": "4MiB", "host_memory": "256KiB"}
PRECIOUS = b"precious\x1b[2J data\n"
NAMES = ("zinf.lock", "zinf.index", "zinf.index.new", "zinf.tier", "zinf-1-1.tier")


@pytest.fixture
def victim(tmp_path: Path) -> Path:
    path = tmp_path / "victim"
    path.write_bytes(PRECIOUS)
    return path


@pytest.fixture
def disk(tmp_path: Path) -> Path:
    path = tmp_path / "disk"
    path.mkdir()
    return path


def untouched(victim: Path) -> bool:
    return victim.read_bytes() == PRECIOUS and not victim.with_name("nowhere").exists()


@pytest.mark.timeout(60)
@pytest.mark.parametrize("plant", PLANTED, ids=lambda plant: plant.__name__)
@pytest.mark.parametrize("name", NAMES)
def test_what_is_not_a_file_of_ours_is_refused_and_left_alone(disk, victim, caplog, name, plant):
    plant(disk / name, victim)
    before = os.lstat(disk / name)
    with pytest.raises(DiskUnusable, match=f"has a {name} which {PLANTED[plant]}"):
        zcompile.offload(nn.Linear(4, 4), disk=disk, durable=True, **FIELDS)
    assert untouched(victim)
    assert os.path.samestat(os.lstat(disk / name), before)
    assert "precious" not in caplog.text
    assert [path.name for path in disk.iterdir()] == [name], "the lock is gone again"


def test_a_link_that_comes_before_a_commit_is_not_written_through(disk, victim):
    run = Run(disk).train(0, 1)
    (disk / "zinf.index.new").symlink_to(victim)
    with pytest.raises(CommitFailed, match="File exists"):
        run.train(1, 2)
    run.close()
    assert untouched(victim)
    (disk / "zinf.index.new").unlink()
    again = after_a_crash(disk)
    assert again.resume() == {"step": 1}
    again.close()


def test_a_link_in_the_place_of_the_index_is_replaced_and_not_written_through(disk, victim):
    run = Run(disk).train(0, 1)
    (disk / "zinf.index").unlink()
    (disk / "zinf.index").symlink_to(victim)
    run.train(1, 2)
    run.close()
    assert untouched(victim)
    again = after_a_crash(disk)
    assert again.resume() == {"step": 2}
    again.close()


def test_what_a_lock_says_is_not_passed_on_unless_it_is_of_ours(disk, caplog):
    (disk / "zinf.lock").write_bytes(PRECIOUS)
    Run(disk).close()
    assert "precious" not in caplog.text
    assert "\x1b" not in caplog.text
    (disk / "zinf.lock").write_text("123 since 2026-01-02 03:04:05\n")
    Run(disk).close()
    assert "process 123 since 2026-01-02 03:04:05, ended without closing its model" in caplog.text
    run = Run(disk)
    (disk / "zinf.lock").write_bytes(b"\x1b[2J since 2026-01-02 03:04:05\n")
    with pytest.raises(DiskOwned, match="in use by another model of this process") as caught:
        Run(disk)
    assert "\x1b" not in str(caught.value)
    run.close()


def test_a_file_of_another_user_is_refused(disk):
    def around(call, go):
        found = go()
        if call.name == "stat" and call.of.name == "zinf.index.new":
            fields = list(found)
            fields[4] = 4242  # st_uid
            return os.stat_result(fields)
        return found

    (disk / "zinf.index.new").write_text("x")
    with pytest.raises(DiskUnusable, match=r"index\.new which belongs to user 4242"):
        offloaded(nn.Linear(4, 4), Border(around), disk=disk, durable=True, **FIELDS)


def test_a_directory_is_made_where_its_parent_is(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for disk in (tmp_path / "one", "two", ("three", tmp_path / "four")):
        run = Run(disk, durable=False).train(0, 1)
        run.close()
    made = sorted(path.name for path in tmp_path.iterdir())
    assert made == ["four", "one", "three", "two"]
    assert all((tmp_path / name).stat().st_mode & 0o777 == 0o700 for name in made)
    run = Run(tmp_path / "five").train(0, 1)
    run.close()
    again = after_a_crash(tmp_path / "five")
    assert again.resume() == {"step": 1}
    again.close()


def test_a_directory_that_is_made_is_on_the_disk_before_anything_is_in_it(tmp_path):
    calls = []

    def around(call, go):
        calls.append((call.name, call.of))
        return go()

    model = offloaded(nn.Linear(4, 4), Border(around), disk=tmp_path / "new", **FIELDS)
    zcompile.close(model)
    made = [("mkdir", tmp_path / "new"), ("open", tmp_path), ("fstat", tmp_path)]
    assert calls[:5] == [("stat", tmp_path / "new"), *made, ("fsync", tmp_path)]


@pytest.mark.slow
def test_a_plan_makes_no_directory(tmp_path):
    report = zcompile.plan(
        nn.Linear(4, 4),
        torch.ones(2, 4),
        device="cpu",
        device_memory="1MiB",
        host_memory="1MiB",
        disk=tmp_path / "new",
    )
    assert report.fits
    assert list(tmp_path.iterdir()) == []


def test_new_files_are_for_their_owner_only(disk):
    run = Run(disk).train(0, 1)
    modes = {path.name: path.stat().st_mode & 0o777 for path in disk.iterdir()}
    run.close()
    assert modes == {"zinf.lock": 0o600, "zinf.index": 0o600, "zinf.tier": 0o600}


def test_a_directory_that_is_replaced_by_a_link_is_not_followed(disk, tmp_path):
    run = Run(disk).train(0, 1)
    elsewhere, moved = tmp_path / "elsewhere", tmp_path / "moved"
    elsewhere.mkdir()
    disk.rename(moved)
    disk.symlink_to(elsewhere)
    run.train(1, 2)
    expected = run.state()
    assert list(elsewhere.iterdir()) == []
    run.close()
    again = after_a_crash(moved)
    assert again.resume() == {"step": 2}
    assert same(again.state(), expected)
    again.close()


def test_the_path_of_a_directory_may_lead_through_links(disk, tmp_path):
    (tmp_path / "link").symlink_to(disk)
    run = Run(tmp_path / "link").train(0, 1)
    zcompile.save(disk, run.model, run.optimizer, epoch=3)
    run.close()
    again = after_a_crash(disk)
    assert again.resume() == {"epoch": 3, "step": 1}
    again.close()


@pytest.fixture(scope="module")
def kept(tmp_path_factory) -> Path:
    """What a run of one step left."""
    path = tmp_path_factory.mktemp("kept")
    Run(path).train(0, 1).close()
    return path


def large(index, **changes):
    """The index with other facts of its first tensor."""
    first, *rest = index.tensors
    return replace(index, tensors=(replace(first, **changes), *rest))


def small(index, **changes):
    first, *rest = index.smalls
    return replace(index, smalls=(replace(first, **changes), *rest))


SAID = {
    "run": lambda i: replace(i, run="../x"),
    "step": lambda i: replace(i, step=-1),
    "true step": lambda i: replace(i, step=True),
    "serial": lambda i: replace(i, serial=1 << 70),
    "written at": lambda i: replace(i, written_at="\x1b[2J"),
    "granule": lambda i: replace(i, granule=0),
    "odd granule": lambda i: replace(i, granule=3000),
    "no directory": lambda i: replace(i, directories=()),
    "relative directory": lambda i: replace(i, directories=("etc",)),
    "name twice": lambda i: replace(i, tensors=(i.tensors[0], *i.tensors)),
    "name of both": lambda i: small(i, name=i.tensors[0].name),
    "kind": lambda i: large(i, kind="program"),
    "dtype": lambda i: large(i, dtype="float32; import os"),
    "dtype of torch": lambda i: large(i, dtype="save"),
    "file below": lambda i: large(i, file=-1),
    "file beyond": lambda i: large(i, file=1),
    "offset below": lambda i: large(i, offset=-4096),
    "offset of header": lambda i: large(i, offset=0),
    "offset between": lambda i: large(i, offset=i.tensors[0].offset + 1),
    "offset beyond": lambda i: large(i, offset=1 << 40),
    "offset of another": lambda i: large(i, offset=i.tensors[1].offset),
    "room": lambda i: large(i, room=4096),
    "room of none": lambda i: large(i, room=-4096),
    "nbytes": lambda i: large(i, nbytes=-1),
    "size": lambda i: large(i, size=(-1, 1)),
    "size too large": lambda i: large(i, size=(1 << 40, 192)),
    "size and stride": lambda i: large(i, stride=(1,)),
    "stride": lambda i: large(i, stride=(-1, 1)),
    "start": lambda i: large(i, start=1 << 30),
    "later step": lambda i: large(i, step=7),
    "written beyond": lambda i: large(i, written=((0, 1 << 30),)),
    "written back": lambda i: large(i, written=((8, 0),)),
    "written of three": lambda i: large(i, written=((0, 8, 9),)),
    "written twice": lambda i: large(i, written=((0, 8), (4, 12))),
    "one byte written twice": lambda i: large(i, written=((0, 8), (7, 12))),
    "written unsummed": lambda i: large(i, pieces=()),
    "piece beyond": lambda i: large(i, pieces=(Piece(0, 1 << 30, 0),)),
    "piece off granules": lambda i: replace(large(i, pieces=(Piece(0, 5, 0),)), granule=512),
    "no checksum": lambda i: large(
        i, pieces=tuple(replace(p, checksum=None) for p in i.tensors[0].pieces)
    ),
    "small beyond": lambda i: small(i, begin=0, end=1 << 30),
    "small back": lambda i: small(i, begin=4, end=0),
    "small size": lambda i: small(i, size=(1 << 40,)),
    "small dtype": lambda i: small(i, dtype="no_such"),
}


def resumed(disk: Path, own: bool) -> None:
    """By the directory's own model, or by one that rests elsewhere."""
    run = Run(disk if own else None)
    run.disk = disk
    run.resume()


@pytest.mark.parametrize("own", [True, False], ids=["own", "copied"])
@pytest.mark.parametrize("said", SAID)
def test_what_an_index_says_is_checked_before_it_is_used(kept, tmp_path, said, own):
    disk = tmp_path / "disk"
    shutil.copytree(kept, disk)
    index, smalls = read_index(disk)
    (disk / "zinf.index").write_bytes(encode(SAID[said](index), smalls))
    with pytest.raises(DurableDamaged, match="left as they are"):
        resumed(disk, own)


META = {
    "no extra": lambda m: {k: v for k, v in m.items() if k != "extra"},
    "no optimizer": lambda m: {k: v for k, v in m.items() if k != "optimizer"},
    "aliases": lambda m: {**m, "aliases": [1]},
    "modules": lambda m: {**m, "modules": None},
    "extra of a tensor that is not there": lambda m: {**m, "extra": {"a": {"$tensor": "none"}}},
    "extra on no device": lambda m: {
        **m,
        "extra": {"a": {"$tensor": "model.up.weight", "on": "program:1"}},
    },
    "extra of another tag": lambda m: {**m, "extra": {"a": {"$import": "os"}}},
    "extra of no number": lambda m: {**m, "extra": {"a": {"$float": [1]}}},
    "extra of pairs that are none": lambda m: {**m, "extra": {"a": {"$dict": [[1]]}}},
    "optimizer": lambda m: {**m, "optimizer": 3},
    "groups": lambda m: {**m, "optimizer": {**m["optimizer"], "groups": [3]}},
    "states": lambda m: {**m, "optimizer": {**m["optimizer"], "states": {"up.weight": 3}}},
    "states of others": lambda m: {**m, "optimizer": {**m["optimizer"], "states": {"x": {}}}},
}


@pytest.mark.parametrize("said", META)
def test_what_an_index_says_that_is_no_tensor_is_checked_too(kept, tmp_path, said):
    disk = tmp_path / "disk"
    shutil.copytree(kept, disk)
    index, smalls = read_index(disk)
    changed = replace(index, meta=META[said](dict(index.meta)))
    (disk / "zinf.index").write_bytes(encode(changed, smalls))
    with pytest.raises(CheckpointMismatch):
        resumed(disk, own=False)


def test_an_index_does_not_choose_where_a_lock_is_made(kept, tmp_path):
    disk, elsewhere = tmp_path / "disk", tmp_path / "elsewhere"
    shutil.copytree(kept, disk)
    elsewhere.mkdir()
    index, smalls = read_index(disk)
    two = replace(index, directories=(*index.directories, str(elsewhere)))
    (disk / "zinf.index").write_bytes(encode(two, smalls))
    before = elsewhere.stat().st_mtime_ns
    with pytest.raises(DurableDamaged, match="is gone, or of another run"):
        zcompile.resume(disk, Run().model)
    assert elsewhere.stat().st_mtime_ns == before, "nothing was made there"


@pytest.mark.parametrize(
    "body", [b"[" * 200_000, b'{"run": ' + b"9" * 5000 + b"}"], ids=["deep", "long number"]
)
def test_an_index_that_no_parser_bears_is_damaged(tmp_path, body):
    from zcompile.runtime.durable.index import SUMS

    header = f"zinf-index 1 {len(body)} 0 crc32 {SUMS['crc32'](memoryview(body)):016x}\n"
    (tmp_path / "zinf.index").write_bytes(header.encode() + body)
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(1_000_000)  # as deep as the stack goes, and deeper
    try:
        with pytest.raises(DurableDamaged, match="cannot be understood"):
            read_index(tmp_path)
    finally:
        sys.setrecursionlimit(limit)


def test_a_first_line_with_a_length_below_zero_is_none(kept, tmp_path):
    content = (kept / "zinf.index").read_bytes()
    words = content.split(b"\n", 1)[0].split()
    text, smalls = int(words[2]), int(words[3])
    for changed in ((-5, text + smalls + 5), (text + smalls + 1, -1)):
        words[2], words[3] = (str(number).encode() for number in changed)
        (tmp_path / "zinf.index").write_bytes(b" ".join(words) + b"\n" + content.split(b"\n", 1)[1])
        with pytest.raises(DurableDamaged, match="has a first line that is not one"):
            read_index(tmp_path)


def test_a_header_that_names_no_directory_is_damaged(kept, tmp_path):
    disk = tmp_path / "disk"
    shutil.copytree(kept, disk)
    (disk / "zinf.index").unlink()
    content = bytearray((disk / "zinf.tier").read_bytes())
    header = json.loads(content[:4096].split(b"\n")[1])
    text = f"zinf-tier 1\n{json.dumps({**header, 'first': '../x', 'number': 9})}\n".encode()
    content[:4096] = text.ljust(4096, b"\0")
    (disk / "zinf.tier").write_bytes(content)
    with pytest.raises(DurableDamaged, match="first block that cannot be understood"):
        Run(disk)


def test_sound_bytes_come_back(kept, tmp_path):
    """The copies above are refused for what was changed in them, not for being copies."""
    shutil.copytree(kept, tmp_path / "disk")
    run = Run()
    run.disk = tmp_path / "disk"
    assert run.resume() == {"step": 1}
    torch.testing.assert_close(run.model.up.weight, Run().train(0, 1).model.up.weight)
