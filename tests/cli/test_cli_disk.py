"""`zinf disk ls|verify|gc`: over directories as a durable training leaves them."""

import errno
import json
import os
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from border import Border
from committed import read_index
from failed_calls import FAULTS, Once, open_below
from sampled import sampled
from torch import nn

import zcompile
from zcompile.cli import disk as cli_disk
from zcompile.errors import DiskOwned, DiskUnusable
from zcompile.frontend.offload import session_behind
from zcompile.runtime.durable.directory import DataHeader

ROOT = Path(__file__).parents[2]


def train(*disks: Path, steps: int = 2) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(128, 192), nn.Linear(192, 128))
    zcompile.offload(
        model, device="cpu", device_memory="4MiB", host_memory="256KiB", disk=disks, durable=True
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for _ in range(steps):
        model(torch.ones(2, 128)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


@pytest.fixture
def disk(tmp_path):
    """A directory with two committed steps, and nobody in it."""
    path = tmp_path / "disk"
    path.mkdir()
    session_behind(train(path)).close()
    return path


@pytest.mark.parametrize("verb", ["verify", "gc"])
def test_a_data_file_that_was_never_finished_is_no_damage(zinf, tmp_path, verb):
    """A power loss while it was made: before its first block, or in the middle of it."""
    long = DataHeader("1" * 16, 0, 1, "/" + "d" * 1000).block()
    for block in (bytes(4096), bytes(512) + long[512:], long[:512].ljust(4096, b"\0")):
        (tmp_path / "zinf.tier").write_bytes(block)
        code, out, told = zinf("disk", verb, tmp_path)
        assert code == 0, told
    assert out.startswith(f"{tmp_path}: ")


def test_ls_lists_the_tensors_of_the_last_commit(zinf, disk):
    code, out, _ = zinf("disk", "ls", disk)
    lines = out.splitlines()
    assert code == 0
    assert lines[0].startswith(f"{disk}: step 2 of run ")
    assert lines[1].startswith("9 tensors, ")
    assert " model.0.weight " in out
    assert " optimizer.0.weight.momentum_buffer " in out
    assert "float32[192, 128]" in out


def test_ls_answers_a_program_too(zinf, disk):
    code, out, _ = zinf("disk", "ls", "--json", disk)
    told = json.loads(out)
    assert code == 0
    assert (told["step"], told["owner"], len(told["tensors"])) == (2, None, 9)
    assert told["tensors"][0]["nbytes"] == 192 * 128 * 4


def test_ls_reads_a_directory_in_use_and_names_who_uses_it(zinf, tmp_path):
    model = train(tmp_path)
    code, out, _ = zinf("disk", "ls", tmp_path)
    session_behind(model).close()
    assert code == 0
    assert "in use by another model of this process" in out


@pytest.mark.parametrize("verb", ["verify", "gc"])
def test_a_directory_in_use_is_neither_verified_nor_cleaned(zinf, tmp_path, verb):
    model = train(tmp_path)
    before = sorted(path.name for path in tmp_path.iterdir())
    code, _, err = zinf("disk", verb, tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == before
    session_behind(model).close()
    assert code == 1
    assert "is in use by another model of this process" in err


def test_an_empty_directory_has_nothing_to_tell(zinf, tmp_path):
    assert zinf("disk", "ls", tmp_path) == (0, f"{tmp_path}: no commit\n", "")
    told = f"{tmp_path}: no commit, nothing to verify: it is empty\n"
    assert zinf("disk", "verify", tmp_path) == (1, told, "")
    assert zinf("disk", "gc", tmp_path)[0] == 0
    assert list(tmp_path.iterdir()) == []


def test_a_directory_of_something_else_is_not_taken_for_a_sound_one(zinf, tmp_path):
    """A wrong path in a script that checks a run every night."""
    zcompile.save(tmp_path / "c", nn.Linear(2, 2))
    code, out, _ = zinf("disk", "verify", tmp_path / "c")
    assert code == 1
    assert "no commit, nothing to verify: it is a checkpoint that zcompile.save wrote" in out
    assert "no checksums" in out
    code, out, _ = zinf("disk", "verify", tmp_path)
    assert (code, "it holds c, and nothing of a run" in out) == (1, True)


@pytest.mark.parametrize("code", [errno.EROFS, errno.EACCES], ids=errno.errorcode.get)
def test_a_backup_that_nothing_can_be_written_to_is_verified(disk, code):
    before = sorted(path.name for path in disk.iterdir())

    def around(call, go):
        if call.name == "open" and call.arguments["flags"] & (os.O_CREAT | os.O_RDWR | os.O_WRONLY):
            raise OSError(code, os.strerror(code))
        return go()

    answer = cli_disk.verify(disk, Border(around))
    assert (answer.code, answer.text.endswith(": sound")) == (0, True)
    flip(disk / "zinf.tier", read_index(disk)[0].tensors[0].offset)
    assert cli_disk.verify(disk, Border(around)).code == 1
    assert sorted(path.name for path in disk.iterdir()) == before
    model = train(disk.parent, steps=1)
    with pytest.raises(DiskOwned, match="is in use by another model"):
        cli_disk.verify(disk.parent, Border(around))
    session_behind(model).close()


def test_what_is_written_to_while_it_is_verified_is_not_told_as_damaged(disk, tmp_path):
    """By a run in it that could not be kept away, as nothing could be made there."""
    (other := tmp_path / "other").mkdir()
    session_behind(train(other, steps=3)).close()
    flip(disk / "zinf.tier", read_index(disk)[0].tensors[0].offset)

    def around(call, go):
        if call.name == "open" and call.arguments["flags"] & os.O_CREAT:
            raise OSError(errno.EROFS, os.strerror(errno.EROFS))
        if call.name == "pread" and call.of == disk / "zinf.tier" and call.arguments["offset"]:
            shutil.copy(other / "zinf.index", disk / "zinf.index")  # as a commit would
        return go()

    with pytest.raises(DiskUnusable, match="was written to while it was read; verify it again"):
        cli_disk.verify(disk, Border(around))


def test_a_path_that_is_no_directory_is_refused(zinf, tmp_path):
    code, _, err = zinf("disk", "ls", tmp_path / "none")
    assert code == 1
    assert "is not a directory" in err


def test_verify_finds_a_sound_commit_sound(zinf, disk):
    code, out, _ = zinf("disk", "verify", disk)
    assert code == 0
    assert out.rstrip().endswith(": sound")


def flip(path: Path, offset: int) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 4]))


