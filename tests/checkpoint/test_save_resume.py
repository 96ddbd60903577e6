"""Checkpoints go out and come back bit by bit, are read by others, and are replaced as a whole."""

import fcntl
import itertools
import json
import os
import subprocess
import sys

import pytest
import safetensors.torch
import torch
from offloaded import SMALL
from pairs import assert_alike, assert_equal, on_disk, other
from small_models import GPT, mlp
from torch import nn

import zcompile
from zcompile.checkpoint import block_files, checkpoint, stream
from zcompile.checkpoint.checkpoint import Loader
from zcompile.checkpoint.stream import Piece, cut
from zcompile.errors import (
    CheckpointMismatch,
    ValueUnset,
)


class Layouts(nn.Module):
    """Parameters that lie in every way, and buffers of other dtypes."""

    def __init__(self, size: int = 5) -> None:
        super().__init__()
        self.transposed = nn.Parameter(torch.randn(size, 3).t())
        self.channels = nn.Parameter(
            torch.randn(2, 4, size, 3).to(memory_format=torch.channels_last)
        )
        self.brain = nn.Parameter(torch.randn(7, size).bfloat16())
        self.scalar = nn.Parameter(torch.randn(()))
        self.empty = nn.Parameter(torch.randn(0, 3))
        self.register_buffer("seen", torch.arange(6).view(2, 3).t())
        self.register_buffer("mask", torch.tensor([True, False, True]))
        self.register_buffer("scratch", torch.randn(3), persistent=False)


def train(model: nn.Module, optimizer, steps: int = 2) -> None:
    for _ in range(steps):
        model(torch.randint(0, 32, (2, 6))).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("size", [5, 300_001])
@pytest.mark.parametrize("tiered", ["plain", "host", "disk"])
def test_every_layout_comes_back_where_it_was(tiered, size, tmp_path):
    def placed(model):
        if tiered == "disk":
            return on_disk(model, tmp_path)
        return (
            zcompile.offload(model, **{**SMALL, "host_memory": "256MiB"})
            if tiered == "host"
            else model
        )

    torch.manual_seed(0)
    model = placed(Layouts(size))
    zcompile.save(tmp_path / "c", model, epoch=3)
    torch.manual_seed(0)
    twin = placed(other(Layouts(size)))
    assert zcompile.resume(tmp_path / "c", twin) == {"epoch": 3}
    assert_alike(model, twin)
    files = safetensors.torch.load_file(tmp_path / "c" / "model.safetensors")
    torch.manual_seed(0)
    for name, value in Layouts(size).state_dict().items():
        assert_equal(value.contiguous(), files[name])


@pytest.mark.slow  # the file of the model is read so below
def test_the_optimizer_is_readable_by_safetensors_alone(tmp_path):
    model = on_disk(GPT(), tmp_path)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    train(model, optimizer)
    zcompile.save(tmp_path / "c", model, optimizer, done=True)
    assert sorted(p.name for p in (tmp_path / "c").iterdir()) == [
        "model.safetensors",
        "optimizer.safetensors",
        "training.json",
        "training.safetensors",
    ]
    script = (
        "import sys, safetensors.torch\n"
        "found = safetensors.torch.load_file('optimizer.safetensors')\n"
        "assert found['embed.weight.step'] == 2 and found['embed.weight.exp_avg'].any()\n"
        "assert not any(name.startswith('zcompile') for name in sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True, cwd=tmp_path / "c", timeout=120)


def test_a_tied_parameter_is_kept_once(tmp_path):
    model = zcompile.offload(GPT(), **SMALL)
    zcompile.save(tmp_path / "c", model)
    assert "head.weight" not in safetensors.torch.load_file(tmp_path / "c/model.safetensors")
    twin = zcompile.offload(other(GPT()), **SMALL)
    zcompile.resume(tmp_path / "c", twin)
    assert_alike(model, twin)
    untied = GPT()
    untied.head.weight = nn.Parameter(untied.head.weight.detach().clone())
    with pytest.raises(CheckpointMismatch, match=r"head.weight: missing, the model has float32"):
        zcompile.resume(tmp_path / "c", untied)


def test_large_checkpoints_are_sharded_as_hugging_face_does(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint, "SHARD_BYTES", 4000)
    model = on_disk(GPT(), tmp_path)
    optimizer = torch.optim.SGD(model.parameters(), momentum=0.9)
    train(model, optimizer, 1)
    zcompile.save(tmp_path / "c", model, optimizer)
    index = json.loads((tmp_path / "c/model.safetensors.index.json").read_text())
    files = sorted(set(index["weight_map"].values()))
    assert files[0] == f"model-00001-of-{len(files):05}.safetensors"
    found = {}
    for file in files:
        shard = safetensors.torch.load_file(tmp_path / "c" / file)
        assert sum(t.nbytes for t in shard.values()) <= 4000 or len(shard) == 1
        assert all(index["weight_map"][name] == file for name in shard)
        found |= shard
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in found.values())
    twin = other(GPT())
    resumed = torch.optim.SGD(twin.parameters(), momentum=0.9)
    zcompile.resume(tmp_path / "c", twin, resumed)
    assert_alike(twin, model)
    third = zcompile.offload(other(GPT()), **SMALL)
    assert zcompile.load(third, tmp_path / "c") == ([], [])
    assert_alike(twin, third)


