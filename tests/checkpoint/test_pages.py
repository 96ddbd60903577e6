"""Each page of a file that ranks write together is written by one of them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zcompile.checkpoint.pages import SharedRow, Stretch, stretches_of
from zcompile.checkpoint.safetensors import PAGE_BYTES

GAPS = st.sampled_from([0, 1, 100, 4096, 5000])


@st.composite
def files(draw):
    """(bytes of a file, what is shared in it): with and without others between, of any sizes."""
    at, rows = PAGE_BYTES, []
    for _ in range(draw(st.integers(0, 4))):
        at += draw(GAPS)
        row = SharedRow(at, draw(st.integers(1, 9000)), draw(st.sampled_from([1, 2, 4])))
        rows.append(row)
        at += row.numel * row.itemsize
    return at + draw(GAPS), rows


def holders_of(nbytes, rows, ranks):
    """Byte -> (who has it, whether it is of a share)."""
    found = [(0, False)] * nbytes
    for row in rows:
        for rank in range(ranks):
            begin, end = row.of_rank(rank, ranks)
            found[begin:end] = [(rank, True)] * (end - begin)
    return found


@given(files(), st.integers(1, 5))
def test_a_page_has_one_writer_who_has_bytes_of_it(file, ranks):
    nbytes, rows = file
    stretches = stretches_of(nbytes, rows, ranks)
    ends = [0, *(stretch.end for stretch in stretches)]
    assert [stretch.begin for stretch in stretches] == ends[:-1]
    assert ends[-1] == nbytes
    held = holders_of(nbytes, rows, ranks)
    writers = {}
    for begin, end, holder, writer in stretches:
        assert {who for who, _ in held[begin:end]} == {holder}
        if writer != holder:  # what is no share may be gathered when it is written: it stays
            assert all(is_share for _, is_share in held[begin:end])
        for page in range(begin // PAGE_BYTES, -(-end // PAGE_BYTES)):
            assert writers.setdefault(page, writer) == writer
    for page, writer in writers.items():
        of_page = held[page * PAGE_BYTES : (page + 1) * PAGE_BYTES]
        assert writer in {who for who, _ in of_page}


@pytest.mark.parametrize(
    ("nbytes", "rows", "expected"),
    [
        # Shares of whole pages: nobody sends anything.
        (12288, [SharedRow(4096, 2048, 4)], [(0, 8192, 0, 0), (8192, 12288, 1, 1)]),
        # The shares meet within a page, which is the first one's; rank 0 has what comes after.
        (
            8292,
            [SharedRow(4096, 2048, 2)],
            [(0, 6144, 0, 0), (6144, 8192, 1, 0), (8192, 8292, 0, 0)],
        ),
        # The last page of the share of rank 1 is rank 0's, which has a tensor there.
        (
            16484,
            [SharedRow(4096, 6144, 2)],
            [
                (0, 10240, 0, 0),
                (10240, 12288, 1, 0),
                (12288, 16384, 1, 1),
                (16384, 16484, 0, 0),
            ],
        ),
    ],
)
def test_who_writes_what(nbytes, rows, expected):
    assert stretches_of(nbytes, rows, 2) == [Stretch(*row) for row in expected]
