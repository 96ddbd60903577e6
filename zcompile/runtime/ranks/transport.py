"""Carries the messages of one lane between ranks, over gloo: from and to memory of the host.

    HostMessages    both ends lie in memory of the host: each message goes as it is
    PinnedMessages  what lies in memory of a device passes blocks of pinned memory

Gloo knows memory of the host alone. With a device of its own memory every message, wherever it
lies, is cut into blocks, the same on both ends, and carried in rounds, one block of each message a
round:

    round n    receive block n of each message | send block n of each
               meanwhile copy block n + 1 from the device, and what came in round n - 1 to it

Two sets of blocks take turns. Ranks may be a round apart and no more, since nobody ends a round
before those that it talks to have come to it; the one that is least far waits for nobody. Copies
are on a stream of the lane's own; the thread of the lane waits for their events: before it sends,
before it uses a block anew, and at the end. So a collective that is over is over on the device too.
"""

from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from zcompile.ir.torch_compat import end_messages
from zcompile.ir.units import KiB, MiB
from zcompile.runtime.device.base import Device
from zcompile.runtime.device.pages import copy_bytes
from zcompile.runtime.transfer.ticket import Ticket

TAGS = 1 << 24
"""The first tag of a message: in a group of the user's, nobody else is likely to use those."""
UNUSED_TAG = TAGS - 1
"""No message has it."""
LONGEST = timedelta(days=20)
"""Of a message: how long ranks wait for each other is up to `watch.py`, which knows why."""
PINNED_BYTES = 16 * MiB
"""Of each lane that carries what lies on a device; more, where many ranks take the least blocks."""
LEAST_BLOCK_BYTES = 64 * KiB
SETS = 2
"""Of blocks, which take turns."""

Message = tuple[int, Tensor]
"""A peer, and what goes there or comes from there: contiguous."""
Work = tuple[int, Any]
"""A peer, and what to wait for of a message that goes there or comes from there."""


class PeerGone(Exception):
    """The connection to a peer has closed."""

    def __init__(self, peer: int) -> None:
        super().__init__(peer)
        self.peer = peer


class Channel:
    """Messages with one tag, between memory of the host; those to one peer come in order.

    raises, whatever is called  PeerGone
    """

    def __init__(self, group: Any, tag: int) -> None:
        self._group, self._tag = group, tag

    def receive(self, peer: int, tensor: Tensor) -> Any:
        """Begin to receive; returns what to `wait` for."""
        try:
            return dist.irecv(tensor, None, self._group, self._tag, peer)
        except RuntimeError as error:
            raise PeerGone(peer) from error

    def send(self, peer: int, tensor: Tensor) -> Any:
        """Begin to send; returns what to `wait` for, before which nobody changes the tensor."""
        try:
            return dist.isend(tensor, None, self._group, self._tag, peer)
        except RuntimeError as error:
            raise PeerGone(peer) from error

    def wait(self, peer: int, work: Any) -> None:
        """Block until a message has been sent, or has come."""
        assert work is not None, "this rank is in the group"
        try:
            work.wait(LONGEST)
        except RuntimeError as error:
            raise PeerGone(peer) from error

    def end_all(self) -> None:
        """End what waits on this rank for messages of the group, whatever their tags: it is told
        that its peer is gone. The group is of no use any more, to this rank or to others."""
        end_messages(self._group, UNUSED_TAG)


class Messages(Protocol):
    """How the messages of a lane are carried; used by the thread of the lane alone."""

    def carry(
        self, sends: Sequence[Message], receives: Sequence[Message], at: Callable[[int], None]
    ) -> None:
        """Carry out one collective; returns when all of it has been sent and has come.

        Empty messages are left out on both sides.
        at      told which peer is waited for
        raises  PeerGone; RuntimeError, if a copy on the device fails
        """

    def bring(self, target: Tensor, source: Tensor) -> None:
        """Copy what this rank itself brings to memory of the host; returns when that is done.

        target, source  1-D, contiguous, as many elements of one dtype
        raises          RuntimeError, if a copy on the device fails
        """


