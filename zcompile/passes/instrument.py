"""Reports what passes did: one line a pass on the log, and everything in the dump.

`TORCH_LOGS="+zcompile"` shows the lines; `ZINF_DUMP=DIR` or `Config(dump=DIR)` writes the files of
`ir/serialize.py`. With neither, nothing is computed and nothing is written.
"""

import logging
from collections import Counter
from collections.abc import MutableMapping
from dataclasses import dataclass, field, fields
from pathlib import Path

import torch
from torch import fx

from zcompile.config import Config
from zcompile.errors import DiskUnusable
from zcompile.ir import ops, printer, serialize
from zcompile.ir import serialize as form
from zcompile.ir.effects import Effects
from zcompile.ir.graph import (
    aliases_of,
    is_compute,
    module_of,
    phase_of,
    region_of,
)
from zcompile.ir.plan import GraphPlan
from zcompile.ir.regions import structure
from zcompile.ir.schedule import Schedule
from zcompile.ir.types import NodeName, ParamSpec
from zcompile.ir.version import VERSION
from zcompile.memory.footprint import Footprint, footprint

log = logging.getLogger("zcompile.passes")

Arrangement = tuple[int, tuple[str, ...]]
"""A schedule as it is walked: its serial, and the tier of each entry of the call."""

Runs = MutableMapping[Path, "RunDir"]
"""Directory that was asked for -> the run in it; kept by whoever owns the model."""


@dataclass
class RunDir:
    """One run on disk: the graphs that a model was compiled to, in order."""

    path: Path
    config: Config
    graphs: list[str] = field(default_factory=list)

    def add(self, name: str) -> Path:
        """The directory of a new graph; run.json names it from here on."""
        path = form.graph_dir(self.path, len(self.graphs))
        path.mkdir()
        self.graphs.append(name)
        config = {f.name: _plain(getattr(self.config, f.name)) for f in fields(self.config)}
        names = tuple(self.graphs)
        record = form.RunRecord(VERSION, torch.__version__, config, names, form.FORMAT)
        form.run_file(self.path).write_text(serialize.encode(record))
        return path


def open_run(config: Config, runs: Runs) -> RunDir | None:
    """The run that this model's graphs are written to; None if no dump was asked for.

    raises  DiskUnusable, if the directory cannot be made
    """
    if config.dump is None:
        return None
    root = Path(config.dump)
    if root not in runs:
        try:
            runs[root] = RunDir(form.new_run(root), config)
        except OSError as error:
            raise DiskUnusable(
                root,
                f"cannot take a dump ({error})",
                "give a directory that can be made and written to as dump or ZINF_DUMP",
            ) from error
    return runs[root]


class Watcher:
    """Records every pass, the final plan and each schedule of one graph."""

    def __init__(self, name: str, run: RunDir | None = None) -> None:
        self.name = name
        self._dir = run.add(name) if run is not None else None
        self._passes: list[form.PassRecord] = []
        self._counts: Counter[str] = Counter()
        self._peak = 0
        self._placement = 0
        self._arrangements: dict[str, list[Arrangement]] = {}
        """Phase -> serials of the schedules that stand in the dump, in the order of its files."""

    @property
    def _idle(self) -> bool:
        return self._dir is None and not log.isEnabledFor(logging.DEBUG)

    def before(self, graph: fx.Graph, plan: GraphPlan) -> None:
        """Record the graph before the first pass."""
        if not self._idle:
            held = footprint(graph, plan.params, slots=True)
            self._counts, self._peak = _census(graph), held.peak
            row = form.PassRecord(0, form.CAPTURED, {}, self._peak, self._peak)
            self._record(row, graph, plan, held)

    def after(self, step: int, name: str, graph: fx.Graph, plan: GraphPlan) -> None:
        """Record what pass number `step` did."""
        if self._idle:
            return
        held = footprint(graph, plan.params, slots=True)
        counts, peak = _census(graph), held.peak
        did = {op: counts[op] - self._counts[op] for op in counts | self._counts}
        notes = tuple(note.text for note in plan.notes if note.by == name)
        row = form.PassRecord(
            step, name, {op: n for op, n in did.items() if n}, self._peak, peak, notes
        )
        self._counts, self._peak = counts, peak
        self._record(row, graph, plan, held)

    def planned(self, graph: fx.Graph, plan: GraphPlan) -> None:
        """Record the plan after the last pass."""
        if self._dir is not None:
            form.plan_file(self._dir).write_text(serialize.encode(_plan(self.name, graph, plan)))

    def lowered(self, schedule: Schedule) -> None:
        """Record the schedule that the passes made of one phase, before any call walks it."""
        if self._dir is not None:
            self._arrangements.pop(_phase_of(schedule), None)
            self._write(schedule, (), [])

    def walked(self, schedule: Schedule, placement: int, homes: tuple[str, ...]) -> None:
        """Record the schedule that a call walks, if the dump lacks it.

        placement  a number per placement of entries: a new one takes the files of the one before
        homes      tier of each entry of the call
        """
        if self._dir is None:
            return
        if placement != self._placement:
            self._placement = placement
            self._arrangements.clear()
        known = self._arrangements.setdefault(_phase_of(schedule), [])
        if (schedule.serial, homes) in known:
            return
        try:
            self._write(schedule, homes, known)
        except OSError as error:  # the call goes on: what it computes does not hang on its dump
            log.warning(
                "%s is not written to any more, and holds no schedule of %s: %s",
                self._dir,
                self.name,
                error.strerror or error,
            )
            self._dir = None

    def _write(self, schedule: Schedule, homes: tuple[str, ...], known: list[Arrangement]) -> None:
        """Write one more arrangement of a phase beside those `known`; stale files go first."""
        assert self._dir is not None
        phase = _phase_of(schedule)
        if not known:
            form.remove_schedules(self._dir, phase)
        known.append((schedule.serial, homes))
        rows = [_instruction(i, x, homes) for i, x in enumerate(schedule.effects)]
        form.schedule_file(self._dir, phase, len(known)).write_text(serialize.encode(rows))
        text = form.schedule_text_file(self._dir, phase, len(known))
        text.write_text(printer.schedule_text(schedule, homes))
        assert schedule.program is not None, "a phase of a graph"
        program = form.program_text_file(self._dir, phase, len(known))
        program.write_text(printer.program_text(schedule.program))

    def _record(
        self, row: form.PassRecord, graph: fx.Graph, plan: GraphPlan, held: Footprint
    ) -> None:
        log.debug("%s %s", self.name, form.pass_line(row))
        self._passes.append(row)
        if self._dir is not None:
            form.passes_file(self._dir).write_text(serialize.encode(self._passes))
            text = form.text_file(self._dir, row.step, row.name)
            text.write_text(printer.text(graph, held.curve))
            nodes = form.nodes_file(self._dir, row.step, row.name)
            nodes.write_text(serialize.encode(_nodes(graph, plan, held)))


