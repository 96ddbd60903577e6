"""Rank 0 reads alone what several ranks hold shares of, while the others send it their shares."""

import io
import os
import signal
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from rank_models import Words, adamw, batch, digest, state_of, train
from rank_models import words as words_of
from sampled import sampled_rows
from torch import nn

import zcompile
from zcompile.errors import (
    ConfigInvalid,
    RankFailed,
    RankZeroFailed,
    Unsupported,
    ValueUnset,
    ZinfError,
)

BUDGETS = {"device": "cpu", "device_memory": "4MiB", "host_memory": "64MiB"}
STEPS = range(3)
"""The last is planned."""


def words() -> Words:
    return words_of(blocks=0)


def offloaded(mesh, **fields):
    model = zcompile.offload(words(), mesh=mesh, **BUDGETS, **fields)
    return model, adamw(model.parameters()), torch.compile(model, backend="zinf")


def go_on(mesh, made, steps=STEPS):
    model, optimizer, run = made
    train(model, run, optimizer, mesh.get_local_rank(), mesh.size(), steps=steps)
    return state_of(model, optimizer)


def tensors_of(model, optimizer):
    states = [value for state in optimizer.state.values() for value in state.values()]
    return [*model.parameters(), *states]


def saved_within(made):
    """Save as a script does that knows of one process: whether this is rank 0, what is saved, and
    the bytes that ranks brought for it."""
    model, optimizer, _ = made
    memory = io.BytesIO()
    moved = zcompile.stats(model)["fabric"]["bytes"]
    with zcompile.rank_zero_reads(model, optimizer) as is_rank_zero:
        if is_rank_zero:
            torch.save([model.state_dict(), optimizer.state_dict()], memory)
            halves = {k: v.to(torch.float16) for k, v in model.state_dict().items()}
            assert all(type(half) is torch.Tensor for half in halves.values())
            assert (model.norm.bias == model.norm.bias.clone()).all()
            assert torch._foreach_add([model.norm.bias], 0.0)[0].equal(model.norm.bias)
            weight = next(model.parameters())
            assert torch.equal(weight.clone(), torch.from_numpy(weight.numpy(force=True).copy()))
    brought = zcompile.stats(model)["fabric"]["bytes"]["gather"] - moved["gather"]
    return is_rank_zero, memory.getvalue(), brought


def failing_within(made, rank, who):
    """One rank raises within: what this one is told."""
    weight = next(made[0].parameters())
    try:
        with zcompile.rank_zero_reads(made[0]) as is_rank_zero:
            if rank == who:
                raise OSError("no space left")
            if is_rank_zero:
                assert weight.detach().cpu().any()
    except (OSError, RankZeroFailed) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def refused_within(made, rank):
    """What this rank is told of what it may not do within."""
    model, optimizer, run = made
    run(*batch(3, rank)).backward()
    weight, told = next(model.parameters()), {}

    def attempt(name, act):
        try:
            act()
        except Unsupported as error:
            told[name] = str(error)

    with zcompile.rank_zero_reads(model):
        attempt("read", lambda: weight.detach().cpu())
        attempt("read a gradient", lambda: weight.grad.cpu())
        attempt("read a state", lambda: optimizer.state[weight]["exp_avg"].numpy())
        attempt("write", lambda: weight.detach().zero_())
        attempt("call", lambda: run(*batch(3, rank)))
        attempt("step", optimizer.step)
        attempt("measure", lambda: nn.utils.get_total_norm([p.grad for p in model.parameters()]))
        attempt("save", lambda: zcompile.save("nowhere", model))
        attempt("close", lambda: zcompile.close(model))
        attempt("enter again", lambda: zcompile.rank_zero_reads(model).__enter__())
    optimizer.zero_grad()
    return told


