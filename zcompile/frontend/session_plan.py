"""Joins a session and the planner: costs and room of a step here, its plan and its prediction.

Nothing here changes the session: a plan is put into force by `frontend/replan.py`.
"""

from collections.abc import Mapping, Sequence, Set
from dataclasses import replace
from math import inf
from typing import Any

from zcompile.frontend.rescheduling import lead_of
from zcompile.ir.step import StepTrace
from zcompile.ir.types import ALIGNMENT, EntryRef
from zcompile.machine.cost import Costs
from zcompile.machine.model import RANK_LINKS, Link, Machine
from zcompile.machine.staging import behind_bytes
from zcompile.passes.arrange import ArenaShare
from zcompile.planner.bounds import Demand, bound, demand_of
from zcompile.planner.exchanges import exchanged
from zcompile.planner.floor import floor
from zcompile.planner.host_step import (
    demand_on_host,
    floor_on_host,
    reaching,
    without_host_updates,
)
from zcompile.planner.late_step import with_all_late
from zcompile.planner.narrow_step import NOTHING_NARROW, with_copies
from zcompile.planner.outlook import Shadow, shadow_prices
from zcompile.planner.pieces import demand_in_pieces
from zcompile.planner.placement import Room
from zcompile.planner.simulator import predicted, step_seconds
from zcompile.planner.step_plan import (
    Seconds,
    StepPlan,
    as_planned,
    as_read,
    plan_late_or_not,
    plan_narrow_or_not,
    plan_on_host_or_not,
    plan_step,
    plan_whole_or_not,
    plan_with_wholes,
    planned_alone,
    stay_and_scratch,
    widened_or_not,
)
from zcompile.planner.whole_step import NO_WHOLES, gathered_in, with_wholes
from zcompile.runtime.probe import machine_for, paced
from zcompile.runtime.progress import working
from zcompile.runtime.ranks.fabric import Fabric
from zcompile.runtime.session import Session

HOLES = 512
"""1/HOLES of the host is left over for holes. An entry that finds none large enough goes to the
disk, if there is one; that costs no more than to leave its size over for good."""


def costs_of(session: Session) -> Costs:
    """Costs of this machine, and of what ran on it."""
    machine = machine_for(session.config, session.device)
    ways = session.ways()
    # By the rates that links have, not by those of the last steps: they would change it to and fro.
    ways = replace(ways, behind_bytes=behind_bytes(ways.ring_bytes, machine.links))
    if session.fabric is not None:
        machine = paced(_with_ranks(machine, session.fabric), session.config, session.device)
    return session.executor.clocks.costs(machine, ways)


def _with_ranks(machine: Machine, fabric: Fabric) -> Machine:
    """A machine as one of the ranks of a fabric has it: with the links between them, at the rate
    that collectives have had, unless the machine says one. Which is the slower is said once for the
    run, since these rates change."""
    links = dict(machine.links)
    for name in RANK_LINKS[: 2 if fabric.size > fabric.ranks_per_node else 1]:
        links.setdefault(name, Link(name, fabric.bytes_per_s(name)))
    return replace(
        machine,
        links=links,
        ranks=fabric.size,
        ranks_per_node=fabric.ranks_per_node,
        replicas=fabric.mesh.replicas,
        slower_way=fabric.links.of_all.name,
    )


def seconds_at(costs: Costs) -> Seconds:
    """The function that simulates an arranged step at these costs."""
    return lambda made, homes: step_seconds(made, costs, homes)


def plan_of(
    session: Session,
    step: StepTrace,
    costs: Costs,
    least_window: int,
    kept: frozenset[EntryRef],
    may_be_late: bool = True,
    wholes: Set[EntryRef] | None = NO_WHOLES,
    copies: bool | None = None,
) -> StepPlan:
    """The plan for a step like this one.

    wholes        parameters of which all is to rest on the device; None: the plan chooses them
    copies        whether low-precision copies are kept, if there is room; None: the plan chooses
    least_window  bytes of the arena to leave free
    kept          gradients that are not gone when the next forward begins, so that none of them may
                  stay outside the arena
    raises        BudgetExceeded
    """
    room, machine, step = room_of(session, step), costs.machine, without_host_updates(step)
    if costs.ways.asynchronous:
        room = replace(
            room,
            host_bytes_per_s=machine.host_update_bytes_per_s,
            updates_end_steps=costs.ways.updates_end_steps,
        )
    link = machine.links.get("disk_write") if session.commit_log is not None else None
    commits = None if link is None else link.bytes_per_s
    chunk_bytes, arena_bytes = session.device.chunk_bytes, session.arena.budget_bytes
    late_chunk_bytes = session.device.late_chunk_bytes
    window, simulated = min(least_window, arena_bytes), seconds_at(costs)
    with working("planning a step", unit=lambda n: f"{n} arrangements tried") as work:

        def seconds(made: StepTrace, homes: Mapping[EntryRef, str]) -> float:
            work.add()
            return simulated(made, homes)

        def planned(
            step: StepTrace,
            kept: frozenset[EntryRef],
            windows: Sequence[int] | None,
            below_s: float = inf,
        ) -> StepPlan | None:
            stay, scratch = stay_and_scratch(
                step, machine, arena_bytes, session.split.held_bytes, chunk_bytes, kept
            )
            arena = ArenaShare(
                window,
                lead_of(session),
                chunk_bytes,
                room.reach,
                scratch=scratch,
                nbytes=arena_bytes,
                late_chunk_bytes=late_chunk_bytes,
            )
            compute = demand_of(step, costs.region_seconds).phases_s
            return plan_step(
                step,
                machine,
                room,
                arena,
                compute,
                seconds,
                stay=stay,
                wanted=windows,
                below_s=below_s,
            )

        def here_or_on_host(step: StepTrace, plan: StepPlan) -> StepPlan:
            if not may_update_on_host(session):
                return plan
            return plan_on_host_or_not(step, plan, planned, kept, room, window, commits)

        def not_late(
            step: StepTrace, _: object, windows: Sequence[int] | None, below_s: float = inf
        ) -> StepPlan | None:
            on_host = may_update_on_host(session)
            plan = planned(step, kept, windows, inf if on_host else below_s)
            return None if plan is None else here_or_on_host(step, plan)

        def finished(plan: StepPlan) -> StepPlan:
            made_for = as_planned(step, plan)
            # Entries that keep the addresses of a plan before may leave holes, for which a window
            # that leaves nothing over has no room.
            if not session.homes.device.planned_bytes:
                plan = widened_or_not(made_for, plan, room.nbytes["device"], seconds)
            found, _ = exchanged(step, made_for, plan, costs, room, seconds, commits)
            return found

        if wholes:
            return finished(plan_with_wholes(step, not_late, frozenset(wholes)))
        if may_be_late:
            plan = plan_late_or_not(
                step,
                planned,
                kept,
                room,
                chunk_bytes,
                seconds,
                window,
                commits,
                late_chunk_bytes,
            )
        else:
            plan = planned_alone(planned, step, kept)
        plan = here_or_on_host(step, plan)
        if wholes is None:
            plan = plan_whole_or_not(step, plan, not_late, arena_bytes - window)
        plan = plan_narrow_or_not(step, plan, not_late, session.reading_copies, room, copies)
        return finished(plan)


