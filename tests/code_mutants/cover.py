"""Which statements a test executes, seen by calls that stand before each statement.

A statement is named by what it says and not by its line, so that what was collected once stays true
of all that did not change. Tracing by the interpreter would slow down all of torch.
"""

import ast
import builtins
from collections import Counter
from collections.abc import Iterator

from code_mutants.mutate import functions, head

HIT = "__zcompile_hit__"

Place = tuple[str, str, str]
"""File, function, what the statement says."""


class Places:
    """Numbers for statements, and the numbers that were met."""

    def __init__(self) -> None:
        self.all: list[Place] = []
        self._numbers: dict[Place, int] = {}
        self._met: set[int] = set()

    def number(self, place: Place) -> int:
        if place not in self._numbers:
            self._numbers[place] = len(self.all)
            self.all.append(place)
        return self._numbers[place]

    def listen(self) -> None:
        setattr(builtins, HIT, self._met.add)

    def take(self) -> set[int]:
        """What was met since it was asked for last."""
        met = set(self._met)
        self._met.clear()
        return met

    def instrumented(self, file: str, source: str) -> str:
        """The source with a call before every statement of a function."""
        tree = ast.parse(source)
        for name, function in functions(tree):
            for node in list(_statements(function)):
                for field in ("body", "orelse", "finalbody"):
                    body = getattr(node, field, None)
                    if isinstance(body, list) and body and isinstance(body[0], ast.stmt):
                        setattr(node, field, list(self._with_calls(file, name, body)))
        return ast.unparse(ast.fix_missing_locations(tree))

    def _with_calls(self, file: str, function: str, body: list[ast.stmt]) -> Iterator[ast.stmt]:
        for node in body:
            if not isinstance(node, ast.Nonlocal | ast.Global):
                at = self.number((file, function, head(node)))
                yield ast.Expr(ast.Call(ast.Name(HIT, ast.Load()), [ast.Constant(at)], []))
            yield node


def places_of(file: str, source: str) -> Counter[Place]:
    """How often each statement is said in a source."""
    found: Counter[Place] = Counter()
    for name, function in functions(ast.parse(source)):
        for node in _statements(function):
            if isinstance(node, ast.stmt) and node is not function:
                found[file, name, head(node)] += 1
    return found


def _statements(node: ast.AST) -> Iterator[ast.AST]:
    """`node`, and the statements and handlers below it, none of a lambda's."""
    yield node
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.stmt | ast.ExceptHandler | ast.match_case):
            yield from _statements(child)
