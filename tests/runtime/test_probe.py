"""This machine is measured once, kept, and measured again when what is kept is of no use."""

import errno
import logging
import os
import subprocess
import sys
import weakref
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from planned_runs import made_on
from sampled import sampled_rows
from torch import is_tensor
from torch.utils._python_dispatch import TorchDispatchMode

from zcompile.config import Config
from zcompile.errors import DiskUnusable
from zcompile.ir.torch_compat import storage_of, trees
from zcompile.ir.units import GiB, KiB, MiB
from zcompile.machine.files import write
from zcompile.machine.model import Compute, Link, Machine
from zcompile.runtime import probe
from zcompile.runtime.device.cpu import CpuDevice
from zcompile.runtime.meter import Meter
from zcompile.runtime.probe import cache_file, cached, compute_of, facts, machine_for, probed

CPU = torch.device("cpu")
MACHINE = Machine(
    "probed",
    {},
    {
        "h2d": Link("h2d", 10e9, 1e-5),
        "d2h": Link("d2h", 10e9, 1e-5),
        "disk_read": Link("disk_read", 2e9, 1e-4, "disk_write"),
        "disk_write": Link("disk_write", 2e9, 1e-4, "disk_read"),
    },
    Compute({"float32": 1e11}, 1e10, 1e-6),
)


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """A cache of its own for each test."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "zcompile"


@pytest.fixture
def disk(tmp_path):
    (path := tmp_path / "disk").mkdir()
    return path


@pytest.fixture
def device():
    opened = CpuDevice({}, Meter(), pytest.fail)
    yield opened
    opened.close()


@pytest.fixture
def measured(monkeypatch):
    """Nothing is measured: `MACHINE` is what one would find. How often it was asked for."""
    asked = []
    monkeypatch.setattr(probe, "probe", lambda *given: asked.append(given) or MACHINE)
    return asked


@pytest.fixture(autouse=True)
def load(monkeypatch):
    """Work for so many cores; a quiet machine."""
    level = [0.0]
    monkeypatch.setattr(probe.os, "getloadavg", lambda: (level[0], 0.0, 0.0))
    return level


@pytest.fixture
def brief(monkeypatch):
    monkeypatch.setattr(probe, "SPAN_S", 0.01)
    monkeypatch.setattr(probe, "MOST_ROUNDS", 1)


def test_what_is_measured_is_this_machine(brief, disk, own_threads):
    before = own_threads()
    machine = probe.probe(CPU, [disk])
    assert set(machine.links) == {"h2d", "d2h", "disk_read", "disk_write"}
    assert all(link.bytes_per_s > 1e6 for link in machine.links.values())
    assert all(link.latency_s < 1 for link in machine.links.values())
    assert set(machine.compute.flops_per_s) == {"float32", "bfloat16"}
    assert machine.compute.launch_s < 1e-2
    assert list(disk.iterdir()) == []
    assert own_threads() == before


@pytest.mark.gpu
def test_a_gpu_is_measured_on_the_paths_of_its_copies():
    machine = probe.probe(torch.device("cuda", 0), [])
    assert set(machine.links) == {"h2d", "d2h"}
    assert all(1e9 < link.bytes_per_s < 1e12 for link in machine.links.values())
    rates = machine.compute.flops_per_s
    assert set(rates) == {"float32", "bfloat16", "float16"}
    assert rates["bfloat16"] > rates["float32"]
    assert "cuda: " in facts(torch.device("cuda", 0), [])["device"]


def test_two_directories_are_measured_together(brief, disk, tmp_path):
    (other := tmp_path / "other").mkdir()
    assert set(probe.disk_links([disk, other])) == {"disk_read", "disk_write"}
    assert list(other.iterdir()) == []


def test_a_directory_in_use_is_measured_all_the_same(brief, disk, open_store):
    store = open_store(disk=disk)
    assert probe.disk_links([disk])["disk_read"].bytes_per_s > 0
    store.close()


def test_random_numbers_and_precision_stay_as_they_were():
    before = torch.random.get_rng_state()
    compute_of(CPU)
    probe.pacing_seconds()
    assert torch.equal(torch.random.get_rng_state(), before)


@pytest.mark.parametrize(
    ("free_bytes", "file_bytes"), [(GiB, 128 * MiB), (100 * MiB, 48 * MiB), (8 * MiB, 4 * MiB)]
)
def test_a_measurement_takes_at_most_half_of_the_room(
    brief, disk, monkeypatch, faults, free_bytes, file_bytes
):
    monkeypatch.setattr(probe, "free_disk_bytes", lambda paths: free_bytes)
    probe.disk_links([disk])
    assert max(request.offset + request.nbytes for request in faults.seen) == file_bytes


def test_a_disk_without_room_is_told(disk, monkeypatch):
    monkeypatch.setattr(probe, "free_disk_bytes", lambda paths: 7 * MiB)
    with pytest.raises(DiskUnusable, match="too full to be measured, which takes 8"):
        probe.disk_links([disk])


@pytest.mark.parametrize("nth", [3, 30])
def test_a_disk_that_fails_is_told_and_nobody_waits_for_ever(brief, disk, faults, nth, own_threads):
    before = own_threads()
    faults.fail("write", errno.ENOSPC, nth)
    with pytest.raises(DiskUnusable, match=r"cannot be measured: .* No space left"):
        probe.disk_links([disk])
    assert list(disk.iterdir()) == []
    assert own_threads() == before


def test_it_is_measured_once_and_then_read(measured, disk):
    assert [probed(CPU, [disk]) for _ in range(3)] == [MACHINE] * 3
    assert len(measured) == 1
    probed(CPU, [disk], again=True)
    assert len(measured) == 2


def test_what_is_measured_on_a_busy_machine_holds_until_it_is_not(measured, load):
    load[0] = 1000.0
    assert [probed(CPU, []) for _ in range(2)] == [MACHINE] * 2
    assert len(measured) == 1
    load[0] = 0.0
    probed(CPU, [])
    assert len(measured) == 2
    load[0] = 1000.0
    probed(CPU, [])
    assert len(measured) == 2  # what was measured in quiet holds


def test_another_disk_device_or_torch_is_measured_for_itself(measured, disk, monkeypatch):
    probed(CPU, [disk])
    probed(CPU, [])
    monkeypatch.setattr(torch, "__version__", "2.12.0")
    probed(CPU, [])
    assert len(measured) == 3


def test_other_directories_of_a_filesystem_are_the_same_disk(measured, disk, tmp_path):
    (other := tmp_path / "other").mkdir()
    assert facts(CPU, [disk]) == facts(CPU, [other])


@pytest.mark.parametrize(
    "damage",
    [b"", b"\xff\xfe", b"name = 3", b"name = 'probed'\n[compute]", write(MACHINE).encode()[:200]],
)
def test_what_is_damaged_is_measured_again(measured, damage):
    probed(CPU, [])
    cache_file(facts(CPU, [])).write_bytes(damage)
    assert probed(CPU, []) == MACHINE
    assert len(measured) == 2
    assert probed(CPU, []) == MACHINE
    assert len(measured) == 2


def test_a_cache_that_cannot_be_written_costs_a_measurement_only(
    measured, tmp_path, monkeypatch, caplog
):
    (file := tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(file))
    caplog.set_level(logging.INFO, "zcompile.runtime.probe")
    assert [probed(CPU, []) for _ in range(2)] == [MACHINE] * 2
    assert len(measured) == 2
    assert "what was measured is not kept" in caplog.text


def test_the_cache_is_where_people_look_for_it(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    for given in ("", "relative/path"):
        monkeypatch.setenv("XDG_CACHE_HOME", given)
        assert cache_file({}).parent == tmp_path / ".cache" / "zcompile"
    monkeypatch.setattr(Path, "home", lambda: (_ for _ in ()).throw(RuntimeError("no home")))
    assert cache_file({}) is None
    assert cached({}, lambda: MACHINE) == MACHINE


def test_a_write_that_fails_leaves_nothing_behind(cache, monkeypatch):
    def refuse(*paths: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(probe.os, "replace", refuse)
    assert cached({"a": "b"}, lambda: MACHINE) == MACHINE
    assert list(cache.iterdir()) == []


@pytest.mark.slow
def test_several_processes_at_once_leave_one_whole_file(cache):
    code = """
