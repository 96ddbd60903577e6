"""What of collectives is done together: messages that wait at once, and sums that are made in one
job. Without any other rank."""

from types import SimpleNamespace

import pytest
import torch

from zcompile.runtime.ranks.fabric import MOST_BEGUN, Exchanged, Fabric, _Lane, _Posts
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
    lane = _Lane("gather", None, 0, pytest.fail)
    lane._carries = HostMessages(told)
    return lane


def posts_of(number, *after, memory=None, bring=lambda: None):
    row = torch.full((4,), number) if memory is None else memory.fill_(number)
    return _Posts([(1, row)], [(1, row)], (row,), after, bring)


def done(error=None):
    made = Promise()
    made.finish(error)
    return made


def seen_by(*rows, paced=False):
    """What had been begun when each of the collectives was waited for; all are handed over."""
    told = Told()
    lane = lane_of(told)
    if paced:
        lane.pace()
    try:
        for row in rows:
            lane.expect(row)
        for number, row in enumerate(rows):
            if row is None:
                lane.alone("spread", [], [(1, torch.full((4,), number))])
            else:
                lane.posted("gather")
    finally:
        lane.stop()
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
    if why == "ticket":
        second = posts_of(1, late, bring=lambda: None)
        first.bring = lambda: None
    elif why == "memory":
        second = posts_of(1)
        second._ranges = first._ranges
    else:
        second = None if why == "alone" else posts_of(1)
    third = posts_of(2)
    told = seen_by_turns(first, second, third, late) if why == "ticket" else None
    found = told or seen_by(first, second, third, paced=why == "paced")
    assert found[0] == (0, [0])
    assert [begun for _, begun in found][-1] == [0, 1, 2], "in order"


def seen_by_turns(first, second, third, late):
    """As `seen_by`, where `late` is kept once the first is over, as a job waits for it."""
    told = Told()
    lane = lane_of(told)
    for row in (first, second, third):
        lane.expect(row)
    lane.posted("gather")
    late.finish()
    lane.posted("gather")
    lane.posted("gather")
    lane.stop()
    return told.seen


def test_what_fails_ahead_is_raised_in_its_turn():
    told, error = Told(), OSError("the share is not there")
    lane = lane_of(told)
    for posts in (posts_of(0), posts_of(1, done(error)), posts_of(2)):
        lane.expect(posts)
    lane.posted("gather")
    assert told.seen == [(0, [0])], "the third would be taken for the second"
    with pytest.raises(OSError, match="the share is not there"):
        lane.posted("gather")
    lane.stop()


def fabric_alone():
    """A fabric of two ranks, of which the other brings 3; its jobs, carried out at once."""
    fabric, jobs = object.__new__(Fabric), []
    fabric.rank, fabric.size = 0, 2
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
