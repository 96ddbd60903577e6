"""What torch implements by reading a tensor's storage, for tensors that have none.

Values come from the tiers as plain copies; what would hand out memory raises.
"""

import weakref
from typing import Any, NoReturn

import torch
from torch import Tensor

from zcompile.errors import ParameterChanged, Unsupported
from zcompile.runtime.session import entry_behind
from zcompile.runtime.store import Entry
from zcompile.specs import Layout
from zcompile.torch_private import is_traced


class Unbacked(torch.Tensor):
    """The half of `TieredTensor` that stands in for storage.

    lies  how the tensor lies in the bytes of its entry
    """

    _handle: Tensor
    lies: Layout
    _known: "weakref.ref[Entry] | None" = None

    @property
    def entry(self) -> Entry:
        """raises  ParameterChanged, if the store was closed"""
        entry = None if self._known is None else self._known()
        if entry is None:
            entry = entry_behind(self._handle)
            self._known = weakref.ref(entry)
        return entry

    def on_host(self) -> Tensor:
        """The full value as a plain CPU tensor; reads the tiers, not the arena."""
        bytes_ = self.entry.store.read_all(self.entry)
        return self.lies.view(bytes_).detach()

    def numpy(self, *, force: bool = False) -> Any:
        if self.requires_grad and not force:
            raise RuntimeError(
                "can't call numpy() on a tensor that requires grad; use tensor.detach().numpy()"
            )
        return self.on_host().numpy()

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        return self.on_host().__array__(dtype)

    def tolist(self) -> Any:
        return self.on_host().tolist()

    def storage(self) -> Any:
        return self._no_storage("storage()")

    def data_ptr(self) -> int:
        return self._no_storage("data_ptr()")

    def share_memory_(self) -> Any:
        return self._no_storage("share_memory_()")

    def apply_(self, callable: Any) -> Any:
        return self._no_storage("apply_()")

    def __dlpack__(self, **_: Any) -> Any:
        return self._no_storage("__dlpack__()")

    def _no_storage(self, what: str) -> NoReturn:
        raise Unsupported(
            f"{what}: a tiered tensor has no memory of its own",
            "use tensor.cpu() for a plain copy, or tensor.on_host()",
        )

    def cpu(self, *args: Any, **kwargs: Any) -> Tensor:
        """A plain CPU tensor: also on the emulated device, where `.cpu()` would be `self`."""
        if torch.compiler.is_compiling() or (self.requires_grad and torch.is_grad_enabled()):
            return super().cpu(*args, **kwargs)
        return self.on_host()

    @property
    def data(self) -> Tensor:
        return self.detach()

    @data.setter
    def data(self, value: Tensor) -> None:
        """`param.data = value` gives the parameter new values, where shape and kind stay."""
        if isinstance(value, Unbacked) and value._handle is self._handle:
            if value.lies != self.lies:
                self.detach().copy_(value.on_host())
            return
        if (value.size(), value.dtype) != (self.size(), self.dtype) or not _alike(value, self):
            raise ParameterChanged(
                self.entry.name,
                f"was given .data of {_kind(value)} in place of {_kind(self)}",
                "change shape, dtype or strides before zcompile.offload",
            )
        with torch.no_grad():
            self.detach().copy_(value)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]  # torch's is untyped
        if is_traced(self._handle):
            return f"TieredTensor({self._handle}, {self.lies})"
        text = repr(self.on_host().requires_grad_(self.requires_grad))
        if self.device.type != "cpu":
            text = f"{text[:-1]}, device='{self.device}')"
        return f"Parameter containing:\n{text}" if getattr(self, "_is_param", False) else text


def _kind(tensor: Tensor) -> str:
    return f"{tensor.dtype} {tuple(tensor.size())} with strides {tensor.stride()}"


def _alike(a: Tensor, b: Tensor) -> bool:
    """Whether the strides that matter are the same."""
    rows = zip(a.size(), a.stride(), b.stride(), strict=True)
    return a.numel() < 2 or all(x == y for n, x, y in rows if n > 1)
