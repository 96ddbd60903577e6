"""The format as we write it is read by the library, and as the library writes it by us."""

import json
import struct
import sys
import tracemalloc
from pathlib import Path

import pytest
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from zcompile.checkpoint.file import OpenFiles
from zcompile.checkpoint.safetensors import DTYPES, PAGE_BYTES, Header, arrange
from zcompile.checkpoint.safetensors import read_header as header_of
from zcompile.errors import CheckpointInvalid, Unsupported
from zcompile.runtime.io.system_calls import KERNEL


def write(path: Path, tensors: dict[str, torch.Tensor], metadata=None) -> Header:
    """A file of ours, in the plainest way."""
    facts = {name: (t.dtype, tuple(t.size())) for name, t in tensors.items()}
    first, header = arrange(facts, metadata or {})
    data = b"".join(bits(tensors[name]) for name in header.rows)
    path.write_bytes(first + data)
    return header


def read_header(path: Path) -> Header:
    with OpenFiles(KERNEL) as files:
        return header_of(files.file(path))


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def filled(dtype: torch.dtype, size: tuple[int, ...]) -> torch.Tensor:
    raw = torch.arange(torch.Size(size).numel() * dtype.itemsize, dtype=torch.int64) % 2
    return raw.to(torch.uint8).view(dtype).reshape(size)


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return (a.dtype, a.size()) == (b.dtype, b.size()) and bits(a) == bits(b)


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_the_library_reads_what_we_write(dtype, tmp_path):
    tensors = {"a": filled(dtype, (3, 5)), "b": filled(dtype, ()), "none": filled(dtype, (0, 2))}
    write(tmp_path / "x", tensors, {"format": "pt"})
    found = safetensors.torch.load_file(tmp_path / "x")
    assert found.keys() == tensors.keys()
    assert all(same(found[name], tensors[name]) for name in tensors)


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_we_read_what_the_library_writes(dtype, tmp_path):
    tensors = {"a": filled(dtype, (3, 5)), "b": filled(dtype, ()), "none": filled(dtype, (0, 2))}
    safetensors.torch.save_file(tensors, tmp_path / "x", {"who": "them"})
    header, raw = read_header(tmp_path / "x"), (tmp_path / "x").read_bytes()
    assert header.metadata == {"who": "them"}
    assert {name: row.size for name, row in header.rows.items()} == {
        name: tuple(t.size()) for name, t in tensors.items()
    }
    assert all(raw[row.begin : row.end] == bits(tensors[n]) for n, row in header.rows.items())


SIZES = st.lists(st.integers(0, 40), max_size=3).map(tuple)
FACTS = st.dictionaries(
    st.text(min_size=1, max_size=8),
    st.tuples(st.sampled_from(list(DTYPES.values())), SIZES),
    max_size=8,
)


@settings(max_examples=60, deadline=None)
@given(facts=FACTS)
def test_any_set_of_tensors_lies_without_holes_and_aligned(facts, tmp_path_factory):
    path = tmp_path_factory.mktemp("any") / "x"
    first, header = arrange(facts, {})
    path.write_bytes(first + bytes(header.nbytes - len(first)))
    assert len(first) % PAGE_BYTES == 0
    assert read_header(path) == header
    assert list(safetensors.torch.load_file(path)) is not None
    for row in header.rows.values():
        assert row.begin % row.dtype.itemsize == 0
        assert row.nbytes % PAGE_BYTES or row.begin % PAGE_BYTES == 0


def broken(path: Path, told: object, data: bytes = b"") -> Path:
    text = told if isinstance(told, bytes) else json.dumps(told).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)
    return path


def one(dtype: object = "F32", shape: object = (2,), offsets: object = (0, 8)) -> object:
    return {"w": {"dtype": dtype, "shape": shape, "data_offsets": offsets}}


