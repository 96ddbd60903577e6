"""`zinf doctor` says what the machine is that a run would plan for, and what a file describes."""

import json

import pytest
import torch

import zcompile
from zcompile.cli.doctor import rows
from zcompile.config import Config
from zcompile.errors import DiskUnusable
from zcompile.frontend.dry_run import plan
from zcompile.frontend.offload import session_behind
from zcompile.machine.files import find, names
from zcompile.runtime import probe


@pytest.fixture(autouse=True)
def measured(monkeypatch, tmp_path):
    """What would be measured is the desktop; how often it was asked for."""
    asked = []
    monkeypatch.setattr(probe, "probe", lambda *given: asked.append(given) or find("desktop-24gb"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr("zcompile.cli.doctor._backends", lambda: {"zinf"})
    return asked


def test_doctor_says_what_a_run_would_plan_for(zinf, tmp_path, measured):
    code, out, _ = zinf("doctor", "--disk", tmp_path)
    lines = out.splitlines()
    assert code == 0
    assert "link        h2d             25.0 GB/s  after 10 us" in lines
    assert any(
        line.endswith("7.00 GB/s  after 100 us, takes turns with disk_write") for line in lines
    )
    assert "compute     bfloat16      130 TFLOP/s" in lines
    assert [line.split()[:2] for line in lines if line.startswith("tier ")] == [
        ["tier", "device"],
        ["tier", "host"],
        ["tier", "disk"],
    ]
    assert any(f"kept in {tmp_path}/cache/zcompile/machine-" in line for line in lines)


def test_doctor_measures_once_unless_it_is_told_to(zinf, measured):
    zinf("doctor")
    zinf("doctor", "--json")
    assert len(measured) == 1
    zinf("doctor", "--measure")
    assert len(measured) == 2


@pytest.mark.parametrize("load", [0.0, 1000.0])
def test_a_busy_machine_is_a_note(zinf, monkeypatch, load):
    monkeypatch.setattr(probe.os, "getloadavg", lambda: (load, 0.0, 0.0))
    assert ("this machine is at work on other things" in zinf("doctor")[1]) is (load > 0)


def test_doctor_answers_a_program_with_the_fields_of_a_machine(zinf, tmp_path, measured):
    told = json.loads(zinf("doctor", "--disk", tmp_path, "--json")[1])
    assert told["machine"]["links"]["disk_write"] == {
        "name": "disk_write",
        "bytes_per_s": 5e9,
        "latency_s": 1e-4,
        "shares": "disk_read",
    }
    assert told["machine"]["compute"]["flops_per_s"]["bfloat16"] == 130e12
    assert told["machine"]["tiers"]["disk"] > 0
    assert told["kept"].startswith(str(tmp_path))


def test_a_disk_that_cannot_be_measured_is_a_note(zinf, tmp_path, monkeypatch):
    def refuse(*given):
        raise DiskUnusable(tmp_path, "is too full to be measured", "give another")

    monkeypatch.setattr(probe, "probe", refuse)
    code, out, _ = zinf("doctor", "--disk", tmp_path)
    assert code == 0
    assert "note        disk=" in out
    assert "is too full to be measured; give another" in out
    assert json.loads(zinf("doctor", "--disk", tmp_path, "--json")[1])["machine"] is None


@pytest.mark.parametrize("name", names())
def test_every_machine_that_comes_along_can_be_printed(zinf, name):
    code, out, _ = zinf("doctor", "--machine", name)
    assert code == 0
    assert out.splitlines() == list(rows(find(name)))


def test_without_a_name_the_names_are_told(zinf):
    assert zinf("doctor", "--machine")[1].split() == list(names())
    assert json.loads(zinf("doctor", "--json", "--machine")[1]) == list(names())


def test_a_cluster_says_how_many_ranks_share_it(zinf, measured):
    _, out, _ = zinf("doctor", "--machine", "dgx2-v100-4nodes")
    assert "ranks       64, 16 on each of 4 nodes; figures are those of one rank" in out
    assert json.loads(zinf("doctor", "--machine", "h200-node", "--json")[1])["ranks"] == 8
    assert measured == []


def test_a_machine_that_is_not_there_is_one_sentence(zinf):
    code, out, err = zinf("doctor", "--machine", "h300-node")
    assert (code, out) == (2, "")
    assert err.startswith("zinf: machine='h300-node' names no machine; did you mean 'h")


def test_doctor_shows_the_tiers_that_a_run_and_a_plan_take_by_default(zinf, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    shown = json.loads(zinf("doctor", "--json")[1])["machine"]["tiers"]
    assert plan.terms_of(Config(device="cpu")).machine.tiers == shown
    model = zcompile.offload(torch.nn.Linear(2, 2), device="cpu")
    session = session_behind(model)
    assert (session.device_budget, session.host_budget) == (shown["device"], shown["host"])
    zcompile.close(model)


def test_doctor_tells_what_a_person_should_know_of_a_machine(zinf):
    out = zinf("doctor", "--machine", "mac-m4-32gb")[1]
    assert "note        one memory, planned as two parts; for planning only: zcompile" in out
    assert "note" not in zinf("doctor", "--machine", "l40s-48gb")[1]
