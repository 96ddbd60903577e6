"""Promises: finished once, by whoever; told to all who asked."""

import threading

import pytest

from zcompile.runtime.transfer.ticket import Countdown, Promise, Ready, Workers


def test_ready_is_done_and_waits_for_nothing():
    ticket = Ready()
    assert ticket.done()
    ticket.wait()
    ticket.join_compute()


def test_wait_returns_once_another_thread_finishes():
    promise = Promise()
    thread = threading.Timer(0.02, promise.finish)
    thread.start()
    assert not promise.done()
    promise.wait()
    assert promise.done()
    thread.join()


def test_wait_raises_what_went_wrong_every_time():
    promise = Promise()
    promise.finish(OSError("gone"))
    for _ in range(2):
        with pytest.raises(OSError, match="gone"):
            promise.wait()


def test_callbacks_run_before_and_after_the_end():
    promise, told = Promise(), []
    promise.then(told.append)
    promise.finish()
    promise.then(told.append)
    assert told == [None, None]


def test_the_first_end_counts():
    promise = Promise()
    error = OSError("first")
    promise.finish(error)
    promise.finish(OSError("second"))
    assert promise.error is error


def test_a_countdown_ends_with_its_last_part_and_keeps_the_first_error():
    countdown = Countdown()
    countdown.hold(2)
    first = OSError("first")
    countdown.drop()
    countdown.drop(first)
    assert not countdown.done()
    countdown.drop(OSError("second"))
    assert countdown.done()
    assert countdown.error is first


@pytest.mark.timeout(60)
def test_workers_that_take_the_last_job_meanwhile_are_stopped(monkeypatch):
    workers, go, ran = Workers("busy", 1, pytest.fail), threading.Event(), []
    jobs = workers._jobs

    class Raced:
        """Whoever has seen a job comes too late for it."""

        def empty(self):
            return jobs.empty() or jobs.get() is None

        def put(self, job):
            go.set()
            jobs.put(job)

        def __getattr__(self, name):
            return getattr(jobs, name)

    workers.submit(go.wait)
    workers.submit(lambda: ran.append(1))
    monkeypatch.setattr(workers, "_jobs", Raced())
    workers.stop()
    assert not ran
    assert not any(thread.is_alive() for thread in workers._threads)
