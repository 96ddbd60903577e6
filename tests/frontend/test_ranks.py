"""Ranks that do not know of each other are refused; those that torchrun starts train together."""

import io
import os
import re
import runpy
import subprocess
import sys
from contextlib import redirect_stdout
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from fresh_processes import in_fresh_process
from pairs import ON_DISK, mlp
from sampled import sampled
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

import zcompile
from zcompile.errors import ConfigInvalid, ModelWrapped, Unsupported
from zcompile.machine.files import find
from zcompile.machine.model import with_ranks

ROOT = Path(__file__).parents[2]


def offloaded(disk, **fields):
    zcompile.offload(mlp(), **ON_DISK, disk=disk, **fields)


def initialised(disk, **fields):
    with zcompile.init(**ON_DISK, disk=disk, **fields):
        mlp()


@pytest.mark.parametrize("opened", [offloaded, initialised])
@pytest.mark.parametrize("name", ["WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE"])
def test_one_of_several_processes_of_a_launcher_is_refused_before_anything_is_made(
    opened, name, tmp_path, monkeypatch
):
    monkeypatch.setenv(name, "2")
    with pytest.raises(
        Unsupported, match=rf"several ranks .*{name}=2.*not initialised.* mesh=False"
    ):
        opened(tmp_path)
    assert not list(tmp_path.iterdir())
    opened(tmp_path, mesh=False)


