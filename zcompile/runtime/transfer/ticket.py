"""Tickets promise bytes that are still travelling; worker threads keep the promises.

Whoever reads a ticket sees three verbs (`Ticket`); whoever keeps a promise has two more, `then` and
`finish`. Nothing in the runtime blocks a thread to learn that a promise was kept: what must follow
is attached with `then`, and only a caller that asks for it waits.

All worker threads are daemons that hold no reference to what they worked on, so neither a forgotten
store nor the end of the interpreter waits for them. One that is within torch by then would end the
process by a signal, so whoever has such threads ends them before.
"""

import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from queue import Empty, SimpleQueue
from typing import Protocol, TypeVar

from zcompile.runtime.transfer.interrupts import interruptible
from zcompile.runtime.transfer.waiting import WAITS

# --- Promises ---

Callback = Callable[[BaseException | None], None]
"""Called once, with what went wrong or None, in the thread that finished the promise."""


class Ticket(Protocol):
    """A promise about bytes, as seen by whoever needs them."""

    def done(self) -> bool:
        """Whether the promise is finished, well or badly, as far as the host has heard: False may
        be out of date, True is not."""

    def wait(self) -> None:
        """Block the host until the promise is finished; raises what went wrong in the transfer."""

    def join_compute(self) -> None:
        """From here on compute may touch the bytes.

        Compute is the calling thread on the CPU device, the current stream on CUDA; there the host
        is blocked only until the last copy is enqueued.
        """


class Ready:
    """The ticket of bytes that have arrived already."""

    def done(self) -> bool:
        return True

    def wait(self) -> None:
        return

    def join_compute(self) -> None:
        return


class Behind:
    """The ticket of no bytes at all: it is finished when others are."""

    def __init__(self, others: Sequence[Ticket]) -> None:
        self._others = tuple(others)

    def done(self) -> bool:
        return all(ticket.done() for ticket in self._others)

    def wait(self) -> None:
        for ticket in self._others:
            ticket.wait()

    def join_compute(self) -> None:
        for ticket in self._others:
            ticket.join_compute()


class Promise:
    """A ticket that is finished once, from any thread; the first error given wins."""

    __slots__ = ("_callbacks", "_finished", "_gate", "_lock", "error")

    def __init__(self) -> None:
        self.error: BaseException | None = None
        self._callbacks: list[Callback] = []
        self._lock = threading.Lock()
        self._finished = False
        self._gate = threading.Lock()
        self._gate.acquire()

    def done(self) -> bool:
        return self._finished

    @interruptible
    def wait_finished(self) -> None:
        """Block until finished, well or badly; raises nothing."""
        if self._gate.locked():
            waiter = object()
            try:
                WAITS.begins(waiter)
                with self._gate:
                    pass
            finally:
                WAITS.ends(waiter)

    def wait(self) -> None:
        self.wait_finished()
        if self.error is not None:
            raise self.error

    def join_compute(self) -> None:
        self.wait()

    def then(self, callback: Callback) -> None:
        """Call `callback` when finished; at once, in this thread, if the promise is finished
        already."""
        with self._lock:
            if not self._finished:
                self._callbacks.append(callback)
                return
        callback(self.error)

    def finish(self, error: BaseException | None = None) -> None:
        """Finish the promise; callbacks run before waiters wake. A second call changes nothing."""
        with self._lock:
            if self._finished:
                return
            self._finished = True
            self.error = error if self.error is None else self.error
            callbacks, self._callbacks = self._callbacks, []
        try:
            for callback in callbacks:
                callback(self.error)
        finally:
            self._gate.release()


class Countdown(Promise):
    """A promise kept in parts: finished when the first part, and every one of `hold`, was
    dropped."""

    __slots__ = ("_held",)

    def __init__(self) -> None:
        super().__init__()
        self._held = 1

    def hold(self, parts: int = 1) -> None:
        """Add parts to wait for."""
        with self._lock:
            self._held += parts

    def drop(self, error: BaseException | None = None) -> None:
        """One part is done, or failed with `error`."""
        with self._lock:
            self._held -= 1
            if self.error is None and not self._finished:
                self.error = error
            last = self._held == 0
        if last:
            self.finish()


# --- Threads ---

Job = Callable[[], None]
Key = TypeVar("Key")


class Worker(threading.Thread):
    """A thread of the runtime, so that it can be told from the user's."""


class Workers:
    """A queue of jobs and the threads that run them, first in first out.

    crashed  told what a job raised; jobs report expected errors themselves, so this is a defect
    """

    def __init__(self, name: str, threads: int, crashed: Callable[[BaseException], None]) -> None:
        self._jobs: SimpleQueue[Job | None] = SimpleQueue()
        self._threads = [
            Worker(target=_run_jobs, args=(self._jobs, crashed), name=f"{name}-{n}", daemon=True)
            for n in range(threads)
        ]
        with ExitStack() as undo:
            undo.callback(self.stop)
            for thread in self._threads:
                thread.start()
            undo.pop_all()

    def submit(self, job: Job) -> None:
        """Queue a job."""
        self._jobs.put(job)

    @property
    def submit_from_c(self) -> Callable[[Job], None]:
        """As `submit`, without a bytecode to run: for the callback of a weak reference."""
        return self._jobs.put

    @property
    def are_alive(self) -> bool:
        """Whether any of the threads has not ended."""
        return any(thread.is_alive() for thread in self._threads)

    def stop(self, timeout_s: float = 10.0) -> None:
        """End the threads after the jobs that run now; queued jobs are dropped.

        timeout_s  for which each of the threads is waited for
        """
        with suppress(Empty):
            while True:
                self._jobs.get_nowait()
        for _ in self._threads:
            self._jobs.put(None)
        with WAITS:
            for thread in self._threads:
                if thread.is_alive() and thread is not threading.current_thread():
                    thread.join(timeout_s)


def start_workers(
    names: Mapping[Key, str], threads: int, crashed: Callable[[BaseException], None]
) -> dict[Key, Workers]:
    """`Workers` for each name, by key: all of them, or an error and none."""
    found: dict[Key, Workers] = {}
    with ExitStack() as undo:
        for key, name in names.items():
            found[key] = Workers(name, threads, crashed)
            undo.callback(found[key].stop)
        undo.pop_all()
    return found


def _run_jobs(jobs: "SimpleQueue[Job | None]", crashed: Callable[[BaseException], None]) -> None:
    """Run jobs until None comes; the loop of a worker thread."""
    while (job := jobs.get()) is not None:
        with Reporting(crashed):
            job()
        del job


class Finishing:
    """A context that keeps a promise: at its end, or with what was raised inside."""

    def __init__(self, promise: Promise) -> None:
        self._promise = promise

    def __enter__(self) -> None:
        return

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> bool:
        self._promise.finish(error)
        return True


class Reporting:
    """Hands whatever a block raises to `report`, and goes on."""

    def __init__(self, report: Callable[[BaseException], None]) -> None:
        self._report = report

    def __enter__(self) -> None:
        return

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> bool:
        if error is not None:
            self._report(error)
        return True
