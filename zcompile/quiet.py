"""Planning makes many objects and little garbage: none is looked for meanwhile, nor right after."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager

MANY = 3_000_000
"""Objects. Tracing 96 layers makes 2.3 million, two thirds of them garbage by then, 150 MB; to look
through them takes two seconds, which is worth it where there are more than one such plan's."""


@contextmanager
def quiet() -> Iterator[None]:
    """Without garbage collection, if there was any; what earlier plans left is collected before,
    where it is much."""
    was = gc.isenabled()
    if was and len(gc.get_objects(generation=2)) > MANY:
        gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if was:
            if not gc.get_freeze_count():  # else they are somebody's, who wants them frozen
                # All that is there becomes old, so that it is not looked through right away.
                gc.freeze()
                gc.unfreeze()
            gc.enable()