@pytest.mark.parametrize("tiered", [False, True])
def test_load_casts_as_load_state_dict_does(tiered, tmp_path):
    values = {n: p.double() for n, p in Layouts(70_001).state_dict().items() if n != "scratch"}
    values |= {"brain": values["brain"].float(), "seen": values["seen"].int()}
    contiguous = {name: value.contiguous() for name, value in values.items()}
    safetensors.torch.save_file(contiguous, tmp_path / "x.safetensors")
    model, expected = other(Layouts(70_001)), other(Layouts(70_001))
    expected.load_state_dict(values)
    if tiered:
        on_disk(model, tmp_path)
    zcompile.load(model, tmp_path / "x.safetensors")
    assert_alike(model, expected)


def test_load_takes_a_model_on_meta_that_was_offloaded(tmp_path):
    plain = mlp()
    values = {n: v for n, v in plain.state_dict().items() if n.startswith("0.")}
    safetensors.torch.save_file({**values, "more": torch.ones(1)}, tmp_path / "model.safetensors")
    with torch.device("meta"):
        model = mlp()
    with pytest.raises(CheckpointMismatch, match=r"0.weight: has no value, it is on meta; call"):
        zcompile.load(model, tmp_path, strict=False)
    zcompile.offload(model, **SMALL)
    with pytest.raises(CheckpointMismatch) as caught:
        zcompile.load(model, tmp_path)
    assert str(caught.value).splitlines()[1:] == [
        "    2.bias: missing, the model has float32[8]",
        "    2.weight: missing, the model has float32[8, 32]",
        "    more: float32[1], the model has none",
    ]
    loaded = zcompile.load(model, tmp_path, strict=False)
    assert loaded == (["2.bias", "2.weight"], ["more"])
    assert_equal(plain[0].weight, model[0].weight)
    with pytest.raises(ValueUnset):
        zcompile.save(tmp_path / "c", model)
    assert not (tmp_path / "c").exists()


def normed():
    """Two norms with one running mean, and a buffer that is not part of the state."""
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.BatchNorm1d(4))
    model[2].running_mean = model[1].running_mean
    model[0].register_buffer("scratch", torch.zeros(4), persistent=False)
    return model


def normed_on_meta(path):
    """A trained model that is saved there, and one on `meta` that was offloaded."""
    plain = normed()
    plain(torch.randn(8, 4))
    zcompile.save(path, plain)
    with torch.device("meta"):
        model = normed()
    return plain, zcompile.offload(model, **SMALL)


BRINGING = {
    "zcompile.load": lambda model, path, plain: zcompile.load(model, path),
    "zcompile.resume": lambda model, path, plain: zcompile.resume(path, model),
    "load_state_dict": lambda model, path, plain: model.load_state_dict(
        plain.state_dict(), assign=True
    ),
    "load_state_dict of submodules": lambda model, path, plain: [
        layer.load_state_dict(like.state_dict(), assign=True)
        for layer, like in zip(model, plain, strict=True)
    ],
}
"""What brings the values of a model on `meta`."""


@pytest.mark.parametrize("by", BRINGING)
def test_buffers_on_meta_get_memory_with_their_values_and_stay_shared(by, tmp_path):
    plain, model = normed_on_meta(tmp_path / "c")
    BRINGING[by](model, tmp_path / "c", plain)
    if by.startswith("zcompile."):
        assert model[2].running_mean is model[1].running_mean
    assert_alike(model, plain)
    assert model[0].scratch.is_meta, "nobody has a value for it"
    x = torch.randn(8, 4)
    assert torch.equal(model(x).cpu(), plain(x))


