"""`zinf explain` tells which regions run over slices of tokens, and what is large and does not."""

import json

import pytest
import small_run
import torch
from torch import nn

import zcompile
from zcompile.cli.explain import SLICES, slices_of, slices_text
from zcompile.ir import serialize as form
from zcompile.ir.memory_curve import SlicedRegion
from zcompile.ir.serialize import PassRecord, PlanRecord, encode, open_run
from zcompile.ir.units import Bytes, KiB, MiB

UP = SlicedRegion("blocks.0.up", 4, 192, 24 * KiB, 72 * KiB, 18 * KiB)
GATE = SlicedRegion("blocks.1.gate", 2, 192, 48 * KiB, 96 * KiB, 48 * KiB)
WHY = (
    "24.0 KiB of 'drop' are not cut into slices of tokens: %dropout draws random numbers, which "
    "is not repeated"
)


class Run:
    """A graph whose plan and passes are known."""

    def __init__(self, *regions, index=0, notes=()):
        self.index, self.regions, self.notes = index, regions, notes

    def plan(self):
        return PlanRecord("graph0", MiB, (), (), 1, 1, sliced=self.regions)

    def passes(self):
        said = (*(region.describe() for region in self.regions), *self.notes)
        return (
            PassRecord(0, form.CAPTURED, {}, 1, 1, ("a note of another pass",)),
            PassRecord(1, "choose-tiles", {}, 1, 1, said),
        )


def text_of(*graphs, asked=SLICES):
    return slices_text([row for graph in graphs for row in slices_of(graph, asked)])


def test_each_region_is_told_with_its_slices_and_its_bytes_whole_and_sliced():
    title, first, second = text_of(Run(UP), Run(GATE, index=1)).splitlines()
    assert "slices of tokens" in title
    assert first.split("  ")[1:3] == ["graph0", "blocks.0.up"]
    for told in (
        "4 slices of 192 tokens",
        "72.0 KiB inside become 18.0 KiB",
        "beside 24.0 KiB whole",
    ):
        assert told in first
    assert "graph1" in second
    assert "96.0 KiB inside become 48.0 KiB" in second


def test_slices_of_the_batch_are_told_as_such():
    block = SlicedRegion("blocks.2.mlp", 4, 32, 24 * KiB, 72 * KiB, 18 * KiB, "samples")
    title, row, both = text_of(Run(block)).splitlines() + text_of(Run(UP, block)).splitlines()[:1]
    assert "over slices of samples," in title
    assert "4 slices of 32 samples" in row
    assert "over slices of tokens and samples," in both


def test_a_run_without_slices_says_so_in_one_line():
    assert text_of(Run(), Run(index=1)) == "nothing runs over slices of tokens, or of the batch\n"


def test_why_something_large_runs_whole_is_told_with_slices_and_without():
    for graph, lines in ((Run(notes=(WHY,)), 2), (Run(UP, notes=(WHY,)), 3)):
        said = text_of(graph).splitlines()
        assert len(said) == lines, "a region is not told twice, and no other pass speaks"
        assert said[-1].endswith(f"note: {WHY}")


def test_a_region_is_found_by_its_name():
    (found,) = slices_of(Run(UP, GATE, notes=(WHY,)), "blocks.1.gate")
    assert (found.regions, found.notes) == ((GATE,), ())
    assert not list(slices_of(Run(UP, GATE), "blocks.1.up"))


def test_the_command_tells_it_to_people_and_to_programs(zinf, tmp_path):
    run = small_run.write_run(tmp_path)
    assert zinf("explain", tmp_path, "slices") == (
        0,
        "nothing runs over slices of tokens, or of the batch\n",
        "",
    )
    graph = form.graph_dir(run, 0)
    plan = open_run(tmp_path).graphs[0].plan()
    rows = {**json.loads(encode(plan)), "sliced": json.loads(encode([UP]))}
    form.plan_file(graph).write_text(json.dumps(rows))
    code, out, _ = zinf("explain", tmp_path, "slices")
    assert code == 0
    assert "blocks.0.up" in out
    (told,) = json.loads(zinf("explain", tmp_path, "slices", "--json")[1])
    assert told == {
        "graph": 0,
        "notes": [],
        "regions": [
            {
                "name": "blocks.0.up",
                "slices": 4,
                "tokens": 192,
                "whole_bytes": 24 * KiB,
                "inside_bytes": 72 * KiB,
                "sliced_bytes": 18 * KiB,
                "unit": "tokens",
            }
        ],
    }


@pytest.fixture(scope="module")
def sliced(tmp_path_factory):
    """The dump of a block that no budget holds whole, and what one of its values takes."""
    torch._dynamo.reset()
    dump, tokens, hidden = tmp_path_factory.mktemp("sliced"), 2048, 256
    block = nn.Sequential(nn.Linear(16, hidden), nn.GELU(), nn.Linear(hidden, 16))
    one = tokens * hidden * 4
    model = zcompile.offload(
        block, device="cpu", device_memory=Bytes(2 * one), host_memory=Bytes(64 * MiB), dump=dump
    )
    torch.compile(model, backend="zinf")(torch.randn(tokens, 16)).sum().backward()
    zcompile.close(model)
    return dump, one


def test_a_real_run_tells_the_slices_that_were_taken(sliced, zinf):
    dump, one = sliced
    (graph,) = json.loads(zinf("explain", dump, "slices", "--json")[1])
    (region,) = graph["regions"]
    assert region["tokens"] == 2048
    assert region["slices"] in (2, 4, 8, 16)
    assert region["inside_bytes"] == 3 * one
    assert region["sliced_bytes"] == 3 * one // region["slices"]
    assert region["whole_bytes"] < one
    shown = zinf("show", dump)[1]
    assert f"{region['name']!r} runs over {region['slices']} slices of its 2048 tokens" in shown
