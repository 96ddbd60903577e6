"""Norms of gradients are taken while the gradients are still on the device.

A loop that clips asks for the same norm in every step. A norm that was asked for in the last step
is taken when a gradient is produced, by the very call that will ask for it, so that clipping reads
no gradient again. The bits are those of the later call: it is the same kernel on the same values.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from zcompile.ir.types import Layout
from zcompile.runtime.store.store import Entry


@dataclass(frozen=True, eq=False)
class Measure:
    """One way to measure a gradient: `func(gradient, *rest, **kwargs)`. The same object each time
    (`measure_of`): gradients keep results by it.

    lists  `func` takes a list of tensors and gives one
    """

    func: Callable[..., Any]
    rest: tuple[Any, ...]
    kwargs: tuple[tuple[str, Any], ...]
    lists: bool

    def __call__(self, grad: Tensor) -> Any:
        return self.func([grad] if self.lists else grad, *self.rest, **dict(self.kwargs))

    def of_each(self, grads: Sequence[Tensor]) -> Sequence[Any]:
        """As a call with each. A list is measured by one call for each dtype, as torch itself
        divides lists: of several it would choose another kernel."""
        if not self.lists:
            return [self(grad) for grad in grads]
        found: list[Any] = [None] * len(grads)
        for dtype in dict.fromkeys(grad.dtype for grad in grads):
            alike = [at for at, grad in enumerate(grads) if grad.dtype is dtype]
            norms = self.func([grads[at] for at in alike], *self.rest, **dict(self.kwargs))
            for at, norm in zip(alike, norms, strict=True):
                found[at] = [norm]
        return found

    @property
    def order(self) -> float | None:
        """The p of the norm; None, if it is not the p-norm of all elements."""
        named = dict(self.kwargs)
        given = self.rest[0] if self.rest else named.get("ord", 2)
        plain = len(self.rest) < 2 and named.keys() <= {"ord", "dtype"}
        return float(given) if plain and isinstance(given, int | float) else None

    @property
    def joins(self) -> bool:
        """Whether the norm of a whole follows from those of its tiles."""
        return self.order is not None and self.order > 0

    def join(self, parts: Sequence[Any]) -> Any:
        """The norm of all: the norm of the norms of tiles.

        Rounds otherwise than one kernel over the whole would, by a few units in the last place.
        """
        values = torch.stack([part[0] if self.lists else part for part in parts])
        whole = torch.linalg.vector_norm(values, self.order)
        return [whole] if self.lists else whole


@lru_cache(maxsize=64)
def measure_of(
    func: Callable[..., Any],
    rest: tuple[Any, ...],
    kwargs: tuple[tuple[str, Any], ...],
    lists: bool,
) -> Measure:
    """The one object for this measure."""
    return Measure(func, rest, kwargs, lists)


CLIPPING = measure_of(torch.ops.aten._foreach_norm.Scalar, (2.0,), (), True)
"""The norm that `clip_grad_norm_` asks for by default; measured in the first step, in which nothing
is known of the loop yet."""


NOT_MEASURED = -1, None, None
"""In place of what an entry keeps of a measure: the version of none."""


class Norms:
    """Measures in this step what was asked for in the last one."""

    def __init__(self) -> None:
        self._wanted: dict[Measure, None] = {CLIPPING: None}
        self._asked: dict[Measure, None] = {}

    @property
    def wanted(self) -> bool:
        """Whether anything is measured."""
        return bool(self._wanted)

    def note(self, entry: Entry, grad: Tensor) -> None:
        """Measure `grad`, which has just become the whole value of `entry`."""
        if not self._wanted:
            return
        layout = Layout.of(grad)
        for measure in self._wanted:
            entry.norms[measure] = entry.version, layout, measure(grad)

    def note_each(self, entries: Sequence[Entry], grads: Sequence[Tensor]) -> None:
        """As `note` of each of these, in one call: a backward makes hundreds."""
        for measure in self._wanted:
            for entry, grad, value in zip(entries, grads, measure.of_each(grads), strict=True):
                entry.norms[measure] = entry.version, Layout.of(grad), value

    def note_tile(self, entry: Entry, offset: int, tile: Tensor) -> None:
        """Measure `tile`, which has just become the elements of `entry` from `offset` on."""
        found = {m: m(tile.detach()) for m in self._wanted if m.joins}
        entry.tiles[offset] = tile.numel(), found

    def note_whole(self, entry: Entry, layout: Layout) -> None:
        """All tiles of `entry` were noted: join their measures."""
        tiles = [entry.tiles[offset] for offset in sorted(entry.tiles)]
        for measure in self._wanted:
            if measure.joins:
                value = measure.join([found[measure] for _, found in tiles])
                entry.norms[measure] = entry.version, layout, value

    def cuts_of(self, entry: Entry) -> Sequence[tuple[int, int]]:
        """(offset, elements) of each tile in which a gradient came; none, if it came whole."""
        return [(offset, entry.tiles[offset][0]) for offset in sorted(entry.tiles)]

    def of(self, entry: Entry, layout: Layout, measure: Measure) -> Any | None:
        """The result of `measure`, the caller's own; None, if the entry has been written since."""
        found = self.kept_of_each([entry], [layout], measure)
        if found is None:
            return None
        return [norm.clone() for norm in found[0]] if measure.lists else found[0].clone()

    def kept_of_each(
        self, entries: Sequence[Entry], layouts: Sequence[Layout], measure: Measure
    ) -> list[Any] | None:
        """As `of`, of each of these, of which the caller makes copies of its own; None, if one of
        them was not measured, or has been written since."""
        found = []
        for entry, layout in zip(entries, layouts, strict=True):
            at = entry.version
            if at == (len(entry.tiles) or 1):
                # Written once; a gradient that is summed up has other values by now.
                self._asked[measure] = None
            version, lies, value = entry.norms.get(measure, NOT_MEASURED)
            if version != at or (lies is not layout and lies != layout):
                return None
            found.append(value)
        return found

    def step_ended(self) -> None:
        """The next step measures what this one asked for."""
        self._wanted, self._asked = self._asked, {}
