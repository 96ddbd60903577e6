"""Who may import whom: the floors of the house as data, every file's imports read with `ast`."""

import ast
import functools
import graphlib
from collections.abc import Callable, Iterator
from itertools import takewhile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

FLOORS = (
    {"zcompile.cli"},
    {"zcompile"},  # the face
    {"zcompile.planning"},
    {"zcompile.paper_step", "zcompile.report"},
    {"zcompile.paper"},
    {"zcompile.report_rows", "zcompile.paper_regions"},
    {"zcompile.outlook"},
    {"zcompile.backend", "zcompile.offloading", "zcompile.checkpoint"},
    {"zcompile.checkpoint_source"},
    {"zcompile.optimizers"},
    {"zcompile.durable"},
    {"zcompile.training_state", "zcompile.tensor_writer", "zcompile.tensor_loader"},
    {"zcompile.optimizer_state", "zcompile.tensor_bytes"},
    {"zcompile.tiered", "zcompile.model_state"},
    {"zcompile.eager", "zcompile.data_assignment"},
    {"zcompile.fillings", "zcompile.plain_values", "zcompile.fresh_results"},
    {"zcompile.streaming", "zcompile.clipping", "zcompile.repeats"},
    {"zcompile.unbacked", "zcompile.chunked", "zcompile.pickled_bytes"},
    {"zcompile.rows", "zcompile.narrowing", "zcompile.shared_memory"},
    {"zcompile.residency", "zcompile.timeline_dump"},
    {"zcompile.step_planning"},
    {"zcompile.refitting"},
    {"zcompile.step_plan", "zcompile.floor"},
    {"zcompile.bounds"},
    {"zcompile.least_program"},
    {"zcompile.pipeline", "zcompile.lower", "zcompile.arrange", "zcompile.dump"},
    {"zcompile.block_files", "zcompile.checkpoint_directory", "zcompile.shards"},
    {"zcompile.safetensors_file"},
    {"zcompile.checkpoint_file"},
    {"zcompile.passes", "zcompile.runtime"},  # two wings, never each other
    {"zcompile.linear_program", "zcompile.greedy_placement", "zcompile.loss_rewrite"},
    {
        "zcompile.loss_backward",
        "zcompile.tiled_weights",
        "zcompile.tiled_gradients",
        "zcompile.token_slices",
    },
    {"zcompile.tiled_uses"},
    {"zcompile.budget_search", "zcompile.tiling", "zcompile.tiles", "zcompile.loss_gradient"},
    {"zcompile.loads", "zcompile.traced_values"},
    {"zcompile.verify", "zcompile.verify_schedule", "zcompile.lower_step"},
    {"zcompile.proof"},
    {"zcompile.levels"},
    {"zcompile.regions", "zcompile.walks", "zcompile.loss_tiles"},
    {"zcompile.printer", "zcompile.runs", "zcompile.loss_match", "zcompile.loss_choice"},
    {"zcompile.prediction"},
    {"zcompile.simulate"},
    {"zcompile.simulated_steps"},
    {"zcompile.flying", "zcompile.routes", "zcompile.told"},
    {"zcompile.step_chunks", "zcompile.traffic", "zcompile.timeline", "zcompile.stages"},
    {"zcompile.activation_graph", "zcompile.saved_rewriting", "zcompile.token_limits"},
    {"zcompile.token_regions"},
    {"zcompile.token_halves"},
    {"zcompile.activation_split", "zcompile.saved_values"},
    {"zcompile.activation_choice", "zcompile.token_rules", "zcompile.slice_choice"},
    {"zcompile.activation_bound", "zcompile.activation_search"},
    {"zcompile.activation_problem"},
    {
        "zcompile.liveness",
        "zcompile.footprint",
        "zcompile.device_peaks",
        "zcompile.packing",
        "zcompile.home_bytes",
        "zcompile.happens_before",
    },
    {"zcompile.sized"},
    {"zcompile.first_fit", "zcompile.time_sweep", "zcompile.storages"},
    {"zcompile.sections", "zcompile.under_way", "zcompile.staying"},
    {"zcompile.held_walk"},
    {"zcompile.scale"},
    {"zcompile.demand"},
    {"zcompile.steps", "zcompile.cost", "zcompile.handover", "zcompile.step_rows", "zcompile.work"},
    {"zcompile.graph", "zcompile.graph_plan", "zcompile.schedule"},
    {"zcompile.holds", "zcompile.ops", "zcompile.specs", "zcompile.config", "zcompile.handles"},
    {
        "zcompile.torch_private",
        "zcompile.ties",
        "zcompile.run_format",
        "zcompile.machine_file",
        "zcompile.user_code",
    },
    {"zcompile.journeys", "zcompile.sound_json"},
    {"zcompile.machine", "zcompile.curve", "zcompile.sliced_region", "zcompile.staging_size"},
    {
        "zcompile.errors",
        "zcompile.units",
        "zcompile.ranks",
        "zcompile.records",
        "zcompile.tables",
        "zcompile.version",
        "triton_kernels",
        "zcompile.byte_ranges",
        "zcompile.listed",
        "zcompile.quiet",
    },
)
"""Top to bottom. A room is a module, or a package with all its modules."""

