"""Training with every saved value away between forward and backward; and what becomes of them."""

import copy
import gc
from itertools import product

import pytest
import torch
from moved import WAYS, forced
from sampled import sampled_rows
from small_models import SMALL_MODELS, small

import zcompile
from zcompile.errors import TierFull
from zcompile.frontend.offload import session_behind
from zcompile.ir.types import EntryKind


def offloaded(name, tmp_path, **config):
    """A small model, its eager twin, its compiled face and inputs."""
    model, inputs = small(name)
    twin = copy.deepcopy(model)
    zcompile.offload(
        model,
        **{
            "device": "cpu",
            "device_memory": "16MiB",
            "host_memory": "32MiB",
            "disk": tmp_path,
            **config,
        },
    )
    torch._dynamo.reset()
    return model, twin, torch.compile(model, backend="zinf"), inputs


def loss_of(model, inputs, seed):
    torch.manual_seed(seed)
    out = model(*inputs)
    return (out if isinstance(out, torch.Tensor) else out[0]).float().square().mean()


def away(model) -> int:
    """Activations that the store holds."""
    gc.collect()
    kinds = [entry.kind for entry in session_behind(model).entries()]
    return kinds.count(EntryKind.ACTIVATION)


def assert_same_parameters(model, twin):
    for (name, mine), other in zip(model.named_parameters(), twin.parameters(), strict=True):
        assert torch.equal(mine.cpu(), other), name


@pytest.mark.parametrize(
    ("name", "how"),
    sampled_rows(
        product(SMALL_MODELS, WAYS),
        ("transformer block", "disk"),
        ("dropout", "disk"),
        ("bf16 autocast", "host or again"),
        ("module called twice", "again"),
        ("convolution", "host"),
        ("view in two places", "host"),
    ),
)
def test_training_gives_the_bits_of_eager(name, how, tmp_path):
    with forced(how):
        model, twin, compiled, inputs = offloaded(name, tmp_path)
        mine, theirs = (torch.optim.AdamW(m.parameters(), lr=1e-2) for m in (model, twin))
        for step in range(4):  # the third is planned as a whole
            for batch in range(2):
                one, other = (loss_of(m, inputs, 9 * step + batch) for m in (compiled, twin))
                assert torch.equal(one, other)
                one.backward()
                other.backward()
            for optimizer in (mine, theirs):
                optimizer.step()
                optimizer.zero_grad()
    assert_same_parameters(model, twin)
    assert away(model) == 0, "what backward has read is gone"


@pytest.mark.slow
def test_an_activation_lives_as_long_as_the_graph_of_autograd(tmp_path):
    with forced("host"):
        model, _, compiled, inputs = offloaded("gpt", tmp_path)
        loss = loss_of(compiled, inputs, 0)
        assert away(model) > 10
        del loss
        assert away(model) == 0, "no backward comes any more"
        with torch.no_grad():
            loss_of(compiled, inputs, 0)
        assert away(model) == 0, "nothing is saved where no backward can come"


def test_backward_may_run_twice_over_a_retained_graph(tmp_path):
    with forced("disk"):
        model, twin, compiled, inputs = offloaded("transformer block", tmp_path)
        for m in (compiled, twin):
            loss = loss_of(m, inputs, 0)
            loss.backward(retain_graph=True)
            loss.backward()
            del loss
    for mine, other in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(mine.grad.cpu(), other.grad)
    assert away(model) == 0


def test_double_backward_is_refused(tmp_path):
    with forced("host"):
        _, _, compiled, inputs = offloaded("mlp", tmp_path)
        given = [x.clone().requires_grad_() for x in inputs]
        slope, *_ = torch.autograd.grad(loss_of(compiled, given, 0), given, create_graph=True)
    with pytest.raises(RuntimeError, match="double backward"):
        slope.sum().backward()


def test_what_finds_no_room_says_its_name_and_what_to_do(tmp_path):
    with forced("host"):
        model, _, compiled, _ = offloaded("mlp", tmp_path, disk=None, host_memory="2MiB")
        with pytest.raises(TierFull, match=r"relu(.*\n)*.*raise host_memory.*\n.*'recompute'"):
            compiled(torch.randn(1 << 15, 8))
        assert away(model) == 0
        assert zcompile.stats(model)["peak"]["device"] > 0
        compiled(torch.randn(4, 8)).sum().backward()


@pytest.mark.slow
def test_activations_away_are_counted_where_they_rest(tmp_path):
    with forced("host"):
        model, _, compiled, inputs = offloaded("gpt", tmp_path)
        loss = loss_of(compiled, inputs, 0)
        loss.backward()
        zcompile.stats(model)
        session_behind(model).meter.reset()
        loss_of(compiled, inputs, 0).backward()
        told = zcompile.stats(model)
    assert told["bytes"]["d2h"] > sum(p.nbytes for p in model.parameters()), "beside the gradients"


@pytest.mark.slow
def test_what_is_remembered_of_calls_does_not_grow_with_values_that_come_anew(tmp_path):
    with forced("host"):
        model, _, compiled, inputs = offloaded("gpt", tmp_path)
        recorder = session_behind(model).executor.recorder
        sizes, firsts = [], []
        for seed in range(4):
            loss_of(compiled, inputs, seed).backward()
            sizes.append(len(recorder._known))
            firsts.append({k for call in recorder.end().calls for k in call.entries})
        assert sizes[0] == sizes[-1] > 0
        assert firsts[2] != firsts[3], "each call is told with its own values"
