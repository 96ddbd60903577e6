"""MKL knows the processor before two threads ask for it at once."""

import subprocess
import sys

import pytest
from sampled import sampled

PROBE = """
import ctypes, sys
from pathlib import Path
import torch

path = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"
if not torch.backends.mkl.is_available() or not path.exists():
    sys.exit("this torch has no MKL")
try:
    detect = ctypes.CDLL(str(path)).mkl_vml_serv_cpu_detect
except AttributeError:
    sys.exit("this MKL detects processors in another function")
address = ctypes.cast(detect, ctypes.c_void_p).value
code = ctypes.string_at(address, 6)
if code[:2] != bytes([0x8B, 0x05]):  # mov eax, [rip + offset]: what was detected before
    sys.exit("this MKL detects processors in another way")
offset = int.from_bytes(code[2:], "little", signed=True)
detected = ctypes.c_int.from_address(address + 6 + offset)
before = detected.value
import zcompile.{module}
print(before, detected.value)
"""
UNKNOWN = -1


@pytest.mark.parametrize(
    "module",
    sampled(
        ["frontend.offload", "frontend.backend", "checkpoint.checkpoint"], "checkpoint.checkpoint"
    ),
)
@pytest.mark.slow
def test_the_kernels_of_vector_math_are_chosen_before_anything_computes(module):
    done = subprocess.run(
        [sys.executable, "-c", PROBE.format(module=module)],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    if done.returncode == 1 and done.stderr.startswith("this "):
        pytest.skip(done.stderr.strip())
    assert done.returncode == 0, done.stderr
    before, after = map(int, done.stdout.split())
    assert before == UNKNOWN, "torch makes the first call by itself, and this file can go"
    assert after != UNKNOWN