@dataclass(frozen=True)
class Within:
    """What one rank met within, and what it trained to.

    refused   each attempt -> what it was told
    failed    what it was told where rank 0 failed, and where rank 1 did
    saved     as `saved_within` has it
    expected  its state before all that, and behind it
    found     its state a step later
    """

    refused: dict[str, str]
    failed: list[str]
    saved: tuple[bool, bytes, int]
    expected: list[object]
    found: object


def all_within(mesh, directory, fields):
    made = offloaded(mesh, disk=directory, **fields)
    rank, expected = mesh.get_local_rank(), [go_on(mesh, made)]
    refused = refused_within(made, rank)
    failed = [failing_within(made, rank, who) for who in (0, 1)]
    saved = saved_within(made)
    expected.append(state_of(*made[:2]))
    found = go_on(mesh, made, range(3, 4))
    zcompile.close(made[0])
    return Within(refused, failed, saved, expected, found)


def never_saved(mesh):
    made = offloaded(mesh)
    go_on(mesh, made)
    found = go_on(mesh, made, range(3, 4))
    zcompile.close(made[0])
    return found


@pytest.fixture(scope="module")
def undisturbed(pool):
    """What so many ranks end with of which none reads alone; once for all tests."""
    return cache(lambda ranks: pool.run(never_saved, ranks))


@pytest.fixture(scope="module")
def within(pool, tmp_path_factory):
    """Of each rank what it met; once for all tests that ask for as many with these fields."""

    @cache
    def rows(ranks, **fields):
        return pool.run(all_within, ranks, str(tmp_path_factory.mktemp("disk")), fields)

    return rows


in_each_division = pytest.mark.parametrize(
    ("ranks", "fields"),
    sampled_rows(
        [(2, {}), (2, {"stage": 2}), (2, {"partition": "owner"}), (4, {})],
        (2, {}),
        (2, {"partition": "owner"}),
    ),
)
"""Of weights and states among ranks: what these are asked for, and how many."""


@in_each_division
def test_rank_zero_saves_as_a_process_alone_does(within, ranks, fields):
    rows = within(ranks, **fields)
    assert [row.saved[0] for row in rows] == [True] + [False] * (ranks - 1)
    expected = rows[0].expected[0]
    weights, states = torch.load(io.BytesIO(rows[0].saved[1]))
    plain = words()
    plain.load_state_dict(weights)
    again = adamw(plain.parameters())
    again.load_state_dict(states)
    assert state_of(plain, again) == expected
    # Whoever is not rank 0 has sent its shares, and nothing else; where one owns, it may have none.
    assert sum(row.saved[2] for row in rows[1:]) > 0


@in_each_division
def test_training_goes_on_behind_it_as_if_nothing_had_happened(within, undisturbed, ranks, fields):
    rows = within(ranks, **fields)
    assert all(before == behind for before, behind in (row.expected for row in rows))
    assert [row.found for row in rows] == undisturbed(ranks)


@pytest.mark.parametrize("who", [0, 1])
def test_what_fails_within_is_told(within, who):
    told = [row.failed[who] for row in within(2)]
    assert told[who] == "OSError: no space left"
    if who == 0:
        assert told[1].startswith("RankZeroFailed: rank 0 on ")
        assert "failed while it alone read: OSError: no space left. No value has" in told[1]
    else:
        assert told[0] == ""


def test_whatever_all_ranks_do_is_refused_within(within):
    first, other = (row.refused for row in within(2))
    assert "read" not in first
    assert other["read"].startswith(
        "rank 1 reads 'table.weight' within zcompile.rank_zero_reads, where rank 0 alone reads"
    )
    for name in ("read a gradient", "read a state", "measure"):
        assert "nothing that zcompile.rank_zero_reads was given" in first[name]
    for told in (first, other):
        for name in ("write", "call", "step", "save", "close", "enter again"):
            assert "within zcompile.rank_zero_reads" in told[name], name


