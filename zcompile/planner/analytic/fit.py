"""Estimates a training step of a decoder on one machine, and the largest batch that fits it.

The step is that of zcompile: a weight that does not rest on the device is fetched for forward and
for backward; the optimizer reads weights, gradients and states through the device and writes
weights and states back. It does so behind backward, with the room of activations to itself; or
late, beside the next forward, which takes the weights that it brings. Everything overlaps within
the passes and within the update, or within backward and within forward and late update, so that
each of the two takes what its busiest lane takes. What rests where is greedy by the bytes that a
resident byte saves: weights, then states, then gradients. How near that comes to the plans that
zcompile makes: `python -m benchmarks.estimates`.

Activations are saved whole, or recomputed block by block from the inputs of the blocks, which rest
on the device or on the host. Nothing is cut into tiles. Sizes in bytes, times in seconds.
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from enum import Enum

from zcompile.ir.units import GiB
from zcompile.machine.model import Machine, scaled, with_tier
from zcompile.machine.staging import staging_size
from zcompile.planner.analytic.decoder import Decoder
from zcompile.planner.analytic.model import forward_flops

STATES = {"adamw": 2, "sgd": 1}
"""States of each parameter, in its dtype, by optimizer; "sgd" is with momentum."""
TOUCHES, HEAD_TOUCHES, LAUNCHES = 4, 11, 160
"""Elementwise work of forward and backward, as `zinf plan` counts it in graphs of Llama and GPT-2:
bytes read and written over those that a block saves, and over those of the logits in float32; and
ops of a block that are launched."""
MOST_BATCH = 1 << 20
"""Where the search for the largest batch stops."""
MOST_GROWTH = 4096
"""Most GiB that a change adds to a tier."""
LEAST_GAIN = 0.05
"""Least part of a step that a change must save to be worth its name."""


class Way(Enum):
    """What becomes of activations."""

    SAVED = "saved"
    RECOMPUTED = "recomputed"
    RECOMPUTED_FROM_HOST = "recomputed, inputs of blocks on the host"


@dataclass(frozen=True)
class Training:
    """What is trained, and how: samples of `seq` tokens, `states` of each parameter."""

    decoder: Decoder
    seq: int
    states: int = STATES["adamw"]

    @property
    def weight_bytes(self) -> int:
        return self.decoder.parameters * self.decoder.element_bytes


@dataclass(frozen=True)
class Estimate:
    """A step of `batch` samples.

    tiers     bytes that rest on each tier, those of activations included
    lacks     tier -> bytes that found no place; empty: it fits
    late      updates are computed beside the next forward
    busy_s    by lane: "compute", and links as `Machine.describe` names them
    """

    batch: int
    tokens: int
    way: Way
    tiers: dict[str, int]
    lacks: dict[str, int]
    late: bool
    seconds: float
    busy_s: dict[str, float]

    @property
    def fits(self) -> bool:
        return not self.lacks

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.seconds

    @property
    def binds(self) -> str:
        """The busiest lane."""
        return max(self.busy_s, key=lambda lane: self.busy_s[lane])


def estimate(training: Training, machine: Machine, batch: int, way: Way) -> Estimate:
    """A step with one way for activations, updated when that is shorter."""
    return _best([_estimate(training, machine, batch, way, late) for late in (False, True)])


def _estimate(training: Training, machine: Machine, batch: int, way: Way, late: bool) -> Estimate:
    decoder, weights = training.decoder, training.weight_bytes
    states, gradients = weights * training.states, weights
    tokens, element = batch * training.seq, decoder.element_bytes
    saved_block = decoder.block_saved_bytes(training.seq)
    inputs = decoder.layers * decoder.hidden * element * tokens
    # What the passes hold of the device beside weights and states.
    head = decoder.head_saved_bytes + 4 * decoder.vocabulary  # and the gradient of the logits
    on_device = {
        Way.SAVED: decoder.layers * saved_block,
        Way.RECOMPUTED: saved_block + inputs / tokens,
        Way.RECOMPUTED_FROM_HOST: saved_block + 2 * decoder.hidden * element,
    }[way]
    largest = decoder.largest_parameters * element
    held = math.ceil(tokens * (on_device + head))
    # Gradients stay where activations were, until the optimizer has read them. Where not all have
    # room there, one is on its way beside them.
    held += 0 if gradients <= held else largest
    # Beside activations and gradients one parameter is on its way with its states, where updates
    # are late; one weight, where they are not, and weights stream.
    updated = largest * (1 + training.states) if late else 0
    # What rests where.
    device, host = machine.tiers["device"], machine.tiers["host"]
    host -= staging_size(host).nbytes
    disk = machine.tiers.get("disk", 0)
    lacks: dict[str, int] = {}
    all_rest = held + updated + weights <= device
    beside = updated if late or all_rest else largest
    resident = weights if all_rest else device - held - beside
    if resident < 0:
        lacks["device"] = -resident
    resident = min(weights, max(0, resident))
    states_here = min(states, max(0, device - held - beside - resident))
    gradients_here = min(gradients, max(0, device - beside - resident - states_here))
    activations = inputs if way is Way.RECOMPUTED_FROM_HOST else 0
    if activations > host:
        lacks["host"] = activations - host
    left = max(0, host - activations)
    away = [weights - resident, gradients - gradients_here, states - states_here]
    on_disk = []
    for nbytes in away:
        here = min(nbytes, left)
        left -= here
        on_disk.append(nbytes - here)
    if sum(on_disk) > disk:
        lacks["host and disk"] = sum(on_disk) - disk
    # Seconds of each lane, in the passes and in the update; a late one has forward beside it.
    passes, update = _Lanes(machine), _Lanes(machine)
    forward = update if late else passes
    again = 0 if way is Way.SAVED else 1
    compute_s = _compute_s(training, machine, tokens, again)
    forward.add("compute", compute_s / (3 + again))
    passes.add("compute", compute_s * (2 + again) / (3 + again))
    fetches = 1 if late else 2  # what a late update brings is there for forward
    passes.move("h2d", fetches * away[0] + activations)
    forward.move("d2h", activations)
    passes.move("d2h", away[1])
    passes.move("disk_read", fetches * on_disk[0])
    passes.move("disk_write", on_disk[1])
    touched = weights * (2 + 1 + 2 * training.states)
    update.add("compute", touched / machine.compute.memory_bytes_per_s)
    update.move("h2d", sum(away))
    update.move("d2h", away[0] + away[2])
    update.move("disk_read", sum(on_disk))
    update.move("disk_write", on_disk[0] + on_disk[2])
    tiers = {
        "device": resident + states_here + beside + max(held, gradients_here),
        "host": activations + sum(away) - sum(on_disk),
        "disk": sum(on_disk),
    }
    lanes = {**passes.busy, **update.busy}
    return Estimate(
        batch,
        tokens,
        way,
        tiers,
        lacks,
        late,
        passes.longest + update.longest,
        {lane: passes.busy[lane] + update.busy[lane] for lane in lanes},
    )


class _Lanes:
    """Busy seconds of the lanes of a machine."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self.busy: dict[str, float] = defaultdict(float)

    def add(self, lane: str, seconds: float) -> None:
        self.busy[lane] += seconds

    def move(self, link: str, nbytes: float) -> None:
        if nbytes:
            used = self._machine.links[link]
            self.add(self._machine.describe(used.lane), nbytes / used.bytes_per_s)

    @property
    def longest(self) -> float:
        return max(self.busy.values())