@pytest.mark.parametrize("said", ["1", "0", "", "many"])
def test_a_launcher_that_started_one_process_disturbs_nobody(said, tmp_path, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", said)
    offloaded(tmp_path)


@pytest.mark.parametrize("mesh", [True, 0, "world"])
def test_what_is_no_mesh_is_refused(mesh, tmp_path):
    with pytest.raises(ConfigInvalid, match=r"mesh=.*give a DeviceMesh of one dimension"):
        offloaded(tmp_path, mesh=mesh)


@pytest.mark.parametrize("inside", ["root", "child"])
def test_an_offloaded_model_is_not_put_into_a_wrapper(inside, tmp_path):
    model = zcompile.offload(mlp(), **ON_DISK, disk=tmp_path)
    wrapped = model if inside == "root" else nn.Sequential(model)
    with pytest.raises(ModelWrapped, match="wrapped in DataParallel"):
        nn.DataParallel(wrapped)


def test_a_wrapper_deep_in_a_model_is_seen():
    with pytest.raises(ModelWrapped, match="wrapped in DataParallel"):
        zcompile.offload(nn.Sequential(nn.Linear(4, 4), nn.DataParallel(nn.Linear(4, 4))))


APART = """
import os, sys
from pathlib import Path
import torch, torch.distributed as dist, zcompile
from pairs import ON_DISK, mlp
from zcompile.errors import DiskOwned, ModelWrapped, Unsupported

def refused(kind, call):
    try:
        call()
    except kind as error:
        return str(error)
    sys.exit("not refused")

here, rank = Path(sys.argv[1]), int(os.environ["RANK"])
world = os.environ.pop("WORLD_SIZE")
late = zcompile.offload(mlp(), **{**ON_DISK, "host_memory": "4MiB"})  # knows of no other rank
os.environ["WORLD_SIZE"] = world
dist.init_process_group("gloo")
optimizer = torch.optim.SGD(late.parameters(), lr=1.0)
late(torch.ones(2, 16)).sum().backward()
assert "before they knew of each other" in refused(Unsupported, optimizer.step)
assert all(torch.equal(p.cpu(), q) for p, q in zip(late.parameters(), mlp().parameters()))

own = here / f"rank-{rank}"
own.mkdir()
model = zcompile.offload(mlp(), **ON_DISK, disk=own, mesh=False)
model(torch.full((2, 16), rank + 1.0)).sum().backward()
grad = model[2].bias.grad
for shared in (lambda: dist.all_reduce(grad), lambda: dist.broadcast(model[0].weight.data, 0)):
    assert "would be lost" in refused(Unsupported, shared)
value = model[2].weight.grad.cpu()
mine = value.clone()
dist.all_reduce(value)
model[2].weight.grad.copy_(value)
assert not torch.equal(mine, value)
assert torch.equal(model[2].weight.grad.cpu(), value)
refused(ModelWrapped, lambda: torch.nn.parallel.DistributedDataParallel(model))
torch.optim.SGD(model.parameters(), lr=1.0).step()
dist.barrier()
if rank:
    taken = here / "rank-0"
    refused(DiskOwned, lambda: zcompile.offload(mlp(), **ON_DISK, disk=taken, mesh=False))
dist.barrier()
dist.destroy_process_group()
print("passed", flush=True)
"""

TOGETHER = r"""
import os, sys
import torch, zcompile
from rank_models import adamw, batch, digest, words

model = zcompile.offload(words(), device="cpu", device_memory="4MiB", host_memory="64MiB")
optimizer, run = adamw(model.parameters()), torch.compile(model, backend="zinf")
rank, ranks = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
for step in range(2):
    for number in range(rank, 4, ranks):
        (run(*batch(step, number)) / (4 // ranks)).backward()
    optimizer.step()
    optimizer.zero_grad()
# One string: torchrun's ranks share a pipe and write unbuffered, and `print` writes in pieces.
sys.stdout.write(f"digest {digest(model.parameters())}\n")
if len(sys.argv) > 1 and rank == 1:
    raise ValueError("rank 1 has had enough")
if len(sys.argv) > 1:
    try:
        run(*batch(3, rank)).backward()
    except zcompile.errors.RankFailed as error:
        sys.stdout.write(f"told {error}\n")
"""


def torchrun(script: str, ranks: int, tmp_path: Path, *args: str) -> subprocess.CompletedProcess:
    (path := tmp_path / "script.py").write_text(script)
    env = {
        **{name: text for name, text in os.environ.items() if "XDIST" not in name},
        "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}:{ROOT / 'tests' / 'helpers'}",
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "1",
    }
    launch = [sys.executable]
    if ranks > 1:
        launch += ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    return subprocess.run(
        [*launch, str(path), *args],
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=200,
    )


@pytest.mark.slow
@pytest.mark.ranks(2)
def test_two_processes_of_torchrun_train_apart_if_they_say_so(tmp_path):
    ran = torchrun(APART, 2, tmp_path, str(tmp_path))
    assert ran.returncode == 0, ran.stdout
    assert ran.stdout.count("passed") == 2


def printed_alone(path: Path) -> str:
    """What one process prints that runs the script by itself, on one thread as ranks do."""
    torch.set_num_threads(1)
    printed = io.StringIO()
    with redirect_stdout(printed):
        runpy.run_path(str(path), run_name="__main__")
    return printed.getvalue()


@pytest.mark.ranks(2)
def test_one_script_trains_one_model_under_torchrun_and_without(tmp_path):
    ran = torchrun(TOGETHER, 2, tmp_path)
    assert ran.returncode == 0, ran.stdout
    (expected,) = re.findall("digest (.*)", in_fresh_process(printed_alone, tmp_path / "script.py"))
    assert re.findall("digest (.*)", ran.stdout) == [expected] * 2


@pytest.mark.slow
@pytest.mark.ranks(2)
def test_a_script_that_ends_with_an_error_tells_the_other_ranks(tmp_path):
    ran = torchrun(TOGETHER, 2, tmp_path, "fails")
    assert ran.returncode != 0
    assert "ValueError: rank 1 has had enough" in ran.stdout
    told = re.findall("told (.*)", ran.stdout)
    # torchrun itself may have ended the other one before it said so.
    assert all(
        "rank 1 on " in text and "ValueError: rank 1 has had enough" in text for text in told
    )
    assert "Signal" in ran.stdout or told, ran.stdout


def test_a_plan_says_that_it_is_of_one_rank_of_several():
    model, inputs = nn.Linear(8, 8, device="meta"), torch.empty(4, 8, device="meta")
    report = zcompile.plan(model, inputs, machine="h200-node")
    assert report.to_dict()["ranks"] == report.ranks == 8
    assert "one of 8 ranks that train the model together" in str(report)
    alone = zcompile.plan(model, inputs, machine="desktop-24gb")
    assert alone.ranks == 1
    assert "rank" not in str(alone)


@pytest.mark.parametrize(
    "sweep",
    [(), pytest.param(("--sweep", "host=8GiB..9GiB:2"), marks=pytest.mark.slow)],
    ids=["one", "sweep"],
)
def test_zinf_plan_says_that_it_is_of_one_rank(sweep, zinf):
    code, out, _ = zinf(
        "plan",
        "small_models:mlp",
        "--machine",
        "h200-node",
        "--shape",
        "8",
        "--host",
        "8GiB",
        *sweep,
    )
    assert code == 0
    assert "one of 8 ranks" in out


def planned(ranks, stage="auto", **fields):
    """The plan of one of so many ranks, or of those of a machine, of a model with two large weights
    and small ones."""
    model = nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 256)).to("meta")
    machine = with_ranks(find("h200-node"), ranks) if isinstance(ranks, int) else ranks
    inputs = torch.empty(4, 256, device="meta")
    return zcompile.plan(model, inputs, machine=machine, stage=stage, **fields)


