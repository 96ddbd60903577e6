"""Fetches of the next graph start while this one computes, and never bring a stale value."""

import pytest
import torch
from offloaded import Twins, equal, twins
from sampled import sampled
from small_models import Block
from torch import nn

import zcompile
from zcompile.errors import IOFault, ParameterChanged

LAYERS = 4


class Broken(nn.Module):
    """Blocks of one structure, with a graph break after each."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
            torch._dynamo.graph_break()
        return x


@pytest.fixture
def slow() -> Twins:
    """A link so slow that what was handed over is still under way when the next call begins."""
    return twins(Broken(), throttle={"h2d": "15MB/s"})


def agrees(pair: Twins, rows: torch.Tensor) -> bool:
    with torch.no_grad():
        return torch.equal(pair.call(rows), pair.plain(rows))


def given(pair: Twins) -> list[int]:
    """How many fetches each call finds under way; grows with every call."""
    counts: list[int] = []
    foresight = pair.session.executor.foresight
    begin = foresight.begin

    def counting(call, others):
        tickets = begin(call, others)
        counts.append(len(tickets))
        return tickets

    foresight.begin = counting
    return counts


def test_the_second_step_finds_its_fetches_under_way(slow):
    counts = given(slow)
    rows = torch.randn(2, 5, 16)
    assert agrees(slow, rows)
    assert counts == [0] * LAYERS
    assert agrees(slow, rows)
    assert all(counts[LAYERS + 1 :]), "every graph but the first of the step"
    assert agrees(slow, rows)
    assert all(counts[2 * LAYERS :]), "and that too, once a step has followed a step"


@pytest.mark.slow
def test_a_training_step_is_foreseen_too():
    pair = twins(Broken(), residency=False)
    counts = given(pair)
    steps = [torch.optim.AdamW(m.parameters(), fused=True) for m in (pair.model, pair.plain)]
    for _ in range(4):
        assert pair.train(torch.randn(2, 5, 16))
        for step in steps:
            step.step()
            step.zero_grad()
    assert pair.same()
    assert sum(map(bool, counts[-2 * LAYERS :])) > LAYERS


def fill(pair: Twins, layer: int, how: str) -> None:
    """Write one parameter of both models in one of the ways that a user has."""
    values = torch.full((64, 16), 0.01 * (layer + 1))
    for model in (pair.model, pair.plain):
        weight = model.blocks[layer].up.weight
        with torch.no_grad():
            if how == "copy_":
                weight.copy_(values)
            elif how == "in place":
                weight.mul_(0.5)
            elif how == "data":
                weight.data = values.clone()  # which is then the memory of one of the two
            elif how == "load_state_dict":
                state = {k: v.clone() for k, v in pair.plain.state_dict().items()}
                state[f"blocks.{layer}.up.weight"] = values
                model.load_state_dict(state)
            elif how == "init":
                nn.init.constant_(weight, 0.03)
            elif how == "zero_":
                weight.zero_()
            else:
                weight[: layer + 1].fill_(0.25)


WAYS = ("copy_", "in place", "data", "load_state_dict", "init", "zero_", "slice")


def test_a_parameter_written_between_two_calls_is_never_stale(slow):
    rows = torch.randn(2, 5, 16)
    for _ in range(3):
        assert agrees(slow, rows)
    for how in WAYS:
        for layer in range(LAYERS):
            fill(slow, layer, how)
            assert agrees(slow, rows), f"{how}, layer {layer}"
            assert agrees(slow, rows)


@pytest.mark.slow  # the one above writes in every way
def test_the_optimizer_writes_what_the_next_step_reads(slow):
    steps = [torch.optim.SGD(m.parameters(), lr=1e-3) for m in (slow.model, slow.plain)]
    for _ in range(3):
        rows = torch.randn(2, 5, 16)
        assert slow.train(rows)
        for step in steps:
            step.step()
            step.zero_grad()
        assert agrees(slow, rows)


def test_a_call_in_another_order_is_computed_right(slow):
    rows = torch.randn(2, 5, 16)
    for _ in range(2):
        assert agrees(slow, rows)
    for model in (slow.model, slow.plain):
        model.blocks = nn.ModuleList(reversed(model.blocks))
    for _ in range(2):
        assert agrees(slow, rows)
    for model in (slow.model, slow.plain):
        model.blocks = model.blocks[:2]
    assert agrees(slow, rows)


def test_an_eager_use_between_two_calls_takes_the_bytes_it_needs(slow):
    rows = torch.randn(2, 5, 16)
    for _ in range(3):
        assert agrees(slow, rows)
        for layer in range(LAYERS):
            weights = [m.blocks[layer].up.weight for m in (slow.model, slow.plain)]
            assert torch.equal(*[w.detach() @ torch.ones(16) for w in weights])
            assert equal(*weights)


@pytest.mark.parametrize(
    "link", sampled(["d2h", "h2d", "disk_write", "disk_read"], "d2h", "disk_read")
)
def test_a_slow_link_changes_when_and_not_what(link, tmp_path):
    """Stores of one call leave from bytes that fetches of the next one fill again."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(96, 96), nn.ReLU(), nn.Linear(96, 96))
    pair = twins(
        model,
        device_memory="256KiB",
        host_memory="256KiB",
        disk=tmp_path,
        throttle={link: "10MB/s"},
    )
    steps = [
        torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in (pair.model, pair.plain)
    ]
    for seed in range(4):
        torch.manual_seed(seed)
        assert pair.train(torch.randn(4, 96))
        for step in steps:
            step.step()
            step.zero_grad()
    assert pair.same()
    pair.session.close()


