"""Prepares steps of stock optimizers, and ends them, by two public hooks of torch.optim.

Before a step, states that were loaded as plain tensors move to the store, and gradients that
autograd left plain too. After it, the step is counted, states get the names people know them by,
and a durable model commits. Optimizers without tiered parameters are not touched.
"""

from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from zcompile.checkpoint import durable
from zcompile.frontend.ranks import refuse_ranks
from zcompile.ir.types import EntryKind, Layout
from zcompile.runtime.eager.fillings import write
from zcompile.runtime.eager.tensor import TieredTensor
from zcompile.runtime.session import Session, session_of
from zcompile.runtime.transfer.interrupts import deferred_interrupts, uninterrupted


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
    return list({t.store_key: session_of(t.entry) for t in tiered}.values())


def _before(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    tiered, begun = _tiered_params(optimizer), list[Session]()
    try:
        with deferred_interrupts():
            _begin(optimizer, tiered, begun)
    except BaseException:
        for session in begun:
            session.cancel_step()
        raise


def _begin(
    optimizer: torch.optim.Optimizer, tiered: list[TieredTensor], begun: list[Session]
) -> None:
    for session in _sessions(tiered):
        refuse_ranks(session.config.mesh)  # the process group may be younger than the model
        durable.check_step(session, optimizer)
        session.begin_step(type(optimizer).__name__)
        begun.append(session)
    for param in tiered:
        session = session_of(param.entry)
        session.gradients.adopt(param)
        for key, value in optimizer.state.get(param, {}).items():
            if _is_foreign_state(value, param):
                optimizer.state[param][key] = _adopted(
                    session, f"{param._name_in_store()}.{key}", value
                )


def _is_foreign_state(value: object, param: TieredTensor) -> bool:
    """Whether a state is plain, or of another model's store, as after `load_state_dict`."""
    if isinstance(value, TieredTensor):
        return value.store_key != param.store_key
    return isinstance(value, Tensor) and value.dim() > 0 and value.size() == param.size()


def _adopted(session: Session, name: str, value: Tensor) -> Tensor:
    """A tiered tensor with the value of a foreign state."""
    if isinstance(value, TieredTensor):
        value = value.on_host()
    layout = Layout.of(value)
    entry = session.create(name, EntryKind.STATE, layout.nbytes)
    made = TieredTensor.over(entry, layout)
    write(entry, layout, value)
    return made


@uninterrupted
def _after(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    tiered = _tiered_params(optimizer)
    for param in tiered:
        for key, value in optimizer.state.get(param, {}).items():
            if isinstance(value, TieredTensor):
                value.entry.become_state(f"{param._name_in_store()}.{key}")
    for session in _sessions(tiered):
        session.end_step()
        session.meter.count("steps")
        durable.commit_step(session, optimizer)
        session.norms.step_ended()