from runtime.test_probe import MACHINE
from zcompile.runtime.probe import cached
for n in range(50):
    assert cached({}, lambda: MACHINE, again=n % 2 == 0) == MACHINE
"""
    root = Path(__file__).parent.parent.parent
    env = {**os.environ, "PYTHONPATH": f"{root}:{root / 'tests'}:{root / 'tests' / 'helpers'}"}
    running = [subprocess.Popen([sys.executable, "-c", code], env=env) for _ in range(2)]
    assert [child.wait(120) for child in running] == [0, 0]
    (file,) = cache.iterdir()
    assert file.name.startswith("machine-")


def test_budgets_are_the_capacities(measured, device, disk):
    machine = machine_for(Config(device="cpu", device_memory=GiB, disk=disk), device)
    assert machine.tiers["device"] == GiB
    assert machine.tiers["host"] > GiB  # not given: what there is
    assert machine.tiers["disk"] > 0
    assert dict(machine.links) == dict(MACHINE.links)
    assert "disk" not in machine_for(Config(device="cpu"), device).tiers
    told = machine_for(Config(device="cpu"), device, {"device": 1, "host": 2})
    assert told.tiers == {"device": 1, "host": 2}


class Allocated(TorchDispatchMode):
    """The most bytes that were alive at once, of storages that ops made inside."""

    def __init__(self):
        super().__init__()
        self.alive, self.peak = [], 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        given = {id(storage_of(t)) for t in trees.tree_leaves((args, kwargs)) if is_tensor(t)}
        for storage in map(storage_of, filter(is_tensor, trees.tree_leaves(made))):
            if id(storage) not in given:
                self.alive = [ref for ref in self.alive if ref() is not None]
                self.alive.append(weakref.ref(storage))
                self.peak = max(self.peak, sum(ref().nbytes() for ref in self.alive))
        return made


@pytest.mark.parametrize(
    ("most_bytes", "side"),
    sampled_rows([(None, 1024), (12 * MiB, 1024), (11 * MiB, 512), (0, 256)], (11 * MiB, 512)),
)
def test_measuring_takes_no_more_of_the_device_than_it_may(brief, monkeypatch, most_bytes, side):
    monkeypatch.setattr(probe, "ELEMENTWISE_BYTES", 64 * KiB)
    monkeypatch.setattr(probe, "MOST_ONCE_S", float("inf"))  # memory alone decides
    with Allocated() as seen:
        compute_of(CPU, most_bytes)
    assert 3 * 4 * side**2 <= seen.peak < 3 * 4 * side**2 + 64 * KiB


def test_a_card_is_measured_within_its_budget(measured, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a card")
    card = SimpleNamespace(torch_device=torch.device("cuda", 0), free_bytes=lambda: 80 * GiB)
    for budget in (384 * MiB, 767 * MiB, 768 * MiB, 80 * GiB):
        machine_for(Config(device="cpu", device_memory=budget), card)
    # With the same matrices it is the same machine.
    assert [most for _, _, most in measured] == [384 * MiB, 768 * MiB]


def test_a_throttle_is_a_slower_link(measured, device, disk):
    config = Config(device="cpu", disk=disk, throttle={"h2d": "1GB/s", "disk_read": "99GB/s"})
    links = machine_for(config, device).links
    assert links["h2d"].bytes_per_s == 1e9
    assert 1e-5 < links["h2d"].latency_s < 0.1
    assert links["disk_read"] == MACHINE.links["disk_read"]
    assert machine_for(config, device).links == links  # what pacing costs is kept as well


def test_the_machine_of_a_config_is_taken_unmeasured(measured, device):
    config = Config(
        device="cpu", machine="desktop-24gb", host_memory=GiB, throttle={"h2d": "1GB/s"}
    )
    machine = machine_for(config, device)
    assert measured == []
    assert machine.name == "desktop-24gb"
    assert machine.tiers == {"device": 24 * 10**9, "host": GiB, "disk": 18 * 10**11}
    assert machine.links["h2d"].bytes_per_s == 1e9


def test_a_throttle_slows_links_between_ranks_that_a_machine_has(measured, device):
    """So `zcompile.plan` plans for it as for any other."""
    config = Config(device="cpu", machine="dgx2-v100-4nodes", throttle={"node_to_node": "1GB/s"})
    between, within = (
        machine_for(config, device).links[name] for name in ("node_to_node", "rank_to_rank")
    )
    assert between.bytes_per_s == 1e9
    assert within == config.machine.links["rank_to_rank"]


def test_a_machine_can_be_given_as_it_is(measured, device):
    given = replace(MACHINE, name="mine", tiers={"device": 3})
    assert machine_for(Config(device="cpu", machine=given), device) == given


def test_the_rate_of_updates_on_the_host_is_measured(monkeypatch):
    monkeypatch.setattr(probe, "HOST_UPDATE_BYTES", 1 << 20)
    monkeypatch.setattr(probe, "SPAN_S", 1e-3)
    assert 1e6 < probe.host_update_rate() < 1e13


def test_it_is_measured_in_the_hosts_memory_whatever_tensors_are_by_default(monkeypatch):
    """On a meta device nothing would be computed, in double precision twice the bytes."""
    monkeypatch.setattr(probe, "HOST_UPDATE_BYTES", 1 << 20)
    monkeypatch.setattr(probe, "SPAN_S", 1e-3)
    made, stepped = torch.optim.AdamW, []

    def watched(params, **how):
        optimizer = made(params, **how)
        stepped.append((params[0], optimizer))
        return optimizer

    monkeypatch.setattr(torch.optim, "AdamW", watched)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with made_on("meta"):
            probe.host_update_rate()
    finally:
        torch.set_default_dtype(before)
    ((param, optimizer),) = stepped
    operands = [param, param.grad, *optimizer.state[param].values()]
    assert {(t.device.type, t.dtype) for t in operands} == {("cpu", torch.float32)}
    assert param.nbytes == 1 << 20
