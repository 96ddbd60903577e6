"""Replays a step with entries on other tiers, in a fraction of the time of a simulation.

What is fetched comes alike from host and disk, and leaves alike for either, so the instructions of
a forward and a backward are the same whichever of the two an entry rests on. `Replay` walks a step
once, with the simulator, and writes down what each transfer and each piece of compute waits for.
With other homes the times follow from these rows:

    compute 3   waits for compute 2 and transfer 7      begins when both are over
    transfer 7  waits for transfer 4, out of its slot   is carried once its link has carried all
                                                        that was ready before

Left out is most of what makes the simulator exact: pieces of a transfer, which bytes of the staging
ring are free, and, beside the host, what waits until copies are enqueued. So a replay tells which
homes are worth a simulation, and the simulator judges them (`planner/exchanges.py`). Pure.
"""

from collections.abc import Iterator, Mapping, Sequence
from heapq import heappop, heappush
from typing import NamedTuple

from zcompile.ir.effects import GRADIENT, HomeAccess, Ticket
from zcompile.ir.step import StepTrace
from zcompile.ir.types import EntryRef
from zcompile.machine.cost import Costs
from zcompile.machine.model import Link
from zcompile.machine.staging import lane_bytes
from zcompile.planner.links import MOST_PIECES, SimTransfer
from zcompile.planner.paths import DISK
from zcompile.planner.simulator import ComputeTask, InFlight, SimulatedSteps, behind_forward


class _Way(NamedTuple):
    """The lanes that carry a transfer, and for how long.

    then      the second lane; None: there is one
    last_s    seconds of the second lane, once the first is through: of the last piece
    behind_s  of what leaves: its slot is free so long before the second lane is through with it;
              None: it arrives
    """

    lane: str
    seconds: float
    latency_s: float
    then: str | None = None
    then_s: float = 0.0
    last_s: float = 0.0
    behind_s: float | None = None


class _Moved(NamedTuple):
    """A transfer: its entry, and the ways that bytes go if that is on the host, or on disk."""

    ref: EntryRef
    by_host: _Way
    by_disk: _Way


class _Row(NamedTuple):
    """What happens next.

    issue_s     seconds that the host takes before
    after       numbers of the rows whose memory on the device must be free, or filled
    after_home  of those that must be done
    work        seconds of compute; a transfer; None: nothing that takes time
    waits       whether the host waits for it
    """

    issue_s: float
    after: Sequence[int]
    after_home: Sequence[int]
    work: float | _Moved | None
    waits: bool


class Replay:
    """A step whose entries may change places between host and disk.

    step   as it was arranged
    homes  entry -> tier, with which it was
    """

    def __init__(self, step: StepTrace, costs: Costs, homes: Mapping[EntryRef, str]) -> None:
        recorder = _Recorder(step, costs, homes)
        recorder.step(behind_forward(step))
        self._begin, self._before = len(recorder.rows), recorder.last
        recorder.step()
        self._rows, self._last = recorder.rows, recorder.last
        self._lanes = costs.machine.links.keys()
        self._rests = {**{ref: fact.home for ref, fact in step.facts.items()}, **homes}

    def seconds(self, homes: Mapping[EntryRef, str]) -> float:
        """About the seconds of the step with these homes.

        Rows are settled in the order in which they are ready, so each lane carries first what is
        ready first.
        """
        rows, rests = self._rows, {**self._rests, **homes}
        over: list[float | None] = [None] * len(rows)
        home: list[float | None] = [None] * len(rows)
        ready, lacks = [0.0] * len(rows), [0] * len(rows)
        followers: dict[int, list[int]] = {}
        """Row -> those that wait until it is over, n, or all done, ~n."""
        waiting: list[tuple[float, int]] = []
        """(when it is ready, row) of those that lack nothing; ~row before its second lane."""
        free = dict.fromkeys(self._lanes, 0.0)

        def settle(wanted: int) -> float:
            """Settle what is ready until a row is; returns when it is over."""
            while (found := over[wanted]) is None:
                at, n = heappop(waiting)
                work = rows[max(n, ~n)].work
                if isinstance(work, float):
                    first = last = at + work
                elif work is None:
                    first = last = at
                else:
                    way = work.by_disk if rests[work.ref] == DISK else work.by_host
                    lane, lane_s, latency_s, then, then_s, last_s, behind_s = way
                    if n < 0:
                        assert then is not None, "there is a second lane"
                        n = ~n
                        first = last = max(at, free[then]) + last_s
                        free[then] = last + then_s - last_s
                    else:
                        free[lane] = max(at, free[lane]) + lane_s
                        first = last = free[lane] + latency_s
                        if then is not None and behind_s is None:
                            heappush(waiting, (first, ~n))
                            continue
                        if then is not None and behind_s is not None:
                            free[then] = max(at, free[then]) + then_s
                            last = max(free[then], first + last_s)
                            first = max(first, last - behind_s)
                over[n], home[n] = first, last
                for m in followers.pop(n, ()):
                    m, time_s = (m, first) if m >= 0 else (~m, last)
                    ready[m] = max(ready[m], time_s)
                    lacks[m] -= 1
                    if not lacks[m]:
                        heappush(waiting, (ready[m], m))
            return found

        host = begun = 0.0
        for number, (issue_s, after, after_home, _, waits) in enumerate(rows):
            if number == self._begin:
                begun = max(host, settle(self._before))
            host += issue_s
            soonest, lacking = host, 0
            for times, before, sign in ((over, after, 0), (home, after_home, -1)):
                for n in before:
                    if (time_s := times[n]) is None:
                        followers.setdefault(n, []).append(number ^ sign)
                        lacking += 1
                    elif time_s > soonest:
                        soonest = time_s
            ready[number], lacks[number] = soonest, lacking
            if not lacking:
                heappush(waiting, (soonest, number))
            if waits:
                host = max(host, settle(number))
        return max(host, settle(self._last)) - begun if rows else 0.0


