"""Lists whose sums know what they hold."""

from zcompile.ir.torch_compat import SetBackedList

MORE = [3, 1]


def test_a_sum_is_the_list_that_it_would_be() -> None:
    assert SetBackedList([1, 2]) + MORE + MORE == [1, 2, 3, 1, 3, 1]


def test_a_sum_knows_what_it_holds() -> None:
    found = SetBackedList([2]) + MORE
    assert 1 in found
    assert 4 not in found


def test_a_list_that_was_changed_holds_what_it_holds_now() -> None:
    found = SetBackedList([7, 2])
    assert 7 in found + MORE
    found.remove(7)
    found.extend([5])
    assert 7 not in found
    assert 7 not in found + MORE
    assert 5 in found + MORE