@pytest.mark.parametrize(
    ("told", "data", "why"),
    [
        (b"[1]", b"", "has a header that is no object"),
        (b"{]", b"", "has a header that is not sound"),
        (b"{\xff}", b"", "has a header that is not sound"),
        (
            b'{"a":' + b"[" * 200_000 + b"]" * 200_000 + b"}",
            b"",
            "has a .* it nests more than 8 deep",
        ),
        (b'{"a":' * 200_000, b"", "has a header that is not sound: it nests more than 8 deep"),
        (
            b'{"w":{"dtype":"F32","shape":[NaN],"data_offsets":[0,0]}}',
            b"",
            "has a .* NaN in it is no",
        ),
        (
            b'{"w":{"dtype":"F32","shape":[-Infinity],"data_offsets":[0,0]}}',
            b"",
            "has a .* no number",
        ),
        (b'{"w":{"shape":[' + b"9" * 5000 + b"]}}", b"", "has a .* a number in it has 5000 digits"),
        (
            b'{"w":{"shape":[-' + b"9" * 4000 + b"]}}",
            b"",
            "has a .* a number in it has 4001 digits",
        ),
        (
            one(shape=[2**62, 4], offsets=[0, 0]),
            b"",
            "gives 'w' 0 bytes, which F32.* does not fill",
        ),
        (
            one(shape=[9 * 10**18, 2**62, 0], offsets=[0, 8]),
            b"8" * 8,
            "gives 'w' 8 bytes, which F32",
        ),
        (
            one(shape=[2**63, 0], offsets=[0, 0]),
            b"",
            r"has 'w' with shape \[9223372036854775808, 0\]",
        ),
        (one(shape=[1] * 65, offsets=[0, 4]), b"4" * 4, "has 'w' with 65 dimensions"),
        (one(shape=[2.0]), b"8" * 8, r"has 'w' with shape \[2.0\]"),
        (one(shape=[True, 2]), b"8" * 8, r"has 'w' with shape \[True, 2\]"),
        (one(offsets=[0, -8]), b"8" * 8, r"has 'w' with .* data_offsets \[0, -8\]"),
        (one(dtype=["F32"]), b"8" * 8, r"has 'w' of dtype \['F32'\], which is not one of"),
        ({"__metadata__": {"a": 1}}, b"", "has __metadata__ with 'a' that is no text"),
        (b'{"a":1,"a":2}', b"", "has a header that is not sound: a name stands in it twice"),
        ({"w": 3}, b"", "has 'w' without dtype, shape and two data_offsets"),
        ({"__metadata__": 3}, b"", "has __metadata__ that is no object"),
        (one("F31"), b"8" * 8, "has 'w' of dtype 'F31', which is not one of F64, F32"),
        (one(shape=[-2]), b"8" * 8, r"has 'w' with shape \[-2\]"),
        (one(shape="2"), b"8" * 8, r"has 'w' with shape 2"),
        (one(offsets=[0, 4]), b"8" * 4, "gives 'w' 4 bytes, which F32.2. does not fill"),
        (one(offsets=[4, 12]), b"8" * 12, "has 'w' begin at byte 4 of the data, and .* ends at 0"),
        (one(), b"8" * 7, r"ends after \d+ bytes, and 'w' needs"),
        (one(), b"8" * 9, "has 1 bytes more than its header tells"),
    ],
)
def test_each_damage_is_told_with_the_file_and_the_tensor(told, data, why, tmp_path):
    path = broken(tmp_path / "x.safetensors", told, data)
    with pytest.raises(CheckpointInvalid, match=f"x.safetensors {why}"):
        read_header(path)


def test_files_that_end_in_the_header_or_have_none(tmp_path):
    path = tmp_path / "x"
    for content, why in [
        (b"", "ends after 0 bytes, within its header"),
        (struct.pack("<Q", 50) + b"{}", "ends after 10 bytes, within its header"),
        (b"\xff" * 64, "its header would have 18446744073709551615 bytes"),
    ]:
        path.write_bytes(content)
        with pytest.raises(CheckpointInvalid, match=why):
            read_header(path)
    with pytest.raises(CheckpointInvalid, match="does not exist"):
        read_header(tmp_path / "y")


def test_a_dtype_that_the_format_lacks_is_refused():
    with pytest.raises(Unsupported, match=r"'w' is of torch.complex128, which safetensors"):
        arrange({"w": (torch.complex128, (2,))}, {})


def test_a_header_that_the_file_does_not_have_is_not_allocated(tmp_path):
    path = tmp_path / "x"
    path.write_bytes(struct.pack("<Q", 99_000_000) + b"{}")
    tracemalloc.start()
    try:
        with pytest.raises(CheckpointInvalid, match="ends after 10 bytes, within its header"):
            read_header(path)
        assert tracemalloc.get_traced_memory()[1] < 1_000_000
    finally:
        tracemalloc.stop()


def test_a_raised_recursion_limit_does_not_let_a_header_reach_the_end_of_the_stack(tmp_path):
    path = broken(tmp_path / "x", b'{"a":' + b"[" * 200_000 + b"]" * 200_000 + b"}")
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(1_000_000)
    try:
        with pytest.raises(CheckpointInvalid, match="nests more than 8 deep"):
            read_header(path)
    finally:
        sys.setrecursionlimit(limit)


def test_brackets_within_names_do_not_nest(tmp_path):
    name = '[{"' * 500 + "\\"
    write(tmp_path / "x", {name: filled(torch.float32, (2,))})
    assert list(read_header(tmp_path / "x").rows) == [name]


def test_a_header_in_another_encoding_is_refused_before_it_is_nested(tmp_path):
    """In UTF-16 one character has the byte of a quotation mark, which would hide brackets."""
    text = '{"a":["\u2200",' + "[" * 20 + "]" * 20 + "]}"
    path = broken(tmp_path / "x", text.encode("utf-16-le"))
    with pytest.raises(CheckpointInvalid, match="header that is not sound"):
        read_header(path)
