"""Several ranks train one model: the numbers do not depend on how many they are."""

import sys

import pytest
import torch
import torch.distributed as dist
from rank_models import batch, optimizer_named, state_of, train, trained_eagerly, words
from sampled import sampled, sampled_rows

import zcompile
from zcompile.errors import ZinfError
from zcompile.frontend.offload import session_behind

BUDGETS = {"device": "cpu", "device_memory": "4MiB", "host_memory": "64MiB"}


def trained(mesh, optimizer="adamw", clip=0.0, fields=None, kinds=None):
    """Digests of weights and states after training on the ranks of a mesh."""
    model = words(**(kinds or {}))
    zcompile.offload(model, mesh=mesh, **{**BUDGETS, **(fields or {})})
    made = optimizer_named(optimizer)(model.parameters())
    run = torch.compile(model, backend="zinf")
    train(model, run, made, mesh.get_local_rank(), mesh.size(), clip)
    found = state_of(model, made)
    read = zcompile.stats(model)["bytes"]["disk_read"]
    assert (read > 0) == ("disk" in (fields or {})), "the disk is used where there is one"
    zcompile.close(model)
    return found


@pytest.mark.parametrize(
    ("optimizer", "ranks"),
    sampled_rows(
        [("adamw", 4), ("adamw", 2), ("adamw", 1), ("adam foreach", 2), ("sgd", 2)],
        ("adamw", 4),
    ),
)
def test_ranks_end_with_the_bits_of_one_process(pool, ranks, optimizer):
    assert pool.run(trained, ranks, optimizer) == [trained_eagerly(optimizer)] * ranks


LARGER = {"blocks": 2}
"""More than fits where little does."""


@pytest.mark.parametrize("partition", sampled(["slices", "owner"], "slices"))
def test_ranks_end_with_the_bits_of_one_process_from_disk(pool, partition, tmp_path):
    fields = {"host_memory": "1MiB", "disk": str(tmp_path), "partition": partition}
    expected = trained_eagerly("adamw", **LARGER)
    assert pool.run(trained, 2, "adamw", 0.0, fields, LARGER) == [expected] * 2
    assert sorted(p.name for p in tmp_path.iterdir()) == ["rank-0", "rank-1"]


@pytest.mark.slow
def test_slow_links_change_no_bit(pool):
    """What an optimizer's step still stores is read from bytes that the next forward gathers to."""
    fields = {"throttle": {"d2h": "1.5MB/s"}, "device_memory": "1MiB"}
    expected = trained_eagerly("sgd", **LARGER)
    assert pool.run(trained, 2, "sgd", 0.0, fields, LARGER) == [expected] * 2


@pytest.mark.slow  # tests/ranks/test_stages.py has tied weights
def test_a_tied_weight_gets_its_gradients_in_the_order_of_autograd(pool):
    kinds = {"tied": True}
    expected = trained_eagerly("adamw", **kinds)
    assert pool.run(trained, 2, "adamw", 0.0, {}, kinds) == [expected] * 2


