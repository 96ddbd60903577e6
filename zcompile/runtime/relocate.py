"""Relocation moves entries to another tier, between two steps, when a placement says so."""

import logging
from collections.abc import Iterable, Mapping
from typing import Any

from zcompile.errors import TierFull
from zcompile.ir.effects import GRADIENT, NEW
from zcompile.ir.step import StepTrace
from zcompile.ir.types import HELD, ON_DEVICE, EntryKind, EntryRef
from zcompile.ir.units import show_size
from zcompile.runtime.changes import CHANGES
from zcompile.runtime.progress import working
from zcompile.runtime.session import Session
from zcompile.runtime.store.store import Entry, as_they_rest, used_by_runtime
from zcompile.runtime.tiers.base import Place
from zcompile.runtime.transfer.interrupts import cleanup, deferred_interrupts

log = logging.getLogger(__name__)


def relocate(
    session: Session, homes: Mapping[EntryRef, str], step: StepTrace
) -> tuple[list[Entry], dict[EntryRef, str]]:
    """Move every entry to where `homes` says.

    Where holes of the host are too small for what is to rest there, what rests there already moves
    together first.

    returns  the entries that found no room, and where each one rests, as `expected_homes` says
    """
    left, rests = relocate_once(session, homes), expected_homes(session, step, homes)
    free = session.homes.free()["host"]
    astray = [ref for ref, home in rests.items() if homes.get(ref) == "host" != home]
    if any(step.facts[ref].nbytes <= free for ref in astray):
        with deferred_interrupts():
            places = [entry.place for entry in session.entries()]
            moved = session.homes.compact(places)
        if moved:
            left, rests = relocate_once(session, homes), expected_homes(session, step, homes)
    return left, rests


def relocate_once(session: Session, homes: Mapping[EntryRef, str]) -> list[Entry]:
    """Move every entry that `homes` knows to where it says; returns those that found no room there.

    What makes room moves first: to the device, then to disk, then from disk to the host. Addresses
    for what goes to the device are reserved already (`DeviceTier.plan`).
    """
    wanted = {e: homes[e.ref] for e in session.entries() if e.ref in homes}
    left: list[Entry] = []
    total = sum(entry.nbytes for entry, home in wanted.items() if entry.home != home)
    with working("moving entries to where they rest", total, show_size) as work:
        for home in ("device", "disk", "host"):
            for entry in [e for e, to in wanted.items() if to == home and e.home != home]:
                work.begin(entry.name)
                if not move(session, entry, home):
                    left.append(entry)
                work.add(entry.nbytes)
    session.homes.want(homes)
    return left


def expected_homes(
    session: Session, step: StepTrace, homes: Mapping[EntryRef, str]
) -> dict[EntryRef, str]:
    """Where each entry rests by now, and where those will find room that a step like this one will
    make.

    Unless `homes` says that an entry stays where it is made. Values that are offloaded for backward
    are made in forward and stay for the whole call that takes them, beside the gradients that it
    makes. Room is looked for in that order, as it will be then, and given back.
    """
    stay = {ref: home for ref, home in homes.items() if home == HELD}
    rests = stay | {entry.ref: entry.home for entry in session.entries()}
    tried: dict[EntryRef, tuple[Place, EntryKind]] = {}

    def place(of: EntryRef, kind: EntryKind, nbytes: int, **wish: Any) -> None:
        if of not in rests:
            found = session.homes.reserve(step.facts[of].name, kind, nbytes, **wish)
            rests[of], tried[of] = found.tier.name, (found, kind)

    def give_back(ref: EntryRef) -> None:
        if ref in tried:
            place, kind = tried.pop(ref)
            session.homes.left(place, kind)
            place.tier.release(place.extent)

    try:
        for call in step.calls:
            for x in call.schedule.effects:
                home = x.home
                if home is None:
                    continue
                ref = call.entry_of(home)
                if home.role is NEW:
                    place(ref, EntryKind.ACTIVATION, home.nbytes, tier=home.tier)
                elif home.role is GRADIENT:
                    place(ref, EntryKind.GRAD, step.facts[ref].nbytes, ref=ref)
            for ref in call.entries:
                if ref in step.facts and step.facts[ref].kind is EntryKind.ACTIVATION:
                    give_back(ref)
    except TierFull:
        log.info("the next step will not find room for all that it makes")  # and will say so
    finally:
        for ref in list(tried):
            give_back(ref)
    return rests


def evict(session: Session, entries: Iterable[Entry], homes: Mapping[EntryRef, str]) -> list[Entry]:
    """Move each of `entries` off the device: to where `homes` has it, else to where there is room.

    returns  the entries for which there is none
    """
    left = []
    for entry in entries:
        first = homes.get(entry.ref, "host")
        ways = dict.fromkeys((first if first not in ON_DEVICE else "host", "host", "disk"))
        if not any(move(session, entry, home) for home in ways):
            left.append(entry)
    return left


@cleanup
def move(session: Session, entry: Entry, home: str) -> bool:
    """Let `entry` rest on `home` from here on; False if there is no room. Nothing is in flight.

    raises  what a transfer raises; then the entry is where it was
    """
    if entry.home == home:
        return True
    if entry.narrow is None:
        return _move(session, entry, home)
    deferred = entry.deferred
    with as_they_rest([entry]):
        entry.defer_only(())  # it is of the values in their own dtype; bytes move as they are
        try:
            return _move(session, entry, home)
        finally:
            entry.defer_only(deferred)


def _move(session: Session, entry: Entry, home: str) -> bool:
    with deferred_interrupts(), used_by_runtime(entry):
        if home == "device":
            return _move_to_device(session, entry)
        return _move_off_device(session, entry, home)


def _move_to_device(session: Session, entry: Entry) -> bool:
    """Fetch the bytes to where the entry will rest: it rests there only once they have come."""
    memory = session.homes.device.reserved_memory(entry.ref, entry.nbytes)
    if memory is None:
        return False
    holds = entry.place.written.touches(0, entry.nbytes)
    if holds:
        session.fetch(entry, memory, after=[session.device.mark()]).wait()
    place, old_extent = entry.place, entry.place.extent
    old = session.homes.move(place, entry.ref, entry.born, "device")
    assert old is not None, "its address is reserved"
    place.written.clear()
    if holds:
        place.written.add(0, entry.nbytes)
    CHANGES.note()
    old.release(old_extent)
    return True


def _move_off_device(session: Session, entry: Entry, home: str) -> bool:
    """Let the entry rest on the host or on disk: from where it rests on the device its bytes leave
    as others do, between those two they pass through memory beside them."""
    place = entry.place
    held = [(low, high) for low, high, held in place.written.pieces(0, entry.nbytes) if held]
    value = None
    if held and place.tier.on_device:
        value = session.view_in_place(entry, 0, entry.nbytes, writes=False)
    elif held:
        value = session.read_here(entry)
    version, old_extent = entry.version, place.extent
    old = session.homes.move(place, entry.ref, entry.born, home)
    if old is None:
        return False
    new, new_extent = place.tier, place.extent
    place.written.clear()
    CHANGES.note()
    try:
        if value is not None:
            session.put(entry, value, after=[session.device.mark()]).wait()
    except BaseException:
        place.rest(old, old_extent)
        for low, high in held:
            place.written.add(low, high)
        new.release(new_extent)
        raise
    entry.kept_value(version)
    old.release(old_extent)
    return True
