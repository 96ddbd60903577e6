"""Turns sizes and rates as people write them into numbers, and back.

Everywhere else a size is an int of bytes and a rate is bytes per second; this file is the only
place where "20GiB" and "300MB/s" become numbers, and numbers become text.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

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
_LETTERS = {"K": KiB, "M": MiB, "G": GiB, "T": TiB}
"""A single letter is binary, as it is to Slurm and Docker. Only of sizes: rates are decimal, where
a letter would be read the other way."""
_FLOPS = {
    "FLOP": 1,
    "KFLOP": 10**3,
    "MFLOP": 10**6,
    "GFLOP": 10**9,
    "TFLOP": 10**12,
    "PFLOP": 10**15,
}
_SECONDS = {"": 1.0, "ms": 1e-3, "s": 1.0, "min": 60.0, "h": 3600.0}
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*\Z")
_RATE = re.compile(r"(.*?)\s*/\s*s\s*\Z")
_SHARE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*%\s*\Z")


class Bytes(int):
    """A size that was asked for with its unit, or confirmed: it is not asked about again.

    raises  as `parse_size`
    """

    def __new__(cls, size: int | str) -> "Bytes":
        return super().__new__(cls, parse_size(size))


@dataclass(frozen=True)
class Share:
    """A percentage of what a tier has in all."""

    percent: float

    def of(self, total_bytes: int) -> Bytes:
        return Bytes(max(1, int(total_bytes * self.percent / 100)))

    def __str__(self) -> str:
        return f"{self.percent:g}%"


def parse_size(text: int | str) -> int:
    """Bytes from an int or from "20GiB", "20G" (the same), "1.5 GB", "4096".

    raises  ValueError with a sentence, if the text is not a size or not positive
    """
    if isinstance(text, bool) or not isinstance(text, int | str):
        raise ValueError(f"{text!r} is not a size; write an int of bytes or a text like '20GiB'")
    if isinstance(text, int):
        nbytes = text
    else:
        match = _SIZE.match(text)
        factor = None if match is None else (_FACTORS | _LETTERS).get(match[2].upper())
        if match is None or factor is None:
            raise ValueError(f"{text!r} is not a size; write it like '20GiB', '500MB' or 4096")
        nbytes = int(float(match[1]) * factor)
    if nbytes <= 0:
        raise ValueError(f"{text!r} is not a size: it must be more than zero bytes")
    return nbytes


def parse_budget(text: int | str | Share) -> Bytes | Share:
    """Bytes of a tier, as of `parse_size`, or a `Share` from "80%".

    No tier is as small as some bytes, so a small number without a unit is asked about.

    raises  ValueError with a sentence
    """
    if isinstance(text, Bytes | Share):
        return text
    if isinstance(text, str) and (match := _SHARE.match(text)):
        if not 0 < float(match[1]) <= 100:
            raise ValueError(f"{text!r} is not a share of a tier: it is above 0% and at most 100%")
        return Share(float(match[1]))
    nbytes = parse_size(text)
    number = str(text).strip()
    if nbytes < MiB and number.isdigit():
        likely = "GiB" if nbytes < KiB else "MiB"
        raise ValueError(
            f"{text!r} means {number} bytes; did you mean '{number}{likely}'? (a number below 1 "
            f"MiB needs its unit: '{number}B' for bytes)"
        )
    return Bytes(nbytes)


def write_budget(nbytes: int) -> str:
    """The size as Python text that `parse_budget` takes: "1048576", "'4096B'"."""
    return str(nbytes) if nbytes >= MiB else f"'{nbytes}B'"


def parse_rate(text: float | str) -> float:
    """Bytes per second from a number or from "300MB/s".

    raises  ValueError with a sentence, if the text is not a rate or not positive
    """
    if isinstance(text, bool) or not isinstance(text, int | float | str):
        raise ValueError(f"{text!r} is not a rate; write bytes per second or a text like '1GB/s'")
    if isinstance(text, str):
        match = _RATE.match(text)
        if match is None or match[1][-1:].upper() in _LETTERS:
            raise ValueError(f"{text!r} is not a rate; write it like '300MB/s'")
        return float(parse_size(match[1]))
    if text <= 0:
        raise ValueError(f"{text!r} is not a rate: it must be more than zero bytes per second")
    return float(text)


def parse_seconds(text: float | str) -> float:
    """Seconds from a number or from "60s", "5min", "1h", "200ms".

    raises  ValueError with a sentence, if the text is not a time or not positive
    """
    if isinstance(text, bool) or not isinstance(text, int | float | str):
        raise ValueError(f"{text!r} is not a time; write seconds or a text like '60s'")
    if isinstance(text, str):
        match = _SIZE.match(text)
        factor = None if match is None else _SECONDS.get(match[2])
        if match is None or factor is None:
            raise ValueError(f"{text!r} is not a time; write it like '60s', '5min' or 60")
        text = float(match[1]) * factor
    if not 0 < text < float("inf"):
        raise ValueError(f"{text!r} is not a time that one can wait")
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
