"""A checkpoint is replaced as a whole, and a damaged one is refused as a whole."""

import errno
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import safetensors.torch
import torch
from border import Border, offloaded
from durable_runs import Run, after_a_crash, same
from pairs import assert_alike, assert_equal, other
from sampled import sampled
from small_models import mlp
from torch import nn

import zcompile
from zcompile.checkpoint import block_files, checkpoint, directory
from zcompile.errors import (
    CheckpointInvalid,
    CheckpointUnwritable,
    IOFault,
    Unsupported,
)


def test_a_checkpoint_is_replaced_and_what_others_keep_there_stays(tmp_path):
    first, second = mlp(), other(mlp())
    zcompile.save(tmp_path / "c", first)
    (tmp_path / "c/config.json").write_text("{}")
    (tmp_path / "c/tokenizer").mkdir()
    zcompile.save(tmp_path / "c", second)
    assert (tmp_path / "c/config.json").read_text() == "{}"
    assert (tmp_path / "c/tokenizer").is_dir()
    zcompile.resume(tmp_path / "c", first)
    assert_alike(first, second)
    assert [p.name for p in tmp_path.iterdir()] == ["c"]


def test_a_link_to_a_checkpoint_stays_a_link(tmp_path):
    zcompile.save(tmp_path / "c", mlp())
    (tmp_path / "latest").symlink_to("c")
    zcompile.save(tmp_path / "latest", other(mlp()))
    assert (tmp_path / "latest").is_symlink()
    assert_equal(
        torch.ones(8), safetensors.torch.load_file(tmp_path / "c/model.safetensors")["2.bias"]
    )


def test_what_is_no_checkpoint_is_not_replaced(tmp_path):
    (tmp_path / "home").mkdir()
    (tmp_path / "home/thesis.txt").write_text("x")
    (tmp_path / "file").write_text("x")
    with pytest.raises(CheckpointUnwritable, match="there is a directory that holds no checkpoint"):
        zcompile.save(tmp_path / "home", mlp())
    with pytest.raises(CheckpointUnwritable, match="there is a file"):
        zcompile.save(tmp_path / "file", mlp())
    (tmp_path / "empty").mkdir()
    zcompile.save(tmp_path / "empty", mlp())
    assert sorted(p.name for p in tmp_path.iterdir()) == ["empty", "file", "home"]


@pytest.mark.parametrize("at", ["c", "c/disk"])
@pytest.mark.parametrize("name", ["zinf.lock", "zinf.tier", "zinf.index", "zinf-17-1.tier"])
def test_a_checkpoint_beside_files_of_the_disk_tier_is_not_replaced(tmp_path, at, name):
    zcompile.save(tmp_path / "c", mlp())
    (tmp_path / at).mkdir(exist_ok=True)
    (tmp_path / at / name).write_text("of a run")
    before = (tmp_path / "c/model.safetensors").stat()
    with pytest.raises(CheckpointUnwritable, match=r"is of the disk tier .*; name another path"):
        zcompile.save(tmp_path / "c", other(mlp()))
    assert (tmp_path / at / name).read_text() == "of a run"
    assert (tmp_path / "c/model.safetensors").stat() == before
    assert [path.name for path in tmp_path.iterdir()] == ["c"]


def test_a_run_that_begins_in_a_checkpoint_while_it_is_replaced_stays(tmp_path):
    zcompile.save(tmp_path / "c", mlp())

    def begin(done: int, total: int) -> None:
        (tmp_path / "c/zinf.lock").touch()

    with pytest.raises(CheckpointUnwritable, match="is of the disk tier"):
        zcompile.save(tmp_path / "c", other(mlp()), progress=begin)
    assert (tmp_path / "c/zinf.lock").exists()
    assert [path.name for path in tmp_path.iterdir()] == ["c"]