def test_one_process_reads_as_ever(tmp_path):
    plain, model = words(), zcompile.offload(words(), **BUDGETS)
    for one in (plain, model):
        with zcompile.rank_zero_reads(one, adamw(one.parameters())) as is_rank_zero:
            assert is_rank_zero
    assert digest(model.parameters()) == digest(plain.parameters())
    with (
        pytest.raises(ConfigInvalid, match="neither a module nor an optimizer; give it those"),
        zcompile.rank_zero_reads(model.state_dict()),
    ):
        pass


def two_models_read(mesh, directory):
    """Of two sessions, by several threads, and a state in a list."""
    models = [zcompile.offload(words(), mesh=mesh, **BUDGETS) for _ in range(2)]
    optimizer = adamw(models[0].parameters())
    run = torch.compile(models[0], backend="zinf")
    train(models[0], run, optimizer, mesh.get_local_rank(), mesh.size(), steps=range(1))
    table = models[0].table.weight
    optimizer.state[table]["history"] = [{"first": optimizer.state[table]["exp_avg"].clone()}]
    expected = [digest(model.parameters()) for model in models]
    found: dict[str, torch.Tensor] = {}
    with zcompile.rank_zero_reads(*models, optimizer) as is_rank_zero:
        if is_rank_zero:
            rows = [*models[0].named_parameters(), *models[1].named_parameters(prefix="second")]
            with ThreadPoolExecutor(3) as threads:
                read = list(threads.map(lambda row: row[1].detach().numpy().copy(), rows))
            for (name, _), values in zip(rows, read, strict=True):
                found[name] = torch.from_numpy(values)
            torch.save(optimizer.state_dict(), Path(directory, "optimizer.pt"))
    halves = [{}, {}]
    for name, values in found.items():
        halves[name.startswith("second")][name] = values
    for model in models:
        zcompile.close(model)
    return expected, [digest(half.values()) for half in halves]


def test_models_of_several_sessions_are_read_by_several_threads(pool, tmp_path):
    rows = pool.run(two_models_read, 2, str(tmp_path))
    assert rows[0][0] == rows[0][1] == rows[1][0]
    saved = torch.load(tmp_path / "optimizer.pt")["state"][0]
    assert torch.equal(saved["history"][0]["first"], saved["exp_avg"])


def unset_read(mesh):
    """Of a model on `meta`, whose values come later."""
    with torch.device("meta"):
        blank = words()
    model = zcompile.offload(blank, mesh=mesh, **BUDGETS)
    told = ""
    with zcompile.rank_zero_reads(model) as is_rank_zero:
        if is_rank_zero:
            try:
                model.table.weight.detach().cpu()
            except ValueUnset as error:
                told = str(error)
    model.load_state_dict(words().state_dict())
    found = digest(model.parameters())
    zcompile.close(model)
    return told, found


def test_what_has_no_value_yet_ends_nothing(pool):
    rows = pool.run(unset_read, 2)
    assert "'table.weight'" in rows[0][0]
    assert [row[1] for row in rows] == [digest(words().parameters())] * 2


def interrupted_while_serving(mesh):
    """Ctrl-C on rank 1, while it waits for what rank 0 reads: what each is told."""
    model = zcompile.offload(words(), mesh=mesh, **BUDGETS)
    processes = [0, 0]
    dist.all_gather_object(processes, os.getpid(), group=mesh.get_group())
    told = None
    try:
        with zcompile.rank_zero_reads(model) as is_rank_zero:
            if is_rank_zero:
                model.table.weight.detach().cpu()  # so the other serves
                os.kill(processes[1], signal.SIGINT)
                while True:  # until the other is heard to have failed
                    model.table.weight.detach().cpu()
    except (ZinfError, KeyboardInterrupt) as error:
        told = type(error), str(error)
    zcompile.close(model)
    return told


def test_who_is_interrupted_while_it_serves_ends_the_ranks(pool):
    rows = pool.run(interrupted_while_serving, 2)
    assert rows[1][0] is KeyboardInterrupt
    assert rows[0][0] is RankFailed
    assert "rank 1 on" in rows[0][1]
    assert "KeyboardInterrupt" in rows[0][1]
