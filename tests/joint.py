"""Joint graphs of small models, caught at the real door, with everything needed to run them.

Dynamo and AOTAutograd trace an offloaded model as they always do; what they hand to the
partitioner is copied before the first pass sees it. A copy can be rewritten and interpreted again
and again: the zinf ops have meanings, and `release` poisons.
"""

import functools
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, fx, nn

import zcompile
from zcompile import backend, ops
from zcompile.dump import Watcher
from zcompile.graph import assign_phases, output_of
from zcompile.offloading import session_behind
from zcompile.pipeline import pipeline, run
from zcompile.plan import Plan
from zcompile.runtime.session import Session
from zcompile.schedule import Schedule
from zcompile.specs import Phase
from zcompile.torch_private import aot_backend, boxed, gradient_of, handle_input
from zcompile.units import MiB

DEVICE_BYTES = 64 * MiB


@dataclass
class Joint:
    """A graph as captured, phases assigned, and the values its placeholders had.

    names  position of an input -> the parameter it is, for those that are tiered
    """

    gm: fx.GraphModule
    plan: Plan
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

    def through(self, *passes: Any) -> "Joint":
        """A copy after these passes."""
        made = self.copy()
        made.plan = run(made.gm, made.plan, passes)
        return made


@dataclass
class Catcher(backend._Graph):
    """Compiles as the backend does, and keeps the graphs and schedules on the way."""

    joints: list[fx.GraphModule] = field(default_factory=list)
    plans: list[Plan] = field(default_factory=list)
    calls: list[list[Any]] = field(default_factory=list)
    schedules: list[Schedule] = field(default_factory=list)

    def _passes(self, gm: fx.GraphModule, forward_outputs: int | None) -> Plan:
        joint = copied(gm)
        assign_phases(joint.graph, forward_outputs)
        self.joints.append(joint)
        plan = super()._passes(gm, forward_outputs)
        self.plans.append(Plan(plan.params, plan.budget_bytes))
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
        catcher = Catcher(specs, session, session.config, Watcher("caught"))
        catchers.append((catcher, list(example_inputs)))
        made = aot_backend(catcher.forward, catcher.backward, catcher.inference, catcher.partition)
        return made(gm, list(example_inputs))

    if not any(isinstance(p, zcompile.tiered.TieredTensor) for p in model.parameters()):
        zcompile.offload(model, **{"device": "cpu", "device_memory": DEVICE_BYTES,
                                   "host_memory": DEVICE_BYTES, **config})  # fmt: skip
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
        size = [int(n) for n in value.size()]
        made.append(torch.randn(size, generator=source).to(value.dtype))
    return made


def results(joint: Joint, seed: int = 3) -> dict[str, Any]:
    """What one interpretation gives: outputs, gradients returned or stored, mutated inputs."""
    stored: dict[str, Tensor] = {}

    def keep(entry: Any, grad: Tensor, after: object = None) -> None:
        assert entry.name not in stored, f"the gradient of {entry.name} came twice"
        stored[entry.name] = grad.clone(memory_format=torch.contiguous_format)

    values = [v.clone() if plain(v) else v for v in joint.values]
    before, joint.session.on_gradient = joint.session.on_gradient, keep
    torch.manual_seed(seed)
    try:
        with torch.no_grad():
            out = fx.Interpreter(joint.gm).run(*values)
    finally:
        joint.session.on_gradient = before
    output = output_of(joint.graph)
    nodes = output.args[0]
    descs = output.meta.get("desc") or [None] * len(nodes)
    found: dict[str, Any] = {f"grad of {name}": grad for name, grad in stored.items()}
    for position, (node, desc, value) in enumerate(zip(nodes, descs, out, strict=True)):
        name = joint.names.get(gradient_of(desc))  # type: ignore[arg-type]
        if isinstance(node, fx.Node) and node.target is ops.reduce_grad:
            assert f"grad of {name}" in found
        else:
            key = f"grad of {name}" if name else f"output {position}"
            found[key] = value.clone() if plain(value) else value
    for node, value in zip(joint.graph.find_nodes(op="placeholder"), values, strict=True):
        if plain(value) and handle_input(node) is None:
            found[f"input {node.name}"] = value
    return found


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


