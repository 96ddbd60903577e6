"""Durable runs whose updates are late: a commit names the inputs of updates that are still to come,
and whoever resumes finds the step whole, at whatever instant the run was killed."""

import functools
import json
import shutil
from dataclasses import dataclass, field, replace

import pytest
import torch
from border import offloaded as behind_border
from committed import read_index
from durable_runs import plain, same
from planned_runs import (
    LITTLE_HOST,
    PLANNED,
    THROTTLE,
    WEIGHT_BYTES,
    adamw,
    gpt,
    held_bytes,
    ids,
    let_all_be_late,
    loss_of,
)
from power_loss import Recording, crashes
from sampled import sampled, sampled_rows
from torch import Tensor, nn

import zcompile
from zcompile.checkpoint import late_rows
from zcompile.errors import DurableDamaged
from zcompile.frontend.offload import session_behind
from zcompile.ir.schedule import Run as RunRegion
from zcompile.ir.units import Bytes
from zcompile.runtime import executor
from zcompile.runtime.durable import index as indexes
from zcompile.runtime.durable.commit import CommitLog
from zcompile.runtime.executor import _Call
from zcompile.runtime.io.system_calls import KERNEL

STEPS = PLANNED + 3


@pytest.fixture(autouse=True)
def forced(monkeypatch):
    let_all_be_late(monkeypatch)


def unfused(model):
    return torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)


def momentum(model):
    return torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9, fused=True)


def amsgrad(model):
    return torch.optim.Adam(model.parameters(), lr=1e-2, amsgrad=True, foreach=True)


RUNS = [
    (adamw, "disk"),
    (unfused, "disk"),
    (adamw, "host"),
    (momentum, "host"),
    (amsgrad, "host"),
]


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """All that training goes on from."""
    found = [plain(p) for p in model.state_dict().values()]
    for param in model.parameters():
        states = optimizer.state.get(param, {})
        found += [plain(states[key]) for key in sorted(states) if states[key] is not None]
    return [*found, *(torch.tensor(group["lr"]) for group in optimizer.param_groups)]


def train_step(model, forward, optimizer, number: int) -> None:
    loss_of(forward, ids(number)).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    optimizer.step()
    optimizer.zero_grad()


@functools.cache
def expected(make, steps: int) -> list[list[Tensor]]:
    """The states of plain PyTorch: before the first step, and after each."""
    model = gpt()
    optimizer = make(model)
    found = [[t.clone() for t in state_of(model, optimizer)]]
    for number in range(steps):
        train_step(model, model, optimizer, number)
        found.append([t.clone() for t in state_of(model, optimizer)])
    return found


@dataclass
class Run:
    """A durable run of which each step leaves updates for the next forward, once it is planned."""

    disk: object
    make: object = adamw
    system: object = KERNEL
    where: str = "disk"
    fields: dict = field(default_factory=dict)

    def __post_init__(self):
        torch._dynamo.reset()
        room = {"host_memory": LITTLE_HOST}
        if self.where == "host":  # behind a link, or it is computed where it lies
            room = {"host_memory": "64MiB", "throttle": THROTTLE}
        self.model = behind_border(
            gpt(),
            self.system,
            device="cpu",
            disk=self.disk,
            durable=True,
            **{"device_memory": Bytes(WEIGHT_BYTES + held_bytes()), **room, **self.fields},
        )
        self.compiled = torch.compile(self.model, backend="zinf")
        self.optimizer = self.make(self.model)
        self.late = session_behind(self.model).late

    def train(self, begin: int, end: int) -> "Run":
        for number in range(begin, end):
            train_step(self.model, self.compiled, self.optimizer, number)
        return self

    def close(self) -> None:
        zcompile.close(self.model)


def resumed_plain(disk, make=adamw) -> tuple[int, nn.Module, torch.optim.Optimizer]:
    """The step of the commit in a directory, and it in plain PyTorch."""
    model = gpt()
    optimizer = make(model)
    return int(zcompile.resume(disk, model, optimizer)["step"]), model, optimizer


def kinds_in(disk) -> set[str]:
    found, _ = read_index(disk)
    return {tensor.kind for tensor in found.tensors}


@pytest.mark.slow  # so do the next and power that is lost
@pytest.mark.parametrize(("make", "where"), sampled_rows(RUNS, RUNS[2]))
def test_a_commit_names_the_inputs_of_late_updates_and_resumes_whole(tmp_path, make, where):
    run = Run(tmp_path, make, where=where).train(0, STEPS)
    waiting = run.late.rows
    assert waiting > 0
    assert "gradient" in kinds_in(tmp_path)
    run.close()
    want = expected(make, STEPS + 2)
    zcompile.resume(tmp_path, alone := gpt())  # without its optimizer
    weights = [plain(p) for p in alone.state_dict().values()]
    assert same(weights, want[STEPS][: len(weights)])
    step, model, optimizer = resumed_plain(tmp_path, make)
    assert step == STEPS
    assert same(state_of(model, optimizer), want[STEPS])
    for more in range(2):
        train_step(model, model, optimizer, STEPS + more)
    assert same(state_of(model, optimizer), want[STEPS + 2])


