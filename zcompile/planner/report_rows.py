"""What a report is made of: facts of the model, what rests where, what the links carry."""

from dataclasses import dataclass

from zcompile.ir.plan import Memory
from zcompile.ir.types import Kind, aligned
from zcompile.planner.outlook import Outlook, Terms

COLUMNS = ("weights", "gradients", "states", "copies", "streaming")
_COLUMN_OF = {Kind.PARAM: "weights", Kind.GRAD: "gradients", Kind.STATE: "states",
              Kind.COPY: "copies", Kind.RESULT: "states"}  # fmt: skip


@dataclass(frozen=True)
class Facts:
    """What is known of the model and its inputs; of one micro-batch, but for their number, and for
    what is held at once (`planning.Traced`)."""

    parameters: int
    activation_bytes: int
    held_bytes: int
    memories: tuple[Memory, ...]
    samples: int
    tokens: int
    micro_batches: int
    optimizer: str


@dataclass(frozen=True)
class TierRow:
    """What rests on a tier, in bytes.

    capacity   for all of it
    streaming  of the device: the window that what is fetched passes; of the host: staging
    """

    tier: str
    capacity: int
    weights: int
    gradients: int
    states: int
    copies: int
    streaming: int

    @property
    def used(self) -> int:
        return sum(getattr(self, column) for column in COLUMNS)


@dataclass(frozen=True)
class LinkRow:
    """A link in one step: bytes, the least there can be, seconds it is in use."""

    link: str
    nbytes: int
    least_nbytes: int
    busy_seconds: float


def tier_rows(found: Outlook, terms: Terms) -> tuple[TierRow, ...]:
    rows = {tier: dict.fromkeys(COLUMNS, 0) for tier in found.room.nbytes}
    homes = found.plan.placement.homes
    for key, fact in found.plan.step.facts.items():
        home = homes.get(key)
        if home in rows:
            rows[home][_COLUMN_OF[fact.kind]] += aligned(fact.nbytes)
    rows["device"]["streaming"] = found.plan.peak_bytes - found.plan.resident_bytes
    rows["host"]["streaming"] = terms.ways.ring_bytes
    capacity = {**found.room.nbytes, "host": terms.machine.tiers["host"]}
    return tuple(TierRow(tier, capacity[tier], **columns) for tier, columns in rows.items())


def bottleneck_of(found: Outlook) -> str:
    """What the step waits for longest, phase by phase."""
    due: dict[str, float] = {}
    for phase, seconds in found.compute_s.items():
        lanes = {"compute": seconds, **found.lanes_s.get(phase, {})}
        name = max(lanes, key=lambda lane: lanes[lane])
        due[name] = due.get(name, 0.0) + lanes[name]
    return max(due, key=lambda name: due[name], default="compute")
