"""Lets ranks exchange gradients once for several micro-batches, as `no_sync` of DDP does."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from zcompile.errors import ConfigInvalid
from zcompile.runtime.eager.tensor import TieredTensor
from zcompile.runtime.session import Session, session_of


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

    models  compiled or not
    raises  ConfigInvalid, for what is no module
    """
    sessions: dict[int, Session] = {}
    for model in models:
        if not isinstance(model, nn.Module):
            raise ConfigInvalid("no_sync", model, "is not a module; give it the model")
        tiered = (param for param in model.parameters() if isinstance(param, TieredTensor))
        for session in (session_of(param.entry) for param in tiered):
            if session.fabric is not None:
                sessions[session.key] = session
    for session in sessions.values():
        session.gradients.enter_no_sync()
    try:
        yield
    finally:
        for session in sessions.values():
            session.gradients.leave_no_sync()
