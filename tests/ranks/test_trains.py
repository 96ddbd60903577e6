"""Several ranks train one model: the numbers do not depend on how many they are."""

import pytest
import torch
from rank_models import optimizer_named, state_of, train, trained_eagerly, words

import zcompile

BUDGETS = {"device": "cpu", "device_memory": "4MiB", "host_memory": "64MiB"}


def trained(mesh, optimizer="adamw", clip=0.0, fields=None, kinds=None):
    """Digests of weights and states after training on the ranks of a mesh."""
    model = words(**(kinds or {}))
    zcompile.offload(model, mesh=mesh, **{**BUDGETS, **(fields or {})})
    made = optimizer_named(optimizer)(model.parameters())
    run = torch.compile(model, backend="zinf")
    train(model, run, made, mesh.get_local_rank(), mesh.size(), clip)
    found = state_of(model, made)
    zcompile.close(model)
    return found


@pytest.mark.parametrize("ranks", [4, 2, 1])
@pytest.mark.parametrize("optimizer", ["adamw", "adam foreach", "sgd"])
def test_ranks_end_with_the_bits_of_one_process(pool, ranks, optimizer):
    assert pool.run(trained, ranks, optimizer) == [trained_eagerly(optimizer)] * ranks


def test_ranks_end_with_the_bits_of_one_process_from_disk(pool, tmp_path):
    fields = {"host_memory": "1MiB", "disk": str(tmp_path)}
    assert pool.run(trained, 2, "adamw", 0.0, fields) == [trained_eagerly("adamw")] * 2
    assert sorted(p.name for p in tmp_path.iterdir()) == ["rank-0", "rank-1"]


def test_a_tied_weight_gets_its_gradients_in_the_order_of_autograd(pool):
    kinds = {"tied": True}
    expected = trained_eagerly("adamw", **kinds)
    assert pool.run(trained, 2, "adamw", 0.0, {}, kinds) == [expected] * 2


def test_clipping_does_not_make_the_numbers_depend_on_the_ranks(pool):
    found = [pool.run(trained, ranks, "adamw", 0.05) for ranks in (1, 2, 4)]
    assert found[0][0] != trained_eagerly("adamw"), "the bound is in effect"
    assert found == [found[0] * ranks for ranks in (1, 2, 4)]


def test_clipping_whose_bound_is_not_reached_changes_no_bit(pool):
    assert pool.run(trained, 2, "adamw", 1e6) == [trained_eagerly("adamw", 1e6)] * 2
