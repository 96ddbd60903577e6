"""What the other ranks are told when one of them does something else, fails, ends, or is killed.

The pool loses ranks on the way: the cases stand in order.
"""

import os
import signal
import tempfile
import time
from contextlib import suppress

import pytest
import torch
from border import Border
from border import offloaded as offloaded_by
from rank_models import adamw, batch, words
from rank_pool import RankPool
from sampled import sampled, sampled_rows

import zcompile
from zcompile.errors import RankFailed, RanksDiffer, ZinfError
from zcompile.frontend.offload import session_behind
from zcompile.runtime.progress import working
from zcompile.runtime.ranks.fabric import Fabric
from zcompile.runtime.ranks.link import LinksOfMesh, RankLink

BUDGETS = {"device": "cpu", "device_memory": "4MiB", "host_memory": "64MiB"}


PROMPT_S = 10.0
"""Seconds in which all ranks know. It takes less than one, but other tests may run beside this;
if nobody told them, ranks would wait for a minute."""


@pytest.fixture(scope="module")
def pool():
    made = RankPool(5)
    yield made
    made.close()


def one_more_step(model, run, optimizer, rank):
    run(*batch(0, rank)).backward()
    optimizer.step()
    optimizer.zero_grad()


def told(mesh, act, blocks=0, **fields):
    """Train a step, then `act(rank, model, run, optimizer)`; the kind, text and time of the error
    that this rank meets, and whether the model is closed afterwards."""
    model = zcompile.offload(words(blocks=blocks), mesh=mesh, **BUDGETS, **fields)
    optimizer, run = adamw(model.parameters()), torch.compile(model, backend="zinf")
    rank = mesh.get_local_rank()
    one_more_step(model, run, optimizer, rank)
    try:
        act(rank, model, run, optimizer)
    except (ZinfError, ValueError) as error:
        at = time.time()
        with pytest.raises(ZinfError):  # nothing goes on after it
            one_more_step(model, run, optimizer, rank)
        zcompile.close(model)
        return type(error).__name__, str(error), at
    zcompile.close(model)
    return "nothing", "", time.time()


# --- Ranks that do not do the same ---


def with_another_rate(rank, model, run, optimizer):
    for group in optimizer.param_groups:
        group["lr"] = 1e-3 * (1 + (rank == 1))
    one_more_step(model, run, optimizer, rank)


def with_another_call(rank, model, run, optimizer):
    if rank == 2:
        repr(model.table.weight)
    one_more_step(model, run, optimizer, rank)


def with_another_seed(rank, model, run, optimizer):
    torch.manual_seed(rank)
    with torch.no_grad():
        model.table.weight.normal_()


def with_other_values(rank, model, run, optimizer):
    with torch.no_grad():
        model.table.weight.copy_(torch.full((200, 96), float(rank)))


def with_other_operands(rank, model, run, optimizer):
    with torch.no_grad():
        model.table.weight.add_(torch.full((200, 96), float(rank)))


def in_another_order(rank, model, run, optimizer):
    first, second = model.head.weight, model.table.weight
    if rank == 0:
        first, second = second, first
    with torch.no_grad():
        first.mul_(0.5)
        second.mul_(0.5)


def with_one_that_saves(rank, model, run, optimizer):
    if rank == 0:
        zcompile.save(tempfile.mkdtemp() + "/run", model, optimizer)
    one_more_step(model, run, optimizer, rank)


def differing(mesh, name):
    return told(mesh, globals()[name])


DIFFERING = [
    ("with_another_rate", ["how they call", "lr=0.002", "rank 1:", "ranks 0, 2, 3:"]),
    ("with_another_call", ["what they do next", "rank 2: read 'table.weight'", "forward"]),
    ("with_one_that_saves", ["what they do next", "rank 0: save ", "forward"]),
    ("with_another_seed", ["how they call aten.normal_"]),
    ("with_other_values", ["how they call aten.copy_", "'table.weight'"]),
    ("with_other_operands", ["how they call aten.add_"]),
    ("in_another_order", ["how they call aten.mul_", "'head.weight'", "'table.weight'"]),
]


@pytest.mark.parametrize(("name", "says"), sampled_rows(DIFFERING, DIFFERING[4]))
def test_ranks_that_differ_are_told_so_before_bytes_move(pool, name, says):
    found = pool.run(differing, 4, name)
    assert {kind for kind, _, _ in found} == {RanksDiffer.__name__}
    for _, text, _ in found:
        assert all(part in text for part in says), text


