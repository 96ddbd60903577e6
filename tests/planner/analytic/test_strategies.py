"""What a rank holds by strategy, and which placement is chosen."""

from dataclasses import replace

import pytest
from clusters import machine

from zcompile.machine.model import with_tier
from zcompile.planner.analytic.model import (
    DATA_PARALLEL,
    INFINITY_CPU,
    INFINITY_NVME,
    RESERVED_BYTES,
    STRATEGIES,
    ZERO_2,
    ZERO_3,
    ZERO_OFFLOAD,
    ClassTiers,
    Strategy,
    Transformer,
    flat_gather,
    hierarchical_gather,
    largest,
    use_of,
)
from zcompile.planner.analytic.step import (
    PLACES,
    Assumptions,
    Job,
    fastest,
    group_of,
    step_time,
    use_of_job,
)

SHAPE = Transformer(layers=10, hidden=4096, heads=32)
P = SHAPE.parameters
WORKING = RESERVED_BYTES + SHAPE.model_working_bytes + SHAPE.activation_working_bytes


@pytest.mark.parametrize(
    ("strategy", "device", "host"),
    [
        (DATA_PARALLEL, 20 * P + SHAPE.checkpoint_bytes, 0),
        (ZERO_2, 2 * P + 18 * P // 4 + SHAPE.checkpoint_bytes, 0),
        (ZERO_OFFLOAD, 2 * P + SHAPE.checkpoint_bytes, 18 * P // 4),
        (ZERO_3, 20 * P // 4 + SHAPE.checkpoint_bytes, 0),
        (INFINITY_CPU, 0, 20 * P // 4 + SHAPE.checkpoint_bytes),
    ],
)
def test_bytes_of_one_of_four_ranks(strategy, device, host):
    use = use_of(strategy, SHAPE, machine(4, 4))
    assert use.bytes_by_tier == {"device": WORKING + device, "host": host, "disk": 0}
    assert use.fits


def test_what_a_slow_tier_cannot_hold_goes_to_a_faster_one():
    small = with_tier(with_tier(machine(4, 4), "host", SHAPE.checkpoint_bytes + P), "disk", P)
    use = use_of(INFINITY_NVME, SHAPE, small)
    assert use.bytes_by_tier["disk"] == P
    assert use.bytes_by_tier["host"] == SHAPE.checkpoint_bytes + P
    assert use.bytes_by_tier["device"] == WORKING + 3 * P
    assert use.fits


def test_what_has_fewer_tiers_to_choose_from_chooses_first():
    picky = Strategy(
        "picky",
        ClassTiers(("device", "host"), True),
        ClassTiers(("device", "host"), True),
        ClassTiers(("host",), True),
    )
    tight = with_tier(machine(4, 4), "host", 4 * P)
    use = use_of(picky, SHAPE, tight)
    assert use.fits
    assert use.bytes_by_tier["host"] == 4 * P


def test_what_is_missing_is_told_to_the_byte():
    tight = with_tier(machine(), "device", WORKING + SHAPE.checkpoint_bytes + 20 * P - 7)
    assert use_of(DATA_PARALLEL, SHAPE, tight).missing_bytes == 7


@pytest.mark.parametrize("strategy", STRATEGIES, ids=lambda strategy: strategy.name)
def test_the_largest_model_fits_and_one_more_layer_does_not(strategy):
    node = machine(16, 16)
    for tier, nbytes in (("device", 32 * 10**9), ("host", 94 * 10**9), ("disk", 10**12)):
        node = with_tier(node, tier, nbytes)
    found = largest(strategy, node)
    assert use_of(strategy, found, node).fits
    assert not use_of(strategy, replace(found, layers=found.layers + 1), node).fits


def test_nothing_is_the_largest_on_a_device_without_room_to_work():
    assert largest(DATA_PARALLEL, with_tier(machine(), "device", RESERVED_BYTES)) is None


def test_a_strategy_is_data_and_a_new_one_needs_no_code():
    weights_on_host = Strategy(
        "mine", ClassTiers(("host",), False), *(ClassTiers(("device",), True),) * 2
    )
    use = use_of(weights_on_host, SHAPE, machine(4, 4))
    assert use.bytes_by_tier["host"] == 2 * P


def test_the_fastest_placement_that_fits_is_chosen():
    cluster = with_tier(machine(4, 4), "device", WORKING + 2 * P)
    chosen = fastest(Job(SHAPE), cluster, Assumptions())
    assert use_of_job(chosen, cluster).fits
    assert (chosen.weights, chosen.optimizer) != ("device", "device")
    for weights, optimizer in PLACES:
        other = replace(chosen, weights=weights, optimizer=optimizer)
        if use_of_job(other, cluster).fits:
            assert step_time(chosen, cluster).seconds <= step_time(other, cluster).seconds


def test_where_nothing_fits_the_placement_that_lacks_least_is_shown():
    cluster = machine(4, 4)
    for tier in ("device", "host", "disk"):
        cluster = with_tier(cluster, tier, WORKING if tier == "device" else 10**6)
    assert not use_of_job(fastest(Job(SHAPE), cluster, Assumptions()), cluster).fits


def test_the_smallest_group_of_nodes_that_holds_the_states():
    need = WORKING + SHAPE.checkpoint_bytes + 20 * P // 8
    group = group_of(SHAPE, with_tier(machine(32, 4), "device", need + 1))
    assert group.ranks == 8
    assert (group.flat, group.hierarchical) == (flat_gather(8), hierarchical_gather(8, 4))
    assert group_of(SHAPE, with_tier(machine(4, 4), "device", need + 1)) is None


def test_a_gather_in_two_hops_crosses_nodes_less():
    flat, two = flat_gather(16), hierarchical_gather(16, 8)
    assert (flat.inter_node, two.inter_node) == (15 / 16, 8 / 16)
    assert flat.hops / two.hops == 16 / (16 / 8 + 8)
