"""Lets ranks exchange gradients once for several micro-batches, as `no_sync` of DDP does."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from zcompile.errors import ConfigInvalid
from zcompile.runtime.eager.tensor import TieredTensor
from zcompile.runtime.session import Session, session_of
from zcompile.runtime.transfer.interrupts import deferred_interrupts


@contextmanager
def no_sync(*models: nn.Module) -> Iterator[None]:
    """A context in which backward exchanges no gradients between ranks: each rank sums its own.

        for ids, targets in micro_batches[:-1]:
            with zcompile.no_sync(model):
                model(ids, targets).backward()
        model(*micro_batches[-1]).backward()  # exchanges the sums
        optimizer.step()

    All ranks enter it for the same backward passes. What counts is where backward runs. The first
    backward outside of it exchanges what was summed, together with what it makes itself: so an
    optimizer's step takes the bytes of one exchange, and each rank room for a whole gradient of
    each parameter, where the store and plans have it. Until then `.grad` is the sum of this rank,
    which nobody may use: a step of an optimizer, clipping and reading are refused. `zero_grad()`
    drops it.
    Numbers are those of DistributedDataParallel with its `no_sync`: a rank's micro-batches are
    summed first, then ranks. Where one process trains alone the context does nothing.

    It acts on all that was offloaded together: for a part of a model, on the whole of it.

    models  compiled or not, at least one
    raises  ConfigInvalid, for what is no module, or has no parameter that is offloaded
    """
    if not models:
        raise ConfigInvalid("no_sync", None, "is given no model; name each whose gradients wait")
    sessions: dict[int, Session] = {}
    for model in models:
        if not isinstance(model, nn.Module):
            raise ConfigInvalid("no_sync", model, "is not a module; give it the model")
        tiered = [param for param in model.parameters() if isinstance(param, TieredTensor)]
        if not tiered:
            raise ConfigInvalid(
                "no_sync",
                type(model).__name__,
                "has no parameter that is offloaded, so its gradients would be exchanged; give the "
                "model that zcompile.offload was given, or call its own no_sync",
            )
        for session in (session_of(param.entry) for param in tiered):
            if session.fabric is not None:
                sessions[session.key] = session
    entered: list[Session] = []
    try:
        with deferred_interrupts():
            for session in sessions.values():
                session.gradients.enter_no_sync()
                entered.append(session)
        yield
    finally:
        with deferred_interrupts():
            for session in entered:
                session.gradients.leave_no_sync()
