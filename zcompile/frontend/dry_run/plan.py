"""Plans the training of a model on a machine, which need not be this one (`zcompile.plan`).

A real training step is walked in a dry run (`session.py`), then placed, scheduled and simulated as
a real one is once it was seen. Weights are not needed: a model on `meta` will do.
"""

import types
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from zcompile.config import Config, build, is_mesh
from zcompile.errors import ConfigInvalid, Unsupported
from zcompile.frontend.dry_run.device import CPU, DryRunDevice, blank_like
from zcompile.frontend.dry_run.ranks import DryRunFabric
from zcompile.frontend.dry_run.session import (
    DryRunMode,
    DryRunSession,
    copy_without_bytes,
    run_steps,
)
from zcompile.frontend.gc_pause import gc_paused
from zcompile.frontend.movable import no_module_error
from zcompile.ir.memory_curve import Memory
from zcompile.ir.schedule import Schedule
from zcompile.ir.step import StepTrace
from zcompile.ir.torch_compat import trees
from zcompile.ir.types import Phase
from zcompile.ir.units import TiB
from zcompile.machine.cost import TransferModes
from zcompile.machine.files import find
from zcompile.machine.model import Machine
from zcompile.planner.narrow_step import NOTHING_NARROW
from zcompile.planner.outlook import Terms, evaluated
from zcompile.planner.report import Facts, Report
from zcompile.runtime.device.cpu import CpuDevice
from zcompile.runtime.device.cuda import CudaDevice
from zcompile.runtime.device.pages import machine_bytes
from zcompile.runtime.hardware import free_disk_bytes
from zcompile.runtime.open import default_budgets, settled
from zcompile.runtime.probe import disks_of, machine_for
from zcompile.runtime.progress import working


def on_cpu() -> AbstractContextManager[object]:
    """A context in which new tensors are on the CPU, as all of a dry run is; a caller's `with
    torch.device("meta")` would take its measurements and what the model makes elsewhere."""
    return CPU if torch.get_default_device() != CPU else nullcontext()


MakeOptimizer = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]

OPTIMIZERS: Mapping[str, MakeOptimizer] = types.MappingProxyType(
    {
        "adamw": lambda params: torch.optim.AdamW(params, fused=True),
        "sgd": lambda params: torch.optim.SGD(params, momentum=0.9, fused=True),
    }
)
CHUNK_BYTES = types.MappingProxyType(
    {
        "cpu": (CpuDevice.chunk_bytes, CpuDevice.late_chunk_bytes),
        "cuda": (CudaDevice.chunk_bytes, CudaDevice.late_chunk_bytes),
    }
)
"""Type of a device -> bytes of its chunks: in a step the most, of late updates the least."""
TRACED_BYTES = 4 * TiB
"""Arena that a step of a dry run is traced for: tracing never fails for want of room; a plan is
scheduled for the machine afterwards."""
MOST_CHUNKS = 2048
"""Most chunks of one state, over all parameters. A real step may have more, smaller ones; that
hides nothing else, but takes its time to simulate."""


@dataclass(frozen=True)
class Traced:
    """A step of a dry run, and facts about its model for the report.

    activation_bytes  that the forward of one micro-batch saves for its backward, outside the arena
    held_bytes        peak of live bytes of its graphs, outside the arena
    memories          memory curves of its graphs
    device_bytes      for which its graphs were planned; None: everything was saved
    samples, tokens   of one micro-batch; tokens 0: the inputs do not say
    optimizer         its class
    chunk_bytes       least size of a chunk of the optimizer's step, so that there are few enough
    reads             serial of a schedule of the step -> the one that reads low-precision copies of
                      weights in its place
    """

    step: StepTrace
    parameters: int
    activation_bytes: int
    held_bytes: int
    memories: tuple[Memory, ...]
    device_bytes: int | None
    samples: int
    tokens: int
    optimizer: str
    chunk_bytes: int
    reads: Mapping[int, Schedule] = field(default_factory=lambda: NOTHING_NARROW)