class HostMessages:
    """Each message goes as it is: both ends lie in memory of the host."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel

    def carry(
        self, sends: Sequence[Message], receives: Sequence[Message], at: Callable[[int], None]
    ) -> None:
        self.end(self.begin(sends, receives), at)

    def begin(self, sends: Sequence[Message], receives: Sequence[Message]) -> list[Work]:
        """Begin to carry out one collective, behind those that have begun; returns what to `end`.

        raises  PeerGone
        """
        channel, works = self._channel, []
        for peer, tensor in receives:
            if tensor.numel():
                works.append((peer, channel.receive(peer, tensor)))
        for peer, tensor in sends:
            if tensor.numel():
                works.append((peer, channel.send(peer, tensor)))
        return works

    def end(self, works: Sequence[Work], at: Callable[[int], None]) -> None:
        """Return when all of a collective has been sent and has come; as `carry`."""
        for peer, work in works:
            at(peer)
            self._channel.wait(peer, work)

    def bring(self, target: Tensor, source: Tensor) -> None:
        target.copy_(source)


class _Block(NamedTuple):
    """A part of a message on its way to a peer: in memory of the host once `ready` is complete."""

    peer: int
    memory: Tensor
    ready: Ticket | None


class PinnedMessages:
    """What lies on a device passes blocks of pinned memory, of `PINNED_BYTES` in all; the module
    says how. All ranks use it at the same time, with as many others.

    others  how many ranks there are beside this one
    name    of the lane, for people
    raises  ConfigInvalid, if memory cannot be pinned
    """

    def __init__(self, channel: Channel, device: Device, others: int, name: str) -> None:
        streams = device.streams
        assert streams is not None, "its memory is its own"
        self._channel, self._is_on_host = channel, streams.is_on_host
        self._copier = streams.copier(name)
        # One for what is sent to each of the others, and one for what comes from it.
        blocks = SETS * 2 * max(others, 1)
        self.block_bytes = max(
            LEAST_BLOCK_BYTES, PINNED_BYTES // blocks // LEAST_BLOCK_BYTES * LEAST_BLOCK_BYTES
        )
        self._blocks = device.host_block(blocks * self.block_bytes).view(SETS, -1, self.block_bytes)

    def carry(
        self, sends: Sequence[Message], receives: Sequence[Message], at: Callable[[int], None]
    ) -> None:
        try:
            self._carry(_as_bytes(sends), _as_bytes(receives), at)
        except BaseException:
            with suppress(RuntimeError):
                self._copier.synchronize()  # nothing of it reads or writes any more
            raise

    def _carry(
        self, sends: Sequence[Message], receives: Sequence[Message], at: Callable[[int], None]
    ) -> None:
        channel, first_of_receives = self._channel, self._blocks.shape[1] // 2
        longest = max((tensor.numel() for _, tensor in (*sends, *receives)), default=0)
        landing: list[list[Ticket]] = [[] for _ in range(SETS)]
        """By set of blocks: the copies that still read them."""
        staged = self._staged(sends, 0)
        for n in range(-(-longest // self.block_bytes)):
            blocks, works, came = self._blocks[n % SETS], [], []
            self._await(landing[n % SETS])
            for at_block, (peer, tensor) in enumerate(receives, first_of_receives):
                part = memory = self._part(tensor, n)
                if not part.numel():
                    continue
                if not self._is_on_host(part):
                    memory = blocks[at_block, : part.numel()]
                    came.append((part, memory))
                works.append((peer, channel.receive(peer, memory)))
            for peer, memory, ready in staged:
                if ready is not None:
                    ready.wait()
                works.append((peer, channel.send(peer, memory)))
            staged = self._staged(sends, n + 1)
            for peer, work in works:
                at(peer)
                channel.wait(peer, work)
            landing[n % SETS] = [self._copier.enqueue(part, memory) for part, memory in came]
        for marks in landing:
            self._await(marks)

    def _staged(self, sends: Sequence[Message], n: int) -> list[_Block]:
        """Begin to copy block `n` of each message from the device: of what goes to several peers
        once."""
        found: list[_Block] = []
        copied: dict[tuple[int, int], _Block] = {}
        for peer, tensor in sends:
            part = self._part(tensor, n)
            if not part.numel():
                continue
            if self._is_on_host(part):
                found.append(_Block(peer, part, None))
                continue
            key = part.data_ptr(), part.numel()
            if key not in copied:
                memory = self._blocks[n % SETS, len(copied), : part.numel()]
                copied[key] = _Block(peer, memory, self._copier.enqueue(memory, part))
            made = copied[key]
            found.append(made._replace(peer=peer))
        return found

    def _part(self, tensor: Tensor, n: int) -> Tensor:
        """Block `n` of a message, which may be shorter, or empty."""
        return tensor[n * self.block_bytes : (n + 1) * self.block_bytes]

    @staticmethod
    def _await(marks: Sequence[Ticket]) -> None:
        for mark in marks:
            mark.wait()

    def bring(self, target: Tensor, source: Tensor) -> None:
        if self._is_on_host(source):
            target.copy_(source)
            return
        try:
            self._bring(target.view(torch.uint8), source.view(torch.uint8))
        except BaseException:
            with suppress(RuntimeError):
                self._copier.synchronize()
            raise

    def _bring(self, target: Tensor, source: Tensor) -> None:
        before: tuple[Tensor, Tensor, Ticket] | None = None
        for n in range(-(-source.numel() // self.block_bytes)):
            part = self._part(source, n)
            memory = self._blocks[n % SETS, 0, : part.numel()]
            now = self._part(target, n), memory, self._copier.enqueue(memory, part)
            if before is not None:
                self._take(*before)
            before = now
        if before is not None:
            self._take(*before)

    @staticmethod
    def _take(target: Tensor, memory: Tensor, ready: Ticket) -> None:
        ready.wait()
        copy_bytes(target, memory, target.numel())


def host_rows(rows: int, numel: int, dtype: torch.dtype) -> Tensor:
    """Memory of the host for what comes from ranks: [rows, numel], zeros; whatever the default
    device is."""
    return torch.zeros(rows, numel, dtype=dtype, device="cpu")


def host_memory(rows: int, numel: int, dtype: torch.dtype) -> Tensor:
    """As `host_rows`, where all of it is written before it is read."""
    return torch.empty(rows, numel, dtype=dtype, device="cpu")


def _as_bytes(messages: Sequence[Message]) -> list[Message]:
    """The messages that are not empty, as uint8."""
    return [(peer, tensor.view(torch.uint8)) for peer, tensor in messages if tensor.numel()]
