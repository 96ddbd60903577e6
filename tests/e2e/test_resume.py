"""A training that is stopped, and goes on in another process, ends where it would have ended."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from e2e.models import CASES, next_token
from sampled import sampled
from torch import nn

import zcompile
from zcompile.ir.units import MiB

pytestmark = pytest.mark.filterwarnings("ignore:Dynamo detected a call to a .functools.lru_cache.")

ROOT = Path(__file__).parents[2]
BUDGETS = {"device": "cpu", "device_memory": "2MiB", "host_memory": "256KiB"}
"""The host budget is as small as the ring that transfers are staged in: all states rest on disk."""
STEPS, STOP = 5, 2


class Training:
    """GPT-2 with dropout, stock AdamW, a schedule and clipping; on disk, or plain eager."""

    def __init__(self, disk: Path | None, optimizer: Callable[..., Any], seed: int) -> None:
        torch.manual_seed(seed)
        self.model: nn.Module = CASES["gpt2"].build().train()
        self.called: Any = self.model
        if disk is not None:
            disk.mkdir(exist_ok=True)
            zcompile.offload(self.model, disk=disk, **BUDGETS)
            self.called = torch.compile(self.model, backend="zinf")
        self.optimizer = optimizer(self.model.parameters())
        self.schedule = torch.optim.lr_scheduler.OneCycleLR(
            self.optimizer, 1e-2, total_steps=STEPS + 1, cycle_momentum=False
        )
        self.data = torch.Generator().manual_seed(1)
        torch.manual_seed(2)  # dropout

    def run(self, steps: int) -> list[float]:
        losses = []
        for _ in range(steps):
            loss = self.called(**next_token(self.data)).loss
            loss.backward()
            nn.utils.clip_grad_norm_(self.model.parameters(), 0.5)
            self.optimizer.step()
            self.schedule.step()
            self.optimizer.zero_grad()
            losses.append(loss.item())
        return losses

    def save(self, path: Path) -> None:
        extra = {"schedule": self.schedule.state_dict(), "data": self.data.get_state()}
        zcompile.save(path, self.called, self.optimizer, **extra)

    def resume(self, path: Path) -> None:
        extra = zcompile.resume(path, self.called, self.optimizer)
        self.schedule.load_state_dict(extra["schedule"])
        self.data.set_state(extra["data"])

    def states(self) -> list[torch.Tensor]:
        values = [*self.model.state_dict().values()]
        for state in self.optimizer.state_dict()["state"].values():
            values += [value for value in state.values() if isinstance(value, torch.Tensor)]
        return [value.detach().cpu() for value in values]


OPTIMIZERS = {
    "AdamW": lambda params: torch.optim.AdamW(params, lr=1e-2, fused=True),
    "AMSGrad": lambda params: torch.optim.Adam(params, lr=1e-2, amsgrad=True),
    "SGD": lambda params: torch.optim.SGD(params, lr=1e-2, momentum=0.9, nesterov=True),
}


@pytest.mark.slow  # tests/checkpoint/test_training_state.py keeps it quicker
@pytest.mark.parametrize(
    "kind",
    ["AdamW", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("AMSGrad", "SGD"))],
)
def test_what_goes_on_from_a_checkpoint_is_bit_equal_to_what_never_stopped(kind, tmp_path):
    eager = Training(None, OPTIMIZERS[kind], seed=0)
    expected = eager.run(STEPS)
    first = Training(tmp_path / "first", OPTIMIZERS[kind], seed=0)
    assert first.run(STOP) == expected[:STOP]
    first.save(tmp_path / "c")
    assert first.run(STEPS - STOP) == expected[STOP:]  # saving disturbs nothing
    for disk in (tmp_path / "second", None):
        second = Training(disk, OPTIMIZERS[kind], seed=7)
        second.run(1)  # has states and random numbers of its own
        second.resume(tmp_path / "c")
        assert second.run(STEPS - STOP) == expected[STOP:]
        pairs = zip(second.states(), eager.states(), strict=True)
        assert all(torch.equal(ours, theirs) for ours, theirs in pairs)


SCRIPT = """
import sys
from pathlib import Path
from e2e.test_resume import OPTIMIZERS, STEPS, STOP, Training
training = Training(Path(sys.argv[1]) / "second", OPTIMIZERS["AdamW"], seed=7)
training.resume(Path(sys.argv[1]) / "c")
print(training.run(STEPS - STOP))
"""


@pytest.mark.slow
def test_another_process_goes_on(tmp_path):
    first = Training(tmp_path / "first", OPTIMIZERS["AdamW"], seed=0)
    first.run(STOP)
    first.save(tmp_path / "c")
    environment = {
        **os.environ,
        "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}:{ROOT / 'tests' / 'helpers'}",
    }
    told = subprocess.run(
        [sys.executable, "-c", SCRIPT, tmp_path],
        env=environment,
        check=True,
        capture_output=True,
        text=True,
        timeout=250,
    )
    assert told.stdout.strip() == str(first.run(STEPS - STOP))


def test_a_durable_directory_is_saved_to_and_resumed_from_as_a_checkpoint_is(tmp_path):
    def build(seed):
        torch.manual_seed(seed)
        model = zcompile.offload(nn.Linear(4, 4), disk=tmp_path, durable=True, **BUDGETS)
        return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    model, optimizer = build(0)
    for _ in range(2):
        model(torch.ones(1, 4)).sum().backward()
        optimizer.step()
    zcompile.save(tmp_path, model, optimizer, epoch=3)
    expected = model.weight.detach().cpu()
    del model, optimizer
    model, optimizer = build(1)
    assert zcompile.resume(tmp_path, model, optimizer) == {"epoch": 3, "step": 2}
    assert torch.equal(model.weight.detach().cpu(), expected)


@pytest.mark.parametrize("name", sampled(CASES, "gpt2", "t5"))
def test_hugging_face_loads_what_was_saved_and_the_other_way_round(name, tmp_path):
    torch.manual_seed(0)
    model = CASES[name].build()
    disk = tmp_path / "disk"
    disk.mkdir()
    zcompile.offload(model, disk=disk, **BUDGETS)
    zcompile.save(tmp_path / "c", model)
    model.config.save_pretrained(tmp_path / "c")
    kind = type(model)
    found, told = kind.from_pretrained(tmp_path / "c", output_loading_info=True)
    assert not told["missing_keys"]
    assert not told["unexpected_keys"]
    for key, value in found.state_dict().items():
        assert torch.equal(value, model.state_dict()[key].cpu())
    found.save_pretrained(tmp_path / "theirs", max_shard_size="20KB")
    assert (tmp_path / "theirs/model.safetensors.index.json").exists()
    with torch.device("meta"):
        empty = kind(model.config)
    zcompile.offload(empty, **{**BUDGETS, "host_memory": "64MiB"})
    assert zcompile.load(empty, tmp_path / "theirs") == ([], [])
    for key, value in found.named_parameters():
        assert torch.equal(value, empty.get_parameter(key).cpu())


MEASURED = """
import resource, sys, threading, time
import torch, zcompile
from torch import nn

