"""The runtime with one of its orders taken out: what the checker has to notice.

A mutant is an edit of the source of one function or more; one whose text is not there any more
fails, and is to be written anew.
"""

import contextlib
import inspect
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from types import FunctionType
from typing import Any

from zcompile.runtime.device import cuda
from zcompile.runtime.device.cuda import CudaCopier, CudaDevice
from zcompile.runtime.executor import _Call
from zcompile.runtime.foresight import Foresight
from zcompile.runtime.gradients.gradients import Gradients
from zcompile.runtime.live_memory import InFlightGradients, PendingReads
from zcompile.runtime.ranks.fabric import Fabric
from zcompile.runtime.ranks.transport import PinnedMessages
from zcompile.runtime.store import resident
from zcompile.runtime.transfer import transfer
from zcompile.runtime.transfer.one_copy import CopyEnds, OneCopy
from zcompile.runtime.transfer.queue import TransferQueue
from zcompile.runtime.transfer.transfer import Put, Transfer


@dataclass(frozen=True)
class Edit:
    """In the source of `owner.name`, `old` becomes `new`."""

    owner: Any
    name: str
    old: str
    new: str

    @contextlib.contextmanager
    def made(self) -> Iterator[None]:
        """Inside, the function is the edited one, whoever holds it."""
        function = inspect.unwrap(getattr(self.owner, self.name))
        before, function.__code__ = function.__code__, self._edited(function).__code__
        try:
            yield
        finally:
            function.__code__ = before

    def _edited(self, function: FunctionType) -> FunctionType:
        source = textwrap.dedent(inspect.getsource(function))
        found = source.count(self.old)
        assert found == 1, f"{self.old!r} is {found} times in {self.name}"
        source = source.replace(self.old, self.new)
        source = source[source.index("def ") :]  # without decorators
        made: dict[str, Any] = {}
        exec(compile(source, f"<{self.name} edited>", "exec"), function.__globals__, made)
        return made[self.name]


