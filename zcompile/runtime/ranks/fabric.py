"""Carries bytes between the ranks that train one model: gathers, exchanges and agreements.

Each kind has a lane of its own: a tag of its own, and a thread that lets collectives begin and end
in the order in which they were handed over, to which every rank hands them over alike. That is
agreed before bytes move: each compiled call, and each op outside of one that concerns several
ranks, first compares what all ranks are about to do, and how. What differs raises on all of them.

Where groups of ranks each hold a whole (`ir/rank_mesh.py`), a whole is gathered within each group,
and a gradient is exchanged and summed up there; what the groups have made of a share crosses
between the ranks that hold it, on a lane of its own.

A collective is messages between pairs of ranks, each into the place where its bytes belong; what
lies in the memory of a device passes memory of the host (`transport.py`). Several of a lane may be
under way at once (`lane.py`). Who waits for one waits for a promise that another thread can break:
a rank that fails, ends, or never comes ends all that waits for it (`watch.py`).
"""

import hashlib
import logging
import os
import struct
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from itertools import accumulate
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from zcompile.errors import RanksDiffer, ZinfError
from zcompile.ir.partition import (
    Crossing,
    Partition,
    SharedRange,
    exchanged,
    gathered,
    in_bucket,
    summed_over_replicas,
)
from zcompile.ir.rank_mesh import RankMesh
from zcompile.ir.torch_compat import materialised, store_of_ranks, where_store_is
from zcompile.runtime.device.base import Device
from zcompile.runtime.progress import BOARD
from zcompile.runtime.ranks.asking import ANSWER_S, AskedStore, Asker, ends_with_process
from zcompile.runtime.ranks.lane import Lane, Posts
from zcompile.runtime.ranks.link import NOTHING, LinksOfMesh, RankLink
from zcompile.runtime.ranks.meeting import meet
from zcompile.runtime.ranks.transport import (
    TAGS,
    PeerGone,
    host_memory,
    host_rows,
)
from zcompile.runtime.ranks.watch import (
    GRACE_S,
    LOOK_S,
    SILENT_S,
    Keeper,
    Waiting,
    Watch,
    patience,
    store_gone,
)
from zcompile.runtime.transfer.interrupts import uninterrupted
from zcompile.runtime.transfer.ticket import Finishing, Promise, Ticket

log = logging.getLogger(__name__)

LANES = ("agree", "gather", "exchange", "replicate")
"""The last one only where several groups each hold a whole."""
JOINING = "make a process group"
DIGEST_BYTES = 16
TEXT_BYTES = 424
"""Of a record, for people: what a rank is about to do."""
_HEAD = struct.Struct(f"<Q{DIGEST_BYTES}s{DIGEST_BYTES}sII")
RECORD_BYTES = _HEAD.size + TEXT_BYTES
NOMINAL_BYTES_PER_S = 1e9
"""Between processes of one machine, before any bytes have moved: what gloo does within a factor of
two (`benchmarks/ranks.py`)."""
_SESSIONS: dict[tuple[int, ...], int] = defaultdict(int)
"""Ranks -> how many sessions they have made, all in the same order."""
SAME_ORDER = (
    "let every rank make the same calls in the same order, with the same settings and the same "
    "number of batches, and be within zcompile.no_sync for the same ones; what reads or changes "
    "parameters, as printing, saving and evaluating do, is done by all ranks, or on rank 0 within "
    "zcompile.rank_zero_reads"
)


def digest_of(*parts: object) -> bytes:
    """A digest of values: of tensors on the CPU their bytes, of others their text."""
    made = hashlib.blake2b(digest_size=DIGEST_BYTES)
    for part in parts:
        if isinstance(part, Tensor):
            made.update(f"{part.dtype}{tuple(part.size())}".encode())
            # numpy has no bfloat16: its bytes are what counts.
            flat = materialised(part.detach()).cpu().contiguous().reshape(-1)
            made.update(flat.view(torch.uint8).numpy().data)
        else:
            made.update(repr(part).encode())
        made.update(b"\0")
    return made.digest()


