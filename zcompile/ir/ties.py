"""Records which objects have died, by C code alone, for whoever looks next.

Ctrl-C may interrupt a callback written in Python, and what is raised within a finalizer is
printed and lost: the interrupt never reaches the program, and what the finalizer was to give back
is never given back. `deque.append` and `SimpleQueue.put` run no bytecode, take no lock, and may be
called in any thread, also within a garbage collection.
"""

import weakref
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

Watch = Callable[[object], None]
"""A function that is told of an object whose death ends something, such as the life of an entry."""


class Dead(deque[Any]):
    """The ties whose objects have died, oldest first, and what else its owner puts there.

    note  `append`, bound once: bound anew for each tie it would be one more object to collect
    """

    def __init__(self) -> None:
        super().__init__()
        self.note = self.append


class Tie(weakref.ref[Any]):
    """A weak reference that is appended to `died` when its object dies, and says by `mark` who that
    was.

    The reference works only as long as somebody keeps it. `tie_to` makes it: a constructor of its
    own would take twice as long and more, and each gradient has three ties.
    """

    __slots__ = ("mark",)

    mark: Any


def tie_to(watched: object, died: Dead, mark: Any) -> Tie:
    """A new tie to `watched`, whose death `died` is told of."""
    made = Tie(watched, died.note)
    made.mark = mark
    return made


class Same:
    """Tells whether some objects are the very ones that were given, in that order, and looks at
    none of them: of a step's hundreds each would have to be fetched from memory.

    An object that has died counts as another one, since a new one may have its place.
    """

    def __init__(self, objects: Sequence[object]) -> None:
        self._places = [*map(id, objects)]
        self._died = Dead()
        self._ties = [tie_to(one, self._died, None) for one in objects]

    def are(self, objects: Sequence[object]) -> bool:
        return not self._died and [*map(id, objects)] == self._places
