"""Finds the links that the bytes of an instruction travel over, by the tier of its entry."""

from collections.abc import Container, Iterable, Mapping, Sequence
from typing import NamedTuple

from zcompile.errors import Unsupported
from zcompile.ir.effects import GRADIENT, IN, Effects, HomeAccess, Instruction
from zcompile.ir.handover import handed_over, last_writes, passes_by
from zcompile.ir.partition import Crossing, exchanged, gathered, summed_over_replicas
from zcompile.ir.step import StepCall, StepTrace
from zcompile.ir.types import EntryKind, EntryRef, Phase
from zcompile.machine.cost import Costs
from zcompile.machine.model import RANK_LINKS, Link, Machine
from zcompile.planner.links import SimTransfer

HOST, DISK = "host", "disk"
Ahead = tuple[StepCall | None, Mapping[int, Sequence[Instruction]]]
"""The call that fetches are handed over to, and the instructions after which they start."""


class Way(NamedTuple):
    """What a collective takes of a link between ranks: all of it, or one of two stages.

    kind  of those that begin one after the other
    """

    kind: str
    link: Link
    crossing: Crossing


def crossings(x: Effects, machine: Machine, wide: Container[str] = ()) -> list[Way]:
    """What a collective takes of links between the ranks of a machine, stage after stage; nothing
    where one rank is all.

    wide  names of parameters whose gradients hooks see, which cross in the parameter's dtype
    """
    mesh, per_node = machine.mesh, machine.ranks_per_node
    of_group = machine.way_of(mesh.group_ring(per_node))
    if x.fills:
        crossing = gathered(x.nbytes, mesh.shards, x.tile)
        return [Way(x.kind, of_group, crossing)] if of_group is not None else []
    shares, nbytes = x.shares, x.nbytes
    if x.wide_nbytes and x.name in wide:
        shares, nbytes = shares and shares.in_nbytes(x.wide_nbytes), x.wide_nbytes
    if shares is None:
        of_all = machine.way_of(mesh.whole_ring(per_node))
        return [Way(x.kind, of_all, exchanged(nbytes, mesh.ranks))] if of_all is not None else []
    found = []
    if of_group is not None:
        found.append(Way(x.kind, of_group, exchanged(nbytes, mesh.shards, shares)))
    of_replicas = machine.way_of(mesh.replica_ring(per_node))
    if of_replicas is not None:
        summed = shares.in_nbytes(x.wide_nbytes or x.nbytes)
        crossing = summed_over_replicas(summed, mesh.replicas)
        found.append(Way("replicate", of_replicas, crossing))
    return found


def crossing_wide(step: StepTrace) -> frozenset[str]:
    """The names of parameters whose gradients hooks of some rank see before they cross."""
    return frozenset(fact.name for fact in step.facts.values() if fact.crosses_wide)


def way_between_ranks(machine: Machine) -> Link | None:
    """The slowest link that a ring over all ranks of a machine passes; None: one rank is all."""
    return machine.way_of(machine.mesh.whole_ring(machine.ranks_per_node))


def ways_between_ranks(machine: Machine) -> tuple[Link, ...]:
    """The links between ranks that anything passes; none, where one rank is all."""
    mesh, per_node = machine.mesh, machine.ranks_per_node
    rings = (mesh.group_ring(per_node), mesh.replica_ring(per_node), mesh.whole_ring(per_node))
    return tuple(dict.fromkeys(link for r in rings if (link := machine.way_of(r)) is not None))


