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
def compiled_frame() -> None:
    seen = []

    def noting(gm, inputs):
        seen.append(private.compiled_frame())
        return gm.forward

    call = torch.compile(lambda x: x + 1, backend=noting, dynamic=False)
    for size in (2, 3):
        call(torch.ones(size))
    torch.compile(lambda x: x + 2, backend=noting)(torch.ones(2))
    assert private.compiled_frame() is None
    assert seen[0] == seen[1] != seen[2]
    assert all(isinstance(frame, int) for frame in seen)


@contract
def on_recompile_limit() -> None:
    """Told with the function that was compiled, whichever of two limits is met."""
    told, frames = [], []

    def noting(gm, inputs):
        frames.append(private.compiled_frame())
        return gm.forward

    stock = torch._dynamo.convert_frame.exceeds_recompile_limit
    private.on_recompile_limit(lambda *what: told.append(what))
    try:
        for limit in ("recompile_limit", "accumulated_recompile_limit"):
            torch._dynamo.reset()
            call = torch.compile(lambda x: x + 1, backend=noting, dynamic=False)
            with torch._dynamo.config.patch({limit: 2}):
                for size in (2, 3):
                    call(torch.ones(size))
                assert not told
                assert call(torch.ones(4)).tolist() == [2.0] * 4, "it runs eagerly"
            assert told.pop() == (frames[-1], limit, 2)
    finally:
        torch._dynamo.convert_frame.exceeds_recompile_limit = stock


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