MUTANTS: dict[str, tuple[str, tuple[Edit, ...]]] = {
    "a fetch does not wait for compute that came before the call": (
        "streaming",
        (
            Edit(
                _Call,
                "_start",
                "[self.begun, *self._after(fetch.after)]",
                "self._after(fetch.after)",
            ),
            Edit(
                Foresight,
                "_follower",
                "self._followers.get(place) or self._followers.get((place[0], LATEST))",
                "None",
            ),
        ),
    ),
    "a fetch does not wait for the last reader of its slot": (
        "streaming",
        (Edit(_Call, "_start", "[self.begun, *self._after(fetch.after)]", "[self.begun]"),),
    ),
    "a fetch does not wait for puts of earlier calls that read its slot": (
        "streaming",
        (Edit(PendingReads, "of", "if low < end and begin < high", "if False"),),
    ),
    "a fetch ahead does not wait for compute": (
        "streaming",
        (Edit(Foresight, "passed", "[self._store.device.mark()]", "[]"),),
    ),
    "a gradient leaves without a mark": (
        "streaming",
        (
            Edit(
                Gradients,
                "receive",
                "grad, after = same, [self._store.device.mark()]",
                "grad, after = same, []",
            ),
            Edit(_Call, "_reduce", "self._after(reduce.after)", "[]"),
        ),
    ),
    "a chunk of the optimizer's step goes home before it is computed": (
        "streaming",
        (Edit(_Call, "_put", "self._after(store.after)", "[]"),),
    ),
    "a region's ticket is that of the beginning of its call": (
        "streaming",
        (Edit(_Call, "_run", "= self.store.device.mark()", "= self.begun"),),
    ),
    "compute does not wait for a fetch": (
        "streaming",
        (Edit(_Call, "_wait", "self._join(self.tickets[wait.ticket])", "pass"),),
    ),
    "compute waits until a copy is enqueued, and not for the copy": (
        "streaming",
        (
            Edit(
                cuda.Mark,
                "join_compute",
                "self.device.compute_stream().wait_event(self.event)",
                "pass",
            ),
        ),
    ),
    "a copy does not wait for its marks": (
        "streaming",
        (Edit(CudaDevice, "_on_stream", "stream.wait_event(mark.event)", "pass"),),
    ),
    "the event of a copy is recorded on the stream of compute": (
        "streaming",
        (
            Edit(
                CudaDevice,
                "_on_stream",
                "made.event.record(stream)",
                "made.event.record(_CUDA.current_stream.__self__.compute)",
            ),
        ),
    ),
    "the event of a copy is recorded before the copy": (
        "streaming",
        (
            Edit(
                CudaDevice,
                "_on_stream",
                "work()\n        made.event.record(stream)",
                "made.event.record(stream)\n        work()",
            ),
        ),
    ),
    "a mark is recorded on a stream of copies": (
        "streaming",
        (
            Edit(
                CudaDevice,
                "mark",
                "self.compute_stream()",
                "self._streams['h2d']",
            ),
        ),
    ),
    "a copy is told to have landed when it is enqueued": (
        "micro-batches",
        (Edit(CudaDevice, "_reap", "mark.wait()", "pass"),),
    ),
    "a transfer does not wait for those on its entry": (
        "micro-batches",
        (
            Edit(TransferQueue, "submit", "place.blockers(transfer)", "()"),
            Edit(TransferQueue, "copy_on_stream", "place.blockers(copy)", "()"),
        ),
    ),
    "a transfer does not wait for puts that read its memory": (
        "streaming",
        (
            Edit(
                TransferQueue,
                "submit",
                "self._follow(transfer, gate, ticket, ticket.copies_mark, ticket.memory_heard)",
                "pass",
            ),
            Edit(TransferQueue, "copy_on_stream", "others.append(ticket)", "pass"),
        ),
    ),
    "a value leaves before it is computed": (
        "offloaded activations",
        (Edit(_Call, "_offload", "after = after or [self.store.device.mark()]", "after = []"),),
    ),
    "a buffer goes back to the ring before it is written to disk": (
        "disk",
        (
            Edit(
                Put,
                "write",
                "partial(self.written, buffer)",
                "self.context.staging.give(buffer) or self.home.drop",
            ),
        ),
    ),
    "a buffer goes back to the ring while the device reads it": (
        "disk",
        (
            Edit(
                transfer._FetchedChunk,
                "enqueued",
                "self.fetch.enqueued(event)",
                "self.fetch.enqueued(event); self.fetch.context.staging.give(self.buffer)",
            ),
            Edit(
                transfer._FetchedChunk,
                "landed",
                "self.fetch.context.staging.give(self.buffer)",
                "pass",
            ),
        ),
    ),
    "a sum is formed before what is added has come": (
        "disk",
        (
            Edit(
                transfer._CopiedChunk,
                "enqueued",
                "self.transfer.enqueued(event)",
                "self.transfer.enqueued(event); isinstance(self.transfer, Add) and self.then(None)",
            ),
            Edit(
                transfer._CopiedChunk,
                "landed",
                "self.then(error)",
                "self.then(error) if not isinstance(self.transfer, Add) else None",
            ),
        ),
    ),
    "memory that compute made is let go of when its copy is enqueued": (
        "streaming",
        (
            Edit(
                OneCopy,
                "enqueue",
                "self.mark = self.streams.enqueue(",
                "self._owner = self._memory = None; self.mark = self.streams.enqueue(",
            ),
            Edit(InFlightGradients, "note", "self._sent.append((ticket, source))", "pass"),
        ),
    ),
    "memory goes back to compute, which does not wait for the copy that reads it": (
        "streaming",
        (Edit(OneCopy, "release", "self._join()", "pass"),),
    ),
    "a copy does not follow those that use the same bytes": (
        "streaming",
        (
            Edit(
                OneCopy,
                "enqueue",
                "[*marks, *(other.mark for other in follows if other.mark is not None)]",
                "marks",
            ),
        ),
    ),
    "a copy is enqueued without the marks that it comes after": (
        "streaming",
        (Edit(TransferQueue, "copy_on_stream", "marks.append(ticket)", "pass"),),
    ),
    "the event of a copy goes back to the pool when it is recorded": (
        "streaming",
        (
            Edit(
                CudaDevice,
                "_on_stream",
                "made.event.record(stream)",
                "made.event.record(stream); self.events.append(made.event)",
            ),
        ),
    ),
    "the event of a mark goes back to the pool when it is recorded": (
        "streaming",
        (
            Edit(
                CudaDevice,
                "mark",
                "made.event.record(self.compute_stream())",
                "made.event.record(self.compute_stream()); self.events.append(made.event)",
            ),
        ),
    ),
    "the event of a copy goes back to the pool when the next copy is enqueued": (
        "streaming",
        (
            Edit(
                CudaDevice,
                "_on_stream",
                "stream, made = self._streams[direction], Mark(self)",
                "stream, made = self._streams[direction], Mark(self); "
                "last = self.__dict__.setdefault('last', []); self.events.extend(last); "
                "last[:] = [made.event]",
            ),
        ),
    ),
    "compute does not wait for what it fetches beside what rests": (
        "part on the device",
        (Edit(_Call, "_wait", "self._join(self.tickets[wait.ticket])", "pass"),),
    ),
    "a late update does not wait for what it reads": (
        "late updates",
        (Edit(_Call, "_wait", "self._join(self.tickets[wait.ticket])", "pass"),),
    ),
    "compute does not wait for a narrow copy": (
        "narrow copies",
        (Edit(_Call, "_wait", "self._join(self.tickets[wait.ticket])", "pass"),),
    ),
}
"""What is broken -> the mode in which it is looked for, and the edits."""

