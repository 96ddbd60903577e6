"""Modules and optimizers of torch's own tables, trained for some steps with and without offload.

A *case* is one training: what is built, how it is called, on which tier its parameters rest.
"""

import copy
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.testing._internal import common_optimizers
from torch.testing._internal.common_modules import module_db
from torch.testing._internal.common_optimizers import optim_db
from torch.utils import _pytree as trees
from torch_tables.comparing import differences
from torch_tables.outcomes import Outcome, judged
from torch_tables.tiers import DEVICE_BYTES, HOST_BYTES, is_tiered, rest_on_device

import zcompile
from zcompile.frontend.offload import session_behind

STEPS = 3
PLANNED_STEPS = 5
"""On the device: two are watched, then the step is planned; three are walked as planned."""


@dataclass
class Run:
    """What a training shows: outputs and gradients of every step, what is there at the end."""

    seen: list[tuple[str, Any]] = field(default_factory=list)
    error: BaseException | None = None

    def see(self, what: str, tree: Any) -> None:
        self.seen.append((what, trees.tree_map(_kept, tree)))


@dataclass(frozen=True)
class Training:
    """One case: `make` builds model, optimizer and a call that gives a loss.

    compiled  through backend="zinf", beside backend="aot_eager"; else both plainly
    """

    name: str
    way: str
    compiled: bool
    make: Callable[[], "Parts"]

    def run(self, tier: str, directory: Path) -> Outcome:
        expected = self._run(None, directory)
        found = self._run(tier, directory)
        outcome = judged(expected, found, self._differences)
        if (
            outcome.kind in ("equal", "refused")
            or expected.error is not None
            or found.error is not None
        ):
            return outcome
        again = self._run(None, directory)
        if list(self._differences(expected, again)):
            return Outcome("random", outcome.why)
        return outcome

    def _differences(self, expected: Run, found: Run) -> Iterator[str]:
        for (what, a), (other, b) in zip(expected.seen, found.seen, strict=True):
            assert what == other
            told = list(differences(a, b, what))
            yield from told
            if told:
                return  # what comes later follows from this

    def _run(self, tier: str | None, directory: Path) -> Run:
        run = Run()
        torch._dynamo.reset()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch.manual_seed(5)
            parts = self.make()
            try:
                _train(parts, run, tier, directory, self.compiled)
            except Exception as error:  # noqa: BLE001  # on purpose: whatever torch raises, ours is to
                run.error = error
            finally:
                if any(is_tiered(p) for p in parts.model.parameters()):
                    zcompile.close(parts.model)
        return run


@dataclass
class Parts:
    """model      what is offloaded
    forward    the outputs of one step, given the model as it is to be called
    inputs     whose gradients are compared too
    optimizer  makes one, of the model's parameters
    closure    step() is given one
    frozen     parameters do not train while the optimizer steps: differentiable=True refuses leaves
               that do
    """

    model: nn.Module
    forward: Callable[[Any], Any]
    inputs: list[Tensor]
    optimizer: Callable[[list[Any]], torch.optim.Optimizer]
    closure: bool = False
    frozen: bool = False


def _train(parts: Parts, run: Run, tier: str | None, directory: Path, compiled: bool) -> None:
    model = parts.model
    if tier is not None:
        _offload(model, tier, directory, compiled)
    backend = "zinf" if tier else "aot_eager"
    call = torch.compile(model, backend=backend) if compiled else model
    params = [p for p in model.parameters() if p.requires_grad]
    optimizer = parts.optimizer(params)
    for step in range(PLANNED_STEPS if compiled else STEPS):
        torch.manual_seed(7 + step)

        def once() -> Tensor:
            optimizer.zero_grad(set_to_none=step % 2 == 0)  # noqa: B023  # called in this step
            for given in parts.inputs:
                given.grad = None
            out = parts.forward(call)
            run.see(f"outputs of step {step}", out)  # noqa: B023
            loss = _loss_of(out)
            if loss.requires_grad:
                loss.backward()
            return loss.detach()

        if parts.closure:
            optimizer.step(once)
        else:
            once()
            run.see(f"gradients of step {step}", {n: p.grad for n, p in model.named_parameters()})
            run.see(f"input gradients of step {step}", [x.grad for x in parts.inputs])
            for param in params:
                param.requires_grad_(not parts.frozen)
            optimizer.step()
            for param in params:
                param.requires_grad_()
        run.see(f"model after step {step}", dict(model.state_dict()))
        run.see(f"optimizer after step {step}", optimizer.state_dict())
    # What rests on the device of a compiled training is the plan's choice, and an RNN has none.
    if tier is not None and not (compiled and tier == "device"):
        elsewhere = {p.entry.home for p in model.parameters() if p.entry.nbytes} - {tier}
        assert not elsewhere, f"rests on {elsewhere}, not on {tier}"


