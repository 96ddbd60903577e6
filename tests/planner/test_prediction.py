"""A step that was run on throttled links, beside what is predicted of it: the same bytes and peak,
to the byte, in no less time.

That it takes no more is for an idle machine to show: `python -m benchmarks.step_plan` compares
both.
"""

import itertools

import pytest
import torch
from sampled import sampled_rows
from torch import nn

import zcompile
from zcompile.frontend.offload import session_behind
from zcompile.machine.model import Compute, Link, Machine
from zcompile.planner.simulator import predicted, simulate, told

WIDTH, LAYERS = 256, 4
RATE = 40e6
"""Bytes per second of all throttled links together: a step of this model then takes some tenths of
a second, nearly all of it on the links, of which no bytes come sooner than their rate lets them."""
STEPS = 6
SETTLED = 2
"""Steps that are over before time is compared: a step ends when the next begins, so the first is
that in whose end `stats` is looked at, and the second finds done what links did meanwhile."""
DEVICE = {False: "4MiB", True: "1MiB"}
"""With residency a fifth of all states, so that links are most of a step then too."""
FACTOR = 1.5
"""How much less a step may take than is predicted: what is said of compute, which is little of it,
is guessed."""


def rate_of(throttle):
    """Bytes per second of each of these links."""
    return RATE / len(throttle)


def trained(tmp_path, throttle, host, residency=False):
    """(what was measured of the last steps, the session, what it is of, and the seconds of as many
    steps that were over by then), some steps into a run."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    layers = [nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)]
    model = zcompile.offload(
        nn.Sequential(*layers),
        device="cpu",
        device_memory=DEVICE[residency],
        host_memory=host,
        disk=tmp_path,
        throttle=dict.fromkeys(throttle, rate_of(throttle)),
        residency=residency,
    )
    session = session_behind(model)
    session.executor.keep_timeline()
    compiled = torch.compile(model, backend="zinf")
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)

    def steps(count):
        for _ in range(count):
            compiled(torch.ones(8, WIDTH)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            yield session.executor.clocks.last_step_s()

    list(steps(8 if residency else 3))  # a plan is reviewed at step 6
    zcompile.stats(model, reset=True)
    seconds = list(steps(STEPS))
    return zcompile.stats(model), session, model, seconds


def costs_of(session, throttle):
    """Of this run: links that nobody throttled are as fast as memory."""
    rates = {
        link: rate_of(throttle) if link in throttle else 4e9
        for link in ("h2d", "d2h", "disk_read", "disk_write")
    }
    links = {name: Link(name, rate) for name, rate in rates.items()}
    machine = Machine("here", {}, links, Compute({"float32": 1e10}, 4e9))
    return session.executor.clocks.costs(machine, session.ways())


SLOW_LINKS = {
    "bus": (("h2d", "d2h"), "64MiB"),
    "disk": (("disk_read", "disk_write"), "256KiB"),
    "all": (("disk_read", "disk_write", "h2d", "d2h"), "256KiB"),
}
"""What is throttled, and the host's budget."""


@pytest.mark.parametrize(
    ("links", "residency"),
    sampled_rows(itertools.product(SLOW_LINKS, (False, True)), ("bus", False)),
)
def test_a_real_step_is_as_predicted(tmp_path, links, residency):
    throttle, host = SLOW_LINKS[links]
    stats, session, _model, seconds = trained(tmp_path, throttle, host, residency=residency)
    found = predicted(session.executor.recorder.last_walked, costs_of(session, throttle))
    moved = {link: nbytes / STEPS for link, nbytes in stats["bytes"].items()}
    assert {link: found["bytes"][link] for link in moved} == moved
    assert found["peak"] == {what: stats["peak"][what] for what in found["peak"]}
    # Who else uses the processors can make a step longer than it is, and never shorter.
    assert found["step_s"] < FACTOR * min(seconds[SETTLED:])
    assert found["bound_s"] <= found["step_s"]


@pytest.mark.slow
def test_a_prediction_is_plain_numbers_that_add_up(tmp_path):
    _, session, _model, _ = trained(tmp_path, ("h2d",), "64MiB")
    step, costs = session.executor.recorder.last_walked, costs_of(session, ("h2d",))
    timeline = simulate(step, costs)
    found = told(timeline, step)
    assert found == predicted(step, costs)
    assert found["seconds"]["compute"] + found["seconds"]["optimizer"] == pytest.approx(
        timeline.compute_s
    )
    assert sum(found["phases"].values()) == pytest.approx(found["step_s"])
    assert all(type(n) is int for n in found["bytes"].values())