def _compute_s(training: Training, machine: Machine, tokens: int, again: int) -> float:
    """Seconds of forward, backward, and of the blocks' forward `again`."""
    decoder, compute = training.decoder, machine.compute
    rate = compute.flops_per_s.get(decoder.dtype) or min(compute.flops_per_s.values())
    width = decoder.heads * decoder.head_dim
    blocks = decoder.layers * forward_flops(decoder.block_parameters, training.seq, width)
    flops = tokens * (3 * (blocks + 2 * decoder.head_parameters) + again * blocks)
    saved = decoder.layers * decoder.block_saved_bytes(training.seq) * (1 + again / 3)
    touched = tokens * (TOUCHES * saved + HEAD_TOUCHES * 4 * decoder.vocabulary)
    launched = LAUNCHES * decoder.layers * (1 + again / 3) * compute.launch_s
    return flops / rate + touched / compute.memory_bytes_per_s + launched


def fastest(training: Training, machine: Machine, batch: int) -> Estimate:
    """The shortest step among the ways that fit; if none does, the one that lacks the least."""
    return _best([estimate(training, machine, batch, way) for way in Way])


def _best(steps: list[Estimate]) -> Estimate:
    fitting = [found for found in steps if found.fits]
    if fitting:
        return min(fitting, key=lambda found: found.seconds)
    return min(steps, key=lambda found: sum(found.lacks.values()))