def _offload(model: nn.Module, tier: str, directory: Path, compiled: bool) -> None:
    fields: dict[str, Any] = {
        "device": "cpu",
        "device_memory": DEVICE_BYTES,
        "host_memory": HOST_BYTES,
    }
    if tier == "disk":
        directory.mkdir(parents=True, exist_ok=True)
        disk = directory / f"d{len(list(directory.iterdir()))}"
        disk.mkdir()
        fields |= {"host_memory": "256KiB", "disk": disk}
    # On the device: a compiled training is planned after some steps, so that all rests there.
    fields["residency"] = tier == "device" and compiled
    zcompile.offload(model, **fields)
    if tier == "device" and not compiled:
        session = session_behind(model)
        session.split.hold(DEVICE_BYTES // 8)  # for whole tensors of optimizers: nothing gives way
        session.homes.device.window_bytes = DEVICE_BYTES // 2
        for param in model.parameters():
            rest_on_device(session, param)


def _loss_of(out: Any) -> Tensor:
    found = [t for t in trees.tree_leaves(out) if isinstance(t, Tensor) and t.requires_grad]
    total = torch.zeros(())
    for tensor in found:
        value = tensor.to_dense() if tensor.layout is not torch.strided else tensor
        value = torch.view_as_real(value) if value.is_complex() else value
        total = (
            total
            + (value.float() * torch.linspace(0.5, 1.5, value.numel()).view(value.size())).sum()
        )
    return total


def _kept(value: Any) -> Any:
    """As it is now: later steps change tensors in place."""
    if not isinstance(value, Tensor):
        return copy.deepcopy(value)
    made = value.detach()
    made = made.on_host() if is_tiered(made) else made.clone()
    return made


# --- modules -----------------------------------------------------------------------------------


class Scaled(nn.Module):
    """A module without parameters, behind one: what it differentiates by is scaled first."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        def scaled(value: Any) -> Any:
            if isinstance(value, Tensor) and value.requires_grad:
                return value * self.scale
            return value

        args, kwargs = trees.tree_map(scaled, (args, kwargs))
        return self.module(*args, **kwargs)


def module_names() -> list[str]:
    return sorted({info.name for info in module_db})


def module_cases(name: str, compiled: bool, most: int | None = None) -> Iterator[Training]:
    for info in module_db:
        if info.name != name:
            continue
        for training in (True, False) if info.train_and_eval_differ else (True,):
            inputs = _module_inputs(info, training)
            for number in range(len(inputs))[: most if most is not None else len(inputs)]:
                if inputs[number].forward_input is None:
                    continue
                mode = "train" if training else "eval"
                way = "compiled" if compiled else "eager"
                desc = inputs[number].desc
                yield Training(
                    f"{name} #{number} {desc} {mode} {way}".replace("  ", " "),
                    way,
                    compiled,
                    _module_maker(info, number, training),
                )


def _module_inputs(info: Any, training: bool) -> list[Any]:
    torch.manual_seed(2)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return list(
            info.module_inputs_func(
                info, device="cpu", dtype=torch.float32, requires_grad=True, training=training
            )
        )


def _module_maker(info: Any, number: int, training: bool) -> Callable[[], Parts]:
    def make() -> Parts:
        given = _module_inputs(info, training)[number]
        torch.manual_seed(3)
        made = given.constructor_input
        model = info.module_cls(*made.args, **made.kwargs)
        if info.is_lazy:
            with torch.no_grad():
                model(*given.forward_input.args, **given.forward_input.kwargs)
        model = model.float().train(training)
        if not any(p.requires_grad for p in model.parameters()):
            model = Scaled(model).train(training)
        args, kwargs = trees.tree_map(
            lambda t: (
                t.detach().clone().requires_grad_(t.requires_grad)
                if isinstance(t, Tensor) and t.layout is torch.strided
                else t
            ),
            (given.forward_input.args, given.forward_input.kwargs),
        )
        leaves = [t for t in trees.tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        return Parts(
            model,
            lambda call: call(*args, **kwargs),
            [t for t in leaves if t.requires_grad and t.is_leaf],
            lambda params: torch.optim.SGD(params, lr=0.01, momentum=0.9),
        )

    return make


# --- optimizers --------------------------------------------------------------------------------


class Several(nn.Module):
    """Parameters of several shapes and strides, all used in one loss.

    matrices   all that there is: Muon takes nothing else
    row_major  without other strides: LBFGS takes flat views of gradients
    """

    def __init__(self, dtype: torch.dtype, matrices: bool, row_major: bool) -> None:
        super().__init__()
        shapes = [(6, 5), (8, 3)] if matrices else [(6, 5), (7,), (), (1,), (4, 3, 2, 2)]
        values = [torch.randn(shape, dtype=dtype) for shape in shapes]
        if not (matrices or row_major):
            values[-1] = values[-1].to(memory_format=torch.channels_last)
            values.append(torch.randn(5, 4, dtype=dtype).t())
        self.weights = nn.ParameterList(nn.Parameter(value) for value in values)

    def forward(self, x: Tensor) -> Tensor:
        total = torch.zeros(())
        for n, weight in enumerate(self.weights):
            used = torch.view_as_real(weight) if weight.is_complex() else weight
            total = total + ((used * x + n).sin() * (used.float() * 0.3 + 0.1 * n)).float().sum()
        return total


class Looked(nn.Module):
    """An embedding with sparse gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 4, sparse=True)

    def forward(self, x: Tensor) -> Tensor:
        found = self.embedding(torch.tensor([1, 3, 3, 6]))
        return (found * x).sin().sum()


