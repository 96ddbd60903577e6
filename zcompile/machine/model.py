"""Defines a machine: tiers with their capacities, links with their rates, compute rates.

A machine is data: measured once (`runtime/probe.py`), or read from a file (`files.py`). Everything
that plans takes one as an argument and asks nothing else. Sizes in bytes, rates in bytes or FLOPs
per second, times in seconds.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from difflib import get_close_matches
from types import MappingProxyType
from typing import Any

from zcompile.errors import ZinfError
from zcompile.ir.rank_mesh import RankMesh, Ring

TIERS = ("device", "host", "disk")
TIER_LINKS = ("disk_read", "disk_write", "h2d", "d2h")
RANK_LINKS = ("rank_to_rank", "node_to_node")
LINKS = (*TIER_LINKS, *RANK_LINKS)
DTYPES = (
    "float64",
    "float32",
    "tfloat32",
    "bfloat16",
    "float16",
    "float8_e4m3fn",
    "float8_e5m2",
    "int8",
)
"""Torch's dtypes with a matmul rate, and the one that its matmuls may take for float32."""

HOST_UPDATE_BYTES_PER_S = 100e9
"""Where a description of a machine does not say it: an assumption, half of what eight channels of
DDR4-3200 carry (205 GB/s), as one socket of a server has them."""

MOST_BUSY = 1.5
"""Highest sum of the shares of two throttled links, of what they had, at which they count as
independent. Two such links over half-duplex hardware, at x and y of what they had, need x + y of
its time: taken for links of their own they are at most 1.5 times too fast; taking turns would be up
to 2 times too slow where one of x and y is small."""


class MachineInvalid(ZinfError, ValueError):
    """A description of a machine cannot be one: where, what, why, and what to do."""

    def __init__(self, where: str, what: str, why: str, todo: str) -> None:
        super().__init__(f"{where}: {what} {why}; {todo}")
        self._told = (where, what, why, todo)

    def within(self, where: str) -> "MachineInvalid":
        """The same error, for a description inside a larger place."""
        told = self._told
        return self if told[0].startswith(where) else type(self)(f"{where}: {told[0]}", *told[1:])


@dataclass(frozen=True)
class Link:
    """A way for bytes between tiers ("h2d", "d2h", "disk_read", "disk_write") or ranks.

    Between ranks: "rank_to_rank" (of one node) and "node_to_node".

    bytes_per_s  rate of long transfers; between ranks the rate at which the result of a collective
                 arrives at each of them
    latency_s    from the start of a short transfer to its end, over its bytes / bytes_per_s
    shares       name of the link that takes turns with this one (half duplex); None: its own lane

    raises  MachineInvalid
    """

    name: str
    bytes_per_s: float
    latency_s: float = 0.0
    shares: str | None = None

    def __post_init__(self) -> None:
        where = f"links.{self.name}"
        _check_known("links", repr(self.name), "is no link", self.name, LINKS)
        _check_rate(where, "bytes_per_s", self.bytes_per_s)
        _check_seconds(where, "latency_s", self.latency_s)
        if self.shares is not None:
            _check_known(where, f"shares={self.shares!r}", "is no link", self.shares, LINKS)
            if self.shares == self.name:
                raise MachineInvalid(
                    where,
                    f"shares={self.shares!r}",
                    "is the link itself",
                    "name the other link, or leave it out",
                )

    @property
    def lane(self) -> str:
        """Name of the lane: links that take turns share one, named by the first of them."""
        return self.name if self.shares is None else min(self.name, self.shares)

    def seconds(self, nbytes: int) -> float:
        """Seconds of one transfer."""
        return self.latency_s + nbytes / self.bytes_per_s


