"""Steps of a few calls for the simulator."""

from written import FLOATS, LOW, schedule

from zcompile.ir.schedule import (
    EntryIndex,
    Fetch,
    Free,
    Reduce,
    Register,
    Run,
    Store,
    Ticket,
    Wait,
)
from zcompile.ir.step import EntryFact, StepCall, StepTrace
from zcompile.ir.types import EntryKind, EntryRef, Phase, Region, Work
from zcompile.machine.model import Compute, Link, Machine

ONE = 1000
"""Bytes. A link of the machine below moves 1000 in a second."""


def machine(latency_s=0.0, half_duplex=False, **rates):
    """Every link at 1000 bytes/s, or as `rates` say."""
    shares = {"disk_read": "disk_write", "disk_write": "disk_read"} if half_duplex else {}
    links = {
        name: Link(name, float(rates.get(name, 1000)), latency_s, shares.get(name))
        for name in ("h2d", "d2h", "disk_read", "disk_write")
    }
    return Machine("paper", {"device": 1 << 30}, links, Compute({"float32": 1e3}, 1e3))


def computing(seconds, ticket=None):
    """A region that takes so long, by its FLOPs."""
    region = Region(f"{seconds} s", "work", tuple, Work(flops=int(seconds * 1000)))
    return Run(region, (), (), ticket=None if ticket is None else Ticket(ticket))


def fetching(entry, ticket, *after, nbytes=ONE, slot=LOW, begin=0, lasting=True):
    return Fetch(EntryIndex(entry), begin, nbytes, slot, Ticket(ticket), after, "w", lasting)


def storing(entry, ticket, *after, nbytes=ONE, slot=LOW, begin=0):
    return Store(EntryIndex(entry), begin, nbytes, slot, Ticket(ticket), after)


def waiting(ticket, slot=LOW):
    return Wait(Ticket(ticket), slot, FLOATS, Register(1))


def reducing(entry, nbytes=ONE, after=()):
    return Reduce(Register(1), EntryIndex(entry), after, nbytes=nbytes)


def freeing(slot=LOW):
    return Free(slot, Register(1))


ENTRIES = tuple(map(EntryRef, (1, 2, 3, 4)))
GRADIENTS = tuple(ref.gradient for ref in ENTRIES)


def a_call(*rows, phase=Phase.FORWARD):
    return StepCall(schedule(*rows, phase=phase), ENTRIES)


def step_of(*calls, home="host", kinds=(EntryKind.PARAM,) * 4):
    facts = {
        ref: EntryFact(ref, f"w{ref.number}", kind, 4096, home)
        for ref, kind in zip(ENTRIES, kinds, strict=True)
    }
    return StepTrace(calls, facts)
