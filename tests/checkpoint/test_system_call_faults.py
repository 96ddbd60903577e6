"""Every system call of the disk tier fails once, in every way that it can.

A durable run (offload, two steps with a commit each, save, close, resume, a step, close) is
recorded; one with `zinf disk gc` and `verify` between, where reads past the page cache are refused;
and one that is not durable, over two directories. Then each call is failed, one a run. Either the
run raises an error of ours that names the file, or the tensor, and leaves the last commit that was
told, or the one that was being made; or it goes on, with the same bits. Nothing stays open, nothing
runs on, and no extent or buffer is taken that nobody has.
"""

import errno
import gc
import os
import re
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from border import CALLS, Border, offloaded
from extents_held import forget_frames, lost_of, tensors_of
from failed_calls import CHECKPOINTS_ONLY, FAULTS, Once, ended, kernel_threads, open_below, running
from sampled import sampled
from torch import nn

import zcompile
from zcompile.cli import disk
from zcompile.errors import CommitFailed, NothingCommitted, ZinfError
from zcompile.frontend.offload import session_behind
from zcompile.runtime.closing import wait_for_dead_stores
from zcompile.runtime.durable.directory import HEADER_BYTES
from zcompile.runtime.io import trial
from zcompile.runtime.tiers import disk as disk_tier

FIELDS = {"device": "cpu", "device_memory": "1MiB", "host_memory": "256KiB", "durable": True}
INPUT = torch.randn(4, 64, generator=torch.Generator().manual_seed(1))


def model_of(seed):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(64, 80), nn.ReLU(), nn.Linear(80, 64))


def optimizer_of(model):
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def values(model):
    return [param.detach().cpu().clone() for param in model.parameters()]


def step(model, optimizer, told):
    optimizer.zero_grad()
    model(INPUT).square().sum().backward()
    try:
        optimizer.step()
    except CommitFailed:
        # What a failed sync left unwritten is not known: no later one may say that all is well.
        with pytest.raises(ZinfError):
            optimizer.step()
        raise
    told.append(values(model))


def run(root, system, told, lost):
    """`told`: the values after each step that returned; `lost`: what was taken for nobody, before
    each model was closed."""

    def first(model, optimizer):
        for _ in range(2):
            step(model, optimizer, told)
        zcompile.save(root / "kept", model, optimizer)

    def second(model, optimizer):
        zcompile.resume(root / "disk", model, optimizer)
        step(model, optimizer, told)

    for seed, work in enumerate((first, second)):
        model = offloaded(model_of(seed), system, disk=root / "disk", **FIELDS)
        counted(model, work, lost)


def tended(root, system, told, lost):
    """As `run`; what no commit names is given back between, and all checksums are read."""

    def first(model, optimizer):
        for _ in range(2):
            step(model, optimizer, told)

    def second(model, optimizer):
        zcompile.resume(root / "disk", model, optimizer)
        step(model, optimizer, told)

    model = offloaded(model_of(0), system, disk=root / "disk", **FIELDS)
    counted(model, first, lost)
    disk.gc(root / "disk", everything=False, system=system)
    if (answer := disk.verify(root / "disk", system)).code:
        raise ZinfError(answer.text)
    model = offloaded(model_of(1), system, disk=root / "disk", **FIELDS)
    counted(model, second, lost)


def striped(root, system, told, lost):
    """Entries lie over two directories."""

    def work(model, optimizer):
        for _ in range(2):
            step(model, optimizer, told)

    fields = {**FIELDS, "durable": False, "disk": (root / "disk", root / "other")}
    counted(offloaded(model_of(0), system, **fields), work, lost)


class Unaligned(Once):
    """Reads past the page cache are refused, as where a file was copied to another sort of disk."""

    through_cache = False

    def __call__(self, call, go):
        def made(*nbytes):  # a request of a ring may be told to move fewer
            data = call.name == "pread" and call.of.name == "zinf.tier"
            if data and len(call.arguments["into"]) > HEADER_BYTES and not self.through_cache:
                raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
            result = go(*nbytes)
            self.through_cache = self.through_cache or call.name == "dup2"
            return result

        return super().__call__(call, made)


@dataclass(frozen=True)
class Kind:
    """run     takes root, system, and the lists `told` and `lost`
    once       the sort of `Once`
    least      calls
    """

    run: Callable[..., None]
    once: type[Once]
    least: int


