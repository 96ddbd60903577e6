"""The simulator of lanes: small cases exactly, laws on random ones."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zcompile.planner.analytic.step import Task, simulate


@st.composite
def programs(draw):
    tasks = []
    for i in range(draw(st.integers(0, 25))):
        after = draw(st.sets(st.integers(0, i - 1), max_size=3)) if i else set()
        seconds = draw(st.integers(0, 9))
        tasks.append(Task(str(i), draw(st.sampled_from("abc")), seconds, tuple(sorted(after))))
    return tasks


def test_lanes_work_side_by_side_and_a_task_waits_for_what_it_comes_after():
    tasks = [
        Task("read", "disk", 3),
        Task("read", "disk", 3),
        Task("run", "cpu", 4, (0,)),
        Task("run", "cpu", 4, (1,)),
    ]
    assert simulate(tasks).starts == (0, 3, 3, 7)
    assert simulate(tasks).seconds == 11
    assert simulate(tasks).busy_s == {"disk": 6, "cpu": 8}


def test_a_lane_does_not_wait_for_a_task_that_is_not_ready():
    tasks = [Task("run", "cpu", 5), Task("write", "disk", 1, (0,)), Task("read", "disk", 2)]
    assert simulate(tasks).starts == (0, 5, 0)


def test_nothing_takes_no_time():
    assert simulate([]).seconds == 0


@given(programs())
def test_a_lane_does_one_task_at_a_time_and_nothing_starts_early(tasks):
    timeline = simulate(tasks)
    for lane in "abc":
        spans = sorted(
            (timeline.starts[i], timeline.ends[i])
            for i, task in enumerate(tasks)
            if task.lane == lane
        )
        assert all(a[1] <= b[0] for a, b in pairwise(spans))
    for i, task in enumerate(tasks):
        assert timeline.ends[i] == timeline.starts[i] + task.seconds
        assert all(timeline.ends[other] <= timeline.starts[i] for other in task.after)


@given(programs())
def test_the_whole_takes_at_least_its_busiest_lane_and_at_most_the_sum(tasks):
    timeline = simulate(tasks)
    assert max(timeline.busy_s.values(), default=0) <= timeline.seconds
    assert timeline.seconds <= sum(task.seconds for task in tasks)


@given(programs())
def test_some_lane_always_works_until_the_end(tasks):
    timeline = simulate(tasks)
    reached = 0.0
    for start, end in sorted(zip(timeline.starts, timeline.ends, strict=True)):
        assert start <= reached
        reached = max(reached, end)
    assert reached == timeline.seconds


def test_a_task_comes_after_earlier_ones_only():
    with pytest.raises(AssertionError):
        simulate([Task("a", "x", 1, (1,)), Task("b", "x", 1)])
