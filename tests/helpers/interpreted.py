"""What triton's interpreter lacks: bf16 rounded to the nearest, ties to even, and scalars as ints.

The interpreter keeps bf16 as integers of 16 bits, truncates where f32 becomes bf16, and makes
nonsense of what is computed in bf16. Kernels that only load, store and cast it are right with the
rounding repaired.

It keeps a scalar as an array of one element. That of triton 3.6 makes an int of it by `int(array)`,
which NumPy refuses since 2.4.
"""

from typing import Any

import numpy as np
import pytest
import torch


def round_bf16(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the interpreter round f32 to bf16 as a device does. raises  TypeError for other casts"""
    import triton.language as tl
    from triton.runtime import interpreter

    before = interpreter.InterpreterBuilder.cast_impl

    def cast(self: object, source: object, made: object) -> object:
        kind, wanted = source.dtype.scalar, made.scalar
        if wanted is not tl.bfloat16 or kind is tl.bfloat16:
            return before(self, source, made)
        if kind is not tl.float32:
            raise TypeError(f"{kind} to bf16 is not rounded here")
        values = torch.from_numpy(np.ascontiguousarray(source.data)).bfloat16()
        bits = values.view(torch.int16).numpy().view(np.uint16)
        return interpreter.TensorHandle(bits.reshape(source.data.shape), tl.bfloat16)

    for name in ("cast_impl", "create_fp_trunc"):
        monkeypatch.setattr(interpreter.InterpreterBuilder, name, cast)


def index_by_scalars(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let `range` take a scalar of the interpreter with any release of NumPy."""
    from triton.runtime import interpreter

    before = interpreter._patch_lang_tensor

    def patch(tensor: Any, scope: Any) -> None:
        before(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    monkeypatch.setattr(interpreter, "_patch_lang_tensor", patch)
