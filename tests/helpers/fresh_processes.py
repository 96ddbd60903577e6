"""Work in a process of its own that has torch and the product imported, and has used neither."""

import os
import sys
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

from rank_pool import forked

PATIENCE_S = 90.0
"""Seconds for such work: far more than any takes."""


def in_fresh_process(work: Callable[..., Any], *given: Any, **environment: str) -> Any:
    """What `work` returns there, a function of a module; with these variables in its environment,
    and no settings of torch's allocators but those.

    It is forked from the process that ranks are forked from: to start Python and import all takes
    seconds.
    """
    context = forked()
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_told, args=(theirs, sys.path, environment, work, given))
    process.start()
    theirs.close()
    try:
        assert ours.poll(PATIENCE_S), "it hangs"
        found, trace = ours.recv()
    finally:
        process.kill()
        process.join()
    assert trace is None, trace
    return found


def _told(
    pipe: Connection,
    path: list[str],
    environment: dict[str, str],
    work: Callable[..., Any],
    given: tuple[Any, ...],
) -> None:
    sys.path[:] = path
    for name in [name for name in os.environ if name.endswith("_ALLOC_CONF")]:
        del os.environ[name]
    os.environ.update(environment)
    try:
        pipe.send((work(*given), None))
    except BaseException:  # noqa: BLE001  # whatever it raises is told
        pipe.send((None, traceback.format_exc()))