class _Unended(InFlight):
    """Transfers of which none ever ends. What writes bytes stands for all that used them before,
    since it waits for them."""

    def start(
        self, ref: EntryRef, begin: int, end: int, writes: bool, transfer: SimTransfer
    ) -> None:
        rows = self._rows.get(ref, [])
        if writes and rows:
            self._rows[ref] = [row for row in rows if row[0] < begin or end < row[1]]
        super().start(ref, begin, end, writes, transfer)


class _Recorder(SimulatedSteps):
    """Walks steps without a clock, and writes down what waits for what, whenever that may end.

    last  the row of the latest compute
    """

    def __init__(self, step: StepTrace, costs: Costs, homes: Mapping[EntryRef, str]) -> None:
        super().__init__(step, costs, homes, tells=False)
        self.rows: list[_Row] = []
        self.last = 0
        self._number: dict[SimTransfer, int] = {}
        self._told_s = 0.0
        self._in_flight = _Unended()

    def _note(
        self,
        task: SimTransfer,
        work: float | _Moved | None,
        after: Sequence[SimTransfer],
        after_home: Sequence[SimTransfer] = (),
        waits: bool = False,
    ) -> None:
        issue_s, self._told_s = self._host - self._told_s, self._host
        before = tuple(self._numbers(after)), tuple(self._numbers(after_home))
        self._number[task] = len(self.rows)
        self.rows.append(_Row(issue_s, *before, work, waits))

    def _numbers(self, tasks: Sequence[SimTransfer]) -> Iterator[int]:
        return (self._number[task] for task in dict.fromkeys(tasks) if task in self._number)

    def _work(self, seconds: float, *after: SimTransfer) -> ComputeTask:
        before, self._compute = self._compute, SimTransfer(0, seconds=seconds)
        self.last, alone = len(self.rows), not self._asynchronous
        self._note(self._compute, float(seconds), (before, *after), waits=alone)
        return ComputeTask(before, self._host, self._compute)

    def _await(self, transfers: Sequence[SimTransfer]) -> None:
        if transfers:
            self._note(SimTransfer(0), None, transfers, waits=True)

    def _await_home(self, home: HomeAccess) -> None:
        blockers = self._in_flight.blockers(
            self._call.entry_of(home), home.begin, home.end, home.writes
        )
        if blockers:
            self._note(SimTransfer(0), None, (), blockers, waits=True)

    def _until_enqueued(self, transfers: Sequence[SimTransfer]) -> None:
        """Copies are enqueued when the host comes to them, as far as a replay knows."""

    def _make_room(self, nbytes: int) -> None:
        """The backlog is unbounded."""

    def _start(
        self,
        transfer: SimTransfer,
        ref: EntryRef,
        home: HomeAccess,
        after: Sequence[Ticket],
        follows: Sequence[SimTransfer] = (),
    ) -> None:
        blockers = self._in_flight.blockers(ref, home.begin, home.end, home.writes)
        self._in_flight.start(ref, home.begin, home.end, home.writes, transfer)
        moved = self._moved(transfer, ref, home) if transfer.route else None
        self._note(transfer, moved, [*follows, *(self._done[t] for t in after)], blockers)

    def _moved(self, transfer: SimTransfer, ref: EntryRef, home: HomeAccess) -> _Moved:
        ways, links = self._costs.ways, self._costs.machine.links
        nbytes, one_way = transfer.nbytes, lane_bytes(ways.ring_bytes)
        piece = min(nbytes, max(nbytes / MOST_PIECES, ways.chunk_bytes), one_way / 4)

        def alone(link: Link) -> _Way:
            return _Way(link.lane, nbytes / link.bytes_per_s, link.latency_s)

        def through_ring(link: Link, then: Link, behind_s: float | None = None) -> _Way:
            then_s, last_s = nbytes / then.bytes_per_s, piece / then.bytes_per_s
            return alone(link)._replace(
                then=then.lane, then_s=then_s, last_s=last_s, behind_s=behind_s
            )

        arrives = transfer.route[0].name in ("h2d", "disk_read") and not transfer.adds
        bus, disk = ("h2d", "disk_read") if arrives else ("d2h", "disk_write")
        if bus not in links or disk not in links:
            by = alone(links[transfer.route[0].name])
            return _Moved(ref, by, by)
        by_host, straight = alone(links[bus]), ways.straight_read
        if arrives:
            by_ring = through_ring(links[disk], links[bus])
        else:
            # Reads, which come first, take the rest of the ring.
            behind_s = (ways.ring_bytes - one_way) / links[disk].bytes_per_s
            by_ring = through_ring(links[bus], links[disk], behind_s)
            straight = ways.straight_write and home.role is not GRADIENT
            straight = straight and nbytes > ways.behind_bytes
        return _Moved(ref, by_host, alone(links[disk]) if straight else by_ring)
