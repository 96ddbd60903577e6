"""Canaries around what a kernel writes: neither triton's interpreter nor a GPU checks bounds."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
"""Where kernels are tested: on a GPU if there is one, else interpreted."""
CANARY, CANARIES = 77.0, 8192
"""What lies before and behind, and how many elements of it: more than the largest block."""


class Fenced:
    """Makes tensors that lie between canaries, and looks at these."""

    def __init__(self) -> None:
        self._all: list[tuple[Tensor, Tensor]] = []

    def __call__(self, values: Tensor, *, shift: int = 0, columns: int = 0) -> Tensor:
        """The values, somewhere else, with canaries on both sides.

        shift    elements that it begins later; 1 breaks the alignment
        columns  canaries behind each row of [rows, n] too
        """
        wide = values if values.dim() == 2 else values.reshape(1, -1)
        rows, n = wide.shape
        beside = CANARIES + shift
        size = rows * (n + columns)
        whole = torch.full((2 * beside + size,), CANARY, dtype=values.dtype).to(DEVICE)
        inside = torch.zeros_like(whole, dtype=torch.bool)
        made, mask = (x[beside : beside + size].view(rows, -1)[:, :n] for x in (whole, inside))
        made.copy_(wide)
        mask.fill_(True)
        self._all.append((whole, inside))
        return made if values.dim() == 2 else made.reshape(-1).view(values.shape)

    @contextmanager
    def around(self, name: str) -> Iterator[None]:
        """What `torch.<name>` makes inside lies between canaries too."""
        made = getattr(torch, name)

        def fenced(*args: Any, **kwargs: Any) -> Tensor:
            return self(made(*args, **kwargs))

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch, name, fenced)
            yield

    def hold(self) -> None:
        """Every canary is alive."""
        for whole, inside in self._all:
            assert (whole[~inside] == CANARY).all(), "a kernel wrote beside what it was given"
