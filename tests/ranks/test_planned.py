"""Several ranks train by plans of whole steps, each by its own, with the bits of one process."""

import functools
from collections import Counter

import pytest
import torch
from rank_models import optimizer_named, state_of, train, words
from rank_plans import ROOMY, SLOW, TIGHT, everything_late
from sampled import sampled, sampled_rows

import zcompile
from zcompile.frontend.offload import session_behind
from zcompile.frontend.replan import plan_in_force
from zcompile.planner import step_plan

STEPS = 6
"""Two are seen, the third is planned, and then some go by the plan."""
LARGE = 6
"""Weights that ranks hold shares of: each matrix and table."""


def eagerly(mesh, optimizer, clip):
    """What stock PyTorch makes of all batches, in one process with one thread, as ranks have."""
    model = words(blocks=2)
    made = optimizer_named(optimizer)(model.parameters())
    train(model, model, made, 0, 1, clip, steps=range(STEPS))
    return state_of(model, made)


@pytest.fixture(scope="module")
def expected(pool):
    return functools.cache(
        lambda optimizer="adamw", clip=0.0: pool.run(eagerly, 1, optimizer, clip)[0]
    )


def trained(mesh, fields, optimizer="adamw", clip=0.0, late=False):
    """Digests after training, and what the last step was like.

    late  let all updates be late that may be
    """
    rank, ranks = mesh.get_local_rank(), mesh.size()
    model = words(blocks=2)
    zcompile.offload(model, mesh=mesh, **fields)
    made = optimizer_named(optimizer)(model.parameters())
    run = torch.compile(model, backend="zinf")
    with everything_late(late):
        train(model, run, made, rank, ranks, clip, steps=range(STEPS - 1))
        zcompile.stats(model, reset=True)
        train(model, run, made, rank, ranks, clip, steps=range(STEPS - 1, STEPS))
    stats, session = zcompile.stats(model), session_behind(model)
    found = {"fabric": stats["fabric"]["bytes"], "moved": stats["bytes"], "peak": stats["peak"]}
    if (plan := plan_in_force(session)) is not None:
        found["late"] = len(plan.late)
        found["predicted"] = stats["predicted"]
        found["collectives"] = [c.schedule.collectives for c in plan.step.calls[:2]]
        found["homes"] = {e.home for e in session.entries()}
    state = state_of(model, made)
    zcompile.close(model)
    return state, found


@pytest.mark.parametrize("ranks", sampled([1, 2, 4], 2))
def test_what_rests_on_the_device_gives_the_bits_of_one_process(pool, expected, ranks):
    rows = pool.run(trained, ranks, ROOMY)
    assert [state for state, _ in rows] == [expected()] * ranks
    for _, found in rows:
        assert found["homes"] == {"device"}
        assert found["moved"]["h2d"] == found["moved"]["d2h"] == 0, "shares are gathered from there"
        assert found["peak"]["device"] <= found["predicted"]["peak"]["device"]
    sent = sum(sum(found["fabric"][lane] for lane in ("gather", "exchange")) for _, found in rows)
    assert sent == sum(found["predicted"]["bytes"]["rank_to_rank"] for _, found in rows)


@pytest.mark.parametrize("ranks", sampled([1, 2, 4], 2))
def test_late_updates_of_shares_come_before_their_gather(pool, expected, ranks):
    fields = {**ROOMY, "device_memory": TIGHT[ranks], "throttle": SLOW}
    rows = pool.run(trained, ranks, fields, "adamw", 0.0, True)
    assert [state for state, _ in rows] == [expected()] * ranks
    assert all(found["late"] >= LARGE for _, found in rows)
    assert all(found["collectives"] == rows[0][1]["collectives"] for _, found in rows)


@pytest.mark.slow
def test_owners_update_late_what_they_hold(pool, expected):
    fields = {**ROOMY, "device_memory": "1MiB", "throttle": SLOW, "partition": "owner"}
    rows = pool.run(trained, 2, fields, "adamw", 0.0, True)
    assert [state for state, _ in rows] == [expected()] * 2
    late = [found["late"] for _, found in rows]
    small = (sum(late) - LARGE) // 2
    assert sum(late) == LARGE + 2 * small, "each large one on one rank, small ones on both"
    assert min(late) > small
    assert rows[0][1]["collectives"] == rows[1][1]["collectives"]


@pytest.mark.slow
def test_ranks_that_update_other_parameters_late_train_together(pool, expected):
    """What each rank decides for itself changes nothing of what crosses."""
    rows = pool.run(trained_alone_late, 2)
    assert [state for state, _ in rows] == [expected()] * 2
    assert rows[0][1]["late"] >= LARGE
    assert rows[1][1]["late"] == 0
    assert rows[0][1]["collectives"] == rows[1][1]["collectives"]


def trained_alone_late(mesh):
    fields = {**ROOMY, "device_memory": TIGHT[2], "throttle": SLOW}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(step_plan, "LATE_PAYS", float("inf"))
        return trained(mesh, fields, late=mesh.get_local_rank() == 0)


@pytest.mark.slow  # their bits are those of one process, above
@pytest.mark.parametrize(
    ("optimizer", "clip"), sampled_rows([("adamw", 0.05), ("sgd", 0.0)], ("adamw", 0.05))
)
def test_planned_ranks_do_what_they_do_without_a_plan(pool, optimizer, clip):
    fields = {**ROOMY, "device_memory": TIGHT[2], "throttle": SLOW}
    planned = pool.run(trained, 2, fields, optimizer, clip, True)
    plain = pool.run(trained, 2, {**fields, "residency": False}, optimizer, clip)
    assert [state for state, _ in planned] == [state for state, _ in plain]
    assert all("late" in found for _, found in planned)
    assert not any("late" in found for _, found in plain)


@pytest.mark.slow
def test_small_gradients_cross_in_one_bucket(pool):
    """Of each backward: 6 large ones by themselves, and those of 10 norms and biases together."""
    (_, found), _ = pool.run(trained, 2, ROOMY)
    backward = [kind for kind, _, _ in found["collectives"][1]]
    assert Counter(backward) == {"gather": 5, "exchange": LARGE, "bucket": 10}


def saved_while_late(mesh, path):
    """Save when all updates are late, before the forward that would compute them; digests of what
    the model has then, and of what a plain one resumes."""
    rank, ranks = mesh.get_local_rank(), mesh.size()
    fields = {**ROOMY, "device_memory": TIGHT[ranks]}
    model = zcompile.offload(words(blocks=2), mesh=mesh, throttle=SLOW, **fields)
    made = optimizer_named("adamw")(model.parameters())
    run = torch.compile(model, backend="zinf")
    with everything_late(True):
        train(model, run, made, rank, ranks, steps=range(STEPS))
        plan = plan_in_force(session_behind(model))
        zcompile.save(path, model, made)
    found = state_of(model, made)
    zcompile.close(model)
    plain = words(blocks=2)
    optimizer = optimizer_named("adamw")(plain.parameters())
    zcompile.resume(path, plain, optimizer)
    return len(plan.late), found, state_of(plain, optimizer)


@pytest.mark.slow
def test_ranks_save_with_late_updates_to_come(pool, expected, tmp_path):
    for late, found, resumed in pool.run(saved_while_late, 2, str(tmp_path / "run")):
        assert late
        assert found == resumed == expected()
