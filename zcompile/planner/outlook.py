"""Evaluates a step on a machine: placed, scheduled, simulated, and compared with its bounds.

Pure: a step, terms, and nothing else. `frontend/dry_run/plan.py` traces the step, `report.py`
prints the answer.
"""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from math import inf

from zcompile.errors import BudgetExceeded, ConfigInvalid
from zcompile.ir.optimizer_step import LEAST_PACED_BYTES
from zcompile.ir.schedule import Run
from zcompile.ir.step import StepTrace, Timeline
from zcompile.ir.types import HELD, EntryRef, Phase, aligned
from zcompile.ir.units import GiB
from zcompile.machine.cost import Costs, TransferModes
from zcompile.machine.model import TIERS, Machine
from zcompile.machine.staging import backlog_bytes, behind_bytes, staging_size
from zcompile.passes.arrange import ArenaShare, Arrangements, arranged
from zcompile.planner.bounds import Bound, Demand, bound, demand_of
from zcompile.planner.exchanges import exchanged
from zcompile.planner.floor import Floor, floor
from zcompile.planner.host_step import demand_on_host, floor_on_host, reaching
from zcompile.planner.late_step import with_all_late
from zcompile.planner.narrow_step import NOTHING_NARROW, Reading, with_copies
from zcompile.planner.pieces import demand_in_pieces
from zcompile.planner.placement import Room, group, lane_seconds, place
from zcompile.planner.simulator import step_seconds
from zcompile.planner.step_plan import (
    UNBOUNDED_LEAD,
    StepPlan,
    as_planned,
    plan_late_or_not,
    plan_narrow_or_not,
    plan_on_host_or_not,
    plan_step,
    plan_whole_or_not,
    plan_with_wholes,
    stay_and_scratch,
    widened_or_not,
)
from zcompile.planner.whole_step import gathered_in, with_wholes

MORE_BYTES = GiB
"""Bytes of a tier whose value a shadow price is."""
MORE_ENTRIES = 4
"""Entries rest whole, so that one more GiB may hold none more: the step is planned again with room
for so many of the largest, and the price is per GiB of that."""

LEAST_SHARE = 8
"""A device that activations fill is planned as if 1/LEAST_SHARE of it were left for entries; the
report says what it lacks."""


@dataclass(frozen=True)
class Terms:
    """The machine and the choices that a step is planned for.

    emulates     compute reaches the host's memory, and disks reach the device's (`Room`)
    prefetch     whether a fetch may start ahead of its reader
    bounded      the device's tier bounds all that a step takes of it, as `device_memory` does: live
                 bytes of graphs are chosen for it; else everything is saved, and takes its part of
                 it
    chunk_bytes  per operand and chunk of an optimizer's step, at most
    activations, tile_bytes, regions, stage, partition  as in `Config`
    updates_on_host  whether a plan of one rank may let the host compute updates beside the device
    tiles_by_kernels  whether kernels of our own compute tiles of a loss, as `Config` says of a run
    late_chunk_bytes  as of a `Device`
    """

    machine: Machine
    ways: TransferModes
    emulates: bool
    prefetch: bool
    bounded: bool
    chunk_bytes: int
    activations: str = "auto"
    tile_bytes: int | None = None
    regions: str = "auto"
    stage: str | int = "auto"
    partition: str = "slices"
    updates_on_host: bool = False
    tiles_by_kernels: bool = False
    late_chunk_bytes: int = LEAST_PACED_BYTES

    def on(self, machine: Machine) -> "Terms":
        """The same terms for another machine, whose host has room for another staging ring."""
        host = machine.tiers["host"]
        ring = staging_size(host, self.emulates and "disk" in machine.tiers)
        ways = replace(
            self.ways,
            chunk_bytes=ring.chunk_bytes,
            ring_bytes=ring.nbytes,
            behind_bytes=behind_bytes(ring.nbytes, machine.links),
            backlog_bytes=backlog_bytes(host, self.emulates),
        )
        return replace(self, machine=machine, ways=ways)

    def costs(self) -> Costs:
        return Costs(self.machine, self.ways)


@dataclass(frozen=True)
class Shadow:
    """Seconds of a step that one more GiB of a tier saves.

    least_s    of the bound
    planned_s  of the simulated step, planned again with `nbytes` more; per GiB of them
    """

    tier: str
    least_s: float
    planned_s: float
    nbytes: int


