"""No garbage is looked for while a plan is made."""

import gc
import weakref
from collections.abc import Iterator

import pytest
import torch
from offloaded import SMALL

import zcompile
from zcompile.frontend import gc_pause as module
from zcompile.frontend.gc_pause import gc_paused
from zcompile.runtime import executor


class Cycle:
    """Alive until it is looked for."""

    def __init__(self) -> None:
        self.me = self


@pytest.fixture(autouse=True)
def collecting(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As in a process that froze nothing, which `conftest.py` does."""
    monkeypatch.setattr(module._Last, "frozen", False)
    was, frozen = gc.isenabled(), gc.get_freeze_count()
    gc.unfreeze()
    gc.enable()
    yield
    if frozen:
        gc.freeze()
    if not was:
        gc.disable()


def test_nothing_is_collected_inside_and_all_goes_on_afterwards() -> None:
    with gc_paused():
        assert not gc.isenabled()
    assert gc.isenabled()


def test_what_was_disabled_stays_so() -> None:
    gc.disable()
    with gc_paused():
        pass
    assert not gc.isenabled()


@pytest.mark.slow
def test_what_was_made_is_old_afterwards_and_can_still_be_collected() -> None:
    with gc_paused():
        made = Cycle()
    assert any(x is made for x in gc.get_objects(generation=2))
    assert not gc.get_freeze_count()
    found = weakref.ref(made)
    del made
    gc.collect()
    assert found() is None


def test_what_is_frozen_stays_so() -> None:
    gc.freeze()
    try:
        with gc_paused():
            pass
        assert gc.get_freeze_count()
    finally:
        gc.unfreeze()


def test_what_is_frozen_is_counted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    counted: list[int] = []
    monkeypatch.setattr(gc, "get_freeze_count", lambda: counted.append(1) or 1)
    for _ in range(3):
        with gc_paused():
            pass
    assert counted == [1]


def test_much_that_was_left_is_collected_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MANY", 1 << 60)
    with gc_paused():
        found = weakref.ref(Cycle())
    with gc_paused():
        assert found() is not None
    monkeypatch.setattr(module._Last, "left", 0)
    monkeypatch.setattr(module, "MANY", 0)
    with gc_paused():
        assert found() is None


def test_a_call_that_is_walked_is_not_interrupted_to_look_for_garbage(monkeypatch) -> None:
    inside: list[bool] = []

    def compute(*args):
        inside.append(gc.isenabled())
        return original(*args)

    original = executor.compute
    monkeypatch.setattr(executor, "compute", compute)
    torch._dynamo.reset()
    model = zcompile.offload(torch.nn.Linear(4, 4), **SMALL)
    torch.compile(model, backend="zinf")(torch.ones(2, 4)).sum().backward()
    assert inside
    assert not any(inside)
    assert gc.isenabled()


@pytest.mark.parametrize("enabled", [True, False])
def test_after_an_error_in_a_call_it_is_as_before(enabled) -> None:
    (gc.enable if enabled else gc.disable)()
    with pytest.raises(KeyError), executor.uncollected():
        raise KeyError(str(gc.isenabled()))
    assert gc.isenabled() is enabled
