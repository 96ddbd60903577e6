"""The errors of ours that a fuzzed program may meet, and why each is right.

A refused step is not run by torch either, and must have changed nothing.
"""

import re

from zcompile.errors import ZinfError

REFUSALS: dict[str, str] = {
    r"torch\.autograd\.grad asks for the gradient of": "a graph takes gradients home itself",
    r"has a hook and gets gradients both from": "the hook could not see their sum",
    r"was given \.data of": "another shape, dtype or strides: what graphs and plans were made for",
    r"changes the shape or the memory of a tiered tensor in place": "as `.data` of another shape",
}


TORCHS: dict[str, str] = {
    r"Cannot swap t\d because it has weakref": "an entry knows its parameter weakly",
    r"new_fn INTERNAL ASSERT FAILED": "torch replays views of what has no memory",
}
"""Errors of torch's own that only a tiered tensor meets."""


def is_refusal(error: BaseException) -> bool:
    """Whether an error is one of ours that is listed; also inside what torch.compile raises."""
    inner = getattr(error, "inner_exception", error)
    listed = REFUSALS if isinstance(inner, ZinfError) else TORCHS
    return any(re.search(said, str(inner)) for said in listed)
