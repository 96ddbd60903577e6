"""Sizes among the arguments of a command."""

from zcompile.errors import ConfigInvalid
from zcompile.ir.units import MiB, parse_size


def read_size(option: str, text: str) -> int:
    """Bytes of a tier. No tier is as small as a few bytes, so a small bare number lacks its unit.

    raises  ConfigInvalid
    """
    try:
        nbytes = parse_size(text)
    except ValueError as error:
        raise ConfigInvalid(option, text, f"cannot be used: {error}") from error
    if nbytes < MiB and text.strip()[-1].isdigit():
        raise ConfigInvalid(option, text, f"has no unit, and so means {nbytes} bytes; write it "
                            f"with one, as {text.strip()}GiB")  # fmt: skip
    return nbytes
