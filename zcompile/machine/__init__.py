"""Tiers, links and rates of a machine; what work costs on it."""

from zcompile.machine.model import Compute, Link, Machine

__all__ = ["Compute", "Link", "Machine"]
