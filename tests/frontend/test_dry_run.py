"""`zcompile.plan`: a training step of a dry run, and what is told of it."""

import json
import re
import resource
from collections import Counter
from dataclasses import replace
from html import unescape
from itertools import product

import pytest
import small_models
import torch
from dry_runs import LINKS, SMALL
from sampled import sampled, sampled_rows
from torch import nn

import zcompile
from zcompile.config import Config, build
from zcompile.errors import ConfigInvalid, Unsupported
from zcompile.frontend.backend import activation_budget
from zcompile.frontend.dry_run import plan
from zcompile.ir.types import EntryKind, Phase
from zcompile.ir.units import GiB, KiB, MiB
from zcompile.machine.files import find
from zcompile.machine.model import Link, with_tier
from zcompile.planner import bounds, floor
from zcompile.runtime.device.cpu import CpuDevice
from zcompile.runtime.device.cuda import CudaDevice
from zcompile.runtime.device.pages import machine_bytes


class Text(nn.Module):
    """A GPT that gives its loss."""

    def __init__(self, width=64, layers=1):
        super().__init__()
        self.gpt = small_models.GPT(layers, width, vocabulary=128)

    def forward(self, ids, targets):
        return nn.functional.cross_entropy(self.gpt(ids).flatten(0, 1), targets.flatten())


def on_meta(make=Text, **sizes):
    with torch.device("meta"):
        return make(**sizes)


IDS = torch.zeros(2, 16, dtype=torch.int64)


@pytest.fixture(scope="module")
def terms():
    return plan.terms_of(Config(device="cpu"), SMALL)


@pytest.fixture(scope="module")
def traced(terms):
    return plan.trace(on_meta(layers=2), (IDS, IDS), terms, "adamw", 2)


def within(terms, machine, layers=1):
    """A step that was traced for the device of `machine`, which bounds all, and the terms."""
    at = replace(terms.on(machine), bounded=True)
    return plan.trace(on_meta(layers=layers), (IDS, IDS), at, "adamw", 2), at


class Autocast(nn.Module):
    """Linear layers under autocast, and the mean of their squares."""

    def __init__(self, width=160, layers=2):
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(width, width) for _ in range(layers)))

    def forward(self, x):
        with torch.autocast("cpu", torch.bfloat16):
            return self.layers(x).float().square().mean()


@pytest.mark.slow
def test_copies_in_the_dtype_of_autocast_are_planned_where_they_pay(terms):
    links = {name: Link(name, 2e8) for name in ("h2d", "d2h")}
    slow = replace(with_tier(SMALL, "device", 400 * KiB), links={**LINKS, **links})
    at = replace(terms.on(slow), bounded=True)
    traced = plan.trace(on_meta(Autocast), (torch.zeros(16, 160),), at, "adamw", 2)
    narrow, wide = (
        plan.report_of(replace(traced, reads=reads), at, prices=True)
        for reads in (traced.reads, {})
    )
    copies = {row.tier: row.copies for row in narrow.tiers}
    assert sum(copies.values()) > 0
    assert not any(row.copies for row in wide.tiers)
    assert narrow.bound_seconds <= narrow.step_seconds < wide.step_seconds
    assert narrow.bound_seconds <= wide.bound_seconds


@pytest.mark.parametrize(("machine", "beside"), [(None, False), ("h200-node", True)])
def test_activations_are_chosen_for_how_compute_runs_there(machine, beside):
    session = plan._session(plan.terms_of(Config(device="cpu"), machine))
    assert activation_budget(session).beside is beside


@pytest.mark.parametrize(
    ("machine", "kernels", "ours"),
    sampled_rows(
        [
            (None, "auto", False),
            ("h200-141gb", "auto", True),
            ("h200-141gb", "stock", False),
            ("dgx2-v100-1gpu", "auto", False),
        ],
        ("h200-141gb", "auto", True),
        ("h200-141gb", "stock", False),
    ),
)
def test_tiles_of_a_loss_are_computed_as_they_would_be_there(machine, kernels, ours):
    """By kernels of our own on a card that can run them, which no run here could take."""
    config = Config(device="cpu", kernels=kernels, tile_bytes=4 * KiB, device_memory=4 * MiB)
    terms = plan.terms_of(config, machine)
    step = plan.trace(on_meta(layers=0), (IDS, IDS), terms).step
    texts = [region.text for call in step.calls for region in call.schedule.regions()]
    for op in ("see_tile", "tile_gradient_"):
        assert any(f"triton_kernels.{op}" in text for text in texts) is ours
    assert any("exp" in text for text in texts) is not ours


