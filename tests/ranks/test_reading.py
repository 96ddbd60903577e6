"""What one rank cannot read of a checkpoint raises on all of them, at once: before anything has
changed, so that the run goes on, or else as the end of the session of all."""

import errno
import os
import shutil

import pytest
import torch
import torch.distributed as dist
from border import Border, offloaded
from rank_models import adamw, digest, words
from safetensors.torch import load_file, save_file
from torch import nn

import zcompile
from zcompile.checkpoint.stream import Loader
from zcompile.checkpoint.together import ENDED
from zcompile.errors import CheckpointInvalid, NothingCommitted, RankFailed, ZinfError
from zcompile.runtime.durable.check import check_all
from zcompile.runtime.progress import BOARD

BUDGETS = {"device": "cpu", "device_memory": "4MiB", "host_memory": "64MiB", "rank_timeout": 80}
"""Of a case, which is given 90 s: who is told by a time-out comes too late."""
WEIGHTS = "model.safetensors"


def other_values():
    torch.manual_seed(1)
    made = words(blocks=1)
    with torch.no_grad():
        for param in made.parameters():
            param.add_(1.0)
    return made


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """A checkpoint for each of two ranks, which is the same, and sound."""
    folder = tmp_path_factory.mktemp("checkpoints")
    model = other_values()
    zcompile.save(folder / "0", model, adamw(model.parameters()), number=7)
    shutil.copytree(folder / "0", folder / "1")
    return folder


def without(path):
    shutil.rmtree(path)


def cut_short(path):
    os.truncate(f"{path}/{WEIGHTS}", 100)


def of_another_shape(path):
    rows = load_file(f"{path}/{WEIGHTS}")
    rows["head.weight"] = rows["head.weight"][:-1].contiguous()
    save_file(rows, f"{path}/{WEIGHTS}")


def without_a_tensor(path):
    rows = load_file(f"{path}/{WEIGHTS}")
    del rows["head.weight"]
    save_file(rows, f"{path}/{WEIGHTS}")


def without_its_state(path):
    os.remove(f"{path}/training.json")


DAMAGES = [without, cut_short, of_another_shape, without_a_tensor, without_its_state]


def met(act):
    """The kind and text of what `act` raises."""
    try:
        act()
    except (ZinfError, OSError, MemoryError) as error:
        return type(error).__name__, str(error)
    return "nothing", ""


def damaged_on_one(mesh, base, folder):
    """What each rank meets where the checkpoint of rank 1 is damaged, for each damage, while it
    resumes and while it loads, and whether the weights are those of before; what it resumes then.
    """
    rank = mesh.get_local_rank()
    model = zcompile.offload(words(blocks=1), mesh=mesh, **BUDGETS)
    before, found = digest(model.parameters()), []
    for damage in DAMAGES:
        for reads in ("resume", "load"):
            path = f"{folder}/{damage.__name__}-{reads}-{rank}"
            shutil.copytree(f"{base}/{rank}", path)
            if rank:
                damage(path)
            if reads == "resume":
                error = met(lambda path=path: zcompile.resume(path, model))
            else:
                error = met(lambda path=path: zcompile.load(model, path))
            found.append((damage.__name__, reads, *error, digest(model.parameters()) == before))
    with torch.no_grad():  # the last of them has read the weights
        for param in model.parameters():
            param.zero_()
    extra = zcompile.resume(f"{base}/{rank}", model, adamw(model.parameters()))
    after = digest(model.parameters())
    zcompile.close(model)
    return found, extra, after


def test_what_one_rank_cannot_read_raises_on_all_and_changes_nothing(pool, base, tmp_path):
    first, second = pool.run(damaged_on_one, 2, str(base), str(tmp_path))
    for ours, theirs in zip(first[0], second[0], strict=True):
        damage, reads, kind, text, same = ours
        if (damage, reads) == ("without_its_state", "load"):
            continue  # weights alone are read
        assert same, ours
        assert theirs[4], theirs
        assert theirs[2] in ("CheckpointInvalid", "CheckpointMismatch"), theirs
        assert kind == CheckpointInvalid.__name__, ours
        assert "rank 1 on " in text
        assert theirs[3].splitlines()[0][:150] in text, (text, theirs[3])
    for _, extra, after in (first, second):
        assert extra == {"number": 7}
        assert after == digest(other_values().parameters())


