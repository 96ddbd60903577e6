"""Two ranks, a process each, train on one CUDA card: their messages pass pinned memory, over gloo.

The card is for real what `test_simulated_cards.py` simulates. The bits are those of eager in one
process on the card.
"""

import pytest
from card_ranks import eagerly, ranks_train

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]

STEPS = 3
LITTLE = {"device": "cuda:0", "device_memory": "4MiB", "host_memory": "128MiB"}


@pytest.mark.parametrize(
    "fields",
    [
        {"residency": False},
        {},
        {"partition": "owner", "residency": False},
        {"device_memory": "32MiB", "stage": 2},
    ],
)
def test_ranks_on_a_card_end_with_the_bits_of_one_process(fields):
    expected = eagerly(STEPS)
    for found in ranks_train(2, STEPS, {**LITTLE, "updates": "device", **fields}):
        assert found is not None
        assert found["state"] == expected


def test_clipping_over_shares_on_a_card_is_the_same_on_all_ranks():
    one, other = ranks_train(2, STEPS, {**LITTLE, "updates": "device"}, clip=0.05)
    assert one is not None
    assert one == other
    assert one["state"] != eagerly(STEPS), "the bound is in effect"


def test_a_killed_rank_ends_the_other_and_the_durable_run_resumes(tmp_path):
    fields = {**LITTLE, "updates": "device", "disk": str(tmp_path), "durable": True}
    one, killed = ranks_train(2, STEPS, fields, dies=2)
    assert killed is None
    assert one is not None
    assert one["rank"] == 1
    for found in ranks_train(2, STEPS, fields, resumes=True):
        assert found is not None
        assert found["begun"] in (1, 2)  # as far as both had committed
        assert found["state"] == eagerly(STEPS)
