"""Machines that were measured, kept between processes: one text file per set of facts.

The files lie in $XDG_CACHE_HOME/zcompile, or ~/.cache/zcompile. Whatever goes wrong with them costs
one more measurement and nothing else.
"""

import hashlib
import logging
import os
import tempfile
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

from zcompile.machine.files import read, write
from zcompile.machine.model import Machine, MachineInvalid

logger = logging.getLogger("zcompile.runtime.probe_cache")

FORMAT = 1
"""Part of the key: what was measured in another way is measured again."""


def cached(facts: Mapping[str, str], measure: Callable[[], Machine], *, again: bool = False,
           busy: bool = False) -> Machine:  # fmt: skip
    """The machine that was measured when `facts` held, or is measured now.

    again  measure, whatever is there
    busy   the machine is at work on other things: what is measured is kept until it is not
    """
    path = cache_file(facts)
    if path is None:
        return measure()
    passing = path.with_stem(f"{path.stem}-busy")
    for kept in (path, passing) if busy else (path,):
        if not again and (found := _read(kept)) is not None:
            return found
    machine = measure()
    told = "\n".join(("Measured by zcompile; may be removed at any time.",
                      *(f"{key}: {value}" for key, value in facts.items())))  # fmt: skip
    _write(passing if busy and not again else path, write(machine, told))
    return machine


def cache_file(facts: Mapping[str, str]) -> Path | None:
    """None if there is no place for it."""
    folder = _folder()
    if folder is None:
        return None
    text = "\n".join((str(FORMAT), *(f"{key}={facts[key]!r}" for key in sorted(facts))))
    return folder / f"machine-{hashlib.sha256(text.encode()).hexdigest()[:16]}.toml"


def _folder() -> Path | None:
    given = Path(os.environ.get("XDG_CACHE_HOME", ""))
    if given.is_absolute():  # its specification says to ignore any other
        return given / "zcompile"
    try:
        return Path.home() / ".cache" / "zcompile"
    except RuntimeError:
        return None


def _read(path: Path) -> Machine | None:
    try:
        return read(path.read_text(encoding="utf-8"), str(path))
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError, MachineInvalid) as error:
        logger.info("%s is of no use, the machine is measured again: %s", path, error)
        return None


def _write(path: Path, text: str) -> None:
    """All of it or nothing; of several processes at once the last one wins."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=f"{path.name}.")
        try:
            with open(handle, "w", encoding="utf-8") as file:
                file.write(text)
            os.replace(name, path)
        except OSError:
            with suppress(OSError):
                os.unlink(name)
            raise
    except OSError as error:
        logger.info("what was measured is not kept: %s", error)
