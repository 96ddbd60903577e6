"""What a plan runs on: tiers with their capacities, links with their rates, compute rates.

A machine is data: measured once (`runtime/probe.py`), or read from a file. Everything that plans
takes one as an argument and asks nothing else. Sizes in bytes, rates in bytes or FLOPs per second,
times in seconds.
"""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Link:
    """A way for bytes: "h2d", "d2h", "disk_read", "disk_write".

    bytes_per_s  what long transfers reach
    latency_s    from the start of a short transfer to its end, over its bytes / bytes_per_s
    shares       name of the link that takes turns with this one (half duplex); None: its own lane
    """

    name: str
    bytes_per_s: float
    latency_s: float = 0.0
    shares: str | None = None

    def seconds(self, nbytes: int) -> float:
        return self.latency_s + nbytes / self.bytes_per_s


@dataclass(frozen=True)
class Compute:
    """What the device computes at.

    flops_per_s         dense matmuls, by dtype ("float32", "bfloat16", ...), sustained
    memory_bytes_per_s  elementwise work: bytes read and written together
    launch_s            the least an op costs
    """

    flops_per_s: Mapping[str, float]
    memory_bytes_per_s: float
    launch_s: float = 0.0


@dataclass(frozen=True)
class Machine:
    """One rank's share of the hardware, and how many ranks there are.

    tiers  capacity in bytes of "device", "host", "disk"; one that is absent is not there
    links  by name
    """

    name: str
    tiers: Mapping[str, int]
    links: Mapping[str, Link]
    compute: Compute
