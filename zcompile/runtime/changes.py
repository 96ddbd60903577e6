"""Tells whether anything but values has changed since somebody looked.

A planned step does to the same entries what the last one did. Where each of them rests, whether
anything waits of it, and which tensor names it need not be looked at entry by entry then: who keeps
something of a step keeps the mark of that moment, and uses it while the mark is the same. Whatever
changes such a fact of an entry that outlives steps gives all stores of the process a new mark,
after the change. A write of values changes none, and neither does a transfer: what rests on the
device has none, and what rests elsewhere is used by transfers, each of which waits for those before
it. What a gradient is is looked at anew in each step, since it is a new entry.
"""


class Changes:
    """The one mark of the process.

    mark  an object of its own for each change; read it before you look
    """

    def __init__(self) -> None:
        self.mark = object()

    def note(self) -> None:
        """Something has changed."""
        self.mark = object()


CHANGES = Changes()
