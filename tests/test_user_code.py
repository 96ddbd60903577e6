"""A model that fails by itself: told in a sentence that says what, where and why; its error is the
cause. What is wrong with us is not blamed on it."""

import functools

import pytest
import torch
from torch import nn

import zcompile
from zcompile.errors import Running, Unsupported, UserCodeFailed, ZinfError
from zcompile.ir.torch_compat import failure_of

ON = "desktop-24gb"
INPUT = torch.empty(4, 8, device="meta")


@pytest.fixture(autouse=True)
def _anew():
    """Dynamo leaves code alone that failed once."""
    torch._dynamo.reset()


class OwnError(Exception):
    """Of no family."""


class NoWayBack(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        raise ValueError("no way back")


class Model(nn.Module):
    """Fails as its `code` does."""

    def __init__(self, code):
        super().__init__()
        self.one, self.two, self.code = nn.Linear(8, 8), nn.Linear(9, 3), code

    def forward(self, x):
        return self.code(self, self.one(x))


def multiplies(model, x):
    return model.two(x)


def views(model, x):
    return x.view(3, 7)


def indexes(model, x):
    return x[:, 9].sum()


def refuses(model, x):
    raise OwnError("not today\nnor tomorrow")


def asks(model, x):
    return x.no_such_method()


def turns(model, x):
    return NoWayBack.apply(x).sum()


@functools.cache
def failure(code):
    """What is told of a model that fails by that code."""
    with pytest.raises(UserCodeFailed) as caught:
        zcompile.plan(Model(code), INPUT, machine=ON)
    return caught.value


@pytest.mark.parametrize(
    ("code", "kind", "says"),
    [
        (multiplies, RuntimeError, "forward of Model with (float32[4, 8]) failed at "),
        (multiplies, RuntimeError, "(`return model.two(x)`): RuntimeError: "),
        (multiplies, RuntimeError, "[4, 8] X [9, 3]; a plan runs the model as it is: give it"),
        (
            views,
            RuntimeError,
            "RuntimeError: shape '[3, 7]' is invalid for input of size 32; a plan",
        ),
        (indexes, IndexError, "IndexError: index 9 is out of bounds"),
        (refuses, OwnError, "OwnError: not today; a plan runs the model"),
        (asks, AttributeError, "AttributeError: "),
        (turns, ValueError, "backward of Model with (float32[4, 8]) failed at "),
    ],
)
def test_a_model_that_fails_is_told_in_a_sentence_and_its_error_is_the_cause(code, kind, says):
    told = failure(code)
    assert says in str(told)
    assert __file__ in str(told)
    assert "\n" not in str(told)
    assert isinstance(failure_of(told.__cause__)[0], kind)


def test_inputs_that_a_forward_does_not_take_have_no_line_of_the_model():
    with pytest.raises(UserCodeFailed, match=r"float32\[4, 8\], 3\) failed: TypeError: "):
        zcompile.plan(Model(views), INPUT, 3, machine=ON)


def test_an_error_of_ours_stays_what_it_is():
    with pytest.raises(Unsupported, match="asks for the value"):
        zcompile.plan(Model(lambda model, x: x.sum() * x.sum().item()), INPUT, machine=ON)


def test_a_bug_of_ours_is_not_blamed_on_the_model():
    """Where the innermost line is ours, nobody's model has failed."""
    with pytest.raises(ValueError, match="is not a size"), Running("forward", "see"):
        zcompile.ir.units.parse_size(object())
    with (
        pytest.raises(UserCodeFailed, match=r"forward of Model failed at .*KeyError: 'x'; see"),
        Running("forward of Model", "see"),
    ):
        {}["x"]


def test_what_is_no_error_passes():
    with pytest.raises(KeyboardInterrupt), Running("forward", "see"):
        raise KeyboardInterrupt
    with pytest.raises(ZinfError, match="mine"), Running("forward", "see"):
        raise ZinfError("mine")


def test_a_failing_model_leaves_nothing_that_disturbs_the_next(caplog):
    with pytest.raises(UserCodeFailed):
        zcompile.plan(Model(multiplies), INPUT, machine=ON)
    assert not [r for r in caplog.records if "failed while attempting to run meta" in r.message]
    assert zcompile.plan(nn.Linear(8, 8), INPUT, machine=ON).fits


@pytest.mark.slow
def test_a_model_with_graph_breaks_can_be_planned_however_often():
    """Its own code is compiled each time, of which Dynamo would have enough after some."""

    def breaks(model, x):
        torch._dynamo.graph_break()
        return (x * 2).sum()

    with torch._dynamo.config.patch(recompile_limit=2):
        for _ in range(4):
            assert zcompile.plan(Model(breaks), INPUT, machine=ON).fits


def test_a_model_of_which_nothing_is_captured_is_told_so():
    def hidden(model, x):
        return x.sum()

    model = Model(hidden)
    model.forward = torch._dynamo.disable(model.forward)
    with pytest.raises(Unsupported, match=r"captured nothing of Model, so .* TORCH_LOGS="):
        zcompile.plan(model, INPUT, machine=ON)
