"""Finds out which ranks share a card, and divides its memory between them.

`device="cuda"`, and no device at all, is the current device of torch: with a card for each rank,
scripts that torchrun starts call `torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))`. Ranks tell
each other which cards they are on and how much is free there, so that all take the same budget,
whatever each has measured, and none takes what another counts on.
"""

import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from zcompile.config import Config
from zcompile.errors import ConfigInvalid
from zcompile.ir.units import show_size
from zcompile.runtime.open import default_budgets, settled
from zcompile.runtime.ranks.fabric import DIGEST_BYTES, Fabric, digest_of

log = logging.getLogger(__name__)

CHOOSE_A_CARD = "call torch.cuda.set_device(int(os.environ['LOCAL_RANK'])) before zcompile.offload"


@dataclass(frozen=True)
class Card:
    """The card of one rank.

    name   of it, the same for every rank that is on it
    host   that it is in, as the rank calls it
    free   bytes there, once all ranks have come to their card
    asked  bytes of `device_memory`; 0: none was given
    spare  cards that this rank sees beside its own
    index  of the card was given by the user
    """

    name: str
    host: str
    free: int
    asked: int
    spare: int
    index: bool


def settled_on_cards(config: Config, fabric: Fabric) -> tuple[Config, int]:
    """The config with the card of this rank, and the budget of the device where none is given: what
    the rank with the least has of its card.

    raises  ConfigInvalid, where ranks share a card that have not the same budget to share, or that
            could have one each; RanksDiffer, RankFailed
    """
    device = torch.device(config.device or "cuda")
    index = torch.cuda.current_device() if device.index is None else device.index
    here = torch.device("cuda", index)
    config = settled(replace(config, device=str(here)))
    fabric.agree("choose cards")  # which each process has begun to use: what is free is free now
    own = Card(
        _name_of(here),
        fabric.hosts[fabric.rank],
        torch.cuda.mem_get_info(here)[0],
        config.budgets.get("device", 0),
        torch.cuda.device_count() - 1,
        device.index is not None,
    )
    cards = told_cards(fabric, own)
    check_cards(cards, fabric.rank)
    return config, budget_of(cards)


def _name_of(device: torch.device) -> str:
    """What a card is called by every process that sees it."""
    found: Any = torch.cuda.get_device_properties(device)
    return f"{found.name} {found.uuid}"


def told_cards(fabric: Fabric, own: Card) -> list[Card]:
    """The cards of all ranks. raises  RanksDiffer, RankFailed"""
    numbers = torch.tensor([own.free, own.asked, own.spare, own.index], device="cpu")
    names = fabric.compare("tell which cards", _key(own.name))
    rows = fabric.rows(numbers).tolist()
    return [
        Card(name.hex(), host, free, asked, spare, bool(index))
        for name, host, (free, asked, spare, index) in zip(names, fabric.hosts, rows, strict=True)
    ]


def _key(name: str) -> bytes:
    return digest_of(name)[:DIGEST_BYTES]


def sharing(cards: Sequence[Card], rank: int) -> list[int]:
    """The ranks that are on the card of one of them."""
    return [other for other, card in enumerate(cards) if card.name == cards[rank].name]


def budget_of(cards: Sequence[Card]) -> int:
    """What every rank takes of its card where no budget is given: the same for all, so that they
    find the same graphs to fit."""
    parts = [
        default_budgets("cuda", card.free)["device"] // len(sharing(cards, rank))
        for rank, card in enumerate(cards)
    ]
    return min(parts)


def check_cards(cards: Sequence[Card], rank: int) -> None:
    """Check what the ranks have chosen, all by the same facts, so that it raises on all or none;
    warn of a card that several share.

    rank    this one
    raises  ConfigInvalid
    """
    for first, card in enumerate(cards):
        ranks = sharing(cards, first)
        if ranks[0] != first or len(ranks) == 1:
            continue
        who = f"ranks {', '.join(map(str, ranks))}"
        taken = len({other.name for other in cards if other.host == card.host})
        if all(cards[r].spare >= taken and not cards[r].index for r in ranks):
            raise ConfigInvalid(
                "device",
                "cuda",
                f"is the same card for {who}, and there are others that no rank is on: the current "
                f"device of each process is taken; {CHOOSE_A_CARD}, or give the card with its "
                "index, as device='cuda:0', to have them share it",
            )
        free, asked = min(cards[r].free for r in ranks), sum(cards[r].asked for r in ranks)
        if asked > free:
            raise ConfigInvalid(
                "device_memory",
                show_size(card.asked),
                f"is asked for by each of {who}, which share a card with {show_size(free)} free; "
                f"give at most {show_size(free // len(ranks))}, or each rank a card of its own "
                f"({CHOOSE_A_CARD})",
            )
        if rank == ranks[0]:
            log.warning(
                "%s share one card, which computes for one after the other; with a card for each "
                "rank, %s (LOCAL_RANK is %s here)",
                who,
                CHOOSE_A_CARD,
                os.environ.get("LOCAL_RANK", "not set"),
            )