def may_update_on_host(session: Session) -> bool:
    """Whether a plan may let the host compute updates beside the device."""
    allowed = session.config.updates_on_host(session.device.torch_device.type)
    return allowed and session.fabric is None and not session.reaches_host


def demand_here(session: Session, step: StepTrace, costs: Costs) -> Demand:
    """What bounds any plan of a step here: with late updates, if there may be any."""
    late = with_all_late(step, session.device.chunk_bytes, session.device.late_chunk_bytes)
    held_bytes = session.split.held_bytes
    return demand_in_pieces(late, costs.region_seconds, costs.machine, held_bytes)


def ways_to_read(session: Session, base: StepTrace) -> list[StepTrace]:
    """A step as it was recorded, and with copies, if it may have any, in low precision or of the
    shares of all ranks: no plan of any of them is shorter than the bound of that."""
    found = [base]
    if session.fabric is not None and session.config.may_keep_wholes:
        found.append(with_wholes(base, {row.ref for row in gathered_in(base)}))
    narrow = with_copies(base, session.reading_copies)
    return found if narrow is None else [*found, narrow.step]


def whole_room(session: Session) -> Room:
    """The budgets as they were given, whatever they were split into."""
    return Room(session.budgets, session.reaches_host, session.reaches_host)


def prediction_of(
    session: Session, plan: StepPlan, base: StepTrace, costs: Costs
) -> dict[str, Any]:
    """`simulator.predicted` of a plan that was made for `base`, with its bound and its floor."""
    made = predicted(plan.step, costs, plan.placement.homes)
    links = machine_for(session.config, session.device).links  # at the rates that they have
    bounds, floors = [], []
    for step in ways_to_read(session, without_host_updates(base)):
        demand, room = demand_here(session, step, costs), room_of(session, step, holes=False)
        bounds.append(bound(demand, links, room))
        floors.append(floor(step, demand, costs, links, whole_room(session)))
        if may_update_on_host(session):
            on_host = demand_on_host(step, costs)
            bounds.append(bound(on_host, links, reaching(room)))
            floors.append(floor_on_host(step, on_host, costs, links, whole_room(session)))
    least = min(bounds, key=lambda found: found.seconds)
    lowest = min(floors, key=lambda found: found.seconds)
    demand = demand_here(session, as_read(base, plan), costs)
    return made | {
        "least_s": least.seconds,
        "binding": least.binding,
        "least_compute_s": sum(demand.phases_s.values()),
        "floor_s": lowest.seconds,
        "floor_binding": lowest.binding,
        "floor_compute_s": lowest.compute_s,
    }


def shadows_of(
    session: Session, plan: StepPlan, base: StepTrace, costs: Costs
) -> tuple[Shadow, ...]:
    """What one more GiB of device and host would save of a step, under a plan made for `base`."""
    now_s = step_seconds(plan.step, costs, plan.placement.homes)
    base = as_read(without_host_updates(base), plan)
    plan = replace(plan, reads=NOTHING_NARROW, wholes=NO_WHOLES)
    room, demand = room_of(session, base), demand_here(session, base, costs)
    within = room
    if plan.on_host:
        demand, within = demand_on_host(base, costs), reaching(room)
    least = bound(demand, costs.machine.links, within)
    fresh = replace(plan, seconds=now_s)
    base = as_planned(base, plan)
    return shadow_prices(base, costs.machine, costs, room, fresh, demand, least, within)


def room_of(session: Session, step: StepTrace, holes: bool = True) -> Room:
    """Bytes of the tiers for the entries of this step: all but those of other entries, and of
    `holes` on the host."""
    berths = session.arena.budget_bytes // ALIGNMENT * ALIGNMENT  # the last ends there
    nbytes = {"device": berths, **session.homes.capacities()}
    for entry in session.entries():
        if entry.ref not in step.facts and entry.home in nbytes:
            nbytes[entry.home] -= entry.place.extent.nbytes
    if holes:  # between entries of different sizes; what finds none goes to disk
        nbytes["host"] -= nbytes["host"] // HOLES
    reach, ring = session.reaches_host, session.ways().ring_bytes
    return Room(nbytes, reach, reach, ring, session.split.held_bytes)
