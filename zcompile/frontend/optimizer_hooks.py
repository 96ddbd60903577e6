"""Prepares steps of stock optimizers, and ends them, by two public hooks of torch.optim.

Before a step, states that were loaded as plain tensors move to the store, and gradients that
autograd left plain too. After it, the step is counted, states get the names people know them by,
and a durable model commits. Optimizers without tiered parameters are not touched; they end the step
of a frozen model all the same, through which their own parameters were trained.
"""

from collections.abc import Callable, Collection, Sequence
from contextlib import ExitStack
from operator import is_
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from zcompile.checkpoint import durable
from zcompile.frontend.ranks import refuse_ranks
from zcompile.ir.ties import Dead, Same, Tie, tie_to
from zcompile.ir.torch_compat import resume_tracing, stop_tracing
from zcompile.ir.types import EntryKind, Layout
from zcompile.runtime.changes import CHANGES
from zcompile.runtime.closing import open_stores
from zcompile.runtime.eager.fillings import write
from zcompile.runtime.eager.tensor import TieredTensor
from zcompile.runtime.session import Session, session_of
from zcompile.runtime.transfer.interrupts import deferred_interrupts, uninterrupted

_STOPPED: WeakKeyDictionary[torch.optim.Optimizer, Any] = WeakKeyDictionary()
"""Optimizers with tiered parameters, from the begin of a step to its end, and what
`resume_tracing` takes."""
_States = Collection[dict[str, Any]]
"""The states of each of some parameters."""


class _Named(NamedTuple):
    """The states of an optimizer that have names.

    whose   the optimizer, weakly
    mark    of `CHANGES`, when they got them
    known   the entry of each parameter, weakly
    keys    by which the optimizer knows the states, of one parameter after the other
    states  tells whether tensors are those
    """

    whose: Tie
    mark: object
    known: Sequence[object]
    keys: list[str]
    states: Same


_NAMED: dict[int, _Named] = {}
"""The identity of an optimizer -> its states, until it has died: a dictionary with weak keys would
lose an interrupt that comes while it forgets one."""
_GONE = Dead()
"""Of optimizers that have died, by identity, what referred to them."""


def watch() -> None:
    """Register the hooks, for every optimizer of the process; once, at import of the face."""
    register_optimizer_step_pre_hook(_before)
    register_optimizer_step_post_hook(_after)


def _tiered_params(optimizer: torch.optim.Optimizer) -> list[TieredTensor]:
    return [
        param
        for group in optimizer.param_groups
        for param in group["params"]
        if isinstance(param, TieredTensor)
    ]


def _sessions(tiered: list[TieredTensor]) -> list[Session]:
    of_stores = {t.store_key: t for t in tiered}
    return [session_of(t.entry) for t in of_stores.values()]


