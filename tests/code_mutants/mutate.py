"""Small changes of product code: what may be changed in a text, and the text with one change.

A mutant changes one place within one function. Its text is the source with that place replaced, so
that a difference of the two is what a reviewer would read.
"""

import ast
import hashlib
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property

SIZE = re.compile(
    r"(?:^|_)(?:offset|nbytes|begin|end|start|stop|size|length|stride|itemsize|low|high|numel|count"
    r"|version|bytes|at|skip|granule|alignment|left|rest)$"
)
"""Names of numbers that say where bytes lie and how many they are."""

SWAPPED_CALLS = {"min": "max", "max": "min", "any": "all", "all": "any"}
COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
TOLD = re.compile(r"(?:^|\.)_?(log|logger|note|warn|warnings|told)\b")
"""Statements that only tell."""


@dataclass(frozen=True)
class Mutant:
    """One change at one place.

    file      path of the source below the root of the tree
    function  qualified name of the function that is changed
    kind      "condition", "size", "removed" or "returned"
    within    digest of what the function says
    nth       which of those that read the same, in this function
    """

    file: str
    function: str
    kind: str
    was: str
    becomes: str
    line: int
    statement: str
    begin: int
    end: int
    within: str
    nth: int = 0

    @cached_property
    def name(self) -> str:
        """Stays as it is where other functions of the file change."""
        told = (
            self.file,
            self.function,
            self.statement,
            self.kind,
            self.was,
            self.becomes,
            self.within,
            str(self.nth),
        )
        return _digest("\0".join(told))

    def of(self, source: str) -> str:
        """The source with this change."""
        text = source.encode()
        return (text[: self.begin] + self.becomes.encode() + text[self.end :]).decode()


def mutants(file: str, source: str) -> list[Mutant]:
    """All changes of the functions of a source that are known here, in the order of its lines."""
    found: list[Mutant] = []
    seen: dict[Mutant, int] = {}
    for mutant in _Places(file, source).all():
        alike = replace(mutant, begin=0, end=0, line=0)
        seen[alike] = nth = seen.get(alike, -1) + 1
        found.append(replace(mutant, nth=nth))
    return found


def functions(tree: ast.AST, above: str = "") -> Iterator[tuple[str, ast.FunctionDef]]:
    """Outermost functions and methods with their qualified names."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef):
            yield above + node.name, node
        elif isinstance(node, ast.ClassDef):
            yield from functions(node, f"{above}{node.name}.")
        else:
            yield from functions(node, above)


def head(statement: ast.stmt) -> str:
    """A statement's own text: of a compound one without its body, in one line."""
    lines = ast.unparse(statement).splitlines()
    compound = isinstance(getattr(statement, "body", None), list)
    return lines[0] if compound else " ".join(part.strip() for part in lines)


