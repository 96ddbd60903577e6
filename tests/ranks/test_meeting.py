"""Ranks find each other in a store that holds what an earlier start of them has left."""

import json
import time
from collections import defaultdict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import zcompile
import zcompile.runtime.ranks.fabric as fabric_module
from zcompile.errors import RankFailed
from zcompile.frontend.offload import session_behind
from zcompile.runtime.ranks.meeting import Met, meet


def started(store: dist.Store, ranks: int, waits_s: Sequence[float]) -> list[Met]:
    """What each rank has met, each in a thread, after a wait of its own."""

    def run(rank: int) -> Met:
        time.sleep(waits_s[rank])
        return meet(store, rank, ranks, 60.0)

    with ThreadPoolExecutor(ranks) as threads:
        return list(threads.map(run, range(ranks)))


def test_all_meet_under_a_name_that_no_start_before_has_used():
    store, names = dist.HashStore(), set()
    for waits in [(0, 0, 0), (0.05, 0, 0.1), (0, 0.1, 0.05)]:
        found = started(store, 3, waits)
        assert len({met.name for met in found}) == 1
        assert all(len(met.hosts) == 3 for met in found)
        names.add(found[0].name)
    assert len(names) == 3


@pytest.mark.parametrize("missing", [0, 1])
def test_a_rank_of_the_start_before_does_not_stand_for_one_that_has_not_come(missing):
    store = dist.HashStore()
    started(store, 2, (0, 0))
    with pytest.raises(RankFailed, match=f"rank {missing} on a host that is not known yet did not"):
        meet(store, 1 - missing, 2, 0.3)


def test_a_host_is_told_as_it_is_now():
    store = dist.HashStore()
    store.set("token/1", json.dumps(["of a start before", "elsewhere"]))
    assert all("elsewhere" not in met.hosts for met in started(store, 2, (0, 0.1)))


def restarted(mesh):
    """What the second of two starts on one store, which torchrun keeps, reads there of failures;
    in the first one, rank 1 fails."""
    for start in range(2):
        with mock.patch.object(fabric_module, "_SESSIONS", defaultdict(int)):
            model = zcompile.offload(torch.nn.Linear(4, 4), mesh=mesh, device="cpu")
        fabric = session_behind(model).fabric
        if start == 0 and mesh.get_local_rank() == 1:
            fabric.failed_here(OSError("of the start before"))
        told = fabric._watch._read_failure()
        zcompile.close(model)
    return str(told)


def test_a_failure_of_the_start_before_is_not_taken_for_one_of_this(pool):
    assert pool.run(restarted, 2) == ["None"] * 2
