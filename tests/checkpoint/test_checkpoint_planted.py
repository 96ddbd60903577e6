"""What others put into a checkpoint, or beside it, is neither waited for nor followed elsewhere."""

import errno
import os
import shutil
import stat
from pathlib import Path

import pytest
import torch
from border import Border, offloaded
from planted import PLANTED, device, directory, fifo, link, unix_socket
from small_models import mlp
from torch import nn

import zcompile
from zcompile.checkpoint import directory as checkpoint_directory
from zcompile.errors import CheckpointInvalid, CheckpointUnwritable

pytestmark = pytest.mark.timeout(60)
FIELDS = {"device": "cpu", "device_memory": "1MiB", "host_memory": "1MiB"}
SPECIAL = (fifo, unix_socket, device)
NO_FILES = (*SPECIAL, directory)
FILES = ("training.json", "model.safetensors", "training.safetensors")


@pytest.fixture
def kept(tmp_path: Path) -> Path:
    zcompile.save(tmp_path / "c", mlp(), n=1)
    return tmp_path / "c"


def open_files(below: Path) -> list[str]:
    names = [f"/proc/self/fd/{fd}" for fd in os.listdir("/proc/self/fd")]
    found = [os.readlink(name) for name in names if os.path.lexists(name)]
    return [name for name in found if name.startswith(str(below))]


@pytest.mark.parametrize("plant", NO_FILES, ids=lambda plant: plant.__name__)
@pytest.mark.parametrize("name", FILES)
def test_a_checkpoint_with_something_else_for_a_file_is_refused(kept, name, plant):
    (kept / name).unlink()
    plant(kept / name, kept)
    before = os.lstat(kept / name)
    kind = PLANTED[plant].removeprefix("is ")
    with pytest.raises(
        CheckpointInvalid, match=rf"{name} cannot .*\(it is {kind} and no .*; remove it"
    ):
        zcompile.resume(kept, mlp())
    assert os.path.samestat(os.lstat(kept / name), before)
    assert open_files(kept) == []


@pytest.mark.parametrize("plant", NO_FILES, ids=lambda plant: plant.__name__)
@pytest.mark.parametrize("name", ["model.safetensors", "model.safetensors.index.json"])
def test_weights_with_something_else_for_a_file_are_refused(kept, name, plant):
    (kept / name).unlink(missing_ok=True)
    plant(kept / name, kept)
    with pytest.raises(CheckpointInvalid, match=rf"{name} cannot be read \(it is a"):
        zcompile.load(mlp(), kept)
    assert open_files(kept) == []


@pytest.mark.parametrize("plant", SPECIAL, ids=lambda plant: plant.__name__)
def test_a_path_that_is_no_file_is_refused(tmp_path, plant):
    plant(tmp_path / "x", tmp_path)
    with pytest.raises(CheckpointInvalid, match="x cannot be read"):
        zcompile.load(mlp(), tmp_path / "x")
    with pytest.raises(CheckpointInvalid, match=r"x is a .*, and a checkpoint is a directory"):
        zcompile.resume(tmp_path / "x", mlp())
    with pytest.raises(CheckpointUnwritable, match="there is a"):
        zcompile.save(tmp_path / "x", mlp())


def test_a_checkpoint_may_be_made_of_links(kept, tmp_path):
    """As in the cache of Hugging Face, and behind a path that is a link."""
    (tmp_path / "made").mkdir()
    for file in kept.iterdir():
        (tmp_path / "made" / file.name).symlink_to(file)
    (tmp_path / "latest").symlink_to("made")
    assert zcompile.resume(tmp_path / "latest", mlp()) == {"n": 1}
    assert zcompile.load(mlp(), tmp_path / "latest").missing_keys == []
    (tmp_path / "made/model.safetensors").unlink()
    (tmp_path / "made/model.safetensors").symlink_to("model.safetensors")
    with pytest.raises(CheckpointInvalid, match="Too many levels of symbolic links"):
        zcompile.resume(tmp_path / "latest", mlp())


@pytest.mark.parametrize("number", [0, 1], ids=["header", "values"])
def test_a_fifo_that_takes_the_place_of_a_file_is_not_waited_for(tmp_path, number):
    """Between the look at it and the opening. Whoever has it open reads on in what he checked."""
    zcompile.save(kept := tmp_path / "c", nn.Linear(512, 512), n=1)
    opened = 0

    def around(call, go):
        nonlocal opened
        if call.name == "open" and call.of == kept / "model.safetensors":
            if opened == number:
                call.of.unlink()
                os.mkfifo(call.of)
            opened += 1
        return go()

    model = offloaded(nn.Linear(512, 512), Border(around), **FIELDS | {"host_memory": "4MiB"})
    if number == 0:
        with pytest.raises(CheckpointInvalid, match=r"it is a FIFO and no .*; remove it"):
            zcompile.resume(kept, model)
    else:
        assert zcompile.resume(kept, model) == {"n": 1}
    zcompile.close(model)
    assert opened == number + 1
    assert open_files(kept) == []


