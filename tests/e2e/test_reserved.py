"""A card's budget is kept as torch's allocator has it: what it has reserved of CUDA, and not only
what we count."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import reserved_run

import zcompile
from zcompile.ir.units import MiB

BESIDE = 64 * MiB
"""Reserved beyond the budget, at most: pieces of what torch's allocator asks CUDA for, of which
some stay empty."""


@pytest.mark.gpu
@pytest.mark.parametrize("name", reserved_run.FIELDS)
def test_a_training_reserves_no_more_than_its_budget(name, tmp_path):
    helpers = Path(reserved_run.__file__)
    paths = (helpers.parent, Path(zcompile.__file__).parent.parent)
    ran = subprocess.run(
        [sys.executable, str(helpers), name, str(tmp_path)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, paths))},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    text = ran.stdout.splitlines()[-1]
    told = json.loads(text)
    assert told["told"]["together"] <= reserved_run.DEVICE_BYTES, text
    assert told["reserved"] - told["before"] <= reserved_run.DEVICE_BYTES + BESIDE, text
    # Once the plan is reviewed, no step asks CUDA for memory.
    assert told["asked"][0] == told["asked"][1], text