@dataclass(frozen=True)
class Compute:
    """Rates of the compute device.

    flops_per_s         dense matmuls, by dtype ("float32", "bfloat16", ...), sustained
    memory_bytes_per_s  elementwise work: bytes read and written together
    launch_s            lower bound on the time of an op

    raises  MachineInvalid
    """

    flops_per_s: Mapping[str, float]
    memory_bytes_per_s: float
    launch_s: float = 0.0

    def __post_init__(self) -> None:
        for dtype, rate in self.flops_per_s.items():
            _check_known("compute.flops_per_s", repr(dtype), "is no dtype", dtype, DTYPES)
            _check_rate("compute.flops_per_s", dtype, rate)
        _check_rate("compute", "memory_bytes_per_s", self.memory_bytes_per_s)
        _check_seconds("compute", "launch_s", self.launch_s)
        object.__setattr__(self, "flops_per_s", MappingProxyType(dict(self.flops_per_s)))

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle without the read-only mapping, which cannot be copied by itself."""
        return Compute, (dict(self.flops_per_s), self.memory_bytes_per_s, self.launch_s)


@dataclass(frozen=True)
class Machine:
    """One rank's share of the hardware, and how many ranks there are.

    tiers           capacity in bytes of "device", "host", "disk"; a tier that is absent is not
                    there
    links           by name; rates that one rank has while all ranks use theirs
    ranks           in all
    ranks_per_node  of them share a node, and every node has as many
    replicas        how many groups of them hold all of the model each, one behind the other
    slower_way      of the two links between ranks, the one by whose rate what passes both is paced,
                    and on which it is counted; None: that of the lower rate
    runs_kernels    whether the device can run our Triton kernels: CUDA, compute capability 8.0 on
    note            what a person should know of it; nothing is planned by it
    host_update_bytes_per_s  at which the host's cores read and write, together, the operands of
                    updates of an optimizer that they compute in its memory

    raises  MachineInvalid
    """

    name: str
    tiers: Mapping[str, int]
    links: Mapping[str, Link]
    compute: Compute
    ranks: int = 1
    ranks_per_node: int = 1
    note: str = ""
    host_update_bytes_per_s: float = HOST_UPDATE_BYTES_PER_S
    replicas: int = 1
    slower_way: str | None = None
    runs_kernels: bool = True

    def __post_init__(self) -> None:
        _check_rate(self.name, "host_update_bytes_per_s", self.host_update_bytes_per_s)
        if not self.name or not self.name.isprintable():
            raise MachineInvalid(
                "machine",
                f"name={self.name!r}",
                "is no name",
                "give it one of printable characters",
            )
        if not isinstance(self.runs_kernels, bool):
            raise MachineInvalid(
                self.name,
                f"runs_kernels={self.runs_kernels!r}",
                "is neither true nor false",
                "say one, or leave it out",
            )
        self._check_tiers()
        self._check_links()
        self._check_ranks()
        for field in ("tiers", "links"):
            object.__setattr__(self, field, MappingProxyType(dict(getattr(self, field))))

    @property
    def nodes(self) -> int:
        return self.ranks // self.ranks_per_node

    @property
    def mesh(self) -> RankMesh:
        return RankMesh(self.ranks, self.replicas)

    def way_of(self, ring: Ring) -> Link | None:
        """The slowest link that a ring of these ranks passes; None: it is of one rank."""
        if self.slower_way is None:
            rates = {name: link.bytes_per_s for name, link in self.links.items()}
        else:
            rates = {self.slower_way: 0.0}
        name = slowest_way(rates, *ring)
        return None if name is None else self.links[name]

    def describe(self, lane: str) -> str:
        """A lane for people: links that take turns by both names."""
        link = self.links.get(lane)
        return lane if link is None or link.shares is None else f"{lane} and {link.shares}"

    def __reduce__(self) -> tuple[Any, ...]:
        return Machine, (
            self.name,
            dict(self.tiers),
            dict(self.links),
            self.compute,
            self.ranks,
            self.ranks_per_node,
            self.note,
            self.host_update_bytes_per_s,
            self.replicas,
            self.slower_way,
            self.runs_kernels,
        )

    def _check_tiers(self) -> None:
        for tier, nbytes in self.tiers.items():
            _check_known(self.name, repr(tier), "is no tier", tier, TIERS)
            if isinstance(nbytes, bool) or not isinstance(nbytes, int) or nbytes <= 0:
                raise MachineInvalid(
                    self.name,
                    f"tiers.{tier}={nbytes!r}",
                    "is no capacity",
                    "give bytes, more than zero, or leave it out",
                )

    def _check_links(self) -> None:
        for name, link in self.links.items():
            if name != link.name:
                raise MachineInvalid(
                    self.name,
                    f"links[{name!r}]",
                    f"is called {link.name!r}",
                    "file it under its name",
                )
            other = link.shares and self.links.get(link.shares)
            if link.shares and (not other or other.shares != name):
                raise MachineInvalid(
                    self.name,
                    f"links.{name} shares={link.shares!r}",
                    "which does not share in turn",
                    f"let links.{link.shares} share {name!r} too",
                )

    def _check_ranks(self) -> None:
        for field in ("ranks", "ranks_per_node", "replicas"):
            count = getattr(self, field)
            if isinstance(count, bool) or not isinstance(count, int) or count < 1:
                raise MachineInvalid(
                    self.name,
                    f"{field}={count!r}",
                    "is no number of ranks",
                    "give an int of at least 1",
                )
        if self.ranks % self.ranks_per_node:
            raise MachineInvalid(
                self.name,
                f"ranks={self.ranks}",
                f"do not fill nodes of ranks_per_node={self.ranks_per_node}",
                "every node has as many ranks",
            )
        if self.ranks % self.replicas:
            raise MachineInvalid(
                self.name,
                f"ranks={self.ranks}",
                f"are not replicas={self.replicas} groups of as many",
                "each group holds all of the model",
            )
        if self.slower_way not in (None, *RANK_LINKS):
            raise MachineInvalid(
                self.name,
                f"slower_way={self.slower_way!r}",
                "is no link between ranks",
                f"name one of {', '.join(RANK_LINKS)}, or leave it out",
            )
        for link, needed in zip(RANK_LINKS, (self.ranks_per_node > 1, self.nodes > 1), strict=True):
            if needed and link not in self.links:
                raise MachineInvalid(
                    self.name,
                    f"ranks={self.ranks}",
                    "have no way between them",
                    f"add links.{link}",
                )


def slowest_way(rates: Mapping[str, float], ranks: int, ranks_per_node: int) -> str | None:
    """Name of the slowest link that a ring over all ranks passes, each rank next to those of its
    node; None: one rank is all.

    rates  bytes per second by name; links without one are never in the way
    """
    passed = (("node_to_node", ranks > ranks_per_node), ("rank_to_rank", ranks_per_node > 1))
    names = [name for name, is_passed in passed if is_passed]
    return min(names, key=lambda name: rates.get(name, math.inf), default=None)


def with_ranks(machine: Machine, ranks: int, replicas: int = 1) -> Machine:
    """`machine` with another number of ranks: on one node, as far as that has so many, or on whole
    nodes.

    replicas  how many groups of them hold all of the model each
    raises    MachineInvalid

    Which link is the slower was said of the ranks that it had, and is a matter of rates again.
    """
    per_node = max(1, min(machine.ranks_per_node if machine.ranks > 1 else ranks, ranks))
    return replace(
        machine, ranks=ranks, ranks_per_node=per_node, replicas=replicas, slower_way=None
    )


def with_tier(machine: Machine, tier: str, nbytes: int) -> Machine:
    """`machine` with another capacity of one tier; with 0 the tier is not there.

    raises  MachineInvalid
    """
    _check_known(machine.name, repr(tier), "is no tier", tier, TIERS)
    tiers = {name: size for name, size in machine.tiers.items() if name != tier}
    return replace(machine, tiers=tiers if nbytes == 0 else {**tiers, tier: nbytes})


def scaled(
    machine: Machine,
    links: Mapping[str, float] | None = None,
    *,
    flops: float = 1.0,
    memory: float = 1.0,
) -> Machine:
    """`machine` with rates multiplied: of links by name, of matmuls, of the device's memory.

    raises  MachineInvalid, if the machine has no such link or a factor is not more than zero
    """
    changed = dict(machine.links)
    for name, factor in (links or {}).items():
        _check_known(machine.name, repr(name), "is no link of it", name, machine.links)
        rate = machine.links[name].bytes_per_s * factor
        changed[name] = replace(machine.links[name], bytes_per_s=rate)
    compute = replace(
        machine.compute,
        flops_per_s={dtype: rate * flops for dtype, rate in machine.compute.flops_per_s.items()},
        memory_bytes_per_s=machine.compute.memory_bytes_per_s * memory,
    )
    return replace(machine, links=changed, compute=compute)


def throttled(machine: Machine, rates: Mapping[str, float], latency_s: float = 0.0) -> Machine:
    """`machine` as a throttle leaves it: no link is faster than its rate in `rates`.

    Links that took turns no longer do, if the rest of their rates adds up to little more than the
    hardware has (`MOST_BUSY`).

    latency_s  that pacing adds to a transfer over a throttled link
    """
    links = dict(machine.links)
    slowed = {
        name for name, rate in rates.items() if name in links and rate < links[name].bytes_per_s
    }
    for name in slowed:
        link = links[name]
        links[name] = replace(link, bytes_per_s=rates[name], latency_s=link.latency_s + latency_s)
    for name in slowed:
        if other := links[name].shares:
            busy = sum(links[x].bytes_per_s / machine.links[x].bytes_per_s for x in (name, other))
            if busy <= MOST_BUSY:
                links[name] = replace(links[name], shares=None)
                links[other] = replace(links[other], shares=None)
    return replace(machine, links=links)


def nearest(key: str, known: Iterable[str]) -> str:
    """Advice for a `key` that is not among the `known`."""
    known = list(known)
    return guess(key, known).rstrip() or f"known are {', '.join(known) or 'none'}"


def guess(key: str, known: Iterable[str]) -> str:
    """ "did you mean ...? ", if one of the `known` is like `key`; else ""."""
    near = get_close_matches(key, list(known), n=1, cutoff=0.5)
    return f"did you mean {near[0]!r}? " if near else ""


def _check_known(where: str, what: str, why: str, key: str, known: Iterable[str]) -> None:
    known = list(known)
    if key not in known:
        raise MachineInvalid(where, what, why, nearest(key, known))


def _check_rate(where: str, field: str, rate: float) -> None:
    if isinstance(rate, bool) or not isinstance(rate, int | float) or not 0 < rate < math.inf:
        raise MachineInvalid(
            where,
            f"{field}={rate!r}",
            "is no rate",
            "give a finite number per second, more than zero",
        )


def _check_seconds(where: str, field: str, seconds: float) -> None:
    if (
        isinstance(seconds, bool)
        or not isinstance(seconds, int | float)
        or not 0 <= seconds < math.inf
    ):
        raise MachineInvalid(
            where,
            f"{field}={seconds!r}",
            "is no time",
            "give a finite number of seconds, zero or more",
        )