@pytest.mark.parametrize("where", ["c", "c/below"])
@pytest.mark.parametrize("plant", SPECIAL, ids=lambda plant: plant.__name__)
def test_what_cannot_come_along_is_told_before_anything_is_written(kept, where, plant):
    (kept.parent / where).mkdir(exist_ok=True)
    plant(kept.parent / where / "mine", kept)
    before = os.lstat(kept.parent / where / "mine")
    kind = PLANTED[plant]
    with pytest.raises(CheckpointUnwritable, match=f"{where}/mine {kind}, which cannot come along"):
        zcompile.save(kept, mlp(), progress=lambda *_: pytest.fail("written"), n=2)
    assert os.path.samestat(os.lstat(kept.parent / where / "mine"), before)
    assert zcompile.resume(kept, mlp()) == {"n": 1}
    assert [path.name for path in kept.parent.iterdir()] == ["c"]


@pytest.mark.parametrize("plant", NO_FILES, ids=lambda plant: plant.__name__)
def test_what_bears_the_name_of_a_file_of_ours_goes_with_the_old_checkpoint(kept, plant):
    plant(kept / "optimizer.safetensors", kept)
    if plant is directory:
        (kept / "optimizer.safetensors/inside").write_text("x")
    zcompile.save(kept, mlp(), n=2)
    assert zcompile.resume(kept, mlp()) == {"n": 2}
    assert [path.name for path in kept.parent.iterdir()] == ["c"]


def test_links_come_along_as_links(kept, tmp_path):
    (tmp_path / "victim").mkdir()
    (tmp_path / "victim/file").write_text("precious")
    (kept / "away").symlink_to(tmp_path / "victim")
    (kept / "nowhere").symlink_to("no/such")
    (kept / "model-00001-of-00002.safetensors").symlink_to(tmp_path / "victim/file")
    zcompile.save(kept, mlp(), n=2)
    assert os.readlink(kept / "away") == str(tmp_path / "victim")
    assert os.readlink(kept / "nowhere") == "no/such"
    assert (tmp_path / "victim/file").read_text() == "precious"


def test_files_come_along_with_mode_times_and_attributes(kept):
    (kept / "tokens").mkdir()
    for path in (kept / "config.json", kept / "tokens/vocab", kept / "tokens"):
        if not path.is_dir():
            path.write_text("{}")
        os.setxattr(path, "user.made_by", b"somebody")
        path.chmod(0o710)
        os.utime(path, ns=(10**18, 10**18 + 1))
    before = {path: path.stat() for path in sorted(kept.rglob("*")) if path.name not in FILES}
    zcompile.save(kept, mlp(), n=2)
    for path, old in before.items():
        now = path.stat()
        assert now.st_ino != old.st_ino, "it was copied"
        assert (now.st_mode, now.st_mtime_ns) == (old.st_mode, old.st_mtime_ns)
        assert os.getxattr(path, "user.made_by") == b"somebody"
    assert (kept / "tokens/vocab").read_text() == "{}"


@pytest.mark.parametrize("instant", ["copied", "removed"])
def test_a_folder_that_is_replaced_by_a_link_is_not_followed(kept, tmp_path, instant):
    """While it comes along, or while the old checkpoint is removed."""
    victim, hidden = tmp_path / "victim", tmp_path / "hidden"
    victim.mkdir()
    (victim / "file").write_text("precious")
    (kept / "sub").mkdir()
    (kept / "sub/file").write_text("x")
    opened = []

    def around(call, go):
        if call.name == "open" and call.of is not None and call.of.name == "sub":
            opened.append(call.of)
            # The first look is whether all can come along; then it is copied, from and to.
            if len(opened) == {"copied": 2, "removed": 5}[instant]:
                old = Path(os.readlink(f"/proc/self/fd/{call.arguments['dir_fd']}"))
                (old / "sub").rename(hidden)
                (old / "sub").symlink_to(victim)
        return go()

    model = offloaded(mlp(), Border(around), **FIELDS)
    if instant == "copied":
        with pytest.raises(CheckpointUnwritable, match="Not a directory"):
            zcompile.save(kept, model, n=2)
    else:
        zcompile.save(kept, model, n=2)
    zcompile.close(model)
    assert hidden.is_dir(), opened
    assert (victim / "file").read_text() == "precious"
    assert [path.name for path in victim.iterdir()] == ["file"]
    assert zcompile.resume(kept, mlp()) == {"n": 1 if instant == "copied" else 2}