@dataclass(frozen=True)
class Record:
    """What a rank is about to do.

    what    must be the same on all ranks
    detail  of what, in a digest, which must be the same too
    value   is handed to who asked, who may or may not want it to be the same
    text    for people
    """

    number: int
    detail: bytes
    value: bytes
    what: str
    text: str

    def packed(self) -> Tensor:
        """uint8 [RECORD_BYTES]"""
        what = self.what.encode()[: TEXT_BYTES // 2]
        text = self.text.encode()[: TEXT_BYTES - len(what)]
        head = _HEAD.pack(self.number, self.detail, self.value, len(what), len(text))
        return torch.frombuffer(
            bytearray((head + what + text).ljust(RECORD_BYTES, b"\0")), dtype=torch.uint8
        )

    @classmethod
    def unpacked(cls, memory: Tensor) -> "Record":
        raw = memory.numpy().tobytes()
        number, detail, value, whats, texts = _HEAD.unpack_from(raw)
        what = raw[_HEAD.size : _HEAD.size + whats]
        text = raw[_HEAD.size + whats : _HEAD.size + whats + texts]
        return cls(
            number, detail, value, what.decode(errors="replace"), text.decode(errors="replace")
        )


class Exchanged(NamedTuple):
    """What the ranks have made of one gradient, for the share of this rank, or for all of it.

    parts      [ranks, n]: of each rank, as it was; there once `ticket` is complete
    bucket     that it crossed in with others, whose parts are all of one dtype; None: with none
    at         its first element there
    of_groups  the parts are those of groups, [replicas, n]: each is what the ranks of a group have
               made, scaled and summed up
    """

    parts: Tensor
    ticket: Promise
    bucket: "_Bucket | None" = None
    at: int = 0
    of_groups: bool = False


class _Bucket:
    """Small gradients that crossed together. Their sums over ranks are made together too, when the
    first is asked for: each by itself, some dozens of elements, costs a job of the lane's thread.

    made  [1, n]: all sums, with what lies between two gradients; None: nobody has asked yet
    """

    def __init__(self, parts: Tensor) -> None:
        self.parts = parts
        self.made: Exchanged | None = None


class Marked(NamedTuple):
    """What each rank has marked, told with an agreement.

    every  uint8 [ranks, marks]: there once `ticket` is complete
    """

    every: Tensor
    ticket: Promise


def _wait_for(collective: Promise) -> None:
    """Wait for what other ranks take part in: two that wait for each other, each within long work
    of its own, are to be missed."""
    with BOARD.waiting():
        collective.wait()


def received(flat: Tensor, partition: Partition | None, tile: SharedRange | None) -> int:
    """How many elements of the gradient of each rank come to this one, as of `Fabric.exchange`."""
    if tile is not None:
        return tile.own_nbytes // flat.element_size()
    return flat.numel() if partition is None else partition.count


def add_up(total: Tensor, more: Tensor) -> None:
    """Add to a sum, on the host."""
    total.add_(more)


class LoneReading(Protocol):
    """How rank 0 reads while the others wait (`lone_reads.py`)."""

    def whole(self, entry: Any) -> Tensor:
        """The bytes of a whole tensor in ordinary host memory."""

    def check_readable(self, entry: Any) -> None:
        """raises  Unsupported, where this rank may not read a tensor alone"""

    def refusal(self, what: str) -> ZinfError:
        """The error where a rank would do what all ranks do together."""


class Fabric:
    """The ranks of one session, and what crosses between them.

    rank, size  this one, of how many; not those of the world, if the mesh is a part of that
    ranks       of the world, in the order of the mesh
    mesh        which of them hold shares of one whole
    shard       which share this one holds
    number      of the session, among those of the same ranks: the same on all of them
    lone_reads  how rank 0 reads alone, on all ranks as long as it does; None: all read together
    """

    lone_reads: LoneReading | None = None

    def __init__(
        self, ranks: Sequence[int], group: Any, timeout_s: float, replicas: int = 1
    ) -> None:
        """
        ranks     of the world, this one among them
        group     their process group, of gloo; None: they are all of the world, and make one of
                  their own
        replicas  how many groups of them hold a whole each, one behind the other
        """
        self.ranks = tuple(ranks)
        self.number = number = _SESSIONS[self.ranks]
        self.rank, self.size = list(ranks).index(dist.get_rank()), len(ranks)
        self.mesh = RankMesh(self.size, replicas)
        self.shard = self.mesh.shard_of(self.rank)
        self._error: BaseException | None = None
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._pending: set[Promise] = set()
        self._lanes: dict[str, Lane] = {}
        self._joins_since: float | None = None
        """When it has begun to make a process group with the others, on the monotonic clock; None:
        it makes none."""
        self._calls = 0
        self.ranks_per_node = self.size
        self.links = LinksOfMesh.all_one(RankLink())
        lanes = LANES if replicas > 1 else LANES[:-1]
        self.moved: dict[str, list[float]] = {lane: [0, 0.0] for lane in lanes}
        """Lane -> bytes that this rank has sent, and seconds that its collectives took, in all."""
        self._told = {lane: (0.0, 0.0) for lane in lanes}
        """As `moved`, when `totals` were reset last."""
        below = f"zcompile/{'-'.join(map(str, ranks))}/{number}"
        keeper, port = _keeper_of_store(self.ranks)
        asker = Asker(lambda: store_of_ranks(below), port)
        with ExitStack() as undo:
            undo.callback(asker.stop, ANSWER_S)
            # First through the store: what makes a group waits for a rank that never comes.
            store = AskedStore(asker, patience(keeper, self.rank, timeout_s))
            try:
                name, self._hosts = meet(store, self.rank, self.size, timeout_s)
            except dist.DistNetworkError as error:
                if (gone := store_gone(keeper)) is not None:
                    raise gone from error
                raise
            _SESSIONS[self.ranks] += 1
            self._watch = Watch(
                asker,
                f"{name}/",
                keeper,
                self.rank,
                self._hosts,
                timeout_s,
                self._waiting,
                self._doing,
                self.fail,
            )
            undo.callback(self._watch.end)
            if group is None:
                group = self._own_group(timeout_s)
            for at, name in enumerate(lanes):
                tag = TAGS + number * len(LANES) + at
                self._lanes[name] = Lane(name, group, tag, self._crashed)
                undo.callback(self._lanes[name].stop)
            undo.pop_all()

    def _own_group(self, timeout_s: float) -> Any:
        """A process group of these ranks, which are all of the world.

        Torch makes it in another thread: it waits there for a rank that has ended or stands still
        since it has come, for longer than that is waited for here.
        raises  RankFailed
        """
        made, promise = [], Promise()
        longest = timedelta(seconds=timeout_s + 2 * SILENT_S)

        def make() -> None:
            with Finishing(promise):
                made.append(dist.new_group(list(self.ranks), timeout=longest, backend="gloo"))

        self._joins_since = time.monotonic()
        try:
            with self._lock:
                self.check()
                self._pending.add(promise)
            thread = threading.Thread(target=make, name="zinf-ranks-group", daemon=True)
            thread.start()
            _, _, port = where_store_is()
            if port is not None:
                ends_with_process(thread, port)
            try:
                _wait_for(promise)
            except dist.DistNetworkError:
                self._check_soon()  # the watch is about to see who is gone
                raise
        finally:
            self._pending.discard(promise)
            self._joins_since = None
        return made[0]

    def _check_soon(self) -> None:
        """`check`, until there is something to raise, or a few looks of the watch are over."""
        until = time.monotonic() + 2 * GRACE_S
        while time.monotonic() < until:
            self.check()
            time.sleep(LOOK_S)

    @property
    def ranks_on_this_host(self) -> int:
        """How many ranks share this machine."""
        return self._hosts.count(self._hosts[self.rank])

    def over(self, links: LinksOfMesh, ranks_per_node: int) -> None:
        """Take these for the links between ranks from here on, on all of them alike: who has a
        throttle sends more messages than who has none.

        ranks_per_node  one behind the other
        """
        self.links, self.ranks_per_node = links, ranks_per_node
        for lane in self._lanes.values() if any(link.is_paced for link in links) else ():
            lane.pace()

    def carry_for(self, device: Device) -> None:
        """Gather to the memory of this device and exchange from there, from here on; all ranks do
        the same on a device of the same type, with no collective on its way.

        raises  ConfigInvalid, if memory of the host cannot be pinned
        """
        if device.streams is not None:
            for name in ("gather", "exchange"):
                self._lanes[name].carry_for(device, self.size - 1)

    def _doing(self) -> str:
        """What long work this rank does, or holds back; "": none."""
        if self._joins_since is not None:
            return JOINING
        return BOARD.doing() or next(filter(None, (link.holding() for link in self.links)), "")

    def _waiting(self) -> list[Waiting]:
        if (since := self._joins_since) is not None:
            return [Waiting(JOINING, since, other) for other in self._others()]
        found = (lane.waiting for lane in self._lanes.values())
        return [waiting for waiting in found if waiting is not None]

    # --- Agreements ---

    def agree(self, what: str, *detail: object, text: str = "") -> None:
        """Compare what all ranks are about to do; they wait for each other.

        what    is the same on all ranks, as is the digest of `detail`
        text    for people, where they differ
        raises  RanksDiffer on every rank, RankFailed
        """
        self.compare(what, bytes(DIGEST_BYTES), *detail, text=text)

    def compare(self, what: str, value: bytes, *detail: object, text: str = "") -> list[bytes]:
        """As `agree`; returns the value of each rank, of `DIGEST_BYTES`."""
        return [told for told, _ in self.tell(what, value, *detail, text=text)]

    def tell(
        self, what: str, value: bytes, *detail: object, text: str = ""
    ) -> list[tuple[bytes, str]]:
        """As `compare`; returns the text of each rank too, of which some 400 bytes are told."""
        records: list[Record] = []
        _wait_for(self._begin_agreement(what, digest_of(*detail), value, text, records))
        return [(record.value, record.text) for record in records]

    def begin_agreement(self, what: str, detail: bytes, text: str, marks: bytes = b"") -> Marked:
        """As `agree`, and does not wait: who waits for the ticket raises what that raises.

        marks  of this rank: a byte of 0 or 1 each, as many on all ranks
        """
        found: list[Record] = []
        with torch.inference_mode(False):  # the lane writes to it, whose thread is in no mode
            every = host_rows(self.size, len(marks), torch.uint8)
            every[self.rank] = torch.tensor(list(marks), dtype=torch.uint8, device="cpu")
        value = digest_of(marks)

        def tell() -> None:
            if len({record.value for record in found}) == 1:
                every[:] = every[self.rank]
                return
            others, own = self._others(), every[self.rank].clone()
            self._lanes["agree"].messages(
                f"tell marks of {what}",
                [(r, own) for r in others],
                [(r, every[r]) for r in others],
            )
            self.moved["agree"][0] += len(marks) * len(others)

        return Marked(every, self._begin_agreement(what, detail, value, text, found, tell))

    def _begin_agreement(
        self,
        what: str,
        detail: bytes,
        value: bytes,
        text: str,
        found: list[Record],
        then: Callable[[], None] = lambda: None,
    ) -> Promise:
        """then  is called when all have told the same, behind that and in its lane"""
        said = f"{what} {text}".strip()
        self.check_together(said)
        self._calls += 1
        own = Record(self._calls, detail, value, what, text)
        self._watch.note(said)

        def compare() -> None:
            rows = host_rows(self.size, RECORD_BYTES, torch.uint8)
            rows[self.rank] = own.packed()
            others = self._others()
            self._lanes["agree"].messages(
                f"agree on {what}",
                [(r, rows[self.rank]) for r in others],
                [(r, rows[r]) for r in others],
            )
            found.extend(map(Record.unpacked, rows))
            _check_same(found)
            then()

        return self._submit("agree", f"agree on {what}", compare, (), RECORD_BYTES)

    def told(self, what: str, content: bytes) -> bytes:
        """What rank 0 has to tell all: `content` there; that of others does not matter.

        raises  RanksDiffer, RankFailed
        """
        own = len(content).to_bytes(DIGEST_BYTES, "little")
        nbytes = int.from_bytes(self.compare(what, own)[0], "little")
        memory = torch.zeros(nbytes, dtype=torch.uint8, device="cpu")
        if self.rank == 0:
            memory = torch.frombuffer(bytearray(content), dtype=torch.uint8)
        self.spread(memory, what)
        return memory.numpy().tobytes()

    def rows(self, own: Tensor) -> Tensor:
        """A small tensor of each rank: [ranks, n], of its dtype, on the host.

        own  on any device; the host waits for what computes it

        raises  RanksDiffer, if another rank tells something else, or of another size
        """
        self.agree("tell each other", own.numel(), own.dtype, text=f"{own.numel()} numbers")
        found = host_rows(self.size, own.numel(), own.dtype)
        found[self.rank] = own.detach().reshape(-1).cpu()

        def collect() -> None:
            others, row = self._others(), found[self.rank].clone()
            self._lanes["agree"].messages(
                "tell each other", [(r, row) for r in others], [(r, found[r]) for r in others]
            )

        sent = own.numel() * own.element_size() * (self.size - 1)
        _wait_for(self._submit("agree", "tell each other", collect, (), sent))
        return found

    def sums(self, rows: Tensor, largest: bool = False) -> Tensor:
        """The sums, or the largest, over shares of numbers that ranks have of theirs: float64 [n].

        Added in the order of shares, so that all have the same bits; who holds the same share has
        the same numbers.
        """
        parts = self.rows(rows)[[*self.mesh.group_of(self.rank)]]
        if largest:
            return parts.amax(0)
        total = parts[0].clone()
        for part in parts[1:]:
            total += part
        return total

    # --- Bytes ---

    def share_of(self, whole: Tensor, tile: SharedRange | None = None) -> tuple[int, int]:
        """The bytes [begin, end) of a tensor's, or of a tile's, that this rank brings to its
        gather."""
        if tile is not None:
            return tile.own
        each = whole.numel() // self.mesh.shards
        return self.shard * each, (self.shard + 1) * each

    def gathered(
        self, name: str, partition: Partition, itemsize: int, read: Callable[[Tensor], Ticket]
    ) -> Tensor:
        """All of a tensor that ranks hold shares of, in ordinary host memory; blocks.

        itemsize  bytes of an element
        read      starts bringing the share of this rank into uint8 [partition.count * itemsize]
        returns   uint8 [partition.numel * itemsize]
        raises    RanksDiffer, RankFailed
        """
        owner, nbytes = partition.owner, partition.count * itemsize
        whole = partition.numel * itemsize
        of = "" if self.mesh.replicas == 1 else " of each group"
        who = "" if owner is None else f", which rank {owner}{of} holds"
        self.agree("read", name, whole if who else nbytes, owner, text=f"{name!r}{who}")
        lent = nbytes * partition.ranks if owner is None else max(nbytes, whole)
        with torch.inference_mode(False):  # another thread writes to it
            memory = host_memory(1, lent, torch.uint8)[0]
        if owner is None:
            self.gather(memory, name, [read(memory[nbytes * partition.rank :][:nbytes])]).wait()
        else:
            # Padding is read too, behind what the owner holds, or where its bytes will come.
            came, tile = read(memory[:nbytes]), partition.range_of(itemsize)
            self.gather(memory[:whole], name, [came], tile).wait()
        return memory[:whole]

    def gather(
        self,
        whole: Tensor,
        name: str,
        after: Sequence[Ticket],
        tile: SharedRange | None = None,
    ) -> Promise:
        """Start bringing the shares of a whole together, or what ranks have of a tile: those of
        this rank's group.

        whole   uint8 [ranks * n], or [tile.nbytes], on the host or the device; what this rank
                brings lies in its place once all of `after` is complete. The thread of the lane
                waits for that, and the promise is kept when the device has it all
        """
        mesh = self.mesh
        if tile is None:
            shares = list(whole.view(mesh.shards, -1))
        else:
            shares = [whole[slice(*tile.of_rank(shard))] for shard in range(mesh.shards)]
        own, others = shares[self.shard], self._others(mesh.group_of(self.rank))
        crossing, what = gathered(whole.numel(), mesh.shards, tile), f"gather {name!r}"
        sends = [(r, own) for r in others]
        receives = [(r, shares[mesh.shard_of(r)]) for r in others]
        posts = Posts(sends, receives, (whole,), after, self.links.of_group)
        sent = own.numel() * len(others)
        return self._submit_posts("gather", what, posts, crossing, after, sent)

    def exchange(
        self,
        flat: Tensor,
        partition: Partition | None,
        name: str,
        after: Sequence[Ticket],
        tile: SharedRange | None = None,
        dtype: torch.dtype | None = None,
    ) -> Exchanged:
        """Start giving every rank the parts of all ranks' gradients that are for it.

        flat       [numel], this rank's gradient, on the host or the device; not changed until the
                   ticket is complete. What comes lies in memory of the host
        partition  of the parameter; None: every rank gets all of it
        tile       of the gradient, which is all of `flat`: every rank gets what is of its share
        dtype      in which parts are added up, where nothing else is to be added to them before:
                   so what ranks hold shares of is summed up within each group, and these sums cross
                   between groups; None: the parts of all ranks cross. With one group that is alike
        """
        width, mesh = flat.element_size(), self.mesh
        shares = partition.range_of(width) if tile is None and partition is not None else tile
        within = dtype is not None and shares is not None and mesh.replicas > 1
        members = mesh.group_of(self.rank) if within else range(self.size)
        others = self._others(members)

        def cut(rank: int) -> Tensor:
            shard = mesh.shard_of(rank)
            begin, end = (0, flat.nbytes) if shares is None else shares.of_rank(shard)
            return flat[begin // width : end // width]

        parts = host_rows(len(members), received(flat, partition, tile), flat.dtype)
        crossing = exchanged(flat.nbytes, len(members), shares)
        own, lane = cut(self.rank), self._lanes["exchange"]
        target = parts[members.index(self.rank), : own.numel()]
        sends = [(r, cut(r)) for r in others]
        receives = [(r, parts[members.index(r), : own.numel()]) for r in others]
        link = self.links.of_group if within else self.links.of_all
        bring = partial(lane.bring, target, own)
        posts = Posts(sends, receives, (flat, parts), after, link, bring)
        sent = sum(part.numel() for _, part in sends) * width
        what = f"exchange the gradient of {name!r}"
        ticket = self._submit_posts("exchange", what, posts, crossing, after, sent)
        made = Exchanged(parts, ticket)
        if not within:
            return made
        assert dtype is not None, "sums cross"
        assert shares is not None, "ranks hold shares"
        wide = shares.in_nbytes(flat.numel() * dtype.itemsize)
        return self._over_replicas(made, wide, dtype, name)

    def _over_replicas(
        self, made: Exchanged, shares: SharedRange, dtype: torch.dtype, name: str
    ) -> Exchanged:
        """Start giving every rank what each group has made of its share: the sums, in `dtype`, of
        the parts in `made`, which are of this rank's group.

        shares  how ranks hold the gradient, or the tile of it, in `dtype`
        """
        mesh, own = self.mesh, shares.own_nbytes // dtype.itemsize
        members = mesh.replicas_of(self.rank)
        rows = host_rows(mesh.replicas, made.parts.shape[1], dtype)
        group = rows[members.index(self.rank)]
        summed = self._after(made, partial(self._fold, made.parts, group, Tensor.mul_))
        others = self._others(members)
        sends = [(r, group[:own]) for r in others]
        receives = [(r, rows[members.index(r), :own]) for r in others]
        posts = Posts(sends, receives, (rows,), (summed,), self.links.of_replicas)
        sent = own * dtype.itemsize * len(others)
        crossing = summed_over_replicas(shares, mesh.replicas)
        what = f"sum the gradient of {name!r} over groups"
        ticket = self._submit_posts("replicate", what, posts, crossing, (summed,), sent)
        return Exchanged(rows, ticket, of_groups=True)

    def exchange_all(self, flats: Sequence[Tensor], after: Sequence[Ticket]) -> list[Exchanged]:
        """As `exchange` of several small gradients, each of which every rank gets whole: in one
        collective.

        flats  [numel] each, on the host once all of `after` is complete
        """
        sizes = [flat.numel() * flat.element_size() for flat in flats]
        ends = list(accumulate(map(in_bucket, sizes)))
        begins = [0, *ends[:-1]]
        parts = host_rows(self.size, ends[-1], torch.uint8)
        others, own, lane = self._others(), parts[self.rank], self._lanes["exchange"]

        def bring() -> None:
            for flat, begin, size in zip(flats, begins, sizes, strict=True):
                lane.bring(own[begin : begin + size], flat.view(torch.uint8))

        sends, receives = [(r, own) for r in others], [(r, parts[r]) for r in others]
        posts = Posts(sends, receives, (*flats, parts), after, self.links.of_all, bring)
        crossing, sent = exchanged(ends[-1], self.size), ends[-1] * len(others)
        what = f"exchange {len(flats)} small gradients"
        promise = self._submit_posts("exchange", what, posts, crossing, after, sent)
        dtype = flats[0].dtype
        bucket = None
        if all(flat.dtype is dtype for flat in flats):
            bucket = _Bucket(parts.view(dtype))
        return [
            Exchanged(
                parts[:, begin : begin + size].view(flat.dtype),
                promise,
                bucket,
                begin // flat.element_size(),
            )
            for flat, begin, size in zip(flats, begins, sizes, strict=True)
        ]

    def added(self, exchanged: Exchanged, more: Exchanged, dtype: torch.dtype) -> Exchanged:
        """The parts of two contributions, added up before anything else is made of them.

        dtype  that of either, or the wider one in which they are added: the result's
        """
        sums = self._as(dtype, exchanged)

        def add() -> None:
            if sums is not exchanged.parts:
                sums.copy_(exchanged.parts)
            sums.add_(more.parts)

        return Exchanged(sums, self._after(exchanged, add))

    def add_here(self, total: Tensor, more: Tensor, after: Sequence[Ticket]) -> Promise:
        """Add to what this rank has of a gradient, before it is exchanged.

        total, more  of one size, on the host once all of `after` is complete
        """
        return self._submit("exchange", "add up", partial(add_up, total, more), after, 0)

    def blank(self, count: int, dtype: torch.dtype) -> Exchanged:
        """Parts of all ranks that are still to be `placed`: [ranks, count], zeros."""
        promise = Promise()
        promise.finish()
        return Exchanged(host_rows(self.size, count, dtype), promise)

    def placed(
        self, sums: Exchanged, tile: Exchanged, first: int, dtype: torch.dtype, adds: bool
    ) -> Exchanged:
        """The parts `sums`, with those of a tile in place of the elements from `first` on.

        dtype  of the result: that of `sums`, or wider
        adds   the tile is added to what is there
        """
        made, more = self._as(dtype, sums), tile.parts

        def place() -> None:
            if made is not sums.parts:
                made.copy_(sums.parts)
            here = made[:, first : first + more.shape[1]]
            if adds:
                here.add_(more)
            else:
                here.copy_(more)

        return Exchanged(made, self._after(tile, place))

    def scaled(self, exchanged: Exchanged, dtype: torch.dtype) -> Exchanged:
        """What is added to a gradient one after the other, in `dtype`, which is that of the parts
        or wider: each part times 1/ranks; with several groups, the sum of those for each group."""
        if exchanged.of_groups:
            return exchanged
        if self.mesh.replicas > 1:
            return self._folded_by_group(exchanged, dtype, Tensor.mul_)
        rows = self._as(dtype, exchanged)

        def scale() -> None:
            if rows is not exchanged.parts:
                rows.copy_(exchanged.parts)
            rows.mul_(1.0 / self.size)

        return Exchanged(rows, self._after(exchanged, scale))

    def folded(self, exchanged: Exchanged, dtype: torch.dtype) -> Exchanged:
        """The sum of the scaled parts in `dtype`, as parts of one: [1, n]. They are added in the
        order of ranks; with several groups those of each group, then what these come to. Parts that
        are narrower are widened one by one. Those that crossed in a bucket of one dtype are summed
        with all others of it."""
        parts, bucket = exchanged.parts, exchanged.bucket
        if bucket is not None and dtype is parts.dtype:
            if bucket.made is None:
                whole = Exchanged(bucket.parts, exchanged.ticket)
                bucket.made = self._folded(whole, dtype, torch.mul)  # others may not ask for sums
            sums, ticket = bucket.made.parts, bucket.made.ticket
            return Exchanged(sums[:, exchanged.at : exchanged.at + parts.shape[1]], ticket)
        return self._folded(exchanged, dtype, Tensor.mul_)

    def _folded(
        self, exchanged: Exchanged, dtype: torch.dtype, scale: Callable[[Tensor, float], Tensor]
    ) -> Exchanged:
        """scale  in place, where nobody needs the parts as they were; else into new memory"""
        total = host_memory(1, exchanged.parts.shape[1], dtype)
        if self.mesh.replicas == 1:
            fold = partial(self._fold, exchanged.parts, total[0], scale)
            return Exchanged(total, self._after(exchanged, fold))
        groups = exchanged
        if not exchanged.of_groups:
            groups = self._folded_by_group(exchanged, dtype, scale)

        def add() -> None:
            total[0] = groups.parts[0]
            for part in groups.parts[1:]:
                total[0] += part

        return Exchanged(total, self._after(groups, add))

    def _folded_by_group(
        self, exchanged: Exchanged, dtype: torch.dtype, scale: Callable[[Tensor, float], Tensor]
    ) -> Exchanged:
        """The sums of the scaled parts of each group, in the order of its ranks: [replicas, n]."""
        parts, mesh = exchanged.parts, self.mesh
        groups = host_memory(mesh.replicas, parts.shape[1], dtype)

        def fold() -> None:
            each = parts.view(mesh.replicas, mesh.shards, parts.shape[1])
            for group, total in zip(each, groups, strict=True):
                self._fold(group, total, scale)

        return Exchanged(groups, self._after(exchanged, fold), of_groups=True)

    def _fold(self, parts: Tensor, total: Tensor, scale: Callable[[Tensor, float], Tensor]) -> None:
        """Add parts of ranks, each times 1/ranks, one after the other: [ranks, n] to [n]."""
        for rank, part in enumerate(parts):
            scaled = scale(part.to(total.dtype), 1.0 / self.size)
            if rank:
                total += scaled
            else:
                total.copy_(scaled)

    @staticmethod
    def _as(dtype: torch.dtype, exchanged: Exchanged) -> Tensor:
        """Memory for parts in `dtype`: that of those which were exchanged, if they are of it."""
        parts = exchanged.parts
        return parts if parts.dtype is dtype else host_memory(len(parts), parts.shape[1], dtype)

    def _after(self, exchanged: Exchanged, act: Callable[[], object]) -> Promise:
        """Do something with parts that were exchanged, in the order of the lane that they came
        on."""

        def in_turn() -> None:
            act()

        lane = "replicate" if exchanged.of_groups else "exchange"
        return self._submit(lane, "add up", in_turn, (exchanged.ticket,), 0)

    def spread(self, memory: Tensor, name: str) -> None:
        """Give all ranks the bytes of rank 0: uint8 [n]."""

        first, what = self.rank == 0, f"spread {name!r}"
        sends = [(r, memory) for r in self._others()] if first else []
        receives = [] if first else [(0, memory)]
        posts = Posts(sends, receives, (memory,), (), self.links.of_all, is_alone=True)
        crossing = Crossing(0 if first else memory.numel(), memory.numel())
        sent = memory.numel() * len(sends)
        _wait_for(self._submit_posts("gather", what, posts, crossing, (), sent))

    def deliver(
        self, what: str, sends: Mapping[int, Tensor], receives: Mapping[int, Tensor]
    ) -> None:
        """Send bytes to some ranks and receive from some, who do the same; blocks.

        sends, receives  by rank: uint8 [n] on the host, as long on both sides
        raises           RankFailed
        """
        sent, came = (sum(t.numel() for t in some.values()) for some in (sends, receives))
        outward, inward = list(sends.items()), list(receives.items())
        memory = (*sends.values(), *receives.values())
        posts = Posts(outward, inward, memory, (), self.links.of_all, is_alone=True)
        crossing = Crossing(came, max(sent, came))
        _wait_for(self._submit_posts("gather", what, posts, crossing, (), sent))

    def _submit_posts(
        self,
        lane: str,
        what: str,
        posts: Posts,
        crossing: Crossing,
        after: Sequence[Ticket],
        sent: int,
    ) -> Promise:
        """Hand over a collective that may begin before others have ended."""
        collect = partial(self._carry, lane, what, posts, crossing)
        return self._submit(lane, what, collect, after, sent, posts)

    def _carry(self, lane: str, what: str, posts: Posts, crossing: Crossing) -> None:
        """Carry out one collective in its lane, at the pace of its link. raises  PeerGone"""
        link, came = posts.link, NOTHING
        try:
            self._lanes[lane].posted(what, posts)
            if link.is_paced:
                peers = {r for r, tensor in (*posts.sends, *posts.receives) if tensor.numel()}
                self._lanes[lane].agree_that_over(
                    f"{what}, over paced links",
                    lambda: link.hold(what, crossing.slowest, posts.since),
                    # Each listens to its neighbour first: of any that is killed one hears at once.
                    [r for r in self._others() if r in peers],
                )
            came = crossing
        finally:
            posts.arrive(came)

    @property
    def hosts(self) -> tuple[str, ...]:
        """The names of the machines that ranks run on."""
        return tuple(self._hosts)

    # --- Failures ---

    def fail(self, error: BaseException) -> None:
        """The ranks cannot go on: whatever waits for them ends with `error`, and so does what
        comes."""
        with self._lock:
            if self._error is not None:
                return
            self._error = error
            pending = list(self._pending)
        self.links.stop()
        for promise in pending:
            promise.finish(error)

    def failed_here(self, error: BaseException) -> None:
        """A call has failed on this rank, in the middle of what all ranks do: they are told."""
        self._watch.say_failed(error)
        if isinstance(error, ZinfError):
            self.fail(error)
            return
        try:
            raise self._watch.failed_here(error) from error
        except ZinfError as told:
            self.fail(told)

    def read_alone(self, reads: LoneReading | None) -> None:
        """From here on rank 0 reads alone, by these; None: all ranks read together again."""
        self.lone_reads = reads

    def check_together(self, what: str) -> None:
        """Check that all ranks may do something together. raises  Unsupported"""
        if self.lone_reads is not None:
            raise self.lone_reads.refusal(what)

    def check(self) -> None:
        """The door of whatever uses values: they may be new in part. raises  what has failed"""
        if self._error is not None:
            raise self._error

    def finish(self) -> None:
        """Wait until all collectives are done that were handed over; after a failure, for none.

        All ranks carry out the same ones, so each that left some out would leave another in the
        middle of a message.
        """
        with self._lock:
            pending = list(self._pending)
        for promise in pending:
            promise.wait_finished()

    @uninterrupted
    def close(self, error: BaseException) -> None:
        """This rank uses the model no more; idempotent. What was handed over is dropped: `finish`
        it before, where the ranks are well.

        error  what is raised by what was dropped, and by what comes, unless ranks failed before
        """
        if os.getpid() != self._pid:
            return
        self._watch.end()
        self.links.stop()
        for lane in self._lanes.values():
            lane.stop()
        self.fail(error)

    def _crashed(self, error: BaseException) -> None:
        self.fail(error)

    def _others(self, members: range | None = None) -> list[int]:
        """The other ranks, this one's neighbour first, so that not all talk to rank 0 at once.

        members  of those they are, as is this one; None: of all
        """
        members = range(self.size) if members is None else members
        at = members.index(self.rank)
        return [*members[at + 1 :], *members[:at]]

    def _submit(
        self,
        lane: str,
        what: str,
        job: Callable[[], None],
        after: Sequence[Ticket],
        sent: int,
        posts: Posts | None = None,
    ) -> Promise:
        """Hand a collective over to its lane.

        after  is complete before it begins
        sent   bytes that this rank sends
        posts  its messages, in a lane whose collectives may overlap; None: it has none, or the
               lane is another one
        """
        promise, jobs = Promise(), [job]
        del job

        def carry_out() -> None:
            with Finishing(promise):
                try:
                    for ticket in after:
                        ticket.wait()
                    if self._error is not None:
                        raise self._error
                    begun = time.perf_counter()
                    # Its memory is nobody's when the promise is kept: compute may have it then.
                    jobs.pop()()
                except PeerGone as gone:
                    # After a failure, or at the end, it is others that have closed the connection,
                    # or this rank: the peer is not to blame.
                    if self._error is None:
                        self.fail(self._watch.lost(gone.peer))
                    assert self._error is not None, "just set"
                    raise self._error from gone
                except BaseException as error:
                    # The others carry this collective out, and the next one would be taken for it.
                    promise.finish(error)  # who waits here is told the cause, not that there is one
                    self.failed_here(error)
                    raise
                moved = self.moved[lane]
                moved[0] += sent
                moved[1] += time.perf_counter() - begun
            self._pending.discard(promise)

        with self._lock:
            error = self._error
            if error is None:
                try:
                    self._pending.add(promise)
                    self._lanes[lane].submit(carry_out, posts)
                except BaseException:
                    self._pending.discard(promise)  # nobody carries it out
                    raise
        if error is not None:
            promise.finish(error)
        return promise

    def bytes_per_s(self, name: str) -> float:
        """The rate at which bytes of other ranks have come over the link of this name, in all
        collectives so far; if no ring has it for its slowest, over that which has. If it is paced,
        the highest that there was without its throttle."""
        link = self.links.named(name) or self.links.of_all
        found = link.best_bytes_per_s if link.is_paced else link.mean_bytes_per_s
        return found or NOMINAL_BYTES_PER_S

    def totals(self, reset: bool = False) -> dict[str, Any]:
        """Bytes that this rank has sent, and seconds that collectives took, by lane; since the last
        `reset`."""
        before, now = self._told, {lane: (row[0], row[1]) for lane, row in self.moved.items()}
        if reset:
            self._told = now
        return {
            "rank": self.rank,
            "ranks": self.size,
            "replicas": self.mesh.replicas,
            "bytes": {lane: int(n - before[lane][0]) for lane, (n, _) in now.items()},
            "seconds": {lane: s - before[lane][1] for lane, (_, s) in now.items()},
        }


def _keeper_of_store(ranks: Sequence[int]) -> tuple[Keeper, int | None]:
    """Who keeps the store of torch.distributed, and its port; None: it has none.

    ranks  of the world, which a session has
    """
    is_torchruns, host, port = where_store_is()
    where = f" (at {host}:{port})" if port is not None else ""
    if is_torchruns:
        return Keeper(None, "torchrun", where), port
    if 0 not in ranks:
        return Keeper(None, "rank 0 of the world", where), port
    return Keeper(list(ranks).index(0), "rank 0", where), port


@contextmanager
def told_to_ranks(fabric: Fabric | None) -> Iterator[None]:
    """A context whose failure the other ranks are told, since they wait for what comes after."""
    try:
        yield
    except BaseException as error:
        if fabric is not None:
            fabric.failed_here(error)
        raise


def _check_same(records: Sequence[Record]) -> None:
    """raises  RanksDiffer"""
    first = records[0]
    said = [(rank, f"{r.what} {r.text}".strip()) for rank, r in enumerate(records)]
    if any(r.what != first.what for r in records):
        raise RanksDiffer("what they do next", said, SAME_ORDER)
    if any(r.detail != first.detail for r in records):
        if len({text for _, text in said}) == 1:
            said = [(rank, f"{text} [{records[rank].detail.hex()[:8]}]") for rank, text in said]
        raise RanksDiffer(f"how they {first.what}", said, SAME_ORDER)
