"""Defines the answer of `zcompile.plan`: a record for programs, `str()` of it for people."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from html import escape
from math import ceil
from typing import Any

from zcompile.ir.memory_curve import Memory
from zcompile.ir.rank_mesh import RankMesh
from zcompile.ir.serialize import encode, plain
from zcompile.ir.tables import html_list, html_table, table
from zcompile.ir.types import EntryKind, aligned
from zcompile.ir.units import show_count, show_seconds, show_size
from zcompile.planner import bounds, floor
from zcompile.planner.outlook import Evaluation, Shadow, Terms, activation_room

COLUMNS = ("weights", "gradients", "states", "copies", "streaming")
_COLUMN_OF = {
    EntryKind.PARAM: "weights",
    EntryKind.GRAD: "gradients",
    EntryKind.STATE: "states",
    EntryKind.COPY: "copies",
    EntryKind.RESULT: "states",
}


@dataclass(frozen=True)
class Facts:
    """Facts of the model and its inputs, of one micro-batch; as in `dry_run.plan.Traced`."""

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
    """Bytes on a tier.

    capacity   for all of it
    streaming  of the device: the window that fetches pass; of the host: staging
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
    """A link in one step: bytes, their lower bound, seconds it is in use."""

    link: str
    nbytes: int
    least_nbytes: int
    busy_seconds: float


def tier_rows(found: Evaluation, terms: Terms) -> tuple[TierRow, ...]:
    rows = {tier: dict.fromkeys(COLUMNS, 0) for tier in found.room.nbytes}
    homes = found.plan.placement.homes
    for ref, fact in found.plan.step.facts.items():
        home = homes.get(ref)
        if home in rows:
            rows[home][_COLUMN_OF[fact.kind]] += aligned(fact.nbytes)
    rows["device"]["streaming"] = found.plan.peak_bytes - found.plan.resident_bytes
    rows["host"]["streaming"] = terms.ways.ring_bytes
    capacity = {**found.room.nbytes, "host": terms.machine.tiers["host"]}
    return tuple(TierRow(tier, capacity[tier], **columns) for tier, columns in rows.items())


def bottleneck_of(found: Evaluation) -> str:
    """Compute or lane that the step waits for longest, phase by phase."""
    due: dict[str, float] = {}
    for phase, seconds in found.compute_s.items():
        lanes = {"compute": seconds, **found.lanes_s.get(phase, {})}
        name = max(lanes, key=lambda lane: lanes[lane])
        due[name] = due.get(name, 0.0) + lanes[name]
    return max(due, key=lambda name: due[name], default="compute")


