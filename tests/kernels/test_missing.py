"""Without CUDA or triton only kernels are lost, and who asks for one is told what is missing."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from triton_kernels import KernelUnavailable, demand, missing

ROOT = Path(__file__).parent.parent.parent

WITHOUT_TRITON = """
import sys
sys.modules["triton"] = None  # as if it were not installed
import torch
from triton_kernels import missing
from triton_kernels.adamw.op import adamw
from triton_kernels.cross_entropy.op import see_tile
from triton_kernels.leave.op import leave, places

p, g = torch.ones(3), torch.ones(3)
adamw([p], [g], [torch.zeros(3)], [torch.zeros(3)], [], [torch.ones(())], None, None,
      0.1, 0.9, 0.99, 1e-8, 0.0)
assert torch.allclose(p, torch.full((3,), 0.9)), p
zero = torch.zeros(1, 1)
most, total, picked = see_tile(torch.tensor([[0.0, 1.0]]), torch.tensor([[1]]), zero, zero, zero)
assert most == 1 and picked == 1, (most, picked)
packed = torch.zeros(64)
leave([g], packed, places([3])[:-1])
assert packed.sum() == 3
torch.cuda.is_available = lambda: True
torch.cuda.get_device_capability = lambda device=None: (9, 0)
print(missing("cuda"))
"""


@pytest.mark.slow
def test_ops_are_their_formulas_on_a_machine_without_triton():
    told = subprocess.run(
        [sys.executable, "-c", WITHOUT_TRITON], capture_output=True, text=True, cwd=ROOT
    )
    assert told.returncode == 0, told.stderr
    assert told.stdout.startswith("triton is not installed; `pip install triton`")


def test_what_is_missing_is_said(monkeypatch):
    assert missing("cpu") == "kernels run on CUDA devices, and this is cpu"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert missing("cuda:0") == "torch sees no CUDA device"
    with pytest.raises(KernelUnavailable, match=r"^a::b on cuda: torch sees no CUDA device$"):
        demand("a::b", torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (7, 5))
    assert missing("cuda:0") == "cuda:0 has compute capability 7.5, kernels need 8.0"
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (8, 0))
    monkeypatch.setenv("CC", "cc")
    assert missing("cuda:0") == ""
    monkeypatch.delenv("CC")
    monkeypatch.setenv("PATH", "")
    assert "finds none: looked for gcc and clang" in missing("cuda:0")


def test_a_kernel_that_is_asked_for_where_it_cannot_run_is_refused():
    from triton_kernels.cross_entropy import op

    zero = torch.zeros(1, 1)
    for launch, given in (
        (op._see_on_cuda, (zero, zero, zero, zero, zero)),
        (op._see_and_sum_on_cuda, (zero, zero, zero, zero, zero, zero)),
        (op._gradient_on_cuda, (zero, zero, zero, zero, None, None)),
    ):
        with pytest.raises(KernelUnavailable, match="on cpu: kernels run on CUDA devices"):
            launch(*given)
