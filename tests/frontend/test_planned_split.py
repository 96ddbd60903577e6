"""A plan in a dry run shares the device between its arena and what graphs hold as a real run
does."""

import functools
import json
from xml.etree import ElementTree

import pytest
import torch
from planned_runs import adamw, gpt, ids
from torch import nn

import zcompile
from zcompile.cli.format import curve_svg
from zcompile.config import Config
from zcompile.errors import BudgetExceeded, Unsupported
from zcompile.frontend.dry_run import plan
from zcompile.frontend.offload import session_behind
from zcompile.ir.units import Bytes, KiB, MiB
from zcompile.machine.model import Compute, Link, Machine

RATES = {"h2d": 1e9, "d2h": 1e9, "disk_read": 2e8, "disk_write": 1e8}
MACHINE = Machine(
    "small",
    {"device": 4 * MiB, "host": 64 * MiB},
    {name: Link(name, rate) for name, rate in RATES.items()},
    Compute({"float32": 1e11}, 1e10),
)
BUDGETS = {
    "keep": Bytes(256 * KiB),
    "recompute": Bytes(108 * KiB),
    "offload": Bytes(96 * KiB),
    "auto": Bytes(88 * KiB),
}


class Loss(nn.Module):
    """A GPT that gives its loss."""

    def __init__(self):
        super().__init__()
        self.gpt = gpt()

    def forward(self, tokens, targets):
        return nn.functional.cross_entropy(self.gpt(tokens).flatten(0, 1), targets.flatten())


def given(number):
    tokens = ids(number)
    return tokens[:, :-1], tokens[:, 1:]


def asked(choice):
    return {
        "device": "cpu",
        "device_memory": BUDGETS[choice],
        "host_memory": "64MiB",
        "machine": MACHINE,
        "activations": choice,
    }


@functools.cache
def planned(choice, micro_batches=1):
    torch._dynamo.reset()
    with torch.device("meta"):
        model = Loss()
    return zcompile.plan(model, *given(0), micro_batches=micro_batches, **asked(choice))


def session_of_run(choice, micro_batches=1):
    """Held bytes, bytes of the arena, and the measured peak of a real run."""
    torch._dynamo.reset()
    model = zcompile.offload(Loss(), **asked(choice))
    optimizer = adamw(model)
    compiled = torch.compile(model, backend="zinf", dynamic=False)
    for number in range(4):
        for batch in range(micro_batches):
            compiled(*given(10 * number + batch)).backward()
        optimizer.step()
        optimizer.zero_grad()
    session = session_behind(model)
    found = session.split.held_bytes, session.arena.budget_bytes
    peak = zcompile.stats(model)["peak"]["activations"]
    zcompile.close(model)
    return *found, peak


@pytest.mark.parametrize(
    ("choice", "micro_batches"),
    [
        ("offload", 2),
        *(
            pytest.param(*how, marks=pytest.mark.slow)
            for how in [("recompute", 1), ("keep", 1), ("keep", 2), ("offload", 1), ("auto", 1)]
        ),
    ],
)
def test_a_plan_splits_the_device_to_the_byte_as_a_run_does(choice, micro_batches):
    held, arena, peak = session_of_run(choice, micro_batches)
    report = planned(choice, micro_batches)
    device = next(row for row in report.tiers if row.tier == "device")
    assert (report.held_bytes, device.capacity) == (held, arena)
    assert held + arena == BUDGETS[choice]
    assert report.held_bytes == report.fullest.after.peak == peak
    assert device.used <= device.capacity
    assert report.fits


@pytest.mark.slow  # tests/frontend/test_dry_run.py plans with room for all
def test_a_plan_keeps_everything_where_nothing_bounds_the_device():
    torch._dynamo.reset()
    report = zcompile.plan(Loss(), *given(0), machine=MACHINE)
    assert not report.bounded
    assert report.fullest.before == report.fullest.after
    assert "everything is kept" in str(report)
    assert report.held_bytes == planned("keep").held_bytes


@pytest.mark.parametrize(
    ("choice", "device"),
    [("keep", 64 * KiB), pytest.param("auto", 4 * KiB, marks=pytest.mark.slow)],
)
@pytest.mark.slow
def test_a_device_that_is_too_small_is_told_what_it_needs(choice, device):
    with torch.device("meta"):
        model = Loss()
    torch._dynamo.reset()
    with pytest.raises(BudgetExceeded) as caught:
        zcompile.plan(model, *given(0), **{**asked(choice), "device_memory": Bytes(device)})
    assert caught.value.needed_bytes > device


def test_a_step_is_traced_anew_for_another_device():
    torch._dynamo.reset()
    terms = plan.terms_of(Config(device="cpu", device_memory=BUDGETS["keep"]), MACHINE)
    traced = plan.trace(Loss(), given(0), terms)
    with pytest.raises(Unsupported, match="trace it anew"):
        plan.report_of(traced, terms.on(MACHINE))


@pytest.mark.slow
def test_the_report_tells_both_peaks_and_gives_both_curves():
    report = planned("recompute")
    memory = report.fullest
    assert f"graphs hold {memory.describe()}" in str(report)
    assert memory.before.peak > memory.after.peak
    (told,) = json.loads(report.to_json())["memories"]
    assert tuple(told["after"]["nbytes"]) == memory.after.nbytes
    assert tuple(told["before"]["nbytes"]) == memory.before.nbytes


def test_the_curves_are_drawn_as_lines():
    report = planned("recompute")
    picture = ElementTree.fromstring(curve_svg(report.fullest))
    texts = [node.text for node in picture.iter() if node.tag.endswith("text")]
    assert {"forward", "backward", "as chosen", "were everything kept"} <= set(texts)
    assert sum(node.tag.endswith("polyline") for node in picture.iter()) == 2