def resident():
    return int(open("/proc/self/statm").read().split()[1]) * 4096

def most_during(act):
    before, peak, over = resident(), [0], threading.Event()
    def watch():
        while not over.wait(0.002):
            peak[0] = max(peak[0], resident())
    watcher = threading.Thread(target=watch)
    watcher.start()
    act()
    over.set()
    watcher.join()
    print(peak[0] - before)

class Big(nn.Module):
    def __init__(self):
        super().__init__()
        self.wide = nn.Parameter(torch.zeros(200 * 2**20 // 4 - 1))
        self.parts = nn.ParameterList(torch.zeros(10 * 2**20 // 4) for _ in range(20))

disk, path = sys.argv[1:]
with zcompile.init(device="cpu", device_memory="8MiB", host_memory="16MiB", disk=disk):
    model = Big()
small = nn.Linear(2, 2)
zcompile.save(path + "-small", small)  # what is imported and mapped once
zcompile.resume(path + "-small", small)
most_during(lambda: zcompile.save(path, model))
most_during(lambda: zcompile.resume(path, model))
most_during(lambda: zcompile.load(model, path))
"""


def test_neither_a_model_nor_a_tensor_is_ever_whole_in_memory(tmp_path):
    disk = tmp_path / "disk"
    disk.mkdir()
    told = subprocess.run(
        [sys.executable, "-c", MEASURED, disk, tmp_path / "c"],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
        timeout=250,
    )
    assert (tmp_path / "c/model.safetensors").stat().st_size > 400 * MiB
    grown = [int(line) for line in told.stdout.split()]
    assert len(grown) == 3
    assert max(grown) < 100 * MiB, grown


def test_going_back_in_the_same_process_forgets_what_came_after(tmp_path):
    """With narrow copies of the parameters, which must follow what is resumed."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))
    (tmp_path / "disk").mkdir()
    zcompile.offload(model, disk=tmp_path / "disk", param_dtype=torch.bfloat16, **BUDGETS)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    compiled = torch.compile(model, backend="zinf")

    def run(steps: int) -> list[float]:
        losses = []
        for _ in range(steps):
            with torch.autocast("cpu", torch.bfloat16):
                loss = compiled(torch.ones(2, 64)).float().square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses

    run(2)
    zcompile.save(tmp_path / "c", model, optimizer)
    expected = run(3)
    for _ in range(2):
        zcompile.resume(tmp_path / "c", model, optimizer)
        assert run(3) == expected