def test_a_durable_run_over_a_checkpoint_outlives_a_save_of_another_model(tmp_path):
    zcompile.save(tmp_path, mlp())
    run = Run(tmp_path).train(0, 1)
    with pytest.raises(CheckpointUnwritable, match="is of the disk tier"):
        zcompile.save(tmp_path, mlp())
    run.train(1, 3)
    expected = run.state()
    run.close()
    with pytest.raises(CheckpointUnwritable, match="is of the disk tier"):
        zcompile.save(tmp_path, mlp())
    again = after_a_crash(tmp_path)
    again.resume()
    assert same(again.state(), expected)
    again.close()


def test_the_directory_in_which_a_process_works_is_not_replaced(tmp_path, monkeypatch):
    """It would find no relative path any more; but it reads a checkpoint there."""
    zcompile.save(tmp_path / "c", mlp(), n=1)
    (tmp_path / "c/below").mkdir()
    monkeypatch.chdir(tmp_path / "c/below")
    with pytest.raises(CheckpointUnwritable, match=r"this process works in it, .*; name another"):
        zcompile.save("..", mlp(), n=2)
    monkeypatch.chdir(tmp_path / "c")
    (tmp_path / "c/below").rmdir()
    for path in (".", tmp_path / "c", "/"):
        with pytest.raises(CheckpointUnwritable, match=r"this process works in it, .*; name anot"):
            zcompile.save(path, mlp(), n=2)
    assert zcompile.resume(".", mlp()) == {"n": 1}
    assert zcompile.load(mlp(), ".").missing_keys == []
    zcompile.save("next", mlp(), n=3)
    assert zcompile.resume(tmp_path / "c/next", mlp()) == {"n": 3}


def test_a_process_whose_directory_is_gone_is_told_so(tmp_path, monkeypatch):
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    with pytest.raises(CheckpointUnwritable, match="No such file"):
        zcompile.save("c", mlp())
    zcompile.save(tmp_path / "c", mlp(), n=1)
    assert zcompile.resume(tmp_path / "c", mlp()) == {"n": 1}
    with pytest.raises(CheckpointInvalid, match="c does not exist"):
        zcompile.resume("c", mlp())


@pytest.mark.parametrize(
    ("path", "why"), [("", "is empty"), ("c\0d", "has a NUL"), ("\ud800", "has characters")]
)
def test_what_is_no_path_is_refused(tmp_path, monkeypatch, path, why):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CheckpointUnwritable, match=why):
        zcompile.save(path, mlp())
    with pytest.raises(CheckpointInvalid, match=why):
        zcompile.resume(path, mlp())
    with pytest.raises(CheckpointInvalid, match=why):
        zcompile.load(mlp(), path)
    assert list(tmp_path.iterdir()) == []


def test_a_directory_without_a_name_is_no_checkpoint():
    with pytest.raises(CheckpointInvalid, match=r"/ holds no training.json"):
        zcompile.resume("/", mlp())


def test_arguments_in_another_order_are_told_with_the_right_one(tmp_path):
    model, optimizer = mlp(), torch.optim.SGD(mlp().parameters())
    with pytest.raises(Unsupported, match=r"call zcompile\.save\(path, model, optimizer\)"):
        zcompile.save(model, tmp_path / "c", optimizer)
    with pytest.raises(Unsupported, match=r"call zcompile\.resume\(path, model, optimizer\)"):
        zcompile.resume(tmp_path, optimizer, model)
    with pytest.raises(Unsupported, match=r"call zcompile\.load\(model, paths\)"):
        zcompile.load(tmp_path, model)
    assert not list(tmp_path.iterdir())


def test_a_file_is_not_resumed(tmp_path):
    zcompile.save(tmp_path, mlp())
    with pytest.raises(CheckpointInvalid, match=r"is a file, .*zcompile\.load reads weights"):
        zcompile.resume(tmp_path / "model.safetensors", mlp())


