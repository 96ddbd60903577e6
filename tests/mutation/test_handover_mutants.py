"""No start that a schedule hands to the next too early goes through unseen."""

from collections.abc import Iterator, Sequence
from itertools import product

import pytest
from mutation.host import Broken, listed, written_registers
from mutation.joined import Starts, entries_of, honest, joined
from mutation.machine import run
from mutation.orders import ORDERS
from mutation.samples import compiled, of_step
from sampled import sampled
from small_models import SMALL_MODELS, UNALIKE

from zcompile.errors import ScheduleInvalid
from zcompile.ir.handover import Handover, handover, last_writes
from zcompile.ir.schedule import Fetch, Schedule
from zcompile.ir.types import Phase
from zcompile.verify.schedule import ScheduleCall, verify_handover

Pair = tuple[Schedule, Schedule]


def planned(now: Schedule, then: Schedule) -> Handover:
    """As the runtime plans it."""
    keys = entries_of(now)
    written = last_writes(now, lambda index: keys[index])
    theirs = entries_of(then)
    brought = {
        f.ticket: written[key]
        for f in then.fetches()
        if f.cast is None and (key := theirs[f.entry]) in written
    }
    return handover(now, then, brought)


def safe(now: Schedule, then: Schedule, chosen: Handover) -> str:
    try:
        verify_handover(
            ScheduleCall(now, entries_of(now)), ScheduleCall(then, entries_of(then)), chosen
        )
    except ScheduleInvalid as error:
        return error.why
    return ""


def comes_out(now: Schedule, then: Schedule, starts: Starts) -> set[object]:
    """The results in all orders, or what breaks."""
    whole = joined(now, then, starts)
    try:
        listing = listed(whole, written_registers(whole))
    except Broken as broken:
        return {str(broken)}
    return {run(whole, listing, order) for order in ORDERS.values()}


def other_starts(now: Schedule, then: Schedule, chosen: Handover) -> Iterator[Starts]:
    """One fetch that is handed over, or one that is not, after each instruction in turn."""
    at = {f.ticket: index for index, fetches in chosen.starts.items() for f in fetches}
    for fetch, index in product(then.fetches(), range(len(now.instructions))):
        if at.get(fetch.ticket) == index or not fetch.lasting:
            continue
        starts: dict[int, list[Fetch]] = {
            k: [f for f in fetches if f.ticket != fetch.ticket]
            for k, fetches in chosen.starts.items()
        }
        starts.setdefault(index, []).append(fetch)
        yield starts


def pairs_of(name: str) -> list[Pair]:
    """What follows what in a training loop; and steps of several chunks, one after the other."""
    if name in ("sgd", "momentum", "adam"):
        made = of_step(name)
        lanes = [
            made["2 lanes, resident nothing"],
            made["3 lanes, resident nothing"],
            made["2 lanes, resident w"],
        ]
        return list(product(lanes, lanes))
    loop: Sequence[Schedule] = compiled(name)
    return [*zip(loop, (*loop[1:], loop[0]), strict=True), (loop[0], loop[0])]


def check(pair: Pair, most: int) -> tuple[int, int]:
    """How many other starts were refused, and how many accepted with reason."""
    now, then = pair
    chosen = planned(now, then)
    assert not safe(now, then, chosen)
    (expected,) = comes_out(now, then, {})
    assert comes_out(now, then, chosen.starts) == {expected}
    others = list(other_starts(now, then, chosen))
    refused = accepted = 0
    for starts in others[:: max(1, len(others) // most) | 1]:
        if safe(now, then, honest(now, starts)):
            refused += 1
            continue
        accepted += 1
        assert comes_out(now, then, starts) == {expected}, starts
    return refused, accepted


@pytest.mark.parametrize("name", sampled([*SMALL_MODELS, "sgd", "adam"], *UNALIKE, "sgd", "adam"))
def test_a_sample_of_other_starts_is_refused_or_means_the_same(name):
    for pair in pairs_of(name):
        check(pair, most=6)


@pytest.mark.slow
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("name", [*SMALL_MODELS, "sgd", "momentum", "adam"])
def test_every_other_start_is_refused_or_means_the_same(name):
    counts = [check(pair, most=10**9) for pair in pairs_of(name)]
    assert sum(refused for refused, _ in counts)


def test_what_a_step_writes_is_not_brought_before():
    """The machine shows what the verifier says: stale weights give another result."""
    step = of_step("sgd")["3 lanes, resident nothing"]
    assert step.phase is Phase.STEP
    weight = next(f for f in step.fetches() if f.name == "w")
    too_early = len(step.instructions) - 1
    while not safe(step, step, honest(step, {too_early: [weight]})):
        too_early -= 1
    assert comes_out(step, step, {too_early: [weight]}) != comes_out(step, step, {})
    assert comes_out(step, step, {too_early + 1: [weight]}) == comes_out(step, step, {})
