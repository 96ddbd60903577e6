"""Sizes and rates as people write them become numbers, and a sentence if they cannot."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zcompile.ir.units import (
    Bytes,
    GiB,
    KiB,
    MiB,
    TiB,
    parse_budget,
    parse_flops,
    parse_rate,
    parse_size,
    show_flops,
    show_rate,
    show_size,
    write_budget,
    write_flops,
    write_rate,
    write_size,
)


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
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
        ("20G", 20 * GiB),
        ("20M", 20 * MiB),
        ("20k", 20 * KiB),
        ("1.5 T", 3 * TiB // 2),
    ],
)
def test_a_size_is_read_as_written(text, nbytes):
    assert parse_size(text) == nbytes


@pytest.mark.parametrize(
    "text",
    ["", "GiB", "80%", "-1", "1e9", "20 GiBs", "20GB/s", "20,5GB", "1 2", None, 1.5, True, [1]],
)
def test_what_is_not_a_size_is_said_to_be_none(text):
    with pytest.raises(ValueError, match="is not a size; write"):
        parse_size(text)


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("20GiB", 20 * GiB),
        (MiB, MiB),
        ("20B", 20),
        (Bytes(7), 7),
        (Bytes("7B"), 7),
        ("2M", 2 * MiB),
    ],
)
def test_a_budget_is_read_as_a_size_and_not_asked_about_again(text, nbytes):
    found = parse_budget(text)
    assert found == nbytes
    assert parse_budget(found) == nbytes
    assert parse_budget(eval(write_budget(nbytes))) == nbytes


@pytest.mark.parametrize(
    ("text", "meant"),
    [(20, "20GiB"), ("20", "20GiB"), (8192, "8192MiB"), (MiB - 1, "1048575MiB")],
)
def test_a_small_number_without_a_unit_is_asked_about(text, meant):
    with pytest.raises(ValueError, match=f"means {text} bytes; did you mean '{meant}'.*'{text}B'"):
        parse_budget(text)


def test_a_percentage_is_of_what_there_is_in_all():
    share = parse_budget(" 80 %")
    assert (str(share), share.of(1000)) == ("80%", 800)
    assert parse_budget(share) is share
    assert parse_budget("12.5%").of(80) == 10
    assert type(share.of(1000)) is Bytes


@pytest.mark.parametrize("text", ["0%", "101%", "0.0%"])
def test_a_percentage_is_a_part(text):
    with pytest.raises(ValueError, match="above 0% and at most 100%"):
        parse_budget(text)


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


@pytest.mark.parametrize("text", ["300MB", "300M/s", "300MB/h", "/s", "", None, True])
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


@pytest.mark.parametrize(
    ("text", "flops_per_s"), [("70TFLOP/s", 70e12), ("1.5 gflop / s", 1.5e9), (3, 3.0)]
)
def test_a_rate_of_flops_is_read_as_written(text, flops_per_s):
    assert parse_flops(text) == flops_per_s


@pytest.mark.parametrize("text", ["70TFLOPS", "70TFLOP", "70TB/s", "70/s", "", None, True, 0, -1.0])
def test_what_is_no_rate_of_flops_is_said_to_be_none(text):
    with pytest.raises(ValueError, match="is not a rate"):
        parse_flops(text)


@pytest.mark.parametrize(
    ("write", "value", "text"),
    [
        (write_size, 20 * GiB, "20GiB"),
        (write_size, 1792 * GiB, "1792GiB"),
        (write_size, 80 * 10**9, "80GB"),
        (write_size, 4097, 4097),
        (write_rate, 3.25e9, "3.25GB/s"),
        (write_rate, 1 / 3, 1 / 3),
        (write_flops, 70e12, "70TFLOP/s"),
        (write_flops, 1e12 / 3, 1e12 / 3),
    ],
)
def test_a_number_is_written_as_one_says_it_where_that_is_exact(write, value, text):
    assert write(value) == text


@given(st.integers(1, 1 << 70), st.floats(1e-3, 1e20))
def test_what_is_written_is_read_back(nbytes, rate):
    assert parse_size(write_size(nbytes)) == nbytes
    assert parse_rate(write_rate(rate)) == parse_flops(write_flops(rate)) == rate


@pytest.mark.parametrize(
    ("show", "value", "text"),
    [
        (show_rate, 3.254e9, "3.25 GB/s"),
        (show_rate, 12, "12.0 B/s"),
        (show_flops, 70e12, "70.0 TFLOP/s"),
        (show_flops, 0.5, "0.50 FLOP/s"),
    ],
)
def test_a_rate_is_shown_with_three_digits(show, value, text):
    assert show(value) == text
