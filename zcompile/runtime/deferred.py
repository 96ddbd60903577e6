"""What was asked of an entry and not done yet: a cheap change that the next reader makes.

Clipping multiplies every gradient by one number. Done at once this reads and writes all of them;
deferred, the optimizer's step multiplies each chunk as it passes. Whoever else reads the entry
finds it done, since the store does it first.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from zcompile.specs import Layout


@dataclass(frozen=True)
class Deferred:
    """`func(values, operand)`, elementwise and in place.

    lists   `func` takes a list of tensors
    operand  one number, or a tensor of one
    layout  of the tensor it was asked of, which covers its entry
    """

    func: Callable[..., object]
    operand: Any
    lists: bool
    layout: Layout

    def apply(self, values: Tensor, operand: Any) -> None:
        """values  a range of the entry's elements; operand  `self.operand`, on its way"""
        self.func([values] if self.lists else values, operand)
