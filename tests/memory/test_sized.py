"""What a graph holds at the sizes of a call is counted once for sizes that calls have often."""

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext
from written import schedule

from zcompile.ir.types import MemoryProfile
from zcompile.memory import sized
from zcompile.memory.sized import SizedSchedule, SizeReader


def reader_of_rows() -> SizeReader:
    """Of a graph with one input, whose number of rows is dynamic."""
    mode = FakeTensorMode(shape_env=ShapeEnv())
    rows = StatelessSymbolicContext([DimDynamic.DYNAMIC, DimDynamic.STATIC])
    graph = fx.Graph()
    graph.placeholder("x").meta["val"] = mode.from_tensor(torch.empty(4, 2), symbolic_context=rows)
    return SizeReader(graph)


def test_sizes_that_come_again_are_not_counted_again(monkeypatch):
    monkeypatch.setattr(sized, "MOST_SIZES", 3)
    counted = []

    def count(sizes):
        counted.extend(sizes.values())
        return MemoryProfile()

    calls = SizedSchedule(schedule(), reader_of_rows(), count)
    for rows in (4, 5, 4, 6, 4, 7, 4, 8, 4):
        assert calls.at([torch.empty(rows, 2)]).holds.sizes == (rows,)
    assert counted == [4, 5, 6, 7, 8], "4 was never out of use for long"
    calls.at([torch.empty(5, 2)])
    assert counted[-1] == 5, "of those that nobody used, few are kept"
