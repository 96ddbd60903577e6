"""Torch compiles a function so often and no more: then its calls leave the plan, which is said."""

import pytest
import torch
from offloaded import twins
from torch import nn
from torch._dynamo.exc import FailOnRecompileLimitHit

SIZES = (2, 3, 4, 5)


def warnings_of(caplog):
    return [r.getMessage() for r in caplog.records if r.name == "zcompile.frontend.recompiles"]


def test_it_is_said_once_that_calls_leave_the_plan_and_they_compute_the_same(caplog):
    pair = twins(nn.Linear(8, 8), dynamic=False)
    with torch._dynamo.config.patch(recompile_limit=2):
        assert pair.train(torch.ones(SIZES[0], 8))
        assert pair.train(torch.ones(SIZES[1], 8))
        assert warnings_of(caplog) == []
        assert all(pair.train(torch.ones(size, 8)) for size in SIZES[2:])
    (told,) = warnings_of(caplog)
    assert "Linear leaves the plan: torch compiled one of its functions 2 times" in told
    assert "torch._dynamo.config.recompile_limit" in told
    assert "dynamic=True" in told
    assert len(pair.graphs) == 2


def test_the_limit_over_all_functions_is_noticed_too(caplog):
    pair = twins(nn.Linear(8, 8), dynamic=False)
    with torch._dynamo.config.patch(accumulated_recompile_limit=1):
        assert all(pair.train(torch.ones(size, 8)) for size in SIZES[:2])
    (told,) = warnings_of(caplog)
    assert "torch._dynamo.config.accumulated_recompile_limit" in told


def test_what_other_backends_compile_is_not_ours_to_tell(caplog):
    plain = torch.compile(nn.Linear(8, 8), backend="eager", dynamic=False)
    with torch._dynamo.config.patch(recompile_limit=1):
        for size in SIZES:
            plain(torch.ones(size, 8))
    assert warnings_of(caplog) == []


def test_where_torch_fails_on_the_limit_it_still_does(caplog):
    pair = twins(nn.Linear(8, 8), dynamic=False)
    with torch._dynamo.config.patch(recompile_limit=1, fail_on_recompile_limit_hit=True):
        assert pair.train(torch.ones(2, 8))
        with pytest.raises(FailOnRecompileLimitHit):
            pair.call(torch.ones(3, 8))
    assert len(warnings_of(caplog)) == 1
