"""`zcompile.stats`: its keys, what they count, and the bytes of a step worked out by hand."""

import json

import pytest
import torch
from pairs import batches, mlp, on_disk, train
from torch import nn

import zcompile
from zcompile.errors import Unsupported
from zcompile.frontend.offload import session_behind

COUNTS = ("steps", "graphs", "regions", "distinct_regions", "gathers", "updates_on_host")
GROUPS = {
    "bytes": ({"disk_read", "disk_write", "h2d", "d2h"}, int),
    "seconds": ({"compute", "stall", "optimizer"}, float),
    "peak": ({"device", "host", "disk", "activations", "together"}, int),
    "planned_peak": ({"device", "host", "disk", "activations", "together"}, int),
}


@pytest.fixture
def trained(tmp_path):
    torch._dynamo.reset()
    model = on_disk(mlp(), tmp_path)
    call = torch.compile(model, backend="zinf")
    train(call, torch.optim.AdamW(model.parameters(), fused=True), 2)
    return model


def test_it_is_a_plain_dict_of_plain_numbers(trained):
    stats = zcompile.stats(trained)
    assert isinstance(stats, dict)
    assert json.loads(json.dumps(stats)) == stats
    assert set(stats) == {*GROUPS, *COUNTS, "step_s", "predicted", "inexact", "fusions"}
    assert stats["fusions"] is None, "regions are eager"
    assert stats["step_s"] is None, "the first whole step has not ended"
    assert stats["predicted"] is None, "no step was planned yet"
    for group, (keys, kind) in GROUPS.items():
        assert type(stats[group]) is dict
        assert set(stats[group]) == keys
        assert all(type(value) is kind for value in stats[group].values()), group
    assert all(type(stats[key]) is int for key in COUNTS)


def test_it_counts_what_happened(trained):
    stats = zcompile.stats(trained)
    assert (stats["steps"], stats["graphs"]) == (2, 1)
    assert 0 < stats["distinct_regions"] <= stats["regions"]
    assert stats["gathers"] == 2 * (4 + 1)  # forward reads all four, backward the last weight
    assert all(stats["bytes"].values())
    assert stats["seconds"]["compute"] > 0
    assert stats["seconds"]["optimizer"] > 0


def test_a_reset_zeroes_totals_and_keeps_structure(trained):
    before = zcompile.stats(trained, reset=True)
    after = zcompile.stats(trained)
    assert before["steps"] == 2
    assert after["steps"] == after["gathers"] == 0
    assert not any(after["bytes"].values())
    assert not any(after["seconds"].values())
    for key in ("graphs", "regions", "distinct_regions", "planned_peak"):
        assert after[key] == before[key]
    assert after["peak"]["device"] <= before["peak"]["device"]


def test_peaks_stay_within_the_budgets(trained):
    peak = zcompile.stats(trained)["peak"]
    assert 0 < peak["device"] <= 1024 * 1024
    assert 0 < peak["host"] <= 256 * 1024
    assert peak["disk"] > 0


def test_the_bytes_of_a_step_are_those_worked_out_by_hand(tmp_path):
    """SGD: forward brings each parameter, backward the second weight, whose gradients leave; the
    step brings parameters and gradients, and parameters leave. Foresight brings what the next
    forward begins with, at most each parameter once."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))
    model = on_disk(model, tmp_path, residency=False)
    call = torch.compile(model, backend="zinf")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=True)
    data = list(batches(1, width=64))
    weight, params = 64 * 64 * 4, 2 * (64 * 64 + 64) * 4
    train(call, optimizer, data=data * 2)
    zcompile.stats(model, reset=True)
    train(call, optimizer, data=data * 4)
    found = zcompile.stats(model)
    assert found["peak"]["device"] == found["planned_peak"]["device"], "every gather was planned"
    moved = {link: n / 4 for link, n in found["bytes"].items()}
    assert moved["d2h"] == 2 * params
    least = params + weight + 2 * params
    assert least <= moved["h2d"] <= least + params
    assert moved["d2h"] <= moved["disk_write"] <= 2 * moved["d2h"]
    assert moved["disk_read"] >= least


def test_a_model_that_was_not_offloaded_has_none():
    with pytest.raises(Unsupported, match=r"no tiered parameters; call zcompile.offload\(model\)"):
        zcompile.stats(mlp())


def test_a_call_that_waits_until_gradients_have_left_stalls(trained, monkeypatch):
    session = session_behind(trained)
    told = []

    def join(most_bytes: int = 0) -> None:
        session.in_flight.waited_s += 7.0

    monkeypatch.setattr(session.in_flight, "wait_down_to", join)
    monkeypatch.setattr(session.executor.clocks, "waited_between", told.append)
    zcompile.stats(trained, reset=True)
    with torch.no_grad():
        torch.compile(trained, backend="zinf")(torch.randn(2, 16))
    assert told == [7.0]
    session.end_step()
    assert told == [7.0, 7.0]
    assert 14.0 <= zcompile.stats(trained)["seconds"]["stall"] < 21.0
