"""Ranks train on cards whose memory is their own, simulated ones: each in a process of its own, by
the device's own code over simulated streams, with messages that gloo really carries."""

import contextlib
from contextlib import nullcontext
from functools import partial

import pytest
import torch
from rank_models import batch, optimizer_named, state_of, train, trained_eagerly, words
from sampled import sampled
from streams.knowledge import simulated
from streams.mutants import OF_RANKS

import zcompile
from zcompile.errors import RankFailed
from zcompile.frontend.offload import session_behind
from zcompile.runtime.ranks import fabric, transport

LITTLE = {"device": "cpu", "device_memory": "1MiB", "host_memory": "64MiB", "updates": "device"}
MODES = {
    "streaming": {"residency": False},
    "small blocks": {"residency": False},
    "owner": {"residency": False, "partition": "owner"},
    "tiles": {"residency": False, "tile_bytes": "40KiB"},
    "disk": {"residency": False, "host_memory": "1MiB", "disk": ...},
    "planned": {"device_memory": "2MiB"},
    "stage 2": {"device_memory": "8MiB", "stage": 2},
    "no_sync": {"residency": False},
    "no_sync, disk": {"residency": False, "host_memory": "1MiB", "disk": ...},
    "no_sync, planned": {"device_memory": "3MiB"},
}
"""What is asked for besides `LITTLE`."""


@contextlib.contextmanager
def offloaded(mesh, mode, directory=None):
    """A model, its optimizer, and what does some steps."""
    torch._dynamo.reset()
    fields = {**LITTLE, **MODES[mode]}
    if "disk" in fields:
        fields["disk"] = directory
    model = words()
    zcompile.offload(model, mesh=mesh, **fields)
    made = optimizer_named("adamw")(model.parameters())
    run = torch.compile(model, backend="zinf")

    def steps(numbers):
        once = partial(zcompile.no_sync, model) if mode.startswith("no_sync") else nullcontext
        train(model, run, made, mesh.get_local_rank(), mesh.size(), 0.0, numbers, once)

    try:
        yield model, made, steps
    finally:
        zcompile.close(model)


def lying_on_host(simulation, made_by):
    return lambda *given: simulation.lies_on_host(made_by(*given))


@contextlib.contextmanager
def on_a_card(mesh, mode, directory=None):
    """As `offloaded`, on a simulated card; that comes first."""
    with contextlib.ExitStack() as inside:
        simulation = inside.enter_context(simulated())
        simulation.records = False
        patch = inside.enter_context(pytest.MonkeyPatch.context())
        # Who lets go of the host's memory last need not know that copies of it have ended.
        for name in ("host_memory", "host_rows"):
            patch.setattr(fabric, name, lying_on_host(simulation, getattr(fabric, name)))
        if mode == "small blocks":
            patch.setattr(transport, "PINNED_BYTES", 0)
            patch.setattr(transport, "LEAST_BLOCK_BYTES", 4096)
        yield simulation, *inside.enter_context(offloaded(mesh, mode, directory))


def trained_without_a_card(mesh, mode, directory=None):
    """The state after three steps on the emulated device, whose memory is the host's."""
    with offloaded(mesh, mode, directory) as (model, made, steps):
        steps(range(3))
        return state_of(model, made)


def rest(simulation, model):
    session = session_behind(model)
    session.executor.wait_for_in_flight()
    session.fabric.finish()
    session.drain()
    simulation.compute.synchronize()


def trained(mesh, mode, directory=None):
    """The state after three steps; of the last one the pairs of accesses that nothing orders, and
    how many accesses there were."""
    with on_a_card(mesh, mode, directory) as (simulation, model, made, steps):
        steps(range(2))
        rest(simulation, model)
        simulation.memory.forget()
        simulation.records = True
        steps(range(2, 3))
        rest(simulation, model)
        simulation.records = False
        pairs, accesses = dict(simulation.memory.pairs), simulation.memory.accesses
        return state_of(model, made), pairs, accesses


