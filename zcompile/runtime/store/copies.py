"""Copies of parameters in a narrower dtype, kept beside them and made by the same cast.

A schedule that fetches one finds it fresh: a copy notes the version of the entry it was cast from,
and is cast again before a call if that has been written since. An optimizer's step that writes the
entry writes the copy as well, so in a training loop no copy is ever made again.
"""

from collections.abc import Callable, Sequence

from zcompile.ir.schedule import Cast, Fetch, Schedule
from zcompile.runtime.store.sources import check_sources
from zcompile.runtime.store.store import Entry

MakeCopy = Callable[[Entry, Cast], None]
"""Makes `entry.copies[cast.narrow]`, or makes it again; given from the side that can compute."""


def source_of(fetch: Fetch, entries: Sequence[Entry]) -> Entry:
    """The entry whose bytes a fetch brings."""
    entry = entries[fetch.entry]
    return entry if fetch.cast is None else entry.copies[fetch.cast.narrow][0]


def is_fresh(entry: Entry, cast: Cast) -> bool:
    found = entry.copies.get(cast.narrow)
    return found is not None and found[1] == entry.version


def freshen(schedule: Schedule, entries: Sequence[Entry], make: MakeCopy) -> None:
    """Make what `schedule` will fetch, as far as it is missing or stale.

    raises  ParameterChanged, if what an entry took its values from was written since: who uses a
            copy uses the entry
    """
    for index, cast in schedule.casts:
        check_sources(entries[index])
        if not is_fresh(entries[index], cast):
            make(entries[index], cast)