KILLED = """
import errno, os, signal, sys
from border import Border, offloaded
import zcompile
from small_models import mlp

path, instant = sys.argv[1:]
exchanged = False

def end():
    os.kill(os.getpid(), signal.SIGKILL)

def around(call, go):
    global exchanged
    if call.name == "exchange" and instant == "renamed":
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
    if instant == "writing" and call.name == "fsync" and call.of.name == "model.safetensors":
        end()
    if instant == "removing" and exchanged and call.name == "unlink":
        end()
    result = go()
    exchanged = exchanged or call.name == "exchange"
    if (instant, call.name) in (("exchanged", "exchange"), ("renamed", "rename")):
        end()
    return result

fields = {"device": "cpu", "device_memory": "1MiB", "host_memory": "1MiB"}
zcompile.save(path, offloaded(mlp(), Border(around), **fields), new=True)
"""


@pytest.mark.slow  # tests/checkpoint/test_power_loss.py, at every instant
@pytest.mark.parametrize(
    "instant", sampled(["writing", "exchanged", "removing", "renamed"], "exchanged")
)
def test_a_save_that_is_killed_leaves_a_whole_checkpoint(instant, tmp_path, caplog):
    """Before its name is given, between that and its sync, after it, and between two renames."""
    model = other(mlp())
    zcompile.save(tmp_path / "c", model, new=False)
    environment = {
        **os.environ,
        "PYTHONPATH": f"{Path.cwd()}:{Path(__file__).parents[1] / 'helpers'}",
    }
    killed = subprocess.run(
        [sys.executable, "-c", KILLED, tmp_path / "c", instant],
        env=environment,
        timeout=120,
        check=False,
    )
    assert killed.returncode == -signal.SIGKILL
    assert len(list(tmp_path.iterdir())) == 2
    found = mlp()
    extra = zcompile.resume(tmp_path / "c", found)
    assert extra == {"new": instant in ("exchanged", "removing")}
    assert_alike(found, mlp() if extra["new"] else model)
    assert ("is the checkpoint before it" in caplog.text) == (instant == "renamed")
    zcompile.save(tmp_path / "c", found)
    assert [p.name for p in tmp_path.iterdir()] == ["c"]


def test_where_two_directories_cannot_be_exchanged_they_are_renamed(tmp_path, monkeypatch):
    monkeypatch.setattr(directory, "exchange", lambda *_: False)
    zcompile.save(tmp_path / "c", mlp(), n=1)
    zcompile.save(tmp_path / "c", mlp(), n=2)
    assert zcompile.resume(tmp_path / "c", mlp()) == {"n": 2}
    assert [p.name for p in tmp_path.iterdir()] == ["c"]


def test_others_files_come_along_from_the_checkpoint_that_a_killed_save_left(tmp_path):
    zcompile.save(tmp_path / "c", mlp(), n=1)
    (tmp_path / "c/config.json").write_text("{}")
    (tmp_path / "c").rename(tmp_path / "c.zinf-previous")  # where it was killed between two renames
    zcompile.save(tmp_path / "c", mlp(), n=2)
    assert zcompile.resume(tmp_path / "c", mlp()) == {"n": 2}
    assert (tmp_path / "c/config.json").read_text() == "{}"
    assert [p.name for p in tmp_path.iterdir()] == ["c"]


@pytest.mark.parametrize("exchanged", [True, False])
@pytest.mark.parametrize("backup", ["c.previous", "c.partial-1", "c.partial-backup"])
def test_a_backup_of_the_users_own_beside_a_checkpoint_stays(
    tmp_path, monkeypatch, exchanged, backup
):
    if not exchanged:
        monkeypatch.setattr(directory, "exchange", lambda *_: False)
    zcompile.save(tmp_path / "c", mlp(), n=1)
    shutil.copytree(tmp_path / "c", tmp_path / backup)
    for n in (2, 3):
        zcompile.save(tmp_path / "c", mlp(), n=n)
    assert zcompile.resume(tmp_path / backup, mlp()) == {"n": 1}
    assert sorted(p.name for p in tmp_path.iterdir()) == ["c", backup]


