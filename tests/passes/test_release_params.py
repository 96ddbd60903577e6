"""A gathered parameter is given back after its last reader, and a view is a reader."""

import pytest
from joint import captured
from sampled import sampled
from small_models import SMALL_MODELS, UNALIKE

from zcompile.ir import ops
from zcompile.ir.graph import aliases_of, find, positions
from zcompile.passes.gather_params import GatherParams
from zcompile.passes.release_params import ReleaseParams


def test_release_follows_the_last_reader(golden):
    joint = captured("mlp").through(GatherParams(), ReleaseParams())
    assert joint.text == golden


def test_release_waits_for_the_last_view(golden):
    joint = captured("tied embeddings").through(GatherParams(), ReleaseParams())
    assert joint.text == golden


@pytest.mark.parametrize("model", sampled(SMALL_MODELS, *UNALIKE))
def test_between_the_last_reader_and_the_release_stands_nothing_but_other_releases(model):
    graph = captured(model).through(GatherParams(), ReleaseParams()).graph
    where = positions(graph)
    for release in find(graph, ops.release):
        (full,) = release.args
        last = max(where[u] for a in aliases_of(full) for u in a.users if u is not release)
        between = list(graph.nodes)[last + 1 : where[release]]
        assert all(node.target is ops.release for node in between)
