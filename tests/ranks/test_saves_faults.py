"""Calls on files fail while several ranks save: all of them raise, or none; what stands is then the
old checkpoint, or the new one; and the run goes on."""

import errno
import json
import os
import time
from pathlib import Path

import pytest
import torch.distributed as dist
from border import Border, offloaded
from rank_models import words

import zcompile
from zcompile.errors import CheckpointUnwritable, RankFailed, ZinfError

BUDGETS = {"device": "cpu", "device_memory": "4MiB", "host_memory": "64MiB", "rank_timeout": 60}
AT_ONCE = 15
"""Saves of a case, which is given 90 s."""
REQUESTS = ("ring", "ring_read", "ring_write")


def number_in(path):
    return json.loads((Path(path) / "training.json").read_text())["state"]["extra"]["number"]


class Failing:
    """Lets one call fail while it is armed, and notes all."""

    def __init__(self, fails):
        self.fails, self.armed, self.seen = fails, False, []

    def around(self, call, go):
        if not self.armed or call.name in REQUESTS:
            return go()
        at = len(self.seen)
        self.seen.append((call.name, Path(str(call.of)).name))
        if self.fails(at, call):
            if call.name == "close":  # which gives the descriptor back, whatever it says
                go()
            raise OSError(errno.EIO, "injected")
        return go()


def three_saves(mesh, folder, fails, turned):
    """Save, save while a call fails, and save again: what each rank met at the second, its calls,
    and what stands after the second and the third."""
    rank = mesh.get_local_rank()
    failing = Failing(lambda at, call: fails(rank, at, call))
    path = f"{folder}/run"
    model = offloaded(words(blocks=1), Border(failing.around), mesh=mesh, **BUDGETS)
    more = {"turned": model.head.weight.detach().t()} if turned else {}
    zcompile.save(path, model, number=1, **more)
    failing.armed = True
    try:
        zcompile.save(path, model, number=2, **more)
        error = None
    except (ZinfError, OSError) as raised:
        error = type(raised).__name__, str(raised), isinstance(raised, ZinfError)
    failing.armed = False
    dist.barrier(mesh.get_group())
    stands = number_in(path)
    dist.barrier(mesh.get_group())
    zcompile.save(path, model, number=3, **more)
    dist.barrier(mesh.get_group())
    left = sorted(os.listdir(folder)), number_in(path)
    zcompile.close(model)
    return error, failing.seen, stands, left


def one_call(mesh, base, who, name, of, turned):
    """The first call `name` of a file or directory `of` fails on rank `who`."""
    met = []

    def fails(rank, at, call):
        if rank != who or met or call.name != name or of not in str(call.of):
            return False
        met.append(at)
        return True

    os.makedirs(base, exist_ok=True)
    return *three_saves(mesh, base, fails, turned), bool(met)


def some_calls(mesh, base, who, turned, first):
    """Calls from `first` on of rank `who` fail, each of a save of its own; no row is the last."""
    found = []
    for at in range(first, first + AT_ONCE):
        folder = f"{base}/{at}"
        os.makedirs(folder, exist_ok=True)
        error, seen, stands, left = three_saves(
            mesh, folder, lambda rank, n, call, at=at: rank == who and n == at, turned
        )
        rows = [None] * 2
        call = seen[at] if rank_is(mesh, who) and at < len(seen) else None
        dist.all_gather_object(rows, (error, call), mesh.get_group())
        if rows[who][1] is None:
            break
        found.append((rows[who][1], [error for error, _ in rows], stands, left))
    return found


def rank_is(mesh, who):
    return mesh.get_local_rank() == who


def check(errors, stands, left):
    """Check what two ranks met at a save of which a call failed."""
    assert left == (["run"], 3)
    if errors == [None, None]:
        assert stands == 2
        return
    assert stands == 1
    assert None not in errors
    for name, text, ours in errors:
        assert ours, name
        assert "injected" in text, text


@pytest.mark.slow
@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("who", [0, 1])
def test_whatever_call_fails_all_ranks_raise_or_none(pool, who, turned, tmp_path):
    rows = []
    while len(rows) % AT_ONCE == 0:
        (more, _) = pool.run(some_calls, 2, str(tmp_path), who, turned, len(rows))
        rows += more
        if not more:
            break
    assert len(rows) > (80 if who == 0 else 10)
    for at, (call, errors, stands, left) in enumerate(rows):
        try:
            check(errors, stands, left)
        except AssertionError as error:
            raise AssertionError(f"call {at} of rank {who}, {call}: {errors}") from error
    assert sum(errors[0] is not None for _, errors, *_ in rows) > len(rows) / 3


