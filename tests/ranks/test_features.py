"""What users do besides the plain loop, with several ranks."""

from collections import Counter
from contextlib import contextmanager

import pytest
import torch
from heard import warnings_of
from rank_models import (
    BATCHES,
    STEPS,
    Words,
    adamw,
    batch,
    digest,
    numbers_of,
    state_of,
    train,
    trained_eagerly,
    whole_state_of,
    words,
)
from sampled import sampled
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

import zcompile
from zcompile.errors import Unsupported
from zcompile.frontend.offload import session_behind
from zcompile.ir.partition import partition_of
from zcompile.ir.torch_compat import dynamo_goes_on
from zcompile.ir.types import Layout

BUDGETS = {"device": "cpu", "device_memory": "4MiB", "host_memory": "64MiB"}


def run_on(mesh, case):
    """A case of this file, `case(model, run, optimizer, rank, ranks)`; mesh None: plain PyTorch."""
    model = words(blocks=2 if case == "broken" else 1)
    rank, ranks = (0, 1) if mesh is None else (mesh.get_local_rank(), mesh.size())
    if mesh is not None:
        zcompile.offload(model, mesh=mesh, **BUDGETS)
    dynamic = True if case == "dynamic" else None  # None: what changes becomes so
    run = model if mesh is None else torch.compile(model, backend="zinf", dynamic=dynamic)
    found = globals()[case](model, run, adamw(model.parameters()), rank, ranks)
    if mesh is not None:
        zcompile.close(model)
    return found


def frozen(model, run, optimizer, rank, ranks):
    """One weight is frozen, and thaws."""
    model.head.weight.requires_grad_(False)
    train(model, run, optimizer, rank, ranks, steps=range(1))
    model.head.weight.requires_grad_(True)
    train(model, run, optimizer, rank, ranks, steps=range(1, 2))
    return state_of(model, optimizer)


def hooked(model, run, optimizer, rank, ranks):
    """Hooks of tensors see this rank's gradient, those after accumulation the mean of all."""
    seen = []
    model.head.weight.register_hook(lambda grad: grad * 2.0)
    model.table.weight.register_post_accumulate_grad_hook(lambda p: seen.append(digest([p.grad])))
    train(model, run, optimizer, rank, ranks, steps=range(2))
    return state_of(model, optimizer), seen[-1]


def scaled(model, run, optimizer, rank, ranks):
    """A GradScaler skips a step of which one rank's gradients are not finite."""
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    numbers = list(numbers_of(rank, ranks))
    for step in range(3):
        for number in numbers:
            loss = run(*batch(step, number)) / len(numbers)
            if step == 1 and number == 1:
                loss = loss * float("inf")
            scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    return state_of(model, optimizer), scaler.get_scale()


def evaluated(model, run, optimizer, rank, ranks):
    """Training and evaluation take turns."""
    losses = []
    for step in range(2):
        train(model, run, optimizer, rank, ranks, steps=range(step, step + 1))
        model.eval()
        with torch.no_grad():
            losses += [run(*batch(9, 0)).item(), run(*batch(9, 1)).item()]
        model.train()
    return state_of(model, optimizer), losses


