"""The door: how the backend is found, what it refuses and with which words."""

import importlib.metadata

import pytest
import torch
from joint import refused_after_trials
from offloaded import SMALL, Twins, twins
from small_models import mlp
from torch import library, nn

import zcompile
from zcompile.errors import (
    BudgetExceeded,
    ConfigInvalid,
    UnknownOption,
    Unsupported,
    ZinfError,
    more_device_memory,
)
from zcompile.frontend import backend
from zcompile.frontend.offload import session_behind
from zcompile.ir.units import Bytes
from zcompile.runtime.eager import tensor

ROWS = torch.ones(2, 8)


@pytest.fixture(autouse=True)
def _forget():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def offloaded(model: nn.Module | None = None, **config: object) -> nn.Module:
    return zcompile.offload(model or mlp(), **{**SMALL, **config})


def refusal(model: object, *inputs: object, **compile: object) -> ZinfError:
    """The error that Dynamo's own wraps."""
    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed) as caught:
        torch.compile(model, backend="zinf", **compile)(*inputs)
    found = caught.value.inner_exception
    assert str(found) in str(caught.value), "the user sees our sentence"
    return found


def test_the_backend_is_found_by_its_name():
    (entry,) = importlib.metadata.entry_points(group="torch_dynamo_backends", name="zinf")
    assert entry.load() is backend.zinf
    assert "zinf" in torch._dynamo.list_backends(exclude_tags=())
    model = offloaded()
    torch.compile(model, backend="zinf")(ROWS)
    assert zcompile.stats(model)["graphs"] == 1


def test_torch_writes_no_graph_down_that_nobody_reads(monkeypatch):
    """As text, which takes it longer than a pass of ours."""
    written = []
    monkeypatch.setattr(
        torch.fx.GraphModule, "print_readable", lambda *_, **__: written.append(1) or ""
    )
    torch.compile(offloaded(), backend="zinf")(ROWS).sum().backward()
    assert not written


def test_a_module_that_compiles_itself_finds_it_too():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = mlp()

        def forward(self, x):
            return self.inner(x)

    model = offloaded(Net())
    model.compile(backend="zinf")
    model(ROWS)
    assert zcompile.stats(model)["graphs"] == 1


def test_an_unknown_option_names_the_nearest():
    error = refusal(offloaded(), ROWS, options={"max_laed": 3})
    assert isinstance(error, UnknownOption)
    assert "did you mean 'max_lead'?" in str(error)


def test_an_option_that_belongs_to_offload_says_so():
    error = refusal(offloaded(), ROWS, options={"device_memory": "1MiB"})
    assert isinstance(error, ConfigInvalid)
    assert "belongs to zcompile.offload()" in str(error)


def test_a_mode_is_refused():
    error = refusal(offloaded(), ROWS, mode="reduce-overhead")
    assert str(error) == "mode='reduce-overhead' means nothing to backend='zinf'; leave it out"


def test_an_option_reaches_the_passes():
    model = offloaded()
    compiled = torch.compile(model, backend="zinf", options={"max_lead": 0})
    compiled(ROWS)
    in_place = zcompile.stats(model)["planned_peak"]["device"]
    other = offloaded()
    torch.compile(other, backend="zinf")(ROWS)
    assert in_place < zcompile.stats(other)["planned_peak"]["device"]


def test_a_model_that_was_not_offloaded_compiles_and_runs():
    model, plain = mlp(), mlp()
    torch.compile(model, backend="zinf")(ROWS).sum().backward()
    plain(ROWS).sum().backward()
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(p.grad, q.grad)


@library.custom_op("zcompile_tests::no_shape", mutates_args=())
def no_shape(x: torch.Tensor) -> torch.Tensor:
    """Works, but its result is not known without its operand: it cannot be traced."""
    return x.clone()


