"""What a walk took: which times count, which do not, and what is kept of a step."""

import gc
import time
from dataclasses import replace

import pytest
import torch
from pairs import mlp, on_disk, train
from written import HIGH, LOW, fetch, free, run, schedule, wait

import zcompile
from zcompile.frontend.offload import session_behind
from zcompile.ir.schedule import Fetch, Reduce, Run
from zcompile.ir.types import Phase
from zcompile.machine.cost import TransferModes, call_name
from zcompile.machine.model import Compute, Link, Machine
from zcompile.runtime import profile
from zcompile.runtime.profile import FIRST, RECENT, Clocks

BARE = Machine("bare", {}, {}, Compute({"float32": 1.0}, 1.0))


class Beside:
    """A device whose compute runs beside the host, at a time of its own."""

    torch_device = torch.device("meta")

    def __init__(self):
        self.now = 0.0

    def stamp(self):
        self.now += 1.0
        return At(self.now)


class At:
    def __init__(self, seconds):
        self.seconds = seconds

    def until(self, later):
        return later.seconds - self.seconds

    def passed(self):
        return True


class Behind(At):
    """A moment that the device has yet to come to."""

    def passed(self):
        return False


class OnHost:
    torch_device = torch.device("cpu")


def waited():
    return 0.0


def learned(walks, clocks=None, rows=None):
    """Costs after walks in which each instruction took so many seconds."""
    clocks = clocks or Clocks(OnHost(), waited)
    rows = rows or (run(),)
    made = schedule(*rows)
    for seconds in walks:
        times = seconds if isinstance(seconds, tuple) else (seconds,) * len(rows)
        clocks.learn(made, [0.0] * len(rows), list(times), {}, frozenset())
    return clocks.costs(BARE, TransferModes())


def test_the_mean_of_what_a_region_took_counts():
    assert learned([1.0, 2.0, 3.0]).regions == {"key": 2.0}


def test_a_first_call_that_took_ages_counts_little():
    assert learned([1000.0] + [1.0] * 15).regions["key"] <= 2.0


def test_old_samples_are_forgotten():
    assert learned([9.0] * RECENT + [1.0] * RECENT).regions["key"] == 1.0


def test_a_wait_costs_what_it_takes_without_waiting():
    rows = (fetch(LOW, 0), wait(LOW, 0, 1), run(1), free(LOW, 1))
    found = learned([(1.0, 5.0, 1.0, 1.0), (3.0, 0.5, 1.0, 1.0)], rows=rows)
    assert found.issues["wait", 0] == 0.5
    assert found.issues["fetch", 512] == 2.0


def test_a_fetch_that_was_under_way_before_does_not_count():
    clocks = Clocks(OnHost(), waited)
    made = schedule(fetch(LOW, 0), fetch(HIGH, 1), wait(LOW, 0, 1), run(1))
    clocks.learn(made, [0.0] * 4, [0.25, 3.0, 1.0, 1.0], {}, frozenset({0}))
    assert clocks.costs(BARE, TransferModes()).issues["fetch", 512] == 3.0


def test_beside_the_host_events_of_the_device_count_and_later_walks_cost_nothing():
    device = Beside()
    clocks = Clocks(device, waited)
    made = schedule(run())
    for _ in range(FIRST + 3):
        watch = clocks.watch(made)
        watch.begins(0)
        watch.ends(0)
        watch.over()
    assert device.now == 2 * FIRST
    costs = clocks.costs(BARE, TransferModes())
    assert costs.regions == {"key": 1.0}
    assert 0 < costs.launches["key"] < 0.1


def walked_beside(clocks, region, *samples):
    """The seconds that are known of a region after samples of (seconds, whether the host was
    ahead)."""
    made = schedule(run())
    for seconds, ahead in samples:
        clocks.watch(made)
        clocks.timed(made, region, (Behind if ahead else At)(0.0), At(seconds))
        clocks.learn(made, [0.0], [LAUNCH_S], {}, frozenset())
    return clocks.costs(BARE, TransferModes()).region_seconds(region)


LAUNCH_S = 1e-3
COLD = (64.0, True)