NEIGHBOURS = (
    {"zcompile.graph", "zcompile.graph_plan", "zcompile.schedule"},
    {"zcompile.ops", "zcompile.specs", "zcompile.config", "zcompile.handles"},
    {"zcompile.errors", "zcompile.units", "zcompile.ranks"},
)
"""Rooms on one floor that may import each other, as long as there is no cycle."""

Walk = Callable[[ast.AST], Iterator[ast.AST]]

PRIVATE_ROOM = "zcompile.torch_private"


def module_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {
    module_of(path): path
    for package in ("zcompile", "triton_kernels")
    for path in sorted((ROOT / package).rglob("*.py"))
}
FILES = sorted(
    path
    for folder in ("zcompile", "triton_kernels", "tests", "examples", "benchmarks")
    for path in (ROOT / folder).rglob("*.py")
)


@functools.cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


def nodes_run_at_import(tree: ast.AST) -> Iterator[ast.AST]:
    """As `ast.walk`, without what waits inside functions."""
    for node in ast.iter_child_nodes(tree):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            yield node
            yield from nodes_run_at_import(node)


def imports(module: str, walk: Walk = ast.walk) -> Iterator[tuple[str, int]]:
    """Full names that a module imports, members included, and the line."""
    for node in walk(tree_of(MODULES[module])):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from ((f"{node.module}.{alias.name}", node.lineno) for alias in node.names)


def our_imports(module: str, walk: Walk = ast.walk) -> Iterator[tuple[str, int]]:
    """Modules of this repository that a module imports, and the line."""
    for name, line in imports(module, walk):
        while name and name not in MODULES:
            name = name.rpartition(".")[0]
        if name and name != module:
            yield name, line


@functools.cache
def room_of(module: str) -> str:
    """The longest room that holds the module; "" if none does."""
    rooms = set().union(*FLOORS) - {"zcompile"}
    name = module
    while name and name not in rooms:
        name = name.rpartition(".")[0]
    return name or ("zcompile" if module == "zcompile" else "")


def floor_of(room: str) -> int:
    floors = [i for i, floor in enumerate(FLOORS) if room in floor]
    assert floors, f"{room or 'a module'} stands on no floor"
    return floors[0]


def may_import(module: str, other: str) -> bool:
    here, there = room_of(module), room_of(other)
    if here == there == "zcompile.passes":
        return other == "zcompile.passes.base" or module == "zcompile.passes"
    if here == there or any({here, there} <= rooms for rooms in NEIGHBOURS):
        return True
    return floor_of(there) > floor_of(here)


