"""Clocks, by hand: what is ordered, and what is not."""

import pytest
from streams.clocks import Doer, Memory, common, joined, knowing, known, told


def ranges(*spans):
    return list(spans)


@pytest.fixture
def memory():
    return Memory()


def test_two_that_know_nothing_of_each_other_are_a_pair(memory):
    a, b = Doer("a"), Doer("b")
    memory.touch(a, "copy", [], [(100, 200)])
    memory.touch(b, "mm", [(150, 160)], [])
    assert list(memory.pairs) == [("copy writes", "mm reads")]


@pytest.mark.parametrize("again", [False, True])
def test_who_knows_the_first_comes_after_it(memory, again):
    a, b = Doer("a"), Doer("b")
    memory.touch(a, "copy", [], [(100, 200)])
    b.known = dict(a.known)
    if again:  # of what comes later it knows nothing
        memory.touch(a, "copy", [], [(100, 200)])
    memory.touch(b, "mm", [(150, 160)], [])
    assert bool(memory.pairs) is again


def test_reads_need_no_order_and_what_covers_an_access_stands_for_it(memory):
    a, b, c = Doer("a"), Doer("b"), Doer("c")
    memory.touch(a, "one", [(0, 8)], [])
    memory.touch(b, "two", [(0, 8)], [])
    assert not memory.pairs
    b.known = joined(a.known, b.known)
    memory.touch(b, "three", [], [(0, 8)])
    c.known = dict(b.known)
    memory.touch(c, "four", [], [(4, 6)])
    assert not memory.pairs


def test_memory_is_not_freed_while_it_is_read(memory):
    a = Doer("a")
    memory.touch(a, "copy", [(0, 8)], [])
    memory.free(0, 4, {}, {"b": 7})
    assert list(memory.pairs) == [("copy reads", "freed")]
    memory.pairs.clear()
    memory.touch(a, "copy", [(0, 8)], [])
    memory.free(0, 8, {}, {"a": 2})
    assert not memory.pairs


def test_a_thread_forgets_what_it_learned_on_behalf_of_another():
    with knowing({"a": 1}):
        told({"b": 2})
        assert known() == {"a": 1, "b": 2}
        with knowing():
            assert known() == {}
    assert "b" not in known()


def test_two_have_in_common_what_both_know():
    assert common({"a": 3, "b": 1, "c": 2}, {"a": 2, "b": 4}) == {"a": 2, "b": 1}
