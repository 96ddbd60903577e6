"""When an optimizer's step may stream through the arena's annex: while no graph holds it."""

import logging
from time import perf_counter
from typing import cast

from zcompile.errors import DeviceTooSmall
from zcompile.ir.optimizer_step import NO_ROOM, StepRoom
from zcompile.ir.schedule import Schedule
from zcompile.runtime.departures import Departures
from zcompile.runtime.device_split import DeviceSplit
from zcompile.runtime.executor import Executor
from zcompile.runtime.store.store import Store
from zcompile.runtime.transfer.transfer import Transfer

log = logging.getLogger(__name__)


class AnnexUse:
    """Of the annex of one store's arena: who may be in it, and when."""

    def __init__(
        self, store: Store, split: DeviceSplit, executor: Executor, departures: Departures
    ) -> None:
        self._store, self._split, self._executor = store, split, executor
        self._departures = departures
        self._annex = store.arena.annex

    @property
    def free_bytes(self) -> int:
        """Of the device, set aside for compiled graphs, that none of them holds now."""
        return max(0, self._split.held_bytes - self._executor.holding.nbytes)

    def room(self, window: StepRoom) -> StepRoom:
        """What a step streams through now: the annex, if one is planned, is larger than the window,
        and is held by nobody."""
        annex = self._annex.room
        if annex.nbytes <= window.nbytes or self._executor.is_running:
            return window
        return annex if annex.nbytes <= self.free_bytes else window

    def plan(self, room: StepRoom) -> None:
        """From here on a step may use this room."""
        self.leave()
        self._annex.plan(room)

    def need(self, schedule: Schedule) -> None:
        """A step was lowered."""
        if schedule.annex_at and not self._annex.need(schedule.arena_bytes):
            self.leave()

    def open(self, schedule: Schedule) -> bool:
        """Whether the slots of a step are there: before it is walked, so that compute that went
        before is done with the memory. If not, `room` says what there is instead."""
        if not schedule.annex_at:
            return True
        if self._annex.room.nbytes > self.free_bytes:
            return False
        try:
            self._annex.open()
        except DeviceTooSmall as error:
            log.warning("the optimizer streams through the arena's window: %s", error)
            self.plan(NO_ROOM)
            return False
        return True

    def leave(self) -> None:
        """The device has the memory back: the host waits until nothing reads it."""
        memory, begin = self._annex.memory, perf_counter()
        if memory is None:
            return
        for ticket in self._departures.under(memory):
            cast(Transfer, ticket).over.settle()
        self._annex.close()
        seconds = perf_counter() - begin
        self._store.meter.add("stall", seconds)
        self._executor.clocks.waited_between(seconds)
