"""A model machine that runs a schedule in any order its edges permit, and says what comes out.

No threads and no device: an array of bytes is the arena, others are the entries at home. Regions
are stand-ins that mix all they read into all they make, so a single wrong byte shows in the result.
A fetch spoils its slot when it starts, and has read half of its source by then; a store has read
half of its slot; so every moment of a transfer counts. A gather spoils what the other ranks bring,
who all go by the schedule that nothing was changed in, and gives them what this rank has.
"""

import functools
import hashlib
from collections.abc import Callable, Hashable, Iterator

import numpy as np
from mutation.host import Event, Listing, Place, extent_of, home_of

from zcompile.ir.schedule import Borrow, Fetch, Gather, Left, Offload, Reduce, Run, Schedule, Store

Bytes = np.ndarray
Order = Callable[[Listing], Iterator[Event]]


def run(schedule: Schedule, listing: Listing, order: Order) -> bytes:
    """A digest of all that comes out: results, gradients, entries at home."""
    memory = _Memory(schedule, listing)
    for event in order(listing):
        memory.act(*event)
    return memory.result()


class _Memory:
    def __init__(self, schedule: Schedule, listing: Listing) -> None:
        self.rows = schedule.instructions
        self.listing = listing
        self.arena = _noise("arena", schedule.arena_bytes)
        self.homes: dict[Hashable, Bytes] = {}
        for x in self.rows:
            if isinstance(x, Fetch | Store | Borrow):
                key, end = home_of(x), extent_of(x)[1]
                if key not in self.homes or len(self.homes[key]) < end:
                    self.homes[key] = _noise(f"home {key}", end)
        self.made: dict[tuple[int, int], Bytes] = {}
        self.carried: dict[int, Bytes] = {}
        self.gradients: dict[int, Bytes] = {}
        self.away: dict[int, Bytes] = {}
        self.given: dict[int, Bytes] = {}
        """What the other ranks get of this one."""

    def act(self, i: int, what: str) -> None:
        x = self.rows[i]
        match x, what:
            case Run(), _:
                self._compute(i, x)
            case Fetch(), "start":
                self.carried[i] = self._home(x).copy()
                self._slot(x)[:] = 0xA5
            case Fetch(), "end":
                half = x.nbytes // 2
                self.carried[i][half:] = self._home(x)[half:]
                self._slot(x)[:] = self.carried[i]
            case Gather(), "start":
                first, last = self.listing.shares[i]
                whole = self._slot(x)
                self.carried[i] = whole[first:last].copy()
                whole[:first] = whole[last:] = 0xA5
            case Gather(), "end":
                first, last = self.listing.shares[i]
                whole, half = self._slot(x), (last - first) // 2
                self.given[i] = np.concatenate([self.carried[i][:half], whole[first:last][half:]])
                others = _noise(f"gather {[*self.listing.shares].index(i)}", x.nbytes)
                whole[:first], whole[last:] = others[:first], others[last:]
            case Store(), "start":
                self.carried[i] = self._slot(x).copy()
            case Store(), "end":
                half = x.nbytes // 2
                self.carried[i][half:] = self._slot(x)[half:]
            case Store(), "home":
                self._home(x)[:] = self.carried[i]
            case Left(), _:
                self._place(self.listing.operands[i][0])[:] = 0xA5  # others take the memory
            case Reduce() | Offload(), "start":
                self.carried[i] = self._place(self.listing.operands[i][0]).copy()
            case Reduce() | Offload(), "end":
                value = self._place(self.listing.operands[i][0])
                half = len(value) // 2
                came = np.concatenate([self.carried[i][:half], value[half:]])
                if isinstance(x, Reduce):
                    self.gradients[i] = came
                else:
                    self.away[x.made] = came

    def result(self) -> bytes:
        total = hashlib.blake2b(digest_size=16)
        for result in self.listing.results:
            total.update(self._place(result) if isinstance(result, Place) else b"-")
        sums: dict[tuple[int, int], list[Bytes]] = {}
        for i in sorted(self.gradients):
            at = int(self.rows[i].entry), self.rows[i].begin
            sums.setdefault(at, []).append(self.gradients[i])
        for at in sorted(sums):  # tiles may come in any order, contributions to one may not
            total.update(b"".join(part.tobytes() for part in sums[at]))
        for gather in sorted(self.given):
            total.update(self.given[gather])
        for made in sorted(self.away):
            total.update(self.away[made])
        for key in sorted(self.homes, key=str):
            total.update(self.homes[key])
        return total.digest()

    def _compute(self, i: int, x: Run) -> None:
        places = self.listing.operands[i]
        seen = hashlib.blake2b((x.region.key + x.region.text).encode(), digest_size=32)
        for place in places:
            seen.update(self._place(place))
        for place in places:
            if place.writes:
                value = self._place(place)
                mask = np.frombuffer(seen.digest(), np.uint8)
                value ^= np.tile(mask, -(-len(value) // len(mask)))[: len(value)]
        for number in range(len(x.outputs)):
            self.made[i, number] = _noise(f"{seen.hexdigest()} {number}", 32)

    def _place(self, place: Place) -> Bytes:
        if place.where == "arena":
            return self.arena[place.begin : place.end]
        if place.where is not None:
            return self.homes[place.where][place.begin : place.end]
        if place.maker < 0:
            return _noise(f"given {place.number}", 32)
        return self.made.get((place.maker, place.number), np.zeros(32, np.uint8))

    def _slot(self, x: Fetch | Store | Gather) -> Bytes:
        first = x.slot.address + (0 if isinstance(x, Gather) else x.offset)
        return self.arena[first : first + x.nbytes]

    def _home(self, x: Fetch | Store) -> Bytes:
        return self.homes[home_of(x)][x.begin : x.begin + x.nbytes]


def _noise(seed: str, nbytes: int) -> Bytes:
    """Bytes that are the same for the same seed; a longer run begins like a shorter one."""
    return np.frombuffer(_drawn(seed, nbytes), np.uint8).copy()


@functools.lru_cache(maxsize=512)
def _drawn(seed: str, nbytes: int) -> bytes:
    return hashlib.shake_128(seed.encode()).digest(nbytes)
