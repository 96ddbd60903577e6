"""How a device is shared between the arena and what compiled graphs hold beside it.

    device_memory = arena + what graphs hold at most

It is split when graphs are compiled, by what they will hold. Where a call would hold more, the
arena gives way before the call: what rests there leaves, and a step is planned anew.
"""

import logging
from collections.abc import Callable, Sequence

from zcompile.errors import BudgetExceeded
from zcompile.runtime.interrupts import deferred_interrupts
from zcompile.runtime.store import Entry, Store
from zcompile.units import show_size

log = logging.getLogger(__name__)

OF_GRAPHS = "values of compiled graphs"


class DeviceSplit:
    """Of the device of one store.

    empty           makes what rests on the device leave, with nothing under way and no schedule
                    remembered that was made for the arena; what could not leave
    held_bytes      set aside for what graphs hold; the arena has the rest
    foreseen_bytes  that compiled graphs will hold, once they are run
    """

    def __init__(self, store: Store, empty: Callable[[], Sequence[Entry]]) -> None:
        self._store, self._empty = store, empty
        self.held_bytes = self.foreseen_bytes = 0

    def foresee(self, nbytes: int) -> None:
        """A graph was compiled that will hold so much: the arena gives way before it is run."""
        self.foreseen_bytes = max(self.foreseen_bytes, nbytes)

    def hold(self, nbytes: int) -> None:
        """Compiled graphs hold up to `nbytes` of the device from here on.

        raises  BudgetExceeded, if the device has less, or what rests on it finds no room elsewhere.
                No value is lost then, and the arena stays as it is; what could leave has left.
        """
        nbytes = max(nbytes, self.foreseen_bytes)
        if nbytes <= self.held_bytes:
            return
        store = self._store
        if nbytes > store.device_budget:
            raise self._refusal(
                nbytes, "what compiled graphs keep for backward", (),
                f"give zcompile.offload device_memory={nbytes} or more, or let go of results "
                "whose backward never comes",
            )  # fmt: skip
        if near := self._empty():
            raise self._refusal(
                store.device_budget + nbytes - self.held_bytes,
                "a compiled graph, beside what rests there,",
                [(OF_GRAPHS, nbytes), *((entry.name, entry.nbytes) for entry in near)],
                "give zcompile.offload more device_memory, or more host_memory or a disk: what "
                "rests on the device has to leave for what the graph holds, and finds no room",
            )
        with deferred_interrupts():
            store.arena.give_way(nbytes)
            store.homes.device.resized()
            self.held_bytes = nbytes
        log.info("compiled graphs hold %s of the device; the arena has the other %s",
                 show_size(nbytes), show_size(store.arena.budget_bytes))  # fmt: skip

    def too_small(self, error: BudgetExceeded, where: str, what: str) -> BudgetExceeded:
        """`where` needs more of the arena than there is: what it needs of the device, with the
        values that are held beside `what` lies in the arena."""
        if not self.held_bytes:
            return error
        needed = error.needed_bytes + self.held_bytes
        return self._refusal(
            needed, where, [(what, error.needed_bytes), (OF_GRAPHS, self.held_bytes)],
            f"give zcompile.offload device_memory={needed} or more, or a smaller batch",
        )  # fmt: skip

    def _refusal(
        self, needed: int, where: str, alive: Sequence[tuple[str, int]], todo: str
    ) -> BudgetExceeded:
        budget = self._store.device_budget
        return BudgetExceeded("device", budget, needed, where, alive, todo)
