"""The errors of ours that a fuzzed program may meet, and why each is right.

A refused step is not run by torch either, and must have changed nothing.
"""

import re

from zcompile.errors import BudgetExceeded, ZinfError

REFUSALS: dict[str, str] = {
    r"torch\.autograd\.grad asks for the gradient of": "a graph takes gradients home itself",
    r"has a hook and gets gradients both from": "the hook could not see their sum",
    r"was given \.data of": "another shape, dtype or strides: what graphs and plans were made for",
    r"a plain tensor is given \.data of a tiered one": "it would point to memory that is not there",
    r"changes the shape or the memory of a tiered tensor in place": "as `.data` of another shape",
}


ENDS: dict[str, str] = {
    r"and that (tensor, or one that shares its memory, )?was written since": "torch shows what was "
    "written to memory that a parameter took its values from; ours, that it was",
    r"got another \.data between a compiled forward": "eager torch reads old or new values, by op",
    r"on the device, the budget is": "beside what compiled calls hold for backward",
}
"""Refusals that end a program: from there on it is another than torch's, or what a step did before
it was refused is not known."""


TORCHS: dict[str, str] = {
    r"Cannot swap t\d because it has weakref": "an entry knows its parameter weakly",
    r"new_fn INTERNAL ASSERT FAILED": "torch replays views of what has no memory",
}
"""Errors of torch's own that only a tiered tensor meets."""


def is_refusal(error: BaseException) -> bool:
    """Whether an error is one that is listed; also inside what torch.compile raises."""
    inner = getattr(error, "inner_exception", error)
    listed = REFUSALS if isinstance(inner, ZinfError) else TORCHS
    return any(re.search(said, str(inner)) for said in listed)


def ends(error: BaseException, called: bool) -> bool:
    """Whether it is one after which there is nothing to compare any more.

    called  the compiled model was: only then a budget may not do
    """
    inner = getattr(error, "inner_exception", error)
    if not isinstance(inner, ZinfError) or (isinstance(inner, BudgetExceeded) and not called):
        return False
    return any(re.search(said, str(inner)) for said in ENDS)
