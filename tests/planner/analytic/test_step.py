"""One rank's step: hand-computed times, and laws that hold on every machine."""

from dataclasses import replace

import pytest
from clusters import machine
from hypothesis import given
from hypothesis import strategies as st

from zcompile.errors import ConfigInvalid
from zcompile.planner.analytic.model import Transformer
from zcompile.planner.analytic.step import (
    Assumptions,
    Job,
    Rates,
    passes_tasks,
    simulate,
    step_time,
    update_tasks,
)

SHAPE = Transformer(layers=6, hidden=1000, heads=8, batch=1, seq=1000)
PLACES = (
    ("device", "device"),
    ("device", "host"),
    ("host", "host"),
    ("host", "disk"),
    ("disk", "disk"),
)


def job(weights="device", optimizer="device", **fields):
    return Job(SHAPE, weights=weights, optimizer=optimizer, **{"checkpoints": "device", **fields})


def test_all_on_one_device_takes_compute_and_the_update_only():
    rates = Rates(job(), machine())
    found = step_time(rates.job, machine())
    assert found.passes_s == pytest.approx(6 * 4 * rates.forward_s)
    assert found.update_s == pytest.approx(72e6 * 28 / 1e12)
    assert set(found.busy_s) == {"device"}


def test_forward_counts_matmuls_attention_and_memory_traffic():
    rates = Rates(job(), machine(), Assumptions(sustained=0.5))
    matmuls = 1000 * 2 * 12e6
    attention = 1000 * 4 * 1000 * 1000
    traffic = 2 * 1000 * (16 * 1000 + 2 * 8 * 1000)
    assert rates.forward_s == pytest.approx((matmuls + attention) / 0.5e12 + traffic / 1e12)


def test_each_rank_moves_its_share_three_times_and_its_gradient_once():
    found = step_time(job("host", "host"), machine(4, 4))
    share = 72e6 * 2 / 4 / 1e9
    assert found.busy_s["h2d"] == pytest.approx(3 * share)
    assert found.busy_s["d2h"] == pytest.approx(share)
    assert found.busy_s["ranks"] == pytest.approx(4 * 72e6 * 2 * 3 / 4 / 1e9)


def test_ranks_of_a_node_share_its_memory_in_an_update_on_the_cpu():
    alone = step_time(job("host", "host"), machine(1, 1), Assumptions(host_bytes_per_s=28e6))
    shared = step_time(job("host", "host"), machine(4, 4), Assumptions(host_bytes_per_s=28e6))
    assert alone.update_s == pytest.approx(72)
    assert shared.update_s == pytest.approx(72)  # a quarter of the work at a quarter of the rate


def test_an_update_from_disk_reads_and_writes_states_beside_each_other():
    full, half = (
        step_time(job("host", "disk"), machine(half_duplex=duplex)) for duplex in (False, True)
    )
    states_s = 72e6 * 12 / 1e9
    assert full.busy_s["disk_read"] == full.busy_s["disk_write"] == pytest.approx(states_s)
    assert half.busy_s["disk_read and disk_write"] == pytest.approx(2 * states_s)
    assert states_s < full.update_s < 1.5 * states_s
    assert half.update_s == pytest.approx(2 * states_s)  # the disk never waits for the CPU


def test_weights_on_disk_bring_gradients_there_too():
    found = step_time(job("disk", "disk"), machine())
    weight_s = 72e6 * 2 / 1e9
    assert found.busy_s["disk_read"] == pytest.approx((3 + 1 + 6) * weight_s)
    assert found.busy_s["disk_write"] == pytest.approx((1 + 1 + 6) * weight_s)


def test_transfers_start_as_many_operators_ahead_as_the_paper_says():
    tasks = passes_tasks(Rates(job("disk", "disk"), machine(2, 2)))
    after = {task.name: {tasks[i].name for i in task.after} for task in tasks[: 6 * 4]}
    assert "forward 0" in after["read 4"]
    assert {"forward 1", "read 4"} <= after["copy 4"]
    assert {"forward 2", "copy 4"} <= after["gather 4"]
    assert {"forward 3", "gather 4"} == after["forward 4"]


def test_ranks_that_split_matrices_share_the_links_between_nodes():
    clusters = machine(64, 16, rank_to_rank=1e15, node_to_node=1e9)
    alone, split = (Rates(Job(SHAPE, mp), clusters).collective_s for mp in (1, 4))
    # A quarter of the bytes over a quarter of the link, save what a rank holds itself.
    assert split / (15 / 16) == pytest.approx(alone / (63 / 64))


