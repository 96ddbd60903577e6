"""Keeps `torch.compile` out of what is no part of a model.

A training loop that is compiled as a whole is traced wherever its calls lead, unless a function
says that it is not to be: into the runtime as well, of which torch would make graphs.
"""

from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch

F = TypeVar("F", bound=Callable[..., Any])


def untraced(function: F) -> F:
    """A function that runs as it stands, with all that it calls, also within compiled code."""
    return cast("F", torch.compiler.disable(function))
