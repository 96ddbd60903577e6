"""Orders in which a machine may act, from the friendliest to the meanest.

Each chooses, whenever several events may come next, by a preference; what it dislikes happens only
when compute, or the end of the list, cannot do without.
"""

import random
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from heapq import heappop, heappush

from mutation.host import Event, Listing
from mutation.machine import Order

Preference = Callable[[Event], float | None]
"""Lower comes first; None: only when it is needed."""


def _linear(listing: Listing, prefer: Preference) -> Iterator[Event]:
    """All events, each after what must come before it."""
    left = {event: set(before) for event, before in listing.before.items()}
    followers: dict[Event, list[Event]] = {event: [] for event in left}
    for event, before in left.items():
        for earlier in before:
            followers[earlier].append(event)
    computes = deque(event for event in left if event[1] == "compute")
    liked: list[tuple[float, Event]] = []
    for event in [event for event, before in left.items() if not before]:
        _offer(liked, event, prefer)
    while left:
        while computes and computes[0] not in left:
            computes.popleft()
        goal = computes[0] if computes else max(left)
        chosen = heappop(liked)[1] if liked else _needed(left, goal)
        yield chosen
        del left[chosen]
        for follower in followers[chosen]:
            left[follower].discard(chosen)
            if not left[follower]:
                _offer(liked, follower, prefer)


def _offer(liked: list[tuple[float, Event]], event: Event, prefer: Preference) -> None:
    if (rank := prefer(event)) is not None:
        heappush(liked, (rank, event))


def _needed(left: dict[Event, set[Event]], goal: Event) -> Event:
    """An event that is ready and must come before `goal`."""
    while left[goal]:
        goal = max(left[goal])
    return goal


def _early(event: Event) -> float:
    """Transfers as soon as their edges allow, the last of the list first."""
    return 1e9 if event[1] == "compute" else -event[0]


def _late(event: Event) -> float | None:
    """Compute runs ahead; transfers start and end when they are waited for."""
    return 0 if event[1] == "compute" else None


def _long(event: Event) -> float | None:
    """Transfers start at once and take until they are waited for."""
    return {"start": -1 - event[0], "compute": 1e9}.get(event[1])


def _slow_home(event: Event) -> float | None:
    """Fetches at once, in the order of the list; what goes home takes its time."""
    return {"start": event[0], "end": event[0], "compute": 1e9}.get(event[1])


def _shuffled(seed: int, listing: Listing) -> Iterator[Event]:
    source = random.Random(seed)
    ranks = {event: source.random() for event in listing.before}
    return _linear(listing, ranks.__getitem__)


ORDERS: dict[str, Order] = {
    "late": partial(_linear, prefer=_late),
    "early": partial(_linear, prefer=_early),
    "long": partial(_linear, prefer=_long),
    "slow home": partial(_linear, prefer=_slow_home),
    **{f"shuffled {seed}": partial(_shuffled, seed) for seed in range(3)},
}
