"""Compiles the graphs of torch.compile: runs the passes, and hands the schedules to the executor.

Dynamo hands over a graph and its inputs; AOTAutograd makes the joint graph and asks for a cut; the
passes run in between. Nothing of a parameter's identity is baked in: an executor reads the handles
of each call.
"""

import logging
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from traceback import walk_tb
from typing import Any

import torch
from torch import fx

from zcompile.config import Config, with_plan_options
from zcompile.errors import BudgetExceeded, ConfigInvalid, Unsupported, ZinfError, quoted
from zcompile.frontend.fusions import compiler_of
from zcompile.frontend.higher_order import keep_tiered_from_higher_order
from zcompile.frontend.ranks import refuse_tiles, tell_of_tiles
from zcompile.frontend.recompiles import remember_frame
from zcompile.frontend.shared_results import first, return_shared
from zcompile.frontend.step_log import write_steps
from zcompile.frontend.timeline import dump_steps
from zcompile.frontend.undefined_gradients import Backwards, Fewer, Tracing, takes_undefined
from zcompile.ir import ops
from zcompile.ir.eager_formulas import FORMULAS, INSTEAD, LEFT_WHOLE
from zcompile.ir.graph import assign_phases, find, is_subgraph, module_of, phase_of
from zcompile.ir.handles import leaf_of
from zcompile.ir.plan import GraphMemory, GraphPlan, Rounding
from zcompile.ir.schedule import Schedule
from zcompile.ir.torch_compat import (
    aot_backend,
    boxed,
    cut,
    dynamo_goes_on,
    ends_compiling,
    hand_on_undefined,
    handle_input,
    hint,
    is_symbol,
    is_tangent,
    let_backward_run_again,
    mutated_positions,
    next_sequence_number,
    node_of_call,
    pin_phase,
    save_unchecked,
    unheard_graphs,
    without_first_look,
    without_modes,
    without_python_kernels,
)
from zcompile.ir.types import EntryKind, MemoryProfile, NodeName, ParamName, ParamSpec, Phase
from zcompile.machine.files import find as find_machine
from zcompile.memory.footprint import Size, footprint, memory_profile
from zcompile.memory.sized import SizedSchedule, SizeReader, Sizes, sizes_as
from zcompile.passes.arrange import arrange, without_exchanges
from zcompile.passes.build_program import program_of
from zcompile.passes.instrument import Watcher, open_run
from zcompile.passes.narrow_params import (
    casts_shares,
    has_copies_to_read,
    reading_copies,
    with_copy_entries,
)
from zcompile.passes.pipeline import DECIDED, decided, pipeline, run
from zcompile.passes.plan_activations.graph import ActivationBudget
from zcompile.passes.undefined_gradients import (
    TracedJoint,
    check_saved,
    drop_unread,
    named_alike,
)
from zcompile.runtime.eager.tensor import TieredTensor, hand_on
from zcompile.runtime.eager.written_views import written_views_refused
from zcompile.runtime.executor import compute_only
from zcompile.runtime.probe import machine_for
from zcompile.runtime.profile import COMPILING
from zcompile.runtime.progress import Work, working
from zcompile.runtime.session import Session, session_of
from zcompile.runtime.store.store import Entry
from zcompile.verify.schedule import verify_schedule

log = logging.getLogger("zcompile.frontend.backend")

CPU = torch.device("cpu")
UNDEFINED = "undefined-gradients"
"""What `stats` names where undefined gradients are zeros."""
ZEROS = "results that are not differentiated have gradients of zeros, as the graph was traced"
MOST_LOGGED = 4
"""Most places of a graph that a line of the log names; `stats` names all."""
NOMINAL_MACHINE = "a100-80gb"
"""The machine that activations are chosen for where several ranks must choose alike."""
STATES = 3
"""Bytes of gradients and two states of each parameter, over the bytes of the parameters."""