def test_a_rename_that_fails_puts_the_old_checkpoint_back(tmp_path):
    """Where directories cannot be exchanged, and the old one has been renamed already."""
    zcompile.save(tmp_path / "c", mlp(), n=1)

    def around(call, go):
        if call.name == "exchange":
            raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
        if call.name == "rename" and "partial" in str(call.arguments["name"]):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return go()

    fields = {"device": "cpu", "device_memory": "1MiB", "host_memory": "1MiB"}
    model = offloaded(mlp(), Border(around), **fields)
    with pytest.raises(CheckpointUnwritable, match="Input/output error"):
        zcompile.save(tmp_path / "c", model, n=2)
    zcompile.close(model)
    assert [p.name for p in tmp_path.iterdir()] == ["c"]
    assert zcompile.resume(tmp_path / "c", mlp()) == {"n": 1}


@pytest.mark.timeout(60)
def test_what_only_bears_the_name_of_a_killed_save_is_left_alone(tmp_path):
    os.mkfifo(tmp_path / "c.zinf-partial-1")
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "c.zinf-partial-2").symlink_to(tmp_path / "elsewhere")
    before = sorted(tmp_path.iterdir())
    zcompile.save(tmp_path / "c", mlp())
    assert sorted(tmp_path.iterdir()) == sorted([*before, tmp_path / "c"])


def full(*_):
    raise OSError(28, "No space left on device")


@pytest.mark.parametrize("call", ["posix_fallocate", "pwrite", "fsync", "ftruncate"])
def test_a_full_disk_leaves_the_checkpoint_before_it(call, tmp_path, monkeypatch):
    zcompile.save(tmp_path / "c", mlp(), n=1)
    with monkeypatch.context() as patch:
        patch.setattr(block_files.os, call, full)
        with pytest.raises(OSError, match="No space left on device") as caught:
            zcompile.save(tmp_path / "c", mlp(), n=2)
    assert isinstance(caught.value, zcompile.ZinfError)
    assert zcompile.resume(tmp_path / "c", mlp()) == {"n": 1}
    assert [p.name for p in tmp_path.iterdir()] == ["c"]


def test_a_checkpoint_too_large_for_the_disk_is_refused_before_a_byte_is_written(
    tmp_path, monkeypatch
):
    class Disk:
        f_bavail, f_frsize = 2, 4096

    monkeypatch.setattr(checkpoint.os, "statvfs", lambda *_: Disk)
    with pytest.raises(CheckpointUnwritable, match=r"it needs .* KiB, and 8.00 KiB are free"):
        zcompile.save(tmp_path / "c", mlp())
    assert list(tmp_path.iterdir()) == []


def test_what_cannot_be_kept_is_told_before_anything_is_written(tmp_path):
    with pytest.raises(Unsupported, match=r"extra.loader is a builtins.object"):
        zcompile.save(tmp_path / "c", mlp(), loader=object())
    model = mlp()
    model.register_buffer("z", torch.ones(1, dtype=torch.complex128))
    with pytest.raises(Unsupported, match=r"'z' is of torch.complex128"):
        zcompile.save(tmp_path / "c", model)
    assert list(tmp_path.iterdir()) == []


def cut_short(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-4])


def rewritten(path: Path) -> None:
    path.write_text(path.read_text().replace("0.weight", "9.weight"))