@library.custom_op("zcompile_tests::odd", mutates_args=())
def odd(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Its backward cannot be traced."""
    return x.clone()


odd.register_fake(lambda x, weight: torch.empty_like(x))
odd.register_autograd(
    lambda ctx, grad: (no_shape(ctx.weight) if grad.shape[0] > 2 else no_shape(grad), None),
    setup_context=lambda ctx, inputs, output: setattr(ctx, "weight", inputs[1]),
)


class Odd(nn.Linear):
    def forward(self, x):
        return odd(x, self.weight)


def with_odd():
    return offloaded(nn.Sequential(nn.Linear(8, 8), Odd(8, 8), nn.Linear(8, 8)))


@pytest.mark.filterwarnings("ignore:Error detected in GeneratedBackward")
@pytest.mark.parametrize("rows", [2, 4], ids=["values", "a parameter"])
def test_a_graph_that_torch_cannot_trace_says_so_and_names_a_way_round(rows):
    found = refusal(with_odd(), torch.ones(rows, 8))
    assert isinstance(found, Unsupported)
    assert "torch failed to trace graph0, before zcompile had a part in it: " in str(found)
    assert "RuntimeError: There was no fake impl registered" in str(found)
    assert "torch.compiler.disable(module.forward)" in str(found)


def test_the_way_round_that_is_named_works():
    model = with_odd()
    model[1].forward = torch.compiler.disable(model[1].forward)
    torch.compile(model, backend="zinf")(ROWS).sum().backward()
    assert model[0].weight.grad is not None


@pytest.mark.parametrize("kind", [TypeError, KeyError])
def test_a_fault_of_our_own_is_not_said_to_be_torchs(monkeypatch, kind):
    """Of a KeyError torch makes an error of its own."""
    fault, stock = kind("a fault of ours"), backend.aot_backend

    def gather(*args):
        raise fault

    def aot_backend(*ours):
        monkeypatch.setattr(tensor.ops, "gather", gather)  # Dynamo had its turn
        return stock(*ours)

    monkeypatch.setattr(backend, "aot_backend", aot_backend)
    found = refusal(offloaded(), ROWS)
    assert fault in (found, found.__cause__)
    assert not isinstance(found, ZinfError)


def test_two_models_in_one_graph_are_refused():
    one, other = offloaded(), offloaded()
    error = refusal(lambda x: one(x) + other(x), ROWS)
    assert isinstance(error, Unsupported)
    assert "parameters of several offloaded models" in str(error)
    assert "compile each model by itself" in str(error)


def test_two_models_compiled_each_by_itself_do_not_notice_each_other():
    one, other = twins(mlp()), twins(nn.Sequential(nn.Linear(8, 8), nn.Tanh()))
    for _ in range(2):
        other.call(one.call(ROWS)).sum().backward()
        other.plain(one.plain(ROWS)).sum().backward()
        assert one.same()
        assert other.same()


@pytest.mark.parametrize("phase", ["forward", "backward"])
def test_a_budget_too_small_names_the_parameter_and_the_bytes_that_do(phase):
    """Too small even for one row of a weight, which is the smallest tile of it."""

    class Net(nn.Module):
        """Forward reads two parameters together, or each phase one at a time."""

        def __init__(self):
            super().__init__()
            self.one = nn.Linear(1024, 8, bias=phase == "forward")

        def forward(self, x):
            return self.one(x)

    rows = torch.ones(2, 1024, requires_grad=True)

    def attempt(budget):
        torch._dynamo.reset()
        torch.compile(offloaded(Net(), device_memory=Bytes(budget)), backend="zinf")(rows)

    error = refused_after_trials(attempt, 2048)
    assert "one.weight" in str(error)
    assert more_device_memory(error.needed_bytes) in str(error)
    torch._dynamo.reset()
    enough = offloaded(Net(), device_memory=Bytes(error.needed_bytes))
    torch.compile(enough, backend="zinf")(rows).sum().backward()
    assert torch.equal(enough.one.weight.grad.cpu(), torch.full((8, 1024), 2.0))
    torch._dynamo.reset()
    assert isinstance(
        refusal(offloaded(Net(), device_memory=Bytes(error.needed_bytes - 1)), rows), BudgetExceeded
    )


def test_the_gradient_of_a_tiered_parameter_cannot_be_asked_for_by_itself():
    model = offloaded()
    loss = torch.compile(model, backend="zinf")(ROWS).sum()
    with pytest.raises(Unsupported, match=r"torch\.autograd\.grad.*call loss\.backward\(\)"):
        torch.autograd.grad(loss, list(model.parameters()))


def test_a_parameter_cannot_be_written_inside_one_graph():
    class Writes(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(8))

        def forward(self, x):
            with torch.no_grad():
                self.weight.mul_(2)
            return x * self.weight

    sentence = "writes to a tiered parameter inside a compiled function; move the write outside"
    with pytest.raises(torch._dynamo.exc.Unsupported, match=sentence):
        torch.compile(offloaded(Writes()), backend="zinf", fullgraph=True)(ROWS)
    # Where a graph may break, the write happens between two graphs and is as in eager.
    pair = twins(Writes())
    for _ in range(3):
        assert pair.train(ROWS)


FAILS = [False]
"""Whether the op `zinftest::fails` raises where it runs."""


@library.custom_op("zinftest::fails", mutates_args=())
def op(x: torch.Tensor) -> torch.Tensor:
    if FAILS[0]:
        raise RuntimeError("the op fails")
    return x.clone()


op.register_fake(torch.empty_like)
op.register_autograd(lambda ctx, grad: op(grad))


class Failing(nn.Module):
    """Two layers with the op between them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.one, self.two = mlp(), mlp()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.two(op(self.one(x)))


def step(pair: Twins, where: str) -> None:
    FAILS[0] = where == "forward"
    loss = pair.call(ROWS).square().mean()
    FAILS[0] = True
    loss.backward()


def fail(pair: Twins, where: str) -> None:
    """One step of the offloaded model that fails in forward or in backward; the arena is empty."""
    with pytest.raises(RuntimeError, match="the op fails"):
        step(pair, where)
    FAILS[0] = False
    assert pair.session.arena.used_bytes == 0
    pair.model.zero_grad()


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_an_error_inside_a_region_leaves_the_arena_empty_and_the_next_step_works(where):
    pair = twins(Failing())
    for _ in range(2):
        fail(pair, where)
        pair.plain.zero_grad()
        assert pair.train(ROWS)


def test_gradients_of_a_backward_that_failed_are_not_in_those_of_the_next():
    pair = twins(Failing())
    for where in ("forward", "backward", "forward", "backward"):
        fail(pair, where)
    assert pair.train(ROWS)


def test_a_parameter_written_between_forward_and_backward_is_noticed():
    """As in eager: what backward would compute with is not what forward computed with."""
    pair = twins(mlp())
    for model, parts in ((pair.plain, pair.plain), (pair.call, pair.model)):
        loss = model(ROWS).square().mean()
        with torch.no_grad():
            parts[2].weight.mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


def test_what_is_measured_stays_within_what_was_planned():
    pair = twins(mlp(32))
    for _ in range(3):
        assert pair.train(torch.randn(4, 32))
    stats = zcompile.stats(pair.model)
    assert 0 < stats["peak"]["device"] <= stats["planned_peak"]["device"]
    assert session_behind(pair.model) is pair.session


def test_a_result_that_is_a_parameter_is_that_parameter():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(8))

        def forward(self, x):
            return x * self.weight, self.weight

    model = offloaded(Net())
    result, weight = torch.compile(model, backend="zinf")(ROWS)
    assert weight is model.weight
    (result.sum() + weight.sum()).backward()
    assert model.weight.grad.tolist() == [3.0] * 8
