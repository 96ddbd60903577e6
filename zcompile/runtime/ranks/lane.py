"""A lane of collectives: the messages of one kind, and the thread that waits for them in order.

Between memories of the host, while a lane waits for the messages of one collective, those of the
next ones are on their way already, as far as nothing stands before them. So small collectives wait
for the other ranks together, and not one after the other; elsewhere one begins when the one before
has ended.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple
from weakref import WeakSet

import torch
from torch import Tensor

from zcompile.ir.partition import Crossing
from zcompile.runtime.closing import call_last
from zcompile.runtime.device.base import Device
from zcompile.runtime.ranks.link import RankLink
from zcompile.runtime.ranks.transport import (
    Channel,
    HostMessages,
    Message,
    Messages,
    PinnedMessages,
    Work,
)
from zcompile.runtime.ranks.watch import Waiting
from zcompile.runtime.transfer.ticket import Finishing, Promise, Reporting, Ticket, Workers

MOST_BEGUN = 16
"""Collectives of a lane that are under way at once."""
LAST_JOB_S = 0.1
"""Seconds for which, at the end of the process, the jobs of all lanes are waited for that wait for
nobody; one that takes longer is taken to wait for another rank."""
LAST_WAIT_S = 2.0
"""Seconds for which the threads of all lanes are waited for after that."""
LOOK_AGAIN_S = 0.02
"""Seconds after which, meanwhile, it is looked again which of them wait for other ranks."""


class Posts:
    """The messages of a collective that may begin before those before it in its lane have ended.

    Whatever the one before comes after is over when that has begun. So what is new is only that
    both touch memory at the same time, which they may where it is not the same.

    memory    all that is read or written
    after     complete before they begin
    link      that they pass
    bring     called before they do: what this rank itself brings
    is_alone  they begin when those before them have ended, and those behind them when they have
    """

    def __init__(
        self,
        sends: Sequence[Message],
        receives: Sequence[Message],
        memory: Sequence[Tensor],
        after: Sequence[Ticket],
        link: RankLink,
        bring: Callable[[], None] = lambda: None,
        is_alone: bool = False,
    ) -> None:
        self.sends, self.receives, self.bring = sends, receives, bring
        self.link, self.is_alone = link, is_alone
        self._after = after
        self._ranges = [(t.data_ptr(), t.data_ptr() + t.nbytes) for t in memory]
        self._works: list[Work] | None = None
        self._error: BaseException | None = None
        self._has_set_out = False
        self.since = 0.0
        """When they set out, on the clock of perf_counter."""

    @property
    def have_begun(self) -> bool:
        return self._works is not None or self._error is not None

    @property
    def has_failed(self) -> bool:
        return self._error is not None

    def may_begin(self, others: "Sequence[Posts]") -> bool:
        """Whether nothing stands before them but messages of others, of other memory."""
        if self.is_alone or not all(ticket.done() for ticket in self._after):
            return False
        apart = (
            end <= low or high <= begin
            for begin, end in self._ranges
            for other in others
            for low, high in other._ranges
        )
        return all(apart)

    def set_out(self) -> None:
        """From now on, and until they `arrive`, they count as on their way over their link."""
        self._has_set_out, self.since = True, time.perf_counter()
        self.link.begins(self.since)

    def arrive(self, came: Crossing) -> None:
        """They are over, and so much has come; `NOTHING`: they have failed, if they ever set
        out."""
        if self._has_set_out:
            self.link.ends(came, self.since, time.perf_counter())

    def begin(self, carrier: HostMessages) -> None:
        """Begin; what goes wrong is raised when their turn has come."""

        def note(error: BaseException) -> None:
            self._error = error

        with Reporting(note):
            for ticket in self._after:
                ticket.wait()  # it is complete, well or badly
            self.set_out()
            self.bring()
            self._works = carrier.begin(self.sends, self.receives)

    def end(self, carrier: HostMessages, at: Callable[[int], None]) -> None:
        """Wait until they are over. raises  as of `Messages`, and what `after` or `bring` raise"""
        if self._error is not None:
            raise self._error
        assert self._works is not None, "they have begun"
        carrier.end(self._works, at)


class _HandedOver(NamedTuple):
    """A job of a lane, and the messages that it has `posted`; None: it does something else."""

    job: Callable[[], None]
    posts: Posts | None


class Lane:
    """The messages of one kind of collective, and the thread that waits for them in order: those of
    several are under way at once, where `posted` says so."""

    def __init__(self, name: str, group: Any, tag: int, crashed: Callable[..., None]) -> None:
        self._channel = Channel(group, tag)
        self._carries: Messages = HostMessages(self._channel)
        self._coming: deque[_HandedOver] = deque()
        """What was handed over and has not had its turn, in order: jobs together with their
        messages, so that none of these is ever taken for that of another job."""
        self._lock = threading.Lock()
        self._name, self._crashed = name, crashed
        self._workers = Workers(f"zinf-{name}", 1, crashed)
        self._holds: Workers | None = None
        """The thread that a paced link holds, while that of the lane listens to the others."""
        self.waiting: Waiting | None = None
        _LANES.add(self)

    def submit(self, job: Callable[[], None], posts: Posts | None = None) -> None:
        """Hand a job over; what is raised on the way, as by an interrupt, takes all of it back.

        posts  what the job calls `posted` with; None: it does not
        """
        handed_over = _HandedOver(job, posts)
        with self._lock:
            try:
                self._coming.append(handed_over)
                # The thread is woken once too often where this fails afterwards, never too seldom.
                self._workers.submit(self._take_turn)
            except BaseException:
                if self._coming and self._coming[-1] is handed_over:
                    self._coming.pop()
                raise

    def _take_turn(self) -> None:
        """Carry out what was handed over first, if that was not taken back."""
        with self._lock:
            if not self._coming:
                return
            job = self._coming.popleft().job
        job()

    @property
    def is_alive(self) -> bool:
        """Whether a thread of it has not ended."""
        return self._workers.are_alive or (self._holds is not None and self._holds.are_alive)

    def stop(self, until: float = 0.0) -> None:
        """End the threads after what they do now.

        until  when they are waited for no more, on the monotonic clock
        """
        for workers in filter(None, (self._workers, self._holds)):
            workers.stop(max(0.0, until - time.monotonic()))

    def end_messages(self) -> None:
        """As `Channel.end_all`: the threads come back from whatever they wait for of others."""
        self._channel.end_all()

    def pace(self) -> None:
        """Let collectives end with `agree_that_over` from here on; idempotent."""
        if self._holds is None:
            self._holds = Workers(f"zinf-{self._name}-holds", 1, self._crashed)

    def carry_for(self, device: Device, others: int) -> None:
        """Carry what lies in memory of the device too, from here on; nothing is on its way."""
        self._carries = PinnedMessages(self._channel, device, others, self._name)

    def bring(self, target: Tensor, source: Tensor) -> None:
        """Copy what this rank itself brings to memory of the host. raises  as of `Messages`"""
        self._carries.bring(target, source)

    def messages(self, what: str, sends: Sequence[Message], receives: Sequence[Message]) -> None:
        """Carry out one collective; empty messages are left out on both sides.

        raises  as of `Messages`
        """
        with self._waits_for(what) as at:
            self._carries.carry(sends, receives, at)

    def posted(self, what: str, posts: Posts) -> None:
        """Carry out a collective, within the job that was handed over with it. Those behind it
        begin meanwhile, as far as they may, if memory of the host is all that is touched and
        nothing paces the link.

        raises  as of `Messages`
        """
        carrier = self._carries
        if self._holds is None and isinstance(carrier, HostMessages):
            with self._waits_for(what) as at:
                self._begin_all(posts, carrier)
                posts.end(carrier, at)
        else:
            posts.set_out()
            posts.bring()
            self.messages(what, posts.sends, posts.receives)

    def _begin_all(self, first: Posts, carrier: HostMessages) -> None:
        """Begin a collective whose turn has come, and what may begin behind it."""
        with self._lock:
            coming = [row.posts for row in self._coming if row.posts is not None]
        begun: list[Posts] = []
        for posts in (first, *coming[: MOST_BEGUN - 1]):
            if not posts.have_begun:
                if begun and not posts.may_begin(begun):
                    return
                posts.begin(carrier)
            if posts.has_failed or posts.is_alone:  # what comes next would be taken for it
                return
            begun.append(posts)

    @contextmanager
    def _waits_for(self, what: str) -> Iterator[Callable[[int], None]]:
        """Within, the watch knows of each peer that the given function is told, who waits for
        it."""
        since = time.monotonic()

        def at(peer: int) -> None:
            self.waiting = Waiting(what, since, peer)

        try:
            yield at
        finally:
            self.waiting = None

    def agree_that_over(self, what: str, hold: Callable[[], None], peers: Sequence[int]) -> None:
        """Wait until `hold` has returned here and on each of the peers, who do the same.

        A peer whose connection closes ends the wait at once, and not `hold`: that is up to whoever
        hears of it (`Fabric.fail`).
        raises  PeerGone
        """
        assert self._holds is not None, "the lane is paced"
        over, lock = Promise(), threading.Lock()
        held, peer = False, -1
        """Whether `hold` has returned: only then this rank waits for another."""

        def listen_to(other: int, has_held: bool) -> None:
            nonlocal held, peer
            with lock:
                held, peer = held or has_held, other
                if held and not over.done():
                    since = time.monotonic() if self.waiting is None else self.waiting.since
                    self.waiting = Waiting(what, since, other)

        def tell() -> None:
            with Finishing(over):
                hold()
                listen_to(peer, True)
                said = torch.zeros(1, dtype=torch.uint8, device="cpu")
                works = [(other, self._channel.send(other, said)) for other in peers]
                for other, work in works:
                    self._channel.wait(other, work)

        try:
            heard = []
            for peer in peers:
                row = torch.zeros(1, dtype=torch.uint8, device="cpu")
                heard.append((peer, self._channel.receive(peer, row)))
            self._holds.submit(tell)
            for other, work in heard:
                listen_to(other, False)
                self._channel.wait(other, work)
            over.wait()
        except BaseException:
            over.finish()  # nobody waits for it any more
            raise
        finally:
            with lock:
                self.waiting = None


_LANES: WeakSet[Lane] = WeakSet()
"""Of this process, stopped ones too: a thread that waits for another rank is stopped by nothing."""


def _end_threads() -> None:
    """End the threads of all lanes, with the process.

    A daemon thread that is within torch when the interpreter ends, and comes back from there, ends
    the process by a signal ("terminate called"). After a failure threads of lanes wait there for
    messages of other ranks, and come back when those end too. One that does not wait comes back by
    itself: for its sake no group is closed, which may be the user's, whose hooks may come yet.
    """
    alive = [lane for lane in _LANES if lane.is_alive]
    until = time.monotonic() + LAST_JOB_S
    for lane in alive:
        lane.stop(until)
    until = time.monotonic() + LAST_WAIT_S
    ended: set[Lane] = set()
    while (now := time.monotonic()) < until and (alive := [one for one in alive if one.is_alive]):
        for lane in alive:
            if lane.waiting is not None and lane not in ended:
                lane.end_messages()
                ended.add(lane)
        for lane in alive:
            lane.stop(min(until, now + LOOK_AGAIN_S))


call_last(_end_threads)