@dataclass(frozen=True)
class Evaluation:
    """The plan of a step, its times, and its bounds.

    room        bytes of each tier for entries
    used_bytes  by tier, residents only
    missing     bytes that a tier would have to have more; empty if all fits
    lanes_s     phase -> link, or links that take turns -> busy seconds under the plan
    one_call_s  seconds of the step, if its micro-batches came as one call; None: there is one
    """

    plan: StepPlan
    timeline: Timeline
    bound: Bound
    floor: Floor
    room: Room
    used_bytes: Mapping[str, int]
    missing: Mapping[str, int]
    shadows: tuple[Shadow, ...]
    compute_s: Mapping[Phase, float]
    lanes_s: Mapping[Phase, Mapping[str, float]]
    one_call_s: float | None = None

    @property
    def batch_factor(self) -> float:
        """Ratio of the batch that hides all transfers of forward and backward to the batch of the
        step.

        Compute grows with the batch and transferred bytes do not, to first order: that is how
        regions are priced, and no plan is made for the other batch.
        """
        return max(
            (
                max(self.lanes_s.get(phase, {}).values(), default=0.0) / seconds
                for phase, seconds in self.compute_s.items()
                if phase is not Phase.STEP and seconds > 0
            ),
            default=0.0,
        )


def evaluated(
    step: StepTrace,
    terms: Terms,
    beside_bytes: int = 0,
    chunk_bytes: int = 0,
    prices: bool = True,
    reading: Reading = NOTHING_NARROW.get,
) -> Evaluation:
    """The evaluation of a step.

    beside_bytes  of the device, that graphs have live outside its arena
    chunk_bytes   of its optimizer's chunks, if those are to be larger than the device's
    prices        whether to plan again for one more GiB of each tier
    reading       says what reads low-precision copies of weights in place of a schedule
    raises        BudgetExceeded, if the device has no room for what one region reads
    """
    # What there is: room on the tiers, costs, gradients that stay, the step scratch.
    room = room_of(terms, beside_bytes)
    costs = terms.costs()
    lead = UNBOUNDED_LEAD if terms.prefetch else 0
    chunk_bytes = max(chunk_bytes, terms.chunk_bytes)
    arena_bytes = room.nbytes["device"]
    beside = terms.machine.tiers["device"] - arena_bytes

    def seconds(made: StepTrace, homes: Mapping[EntryRef, str]) -> float:
        return step_seconds(made, costs, homes)

    several = terms.machine.ranks > 1
    narrow = None if several else with_copies(step, reading)
    read_as = [step] if narrow is None else [step, narrow.step]
    ways = [with_all_late(way, chunk_bytes, terms.late_chunk_bytes) for way in read_as]
    for name, value, default in (
        ("stage", terms.stage, "auto"),
        ("partition", terms.partition, "slices"),
    ):
        if not several and value != default:
            why = "is of several ranks that train one model, and the machine has one"
            raise ConfigInvalid(name, value, why)
    if several and terms.stage != 3:
        ways.append(with_wholes(step, {row.ref for row in gathered_in(step)}))
    demands = [
        demand_in_pieces(way, costs.region_seconds, terms.machine, room.held_bytes) for way in ways
    ]
    found = [(demand, room) for demand in demands]
    on_host = terms.updates_on_host and not several
    if on_host:
        found += [(demand_on_host(way, costs), reaching(room)) for way in read_as]
    bounds = [(bound(demand, terms.machine.links, of), demand, of) for demand, of in found]
    least, demand, within = min(bounds, key=lambda row: row[0].seconds)

    def plan(
        step: StepTrace,
        kept: frozenset[EntryRef],
        windows: Sequence[int] | None,
        below_s: float = inf,
    ) -> StepPlan | None:
        stay, scratch = stay_and_scratch(
            step, terms.machine, arena_bytes, beside, chunk_bytes, kept
        )
        arena = ArenaShare(
            0,
            lead,
            chunk_bytes,
            room.reach,
            scratch=scratch,
            nbytes=arena_bytes,
            late_chunk_bytes=terms.late_chunk_bytes,
        )
        compute = demand_of(step, costs.region_seconds).phases_s
        return plan_step(
            step,
            terms.machine,
            room,
            arena,
            compute,
            seconds,
            least.seconds,
            stay,
            windows,
            below_s,
        )

    # The plan, near the bound if it can be; then all numbers of it.
    # What ranks exchange does not stay where backward made it.
    kept = frozenset(step.facts if several else ())
    planned = plan_late_or_not(
        step,
        plan,
        kept,
        room,
        chunk_bytes,
        seconds,
        late_chunk_bytes=terms.late_chunk_bytes,
    )

    def here_or_on_host(step: StepTrace, made: StepPlan) -> StepPlan:
        if not on_host:
            return made
        return plan_on_host_or_not(step, made, plan, kept, room)

    def not_late(
        step: StepTrace, _: object, windows: Sequence[int] | None, below_s: float = inf
    ) -> StepPlan | None:
        made = plan(step, kept, windows, inf if on_host else below_s)
        return None if made is None else here_or_on_host(step, made)

    planned = here_or_on_host(step, planned)

    if narrow is not None:
        planned = plan_narrow_or_not(step, planned, not_late, reading, room)
    if several and terms.stage == 2:
        wanted = frozenset(row.ref for row in gathered_in(step))
        planned = plan_with_wholes(step, not_late, wanted)
    elif several and terms.stage != 3:
        planned = plan_whole_or_not(step, planned, not_late, arena_bytes)
    step, base = as_planned(step, planned), step
    planned = widened_or_not(step, planned, arena_bytes, seconds)
    planned, timeline = exchanged(base, step, planned, costs, room, seconds)
    compute_s = demand_of(step, costs.region_seconds).phases_s
    homes = planned.placement.homes
    used, groups = _used(step, homes), group(step, terms.machine, room, planned.placement.stay)
    return Evaluation(
        plan=planned,
        timeline=timeline,
        bound=least,
        floor=min(
            (
                *(floor(base, d, costs, terms.machine.links, whole_room(terms)) for d in demands),
                *(
                    floor_on_host(base, d, costs, terms.machine.links, whole_room(terms))
                    for d, _ in found[len(demands) :]
                ),
            ),
            key=lambda found: found.seconds,
        ),
        room=room,
        used_bytes=used,
        missing=_missing(terms, room, used, beside_bytes),
        shadows=shadow_prices(step, terms.machine, costs, room, planned, demand, least, within)
        if prices
        else (),
        compute_s=compute_s,
        lanes_s=lane_seconds(groups, homes, terms.machine.links),
        one_call_s=one_call_seconds(step, planned, costs),
    )


