"""Reads and writes machines as TOML files, and finds those that come along by name.

    name = "desktop"                       # sizes and rates: texts with units, or plain numbers
    [tiers]
    device = "24GiB"
    [links.h2d]
    bytes_per_s = "25GB/s"
    latency_s = 1e-5
    [compute]
    memory_bytes_per_s = "900GB/s"
    [compute.flops_per_s]
    bfloat16 = "130TFLOP/s"

The keys are the fields of `Machine`, `Link` and `Compute`; figures are those of one rank.
"""

import json
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

from zcompile.errors import ZinfError
from zcompile.ir.units import (
    parse_flops,
    parse_rate,
    parse_size,
    write_flops,
    write_rate,
    write_size,
)
from zcompile.machine.model import (
    HOST_UPDATE_BYTES_PER_S,
    Compute,
    Link,
    Machine,
    MachineInvalid,
    guess,
    nearest,
)

FOLDER = Path(__file__).parent
SUFFIX = ".toml"


class MachineUnknown(ZinfError, LookupError):
    """No machine of that name comes along; those that do are listed."""

    def __init__(self, name: str, known: Iterable[str]) -> None:
        known = list(known)
        super().__init__(
            f"machine={name!r} names no machine; {guess(name, known)}known are {', '.join(known)}; "
            f"a file is given by its path, as ./{name.rpartition('/')[2]}.toml"
        )


class MachineUnreadable(ZinfError, OSError):
    """A file of a machine cannot be read."""

    def __init__(self, path: Path, why: str) -> None:
        super().__init__(
            f"machine={str(path)!r} cannot be read ({why}); give another file, or the "
            "name of a machine that comes along"
        )


def names() -> tuple[str, ...]:
    """Names of the machines that come along."""
    return tuple(sorted(path.stem for path in FOLDER.glob(f"*{SUFFIX}")))


def find(name_or_path: str | Path) -> Machine:
    """The machine of a name in `names()`, or of a file: a path with a "/", or ending in ".toml".

    raises  MachineUnknown, MachineUnreadable, MachineInvalid
    """
    path = Path(name_or_path)
    if not (isinstance(name_or_path, Path) or "/" in name_or_path or path.suffix == SUFFIX):
        if name_or_path not in names():
            raise MachineUnknown(name_or_path, names())
        path = FOLDER / f"{name_or_path}{SUFFIX}"
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise MachineUnreadable(path, error.strerror or str(error)) from error
    except UnicodeDecodeError as error:
        raise MachineUnreadable(path, f"not text in UTF-8, byte {error.start}") from error
    return read(text, str(path))


def read(text: str, where: str) -> Machine:
    """The machine that a TOML text describes; `where` it comes from, for errors.

    raises  MachineInvalid
    """
    try:
        top = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise MachineInvalid(where, "the text", f"is not TOML: {error}", "mend it") from error
    _check_keys(where, top, Machine)
    links = _table(where, "links", top.get("links", {}))
    try:
        return Machine(
            name=_text(where, "name", top["name"]),
            tiers=_numbers(where, "tiers", top.get("tiers", {}), parse_size),
            links={
                name: _link(where, name, _table(where, f"links.{name}", row))
                for name, row in links.items()
            },
            compute=_compute(where, _table(where, "compute", top["compute"])),
            ranks=top.get("ranks", 1),
            ranks_per_node=top.get("ranks_per_node", 1),
            replicas=top.get("replicas", 1),
            slower_way=top.get("slower_way"),
            runs_kernels=top.get("runs_kernels", True),
            note=_text(where, "note", top.get("note", "")),
            host_update_bytes_per_s=_number(
                where,
                "host_update_bytes_per_s",
                top.get("host_update_bytes_per_s", HOST_UPDATE_BYTES_PER_S),
                parse_rate,
            ),
        )
    except MachineInvalid as error:
        raise error.within(where) from None


def write(machine: Machine, comment: str = "") -> str:
    """The text that `read` reads as an equal machine.

    comment  its first lines
    """
    return "\n".join((*(f"# {line}".rstrip() for line in comment.splitlines()), *_lines(machine)))