@pytest.mark.parametrize("plant", [link, *SPECIAL], ids=lambda plant: plant.__name__)
def test_what_only_bears_the_name_of_a_previous_checkpoint_is_not_believed(
    kept, tmp_path, plant, monkeypatch, caplog
):
    kept.rename(tmp_path / "other")
    previous = tmp_path / "c.zinf-previous"
    plant(previous, tmp_path / "other")
    before = os.lstat(previous)
    with pytest.raises(CheckpointInvalid, match="does not exist"):
        zcompile.resume(kept, mlp())
    zcompile.save(kept, mlp(), n=2)
    zcompile.save(kept, mlp(), n=3)
    monkeypatch.setattr(checkpoint_directory, "exchange", lambda *_: False)
    with pytest.raises(CheckpointUnwritable, match=r"zinf-previous is a .*, which no save made"):
        zcompile.save(kept, mlp(), n=4)
    assert os.path.samestat(os.lstat(previous), before)
    assert zcompile.resume(kept, mlp()) == {"n": 3}
    assert zcompile.resume(tmp_path / "other", mlp()) == {"n": 1}


@pytest.mark.parametrize("plant", [link, fifo], ids=lambda plant: plant.__name__)
def test_a_new_checkpoint_is_not_written_through_what_bears_its_name(tmp_path, plant):
    (elsewhere := tmp_path / "elsewhere").mkdir()
    plant(tmp_path / f"c.zinf-partial-{os.getpid()}", elsewhere)
    with pytest.raises(CheckpointUnwritable, match="File exists"):
        zcompile.save(tmp_path / "c", mlp())
    assert list(elsewhere.iterdir()) == []
    assert not (tmp_path / "c").exists()


@pytest.mark.parametrize("exchanged", [True, False], ids=["exchanged", "renamed"])
@pytest.mark.parametrize("first", [True, False], ids=["first", "second"])
def test_a_name_that_cannot_be_synced_is_taken_back(tmp_path, exchanged, first):
    """So the old checkpoint stands, as the error says, and nothing of it is removed."""
    path, failing = tmp_path / "runs/c", False

    def around(call, go):
        if call.name == "exchange" and not exchanged:
            raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
        if failing and call.name == "fsync" and call.of == path.parent:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return go()

    path.parent.mkdir()
    if not first:
        zcompile.save(path, mlp(), n=1)
        (path / "config.json").write_text("{}")
    model, failing = offloaded(mlp(), Border(around), **FIELDS), True
    with pytest.raises(CheckpointUnwritable, match="Input/output error"):
        zcompile.save(path, model, n=2)
    zcompile.close(model)
    assert [one.name for one in path.parent.iterdir()] == ([] if first else ["c"])
    if not first:
        assert (path / "config.json").read_text() == "{}"
        assert zcompile.resume(path, mlp()) == {"n": 1}


def test_what_stays_behind_is_told(kept, caplog):
    def around(call, go):
        if call.name == "unlink" and call.of.name == "model.safetensors":
            raise OSError(errno.EROFS, os.strerror(errno.EROFS))
        return go()

    model = offloaded(mlp(), Border(around), **FIELDS)
    zcompile.save(kept, model, n=2)
    zcompile.close(model)
    assert f"c.zinf-partial-{os.getpid()} stays behind: Read-only file system" in caplog.text
    left = kept.with_name(f"c.zinf-partial-{os.getpid()}")
    assert [path.name for path in left.iterdir()] == ["model.safetensors"]
    zcompile.save(kept, mlp(), n=3)
    assert [path.name for path in kept.parent.iterdir()] == ["c"]


def test_small_and_large_tensors_leave_no_file_open(tmp_path):
    model = nn.Sequential(nn.Linear(512, 512), nn.Linear(512, 1))
    zcompile.save(tmp_path / "c", model)
    zcompile.load(model, tmp_path / "c")
    assert open_files(tmp_path) == []
    assert stat.S_IMODE((tmp_path / "c/training.json").stat().st_mode) & 0o600 == 0o600
    shutil.rmtree(tmp_path / "c")
    assert torch.isfinite(model[0].weight).all()
