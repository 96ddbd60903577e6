"""Joint graphs of small models, caught at the real door, with everything needed to run them.

Dynamo and AOTAutograd trace an offloaded model as they always do; what they hand to the
partitioner is copied before the first pass sees it. A copy can be rewritten and interpreted again
and again: the zinf ops have meanings, and `release` poisons.
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from small_models import small
from torch import Tensor, fx, nn
from torch._dynamo.exc import BackendCompilerFailed

import zcompile
from zcompile.errors import BudgetExceeded
from zcompile.frontend import backend
from zcompile.frontend.offload import session_behind
from zcompile.ir import ops, printer
from zcompile.ir.eager_formulas import FORMULAS, INSTEAD, LEFT_WHOLE
from zcompile.ir.graph import assign_phases, output_of
from zcompile.ir.plan import GraphPlan
from zcompile.ir.schedule import Schedule
from zcompile.ir.torch_compat import (
    aot_backend,
    boxed,
    gradient_of,
    handle_input,
    hint,
    without_python_kernels,
)
from zcompile.ir.types import Phase
from zcompile.ir.units import MiB
from zcompile.memory.footprint import footprint
from zcompile.passes.choose_tiles import NOTHING_SPLITS
from zcompile.passes.instrument import Watcher
from zcompile.passes.pipeline import SILENT, Silence, Watch, pipeline, run
from zcompile.runtime.eager import streaming
from zcompile.runtime.session import Session

DEVICE_BYTES = 64 * MiB


@dataclass
class Joint:
    """A graph as captured, phases assigned, and the values its placeholders had.

    names  position of an input -> the parameter it is, for those that are tiered
    """

    gm: fx.GraphModule
    plan: GraphPlan
    values: list[Any]
    session: Session
    names: dict[int, str]
    model: nn.Module

    @property
    def graph(self) -> fx.Graph:
        return self.gm.graph

    def copy(self, budget_bytes: int | None = None) -> "Joint":
        """The same graph anew, to be rewritten; under another budget, if one is given."""
        plan = replace(self.plan, budget_bytes=budget_bytes or self.plan.budget_bytes)
        return replace(self, gm=copied(self.gm), plan=plan)

    def through(self, *passes: Any, watch: Watch = SILENT) -> "Joint":
        """A copy after these passes."""
        made = self.copy()
        made.plan = run(made.gm, made.plan, passes, watch=watch)
        return made

    @property
    def text(self) -> str:
        """The graph as a dump shows it, with the bytes live at each line."""
        live = footprint(self.graph, self.plan.params, slots=True).curve
        return printer.text(self.graph, live)

    def through_each(self, *passes: Any) -> Iterator[tuple[str, dict[str, Any]]]:
        """The name of each pass, and `results` of a copy of the graph right after it."""
        found: list[tuple[str, dict[str, Any]]] = []
        made = self.copy()

        class Interpreting(Silence):
            def after(self, step: int, name: str, graph: fx.Graph, plan: GraphPlan) -> None:
                made.plan = plan
                found.append((name, results(made)))

        run(made.gm, made.plan, passes, watch=Interpreting())
        assert [name for name, _ in found] == [p.name for p in passes]
        return iter(found)


@dataclass
class Catcher(backend._Graph):
    """Compiles as the backend does, and keeps the graphs and schedules on the way."""

    joints: list[fx.GraphModule] = field(default_factory=list)
    plans: list[GraphPlan] = field(default_factory=list)
    calls: list[list[Any]] = field(default_factory=list)
    schedules: list[Schedule] = field(default_factory=list)

    def _passes(self, gm: fx.GraphModule, forward_outputs: int | None) -> GraphPlan:
        joint = copied(gm)
        assign_phases(joint.graph, forward_outputs)
        self.joints.append(joint)
        plan = super()._passes(gm, forward_outputs)
        self.plans.append(GraphPlan(plan.params, plan.budget_bytes))
        return plan

    def _executable(self, gm: fx.GraphModule, phase: Phase, *rest: Any) -> Callable[..., Any]:
        call = super()._executable(gm, phase, *rest)

        def kept(args: list[Any]) -> list[Any]:
            if phase is Phase.FORWARD:
                self.calls.append([a.clone() if plain(a) else a for a in args])
            return call(args)

        return boxed(kept)


def plain(value: object) -> bool:
    """A tensor that is not a handle."""
    return isinstance(value, Tensor) and not (value.dim() == 0 and value.dtype is torch.int64)


def copied(gm: fx.GraphModule) -> fx.GraphModule:
    """Another module over a copy of the graph; the copied nodes keep what is known of them."""
    graph = fx.Graph()
    results, old = graph.graph_copy(gm.graph, {}, return_output_node=True)
    graph.output(results).meta = dict(old.meta)
    return fx.GraphModule(gm, graph)


def catch(model: nn.Module, *inputs: Any, grad: bool = True, **config: Any) -> Joint:
    """The first graph of `model(*inputs)`; of training, or of inference if `grad` is False."""
    catchers: list[tuple[Catcher, list[Any]]] = []

    def door(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        specs, session = backend.describe(example_inputs)
        assert session is not None, "offload the model"
        catcher = Catcher(specs, lambda: session, session.config, Watcher("caught"))
        catchers.append((catcher, list(example_inputs)))
        made = aot_backend(
            catcher.forward, catcher.backward, catcher.inference, catcher.partition, FORMULAS
        )
        with without_python_kernels(LEFT_WHOLE, INSTEAD):
            return made(gm, list(example_inputs))

    if not any(
        isinstance(p, zcompile.runtime.eager.tensor.TieredTensor) for p in model.parameters()
    ):
        zcompile.offload(
            model,
            **{
                "device": "cpu",
                "device_memory": DEVICE_BYTES,
                "host_memory": DEVICE_BYTES,
                **config,
            },
        )
    torch._dynamo.reset()
    with torch.set_grad_enabled(grad):
        torch.compile(model, backend=door)(*inputs)
    ((catcher, examples), *_) = catchers
    (joint, *_), (plan, *_), (call, *_) = catcher.joints, catcher.plans, catcher.calls
    names = {i: e.entry.name for i, e in enumerate(examples) if i in catcher.specs}
    values = [*call, *tangents(joint, len(call))]
    return Joint(joint, plan, values, session_behind(model), names, model)


def tangents(gm: fx.GraphModule, after: int) -> list[Tensor]:
    """Gradients to start backward from, as many as the graph has placeholders left."""
    source = torch.Generator().manual_seed(7)
    made = []
    for node in gm.graph.find_nodes(op="placeholder")[after:]:
        value = node.meta["val"]
        size, stride = ([hint(n) for n in given] for given in (value.size(), value.stride()))
        laid_out = torch.empty_strided(size, stride, dtype=value.dtype)
        made.append(laid_out.copy_(torch.randn(size, generator=source)))
    return made


def results(joint: Joint, seed: int = 3) -> dict[str, Any]:
    """What one interpretation gives: outputs, gradients returned or stored, mutated inputs."""
    stored: dict[str, Tensor] = {}
    tiles: dict[str, list[tuple[int, Tensor]]] = {}

    def keep(entry: Any, grad: Tensor, offset: int | None = None) -> None:
        if offset is not None:
            tiles.setdefault(entry.name, []).append((offset, grad.clone()))
            return
        assert entry.name not in stored, f"the gradient of {entry.name} came twice"
        stored[entry.name] = grad.clone(memory_format=torch.contiguous_format)

    values = [v.clone() if plain(v) else v for v in joint.values]
    before, joint.session.take_gradient = joint.session.take_gradient, keep
    torch.manual_seed(seed)
    try:
        with torch.no_grad():
            out = fx.Interpreter(joint.gm).run(*values)
    finally:
        joint.session.take_gradient = before
    for name, parts in tiles.items():
        together = put_together(joint, name, parts)
        stored[name] = together if name not in stored else together + stored[name]
    output = output_of(joint.graph)
    nodes = output.args[0]
    descs = output.meta.get("desc") or [None] * len(nodes)
    found: dict[str, Any] = {f"grad of {name}": grad for name, grad in stored.items()}
    for position, (node, desc, value) in enumerate(zip(nodes, descs, out, strict=True)):
        name = joint.names.get(gradient_of(desc))  # type: ignore[arg-type]
        if isinstance(node, fx.Node) and node.target in ops.SINKS:
            assert f"grad of {name}" in found
        else:
            key = f"grad of {name}" if name else f"output {position}"
            value = value.clone() if plain(value) else value
            found[key] = found[key] + value if key in found else value
    for node, value in zip(joint.graph.find_nodes(op="placeholder"), values, strict=True):
        if plain(value) and handle_input(node) is None:
            found[f"input {node.name}"] = value
    return found


def put_together(joint: Joint, name: str, tiles: Sequence[tuple[int, Tensor]]) -> Tensor:
    """A gradient of its tiles: contribution after contribution, each of them whole."""
    (spec,) = {s for s in joint.plan.params.values() if s.name == name}
    came: set[int] = set()
    total, left = torch.zeros(spec.layout.numel, dtype=tiles[0][1].dtype), spec.layout.numel
    for offset, tile in tiles:
        assert offset not in came, f"a tile of {name} came twice"
        assert tile.is_contiguous()
        total[offset : offset + tile.numel()] += tile.reshape(-1)
        came.add(offset)
        left -= tile.numel()
        if not left:
            came, left = set(), spec.layout.numel
    assert not came, f"only {len(came)} tiles of {name} came"
    return total.view(spec.layout.size)


def assert_same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    """Bit by bit, and nothing is missing."""
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        if isinstance(value, Tensor):
            assert torch.equal(found[key], value), f"{key} changed"
        else:
            assert found[key] == value, f"{key} changed"


@contextmanager
def schedules_of() -> Any:
    """Every schedule that the backend makes inside, in order."""
    made: list[Schedule] = []
    original = backend.verify_schedule

    def keep(schedule: Schedule) -> None:
        made.append(schedule)
        original(schedule)

    backend.verify_schedule = keep
    try:
        yield made
    finally:
        backend.verify_schedule = original


@contextmanager
def steps_of() -> Any:
    """Every schedule of an optimizer's step, or of clipping, that is lowered inside, in order."""
    made: list[Schedule] = []
    lowered = streaming.lower_step

    def keep(*args: Any, **kwargs: Any) -> Schedule:
        made.append(lowered(*args, **kwargs))
        return made[-1]

    streaming.lower_step = keep
    try:
        yield made
    finally:
        streaming.lower_step = lowered


