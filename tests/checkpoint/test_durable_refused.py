"""What a durable training refuses, and that the last commit stays as it is."""

import errno
import logging

import pytest
import torch
from committed import check_all, read_index
from durable_runs import ON_DISK, ON_HOST, WIDTH, Run, after_a_crash, flip, same
from torch import nn

import zcompile
from zcompile.errors import (
    ConfigInvalid,
    DiskUnusable,
    DurableDamaged,
    DurableHeld,
    NothingCommitted,
    TierFull,
    Unsupported,
)
from zcompile.frontend.offload import session_behind


def test_a_commit_that_nobody_resumed_is_not_lost_by_a_step(tmp_path):
    Run(tmp_path).train(0, 2).close()
    index = read_index(tmp_path)
    run = after_a_crash(tmp_path)
    with pytest.raises(DurableHeld, match="holds step 2 of an earlier run: continue it with"):
        run.train(0, 1)
    with pytest.raises(DurableHeld):
        zcompile.save(tmp_path, run.model, run.optimizer)
    run.close()
    assert read_index(tmp_path) == index
    check_all(index[0], [tmp_path])


def test_an_empty_directory_has_nothing_to_resume(tmp_path):
    run = Run(tmp_path)
    with pytest.raises(NothingCommitted, match="there is nothing to resume: train on"):
        run.resume()
    run.train(0, 1).close()


def test_a_run_is_resumed_once(tmp_path):
    run = Run(tmp_path).train(0, 1)
    with pytest.raises(Unsupported, match="holds what this very model committed"):
        run.resume()
    run.close()


def test_adapters_that_no_commit_would_hold_are_refused_until_they_are_taken_in(tmp_path):
    run = Run(tmp_path)
    run.model.requires_grad_(False)
    run.model.added = nn.Linear(WIDTH, WIDTH)
    run.optimizer = torch.optim.AdamW(run.model.added.parameters())
    x = torch.ones(8, WIDTH)
    (run.model(x) + run.model.added(x)).sum().backward()
    with pytest.raises(Unsupported, match=r"added to the durable Net .*offload\(model\) once more"):
        run.optimizer.step()
    zcompile.offload(run.model)
    run.optimizer.step()
    assert read_index(tmp_path)[0].step == 1
    run.close()


def test_a_closure_that_fails_leaves_no_step_broken_off(tmp_path):
    run = Run(tmp_path).train(0, 1)

    def fails():
        raise ValueError("no batch")

    with pytest.raises(ValueError, match="no batch"):
        run.optimizer.step(fails)
    run.train(1, 2).close()
    assert read_index(tmp_path)[0].step == 2


def test_a_second_optimizer_is_refused(tmp_path):
    run = Run(tmp_path).train(0, 1)
    other = torch.optim.SGD(run.model.up.parameters(), lr=0.1)
    run.model(torch.ones(8, WIDTH)).sum().backward()
    with pytest.raises(Unsupported, match="a second optimizer \\(SGD\\) steps on a durable model"):
        other.step()
    run.close()


def test_a_save_without_the_optimizer_does_not_lose_what_was_resumed_of_it(tmp_path):
    Run(tmp_path).train(0, 2).close()
    run = after_a_crash(tmp_path)
    run.resume()
    expected = run.state()
    zcompile.save(tmp_path, run.model, epoch=1)
    run.close()
    again = after_a_crash(tmp_path)
    assert again.resume() == {"step": 2, "epoch": 1}
    assert same(again.state(), expected)
    again.close()


@pytest.mark.parametrize("extra", [{"hook": print}, {"step": 7}], ids=["a function", "step"])
def test_what_cannot_be_kept_is_refused_and_does_not_stay_for_later_commits(tmp_path, extra):
    run = Run(tmp_path).train(0, 1)
    zcompile.save(tmp_path, run.model, run.optimizer, epoch=3)
    with pytest.raises(Unsupported, match="|".join(extra)):
        zcompile.save(tmp_path, run.model, run.optimizer, **extra)
    run.train(1, 2).close()
    again = after_a_crash(tmp_path)
    assert again.resume() == {"step": 2, "epoch": 3}
    again.close()


def test_durable_needs_a_disk():
    with pytest.raises(ConfigInvalid, match="durable=True needs a disk"):
        zcompile.Config(device="cpu", durable=True)