def plan(
    model: nn.Module,
    *example_inputs: Any,
    config: Config | None = None,
    machine: Machine | str | Path | None = None,
    optimizer: str | MakeOptimizer | None = None,
    micro_batches: int = 1,
    no_sync: bool = False,
    **fields: Any,
) -> Report:
    """What a training step of `model` would cost, and what bounds it. Nothing is moved.

    model           any module; on `meta` it needs no memory. It is copied, and not touched.
    example_inputs  tensors as the model's call takes them, real or on `meta`; one mapping stands
                    for arguments by name. The loss is what the call returns, or its `.loss`.
    machine         a name, a file or a `Machine`; else the config's, else this one, measured. Of
                    one with several ranks, which train the model together, one rank is planned
    optimizer       "adamw" (also if None), "sgd" (with momentum), or a function of the parameters
    micro_batches   forward and backward passes per optimizer step
    no_sync         all but the last of those run within `zcompile.no_sync`
    config, fields  as `zcompile.offload`; budgets that are given replace the machine's
    raises          ConfigInvalid, UnknownOption, Unsupported (also: entries of such a run stay
                    where they are put first), BudgetExceeded (the device is too small for what
                    one region reads), MachineUnknown, MachineInvalid, UserCodeFailed (the model
                    fails with these inputs; the cause is its error)
    """
    with on_cpu(), working(f"planning {type(model).__name__}"):
        terms = terms_of(build(config, fields, "zcompile.plan"), machine)
        traced = trace(model, example_inputs, terms, optimizer, micro_batches, no_sync)
        return report_of(traced, terms)


def report_of(traced: Traced, terms: Terms, prices: bool = True) -> Report:
    """The report of a traced step; also on another machine, where nothing bounds the device.

    raises  BudgetExceeded; Unsupported, if it was traced for another bounded device
    """
    bounded_by = terms.machine.tiers["device"] if terms.bounded else None
    if traced.device_bytes != bounded_by:
        raise Unsupported(
            "a step is planned for another device than it was traced for",
            "trace it anew: what graphs hold is chosen for the device",
        )
    beside = traced.held_bytes if terms.bounded else traced.activation_bytes
    with gc_paused(), working("planning the traced step"):
        found = evaluated(traced.step, terms, beside, traced.chunk_bytes, prices, traced.reads.get)
    facts = Facts(
        traced.parameters,
        traced.activation_bytes,
        traced.held_bytes,
        traced.memories,
        traced.samples,
        traced.tokens,
        traced.step.micro_batches,
        traced.optimizer,
    )
    return Report.of(found, terms, facts)