class LinkPaths:
    """The links of each transfer of one step on one machine.

    homes  entry -> tier; where it is silent, as the step was recorded
    """

    def __init__(self, step: StepTrace, costs: Costs, homes: Mapping[EntryRef, str]) -> None:
        self._facts = step.facts
        self._ways = costs.ways
        self._machine = costs.machine
        self._homes = {**{ref: fact.home for ref, fact in step.facts.items()}, **homes}
        self._copies = {f.name: f.ref for f in step.facts.values() if f.kind is EntryKind.COPY}
        self._wide = crossing_wide(step)
        self._written: set[EntryRef] = set()
        self._came: set[tuple[EntryRef, int]] = set()
        """Of which gradients, and from which byte of them on, a part went home in this step."""
        self._links: dict[tuple[str, ...], tuple[Link, ...]] = {}

    def begin(self) -> None:
        """Begin a step, in which nothing was written yet."""
        self._written.clear()
        self._came.clear()

    def home(self, ref: EntryRef) -> str:
        return self._homes.get(ref, HOST)

    def name(self, ref: EntryRef) -> str:
        """Name of an entry, for people; "" of one that the step does not know."""
        fact = self._facts.get(ref)
        return "" if fact is None else fact.name

    def resident(self, tier: str) -> Iterable[int]:
        """Bytes of each entry that rests on `tier`."""
        return (fact.nbytes for ref, fact in self._facts.items() if self.home(ref) == tier)

    def entry_of(self, call: StepCall, home: HomeAccess) -> EntryRef:
        """The entry that an access is about, which may be a low-precision copy."""
        ref = call.entry_of(home)
        if home.copy_dtype is None or ref not in self._facts:
            return ref
        dtype = str(home.copy_dtype).removeprefix("torch.")
        return self._copies.get(f"{self._facts[ref].name} in {dtype}", ref)

    def handovers(self, calls: Sequence[StepCall]) -> list[Ahead]:
        """For each call, the fetches that start in it for a later call.

        That is the next one, but for calls that are passed by, which hand over nothing themselves.
        """
        found: list[Ahead] = []
        # The next step begins with this one, unless that is passed by too.
        heeded = (call for call in calls if not call.schedule.changes_in_place)
        then = next(heeded, calls[0] if calls else None)
        for now in reversed(calls):
            assert then is not None, "there are calls"
            written = self._written_in(now, then)
            if passes_by(now.schedule, then.schedule, written):
                found.append((None, {}))
            else:
                found.append((then, handed_over(now.schedule, then.schedule, written)))
                then = now
        return found[::-1]

    def _written_in(self, now: StepCall, then: StepCall) -> Mapping[int, int]:
        """Ticket of a fetch of `then` -> instruction of `now` after which what it brings is
        written."""
        writes = last_writes(now.schedule, now.entries.__getitem__)
        return {
            x.ticket: writes[ref]
            for x in then.schedule.effects
            if x.lane is IN and x.home is not None and x.ticket is not None
            if (ref := self.entry_of(then, x.home)) in writes
        }

    def transfer(self, call: StepCall, ref: EntryRef, x: Effects) -> SimTransfer:
        """The transfer of an instruction, to or from the bytes of `ref`."""
        moved = x.home
        assert moved is not None, "a transfer moves bytes of an entry"
        if x.lane is IN:
            return self._arriving(call, ref, moved)
        if moved.role is GRADIENT:
            return self._gradient(ref, moved)
        self._written.add(ref)
        home = self.home(ref)
        straight = self._ways.straight_write and x.reads_slot is not None
        if home == DISK and straight and moved.nbytes > self._ways.behind_bytes:
            return self._sim_transfer(moved, 1, "disk_write", unseen="d2h")
        return self._leaving(home, moved)

    def _arriving(self, call: StepCall, ref: EntryRef, moved: HomeAccess) -> SimTransfer:
        """The transfer of bytes of an entry to the arena."""
        home = self.home(ref)
        if self._blank(call, ref):
            return SimTransfer(0)
        if home == DISK and self._ways.straight_read:
            return self._sim_transfer(moved, 1, "disk_read", unseen="h2d")
        if home == DISK:
            return self._sim_transfer(moved, 2, "disk_read", "h2d")
        return self._sim_transfer(moved, 1, *(("h2d",) if home == HOST else ()))

    def _gradient(self, ref: EntryRef, moved: HomeAccess) -> SimTransfer:
        """The transfer of a gradient home, where it is added to earlier parts."""
        at = moved.begin if moved.tile is None else moved.tile[0]
        home, more = self.home(ref), (ref, at) in self._came
        self._came.add((ref, at))
        if more and home == DISK:
            return self._sim_transfer(moved, 2, "disk_read", "d2h", "disk_write", adds=True)
        return self._leaving(home, moved, adds=more)

    def collective(self, x: Effects) -> list[tuple[str, SimTransfer]]:
        """What one rank gets from others, in a ring: over the slowest way between two of them;
        stage after stage, each with the kind of those that it follows.

        An agreement takes the latency of that way.
        """
        if x.is_agreement:
            way = way_between_ranks(self._machine)
            return [(x.kind, SimTransfer(0, seconds=0.0 if way is None else way.latency_s))]
        ways = crossings(x, self._machine, self._wide)
        return [
            (kind, SimTransfer(found.slowest, (link,), 1, disk_nbytes=found.arrives))
            for kind, link, found in ways
        ] or [(x.kind, SimTransfer(0))]

    def totals(self, transfers: Sequence[SimTransfer]) -> tuple[dict[str, int], dict[str, float]]:
        """Bytes and busy seconds over each link."""
        nbytes = dict.fromkeys(self._machine.links, 0)
        busy_s = dict.fromkeys(self._machine.links, 0.0)
        for transfer in transfers:
            for link in transfer.route:
                own = link.name.startswith(DISK) or link.name in RANK_LINKS
                nbytes[link.name] += transfer.disk_nbytes if own else transfer.nbytes
                busy_s[link.name] += transfer.nbytes / link.bytes_per_s
            if transfer.unseen and not self._ways.asynchronous:
                nbytes[transfer.unseen] = nbytes.get(transfer.unseen, 0) + transfer.nbytes
        return nbytes, busy_s

    def _leaving(self, home: str, moved: HomeAccess, adds: bool = False) -> SimTransfer:
        if home == DISK:
            return self._sim_transfer(moved, 1, "d2h", "disk_write", adds=adds)
        return self._sim_transfer(moved, 1, *(("d2h",) if home == HOST else ()), adds=adds)

    def _blank(self, call: StepCall, ref: EntryRef) -> bool:
        """Whether an entry has no bytes worth fetching: a step makes it anew; zeros come over no
        link."""
        if call.phase is not Phase.STEP or (fact := self._facts.get(ref)) is None:
            return False
        return fact.kind is EntryKind.COPY or (
            fact.kind is EntryKind.RESULT and ref not in self._written
        )

    def _sim_transfer(
        self,
        moved: HomeAccess,
        over_after: int,
        *links: str,
        unseen: str | None = None,
        adds: bool = False,
    ) -> SimTransfer:
        if links not in self._links:
            self._links[links] = tuple(map(self._link, links))
        unit = self._ways.granule
        return SimTransfer(
            moved.nbytes,
            self._links[links],
            over_after,
            adds=adds,
            disk_nbytes=-(-moved.end // unit) * unit - moved.begin // unit * unit,
            unseen=unseen,
        )

    def _link(self, name: str) -> Link:
        try:
            return self._machine.links[name]
        except KeyError:
            raise Unsupported(
                f"the step moves bytes over {name!r}, which {self._machine.name!r} does not have",
                "give the machine that link, or keep everything on tiers that it reaches",
            ) from None
