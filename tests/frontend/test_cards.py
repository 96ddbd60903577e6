"""Which ranks share a card, what each may take of it, and what is refused: by what they tell."""

import logging
from types import SimpleNamespace

import pytest
import torch

from zcompile.checkpoint.state import Fact, read_back
from zcompile.errors import ConfigInvalid, Unsupported
from zcompile.frontend import ranks
from zcompile.frontend.cards import Card, budget_of, check_cards, sharing
from zcompile.ir.units import GiB


def card(name, free=80, asked=0, spare=0, index=False, host="here"):
    return Card(name, host, free * GiB, asked * GiB, spare, index)


def test_all_ranks_take_what_the_one_with_the_least_has():
    assert budget_of([card("a", 80), card("b", 70)]) == 70 * GiB * 8 // 10
    assert budget_of([card("a", 80), card("a", 80), card("b", 70)]) == 80 * GiB * 8 // 10 // 2


def test_ranks_that_share_a_card_are_known():
    cards = [card("a"), card("b"), card("a")]
    assert [sharing(cards, rank) for rank in range(3)] == [[0, 2], [1], [0, 2]]


def test_ranks_on_one_card_that_could_have_one_each_are_refused():
    with pytest.raises(ConfigInvalid, match=r"same card for ranks 0, 1, .*set_device.*LOCAL_RANK"):
        check_cards([card("a", spare=1), card("a", spare=1)], 0)


def test_ranks_may_share_cards_where_none_is_left_over():
    check_cards([card(name, spare=1) for name in "abab"], 0)
    elsewhere = card("c", spare=2, host="there")
    with pytest.raises(ConfigInvalid, match=r"same card for ranks 0, 2, .*that no rank is on"):
        check_cards([*(card(name, spare=2) for name in "aba"), elsewhere], 0)


def test_budgets_on_one_card_must_fit_together():
    with pytest.raises(ConfigInvalid, match=r"of ranks 0, 1, .*80.0 GiB free; .*at most 40.0 GiB"):
        check_cards([card("a", asked=50), card("a", asked=50)], 1)
    check_cards([card("a", asked=50), card("b", asked=50)], 0)


@pytest.mark.parametrize("asked_for", [{}, {"spare": 3, "index": True}])
def test_ranks_that_share_a_card_are_warned_once(caplog, asked_for):
    cards = [card("a", asked=40, **asked_for), card("a", asked=40, **asked_for)]
    for rank in range(2):
        with caplog.at_level(logging.WARNING):
            check_cards(cards, rank)
    (said,) = caplog.messages
    assert said.startswith("ranks 0, 1 share one card")


def test_ranks_with_a_card_each_hear_nothing(caplog):
    check_cards([card("a", spare=1), card("b", spare=1)], 0)
    assert not caplog.messages


def test_a_part_of_the_world_needs_a_group_that_carries_what_lies_on_the_host(monkeypatch):
    mesh = SimpleNamespace(get_group=lambda: "its group")
    monkeypatch.setattr(ranks.dist, "get_backend_config", lambda group: "cpu:gloo,cuda:nccl")
    assert ranks._group_of(mesh) == "its group"
    monkeypatch.setattr(ranks.dist, "get_backend_config", lambda group: "cuda:nccl")
    with pytest.raises(Unsupported, match=r"has none .cuda:nccl.; call .*'cpu:gloo,cuda:nccl'"):
        ranks._group_of(mesh)


def test_what_lay_on_the_card_of_rank_0_comes_back_on_that_of_this_rank():
    source = SimpleNamespace(fill=lambda name, target: None)
    facts = {"x": Fact(torch.float32, (3,))}
    found = [read_back(source, facts, "meta", "x", on).device.type for on in ("cuda:0", "cpu")]
    assert found == ["meta", "cpu"]