def terms_of(config: Config, machine: Machine | str | Path | None = None) -> Terms:
    """The machine that is planned for, with its budgets, and how bytes travel there.

    raises  MachineUnknown, MachineUnreadable, MachineInvalid, DiskUnusable, Unsupported
    """
    if why := config.stays_because:
        raise Unsupported(
            f"a plan says where entries rest best, and with {why} they stay where "
            "they are put first",
            "leave that out to plan a run without",
        )
    if config.param_dtype is not None:
        raise Unsupported(
            f"a plan of a run with param_dtype={config.param_dtype}, of whose copies nothing is "
            "known before it is trained",
            "leave that out to plan a run without; with it, less of the weights travels",
        )
    if config.durable:
        raise Unsupported(
            "a plan of a run with durable=True, whose commits it does not count",
            "leave that out to plan a run without; beside it, a commit writes what a step has "
            "changed and what does not rest on disk",
        )
    if machine is not None:
        config = replace(config, machine=machine if isinstance(machine, Machine) else find(machine))
    # The device of a named machine is CUDA; without a name, that of this machine.
    device = torch.device(config.device or "cpu")
    here = config.machine is None
    named = config.machine
    config = config.in_bytes(named.tiers) if isinstance(named, Machine) else settled(config)
    paced = {"h2d", "d2h"} & set(config.throttle)
    emulates = here and device.type == "cpu" and not paced
    most, least_late = CHUNK_BYTES[device.type if here else "cuda"]
    stand_in = DryRunDevice(
        chunk_bytes=most, late_chunk_bytes=least_late, emulates=emulates, torch_device=device
    )
    found = machine_for(config, stand_in, _capacities(config) if here else None)
    if config.ranks_per_node is not None and found.ranks > 1:
        found = replace(found, ranks_per_node=config.ranks_per_node)
    if is_mesh(config.mesh) and config.mesh.ndim == 2:
        if config.mesh.size() != found.ranks:
            raise ConfigInvalid(
                "mesh",
                config.mesh,
                f"has {config.mesh.size()} ranks, and the machine {found.ranks}; give a machine "
                "with as many",
            )
        found = replace(found, replicas=config.mesh.size(0))
    for tier in ("device", "host"):
        if tier not in found.tiers:
            raise ConfigInvalid(
                "machine", found.name, f"has no tier {tier!r}; add it, or give {tier}_memory"
            )
    # How bytes travel: only the emulated device is reached by compute and disks.
    ways = TransferModes(
        asynchronous=not (here and device.type == "cpu"),
        straight_read=emulates,
        straight_write=emulates,
    )
    terms = Terms(
        found,
        ways,
        emulates,
        config.max_lead > 0,
        config.device_memory is not None,
        stand_in.chunk_bytes,
        config.activations,
        None if config.tile_bytes is None else int(config.tile_bytes),
        config.regions,
        config.stage,
        config.partition,
        updates_on_host=config.updates_on_host("cuda" if ways.asynchronous else "cpu")
        and not emulates,
        # Whether this machine has what kernels need says nothing of one that is named.
        tiles_by_kernels=config.tiles_by_kernels
        if here
        else config.kernels != "stock" and found.runs_kernels,
        late_chunk_bytes=stand_in.late_chunk_bytes,
    )
    return terms.on(found)


def _capacities(config: Config) -> dict[str, int]:
    """Capacities of this machine, where the config gives no budget: as `zcompile.offload` would
    take."""
    device = torch.device(config.device or "cpu")
    on_cuda = device.type == "cuda"
    free = torch.cuda.mem_get_info(device)[0] if on_cuda else machine_bytes()
    usual = default_budgets(device.type, free)
    tiers = {**usual, **config.budgets}
    if disks := disks_of(config):
        tiers["disk"] = free_disk_bytes(disks)
    return tiers


def trace(
    model: nn.Module,
    example_inputs: tuple[Any, ...],
    terms: Terms,
    optimizer: str | MakeOptimizer | None = None,
    micro_batches: int = 1,
    no_sync: bool = False,
) -> Traced:
    """The step of training that a dry run takes.

    raises  ConfigInvalid, Unsupported, UserCodeFailed; BudgetExceeded, where the device is bounded
    """
    _check(model, optimizer, micro_batches)
    make = OPTIMIZERS[optimizer or "adamw"] if not callable(optimizer) else optimizer
    nbytes = sum(p.numel() * p.element_size() for p in model.parameters())
    # A copy of the model takes the step.
    session = _session(terms)
    try:
        copied = copy_without_bytes(model, session)
        inputs = trees.tree_map(_input, example_inputs)
        with gc_paused(), working("tracing a step"), DryRunMode():  # type: ignore[no-untyped-call]  # torch's
            made = make(_trained(copied))  # alive until its states are told
            run_steps(copied, inputs, made, micro_batches, no_sync)
        samples, tokens = _counts(example_inputs)
        step = _settled(_recorded(session, model), session)
        return Traced(
            step,
            sum(p.numel() for p in model.parameters()),
            session.saved_bytes // micro_batches,
            session.split.held_bytes,
            tuple(session.memories),
            terms.machine.tiers["device"] if terms.bounded else None,
            samples,
            tokens,
            type(made).__name__,
            nbytes // MOST_CHUNKS,
            _reading_copies(step, session),
        )
    finally:
        session.close()