def mlp(width: int = 8) -> nn.Module:
    """Two layers: the model of the golden graphs."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(width, 4 * width), nn.ReLU(), nn.Linear(4 * width, width))


class Block(nn.Module):
    """A transformer block."""

    def __init__(self, width: int = 16, heads: int = 2) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = (
            part.view(batch, length, self.heads, -1).transpose(1, 2)
            for part in self.qkv(self.norm1(x)).chunk(3, dim=-1)
        )
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(nn.functional.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    """Embedding, blocks, a head that is the embedding again."""

    def __init__(self, layers: int = 2, width: int = 16, vocabulary: int = 32) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class Tied(nn.Module):
    """One weight, read as a table and as a matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(12, 8)
        self.head = nn.Linear(8, 12, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(torch.tanh(self.embed(ids)))


class Twice(nn.Module):
    """A module called twice, with another between."""

    def __init__(self) -> None:
        super().__init__()
        self.shared, self.between = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.shared(torch.relu(self.between(torch.relu(self.shared(x)))))


class TwoPlaces(nn.Module):
    """A parameter read by two ops of different kinds, far apart."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.randn(8))
        self.inner = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x * self.scale) + self.scale.exp()


class OneView(nn.Module):
    """A view of a parameter, made once and read in two places."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(2, 8, 8))
        self.inner = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        first, second = self.weight.transpose(1, 2).unbind(0)
        return self.inner(torch.relu(x @ first)) @ first @ second


class ReturnsView(nn.Module):
    """A result that is a view of a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 4))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x @ self.weight, self.weight.t()


class Autocast(nn.Module):
    """Two layers that compute in bfloat16."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = mlp()

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return self.inner(x)


def convolution() -> nn.Module:
    return nn.Sequential(nn.Conv2d(2, 4, 3, padding=1), nn.ReLU(), nn.Flatten(),
                         nn.Linear(4 * 36, 5))  # fmt: skip


def batch_norm() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 3))


def dropout() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.3), nn.ReLU(), nn.Linear(16, 8),
                         nn.Dropout(0.2), nn.Linear(8, 4))  # fmt: skip


def _rows() -> tuple[Tensor, ...]:
    return (torch.randn(4, 8),)


SMALL_MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], tuple[Any, ...]]]] = {
    "mlp": (mlp, _rows),
    "transformer block": (Block, lambda: (torch.randn(2, 5, 16),)),
    "gpt": (GPT, lambda: (torch.randint(0, 32, (2, 6)),)),
    "tied embeddings": (Tied, lambda: (torch.randint(0, 12, (3, 5)),)),
    "convolution": (convolution, lambda: (torch.randn(2, 2, 6, 6),)),
    "dropout": (dropout, _rows),
    "module called twice": (Twice, _rows),
    "parameter in two places": (TwoPlaces, _rows),
    "view in two places": (OneView, _rows),
    "batch norm": (batch_norm, _rows),
    "returns a view": (ReturnsView, _rows),
    "bf16 autocast": (Autocast, _rows),
}


def small(name: str) -> tuple[nn.Module, tuple[Any, ...]]:
    """A model of SMALL_MODELS and its inputs, always with the same values."""
    torch.manual_seed(1)
    make, inputs = SMALL_MODELS[name]
    return make(), inputs()


def least_budget(joint: Joint) -> int:
    """The smallest device budget under which the pipeline accepts the graph, in bytes."""
    try:
        joint.copy(budget_bytes=1).through(*pipeline(zcompile.Config(device="cpu")))
    except zcompile.errors.BudgetExceeded as error:
        return error.needed_bytes
    raise AssertionError("the graph needs no bytes")


@functools.cache
def captured(name: str) -> Joint:
    """The joint graph of a model of SMALL_MODELS, traced once; rewrite copies of it."""
    model, inputs = small(name)
    return catch(model, *inputs)
