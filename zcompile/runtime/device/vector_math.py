"""The vector math of the CPU, settled before two threads need it at once.

Torch hands exp, log, sin, cos, tan, tanh, erf, sqrt and their like on the CPU to MKL, and cuts what
has more than 2048 elements between its threads. MKL looks the processor up at the first of these
calls; meanwhile the variable that says which kernels to take holds another number than in the end
(`mkl_vml_serv_cpu_detect` in MKL 2024.2, which torch 2.13 contains; pytorch/pytorch#188792). A
thread that reads it then computes its part with a kernel of low accuracy: half of the first tanh
of a process is off by up to 5e-5. Between the two writes lies the read of a page that nobody has
touched; where that page comes from disk, the first call fails in every third process or more.

A run that is resumed, or repeated, would then not equal the other one to the bit.
"""

import torch


def settle_vector_math() -> None:
    """Make the first call while this thread is alone at it: one element is never cut. It settles
    all of these functions, in float32 and float64."""
    torch.zeros((), dtype=torch.float32, device="cpu").tanh()
