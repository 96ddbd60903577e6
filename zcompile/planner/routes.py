"""Which links the bytes of an instruction travel over, by where its entry rests."""

from collections.abc import Iterable, Mapping, Sequence

from zcompile.errors import Unsupported
from zcompile.ir.handover import handover, last_writes, passes_by
from zcompile.ir.schedule import Fetch, Offload, Reduce, Store
from zcompile.ir.step import Step, StepCall
from zcompile.ir.types import Kind, Phase
from zcompile.machine.cost import Costs
from zcompile.machine.model import Link
from zcompile.planner.journeys import Journey

HOST, DISK = "host", "disk"
Ahead = tuple[StepCall | None, Mapping[int, Sequence[Fetch]]]
"""To which call fetches are handed over, and after which instruction they start."""


class Routes:
    """The ways of one step on one machine.

    homes  key of an entry -> tier; where it is silent, as the step was recorded
    """

    def __init__(self, step: Step, costs: Costs, homes: Mapping[int, str]) -> None:
        self._facts = step.facts
        self._ways = costs.ways
        self._machine = costs.machine
        self._homes = {**{key: fact.home for key, fact in step.facts.items()}, **homes}
        self._copies = {f.name: f.key for f in step.facts.values() if f.kind is Kind.COPY}
        self._written: set[int] = set()
        self._came: set[tuple[int, int]] = set()
        """Of which gradients, and from which byte of them on, a part went home in this step."""
        self._links: dict[tuple[str, ...], tuple[Link, ...]] = {}

    def begin(self) -> None:
        """A step begins: nothing was written in it yet."""
        self._written.clear()
        self._came.clear()

    def home(self, key: int) -> str:
        return self._homes.get(key, HOST)

    def resident(self, tier: str) -> Iterable[int]:
        """Bytes of each entry that rests there."""
        return (fact.nbytes for key, fact in self._facts.items() if self.home(key) == tier)

    def source(self, call: StepCall, fetch: Fetch) -> int:
        """Key of what a fetch brings: of the copy in another dtype, if it asks for that."""
        key = call.entries[fetch.entry]
        if fetch.cast is None or key not in self._facts:
            return key
        dtype = str(fetch.cast.narrow).removeprefix("torch.")
        return self._copies.get(f"{self._facts[key].name} in {dtype}", key)

    def handovers(self, calls: Sequence[StepCall]) -> list[Ahead]:
        """From each call to the one after it, from the last to the first; past those that it passes
        by, which hand over nothing themselves."""
        found: list[Ahead] = []
        heeded = [not self._passes_by(call) for call in calls]
        for number, now in enumerate(calls):
            after = [*range(number + 1, len(calls)), *range(number + 1)]
            if not heeded[number]:
                found.append((None, {}))
                continue
            then = next(calls[n] for n in after if heeded[n])
            writes = last_writes(now.schedule, now.entries.__getitem__)
            keys = {f.ticket: self.source(then, f) for f in then.schedule.fetches()}
            written: dict[int, int] = {t: writes[key] for t, key in keys.items() if key in writes}
            found.append((then, handover(now.schedule, then.schedule, written).starts))
        return found

    def _passes_by(self, call: StepCall) -> bool:
        kinds = [self._facts[k].kind if k in self._facts else Kind.RESULT for k in call.entries]
        return passes_by(call.schedule, kinds.__getitem__)

    def fetch(self, call: StepCall, fetch: Fetch) -> Journey:
        """To the arena."""
        key = self.source(call, fetch)
        home = self.home(key)
        if self._blank(call, key):
            return self._journey(0, 0, 0)
        if home == DISK and self._ways.straight_read:
            journey = self._journey(fetch.begin, fetch.nbytes, 1, "disk_read")
            journey.unseen = "h2d"
            return journey
        if home == DISK:
            return self._journey(fetch.begin, fetch.nbytes, 2, "disk_read", "h2d")
        return self._journey(fetch.begin, fetch.nbytes, 1, *(("h2d",) if home == HOST else ()))

    def store(self, call: StepCall, store: Store) -> Journey:
        """From the arena home."""
        key = call.entries[store.entry]
        self._written.add(key)
        home = self.home(key)
        if home == DISK and self._ways.straight_write:
            journey = self._journey(store.begin, store.nbytes, 1, "disk_write")
            journey.unseen = "d2h"
            return journey
        return self._leaving(home, store.begin, store.nbytes)

    def reduce(self, call: StepCall, reduce: Reduce) -> Journey:
        """A gradient home, or added to what came of it before."""
        key = -call.entries[reduce.entry]
        begin, home = reduce.begin, self.home(key)
        more = (key, begin) in self._came
        self._came.add((key, begin))
        if more and home == DISK:
            journey = self._journey(begin, reduce.nbytes, 2, "disk_read", "d2h", "disk_write")
        else:
            journey = self._leaving(home, begin, reduce.nbytes)
        journey.adds = more
        return journey

    def offload(self, call: StepCall, offload: Offload) -> Journey:
        """A value that backward needs, to the entry that it becomes."""
        return self._leaving(self.home(call.made[offload.made]), 0, offload.nbytes)

    def totals(self, journeys: Sequence[Journey]) -> tuple[dict[str, int], dict[str, float]]:
        """Bytes and busy seconds over each link."""
        nbytes = dict.fromkeys(self._machine.links, 0)
        busy_s = dict.fromkeys(self._machine.links, 0.0)
        for journey in journeys:
            for link in journey.route:
                on_disk = link.name.startswith(DISK)
                nbytes[link.name] += journey.disk_nbytes if on_disk else journey.nbytes
                busy_s[link.name] += journey.nbytes / link.bytes_per_s
            if journey.unseen and not self._ways.asynchronous:
                nbytes[journey.unseen] = nbytes.get(journey.unseen, 0) + journey.nbytes
        return nbytes, busy_s

    def _leaving(self, home: str, begin: int, nbytes: int) -> Journey:
        if home == DISK:
            return self._journey(begin, nbytes, 1, "d2h", "disk_write")
        return self._journey(begin, nbytes, 1, *(("d2h",) if home == HOST else ()))

    def _blank(self, call: StepCall, key: int) -> bool:
        """What a step makes anew holds nothing before; zeros come over no link."""
        fact = self._facts.get(key)
        if fact is None or call.phase is not Phase.STEP:
            return False
        return fact.kind is Kind.COPY or (fact.kind is Kind.RESULT and key not in self._written)

    def _journey(self, begin: int, nbytes: int, over_after: int, *links: str) -> Journey:
        if links not in self._links:
            self._links[links] = tuple(map(self._link, links))
        journey = Journey(nbytes, self._links[links], over_after)
        unit = self._ways.granule
        journey.disk_nbytes = -(-(begin + nbytes) // unit) * unit - begin // unit * unit
        return journey

    def _link(self, name: str) -> Link:
        try:
            return self._machine.links[name]
        except KeyError:
            raise Unsupported(
                f"the step moves bytes over {name!r}, which {self._machine.name!r} does not have",
                "give the machine that link, or keep everything on tiers that it reaches",
            ) from None
