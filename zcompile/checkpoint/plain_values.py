"""Packs values as JSON and named tensors, and unpacks them: a checkpoint without pickling.

Values that JSON has are written as they are. The rest is an object with one key that begins with
"$": a tuple, a dict with keys that are not texts, an infinite number, or the name of a tensor that
is stored elsewhere. Any other value raises, and the error says where it stands.
"""

from collections import Counter, OrderedDict
from collections.abc import Callable, Container, Mapping
from typing import Any

import torch
from torch import Tensor

from zcompile.errors import Unsupported
from zcompile.runtime.eager.unbacked import Unbacked
from zcompile.runtime.io.sound_json import MOST_NESTED

Read = Callable[[str, str], Tensor]
"""(name of a tensor, the device it was on or "tiered") -> the tensor."""

_AS_THEY_ARE = (str, int, bool, type(None))
_KINDS_OF_DICT: Mapping[str, type] = {
    "$dict": dict,
    "$ordered": OrderedDict,
    "$counter": Counter,
}


class Packer:
    """Packs values, and collects the tensors in them.

    tensors  by name, which begins with the place of the value; the tensors themselves, not copies
    """

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        self.tensors = tensors

    def pack(self, value: object, where: str, depth: int = 0) -> Any:
        """`value` as JSON has it, `depth` levels down.

        raises  Unsupported, naming `where`
        """
        if depth > MOST_NESTED:
            raise Unsupported(
                f"{where:.80} ... nests more than {MOST_NESTED} deep (a tuple counts for two, a "
                "dict whose keys are no texts for three), which could not be read again",
                "make it flatter, or keep it as a text or a tensor",
            )
        kind = type(value)
        if kind in _AS_THEY_ARE:
            return value
        if isinstance(value, float) and kind is float:
            finite = value - value == 0
            return value if finite else {"$float": repr(value)}
        if isinstance(value, list) and kind is list:
            return [self.pack(item, f"{where}.{at}", depth + 1) for at, item in enumerate(value)]
        if isinstance(value, tuple) and kind is tuple:
            items = [self.pack(item, f"{where}.{at}", depth + 2) for at, item in enumerate(value)]
            return {"$tuple": items}
        if isinstance(value, dict) and kind in _KINDS_OF_DICT.values():
            return self._dict(value, where, depth)
        if isinstance(value, Tensor):
            return self._tensor(value, where)
        raise Unsupported(
            f"{where} is a {kind.__module__}.{kind.__qualname__}, which a checkpoint cannot keep",
            "give numbers, texts, None, tensors, and lists, tuples and dicts of them",
        )

    def _dict(self, value: dict[Any, Any], where: str, depth: int) -> Any:
        kind = type(value)
        if kind is dict and all(type(key) is str and key[:1] != "$" for key in value):
            return {k: self.pack(item, f"{where}.{k}", depth + 1) for k, item in value.items()}
        (tag,) = (tag for tag, known in _KINDS_OF_DICT.items() if known is kind)
        return {
            tag: [
                [
                    self.pack(key, f"{where} (a key)", depth + 3),
                    self.pack(item, f"{where}.{key}", depth + 3),
                ]
                for key, item in value.items()
            ]
        }

    def _tensor(self, value: Tensor, where: str) -> Any:
        check_dense(value, where)
        name, tries = where, 1
        while name in self.tensors:
            name, tries = f"{where}~{tries}", tries + 1
        tiered = isinstance(value, Unbacked)
        self.tensors[name] = value if tiered else value.detach()
        return {"$tensor": name, "on": "tiered" if tiered else str(value.device)}


def unpack(value: Any, read: Read) -> Any:
    """The value that `Packer.pack` was given.

    raises  ValueError, if `value` is not of its making
    """
    if isinstance(value, list):
        return [unpack(item, read) for item in value]
    if not isinstance(value, dict):
        return value
    tag = next(iter(value), "")
    if tag[:1] != "$":
        return {key: unpack(item, read) for key, item in value.items()}
    inner = value[tag]
    if tag == "$tensor":
        return read(inner, value.get("on", "cpu"))
    if tag == "$float":
        return float(inner)
    if tag == "$tuple":
        return tuple(unpack(item, read) for item in inner)
    if tag in _KINDS_OF_DICT:
        pairs = ((unpack(key, read), unpack(item, read)) for key, item in inner)
        return _KINDS_OF_DICT[tag](dict(pairs))
    raise ValueError(f"a value is tagged {tag!r}, which is not known")


def check_packed(value: Any, names: Container[str], where: str) -> None:
    """Check that `unpack` can take all of `value`, which anybody may have written.

    names   of the tensors there are
    raises  ValueError
    """
    if isinstance(value, list):
        for item in value:
            check_packed(item, names, where)
    if not isinstance(value, dict):
        return
    tag = next(iter(value), "")
    if tag[:1] != "$":
        for key, item in value.items():
            check_packed(item, names, f"{where}.{key}")
        return
    inner = value[tag]
    if tag == "$tensor":
        on = value.get("on", "cpu")
        sound = isinstance(inner, str) and inner in names and isinstance(on, str)
        sound = sound and (on == "tiered" or _is_device(on))
    elif tag == "$float":
        sound = inner in ("nan", "inf", "-inf")
    elif tag == "$tuple":
        sound = isinstance(inner, list)
        check_packed(inner, names, where)
    else:
        sound = tag in _KINDS_OF_DICT and isinstance(inner, list)
        sound = sound and all(isinstance(pair, list) and len(pair) == 2 for pair in inner)
        check_packed(inner, names, where)
    if not sound:
        raise ValueError(f"{where} holds {value!r:.60}, which is not of a checkpoint's making")


def _is_device(text: str) -> bool:
    try:
        torch.device(text)
    except RuntimeError:
        return False
    return True


def check_dense(value: Tensor, where: str) -> None:
    """Refuse tensors whose values are not simply their elements.

    raises  Unsupported
    """
    if value.layout is not torch.strided or value.is_quantized:
        raise Unsupported(
            f"{where} is a tensor of layout {value.layout} and dtype {value.dtype}",
            "a checkpoint keeps dense tensors only; convert it first",
        )
