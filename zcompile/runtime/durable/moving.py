"""What a commit moves, through the staging ring, which is idle then.

from_host    host tier -> buffer -> the entry's copy on disk
over         committed extent -> buffer -> the new one: what the step did not write
sum          new extent -> buffer -> checksum: what was written in parts
"""

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial

from zcompile.runtime.device.pages import copy_bytes
from zcompile.runtime.durable.checksums import BEST, Piece, Running
from zcompile.runtime.durable.tier_durable import DurableTier
from zcompile.runtime.durable.versions import Versions
from zcompile.runtime.tiers.extents import Written
from zcompile.runtime.tiers.place import Place
from zcompile.runtime.tiers.tiers import Buffer, Extent
from zcompile.runtime.transfer.staging import Staging
from zcompile.runtime.transfer.ticket import Countdown, Promise

Begin = Callable[[int, int, Buffer], Promise]
"""Start moving bytes [begin, end) through the buffer."""


class Moving:
    """Moves under way for one commit."""

    def __init__(self, staging: Staging, tier: DurableTier) -> None:
        self._staging = staging
        self._tier = tier
        self._over = Countdown()

    def wait(self) -> None:
        """All that was begun is over. raises  what a move failed with"""
        over, self._over = self._over, Countdown()
        over.drop()
        over.wait()

    def from_host(self, place: Place, extent: Extent) -> None:
        """Start writing what `place`, on the host, holds to `extent` of the durable tier."""
        unit = self._tier.granule
        blocks = Written()
        for begin, end, held in place.written.pieces(0, place.nbytes):
            if held:
                blocks.add(begin // unit * unit, min(-(-end // unit) * unit, extent.nbytes))
        ranges = [(low, high) for low, high, held in blocks.pieces(0, extent.nbytes) if held]
        self._begin(ranges, partial(self._write, place, extent))

    def over(self, extent: Extent, versions: Versions, ranges: Sequence[tuple[int, int]]) -> None:
        """Copy `ranges` from the committed version to the working one; blocks."""
        self._begin(ranges, partial(self._copy, extent, versions))
        self.wait()
        for begin, end in ranges:
            versions.fresh.add(begin, end)

    def sum(self, extent: Extent, versions: Versions, pieces: Sequence[Piece]) -> None:
        """Read pieces back for their checksums; blocks, one request at a time: they are rare."""
        for piece in pieces:
            running = Running(BEST)
            for begin, end in self._chunks([(piece.begin, piece.end)]):
                self._begin([(begin, end)], partial(self._add, extent, running))
                self.wait()
            versions.pieces.know(piece.begin, piece.end, running.value())

    def _begin(self, ranges: Sequence[tuple[int, int]], begin: Begin) -> None:
        chunks = deque(self._chunks(ranges))
        self._over.hold(len(chunks))
        self._staging.request("write", _Flow(begin, self._over, self._staging), chunks)

    def _chunks(self, ranges: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
        size = self._staging.chunk_bytes
        return [(low, min(low + size, end)) for begin, end in ranges
                for low in range(begin, end, size)]  # fmt: skip

    def _write(self, place: Place, extent: Extent, begin: int, end: int,
               buffer: Buffer) -> Promise:  # fmt: skip
        for at, memory in place.tier.pieces(place.extent, begin, min(end, place.extent.nbytes)):
            copy_bytes(buffer.memory[at - begin :], memory, memory.numel())
        return self._tier.write(extent, begin, buffer.part(0, end - begin))

    def _copy(self, extent: Extent, versions: Versions, begin: int, end: int,
              buffer: Buffer) -> Promise:  # fmt: skip
        part = buffer.part(0, end - begin)
        over = Countdown()
        assert versions.working is not None
        assert versions.committed is not None
        write = partial(self._copied, versions.working, begin, part, over)
        self._tier.disk.read(versions.committed, begin, part).then(write)
        return over

    def _copied(self, working: Extent, begin: int, part: Buffer, over: Countdown,
                error: BaseException | None) -> None:  # fmt: skip
        if error is not None:
            over.drop(error)
        else:
            self._tier.disk.write(working, begin, part).then(over.drop)

    def _add(self, extent: Extent, running: Running, begin: int, end: int,
             buffer: Buffer) -> Promise:  # fmt: skip
        part = buffer.part(0, end - begin)
        over = Countdown()

        def add(error: BaseException | None) -> None:
            if error is None:
                running.update(part.view)
            over.drop(error)

        self._tier.read(extent, begin, part).then(add)
        return over


class _Flow:
    """Chunks of one move, each with a buffer of the ring: a `Staged`."""

    def __init__(self, begin: Begin, over: Countdown, staging: Staging) -> None:
        self._begin = begin
        self._over = over
        self._staging = staging

    def room(self, begin: int, end: int) -> int:
        return end - begin

    def begin_chunk(self, begin: int, end: int, buffer: Buffer) -> None:
        self._begin(begin, end, buffer).then(partial(self._ended, buffer))

    def _ended(self, buffer: Buffer, error: BaseException | None) -> None:
        self._staging.give(buffer)
        self._over.drop(error)
