"""Contracts of the private torch APIs by which we say what a compiled call failed of."""

import logging

import pytest
import torch
from contracts import CONTRACTS, contract

from zcompile.ir import torch_compat as private

__all__ = ["CONTRACTS", "contract"]


def failing(code, *inputs) -> tuple[BaseException, str]:
    with private.muted_tracing(), pytest.raises((RuntimeError, LookupError)) as caught:
        torch.compile(code, backend="eager")(*inputs)
    reason, frames = private.failure_of(caught.value)
    return reason, frames[-1].name


@contract
def failure_of() -> None:
    """The op's own error, found behind Dynamo's, and the innermost frame of what was traced."""

    def multiplies(x):
        return x @ x

    def looks(x):
        return (x + 1)[:, 9]

    def refuses(x):
        raise KeyError("mine")

    reason, where = failing(multiplies, torch.ones(2, 3))
    assert type(reason) is RuntimeError
    assert where == "multiplies"
    reason, where = failing(looks, torch.ones(2, 3))
    assert isinstance(reason, IndexError)
    assert where == "looks"
    reason, where = failing(refuses, torch.ones(2, 3))
    assert isinstance(reason, KeyError)
    assert where == "refuses"


@contract
def says_not_resizable() -> None:
    """What cannot be resized, since its memory is somebody's else, says so in these words."""
    lent = torch.zeros(4, dtype=torch.uint8).numpy()
    out = torch.frombuffer(lent, dtype=torch.float32)[:0]
    with pytest.raises(RuntimeError) as caught:
        torch.add(torch.ones(3), 1, out=out)
    assert private.says_not_resizable(caught.value)
    with pytest.raises(RuntimeError) as caught:
        torch.add(torch.ones(3), torch.ones(2))
    assert not private.says_not_resizable(caught.value)


@contract
def muted_tracing() -> None:
    """An op that cannot be traced is logged by torch as an error, and not while muted."""
    heard: list[logging.LogRecord] = []

    class Ear(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            heard.append(record)

    ear = Ear(logging.ERROR)
    log = logging.getLogger(private.FakeTensor.__module__)
    log.addHandler(ear)
    try:
        failing(lambda x: x @ x, torch.ones(2, 3))
    finally:
        log.removeHandler(ear)
    assert not heard
    assert not log.disabled


@contract
def without_recompile_limit() -> None:
    """Code that differs each time is compiled each time, and the limits come back."""
    graphs = []

    def keep(gm, inputs):
        graphs.append(gm)
        return gm.forward

    def add(x, number):
        return x + number

    before = torch._dynamo.config.recompile_limit
    compiled = torch.compile(add, backend=keep, dynamic=False)
    with private.without_recompile_limit():
        for number in range(before + 2):
            compiled(torch.ones(2), number)
    assert len(graphs) == before + 2
    assert torch._dynamo.config.recompile_limit == before