@torch.compiler.disable(recursive=False)  # type: ignore[untyped-decorator]  # torch's own
def _before(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> Any:
    """Begin a step; returns the arguments of `step`, with closures that run outside of it.

    A step within a compiled function is not compiled, as it is not outside of one: its updates are
    planned as they come, and code compiled op by op would compute other bits.
    """
    stopped = stop_tracing()
    _STOPPED.pop(optimizer, None)  # of a step that failed, in a compiled function that has ended
    try:
        tiered = _tiered_params(optimizer)
        replaced = _begin(optimizer, tiered, args, kwargs)
    except BaseException:
        resume_tracing(stopped)
        raise
    if tiered:
        _STOPPED[optimizer] = stopped
    else:
        resume_tracing(stopped)
    return replaced


def _begin(
    optimizer: torch.optim.Optimizer, tiered: list[TieredTensor], args: Any, kwargs: Any
) -> Any:
    """Begin a step of an optimizer with these parameters; returns what `_before` does."""
    begun = list[Session]()
    try:
        with deferred_interrupts():
            if not tiered:
                durable.check_plain(optimizer)
            for session in _sessions(tiered):
                if session.fabric is not None:
                    session.fabric.check_together("step an optimizer")
                refuse_ranks(session.config.mesh, session.fabric)
                durable.check_step(session, optimizer)
                session.begin_step(type(optimizer).__name__)
                begun.append(session)
            if not any(map(callable, (*args[1:], *kwargs.values()))):
                _check_exchanged(tiered)  # else the closure may exchange them
            _adopt(optimizer, tiered)
    except BaseException:
        for session in begun:
            session.cancel_step()
        raise
    if not begun:
        return None

    def outside(value: Any) -> Any:
        return _outside_the_step(value, optimizer, begun) if callable(value) else value

    return (
        (args[0], *map(outside, args[1:])),
        {key: outside(value) for key, value in kwargs.items()},
    )


def _outside_the_step(
    closure: Callable[[], Any], optimizer: torch.optim.Optimizer, sessions: list[Session]
) -> Callable[[], Any]:
    """A closure that runs a forward and a backward, clips and the like, none of which is an op of
    the optimizer. Where the first call fails, the step has changed nothing yet."""
    first = True

    def run() -> Any:
        nonlocal first
        try:
            with ExitStack() as closures:
                for session in sessions:
                    closures.enter_context(session.in_closure())
                result = closure()
            with deferred_interrupts():
                for session in sessions:
                    durable.check_step(session, optimizer)
                tiered = _tiered_params(optimizer)
                _check_exchanged(tiered)
                _adopt(optimizer, tiered)
        except BaseException:
            if first:
                for session in sessions:
                    session.cancel_step()
            raise
        first = False
        return result

    return run


def _check_exchanged(tiered: list[TieredTensor]) -> None:
    """raises  Unsupported, if a gradient is the sum of this rank alone"""
    for session in _sessions(tiered):
        params = (t for t in tiered if t.store_key == session.key)
        session.gradients.unexchanged.check_exchanged(params)


def _adopt(optimizer: torch.optim.Optimizer, tiered: list[TieredTensor]) -> None:
    """Move gradients and states to the store that are plain."""
    for session in _sessions(tiered):
        session.gradients.adopt_each([t for t in tiered if t.store_key == session.key])
    every_state = _states_of(optimizer, tiered)
    if _are_as_before(optimizer, tiered, every_state):
        return
    for param, states in zip(tiered, every_state, strict=True):
        for key, value in states.items():
            if _is_foreign_state(value, param):
                session, name = session_of(param.entry), f"{param._name_in_store()}.{key}"
                states[key] = _adopted(session, name, param, value)


def _states_of(optimizer: torch.optim.Optimizer, tiered: list[TieredTensor]) -> _States:
    """The states of each parameter; of one without states an empty dict."""
    state = optimizer.state
    if len(state) == len(tiered) and all(map(is_, state, tiered)):
        return state.values()  # in the usual order: to look each up takes ten times as long
    return [state.get(param, {}) for param in tiered]


def _name_states(optimizer: torch.optim.Optimizer, tiered: list[TieredTensor]) -> None:
    """Let all that is an optimizer's state be one, and called by its parameter and its key."""
    every_state = _states_of(optimizer, tiered)
    if _are_as_before(optimizer, tiered, every_state):
        return
    keys, values, at_home = list[str](), list[Any](), True
    for param, states in zip(tiered, every_state, strict=True):
        title = param._name_in_store()
        for key, value in states.items():
            if isinstance(value, TieredTensor):
                value.entry.become_state(f"{title}.{key}")
            keys.append(key)
            values.append(value)
            # What is no tensor may have the place of one next time.
            at_home &= isinstance(value, Tensor) and not _is_foreign_state(value, param)
    if at_home:
        known = [param._known for param in tiered]
        _forget_gone()
        whose = tie_to(optimizer, _GONE, id(optimizer))
        _NAMED[id(optimizer)] = _Named(whose, CHANGES.mark, known, keys, Same(values))


def _forget_gone() -> None:
    while _GONE:
        gone = _GONE.popleft()
        found = _NAMED.get(gone.mark)
        if found is not None and found.whose is gone:
            del _NAMED[gone.mark]


def _are_as_before(
    optimizer: torch.optim.Optimizer, tiered: list[TieredTensor], every_state: _States
) -> bool:
    """Whether parameters have the states that they had when the last step ended: each of those is
    in the store, unless it is one number, and has its name."""
    before = _NAMED.get(id(optimizer))
    if before is None or before.whose() is not optimizer or before.mark is not CHANGES.mark:
        return False
    if before.known != [param._known for param in tiered]:
        return False
    keys = [key for states in every_state for key in states]
    values = [value for states in every_state for value in states.values()]
    return keys == before.keys and before.states.are(values)


def _is_foreign_state(value: object, param: TieredTensor) -> bool:
    """Whether a state is plain, or of another model's store, as after `load_state_dict`."""
    if isinstance(value, TieredTensor):
        return value.store_key != param.store_key
    return isinstance(value, Tensor) and value.dim() > 0 and value.size() == param.size()


def _adopted(session: Session, name: str, param: TieredTensor, value: Tensor) -> Tensor:
    """A tiered tensor with the value of a foreign state."""
    if isinstance(value, TieredTensor):
        value = value.on_host()
    layout = Layout.of(value)
    entry = session.create_for(name, EntryKind.STATE, layout, like=param)
    made = TieredTensor.over(entry, layout)
    write(entry, layout, value)
    return made


@torch.compiler.disable(recursive=False)  # type: ignore[untyped-decorator]  # torch's own
def _after(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    """End a step, of which nothing was compiled."""
    stopped = stop_tracing()
    try:
        _end(optimizer)
    finally:
        resume_tracing(_STOPPED.pop(optimizer, stopped))


@uninterrupted
def _end(optimizer: torch.optim.Optimizer) -> None:
    """What follows the step of an optimizer, in every session that it has parameters of."""
    tiered = _tiered_params(optimizer)
    _name_states(optimizer, tiered)
    sessions = _sessions(tiered)
    for session in sessions:
        session.end_step()
        session.meter.count("steps")
        durable.commit_step(session, optimizer)
        session.norms.step_ended()
    for store in open_stores():
        # A frozen model with trained parts that are no entries, as adapters may be.
        if isinstance(store, Session) and store not in sessions and store.is_trained_through:
            store.end_step()
            store.meter.count("steps")