@pytest.mark.parametrize(
    ("samples", "known", "least"),
    [
        ([COLD], 64.0, 64.0),
        ([COLD, (8.0, False)], 8.0, 8.0),
        ([COLD, (8.0, False), (4.0, False), (6.0, False)], 4.0, 4.0),
        ([COLD, (8.0, True), (4.0, True)], 6.0, 4.0),  # the device's own time: the mean
        ([COLD, (4.0, False), (6.0, True)], 6.0, 6.0),
        ([COLD, (6.0, True), (2.0, False)], 6.0, 6.0),
    ],
)
def test_what_a_device_took_that_may_have_waited_for_the_host_is_an_upper_bound(
    samples, known, least
):
    clocks, (only,) = Clocks(Beside(), waited), [x.region for x in schedule(run()).effects]
    assert walked_beside(clocks, only, *samples) == known
    assert clocks.costs(BARE, TransferModes()).idle["key"] == least


def test_a_region_is_delayed_until_the_host_was_often_enough_ahead():
    clocks, (only,) = Clocks(Beside(), waited), [x.region for x in schedule(run()).effects]
    joined = replace(only, parts=(only, only))
    delays = []
    for ahead in (False, False, *[True] * profile.ENOUGH):
        delays.append(clocks.delay_s(only))
        walked_beside(clocks, only, (1.0, ahead))
        assert clocks.delay_s(joined) == 0.0
    assert delays == [0.0] + [pytest.approx(2 * LAUNCH_S)] * (1 + profile.ENOUGH)
    assert clocks.delay_s(only) == 0.0


def test_a_region_that_took_the_host_ages_is_delayed_for_a_moment():
    clocks, made = Clocks(Beside(), waited), schedule(run())
    clocks.learn(made, [0.0], [64.0], {}, frozenset())
    assert clocks.delay_s(made.effects[0].region) == profile.MOST_DELAY_S


def test_what_lies_between_two_calls_is_known_by_their_names():
    clocks = Clocks(OnHost(), waited)
    one, other = schedule(), schedule(phase=Phase.BACKWARD)
    clocks.watch(one).over()
    time.sleep(0.01)
    clocks.watch(other).over()
    clocks.forget()
    clocks.watch(one).over()
    assert list(clocks.costs(BARE, TransferModes()).gaps) == [("forward test", "backward test")]
    assert clocks.costs(BARE, TransferModes()).gaps["forward test", "backward test"] >= 0.01


def between(clocks, monkeypatch, *pauses):
    """Seconds between two calls as they are known after calls with these pauses in between; a pair:
    so much of it is set aside."""
    now = [0.0]
    monkeypatch.setattr(profile, "perf_counter", lambda: now[0])
    one, other = schedule(), schedule(phase=Phase.BACKWARD)
    for pause in pauses:
        seconds, aside = pause if isinstance(pause, tuple) else (pause, 0.0)
        clocks.watch(one).over()
        now[0] += seconds
        with clocks.set_aside():
            clocks.waited_between(aside / 4)  # within it, as where transfers end before a move
            now[0] += aside
        clocks.watch(other).over()
        clocks.forget()
    return clocks.costs(BARE, TransferModes()).gaps["forward test", "backward test"]


def test_a_call_of_a_step_is_known_without_those_that_came_before_it(monkeypatch):
    """As the plan's step makes it, which was seen before gradients stayed, and clips no gradient by
    a call of its own."""
    clocks, now = Clocks(OnHost(), waited), [0.0]
    monkeypatch.setattr(profile, "perf_counter", lambda: now[0])
    backward = schedule(phase=Phase.BACKWARD)
    clip, update = (replace(schedule(phase=Phase.STEP), name=name) for name in ("clip", "update"))

    def step(*calls):
        """Each takes the host a second, after a pause."""
        for pause, call in calls:
            now[0] += pause
            watch = clocks.watch(call)
            now[0] += 1.0
            watch.over()

    step((0.0, backward), (512.0, update))
    step((2.0, backward), (256.0, update))
    for _ in range(3):
        step((2.0, backward), (4.0, clip), (8.0, update), (16.0, clip), (32.0, update))
    gaps = clocks.costs(BARE, TransferModes()).gaps
    assert gaps == {
        ("backward test", "step update"): 4.0 + 1.0 + 8.0,
        ("backward test", "step clip"): 4.0,
        ("step clip", "step update"): 32.0,
        ("step update", "step clip"): 16.0,
        ("step update", "backward test"): 2.0,
    }