def trained_schedules(model: nn.Module, inputs: Sequence[Any], grad: bool = True) -> list[Schedule]:
    """The schedules of one step of an offloaded model, clipped, by AdamW; if not `grad`, of one
    evaluation."""
    torch._dynamo.reset()
    with schedules_of() as graphs, steps_of() as steps, torch.set_grad_enabled(grad):
        out = torch.compile(model, backend="zinf")(*inputs)
        if grad:
            (out if isinstance(out, Tensor) else out[0]).square().mean().backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            torch.optim.AdamW(model.parameters(), fused=True).step()
    model.zero_grad()
    return [*graphs, *steps]


def least_budget(joint: Joint) -> int:
    """The smallest device budget under which nothing is cut, neither weights, tokens nor the batch,
    in bytes."""
    tiles = ("choose-tiles", "tile-tokens", "slice-batch", "tile-matmuls")
    passes = [p for p in pipeline(zcompile.Config(device="cpu")) if p.name not in tiles]
    try:
        joint.copy(budget_bytes=1).through(*passes)
    except BudgetExceeded as error:
        return error.needed_bytes
    raise AssertionError("the graph needs no bytes")


def refused_after_trials(attempt: Callable[[int], object], budget: int) -> BudgetExceeded:
    """The refusal of a budget that was searched for in vain, which names one that does.

    Below what nothing can split, a budget is refused at once, with that bound: it is tried next.

    attempt  budget in bytes -> raises BudgetExceeded, or torch's error around it
    """
    while True:
        try:
            attempt(budget)
        except (BudgetExceeded, BackendCompilerFailed) as caught:
            inner = getattr(caught, "inner_exception", caught)
            assert isinstance(inner, BudgetExceeded)
            if inner.where != NOTHING_SPLITS:
                return inner
            assert inner.needed_bytes > budget
            budget = inner.needed_bytes
        else:
            raise AssertionError(f"{budget} bytes are enough")


def held_bytes(joint: Joint) -> int:
    """What the graph holds beside the arena where it holds most, no weight being cut."""
    roomy = joint.copy(budget_bytes=2**40).through(*pipeline(zcompile.Config(device="cpu")))
    return roomy.plan.beside.nbytes


@functools.cache
def captured(name: str) -> Joint:
    """The joint graph of a model of SMALL_MODELS, traced once; rewrite copies of it."""
    model, inputs = small(name)
    return catch(model, *inputs)