def zinf(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    mode: str | None = None,
    options: Mapping[str, object] | None = None,
) -> Callable[..., Any]:
    """The backend `torch.compile(model, backend="zinf")` looks up by its entry point.

    raises  UnknownOption, ConfigInvalid, BudgetExceeded, Unsupported
    """
    if mode not in (None, "default"):
        raise ConfigInvalid("mode", mode, "means nothing to backend='zinf'; leave it out")
    specs, session = describe(example_inputs)
    config = with_plan_options(session.config if session else Config(), options or {})
    refuse_tiles(config, session.fabric if session else None)
    number = next(session.numbers) if session else 0
    dumped = open_run(config, session.dumps if session else {})
    watch = Watcher(f"graph{number}", dumped)
    if session is not None and dumped is not None:
        dump_steps(session, dumped.path)
        write_steps(session, dumped.path)
        session.executor.listen(watch.name, watch)
    graph = _Graph(specs, _weakly(session), config, watch)
    results = None
    if session is not None:
        session.meter.count("graphs")
        remember_frame(session)
        results = return_shared(gm)
        keep_tiered_from_higher_order(gm)
    if config.regions != "inductor" and (session is None or session.fabric is None):
        graph.tracing = Tracing.of(gm, session.device.torch_device if session else CPU)
    backend = aot_backend(graph.forward, graph.backward, graph.inference, graph.partition, FORMULAS)
    with (
        working(watch.name) as graph.work,
        unheard_graphs(),
        without_python_kernels(LEFT_WHOLE, INSTEAD),
    ):
        graph.work.begin("tracing its compute")
        try:
            with written_views_refused():
                compiled: Callable[..., Any] = backend(gm, list(example_inputs))
        except Exception as error:  # on purpose: what torch cannot trace raises of no one class
            if dynamo_goes_on(error):
                raise
            if isinstance(error, ZinfError):
                error.put_notes_into_sentence()
            if session is not None and session.fabric is not None:
                session.fabric.failed_here(error)  # the others wait for the call
            ours = graph.reached or isinstance(error, ZinfError) or not _is_of_torch(error)
            if ours or not ends_compiling(error):
                raise
            raise Unsupported(
                f"torch failed to trace {watch.name}, before zcompile had a part in it: "
                f"{type(error).__name__}: {error}",
                "keep the module that does it out of the graph "
                "(module.forward = torch.compiler.disable(module.forward)), or compile the blocks "
                'around it one by one (block.compile(backend="zinf")); without torch.compile the '
                "offloaded model runs as it is, but slower",
            ) from error
    followed = _followed(compiled, _weakly(session), graph)
    return followed if results is None else first(results, followed)


def _is_of_torch(error: BaseException) -> bool:
    """Whether an error of tracing is torch's: from the last of our functions above the place where
    it arose, all was in torch's hands."""
    frames = (frame for frame, _ in walk_tb(error.__traceback__))
    ours = [f.f_code for f in frames if f.f_globals.get("__name__", "").startswith("zcompile.")]
    if ours and ours[-1] not in (zinf.__code__, hand_on.__code__):
        return False
    return error.__cause__ is None or _is_of_torch(error.__cause__)


def describe(inputs: Sequence[Any]) -> tuple[dict[int, ParamSpec], Session | None]:
    """The tiered inputs by position, and the one session they belong to.

    raises  Unsupported, if they belong to several
    """
    specs: dict[int, ParamSpec] = {}
    sessions: dict[int, Session] = {}
    for position, value in enumerate(inputs):
        if isinstance(value, TieredTensor):
            entry = value.entry
            session = session_of(entry)
            sessions[session.key] = session
            specs[position] = ParamSpec(
                ParamName(value._name_in_store()),
                value.entry_layout,
                _gathered_bytes(entry),
                value.sink,
                entry.home,
                share=_share(entry),
                shared=session.fabric is not None,
                one_owner=None if entry.partition is None else entry.partition.one_owner,
            )
    if len(sessions) > 1:
        raise Unsupported(
            "one compiled graph uses parameters of several offloaded models",
            "compile each model by itself, or offload them as one module",
        )
    return specs, next(iter(sessions.values()), None)


def _gathered_bytes(entry: Entry) -> int:
    """The bytes of the shares of all ranks; of what one rank holds, those of the tensor."""
    part = entry.partition
    if part is None or part.owner is not None:
        return entry.whole_bytes
    return entry.nbytes * part.ranks


def _share(entry: Entry) -> tuple[int, int] | None:
    """The bytes of an entry that rest on this rank, among those of all ranks; None: all do."""
    part = entry.partition
    if part is None or part.owner is not None:
        return None if part is None else (0, entry.nbytes)
    return part.rank * entry.nbytes, (part.rank + 1) * entry.nbytes


