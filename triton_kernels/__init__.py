"""Triton kernels, each beside its formula in torch. They know torch and triton, nothing of ours.

A kernel is a folder: `kernel.py` is what the device executes and how it is launched, `reference.py`
the same in torch, `op.py` an op of torch: the kernel on CUDA, the formula on the CPU. An op can be
traced, and called on the CPU, without triton, which is imported when a kernel is launched first.
"""

import importlib.util
import os
import shutil
from contextlib import AbstractContextManager, nullcontext

import torch

OLDEST = (8, 0)
"""Compute capability from which on kernels are compiled and tested."""
COMPILERS = ("gcc", "clang")
"""Programs that triton looks for, where the environment's CC names none."""


class KernelUnavailable(RuntimeError):
    """A kernel was asked for where it cannot run; the text says what is missing."""


def missing(device: str | torch.device) -> str:
    """What keeps kernels from running on a device, for people; "" if nothing does.

    device  such as "cuda:0"; it need not be there
    """
    where = torch.device(device)
    if where.type != "cuda":
        return f"kernels run on CUDA devices, and this is {where.type}"
    if not torch.cuda.is_available():
        return "torch sees no CUDA device"
    if torch.version.hip is None and torch.cuda.get_device_capability(where) < OLDEST:
        found = ".".join(map(str, torch.cuda.get_device_capability(where)))
        return f"{where} has compute capability {found}, kernels need {OLDEST[0]}.{OLDEST[1]}"
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed; `pip install triton` in the version that torch asks for"
    if not os.environ.get("CC") and not any(map(shutil.which, COMPILERS)):
        named = " and ".join(COMPILERS)
        return f"triton builds a launcher with a C compiler, and finds none: looked for {named}"
    return ""


def demand(op: str, device: torch.device) -> None:
    """Do nothing if kernels run on `device`. raises  KernelUnavailable"""
    if why := missing(device):
        raise KernelUnavailable(f"{op} on {device}: {why}")


def on(device: torch.device) -> AbstractContextManager[object]:
    """Make `device` the one that kernels are launched on, which triton takes from torch."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()