@dataclass(frozen=True, repr=False)
class Report:
    """One training step of a model on a machine, from a dry run. Sizes in bytes, times in seconds.

    optimizer          its class
    fits               whether every tier holds the entries that are to rest on it
    missing_bytes      tier -> how much more it would have to have
    activation_bytes   that forward saves for backward on the device, outside the arena
    held_bytes         peak of live bytes of compiled graphs on the device, outside the arena
    bounded            the device's bytes bound entries and live bytes of graphs together; else
                       activations are all saved
    memories           memory curves of each compiled graph, with everything saved and as it was
                       chosen
    step_seconds       of one optimizer step with all its micro-batches, once training is under way
    compute_seconds    of which the device computes; it idles in the others
    bottleneck         "compute", a link, or two that take turns: what the step waits for longest
    bound_seconds      lower bound on plans that compute what this one does, and have the same arena
                       for weights and states (`bounds.py`); due to `bound_by` most of all
    floor_seconds      lower bound on all plans within these budgets (`floor.py`); due to `floor_by`
    activation_room    bytes of the device that activations may take, so that enough is left for
                       entries; None: they lie outside what is planned, or were chosen to fit a
                       bounded device, and larger batches were not tried
    hiding_samples     per micro-batch: the smallest batch whose forward and backward hide
                       transfers, since compute grows with the batch and transferred bytes do not
    shadows            what one more GiB of a tier saves
    peak_device_bytes  of the arena, with entries that rest there
    scratch_bytes      outside it, for the optimizer's step, while no graph needs them
    staying_bytes      of gradients that stay there from backward to that step
    late_parameters    number of parameters that are updated in the next forward
    host_parameters    number of parameters that the host updates, where they rest
    whole_parameters   of which all rests on the device of every rank, not only a share
    one_call_seconds   of the step, if its micro-batches came as one call that runs in slices; None:
                       there is one
    ranks              that the machine has, and which train the model together; one of them is what
                       is planned
    replicas           how many groups of them hold all of the model each
    """

    machine: str
    ranks: int
    replicas: int
    parameters: int
    samples: int
    tokens: int
    micro_batches: int
    optimizer: str
    fits: bool
    missing_bytes: Mapping[str, int]
    activation_bytes: int
    held_bytes: int
    bounded: bool
    memories: tuple[Memory, ...]
    tiers: tuple[TierRow, ...]
    step_seconds: float
    compute_seconds: float
    idle_seconds: float
    phase_seconds: Mapping[str, float]
    bottleneck: str
    bound_seconds: float
    bound_by: str
    floor_seconds: float
    floor_by: str
    links: tuple[LinkRow, ...]
    activation_room: int | None
    hiding_samples: int
    shadows: tuple[Shadow, ...]
    peak_device_bytes: int
    scratch_bytes: int
    staying_bytes: int
    late_parameters: int
    host_parameters: int
    whole_parameters: int
    one_call_seconds: float | None

    @classmethod
    def of(cls, found: Evaluation, terms: Terms, facts: Facts) -> "Report":
        timeline, least = found.timeline, found.bound
        return cls(
            machine=terms.machine.name,
            ranks=terms.machine.ranks,
            replicas=terms.machine.replicas,
            parameters=facts.parameters,
            samples=facts.samples,
            tokens=facts.tokens,
            micro_batches=facts.micro_batches,
            optimizer=facts.optimizer,
            fits=not found.missing,
            missing_bytes=found.missing,
            activation_bytes=facts.activation_bytes,
            held_bytes=facts.held_bytes,
            bounded=terms.bounded,
            memories=facts.memories,
            tiers=tier_rows(found, terms),
            step_seconds=timeline.step_s,
            compute_seconds=timeline.compute_s,
            idle_seconds=max(0.0, timeline.step_s - timeline.compute_s),
            phase_seconds={phase.value: s for phase, s in timeline.phases.items()},
            bottleneck=terms.machine.describe(bottleneck_of(found)),
            bound_seconds=least.seconds,
            bound_by=terms.machine.describe(least.binding),
            floor_seconds=found.floor.seconds,
            floor_by=terms.machine.describe(found.floor.binding),
            links=tuple(
                LinkRow(
                    name,
                    timeline.nbytes.get(name, 0),
                    least.nbytes.get(name, 0),
                    timeline.busy_s.get(name, 0.0),
                )
                for name in least.nbytes
            ),
            activation_room=activation_room(terms),
            hiding_samples=max(1, ceil(facts.samples * found.batch_factor - 1e-9)),
            shadows=found.shadows,
            peak_device_bytes=found.plan.peak_bytes,
            scratch_bytes=found.plan.scratch_bytes,
            staying_bytes=found.plan.staying_bytes,
            late_parameters=len(found.plan.late),
            host_parameters=len(found.plan.on_host),
            whole_parameters=len(found.plan.wholes),
            one_call_seconds=found.one_call_s,
        )

    @property
    def sequence(self) -> int:
        """Tokens of a sample; 0, if the inputs do not say."""
        return self.tokens // self.samples

    @property
    def most_samples(self) -> int | None:
        """Largest batch per micro-batch whose activations fit; 0 if those of one sample do not.

        None if nothing bounds it. Activations grow with the batch, to first order.
        """
        if self.activation_room is None or not self.activation_bytes:
            return None
        return self.samples * self.activation_room // self.activation_bytes

    @property
    def suggested_samples(self) -> int:
        """`hiding_samples`, or `most_samples` if those are fewer; 0: no batch fits."""
        most = self.most_samples
        return self.hiding_samples if most is None else min(self.hiding_samples, most)

    @property
    def fullest(self) -> Memory | None:
        """Memory curves of the graph with the largest peak."""
        return max(self.memories, key=lambda memory: memory.after.peak, default=None)

    @property
    def gap(self) -> float:
        """Ratio of the step to its bound; 1 is as good as can be."""
        return self.step_seconds / self.bound_seconds if self.bound_seconds else 1.0

    @property
    def floor_gap(self) -> float:
        """Ratio of the step to its floor; an excess over 1 may be due to memory, and not to this
        plan."""
        return self.step_seconds / self.floor_seconds if self.floor_seconds else 1.0

    @property
    def samples_per_second(self) -> float:
        return self.samples * self.micro_batches / self.step_seconds

    @property
    def tokens_per_second(self) -> float:
        """0, if the inputs do not say."""
        return self.tokens * self.micro_batches / self.step_seconds

    def to_dict(self) -> dict[str, Any]:
        """Lists, dicts, texts and numbers; derived values stand beside the fields."""
        names = (
            "sequence",
            "gap",
            "floor_gap",
            "samples_per_second",
            "tokens_per_second",
            "most_samples",
            "suggested_samples",
        )
        derived = {name: getattr(self, name) for name in names}
        return {**plain(self), **derived}

    def to_json(self) -> str:
        return encode(self.to_dict())

    def __str__(self) -> str:
        return "\n".join(_lines(self))

    __repr__ = __str__

    def _repr_html_(self) -> str:
        """The report as a notebook shows it; nothing in it is fetched from elsewhere."""
        return "\n".join(_html(self))


