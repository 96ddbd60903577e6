"""Refuses graphs that write to a view of a parameter which they took themselves.

A graph reads a parameter by gathering it, and what it takes a view of is what it gathered: whatever
is written there would never come to the parameter. A write to the parameter itself is refused where
it is traced (`tensor.py`), so that Dynamo breaks the graph; of a write to plain values nobody is
told, and functionalization is asked afterwards.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from torch import Tensor

from zcompile.errors import Unsupported
from zcompile.ir.torch_compat import is_written_in_graph, line_being_traced

_GATHERED: ContextVar[list[tuple[Tensor, str]] | None] = ContextVar("gathered", default=None)
"""What the graph that is being traced has gathered, and the user's lines that read it: of a view,
the one that takes it. Which line writes to it, nobody knows."""


def note_gathered(gathered: Tensor) -> None:
    """A graph gathers a parameter to compute with it, or to take a view."""
    noted = _GATHERED.get()
    if noted is not None:
        noted.append((gathered, line_being_traced()))


@contextmanager
def written_views_refused() -> Iterator[None]:
    """Trace a graph in here.

    raises  Unsupported, if it writes to a view of what it gathered
    """
    noted: list[tuple[Tensor, str]] = []
    token = _GATHERED.set(noted)
    try:
        yield
    finally:
        _GATHERED.reset(token)
    for gathered, line in noted:
        if is_written_in_graph(gathered):
            where = f" (the view is taken in {line})" if line else ""
            raise Unsupported(
                f"a compiled function writes to a view of a parameter{where}",
                "move the write outside, or into a function under torch.compiler.disable that "
                "takes the view from the parameter itself (one that is handed to it is a copy)",
            )
