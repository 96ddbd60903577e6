"""This module reads JSON from a file that anybody may have written, without harm to the reader.

`json.loads` nests its own calls as deep as the text nests, up to the end of the stack where the
recursion limit was raised. So the depth of a text is counted before `json.loads` sees the text.
"""

import json
import re
from typing import Any

MOST_NESTED = 200
"""How deep a value that a user gives to be kept may nest. Whatever writes, reads or assembles such
a value calls itself up to three times a level, and Python ends that at 1000 calls, others'
included."""
MOST_DEPTH = MOST_NESTED + 16
"""How deep a text that holds such a value may nest."""
MOST_DIGITS = 19
"""The digits of 2^63 - 1, which no size and no offset exceeds."""
_MARKS = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"|[\[{]|[\]}]', re.DOTALL)
"""A whole string, or a bracket."""


def loads(text: bytes, most_depth: int = MOST_DEPTH) -> Any:
    """The value that `text` stands for. raises ValueError"""
    return _loads(text, most_depth)


def loads_sizes(text: bytes, most_depth: int) -> Any:
    """The value that `text` stands for, where all numbers are sizes and offsets. raises ValueError

    Refuses NaN and infinities, and numbers of thousands of digits, which would take long to print.
    """
    return _loads(text, most_depth, parse_int=_integer, parse_constant=_refuse_constant)


def _loads(text: bytes, most_depth: int, **numbers: Any) -> Any:
    if (depth := _depth(text, most_depth)) > most_depth:
        raise ValueError(f"it nests more than {most_depth} deep")
    try:
        # As UTF-8, in which no other character has the byte of a bracket or a quotation mark.
        return json.loads(text.decode(), object_pairs_hook=_without_duplicates, **numbers)
    except RecursionError as error:
        raise ValueError(f"it nests {depth} deep") from error


def _depth(text: bytes, enough: int) -> int:
    """How deep arrays and objects nest in `text`; counting stops above `enough`."""
    now = most = 0
    for found in _MARKS.finditer(text):
        mark = text[found.start()]
        if mark in b"[{":
            now += 1
            if now > most:
                most = now
                if most > enough:
                    break
        elif mark in b"]}":
            now -= 1
    return most


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """The dict of `pairs`. raises  ValueError, if a name stands there twice"""
    made = dict(pairs)
    if len(made) < len(pairs):
        raise ValueError("a name stands in it twice")
    return made


def _integer(text: str) -> int:
    """The integer `text`. raises  ValueError, if it has more digits than an offset can have"""
    if len(text.lstrip("-")) > MOST_DIGITS:
        raise ValueError(f"a number in it has {len(text)} digits")
    return int(text)


def _refuse_constant(text: str) -> float:
    """raises  ValueError, for NaN and infinities"""
    raise ValueError(f"{text} in it is no number")
