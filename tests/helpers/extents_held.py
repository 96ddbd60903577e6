"""What is taken of the tiers of a store, though nobody has it: extents, buffers, entries.

Asked between two operations, whether or not the last one failed.
"""

import gc
from collections.abc import Iterable, Iterator
from contextlib import suppress
from typing import Any

from torch import Tensor

from zcompile.errors import ZinfError
from zcompile.runtime.durable.directory import HEADER_BYTES
from zcompile.runtime.durable.tier import DurableTier
from zcompile.runtime.eager.tensor import TieredTensor
from zcompile.runtime.session import Session
from zcompile.runtime.tiers.base import Extent
from zcompile.runtime.tiers.disk import DiskTier


def forget_frames(error: BaseException | None) -> None:
    """What was being worked on when it was raised is not held by it any more."""
    while error is not None:
        error.__traceback__ = None
        forget_frames(error.__cause__)
        error = error.__context__


def lost_of(session: Session, tensors: Iterable[Tensor]) -> dict[str, object]:
    """Empty, if all that is taken belongs to `tensors`, or to a commit."""
    gc.collect()
    with suppress(ZinfError):
        session.drain()  # whatever becomes of it: it has ended
    session.enter("the model")  # which buries the dead
    wanted = {t.entry.key for t in tensors if isinstance(t, TieredTensor)}
    found: dict[str, object] = {
        "entries": [e.name for e in session._entries.values() if e.key not in wanted],
        "host": _lost_on_host(session),
        "disk": [*_lost_on_disk(session), *_lost_in_scratch(session)],
        "staging": session._context.staging._ranges.used_bytes,
        "backlog": session._backlog._now,
        "arena": session.arena.used_bytes,
        "under way": len(session._mover._in_flight),
    }
    return {what: value for what, value in found.items() if value}


def _lost_on_host(session: Session) -> int:
    (host,) = (tier for tier in session.homes._tiers if tier.name == "host")
    held = sum(e.place.extent.nbytes for e in session._entries.values() if e.place.tier is host)
    return host.usage()[1] - held


def _lost_on_disk(session: Session) -> Iterator[str]:
    """Of a durable tier: extents belong to entries, to copies of those on the host, to what the
    next commit gives back, or to a commit that nobody has resumed yet."""
    tier, commit_log = session.durable, session.commit_log
    if tier is None or commit_log is None:
        return
    assert isinstance(tier, DurableTier)
    keys = {e.place.extent.file for e in session._entries.values() if e.place.tier is tier}
    keys |= {copy.extent.file for copy in commit_log._copies.values()}
    if strangers := tier._versions.keys() - keys:
        yield f"versions of nobody: {strangers}"
    held: list[Extent] = [*tier._replaced]
    for versions in tier._versions.values():
        held += [one for one in (versions.committed, versions.working) if one is not None]
    taken = {(one.file, one.offset): one.nbytes for one in held}
    if len(taken) < len(held):
        yield f"an extent of two: {held}"
    if not commit_log.resumed and commit_log.files.index is not None:
        taken |= {(t.file, t.offset): t.room for t in commit_log.files.index.tensors}
    for number, file in enumerate(commit_log.files.files):
        here = sum(nbytes for (of, _), nbytes in taken.items() if of == number)
        if file.extents.used_bytes != HEADER_BYTES + here:
            yield f"{file.path}: {file.extents.used_bytes} taken, {HEADER_BYTES + here} held"


def _lost_in_scratch(session: Session) -> Iterator[str]:
    """Of a disk tier that is not durable: every extent, or its parts, is of an entry."""
    for tier in session.homes._tiers:
        if not isinstance(tier, DiskTier):
            continue
        held = [e.place.extent for e in session._entries.values() if e.place.tier is tier]
        parts = [part for extent in held for part in tier._parts.get(extent.file, (extent,))]
        for number, file in enumerate(tier._files):
            here = sum(part.nbytes for part in parts if part.file == number)
            if file.extents.used_bytes != here:
                yield f"{file.path}: {file.extents.used_bytes} taken, {here} held"


def tensors_of(model: Any, optimizer: Any) -> Iterator[Tensor]:
    """Parameters, gradients and states of the optimizer."""
    for param in model.parameters():
        yield param
        if param.grad is not None:
            yield param.grad
        yield from (v for v in optimizer.state.get(param, {}).values() if isinstance(v, Tensor))
