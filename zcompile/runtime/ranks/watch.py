"""Lets every rank know when another one has failed, ended, or does not come.

A rank that fails says why in the store of `torch.distributed`, through which ranks find each other;
a thread of each rank looks there ten times a second, and ends what waits with that cause. A rank
that is killed says nothing: who talks to it sees the connection close, and says so for it. A rank
that never comes is missed once something has waited for it for longer than `rank_timeout`, unless
it is busy with long work of its own, as compiling is. So is one that cannot be asked for, since the
store does not answer for as long. Time for which this process itself stood still is not counted.
"""

import json
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from zcompile.errors import RankFailed, RanksDiffer, ZinfError
from zcompile.runtime.ranks.asking import (
    ANSWER_S,
    LONGEST_TURN_S,
    AskedStore,
    Asker,
    StoreSilent,
    Turn,
)

LOOK_S = 0.1
"""Seconds between two looks: a rank that raises is known to all in a tenth of the second that they
may take."""
GRACE_S = 1.0
"""Seconds for which what an ended rank has sent before may still arrive."""
SILENT_S = 10.0
"""Seconds after which a rank that is busy, and does not say so any more, is taken to be gone, at
the earliest."""
FAILED = "failed"
ADVICE = "see its own output; start all ranks again, from the last checkpoint"


MESH = (
    "let every rank of the mesh call zcompile.offload, or zcompile.init, in the same order; mesh= "
    "says which ranks train together, mesh=False that each trains a model of its own"
)


class Keeper(NamedTuple):
    """In whose process the store lies.

    rank   of those that are watched; None: in none of theirs
    whose  for people
    where  the address, for people
    """

    rank: int | None
    whose: str
    where: str


class Waiting(NamedTuple):
    """A collective that waits for other ranks.

    what   for people
    since  on the monotonic clock
    for_   the rank that it waits for at the moment
    """

    what: str
    since: float
    for_: int


class _Over(Exception):
    """The watch waits for an answer of the store no more: the ranks cannot go on with `error`, or,
    if that is None, this rank uses the model no more."""

    def __init__(self, error: RankFailed | None) -> None:
        super().__init__()
        self.error = error


def patience(keeper: Keeper, rank: int, timeout_s: float) -> Turn:
    """A turn of a rank that asks the store before ranks know of each other; it raises
    RankFailed."""

    def turn(waited: float) -> None:
        if waited <= timeout_s:
            return
        silent = f"has not answered for {waited:.0f} s"
        if keeper.rank is not None:
            why = f"{silent}: {_keeps(keeper)}, through which ranks find each other"
            raise RankFailed(keeper.rank, "a host that is not known yet", why, ADVICE)
        why = f"has not found the others: {_kept(keeper)}, {silent}"
        raise RankFailed(rank, socket.gethostname(), why, ADVICE)

    return turn


def store_gone(keeper: Keeper) -> RankFailed | None:
    """The error where the store has ended before ranks know of each other; None, if it was in the
    process of no rank."""
    if keeper.rank is None:
        return None
    why = f"is gone: {_keeps(keeper)}, through which ranks find each other"
    return RankFailed(keeper.rank, "a host that is not known yet", why, ADVICE)


def _keeps(keeper: Keeper) -> str:
    return f"its process keeps the store of torch.distributed{keeper.where}"


def _kept(keeper: Keeper) -> str:
    return f"the store of torch.distributed{keeper.where}, which {keeper.whose} keeps"


