"""Notices when torch compiles a function no more, so that its calls leave the plan, and says it.

Torch compiles a function anew for each kind of input, up to a limit. Calls that no version takes
then run eagerly, op by op: the numbers are the same, but nothing is fetched ahead, and
`device_memory` does not bound what they hold.
"""

import logging
import weakref

from zcompile.ir.torch_compat import compiled_frame, on_recompile_limit
from zcompile.runtime.session import Session

log = logging.getLogger(__name__)

_COMPILED: dict[int, weakref.ref[Session]] = {}
"""Frame that this backend has compiled -> whose parameters it uses."""
_TOLD: weakref.WeakSet[Session] = weakref.WeakSet()


def remember_frame(session: Session) -> None:
    """Note that the frame which is compiled now is one of `session`."""
    if (frame := compiled_frame()) is not None:
        _COMPILED[frame] = weakref.ref(session)


def _tell(frame: int, limit: str, most: int) -> None:
    """Say once for each model that a limit was met."""
    session = alive() if (alive := _COMPILED.get(frame)) else None
    if session is None or session in _TOLD:
        return
    _TOLD.add(session)
    model = session.root and session.root()
    log.warning(
        "%s leaves the plan: torch compiled one of its functions %d times, which is "
        "torch._dynamo.config.%s, and does so no more. Calls that fit none of these versions run "
        "eagerly from here on: the same numbers, but each use of a weight waits for it, and "
        "device_memory does not bound what they hold; with fullgraph=True they raise. Torch's own "
        "warning names the function and what changed. Mark what changes as dynamic "
        "(torch.compile(model, backend='zinf', dynamic=True)), keep it the same, or raise that "
        "limit before the first call",
        "the model" if model is None else type(model).__name__,
        most,
        limit,
    )


on_recompile_limit(_tell)