def counted(model, work, lost):
    """`work` with the model, which is closed then; `lost` as `run` has it."""
    optimizer, failure = optimizer_of(model), None
    try:
        work(model, optimizer)
    except ZinfError as error:
        failure = error
        forget_frames(error)
    try:
        lost.append(lost_of(session_behind(model), tensors_of(model, optimizer)))
    finally:
        zcompile.close(model)
    if failure is not None:
        raise failure


def same(some, others):
    return len(some) == len(others) and all(map(torch.equal, some, others))


def committed(root):
    """The values that the directory holds; None if it holds no commit."""
    model = offloaded(model_of(2), Border(), disk=root / "disk", **FIELDS)
    try:
        zcompile.resume(root / "disk", model, optimizer_of(model))
        return values(model)
    except NothingCommitted:
        return None
    finally:
        zcompile.close(model)


KINDS = {
    "durable": Kind(run, Once, 300),
    "tended": Kind(tended, Unaligned, 300),
    "striped": Kind(striped, Once, 100),
}


@pytest.fixture(scope="module")
def recorded(tmp_path_factory, small_stripes):
    """By kind: the calls of a run in which nothing fails, and the values after each step."""
    found = {}
    for name, kind in KINDS.items():
        for _ in range(2):  # what is made once, at the first
            root = tmp_path_factory.mktemp("recorded")
            told, once = [], kind.once(root)
            kind.run(root, Border(once), told, lost := [])
            assert not any(lost)
        assert len(once.seen) > kind.least
        found[name] = list(dict.fromkeys(once.seen)), told
    return found


@pytest.fixture(scope="module")
def small_stripes():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(disk_tier, "STRIPE_BYTES", 8192)
        yield


def check(root, kind, at, fault, want):
    """One run in which `at` fails."""
    threads, tasks, told, once = running(), len(kernel_threads()), [], kind.once(root, at, fault)
    where, named, lost = f"{at} {fault}", None, []
    try:
        kind.run(root, Border(once), told, lost)
    except ZinfError as error:
        forget_frames(error)
        said = str(error)
        if isinstance(error, CommitFailed):
            named = error.last, error.step, error.outcome_unknown
        assert str(root) in said, f"{where}: the error names no file: {said}"
        if at[0].startswith("ring_") and "trial" not in at[1]:
            assert re.search(r"'[02]\.(weight|bias)|CommitFailed|step \d", said), f"{where}: {said}"
    else:
        assert all(map(same, told, want)), where
        assert len(told) == len(want), where
    assert once.hit, where
    assert not any(lost), f"{where}: {lost}"
    gc.collect()
    wait_for_dead_stores()
    assert running() == threads, where
    assert ended(tasks), f"{where}: {kernel_threads()}"
    assert open_below(root) == [], where
    if kind.run is striped:
        kind.run(root, Border(), [], [])  # which clears up what could not be removed
        assert [name for place in root.iterdir() for name in place.iterdir()] == [], where
        return
    held = committed(root)
    steps = [n for n, one in enumerate(want, 1) if held is not None and same(held, one)]
    unsure = once.commits > len(told)
    assert named in (None, (len(told), len(told) + 1, unsure)), f"{where}: {named}"
    assert once.commits in (len(told), len(told) + 1), f"{where}: {steps} after {len(told)}"
    assert steps == ([once.commits] if once.commits else []), f"{where}: {steps}"
    assert held is None or steps, where


