"""Regions of a step on paper: each only says what it would make."""

from collections.abc import MutableMapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from zcompile.frontend.dry_run.device import blank
from zcompile.ir.torch_compat import hint, trees
from zcompile.ir.types import Region


class PaperRegions(dict[str, Region], MutableMapping[str, Region]):
    """Regions that are compiled here make blanks of what the traced ones make."""

    def __setitem__(self, key: str, region: Region) -> None:
        blanks = isinstance(region.call, _BlankResults)  # a variant of one that is here
        call = region.call if blanks else _BlankResults(region)
        super().__setitem__(key, replace(region, call=call))


class _BlankResults:
    """Stands in for the call of a region; the results are those that tracing saw."""

    def __init__(self, region: Region) -> None:
        traced: Any = region.call
        (output,) = traced.__self__.graph.find_nodes(op="output")
        self._results = tuple(node.meta["val"] for node in output.args[0])

    def __call__(self, values: list[Any]) -> tuple[Any, ...]:
        values.clear()
        return tuple(trees.tree_map(_blank, result) for result in self._results)


def _blank(value: Any) -> Any:
    if isinstance(value, Tensor):
        return blank([hint(n) for n in value.size()], [hint(n) for n in value.stride()],
                     value.dtype)  # fmt: skip
    return hint(value) if isinstance(value, torch.SymInt) else value
