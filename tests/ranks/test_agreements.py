"""What the ranks compare of a call, and how often."""

from types import SimpleNamespace

import pytest
import torch
from rank_models import adamw, batch, words

import zcompile
from zcompile.errors import RanksDiffer
from zcompile.frontend.offload import session_behind
from zcompile.ir.partition import Partition
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
            begin_agreement=lambda *x: begun.append(x) or SimpleNamespace(ticket="promise")
        ),
        schedule=SimpleNamespace(name="graph0", collectives=(), narrow_gradients={}),
        call_digests=SimpleNamespace(of=lambda schedule, entries: b"this call"),
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
    with pytest.raises(AssertionError, match="a plan changes nothing that crosses"):
        call_agreeing(b"another call")


def agreements(mesh):
    """How many there are in each step; a rank that does something else then is found out."""
    model = words()
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
