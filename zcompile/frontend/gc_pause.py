"""Pauses garbage collection while a plan is made."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager

MANY = 3_000_000
"""Objects made since the last garbage collection from which on another one pays before a plan.
Tracing 96 layers makes 2.3 million, two thirds of them garbage by then, 150 MB; to look through
them takes two seconds, which is worth it where there are more than one such plan's."""


class _Last:
    """State of the last garbage collection before a plan.

    left    objects that it did not free
    frozen  some are frozen (`gc.freeze`), by somebody else. To ask costs a walk through all of
            them, 0.07 s a million, so who froze objects once is taken to keep them so
    """

    left = 0
    frozen = False


@contextmanager
def gc_paused() -> Iterator[None]:
    """A context without garbage collection, if it was on: planning makes many objects and little
    garbage.

    Garbage of earlier plans is collected before, where it is much, and young garbage always.
    """
    was = gc.isenabled()
    if was:
        gc.collect(1)
        if len(gc.get_objects(generation=2)) > _Last.left + MANY:
            gc.collect()
            _Last.left = len(gc.get_objects(generation=2))
    gc.disable()
    try:
        yield
    finally:
        if was:
            _Last.frozen = _Last.frozen or gc.get_freeze_count() > 0
            if not _Last.frozen:  # else they are somebody's, who wants them frozen
                # All that is there becomes old, so that it is not looked through right away.
                gc.freeze()
                gc.unfreeze()
            gc.enable()