def test_planning_is_no_part_of_what_lies_between_two_calls(monkeypatch):
    assert between(Clocks(OnHost(), waited), monkeypatch, (1.0, 512.0)) == 1.0


@pytest.fixture
def compiling(monkeypatch):
    """What is known of `torch.compile`, as in a process in which it has not worked yet."""
    compiling = profile.Compiling()
    monkeypatch.setattr(profile, "COMPILING", compiling)
    return compiling


def test_what_torch_compiles_is_no_part_of_what_lies_between_two_calls(monkeypatch, compiling):
    """With planning before, within and behind it, and when it fails twice."""
    clocks, now = Clocks(OnHost(), waited), [0.0]
    monkeypatch.setattr(profile, "perf_counter", lambda: now[0])

    def compiles(seconds):
        compiling.begins()
        now[0] += seconds
        compiling.ends()

    clocks.watch(schedule()).over()
    now[0] += 1.0
    compiles(64.0)
    with clocks.set_aside():
        now[0] += 128.0
        compiles(256.0)
        clocks.watch(schedule(phase=Phase.STEP)).over()
        compiles(512.0)
    compiles(1024.0)
    compiling.ends()
    now[0] += 2.0
    clocks.watch(schedule(phase=Phase.BACKWARD)).over()
    gaps = clocks.costs(BARE, TransferModes()).gaps
    assert gaps == {("forward test", "backward test"): 3.0}


def test_a_session_is_told_of_what_torch_compiles_forward_and_backward():
    model = zcompile.offload(torch.nn.Linear(4, 4), device="cpu", device_memory="4MiB")
    compiled = torch.compile(model, backend="zinf")
    seconds = [profile.COMPILING.seconds]
    for rows in (2, 2, 3):  # another shape is compiled anew
        loss = compiled(torch.ones(rows, 4)).sum()
        seconds.append(profile.COMPILING.seconds)
        loss.backward()
        seconds.append(profile.COMPILING.seconds)
    none, first, backward, again, backward_again, other, _ = seconds
    assert none < first < backward == again == backward_again < other
    zcompile.close(model)


def test_calls_that_planning_walks_are_no_ends_of_pauses(monkeypatch):
    """As those that compute late updates, before entries move."""
    clocks, now = Clocks(OnHost(), waited), [0.0]
    monkeypatch.setattr(profile, "perf_counter", lambda: now[0])
    clocks.watch(schedule()).over()
    now[0] += 1.0
    with clocks.set_aside():
        now[0] += 256.0
        clocks.watch(schedule(phase=Phase.STEP)).over()
        now[0] += 256.0
    clocks.watch(schedule(phase=Phase.BACKWARD)).over()
    gaps = clocks.costs(BARE, TransferModes()).gaps
    assert gaps == {("forward test", "backward test"): 1.0}


def test_the_first_time_between_two_calls_counts_until_there_is_another(monkeypatch):
    assert between(Clocks(OnHost(), waited), monkeypatch, 64.0) == 64.0
    assert between(Clocks(OnHost(), waited), monkeypatch, 64.0, 1.0) == 1.0


def test_a_pause_that_has_ended_is_known_while_planning_and_counts_once(monkeypatch):
    """What a user did once behind the first step is outvoted before the first plan is made."""
    clocks, now = Clocks(OnHost(), waited), [0.0]
    monkeypatch.setattr(profile, "perf_counter", lambda: now[0])
    update, forward = schedule(phase=Phase.STEP), schedule()

    def next_step(pause):
        clocks.watch(update).over()
        now[0] += pause
        clocks.pause_ends(forward)
        with clocks.set_aside():
            now[0] += 512.0
            clocks.watch(update).over()
            known = clocks.costs(BARE, TransferModes()).gaps
        now[0] += 16.0
        clocks.watch(forward).over()
        assert clocks.costs(BARE, TransferModes()).gaps == known
        clocks.forget()
        return known["step test", "forward test"]

    assert next_step(64.0) == 64.0
    assert next_step(1.0) == 1.0
    assert next_step(3.0) == 2.0


