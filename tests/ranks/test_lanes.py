"""What of collectives is done together: messages that wait at once, and sums that are made in one
job. Without any other rank."""

import threading
from functools import partial
from types import SimpleNamespace

import pytest
import torch

from zcompile.ir.rank_mesh import RankMesh
from zcompile.runtime.ranks.fabric import Exchanged, Fabric
from zcompile.runtime.ranks.lane import MOST_BEGUN, Lane, Posts
from zcompile.runtime.ranks.link import LinksOfMesh, RankLink
from zcompile.runtime.ranks.transport import HostMessages
from zcompile.runtime.transfer.ticket import Promise, Ready


class Told:
    """A channel that tells what is begun, and what had been when each collective was waited for."""

    def __init__(self):
        self.begun, self.seen = [], []

    def receive(self, peer, tensor):
        self.begun.append(int(tensor[0]))
        return int(tensor[0])

    def send(self, peer, tensor):
        return None

    def wait(self, peer, work):
        if work is not None:
            self.seen.append((work, [*self.begun]))


def lane_of(told):
    """A lane, and the turns that its thread would take, for the test to take."""
    lane, turns = Lane("gather", None, 0, pytest.fail), []
    lane.stop()
    lane._carries = HostMessages(told)
    lane._workers = SimpleNamespace(submit=turns.append)
    return lane, turns


def hand_over(lane, posts):
    lane.submit(partial(lane.posted, "gather", posts), posts)


def posts_of(number, *after, memory=None, is_alone=False):
    row = torch.full((4,), number) if memory is None else memory.fill_(number)
    return Posts([(1, row)], [(1, row)], (row,), after, RankLink(), is_alone=is_alone)


def done(error=None):
    made = Promise()
    made.finish(error)
    return made


def seen_by(*rows, paced=False):
    """What had been begun when each of the collectives was waited for; all are handed over."""
    told = Told()
    lane, turns = lane_of(told)
    if paced:
        lane._holds = SimpleNamespace()
    for row in rows:
        hand_over(lane, row)
    for turn in turns:
        turn()
    assert not lane._coming, "memory is dropped with what was done"
    return told.seen


def test_messages_begin_while_those_before_them_wait():
    rows = [posts_of(n, Ready()) for n in range(3)]
    assert seen_by(*rows) == [(n, [0, 1, 2]) for n in range(3)]


def test_so_many_and_no_more_are_under_way():
    rows = [posts_of(n) for n in range(MOST_BEGUN + 1)]
    assert [len(begun) for _, begun in seen_by(*rows)][:2] == [MOST_BEGUN, MOST_BEGUN + 1]


@pytest.mark.parametrize("why", ["ticket", "memory", "alone", "paced"])
def test_what_something_stands_before_waits_for_its_turn(why):
    """Others that come behind it wait too: each rank sends and receives in one order."""
    shared, late = torch.zeros(4, dtype=torch.int64), Promise()
    first = posts_of(0, memory=shared if why == "memory" else None)
    second = posts_of(1, *([late] if why == "ticket" else []), is_alone=why == "alone")
    if why == "memory":
        second._ranges = first._ranges
    third = posts_of(2)
    told = seen_by_turns(first, second, third, late) if why == "ticket" else None
    found = told or seen_by(first, second, third, paced=why == "paced")
    assert found[0] == (0, [0])
    assert found[1] == (1, [0, 1] if why in ("alone", "paced") else [0, 1, 2])
    assert found[2] == (2, [0, 1, 2]), "in order"


def seen_by_turns(first, second, third, late):
    """As `seen_by`, where `late` is kept once the first is over, as a job waits for it."""
    told = Told()
    lane, turns = lane_of(told)
    for row in (first, second, third):
        hand_over(lane, row)
    turns[0]()
    late.finish()
    turns[1]()
    turns[2]()
    return told.seen


def test_what_fails_ahead_is_raised_in_its_turn():
    told, error = Told(), OSError("the share is not there")
    lane, turns = lane_of(told)
    for posts in (posts_of(0), posts_of(1, done(error)), posts_of(2)):
        hand_over(lane, posts)
    turns[0]()
    assert told.seen == [(0, [0])], "the third would be taken for the second"
    with pytest.raises(OSError, match="the share is not there"):
        turns[1]()


def fabric_over(told):
    """A fabric of two ranks whose lanes have these messages, and the turns of its threads."""
    fabric = object.__new__(Fabric)
    fabric.rank, fabric.size, fabric.mesh, fabric.shard = 0, 2, RankMesh(2), 0
    fabric._lock, fabric._pending, fabric._error = threading.Lock(), set(), None
    fabric.links = LinksOfMesh.all_one(RankLink())
    fabric.moved = {name: [0, 0.0] for name in ("gather", "exchange")}
    lane, turns = lane_of(told)
    fabric._lanes = dict.fromkeys(fabric.moved, lane)
    return fabric, turns


