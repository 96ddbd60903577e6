"""Code that is not ours, run by us: what it raises is told in a sentence, and stays the cause."""

import traceback
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from traceback import FrameSummary
from types import TracebackType

from zcompile.errors import ZinfError

Frames = Sequence[FrameSummary]
Failure = Callable[[BaseException], tuple[BaseException, Frames]]
"""Of what was raised: the error behind it, and where the code was then, innermost last."""


class UserCodeFailed(ZinfError, RuntimeError):
    """A model, or what makes one, failed by itself while zcompile ran it; `__cause__` says how."""

    def __init__(self, what: str, at: str, error: BaseException, todo: str) -> None:
        why = str(error).strip().partition("\n")[0].rstrip(".")
        told = f"{type(error).__name__}: {why}" if why else type(error).__name__
        super().__init__(f"{what} failed{at}: {told}; {todo}")


def as_raised(error: BaseException) -> tuple[BaseException, Frames]:
    """A `Failure` of code that is run as it stands."""
    return error, traceback.extract_tb(error.__traceback__)


class Running:
    """While it is entered, any error of code that is not ours becomes a `UserCodeFailed`.

    Nothing is swallowed: the error goes on as the cause. Ours stay what they are, also where they
    are found behind what was raised; what our own code raises otherwise is a bug, and shows itself.
    """

    def __init__(self, what: str, todo: str, failure: Failure = as_raised) -> None:
        self._what, self._todo, self._failure = what, todo, failure

    def __enter__(self) -> None:
        return None

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if not isinstance(error, Exception) or isinstance(error, ZinfError):
            return
        reason, frames = self._failure(error)
        if isinstance(reason, ZinfError):
            raise reason from error
        if frames and _is_within(frames[-1], "zcompile"):
            return
        raise UserCodeFailed(self._what, _at(frames), reason, self._todo) from error


def _at(frames: Frames) -> str:
    """Where the code was that is neither torch's nor ours."""
    theirs = [f for f in frames if not _is_within(f, "torch") and not _is_within(f, "zcompile")]
    if not theirs:
        return ""
    frame = theirs[-1]
    line = f" (`{frame.line}`)" if frame.line else ""
    return f" at {frame.filename}:{frame.lineno}{line}"


def _is_within(frame: FrameSummary, package: str) -> bool:
    spec = find_spec(package)
    return (
        spec is not None
        and spec.origin is not None
        and Path(frame.filename).is_relative_to(Path(spec.origin).parent)
    )