@pytest.mark.parametrize("fields", [ON_DISK, ON_HOST], ids=["disk", "host"])
def test_a_flipped_bit_names_file_and_tensor_and_nothing_is_changed(tmp_path, fields):
    Run(tmp_path, **fields).train(0, 2).close()
    tensor = read_index(tmp_path)[0].tensors[-1]
    flip(tmp_path / "zinf.tier", tensor.offset + tensor.nbytes - 1)
    run = after_a_crash(tmp_path, **fields)
    before = run.state()
    with pytest.raises(DurableDamaged) as caught:
        run.resume()
    assert f"{tmp_path / 'zinf.tier'}: {tensor.name!r} is damaged" in str(caught.value)
    assert same(run.state(), before)
    with pytest.raises(DurableHeld):
        run.train(0, 1)
    run.close()
    assert (tmp_path / "zinf.index").exists()


def test_another_model_does_not_fit_and_the_commit_stays(tmp_path):
    Run(tmp_path).train(0, 2).close()
    model = zcompile.offload(nn.Linear(4, 4), disk=tmp_path, **ON_DISK)
    with pytest.raises(zcompile.ZinfError, match=r"up\.weight: float32"):
        zcompile.resume(tmp_path, model)
    session_behind(model).close()
    again = after_a_crash(tmp_path)
    assert again.resume() == {"step": 2}
    again.close()


def test_a_step_that_finds_no_room_is_refused_before_it_writes(tmp_path, monkeypatch):
    run = Run(tmp_path).train(0, 2)
    monkeypatch.setattr(run.commit_log.tier, "usage", lambda: ("disk", 100, 100))
    with pytest.raises(TierFull, match="the new version of what this step changes"):
        run.train(2, 3)
    run.close()
    again = after_a_crash(tmp_path)
    assert again.resume() == {"step": 2}
    again.close()


def test_a_file_that_cannot_grow_ends_the_step_and_nothing_hangs(tmp_path, monkeypatch):
    run = Run(tmp_path).train(0, 1)
    for file in run.commit_log.files.files:
        for begin, end in list(file.extents._free):
            file.extents.take_at(begin, end - begin)

    def refused(*args):
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr("os.posix_fallocate", refused)
    with pytest.raises(DiskUnusable, match="cannot be grown into \\(Read-only file system"):
        run.train(1, 2)
    with pytest.raises(DiskUnusable):
        session_behind(run.model).drain()
    run.close()
    monkeypatch.undo()
    again = after_a_crash(tmp_path)
    assert again.resume() == {"step": 1}
    again.close()


def test_resuming_is_told(tmp_path, caplog):
    Run(tmp_path).train(0, 1).close()
    run = after_a_crash(tmp_path)
    with caplog.at_level(logging.INFO, "zcompile.checkpoint.durable"):
        run.resume()
    assert "resumed at step 1" in caplog.text
    run.close()


def test_after_a_step_that_broke_off_nothing_is_committed(tmp_path):
    run = Run(tmp_path).train(0, 2)
    index = read_index(tmp_path)
    hook = run.optimizer.register_step_pre_hook(_interrupted)
    with pytest.raises(KeyboardInterrupt):
        run.train(2, 3)
    hook.remove()
    with pytest.raises(Unsupported, match="a step of AdamW broke off, so that some parameters"):
        run.train(2, 3)
    run.close()
    assert read_index(tmp_path) == index


def _interrupted(*args, **kwargs):
    raise KeyboardInterrupt


def test_what_a_commit_would_not_hold_is_refused_before_it_is_changed(tmp_path):
    run = Run(tmp_path)
    head = nn.Linear(WIDTH, 1)
    optimizer = torch.optim.AdamW([*run.model.parameters(), *head.parameters()])
    head(run.model(torch.ones(8, WIDTH))).sum().backward()
    before = head.weight.detach().clone()
    with pytest.raises(Unsupported, match=r"2 of [0-9]+ parameters that are not those"):
        optimizer.step()
    assert torch.equal(head.weight, before)
    run.close()


def test_two_modules_of_one_init_are_not_half_committed(tmp_path):
    with zcompile.init(device="cpu", disk=tmp_path, durable=True):
        first, second = nn.Linear(4, 4), nn.Linear(4, 4)
    optimizer = torch.optim.SGD([*first.parameters(), *second.parameters()], lr=0.1)
    second(first(torch.ones(2, 4))).sum().backward()
    with pytest.raises(Unsupported, match="make one module of all that is trained"):
        optimizer.step()
    zcompile.close(first)


def test_extra_is_kept_as_it_was_given(tmp_path):
    run, extra = Run(tmp_path).train(0, 1), {"seen": [1]}
    zcompile.save(tmp_path, run.model, run.optimizer, data=extra)
    extra["seen"].append(2)
    run.train(1, 2).close()
    found = Run(tmp_path)
    assert found.resume()["data"] == {"seen": [1]}
    found.close()