def offloaded(mesh, name):
    """Offload what differs from rank to rank: the error, or the digest of what all have."""
    rank, model, fields = mesh.get_local_rank(), words(), dict(BUDGETS)
    if name == "another width":
        model = words(width=96 + 32 * rank)
    elif name == "another budget":
        fields["device_memory"] = f"{4 + rank}MiB"
    elif name == "another way":
        fields["max_lead"] = rank
    elif name == "frozen":
        model.head.weight.requires_grad_(rank == 0)
    try:
        zcompile.close(zcompile.offload(model, mesh=mesh, **fields))
    except RanksDiffer as error:
        return str(error)
    return "nothing"


@pytest.mark.parametrize(
    "name",
    sampled(["another width", "another budget", "another way", "frozen"], "another width"),
)
def test_models_and_settings_that_differ_are_refused(pool, name):
    found = pool.run(offloaded, 2, name)
    assert all(text.startswith("the ranks differ in how they offload a model") for text in found)


# --- Ranks that fail ---


def refuse(_):
    raise ValueError("not today")


def raising(rank, model, run, optimizer):
    if rank == 1:
        model.head.weight.register_hook(refuse)
    one_more_step(model, run, optimizer, rank)


def raised(mesh):
    return told(mesh, raising)


def test_a_rank_that_raises_ends_the_others_with_its_cause(pool):
    found = pool.run(raised, 4)
    kind, _, at = found[1]
    assert kind == "ValueError"
    for rank in (0, 2, 3):
        kind, text, then = found[rank]
        assert kind == RankFailed.__name__
        assert "rank 1 on " in text
        assert "ValueError: not today" in text
        assert then - at < PROMPT_S


class Lost:
    """A share that does not come."""

    def done(self):
        return True

    def wait(self):
        raise ValueError("the disk is gone")


def without_its_share(rank, model, run, optimizer):
    fabric = session_behind(model).fabric
    gather = fabric.gather

    def gathers(whole, name, after, tile=None):
        lost = [Lost()] if rank == 1 and name == "blocks.0.down.weight" else []
        return gather(whole, name, [*after, *lost], tile)

    fabric.gather = gathers
    one_more_step(model, run, optimizer, rank)


def lost(mesh):
    return told(mesh, without_its_share, blocks=1, stage=3)


def test_a_rank_whose_share_does_not_come_ends_the_others_with_its_cause(pool):
    """Its lane carries out no other collective in the place of that one."""
    (kind, text, then), (failed, why, at) = pool.run(lost, 2)
    assert (failed, why) == ("ValueError", "the disk is gone")
    assert kind == RankFailed.__name__
    assert "ValueError: the disk is gone" in text
    assert abs(then - at) < PROMPT_S


def without_a_plan(rank, model, run, optimizer):
    if rank == 1:
        session_behind(model).controller.planned = refuse
    for _ in range(2):
        one_more_step(model, run, optimizer, rank)


def unplanned(mesh):
    return told(mesh, without_a_plan)


@pytest.mark.slow  # one that raises in a hook does, above
def test_a_rank_that_fails_while_it_plans_a_step_ends_the_others_with_its_cause(pool):
    """Which is between two calls, where the others have come to the next already."""
    (kind, text, then), (failed, _, at) = pool.run(unplanned, 2)
    assert failed == "ValueError"
    assert kind == RankFailed.__name__
    assert "ValueError: not today" in text
    assert then - at < PROMPT_S


def resting(rank, model, run, optimizer):
    began = time.monotonic()
    if rank == 1:
        time.sleep(5.0)
    try:
        one_more_step(model, run, optimizer, rank)
    except RankFailed as error:
        raise ValueError(f"{time.monotonic() - began:.2f} s: {error}") from None


def rested(mesh):
    return told(mesh, resting, rank_timeout="2s")


def test_a_rank_that_does_not_come_is_missed_and_named(pool):
    found = pool.run(rested, 3)
    waited = []
    for rank in (0, 2):
        _, text, _ = found[rank]
        seconds, _, why = text.partition(" s: ")
        waited.append(float(seconds))
        assert why.startswith("rank 1 on ")
        assert "did not come within 2 s to agree on forward: the last that it came to was" in why
    assert 2.0 < max(waited) < 2.0 + PROMPT_S, (
        "the one that came first misses it, and tells the other"
    )
    assert "rank 1 on " in found[1][1], "it is told when it comes"


def crossed(mesh):
    """Each rank waits for the other, over another model and within long work of its own."""
    models = [zcompile.offload(words(), mesh=mesh, **BUDGETS, rank_timeout="2s") for _ in range(2)]
    rank = mesh.get_local_rank()
    try:
        with working("saving"):
            session_behind(models[rank]).fabric.agree("save")
    except RankFailed as error:
        return str(error)
    finally:
        for model in models:
            zcompile.close(model)
    return ""


