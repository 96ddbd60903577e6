"""Gradients under way are held until nothing reads them, and no longer."""

import gc

import pytest
import torch
from torch import nn

import zcompile
from zcompile.frontend.offload import session_behind
from zcompile.ir.types import EntryKind
from zcompile.ir.units import MiB
from zcompile.runtime.live_memory import NO_STORAGES

NBYTES = MiB


@pytest.fixture
def slow_disk(tmp_path):
    """A session whose disk takes two seconds for an entry, and the entry."""
    model = nn.Module()
    model.weight = nn.Parameter(torch.zeros(NBYTES // 4))
    zcompile.offload(
        model,
        device="cpu",
        device_memory="8MiB",
        host_memory="16MiB",
        disk=tmp_path,
        throttle={"disk_write": "500KB/s"},
    )
    session = session_behind(model)
    entry = session.create("away", EntryKind.GRAD, NBYTES, tier="disk")
    yield session, entry
    zcompile.close(model)
    gc.collect()


def test_a_join_waits_until_a_gradient_was_read_and_not_until_it_is_on_disk(slow_disk):
    session, entry = slow_disk
    leaving = session.in_flight
    gradient = torch.ones(NBYTES // 4 + 1)[1:]  # on no granule of the disk: it goes by the ring
    leaving.expect(NBYTES, 2 * NBYTES)
    transfer = session.put(entry, gradient.view(torch.uint8))
    leaving.sent(NBYTES, NO_STORAGES)
    leaving.wait_down_to()
    assert transfer.memory_free.done()
    assert not transfer.done()
    gradient.zero_()
    assert session.read_all(entry).view(torch.float32).eq(1).all()


@pytest.mark.slow
def test_how_long_gradients_wait_for_others_is_known(slow_disk):
    session, entry = slow_disk
    before = session.in_flight.waited_s
    for _ in range(2):
        session.in_flight.expect(NBYTES, NBYTES)
        session.put(entry, torch.ones(NBYTES, dtype=torch.uint8))
        session.in_flight.sent(NBYTES, NO_STORAGES)
    session.in_flight.wait_down_to()
    assert session.in_flight.waited_s > before + 0.1, "the second starts once the first is on disk"
