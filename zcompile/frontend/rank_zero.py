"""Lets rank 0 alone read a model that several ranks train, as libraries do to save it."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from zcompile.errors import ConfigInvalid, Unsupported
from zcompile.ir.torch_compat import trees
from zcompile.runtime.closing import open_stores
from zcompile.runtime.eager.tensor import TieredTensor
from zcompile.runtime.progress import working
from zcompile.runtime.ranks.fabric import Fabric
from zcompile.runtime.ranks.lone_reads import DOING, LoneReads
from zcompile.runtime.session import session_of
from zcompile.runtime.transfer.interrupts import deferred_interrupts


@contextmanager
def rank_zero_reads(*held: nn.Module | Optimizer) -> Iterator[bool]:
    """A context in which rank 0 reads values by itself, and the other ranks send it what it reads.

        with zcompile.rank_zero_reads(model, optimizer) as is_rank_zero:
            if is_rank_zero:
                torch.save(model.state_dict(), "model.pt")

    All ranks enter it, with the same modules and optimizers. The others wait at its end until rank
    0 has come to that, too; so within it no rank waits for another, as in `dist.barrier()`, and
    nothing is done that all ranks do, as calls of compiled models, steps and writes. Each tensor is
    whole while it is read, in host memory of rank 0. Where one process trains alone the context
    does nothing.

    held    modules, compiled or not, and optimizers: their parameters, buffers and states
    yields  whether this rank may read: True on rank 0, and where ranks share nothing
    raises  RankZeroFailed on the other ranks, if rank 0 raises within it: no value has changed, and
            the run can go on; Unsupported, within another one; RanksDiffer, RankFailed
    """
    tiered = [tensor for tensor in _tensors_of(held) if isinstance(tensor, TieredTensor)]
    found = {id(session): session for session in (session_of(t.entry) for t in tiered)}
    fabrics = [s.fabric for s in found.values() if s.fabric is not None]
    if not fabrics:
        yield True
        return
    if len({(fabric.ranks, fabric.mesh) for fabric in fabrics}) > 1:
        raise Unsupported(
            "zcompile.rank_zero_reads was given models that are trained by different ranks, or "
            "over different meshes",
            "open one context for each of them, one after the other",
        )
    for store in open_stores():
        if store.fabric is not None:
            store.fabric.check_together("open zcompile.rank_zero_reads")
    with _reading(fabrics, tiered) as is_rank_zero:
        yield is_rank_zero


@contextmanager
def _reading(fabrics: Sequence[Fabric], tiered: Iterable[TieredTensor]) -> Iterator[bool]:
    """As `rank_zero_reads`, of tensors of sessions of the same ranks."""
    shared = {t.entry.key: t.entry for t in tiered if t.entry.partition is not None}
    reads = LoneReads(fabrics, list(shared.values()))
    is_rank_zero, begun = fabrics[0].rank == 0, False
    failed: BaseException | None = None
    try:
        with deferred_interrupts():
            reads.begin()
            begun = True
        # The others wait for as long as this takes, and know that it is long work.
        with working(DOING) if is_rank_zero else nullcontext():
            yield is_rank_zero
    except BaseException as error:
        failed = error
        raise
    finally:
        if begun and is_rank_zero:
            with deferred_interrupts():
                reads.end(failed)
        elif begun:
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
                    states = trees.tree_leaves(dict(optimizer.state.get(param, {})))
                    yield from (state for state in states if isinstance(state, Tensor))
        else:
            raise ConfigInvalid(
                "rank_zero_reads", one, "is neither a module nor an optimizer; give it those"
            )
