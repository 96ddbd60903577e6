"""Lets rank 0 alone read a model that several ranks train, as libraries do to save it."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from zcompile.errors import ConfigInvalid, Unsupported
from zcompile.runtime.eager.tensor import TieredTensor
from zcompile.runtime.progress import working
from zcompile.runtime.ranks.lone_reads import DOING, LoneReads
from zcompile.runtime.session import Session, session_of
from zcompile.runtime.store.store import Entry


@contextmanager
def rank_zero_reads(*held: nn.Module | Optimizer) -> Iterator[bool]:
    """A context in which rank 0 reads values by itself, and the other ranks send it what it reads.

        with zcompile.rank_zero_reads(model, optimizer) as is_rank_zero:
            if is_rank_zero:
                torch.save(model.state_dict(), "model.pt")

    All ranks enter it with the same model. At its end the others wait until rank 0 has come to the
    end of it, too; within it nothing is changed, called or read by all ranks. One tensor at a time
    is whole, in host memory of rank 0. Where one process trains alone it does nothing.

    held    modules, compiled or not, and optimizers: their parameters, buffers and states
    yields  whether this rank may read: True on rank 0, and where ranks share nothing
    raises  Unsupported on the other ranks, if rank 0 raises within it: no value has changed, and
            the run can go on; RanksDiffer, RankFailed
    """
    tiered = [tensor for tensor in _tensors_of(held) if isinstance(tensor, TieredTensor)]
    sessions = {id(session): session for session in (session_of(t.entry) for t in tiered)}
    shared = [session for session in sessions.values() if session.fabric is not None]
    if len(shared) > 1:
        raise Unsupported(
            "zcompile.rank_zero_reads was given parts of models that were offloaded one by one",
            "open one context for each model, one after the other",
        )
    if not shared:
        yield True
        return
    with _reading(shared[0], tiered) as is_rank_zero:
        yield is_rank_zero


@contextmanager
def _reading(session: Session, tiered: Iterable[TieredTensor]) -> Iterator[bool]:
    """As `rank_zero_reads`, of tensors of one session of several ranks."""
    fabric = session.fabric
    assert fabric is not None, "ranks share it"
    found = {t.entry.key: t.entry for t in tiered if t.entry.partition is not None}
    entries: list[Entry] = list(found.values())
    reads = LoneReads(fabric, entries)
    reads.begin()
    if fabric.rank == 0:
        # The others wait for as long as this takes, and know that it is long work.
        with working(DOING):
            try:
                yield True
            except BaseException as error:
                reads.end(error)
                raise
            reads.end(None)
        return
    try:
        yield False
    finally:
        reads.serve()


def _tensors_of(held: Iterable[object]) -> Iterator[Tensor]:
    """Parameters, buffers and states, in an order that is the same on all ranks.

    raises  ConfigInvalid, for what is neither a module nor an optimizer
    """
    for one in held:
        if isinstance(one, nn.Module):
            yield from one.parameters()
            yield from one.buffers()
        elif hasattr(one, "param_groups") and hasattr(one, "state"):  # libraries wrap optimizers
            optimizer: Any = one
            for group in optimizer.param_groups:
                for param in group["params"]:
                    state = optimizer.state.get(param, {})
                    rows = [state[key] for key in sorted(state, key=str)]
                    yield from (row for row in rows if isinstance(row, Tensor))
        else:
            raise ConfigInvalid(
                "rank_zero_reads", one, "is neither a module nor an optimizer; give it those"
            )
