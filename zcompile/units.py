"""Sizes and rates as people write them, and back.

Inside the house a size is an int of bytes and a rate is bytes per second; this file is the only
place where "20GiB" and "300MB/s" become numbers, and numbers become text.
"""

import re

KiB = 1 << 10
MiB = 1 << 20
GiB = 1 << 30
TiB = 1 << 40

_FACTORS = {
    "": 1, "B": 1,
    "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12,
    "KIB": KiB, "MIB": MiB, "GIB": GiB, "TIB": TiB,
}  # fmt: skip
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*\Z")
_RATE = re.compile(r"(.*?)\s*/\s*s\s*\Z")


def parse_size(text: int | str) -> int:
    """Bytes from an int or from "20GiB", "1.5 GB", "4096".

    raises  ValueError with a sentence, if the text is not a size or not positive
    """
    if isinstance(text, bool) or not isinstance(text, int | str):
        raise ValueError(f"{text!r} is not a size; write an int of bytes or a text like '20GiB'")
    if isinstance(text, int):
        nbytes = text
    else:
        match = _SIZE.match(text)
        if match is None or match[2].upper() not in _FACTORS:
            raise ValueError(f"{text!r} is not a size; write it like '20GiB', '500MB' or 4096")
        nbytes = int(float(match[1]) * _FACTORS[match[2].upper()])
    if nbytes <= 0:
        raise ValueError(f"{text!r} is not a size: it must be more than zero bytes")
    return nbytes


def parse_rate(text: float | str) -> float:
    """Bytes per second from a number or from "300MB/s".

    raises  ValueError with a sentence, if the text is not a rate or not positive
    """
    if isinstance(text, bool) or not isinstance(text, int | float | str):
        raise ValueError(f"{text!r} is not a rate; write bytes per second or a text like '1GB/s'")
    if isinstance(text, str):
        match = _RATE.match(text)
        if match is None:
            raise ValueError(f"{text!r} is not a rate; write it like '300MB/s'")
        return float(parse_size(match[1]))
    if text <= 0:
        raise ValueError(f"{text!r} is not a rate: it must be more than zero bytes per second")
    return float(text)


def show_size(nbytes: float) -> str:
    """A size for people: three digits and a binary unit, as "1.25 KiB" or "18.4 GiB"."""
    for unit, factor in (("TiB", TiB), ("GiB", GiB), ("MiB", MiB), ("KiB", KiB)):
        if abs(nbytes) >= factor:
            value = nbytes / factor
            digits = 2 if value < 10 else 1 if value < 100 else 0
            return f"{value:.{digits}f} {unit}"
    return f"{nbytes:.0f} B"
