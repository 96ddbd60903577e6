"""What `torch.distributed.checkpoint` asks of a tensor of which ranks hold shares: the blocks that
this rank has, to write them and to read into them.

A share is a range of elements in storage, which is a few blocks (`ir/boxes.py`). A block is handed
out as memory of its own; what is copied into it goes on to where the share rests. Nothing crosses
between ranks, so each may read and write its blocks in its own order.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from zcompile.ir.boxes import Box, boxes_of, storage_order
from zcompile.ir.torch_compat import no_torch_function
from zcompile.ir.types import Layout
from zcompile.runtime.store.store import Entry


def write_items(tensor: Any, name: str) -> list[Any]:
    """What this rank writes of a tensor: a `WriteItem` for each of its blocks."""
    from torch.distributed.checkpoint.metadata import (
        ChunkStorageMetadata,
        MetadataIndex,
        TensorProperties,
    )
    from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

    shared = tensor.entry.partition is not None
    kind = WriteItemType.SHARD if shared else WriteItemType.TENSOR  # of those, one rank writes it
    properties = TensorProperties(dtype=tensor.dtype)
    return [
        WriteItem(
            MetadataIndex(name, torch.Size(box.offsets)),
            kind,
            tensor_data=TensorWriteData(
                ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.sizes)),
                properties,
                tensor.size(),
            ),
        )
        for box in _boxes(tensor)
    ]


def chunk_list(tensor: Any) -> list[Any]:
    """The blocks that this rank holds, as `ChunkStorageMetadata`."""
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

    return [
        ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.sizes))
        for box in _boxes(tensor)
    ]


def tensor_shard(tensor: Any, index: Any) -> Tensor:
    """The block that begins at `index.offset`; what is written to it is written to the tensor.

    raises  KeyError, if this rank holds none there
    """
    entry: Entry = tensor.entry
    if entry.store.fabric is None or (
        entry.partition is None and not tensor.entry_layout.covers(entry.nbytes)
    ):
        return tensor  # type: ignore[no-any-return]  # all of it, which reads and writes by itself
    offsets = tuple(index.offset or (0,) * tensor.dim())
    box = next((box for box in _boxes(tensor) if box.offsets == offsets), None)
    if box is None:
        raise KeyError(f"this rank holds no block of {entry.name!r} at {offsets}")
    layout: Layout = tensor.entry_layout
    begin = _begin(entry, layout, box)
    memory = torch.zeros(box.numel * layout.dtype.itemsize, dtype=torch.uint8)
    if not entry.unset:
        entry.store.read(entry, memory, begin=begin).wait()
    order = storage_order(layout.size, layout.stride)
    values = memory.view(layout.dtype).view([box.sizes[dim] for dim in order])
    turned = values.permute([order.index(dim) for dim in range(len(order))])
    return Block.over(turned, partial(_put, tensor, begin, memory))


def _boxes(tensor: Any) -> list[Box]:
    layout, part = tensor.entry_layout, tensor.entry.partition
    if part is None:
        size = tuple(tensor.size())
        return [Box((0,) * len(size), size, 0)]
    return boxes_of(layout.size, layout.stride, *part.own)


def _begin(entry: Entry, layout: Layout, box: Box) -> int:
    """Byte of this rank's share at which a block begins."""
    first = 0 if entry.partition is None else entry.partition.own[0]
    return (box.first - first) * layout.dtype.itemsize


def _put(tensor: Any, begin: int, memory: Tensor) -> None:
    """Write a block to where the share rests."""
    entry: Entry = tensor.entry
    if entry.unset:
        entry.store.zero(entry)  # the padding has a value too
    entry.store.put(entry, memory.clone(), begin=begin).wait()
    increment_version(tensor._handle)


class Block(Tensor):
    """Memory of one block, or a part of it, whose writes by `copy_` go on to a share.

    What is asked of it to be written to a file, `cpu` last, is plain.
    """

    _written: Callable[[], None]

    @classmethod
    def over(cls, values: Tensor, written: Callable[[], None]) -> "Block":
        made = values.as_subclass(cls)
        made._written = written
        return made

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        found = no_torch_function(func, types, tuple(args), kwargs or {})
        block = args[0] if args else None
        if isinstance(block, Block):
            if func is Tensor.copy_:
                block._written()
                return block
            if func in PARTS:
                return no_torch_function(cls.over, (), (found, block._written), {})
        if isinstance(found, Block):
            return no_torch_function(Tensor.as_subclass, (), (found, Tensor), {})
        return found


PARTS = frozenset({Tensor.detach, Tensor.narrow})
"""What `torch.distributed.checkpoint` does with a block before it copies into it."""