def _lines(report: Report) -> Iterator[str]:
    yield from _verdict(report)
    yield ""
    yield from table(TIER_HEAD, _tier_table(report))
    yield from (f"  {line}" for line in _memory(report))
    yield ""
    yield from _times(report)
    if report.links:
        yield ""
        yield from table(LINK_HEAD, _link_table(report))
    yield ""
    yield from _advice(report)


def _html(report: Report) -> Iterator[str]:
    verdict, *more = _verdict(report)
    yield f"<p><b>{escape(verdict)}</b></p>"
    yield from html_list(more)
    yield from html_table(TIER_HEAD, _tier_table(report))
    yield from html_list(_memory(report))
    yield from html_list(_times(report))
    if report.links:
        yield from html_table(LINK_HEAD, _link_table(report))
    yield from html_list(_advice(report))


TIER_HEAD = ("tier", "capacity", "used", *COLUMNS)
LINK_HEAD = ("link", "per step", "least", "busy")


def _tier_table(report: Report) -> list[tuple[str, ...]]:
    return [
        (
            row.tier,
            *(show_size(n) for n in (row.capacity, row.used)),
            *(_size(getattr(row, column)) for column in COLUMNS),
        )
        for row in report.tiers
    ]


def _link_table(report: Report) -> list[tuple[str, ...]]:
    return [
        (
            row.link,
            show_size(row.nbytes),
            show_size(row.least_nbytes),
            f"{row.busy_seconds / report.step_seconds:.0%}",
        )
        for row in report.links
    ]


def _memory(report: Report) -> Iterator[str]:
    """Sentences on the memory of graphs on the device."""
    if report.activation_bytes or report.bounded:
        yield _beside(report)
    if report.staying_bytes:
        yield (
            f"{show_size(report.staying_bytes)} of gradients stay in what activations leave "
            "until the optimizer has read them"
        )
    if report.late_parameters:
        yield (
            f"{report.late_parameters} parameters are updated in the forward behind the "
            "optimizer's step, which fetches them anyway"
        )
    if report.host_parameters:
        yield (
            f"{report.host_parameters} parameters are updated by the host, where they rest with "
            "gradients and states, beside the forward behind the optimizer's step"
        )
    if report.whole_parameters:
        yield (
            f"all of {report.whole_parameters} parameters rests on the device of every rank, which "
            "gather each once a step (stage 2 of ZeRO)"
        )
    if report.scratch_bytes:
        yield (
            f"the optimizer streams through {show_size(report.scratch_bytes)} beside it, which "
            "no graph holds then"
        )
    if report.fullest is not None:
        yield f"graphs hold {report.fullest.describe()}"


def _beside(report: Report) -> str:
    """A sentence on activations, and on the device's capacity in the table."""
    left = next(row.capacity for row in report.tiers if row.tier == "device")
    if report.bounded:
        held = f"{show_size(report.held_bytes)}, held by graphs,"
        return f"the device's capacity above is what {held} leave of its " + show_size(
            left + report.held_bytes
        )
    activations = f"{show_size(report.activation_bytes)} of activations"
    most = report.activation_room
    if most is None:
        return f"beside them on the device: {activations}"
    whole = show_size(left + min(report.activation_bytes, most))
    if report.activation_bytes <= most:
        return f"the device's capacity above is what {activations} leave of its {whole}"
    return (
        f"{activations} leave too little of the device's {whole}: the capacity above is the "
        f"least that is kept for entries, so activations have {show_size(most)}"
    )