def dotted(node: ast.expr) -> str:
    """The text "torch.fx.Node" of such an expression; "" of any other."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute) and (base := dotted(node.value)):
        return f"{base}.{node.attr}"
    return ""


def torch_names(module: str) -> Iterator[tuple[str, int]]:
    """Every name below torch or functorch that a module imports or spells out."""
    for name, line in imports(module):
        if name.partition(".")[0] in ("torch", "functorch"):
            yield name, line
    for node in ast.walk(tree_of(MODULES[module])):
        if isinstance(node, ast.Attribute) and (name := dotted(node)).startswith("torch."):
            yield name, node.lineno


def is_private(name: str) -> bool:
    """Torch does not promise to keep it. What follows `torch.ops` are names of operators."""
    parts = list(takewhile(lambda part: part != "ops", name.split(".")))
    return parts[0] == "functorch" or any(
        part.startswith("_") and not part.endswith("__") for part in parts
    )


def test_every_module_is_on_a_floor():
    homeless = [module for module in MODULES if not room_of(module)]
    assert not homeless, f"give each a floor in FLOORS: {', '.join(homeless)}"


def test_a_room_stands_on_one_floor_only():
    rooms = [room for floor in FLOORS for room in floor]
    assert len(rooms) == len(set(rooms))


def test_imports_go_down():
    up = [
        f"{MODULES[module].relative_to(ROOT)}:{line} imports {other}"
        for module in MODULES
        for other, line in our_imports(module)
        if not may_import(module, other)
    ]
    assert not up, "\n".join(["a room may not import what stands above it:", *up])


@pytest.mark.parametrize(
    ("module", "other", "may"),
    [
        ("zcompile.backend", "zcompile.pipeline", True),
        ("zcompile.pipeline", "zcompile.backend", False),
        ("zcompile.passes.plan_arena", "zcompile.runtime.arena", False),
        ("zcompile.runtime.arena", "zcompile.passes.plan_arena", False),
        ("zcompile.passes.plan_arena", "zcompile.passes.tile_loss", False),
        ("zcompile.runtime.store", "zcompile.runtime.arena", True),
        ("zcompile.errors", "zcompile.units", True),
    ],
)
def test_what_may_be_imported(module, other, may):
    assert may_import(module, other) is may


def test_no_module_needs_itself_to_be_imported():
    # A factory may name the implementations of its own protocol, if it does so when called.
    graph = {
        module: {other for other, _ in our_imports(module, nodes_run_at_import)}
        for module in MODULES
    }
    graphlib.TopologicalSorter(graph).prepare()


def test_the_runtime_does_not_know_fx():
    fx = [
        f"{MODULES[module].relative_to(ROOT)}:{line}"
        for module in MODULES
        if module.startswith("zcompile.runtime")
        for name, line in torch_names(module)
        if f"{name}.".startswith("torch.fx.")
    ]
    assert not fx, f"torch.fx is named in {', '.join(fx)}"


def test_private_torch_lives_in_one_room():
    private = sorted(
        {
            f"{MODULES[module].relative_to(ROOT)}:{line} {name}"
            for module in MODULES
            if module != PRIVATE_ROOM
            for name, line in torch_names(module)
            if is_private(name)
        }
    )
    assert not private, "\n".join([f"move to {PRIVATE_ROOM}:", *private])


@pytest.mark.parametrize(
    ("name", "private"),
    [
        ("torch._ops.OpOverload", True),
        ("torch.cuda._sleep", True),
        ("functorch.compile.make_boxed_func", True),
        ("torch.ops.aten._fused_adamw_", False),
        ("torch.__version__", False),
        ("torch.fx.Node", False),
    ],
)
def test_what_counts_as_private(name, private):
    assert is_private(name) is private


LOGS_AS = {"zcompile.dump": "zcompile.passes"}
"""It tells what each pass did."""


def test_a_line_of_the_log_says_which_module_wrote_it():
    strangers = [
        f"{MODULES[module].relative_to(ROOT)}:{node.lineno} logs as {node.args[0].value}"
        for module in MODULES
        for node in ast.walk(tree_of(MODULES[module]))
        if isinstance(node, ast.Call)
        and dotted(node.func) == "logging.getLogger"
        and isinstance(node.args[0], ast.Constant)
        and node.args[0].value != LOGS_AS.get(module, module)
    ]
    assert not strangers, "\n".join(strangers)


def test_a_file_says_what_it_is_for():
    silent = [str(path.relative_to(ROOT)) for path in FILES if not ast.get_docstring(tree_of(path))]
    assert not silent, f"each file opens by saying what it is for: {', '.join(silent)}"
