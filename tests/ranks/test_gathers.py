"""What a gather waits for, and how elements are divided: without any other rank."""

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from zcompile.config import Config
from zcompile.errors import ConfigInvalid
from zcompile.ir.partition import SHARE_ELEMENTS, Partition, partition_of
from zcompile.ir.schedule import EntryIndex, Gather, Slot, Ticket
from zcompile.ir.types import Layout
from zcompile.runtime.executor import _Call
from zcompile.runtime.gradients.exchanged import Packed


def test_a_gather_waits_for_what_still_reads_bytes_that_it_fills():
    """A store of the optimizer's step may still read where the shares of others will lie."""
    arena = torch.arange(4096, dtype=torch.uint8)
    asked, given_over = [], []

    def readers(target):
        asked.append((target.storage_offset(), target.numel()))
        return ["a store of an earlier call"] if target.numel() else []

    call = SimpleNamespace(
        begun="begun",
        store=SimpleNamespace(
            arena=SimpleNamespace(slot=lambda address, nbytes: arena[address : address + nbytes]),
            readers=readers,
        ),
        entries=[SimpleNamespace(name="w")],
        tickets={},
        _after=lambda tickets: [f"ticket {t}" for t in tickets],
        _fabric=SimpleNamespace(
            gather=lambda *args: given_over.append(args) or "promise",
            share_of=lambda whole, tile: (0, whole.numel() // 2),
        ),
    )
    gather = Gather(EntryIndex(0), 2048, Slot(1024, 2048), Ticket(7), (Ticket(3),), "w")
    _Call._gather(call, gather)
    ((whole, name, after, tile),) = given_over
    assert tile is None
    assert (whole.numel(), name) == (2048, "w")
    assert asked == [(1024, 0), (2048, 1024)], "its own share may still be stored from there"
    assert after == ["begun", "ticket 3", "a store of an earlier call"]
    assert call.tickets == {7: "promise"}


def test_small_gradients_cross_behind_what_copies_them_to_the_host():
    """The marks of regions that made them are older: compute copies them since."""
    asked = []

    def exchange_all(flats, after):
        asked.append((flats, after))
        return [SimpleNamespace(ticket="promise") for _ in flats]

    taken = []
    call = SimpleNamespace(
        bucket=[Packed("leaf", torch.ones(3), ("a read of a sum",))],
        store=SimpleNamespace(device=SimpleNamespace(mark=lambda: "now")),
        tickets={},
        gradients=SimpleNamespace(exchanged=SimpleNamespace(take=lambda *x: taken.append(x))),
        _after=lambda tickets: [f"ticket {t}" for t in tickets],
        _fabric=SimpleNamespace(exchange_all=exchange_all),
    )
    _Call._exchange_bucket(call, SimpleNamespace(after=(Ticket(3),), ticket=Ticket(7)))
    assert [after for _, after in asked] == [["ticket 3", "now", "a read of a sum"]]
    assert call.tickets == {7: "promise"}
    assert len(taken) == 1


@given(st.integers(1, 200_000), st.integers(1, 9))
def test_every_element_is_held_once(numel, ranks):
    parts = [Partition(numel, rank, ranks) for rank in range(ranks)]
    assert {part.count for part in parts} == {parts[0].count}
    assert parts[0].count % SHARE_ELEMENTS == 0
    held = [part.own for part in parts]
    assert [first for first, _ in held] == [0, *(last for _, last in held[:-1])]
    assert held[-1][1] == numel
    assert sum(part.own_count for part in parts) == numel


@given(st.integers(1, 9000), st.integers(1, 4))
def test_shares_together_are_the_tensor_and_padding(numel, ranks):
    flat = torch.arange(1, numel + 1)
    shares = torch.cat([Partition(numel, rank, ranks).cut(flat) for rank in range(ranks)])
    assert torch.equal(shares[:numel], flat)
    assert not shares[numel:].any()


@pytest.mark.parametrize(
    ("tensor", "divided"),
    [
        (torch.empty(16384), False),  # 64 KiB
        (torch.empty(16385), True),
        (torch.empty(130, 130).t(), True),
        (torch.empty(40000)[::2], False),  # has gaps
    ],
)
def test_what_is_small_or_has_gaps_is_whole_on_every_rank(tensor, divided):
    layout = Layout.of(tensor)
    assert (partition_of(layout, 0, 2) is not None) == divided


@pytest.mark.parametrize(
    ("given_", "seconds"), [(5, 5.0), ("60s", 60.0), ("2min", 120.0), ("200ms", 0.2)]
)
def test_how_long_ranks_wait_is_written_as_one_says_it(given_, seconds):
    assert Config(device="cpu", rank_timeout=given_).rank_timeout == seconds


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"rank_timeout": "soon"}, r"rank_timeout='soon' cannot be used: 'soon' is not a time"),
        ({"rank_timeout": 0}, r"rank_timeout=0 cannot be used: 0 is not a time that one can wait"),
        ({"rank_timeout": True}, r"rank_timeout=True cannot be used: True is not a time"),
        ({"reduction": "fast"}, r"reduction='fast' is not there; .* no more bytes"),
        ({"mesh": "world"}, r"mesh='world' cannot be used: give a DeviceMesh"),
        ({"stage": 0}, r"stage=0 is not one of auto, 2, 3"),
        ({"stage": True}, r"stage=True is not one of auto, 2, 3"),
        ({"stage": "2"}, r"stage='2' is not one of auto, 2, 3"),
        ({"stage": 1}, r"stage=1 is not there: .* rounds otherwise than reduction='ordered' does"),
        ({"stage": 2, "mesh": False}, r"stage=2 is of ranks that train one model, and mesh=False"),
        ({"stage": 2, "residency": False}, r"needs steps that are planned, and with residency=Fal"),
    ],
)
def test_what_cannot_be_asked_of_ranks_says_why(fields, says):
    with pytest.raises(ConfigInvalid, match=says):
        Config(device="cpu", **fields)