OF_STORES: dict[str, tuple[str, tuple[Edit, ...]]] = {
    "copies to new memory do not wait for compute that had it before": (
        "copy to memory that compute had",
        (Edit(CudaDevice, "allocate_each", "*self._streams.values(), ", "*(), "),),
    ),
    "copies of ranks to new memory do not wait for compute that had it before": (
        "copy for ranks to memory that compute had",
        (Edit(CudaDevice, "allocate_each", ", *self._own_streams", ","),),
    ),
    "a new stream of ranks does not wait for compute": (
        "copy for ranks on a new stream",
        (Edit(CudaDevice, "copier", "stream.wait_stream(self.compute_stream())", "pass"),),
    ),
    "a copy has ended though nobody has waited for its event": (
        "send what came before what another waits for",
        (Edit(CopyEnds, "_hear", "first.mark.wait()", "pass"),),
    ),
    "a copy has ended when somebody looks, whatever its event says": (
        "send what came before what another waits for",
        (Edit(CopyEnds, "_has_ended", "not first.mark.done()", "False"),),
    ),
    "a transfer follows the reads of its entry's bytes, and not their way home": (
        "fetch a sum at once",
        (
            Edit(
                TransferQueue,
                "submit",
                "blocker.home_mark, blocker.end_heard",
                "blocker.copies_mark, blocker.end_heard",
            ),
        ),
    ),
    "a transfer does not follow copies that are enqueued": (
        "fetch what is there in part at once",
        (Edit(TransferQueue, "_follow", "transfer.follow(found)", "pass"),),
    ),
    "a transfer starts without the marks that it follows": (
        "fetch what is there in part at once",
        (
            Edit(
                Transfer,
                "start",
                "(*self.marks, *self._follows)",
                "self.marks",
            ),
        ),
    ),
    "a transfer of what is on disk follows the reads of its memory, and not their way home": (
        "fetch from disk at once",
        (Edit(Transfer, "home_mark", " and self.place.tier.in_memory", ""),),
    ),
    "what the host copies comes when it is enqueued, and does not heed marks": (
        "read at once",
        (Edit(TransferQueue, "_follow", "error is None and transfer.heeds_marks", "not error"),),
    ),
    "a copy on the host does not wait for its marks": (
        "put from the host at once",
        (Edit(cuda, "_copy_on_host", "mark.wait()", "pass"),),
    ),
    "an extent is given back while transfers are on it": (
        "die at once",
        (
            Edit(TransferQueue, "free", "idle = not place.in_flight", "idle = True"),
            Edit(
                TransferQueue,
                "_finished",
                "free = started and place.freed and not place.in_flight",
                "free = False",
            ),
        ),
    ),
}
"""What is broken -> the use of a store in which it is looked for (`test_stores`), and the edits."""

OF_RANKS: dict[str, tuple[str, tuple[Edit, ...]]] = {
    "a gather begins before this rank's share has come": (
        "streaming",
        (Edit(_Call, "_gather", "*self._after(gather.after), *readers]", "*readers]"),),
    ),
    "a lane waits for nothing": (
        "streaming",
        (Edit(Fabric, "_submit", "ticket.wait()", "pass"),),
    ),
    "compute does not wait for a gather": (
        "streaming",
        (Edit(_Call, "_wait", "self._join(self.tickets[wait.ticket])", "pass"),),
    ),
    "a gather is over before its copies to the device are": (
        "streaming",
        (
            Edit(
                PinnedMessages,
                "_carry",
                "for marks in landing:\n        self._await(marks)",
                "pass",
            ),
        ),
    ),
    "a gradient crosses before compute has made it": (
        "streaming",
        (
            Edit(
                _Call,
                "_exchange",
                "[*self._after(x.after), self.store.device.mark()]",
                "[]",
            ),
        ),
    ),
    "a block is sent before it is copied from the device": (
        "streaming",
        (Edit(PinnedMessages, "_carry", "ready.wait()", "pass"),),
    ),
    "what this rank itself brings is taken before it is copied from the device": (
        "streaming",
        (Edit(PinnedMessages, "_take", "ready.wait()", "pass"),),
    ),
    "a block receives anew what the device has yet to copy": (
        "small blocks",
        (Edit(PinnedMessages, "_carry", "self._await(landing[n % SETS])", "pass"),),
    ),
    "the event of a copy of a lane is recorded before the copy": (
        "streaming",
        (
            Edit(
                CudaCopier,
                "enqueue",
                "target.copy_(source, non_blocking=True)\n        made.event.record(self._stream)",
                "made.event.record(self._stream)\n        target.copy_(source, non_blocking=True)",
            ),
        ),
    ),
}
"""What is broken -> the mode in which `tests/ranks/test_simulated_cards.py` looks for it, and the
edits."""

EQUIVALENT: dict[str, tuple[str, tuple[Edit, ...]]] = {
    # What is put to the device is moved by compute, and came from compute: one stream.
    "the device does not wait for what is put to it": (
        "part on the device",
        (Edit(resident, "put", "ticket.join_compute()", "pass"),),
    ),
}
"""What is not needed for order, and why: the same, where nothing may be told."""
