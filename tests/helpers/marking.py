"""A dispatch mode of a user, under which whatever an op makes is a tensor of a subclass."""

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class Marked(torch.Tensor):
    """Made by an op under `Marking`."""


class Marking(TorchDispatchMode):
    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        made = func(*args, **(kwargs or {}))
        return made.as_subclass(Marked) if isinstance(made, torch.Tensor) else made
