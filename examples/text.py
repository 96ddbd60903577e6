"""Real text as bytes, and seeded batches of it. A byte is a token, so there is no tokenizer."""

import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

VOCABULARY = 256


class InputInvalid(ValueError):
    """Something given on the command line that cannot be used; the text is a sentence."""


@dataclass(frozen=True)
class Batch:
    """ids and targets: int64 [batch, sequence]; a target is the byte after its id."""

    ids: Tensor
    targets: Tensor


def read_text(files: Sequence[Path], least_bytes: int) -> Tensor:
    """The bytes of all files, one after the other: uint8 [n]. Without files, of Python itself.

    raises  InputInvalid if a file cannot be read, or all are shorter than `least_bytes`
    """
    chosen = list(files) or own_sources()
    pieces = []
    for path in chosen:
        try:
            pieces.append(path.read_bytes())
        except OSError as error:
            raise InputInvalid(
                f"cannot read {path}: {error.strerror}; give --data files that "
                "exist and may be read"
            ) from error
    data = bytearray().join(pieces)
    if len(data) < least_bytes:
        raise InputInvalid(
            f"the text has {len(data)} bytes and one sequence needs {least_bytes}; "
            "give longer files, or a smaller --seq"
        )
    return torch.frombuffer(data, dtype=torch.uint8)


def own_sources() -> list[Path]:
    """The modules of the running interpreter's standard library, by name.

    raises  InputInvalid if this interpreter came without its sources
    """
    home = Path(sysconfig.get_path("stdlib"))
    found = sorted(home.glob("*.py"))
    if not found:
        raise InputInvalid(f"this Python has no sources in {home}; give a text with --data FILES")
    return found


def batches(
    text: Tensor, batch: int, sequence: int, seed: int, device: torch.device
) -> Iterator[Batch]:
    """Random windows of the text, without end; the same ones for the same seed."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        starts = torch.randint(len(text) - sequence, (batch,), generator=generator)
        windows = torch.stack([text[s : s + sequence + 1] for s in starts.tolist()]).long()
        windows = windows.to(device)
        yield Batch(windows[:, :-1].contiguous(), windows[:, 1:].contiguous())