def _verdict(report: Report) -> Iterator[str]:
    yield from _fits(report)
    if note := note_of_ranks(RankMesh(report.ranks, report.replicas)):
        yield f"  {note}"


def note_of_ranks(mesh: RankMesh) -> str:
    """What a plan makes of a machine with such ranks; "" if it has one."""
    if mesh.ranks == 1:
        return ""
    told = (
        f"one of {mesh.ranks} ranks that train the model together: tiers, links and samples are "
        "those of that rank, which holds a share of each tensor"
    )
    if mesh.replicas > 1:
        told += f"; each of {mesh.replicas} groups of {mesh.shards} holds all of the model"
    return told


def _fits(report: Report) -> Iterator[str]:
    model = f"{show_count(report.parameters)} parameters on {report.machine}"
    if report.fits:
        yield f"{model}: fits"
        return
    lacks = ", ".join(f"{show_size(n)} of {tier}" for tier, n in report.missing_bytes.items())
    yield f"{model}: does not fit, it lacks {lacks}"
    yield "  what follows is what would be, if it had them"


def _times(report: Report) -> Iterator[str]:
    phases = ", ".join(f"{name} {show_seconds(s)}" for name, s in report.phase_seconds.items() if s)
    rate = f"{report.samples_per_second:.4g} samples/s"
    if report.tokens:
        rate += f", {report.tokens_per_second:.4g} tokens/s"
    batch = f"batch {report.samples}" + (f" of {report.sequence} tokens" if report.tokens else "")
    if report.micro_batches > 1:
        batch = f"{report.micro_batches} micro-batches, each {batch}"
    seconds = show_seconds(report.step_seconds)
    yield f"step of {batch}, {report.optimizer}: {seconds} ({phases}); {rate}"
    yield (
        f"  compute {show_seconds(report.compute_seconds)}, idle "
        f"{show_seconds(report.idle_seconds)}; bottleneck: {report.bottleneck}"
    )
    yield (
        f"  least of a plan like this: {show_seconds(report.bound_seconds)} (bound by "
        f"{report.bound_by}); this one takes {report.gap:.2f} times that"
    )
    yield f"    ({bounds.ASSUMES})"
    yield (
        f"  floor of all plans: {show_seconds(report.floor_seconds)} (bound by {report.floor_by}); "
        f"this one takes {report.floor_gap:.2f} times that"
    )
    yield f"    ({floor.ASSUMES})"


ONE_CALL_PAYS = 1.05
"""A call with the whole batch is told of where it is so many times as fast."""


def _advice(report: Report) -> Iterator[str]:
    yield _batch(report)
    if told := _one_call(report):
        yield told
    for row in report.shadows:
        yield (
            f"one more GiB of {row.tier} saves {show_seconds(row.planned_s)} a step (the bound: "
            f"{show_seconds(row.least_s)})"
        )


def _batch(report: Report) -> str:
    """A sentence on the batch to take."""
    now, hiding, most = report.samples, report.hiding_samples, report.most_samples
    if most is not None and most < now:
        single = ", those of a single sample do not either" if now > 1 else ""
        most_told = f", those of {most} fit" if most else single
        return (
            f"activations of batch {now} do not fit{most_told}: recompute some "
            "(checkpoints), or take shorter samples"
        )
    if hiding <= now:
        return (
            f"batch {now}: compute hides what forward and backward move; from {hiding} on it does"
        )
    if most is not None and most < hiding:
        return (
            f"batch {now} is small, but activations of at most {most} fit; only from {hiding} "
            "on would compute hide what forward and backward move"
        )
    return f"batch {now} is small: from {hiding} on, compute hides what forward and backward move"


def _one_call(report: Report) -> str:
    """A sentence on all micro-batches in one call; "" where that is no faster."""
    seconds = report.one_call_seconds
    if not seconds or report.step_seconds < ONE_CALL_PAYS * seconds:
        return ""
    return (
        f"one call with all {report.micro_batches * report.samples} samples, in slices where they "
        f"do not fit, would take {show_seconds(seconds)}, {report.step_seconds / seconds:.2f} "
        "times as fast: it fetches each weight once, where micro-batches do so each"
    )


def _size(nbytes: int) -> str:
    return show_size(nbytes) if nbytes else "-"
