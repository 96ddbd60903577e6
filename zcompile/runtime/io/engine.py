"""The I/O engine cuts moves of any size into requests and keeps requests in flight through a ring.

A *move* is a range of a file on its way to or from a buffer; a *piece* of a move becomes one
request; a *lane* holds the moves of one direction, in order, and bounds the bytes in flight. A move
starts in the thread that asks for it: one system call submits all its requests. One thread of the
engine blocks until requests are over, finishes moves, and submits what had to wait. Reads go before
writes. `Move`, `Piece` and `Lane` neither lock nor call the system: `Engine` does both.
"""

import errno
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

from zcompile.errors import IOFault
from zcompile.ir.units import MiB
from zcompile.runtime.io.rings import Outcome, Request, Ring
from zcompile.runtime.tiers.base import Buffer
from zcompile.runtime.transfer.interrupts import deferred_interrupts
from zcompile.runtime.transfer.ticket import Callback, Workers

# --- What the engine is asked to do ---


class Target(NamedTuple):
    """A position in an open file. Direct transfers come in multiples of `granule`, in bytes."""

    path: Path
    fd: int
    offset: int
    granule: int


class Move:
    """A transfer of bytes between `buffer` and a file; the buffer is kept until no request touches
    it.

    on_done      called once, with what went wrong or None
    unrequested  bytes that no request was made for yet
    in_flight    requests that were submitted, or wait to be tried again
    done         bytes that were moved
    """

    __slots__ = (
        "_address",
        "_target",
        "buffer",
        "done",
        "error",
        "granule",
        "in_flight",
        "name",
        "nbytes",
        "on_done",
        "unrequested",
        "write",
    )

    def __init__(
        self, write: bool, target: Target, buffer: Buffer, name: str, on_done: Callback
    ) -> None:
        self.write = write
        self.name = name
        self.buffer = buffer
        self.on_done = on_done
        self.granule = target.granule
        self.nbytes = self.unrequested = buffer.nbytes
        self.done = self.in_flight = 0
        self.error: BaseException | None = None
        self._target = target
        self._address = buffer.memory.data_ptr()

    def request(self, key: int, at: int, nbytes: int) -> Request:
        """The ring's request for `nbytes` of the move from byte `at` on."""
        return Request(
            key, self.write, self._target.fd, self._address + at, nbytes, self._target.offset + at
        )

    def fail(self, error: BaseException) -> None:
        """A request of the move ended with `error`; the first error of a move stays."""
        self.in_flight -= 1
        self.error = self.error or error

    def fault(self, code: int, why: str) -> IOFault:
        """The error that tells a user which bytes of which file were not moved, and why."""
        return IOFault(
            code,
            "write" if self.write else "read",
            self._target.path,
            self.name,
            self._target.offset,
            self.done,
            self.nbytes,
            why,
        )

    def end_reason(self) -> str:
        """The text for a request that moved nothing although nothing failed."""
        return "the device takes no more" if self.write else "the file ends before the data"


class Piece(NamedTuple):
    """Bytes [at, at + nbytes) of a move, for one request, which made no progress `tries` times."""

    move: Move
    at: int
    nbytes: int
    tries: int = 0

    def request(self, key: int) -> Request:
        return self.move.request(key, self.at, self.nbytes)


class Lane:
    """A queue of moves in one direction, served in order of arrival, with bounded bytes in flight.

    most_bytes     the limit on bytes in flight
    most           the limit on requests in flight
    request_bytes  the most that one request moves
    """

    def __init__(self, most_bytes: int, most: int, request_bytes: int) -> None:
        self._most_bytes, self._most = most_bytes, most
        self._request_bytes = request_bytes
        self._bytes = self._count = 0  # in flight
        self._waiting: deque[Move] = deque()
        self._retries: deque[Piece] = deque()

    def put(self, move: Move) -> None:
        """Queue `move`."""
        self._waiting.append(move)

    def take(self) -> Piece | None:
        """The next piece, if the limits allow one more; the piece counts as in flight until
        `landed`."""
        if not (self._retries or self._waiting) or self._count == self._most:
            return None
        piece = self._retries[0] if self._retries else self._next_piece(self._waiting[0])
        if self._bytes and self._bytes + piece.nbytes > self._most_bytes:
            return None
        if self._retries:
            self._retries.popleft()
        else:
            piece.move.unrequested -= piece.nbytes
            piece.move.in_flight += 1
            if not piece.move.unrequested:
                self._waiting.popleft()
        self._bytes += piece.nbytes
        self._count += 1
        return piece

    def landed(self, piece: Piece) -> None:
        """`piece` is no longer in flight."""
        self._bytes -= piece.nbytes
        self._count -= 1

    def retry(self, piece: Piece) -> None:
        """Take `piece`, which is not in flight, before all others."""
        self._retries.appendleft(piece)

    def drop(self, move: Move) -> None:
        """Make no more requests for a move that failed."""
        if move.unrequested:
            move.unrequested = 0
            self._waiting.remove(move)

    def cancel(self, why: Callable[[str], BaseException]) -> list[Move]:
        """Empty the queue; returns the moves that end by that, each with an error."""
        touched = {id(move): move for move in self._waiting}
        for move in self._waiting:
            move.unrequested = 0
            move.error = move.error or why(move.name)
        for piece in self._retries:
            piece.move.fail(why(piece.move.name))
            touched[id(piece.move)] = piece.move
        self._waiting.clear()
        self._retries.clear()
        return [move for move in touched.values() if not move.in_flight]

    def _next_piece(self, move: Move) -> Piece:
        """The first piece of `move` that no request was made for."""
        return Piece(
            move, move.nbytes - move.unrequested, min(move.unrequested, self._request_bytes)
        )


