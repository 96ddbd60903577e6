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
    {"zcompile.eager"},
    {"zcompile.fillings", "zcompile.plain_values"},
    {"zcompile.streaming", "zcompile.clipping", "zcompile.repeats"},
    {"zcompile.unbacked", "zcompile.chunked"},
    {"zcompile.rows", "zcompile.narrowing"},
    {"zcompile.residency", "zcompile.timeline_dump"},
    {"zcompile.step_planning"},
    {"zcompile.refitting"},
    {"zcompile.step_plan", "zcompile.bounds"},
    {"zcompile.least_program"},
    {"zcompile.pipeline", "zcompile.lower", "zcompile.arrange", "zcompile.dump"},
    {"zcompile.block_files", "zcompile.checkpoint_directory", "zcompile.shards"},
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
        "zcompile.run_format",
        "zcompile.safetensors_file",
        "zcompile.machine_file",
        "zcompile.user_code",
    },
    {"zcompile.journeys"},
    {"zcompile.machine", "zcompile.curve", "zcompile.sliced_region"},
    {
        "zcompile.errors",
        "zcompile.units",
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
    {"zcompile.errors", "zcompile.units"},
)
"""Rooms on one floor that may import each other, as long as there is no cycle."""

Walk = Callable[[ast.AST], Iterator[ast.AST]]

PRIVATE_ROOM = "zcompile.torch_private"
MAX_LINES = 300


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


@pytest.mark.parametrize("module", MODULES)
def test_every_module_is_on_a_floor(module):
    assert room_of(module), f"give {module} a floor in FLOORS"


def test_a_room_stands_on_one_floor_only():
    rooms = [room for floor in FLOORS for room in floor]
    assert len(rooms) == len(set(rooms))


@pytest.mark.parametrize("module", MODULES)
def test_imports_go_down(module):
    up = [f"line {line}: {other}" for other, line in our_imports(module)
          if not may_import(module, other)]  # fmt: skip
    assert not up, f"{module} ({room_of(module)}) may not import {', '.join(up)}"


def test_no_module_needs_itself_to_be_imported():
    # A factory may name the implementations of its own protocol, if it does so when called.
    graph = {module: {other for other, _ in our_imports(module, nodes_run_at_import)}
             for module in MODULES}  # fmt: skip
    graphlib.TopologicalSorter(graph).prepare()


@pytest.mark.parametrize("module", [m for m in MODULES if m.startswith("zcompile.runtime")])
def test_the_runtime_does_not_know_fx(module):
    fx = [line for name, line in torch_names(module) if f"{name}.".startswith("torch.fx.")]
    assert not fx, f"{module} knows torch.fx in lines {fx}"


@pytest.mark.parametrize("module", [m for m in MODULES if m != PRIVATE_ROOM])
def test_private_torch_lives_in_one_room(module):
    private = sorted({f"line {line}: {name}" for name, line in torch_names(module)
                      if is_private(name)})  # fmt: skip
    assert not private, f"move to {PRIVATE_ROOM}: {', '.join(private)}"


@pytest.mark.parametrize(("name", "private"), [
    ("torch._ops.OpOverload", True),
    ("torch.cuda._sleep", True),
    ("functorch.compile.make_boxed_func", True),
    ("torch.ops.aten._fused_adamw_", False),
    ("torch.__version__", False),
    ("torch.fx.Node", False),
])  # fmt: skip
def test_what_counts_as_private(name, private):
    assert is_private(name) is private


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_file_says_what_it_is_for_and_fits_in_a_head(path):
    text = path.read_text(encoding="utf-8")
    assert ast.get_docstring(tree_of(path)), "a file opens by saying what it is for"
    assert text.count("\n") < MAX_LINES
