"""Defects that were found once, put back on purpose: the fuzzer must find each."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from unittest import mock

import torch

from zcompile.ir.types import Layout
from zcompile.runtime.eager.tensor import TieredTensor


@contextmanager
def span_for_coverage() -> Iterator[None]:
    """A view that spans its entry is taken to cover it: a diagonal is."""
    with mock.patch.object(Layout, "covers", lambda self, nbytes: self.nbytes == nbytes):
        yield


@contextmanager
def data_that_copies() -> Iterator[None]:
    """`p.data = x` copies the values of x, where torch points to them."""

    def copy(self: torch.Tensor, value: torch.Tensor) -> None:
        with torch.no_grad():
            self.detach().copy_(value)

    owner = next(kind for kind in TieredTensor.__mro__ if "data" in vars(kind))
    with mock.patch.object(owner, "data", property(vars(owner)["data"].fget, copy)):
        yield


INJECTED: dict[str, Callable[[], object]] = {
    "the span of a view is taken for what it covers": span_for_coverage,
    "data that is assigned is copied": data_that_copies,
}
