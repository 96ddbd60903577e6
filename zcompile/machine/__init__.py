"""The machine package describes tiers, links and rates of a machine, and what work costs on it."""

from zcompile.machine.model import Compute, Link, Machine

__all__ = ["Compute", "Link", "Machine"]
