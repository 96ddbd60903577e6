"""Resuming a durable training without all of it: the optimizer left out, `extra` of earlier."""

import gc
import logging
from functools import partial

import pytest
import torch
from committed import read_index
from durable_runs import Net, Run, after_a_crash, plain, same

import zcompile
from zcompile.errors import CheckpointInvalid, Unsupported

SGD = partial(torch.optim.SGD, momentum=0.0)


def test_a_step_that_would_lose_the_states_of_an_optimizer_is_refused_before_it_writes(tmp_path):
    Run(tmp_path).train(0, 2).close()
    index = read_index(tmp_path)
    run = after_a_crash(tmp_path)
    zcompile.resume(tmp_path, run.model)
    before = [plain(param) for param in run.model.parameters()]
    with pytest.raises(Unsupported, match=r"holds states of an optimizer \(AdamW\).*build the mod"):
        run.train(2, 3)
    assert same([plain(param) for param in run.model.parameters()], before)
    assert not run.optimizer.state
    for optimizer in (None, run.optimizer):
        with pytest.raises(Unsupported, match="holds states of an optimizer"):
            zcompile.save(tmp_path, run.model, optimizer)
    run.close()
    assert read_index(tmp_path) == index
    again = after_a_crash(tmp_path)
    assert again.resume() == {"step": 2}
    again.train(2, 3).close()


def test_an_optimizer_without_states_need_not_be_resumed(tmp_path):
    Run(tmp_path, SGD).train(0, 1).close()
    run = after_a_crash(tmp_path, SGD)
    zcompile.resume(tmp_path, run.model)
    run.train(1, 2).close()
    assert read_index(tmp_path)[0].step == 2


def test_what_is_committed_without_an_optimizer_is_resumed_without_one(tmp_path):
    run = Run(tmp_path)
    zcompile.save(tmp_path, run.model)
    run.close()
    run = after_a_crash(tmp_path)
    zcompile.resume(tmp_path, run.model)
    run.train(0, 1).close()
    assert read_index(tmp_path)[0].step == 1


def test_extra_that_is_older_than_the_commit_is_told_once_and_returned(tmp_path, caplog):
    run = Run(tmp_path).train(0, 1)
    zcompile.save(tmp_path, run.model, run.optimizer, epoch=7)
    run.train(1, 2).close()
    run = after_a_crash(tmp_path)
    assert run.resume() == {"epoch": 7, "step": 2}
    told = [record.getMessage() for record in caplog.records if "extra" in record.getMessage()]
    assert len(told) == 1
    assert "extra (epoch) is of step 1, the commit is step 2" in told[0]
    run.train(2, 3).close()
    del run
    gc.collect()
    model = Net()
    assert zcompile.resume(tmp_path, model) == {"epoch": 7, "step": 3}
    assert "extra (epoch) is of step 1, the commit is step 3" in caplog.text


def test_extra_of_the_last_step_is_not_told(tmp_path, caplog):
    run = Run(tmp_path).train(0, 2)
    zcompile.save(tmp_path, run.model, run.optimizer, epoch=7)
    run.close()
    run = after_a_crash(tmp_path)
    with caplog.at_level(logging.WARNING, "zcompile"):
        assert run.resume() == {"epoch": 7, "step": 2}
    run.train(2, 3).close()
    assert "extra (" not in caplog.text


def test_a_checkpoint_in_the_directory_of_a_run_without_a_commit_is_not_passed_over(tmp_path):
    zcompile.save(tmp_path, Net())
    run = Run(tmp_path)
    with pytest.raises(Unsupported, match=r"but a checkpoint .*; give another directory as disk"):
        run.resume()
    run.close()


def test_weights_of_a_durable_directory_are_got_by_resume(tmp_path):
    run = Run(tmp_path).train(0, 1)
    expected = list(map(plain, run.model.state_dict().values()))
    run.close()
    model = Net()
    with pytest.raises(CheckpointInvalid, match=r"durable run.*zcompile\.resume\('.*', model\)"):
        zcompile.load(model, tmp_path)
    zcompile.resume(tmp_path, model)
    assert same(list(model.state_dict().values()), expected)
