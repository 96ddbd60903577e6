"""What keeps plans above their least, part by part.

    python -m benchmarks.plan_parts --only linear

Plans the cases of `benchmarks/plan_table.py` on the machine that is written down there, and takes
the distance from the least to the simulated step apart. Milliseconds of a step; each column adds to
what is left before it, and all of them to the step:

    least       of any plan with late updates
    held        only the gradients that stay in the plan are held beside the arena, whole
    one place   an entry rests in the same place in every segment
    placing     what the program of `planner/placement.py` counts besides: latencies, small entries,
                and the optimizer's step as a phase of its own, where updates are not late
    window      the device without the room that values stream through
    whole       entries are not split
    simulated   what links and compute do with the schedule
"""

import argparse
from collections.abc import Iterator
from dataclasses import replace

from benchmarks.plan_table import CASES, HELD_OUT, Case, budgeted, traced_dry
from zcompile.frontend.dry_run.plan import Traced
from zcompile.planner.bounds import demand_of, least_seconds
from zcompile.planner.late_step import with_all_late
from zcompile.planner.outlook import Terms, evaluated
from zcompile.planner.placement import place
from zcompile.planner.step_plan import as_planned

COLUMNS = ("least", "held", "one place", "placing", "window", "whole", "simulated")


def heights(traced: Traced, given: Terms) -> Iterator[float]:
    """Seconds of a step with one more restriction each, from the least to the plan as simulated."""
    found = evaluated(
        traced.step, given, traced.held_bytes, traced.chunk_bytes, False, traced.reads.get
    )
    plan, room, machine, costs = found.plan, found.room, given.machine, given.costs()
    chunk_bytes = max(traced.chunk_bytes, given.chunk_bytes)
    late = with_all_late(traced.step, chunk_bytes, given.late_chunk_bytes)
    demand = demand_of(late, costs.region_seconds, together=True, machine=machine)
    held = replace(room, held_bytes=plan.staying_bytes)
    for of, one_place in ((room, False), (held, False), (held, True)):
        least = least_seconds(demand, machine.links, of, one_place)
        assert least is not None, "the cases have few segments"
        yield least.seconds
    step = as_planned(traced.step, plan)
    compute = demand_of(step, costs.region_seconds).phases_s
    left = room.nbytes["device"] - plan.arena.window_bytes
    for of in (room, replace(room, nbytes={**room.nbytes, "device": left})):
        yield place(step, machine, of, compute, plan.placement.stay).least_seconds
    yield plan.placement.rounded_seconds
    yield found.timeline.step_s


def rows(case: Case) -> Iterator[str]:
    """A row for each budget."""
    traced, terms = traced_dry(case)
    for budget, given in budgeted(traced, terms):
        below, texts = 0.0, [case.name, budget]
        for height in heights(traced, given):
            texts.append(f"{1e3 * (height - below):z.1f}")
            below = height
        yield f"| {' | '.join((*texts, f'{1e3 * below:.1f}'))} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--held-out", action="store_true", help="the cases that are held out")
    parser.add_argument("--only", default="", help="cases whose name has this in it")
    args = parser.parse_args()
    print(f"| case | budget | {' | '.join(COLUMNS)} | step |")
    print("|---" * (len(COLUMNS) + 3) + "|", flush=True)
    for case in HELD_OUT if args.held_out else CASES:
        for row in rows(case) if args.only in case.name else ():
            print(row, flush=True)


if __name__ == "__main__":
    main()
