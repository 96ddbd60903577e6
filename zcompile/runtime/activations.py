"""Values that backward needs and that leave the device meanwhile.

Each becomes an entry of its own, in every call anew. The entry lives as long as the storage of its
handle, which autograd keeps for backward: when backward is over, or never comes, it is freed.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from zcompile.errors import TierFull
from zcompile.ir.torch_compat import materialised
from zcompile.ir.types import Kind, Layout
from zcompile.runtime.store.store import Entry, Store
from zcompile.runtime.transfer.interrupts import uninterrupted
from zcompile.runtime.transfer.ticket import Ticket

UNPLANNED = (
    "\n  values of one forward were planned for: call backward before the next forward, or give "
    "activations='recompute' or 'keep', with device_memory for what stays"
)


@uninterrupted
def offload(
    store: Store, value: Tensor, layout: Layout, tier: str, name: str, after: Sequence[Ticket]
) -> tuple[Entry, Tensor, Ticket]:
    """Start moving `value` to `tier`: its entry, the handle of that, and when it has left.

    value   on the compute device; must not be changed before the ticket's `join_compute`
    layout  how it will be read back
    after   complete once `value` is computed
    raises  TierFull
    """
    try:
        entry = store.create(name, Kind.ACTIVATION, layout.nbytes, tier=tier)
    except TierFull as error:
        raise TierFull(name, layout.nbytes, error.tiers, UNPLANNED) from error
    handle = store.handle(entry)
    return entry, handle, store.put(entry, bytes_of(value, layout), after=after)


def bytes_of(value: Tensor, layout: Layout) -> Tensor:
    """The bytes of `value` as `layout` has them: uint8 [layout.nbytes], over its own memory if it
    lies like that."""
    value = materialised(value)
    if Layout.of(value) != layout:
        wanted = torch.empty_strided(layout.size, layout.stride, dtype=layout.dtype,
                                     device=value.device)  # fmt: skip
        value = wanted.copy_(value)
    return value.as_strided((layout.span,), (1,)).view(torch.uint8)
