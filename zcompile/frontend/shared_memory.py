"""Which parameters of a model lie in the same memory, as after `a.weight.data = b.weight.data`.

They are several parameters, each with a gradient of its own, that show the same values.
"""

from collections.abc import Iterable
from dataclasses import replace

from torch import Tensor

from zcompile.errors import Unsupported
from zcompile.ir.torch_compat import memory_of
from zcompile.ir.types import Layout


def first_in_memory(named: Iterable[tuple[str, Tensor]]) -> dict[int, Tensor]:
    """id of a parameter -> the first that lies exactly where it does, if it is not that itself.

    raises  Unsupported, if two share a part of their memory
    """
    lying: dict[int, list[tuple[str, Tensor, Layout]]] = {}
    found: dict[int, Tensor] = {}
    for name, param in named:
        layout = replace(Layout.of(param), offset=int(param.storage_offset()))
        others = lying.setdefault(memory_of(param), [])
        for before, other, lies in others:
            if layout == lies:
                found[id(param)] = other
                break
            if not layout.numel or not _overlap(layout, lies):
                continue
            raise Unsupported(
                f"parameters {before!r} and {name!r} share a part of their memory",
                "give each memory of its own (param.data = param.data.clone()), or make both views "
                "of one parameter",
            )
        else:
            others.append((name, param, layout))
    return found


def _overlap(a: Layout, b: Layout) -> bool:
    begin = max(a.offset * a.dtype.itemsize, b.offset * b.dtype.itemsize)
    return begin < min(a.end_bytes, b.end_bytes)