def test_verify_names_every_damaged_tensor(zinf, disk):
    index, _ = read_index(disk)
    for tensor in index.tensors[:2]:
        flip(disk / "zinf.tier", tensor.offset + 5)
    code, out, _ = zinf("disk", "verify", disk)
    assert code == 1
    assert [tensor.name for tensor in index.tensors if f"'{tensor.name}' is damaged" in out] == [
        tensor.name for tensor in index.tensors[:2]
    ]


def test_a_damaged_index_is_told_by_every_verb_and_removed_by_gc_all_only(zinf, disk):
    flip(disk / "zinf.index", 200)
    for verb in ("ls", "verify", "gc"):
        code, _, err = zinf("disk", verb, disk)
        assert code == 1
        assert "the index does not have the checksum" in err
    assert zinf("disk", "gc", "--all", disk)[0] == 0
    assert list(disk.iterdir()) == []


def test_gc_gives_back_what_no_tensor_takes_and_the_commit_stays_sound(zinf, disk):
    tier = disk / "zinf.tier"
    before = tier.stat().st_blocks
    told = json.loads(zinf("disk", "gc", "--json", disk)[1])
    assert told["freed_bytes"] == (before - tier.stat().st_blocks) * 512 > 0
    assert zinf("disk", "verify", disk)[0] == 0


def untouched(directory: Path) -> list[tuple[str, int, int]]:
    found = [(path.name, path.stat()) for path in sorted(directory.iterdir())]
    return [(name, stat.st_size, stat.st_blocks) for name, stat in found]


def test_an_index_that_is_gone_is_a_finding_and_nothing_is_freed(zinf, disk):
    (disk / "zinf.index").unlink()
    (disk / "zinf-99999-1.tier").write_bytes(bytes(8192))
    before = untouched(disk)
    for verb in ("verify", "gc"):
        code, out, err = zinf("disk", verb, disk)
        assert (code, out) == (1, "")
        assert f"{disk}/zinf.index: the index is gone; {disk}/zinf.tier belongs to a comm" in err
    assert untouched(disk) == before


