"""Entries change their home, between two steps, when a placement says so."""

from collections.abc import Mapping

from zcompile.runtime.interrupts import deferred_interrupts
from zcompile.runtime.recorder import key_of
from zcompile.runtime.session import Session
from zcompile.runtime.store import Entry


def resettle(session: Session, homes: Mapping[int, str]) -> list[Entry]:
    """Every entry that `homes` knows goes where it says; returns those that found no room there.

    What makes room moves first: to the device, then to disk, then from disk to the host. Berths for
    what goes to the device are planned already (`DeviceTier.plan`).
    """
    session.executor.foresight.abandon()
    session.drain()
    wanted = {e: homes[key_of(e)] for e in session.entries() if key_of(e) in homes}
    left: list[Entry] = []
    for home in ("device", "disk", "host"):
        due = [e for e, to in wanted.items() if to == home and e.home != home]
        left += [entry for entry in due if not move(session, entry, home)]
    session.homes.wanted = {-key: home for key, home in homes.items() if key < 0}
    return left


def move(session: Session, entry: Entry, home: str) -> bool:
    """`entry` rests on `home` from here on; False if there is no room. Nothing is under way."""
    if entry.home == home:
        return True
    place = entry.place
    held = any(held for _, _, held in place.written.pieces(0, entry.nbytes))
    with deferred_interrupts():
        value = session.read_all(entry) if held else None
        version, extent = entry.version, place.extent
        old = session.homes.move(place, key_of(entry), entry.born, home)
        if old is None:
            return False
        place.written.clear()
        if value is not None:
            session.put(entry, value).wait()
            entry.version = version
        old.release(extent)
    return True
