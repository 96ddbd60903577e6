"""Triton kernels, each beside its formula in torch. They know torch and triton, nothing of ours."""