# --- The engine ---

MOST_READ_BYTES = 512 * MiB
"""The most bytes of reads in flight. Large, since bytes in flight arrive without the interpreter
lock, however long compute holds that: at 5 GB/s this is 100 ms."""
MOST_WRITE_BYTES = 128 * MiB
"""The most bytes of writes in flight. A read that comes later waits behind these in the device."""
RETRIED_ERRNOS = (errno.EAGAIN, errno.EINTR, errno.ENOMEM, errno.EBUSY)
"""Errors after which a request is tried again."""
MOST_TRIES = 100
RETRY_PAUSE_SECONDS = 1e-3
"""Slept before a request that made no progress is tried again, at most MOST_TRIES times."""
MOST_CLOSING_SECONDS = 30.0
"""How long `Engine.close` waits for requests in flight."""


class Engine:
    """Starts moves through one ring, which belongs to the engine from here on; thread-safe.

    crashed  told of a defect, after which some moves may never finish
    closed   gives the error, by name of the tensor, for moves that `close` cancels or that come
             later
    """

    def __init__(
        self,
        ring: Ring,
        crashed: Callable[[BaseException], None],
        closed: Callable[[str], BaseException],
    ) -> None:
        self.ring = ring
        self._closed_error = closed
        most = ring.depth // 2
        self._lanes = {
            False: Lane(MOST_READ_BYTES, most, ring.request_bytes),
            True: Lane(MOST_WRITE_BYTES, most, ring.request_bytes),
        }
        self._in_flight: dict[int, Piece] = {}
        self._next_key = 0
        self._lock = threading.Lock()
        self._idle = threading.Condition(self._lock)
        # Requests started less requests reaped; below 0 while a submitter has yet to count its own.
        self._in_ring = 0
        self._submitting = self._reaping = self._closed = False
        self._pid = os.getpid()
        self._thread = Workers("zinf-disk", 1, crashed)

    def start(self, move: Move) -> None:
        """Start `move`; `move.on_done` is called when the move has ended, in some thread."""
        # Asked before the lock is taken, since a fork may have left the lock locked.
        if os.getpid() != self._pid:
            move.on_done(
                move.fault(
                    errno.EBADF,
                    f"the file belongs to process {self._pid}, and this is a fork of it",
                )
            )
            return
        # An interrupt between two lines would leave `_submitting` set for ever.
        with deferred_interrupts():
            with self._lock:
                closed = self._closed
                if not closed:
                    self._lanes[move.write].put(move)
            if closed:
                move.on_done(self._closed_error(move.name))
            else:
                self._submit()

    def close(self) -> None:
        """Cancel the moves that have not started, and wait for the others. Idempotent."""
        if os.getpid() != self._pid:
            return
        with self._lock:
            was_closed, self._closed = self._closed, True
            ended = [
                move for lane in self._lanes.values() for move in lane.cancel(self._closed_error)
            ]
            if was_closed:
                return
        self._call_back(ended)
        with self._lock:
            is_idle = self._idle.wait_for(
                lambda: not (self._submitting or self._reaping), MOST_CLOSING_SECONDS
            )
        self._thread.stop()
        if is_idle:  # else the device hangs, and requests in flight must not lose their ring
            self.ring.close()
            with self._lock:  # nothing is in flight, unless the ring could not be reaped
                lost, self._in_flight = list(self._in_flight.values()), {}
                ended = [move for piece in lost for move in self._count_outcome(piece, -errno.EIO)]
            self._call_back(ended)

    def _submit(self) -> None:
        """Submit what the limits allow. A thread that is submitting already does the work of
        others."""
        while True:
            with self._lock:
                if self._submitting or not (requests := self._take_requests()):
                    return
                self._submitting = True
            started, refused = self._submit_to_ring(requests)
            with self._lock:
                self._submitting = False
                self._in_ring += started
                self._wake_reaper()
                left = [self._in_flight.pop(request.key) for request in requests[started:]]
                # With nothing in flight no batch would come and try again: this counts as a try.
                wait = refused in RETRIED_ERRNOS and self._in_ring > 0
                ended = self._count_outcome(left.pop(0), -refused) if refused and not wait else []
                ended += self._return_unstarted(left)
                self._idle.notify_all()
            self._call_back(ended)
            if wait:
                return
            if refused in RETRIED_ERRNOS:
                time.sleep(RETRY_PAUSE_SECONDS)

    def _submit_to_ring(self, requests: list[Request]) -> tuple[int, int]:
        """How many of `requests` were started, and the errno that refuses the first if none was."""
        try:
            started = self.ring.submit(requests)
            return started, 0 if started else errno.EAGAIN
        except OSError as error:
            return 0, error.errno or errno.EIO

    def _take_requests(self) -> list[Request]:
        """The requests that the limits of the lanes allow now, reads first."""
        requests: list[Request] = []
        for lane in self._lanes.values():
            while (piece := lane.take()) is not None:
                self._next_key += 1
                self._in_flight[self._next_key] = piece
                requests.append(piece.request(self._next_key))
        return requests

    def _return_unstarted(self, pieces: list[Piece]) -> list[Move]:
        """`pieces` did not start: others go after them; after `close` their moves end instead."""
        if self._closed:
            return [
                move for piece in pieces for move in self._count_outcome(piece, -errno.ECANCELED)
            ]
        for piece in reversed(pieces):
            lane = self._lanes[piece.move.write]
            lane.landed(piece)
            lane.retry(piece)
        return []

    def _wake_reaper(self) -> None:
        """Queue `_reap_batch`, if requests are in the ring and no batch is being waited for."""
        if self._in_ring > 0 and not self._reaping:
            self._reaping = True
            self._thread.submit(self._reap_batch)

    def _reap_batch(self) -> None:
        """Wait for one batch of outcomes; queues itself while requests are in the ring."""
        outcomes: list[Outcome] = []
        ended: list[Move] = []
        try:
            outcomes = self.ring.reap()
            with self._lock:
                for outcome in outcomes:
                    ended += self._count_outcome(self._in_flight.pop(outcome.key), outcome.result)
            self._call_back(ended)
            if outcomes and all(-outcome.result in RETRIED_ERRNOS for outcome in outcomes):
                time.sleep(RETRY_PAUSE_SECONDS)
        finally:
            with self._lock:
                # A ring that cannot be reaped is reported, and reaped again at the next submission.
                self._in_ring = self._in_ring - len(outcomes) if outcomes else 0
                self._reaping = False
                self._wake_reaper()
                self._idle.notify_all()
        self._submit()

    def _count_outcome(self, piece: Piece, result: int) -> list[Move]:
        """Count what a request for `piece` achieved; returns the move, if this was its last
        request.

        result  bytes moved, or an errno negated
        """
        move, lane = piece.move, self._lanes[piece.move.write]
        lane.landed(piece)
        moved = result if result == piece.nbytes else max(result, 0) // move.granule * move.granule
        move.done += moved
        if moved == piece.nbytes:
            move.in_flight -= 1
        elif self._closed:
            move.fail(self._closed_error(move.name))
        elif moved:
            lane.retry(Piece(move, piece.at + moved, piece.nbytes - moved))
        elif -result in RETRIED_ERRNOS and piece.tries < MOST_TRIES:
            lane.retry(piece._replace(tries=piece.tries + 1))
        else:
            code = max(-result, 0)
            move.fail(
                move.fault(code or errno.EIO, os.strerror(code) if code else move.end_reason())
            )
        if move.error is not None:
            lane.drop(move)
        return [] if move.in_flight or move.unrequested else [move]

    def _call_back(self, ended: list[Move]) -> None:
        """Call `on_done` of moves that ended: of all of them, also when a callback raises."""
        with ExitStack() as callbacks:
            for move in reversed(ended):
                callbacks.callback(move.on_done, move.error)