def largest_batch(training: Training, machine: Machine, ways: Iterable[Way] = Way) -> int:
    """The most samples of a step that fit in one of the ways; 0, if not even one sample does."""
    ways = tuple(ways)

    def fits(batch: int) -> bool:
        return any(estimate(training, machine, batch, way).fits for way in ways)

    if not fits(1):
        return 0
    low, high = 1, 2
    while high <= MOST_BATCH and fits(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


@dataclass(frozen=True)
class Change:
    """A change of a machine, and what a step of `batch` samples takes with it."""

    what: str
    batch: int
    seconds: float


def cheapest_change(training: Training, machine: Machine, found: Estimate) -> Change | None:
    """The cheapest change that lets a sample fit, or shortens the step by lifting what binds it.

    From the cheapest on: memory of the host, a disk twice as fast, memory of the device, links
    twice as fast. The order is that of what parts usually cost; no price is known here. None: what
    binds is compute, or nothing of that helps.
    """
    if not found.fits:
        for tier in ("host", "disk", "device"):
            if added := _grown(training, machine, tier):
                after = fastest(training, _with(machine, tier, added), 1)
                return Change(f"{tier} +{added} GiB", 1, after.seconds)
        return None
    if found.binds == "compute":
        return None
    for what, changed in _changes(machine, found):
        after = fastest(training, changed, found.batch)
        if after.fits and after.seconds < (1 - LEAST_GAIN) * found.seconds:
            return Change(what, found.batch, after.seconds)
    return None


def _changes(machine: Machine, found: Estimate) -> Iterator[tuple[str, Machine]]:
    if found.tiers["disk"]:
        added = -(-found.tiers["disk"] // GiB)
        yield f"host +{added} GiB", _with(machine, "host", added)
        yield "disk twice as fast", scaled(machine, {"disk_read": 2.0, "disk_write": 2.0})
    if away := found.tiers["host"] + found.tiers["disk"]:
        added = -(-away // GiB)
        yield f"device +{added} GiB", _with(machine, "device", added)
    yield "links twice as fast", scaled(machine, {"h2d": 2.0, "d2h": 2.0})


def _with(machine: Machine, tier: str, added_gib: int) -> Machine:
    return with_tier(machine, tier, machine.tiers.get(tier, 0) + added_gib * GiB)


def _grown(training: Training, machine: Machine, tier: str) -> int:
    """The fewest whole GiB more of a tier with which one sample fits; 0, if none do."""

    def fits(added: int) -> bool:
        return largest_batch(training, _with(machine, tier, added)) > 0

    if (tier == "disk" and "disk" not in machine.tiers) or not fits(MOST_GROWTH):
        return 0
    low, high = 0, MOST_GROWTH
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if fits(middle) else (middle, high)
    return high


def alone(machine: Machine) -> Machine:
    """One rank of a machine, which trains by itself."""
    return replace(machine, ranks=1, ranks_per_node=1)
