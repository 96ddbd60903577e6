"""How a device is shared between the arena and what compiled graphs hold beside it.

    device_memory = arena + what graphs hold at most

It is split when graphs are compiled, by what they will hold. Where a call would hold more, the
arena gives way before the call: what rests there leaves, and a step is planned anew.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from zcompile.errors import BudgetExceeded
from zcompile.ir.units import show_size
from zcompile.runtime.store.store import Entry, Store
from zcompile.runtime.transfer.interrupts import deferred_interrupts

log = logging.getLogger(__name__)

OF_GRAPHS = "values of compiled graphs"


@dataclass(frozen=True)
class Whole:
    """An op of an optimizer that gathers whole tensors.

    gathers  into the arena: name, bytes
    beside   what it takes beside it
    """

    name: str
    gathers: Sequence[tuple[str, int]]
    beside: Sequence[tuple[str, int]]


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

    def hold_whole(self, op: Whole, held_bytes: int) -> None:
        """An op on whole tensors is about to be called, while graphs hold so much.

        raises  BudgetExceeded, as `hold`
        """
        gathered, beside = (sum(n for _, n in rows) for rows in (op.gathers, op.beside))
        needed = held_bytes + beside + gathered
        if needed > self._store.device_budget:
            raise self._refusal(
                needed, f"{op.name}, which takes whole tensors,",
                [*op.gathers, *op.beside, (OF_GRAPHS, held_bytes)],
                f"give zcompile.offload device_memory={needed} or more, or take an optimizer "
                "whose ops are elementwise (AdamW, Adam, SGD; foreach or fused): they stream",
            )  # fmt: skip
        self.hold(held_bytes + beside, gathered)

    def hold(self, nbytes: int, least_arena: int = 0) -> None:
        """Compiled graphs hold up to `nbytes` of the device from here on, and the arena has at
        least so much.

        What was held once, or was foreseen, stays set aside, so that the arena need not change from
        call to call; only where a call needs that for what it fetches, the arena has it back.

        raises  BudgetExceeded, if the device has less, or what rests on it finds no room elsewhere.
                No value is lost then, and the arena stays as it is; what could leave has left.
        """
        store = self._store
        if nbytes + least_arena > store.device_budget:
            raise self._refusal(
                nbytes + least_arena, "a call, with what compiled graphs keep for backward,",
                [(OF_GRAPHS, nbytes), ("parameters that are read together", least_arena)],
                f"give zcompile.offload device_memory={nbytes + least_arena} or more, or a smaller "
                "batch, or let go of results whose backward never comes; or call torch._dynamo."
                "reset() and begin with the largest batch: what is compiled first for small ones "
                "may keep what it would else make again",
            )  # fmt: skip
        aside = max(nbytes, self.foreseen_bytes, self.held_bytes)
        if aside + least_arena > store.device_budget:
            aside = nbytes
        if aside == self.held_bytes:
            return
        if near := self._empty():
            raise self._refusal(
                store.device_budget + aside - self.held_bytes,
                "a compiled graph, beside what rests there,",
                [(OF_GRAPHS, aside), *((entry.name, entry.nbytes) for entry in near)],
                "give zcompile.offload more device_memory, or more host_memory or a disk: what "
                "rests on the device has to leave for what the graph holds, and finds no room",
            )
        used = store.arena.used_bytes
        if used and (aside < self.held_bytes or aside + least_arena + used > store.device_budget):
            raise self._refusal(
                nbytes + least_arena + used,
                "a call, beside values that eager code gathered and keeps,",
                [(OF_GRAPHS, nbytes), ("gathered values", used)],
                "drop references to what eager code gathered, or give zcompile.offload more "
                "device_memory",
            )
        with deferred_interrupts():
            store.arena.give_way(aside)
            store.homes.device.resized()
            self.held_bytes = aside
        log.info("compiled graphs hold %s of the device; the arena has the other %s",
                 show_size(aside), show_size(store.arena.budget_bytes))  # fmt: skip

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
