"""An activation that leaves is held until the copy that reads it is over, however late that is."""

import pytest
from lagging import lagging
from moved import forced, of_another_layout
from planned_runs import begun, expected, same, train
from sampled import sampled

import zcompile
from zcompile.frontend.offload import session_behind
from zcompile.ir.torch_compat import storage_of
from zcompile.ir.units import Bytes, KiB

BUDGET = Bytes(128 * KiB)


def bytes_of(sources) -> int:
    """Of the storages that these lie in."""
    return sum({s.data_ptr(): s.untyped_storage().nbytes() for s in sources}.values())


@pytest.mark.parametrize("batches", sampled([1, 2], 2))
def test_what_copies_have_yet_to_read_is_held(monkeypatch, batches):
    devices = lagging(monkeypatch)
    with forced("host"):
        model, compiled, optimizer = begun(2, batches, device_memory=BUDGET, residency=False)
    (device,) = devices
    holding, seen = session_behind(model).live_memory, []
    arena = session_behind(model).arena

    def look():
        beside = [s for s in device.sources if not arena.holds(s)]
        seen.append((bytes_of(beside), holding.nbytes))

    device.asked = look
    zcompile.stats(model, reset=True)
    train(model, compiled, optimizer, 2, 4, batches)
    stats = zcompile.stats(model)
    assert len(seen) > 20
    assert all(read <= held for read, held in seen), max(r - h for r, h in seen)
    assert stats["peak"]["activations"] <= stats["planned_peak"]["activations"]
    assert stats["peak"]["together"] <= BUDGET
    device.asked = lambda: None
    assert same(model, expected(end=4, batches=batches))


def test_a_value_whose_bytes_are_copied_to_leave_counts_with_the_copy(monkeypatch):
    """As of one that an op makes in another layout on this device than it was traced in."""
    devices = lagging(monkeypatch)
    with forced("host"):
        model, compiled, optimizer = begun(2, device_memory=BUDGET, residency=False)
    (device,) = devices
    holding, seen = session_behind(model).live_memory, []
    arena = session_behind(model).arena

    def look():
        beside = [storage_of(s) for s in device.sources if not arena.holds(s)]
        beside += [s for ref in values if (s := ref()) is not None]
        alive = {s.data_ptr(): s.nbytes() for s in beside}
        seen.append((sum(alive.values()), holding.nbytes))

    values = of_another_layout(monkeypatch)
    device.asked = look
    train(model, compiled, optimizer, 2, 4)
    assert len(values) > 4
    assert all(read <= held for read, held in seen), max(r - h for r, h in seen)
    device.asked = lambda: None
    assert same(model, expected(end=4))