def test_a_plan_of_more_ranks_holds_less_and_gathers_more():
    weights, small = 2 * 256 * 512 * 4, (256 + 512) * 4
    for ranks in (1, 2, 8):
        report = planned(ranks, 3 if ranks > 1 else "auto")
        rests = sum(row.weights + row.gradients + row.states for row in report.tiers)
        kept = report.staying_bytes  # gradients, where nothing is exchanged
        assert rests + kept == 4 * (weights // ranks + small), "with gradients and two moments"
        crosses = {row.link: row.nbytes for row in report.links}.get("rank_to_rank", 0)
        # The second weight is read in backward too; each gradient is exchanged.
        gathered, exchanged = weights + weights // 2, weights
        assert crosses == (gathered + exchanged) * (ranks - 1) // ranks + small * (ranks - 1)
        # Equal with one rank, where all stays on the device: the same seconds, in two orders.
        assert report.bound_seconds <= report.step_seconds * (1 + 1e-12)


@pytest.mark.parametrize("replicas", [1, 2, 8])
def test_a_plan_of_groups_gathers_within_one_and_sums_over_all(replicas):
    weights, small, ranks = 2 * 256 * 512 * 4, (256 + 512) * 4, 8
    shards, others = ranks // replicas, replicas - 1
    report = planned(with_ranks(find("h200-node"), ranks, replicas), 3)
    rests = sum(row.weights + row.gradients + row.states for row in report.tiers)
    assert rests == 4 * (weights // shards + small)
    crosses = {row.link: row.nbytes for row in report.links}["rank_to_rank"]
    gathered, exchanged = weights + weights // 2, weights
    within = (gathered + exchanged) * (shards - 1) // shards
    assert crosses == within + weights // shards * others + small * (ranks - 1)
    assert report.to_dict()["replicas"] == replicas
    assert ("groups of" in str(report)) == (replicas > 1)
    assert report.bound_seconds <= report.step_seconds * (1 + 1e-12)


def test_a_plan_of_groups_that_are_nodes_leaves_them_for_sums_alone():
    weights, small = 2 * 256 * 512 * 4, (256 + 512) * 4
    machine = find("dgx2-v100-4nodes")
    report = planned(replace(machine, replicas=4), 3)
    crosses = {row.link: row.nbytes for row in report.links}
    assert crosses["rank_to_rank"] == (2 * weights + weights // 2) * 15 // 16
    assert crosses["node_to_node"] == weights // 16 * 3 + small * 63
    flat = {row.link: row.nbytes for row in planned(machine, 3).links}
    assert flat["node_to_node"] == (2 * weights + weights // 2) * 63 // 64 + small * 63


def test_a_plan_of_a_mesh_is_of_as_many_ranks_as_the_machine():
    mesh = DeviceMesh("cpu", [[0, 1], [2, 3]], _init_backend=False, _rank=0)
    assert planned(4, 3, mesh=mesh).replicas == 2
    with pytest.raises(ConfigInvalid, match="has 4 ranks, and the machine 8"):
        planned(8, 3, mesh=mesh)


def test_a_plan_of_micro_batches_within_no_sync_exchanges_once():
    weights, small, ranks, times = 2 * 256 * 512 * 4, (256 + 512) * 4, 8, 3
    report = planned(ranks, 3, micro_batches=times, no_sync=True)
    crosses = {row.link: row.nbytes for row in report.links}["rank_to_rank"]
    gathered, exchanged = times * (weights + weights // 2), weights
    assert crosses == (gathered + exchanged) * (ranks - 1) // ranks + small * (ranks - 1)
    assert report.micro_batches == times
    # Of gradients each rank has room for all.
    gradients = sum(row.gradients for row in report.tiers)
    assert gradients == weights + small
    assert report.bound_seconds <= report.step_seconds
    assert report.floor_seconds <= report.step_seconds


def test_a_plan_of_owners_brings_what_one_of_them_holds():
    weight, small, ranks = 256 * 512 * 4, (256 + 512) * 4, 4
    report = planned(ranks, partition="owner")
    crosses = {row.link: row.nbytes for row in report.links}["rank_to_rank"]
    # Rank 0 holds the first weight; the second comes in forward and in backward, and the gradients
    # of the first from all others.
    assert crosses == 2 * weight + (weight + small) * (ranks - 1)
    rests = sum(row.weights + row.gradients + row.states for row in report.tiers)
    padding, held = 4 * 4096, rests + report.staying_bytes
    assert 4 * (weight + small) <= held <= 4 * (weight + small) + padding
    assert report.bound_seconds <= report.step_seconds
    with pytest.raises(ConfigInvalid, match=r"partition='owner'.*the machine has one"):
        planned(1, partition="owner")


@pytest.mark.parametrize("micro_batches", sampled([1, 2], 2))
@pytest.mark.slow
def test_a_plan_keeps_weights_whole_where_that_is_faster_or_asked_for(micro_batches):
    weights, small, ranks = 2 * 256 * 512 * 4, (256 + 512) * 4, 8
    seconds = {}
    for stage in ("auto", 2, 3):
        report = planned(ranks, stage, micro_batches=micro_batches)
        seconds[stage] = report.step_seconds
        assert report.bound_seconds <= report.step_seconds
        assert report.floor_seconds <= report.step_seconds
        copies = sum(row.copies for row in report.tiers)
        if stage == 3:
            assert (copies, report.whole_parameters) == (0, 0)
            continue
        crosses = {row.link: row.nbytes for row in report.links}["rank_to_rank"]
        exchanged = micro_batches * (weights * (ranks - 1) // ranks + small * (ranks - 1))
        assert crosses == weights * (ranks - 1) // ranks + exchanged, "each is gathered once"
        # The first weight is read in forward alone, so of one micro-batch nothing is saved.
        kept = 1 if (stage, micro_batches) == ("auto", 1) else 2
        assert (copies, report.whole_parameters) == (kept * weights // 2, kept)
        assert f"all of {kept} parameters rests on the device of every rank" in str(report)
    assert seconds["auto"] == seconds[2] < seconds[3]


def test_a_stage_of_one_rank_is_refused():
    with pytest.raises(ConfigInvalid, match="stage=2 is of several ranks"):
        planned(1, 2)


def test_zinf_plan_takes_a_number_of_ranks(zinf):
    words = "plan", "small_models:mlp", "--shape", "8", "--host", "8GiB", "--machine"
    code, out, _ = zinf(*words, "h200-node", "--ranks", "2")
    assert code == 0
    assert "one of 2 ranks" in out
    assert "rank" not in zinf(*words, "h200-node", "--ranks", "1")[1]
    assert "each of 2 groups of 4 holds all" in zinf(*words, "h200-node", "--ranks", "2x4")[1]
    steps = (*words, "h200-node", "--ranks", "2", "--micro-batches", "3", "--json")
    assert zinf(*steps, "--no-sync")[1] != zinf(*steps)[1]
    for ranks, micro_batches, says in (
        ("1", "3", "means nothing with one rank"),
        ("2", "1", "means nothing with one micro-batch"),
    ):
        given = "--ranks", ranks, "--micro-batches", micro_batches, "--no-sync"
        code, _, err = zinf(*words, "h200-node", *given)
        assert code == 2
        assert says in err
    for machine, ranks, says in (
        ("h200-node", "12", "do not fill nodes of ranks_per_node=8"),
        ("desktop-24gb", "2", "add links.rank_to_rank"),
        ("h200-node", "0", "is no number of ranks"),
        ("h200-node", "2x2x2", "is no number of ranks; give one, as 8, or groups x ranks of each"),
    ):
        code, _, err = zinf(*words, machine, "--ranks", ranks)
        assert code
        assert says in err
    code, _, err = zinf("plan", "transformer:layers=2,hidden=64,heads=2", "--ranks", "2")
    assert code
    assert "ranks=2 goes with the plan of a model alone" in err