def optimizer_names() -> list[str]:
    return sorted(info.name for info in optim_db)


def optimizer_cases(
    name: str, compiled: bool, most: int | None = None, dtype: torch.dtype = torch.float32
) -> Iterator[Training]:
    for info in optim_db:
        if info.name != name:
            continue
        listed = common_optimizers._get_optim_inputs_including_global_cliquey_kwargs
        settings = listed("cpu", dtype, info)
        for number in range(len(settings))[: most if most is not None else len(settings)]:
            way = "compiled" if compiled else "eager"
            yield Training(
                f"{name} #{number} {settings[number].desc} {str(dtype)[6:]} {way}",
                way,
                compiled,
                _optimizer_maker(info, number, dtype),
            )


def _optimizer_maker(info: Any, number: int, dtype: torch.dtype) -> Callable[[], Parts]:
    def make() -> Parts:
        listed = common_optimizers._get_optim_inputs_including_global_cliquey_kwargs
        kwargs = listed("cpu", dtype, info)[number].kwargs
        torch.manual_seed(3)
        sparse = info.only_supports_sparse_grads
        model = Looked() if sparse else Several(dtype, info.name == "Muon", info.name == "LBFGS")
        x = torch.tensor(0.7)
        return Parts(
            model,
            lambda call: call(x),
            [],
            lambda params: info.optim_cls(params, **kwargs),
            closure=info.step_requires_closure,
            frozen=kwargs.get("differentiable", False),
        )

    return make
