"""Frozen dataclasses to JSON and back; the annotations of the fields are the format."""

import dataclasses
import functools
import json
import types
from collections.abc import Mapping
from typing import Any, TypeVar, Union, cast, get_args, get_origin, get_type_hints

R = TypeVar("R")


def encode(record: object) -> str:
    """JSON text of a record or a sequence of records: one key or row a line, ends with a newline.

    record  dataclasses, mappings, sequences, texts, numbers and None
    """
    return json.dumps(plain(record), indent=1, allow_nan=False) + "\n"


def plain(record: object) -> Any:
    """The lists, dicts, texts and numbers that `encode` writes."""
    if dataclasses.is_dataclass(record) and not isinstance(record, type):
        return {f.name: plain(getattr(record, f.name)) for f in dataclasses.fields(record)}
    if isinstance(record, Mapping):
        return {str(key): plain(value) for key, value in record.items()}
    if isinstance(record, list | tuple):
        return [plain(value) for value in record]
    return record if isinstance(record, str | int | float | None) else str(record)


def decode(kind: type[R], value: object, where: str = "the top") -> R:
    """`value`, as JSON gives it, as a `kind`: a record, tuple[X, ...], Mapping[str, X], X | Y.

    raises  ValueError, which says where in the text something else was found
    """
    return cast(R, _decode(kind, value, where))


def _decode(kind: Any, value: object, where: str) -> object:
    origin = get_origin(kind)
    if kind is object:
        return value
    if dataclasses.is_dataclass(kind):
        return _record(cast(type, kind), value, where)
    if origin in (Union, types.UnionType):
        return _union(get_args(kind), value, where)
    if origin is tuple and isinstance(value, list):
        inner = get_args(kind)[0]
        return tuple(_decode(inner, row, f"{where}[{i}]") for i, row in enumerate(value))
    if origin is Mapping and isinstance(value, dict):
        inner = get_args(kind)[1]
        return {key: _decode(inner, row, f"{where}.{key}") for key, row in value.items()}
    if isinstance(kind, type) and isinstance(value, kind):
        return value
    raise _unexpected(kind, value, where)


def _record(kind: type, value: object, where: str) -> object:
    if not isinstance(value, dict):
        raise _unexpected(kind, value, where)
    hints = _hints(kind)
    given = {}
    for field in dataclasses.fields(kind):
        if field.name in value:
            inner = f"{where}.{field.name}"
            given[field.name] = _decode(hints[field.name], value[field.name], inner)
        elif field.default is dataclasses.MISSING:
            raise ValueError(f"{where} lacks {field.name!r}")
    return kind(**given)


@functools.cache
def _hints(kind: type) -> Mapping[str, Any]:
    """Of the fields; to look them up takes longer than to read a record."""
    return get_type_hints(kind)


def _union(kinds: tuple[Any, ...], value: object, where: str) -> object:
    for kind in kinds:
        try:
            return _decode(kind, value, where)
        except ValueError:
            continue
    raise _unexpected(" or ".join(_name(kind) for kind in kinds), value, where)


def _unexpected(kind: Any, value: object, where: str) -> ValueError:
    return ValueError(f"{where} should be {_name(kind)}, and is {value!r:.60}")


def _name(kind: Any) -> str:
    return kind if isinstance(kind, str) else getattr(kind, "__name__", str(kind))
