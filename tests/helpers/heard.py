"""What a logger says while something is done, in a process without pytest's `caplog`."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def warnings_of(name: str) -> Iterator[list[str]]:
    """The warnings that this logger gives meanwhile."""
    said: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger(name).addHandler(handler)
    try:
        yield said
    finally:
        logging.getLogger(name).removeHandler(handler)