class Small(nn.Module):
    """Whose tensors are whole on every rank."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x).relu()
        return x.square().mean()


def half_loaded(mesh, path):
    """What each rank meets where rank 1 is interrupted between two small tensors, and then by
    whatever would use values; and whether the model closes."""
    rank, tries, fill = mesh.get_local_rank(), 0, Loader.fill
    model = zcompile.offload(Small(), mesh=mesh, **BUDGETS)
    run, x = torch.compile(model, backend="zinf"), torch.ones(2, 8)
    with torch.no_grad():
        run(x)

    def interrupted(*arguments):
        nonlocal tries
        tries += 1
        if rank and tries == 3:
            raise KeyboardInterrupt
        return fill(*arguments)

    weight = model.layers[2].weight
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Loader, "fill", interrupted)
        try:
            zcompile.load(model, path)
        except (RankFailed, KeyboardInterrupt) as error:
            caught = error
    with torch.no_grad():
        then = [
            met(lambda: digest([weight])),
            met(lambda: run(x)),
            met(lambda: weight.add_(1.0)),
            met(lambda: [value.cpu() for value in model.state_dict().values()]),
            met(lambda: zcompile.save(f"{path}-{rank}", model)),
        ]
    zcompile.close(model)
    return type(caught).__name__, caught.__notes__, then


def test_nothing_that_was_loaded_in_half_is_used(pool, tmp_path):
    zcompile.save(tmp_path / "small", Small())
    found = pool.run(half_loaded, 2, str(tmp_path / "small"))
    assert [kind for kind, _, _ in found] == [RankFailed.__name__, "KeyboardInterrupt"]
    for _, notes, then in found:
        assert ENDED in notes
        for kind, text in then:
            assert kind == RankFailed.__name__
            assert "rank 1 on " in text
            assert "KeyboardInterrupt" in text


def memory_is_short(*_):
    raise MemoryError("no memory is left")


def failing_on_one(mesh, base, folder, how):
    """What each rank meets where rank 1 fails while values come; and what it meets next."""
    rank, armed = mesh.get_local_rank(), False

    def around(call, go):
        fails = {"read": ("preadv", "pread", "ring_read"), "write": ("pwrite", "ring_write")}
        if armed and rank and call.name in fails.get(how, ()):
            place = str(call.of)
            if (WEIGHTS in place) == (how == "read"):
                code = errno.EIO if how == "read" else errno.ENOSPC
                if call.name.startswith("ring"):
                    return -code
                raise OSError(code, os.strerror(code))
        return go()

    disk = f"{folder}/{how}"
    os.makedirs(disk, exist_ok=True)
    budgets = {**BUDGETS, "host_memory": "300KiB" if how == "write" else "64MiB"}
    model = offloaded(words(blocks=1), Border(around), mesh=mesh, disk=disk, **budgets)
    dist.barrier(mesh.get_group())
    fill = Loader.fill

    def fails_from_here(*arguments):
        nonlocal armed
        armed = True
        return memory_is_short() if how == "memory" and rank else fill(*arguments)

    Loader.fill = fails_from_here
    try:
        first = met(lambda: zcompile.resume(f"{base}/{rank}", model, adamw(model.parameters())))
    finally:
        Loader.fill = fill
    armed = False
    then = met(lambda: digest(model.parameters()))
    zcompile.close(model)
    return first, then


@pytest.mark.parametrize("how", ["read", "write", "memory"])
def test_what_fails_on_one_rank_while_values_come_ends_the_session_of_all(
    pool, base, tmp_path, how
):
    (first, then), (failed, after) = pool.run(failing_on_one, 2, str(base), str(tmp_path), how)
    says = {"read": "Input/output error", "write": "No space left", "memory": "no memory is left"}
    assert says[how] in failed[1]
    assert first[0] == RankFailed.__name__
    assert "rank 1 on " in first[1]
    assert says[how] in first[1]
    assert then[0] == RankFailed.__name__
    for _, text in (then, after):  # nothing is used that was read in part
        assert says[how] in text


def checked(mesh, disk):
    """What a rank is known to do while it checks a commit: its own, and one it copies."""
    here, seen = check_all, []

    def noted(*arguments):
        seen.append(BOARD.doing())
        return here(*arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("zcompile.checkpoint.durable.check_all", noted)
        for durable in (True, True, False):
            fields = {"durable": True, "disk": disk} if durable else {}
            model = zcompile.offload(words(blocks=1), mesh=mesh, **BUDGETS, **fields)
            optimizer = adamw(model.parameters())
            try:
                zcompile.resume(disk, model, optimizer)
            except NothingCommitted:
                zcompile.save(disk, model, optimizer)
            zcompile.close(model)
    return seen


def test_a_rank_that_checks_a_commit_is_busy(pool, tmp_path):
    """So that the others wait for it, for longer than `rank_timeout` too."""
    for seen in pool.run(checked, 2, str(tmp_path)):
        assert len(seen) == 3, "its own part, and then those of both"
        for text in seen:
            assert f"reading {tmp_path}; checking {tmp_path}/rank-" in text


def too_little_memory_on_one(mesh):
    """What each rank meets where rank 1 cannot keep a share while the model is offloaded."""
    rank, model = mesh.get_local_rank(), words(blocks=1)
    with pytest.MonkeyPatch.context() as patch:
        if rank:
            patch.setattr("zcompile.frontend.offload.own", memory_is_short)
        return met(lambda: zcompile.offload(model, mesh=mesh, **BUDGETS))


def test_a_rank_that_fails_while_it_offloads_ends_the_others_with_its_cause(pool):
    (kind, text), (failed, why) = pool.run(too_little_memory_on_one, 2)
    assert (failed, why) == ("MemoryError", "no memory is left")
    assert kind == RankFailed.__name__
    assert "rank 1 on " in text
    assert "MemoryError: no memory is left" in text
