"""What a graph holds is counted to the byte: against a meter that knows nothing of the count."""

import gc
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from byte_meter import Meter
from e2e.models import CASES
from joint import captured
from moved import forced
from offloaded import Twins, twins
from sampled import sampled
from small_models import SMALL_MODELS, UNALIKE, small
from torch import Tensor, fx, nn
from torch.fx.experimental.proxy_tensor import make_fx

from zcompile.frontend import backend
from zcompile.ir.graph import assign_phases, is_compute, output_of, region_of
from zcompile.ir.plan import GraphPlan
from zcompile.ir.schedule import Run
from zcompile.ir.torch_compat import is_tangent
from zcompile.ir.types import MemoryProfile, Phase
from zcompile.memory.footprint import Footprint, Given, footprint
from zcompile.runtime import executor
from zcompile.runtime.live_memory import CallMemory, LiveMemory
from zcompile.runtime.meter import Gauge

aten = torch.ops.aten

NORM_BYTES = 8
"""Norms of gradients are taken on the way home, between the regions; they are scalars."""


def plainly(build: Callable[..., Any], *inputs: Tensor) -> tuple[fx.GraphModule, Footprint]:
    """The traced graph of a function, all forward, and what is said of it."""
    gm = make_fx(build, tracing_mode="fake")(*inputs)
    assign_phases(gm.graph, None)
    gm.recompile()
    return gm, footprint(gm.graph, {})


def views(x: Tensor) -> Tensor:
    a = x + 1
    b, c = a.t()[1:5].split(2)
    d = (b.exp(), a.detach().view(-1))[0]
    return d * c


def in_place(x: Tensor) -> Tensor:
    a = x + 1
    b = a.mul_(2).t().add_(1)
    return (a.sum(), b.exp())[1].sin()


def several(x: Tensor) -> Tensor:
    y, _, rstd = aten.native_layer_norm(x, [x.shape[-1]], None, None, 1e-5)
    values, _ = y.topk(2)
    return values.exp().sum() + rstd.sum()


def overlap(x: Tensor) -> Tensor:
    wide = x.new_zeros(1).expand(64)
    return (wide * 2).as_strided((5, 5), (1, 1)).clone() + x[:5, :5].narrow(0, 0, 1)


def widths(x: Tensor) -> Tensor:
    half = x.to(torch.float16)
    flags = half > 0
    return torch.where(flags, x.double(), x.to(torch.int8))


def scattered(x: Tensor) -> Tensor:
    made = aten.copy(x[1:, 2:], x[:5, :4]) + 1
    return aten.slice_scatter(x.t()[1:], x[:1] * 2, 0, 1, 2).sum() + made


def scattered_into_parts(x: Tensor) -> Tensor:
    """Into views that end before their storage does, and into one that repeats its elements."""
    inner = aten.copy(x[:4, 1:3], x[:4, :2]) + 1
    row = aten.select_scatter(x.view(-1)[3:9:2], x[0, 0], 0, 1) * 2
    return aten.slice_scatter(x[:1].expand(3, 6), x[1:2], 0, 0, 1).sum() + inner.sum() + row


@pytest.mark.parametrize(
    "build", [views, in_place, several, overlap, widths, scattered, scattered_into_parts]
)
def test_ops_of_every_kind_are_counted_as_they_take_memory(build):
    x = torch.randn(6, 6)
    gm, held = plainly(build, x)
    curve = [
        n
        for node, n in zip(held.nodes, held.curve, strict=True)
        if node.op == "call_function" and isinstance(node.target, torch._ops.OpOverload)
    ]
    seen: list[int] = []
    with Meter() as meter:
        meter.after_op = lambda: seen.append(meter.live)
        meter.on = True
        gm(x)
    assert seen == curve


@dataclass
class Region:
    """One run of a schedule, and what was counted node by node."""

    name: str
    counted: list[int]


@dataclass
class Watched:
    """What was counted of every schedule, and what the meter met.

    held    by schedule; regions: one item per run of it
    met     region -> bytes after each of its ops, in the order of the runs
    others  bytes that were held when the call began, and are not its own
    """

    meter: Meter
    phases: dict[int, Phase] = field(default_factory=dict)
    held: dict[int, Footprint] = field(default_factory=dict)
    regions: dict[int, list[Region]] = field(default_factory=dict)
    met: list[tuple[Region, list[int]]] = field(default_factory=list)
    others: int = 0


def regions_of(held: Footprint) -> list[Region]:
    """The nodes of each run, as the schedule takes them together."""
    found: list[Region] = []
    before: object = None
    for node, nbytes in zip(held.nodes, held.curve, strict=True):
        if is_compute(node):
            if region_of(node) != before:
                found.append(Region(f"region {region_of(node)}", []))
            before = region_of(node)
            if isinstance(node.target, torch._ops.OpOverload):
                found[-1].counted.append(nbytes)
        elif node.op != "placeholder":
            before = None
    return found