DAMAGES = {
    "truncated": ("model.safetensors", cut_short, r"model.safetensors ends after \d+ bytes, and '"),
    "gone": ("optimizer.safetensors", Path.unlink, "optimizer.safetensors does not exist; copy"),
    "no json": ("training.json", cut_short, "training.json is not sound"),
    "empty": ("training.json", lambda p: p.write_text("{}"), "lacks what zcompile.save writes"),
    "other names": ("training.json", rewritten, "needs the tensor 'optimizer.9.weight"),
    "odd values": (
        "training.json",
        lambda p: p.write_text(p.read_text().replace('"$tensor"', '"$odd"')),
        "training.json has values that are not sound",
    ),
    "header": ("training.safetensors", lambda p: p.write_bytes(b"\0" * 99), "within its header"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_checkpoint_is_refused_as_a_whole(damage, tmp_path):
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), momentum=0.9)
    model(torch.randn(2, 8)).sum().backward()
    optimizer.step()
    zcompile.save(tmp_path / "c", model, optimizer)
    file, harm, why = DAMAGES[damage]
    harm(tmp_path / "c" / file)
    twin = other(mlp())
    before = {name: value.clone() for name, value in twin.state_dict().items()}
    with pytest.raises(CheckpointInvalid, match=why):
        zcompile.resume(tmp_path / "c", twin, torch.optim.SGD(twin.parameters(), momentum=0.9))
    assert all(torch.equal(value, before[name]) for name, value in twin.state_dict().items())


def test_files_of_two_checkpoints_are_not_mixed(tmp_path):
    zcompile.save(tmp_path / "a", mlp())
    zcompile.save(tmp_path / "b", mlp())
    os.replace(tmp_path / "a/model.safetensors", tmp_path / "b/model.safetensors")
    with pytest.raises(CheckpointInvalid, match=r"is not of the same checkpoint as training.json"):
        zcompile.resume(tmp_path / "b", mlp())


def test_what_is_no_checkpoint_is_told_by_what_it_is(tmp_path):
    with pytest.raises(CheckpointInvalid, match=r"c does not exist; name one that does"):
        zcompile.resume(tmp_path / "c", mlp())
    zcompile.save(tmp_path / "c", mlp())
    (tmp_path / "c/training.json").unlink()
    with pytest.raises(CheckpointInvalid, match=r"lacks training.json, .*; copy it again"):
        zcompile.resume(tmp_path / "c", mlp())
    (tmp_path / "c/training.safetensors").unlink()
    with pytest.raises(CheckpointInvalid, match=r"holds weights, .*; zcompile.load\(model, path\)"):
        zcompile.resume(tmp_path / "c", mlp())
    (tmp_path / "c/model.safetensors").unlink()
    with pytest.raises(CheckpointInvalid, match=r"holds no training.json, .*; name the directory"):
        zcompile.resume(tmp_path / "c", mlp())


def test_a_missing_shard_is_told_with_a_tensor_of_it(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint, "SHARD_BYTES", 1000)
    zcompile.save(tmp_path / "c", mlp())
    shard = sorted((tmp_path / "c").glob("model-*"))[1]
    shard.unlink()
    with pytest.raises(
        CheckpointInvalid, match=rf"{shard.name} does not exist, and .* has '\d.*; copy it again"
    ):
        zcompile.load(mlp(), tmp_path / "c")
    with pytest.raises(CheckpointInvalid, match=r"holds neither model.safetensors nor"):
        zcompile.load(mlp(), tmp_path)
    with pytest.raises(CheckpointInvalid, match=r"holds no training.json, so it is no checkpoint"):
        zcompile.resume(tmp_path, mlp())


@pytest.mark.parametrize("nbytes", [100, 10_000_000])
def test_a_disk_that_fails_while_reading_is_told_with_the_tensor(nbytes, tmp_path, monkeypatch):
    model = nn.Linear(nbytes // 4, 1, bias=False)
    zcompile.save(tmp_path / "c", model)

    def fail(fd, buffers, offset, really=os.preadv):
        if offset < 4096:  # the header
            return really(fd, buffers, offset)
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(block_files.os, "preadv", fail)
    with pytest.raises(IOFault, match="read of 'weight' failed: Input/output error"):
        zcompile.load(model, tmp_path / "c")
