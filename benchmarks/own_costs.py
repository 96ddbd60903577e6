"""What is predicted of a step that was run, at what its own regions took.

The speed of a shared machine changes from one minute to the next. A plan that is compared with a
least that was worked out some steps before is compared with another machine.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from zcompile.frontend.replan import StepController
from zcompile.runtime.profile import Clocks, Walked
from zcompile.runtime.session import Session


def walks_of(session: Session) -> list[tuple[Walked, ...]]:
    """What is timed in each step from here on; a step gets in when the next begins."""
    clocks, walked = session.executor.clocks, []
    session.executor.keep_timeline(lambda: walked.append(clocks.timeline()))
    return walked


def at_own_costs(session: Session, walks: Sequence[Walked]) -> Mapping[str, Any] | None:
    """What is predicted under the plan in force, and the least, as `StepController.prediction`
    says, at what the regions of one step took. Links, and what the host takes beside regions, are
    as of late; regions that did not run, as chunks of another size, cost what those alike did. None
    where nothing is planned."""
    residency = session.controller
    if not isinstance(residency, StepController) or residency.plan is None:
        return None
    assert session.device.torch_device.type == "cpu", "elsewhere regions are timed by events"
    clocks = Clocks(session.device, lambda: 0.0)
    for x in walks:
        clocks.learn(x.schedule, list(x.begins), list(x.ends), x.stalls, frozenset())
    known = residency.costs()
    now = clocks.costs(known.machine, known.ways)
    alike = {**known.alike, **now.alike}
    return residency.predicted_at(replace(known, regions=now.regions, alike=alike))
