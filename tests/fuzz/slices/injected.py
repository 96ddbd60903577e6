"""Defects of slices, most of which were found once, put back on purpose: each must be found."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Any
from unittest import mock

import torch

from zcompile.passes.slice_batch import axes, rewrite
from zcompile.passes.slice_batch.axes import Axis, Call, Rule

aten = torch.ops.aten
ATTENTION = (
    aten._scaled_dot_product_flash_attention_for_cpu.default,
    aten._scaled_dot_product_flash_attention_for_cpu_backward.default,
)


def _instead(ops: tuple[Any, ...], change: Callable[[Call, Rule], Rule]) -> Any:
    """The rules of ops, with a change of what they say."""

    def changed(op: Any) -> Callable[[Call], Rule | None]:
        given = axes.RULES[op]

        def rule(call: Call) -> Rule | None:
            found = given(call)
            return None if found is None else change(call, found)

        return rule

    return mock.patch.dict(axes.RULES, {op: changed(op) for op in ops})


def rows_of_a_mask() -> Any:
    """An attention mask of tokens by tokens is read as if its rows were samples."""

    def change(call: Call, rule: Rule) -> Rule:
        mask = call.node_of("attn_mask")
        return rule if mask is None else replace(rule, reads={**rule.reads, mask: Axis(0)})

    return _instead(ATTENTION, change)


def squeezed_slices() -> Any:
    """A slice of one sample is squeezed as the whole batch is, and loses its batch."""
    return mock.patch.object(rewrite, "SQUEEZES", frozenset())


class _ByValue(dict[tuple[Any, Axis], Any]):
    """Forgets where a value was cut."""

    def __contains__(self, key: object) -> bool:
        return super().__contains__(self._without(key))

    def __getitem__(self, key: Any) -> Any:
        return super().__getitem__(self._without(key))

    def __setitem__(self, key: Any, value: Any) -> None:
        super().__setitem__(self._without(key), value)

    @staticmethod
    def _without(key: Any) -> Any:
        return (key[0], Axis(0))


@contextmanager
def one_part_for_all() -> Iterator[None]:
    """What is cut of a value without a batch is kept per value, wherever readers want it cut."""

    def keep(self: Any, name: str, value: object) -> None:
        object.__setattr__(self, name, _ByValue() if name == "cut" else value)

    with mock.patch.object(rewrite._BatchWriter, "__setattr__", keep):
        yield


def batch_before_tokens() -> Any:
    """A view takes the batch to be the first of the dimensions that it joins."""

    def change(call: Call, rule: Rule) -> Rule:
        return replace(
            rule, results=tuple(Axis(r.dim) if isinstance(r, Axis) else r for r in rule.results)
        )

    return _instead((aten.view.default, aten._unsafe_view.default), change)


def running_sum_of_a_slice() -> Any:
    """A running sum over the batch begins anew in each slice."""

    def rule(call: Call) -> Rule | None:
        source = call.node_of("self")
        axis = call.batch.axis(source)
        return None if axis is None or source is None else Rule({source: axis}, (axis,))

    return mock.patch.dict(axes.RULES, {aten.cumsum.default: rule, aten._softmax.default: rule})


INJECTED: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "rows of a mask are taken for samples": rows_of_a_mask,
    "a slice of one sample is squeezed as the whole": squeezed_slices,
    "a value that is cut in two ways is cut in one": one_part_for_all,
    "the batch is followed through a view without its place": batch_before_tokens,
    "a running sum begins anew in each slice": running_sum_of_a_slice,
}
