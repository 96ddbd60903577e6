"""JSON from a file that anybody may have written, read without harm.

`json.loads` nests its own calls as deep as the text nests, up to the end of the stack where the
recursion limit was raised.
"""

import json
import re
from typing import Any

MOST_NESTED = 200
"""How deep what a user gives to be kept may nest. Whatever writes it, reads it or puts it together
calls itself up to three times a level, and Python ends that at 1000 calls, others' included."""
MOST_DEPTH = MOST_NESTED + 16
"""Of a text that holds it."""
MOST_DIGITS = 19
"""Of 2^63 - 1, which no size and no offset exceeds."""
_MARKS = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"|[\[{]|[\]}]', re.DOTALL)


def loads(text: bytes, most_depth: int = MOST_DEPTH) -> Any:
    """What `text` says. raises ValueError"""
    return _loads(text, most_depth)


def loads_sizes(text: bytes, most_depth: int) -> Any:
    """What `text` says, whose numbers are sizes and offsets. raises ValueError

    Thousands of digits are no number then, which would take as long to print, nor is NaN.
    """
    return _loads(text, most_depth, parse_int=_integer, parse_constant=_constant)


def _loads(text: bytes, most_depth: int, **numbers: Any) -> Any:
    if (depth := _depth(text, most_depth)) > most_depth:
        raise ValueError(f"it nests more than {most_depth} deep")
    try:
        # As UTF-8, in which no other character has the byte of a bracket or a quotation mark.
        return json.loads(text.decode(), object_pairs_hook=_unique, **numbers)
    except RecursionError as error:
        raise ValueError(f"it nests {depth} deep") from error


def _depth(text: bytes, enough: int) -> int:
    """How deep arrays and objects nest; counted until it is more than enough."""
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


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) < len(pairs):
        raise ValueError("a name stands in it twice")
    return made


def _integer(text: str) -> int:
    if len(text.lstrip("-")) > MOST_DIGITS:
        raise ValueError(f"a number in it has {len(text)} digits")
    return int(text)


def _constant(text: str) -> float:
    raise ValueError(f"{text} in it is no number")
