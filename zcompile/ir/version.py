"""Holds the version of zcompile, which packaging reads, and the versions of torch that it takes.

Needs no torch: what is refused here would fail inside of torch's internals otherwise.
"""

import re
import sys
from importlib import metadata

VERSION = "0.1.0"
TESTED = ((2, 11), (2, 13))
"""First and last torch minor release under test; the CPU suite runs on the last one."""


def installed_torch() -> str | None:
    """The version of the torch that is imported, or would be; None without one."""
    if "torch" in sys.modules:
        return str(getattr(sys.modules["torch"], "__version__", "")) or None
    try:
        return metadata.version("torch")
    except metadata.PackageNotFoundError:
        return None


def check_torch(version: str | None) -> None:
    """Refuse a version of torch outside of `TESTED`; None, an absent one, fails by itself.

    raises  TorchUnsupported
    """
    found = re.match(r"(\d+)\.(\d+)", version or "")
    first, last = TESTED
    if version is None or (found and first <= (int(found[1]), int(found[2])) <= last):
        return
    from zcompile.errors import TorchUnsupported  # packaging reads this file alone

    raise TorchUnsupported(version, f"{first[0]}.{first[1]} to {last[0]}.{last[1]}")