def test_a_run_goes_on_from_a_commit_with_updates_to_come(tmp_path):
    Run(tmp_path).train(0, STEPS).close()
    want = expected(adamw, 2 * STEPS)
    run = Run(tmp_path)
    assert zcompile.resume(tmp_path, run.model, run.optimizer)["step"] == STEPS
    assert same(state_of(run.model, run.optimizer), want[STEPS])
    run.train(STEPS, 2 * STEPS)
    assert run.late.rows > 0
    assert same(state_of(run.model, run.optimizer), want[2 * STEPS])
    run.close()
    step, model, optimizer = resumed_plain(tmp_path)
    assert step == 2 * STEPS
    assert same(state_of(model, optimizer), want[2 * STEPS])


@pytest.mark.slow
def test_what_is_committed_by_hand_after_each_step_lets_updates_be_late(tmp_path):
    """A scheduler changes the learning rate behind the step, and is saved with it."""
    run, plain_model = Run(tmp_path), gpt()
    plain_optimizer = adamw(plain_model)
    schedulers = [
        torch.optim.lr_scheduler.StepLR(o, 1, 0.5) for o in (run.optimizer, plain_optimizer)
    ]
    for number in range(STEPS):
        run.train(number, number + 1)
        train_step(plain_model, plain_model, plain_optimizer, number)
        for scheduler in schedulers:
            scheduler.step()
        zcompile.save(tmp_path, run.model, run.optimizer, scheduler=schedulers[0].state_dict())
    assert run.late.rows > 0
    assert "gradient" in kinds_in(tmp_path)
    run.close()
    step, model, optimizer = resumed_plain(tmp_path)
    assert step == STEPS
    assert same(state_of(model, optimizer), state_of(plain_model, plain_optimizer))


@pytest.mark.slow
@pytest.mark.parametrize("torn", [True, False])
def test_a_commit_behind_a_forward_that_failed_is_complete(tmp_path, monkeypatch, torn):
    """Within an update that has a part of its chunks, which no commit can name: all updates are
    done before it. Between two updates: it names those to come."""
    run = Run(tmp_path).train(0, STEPS)
    waiting, plain_run = run.late.rows, _Call._run

    def fails(self, instruction):
        late = instruction.late
        if late is not None and (late.first > 0 if torn else late.update == 1):
            raise RuntimeError("injected")
        plain_run(self, instruction)

    with monkeypatch.context() as patch:
        patch.setattr(executor, "ACTIONS", {**executor.ACTIONS, RunRegion: fails})
        with pytest.raises(RuntimeError, match="injected"):
            loss_of(run.compiled, ids(STEPS))
    zcompile.save(tmp_path, run.model, run.optimizer)
    assert run.late.rows == (0 if torn else waiting - 1)
    assert ("gradient" in kinds_in(tmp_path)) != torn
    run.close()
    step, model, optimizer = resumed_plain(tmp_path)
    assert step == STEPS
    assert same(state_of(model, optimizer), expected(adamw, STEPS + 2)[STEPS])


@pytest.mark.slow
def test_who_reads_between_a_commit_and_the_next_forward_changes_nothing_of_it(tmp_path):
    run = Run(tmp_path).train(0, STEPS)
    want = expected(adamw, STEPS + 2)
    assert same(state_of(run.model, run.optimizer), want[STEPS])
    shutil.copytree(tmp_path, tmp_path.with_name("copy"))
    step, model, optimizer = resumed_plain(tmp_path.with_name("copy"))
    assert step == STEPS
    assert same(state_of(model, optimizer), want[STEPS])
    run.train(STEPS, STEPS + 1)
    assert same(state_of(run.model, run.optimizer), want[STEPS + 1])
    run.close()