class _Places:
    def __init__(self, file: str, source: str) -> None:
        self._file = file
        self._tree = ast.parse(source)
        starts = [0]
        for line in source.encode().splitlines(keepends=True):
            starts.append(starts[-1] + len(line))
        self._starts = starts
        self._function = self._within = ""
        self._statement: ast.stmt

    def all(self) -> Iterator[Mutant]:
        for name, node in functions(self._tree):
            self._function = name
            self._within = _digest(ast.unparse(node))
            for statement in node.body:
                yield from self._of_statement(statement)

    # -- statements

    def _of_statement(self, node: ast.stmt) -> Iterator[Mutant]:
        self._statement = node
        match node:
            case ast.Assert() | ast.Import() | ast.ImportFrom() | ast.ClassDef() | ast.Pass():
                return
            case ast.Expr(value=ast.Constant()):
                return  # a docstring
            case ast.Expr(value=ast.Call(func=func)) if TOLD.search(ast.unparse(func)):
                return
            case ast.Expr(value=ast.Call() | ast.Await()):
                yield self._at(node, "removed", "pass")
            case ast.Assign(targets=targets) if any(
                isinstance(t, ast.Attribute | ast.Subscript) for t in targets
            ):
                yield self._at(node, "removed", "pass")
            case ast.AugAssign() | ast.Delete():
                yield self._at(node, "removed", "pass")
            case ast.Raise():
                yield self._at(node, "removed", "pass")
                return  # what the message says is not what is done
            case ast.Continue() | ast.Break():
                yield self._at(node, "removed", "pass")
            case ast.Return(value=ast.expr() as value):
                yield from self._of_returned(value)
            case ast.If(test=test) | ast.While(test=test):
                yield from self._of_test(test, loops=isinstance(node, ast.While))
        for name, field in ast.iter_fields(node):
            if name in ("annotation", "args", "returns", "decorator_list"):
                continue  # of a statement: said to people, or done where a function is defined
            parts = field if isinstance(field, list) else [field]
            for part in parts:
                self._statement = node
                match part:
                    case ast.stmt():
                        yield from self._of_statement(part)
                    case ast.ExceptHandler() | ast.match_case():
                        if isinstance(part, ast.match_case) and part.guard is not None:
                            yield from self._of_test(part.guard)
                            yield from self._of_expression(part.guard)
                        for inner in part.body:
                            yield from self._of_statement(inner)
                    case ast.withitem():
                        yield from self._of_expression(part.context_expr)
                    case ast.expr():
                        yield from self._of_expression(part)

    def _of_returned(self, value: ast.expr) -> Iterator[Mutant]:
        match value:
            case ast.Constant(value=None):
                return
            case ast.Constant(value=bool() as said):
                yield self._at(value, "returned", str(not said))
            case ast.Compare() | ast.BoolOp() | ast.UnaryOp(op=ast.Not()):
                yield self._at(value, "returned", f"not ({ast.unparse(value)})")
            case _:
                yield self._at(value, "returned", "None")

    def _of_test(self, test: ast.expr, loops: bool = False) -> Iterator[Mutant]:
        if isinstance(test, ast.Constant | ast.NamedExpr):
            return
        if not (isinstance(test, ast.Compare) and len(test.ops) == 1):
            yield self._at(test, "condition", f"(not ({ast.unparse(test)}))")
        if not any(isinstance(part, ast.NamedExpr) for part in ast.walk(test)):
            yield self._at(test, "condition", "False")
            if not loops:
                yield self._at(test, "condition", "True")

    # -- expressions

    def _of_expression(self, node: ast.AST) -> Iterator[Mutant]:
        if isinstance(node, ast.JoinedStr | ast.Constant) and not isinstance(
            getattr(node, "value", None), bool | int
        ):
            return
        match node:
            case ast.Compare(left=left, ops=[op], comparators=[right]) if type(op) in COMPARISONS:
                other = COMPARISONS[type(op)]()
                yield self._changed(node, "condition", ast.Compare(left, [other], [right]))
            case ast.BoolOp(op=op, values=values):
                other = ast.Or() if isinstance(op, ast.And) else ast.And()
                yield self._changed(node, "condition", ast.BoolOp(other, values))
                for leave in range(len(values)):
                    rest = values[:leave] + values[leave + 1 :]
                    less = rest[0] if len(rest) == 1 else ast.BoolOp(op, rest)
                    if not isinstance(values[leave], ast.NamedExpr):
                        yield self._changed(node, "condition", less)
            case ast.UnaryOp(op=ast.Not(), operand=operand):
                yield self._changed(node, "condition", operand)
            case ast.UnaryOp(
                op=ast.USub(),
                operand=ast.BinOp(
                    left=ast.UnaryOp(op=ast.USub(), operand=x), op=ast.FloorDiv(), right=y
                ),
            ):
                yield self._changed(node, "size", ast.BinOp(x, ast.FloorDiv(), y))
                return
            case ast.IfExp(test=test):
                yield from self._of_test(test)
            case ast.comprehension(ifs=ifs):
                for test in ifs:
                    yield from self._of_test(test)
            case ast.BinOp():
                yield from self._of_sum(node)
            case ast.Call():
                yield from self._of_call(node)
            case ast.Slice(lower=ast.expr() as low, upper=ast.expr() as high):
                yield self._at(node, "size", f"{ast.unparse(high)}:{ast.unparse(low)}")
            case ast.Constant(value=bool() as said):
                yield self._at(node, "condition", str(not said))
            case ast.Constant(value=int() as said) if abs(said) <= 1 << 40:
                yield self._at(node, "size", str(said + 1))
                if said > 0:
                    yield self._at(node, "size", str(said - 1))
            case ast.Name(ctx=ast.Load()) | ast.Attribute(ctx=ast.Load()):
                text = ast.unparse(node)
                if SIZE.search(text.rpartition(".")[2]):
                    yield self._at(node, "size", f"({text} + 1)")
                    yield self._at(node, "size", f"({text} - 1)")
                return
            case ast.Lambda(body=body):
                yield from self._of_expression(body)
                return
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.expr | ast.comprehension | ast.keyword):
                if isinstance(node, ast.Call) and child is node.func:
                    # The name of what is called is no number; what it is called on may be one.
                    if isinstance(child, ast.Attribute):
                        yield from self._of_expression(child.value)
                    continue
                yield from self._of_expression(child)

    def _of_sum(self, node: ast.BinOp) -> Iterator[Mutant]:
        left, right = node.left, node.right
        match node.op:
            case ast.Add() if not isinstance(right, ast.Tuple | ast.List | ast.Constant):
                yield self._changed(node, "size", ast.BinOp(left, ast.Sub(), right))
            case ast.Sub():
                yield self._changed(node, "size", ast.BinOp(left, ast.Add(), right))
            case ast.Mult():
                yield self._changed(node, "size", left)
                yield self._changed(node, "size", right)
            case ast.FloorDiv():
                up = ast.UnaryOp(
                    ast.USub(),
                    ast.BinOp(ast.UnaryOp(ast.USub(), left), ast.FloorDiv(), right),
                )
                yield self._changed(node, "size", up)
                yield self._changed(node, "size", left)
            case ast.Mod():
                yield self._changed(node, "size", ast.BinOp(left, ast.FloorDiv(), right))
            case ast.BitAnd():
                yield self._changed(node, "condition", ast.BinOp(left, ast.BitOr(), right))
            case ast.BitOr():
                yield self._changed(node, "condition", ast.BinOp(left, ast.BitAnd(), right))

    def _of_call(self, node: ast.Call) -> Iterator[Mutant]:
        func = node.func
        if isinstance(func, ast.Name) and func.id in SWAPPED_CALLS:
            other = ast.Call(ast.Name(SWAPPED_CALLS[func.id]), node.args, node.keywords)
            kind = "size" if func.id in ("min", "max") else "condition"
            yield self._changed(node, kind, other)
        alike = isinstance(func, ast.Name) and func.id in SWAPPED_CALLS  # whatever the order
        for at in range(0 if alike else len(node.args) - 1):
            pair = node.args[at : at + 2]
            if all(SIZE.search(ast.unparse(arg).rpartition(".")[2]) for arg in pair):
                args = [*node.args[:at], pair[1], pair[0], *node.args[at + 2 :]]
                yield self._changed(node, "size", ast.Call(func, args, node.keywords))
        for keyword in node.keywords:
            if keyword.arg is not None and isinstance(keyword.value, ast.Constant):
                rest = [other for other in node.keywords if other is not keyword]
                yield self._changed(node, "condition", ast.Call(func, node.args, rest))

    # -- texts

    def _changed(self, node: ast.expr, kind: str, other: ast.expr) -> Mutant:
        text = ast.unparse(other)
        atom = isinstance(other, ast.Name | ast.Attribute | ast.Call | ast.Constant | ast.Subscript)
        return self._at(node, kind, text if atom else f"({text})")

    def _at(self, node: ast.expr | ast.stmt, kind: str, becomes: str) -> Mutant:
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        return Mutant(
            self._file,
            self._function,
            kind,
            ast.unparse(node) if isinstance(node, ast.expr) else head(node),
            becomes,
            node.lineno,
            head(self._statement),
            self._starts[node.lineno - 1] + node.col_offset,
            self._starts[node.end_lineno - 1] + node.end_col_offset,
            self._within,
        )


def _digest(text: str) -> str:
    return hashlib.sha1(text.encode()).hexdigest()[:10]