def _trained(model: nn.Module) -> list[nn.Parameter]:
    found = [p for p in model.parameters() if p.requires_grad]
    if not found:
        raise Unsupported(
            "no parameter of the model requires a gradient", "plan a model that is to be trained"
        )
    return found


def _recorded(session: DryRunSession, model: nn.Module) -> StepTrace:
    step = session.executor.recorder.end()
    if step is None:
        raise Unsupported(
            f"torch.compile captured nothing of {type(model).__name__}, so there is no step to "
            "plan",
            "see why with TORCH_LOGS=graph_breaks; code that failed in this process "
            "before is left out from then on, until torch._dynamo.reset()",
        )
    return step


def _session(terms: Terms) -> DryRunSession:
    """The session to trace a step in: with the device as it is bounded, or one that holds
    everything."""
    machine = terms.machine
    tiers = {tier: nbytes for tier, nbytes in machine.tiers.items() if tier != "device"}
    tiers["host"] -= terms.ways.ring_bytes
    config = Config(
        device="cpu",
        machine=machine,
        activations=terms.activations,
        tile_bytes=terms.tile_bytes,
        regions=terms.regions,
        partition=terms.partition,
    )
    device = machine.tiers["device"] if terms.bounded else TRACED_BYTES
    fabric = DryRunFabric(machine.mesh) if machine.ranks > 1 else None
    by_kernels = terms.tiles_by_kernels
    return DryRunSession(config, device, terms.emulates, tiers, terms.ways, fabric, by_kernels)


def _check(model: Any, optimizer: Any, micro_batches: Any) -> None:
    if not isinstance(model, nn.Module):
        raise no_module_error(model, "zcompile.plan")
    if not any(True for _ in model.parameters()):
        raise Unsupported(f"{type(model).__name__} has no parameters", "plan a model that has")
    if optimizer is not None and not callable(optimizer) and optimizer not in OPTIMIZERS:
        raise ConfigInvalid(
            "optimizer",
            optimizer,
            f"is none of {', '.join(OPTIMIZERS)}; give "
            "one of them, or a function of the parameters",
        )
    if isinstance(micro_batches, bool) or not isinstance(micro_batches, int) or micro_batches < 1:
        raise ConfigInvalid("micro_batches", micro_batches, "must be an int of at least 1")


def _input(value: Any) -> Any:
    """The stand-in of an input: whole numbers on the CPU are kept, since code may look at them; all
    else has no values."""
    if not isinstance(value, Tensor):
        return value
    kept = value.device.type == "cpu" and not value.is_floating_point()
    return value if kept else blank_like(value)


def _settled(step: StepTrace, session: DryRunSession) -> StepTrace:
    """The step with facts as they are after it, since an optimizer makes its states in the first
    step."""
    alive = {entry.ref: entry for entry in session.entries()}
    facts = {
        ref: replace(fact, name=alive[ref].name, kind=alive[ref].kind) if ref in alive else fact
        for ref, fact in step.facts.items()
    }
    return replace(step, facts=facts)


def _reading_copies(step: StepTrace, session: DryRunSession) -> Mapping[int, Schedule]:
    """What reads low-precision copies of weights in place of the schedules of a step."""
    serials = {call.schedule.serial for call in step.calls if call.phase is not Phase.STEP}
    found = ((serial, session.reading_copies(serial)) for serial in serials)
    return {serial: narrow for serial, narrow in found if narrow is not None}


def _counts(inputs: Any) -> tuple[int, int]:
    """Samples and tokens of the inputs: sizes of the first tensor, tokens if it is of integers."""
    first = next((x for x in trees.tree_leaves(inputs) if isinstance(x, Tensor)), None)
    if first is None or first.dim() == 0:
        return 1, 0
    whole = not first.is_floating_point() and first.dim() == 2
    return int(first.shape[0]), int(first.shape[0] * first.shape[1]) if whole else 0