@pytest.mark.parametrize(
    ("who", "name", "of", "turned"),
    [
        (1, "open", "run.zinf-partial", False),
        (1, "stat", "/of-", False),
        (1, "pwrite", "model.safetensors", True),
        (1, "close", "model.safetensors", False),
        (0, "unlink", "/of-", False),
        (0, "fsync", "training.safetensors", True),
        (0, "close", "model.safetensors", False),
    ],
)
def test_a_call_that_fails_is_told_to_both_ranks_by_its_cause(
    pool, who, name, of, turned, tmp_path
):
    rows = pool.run(one_call, 2, str(tmp_path), who, name, of, turned)
    assert rows[who][-1], "the call was met"
    check([row[0] for row in rows], rows[0][2], rows[0][3])
    other = rows[1 - who][0]
    assert other[0] == CheckpointUnwritable.__name__
    assert f"rank {who} on " in other[1]


def test_closing_the_directory_can_fail_and_loses_nothing(pool, tmp_path):
    rows = pool.run(folder_unclosed, 2, str(tmp_path))
    assert [row[0] for row in rows] == [None, None]
    assert rows[0][2:4] == (2, (["run"], 3))
    assert rows[1][4]


def folder_unclosed(mesh, base):
    """As `one_call`: rank 1 cannot close the directory, whose name it has only read."""
    met = []

    def fails(rank, at, call):
        name = Path(str(call.of)).name
        if rank == 1 and call.name == "close" and name.startswith("run.zinf-partial"):
            met.append(at)
            return True
        return False

    return *three_saves(mesh, base, fails, False), bool(met)


def directories_made(mesh, path):
    """The directories that are made while all save three times."""
    made = []

    def around(call, go):
        if call.name == "mkdir":
            made.append(Path(str(call.of)).name)
        return go()

    model = offloaded(words(blocks=1), Border(around), mesh=mesh, **BUDGETS)
    for number in range(3):
        zcompile.save(path, model, number=number)
    zcompile.close(model)
    return made


def test_no_two_saves_have_a_new_directory_of_one_name(pool, tmp_path):
    first, second = pool.run(directories_made, 2, str(tmp_path / "run"))
    assert second == []
    assert len(set(first)) == len(first) == 3
    assert all(name.startswith("run.zinf-partial-") for name in first)


def gathered_in_vain(mesh, path):
    """Reading fails on rank 1 in the middle of a gather; what each rank raises, and then."""
    armed = False

    def unread(entry):
        if armed and mesh.get_local_rank() == 1:
            raise OSError(errno.EIO, "unreadable")
        return read_all(entry)

    model = offloaded(words(blocks=1), Border(), mesh=mesh, **BUDGETS)
    turned = model.head.weight.detach().t()
    store = turned.entry.store
    read_all, store.read_all = store.read_all, unread
    zcompile.save(path, model, number=1, turned=turned)
    armed = True
    found = []
    for act in (lambda: zcompile.save(path, model, number=2, turned=turned), model.head.weight.sum):
        with pytest.raises((ZinfError, OSError)) as caught:
            act()
        found.append((type(caught.value).__name__, str(caught.value)))
    zcompile.close(model)
    return found


def test_a_failure_in_the_middle_of_a_gather_ends_the_session_and_says_so(pool, tmp_path):
    rows = pool.run(gathered_in_vain, 2, str(tmp_path / "run"))
    (first, then), (own, _) = rows
    assert first[0] == then[0] == RankFailed.__name__
    assert "rank 1 on " in first[1]
    assert "unreadable" in first[1]
    assert "unreadable" in own[1]
    assert number_in(tmp_path / "run") == 1
    assert os.listdir(tmp_path) == ["run"]


def opened_late(mesh, path):
    """Rank 0 cannot remove the mark; rank 1 opens its file when it may be gone, if it goes."""

    def around(call, go):
        if mesh.get_local_rank() == 0 and call.name == "unlink" and "/of-" in str(call.of):
            raise OSError(errno.EIO, "injected")
        if mesh.get_local_rank() == 1 and call.name == "open" and "model" in Path(call.of).name:
            until = time.monotonic() + 0.5
            while call.of.exists() and time.monotonic() < until:
                time.sleep(0.01)
        return go()

    model = offloaded(words(blocks=1), Border(around), mesh=mesh, **BUDGETS)
    with pytest.raises(CheckpointUnwritable) as caught:
        zcompile.save(path, model)
    zcompile.close(model)
    return str(caught.value)


def test_rank_0_tells_before_it_removes_what_others_write_to(pool, tmp_path):
    first, second = pool.run(opened_late, 2, str(tmp_path / "run"))
    assert "injected" in first
    assert "rank 0 on " in second
    assert "injected" in second
