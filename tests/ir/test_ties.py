"""What is told of objects that die, and of objects that are the very same."""

import pytest

from zcompile.ir.ties import Same


class Thing:
    pass


def test_the_very_objects_in_their_order_are_the_same():
    first, last = Thing(), Thing()
    same = Same([first, last])
    assert same.are([first, last])
    assert not same.are([last, first])
    assert not same.are([first])
    assert not same.are([first, Thing()])


def test_an_object_in_the_place_of_one_that_has_died_is_another():
    gone = Thing()
    same, place, others = Same([gone]), id(gone), []
    del gone
    for _ in range(100_000):
        others.append(Thing())
        if id(others[-1]) == place:
            assert not same.are([others[-1]])
            return
    pytest.fail("no object has got the place")


def test_objects_are_not_kept_alive():
    things = [Thing()]
    same = Same(things)
    things.clear()
    assert same._died
