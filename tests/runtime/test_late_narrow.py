"""Late updates of parameters whose narrow copies the forward reads: the forward updates the wide
one, writes the copy, and reads that."""

import gc

import pytest
import torch
from planned_runs import (
    LITTLE_HOST,
    PLANNED,
    WEIGHT_BYTES,
    adamw,
    gpt,
    held_bytes,
    ids,
    let_all_be_late,
    loss_of,
    offloaded,
    same,
    values,
)
from sampled import sampled
from torch import nn

import zcompile
from zcompile.frontend.offload import session_behind
from zcompile.ir.schedule import Run
from zcompile.ir.units import Bytes
from zcompile.runtime import executor
from zcompile.runtime.executor import _Call

BF16 = torch.bfloat16


@pytest.fixture(autouse=True)
def forced(monkeypatch):
    let_all_be_late(monkeypatch)


def step(model, forward, optimizer, number, clip=True):
    with torch.autocast("cpu", BF16):
        loss = loss_of(forward, ids(number))
    loss.backward()
    if clip:
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


class Pair:
    """A model that trains late with copies in bf16, and the same in plain PyTorch."""

    def __init__(self, tmp_path, **fields):
        self.plain = gpt()
        self.model, self.compiled = offloaded(
            disk=tmp_path,
            param_dtype=BF16,
            **{
                "device_memory": Bytes(WEIGHT_BYTES + held_bytes()),
                "host_memory": LITTLE_HOST,
                **fields,
            },
        )
        self.optimizers = adamw(self.plain), adamw(self.model)
        self.late = session_behind(self.model).late
        self.number = 0

    @property
    def both(self):
        return zip((self.plain, self.model), self.optimizers, strict=True)

    def step(self, steps=1):
        for _ in range(steps):
            losses = [
                step(m, forward, optimizer, self.number)
                for (m, optimizer), forward in zip(
                    self.both, (self.plain, self.compiled), strict=True
                )
            ]
            assert losses[0] == losses[1]
            self.number += 1
        return self

    def equal(self):
        return same(self.model, values(self.plain))

    @property
    def narrow_rows(self):
        return sum(
            any(column.blank for column in group.schedule.rows[row].columns)
            for group in self.late._waiting
            for row in group.rows
        )


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        let_all_be_late(patch)
        made = Pair(tmp_path_factory.mktemp("shared"), host_memory="256KiB").step(PLANNED)
        yield made
        zcompile.close(made.model)


@pytest.fixture
def pair(shared):
    """Some steps into a run in which updates are late. Tests share it, and go on from where the one
    before ended; they stand together, since what compiles another model makes this one's graph
    anew."""
    assert shared.equal(), "the test before this one left the two apart"
    shared.step(2)  # what was compared is updated
    assert shared.narrow_rows > 0
    return shared


@pytest.mark.slow  # as in e2e/test_narrow_traffic.py
def test_parameters_with_copies_are_updated_late_and_train_bit_equal(pair):
    waiting = pair.late.rows
    pair.step(3)
    assert pair.late.rows == waiting
    assert pair.equal()


def test_rows_that_write_copies_along_and_wait_are_those_of_the_step_before(pair, counted):
    """Parameters, states and copies of each step are the same entries, and all rows are late."""
    waiting, serials = pair.narrow_rows, {group.schedule.serial for group in pair.late._waiting}
    for step in range(1, 4):
        pair.step()
        assert counted == {"rows": 0, "again": step}
        assert pair.narrow_rows == waiting
        assert {group.schedule.serial for group in pair.late._waiting} == serials
    assert pair.equal()


@pytest.mark.slow
def test_the_copy_is_not_made_again_behind_a_late_update(pair, monkeypatch):
    """Which would read the parameter once more."""
    made = []
    session = session_behind(pair.model)
    plain = session.executor._make_copy
    monkeypatch.setattr(
        session.executor, "_make_copy", lambda entry, cast: (made.append(entry), plain(entry, cast))
    )
    pair.step(2)
    assert not made
    assert pair.equal()


def test_whoever_asks_before_finds_parameter_and_copy_updated(pair):
    assert all(
        torch.equal(a.detach(), b.on_host())
        for a, b in zip(pair.plain.parameters(), pair.model.parameters(), strict=True)
    )
    with torch.no_grad(), torch.autocast("cpu", BF16):
        assert torch.equal(loss_of(pair.plain, ids(77)), loss_of(pair.compiled, ids(77)))
    assert pair.step(2).equal()


@pytest.mark.slow  # tests/runtime/test_narrowing.py
def test_a_parameter_that_is_written_before_the_forward_is_cast_again(pair):
    for model, _ in pair.both:
        with torch.no_grad():
            for p in model.parameters():
                p.mul_(0.75)
    assert pair.step(2).equal()


@pytest.mark.parametrize("shares", sampled([(0.3, 0.9), (0.05, 0.6)], (0.3, 0.9)))
@pytest.mark.slow
def test_a_forward_that_fails_leaves_no_copy_that_is_half_new(pair, monkeypatch, shares):
    plain = _Call._run
    for share in shares:
        pair.step(2)  # what was compared is updated
        done = []

        def run(self, instruction, share=share, done=done):
            if self.schedule.updates_late:
                runs = sum(isinstance(x, Run) for x in self.schedule.instructions)
                if len(done) == int(share * runs):
                    raise RuntimeError("injected")
                done.append(instruction)
            plain(self, instruction)

        with monkeypatch.context() as patch:
            patch.setattr(executor, "ACTIONS", {**executor.ACTIONS, Run: run})
            with (
                pytest.raises(RuntimeError, match="injected"),
                torch.autocast("cpu", BF16),
            ):
                loss_of(pair.compiled, ids(pair.number))
        gc.collect()
        assert pair.step(2).equal(), share


@pytest.mark.slow  # tests/checkpoint/test_durable_late.py, of wide ones
def test_a_durable_run_commits_what_such_updates_need(tmp_path):
    made = Pair(tmp_path, durable=True, host_memory="256KiB").step(PLANNED + 2)
    assert made.narrow_rows > 0
    zcompile.close(made.model)
    model = gpt()
    zcompile.resume(tmp_path, model, adamw(model))
    assert same(model, values(made.plain))
