"""What is only read after a cast is fetched in that dtype, and nothing else is."""

from dataclasses import replace

import pytest
import torch
from joint import captured, catch
from small_models import SMALL_MODELS
from torch import nn

from zcompile.ir import ops
from zcompile.ir.graph import CASTS, find
from zcompile.ir.plan import layout_of_fetch
from zcompile.passes.gather_params import GatherParams
from zcompile.passes.narrow_params import NarrowParams

BF16 = torch.bfloat16


def on_disk(model):
    """The captured graph, as if every parameter rested on disk."""
    joint = captured(model)
    params = {name: replace(spec, home="disk") for name, spec in joint.plan.params.items()}
    return replace(joint, plan=replace(joint.plan, params=params))


def dtypes(graph):
    return {str(fetch): fetch.args[4] for fetch in find(graph, ops.fetch)}


def test_under_autocast_every_matmul_weight_comes_narrow():
    before = captured("bf16 autocast").through(GatherParams())
    after = on_disk("bf16 autocast").through(GatherParams(), NarrowParams(BF16))
    assert set(dtypes(before.graph).values()) == {torch.float32}
    narrow = {name for name, dtype in dtypes(after.graph).items() if dtype is BF16}
    assert narrow
    for wait in find(after.graph, ops.wait):
        assert wait.meta["val"].dtype is dtypes(after.graph)[str(wait.args[0])]
        if str(wait.args[0]) in narrow:
            assert not any(user.target in CASTS for user in wait.users)


def test_a_fetch_weighs_what_it_brings():
    joint = on_disk("bf16 autocast").through(GatherParams(), NarrowParams(BF16))
    for fetch in find(joint.graph, ops.fetch):
        spec, nbytes = joint.plan.spec_of(fetch), layout_of_fetch(fetch).nbytes
        assert nbytes == (spec.nbytes // 2 if fetch.args[4] is BF16 else spec.nbytes)


@pytest.mark.parametrize("model", [m for m in SMALL_MODELS if m != "bf16 autocast"])
def test_without_casts_every_fetch_stays_and_a_note_says_why(model):
    before = captured(model).through(GatherParams())
    after = on_disk(model).through(GatherParams(), NarrowParams(BF16))
    assert dtypes(after.graph) == dtypes(before.graph)
    if dtypes(before.graph):
        (note,) = after.plan.notes
        assert "autocast" in note.text


def test_without_a_dtype_the_pass_does_nothing():
    joint = on_disk("bf16 autocast").through(GatherParams(), NarrowParams())
    assert set(dtypes(joint.graph).values()) == {torch.float32}
    assert joint.plan.notes == ()


def test_what_rests_on_the_host_stays_wide():
    joint = captured("bf16 autocast").through(GatherParams(), NarrowParams(BF16))
    assert set(dtypes(joint.graph).values()) == {torch.float32}


def shared(joint):
    """A graph as if this rank, the second of two, held shares of its parameters."""
    params = {
        name: replace(spec, share=(spec.nbytes // 2, spec.nbytes), shared=True)
        for name, spec in joint.plan.params.items()
    }
    return replace(joint, plan=replace(joint.plan, params=params))


def test_what_ranks_hold_shares_of_comes_narrow_wherever_it_rests():
    from_disk = on_disk("bf16 autocast").through(GatherParams(), NarrowParams(BF16))
    from_host = shared(captured("bf16 autocast")).through(GatherParams(), NarrowParams(BF16))
    assert dtypes(from_host.graph) == dtypes(from_disk.graph)
    for fetch in find(from_host.graph, ops.fetch):
        spec, nbytes = from_host.plan.spec_of(fetch), from_host.plan.fetched_bytes(fetch)
        assert nbytes == (spec.nbytes // 2 if fetch.args[4] is BF16 else spec.nbytes)


class ReadTwice(nn.Module):
    """Forward reads the weight as it is as well, backward only what it is cast to."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 8))

    def forward(self, x):
        with torch.autocast("cpu", BF16):
            product = x @ self.weight
        return product.float().sum() + self.weight.sum()


@pytest.mark.parametrize(("alike", "narrow"), [(False, 1), (True, 0)])
def test_what_may_be_kept_for_both_phases_comes_in_one_dtype(alike, narrow):
    found = catch(ReadTwice(), torch.randn(4, 8, requires_grad=True))
    joint = shared(found).through(GatherParams(), NarrowParams(BF16, alike=alike))
    assert list(dtypes(joint.graph).values()).count(BF16) == narrow
    assert len(dtypes(joint.graph)) == 2