def test_a_run_sets_its_planning_aside(trained, monkeypatch):
    clocks, recorder, now = trained.clocks, trained.recorder, [0.0]
    forward, update = recorder.last_walked.calls[0].schedule, schedule(phase=Phase.STEP)

    def planning(step):
        known = clocks.costs(BARE, TransferModes()).gaps
        assert known[call_name(update), call_name(forward)] == 2.0
        now[0] += 512.0

    monkeypatch.setattr(profile, "perf_counter", lambda: now[0])
    monkeypatch.setattr(trained._policy, "step_ended", planning)
    monkeypatch.setattr(recorder, "ends_with", lambda of: of is forward)
    monkeypatch.setattr(recorder, "end", lambda: recorder.last_walked)
    clocks.over(update)
    now[0] += 2.0
    trained._end_step(forward)
    clocks.watch(forward)
    assert now == [514.0]
    assert clocks.costs(BARE, TransferModes()).gaps[call_name(update), call_name(forward)] == 2.0


def test_a_step_lasts_from_its_first_call_to_that_of_the_next():
    clocks = Clocks(OnHost(), waited)
    forward, update = schedule(), schedule(phase=Phase.STEP)
    for _ in range(3):
        assert clocks.step_s() is None or clocks.step_s() >= 0.01
        clocks.watch(forward).over()
        time.sleep(0.01)
        clocks.watch(update).over()
        clocks.watch(update).over()  # a change that was deferred, say
        clocks.stepped()
    assert clocks.step_s() >= 0.01


def test_links_are_brought_to_what_they_did_in_the_last_steps():
    told = {"h2d": (0, 0.0)}
    clocks = Clocks(OnHost(), waited, lambda: dict(told))
    forward, update = schedule(), schedule(phase=Phase.STEP)
    for step in range(20):
        clocks.watch(forward).over()
        clocks.watch(update).over()
        clocks.stepped()
        told["h2d"] = ((step + 1) << 30, (step + 1) * 2.0)
    machine = replace(BARE, links={"h2d": Link("h2d", 1e9), "d2h": Link("d2h", 1e9)})
    found = clocks.costs(machine, TransferModes()).machine.links
    assert found["h2d"].bytes_per_s == pytest.approx((1 << 30) / 2, rel=0.05)
    assert found["d2h"] == machine.links["d2h"]


@pytest.fixture
def trained(tmp_path):
    torch._dynamo.reset()
    model = on_disk(mlp(), tmp_path)
    executor = session_behind(model).executor
    executor.keep_timeline()
    call = torch.compile(model, backend="zinf")
    train(call, torch.optim.AdamW(model.parameters(), fused=True), 3)
    yield executor
    gc.collect()


def test_a_real_step_is_kept_walk_by_walk(trained):
    walks = trained.clocks.timeline()
    phases = [walk.schedule.phase for walk in walks]
    assert phases == [Phase.FORWARD, Phase.BACKWARD, Phase.STEP]
    assert [call.schedule for call in trained.recorder.last_walked.calls] == [
        w.schedule for w in walks
    ]
    for walk in walks:
        assert len(walk.begins) == len(walk.schedule.instructions)
        moments = [t for pair in zip(walk.begins, walk.ends, strict=True) for t in pair]
        assert moments == sorted(moments)
        assert all(stall >= 0 for stall in walk.stalls.values())


def test_every_region_and_kind_of_a_real_step_has_a_cost(trained):
    costs = trained.clocks.costs(BARE, TransferModes())
    for call in trained.recorder.last_walked.calls:
        for x in call.schedule.instructions:
            if isinstance(x, Run):
                assert 0 < costs.region_seconds(x.region) < 1.0
            elif isinstance(x, Fetch | Reduce):
                assert 0 < costs.issue_seconds(x.effects) < 1.0
    assert len(costs.gaps) == 3


def test_what_ran_while_no_transfer_was_under_way_is_known_by_itself():
    transfers = iter([False, False, True, True, True, False, True, True])
    clocks = Clocks(OnHost(), waited, idle=lambda: next(transfers))
    made = schedule(run(), run(1))
    for _ in range(2):
        watch = clocks.watch(made)
        for index in range(2):
            watch.begins(index)
            watch.ends(index)
        watch.over()
    found = clocks.costs(BARE, TransferModes())
    timed = clocks._regions._times["key"]
    assert len(timed) == 2, "of the first walk nothing counts, it was cold"
    assert found.idle == {"key": timed[1]}, "beside the other a transfer began"


def test_a_region_that_never_ran_beside_idle_links_counts_as_the_least_that_was_measured():
    assert learned([3.0, 1.0, 2.0]).idle == {"key": 1.0}
