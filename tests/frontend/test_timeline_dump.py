"""Steps of real runs as a dump holds them."""

import json
from itertools import pairwise

import pytest
import torch
from offloaded import SMALL
from small_models import mlp
from small_run import real_run

import zcompile
from zcompile.cli import main
from zcompile.frontend.offload import session_behind
from zcompile.frontend.replan import State
from zcompile.frontend.timeline import _unplanned, _Writer
from zcompile.ir import serialize as rf
from zcompile.ir.units import MiB


def test_a_real_run_writes_its_second_step_when_the_third_begins(tmp_path, capsys):
    model = real_run(tmp_path)
    assert main(["timeline", str(tmp_path), "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["step"] == 2
    assert list(shown["measured"]["phases"]) == ["forward", "backward", "step"]
    moments = shown["moments"]
    assert all(m["begin_s"] <= m["end_s"] for m in moments)
    assert all(m["predicted_begin_s"] <= m["predicted_end_s"] for m in moments)
    assert {m["call"] for m in moments} >= {0, 1, 2}
    assert 0 < shown["predicted"]["compute_s"] <= shown["predicted"]["step_s"]
    measured = shown["measured"]
    assert sum(measured["phases"].values()) == measured["step_s"]
    walked = moments[-1]["end_s"] - moments[0]["begin_s"]
    assert measured["step_s"] > walked, "what lies before the first call is part of a step"
    assert shown["plan"] is None, "the plan made of this step is that of the next"
    assert shown["unplanned"].startswith("No plan was in force in this step")
    assert {row["plan"] for row in shown["entries"]} == {None}
    zcompile.close(model)


THROTTLED = {link: 50 * MiB for link in ("h2d", "d2h", "disk_read", "disk_write")}


@pytest.fixture(scope="module")
def recorded(tmp_path_factory) -> rf.TimelineRecord:
    """The fourth step of a model most of which rests on disk, under the first plan."""
    torch._dynamo.reset()
    root = tmp_path_factory.mktemp("runs")
    model = zcompile.offload(
        mlp(256),
        device="cpu",
        device_memory="3MiB",
        host_memory="5MiB",
        disk=tmp_path_factory.mktemp("disk"),
        throttle=THROTTLED,
        machine="desktop-24gb",
        dump=root,
        # With updates on the host the window is larger: more is under way when a step ends.
        updates="device",
    )
    compiled = torch.compile(model, backend="zinf")
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)
    for _ in range(5):
        compiled(torch.ones(2, 256)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    record = rf.open_run(root).timeline()
    zcompile.close(model)
    return record


@pytest.mark.slow
def test_what_passed_each_link_is_what_was_counted(recorded):
    measured = recorded.measured
    assert recorded.step == 4
    for link, nbytes in measured.nbytes.items():
        rows = [row for row in recorded.passages if row.link == link]
        assert nbytes > 0, "the model is too large for host and device"
        assert all(a.end_s <= b.begin_s + 1e-9 for a, b in pairwise(rows))
        # What is in flight when a step ends has moved, and is held back until it would arrive.
        under_way = 4 * max(row.nbytes for row in rows)
        assert abs(sum(row.nbytes for row in rows) - nbytes) <= under_way, (link, nbytes)
    entries = {row.name for row in recorded.entries}
    assert {row.name for row in recorded.passages} <= entries


@pytest.mark.slow
def test_what_is_predicted_to_pass_each_link_is_the_same_as_its_sum(recorded):
    for link, nbytes in recorded.predicted.nbytes.items():
        rows = [row for row in recorded.predicted_passages if row.link == link]
        # Some are on their way when the step begins, and others when it ends.
        under_way = 4 * max(row.nbytes for row in rows)
        assert abs(sum(row.nbytes for row in rows) - nbytes) <= under_way, (link, nbytes)
    moments = {(m.call, m.index): m for m in recorded.moments}
    known = [row for row in recorded.predicted_passages if row.call is not None]
    assert known
    for row in known:
        moment = moments[row.call, row.index]
        assert moment.kind in ("fetch", "store", "reduce")
        assert row.name in (moment.entry, f"{moment.entry}.grad")


def test_a_fetch_says_what_uses_it_first(recorded):
    moments = {(m.call, m.index): m for m in recorded.moments}
    fetches = [m for m in recorded.moments if m.kind == "fetch"]
    assert fetches
    for fetch in fetches:
        used = moments[fetch.call, fetch.used_by]
        assert used.kind in ("run", "update")
        between = [m for m in recorded.moments if m.call == fetch.call]
        waits = [m for m in between if m.kind == "wait" and m.entry == fetch.entry]
        assert any(fetch.index < wait.index < used.index for wait in waits)
    assert all(m.used_by is None for m in recorded.moments if m.kind != "fetch")


def test_levels_of_memory_stay_within_their_budgets(recorded):
    budgets = {row.tier: row for row in recorded.tiers}
    assert budgets["device"].budget_bytes == 3 * MiB
    assert budgets["host"].budget_bytes == 5 * MiB
    for column, tier in ((0, "device"), (2, "host"), (3, "disk")):
        peak = max(m.levels[column] for m in recorded.moments)
        assert 0 < peak == budgets[tier].peak_bytes <= budgets[tier].budget_bytes
    assert all(m.levels[1] <= m.levels[0] for m in recorded.moments)
    for m in recorded.moments:
        both, outside = m.predicted_levels
        assert 0 <= outside <= both <= 3 * MiB


def test_entries_rest_where_the_plan_wants_them(recorded):
    kinds = {row.kind for row in recorded.entries}
    assert {"weight", "state", "gradient"} <= kinds
    homes = {row.home for row in recorded.entries}
    assert {"device", "disk"} <= homes
    assert [row.name for row in recorded.entries if row.plan is None] == []
    sizes = {row.name: row.nbytes for row in recorded.entries}
    assert sizes["0.weight"] == 4 * 256 * 1024


def test_what_binds_the_step_and_what_more_memory_would_save_are_told(recorded):
    plan = recorded.plan
    assert recorded.unplanned == ""
    assert 0 < plan.floor_s <= plan.least_s
    assert plan.binding.keys() <= {"forward", "backward", "step"}
    assert [row.tier for row in plan.shadows] == ["device", "host"]
    assert plan.shadows[0].planned_s > 0, "nothing would move any more"
    rates = {row.link: row.bytes_per_s for row in recorded.links}
    assert THROTTLED.keys() <= rates.keys()


def test_without_a_plan_the_reason_is_told(tmp_path):
    model = real_run(tmp_path, residency=False)
    record = rf.open_run(tmp_path).timeline()
    assert record.plan is None
    assert "residency=False" in record.unplanned
    assert not list(tmp_path.rglob("*.tmp"))
    assert record.format == rf.FORMAT == rf.open_run(tmp_path).record.format
    zcompile.close(model)


def test_what_a_step_moved_does_not_hang_on_resets(tmp_path):
    model = zcompile.offload(mlp(), **SMALL)
    session = session_behind(model)
    writer = _Writer(session, tmp_path)
    writer._since(session)
    session.meter.moved("d2h", 20)
    zcompile.stats(model, reset=True)
    session.meter.moved("d2h", 3)
    assert writer._since(session)[0]["d2h"] == 23


@pytest.mark.parametrize(
    ("state", "why"),
    [
        (State.OBSERVING, "the first steps are observed."),
        (State.WITHDRAWN, "none could be made, or kept in force, as the log of the run says."),
    ],
)
def test_a_step_without_a_plan_says_what_became_of_it(state, why):
    session = session_behind(zcompile.offload(mlp(), **SMALL))
    session.controller.state = state
    assert _unplanned(session, None) == f"No plan was in force in this step: {why}"
