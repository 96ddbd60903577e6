"""Threads that do one thing after another.

All are daemons that hold no reference to what they worked on, so neither a forgotten store nor
the end of the interpreter waits for them.
"""

import threading
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from queue import SimpleQueue
from types import TracebackType
from typing import TypeVar

Job = Callable[[], None]
Key = TypeVar("Key")


class _Reporting:
    """Hands whatever a block raises to `report`, and goes on."""

    def __init__(self, report: Callable[[BaseException], None]) -> None:
        self._report = report

    def __enter__(self) -> None:
        return

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> bool:  # fmt: skip
        if error is not None:
            self._report(error)
        return True


class Worker(threading.Thread):
    """A thread of ours, so that it can be told from the user's."""


class Workers:
    """A queue and the threads that empty it, first in first out.

    crashed  told what a job raised; jobs report expected errors themselves, so this is a defect
    """

    def __init__(self, name: str, threads: int, crashed: Callable[[BaseException], None]) -> None:
        self._jobs: SimpleQueue[Job | None] = SimpleQueue()
        self._threads = [
            Worker(target=_work, args=(self._jobs, crashed), name=f"{name}-{n}", daemon=True)
            for n in range(threads)
        ]
        with ExitStack() as undo:
            undo.callback(self.stop)
            for thread in self._threads:
                thread.start()
            undo.pop_all()

    def submit(self, job: Job) -> None:
        self._jobs.put(job)

    @property
    def submit_from_c(self) -> Callable[[Job], None]:
        """As `submit`, with not one bytecode to run: for the callback of a weak reference."""
        return self._jobs.put

    def stop(self, timeout_s: float = 10.0) -> None:
        """End after the jobs under way; those still queued are dropped."""
        while not self._jobs.empty():
            self._jobs.get()
        for _ in self._threads:
            self._jobs.put(None)
        for thread in self._threads:
            if thread.is_alive() and thread is not threading.current_thread():
                thread.join(timeout_s)


def several(names: Mapping[Key, str], threads: int,
            crashed: Callable[[BaseException], None]) -> dict[Key, Workers]:  # fmt: skip
    """`Workers` for each name: all of them, or an error and none."""
    found: dict[Key, Workers] = {}
    with ExitStack() as undo:
        for key, name in names.items():
            found[key] = Workers(name, threads, crashed)
            undo.callback(found[key].stop)
        undo.pop_all()
    return found


def _work(jobs: "SimpleQueue[Job | None]", crashed: Callable[[BaseException], None]) -> None:
    while (job := jobs.get()) is not None:
        with _Reporting(crashed):
            job()
        del job
