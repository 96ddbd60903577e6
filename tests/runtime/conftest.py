"""Stores for the runtime's tests: opened by field, closed and searched for leftovers; and what is
counted of list ops."""

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from runtime.faulty import Faults

from zcompile.config import Config
from zcompile.ir.units import Bytes, KiB
from zcompile.runtime.eager import dispatch
from zcompile.runtime.eager.repeats import ListCall
from zcompile.runtime.meter import Meter
from zcompile.runtime.store.store import Store
from zcompile.runtime.tiers.disk import DiskTier

OpenStore = Callable[..., Store]


@pytest.fixture
def own_threads() -> Callable[[], list[str]]:
    """Names of the threads that stores opened in this test run; those of forgotten models of other
    tests may end at any time."""
    others = set(threading.enumerate())
    return lambda: [
        t.name for t in threading.enumerate() if t.name.startswith("zinf-") and t not in others
    ]


@pytest.fixture
def faults(monkeypatch: pytest.MonkeyPatch) -> Faults:
    """What is to go wrong below the I/O engines of tiers and stores that are opened after this."""
    return Faults(monkeypatch)


@pytest.fixture
def open_store(tmp_path: Path, own_threads: Callable[[], list[str]]) -> Iterator[OpenStore]:
    """Opens a small store on the CPU device; `disk=True` gives it a directory of its own."""
    stores: list[Store] = []

    def open_one(**fields: object) -> Store:
        above = {k: fields.pop(k) for k in ("apply_deferred",) if k in fields}
        if fields.get("disk") is True:
            directory = tmp_path / f"disk{len(stores)}"
            directory.mkdir()
            fields["disk"] = directory
        given = {"device": "cpu", "device_memory": "8MiB", "host_memory": "1MiB", **fields}
        stores.append(Store(Config(**given), **above))  # type: ignore[arg-type]
        return stores[-1]

    before = own_threads()
    yield open_one
    for store in stores:
        store.close()
    assert own_threads() == before
    assert [p for p in tmp_path.rglob("*") if p.is_file()] == []


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often rows of an optimizer's step were made ("rows"), and how often a step was repeated
    with those of an earlier one ("again")."""
    seen: Counter[str] = Counter(rows=0, again=0)
    rows_of, again = dispatch.rows_of, ListCall.rerun

    def count_rows(func: Any, args: Any, kwargs: Any) -> Any:
        seen["rows"] += func._schema.name == "aten::_fused_adamw_"
        return rows_of(func, args, kwargs)

    def count_again(call: ListCall) -> bool:
        done = again(call)
        seen["again"] += done and call.func._schema.name == "aten::_fused_adamw_"
        return done

    monkeypatch.setattr(dispatch, "rows_of", count_rows)
    monkeypatch.setattr(ListCall, "rerun", count_again)
    return seen


HOMES = (
    ("cpu", "host"),
    ("cpu", "disk"),
    pytest.param(("cuda", "host"), marks=pytest.mark.gpu),
    pytest.param(("cuda", "disk"), marks=pytest.mark.gpu),
)
SMALL_BYTES = Bytes(256 * KiB)
"""The least host budget: all of it is staging, so entries rest on disk."""


@pytest.fixture(params=HOMES, ids=str)
def store(request: pytest.FixtureRequest, open_store: OpenStore) -> Store:
    """A store on the device and with entries on the tier of the test's parameter."""
    device, home = request.param
    if home == "host":
        return open_store(device=device, host_memory="16MiB")
    return open_store(device=device, host_memory=SMALL_BYTES, disk=True)


@pytest.fixture
def crashes() -> Iterator[list[BaseException]]:
    """Defects that engines reported; a test that expects none need not look."""
    found: list[BaseException] = []
    yield found
    assert not found


@pytest.fixture
def faulty_tier(
    tmp_path: Path,
    faults: Faults,
    crashes: list[BaseException],
    own_threads: Callable[[], list[str]],
) -> Iterator[DiskTier]:
    """A disk tier over `faults`."""
    before = own_threads()
    tier = DiskTier((tmp_path,), {}, Meter(), crashes.append)
    yield tier
    faults.gate.set()
    tier.close()
    assert own_threads() == before
    assert list(tmp_path.iterdir()) == []