@pytest.mark.parametrize("by", ["zcompile.load", "zcompile.resume"])
def test_what_a_hook_of_state_dict_makes_on_meta_is_refused(by, tmp_path):
    """The buffer itself is nowhere to be found."""
    plain, model = normed_on_meta(tmp_path / "c")
    model.register_state_dict_post_hook(
        lambda _, state, *rest: state.update({"1.running_var": state["1.running_var"].detach()})
    )
    with pytest.raises(CheckpointMismatch, match=r"1.running_var: has no value, it is on meta, an"):
        BRINGING[by](model, tmp_path / "c", plain)
    assert model[1].running_var.is_meta


@pytest.mark.parametrize("by", ["zcompile.load", "zcompile.resume"])
def test_buffers_whose_values_did_not_come_are_on_meta_again(by, tmp_path, monkeypatch):
    plain, model = normed_on_meta(tmp_path / "c")
    fill = Loader.fill

    def failing(self, file, name, *rest):
        if name.endswith("1.running_var"):
            raise OSError(5, "Input/output error")
        fill(self, file, name, *rest)

    with monkeypatch.context() as patch:
        patch.setattr(Loader, "fill", failing)
        with pytest.raises(OSError, match="Input/output"):
            BRINGING[by](model, tmp_path / "c", plain)
    assert model[1].running_var.is_meta
    for name, buffer in model.named_buffers():
        if not buffer.is_meta:
            assert torch.equal(buffer, plain.get_buffer(name))
    BRINGING[by](model, tmp_path / "c", plain)
    assert_alike(model, plain)


@pytest.mark.parametrize("name", ["embed.weight", "head.weight"])
def test_a_tied_weight_is_found_under_any_of_its_names(name, tmp_path):
    values = dict(GPT().state_dict())
    value = values.pop("embed.weight")
    values.pop("head.weight")
    safetensors.torch.save_file({**values, name: value}, tmp_path / "x.safetensors")
    model = zcompile.offload(other(GPT()), **SMALL)
    assert zcompile.load(model, str(tmp_path / "x.safetensors")) == ([], [])
    assert_equal(value, model.head.weight)


def test_shapes_must_agree_even_if_names_need_not(tmp_path):
    safetensors.torch.save_file({"0.bias": torch.ones(3)}, tmp_path / "x")
    with pytest.raises(
        CheckpointMismatch, match=r"0.bias: float32\[3\], the model has float32\[32"
    ):
        zcompile.load(mlp(), [tmp_path / "x"], strict=False)


def test_progress_is_told_to_the_last_byte(tmp_path):
    told = []
    zcompile.save(tmp_path / "c", Layouts(2_000_001), progress=lambda *now: told.append(now))
    assert told == sorted(told)
    assert {total for _, total in told} == {told[-1][0]}
    assert len(told) > 3
    assert told[-1][1] == sum(p.stat().st_size for p in (tmp_path / "c").glob("*.safetensors"))


def test_a_filesystem_without_direct_requests_is_written_through_the_cache(tmp_path, monkeypatch):
    model, twin = Layouts(300_001), other(Layouts(300_001))
    pwrite, preadv = os.pwrite, os.preadv

    def refusing(call):
        def request(fd, data, offset):
            if fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT:
                raise OSError(22, "Invalid argument")
            return call(fd, data, offset)

        return request

    monkeypatch.setattr(block_files.os, "pwrite", refusing(pwrite))
    monkeypatch.setattr(block_files.os, "preadv", refusing(preadv))
    zcompile.save(tmp_path / "c", model)
    zcompile.resume(tmp_path / "c", twin)
    assert_alike(model, twin)


@pytest.mark.parametrize(
    ("sizes", "blocks"),
    [
        ((), []),
        ((0, 3), [[Piece(1, 0, 0, 3)]]),
        ((4, 4), [[Piece(0, 0, 0, 4)], [Piece(1, 0, 0, 4)]]),
        ((6, 1), [[Piece(0, 0, 0, 4)], [Piece(0, 4, 0, 2), Piece(1, 0, 2, 1)]]),
    ],
)
def test_blocks_are_cut_from_what_lies_end_to_end(sizes, blocks):
    assert list(cut(sizes, 4)) == blocks


@pytest.mark.parametrize("begin", [0, 5, 4096, 4097, 8190])
def test_what_is_read_at_once_fits_a_block_and_splits_no_element(begin, monkeypatch):
    monkeypatch.setattr(stream, "BLOCK_BYTES", 8192)
    row = stream.Row(torch.int64, (5000,), begin, begin + 40_000)
    parts = list(stream.spans(row.begin, row.end, row.dtype.itemsize))
    assert [parts[0][0], parts[-1][1]] == [row.begin, row.end]
    assert all(a[1] == b[0] for a, b in itertools.pairwise(parts))
    assert all((b - row.begin) % 8 == 0 and e - b // 4096 * 4096 <= 8192 for b, e in parts)