Weakly = Callable[[], Session | None]
"""Returns a session if it is still there: torch's caches must not keep a model alive."""


@dataclass
class _Graph:
    """One graph from Dynamo on its way to schedules; AOTAutograd calls the methods in order.

    started          the plan before the passes
    traced           what the joint graph was before the passes
    untraced         why that could not be told
    tracing          what it is traced again from, where results are not differentiated; None: it
                     is not
    takes_undefined  whether its backward may be called with None for the gradients of some results
    reached          whether it has called the first: torch's own tracing is done
    work             what is shown of it while it is compiled
    """

    specs: Mapping[int, ParamSpec]
    session: Weakly
    config: Config
    watch: Watcher
    plan: GraphPlan | None = None
    sinks: Mapping[NodeName, int] = field(default_factory=dict)
    joint: fx.Graph | None = None
    saved: frozenset[str] = frozenset()
    started: GraphPlan | None = None
    traced: TracedJoint | None = None
    untraced: str = ""
    tracing: Tracing | None = None
    takes_undefined: bool = False
    reached: bool = False
    work: Work = field(default_factory=lambda: Work("a graph"))
    largest: dict[str, int] = field(default_factory=dict)
    """Name of each dynamic size -> its largest value in forward calls."""

    def partition(
        self, joint: fx.GraphModule, inputs: Sequence[Any], *, num_fwd_outputs: int, **_: Any
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        """Run the passes on the joint graph, then cut it by phase."""
        tangents = [node for node in joint.graph.find_nodes(op="placeholder") if is_tangent(node)]
        if self.tracing is not None and len(tangents) > 1:
            try:
                self.traced = TracedJoint.of(joint, num_fwd_outputs)
            except Exception as error:  # noqa: BLE001  # on purpose: of any class; zeros are right, too
                self.untraced = _in_a_line(error)
        self.plan = self._passes(joint, num_fwd_outputs)
        self.sinks = _contributions(joint.graph, self.plan)
        forward, backward = self._cut(joint, num_fwd_outputs)
        may = self.traced is not None or bool(self.untraced)
        self.takes_undefined = may and takes_undefined(backward.graph)
        return forward, backward

    def _cut(
        self, joint: fx.GraphModule, num_fwd_outputs: int
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        assert self.plan is not None
        saved: list[fx.Node] = []
        symbols: list[fx.Node] = []
        for node in joint.graph.nodes:
            if is_subgraph(node):
                continue  # each phase has those that its ops are given
            pin_phase(node, phase_of(node) is Phase.BACKWARD)
            if node.name in self.plan.params and not _gathered_in_backward(node):
                save_unchecked(node)  # only its gradient is taken home; its value is not read
            if phase_of(node) is Phase.FORWARD and any(
                user.op != "output" and phase_of(user) is Phase.BACKWARD for user in node.users
            ):
                (symbols if is_symbol(node) else saved).append(node)
        self.joint, self.saved = joint.graph, frozenset(n.name for n in saved)
        return cut(joint, saved, symbols, num_fwd_outputs)

    def forward(self, gm: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        let_backward_run_again()
        return self._executable(gm, Phase.FORWARD, "forward", self.sinks)

    def backward(self, gm: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        whole = self._executable(gm, Phase.BACKWARD, "backward", {})
        if not self.takes_undefined:
            return whole
        make = partial(self._without, gm.graph)
        return boxed(Backwards(gm.graph, whole, make, self._leave_out, self._tell_of_zeros))

    def _without(self, backward: fx.Graph, left_out: Collection[int]) -> Fewer | str:
        """The backward of a graph traced without gradients of some results; or why there is none.

        backward  of all gradients
        """
        assert self.plan is not None
        assert self.tracing is not None
        if self.untraced:
            return self.untraced
        if self.plan.cuts or self.plan.slices or self.plan.batch or self.plan.roundings:
            return "parts of it run in tiles or slices"
        COMPILING.begins()  # it is no part of a step
        try:
            with working(f"tracing {self.watch.name} for the results that are differentiated"):
                made = self.tracing.without(left_out, partial(self._fewer, backward))
            if isinstance(made, Exception):
                raise made
            graph, gm = made
            call = graph._executable(gm, Phase.BACKWARD, "backward", {})
        except Exception as error:  # noqa: BLE001  # on purpose: of any class; zeros are right, too
            return _in_a_line(error)
        finally:
            COMPILING.ends()
        inputs = [node.name for node in gm.graph.find_nodes(op="placeholder")]
        without = _sent_home(backward) - _sent_home(gm.graph)
        return Fewer(call, inputs, sorted(without))

    def _fewer(
        self, backward: fx.Graph, joint: fx.GraphModule, num_fwd_outputs: int
    ) -> tuple["_Graph", fx.GraphModule]:
        """A joint graph that was traced again, with what was decided, and its backward.

        raises  Unfit, and what passes raise
        """
        assert self.plan is not None
        assert self.joint is not None
        assert self.traced is not None
        assert self.started is not None
        plan = replace(
            self.started,
            activations=self.plan.activations,
            activation_cost=self.plan.activation_cost,
        )
        joint = named_alike(joint, self.traced, num_fwd_outputs)
        drop_unread(joint)
        assign_phases(joint.graph, num_fwd_outputs)
        plan = run(joint, plan, decided(self.config), given=DECIDED)
        if plan.beside.nbytes <= self.plan.beside.nbytes:
            plan = replace(plan, beside=self.plan.beside, budget_bytes=self.plan.budget_bytes)
        fewer = replace(self, plan=plan)
        _, gm = fewer._cut(joint, num_fwd_outputs)
        check_saved(joint.graph, gm.graph, self.joint, backward)
        if (session := self.session()) is not None and plan.budget_bytes is not None:
            session.split.expect(plan.beside.nbytes)  # as of another graph, if that is more
        return fewer, gm

    def _leave_out(self, handles: Sequence[Any]) -> None:
        """Tell that a backward begins which makes no gradient for the parameters behind these
        handles, though its forward expects one."""
        if (session := self.session()) is not None:
            session.gradients.leave_out(leaf_of(handle) for handle in handles)

    def _tell_of_zeros(self, why: str) -> None:
        """Say that results which nobody differentiates have gradients of zeros."""
        assert self.plan is not None
        if self.plan.roundings:
            return  # it is told already that bits may differ
        told = Rounding(UNDEFINED, self.watch.name, f"{ZEROS}: {why}")
        _log_roundings(self.watch.name, [told])
        if (session := self.session()) is not None:
            session.inexact[told.where, told.by] = told.why

    def inference(self, gm: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        self.plan = self._passes(gm, None)
        return self._executable(gm, Phase.FORWARD, "inference", {})

    def _passes(self, gm: fx.GraphModule, forward_outputs: int | None) -> GraphPlan:
        self.reached = True
        # What the passes may know: tiered inputs, budget, machine, memory of earlier graphs.
        params = {
            NodeName(node.name): self.specs[position]
            for node in gm.graph.find_nodes(op="placeholder")
            if (position := handle_input(node)) in self.specs and position is not None
        }
        session = self.session()
        budget = session.device_budget if session is not None and params else None
        _refuse_sparse(gm.graph)
        _refuse_written_views(gm.graph, self.specs)
        assign_phases(gm.graph, forward_outputs)
        around = None if session is None else cache(partial(activation_budget, session))
        before = GraphMemory(session.split.expected_bytes if session is not None else 0)
        self.started = GraphPlan(params, budget, before)
        plan = self._run(gm, self.started, around)
        # What the session tells of its graphs.
        shared = [plan.params[NodeName(name)] for name in plan.cuts or ()]
        tiled = [param.name for param in shared if param.share is not None]
        tell_of_tiles(self.config, self.watch.name, tiled)
        if plan.roundings:
            _log_roundings(self.watch.name, plan.roundings)
        if session is not None:
            session.inexact.update({(r.where, r.by): r.why for r in plan.roundings})
        if session is not None and plan.budget_bytes is not None:
            session.split.expect(plan.beside.nbytes)
        if session is not None and plan.memory is not None:
            session.compiled(plan.memory)
        self.watch.planned(gm.graph, plan)
        return plan

    def _run(
        self,
        gm: fx.GraphModule,
        plan: GraphPlan,
        around: Callable[[], ActivationBudget] | None,
    ) -> GraphPlan:
        """Run the passes, and show how far they are."""
        tried, begun = 0, ""

        def begins(done: int, name: str) -> None:
            nonlocal tried, begun
            tried, begun = 0, f"{done + 1} of {len(passes)}, {name}"
            work.begin(begun)

        def trial() -> None:
            nonlocal tried
            tried += 1
            ways = "1 way" if tried == 1 else f"{tried} ways"
            work.begin(f"{begun}, {ways} tried")

        session = self.session()
        compiler = None if session is None else compiler_of(session, self.config)
        by_kernels = None if session is None else session.tiles_by_kernels()
        passes = pipeline(self.config, around, trial, compiler, by_kernels)
        self.work.begin("")  # it is traced
        with working("passes") as work:
            return run(gm, plan, passes, watch=self.watch, begins=begins)

    def _executable(
        self, gm: fx.GraphModule, phase: Phase, told_as: str, sinks: Mapping[NodeName, int]
    ) -> Callable[..., Any]:
        with working(f"scheduling {told_as} of {self.watch.name}"):
            call = self._scheduled(gm, phase, told_as, sinks)
            return without_first_look(call) if _has_complex_values(gm.graph) else call

    def _scheduled(
        self, gm: fx.GraphModule, phase: Phase, told_as: str, sinks: Mapping[NodeName, int]
    ) -> Callable[..., Any]:
        assert self.plan is not None
        session = self.session()
        regions = session.regions if session is not None else {}
        known = frozenset(regions)
        # Schedule, count live bytes, and prove the schedule safe.
        program = program_of(
            gm, self.plan, phase, self.watch.name, regions, sinks, trains=told_as == "forward"
        )
        schedule = arrange(program, self.plan.budget_bytes, self.config.max_lead)
        count = partial(self._holds, gm.graph, schedule)
        schedule = replace(schedule, holds=count(hint))
        verify_schedule(schedule)
        self.watch.lowered(schedule)
        if session is None:
            return boxed(partial(compute_only, schedule))
        # Tell the session, and bind the schedule to its calls.
        meter = session.meter
        if not session.controller.arranges:
            session.homes.plan_device(schedule.peak_bytes)
        keys = [region.key for region in schedule.regions()]
        meter.count("regions", len(keys))
        meter.count("distinct_regions", len({*keys} - known))
        reader = SizeReader(gm.graph)
        self._offer_copies(session, gm, told_as, sinks, schedule, fixed=not reader.names)
        if session.fabric is not None and phase is Phase.BACKWARD:
            session.may_exchange_later(schedule.serial, cache(partial(self._summing, schedule)))
        if not reader.names:
            return boxed(_bound(self.session, lambda args: schedule))

        def counted(sizes: Sizes) -> MemoryProfile:
            if told_as == "forward":  # whose backward may not be told all of them
                for name, largest in sizes.items():
                    self.largest[name] = max(largest, self.largest.get(name, largest))
            return count(sizes_as({**self.largest, **sizes}))

        return boxed(_bound(self.session, SizedSchedule(schedule, reader, counted).at))

    def _offer_copies(
        self,
        session: Session,
        gm: fx.GraphModule,
        told_as: str,
        sinks: Mapping[NodeName, int],
        wide: Schedule,
        fixed: bool,
    ) -> None:
        """Tell the session what would read low-precision copies in place of `wide`, once it asks.

        Of several ranks all tell it, or none: whether they ask each other before a call must not
        depend on `fixed`, that no size is dynamic, which is up to the batches of one rank.
        """
        assert self.plan is not None
        if not self.config.may_read_copies:
            return
        make = cache(partial(self._reading_copies, gm, told_as, sinks, wide))
        if session.fabric is not None:
            if casts_shares(gm.graph, self.plan):
                session.may_read_copies(wide.serial, make if fixed else _reads_no_copies)
        elif fixed and has_copies_to_read(gm.graph, self.plan):
            session.may_read_copies(wide.serial, make)

    def _reading_copies(
        self, gm: fx.GraphModule, told_as: str, sinks: Mapping[NodeName, int], wide: Schedule
    ) -> Schedule | None:
        """The schedule that reads low-precision copies in place of `wide`, scheduled and proven as
        that was; None, if it reads nothing after a cast."""
        plan, session = self.plan, self.session()
        assert plan is not None
        assert session is not None
        assert wide.program is not None
        graph = reading_copies(gm.graph, plan)
        if graph is None:
            return None
        copied = fx.GraphModule(gm, graph)
        name, phase, trains = self.watch.name, wide.phase, told_as == "forward"
        program = program_of(copied, plan, phase, name, session.regions, sinks, trains)
        program = with_copy_entries(program, wide.program)
        try:
            schedule = arrange(program, plan.budget_bytes, self.config.max_lead)
        except BudgetExceeded:  # copies live for longer than what is cast at once
            return None
        schedule = replace(schedule, holds=self._holds(graph, schedule, hint))
        verify_schedule(schedule)
        return schedule

    def _summing(self, exchanging: Schedule) -> Schedule:
        """The schedule that a backward walks within `no_sync`, proven; of what reads low-precision
        copies in place of that as well."""
        session = self.session()
        assert session is not None
        made = _summing_alone(exchanging, self.config)
        if made is not exchanging and session.offers_copies(exchanging.serial):

            def reading_copies() -> Schedule | None:
                narrow = session.reading_copies(exchanging.serial)
                return None if narrow is None else _summing_alone(narrow, self.config)

            session.may_read_copies(made.serial, cache(reading_copies))
        return made

    def _holds(self, graph: fx.Graph, schedule: Schedule, size: Size) -> MemoryProfile:
        """Live bytes of calls of the graph of one phase, where `size` evaluates dynamic sizes."""
        assert self.plan is not None
        if self.joint is None:
            return memory_profile(schedule, footprint(graph, self.plan.params, {}, size))
        joint = footprint(self.joint, self.plan.params, {}, size)
        kept = joint.handed_over(self.saved)
        given = kept if schedule.phase is Phase.BACKWARD else {}
        held = footprint(graph, self.plan.params, given, size)
        if not schedule.trains:
            return memory_profile(schedule, held)
        return replace(memory_profile(schedule, held, kept), ahead_bytes=joint.peak)


def _in_a_line(error: Exception) -> str:
    """The class of an error, and the first line of what it says."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else ''}"


def _summing_alone(exchanging: Schedule, config: Config) -> Schedule:
    """`exchanging` as a backward within `no_sync`, proven."""
    made = without_exchanges(exchanging, config.max_lead)
    if made is not exchanging:
        verify_schedule(made)
    return made


def _reads_no_copies() -> None:
    """What reads copies in place of a schedule of dynamic sizes: nothing does yet."""


def _has_complex_values(graph: fx.Graph) -> bool:
    values = (node.meta.get("val") for node in graph.nodes)
    return any(isinstance(value, torch.Tensor) and value.is_complex() for value in values)


def _refuse_sparse(graph: fx.Graph) -> None:
    """Refuse a graph with a value that is not dense.

    raises  Unsupported
    """
    for node in graph.nodes:
        value = node.meta.get("val")
        if isinstance(value, torch.Tensor) and value.layout is not torch.strided:
            module = module_of(node)
            where = repr(module) if module else "the model"
            raise Unsupported(
                f"{node.target} of {where} makes a {value.layout} tensor, as the gradient "
                "of torch.nn.Embedding(sparse=True) is, and those of compiled graphs are dense",
                "give sparse=False, or leave that module out of the graph: "
                "module.forward = torch.compiler.disable(module.forward)",
            )


def _refuse_written_views(graph: fx.Graph, specs: Mapping[int, ParamSpec]) -> None:
    """Refuse a graph that writes a view of a parameter it was called with.

    Torch traces the view as a tensor by itself, and other inputs that show the same bytes as
    unwritten.

    raises  Unsupported
    """
    for position in sorted(mutated_positions(graph) & specs.keys()):
        raise Unsupported(
            f"a compiled function writes to a view of {specs[position].name!r} that was taken "
            "outside of it",
            "move the write outside, or into a function under torch.compiler.disable",
        )


def _log_roundings(graph: str, roundings: Sequence[Rounding]) -> None:
    """Log in one line where a graph may round otherwise than eager."""
    places = [f"{quoted(r.where)} ({r.by}: {r.why})" for r in roundings]
    more = f"; {len(places) - MOST_LOGGED} more in stats" if len(places) > MOST_LOGGED else ""
    log.info(
        "%s is not bit-equal to eager, within rounding: %s%s",
        graph,
        "; ".join(places[:MOST_LOGGED]),
        more,
    )


def activation_budget(session: Session) -> ActivationBudget:
    """Bytes that activations of a model may use beside its parameters, tier by tier.

    The host has room for what gradients and the states of an optimizer will not take; where there
    is a disk, these may rest there, and a quarter of what is free on the host is offered. A disk
    whose content outlives the run is not for activations.
    """
    sizes = [e.nbytes for e in session.entries() if e.kind is EntryKind.PARAM]
    free = session.free_bytes()
    rooms = {"host": max(0, free.get("host", 0) - STATES * sum(sizes))}
    if "disk" in free and session.durable is None:
        rooms = {"host": max(rooms["host"], free["host"] // 4), "disk": free["disk"] // 2}
    rooms = {tier: nbytes for tier, nbytes in rooms.items() if nbytes}
    if session.fabric is not None and session.config.machine is None:
        # What is measured differs from rank to rank, and what is made again decides what is
        # gathered in backward: all ranks choose for one machine that none of them has measured.
        return ActivationBudget(find_machine(NOMINAL_MACHINE), {}, False)
    with without_modes():  # what is measured must be done, and not traced
        machine = machine_for(session.config, session.device)
    return ActivationBudget(machine, rooms, session.ways().asynchronous)


def _contributions(graph: fx.Graph, plan: GraphPlan) -> Mapping[NodeName, int]:
    """Number of contributions that the backward of a graph makes to the gradient of each sink."""
    sinks = [name for name, spec in plan.params.items() if spec.sink]
    elements: dict[NodeName, int] = {}
    for sink in find(graph, *ops.SINKS):
        grad, handle = sink.args[:2]
        assert isinstance(grad, fx.Node)
        assert isinstance(handle, fx.Node)
        name = NodeName(handle.name)
        elements[name] = elements.get(name, 0) + grad.meta["val"].numel()
    made = {n: c // max(1, plan.params[n].layout.numel) for n, c in elements.items()}
    return {n: max(1, made.get(n, 0)) for n in sinks}


def _sent_home(graph: fx.Graph) -> set[str]:
    """Names of the handles whose gradients a graph sends home."""
    handles = [sink.args[1] for sink in find(graph, *ops.SINKS)]
    return {handle.name for handle in handles if isinstance(handle, fx.Node)}


def _gathered_in_backward(handle: fx.Node) -> bool:
    """Whether backward fetches the parameter of a handle."""
    return any(
        user.target is ops.fetch and phase_of(user) is Phase.BACKWARD for user in handle.users
    )


def _weakly(session: Session | None) -> Weakly:
    return weakref.ref(session) if session is not None else lambda: None


def _followed(compiled: Callable[..., Any], session: Weakly, graph: _Graph) -> Callable[..., Any]:
    """`compiled`; after each call its gradients know by which node of autograd they will come, and
    that node hands on which of its own are undefined."""

    def call(*args: Any) -> Any:
        since = next_sequence_number()
        results = compiled(*args)
        node = cache(lambda: node_of_call(results, since) or node_of_call(args, since))
        if graph.takes_undefined and (found := node()) is not None:
            hand_on_undefined(found)
        if (alive := session()) is not None:
            alive.gradients.expect_from(node)
        return results

    return call


def _bound(
    session: Weakly, at: Callable[[Sequence[Any]], Schedule]
) -> Callable[[list[Any]], list[Any]]:
    """The function that runs the schedule for its inputs; it empties the list it is given."""

    def call(args: list[Any]) -> list[Any]:
        alive = session()
        assert alive is not None, "the handles among the inputs keep their session"
        with torch.no_grad():
            return alive.executor.run(_as_synced(alive, at(args)), args)

    return call


def _as_synced(session: Session, schedule: Schedule) -> Schedule:
    """`schedule`, or what a backward walks in its place within `no_sync`."""
    if schedule.phase is not Phase.BACKWARD or not session.gradients.within_no_sync:
        return schedule
    made = session.summing_alone(schedule.serial)
    same = made.holds.sizes == schedule.holds.sizes
    return made if same else replace(made, holds=schedule.holds)