def _phase_of(schedule: Schedule) -> str:
    """One of `serialize.PHASES`."""
    return schedule.call_kind.replace(" ", "-")


def _plain(value: object) -> object:
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, tuple):
        return [_plain(v) for v in value]
    return dict(value) if hasattr(value, "keys") else value  # type: ignore[call-overload]  # a mapping


def _census(graph: fx.Graph) -> Counter[str]:
    return Counter(printer.target_of(n) for n in graph.nodes if n.op == "call_function")


def _owners(graph: fx.Graph, plan: GraphPlan) -> dict[fx.Node, str]:
    """Name of the parameter, or offloaded value, behind each handle and each zinf node."""
    owners: dict[fx.Node, str] = {}
    for handle in graph.nodes:
        if handle.name not in plan.params:
            continue
        name = str(plan.params[NodeName(handle.name)].name)
        owners[handle] = name
        for user in handle.users:
            owners[user] = name
            for alias in aliases_of(user) if user.target in (ops.fetch, ops.gather) else ():
                for reader in (alias, *alias.users):
                    if reader.target in ops.OURS:
                        owners[reader] = name
    return {n: name for n, name in owners.items() if n.op == "placeholder" or n.target in ops.OURS}


def _nodes(graph: fx.Graph, plan: GraphPlan, held: Footprint) -> list[form.NodeRecord]:
    owners = _owners(graph, plan)
    rows = []
    for node, alive in zip(graph.nodes, held.curve, strict=True):
        value = node.meta.get("val")
        tensor = isinstance(value, torch.Tensor)
        rows.append(
            form.NodeRecord(
                name=node.name,
                op=node.op,
                target=printer.target_of(node),
                phase=phase_of(node).value,
                args=tuple(printer.argument(a) for a in node.args),
                shape=tuple(n if isinstance(n, int) else str(n) for n in value.size())
                if tensor
                else None,
                dtype=str(value.dtype).removeprefix("torch.") if tensor else None,
                nbytes=sum(s.nbytes for s in held.of.get(node, ()) if s.maker is node),
                live_bytes=alive,
                module=module_of(node) or None,
                param=owners.get(node),
            )
        )
    return rows


def _plan(name: str, graph: fx.Graph, plan: GraphPlan) -> form.PlanRecord:
    regions: dict[int, list[fx.Node]] = {}
    for node in graph.nodes:
        if is_compute(node):
            regions.setdefault(region_of(node) or 0, []).append(node)
    return form.PlanRecord(
        name=name,
        budget_bytes=plan.budget_bytes,
        params=tuple(_param(handle, spec) for handle, spec in plan.params.items()),
        regions=len(regions),
        distinct_regions=len({structure(nodes) for nodes in regions.values()}),
        notes=tuple(note.text for note in plan.notes),
        activations=plan.activations,
        activation_cost=plan.activation_cost,
        memory=plan.memory,
        sliced=plan.sliced,
    )


def _param(handle: NodeName, spec: ParamSpec) -> form.ParamRecord:
    layout = spec.layout
    dtype = str(layout.dtype).removeprefix("torch.")
    return form.ParamRecord(handle, spec.name, layout.size, dtype, spec.nbytes, spec.home)


def _instruction(index: int, x: Effects, homes: tuple[str, ...]) -> form.InstructionRecord:
    slot = printer.slot_of(x)
    return form.InstructionRecord(
        index,
        *printer.instruction_row(x, homes),
        None if slot is None else slot.address,
        x.ticket,
        x.after,
        x.reads,
        x.defines,
    )