def one_call_seconds(step: StepTrace, planned: StepPlan, costs: Costs) -> float | None:
    """Seconds of a step whose micro-batches come as one call; None, if there is but one.

    The call runs in slices (`passes/slice_batch`): each weight is fetched once, each gradient sent
    once, and regions take as long as those of all micro-batches. What is saved between the stages
    of the slices is left out.
    """
    passes = [call for call in step.calls if call.phase is not Phase.STEP]
    times = step.micro_batches
    if times == 1 or len(passes) % times:
        return None
    updates = [call for call in step.calls if call.phase is Phase.STEP]
    # The last, in which ranks exchange gradients, wherever else they do.
    last = passes[len(passes) - len(passes) // times :]
    once = replace(step, calls=(*last, *updates), micro_batches=1)
    regions = {
        region.key: times * costs.region_seconds(region)
        for call in once.calls
        for x in call.schedule.instructions
        if isinstance(x, Run) and x.late is None and call.phase is not Phase.STEP
        for region in x.region.parts or (x.region,)
    }
    homes = planned.placement.homes
    made = arranged(once, homes, planned.arena)
    longer = replace(costs, regions={**costs.regions, **regions})
    return step_seconds(made, longer, homes)


def room_of(terms: Terms, beside_bytes: int) -> Room:
    """Bytes of the tiers for entries."""
    tiers = dict(terms.machine.tiers)
    most = tiers["device"] if terms.bounded else activation_room(terms)
    if most is not None:
        tiers["device"] -= min(beside_bytes, most)
    tiers["host"] -= terms.ways.ring_bytes
    return Room(
        {tier: tiers[tier] for tier in TIERS if tier in tiers},
        reach=terms.emulates,
        straight=terms.emulates,
        ring_bytes=terms.ways.ring_bytes,
        held_bytes=beside_bytes,
        host_bytes_per_s=terms.machine.host_update_bytes_per_s if terms.ways.asynchronous else 0.0,
    )


def whole_room(terms: Terms) -> Room:
    """The tiers as they are, whatever they are split into."""
    tiers = {tier: terms.machine.tiers[tier] for tier in TIERS if tier in terms.machine.tiers}
    return Room(tiers, reach=terms.emulates, straight=terms.emulates)


def activation_room(terms: Terms) -> int | None:
    """Bytes of the device that activations may take, if all are saved.

    None, if they are chosen to fit, or lie outside what is planned.
    """
    if terms.bounded or terms.emulates:
        return None
    whole = terms.machine.tiers["device"]
    return whole - whole // LEAST_SHARE


def _missing(terms: Terms, room: Room, used: Mapping[str, int], beside: int) -> dict[str, int]:
    """Bytes that each tier lacks.

    beside  bytes of the device for activations
    """
    missing = {tier: n - room.nbytes.get(tier, 0) for tier, n in used.items()}
    if activation_room(terms) is not None:
        missing["device"] = room.nbytes["device"] + beside - terms.machine.tiers["device"]
    return {tier: n for tier, n in missing.items() if n > 0}


def _used(step: StepTrace, homes: Mapping[EntryRef, str]) -> dict[str, int]:
    used: dict[str, int] = {}
    for ref, home in homes.items():
        if home != HELD:  # which is where graphs hold values
            used[home] = used.get(home, 0) + aligned(step.facts[ref].nbytes)
    return used


def shadow_prices(
    step: StepTrace,
    machine: Machine,
    costs: Costs,
    room: Room,
    planned: StepPlan,
    demand: Demand,
    least: Bound,
    within: Room,
) -> tuple[Shadow, ...]:
    """Shadow prices of device and host; a disk has room, or lacks it, and saves no time.

    The window stays as it is, so that the GiB goes to resident entries.

    step     as it was recorded
    machine  links and rates
    costs    of which `planned` has its seconds
    room     bytes of each tier for the entries of the step
    least    bound of the step with `demand`, in the room `within`
    """
    largest = max((fact.nbytes for fact in step.facts.values()), default=0)
    more = MORE_BYTES * max(1, -(-MORE_ENTRIES * largest // MORE_BYTES))
    window, stay = planned.arena.window_bytes, planned.placement.stay
    groups = group(step, machine, room, stay)

    def placed(tiers: Mapping[str, int]) -> list[Mapping[EntryRef, str]]:
        """Homes beside the window, which may be as small as a placement of whole numbers let it be,
        and no other does."""
        left = replace(room, nbytes={**tiers, "device": tiers["device"] - window})
        terms = (step, machine, left, demand.phases_s, stay)
        rounded, whole = (place(*terms, whole, groups).homes for whole in (False, True))
        return [rounded] if whole == rounded else [rounded, whole]

    known = Arrangements()

    def seconds(homes: Mapping[EntryRef, str]) -> float:
        with suppress(BudgetExceeded):
            return step_seconds(arranged(step, homes, planned.arena, known), costs, homes)
        return inf

    # With entries as they would be placed here, and not where exchanges brought them: so they will
    # be in more room.
    here, now_s = placed(room.nbytes), planned.seconds
    if planned.placement.homes not in here and (placed_s := min(map(seconds, here))) < inf:
        now_s = placed_s
    made = []
    for tier in ("device", "host"):
        nbytes = room.nbytes[tier]
        others = placed({**room.nbytes, tier: nbytes + more})
        # No worse than now: all could stay as it is. Nor better where more memory is of no use.
        again_s = min([now_s, *(seconds(homes) for homes in others if homes not in here)])
        dearer = replace(within, nbytes={**room.nbytes, tier: nbytes + MORE_BYTES})
        saved_s = (now_s - again_s) * MORE_BYTES / more
        less_s = least.seconds - bound(demand, machine.links, dearer).seconds
        made.append(Shadow(tier, less_s, saved_s, more))
    return tuple(made)
