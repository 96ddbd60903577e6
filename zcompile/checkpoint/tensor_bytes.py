"""The bytes of a tensor as a file has them: row-major, range by range, wherever the tensor lies."""

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from zcompile.checkpoint.safetensors_file import PAGE_BYTES
from zcompile.ir.torch_compat import is_lazy, materialised
from zcompile.runtime.device.pages import copy_bytes
from zcompile.runtime.eager.tensor import TieredTensor
from zcompile.runtime.tiers.base import Stretch
from zcompile.runtime.transfer.ticket import Ticket


class TensorBytes(ABC):
    """One tensor, read or written by ranges of its `nbytes`."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor
        self.nbytes = tensor.numel() * tensor.dtype.itemsize

    @abstractmethod
    def read(self, begin: int, into: Tensor) -> Sequence[Ticket]:
        """Start to fill `into`, uint8 on the host, with the bytes from `begin` on."""

    @abstractmethod
    def write(self, begin: int, source: Tensor) -> Sequence[Ticket]:
        """Start to put `source`, uint8 on the host, where the bytes from `begin` on are.

        `source` must not change before the tickets are done.
        """

    def stretches(self) -> Sequence[Stretch]:
        """Where in files all of it lies, if it does."""
        return ()

    def finish(self) -> None:
        """All of it was written."""
        increment_version(self.tensor)


class _Tiered(TensorBytes):
    """In the store, and there row-major."""

    tensor: TieredTensor

    def __init__(self, tensor: TieredTensor) -> None:
        super().__init__(tensor)
        self._first = tensor.lies.offset * tensor.dtype.itemsize

    def read(self, begin: int, into: Tensor) -> Sequence[Ticket]:
        entry, at = self.tensor.entry, self._first + begin
        # Whole pages can come straight from the disk, so they do not wait with what is left.
        whole = into.numel() // PAGE_BYTES * PAGE_BYTES
        parts = [(at, into[:whole]), (at + whole, into[whole:])]
        return [entry.store.read(entry, part, begin=begin) for begin, part in parts if part.numel()]

    def write(self, begin: int, source: Tensor) -> Sequence[Ticket]:
        entry = self.tensor.entry
        return [entry.store.put(entry, source, begin=self._first + begin)]

    def stretches(self) -> Sequence[Stretch]:
        entry = self.tensor.entry
        return entry.store.stretches(entry, self._first, self._first + self.nbytes)

    def finish(self) -> None:
        entry = self.tensor.entry
        if not entry.nbytes:
            entry.store.zero(entry)  # without bytes, but no longer unset
        # A compiled graph saves handles for backward, and asks them whether they were written.
        increment_version(self.tensor._handle)


class _Plain(TensorBytes):
    """In ordinary memory, of the host or of a device, and there row-major."""

    def __init__(self, tensor: Tensor) -> None:
        super().__init__(tensor)
        self._flat = tensor.detach().reshape(-1).view(torch.uint8)

    def read(self, begin: int, into: Tensor) -> Sequence[Ticket]:
        _copy(into, self._flat[begin : begin + into.numel()])
        return ()

    def write(self, begin: int, source: Tensor) -> Sequence[Ticket]:
        _copy(self._flat[begin : begin + source.numel()], source)
        return ()


class _Whole(TensorBytes):
    """Not row-major where it lies, so all of it passes through host memory at once."""

    def __init__(self, tensor: Tensor) -> None:
        super().__init__(tensor)
        self._rows: Tensor | None = None

    def read(self, begin: int, into: Tensor) -> Sequence[Ticket]:
        if self._rows is None:
            value = self.tensor.detach()
            value = value.on_host() if isinstance(value, TieredTensor) else value.cpu()
            self._rows = materialised(value).contiguous()
        flat = self._rows.reshape(-1).view(torch.uint8)
        _copy(into, flat[begin : begin + into.numel()])
        if begin + into.numel() == self.nbytes:
            self._rows = None
        return ()

    def write(self, begin: int, source: Tensor) -> Sequence[Ticket]:
        if self._rows is None:
            self._rows = torch.empty(self.tensor.size(), dtype=self.tensor.dtype, device="cpu")
        flat = self._rows.view(-1).view(torch.uint8)
        _copy(flat[begin : begin + source.numel()], source)
        return ()

    def finish(self) -> None:
        if self._rows is not None:
            self.tensor.detach().copy_(self._rows)
            self._rows = None


def bytes_of(tensor: Tensor) -> TensorBytes:
    if not tensor.is_contiguous() or is_lazy(tensor):
        return _Whole(tensor)
    return _Tiered(tensor) if isinstance(tensor, TieredTensor) else _Plain(tensor)


def _copy(target: Tensor, source: Tensor) -> None:
    if target.is_cpu and source.is_cpu:
        copy_bytes(target, source, target.numel())
    else:
        target.copy_(source)