def spread(found, most):
    """At most so many of them, the first and the last among them: the slow tests fail each."""
    count = min(most, len(found))
    return [found[at * (len(found) - 1) // max(1, count - 1)] for at in range(count)]


def test_the_table_knows_every_call():
    assert FAULTS.keys() == {*CALLS, "ring", "ring_read", "ring_write"}


def chosen(spots, name, kind):
    """The last call of a name, on the data file if there are such; of the plain run the first
    too."""
    found = [spot for spot in spots if spot[0] == name]
    found = [spot for spot in found if spot[1].endswith(".tier")] or found
    return dict.fromkeys([*(found[:1] if kind == "durable" else ()), *found[-1:]])


FEW = ("allocate", "fdatasync", "fsync", "open", "pread", "rename", "ring_read", "ring_write")


@pytest.mark.parametrize("name", sampled(sorted(FAULTS.keys() - CHECKPOINTS_ONLY), *FEW))
def test_a_call_that_fails_is_told_and_loses_nothing(tmp_path, recorded, name):
    cases = [(kind, at) for kind in KINDS for at in chosen(recorded[kind][0], name, kind)]
    assert cases
    for number, (kind, at) in enumerate(cases):
        (root := tmp_path / str(number)).mkdir()
        check(root, KINDS[kind], at, FAULTS[name][0], recorded[kind][1])


def test_a_part_of_a_stripe_that_cannot_be_had_is_told_and_the_others_are_given_back(
    tmp_path, recorded
):
    spots, want = recorded["striped"]
    found = [spot for spot in spots if spot[0] == "allocate" and spot[1].startswith("/other/")]
    assert found
    for number, at in enumerate(found):
        (root := tmp_path / str(number)).mkdir()
        check(root, KINDS["striped"], at, "EIO", want)


@pytest.mark.parametrize(
    ("name", "of", "fault"),
    [
        ("stat", "/disk/zinf.index", "EIO"),  # one of them follows the rename that is the commit
        pytest.param(  # one looks how long a file is that is open already
            "stat", "/disk/zinf.tier", "EIO", marks=pytest.mark.slow
        ),
        ("fsync", "/disk", "EIO"),  # of the directory: the names of its files
        pytest.param(  # some follow the taking of an extent
            "fstat", "/disk/zinf.tier", "EIO", marks=pytest.mark.slow
        ),
        ("allocate", "/disk/zinf.tier", "EOPNOTSUPP"),
        ("flock", "/disk/zinf.lock", "ENOLCK"),
        ("flock", "/kept.zinf-partial", "ENOLCK"),
    ],
)
def test_calls_that_a_commit_hangs_on(tmp_path, recorded, name, of, fault):
    spots, want = recorded["durable"]
    found = [spot for spot in spots if spot[:2] == (name, of)]
    assert found
    for number, at in enumerate(spread(found, 6)):
        (root := tmp_path / f"{number}").mkdir()
        check(root, KINDS["durable"], at, fault, want)


@pytest.mark.parametrize(
    ("own", "name", "file"),
    [
        (True, "open", "zinf.tier"),
        (False, "open", "zinf.tier"),
        (False, "open", "zinf.index"),
        (False, "stat", "zinf.lock"),
    ],
)
def test_a_commit_that_cannot_be_opened_is_told(tmp_path, own, name, file):
    """By the model of the directory, and by one that rests elsewhere."""
    run(tmp_path, Border(), [], [])
    failing = False

    def around(call, go):
        if failing and call.name == name and call.of is not None and call.of.name == file:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return go()

    elsewhere = {**FIELDS, "durable": False, "host_memory": "4MiB"}
    fields = {**FIELDS, "disk": tmp_path / "disk"} if own else elsewhere
    model = offloaded(model_of(1), Border(around), **fields)
    before, failing = len(open_below(tmp_path)), True
    with pytest.raises(ZinfError, match=str(tmp_path / "disk")):
        zcompile.resume(tmp_path / "disk", model, optimizer_of(model))
    assert len(open_below(tmp_path)) == before
    failing = False
    zcompile.close(model)
    assert committed(tmp_path) is not None, "the lock is given back"


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("ring", trial.DIRECT)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", sorted(FAULTS.keys() - CHECKPOINTS_ONLY))
def test_any_call_that_fails_in_any_way_is_told_and_loses_nothing(
    tmp_path, monkeypatch, recorded, name, kind, ring
):
    if not opens(ring):
        pytest.skip(f"this machine has no {ring}")
    others = {kind: refused for kind in trial.DIRECT if kind != ring}
    monkeypatch.setattr(trial, "RINGS", {**trial.RINGS, **others})
    spots, want = recorded[kind]
    for number, at in enumerate(spot for spot in spots if spot[0] == name):
        for fault in FAULTS[name]:
            (root := tmp_path / f"{number}{fault}").mkdir()
            check(root, KINDS[kind], at, fault, want)


def opens(ring):
    try:
        trial.RINGS[ring]().close()
    except OSError:
        return False
    return True


def refused():
    raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
