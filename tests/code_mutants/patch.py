"""Another text of a module's functions, put into a process that has imported the module.

Only code is exchanged: functions stay the objects that others imported, registered or wrapped. What
a module does while it is imported is not repeated, so a change there would not be seen; changes are
therefore made within functions.
"""

import gc
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import CodeType, FunctionType

Key = tuple[str, int]
"""A qualified name, and which of those of this name in the source."""


def codes(source: str, path: Path) -> dict[Key, CodeType]:
    """The code of each function of a source, inner ones and lambdas included."""
    seen: Counter[str] = Counter()
    found = {}
    for code in _within(compile(source, str(path), "exec", dont_inherit=True)):
        found[code.co_qualname, seen[code.co_qualname]] = code
        seen[code.co_qualname] += 1
    return found


class Patcher:
    """The functions of some modules as this process holds them; made before garbage is frozen."""

    def __init__(self, paths: Mapping[str, Path]) -> None:
        """`paths`: the sources as they were imported, by the names that `put` knows them under."""
        self._paths = dict(paths)
        of_path = {str(path): name for name, path in paths.items()}
        texts = {name: path.read_text("utf-8") for name, path in paths.items()}
        keys = {
            name: {code: key for key, code in codes(texts[name], path).items()}
            for name, path in paths.items()
        }
        self._held: dict[str, list[tuple[Key, FunctionType]]] = {name: [] for name in paths}
        for held in gc.get_objects():
            if isinstance(held, FunctionType):
                name = of_path.get(held.__code__.co_filename)
                if name is not None and held.__code__ in keys[name]:
                    self._held[name].append((keys[name][held.__code__], held))

    def functions(self, name: str) -> int:
        return len(self._held[name])

    def put(self, name: str, source: str) -> None:
        """From here on the functions of `name` do what `source` says."""
        others = codes(source, self._paths[name])
        for key, function in self._held[name]:
            code = others[key]
            if code.co_freevars == function.__code__.co_freevars:
                function.__code__ = code
            else:
                raise ValueError(f"{name}: {key[0]} closes over other variables")


def _within(code: CodeType) -> Iterator[CodeType]:
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield inner
            yield from _within(inner)
