"""Gradients that come in tiles: as those that come at once, whatever the order of the tiles."""

import gc

import pytest
import torch
from pairs import Holder, assert_equal, backward, on_disk, plain_of

from zcompile.frontend.offload import session_behind
from zcompile.ir import ops
from zcompile.ir.types import EntryKind

SHAPE = (6, 5)
CUTS = (0, 2, 4, 6)


@pytest.fixture(autouse=True)
def _leave_no_store():
    """The tests of stores beside this file count threads."""
    yield
    gc.collect()


@pytest.fixture
def param(tmp_path):
    return on_disk(Holder(torch.zeros(SHAPE)), tmp_path).w


def rows(seed):
    return torch.randn(SHAPE, generator=torch.Generator().manual_seed(seed))


def tiles(grad, order=(0, 1, 2)):
    """(tile, its offset in elements)"""
    return [(grad[CUTS[n] : CUTS[n + 1]], CUTS[n] * SHAPE[1]) for n in order]


def tiled(param, grad, order=(0, 1, 2)):
    """A step of `backward`: `grad` comes in tiles."""

    def come():
        for tile, offset in tiles(grad, order):
            param.entry.store.gradients.receive_tile(param.entry, tile, offset)

    return come


def whole(param, grad):
    return lambda: param.entry.store.gradients.receive(param.entry, grad)


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1)])
def test_tiles_become_one_gradient(param, order):
    backward(param, tiled(param, rows(1), order))
    assert_equal(rows(1), param.grad)
    assert param.grad.entry.kind is EntryKind.GRAD
    assert param.grad.entry.name == "w.grad"


def test_there_is_no_gradient_before_the_last_tile(param):
    seen = []
    receive = param.entry.store.gradients.receive_tile

    def come():
        for tile, offset in tiles(rows(1)):
            seen.append(param.grad is None)
            receive(param.entry, tile, offset)

    backward(param, come)
    assert seen == [True, True, True]
    assert_equal(rows(1), param.grad)


def test_the_tiles_of_the_next_pass_are_added_in_place(param):
    backward(param, tiled(param, rows(1)))
    first = param.grad
    backward(param, tiled(param, rows(2)))
    assert param.grad is first
    assert_equal(rows(1) + rows(2), param.grad)


@pytest.mark.parametrize(
    "ways", [(tiled, tiled, tiled), (whole, tiled, whole), (tiled, whole, tiled)]
)
def test_contributions_of_one_pass_are_summed_before_they_are_added(param, ways):
    backward(param, whole(param, torch.ones(SHAPE)))
    small = torch.full(SHAPE, 4e-8)
    backward(param, *[way(param, small) for way in ways], expect=3)
    assert_equal(torch.ones(SHAPE) + ((small + small) + small), param.grad)
    assert not torch.equal(param.grad.cpu(), ((torch.ones(SHAPE) + small) + small) + small)


def test_a_contribution_that_never_comes_is_not_waited_for(param):
    backward(param, tiled(param, rows(1)), expect=3)
    assert_equal(rows(1), param.grad)
    backward(param, tiled(param, rows(2)))
    assert_equal(rows(1) + rows(2), param.grad)


def test_what_a_user_assigned_is_added_to(param):
    param.grad = rows(1)
    backward(param, tiled(param, rows(2)))
    assert_equal(rows(1) + rows(2), param.grad)


@pytest.mark.parametrize("way", [tiled, whole])
def test_what_lies_another_way_is_added_to(param, way):
    """Bytes are not added to bytes then: the rows of what is there lie elsewhere."""
    across = torch.zeros_like(param.t(), memory_format=torch.contiguous_format)
    across.copy_(rows(1).t())
    param.grad = across.t()
    backward(param, way(param, rows(2)))
    assert torch.equal(plain_of(param.grad), rows(1) + rows(2))


def test_a_hook_sees_the_whole_once_and_may_change_it(param):
    seen = []
    param.register_hook(lambda g: seen.append(g.detach().cpu()))
    param.register_hook(lambda g: g * 2)
    backward(param, tiled(param, rows(1)), tiled(param, rows(2)), expect=2)
    assert len(seen) == 1
    assert torch.equal(seen[0], rows(1) + rows(2))
    assert_equal((rows(1) + rows(2)) * 2, param.grad)


def test_who_waits_for_a_gradient_is_told_once_and_finds_it_whole(param):
    told = []
    param.register_post_accumulate_grad_hook(lambda p: told.append(p.grad.cpu()))
    backward(param, tiled(param, rows(1)))
    assert len(told) == 1
    assert torch.equal(told[0], rows(1))


@pytest.mark.parametrize("way", [tiled, whole])
@pytest.mark.parametrize("expect", [1, 2])
def test_what_a_failed_pass_left_behind_is_neither_added_to_nor_kept(param, way, expect):
    def come():
        if way is tiled:
            tile, offset = tiles(rows(1))[0]
            param.entry.store.gradients.receive_tile(param.entry, tile, offset)
        elif expect > 1:
            param.entry.store.gradients.receive(param.entry, rows(1))
        raise RuntimeError("out of patience")

    with pytest.raises(RuntimeError, match="patience"):
        backward(param, come, expect=expect)
    assert param.grad is None
    backward(param, way(param, rows(2)))
    assert_equal(rows(2), param.grad)
    entries = param.entry.store._entries.values()
    assert [entry.name for entry in entries if entry.kind is EntryKind.GRAD] == ["w.grad"]


def test_the_norm_of_tiles_is_taken_on_the_way(param):
    backward(param, tiled(param, rows(1)))
    meter = param.entry.store.meter
    param.entry.store.drain()
    before = meter.bytes()
    total = torch.nn.utils.clip_grad_norm_([param], 0.5)
    expected = torch.linalg.vector_norm(rows(1))
    assert torch.allclose(total, expected, rtol=1e-6)
    assert meter.bytes() == before, "clipping read the gradient again"


def test_the_norm_of_a_sum_is_that_of_the_sum(param):
    backward(param, tiled(param, rows(1)))
    backward(param, tiled(param, rows(2)))
    total = torch.nn.utils.clip_grad_norm_([param], 1e9)
    assert torch.allclose(total, torch.linalg.vector_norm(rows(1) + rows(2)), rtol=1e-6)


def test_the_op_means_the_same(param):
    names, _ = param.__tensor_flatten__()
    handle = getattr(param, names[0])

    def come():
        for tile, offset in tiles(rows(1)):
            assert ops.reduce_tile(tile, handle, offset).numel() == 0

    backward(param, come)
    assert_equal(rows(1), param.grad)


def test_a_parameter_that_died_takes_no_tile(tmp_path):
    model = torch.nn.Sequential(on_disk(Holder(torch.zeros(SHAPE)), tmp_path))
    entry, gradients = model[0].w.entry, session_behind(model).gradients
    del model[0].w
    tile, offset = tiles(rows(1))[0]
    gradients.receive_tile(entry, tile, offset)
    assert [e for e in entry.store._entries.values() if e.kind is EntryKind.GRAD] == []
