"""Counts the bytes of entries that are in ordinary host memory, beside what the tiers hold."""

import time
import weakref

import pytest
from torch import Tensor

from zcompile.runtime.store.store import Entry, Store


class Copies:
    """Each copy that a store made of a whole entry for somebody, as long as that lives.

    read_bytes  of all that were made
    most_bytes  the most that lived at once
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.read_bytes = self.most_bytes = 0
        self._live: list[weakref.ref[object]] = []
        read_all = Store.read_all

        def counted(store: Store, entry: Entry) -> Tensor:
            made = read_all(store, entry)
            self._live.append(weakref.ref(made.untyped_storage()))
            self.read_bytes += made.nbytes
            self.most_bytes = max(self.most_bytes, self.live_bytes())
            return made

        monkeypatch.setattr(Store, "read_all", counted)

    def live_bytes(self) -> int:
        found = [ref() for ref in self._live]
        return sum(storage.nbytes() for storage in found if storage is not None)

    def left_bytes(self) -> int:
        """Of those that nobody lets go: the thread that has read one holds it for a moment longer
        than its reader waits for it."""
        end = time.monotonic() + 5
        while (left := self.live_bytes()) and time.monotonic() < end:
            time.sleep(0.001)
        return left
