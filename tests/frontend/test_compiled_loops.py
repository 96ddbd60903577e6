"""Training loops that are compiled as a whole, or whose optimizer's step is.

Torch compiles such a loop in pieces: it breaks off where backward is called, and where a hook is.
Of tiered parameters only the model is compiled; the rest runs as it does outside, with the bits of
a loop that is not compiled.
"""

import copy
import pickle

import pytest
import torch
from pairs import assert_equal, on_disk
from sampled import sampled
from torch import nn

import zcompile
from zcompile.frontend.backend import zinf


class Deep(nn.Module):
    """Ten parameters: torch compiles a function of each for 8 of them at most."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(*[nn.Linear(8 + i, 9 + i) for i in range(5)])

    def forward(self, x):
        return self.layers(x)


OPTIMIZERS = {
    "AdamW": torch.optim.AdamW,
    "AdamW, lists": lambda params: torch.optim.AdamW(params, foreach=True),
    "AdamW, fused": lambda params: torch.optim.AdamW(params, fused=True),
    "SGD": lambda params: torch.optim.SGD(params, 0.1, momentum=0.9),
}


def inputs(step):
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(step))


def loop(model, optimizer):
    """A step of training as one writes it."""

    def step(x):
        loss = model(x).square().mean()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def pair(tmp_path, name):
    """(model, optimizer), plain and tiered."""
    plain = Deep()
    tiered = on_disk(copy.deepcopy(plain), tmp_path)
    return [(model, OPTIMIZERS[name](model.parameters())) for model in (plain, tiered)]


class Counting:
    """A backend that counts the graphs it is given; `zinf` compiles them."""

    def __init__(self):
        self.graphs = 0

    def __call__(self, gm, args):
        self.graphs += 1
        return zinf(gm, args)


@pytest.mark.parametrize("name", sampled(OPTIMIZERS, "AdamW, lists"))  # of all below
def test_a_compiled_step_of_training_has_the_bits_of_one_that_is_not(tmp_path, name):
    (plain, with_plain), (tiered, with_tiered) = pair(tmp_path, name)
    torch._dynamo.reset()
    eager, compiled = (
        loop(plain, with_plain),
        torch.compile(loop(tiered, with_tiered), backend=zinf),
    )
    for step in range(4):
        assert_equal(eager(inputs(step)), compiled(inputs(step)))
    for one, other in zip(plain.parameters(), tiered.parameters(), strict=True):
        assert_equal(one, other)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_compiled_step_of_an_optimizer_is_not_compiled(tmp_path, name):
    (plain, with_plain), (tiered, with_tiered) = pair(tmp_path, name)
    torch._dynamo.reset()
    counting = Counting()
    compiled = torch.compile(with_tiered.step, backend=counting)
    for step in range(3):
        for model in (plain, tiered):
            model(inputs(step)).square().mean().backward()
        with_plain.step()
        compiled()
    assert counting.graphs == 0
    for one, other in zip(plain.parameters(), tiered.parameters(), strict=True):
        assert_equal(one, other)


@pytest.mark.slow
def test_what_else_is_in_a_compiled_function_is_compiled(tmp_path):
    """Before and after the step, and the step of an optimizer without tiered parameters."""
    _, (tiered, optimizer) = pair(tmp_path, "SGD")
    beside = nn.Linear(8, 8)
    other = torch.optim.SGD(beside.parameters(), 0.1)
    torch._dynamo.reset()
    counting = Counting()

    def both(x):
        x = x + 1
        optimizer.step()
        x = x * 2
        other.step()
        return x - 1

    compiled = torch.compile(both, backend=counting)
    for _ in range(2):
        (tiered(inputs(0)).sum() + beside(inputs(0)).sum()).backward()
        assert torch.equal(compiled(torch.ones(2)), torch.full((2,), 3.0))
    assert counting.graphs == 4


def test_a_step_that_fails_in_a_compiled_function_leaves_the_next_as_they_are(tmp_path):
    _, (tiered, optimizer) = pair(tmp_path, "SGD")
    failing = True

    def fails(*_):
        if failing:
            raise ValueError("not now")

    optimizer.register_step_pre_hook(fails)
    torch._dynamo.reset()
    counting = Counting()
    compiled = torch.compile(optimizer.step, backend=counting)
    tiered(inputs(0)).sum().backward()
    before = tiered.layers[0].weight.detach().clone()
    with pytest.raises(ValueError, match="not now"):
        compiled()
    assert torch.compile(lambda x: x + 1, backend=counting)(torch.ones(1)) == 2
    assert counting.graphs == 1
    failing = False
    optimizer.step()
    assert not torch.equal(before, tiered.layers[0].weight.detach())
    untraced = [lambda x: x + 2, lambda x: x + 3]
    assert [function(torch.zeros(())).item() for function in untraced] == [2, 3]
    assert counting.graphs == 1


def test_after_a_step_that_failed_no_step_of_plain_parameters_makes_torch_compile(tmp_path):
    """The optimizer has other parameters by then."""
    _, (tiered, optimizer) = pair(tmp_path, "SGD")
    failing = optimizer.register_step_post_hook(lambda *_: 1 / 0)
    torch._dynamo.reset()
    counting = Counting()
    compiled = torch.compile(optimizer.step, backend=counting)
    tiered(inputs(0)).sum().backward()
    with pytest.raises(ZeroDivisionError):
        compiled()
    failing.remove()
    plain = nn.Linear(8, 8)
    optimizer.param_groups[0]["params"] = list(plain.parameters())
    plain(inputs(0)).sum().backward()
    optimizer.step()

    def innocent(x):
        return x + 1

    assert innocent(torch.zeros(())) == 1
    assert counting.graphs == 0


def test_a_closure_of_a_compiled_step(tmp_path):
    plain = Deep()
    tiered = on_disk(copy.deepcopy(plain), tmp_path)
    torch._dynamo.reset()
    for model, wrap in ((plain, lambda f: f), (tiered, lambda f: torch.compile(f, backend=zinf))):
        optimizer = torch.optim.LBFGS(model.parameters(), max_iter=2)
        forward = wrap(model)

        def closure(model=model, optimizer=optimizer, forward=forward):
            optimizer.zero_grad()
            loss = forward(inputs(0)).square().mean()
            loss.backward()
            return loss

        step = wrap(optimizer.step)
        for _ in range(2):
            step(closure)
    for one, other in zip(plain.parameters(), tiered.parameters(), strict=True):
        assert_equal(one, other)


def test_what_saves_and_tells_within_a_compiled_function_is_not_compiled(tmp_path):
    """Each of them would be some graphs otherwise."""
    _, (tiered, optimizer) = pair(tmp_path, "SGD")
    tiered(inputs(0)).sum().backward()
    optimizer.step()
    torch._dynamo.reset()
    counting = Counting()

    def ends(x):
        zcompile.save(tmp_path / "saved", tiered, optimizer)
        zcompile.load(tiered, tmp_path / "saved")
        zcompile.resume(tmp_path / "saved", tiered, optimizer)
        steps = zcompile.stats(tiered)["steps"]
        zcompile.close(tiered)
        return x, steps

    assert torch.compile(ends, backend=counting)(0) == (0, 1)
    assert counting.graphs == 0


def follow(param):
    """What a momentum encoder does to its parameters, and what a swap of weights does."""
    param.data = param.data * 0.9 + 1
    param.data.mul_(0.9)
    kept, param.data = param.data, param.data.clone()
    param.data = kept


def add_copies(param):
    for made in (copy.deepcopy(param), pickle.loads(pickle.dumps(param))):
        param.data.add_(made.detach())
    copy.copy(param).data.mul_(0.5)  # which has the same memory


@pytest.mark.parametrize("change", sampled([follow, add_copies], follow))
def test_parameters_change_where_a_loop_breaks_the_graph(change, tmp_path):
    """Torch runs the frame of such a loop in Python, and would trace what it calls one by one: a
    view of a parameter would be a copy then, of a size that is a symbol."""
    plain = nn.Linear(8, 4)
    tiered = on_disk(copy.deepcopy(plain), tmp_path)
    torch._dynamo.reset()

    def changing(model):
        def forward(x):
            for param in model.parameters():
                torch._dynamo.graph_break()
                change(param)
            return model(x)

        return forward

    compiled = torch.compile(changing(tiered), backend="zinf")
    for step in range(2):
        assert_equal(changing(plain)(inputs(step)), compiled(inputs(step)))
    for one, other in zip(plain.parameters(), tiered.parameters(), strict=True):
        assert_equal(one, other)


def test_a_compiled_function_reads_gradients_that_were_clipped(tmp_path):
    """Their factor waits for who reads them first, and is applied before the call walks."""
    (plain, _), (tiered, _) = pair(tmp_path, "SGD")
    torch._dynamo.reset()

    def norm(grad):
        return grad.norm()

    def clip(model):
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)

    compiled = torch.compile(norm, backend="zinf")
    for model, call in ((plain, norm), (tiered, compiled)):
        model(inputs(0)).square().sum().backward()
        clip(model)
        model.seen = [call(p.grad) for p in list(model.parameters())[:2]]
        for view in (lambda g: g[1], lambda g: g.t(), lambda g: g.view(-1)):
            clip(model)  # anew, for each: who reads a view has the factors of all applied
            model.seen.append(call(view(next(model.parameters()).grad)))
    assert plain.seen == tiered.seen
