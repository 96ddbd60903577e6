"""Reads weights that `torch.save` wrote, such as the `pytorch_model.bin` of an export.

A file is mapped: its tensors are views of the page cache, and what is read of them goes to the
tiers piece by piece. Files of the format before torch 1.6 cannot be mapped, and are in memory while
they are read, one at a time. A pickle may hold code, so `weights_only` of torch reads it, which
makes tensors and plain values and calls nothing.
"""

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from errno import EINVAL
from pickle import UnpicklingError
from typing import Any, NamedTuple

import torch
from torch import Tensor

from zcompile.checkpoint.file import OpenFile, checkpoint_errors
from zcompile.checkpoint.safetensors import Row, nbytes_of
from zcompile.errors import CheckpointInvalid
from zcompile.runtime.transfer.interrupts import uninterrupted

ZIP, PICKLE = b"PK\x03\x04", b"\x80"
"""First bytes of a file of `torch.save`: of today's format, and of the one before."""
INNER = ("state_dict", "model_state_dict", "model", "module")
"""Names under which training programs keep the weights, beside other things."""
_NAMED = re.compile(r"GLOBAL ([\w.]+)")


def is_torch_file(file: OpenFile) -> bool:
    """Whether `torch.save` wrote a file, by its name and its first bytes.

    raises  CheckpointInvalid
    """
    if file.path.suffix == ".safetensors":  # whose first bytes are a length
        return False
    with checkpoint_errors(file.path):
        return file.system.read_all(file.fd, len(ZIP)).startswith((ZIP, PICKLE))


class TorchFile:
    """The tensors of one file; it stays open as long as its `OpenFiles`.

    rows    by name; `begin` and `end` of one count its own bytes, not those of the file
    raises  CheckpointInvalid, naming the file
    """

    def __init__(self, file: OpenFile) -> None:
        self.path, self._file = file.path, file
        with checkpoint_errors(file.path):
            self._is_mapped = file.system.read_all(file.fd, len(ZIP)) == ZIP
        self._tensors: Mapping[str, Tensor] | None = self._read()
        self.rows = {
            name: Row(tensor.dtype, tuple(tensor.size()), 0, nbytes_of(tensor.dtype, tensor.size()))
            for name, tensor in self._tensors.items()
        }
        self.leave()

    def tensor(self, name: str) -> Tensor:
        """A tensor of the file, on the CPU."""
        if self._tensors is None:
            self._tensors = self._read()
        return self._tensors[name]

    def shows_one(self, name: str, other: str) -> bool:
        """Whether the file keeps one tensor under two names."""
        one = self.tensor(name).is_set_to(self.tensor(other))
        self.leave()
        return one

    def leave(self) -> None:
        """Give memory back that the tensors take, until one is asked for again."""
        if not self._is_mapped:
            self._tensors = None

    @uninterrupted
    def _read(self) -> Mapping[str, Tensor]:
        path = self.path
        opened = f"/proc/self/fd/{self._file.fd}"  # the file that was opened, whatever its name is
        try:
            with checkpoint_errors(path), _end_errors():
                told = torch.load(
                    opened, map_location="cpu", weights_only=True, mmap=self._is_mapped
                )
        except UnpicklingError as error:
            raise _refused(self, str(error)) from error
        except (RuntimeError, EOFError, ValueError, KeyError, TypeError, AttributeError) as error:
            if isinstance(error, CheckpointInvalid):
                raise
            first = str(error).partition("\n")[0] or "it ends too early"
            raise CheckpointInvalid(path, f"is damaged or cut short: {first:.200}") from error
        return _checked(self, told)


@contextmanager
def _end_errors() -> Iterator[None]:
    """A context in which a file without its end is said to be one: torch looks for what lies so
    far before the end, and the system tells of an invalid argument.

    raises  EOFError
    """
    try:
        yield
    except OSError as error:
        if error.errno == EINVAL:
            raise EOFError from error
        raise


class Held(NamedTuple):
    """The file and row of a tensor."""

    file: TorchFile
    row: Row


def _refused(file: TorchFile, said: str) -> CheckpointInvalid:
    """The error about a pickle that torch's reader of weights refuses."""
    if (named := _NAMED.search(said)) is None:
        return CheckpointInvalid(file.path, "is damaged, or no file of torch.save")
    return CheckpointInvalid(
        file.path,
        f"holds more than tensors: it names {named[1]}, which weights_only does not call, since a "
        "pickle may run any code",
        "ask for a safetensors file, or convert it where you trust it: "
        "torch.save(model.state_dict(), path)",
    )


def _checked(file: TorchFile, told: Any) -> Mapping[str, Tensor]:
    """What a file holds, if it is tensors by name.

    raises  CheckpointInvalid
    """
    if not isinstance(told, Mapping):
        raise CheckpointInvalid(
            file.path, f"holds a {type(told).__name__}, and no mapping of names to tensors"
        )
    inner = next((key for key in INNER if isinstance(told.get(key), Mapping)), None)
    if inner is not None:
        raise CheckpointInvalid(
            file.path,
            f"keeps its tensors under {inner!r}, beside other things",
            f"torch.save(torch.load(path, weights_only=True)[{inner!r}], other), and load that",
        )
    for name, value in told.items():
        if not isinstance(name, str) or not isinstance(value, Tensor):
            raise CheckpointInvalid(
                file.path, f"has {name!r:.200}, a {type(value).__name__} and no tensor"
            )
        if value.layout is not torch.strided or value.is_quantized:
            raise CheckpointInvalid(
                file.path, f"has {name!r:.200}, which is not dense", "convert it first"
            )
    return told