def test_what_was_handed_over_and_not_used_is_given_back(slow):
    rows = torch.randn(2, 5, 16)
    for _ in range(3):
        agrees(slow, rows)
    assert slow.session.arena.used_bytes > 0, "the first graph of the next step is on its way"
    slow.session.executor.foresight.abandon()
    assert slow.session.arena.used_bytes == 0
    assert agrees(slow, rows)
    assert zcompile.stats(slow.model)["gathers"] > 0


@pytest.fixture
def given_values(slow) -> tuple[Twins, dict[str, torch.Tensor]]:
    """A model that took its values from tensors of the user, and was called a few times."""
    kept = {name: value.clone() for name, value in slow.plain.state_dict().items()}
    slow.model.load_state_dict(kept, assign=True)
    for _ in range(3):
        assert agrees(slow, torch.randn(2, 5, 16))
    return slow, kept


def test_what_was_handed_over_is_not_used_once_torch_would_show_something_else(given_values):
    pair, kept = given_values
    handed = pair.session.executor.foresight._prefetched
    ahead = {handed.call.entries[fetch.entry].name for fetch, *_ in handed.started}
    assert "blocks.0.up.weight" in ahead
    kept["blocks.0.up.weight"].mul_(2)
    for _ in range(3):
        with pytest.raises(ParameterChanged, match=r"'blocks.0.up.weight' took the values"):
            agrees(pair, torch.randn(2, 5, 16))
    pair.model.load_state_dict(kept, assign=True)
    pair.plain.load_state_dict(kept)
    for _ in range(3):
        assert agrees(pair, torch.randn(2, 5, 16))


@pytest.mark.parametrize("layer", sampled(range(LAYERS), 2))
def test_the_call_that_uses_a_value_is_the_one_that_cannot(layer, given_values):
    """What the call before could not bring ahead was not its own: it gives what it computed, and
    leaves the room to the next."""
    pair, kept = given_values
    reached = []
    for number, block in enumerate(pair.model.blocks):
        block.register_forward_hook(lambda *_, number=number: reached.append(number))
    kept[f"blocks.{layer}.up.weight"].mul_(2)
    for _ in range(3):
        reached.clear()
        with pytest.raises(ParameterChanged, match=rf"'blocks.{layer}.up.weight' took the values"):
            agrees(pair, torch.randn(2, 5, 16))
        assert reached == list(range(layer))
        assert pair.session.arena.used_bytes == 0


def test_what_cannot_be_brought_ahead_takes_no_room(slow, monkeypatch):
    rows = torch.randn(2, 5, 16)
    for _ in range(2):
        assert agrees(slow, rows)
    store, fetch = slow.session, slow.session.fetch

    def failing(*args, ahead=False, **more):
        if ahead:
            raise IOFault(5, "read", "tier", "w", 0, 0, 8, "Input/output error")
        return fetch(*args, **more)

    monkeypatch.setattr(store, "fetch", failing)
    for _ in range(3):
        assert agrees(slow, rows)
    store.executor.foresight.abandon()
    assert store.arena.used_bytes == 0
