"""What became of a case, and what of that is allowed."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from zcompile.errors import ZinfError


@dataclass(frozen=True)
class Outcome:
    """What became of a case.

    kind  "equal"; "refused": an error of ours where plain torch works; "rounded": sums in another
          order; "different"; "raises": plain torch raises, and so does ours, so that there is
          nothing to compare; "random": what differs, differs as well when plain torch is called
          twice
    why   the differences, or the error
    """

    kind: str
    why: str = ""


def judged(expected: Any, found: Any, differences: Callable[[Any, Any], Iterable[str]]) -> Outcome:
    """expected, found  have an `error`, or what `differences` compares"""
    if expected.error is not None:
        if found.error is None:
            return Outcome("different", f"raises nothing, not {told(expected.error)}")
        if isinstance(found.error, type(expected.error) | ZinfError):
            return Outcome("raises", told(expected.error))
        return Outcome("different", f"{told(found.error)}, not {told(expected.error)}")
    if found.error is not None:
        kind = "refused" if isinstance(_inner(found.error), ZinfError) else "different"
        return Outcome(kind, told(_inner(found.error)))
    why = list(differences(expected, found))
    if not why:
        return Outcome("equal")
    kind = "rounded" if all(": rounded otherwise" in line for line in why) else "different"
    return Outcome(kind, "; ".join(why))


def _inner(error: BaseException) -> BaseException:
    """What torch.compile wraps arrives inside its own error."""
    inner = getattr(error, "inner_exception", None)
    return inner if isinstance(inner, ZinfError) else error


def told(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:200] if lines else ''}"
