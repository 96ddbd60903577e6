"""Opens a session on directories that an earlier model of this process may still hold.

A notebook builds its model again and again. What only garbage keeps alive is closed by the lock of
the directory itself (`runtime/tiers/directory_lock.py`). A model that is alive is closed where the
cell that made it is run again: what it makes takes the place of what it made before, unless a name
that the cell does not bind, or a list or dict under such a name, keeps the model. That one, and any
of another cell, is left alone, and the refusal says what holds it.
"""

import ast
import logging
import re
import sys
import threading
import weakref
from collections.abc import Callable, Container, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any

import torch
from torch import nn

from zcompile.errors import DiskOwned
from zcompile.runtime.closing import open_stores
from zcompile.runtime.eager.tensor import TieredTensor
from zcompile.runtime.session import Session

log = logging.getLogger(__name__)

MOST_NAMES = 4
"""Most names that a refusal tells."""
_OUTPUT = re.compile(r"_{1,3}|_\d+")
"""What IPython calls its last outputs."""


@dataclass(frozen=True)
class Cell:
    """A cell of a notebook, or an input of IPython, that is being run.

    key   its id, where the notebook says it, else its text
    run   number of inputs that were run before, this one included
    text  as IPython runs it
    """

    key: str
    run: int
    text: str


def current_cell() -> Cell | None:
    """The cell that runs now; None outside of IPython, and on a thread that a cell started."""
    found = getattr(sys.modules.get("IPython"), "get_ipython", None)
    shell: Any = found() if found is not None else None
    inputs = getattr(shell, "user_ns", {}).get("In")
    if not inputs or threading.current_thread() is not threading.main_thread():
        return None
    asked = shell.get_parent() if hasattr(shell, "get_parent") else None
    named = (asked or {}).get("metadata", {}).get("cellId")
    return Cell(str(named or inputs[-1]), shell.execution_count, inputs[-1])


def _bound_by(text: str) -> set[str]:
    """Names that the text of a cell binds, below a magic such as %%time too."""
    try:
        nodes = list(ast.walk(ast.parse(text)))
    except SyntaxError:  # a language of its own, below a magic
        return set()
    names = {n.id for n in nodes if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
    for node in nodes:
        if isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "run_cell_magic":
            body = node.args[-1]
            names |= _bound_by(str(body.value)) if isinstance(body, ast.Constant) else set()
    return names


_MADE_IN: weakref.WeakKeyDictionary[Session, Cell] = weakref.WeakKeyDictionary()
"""The cell that made each session."""


def open_owned(make: Callable[[], Session], directories: tuple[Path, ...]) -> Session:
    """The session that `make` opens, where need be after an earlier one of the same cell is closed.

    raises  as `make`; DiskOwned names what holds a directory, if that is a model of this process
    """
    cell = current_cell()
    try:
        session = make()
    except DiskOwned:
        holders = list(_holders(directories))
        if not holders:
            raise
        for holder in holders:
            if not _is_superseded(holder, cell):
                raise DiskOwned(directories[0], _told(holder), CLOSE) from None
        for holder in holders:
            log.warning("the cell that made %s is run again: what it made is closed", _name(holder))
            holder.close()
        session = make()
    if cell is not None:
        _MADE_IN[session] = cell
    return session


CLOSE = (
    "call zcompile.close(model) with it first, or give each model a directory of its own; `with "
    "zcompile.offloaded(...) as model:` closes by itself"
)


def _holders(directories: tuple[Path, ...]) -> Iterator[Session]:
    """Sessions of this process that are open on one of the directories."""
    wanted = {path.resolve() for path in directories}
    for store in open_stores():
        disk = store.config.disk if isinstance(store, Session) else None
        if isinstance(disk, tuple) and wanted & {Path(path).resolve() for path in disk}:
            yield store


def _is_superseded(holder: Session, cell: Cell | None) -> bool:
    """Whether `cell` made it when it was run before."""
    made = _MADE_IN.get(holder)
    if cell is None or made is None or made.key != cell.key or made.run >= cell.run:
        return False
    return not any(True for _ in _keepers(holder, _bound_by(cell.text)))


def _keepers(session: Session, bound: Container[str]) -> Iterator[str]:
    """Names in the main module, but for some, that are bound to the very model of a session, or to
    a collection of models with it."""
    root = session.root and session.root()
    for name, value in list(vars(_main()).items()):
        if root is None or name in bound or name in ("Out", "_oh") or _OUTPUT.fullmatch(name):
            continue
        items = list(value.values()) if isinstance(value, dict) else value
        if value is root or (
            isinstance(items, list | tuple | set | frozenset)
            and any(root is held for item in items for held in (item, *_attributes(item)))
        ):
            yield name


def _attributes(item: Any) -> list[Any]:
    return list(getattr(item, "__dict__", {}).values())


def _main() -> ModuleType:
    return sys.modules.get("__main__", ModuleType("none"))


def _name(session: Session) -> str:
    model = session.root and session.root()
    return "a model" if model is None else f"a {type(model).__name__}"


def _told(session: Session) -> str:
    """The session for people, with names in the main module that hold it."""
    names = [f"`{name}`" for name in dict.fromkeys([*_names(session), *_keepers(session, ())])]
    held = f" that {', '.join(names[:MOST_NAMES])} still refers to" if names else ""
    return f"another model of this process, {_name(session)}{held}"


def _names(session: Session) -> Iterator[str]:
    """What refers to parameters of the session, as far as it is quickly found."""
    main = _main()
    for name, value in list(vars(main).items()):
        if not name.startswith("_") and _refers(value, session):
            yield name
    for number, value in dict(vars(main).get("Out") or {}).items():
        if _refers(value, session):
            yield f"Out[{number}]"
    trace: TracebackType | None = getattr(sys, "last_traceback", None)
    while trace is not None:
        for name, value in list(trace.tb_frame.f_locals.items()):
            if trace.tb_frame.f_globals is not vars(main) and _refers(value, session):
                yield f"{name} in the traceback of the last error (sys.last_traceback)"
        trace = trace.tb_next


def _refers(value: Any, session: Session) -> bool:
    """Whether a value is a parameter of the session, or a model or an optimizer with one."""
    if isinstance(value, nn.Module):
        held: list[Any] = list(value.parameters())
    elif isinstance(value, torch.optim.Optimizer):
        held = [param for group in value.param_groups for param in group["params"]]
    else:
        held = [value]
    return any(isinstance(p, TieredTensor) and p.store_key == session.key for p in held)
