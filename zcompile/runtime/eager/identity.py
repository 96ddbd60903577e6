"""Answers those who ask where a tiered tensor lies, to find tensors that share memory.

Libraries that save models compare `tensor.untyped_storage().data_ptr()`, its size and
`tensor.data_ptr()` to write tied weights once. A tiered tensor has no memory, but it lies in an
entry, as a plain one lies in its storage. So both are answered by an `Address`: the entry and a
byte within it. It can be compared, hashed and moved by a number of bytes, and is no number itself:
whoever would read or write memory by it (ctypes, a Triton kernel, `int`) gets an error.

safetensors alone reads by it, of tensors that say they are on the CPU, as those of the emulated
device do: it turns the address to a ctypes pointer, and the bytes behind that into a file. At that
moment the address becomes that of a copy of the values on the host, which nobody else sees, and
which lives as long as what safetensors itself keeps until the file is written.
"""

import sys
import weakref
from functools import total_ordering
from typing import Any, NoReturn, Protocol

import torch
from torch import Tensor

from zcompile.errors import Unsupported

READER = "safetensors.torch"
"""The module that may turn an address to a pointer: it reads, and never writes."""
FLATTENS = "huggingface_hub."
"""Whose modules take apart what `__tensor_flatten__` names, to ask each part where it lies."""
KEPT = "keep_alive_buffer"
"""What the caller of the function that reads calls its list of what must live until then."""


class Shown(Protocol):
    """What an address needs of the tensor that it is of."""

    _copy: Tensor | None

    def on_host(self) -> Tensor:
        """The full value as a plain CPU tensor."""


def refuse(what: str) -> NoReturn:
    """raises  Unsupported, for an operation that needs memory"""
    raise Unsupported(
        f"{what}: a tiered tensor has no memory of its own",
        "use tensor.cpu() for a plain copy, or tensor.on_host()",
    )


def is_asked_by(module: str) -> bool:
    """Whether the function that calls this one was called from a module of this name, or, if that
    ends with a dot, of this package."""
    caller = str(sys._getframe(2).f_globals.get("__name__", ""))
    return caller.startswith(module) if module.endswith(".") else caller == module


@total_ordering
class Address:
    """A byte of an entry: equal for tensors that begin at the same one, and for no others.

    entry  its key; no two entries of a process ever have the same
    byte   from the begin of the entry
    """

    def __init__(self, entry: int, byte: int, of: Shown | None = None) -> None:
        self.entry, self.byte = entry, byte
        self._of = None if of is None else weakref.ref(of)

    def _place(self) -> tuple[int, int]:
        return self.entry, self.byte

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Address) and self._place() == other._place()

    def __lt__(self, other: object) -> bool:
        if not isinstance(other, Address):
            return NotImplemented
        return self._place() < other._place()

    def __hash__(self) -> int:
        return hash(self._place())

    def __add__(self, nbytes: int) -> "Address":
        return Address(self.entry, self.byte + nbytes)

    def __repr__(self) -> str:
        return f"<byte {self.byte} of entry {self.entry}>"

    def __index__(self) -> int:
        refuse("data_ptr() as a number")

    @property
    def _as_parameter_(self) -> int:
        """What ctypes makes a pointer of: here called by `ctypes.cast`, which safetensors calls.

        raises  Unsupported, if anybody else asks
        """
        tensor = None if self._of is None else self._of()
        reader = sys._getframe(1).f_back
        if tensor is None or reader is None or reader.f_globals.get("__name__") != READER:
            refuse("data_ptr() as a pointer")
        copy = tensor.on_host()
        kept = None if reader.f_back is None else reader.f_back.f_locals.get(KEPT)
        if isinstance(kept, list):
            kept.append(copy)
        else:  # a version that has no such list, and reads while it has the tensor
            tensor._copy = copy
        return copy.data_ptr()


class EntryStorage:
    """What `untyped_storage()` of a tiered tensor gives: which entry it is, and how large.

    All else that a storage can do reads or writes memory, or hands it out, and is refused.
    """

    def __init__(self, key: int, nbytes: int, device: torch.device) -> None:
        self._key, self._nbytes, self.device = key, nbytes, device

    def data_ptr(self) -> Address | int:
        """Where the entry begins; 0 for one without bytes, as torch says."""
        return Address(self._key, 0) if self._nbytes else 0

    def nbytes(self) -> int:
        return self._nbytes

    size = __len__ = nbytes

    def __getattr__(self, name: str) -> Any:
        if hasattr(torch.UntypedStorage, name):
            refuse(f"untyped_storage().{name}")
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def __getitem__(self, index: object) -> NoReturn:
        refuse("untyped_storage()[...]")

    def __setitem__(self, index: object, value: object) -> NoReturn:
        refuse("untyped_storage()[...] = ...")

    def __iter__(self) -> NoReturn:
        refuse("iter(untyped_storage())")

    def __copy__(self) -> NoReturn:
        refuse("copy.copy(untyped_storage())")

    def __deepcopy__(self, memo: object) -> NoReturn:
        refuse("copy.deepcopy(untyped_storage())")

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        refuse("pickling untyped_storage()")