@contextmanager
def watched(monkeypatch: pytest.MonkeyPatch) -> Iterator[Watched]:
    """Counts every graph that is compiled inside, and meters every region that runs."""
    found = Watched(Meter())
    meter = found.meter
    kept: dict[int, Given] = {}
    saved: dict[int, set[str]] = {}
    callers: dict[int, list[int]] = {}
    running: deque[Region] = deque()
    graphs: list[tuple[fx.GraphModule, GraphPlan, Phase]] = []
    build, arrange, cut = backend.program_of, backend.arrange, backend._Graph._cut
    compute, run = executor.compute, executor.Executor.run

    def parted(self: Any, joint: fx.GraphModule, *args: Any, **kwargs: Any) -> Any:
        made = cut(self, joint, *args, **kwargs)
        held = footprint(joint.graph, self.plan.params)
        kept[id(self.plan)] = held.handed_over(n.name for n in held.nodes)
        saved[id(self.plan)] = {
            node.name
            for node, storages in held.of.items()
            if any(s.first < held.boundary <= s.last and not is_tangent(s.maker) for s in storages)
        }
        return made

    def built(gm: fx.GraphModule, plan: GraphPlan, phase: Phase, *rest: Any, **named: Any) -> Any:
        graphs.append((gm, plan, phase))
        return build(gm, plan, phase, *rest, **named)

    def arranged(*args: Any) -> Any:
        schedule = arrange(*args)
        gm, plan, phase = graphs.pop()
        given = kept.get(id(plan), {}) if phase is Phase.BACKWARD else {}
        held = found.held[schedule.serial] = footprint(gm.graph, plan.params, given)
        found.phases[schedule.serial] = phase
        results = output_of(gm.graph).args[0]
        callers[schedule.serial] = [
            i
            for i, n in enumerate(results)
            if isinstance(n, fx.Node) and n.name not in saved.get(id(plan), ())
        ]
        found.regions[schedule.serial] = regions_of(held)
        runs = sum(isinstance(x, Run) for x in schedule.instructions)
        assert len(found.regions[schedule.serial]) == runs
        return schedule

    def ran(self: Any, schedule: Any, args: list[Any], *rest: Any) -> Any:
        if schedule.phase is Phase.STEP:
            return run(self, schedule, args, *rest)
        self.in_flight.wait_down_to()  # of the call before
        held = found.held[schedule.serial]
        placeholders = [n for n in held.nodes if n.op == "placeholder"]
        for node, value in zip(placeholders, args, strict=True):
            if is_tangent(node):
                meter.adopt(value)
        del value
        own = sum(v.nbytes for v in held.values if v.maker.op == "placeholder")
        found.others = meter.live - own
        running.extend(found.regions[schedule.serial])
        meter.on, meter.least = True, NORM_BYTES  # only regions compute anything as small
        results = run(self, schedule, args, *rest)
        meter.on = False
        for position in callers[schedule.serial]:
            meter.forget(results[position])
        return results

    def computed(instruction: Any, values: list[Any], targets: Sequence[Tensor] = ()) -> None:
        if not meter.on:
            compute(instruction, values, targets)
            return
        met: list[int] = []
        found.met.append((running.popleft(), met))
        meter.least, meter.after_op = 0, lambda: met.append(meter.live - found.others)
        compute(instruction, values, targets)
        meter.least, meter.after_op = NORM_BYTES, lambda: None

    monkeypatch.setattr(backend, "program_of", built)
    monkeypatch.setattr(backend, "arrange", arranged)
    monkeypatch.setattr(backend._Graph, "_cut", parted)
    monkeypatch.setattr(executor.Executor, "run", ran)
    monkeypatch.setattr(executor, "compute", computed)
    with meter:
        yield found


