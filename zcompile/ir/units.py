"""Turns sizes and rates as people write them into numbers, and back.

Everywhere else a size is an int of bytes and a rate is bytes per second; this file is the only
place where "20GiB" and "300MB/s" become numbers, and numbers become text.
"""

import re
from collections.abc import Callable, Mapping

KiB = 1 << 10
MiB = 1 << 20
GiB = 1 << 30
TiB = 1 << 40

_FACTORS = {
    "": 1,
    "B": 1,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "KIB": KiB,
    "MIB": MiB,
    "GIB": GiB,
    "TIB": TiB,
}
_FLOPS = {
    "FLOP": 1,
    "KFLOP": 10**3,
    "MFLOP": 10**6,
    "GFLOP": 10**9,
    "TFLOP": 10**12,
    "PFLOP": 10**15,
}
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


def parse_flops(text: float | str) -> float:
    """FLOPs per second from a number or from "70TFLOP/s".

    raises  ValueError with a sentence, if the text is not such a rate or not positive
    """
    if isinstance(text, bool) or not isinstance(text, int | float | str):
        raise ValueError(f"{text!r} is not a rate; write FLOPs per second or '70TFLOP/s'")
    rate = _RATE.match(text) if isinstance(text, str) else None
    match = _SIZE.match(rate[1]) if rate else None
    if isinstance(text, str) and (match is None or match[2].upper() not in _FLOPS):
        raise ValueError(f"{text!r} is not a rate; write it like '70TFLOP/s'")
    flops = float(text) if match is None else float(match[1]) * _FLOPS[match[2].upper()]
    if flops <= 0:
        raise ValueError(f"{text!r} is not a rate: it must be more than zero FLOPs per second")
    return flops


def write_size(nbytes: int) -> int | str:
    """The shortest text that `parse_size` reads as exactly `nbytes`; the number if none does."""
    units = ("TiB", "GiB", "MiB", "KiB", "TB", "GB", "MB", "KB")
    factors = {unit: _FACTORS[unit.upper()] for unit in units}
    texts = [f"{nbytes // n}{unit}" for unit, n in factors.items() if nbytes % n == 0]
    exact = [text for text in texts if parse_size(text) == nbytes]
    return min(exact, key=len, default=nbytes)


def write_rate(bytes_per_s: float) -> float | str:
    """A text that `parse_rate` reads as exactly `bytes_per_s`; the number if there is none."""
    units = {unit: _FACTORS[unit] for unit in ("TB", "GB", "MB", "KB")}
    return _written(bytes_per_s, units, parse_rate)


def write_flops(flops_per_s: float) -> float | str:
    """A text that `parse_flops` reads as exactly `flops_per_s`; the number if there is none."""
    return _written(flops_per_s, dict(reversed(_FLOPS.items())), parse_flops)


def _written(value: float, units: Mapping[str, int], parse: Callable[[str], float]) -> float | str:
    for unit, factor in units.items():
        text = f"{value / factor:.6g}{unit}/s"
        if value >= factor and "e" not in text and parse(text) == value:
            return text
    return value


def show_rate(bytes_per_s: float) -> str:
    """A rate for people: three digits and a decimal unit, as "3.25 GB/s"."""
    return _shown(bytes_per_s, ("TB", "GB", "MB", "KB", "B"), _FACTORS)


def show_flops(flops_per_s: float) -> str:
    """A rate for people: three digits, as "70.0 TFLOP/s"."""
    return _shown(flops_per_s, tuple(reversed(_FLOPS)), _FLOPS)


def _shown(value: float, units: tuple[str, ...], factors: Mapping[str, int]) -> str:
    unit = next((unit for unit in units if value >= factors[unit]), units[-1])
    scaled = value / factors[unit]
    return f"{scaled:.{2 if scaled < 10 else 1 if scaled < 100 else 0}f} {unit}/s"


def show_size(nbytes: float) -> str:
    """A size for people: three digits and a binary unit, as "1.25 KiB" or "18.4 GiB"."""
    for unit, factor in (("TiB", TiB), ("GiB", GiB), ("MiB", MiB), ("KiB", KiB)):
        if abs(nbytes) >= factor:
            value = nbytes / factor
            digits = 2 if value < 10 else 1 if value < 100 else 0
            return f"{value:.{digits}f} {unit}"
    return f"{nbytes:.0f} B"


def show_seconds(seconds: float) -> str:
    """A time for people: three digits, as "1.25 ms" or "18.4 s"."""
    for unit, factor in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if abs(seconds) >= factor:
            value = seconds / factor
            return f"{value:.{2 if value < 10 else 1 if value < 100 else 0}f} {unit}"
    return f"{seconds * 1e6:.2f} us" if seconds else "0 s"


def show_count(n: int) -> str:
    """A number of parameters for people: "25.4 M", "175 B"."""
    for unit, factor in (("T", 10**12), ("B", 10**9), ("M", 10**6), ("K", 10**3)):
        if n >= factor:
            return f"{n / factor:.3g} {unit}"
    return str(n)
