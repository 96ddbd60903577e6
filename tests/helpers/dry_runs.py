"""A small run to be planned without bytes."""

from zcompile.ir.units import GiB, MiB
from zcompile.machine.model import Compute, Link, Machine

LINKS = {
    "h2d": Link("h2d", 1e9),
    "d2h": Link("d2h", 1e9),
    "disk_read": Link("disk_read", 2e8),
    "disk_write": Link("disk_write", 1e8),
}


SMALL = Machine(
    "small",
    {"device": 4 * MiB, "host": 8 * MiB, "disk": GiB},
    LINKS,
    Compute({"float32": 1e11}, 1e10),
)
