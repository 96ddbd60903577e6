"""Backward passes that want gradients of some tensors only, through a compiled model and a plain
one: the same numbers, and nothing left of what was not wanted."""

import pytest
import torch
from pairs import assert_equal, mlp, on_disk

from zcompile.errors import Unsupported
from zcompile.frontend.offload import session_behind

MODES = pytest.mark.parametrize("mode", ["eager", "compiled"])


class Pair:
    """A plain model and its tiered twin, each with its own input of the same values."""

    def __init__(self, tmp_path, mode, **fields):
        torch._dynamo.reset()
        torch.manual_seed(3)
        self.plain, self.tiered = mlp(), on_disk(mlp(), tmp_path, **fields)
        self.call = (
            torch.compile(self.tiered, backend="zinf") if mode == "compiled" else self.tiered
        )
        x = torch.randn(4, 16)
        self.x = [x.clone().requires_grad_() for _ in range(2)]
        self.sides = ((self.plain, self.plain, self.x[0]), (self.tiered, self.call, self.x[1]))

    def both(self, do):
        """What `do(model, loss, input)` gives for each."""
        return [do(model, call(x).square().sum(), x) for model, call, x in self.sides]

    def assert_same(self):
        pairs = [*zip(self.plain.parameters(), self.tiered.parameters(), strict=True), self.x]
        for plain, tiered in pairs:
            if plain.grad is None:
                assert tiered.grad is None
            else:
                assert_equal(plain.grad, tiered.grad)

    def held(self):
        """Everything of the model that a dropped gradient could have been left in."""
        session = session_behind(self.tiered)
        session.drain()
        entries = sorted(entry.name for entry in session.entries())
        gradients = session.gradients
        left = dict(gradients._sums), dict(gradients._tiled), dict(gradients.returned)
        host = session.free_bytes()["host"]
        return entries, host, session.arena.used_bytes, session._backlog._now, left

    def settled(self):
        """As `held`, after whole passes: from the second on, a call begins what its follower
        fetches."""
        for _ in range(3):
            self.both(lambda model, loss, x: loss.backward())
            for model in (self.plain, self.tiered):
                model.zero_grad()
        return self.held()


@MODES
def test_gradients_of_inputs_alone_are_given_and_nothing_of_parameters_is_left(mode, tmp_path):
    pair = Pair(tmp_path, mode)
    before = pair.settled()
    for _ in range(3):
        plain, tiered = pair.both(lambda model, loss, x: torch.autograd.grad(loss, x)[0])
        assert_equal(plain, tiered)
        assert pair.held() == before
    pair.both(lambda model, loss, x: loss.backward())
    pair.assert_same()


@MODES
def test_what_was_accumulated_stays_when_gradients_of_inputs_are_asked_for(mode, tmp_path):
    pair = Pair(tmp_path, mode)
    for _ in range(2):
        pair.both(lambda model, loss, x: loss.backward())
        pair.both(lambda model, loss, x: torch.autograd.grad(loss, x))
        pair.assert_same()


@MODES
def test_gradients_of_inputs_and_then_of_all(mode, tmp_path):
    """As a penalty on the input's gradient is logged: the graph is kept and run again."""
    pair = Pair(tmp_path, mode)

    def twice(model, loss, x):
        first = torch.autograd.grad(loss, x, retain_graph=True)[0]
        loss.backward()
        return first

    for _ in range(2):
        assert_equal(*pair.both(twice))
        pair.assert_same()


@MODES
@pytest.mark.parametrize(
    "wanted",
    [
        lambda model, x: [x],
        lambda model, x: [model[0].weight],
        lambda model, x: [x, model[2].bias, model[2].weight],
    ],
    ids=["input", "a weight", "some of both"],
)
def test_backward_of_some_leaves_gives_these_and_no_others(mode, wanted, tmp_path):
    pair = Pair(tmp_path, mode)
    for _ in range(2):
        pair.both(lambda model, loss, x: loss.backward(inputs=wanted(model, x)))
        pair.assert_same()
    pair.both(lambda model, loss, x: loss.backward())
    pair.assert_same()


@MODES
def test_tiles_of_a_gradient_that_nobody_wants_are_dropped(mode, tmp_path):
    pair = Pair(tmp_path, mode, tile_bytes=512)
    before = pair.settled()
    plain, tiered = pair.both(lambda model, loss, x: torch.autograd.grad(loss, x)[0])
    torch.testing.assert_close(plain, tiered)
    assert pair.held() == before
    assert all(p.grad is None for p in pair.tiered.parameters())


@MODES
def test_a_parameter_that_is_frozen_before_backward_gets_nothing(mode, tmp_path):
    pair = Pair(tmp_path, mode)

    def freeze(model, loss, x):
        model[0].weight.requires_grad_(False)
        loss.backward()

    pair.both(freeze)
    pair.assert_same()


def test_where_gradients_rest_on_the_device_those_of_inputs_come_without_them(tmp_path):
    """A planned run makes gradients in their berths, or keeps them where they were made."""
    pair = Pair(tmp_path, "compiled", device_memory="64MiB", host_memory="16MiB")
    adams = [torch.optim.SGD(model.parameters(), lr=0.1) for model in (pair.plain, pair.tiered)]
    for _ in range(4):
        pair.both(lambda model, loss, x: loss.backward())
        homes = {p.grad.entry.home for p in pair.tiered.parameters()}
        for adam in adams:
            adam.step()
            adam.zero_grad()
    assert homes & {"device", "held"}
    before = pair.held()
    for _ in range(2):
        assert_equal(*pair.both(lambda model, loss, x: torch.autograd.grad(loss, x)[0]))
        assert pair.held() == before
        assert all(p.grad is None for p in pair.tiered.parameters())
    pair.both(lambda model, loss, x: loss.backward())
    pair.assert_same()


@pytest.mark.parametrize(
    "ask",
    [
        lambda model, loss, x: torch.autograd.grad(loss, list(model.parameters())),
        lambda model, loss, x: torch.autograd.grad(loss, [x, model[0].weight]),
    ],
    ids=["all", "one"],
)
def test_gradients_of_parameters_cannot_be_returned_by_a_compiled_model(ask, tmp_path):
    pair = Pair(tmp_path, "compiled")
    _, call, x = pair.sides[1]
    with pytest.raises(Unsupported, match=r"call loss\.backward\(\) and read \.grad"):
        ask(pair.tiered, call(x).square().sum(), x)
    assert all(p.grad is None for p in pair.tiered.parameters())
    pair.both(lambda model, loss, x: loss.backward())
    pair.assert_same()
