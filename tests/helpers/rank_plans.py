"""Budgets with which the models of `rank_models.py` are planned by each rank for itself."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from zcompile.planner import late_step, step_plan

ROOMY = {"device": "cpu", "device_memory": "4MiB", "host_memory": "64MiB", "stage": 3}
"""What ranks keep whole stands in `ranks/test_stages.py`."""
TIGHT = {1: "900KiB", 2: "640KiB", 4: "560KiB"}
"""Ranks -> device memory beside which most of what a rank holds streams; activations take 300 KiB
of it."""
SLOW = {"h2d": "50MB/s", "d2h": "50MB/s"}


@contextmanager
def everything_late(wanted: bool) -> Iterator[None]:
    """Within, a plan has all updates late that may be, whether that pays or not: whatever costs
    were measured."""
    with pytest.MonkeyPatch.context() as patch:
        if wanted:
            patch.setattr(step_plan, "LATE_PAYS", 0.0)
            patch.setattr(late_step, "SMALL_BYTES", 0)
            patch.setattr(step_plan, "_moving", lambda step, weights, placement, reach: [*weights])
        yield