@pytest.mark.slow
def test_ranks_that_wait_for_each_other_within_long_work_are_missed(pool):
    for text in pool.run(crossed, 2):
        assert "did not come within 2 s to agree on save" in text


def alone(mesh):
    """Rank 0 offloads a model, and rank 1 does not."""
    if mesh.get_local_rank() == 0:
        try:
            zcompile.offload(words(), mesh=mesh, **BUDGETS, rank_timeout="500ms")
        except RankFailed as error:
            return str(error)
    return ""


def test_a_rank_that_offloads_no_model_is_missed(pool):
    found, _ = pool.run(alone, 2)
    assert (
        "did not come within 0.5 s to offload the model; let every rank of the mesh call" in found
    )


def leaving(rank, model, run, optimizer):
    if rank == 3:
        raise SystemExit
    one_more_step(model, run, optimizer, rank)


def ended(mesh):
    return told(mesh, leaving)


def held(mesh):
    """What a gather ends with that a slow link holds for an hour, on all ranks, when the last of
    them is killed meanwhile."""
    rank, ranks = mesh.get_local_rank(), mesh.size()
    fabric = Fabric(list(range(ranks)), mesh.get_group(), 60.0)
    fabric.over(LinksOfMesh.all_one(RankLink("rank_to_rank", 1.0)), ranks)
    promise = fabric.gather(torch.zeros(3600 * ranks, dtype=torch.uint8), "w", [])
    while not fabric.links.of_all.holding():
        time.sleep(0.01)
    with suppress(RankFailed):  # of one that is killed before all know that it has agreed
        fabric.agree("be killed")
    if rank == ranks - 1:
        os.kill(os.getpid(), signal.SIGKILL)
    promise.wait_finished()
    fabric.close(ZinfError("closed"))
    return str(promise.error)


def test_a_rank_that_is_killed_ends_what_a_link_holds_back(pool):
    pool.send(held, 5)
    for rank in range(4):
        ok, text = pool.receive(rank)
        assert ok
        assert "rank 4 on " in text
        assert "its process ended without a word" in text


def test_a_rank_that_ends_its_loop_early_is_named(pool):
    pool.send(ended, 4)
    pool.processes[3].join(20)
    for rank in range(3):
        ok, (kind, text, _) = pool.receive(rank)
        assert ok
        assert kind == RankFailed.__name__
        assert "rank 3 on " in text
        assert "has ended its run after call" in text


def dying(rank, model, run, optimizer):
    """Also the sums of the others, which are not exchanged yet, come to nothing."""
    with zcompile.no_sync(model):
        run(*batch(0, rank)).backward()
    if rank == 2:
        print(time.time(), file=open(os.environ["DIED"], "w"), flush=True)  # noqa: SIM115
        os.kill(os.getpid(), signal.SIGKILL)
    one_more_step(model, run, optimizer, rank)


def died(mesh, path):
    os.environ["DIED"] = path
    return told(mesh, dying)


def test_a_rank_that_is_killed_is_named_at_once(pool, tmp_path):
    pool.send(died, 3, str(tmp_path / "at"))
    for rank in range(2):
        ok, (kind, text, then) = pool.receive(rank)
        assert ok
        assert kind == RankFailed.__name__
        assert "rank 2 on " in text
        assert "its process ended without a word" in text
        assert then - float((tmp_path / "at").read_text()) < PROMPT_S


def well(mesh):
    return told(
        mesh, lambda rank, model, run, optimizer: one_more_step(model, run, optimizer, rank)
    )


def test_the_ranks_that_are_left_train_on_together(pool):
    assert [kind for kind, _, _ in pool.run(well, 2)] == ["nothing"] * 2


def while_it_saves(mesh, path):
    """Save twice; rank 1 is killed when the second save comes to write what it has."""

    def around(call, go):
        if armed and call.name == "pwrite" and mesh.get_local_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return go()

    armed = False
    model = offloaded_by(words(), Border(around), mesh=mesh, **BUDGETS)
    zcompile.save(path, model, number=1)
    armed = True
    with pytest.raises(RankFailed) as caught:
        zcompile.save(path, model, number=2)
    zcompile.close(model)
    return str(caught.value)


def test_a_rank_that_is_killed_while_it_saves_leaves_the_checkpoint_before(pool, tmp_path):
    pool.send(while_it_saves, 2, str(tmp_path / "run"))
    ok, text = pool.receive(0)
    assert ok, text
    assert "rank 1 on " in text
    assert "its process ended without a word" in text
    assert zcompile.resume(tmp_path / "run", words()) == {"number": 1}
    assert os.listdir(tmp_path) == ["run"]
