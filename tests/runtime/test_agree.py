"""Ranks agree on one machine, or all of them are told which rank differs in what."""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from zcompile.machine.model import Compute, Link, Machine, scaled, with_tier
from zcompile.runtime.agree import RanksDiffer, agree, agreed

ROOT = Path(__file__).parent.parent.parent
MACHINE = Machine("probed", {"device": 100, "host": 200}, {"h2d": Link("h2d", 10e9, 1e-5)},
                  Compute({"float32": 1e12}, 1e11))  # fmt: skip

RANK = """
import sys
import torch.distributed as dist
from zcompile.machine.model import scaled, with_tier
from zcompile.machine.files import write
from zcompile.runtime.agree import RanksDiffer, agree
from runtime.test_agree import MACHINE

rank, factor = int(sys.argv[1]), float(sys.argv[3])
dist.init_process_group("gloo", init_method=f"file://{sys.argv[2]}", rank=rank, world_size=2)
mine = with_tier(scaled(MACHINE, {"h2d": factor if rank else 1.0}), "device", 100 - rank)
try:
    print(write(agree(mine)))
except RanksDiffer as error:
    print(error)
dist.destroy_process_group()
"""


def two_ranks(tmp_path: Path, factor: float) -> list[str]:
    env = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}", "GLOO_SOCKET_IFNAME": "lo"}
    running = [
        subprocess.Popen([sys.executable, "-c", RANK, str(rank), tmp_path / "meet", str(factor)],
                         env=env, stdout=subprocess.PIPE, text=True)
        for rank in range(2)
    ]  # fmt: skip
    return [child.communicate(timeout=120)[0] for child in running]


@pytest.mark.slow
@pytest.mark.ranks(2)
def test_two_processes_end_up_with_one_machine(tmp_path):
    first, second = two_ranks(tmp_path, 1.3)
    assert first == second
    assert 'bytes_per_s = "10GB/s"' in first  # of rank 0
    assert "device = 99\n" in first  # of rank 1, which has less


@pytest.mark.slow
@pytest.mark.ranks(2)
def test_two_processes_that_differ_both_say_so(tmp_path):
    first, second = two_ranks(tmp_path, 0.3)
    assert first == second
    assert "rank 1 has links.h2d 3.00 GB/s, rank 0 has 10.0 GB/s: more than a factor of 2" in first


def test_alone_one_agrees_with_oneself():
    assert agree(MACHINE) is MACHINE


def test_all_take_the_rates_of_the_first_and_the_least_capacities():
    other = with_tier(scaled(MACHINE, {"h2d": 1.5}, flops=0.6), "host", 150)
    assert agreed([MACHINE, other, MACHINE]) == with_tier(MACHINE, "host", 150)
    assert agreed([MACHINE, with_tier(MACHINE, "host", 0)]).tiers == {"device": 100}


@pytest.mark.parametrize(("other", "sentence"), [
    (scaled(MACHINE, {"h2d": 2.5}), "rank 2 has links.h2d 25.0 GB/s, rank 0 has 10.0 GB/s"),
    (scaled(MACHINE, flops=0.1), "rank 2 has compute of float32 100 GFLOP/s, rank 0 has 1.00 TFLO"),
    (scaled(MACHINE, memory=3), "rank 2 has memory of the device 300 GB/s"),
    (replace(MACHINE, links={}), "rank 2 has links.h2d none, rank 0 has 10.0 GB/s"),
])  # fmt: skip
def test_a_rank_that_is_not_alike_is_named_with_the_figure(other, sentence):
    with pytest.raises(RanksDiffer, match=sentence) as told:
        agreed([MACHINE, MACHINE, other])
    assert told.value.rank == 2