def _lines(machine: Machine) -> Iterator[str]:
    yield f"name = {_quoted(machine.name)}"
    if machine.ranks > 1:
        yield f"ranks = {machine.ranks}"
        yield f"ranks_per_node = {machine.ranks_per_node}"
    if machine.replicas > 1:
        yield f"replicas = {machine.replicas}"
    if machine.slower_way is not None:
        yield f"slower_way = {_quoted(machine.slower_way)}"
    if not machine.runs_kernels:
        yield "runs_kernels = false"
    if machine.note:
        yield f"note = {_quoted(machine.note)}"
    if machine.host_update_bytes_per_s != HOST_UPDATE_BYTES_PER_S:
        yield f"host_update_bytes_per_s = {_value(write_rate(machine.host_update_bytes_per_s))}"
    yield "\n[tiers]"
    for tier, nbytes in machine.tiers.items():
        yield f"{tier} = {_value(write_size(nbytes))}"
    for link in machine.links.values():
        yield f"\n[links.{link.name}]"
        yield f"bytes_per_s = {_value(write_rate(link.bytes_per_s))}"
        if link.latency_s:
            yield f"latency_s = {_value(link.latency_s)}"
        if link.shares:
            yield f"shares = {_quoted(link.shares)}"
    yield "\n[compute]"
    yield f"memory_bytes_per_s = {_value(write_rate(machine.compute.memory_bytes_per_s))}"
    if machine.compute.launch_s:
        yield f"launch_s = {_value(machine.compute.launch_s)}"
    yield "\n[compute.flops_per_s]"
    for dtype, rate in machine.compute.flops_per_s.items():
        yield f"{dtype} = {_value(write_flops(rate))}"
    yield ""


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)  # of printable text, the same in TOML


def _value(value: float | str) -> str:
    return _quoted(value) if isinstance(value, str) else repr(value)


def _link(where: str, name: str, row: Mapping[str, Any]) -> Link:
    inside = f"{where}: links.{name}"
    _check_keys(inside, row, Link, without=("name",))
    shares = row.get("shares")
    return Link(
        name,
        _number(inside, "bytes_per_s", row["bytes_per_s"], parse_rate),
        row.get("latency_s", 0.0),
        None if shares is None else _text(inside, "shares", shares),
    )


def _compute(where: str, row: Mapping[str, Any]) -> Compute:
    inside = f"{where}: compute"
    _check_keys(inside, row, Compute)
    return Compute(
        _numbers(where, "compute.flops_per_s", row["flops_per_s"], parse_flops),
        _number(inside, "memory_bytes_per_s", row["memory_bytes_per_s"], parse_rate),
        row.get("launch_s", 0.0),
    )


def _check_keys(
    where: str, row: Mapping[str, Any], kind: Any, without: tuple[str, ...] = ()
) -> None:
    """Every key is a field of the dataclass `kind`, and every field without a default is there."""
    known = {f.name: f for f in fields(kind) if f.name not in without}
    for key in row:
        if key not in known:
            raise MachineInvalid(where, repr(key), "is not known here", nearest(key, known))
    for name, field in known.items():
        if field.default is MISSING and name not in (*row, "tiers", "links"):
            raise MachineInvalid(where, repr(name), "is missing", "add it")


def _numbers(where: str, name: str, rows: object, parse: Callable[[Any], Any]) -> dict[str, Any]:
    return {
        key: _number(f"{where}: {name}", key, value, parse)
        for key, value in _table(where, name, rows).items()
    }


def _number(where: str, key: str, value: object, parse: Callable[[Any], Any]) -> Any:
    try:
        return parse(value)
    except (ValueError, OverflowError) as error:
        raise MachineInvalid(where, f"{key}={value!r}", "cannot be used", str(error)) from error


def _table(where: str, name: str, value: object) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise MachineInvalid(where, f"{name}={value!r}", "is no table", f"begin it by [{name}]")
    return value


def _text(where: str, name: str, value: object) -> str:
    if not isinstance(value, str):
        raise MachineInvalid(where, f"{name}={value!r}", "is no text", "put it in quotes")
    return value