def test_ranks_that_split_matrices_reduce_activations_twice_a_pass():
    split = Rates(Job(SHAPE, 4), machine(4, 4, rank_to_rank=1e9))
    # Of 4 * 1000 tokens of 1000 elements, a ring moves 2 * 3/4 over each rank's link.
    assert split.tensor_parallel_s == pytest.approx(2 * 2 * 3 / 4 * 4 * 1000 * 1000 * 2 / 1e9)
    assert Rates(Job(SHAPE), machine(4, 4)).tensor_parallel_s == 0


def test_backward_waits_for_room_for_its_gradients():
    tasks = passes_tasks(Rates(job("host", "host"), machine()))
    after = {task.name: {tasks[i].name for i in task.after} for task in tasks}
    assert "gradient 4" in after["backward 1"]
    assert not {"gradient 2", "gradient 3"} & after["backward 1"]


def test_checkpoints_on_the_host_go_and_come_once():
    found = step_time(job(checkpoints="host"), machine())
    assert found.busy_s["h2d"] == found.busy_s["d2h"] == pytest.approx(6 * 2 * 1e6 / 1e9)


def test_weights_that_stay_on_the_device_come_back_from_an_update_elsewhere():
    found = step_time(job("device", "host"), machine())
    assert found.busy_s["h2d"] == found.busy_s["d2h"] == pytest.approx(72e6 * 2 / 1e9)


def test_without_overlap_everything_follows_one_by_one():
    rates = Rates(job("disk", "disk", checkpoints="host", overlap=False), machine(4, 2))
    timeline = simulate(passes_tasks(rates))
    assert timeline.seconds == pytest.approx(sum(timeline.busy_s.values()))


@given(
    places=st.sampled_from(PLACES),
    checkpoints=st.sampled_from(["device", "host"]),
    ranks=st.sampled_from([(1, 1), (4, 4), (8, 2)]),
    disk=st.sampled_from([1e8, 1e9, 1e11]),
    half_duplex=st.booleans(),
)
def test_no_step_beats_its_busiest_lane_and_overlap_never_costs(
    places, checkpoints, ranks, disk, half_duplex
):
    cluster = machine(*ranks, half_duplex=half_duplex, disk_read=disk, disk_write=disk)
    wanted = job(*places, checkpoints=checkpoints)
    rates = Rates(wanted, cluster)
    for tasks in (passes_tasks(rates), update_tasks(rates)):
        timeline = simulate(tasks)
        assert timeline.seconds >= max(timeline.busy_s.values()) * (1 - 1e-9)
    serial = step_time(replace(wanted, overlap=False), cluster)
    assert step_time(wanted, cluster).seconds <= serial.seconds * (1 + 1e-9)


@given(places=st.sampled_from(PLACES), link=st.sampled_from(["h2d", "d2h", "rank_to_rank"]))
def test_where_compute_hides_every_link_a_faster_one_gains_nothing(places, link):
    slow = machine(4, 4, h2d=1e12, d2h=1e12, disk_read=1e12, disk_write=1e12, rank_to_rank=1e12)
    fast = machine(
        4,
        4,
        **{
            "h2d": 1e12,
            "d2h": 1e12,
            "disk_read": 1e12,
            "disk_write": 1e12,
            "rank_to_rank": 1e12,
            link: 1e13,
        },
    )
    a, b = (step_time(job(*places), cluster).passes_s for cluster in (slow, fast))
    assert b <= a <= 1.01 * b


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"mp": 3}, "does not divide the 4 ranks"),
        ({"weights": "tape"}, "is no tier of tested"),
        ({"checkpoints": "disk"}, "is not simulated"),
        ({"weights": "disk", "optimizer": "host"}, "is faster than the weights' tier"),
    ],
)
def test_a_job_that_does_not_fit_the_machine_is_refused(fields, said):
    with pytest.raises(ConfigInvalid, match=said):
        step_time(Job(SHAPE, **fields), machine(4, 4))


def test_groups_that_hold_the_same_are_no_matter_of_shapes():
    with pytest.raises(ConfigInvalid, match="replicas=2 is not reckoned from shapes"):
        step_time(Job(SHAPE), replace(machine(4, 4), replicas=2))


def test_a_dtype_without_a_rate_is_refused():
    with pytest.raises(ConfigInvalid, match="has no rate on tested"):
        step_time(job(), machine(), Assumptions(dtype="bfloat16"))