@pytest.mark.parametrize("left", [0, 4096, 200_000], ids=["empty", "header", "part"])
def test_gc_touches_nothing_of_a_truncated_data_file(zinf, disk, left):
    os.truncate(disk / "zinf.tier", left)
    before = untouched(disk)
    code, out, err = zinf("disk", "gc", disk)
    assert (code, out) == (1, "")
    assert "zinf disk verify" in err
    assert untouched(disk) == before


def test_gc_removes_what_a_dead_process_left(zinf, tmp_path):
    (tmp_path / "zinf-99999-1.tier").write_bytes(bytes(8192))
    code, out, _ = zinf("disk", "gc", tmp_path)
    assert code == 0
    assert "removed zinf-99999-1.tier" in out
    assert list(tmp_path.iterdir()) == []


def test_several_directories_are_one(zinf, tmp_path):
    disks = [tmp_path / "a", tmp_path / "b"]
    for path in disks:
        path.mkdir()
    session_behind(train(*disks)).close()
    told = json.loads(zinf("disk", "ls", "--json", disks[0])[1])
    assert {tensor["directory"] for tensor in told["tensors"]} == {str(path) for path in disks}
    code, _, err = zinf("disk", "gc", disks[1])
    assert code == 1
    assert "holds a file of the run in" in err
    assert zinf("disk", "verify", disks[0])[0] == 0
    assert zinf("disk", "gc", "--all", disks[0])[0] == 0
    assert [list(path.iterdir()) for path in disks] == [[], []]


WITHOUT_TORCH = """
import sys
from zcompile.cli import main
sys.exit(main(sys.argv[1:]) or 3 * ("torch" in sys.modules))
"""


def test_the_command_does_not_import_torch(disk):
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    for verb in ("ls", "verify", "gc"):
        command = [sys.executable, "-c", WITHOUT_TORCH, "disk", verb, str(disk)]
        assert subprocess.run(command, env=env, timeout=60).returncode == 0


def test_a_fit_does_not_import_torch(tmp_path):
    (config := tmp_path / "config.json").write_text(
        '{"model_type": "gpt2", "vocab_size": 9, "n_embd": 8, "n_layer": 2, "n_head": 2, '
        '"n_positions": 64}'
    )
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", WITHOUT_TORCH, "plan", str(config), "--fit"]
    assert subprocess.run(command, env=env, timeout=60).returncode == 0


def failed(zinf, monkeypatch, disk, argv, at=None, fault=None):
    """A command whose calls pass the border; one of them fails."""
    once = Once(disk.parent, at, fault)
    with monkeypatch.context() as patch:
        verb = partial(getattr(cli_disk, argv[0]), system=Border(once))
        patch.setattr(cli_disk, argv[0], verb)
        code, out, error = zinf("disk", argv[0], disk, *argv[1:])
    return once, code, error or out


@pytest.mark.parametrize(
    "argv",
    sampled([("ls",), ("verify",), ("gc",), ("gc", "--all")], ("ls",)),
    ids=" ".join,
)
def test_a_call_that_fails_is_told_in_a_sentence_and_loses_no_commit(
    zinf, monkeypatch, disk, tmp_path, argv
):
    """Every call, in every way that it can."""
    shutil.copytree(disk, kept := tmp_path / "kept")
    once, code, _ = failed(zinf, monkeypatch, disk, argv)
    assert code == 0
    cases = [(at, fault) for at in dict.fromkeys(once.seen) for fault in FAULTS[at[0]]]
    assert len(cases) > 30
    for at, fault in cases:
        shutil.rmtree(disk)
        shutil.copytree(kept, disk)
        _, code, told = failed(zinf, monkeypatch, disk, argv, at, fault)
        assert code == 0 or told.startswith("zinf: ") or ": damaged" in told, (at, fault, told)
        assert code == 0 or str(disk) in told, (at, fault, told)
        assert open_below(disk) == [], (at, fault)
        left = zinf("disk", "verify", disk)
        sound = f"{disk}: step 2, 9 tensors" in left[1]
        assert sound or argv[-1] == "--all", (at, fault, left)
        assert sound or code or "no commit" in left[1], (at, fault, left)
