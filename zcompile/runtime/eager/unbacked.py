"""A tiered tensor has no storage: what torch implements by reading one is implemented here.

Values come from the tiers as plain copies. Who asks which memory it is, is told the entry
(`identity.py`); what would hand out memory raises.
"""

import weakref
from typing import Any

import torch
from torch import Tensor

from zcompile.ir.torch_compat import is_asked_by_tracing, is_traced, storage_of
from zcompile.ir.types import Layout
from zcompile.runtime.eager.identity import Address, EntryStorage, refuse
from zcompile.runtime.session import entry_behind
from zcompile.runtime.store.store import Entry, Store


class Unbacked(torch.Tensor):
    """The half of `TieredTensor` that stands in for storage.

    entry_layout  the layout of the tensor in the bytes of its entry
    _store        keeps the store alive: a value that is still held outlives the model it came from
    _copy         of its values, where safetensors reads one (`identity.py`)
    """

    _handle: Tensor
    entry_layout: Layout
    _known: "weakref.ref[Entry] | None" = None
    _store: Store | None = None
    _copy: Tensor | None = None

    @property
    def entry(self) -> Entry:
        """The entry with the bytes. raises  ParameterChanged, if the store was closed"""
        entry = None if self._known is None else self._known()
        if entry is None:
            entry = entry_behind(self._handle)
            self._known = weakref.ref(entry)
            self._store = entry.store
        return entry

    @property
    def covers(self) -> bool:
        """Whether the tensor is all of its entry: each byte of it, each once."""
        return self.entry_layout.covers(self.entry.whole_bytes)

    def on_host(self) -> Tensor:
        """The full value as a plain CPU tensor; reads the tiers, not the arena."""
        bytes_ = self.entry.store.read_all(self.entry)
        return self.entry_layout.view(bytes_).detach()

    def numpy(self, *, force: bool = False) -> Any:
        """A read-only array of the values as they are now: there is no memory to share."""
        if self.requires_grad and not force:
            raise RuntimeError(
                "can't call numpy() on a tensor that requires grad; use tensor.detach().numpy()"
            )
        return _read_only(self.on_host().numpy(force=force))

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        """As `numpy`; with `copy=True` an array of the caller's own, which may be written.

        raises  ValueError, for `copy=False`
        """
        if copy is False:
            raise ValueError(
                "a copy cannot be avoided, since a tiered tensor has no memory to share with an "
                "array: leave copy=False out (numpy.asarray gives a read-only array)"
            )
        made = self.on_host().__array__(dtype)
        return made if copy else _read_only(made)

    def tolist(self) -> Any:
        return self.on_host().tolist()

    def storage(self) -> Any:
        refuse("storage()")

    def untyped_storage(self) -> Any:
        """Which entry the tensor lies in, and how large that is; all else of a storage raises."""
        # Torch has one for a wrapper, of its size and without bytes: who reads it, or writes it,
        # ends the process.
        if is_traced(self._handle) or is_asked_by_tracing():
            return storage_of(self)
        entry = self.entry
        return EntryStorage(entry.key, entry.whole_bytes, self.device)

    def _typed_storage(self) -> Any:
        if is_traced(self._handle) or is_asked_by_tracing():
            return torch.TypedStorage(
                wrap_storage=storage_of(self), dtype=self.dtype, _internal=True
            )
        refuse("_typed_storage()")

    def is_shared(self) -> bool:
        """Whether another process sees the memory of the tensor: never."""
        return False

    def data_ptr(self) -> Address | int:  # type: ignore[override]  # what cannot be read by
        """Where in its entry the tensor begins, to be compared; 0 without elements, as torch says.

        Whoever would read or write memory there gets an error (`identity.py`).
        """
        layout = self.entry_layout
        if not layout.numel:
            return 0
        return Address(self.entry.key, layout.offset * layout.dtype.itemsize, self)

    def share_memory_(self) -> Any:
        refuse("share_memory_()")

    def apply_(self, callable: Any) -> Any:
        refuse("apply_()")

    def __dlpack__(self, **_: Any) -> Any:
        refuse("__dlpack__()")

    def cpu(self, *args: Any, **kwargs: Any) -> Tensor:
        """A plain CPU tensor: also on the emulated device, where `.cpu()` would be `self`."""
        if torch.compiler.is_compiling() or (self.requires_grad and torch.is_grad_enabled()):
            return super().cpu(*args, **kwargs)
        return self.on_host()

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]  # torch's is untyped
        if is_traced(self._handle):
            return f"TieredTensor({self._handle}, {self.entry_layout})"
        text = repr(self.on_host().requires_grad_(self.requires_grad))
        if self.device.type != "cpu":
            text = f"{text[:-1]}, device='{self.device}')"
        return f"Parameter containing:\n{text}" if getattr(self, "_is_param", False) else text


def _read_only(array: Any) -> Any:
    """Make an array read-only: what is written to it would reach no tensor, and torch has it reach
    one."""
    array.setflags(write=False)
    return array
