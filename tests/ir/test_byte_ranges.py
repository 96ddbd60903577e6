"""What is known of byte ranges, beside a list with one item per byte."""

from hypothesis import given, settings
from hypothesis import strategies as st

from zcompile.ir.byte_ranges import ByteRanges

SPANS = st.tuples(st.integers(0, 40), st.integers(0, 12))


@settings(deadline=None, derandomize=True)
@given(st.lists(st.tuples(SPANS, st.booleans()), max_size=30))
def test_what_is_read_is_what_was_last_put_there(steps):
    ranges: ByteRanges[int] = ByteRanges()
    known: list[int | None] = [None] * 60
    for n, ((begin, length), puts) in enumerate(steps):
        end = begin + length
        if puts:
            ranges.put(begin, end, n)
            known[begin:end] = [n] * length
        found = ranges.over(begin, end)
        assert set(found) == {value for value in known[begin:end] if value is not None}
        held = sum(value is not None for value in known[begin:end])
        assert ranges.bytes_over(begin, end) == held


def test_the_rest_of_a_range_keeps_its_value():
    ranges: ByteRanges[str] = ByteRanges()
    ranges.put(0, 30, "old")
    ranges.put(10, 20, "new")
    assert ranges.over(0, 30) == ["old", "new", "old"]
    assert ranges.over(9, 10) == ["old"]
    assert ranges.over(19, 21) == ["new", "old"]
