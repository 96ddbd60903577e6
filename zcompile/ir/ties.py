"""How the death of an object is told: by C code alone, to whoever looks next.

A callback written in Python may be struck by Ctrl-C, and what is raised within a finalizer is
printed and lost: the interrupt never reaches the program, and what the finalizer was to give back
is never given back. `deque.append` and `SimpleQueue.put` run no bytecode, take no lock, and may be
called in any thread, also within a garbage collection.
"""

import weakref
from collections import deque
from collections.abc import Callable
from typing import Any

Watch = Callable[[object], None]
"""Told of an object: its death is the end of something."""


class Tie(weakref.ref[Any]):
    """When its object dies, the tie itself goes to `died`, and says by `mark` who that was.

    Whoever is to be told keeps the tie; once that is gone, nobody is.
    """

    __slots__ = ("mark",)

    mark: Any

    def __new__(cls, watched: object, died: "deque[Any]", mark: Any) -> "Tie":
        made = super().__new__(cls, watched, died.append)
        made.mark = mark
        return made

    def __init__(self, watched: object, died: "deque[Any]", mark: Any) -> None:
        """All is done: a weak reference would refuse three arguments."""
