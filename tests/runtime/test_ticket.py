"""Promises: finished once, by whoever; told to all who asked."""

import threading

import pytest

from zcompile.runtime.transfer.ticket import Countdown, Promise, Ready


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
