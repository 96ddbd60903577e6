"""Every system call of checkpoints fails once, in every way that it can.

A checkpoint is saved, replaced while others keep files, a folder and a link in it, resumed and
loaded. Each call is failed, one a run: with an exchange of directories in one call, and without.
Either an error of ours names the file and what stood before stands whole, or all goes on. Nothing
stays open; what stays behind goes with the next save.
"""

import errno
import gc
import os

import pytest
import torch
from border import Border, offloaded
from extents_held import forget_frames, lost_of
from failed_calls import CHECKPOINTS_ONLY, FAULTS, Once, ended, kernel_threads, open_below
from torch import nn

import zcompile
from zcompile.errors import ZinfError
from zcompile.frontend.offload import session_behind

FIELDS = {"device": "cpu", "device_memory": "1MiB", "host_memory": "1MiB"}
KEPT = "runs/kept"


def model_of(value):
    """Of large and small tensors: they come by different ways."""
    model = nn.Sequential(nn.Linear(300, 300), nn.Linear(300, 4))
    with torch.no_grad():
        for param in model.parameters():
            param.fill_(value)
    return model


def put_others(kept):
    (kept / "tokens").mkdir()
    (kept / "tokens/vocab").write_text("a b c")
    (kept / "config.json").write_text("{}")
    (kept / "latest").symlink_to("tokens/vocab")
    os.setxattr(kept / "config.json", "user.made_by", b"somebody")


def others(kept):
    """What others keep there, as it should be."""
    return (
        (kept / "tokens/vocab").read_text() == "a b c"
        and (kept / "config.json").read_text() == "{}"
        and os.readlink(kept / "latest") == "tokens/vocab"
    )


def run(root, system, told, lost):
    """`told`: what was done; `lost`: what was taken for nobody, before the model was closed."""
    model, failure = offloaded(model_of(0), system, **FIELDS), None
    try:
        work(root / KEPT, model, told)
    except ZinfError as error:
        failure = error
        forget_frames(error)
    try:
        lost.append(lost_of(session_behind(model), model.parameters()))
    finally:
        zcompile.close(model)
    if failure is not None:
        raise failure


def work(kept, model, told):
    zcompile.save(kept, model, n=1)
    told.append("saved")
    put_others(kept)
    with torch.no_grad():
        for param in model.parameters():
            param.fill_(1)
    zcompile.save(kept, model, n=2)
    told.append("replaced")
    assert zcompile.resume(kept, model) == {"n": 2}
    told.append("resumed")
    zcompile.load(model, kept)
    told.append("loaded")
    assert all(param.on_host().eq(1).all() for param in model.parameters())


class Failing(Once):
    """exchanged: whether the system can; else directories are renamed."""

    def __init__(self, root, exchanged, at=None, fault=None):
        super().__init__(root, at, fault)
        self.exchanged = exchanged

    def __call__(self, call, go):
        def made():
            if call.name == "exchange" and not self.exchanged:
                raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
            return go()

        return super().__call__(call, made)


WAYS = [True, pytest.param(False, marks=pytest.mark.slow)]


@pytest.fixture(scope="module", params=WAYS, ids=["exchanged", "renamed"])
def recorded(request, tmp_path_factory):
    """The calls of a run in which nothing fails."""
    for _ in range(2):  # what is made once, at the first
        once = Failing(root := tmp_path_factory.mktemp("recorded"), request.param)
        run(root, Border(once), told := [], lost := [])
        assert (told, lost) == (["saved", "replaced", "resumed", "loaded"], [{}])
    assert len(once.seen) > 150
    assert {name for name, _, _ in once.seen} >= CHECKPOINTS_ONLY
    return list(dict.fromkeys(once.seen)), request.param


def check(root, exchanged, at, fault):
    root.mkdir()
    tasks, told, lost, where = len(kernel_threads()), [], [], f"{at} {fault}"
    once, said = Failing(root, exchanged, at, fault), None
    try:
        run(root, Border(once), told, lost)
    except ZinfError as error:
        forget_frames(error)
        said = str(error)
    assert once.hit, where
    assert (said is not None) == (len(told) < 4), where
    assert said is None or str(root) in said, f"{where}: the error names no file: {said}"
    assert not any(lost), f"{where}: {lost}"
    gc.collect()
    assert ended(tasks), f"{where}: {kernel_threads()}"
    assert open_below(root) == [], where
    kept, stands = root / KEPT, min(len(told), 2)
    if stands:
        assert zcompile.resume(kept, again := model_of(9)) == {"n": stands}, where
        assert all(param.eq(stands - 1).all() for param in again.parameters()), where
        assert others(kept), where
    else:
        assert not kept.exists(), where
    zcompile.save(kept, model_of(0))
    assert [path.name for path in kept.parent.iterdir()] == ["kept"], where


@pytest.mark.slow
def test_a_call_of_each_sort_that_fails_leaves_what_stood(tmp_path, recorded):
    """The first of each name and file."""
    spots, exchanged = recorded
    first = {
        (name, os.path.basename(of)): (name, of, number) for name, of, number in reversed(spots)
    }.values()
    for number, at in enumerate(first):
        check(tmp_path / str(number), exchanged, at, FAULTS[at[0]][0])


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", FAULTS)
def test_any_call_that_fails_in_any_way_leaves_what_stood(tmp_path, recorded, name):
    spots, exchanged = recorded
    for number, at in enumerate(spot for spot in spots if spot[0] == name):
        for fault in FAULTS[name]:
            check(tmp_path / f"{number}{fault}", exchanged, at, fault)
