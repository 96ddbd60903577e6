"""Who may import whom: the entries of `zcompile/` as data, every file's imports read with `ast`."""

import ast
import functools
import graphlib
import sys
from collections.abc import Callable, Iterator
from itertools import takewhile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

FLOORS = (
    {"errors"},
    {"sparse_attention"},
    {"ir"},
    {"machine"},
    {"config"},
    {"memory"},
    {"verify"},
    {"passes"},
    {"planner"},
    {"runtime"},
    {"checkpoint"},
    {"frontend"},
    {"integrations"},
    {"__init__"},  # the public face
    {"cli"},
)
"""The entries of `zcompile/`, bottom to top: each may import what stands below it."""

WINGS = ({"passes", "planner"}, {"runtime"})
"""The compiler and what executes: neither imports the other."""

LEAVES = {"zcompile.ir.units"}
"""Modules that import nothing of ours, so that any may import them: an error tells sizes."""

PASSES_MAY_SHARE = {"zcompile.passes.base", "zcompile.passes.trial"}
PIPELINE = {
    f"zcompile.passes.{name}" for name in ("arrange", "choose_tiles", "instrument", "pipeline")
}
"""Modules of `passes` that put passes together, or come after all of them."""

Walk = Callable[[ast.AST], Iterator[ast.AST]]

PRIVATE_ROOM = "zcompile.ir.torch_compat"


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


def entry_of(module: str) -> str:
    """The entry of `zcompile/` that a module belongs to; triton_kernels is none of them."""
    parts = module.split(".")
    if parts[0] != "zcompile":
        return parts[0]
    return parts[1] if len(parts) > 1 else "__init__"


def floor_of(module: str) -> int:
    entry = entry_of(module)
    floors = [i for i, floor in enumerate(FLOORS) if entry in floor]
    assert floors, f"{module} stands on no floor"
    return floors[0]


def may_import(module: str, other: str) -> bool:
    here, there = entry_of(module), entry_of(other)
    if other in LEAVES or there == "triton_kernels":
        return True
    if here == there == "passes":
        return may_share(module, other)
    if any(here in one and there in two for one in WINGS for two in WINGS if one is not two):
        return False
    return here == there or floor_of(other) <= floor_of(module)


def may_share(module: str, other: str) -> bool:
    """Whether a module of `passes` may import another: no pass knows a pass beside it."""
    together = module.split(".")[2:3] == other.split(".")[2:3]
    return together or module in PIPELINE or other in PASSES_MAY_SHARE


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
    for module in MODULES:
        if entry_of(module) != "triton_kernels":
            floor_of(module)


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
        ("zcompile.frontend.backend", "zcompile.passes.pipeline", True),
        ("zcompile.passes.pipeline", "zcompile.frontend.backend", False),
        ("zcompile.passes.allocate_arena", "zcompile.runtime.device.arena", False),
        ("zcompile.runtime.device.arena", "zcompile.passes.allocate_arena", False),
        ("zcompile.runtime.session", "zcompile.planner.bounds", False),
        ("zcompile.planner.step_plan", "zcompile.passes.arrange", True),
        ("zcompile.passes.allocate_arena", "zcompile.passes.tile_loss.match", False),
        ("zcompile.passes.tile_loss", "zcompile.passes.tile_loss.match", True),
        ("zcompile.runtime.store.store", "zcompile.runtime.device.arena", True),
        ("zcompile.errors", "zcompile.ir.units", True),
        ("zcompile.errors", "zcompile.ir.types", False),
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


KERNEL_SIDE = {"kernel", "table"}
"""Modules of triton_kernels that need triton to be imported: ops import them when they launch."""


def test_kernels_know_torch_and_triton_and_need_triton_only_to_be_launched():
    ours = [module for module in MODULES if module.startswith("triton_kernels")]
    known = {"torch", "triton", "triton_kernels", *sys.stdlib_module_names}
    strangers = [
        f"{module}:{line} imports {name}"
        for module in ours
        for name, line in imports(module)
        if name.partition(".")[0] not in known
    ]
    assert not strangers, "\n".join(strangers)
    for module in ours:
        if module.rpartition(".")[2] not in KERNEL_SIDE:
            at_import = {name for name, _ in imports(module, nodes_run_at_import)}
            needs = [name for name in at_import if name.split(".")[0] == "triton"]
            sides = [name for name in at_import if KERNEL_SIDE & set(name.split("."))]
            assert not needs + sides, f"{module} needs triton to be imported"


LOGS_AS = {"zcompile.passes.instrument": "zcompile.passes"}
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