def lengthening(model, run, optimizer, rank, ranks):
    """Batches of another length in each step, so that sizes become dynamic."""
    for step in range(3):
        for number in numbers_of(rank, ranks):
            ids, wanted = batch(step, number)
            (run(ids[:, : 4 + step], wanted[:, : 4 + step]) / (BATCHES // ranks)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return state_of(model, optimizer)


def dynamic(model, run, optimizer, rank, ranks):
    """Compiled with dynamic sizes from the start: floats of the model are inputs of its graph,
    which torch makes tensors while the backend compiles, and then analyses the model anew."""
    with restarts_counted() as restarts:
        found = lengthening(model, run, optimizer, rank, ranks)
    assert restarts or run is model, "else nothing is shown"
    return found


@contextmanager
def restarts_counted():
    """A list that grows with each analysis of a frame that the backend has asked for anew."""
    restarts = []

    def counted(error):
        goes_on = dynamo_goes_on(error)
        restarts.extend([error] * goes_on)
        return goes_on

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("zcompile.frontend.backend.dynamo_goes_on", counted)
        yield restarts


def cut(self, ids, wanted):
    """The forward of `Words`, with a graph break between its blocks."""
    x = self.blocks[0](self.table(ids))
    torch._dynamo.graph_break()
    x = self.blocks[1](x)
    return nn.functional.cross_entropy(self.head(self.norm(x)).flatten(0, 1), wanted.flatten())


def broken(model, run, optimizer, rank, ranks):
    """Dynamo cuts the model into two graphs, whose collectives follow each other."""
    model.forward = cut.__get__(model)
    train(model, run, optimizer, rank, ranks, steps=range(2))
    return state_of(model, optimizer)


def kept(model, run, optimizer, rank, ranks):
    """`.grad` between backward and step: its values, its norm, and an op on it."""
    for number in numbers_of(rank, ranks):
        (run(*batch(0, number)) / (BATCHES // ranks)).backward()
    grads = [p.grad for p in model.parameters()]
    found = digest(grads)
    torch._foreach_mul_(grads, 0.5)
    optimizer.step()
    optimizer.zero_grad(set_to_none=False)
    train(model, run, optimizer, rank, ranks, steps=range(1, 2))
    return found, state_of(model, optimizer)


CASES = ["frozen", "hooked", "scaled", "evaluated", "lengthening", "dynamic", "broken", "kept"]


# Frozen weights train in test_stages.py.
@pytest.mark.parametrize("case", sampled(CASES, "hooked", "scaled"))
def test_ranks_do_what_one_process_does(pool, case):
    assert pool.run(run_on, 2, case) == [run_on(None, case)] * 2


def inferred(mesh):
    model = zcompile.offload(words(), mesh=mesh, **BUDGETS)
    with torch.inference_mode():
        found = torch.compile(model, backend="zinf")(*batch(9, 0)).item()
    zcompile.close(model)
    return found


def test_ranks_evaluate_in_inference_mode(pool):
    assert pool.run(inferred, 2) == [words()(*batch(9, 0)).item()] * 2


# --- Small budgets, and models that differ in their seeds ---


def squeezed(mesh):
    """A budget that keeps few activations, and streams every weight."""
    model = zcompile.offload(
        words(blocks=4), mesh=mesh, device="cpu", device_memory="700KiB", host_memory="8MiB"
    )
    optimizer, run = adamw(model.parameters()), torch.compile(model, backend="zinf")
    train(model, run, optimizer, mesh.get_local_rank(), mesh.size(), steps=range(2))
    held = Counter[str]()
    for entry in session_behind(model).entries():
        held[entry.kind.value] += entry.nbytes
    found = state_of(model, optimizer), zcompile.stats(model)["peak"]["together"], held
    zcompile.close(model)
    return found


@pytest.mark.slow
def test_little_memory_makes_no_other_numbers(pool):
    model = words(blocks=4)
    optimizer = adamw(model.parameters())
    train(model, model, optimizer, 0, 1, steps=range(2))
    rows = pool.run(squeezed, 2)
    assert [found for found, _, _ in rows] == [state_of(model, optimizer)] * 2
    sizes = [p.numel() * 4 for p in model.parameters()]
    small = sum(size for size in sizes if size <= 64 << 10)
    for _, peak, held in rows:
        assert peak <= 700 << 10
        assert held["parameter"] <= 1.05 * (sum(sizes) - small) / 2 + small
        assert held["optimizer state"] == 2 * held["parameter"]


def sent(mesh):
    """Bytes that a rank sends in one step."""
    model = zcompile.offload(words(), mesh=mesh, **BUDGETS)
    optimizer, run = adamw(model.parameters()), torch.compile(model, backend="zinf")
    train(model, run, optimizer, mesh.get_local_rank(), mesh.size(), steps=range(1))
    zcompile.stats(model, reset=True)
    train(model, run, optimizer, mesh.get_local_rank(), mesh.size(), steps=range(1, 2))
    found = zcompile.stats(model)["fabric"]
    zcompile.close(model)
    return found


@pytest.mark.slow  # tests/ranks/test_stages.py has the formula of both stages
def test_the_bytes_between_ranks_are_those_of_the_formula(pool):
    """Of each large weight a share goes to every other rank, in forward and in backward (a table is
    read in forward alone); of each gradient every other rank's share, and small ones whole."""
    for rank, found in enumerate(pool.run(sent, 4)):
        gathered = exchanged = 0
        for name, param in words().named_parameters():
            part = partition_of(Layout.of(param), rank, 4)
            if part is None:
                exchanged += 3 * param.numel() * 4
                continue
            gathered += 3 * part.count * 4 * (1 if name == "table.weight" else 2)
            exchanged += (part.numel - part.own_count) * 4
        assert (found["rank"], found["ranks"]) == (rank, 4)
        assert found["bytes"]["gather"] == gathered
        assert found["bytes"]["exchange"] == exchanged


def seeded(mesh, opened):
    torch.manual_seed(10 + mesh.get_local_rank())
    with warnings_of("zcompile.runtime.ranks.values") as told:
        if opened == "init":
            with zcompile.init(mesh=mesh, **BUDGETS):
                model = Words()
        else:
            model = zcompile.offload(Words(), mesh=mesh, **BUDGETS)
    found = digest(model.parameters())
    zcompile.close(model)
    return found, [text.partition(" of ")[2].partition(";")[0] for text in told]


class Filled(nn.Module):
    """Parameters that begin as `value`, which only the last keeps: others are filled, as those of
    modules are that begin as `torch.empty`."""

    def __init__(self, value):
        super().__init__()
        sizes = {"zeros": 20_000, "ones": 30, "normal": 20_000, "kept": 30}
        for name, size in sizes.items():
            self.register_parameter(name, nn.Parameter(torch.full((size,), float(value))))
        nn.init.zeros_(self.zeros)
        nn.init.ones_(self.ones)
        nn.init.normal_(self.normal)


def filled(mesh):
    torch.manual_seed(10)
    with warnings_of("zcompile.runtime.ranks.values") as told, zcompile.init(mesh=mesh, **BUDGETS):
        model = Filled(mesh.get_local_rank())
    found = digest(model.parameters())
    zcompile.close(model)
    return found, [text.partition(" of ")[2].partition(";")[0] for text in told]


@pytest.mark.parametrize("opened", sampled(["offload", "init"], "offload"))
def test_where_values_differ_those_of_rank_0_are_taken(pool, opened):
    torch.manual_seed(10)
    model = Words()
    names = [name for name, _ in model.named_parameters() if "norm" not in name]  # those are drawn
    text = ", ".join(map(repr, names[:3])) + f" and {len(names) - 3} more"
    assert pool.run(seeded, 4, opened) == [(digest(model.parameters()), [text])] * 4


def test_what_a_parameter_was_before_it_was_filled_is_not_compared(pool):
    """`torch.empty` finds other bytes on each rank."""
    torch.manual_seed(10)
    want = digest(Filled(0).parameters()), ["'kept'"]
    assert pool.run(filled, 2) == [want] * 2


# --- Beside DistributedDataParallel and FSDP2 ---


@pytest.mark.parametrize("peer", sampled(["DDP", "FSDP2"], "DDP"))
def test_two_ranks_end_with_the_bits_of(pool, peer):
    """One micro-batch of each rank: two of them are summed in the only order that there is."""
    theirs = pool.run(one_batch_each, 2, peer)
    assert pool.run(one_batch_each, 2, "") == theirs


def one_batch_each(mesh, peer):
    model, rank = words(), mesh.get_local_rank()
    if peer == "DDP":
        run = nn.parallel.DistributedDataParallel(model, process_group=mesh.get_group())
    elif peer == "FSDP2":
        for block in model.blocks:
            fully_shard(block, mesh=mesh)
        run = fully_shard(model, mesh=mesh)
    else:
        zcompile.offload(model, mesh=mesh, **BUDGETS)
        run = torch.compile(model, backend="zinf")
    optimizer = adamw(model.parameters())
    for step in range(STEPS):
        run(*batch(step, rank)).backward()
        optimizer.step()
        optimizer.zero_grad()
    found = (whole_state_of if peer == "FSDP2" else state_of)(model, optimizer)
    if not peer:
        zcompile.close(model)
    return found


# --- Meshes in another order than the world ---


def in_pairs(mesh):
    """The state after steps of two pairs, each of which is numbered backwards."""
    pairs = DeviceMesh("cpu", [[1, 0], [3, 2]], mesh_dim_names=("pairs", "dp"))
    return trained_over(pairs["dp"])


def in_another_order(mesh):
    return trained_over(DeviceMesh("cpu", [2, 0, 3, 1]))


def trained_over(mesh):
    model = zcompile.offload(words(), mesh=mesh, **BUDGETS)
    optimizer, run = adamw(model.parameters()), torch.compile(model, backend="zinf")
    train(model, run, optimizer, mesh.get_local_rank(), mesh.size(), steps=range(1))
    found = state_of(model, optimizer)
    zcompile.close(model)
    return found


@pytest.mark.parametrize("case", sampled([in_pairs, in_another_order], in_pairs))
def test_a_mesh_may_number_ranks_otherwise_than_the_world(pool, case):
    assert pool.run(case, 4) == [trained_eagerly(steps=1)] * 4


# --- Refused ---


def refused(mesh, case):
    model = words()
    try:
        globals()[case](model, mesh)
    except Unsupported as error:
        return str(error)
    return "not refused"


def in_tiles(model, mesh):
    zcompile.offload(model, mesh=mesh, tile_bytes="8KiB", stage=2, **BUDGETS)


def assigned(model, mesh):
    zcompile.offload(model, mesh=mesh, **BUDGETS)
    model.head.weight.data = torch.zeros(200, 96)


@pytest.mark.parametrize(
    ("case", "says"),
    [
        ("in_tiles", "stage=2 with tile_bytes=8192 is asked for, and several ranks"),
        ("assigned", "the .data of 'head.weight' is assigned, and several ranks"),
    ],
)
def test_what_ranks_cannot_do_together_is_refused(pool, case, says):
    for text in pool.run(refused, 2, case):
        assert says in text
