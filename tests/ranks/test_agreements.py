"""What the ranks compare of a call, and how often."""

from types import SimpleNamespace

import pytest
import torch
from rank_models import adamw, batch, words

import zcompile
from zcompile.errors import CallChanged, RankFailed, RanksDiffer, ZinfError
from zcompile.frontend.offload import session_behind
from zcompile.ir.partition import Partition
from zcompile.ir.rank_mesh import RankMesh
from zcompile.ir.schedule import Agree, Ticket
from zcompile.runtime.executor import _Call
from zcompile.runtime.ranks.calls import CallDigests


def entry(key, name, partition=None):
    return SimpleNamespace(key=key, name=name, partition=partition)


def a_schedule(serial=1, nbytes=8, dtype="torch.float32"):
    return SimpleNamespace(
        serial=serial,
        collectives=(("gather", 0, nbytes),),
        crossing_dtypes=(("gather", 0, dtype),),
    )


def test_a_digest_tells_calls_apart_by_what_crosses():
    digests, entries = CallDigests(), [entry(5, "w", Partition(4096, 0, 2)), entry(6, "b")]
    found = digests.of(a_schedule(), entries)
    assert digests.of(a_schedule(serial=2), entries) == found, "whichever schedule it is"
    assert digests.of(a_schedule(), [entry(7, "w"), entry(8, "c")]) == found, "on any rank"
    others = [
        digests.of(a_schedule(3, nbytes=16), entries),
        digests.of(a_schedule(4, dtype="torch.bfloat16"), entries),
        digests.of(a_schedule(), [entry(9, "another"), entry(6, "b")]),
    ]
    assert len({found, *others}) == 4


def test_a_digest_knows_of_a_new_name():
    digests, w = CallDigests(), entry(5, "w")
    before = digests.of(a_schedule(), [w])
    w.name = "renamed"
    assert digests.of(a_schedule(), [w]) != before
    w.name = "w"
    assert digests.of(a_schedule(), [w]) == before


def call_agreeing(ahead):
    begun = []
    call = SimpleNamespace(
        _fabric=SimpleNamespace(
            begin_agreement=lambda *x: begun.append(x) or SimpleNamespace(ticket="promise"),
            mesh=RankMesh(2),
        ),
        schedule=SimpleNamespace(
            name="graph0", collectives=(), narrow_gradients={}, exchanged_shares={}
        ),
        digest_of_call=lambda schedule, entries: b"this call",
        gradients=SimpleNamespace(exchanged=None),
        entries=(),
        leaves=(),
        tickets={},
        agreed_ahead=ahead,
    )
    _Call._agree(call, Agree(Ticket(7), "forward"))
    return call.tickets[7], begun


def test_a_call_is_not_agreed_on_twice():
    ticket, begun = call_agreeing(b"this call")
    assert ticket.done()
    assert not begun
    assert call_agreeing(None)[0] == "promise"
    with pytest.raises(CallChanged, match="forward of graph0 would make 0 collectives"):
        call_agreeing(b"another call")


def agreements(mesh):
    """How many there are in each step; a rank that does something else then is found out."""
    model = words(blocks=0)
    zcompile.offload(model, mesh=mesh, device="cpu", device_memory="4MiB", host_memory="64MiB")
    rank, fabric = mesh.get_local_rank(), session_behind(model).fabric
    run, optimizer = torch.compile(model, backend="zinf"), adamw(model.parameters())
    found = []
    for step in range(5):
        before = fabric._calls
        run(*batch(step, rank)).backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(fabric._calls - before)
    digests = session_behind(model).executor.call_digests
    if rank == 1:
        digests.of = lambda schedule, entries: b"something else"
    with pytest.raises(RanksDiffer):
        run(*batch(5, rank)).backward()
    return found


def test_forward_backward_and_step_agree_once_each(pool):
    rows = pool.run(agreements, 2)
    assert [found[-2:] for found in rows] == [[3, 3]] * 2


def changed_between(mesh):
    """What each rank raises of a call that becomes another one on rank 1 once all have agreed."""
    model = words(blocks=0)
    zcompile.offload(model, mesh=mesh, device="cpu", device_memory="4MiB", host_memory="64MiB")
    rank, session = mesh.get_local_rank(), session_behind(model)
    run, optimizer = torch.compile(model, backend="zinf"), adamw(model.parameters())
    for step in range(3):
        run(*batch(step, rank)).backward()
        optimizer.step()
        optimizer.zero_grad()
    digests, uses = session.executor.call_digests, []
    made = digests.of

    def of(schedule, entries):
        uses.append(made(schedule, entries))
        return uses[-1] if len(uses) == 1 else b"something else!!"

    if rank == 1:
        digests.of = of
    with pytest.raises(ZinfError) as met:
        run(*batch(3, rank)).backward()
    with pytest.raises(ZinfError):  # nothing goes on after it
        run(*batch(3, rank)).backward()
    zcompile.close(model)
    return type(met.value).__name__, str(met.value), len(uses)


def test_a_call_that_is_another_than_agreed_on_ends_all_ranks_with_that_cause(pool):
    (kind, text, _), (changed, cause, uses) = pool.run(changed_between, 2)
    assert (kind, changed, uses) == (RankFailed.__name__, CallChanged.__name__, 2)
    assert "forward of graph" in cause
    assert f"failed: CallChanged: {cause}" in text