@pytest.mark.parametrize("is_queued", [False, True])
def test_what_an_interrupt_keeps_from_its_lane_is_taken_back_whole(is_queued):
    """Else the next job carries out what this one was to, and keeps its promise too early."""
    told = Told()
    fabric, turns = fabric_over(told)
    workers = fabric._lanes["gather"]._workers

    def interrupted(turn):
        workers.submit = turns.append
        if is_queued:
            turns.append(turn)
        raise KeyboardInterrupt

    workers.submit = interrupted
    with pytest.raises(KeyboardInterrupt):
        fabric.gather(torch.full((8,), 1, dtype=torch.uint8), "a", [])
    assert not fabric._pending, "who ends the session waits for what is pending"
    promise = fabric.gather(torch.full((8,), 2, dtype=torch.uint8), "b", [])
    turns[0]()
    assert promise.done()
    assert told.seen == [(2, [2])]
    for turn in turns[1:]:
        turn()
    assert told.seen == [(2, [2])]


def gathered_twice(fabric, memory):
    for row in memory:
        fabric.gather(row.view(torch.uint8), "w", [])


def exchanged_twice(fabric, memory):
    for row in memory:
        fabric.exchange(row, None, "w", [])


def exchanged_in_buckets(fabric, memory):
    for row in memory:
        fabric.exchange_all([row], [])


@pytest.mark.parametrize("twice", [gathered_twice, exchanged_twice, exchanged_in_buckets])
@pytest.mark.parametrize("is_same", [True, False])
def test_collectives_of_the_same_bytes_do_not_overlap(twice, is_same):
    """All that each of them reads and writes is named, by whoever hands it over."""
    told = Told()
    fabric, turns = fabric_over(told)
    first = torch.full((4,), 7.0)
    twice(fabric, [first, first if is_same else torch.full((4,), 7.0)])
    for turn in turns:
        turn()
    assert [len(begun) for _, begun in told.seen] == [1 if is_same else 2, 2]


def test_bytes_that_set_out_before_the_turn_of_their_collective_count_from_then_on():
    fabric, turns = fabric_over(Told())
    events = []
    link = SimpleNamespace(
        is_paced=False,
        begins=lambda at: events.append(("begins", at)),
        ends=lambda nbytes, since, at: events.append((nbytes, since)),
    )
    fabric.links = LinksOfMesh.all_one(link)
    gathered_twice(fabric, [torch.zeros(4), torch.zeros(4)])
    for turn in turns:
        turn()
    (kind, one), (other_kind, other), *ends = events
    assert (kind, other_kind) == ("begins", "begins")
    assert [(came.arrives, since) for came, since in ends] == [(8, one), (8, other)]


def fabric_alone():
    """A fabric of two ranks, of which the other brings 3; its jobs, carried out at once."""
    fabric, jobs = object.__new__(Fabric), []
    fabric.rank, fabric.size, fabric.mesh, fabric.shard = 0, 2, RankMesh(2), 0
    fabric.links = LinksOfMesh.all_one(RankLink())
    fabric._lanes = {"exchange": SimpleNamespace(bring=lambda target, own: target.copy_(own))}

    def submit_posts(lane, what, posts, *_):
        posts.bring()
        for _, row in posts.receives:
            row.view(torch.float32).fill_(3.0)
        jobs.append(what)
        return done()

    def submit(lane, what, job, *_):
        job()
        jobs.append(what)
        return done()

    fabric._submit_posts, fabric._submit = submit_posts, submit
    return fabric, jobs


@pytest.mark.parametrize(
    ("dtypes", "sums"), [((torch.float32,) * 3, 1), ((torch.float32, torch.float64), 2)]
)
def test_small_gradients_of_one_dtype_are_summed_in_one_job(dtypes, sums):
    fabric, jobs = fabric_alone()
    flats = [torch.randn(5 + 9 * n, dtype=dtype) for n, dtype in enumerate(dtypes)]
    rows = fabric.exchange_all(flats, [])
    alone = [
        fabric.folded(Exchanged(row.parts.clone(), row.ticket), row.parts.dtype) for row in rows
    ]
    jobs.clear()
    found = [fabric.folded(row, row.parts.dtype) for row in rows]
    assert jobs == ["add up"] * sums
    for flat, one, total in zip(flats, alone, found, strict=True):
        assert total.parts.shape == (1, flat.numel())
        assert torch.equal(total.parts, one.parts)


@pytest.mark.parametrize("first", [True, False])
def test_a_small_gradient_that_is_added_to_another_is_scaled_once(first):
    """Beside one that is summed, with all that crossed in the bucket, before or after it."""
    fabric, _ = fabric_alone()
    flats = [torch.randn(5), torch.randn(7)]
    one, other = fabric.exchange_all(flats, [])
    if first:
        fabric.folded(one, torch.float32)
    scaled = fabric.scaled(other, torch.float32)
    total = fabric.folded(one, torch.float32)
    assert torch.equal(scaled.parts, torch.stack([flats[1], torch.full((7,), 3.0)]) * 0.5)
    assert torch.equal(total.parts[0], flats[0] * 0.5 + 1.5)


def test_a_small_gradient_that_is_widened_is_summed_by_itself():
    fabric, _ = fabric_alone()
    (row, _) = fabric.exchange_all([torch.randn(5), torch.randn(7)], [])
    expected = row.parts.double().mul(0.5).sum(0)
    found = fabric.folded(row, torch.float64)
    assert found.parts.dtype is torch.float64
    assert torch.equal(found.parts[0], expected)