@pytest.mark.parametrize("mode", sampled(MODES, "streaming"))
def test_ranks_on_cards_end_with_the_bits_of_one_process(pool, mode, tmp_path):
    # Products in tiles round otherwise than whole ones, and so do sums of each rank's own.
    if mode == "tiles" or mode.startswith("no_sync"):
        expected = pool.run(trained_without_a_card, 2, mode, str(tmp_path / "emulated"))[0]
    else:
        expected = trained_eagerly("adamw")
    for state, pairs, accesses in pool.run(trained, 2, mode, str(tmp_path)):
        assert state == expected
        assert pairs == {}
        assert accesses > 100


def outside_of_graphs(mesh, simulates):
    """The state after what no schedule has: a backward that is not compiled, clipping, a gradient
    that a user sets, and ops on whole tensors, one of which draws."""
    with contextlib.ExitStack() as inside:
        if simulates:
            _, model, made, _ = inside.enter_context(on_a_card(mesh, "streaming"))
        else:
            model, made, _ = inside.enter_context(offloaded(mesh, "streaming"))
        model(*batch(0, mesh.get_local_rank())).backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        weight = model.head.weight
        weight.grad = weight.grad.on_host() * 0.5
        made.step()
        with torch.no_grad():
            torch.manual_seed(5)
            torch.nn.init.orthogonal_(model.blocks[0].up.weight)
            model.blocks[0].down.weight.copy_(model.blocks[0].up.weight.on_host().flip(0).t())
            model.table.weight.normal_()
        return norm.item(), state_of(model, made)


def test_what_is_done_outside_of_graphs_has_the_same_values_on_cards(pool):
    assert pool.run(outside_of_graphs, 2, True) == pool.run(outside_of_graphs, 2, False)


def refuse(nbytes, name):
    raise ValueError(f"no room for {name}")


def without_room(mesh):
    """The error of an op for whose whole tensor one rank has no room, after all have agreed on it:
    what rests on the device may differ from rank to rank."""
    with on_a_card(mesh, "streaming") as (_, model, _, _):
        if mesh.get_local_rank() == 1:
            session_behind(model).arena.take = refuse
        try:
            torch.cumsum(model.blocks[0].up.weight.detach(), 0)
        except (RankFailed, ValueError) as error:
            return type(error).__name__, str(error)
    return "nothing", ""


def test_a_rank_without_room_for_a_whole_tensor_ends_the_others_with_its_cause(pool):
    (kind, told), (failed, text) = pool.run(without_room, 2)
    assert (failed, text) == ("ValueError", "no room for blocks.0.up.weight")
    assert kind == RankFailed.__name__
    assert "failed: ValueError: no room for blocks.0.up.weight" in told


def pairs_of_mutants(mesh, mode, names):
    """How many pairs there are in a step of each mutant."""
    found = {}
    with on_a_card(mesh, mode) as (simulation, model, _, steps):
        steps(range(2))
        rest(simulation, model)
        for number, name in enumerate(names, 2):
            simulation.memory.forget()
            simulation.records = True
            with contextlib.ExitStack() as broken:
                for edit in OF_RANKS[name][1]:
                    broken.enter_context(edit.made())
                steps(range(number, number + 1))
                rest(simulation, model)
            found[name] = sum(simulation.memory.pairs.values())
            rest(simulation, model)
    return found


@pytest.mark.parametrize("mode", ["streaming", "small blocks"])
@pytest.mark.slow
def test_without_one_of_its_orders_a_lane_is_found_out(pool, mode):
    names = [name for name, (where, _) in OF_RANKS.items() if where == mode]
    for found in pool.run(pairs_of_mutants, 2, mode, names):
        assert [name for name in names if not found[name]] == []


def test_each_mutant_names_a_mode():
    assert {mode for mode, _ in OF_RANKS.values()} <= set(MODES)
