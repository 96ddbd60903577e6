"""Machines for tests of scale: of one speed everywhere, so that times can be worked out by hand."""

from zcompile.machine.model import Compute, Link, Machine

TIERS = {"device": 10**15, "host": 10**15, "disk": 10**15}


def machine(ranks=1, ranks_per_node=1, *, half_duplex=False, **bytes_per_s):
    rates = {
        "h2d": 1e9,
        "d2h": 1e9,
        "disk_read": 1e9,
        "disk_write": 1e9,
        "rank_to_rank": 1e9,
        "node_to_node": 1e9,
        **bytes_per_s,
    }
    shares = {"disk_read": "disk_write", "disk_write": "disk_read"} if half_duplex else {}
    links = {name: Link(name, rate, 0.0, shares.get(name)) for name, rate in rates.items()}
    return Machine("tested", TIERS, links, Compute({"float16": 1e12}, 1e12), ranks, ranks_per_node)