@pytest.mark.parametrize("why", sampled(["room", "row", "plain"], "row"))
@pytest.mark.slow
def test_where_a_commit_cannot_name_updates_they_are_done_before_it(tmp_path, monkeypatch, why):
    if why == "room":
        monkeypatch.setattr(CommitLog, "has_room", lambda self, changing, more: False)
    elif why == "row":
        monkeypatch.setattr(late_rows, "packed", lambda compute: None)
    else:

        class Refusing(late_rows.Packer):
            def pack(self, value, where, depth=0):
                raise zcompile.errors.Unsupported("a value", "nothing")

        monkeypatch.setattr(late_rows, "Packer", Refusing)
    run = Run(tmp_path).train(0, STEPS)
    assert run.late.rows == 0
    assert "gradient" not in kinds_in(tmp_path)
    run.close()
    step, model, optimizer = resumed_plain(tmp_path)
    assert same(state_of(model, optimizer), expected(adamw, STEPS + 2)[step])


# Killed


@pytest.mark.slow
def test_power_lost_at_any_instant_of_steps_with_late_updates_loses_no_commit(tmp_path):
    """What a killed process leaves is one of these states: all that it wrote is there."""
    base = tmp_path / "base"
    base.mkdir()
    recording = Recording(base)
    run = Run(base / "disk", system=recording.border)
    said = {}
    for number in range(STEPS):
        run.train(number, number + 1)
        recording.say(number + 1)
        said[len(recording.events)] = number + 1
    assert run.late.rows > 0
    run.close()
    shutil.rmtree(base)
    base.mkdir()
    want = expected(adamw, STEPS + 2)
    seen, whole = set(), 0
    for crash in crashes(recording, weak=False, seed=0, most=3):
        safe = max((step for at, step in said.items() if at <= crash.at), default=0)
        if safe < PLANNED or "disk/zinf.index" not in (tree := crash.tree()):
            continue
        known = safe, *((n, f and (bytes(f.content), f.size)) for n, f in sorted(tree.items()))
        if hash(known) in seen:
            continue
        seen.add(hash(known))
        crash.put(base)
        step, model, optimizer = resumed_plain(base / "disk")
        assert step in (safe, safe + 1), str(crash)
        assert same(state_of(model, optimizer), want[step]), str(crash)
        whole += "gradient" in kinds_in(base / "disk")
        shutil.rmtree(base)
        base.mkdir()
    assert whole > 20


# What anybody may have written


def changed_index(disk, change) -> None:
    """Write an index anew, with its checksum."""
    path = disk / indexes.INDEX_NAME
    found, smalls = indexes.parse(path, path.read_bytes())
    meta = json.loads(json.dumps(dict(found.meta)))
    change(meta["late"])
    path.write_bytes(indexes.encode(replace(found, meta=meta), smalls))


def no_list(rows):
    rows[0]["columns"] = None


def no_tensor(rows):
    rows[0]["columns"][0]["tensor"] = "optimizer.nothing"


def outside(rows):
    rows[0]["columns"][0]["begin"] = 4096


def too_many(rows):
    rows[0]["numel"] = 1 << 40


def another_op(rows):
    rows[0]["compute"]["ops"][0]["op"] = ["aten::mm", "default"]


def no_operand(rows):
    rows[0]["compute"]["ops"][0]["args"][0] = [{"column": 77}]


def no_result(rows):
    rows[0]["compute"]["ops"][0]["args"][0] = [{"result": 0}]


def no_plain(rows):
    rows[0]["plains"] = [{"$tensor": "nowhere"}]


def twice(rows):
    rows.append(rows[0])


@pytest.fixture(scope="module")
def committed(tmp_path_factory):
    """A durable directory of a run that was killed before the last updates."""
    with pytest.MonkeyPatch.context() as patch:
        let_all_be_late(patch)
        disk = tmp_path_factory.mktemp("committed")
        Run(disk).train(0, STEPS).close()
    return disk


@pytest.mark.parametrize(
    "change",
    [
        no_list,
        no_tensor,
        outside,
        too_many,
        another_op,
        no_operand,
        no_result,
        no_plain,
        twice,
    ],
)
def test_updates_that_make_no_sense_are_refused_before_anything_changes(
    committed, tmp_path, change
):
    disk = tmp_path / "disk"
    shutil.copytree(committed, disk)
    changed_index(disk, change)
    model = gpt()
    before = [p.detach().clone() for p in model.parameters()]
    with pytest.raises(DurableDamaged, match="the updates that are to come"):
        zcompile.resume(disk, model, adamw(model))
    assert same([p.detach() for p in model.parameters()], before)


def test_an_index_with_updates_to_come_has_a_format_of_its_own(committed, tmp_path):
    """Who knows only the other would take its parameters for those of its step."""
    head = (committed / indexes.INDEX_NAME).read_bytes()[:64].split()
    assert head[1] == str(indexes.FORMAT_TO_COME).encode()
    run = Run(tmp_path)
    run.train(0, 1)
    head = (tmp_path / indexes.INDEX_NAME).read_bytes()[:64].split()
    assert head[1] == str(indexes.FORMAT).encode()
    run.close()
