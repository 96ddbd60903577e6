"""How an engine ends, and what it outlives: closing, Ctrl-C, a fork, a defect."""

import errno
import os
import signal
import threading
import time

import pytest
import torch

from zcompile.errors import IOFault, ParameterChanged
from zcompile.ir.units import MiB
from zcompile.runtime.device.pages import host_pages
from zcompile.runtime.tiers.base import Buffer
from zcompile.runtime.tiers.disk import DiskTier

UNIT = 4096


@pytest.fixture
def tier(faulty_tier):
    return faulty_tier


def filled(nbytes: int, value: int = 0) -> Buffer:
    return Buffer.over(host_pages(nbytes).fill_(value))


def serves(tier: DiskTier) -> bool:
    """Whether what is written is read, right now."""
    extent, source, into = tier.reserve(UNIT, "w"), filled(UNIT, 7), filled(UNIT)
    tier.write(extent, 0, source).wait()
    tier.read(extent, 0, into).wait()
    return torch.equal(into.memory, source.memory)


def test_closing_cancels_what_waits_and_ends_what_is_under_way(tier, faults, monkeypatch):
    monkeypatch.setattr(tier._engines[0]._lanes[True], "_most_bytes", UNIT)
    extent = tier.reserve(8 * UNIT, "w")
    faults.gate.clear()
    promises = [tier.write(extent, n * UNIT, filled(UNIT)) for n in range(4)]
    closing = threading.Thread(target=tier.close)
    closing.start()
    while not tier._engines[0]._closed:
        time.sleep(0.001)
    faults.gate.set()
    closing.join(30)
    promises[0].wait()
    for promise in promises[1:]:
        with pytest.raises(ParameterChanged, match="'w' is gone: its store was closed"):
            promise.wait()


def test_a_defect_in_a_callback_is_reported_and_the_engine_goes_on(tier, crashes):
    extent = tier.reserve(MiB, "w")
    promise = tier.write(extent, 0, filled(MiB))

    def defect(error: BaseException | None) -> None:
        raise ZeroDivisionError

    promise.then(defect)
    promise.wait_finished()
    assert serves(tier)
    assert [type(error) for error in crashes] == [ZeroDivisionError]
    crashes.clear()


def test_a_ring_that_cannot_be_reaped_is_reported_and_closing_ends_what_it_lost(
    tier, crashes, monkeypatch
):
    def broken() -> None:
        raise OSError(errno.EINVAL, "no such context")

    extent = tier.reserve(UNIT, "w")
    monkeypatch.setattr(tier._engines[0].ring, "reap", broken)
    promise = tier.write(extent, 0, filled(UNIT))
    tier.close()
    with pytest.raises(ParameterChanged, match="'w' is gone: its store was closed"):
        promise.wait()
    assert [str(error) for error in crashes] == ["[Errno 22] no such context"]
    crashes.clear()


def test_a_forked_child_gets_an_error_and_ends(tier):
    extent = tier.reserve(UNIT, "w")
    heard, told = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            tier.read(extent, 0, filled(UNIT)).wait()
        except IOFault as error:
            os.write(told, str(error).encode())
        tier._engines[0].close()
        os._exit(0)
    os.waitpid(pid, 0)
    text = os.read(heard, 4096).decode()
    os.close(heard)
    os.close(told)
    assert f"read of 'w' failed: the file belongs to process {os.getpid()}" in text
    assert serves(tier)


def test_an_interrupt_while_requests_are_submitted_comes_when_they_are(tier, faults):
    extent, source = tier.reserve(UNIT, "w"), filled(UNIT, 3)

    def interrupted(request):
        signal.raise_signal(signal.SIGINT)

    faults.decide = interrupted
    with pytest.raises(KeyboardInterrupt):
        tier.write(extent, 0, source)
    faults.none()
    assert serves(tier)
    into = filled(UNIT)
    tier.read(extent, 0, into).wait()
    assert into.memory.eq(3).all()
