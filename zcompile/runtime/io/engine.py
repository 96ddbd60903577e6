"""The I/O engine: moves of any size become requests, kept in flight through a ring.

A move starts in the thread that asks for it: one system call submits all its requests. One thread
of the engine blocks until requests are over, finishes moves, and submits what had to wait. Reads
go before writes, and each has a limit of its own on the bytes in flight.

What the I/O engine is asked to do, and in which order: moves, their pieces, lanes.

Nothing here locks or calls the system; the engine does both.
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


class Target(NamedTuple):
    """Where in a file. Direct transfers come in multiples of `granule`."""

    path: Path
    fd: int
    offset: int
    granule: int


class Move:
    """Bytes between `buffer` and a file; the buffer is kept until no request touches it.

    over    called once, with what went wrong or None
    rest    bytes that no request was made for yet
    flying  requests under way or to be tried again
    """

    __slots__ = (
        "_address",
        "_target",
        "buffer",
        "done",
        "error",
        "flying",
        "granule",
        "name",
        "nbytes",
        "over",
        "rest",
        "write",
    )

    def __init__(
        self, write: bool, target: Target, buffer: Buffer, name: str, over: Callback
    ) -> None:
        self.write = write
        self.name = name
        self.buffer = buffer
        self.over = over
        self.granule = target.granule
        self.nbytes = self.rest = buffer.nbytes
        self.done = self.flying = 0
        self.error: BaseException | None = None
        self._target = target
        self._address = buffer.memory.data_ptr()

    def request(self, key: int, at: int, nbytes: int) -> Request:
        return Request(
            key, self.write, self._target.fd, self._address + at, nbytes, self._target.offset + at
        )

    def fail(self, error: BaseException) -> None:
        """One of its requests is over, badly; the first error stays."""
        self.flying -= 1
        self.error = self.error or error

    def fault(self, code: int, why: str) -> IOFault:
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

    def ending(self) -> str:
        """Why nothing was moved although nothing failed."""
        return "the device takes no more" if self.write else "the file ends before the data"


class Piece(NamedTuple):
    """Bytes [at, at + nbytes) of a move, for one request. `tries` made no progress so far."""

    move: Move
    at: int
    nbytes: int
    tries: int = 0

    def request(self, key: int) -> Request:
        return self.move.request(key, self.at, self.nbytes)


class Lane:
    """Moves of one direction, first come, first served, a bounded number of bytes at a time."""

    def __init__(self, most_bytes: int, most: int, request_bytes: int) -> None:
        self._most_bytes, self._most = most_bytes, most
        self._request_bytes = request_bytes
        self._bytes = self._count = 0  # in flight
        self._waiting: deque[Move] = deque()
        self._again: deque[Piece] = deque()

    def put(self, move: Move) -> None:
        self._waiting.append(move)

    def take(self) -> Piece | None:
        """The next piece, if the limits allow it; it counts as in flight until it has `left`."""
        if not (self._again or self._waiting) or self._count == self._most:
            return None
        piece = self._again[0] if self._again else self._first(self._waiting[0])
        if self._bytes and self._bytes + piece.nbytes > self._most_bytes:
            return None
        if self._again:
            self._again.popleft()
        else:
            piece.move.rest -= piece.nbytes
            piece.move.flying += 1
            if not piece.move.rest:
                self._waiting.popleft()
        self._bytes += piece.nbytes
        self._count += 1
        return piece

    def left(self, piece: Piece) -> None:
        """`piece` is not in flight any more."""
        self._bytes -= piece.nbytes
        self._count -= 1

    def retry(self, piece: Piece) -> None:
        """Take `piece`, which has left, before all others."""
        self._again.appendleft(piece)

    def drop(self, move: Move) -> None:
        """Make no more requests of a move that failed."""
        if move.rest:
            move.rest = 0
            self._waiting.remove(move)

    def cancel(self, why: Callable[[str], BaseException]) -> list[Move]:
        """Take nothing any more; the moves that thereby end, failed."""
        touched = {id(move): move for move in self._waiting}
        for move in self._waiting:
            move.rest = 0
            move.error = move.error or why(move.name)
        for piece in self._again:
            piece.move.fail(why(piece.move.name))
            touched[id(piece.move)] = piece.move
        self._waiting.clear()
        self._again.clear()
        return [move for move in touched.values() if not move.flying]

    def _first(self, move: Move) -> Piece:
        return Piece(move, move.nbytes - move.rest, min(move.rest, self._request_bytes))


MOST_READ_BYTES = 512 * MiB
"""In flight. Large, since what is in flight arrives without the interpreter lock, however long
compute holds that: at 5 GB/s this is 100 ms."""
MOST_WRITE_BYTES = 128 * MiB
"""In flight. A read that comes later waits behind these in the device."""
AGAIN = (errno.EAGAIN, errno.EINTR, errno.ENOMEM, errno.EBUSY)
MOST_TRIES = 100
PAUSE_SECONDS = 1e-3
"""Before a request that made no progress is tried again, at most MOST_TRIES times."""
MOST_CLOSING_SECONDS = 30.0


class Engine:
    """The queue above one ring, which is the engine's from here on; thread-safe.

    crashed  told of a defect, after which some moves may never finish
    closed   what moves that `close` cancels, or that come later, fail with; by name of the tensor
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
        self._flying: dict[int, Piece] = {}
        self._next_key = 0
        self._lock = threading.Lock()
        self._still = threading.Condition(self._lock)
        self._inside = 0  # started less reaped; below 0 while a submitter has yet to count its own
        self._submitting = self._reaping = self._closed = False
        self._pid = os.getpid()
        self._thread = Workers("zinf-disk", 1, crashed)

    def start(self, move: Move) -> None:
        """Put `move` under way; `move.over` is called when it has ended, in some thread."""
        if os.getpid() != self._pid:  # asked before the lock, which a fork may have left locked
            move.over(
                move.fault(
                    errno.EBADF,
                    f"the file belongs to process {self._pid}, and this is a fork of it",
                )
            )
            return
        with deferred_interrupts():  # one between two lines would leave the engine at it for ever
            with self._lock:
                closed = self._closed
                if not closed:
                    self._lanes[move.write].put(move)
            if closed:
                move.over(self._closed_error(move.name))
            else:
                self._submit()

    def close(self) -> None:
        """Cancel what has not started, and wait for what has. Idempotent."""
        if os.getpid() != self._pid:
            return
        with self._lock:
            again, self._closed = self._closed, True
            ended = [
                move for lane in self._lanes.values() for move in lane.cancel(self._closed_error)
            ]
            if again:
                return
        self._finish(ended)
        with self._lock:
            still = self._still.wait_for(
                lambda: not (self._submitting or self._reaping), MOST_CLOSING_SECONDS
            )
        self._thread.stop()
        if still:  # else the device hangs, and what is under way must not lose its ring
            self.ring.close()
            with self._lock:  # empty, unless the ring could not be reaped
                lost, self._flying = list(self._flying.values()), {}
                ended = [move for piece in lost for move in self._settle(piece, -errno.EIO)]
            self._finish(ended)

    def _submit(self) -> None:
        """Start what the limits allow. Another thread that is at it already does it for us."""
        while True:
            with self._lock:
                if self._submitting or not (requests := self._take()):
                    return
                self._submitting = True
            started, refused = self._start(requests)
            with self._lock:
                self._submitting = False
                self._inside += started
                self._wake_reaper()
                left = [self._flying.pop(request.key) for request in requests[started:]]
                # With nothing under way nobody would come by to try again: it counts as tried.
                wait = refused in AGAIN and self._inside > 0
                ended = self._settle(left.pop(0), -refused) if refused and not wait else []
                ended += self._put_back(left)
                self._still.notify_all()
            self._finish(ended)
            if wait:
                return
            if refused in AGAIN:
                time.sleep(PAUSE_SECONDS)

    def _start(self, requests: list[Request]) -> tuple[int, int]:
        """How many were started, and the errno that refuses the first if none was."""
        try:
            started = self.ring.submit(requests)
            return started, 0 if started else errno.EAGAIN
        except OSError as error:
            return 0, error.errno or errno.EIO

    def _take(self) -> list[Request]:
        requests: list[Request] = []
        for lane in self._lanes.values():
            while (piece := lane.take()) is not None:
                self._next_key += 1
                self._flying[self._next_key] = piece
                requests.append(piece.request(self._next_key))
        return requests

    def _put_back(self, pieces: list[Piece]) -> list[Move]:
        """They did not start, and go first when others do; or end now, after `close`."""
        if self._closed:
            return [move for piece in pieces for move in self._settle(piece, -errno.ECANCELED)]
        for piece in reversed(pieces):
            lane = self._lanes[piece.move.write]
            lane.left(piece)
            lane.retry(piece)
        return []

    def _wake_reaper(self) -> None:
        if self._inside > 0 and not self._reaping:
            self._reaping = True
            self._thread.submit(self._reap)

    def _reap(self) -> None:
        """A job of the engine's thread: one batch; it queues itself while anything is inside."""
        outcomes: list[Outcome] = []
        ended: list[Move] = []
        try:
            outcomes = self.ring.reap()
            with self._lock:
                for outcome in outcomes:
                    ended += self._settle(self._flying.pop(outcome.key), outcome.result)
            self._finish(ended)
            if outcomes and all(-outcome.result in AGAIN for outcome in outcomes):
                time.sleep(PAUSE_SECONDS)
        finally:
            with self._lock:
                # A ring that cannot be reaped is reported, and asked again when used again.
                self._inside = self._inside - len(outcomes) if outcomes else 0
                self._reaping = False
                self._wake_reaper()
                self._still.notify_all()
        self._submit()

    def _settle(self, piece: Piece, result: int) -> list[Move]:
        """Count what a request achieved; the move, if that was its last."""
        move, lane = piece.move, self._lanes[piece.move.write]
        lane.left(piece)
        moved = result if result == piece.nbytes else max(result, 0) // move.granule * move.granule
        move.done += moved
        if moved == piece.nbytes:
            move.flying -= 1
        elif self._closed:
            move.fail(self._closed_error(move.name))
        elif moved:
            lane.retry(Piece(move, piece.at + moved, piece.nbytes - moved))
        elif -result in AGAIN and piece.tries < MOST_TRIES:
            lane.retry(piece._replace(tries=piece.tries + 1))
        else:
            code = max(-result, 0)
            move.fail(move.fault(code or errno.EIO, os.strerror(code) if code else move.ending()))
        if move.error is not None:
            lane.drop(move)
        return [] if move.flying or move.rest else [move]

    def _finish(self, ended: list[Move]) -> None:
        with ExitStack() as callbacks:  # all of them are called, also when one raises
            for move in reversed(ended):
                callbacks.callback(move.over, move.error)