def test_a_percentage_is_of_the_machine_that_is_planned_for():
    tiers = plan.terms_of(Config(device="cpu", device_memory="50%"), "h200-node").machine.tiers
    whole = plan.terms_of(Config(device="cpu"), "h200-node").machine.tiers
    assert tiers == {**whole, "device": whole["device"] // 2}
    here = plan.terms_of(Config(device="cpu", host_memory="2%")).machine.tiers
    assert here["host"] == machine_bytes() // 50
    machine = replace(find("h200-node"), tiers={"device": GiB})
    with pytest.raises(ConfigInvalid, match="the machine has no tier 'host'"):
        plan.terms_of(Config(device="cpu", host_memory="50%"), machine)


@pytest.mark.slow
def test_a_step_in_a_dry_run_has_the_calls_of_a_real_one(traced):
    phases = [call.phase for call in traced.step.calls]
    assert phases == [Phase.FORWARD, Phase.BACKWARD] * 2 + [Phase.STEP]
    assert traced.step.micro_batches == 2


@pytest.mark.slow
def test_micro_batches_are_told_what_one_call_would_save():
    """Where links bind, by the weights that they fetch once more; elsewhere nothing is said."""
    machine = replace(SMALL, tiers={**SMALL.tiers, "device": MiB, "host": GiB})
    reports = {
        rate: zcompile.plan(
            on_meta(layers=2),
            IDS,
            IDS,
            micro_batches=4,
            machine=replace(
                machine, links={name: replace(x, bytes_per_s=rate) for name, x in LINKS.items()}
            ),
        )
        for rate in (1e7, 1e13)
    }
    slow, fast = reports.values()
    assert slow.one_call_seconds < slow.step_seconds / 1.5
    assert f"one call with all {4 * slow.samples} samples" in str(slow)
    assert "one call" not in str(fast)
    assert zcompile.plan(on_meta(layers=2), IDS, IDS, machine=machine).one_call_seconds is None


@pytest.mark.slow  # the next has the states
def test_a_step_in_a_dry_run_is_about_the_entries_of_a_real_one(traced):
    model = Text(layers=2)
    zcompile.offload(model, device="cpu", host_memory="64MiB", device_memory="16MiB")
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    steps = []
    session = zcompile.frontend.offload.session_behind(model)
    session.controller.step_ended = steps.append
    compiled = torch.compile(model, backend="zinf", dynamic=False)
    for _ in range(3):
        compiled(IDS, IDS).backward()
        optimizer.step()
        optimizer.zero_grad()

    def told(step):
        return sorted((fact.name, fact.kind.name, fact.nbytes) for fact in step.facts.values())

    assert told(traced.step) == told(steps[-1])
    zcompile.close(model)


STEPS = [{"weight_decay": 0.1}, {"maximize": True, "foreach": True}, {}]


@pytest.mark.parametrize("fields", sampled(STEPS, STEPS[1]))
def test_the_step_is_one_that_finds_the_states_of_its_optimizer(fields):
    """SGD makes its buffers in its first step, of a gradient or of what it has made of one; from
    the second step on it reads and writes them."""

    def make(params):
        return torch.optim.SGD(params, lr=0.1, momentum=0.9, **fields)

    def told(step):
        updates = [call for call in step.calls if call.phase is Phase.STEP]
        moved = Counter(
            (step.facts[call.entries[x.home.entry]].kind.name, x.home.reads, x.home.writes)
            for call in updates
            for x in call.schedule.effects
            if x.home is not None
        )
        return moved, Counter(fact.kind.name for fact in step.facts.values())

    x = torch.zeros(2, 160)
    dry = plan.trace(
        on_meta(Autocast), (x,), plan.terms_of(Config(device="cpu"), "h100-pcie-80gb"), make
    )
    model = zcompile.offload(
        Autocast(), device="cpu", host_memory="64MiB", throttle={"h2d": "10GB/s"}, residency=False
    )
    session, steps = zcompile.frontend.offload.session_behind(model), []
    session.controller.step_ended = steps.append
    session.executor.recorder.start()
    compiled, optimizer = torch.compile(model, backend="zinf"), make(model.parameters())
    for _ in range(4):
        compiled(x).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert told(dry.step) == told(steps[-1])
    assert told(dry.step)[1]["STATE"] == 4


def test_tied_weights_are_one_entry(traced):
    weights = [f.name for f in traced.step.facts.values() if f.kind is EntryKind.PARAM]
    assert len(weights) == len(set(weights)) == len(list(on_meta(layers=2).parameters()))


@pytest.mark.parametrize(
    ("make", "inputs"),
    [
        (lambda: nn.Linear(8, 8), (torch.ones(4, 8),)),
        pytest.param(Text, (IDS, IDS), marks=pytest.mark.slow),
    ],
    ids=["linear", "text"],
)
def test_the_callers_model_is_left_as_it_was(make, inputs):
    model = make()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    zcompile.plan(model, *inputs, machine=SMALL)
    assert all(type(p) is nn.Parameter and p.grad is None for p in model.parameters())
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


@pytest.mark.slow
def test_a_model_larger_than_this_machine_takes_no_memory():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * KiB
    model = on_meta(width=24 * 1024)  # 29 GB of weights
    report = zcompile.plan(model, IDS, IDS, machine="h200-node")
    assert report.parameters > 6_000_000_000
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * KiB - before < 2 * GiB


def test_with_room_for_everything_nothing_moves_and_the_bound_is_met(traced, terms):
    report = plan.report_of(traced, terms.on(with_tier(SMALL, "device", GiB)))
    assert report.fits
    assert all(link.nbytes == 0 for link in report.links)
    assert report.gap == pytest.approx(1.0, abs=0.02)
    assert report.bottleneck == report.bound_by == "compute"


@pytest.mark.parametrize(
    ("device", "host"),
    sampled_rows(product((256 * KiB, MiB, 2 * MiB), (MiB, 4 * MiB)), (MiB, MiB)),
)
def test_no_plan_is_below_its_bound(terms, device, host):
    small = with_tier(with_tier(SMALL, "device", device), "host", host)
    report = plan.report_of(*within(terms, small), prices=False)
    assert report.gap >= 1 - 1e-6
    assert all(link.nbytes >= link.least_nbytes for link in report.links)
    assert report.fits
    assert all(row.used <= row.capacity for row in report.tiers)


def test_every_weight_gradient_and_state_rests_somewhere(traced, terms):
    rows = plan.report_of(traced, terms, prices=False).tiers
    weights, gradients, states = (
        sum(getattr(row, kind) for row in rows) for kind in ("weights", "gradients", "states")
    )
    assert weights >= traced.parameters * 4
    assert (gradients, states) == (weights, 2 * weights)


@pytest.mark.slow  # tests/cli/test_cli_plan.py reads the sentence
def test_what_does_not_fit_is_said_tier_by_tier(terms):
    without_disk = with_tier(with_tier(SMALL, "disk", 0), "host", MiB)
    report = plan.report_of(*within(terms, with_tier(without_disk, "device", 300 * KiB)))
    assert not report.fits
    assert set(report.missing_bytes) == {"host"}
    assert "does not fit, it lacks" in str(report)


@pytest.mark.slow
def test_activations_that_fill_the_device_are_what_it_lacks(terms):
    traced = plan.trace(on_meta(), (IDS.repeat(64, 4), IDS.repeat(64, 4)), terms)
    report = plan.report_of(traced, terms)
    assert report.activation_bytes > SMALL.tiers["device"]
    assert set(report.missing_bytes) == {"device"}


@pytest.mark.slow
def test_a_larger_batch_is_suggested_until_compute_hides_what_moves(traced, terms):
    small = with_tier(SMALL, "device", 512 * KiB)
    report = plan.report_of(*within(terms, small), prices=False)
    assert report.suggested_samples > report.samples
    fast = plan.report_of(traced, terms.on(with_tier(SMALL, "device", GiB)), prices=False)
    assert fast.suggested_samples == 1


@pytest.mark.parametrize(
    ("room", "most", "suggested", "says"),
    [
        (None, None, 7, "batch 2 is small: from 7 on, compute hides"),
        (8.0, 16, 7, "batch 2 is small: from 7 on, compute hides"),
        (2.6, 5, 5, "batch 2 is small, but activations of at most 5 fit; only from 7 on"),
        (0.5, 1, 1, "activations of batch 2 do not fit, those of 1 fit: recompute some"),
        (0.4, 0, 0, "activations of batch 2 do not fit, those of a single sample do not either"),
    ],
)
def test_no_batch_is_suggested_whose_activations_do_not_fit(
    traced, terms, room, most, suggested, says
):
    report = plan.report_of(traced, terms, prices=False)
    bytes_there = None if room is None else int(room * report.activation_bytes)
    found = replace(report, activation_room=bytes_there, hiding_samples=7)
    assert (found.most_samples, found.suggested_samples) == (most, suggested)
    assert says in str(found)


@pytest.mark.slow
def test_the_capacity_of_a_device_is_explained(traced, terms):
    def told(activations, **given):
        device = SMALL.tiers["device"] if "bounded" in given else None
        found = replace(
            traced, activation_bytes=activations, held_bytes=activations, device_bytes=device
        )
        return str(plan.report_of(found, replace(terms, **given), prices=False))

    assert "above is what 1.00 MiB of activations leave of its 4.00 MiB" in told(MiB)
    assert "5.00 MiB of activations leave too little of the device's 4.00 MiB" in told(5 * MiB)
    assert "beside them on the device: 5.00 MiB of" in told(5 * MiB, emulates=True)
    assert "above is what 1.00 MiB, held by graphs, leave of its 4.00 MiB" in told(
        MiB, bounded=True
    )


@pytest.mark.parametrize(
    ("layers", "device", "has"), sampled_rows([(2, MiB, True), (1, 2 * MiB, False)], (2, MiB, True))
)
@pytest.mark.slow
def test_what_the_optimizer_has_beside_the_arena_is_told(terms, layers, device, has):
    report = plan.report_of(
        *within(terms, with_tier(SMALL, "device", device), layers), prices=False
    )
    assert bool(report.scratch_bytes) is has
    assert ("the optimizer streams through" in str(report)) is has


@pytest.mark.slow  # tests/frontend/test_timeline_dump.py
def test_one_more_gib_is_worth_something_by_the_bound_and_by_the_plan(terms):
    device = plan.report_of(*within(terms, with_tier(SMALL, "device", MiB), layers=2)).shadows[0]
    assert device.tier == "device"
    assert device.least_s > 0
    assert device.planned_s > 0


def test_a_report_is_a_record_and_a_text(traced, terms):
    report = plan.report_of(traced, terms)
    told = json.loads(report.to_json())
    assert told["parameters"] == report.parameters
    assert told["gap"] == report.gap
    assert {row["tier"] for row in told["tiers"]} == {"device", "host", "disk"}
    assert told["floor_gap"] == report.floor_gap >= report.gap > 0
    for said in ("least of a plan like this: ", "floor of all plans: "):
        assert said in str(report)
    assert bounds.ASSUMES in str(report)
    assert floor.ASSUMES in str(report)
    assert f"{report.tokens_per_second:.4g} tokens/s" in str(report)


def test_a_report_says_in_a_notebook_what_it_says_as_text(traced, terms):
    report = replace(plan.report_of(traced, terms), machine="</b><script>alert(1)</script>")
    shown = report._repr_html_()
    assert "<script" not in shown
    texts = " ".join(map(unescape, re.findall(r">([^<>]+)<", shown)))
    assert texts.split() == str(report).split()
    tags = Counter(re.findall(r"<(/?\w+)", shown))
    assert all(tags[f"/{tag}"] == tags[tag] for tag in ("table", "tr", "th", "td", "ul", "li", "p"))
    assert tags["table"] == 2
    assert "http" not in shown


@pytest.mark.slow  # tests/planner/test_fit.py, test_bounds.py, test_floor.py
def test_links_that_take_turns_are_told_together(terms):
    turns = {"disk_read": "disk_write", "disk_write": "disk_read"}
    links = {name: replace(link, shares=turns.get(name)) for name, link in LINKS.items()}
    little = {"device": 512 * KiB, "host": MiB, "disk": GiB}
    turning = replace(SMALL, links=links, tiers=little)
    report = plan.report_of(*within(terms, turning, layers=2), prices=False)
    assert report.bottleneck == report.bound_by == "disk_read and disk_write"


def test_an_offloaded_model_can_be_planned_for_another_machine():
    model = zcompile.offload(Text(), device="cpu", host_memory="64MiB", device_memory="16MiB")
    assert zcompile.plan(model, IDS, IDS, machine=SMALL).parameters == sum(
        p.numel() for p in model.parameters()
    )
    assert zcompile.stats(model)["graphs"] == 0
    zcompile.close(model)


def test_a_plan_can_be_dumped(tmp_path, monkeypatch):
    monkeypatch.setenv("ZINF_DUMP", str(tmp_path))
    zcompile.plan(nn.Linear(8, 8), torch.empty(4, 8), machine=SMALL)
    assert list(tmp_path.iterdir())


def test_arguments_may_go_by_name_and_the_loss_may_be_a_field():
    class Named(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(8, 8)

        def forward(self, x, scale):
            return {"loss": None, "logits": self.layer(x) * scale}

    x = torch.empty(4, 8, device="meta")
    report = zcompile.plan(Named(), {"x": x, "scale": 2.0}, machine=SMALL, optimizer="sgd")
    assert report.samples == 4
    assert report.tokens == 0


def test_a_graph_break_is_walked_in_a_dry_run_too():
    class Broken(nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.two = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x):
            x = self.one(x).relu()
            torch._dynamo.graph_break()
            return self.two(x * 2).sum()

    terms = plan.terms_of(Config(device="cpu"), SMALL)
    found = plan.trace(Broken(), (torch.empty(4, 8, device="meta"),), terms)
    assert sum(call.phase is Phase.FORWARD for call in found.step.calls) == 2
    grads = [f for f in found.step.facts.values() if f.kind is EntryKind.GRAD]
    assert len(grads) == 4


def test_a_model_that_looks_at_values_is_told_so():
    class Looks(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(8, 8)

        def forward(self, x):
            y = self.layer(x)
            return y.sum() if y.sum().item() > 0 else y.mean()

    with pytest.raises(Unsupported, match="asks for the value of a tensor"):
        zcompile.plan(Looks(), torch.empty(4, 8), machine=SMALL)


def test_a_plan_made_where_new_tensors_are_on_meta_is_the_same():
    class Positions(nn.Module):
        """Makes tensors of its own, on whatever device is the default."""

        def __init__(self):
            super().__init__()
            self.table = nn.Linear(16, 16)

        def forward(self, x):
            return (self.table(x) + torch.arange(16.0)).square().mean()

    with torch.device("meta"):
        model, x = Positions(), torch.ones(4, 16)
        inside = zcompile.plan(model, x, machine="desktop-24gb")
    assert str(inside) == str(zcompile.plan(model, x, machine="desktop-24gb"))


def test_a_card_takes_larger_chunks_of_updates_that_join_a_forward():
    """Beside a fast link the host would not be done with starting small ones."""
    config = build(None, {"device_memory": "1GiB"}, "a test")
    here, on_card = plan.terms_of(config), plan.terms_of(config, "h100-pcie-80gb")
    assert here.late_chunk_bytes == CpuDevice.late_chunk_bytes
    assert on_card.late_chunk_bytes == CudaDevice.late_chunk_bytes > here.late_chunk_bytes
