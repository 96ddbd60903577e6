"""What the I/O engine is asked to do, and in which order: moves, their pieces, lanes.

Nothing here locks or calls the system; the engine does both.
"""

from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from zcompile.errors import IOFault
from zcompile.runtime.io.ring import Request
from zcompile.runtime.tiers.tiers import Buffer
from zcompile.runtime.transfer.ticket import Callback


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

    __slots__ = ("_address", "_target", "buffer", "done", "error", "flying", "granule", "name",
                 "nbytes", "over", "rest", "write")  # fmt: skip

    def __init__(self, write: bool, target: Target, buffer: Buffer, name: str,
                 over: Callback) -> None:  # fmt: skip
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
        return Request(key, self.write, self._target.fd, self._address + at, nbytes,
                       self._target.offset + at)  # fmt: skip

    def fail(self, error: BaseException) -> None:
        """One of its requests is over, badly; the first error stays."""
        self.flying -= 1
        self.error = self.error or error

    def fault(self, code: int, why: str) -> IOFault:
        return IOFault(code, "write" if self.write else "read", self._target.path, self.name,
                       self._target.offset, self.done, self.nbytes, why)  # fmt: skip

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
