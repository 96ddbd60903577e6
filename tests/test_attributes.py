"""Who may assign an attribute: the file of the class that has it, and no other.

What a part works with comes in by its constructor, and what becomes of it is done by its methods:
whoever reads a class has seen everything that changes its objects. Read with `ast`, by names: an
attribute belongs to a file if a class there has one of that name, or inherits it.
"""

import ast
import functools
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest
from test_layers import MODULES, tree_of

OF_OTHERS = {
    "args": "fx.Node: how torch rewrites a graph",
    "kwargs": "fx.Node",
    "target": "fx.Node",
    "meta": "fx.Node",
    "grad": "Tensor: what the runtime is there to set",
    "data": "Tensor",
    "_backward_hooks": "Tensor: forgotten in torch_compat, as before the first hook",
    "_post_accumulate_grad_hooks": "Tensor",
    "_flat_weight_refs": "nn.RNNBase, which refers to its weights weakly",
    "exceeds_recompile_limit": "torch's own question before it compiles once more, in torch_compat",
    "_maybe_set": "torch's own list of what it saves, in torch_compat",
    "_log_joint_graph": "AOTAutograd's own, which writes graphs down, in torch_compat for a while",
    "_log_fw_bw_graphs": "AOTAutograd's own, in torch_compat for a while",
    "create_joint": "AOTAutograd's own, which traces joint graphs, in torch_compat",
    "handle": "a function of AOTAutograd: what it has its tracing told by",
    "_collect_fake_inputs": "torch 2.11's, of higher-order ops, in torch_compat",
    "runtime_unwrap_tensor_subclasses": "AOTAutograd's of torch 2.11, in torch_compat",
    "_boxed_call": "a function: the mark of AOTAutograd's calling convention",
    "disabled": "logging.Logger: torch's, muted for a while",
    "loss_type": "a config of transformers",
    "__class__": "an Accelerator that a Trainer of transformers has made, of a class of its own",
    "memory": "an array of ctypes, which keeps alive what it lies over",
    "argtypes": "a function of ctypes",
    "restype": "a function of ctypes",
}
"""Attributes of objects that are not ours, and whose they are."""


def targets(node: ast.expr) -> Iterator[ast.Attribute]:
    """The attributes that an assignment to `node` sets."""
    match node:
        case ast.Tuple(elts=parts) | ast.List(elts=parts):
            for part in parts:
                yield from targets(part)
        case ast.Starred(value=value):
            yield from targets(value)
        case ast.Attribute():
            yield node


def assigned(tree: ast.AST) -> Iterator[ast.Attribute]:
    for node in ast.walk(tree):
        match node:
            case ast.Assign(targets=many) | ast.Delete(targets=many):
                for target in many:
                    yield from targets(target)
            case ast.AugAssign(target=one) | ast.AnnAssign(target=one) | ast.For(target=one):
                yield from targets(one)
            case ast.withitem(optional_vars=ast.expr() as one):
                yield from targets(one)


def is_own(attribute: ast.Attribute) -> bool:
    """Whether a method assigns it to its own object, or to its class."""
    return isinstance(attribute.value, ast.Name) and attribute.value.id in ("self", "cls")


def declared(made: ast.ClassDef) -> Iterator[str]:
    """The attributes of a class: of its body, and those that its methods assign."""
    for row in made.body:
        match row:
            case ast.AnnAssign(target=ast.Name(id=name)):
                yield name
            case ast.Assign(targets=[ast.Name(id=name)]):
                yield name
    yield from (attribute.attr for attribute in assigned(made) if is_own(attribute))


def attributes_of_classes(trees: list[ast.Module]) -> dict[str, set[str]]:
    """Name of a class -> its attributes, with those that it inherits from others here."""
    own, bases = defaultdict(set), defaultdict(set)
    for tree in trees:
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                own[node.name] |= set(declared(node))
                bases[node.name] |= {b.id for b in node.bases if isinstance(b, ast.Name)}

    def all_of(name: str) -> set[str]:
        return own[name].union(*(all_of(b) for b in bases[name] if b != name and b in own))

    return {name: all_of(name) for name in list(own)}


@functools.cache
def classes() -> dict[str, set[str]]:
    """Of the product. Asked for by tests, since every process of tests imports this file."""
    return attributes_of_classes([tree_of(path) for path in MODULES.values()])


def foreign(tree: ast.Module) -> list[str]:
    """The attributes that a file assigns to objects whose class stands in another one."""
    here = {node.name for node in ast.walk(tree) if isinstance(node, ast.ClassDef)}
    mine = set[str]().union(*(classes().get(name, set()) for name in here))
    return [
        f"{ast.unparse(attribute)} in line {attribute.lineno}"
        for attribute in assigned(tree)
        if not is_own(attribute) and attribute.attr not in mine | OF_OTHERS.keys()
    ]


@pytest.mark.parametrize("path", MODULES.values(), ids=MODULES)
def test_a_file_assigns_attributes_of_its_own_classes_only(path: Path) -> None:
    assert foreign(tree_of(path)) == []


def test_nothing_is_assigned_by_a_name_that_is_a_value() -> None:
    """`setattr` would go around it; a class may do so for attributes of its own."""
    calls = [
        ast.unparse(node)
        for path in MODULES.values()
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.Call)
        and ast.unparse(node.func).endswith(("setattr", "__setattr__"))
        and ast.unparse(node.args[0]) != "self"
    ]
    assert calls == ["setattr(TieredTensor, _name, _converting(_name))"]


@pytest.mark.parametrize(
    "line",
    [
        "session.executor.fit = unchanged",
        "a, (b.c, session.depth) = found",
        "entry.version += 1",
        "for session.depth in range(3): pass",
        "with opened() as session.file: pass",
        "del session.depth",
    ],
)
def test_every_form_of_assignment_is_found(line: str) -> None:
    assert foreign(ast.parse(line))