class Odd(torch.nn.Module):
    """Weights that do not divide: with four ranks the last one holds nothing but padding."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layer = torch.nn.Linear(205, 41).double()
        self.turned = torch.nn.Parameter(torch.randn(130, 90, dtype=torch.float64).t())
        self.narrow = torch.nn.Parameter(torch.randn(60_000).bfloat16())

    def forward(self, x):
        y = self.layer(x).square().mean() + (self.turned * x[0, 0]).square().mean()
        return y + (self.narrow * self.narrow).sum().double() / 60_000


def trained_oddly(mesh):
    model, rank, ranks = Odd(), 0, 1
    run = model
    if mesh is not None:
        rank, ranks = mesh.get_local_rank(), mesh.size()
        run = torch.compile(zcompile.offload(model, mesh=mesh, **BUDGETS), backend="zinf")
    made = optimizer_named("adamw")(model.parameters())
    for step in range(2):
        for number in range(rank, 4, ranks):
            x = torch.full((2, 205), 0.01 * (step + number + 1), dtype=torch.float64)
            (run(x) * (ranks / 4)).backward()
        made.step()
        made.zero_grad()
    found = state_of(model, made)
    if mesh is not None:
        zcompile.close(model)
    return found


def test_weights_of_any_size_dtype_and_strides_are_shared(pool):
    assert pool.run(trained_oddly, 4) == [trained_oddly(None)] * 4


@pytest.mark.slow  # tests/ranks/test_stages.py clips
def test_clipping_does_not_make_the_numbers_depend_on_the_ranks(pool):
    found = [pool.run(trained, ranks, "adamw", 0.05) for ranks in (1, 2, 4)]
    assert found[0][0] != trained_eagerly("adamw"), "the bound is in effect"
    assert found == [found[0] * ranks for ranks in (1, 2, 4)]


@pytest.mark.slow  # tests/ranks/test_stages.py clips
def test_clipping_whose_bound_is_not_reached_changes_no_bit(pool):
    assert pool.run(trained, 2, "adamw", 1e6) == [trained_eagerly("adamw", 1e6)] * 2


def closed_behind_a_backward(mesh):
    """Whether each collective that was on its way when a model was closed has ended well."""
    model = words()
    throttle = {"rank_to_rank": "400KB/s"}
    zcompile.offload(model, mesh=mesh, device="cpu", device_memory="4MiB", throttle=throttle)
    run = torch.compile(model, backend="zinf")
    run(*batch(0, mesh.get_local_rank())).backward()
    pending = list(session_behind(model).fabric._pending)
    zcompile.close(model)
    return [promise.done() and promise.error is None for promise in pending]


def test_a_model_that_is_closed_leaves_no_collective_out(pool):
    """One that one rank leaves out and another does not ends in the middle of a message: a process
    died of it that made another group, or ended."""
    for ended in pool.run(closed_behind_a_backward, 2):
        assert ended
        assert all(ended)


USES = {
    "read a weight": lambda model, run, optimizer, rank: model.head.weight + 1,
    "read a gradient": lambda model, run, optimizer, rank: model.head.weight.grad.sum().item(),
    "step": lambda model, run, optimizer, rank: optimizer.step(),
    "call the compiled model": lambda model, run, optimizer, rank: run(*batch(0, rank)),
    "call the model": lambda model, run, optimizer, rank: model(*batch(0, rank)),
}


def used_after_close(mesh):
    """Whether each use of a closed model says that it is; and what rank 1, which closes it last,
    has been told of what rank 0 meets after it has closed it."""
    rank = mesh.get_local_rank()
    model = zcompile.offload(words(blocks=1), mesh=mesh, device="cpu", device_memory="4MiB")
    run = torch.compile(model, backend="zinf")
    optimizer = optimizer_named("adamw")(model.parameters())
    run(*batch(0, rank)).backward()
    fabric = session_behind(model).fabric
    heard = None
    if rank == 1:
        dist.barrier(mesh.get_group())
        heard = fabric._watch._read_failure()
    zcompile.close(model)
    told = {}
    for name, use in USES.items():
        try:
            told[name] = use(model, run, optimizer, rank)
        except Exception as error:  # noqa: BLE001  # on purpose: any but ours is shown as such
            told[name] = "gone: its store was closed" in str(error)
    if rank == 0:
        fabric.failed_here(ZinfError("a transfer that was dropped"))
        dist.barrier(mesh.get_group())
    return told, str(heard)


def test_a_closed_model_says_so_at_once(pool):
    """Its ranks talk no more: who asked them waited for ever. To use it is no failure of the other
    ranks, which may train on as long as they need not this one."""
    assert pool.run(used_after_close, 2) == [(dict.fromkeys(USES, True), "None")] * 2


def has_imported(mesh):
    return "rank_imports" in sys.modules


def test_ranks_are_forked_from_one_that_has_imported_all(pool):
    """Else nothing fails but time: a fork server passes over what it does not find."""
    assert pool.run(has_imported, 2) == [True] * 2