class RunningTime:
    """Tells how long something has waited, but for the time in which this process stood still, as
    one that is stopped does: what others did meanwhile, it cannot know.

    clock  seconds that only go up
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._before = clock()
        self._still: deque[tuple[float, float]] = deque(maxlen=256)
        """When it went on, and how many seconds before that do not count."""

    def turn(self) -> None:
        """Called several times a second, unless this process stands still."""
        now = self._clock()
        if (still := now - self._before - LONGEST_TURN_S) > 0.0:
            self._still.append((now, still))
        self._before = now

    def since(self, begun: float) -> float:
        """Seconds since a time on the clock, as of the last turn."""
        still = sum(min(seconds, until - begun) for until, seconds in self._still if until > begun)
        return max(0.0, self._before - begun - still)

    def just_stood_still(self) -> float:
        """Seconds for which it has stood still at most, until a few seconds ago or later."""
        since = self._before - SILENT_S
        found = [seconds + LONGEST_TURN_S for until, seconds in self._still if until > since]
        return max(found, default=0.0)


class Watch:
    """Watches the other ranks for one session, in a thread of its own.

    asker      of the store of torch.distributed; it is the watch's own from here on
    below      what its keys begin with
    keeper     who has the store
    hosts      of each rank
    timeout_s  longest that a rank is waited for
    waiting    the collectives that wait now
    doing      what long work this rank does; "": none
    failed     called once, with the error, when the ranks cannot go on
    """

    def __init__(
        self,
        asker: Asker,
        below: str,
        keeper: Keeper,
        rank: int,
        hosts: list[str],
        timeout_s: float,
        waiting: Callable[[], list[Waiting]],
        doing: Callable[[], str],
        failed: Callable[[BaseException], None],
    ) -> None:
        self._asker, self._keeper = asker, keeper
        self._store = AskedStore(asker, self._turn, below)
        self._rank, self._hosts = rank, hosts
        self._timeout_s = timeout_s
        self._waiting, self._doing, self._failed = waiting, doing, failed
        self._end = threading.Event()
        self._gone = False
        """Whether the store cannot be asked any more: each time torch would warn at length."""
        self._said: tuple[int, str, str] | None = None
        self._beat = 0.0
        self._running = RunningTime()
        self.calls = 0
        """Agreements that this rank has begun."""
        self.last = "nothing yet"
        """What it has agreed on last."""
        self._keeper_ended = ""
        """What the rank that has the store has said at its end, with which the store ends."""
        self._ended: dict[int, float] = {}
        """Ranks that have ended, and when that was seen."""
        self._busy: dict[int, tuple[float, float]] = {}
        """Ranks that are busy: their last beat, and when that was seen first."""
        self._thread = threading.Thread(target=self._run, name="zinf-ranks", daemon=True)
        self._thread.start()

    def note(self, what: str) -> None:
        """This rank begins an agreement."""
        self.calls += 1
        self.last = what

    def failed_here(self, error: BaseException) -> RankFailed:
        """What later calls on this rank are told of its own failure."""
        return self._error(self._rank, f"failed: {type(error).__name__}: {error}")

    def say_failed(self, error: BaseException) -> None:
        """Tell the other ranks that this one has failed, unless it is they who have, or it uses the
        model no more, which they know."""
        if not self._end.is_set() and not isinstance(error, RankFailed | RanksDiffer):
            self._say(self._rank, f"failed: {type(error).__name__}: {error}")

    def lost(self, rank: int) -> RankFailed:
        """The error about a rank whose connection has closed; all others are told."""
        until = time.monotonic() + 3 * LOOK_S  # what it said itself may be on its way
        while time.monotonic() < until:
            if (error := self._read_failure()) is not None:
                return error
            time.sleep(LOOK_S / 5)
        why = self._get(f"ended/{rank}")
        why = why or "is gone: its process ended without a word, as one that is killed"
        why += self._as_it_stood_still()
        self._say(rank, why)
        return self._read_failure() or self._error(rank, why)

    def end(self) -> None:
        """This rank uses the model no more."""
        if self._end.is_set():
            return
        self._end.set()
        error = getattr(sys, "last_value", None)
        # Of a program that ends with an error: torchrun ends the others, or they see it here.
        text = "has ended its run" if error is None else f"failed: {type(error).__name__}: {error}"
        self._set(f"ended/{self._rank}", f"{text} after {self.last}")
        if error is not None and not isinstance(error, ZinfError):
            self._say(self._rank, f"{text} after {self.last}")
        if threading.current_thread() is not self._thread:
            self._thread.join(ANSWER_S)  # longer than a turn
        self._asker.stop(ANSWER_S)

    def _say(self, rank: int, why: str) -> None:
        try:
            self._store.compare_set(FAILED, "", json.dumps([rank, why[:2000]]))
        except StoreSilent:
            if rank == self._rank:
                self._asker.must_tell()
        except RuntimeError:
            return  # the store is gone, which the others see as well

    def _set(self, key: str, value: str) -> None:
        if self._gone:
            return
        try:
            self._store.set(key, value)
        except RuntimeError:
            return

    def _get(self, key: str) -> str:
        if self._gone:
            return ""
        try:
            return self._store.get(key).decode() if self._store.check([key]) else ""
        except RuntimeError:
            return ""

    def _error(self, rank: int, why: str) -> RankFailed:
        return RankFailed(rank, self._hosts[rank], why, ADVICE)

    def _read_failure(self) -> RankFailed | None:
        """What a rank has said of its failure, or another of it."""
        text = self._get(FAILED)
        if not text:
            return None
        rank, why = json.loads(text)
        return self._error(rank, why)

    def _run(self) -> None:
        try:
            while not self._end.wait(LOOK_S):
                self._look()
                self._tell()
        except _Over as over:
            if over.error is not None and not self._end.is_set():
                self._failed(over.error)

    def _look(self) -> None:
        """raises  _Over"""
        self._running.turn()
        if not self._can_be_asked():
            what = self._keeper_ended or "is gone"
            raise _Over(self._without_store(f"{what}{self._as_it_stood_still()}"))
        if self._keeper.rank is not None and not self._keeper_ended:
            self._keeper_ended = self._get(f"ended/{self._keeper.rank}")
        if (error := self._read_failure() or self._missed()) is not None:
            raise _Over(error)

    def _turn(self, waited: float) -> None:
        """The store has not answered for some seconds. raises  StoreSilent, _Over"""
        if threading.current_thread() is not self._thread:
            if waited > ANSWER_S or self._asker.is_silent:
                raise StoreSilent("it does not answer")
            return
        if self._end.is_set():
            raise _Over(None)
        self._running.turn()
        if waited <= self._timeout_s:
            return
        for wait in self._waiting():
            if self._running.since(wait.since) > self._timeout_s:
                raise _Over(self._without_store(f"has not answered for {waited:.0f} s", wait))

    def _without_store(self, what: str, wait: Waiting | None = None) -> RankFailed:
        """The error where the store cannot be asked.

        what  has become of it
        wait  that has taken too long; None: none has
        """
        self._gone, keeper = True, self._keeper
        if keeper.rank is not None:
            return self._error(
                keeper.rank, f"{what}: {_keeps(keeper)}, through which ranks know of each other"
            )
        if wait is None:
            why = f"watches the others no more: {_kept(keeper)}, {what}"
            return self._error(self._rank, why)
        why = f"did not come to {wait.what}: why is not known, since {_kept(keeper)}, {what}"
        return self._error(wait.for_, why)

    def _as_it_stood_still(self) -> str:
        """Why others are gone, for people: they have waited for this rank for too long, and it
        could not hear so; "", if that is not why."""
        seconds = self._running.just_stood_still()
        if seconds <= self._timeout_s:
            return ""
        return f", while rank {self._rank} stood still for {seconds:.0f} s"

    def _can_be_asked(self) -> bool:
        """Whether the store is there: it is in the process of rank 0, unless torchrun keeps it."""
        try:
            self._store.check([FAILED])
        except RuntimeError:
            return False
        return True

    def _tell(self) -> None:
        """Say what this rank does, where that has changed; every second, if it is busy."""
        doing, now = self._doing(), time.monotonic()
        said = self.calls, self.last, doing
        if said == self._said and not (doing and now - self._beat > 1.0):
            return
        self._said, self._beat = said, now
        self._set(
            f"state/{self._rank}", json.dumps([self.calls, self.last[:500], doing[:500], now])
        )

    def _state(self, rank: int) -> tuple[int, str, str, float]:
        text = self._get(f"state/{rank}")
        if not text:
            return 0, "nothing yet", "", 0.0
        calls, last, doing, beat = json.loads(text)
        return int(calls), str(last), str(doing), float(beat)

    def _missed(self) -> RankFailed | None:
        """The error about a rank that is waited for, and has ended, or does not come."""
        waits = [(self._running.since(wait.since), wait) for wait in self._waiting()]
        waits = [(seconds, wait) for seconds, wait in waits if seconds > GRACE_S]
        if not waits:
            return None
        now = time.monotonic()
        for rank in range(len(self._hosts)):
            if rank == self._rank or not (text := self._get(f"ended/{rank}")):
                continue
            if now - self._ended.setdefault(rank, now) > GRACE_S:
                self._say(rank, f"{text}, while others go on with {waits[0][1].what}")
                return self._read_failure()
        for seconds, wait in waits:
            self._is_busy(wait.for_)  # from here on, to know by then for how long it was silent
            if seconds > self._timeout_s and (error := self._late(wait, seconds)) is not None:
                return error
        return None

    def _late(self, wait: Waiting, seconds: float) -> RankFailed | None:
        """The error about a rank that does not come; None as long as it is busy."""
        behind = [
            (calls, rank, last)
            for rank in range(len(self._hosts))
            if rank != self._rank
            for calls, last, _, _ in [self._state(rank)]
            if calls < self.calls or rank == wait.for_
        ]
        calls, rank, last = min(behind)
        if self._is_busy(rank):
            return None
        self._say(
            rank,
            f"did not come within {seconds:.0f} s to {wait.what}: the last that it came to was "
            f"{last} (its call {calls}, of {self.calls} here)",
        )
        return self._read_failure()

    def _is_busy(self, rank: int) -> bool:
        """Whether a rank is busy with long work, and has said so lately."""
        _, _, doing, beat = self._state(rank)
        known, seen = self._busy.get(rank, (-1.0, 0.0))
        if known != beat:
            self._busy[rank] = beat, time.monotonic()
            return bool(doing)
        return bool(doing) and self._running.since(seen) < max(SILENT_S, self._timeout_s)
