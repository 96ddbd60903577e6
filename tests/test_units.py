"""Sizes and rates as people write them become numbers, and a sentence if they cannot."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zcompile.units import GiB, KiB, MiB, TiB, parse_rate, parse_size, show_size


@pytest.mark.parametrize(("text", "nbytes"), [
    (4096, 4096),
    ("4096", 4096),
    ("1B", 1),
    ("20GiB", 20 * GiB),
    ("20 gib", 20 * GiB),
    (" 1.5 KiB ", 1536),
    ("300MB", 300 * 10**6),
    ("2TB", 2 * 10**12),
    ("1TiB", TiB),
    ("0.5KB", 500),
])  # fmt: skip
def test_a_size_is_read_as_written(text, nbytes):
    assert parse_size(text) == nbytes


@pytest.mark.parametrize("text", ["", "GiB", "-1", "1e9", "20 GiBs", "20GB/s", "20,5GB", "1 2",
                                  None, 1.5, True, [1]])  # fmt: skip
def test_what_is_not_a_size_is_said_to_be_none(text):
    with pytest.raises(ValueError, match="is not a size; write"):
        parse_size(text)


@pytest.mark.parametrize("text", [0, -4, "0", "0GiB", "0.1B"])
def test_a_size_is_more_than_nothing(text):
    with pytest.raises(ValueError, match="more than zero bytes"):
        parse_size(text)


@pytest.mark.parametrize(
    ("text", "bytes_per_s"),
    [
        ("300MB/s", 3e8),
        ("1 GiB / s", float(GiB)),
        (1e9, 1e9),
        (5, 5.0),
    ],
)
def test_a_rate_is_read_as_written(text, bytes_per_s):
    assert parse_rate(text) == bytes_per_s


@pytest.mark.parametrize("text", ["300MB", "300MB/h", "/s", "", None, True])
def test_what_is_not_a_rate_is_said_to_be_none(text):
    with pytest.raises(ValueError, match=r"is not a (rate|size); write"):
        parse_rate(text)


@pytest.mark.parametrize("text", [0, -1.0, "0MB/s"])
def test_a_rate_is_more_than_nothing(text):
    with pytest.raises(ValueError, match="more than zero bytes"):
        parse_rate(text)


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1280, "1.25 KiB"),
        (18.4 * GiB, "18.4 GiB"),
        (500 * MiB, "500 MiB"),
        (3 * TiB, "3.00 TiB"),
        (-2 * KiB, "-2.00 KiB"),
    ],
)
def test_a_size_is_shown_with_three_digits(nbytes, text):
    assert show_size(nbytes) == text


@given(st.integers(min_value=1, max_value=1 << 50))
def test_a_shown_size_is_read_back_within_its_digits(nbytes):
    assert abs(parse_size(show_size(nbytes)) - nbytes) <= max(1, nbytes * 0.006)


@given(st.integers(min_value=1, max_value=1 << 60))
def test_an_int_of_bytes_is_itself(nbytes):
    assert parse_size(nbytes) == parse_size(str(nbytes)) or nbytes >= 1 << 53
    assert parse_size(nbytes) == nbytes