class Lost(nn.Module):
    """A model with its loss, which is all that it returns."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, *inputs: Tensor, **named: Tensor) -> Tensor:
        out = self.inner(*inputs, **named)
        if hasattr(out, "loss"):
            return out.loss
        out = out if isinstance(out, Tensor) else out[0]
        return out.float().square().mean()


def walked_twice(pair: Twins, found: Watched, *inputs: Any, **named: Any) -> None:
    """Two micro-batches: the gradients of the second are added to those of the first."""
    for _ in range(2):
        loss = pair.call(*inputs, **named)
        (loss * 1).backward()  # so that nobody holds the gradient that backward is called with
        del loss
    pair.session.in_flight.wait_down_to()
    gc.collect()  # a model's code may make cycles
    assert found.meter.live == 0, "what is held is let go of"
    assert {s for s in found.phases.values()} >= {Phase.FORWARD, Phase.BACKWARD}
    assert len(found.met) >= sum(map(len, found.regions.values()))
    for number, (region, met) in enumerate(found.met):
        assert met == region.counted, f"{region.name}, the {number}th that ran"


@pytest.mark.parametrize("name", sampled(SMALL_MODELS, *UNALIKE))
def test_a_small_model_holds_what_is_counted(name, monkeypatch):
    model, inputs = small(name)
    with watched(monkeypatch) as found:
        walked_twice(twins(Lost(model)), found, *inputs)


class ScatteredInto(nn.Module):
    """Some rows of a weight are replaced, and a column of a part of it."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(64, 64))

    def forward(self, x: Tensor) -> Tensor:
        rows = torch.slice_scatter(self.weight, x, 0, 0, 8)
        columns = torch.select_scatter(self.weight.t()[4:20], x[0, :16], 1, 3)
        return rows.square().sum() + columns.cos().sum()


def test_values_scattered_into_a_weight_take_the_bytes_of_that_weight_alone(monkeypatch):
    pair, x = twins(ScatteredInto(), device_memory="1MiB"), torch.randn(8, 64)
    with watched(monkeypatch) as found:
        walked_twice(pair, found, x)
    for _ in range(2):
        pair.plain(x).backward()
    assert pair.same()


class RowsReplaced(torch.autograd.Function):
    """A sine whose backward multiplies by `x` with other rows in it, and not by the cosine."""

    @staticmethod
    def forward(context, x: Tensor) -> Tensor:
        context.save_for_backward(x)
        return x.sin()

    @staticmethod
    def backward(context, gradient: Tensor) -> Tensor:
        (x,) = context.saved_tensors
        return gradient * torch.slice_scatter(x, gradient[:2], 0, 0, 2)


class ScatteredIntoSaved(nn.Module):
    """Values are scattered into one that forward saves."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        return RowsReplaced.apply(self.inner(x)).square().sum()


def test_values_scattered_into_one_that_came_back_take_its_bytes_alone(monkeypatch):
    x = torch.randn(8, 64)
    with forced("host") as decided, watched(monkeypatch) as found:
        pair = twins(ScatteredIntoSaved(), device_memory="1MiB")
        walked_twice(pair, found, x)
    assert decided == [(0, 2)]
    for _ in range(2):
        pair.plain(x).backward()
    assert pair.same()


class WithMore(nn.Module):
    """A model with its loss, that returns more: its backward alone reads a value that is saved."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(16, 16), nn.Linear(16, 64)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        logits = self.head(self.body(x).tanh())
        return logits.logsumexp(-1).mean(), (logits * 2).sin()


def test_gradients_of_results_that_are_not_differentiated_take_no_memory(monkeypatch):
    pair = twins(WithMore())
    with watched(monkeypatch) as found:
        walked_twice(replace(pair, call=lambda x: pair.call(x)[0]), found, torch.randn(32, 16))
    whole, walked = (s for s, phase in found.phases.items() if phase is Phase.BACKWARD)
    tangents = [
        [v.nbytes for v in found.held[backward].values if is_tangent(v.maker)]
        for backward in (whole, walked)
    ]
    assert tangents == [[4, 32 * 64 * 4], [4]], "of the loss alone"


@pytest.mark.parametrize("keeps", [True, False], ids=["kept", "handed over"])
def test_a_gradient_that_backward_is_called_with_counts_while_torch_keeps_it(keeps, monkeypatch):
    monkeypatch.setattr("zcompile.memory.footprint.keeps_tangents", lambda: keeps)
    joint = captured("mlp")
    held = footprint(joint.graph, joint.plan.params)
    (tangent,) = (s for s in held.values if is_tangent(s.maker))
    assert (tangent.last == len(held.nodes) - 1) is keeps


def test_what_is_lent_to_a_call_counts_until_the_call_has_ended():
    live, value, first = LiveMemory(Gauge()), torch.ones(4), frozenset({0})
    profile = MemoryProfile(registers=first, given=first, lent=first)
    call = CallMemory(live, profile, (), [value])
    assert live.nbytes == value.nbytes
    call.lets_go(0)
    assert live.nbytes == value.nbytes
    call.end([None])
    assert live.nbytes == 0


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_a_model_from_transformers_holds_what_is_counted(name, monkeypatch):
    torch.manual_seed(0)
    model = Lost(CASES[name].build().train())
    inputs = CASES[name].inputs(torch.Generator().manual_seed(1))
    with watched(monkeypatch) as found:
        walked_twice(twins(model), found, **inputs)
