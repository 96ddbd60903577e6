"""Tasks on lanes: when does each start and end?

A lane does one task at a time, in the order in which they become ready; a task is ready when all
that it comes after have ended. Nothing is decided here, and nothing is random.
"""

import heapq
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Task:
    """`seconds` of `lane`; `after` holds positions of earlier tasks."""

    name: str
    lane: str
    seconds: float
    after: tuple[int, ...] = ()


@dataclass(frozen=True)
class Timeline:
    """starts, ends: seconds since the first task, by position. busy_s: by lane."""

    starts: tuple[float, ...]
    ends: tuple[float, ...]
    busy_s: dict[str, float]

    @property
    def seconds(self) -> float:
        return max(self.ends, default=0.0)


def simulate(tasks: Sequence[Task]) -> Timeline:
    """Walks from one end of a task to the next; of tasks ready at one instant the first goes first.

    Tasks come after earlier ones only, so there is no cycle and all of them end.
    """
    walk = _Walk(tasks)
    walk.start(walk.ready(i for i, task in enumerate(tasks) if not task.after))
    while walk.running:
        walk.start(walk.end_next())
    busy: dict[str, float] = defaultdict(float)
    for task in tasks:
        busy[task.lane] += task.seconds
    return Timeline(tuple(walk.starts), tuple(walk.ends), dict(busy))


class _Walk:
    """What is under way `now`."""

    def __init__(self, tasks: Sequence[Task]) -> None:
        self.tasks = tasks
        self.starts, self.ends = [0.0] * len(tasks), [0.0] * len(tasks)
        self.now = 0.0
        self.running: list[tuple[float, int]] = []  # a heap of (end, task)
        self._waiting: dict[str, list[tuple[float, int]]] = {task.lane: [] for task in tasks}
        self._working: set[str] = set()
        self._missing = [len(set(task.after)) for task in tasks]
        self._followers: dict[int, list[int]] = defaultdict(list)
        for i, task in enumerate(tasks):
            for other in set(task.after):
                assert other < i
                self._followers[other].append(i)

    def ready(self, found: Iterable[int]) -> set[str]:
        """Queues tasks; the lanes that have something new to look at."""
        lanes = set()
        for i in found:
            heapq.heappush(self._waiting[self.tasks[i].lane], (self.now, i))
            lanes.add(self.tasks[i].lane)
        return lanes

    def start(self, lanes: set[str]) -> None:
        for lane in sorted(lanes - self._working):
            if self._waiting[lane]:
                _, i = heapq.heappop(self._waiting[lane])
                self.starts[i], self.ends[i] = self.now, self.now + self.tasks[i].seconds
                self._working.add(lane)
                heapq.heappush(self.running, (self.ends[i], i))

    def end_next(self) -> set[str]:
        """Ends all that end at the next instant; the lanes that are free or have new tasks."""
        self.now, lanes = self.running[0][0], set[str]()
        while self.running and self.running[0][0] == self.now:
            _, done = heapq.heappop(self.running)
            self._working.discard(self.tasks[done].lane)
            lanes.add(self.tasks[done].lane)
            for i in self._followers[done]:
                self._missing[i] -= 1
            lanes |= self.ready(i for i in self._followers[done] if not self._missing[i])
        return lanes
