"""The index of a durable directory: what is written comes back, and what was changed is refused."""

from dataclasses import replace

import pytest
from committed import read_header, read_index
from hypothesis import given
from hypothesis import strategies as st

from zcompile.errors import DurableDamaged
from zcompile.runtime.durable.directory import DataHeader
from zcompile.runtime.durable.index import (
    DATA_NAME,
    INDEX_NAME,
    SUMS,
    Index,
    Piece,
    Pieces,
    RunningChecksum,
    SmallTensor,
    StoredTensor,
    check_extents,
    encode,
    parse,
    switch_index,
    write_new_index,
)
from zcompile.runtime.io.files import Directory
from zcompile.runtime.tiers.extents import RangeAllocator

WEIGHT = StoredTensor(
    "model.a.weight",
    "parameter",
    "float32",
    (2, 3),
    (3, 1),
    0,
    24,
    0,
    4096,
    4096,
    7,
    ((0, 24),),
    "crc32",
    (Piece(0, 512, 0xDEAD), Piece(512, 4096, 1)),
)
INDEX = Index(
    "a1b2",
    7,
    9,
    "2026-01-02 03:04:05",
    512,
    ("/data",),
    (WEIGHT,),
    (SmallTensor("rng.cpu", "uint8", (4,), 0, 4),),
    {"lr": 0.1, "none": None},
)
SMALLS = b"\x01\x02\x03\x04"


def test_an_index_comes_back_as_it_was_written(tmp_path):
    with Directory(tmp_path) as directory:
        write_new_index(directory, encode(INDEX, SMALLS))
        switch_index(directory)
    assert read_index(tmp_path) == (INDEX, SMALLS)
    assert [path.name for path in tmp_path.iterdir()] == [INDEX_NAME]


def test_a_directory_without_an_index_has_none(tmp_path):
    assert read_index(tmp_path) is None


def test_an_index_is_text_with_one_tensor_a_line():
    lines = encode(INDEX, b"").decode().splitlines()
    assert lines[0].startswith("zinf-index 1 ")
    assert sum('"name": "model.a.weight"' in line for line in lines) == 1


def test_no_byte_of_an_index_can_change_unnoticed(tmp_path):
    content = encode(INDEX, SMALLS)
    for at in range(len(content)):
        changed = bytearray(content)
        changed[at] ^= 1 << (at % 8)
        try:
            found = parse(tmp_path / INDEX_NAME, bytes(changed))
        except DurableDamaged:
            continue
        assert found == (INDEX, SMALLS), f"byte {at} of {content[:80]!r}"


@pytest.mark.parametrize("left", [0, 1, 30, 200])
def test_a_truncated_index_is_refused(tmp_path, left):
    (tmp_path / INDEX_NAME).write_bytes(encode(INDEX, SMALLS)[:left])
    with pytest.raises(DurableDamaged, match=str(tmp_path / INDEX_NAME)):
        read_index(tmp_path)


def test_an_index_of_another_format_says_which(tmp_path):
    content = encode(INDEX, SMALLS).replace(b"zinf-index 1", b"zinf-index 3", 1)
    with pytest.raises(DurableDamaged, match="has format 3, this version of zcompile reads"):
        parse(tmp_path / INDEX_NAME, content)


def test_an_index_that_lacks_a_field_says_where(tmp_path):
    body = b'{"run": "a"}\n'
    header = f"zinf-index 1 {len(body)} 0 crc32 {SUMS['crc32'](memoryview(body)):016x}\n"
    with pytest.raises(DurableDamaged, match="the top lacks 'step'"):
        parse(tmp_path / INDEX_NAME, header.encode() + body)


def test_tensors_lie_inside_their_file_and_apart(tmp_path):
    path = tmp_path / INDEX_NAME
    check_extents(INDEX, path, [8192])
    with pytest.raises(DurableDamaged, match=r"'model.a.weight' lies at \[4096, 8192\)"):
        check_extents(INDEX, path, [8191])
    for room in (4608, 4097):  # one byte is enough
        other = replace(WEIGHT, name="model.b", offset=0, room=room)
        with pytest.raises(DurableDamaged, match=r"'model.b' shares bytes with 'model.a.weight'"):
            check_extents(replace(INDEX, tensors=(WEIGHT, other)), path, [8192])
    check_extents(replace(INDEX, tensors=(WEIGHT, replace(other, room=4096))), path, [8192])


def test_a_data_file_says_whose_it_is(tmp_path):
    header = DataHeader("a1b2", 1, 2, "/data")
    assert read_header(tmp_path) is None
    (tmp_path / DATA_NAME).write_bytes(header.block())
    assert read_header(tmp_path) == header
    (tmp_path / DATA_NAME).write_bytes(b"\0" * 4096)
    with pytest.raises(DurableDamaged, match="does not begin as one of ours"):
        read_header(tmp_path)


@pytest.mark.parametrize("name", SUMS)
def test_a_checksum_in_parts_is_that_of_the_whole(name):
    data = bytes(range(256)) * 33
    running = RunningChecksum(name)
    for at in range(0, len(data), 1000):
        running.update(memoryview(data)[at : at + 1000])
    assert running.value() == SUMS[name](memoryview(data))


@given(st.lists(st.tuples(st.integers(0, 60), st.integers(1, 20), st.booleans()), max_size=20))
def test_pieces_are_what_was_written_last_and_whole(writes):
    """Against a table of bytes: which write each byte is of."""
    pieces, owner, known = Pieces(), {}, {}
    for number, (begin, length, tells) in enumerate(writes):
        pieces.add(begin, begin + length)
        owner |= dict.fromkeys(range(begin, begin + length), number)
        if tells:
            pieces.set_checksum(begin, begin + length, number)
            known[number] = (begin, begin + length)
    found = pieces.all()
    assert [at for p in found for at in range(p.begin, p.end)] == sorted(owner)
    for piece in found:
        (number,) = {owner[at] for at in range(piece.begin, piece.end)}
        whole = known.get(number) == (piece.begin, piece.end)
        assert piece.checksum == (number if whole else None)


@given(st.lists(st.tuples(st.integers(0, 15), st.integers(0, 6)), max_size=12))
def test_a_range_is_taken_once(ranges):
    extents, taken = RangeAllocator(1, 16), set()
    for offset, length in ranges:
        wanted = set(range(offset, offset + length))
        free = not wanted & taken and offset + length <= 16
        assert extents.take_at(offset, length) == free
        taken |= wanted if free else set()
    assert [at for low, high in extents._free for at in range(low, high)] == sorted(
        set(range(16)) - taken
    )
    assert extents.used_bytes == len(taken)
