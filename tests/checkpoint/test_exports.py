"""`zcompile.load` of what others exported: safetensors and `torch.save`, whole and in shards."""

import json
import os
import pickle
import zipfile

import pytest
import safetensors.torch
import torch
from offloaded import SMALL
from pairs import assert_alike, assert_equal, other
from small_models import GPT, mlp
from torch import nn

import zcompile
from zcompile.checkpoint import stream
from zcompile.checkpoint.block_files import LEAST_DIRECT_BYTES
from zcompile.errors import CheckpointInvalid, CheckpointMismatch, IOFault, ValueUnset
from zcompile.ir.units import KiB


def tiered(model):
    return zcompile.offload(other(model), **SMALL)


def sharded(folder, values, single="pytorch_model.bin"):
    """An export of two shards, and its index."""
    folder.mkdir()
    stem, _, end = single.partition(".")
    names, where = list(values), {}
    for number, part in enumerate((names[::2], names[1::2]), 1):
        file = f"{stem}-{number:05}-of-00002.{end}"
        rows = {name: values[name].contiguous() for name in part}
        save = torch.save if end == "bin" else safetensors.torch.save_file
        save(rows, folder / file)
        where |= dict.fromkeys(part, file)
    index = {"metadata": {}, "weight_map": where}
    (folder / f"{single}.index.json").write_text(json.dumps(index))
    return folder


@pytest.mark.parametrize("of_today", [True, False], ids=["mapped", "old format"])
def test_a_file_of_torch_save_is_read_into_the_tiers(of_today, tmp_path, monkeypatch):
    """A tied weight, which it holds once, is not read twice to be compared with itself."""
    monkeypatch.setattr(stream.Loader, "digest", None)
    plain, model = GPT(), tiered(GPT())
    assert plain.head.weight is plain.embed.weight, "both names are in the file"
    torch.save(plain.state_dict(), tmp_path / "x.pt", _use_new_zipfile_serialization=of_today)
    assert zcompile.load(model, tmp_path / "x.pt") == ([], [])
    assert_alike(model, plain)


@pytest.mark.parametrize("single", ["pytorch_model.bin", "model.safetensors"])
def test_shards_are_read_one_after_the_other(single, tmp_path):
    plain, model = mlp(), tiered(mlp())
    folder = sharded(tmp_path / "c", plain.state_dict(), single)
    assert zcompile.load(model, folder) == ([], [])
    assert_alike(model, plain)


def test_where_both_are_there_safetensors_is_read(tmp_path):
    plain, model = mlp(), tiered(mlp())
    safetensors.torch.save_file(plain.state_dict(), tmp_path / "model.safetensors")
    torch.save({name: value + 1 for name, value in plain.state_dict().items()}, tmp_path / "b")
    os.rename(tmp_path / "b", tmp_path / "pytorch_model.bin")
    zcompile.load(model, tmp_path)
    assert_alike(model, plain)


def test_shards_of_the_old_format_are_in_memory_one_at_a_time(tmp_path, monkeypatch):
    folder = sharded(tmp_path / "c", mlp().state_dict())
    for file in folder.glob("*.bin"):
        values = torch.load(file, weights_only=True)
        torch.save(values, file, _use_new_zipfile_serialization=False)
    alive, most = set(), []
    fill = stream.Loader.fill

    def counted(loader, file, *rest):
        fill(loader, file, *rest)
        alive.add(file)
        most.append(sum(seen._tensors is not None for seen in alive))

    monkeypatch.setattr(stream.Loader, "fill", counted)
    model = tiered(mlp())
    zcompile.load(model, folder)
    assert_alike(model, mlp())
    assert max(most) == 1


def test_a_large_tensor_is_cast_piece_by_piece(tmp_path, monkeypatch):
    monkeypatch.setattr(stream, "BLOCK_BYTES", 4096)
    wide, model = nn.Linear(1000, 7, dtype=torch.float64), tiered(nn.Linear(1000, 7))
    torch.save(wide.state_dict(), tmp_path / "x")
    zcompile.load(model, tmp_path / "x")
    assert_equal(model.weight, wide.weight.float())


@pytest.mark.parametrize(
    ("was", "to"), [(torch.bfloat16, torch.float32), (torch.float32, torch.bfloat16)]
)
@pytest.mark.parametrize("save", [torch.save, safetensors.torch.save_file])
def test_a_dtype_is_converted_as_load_state_dict_does(was, to, save, tmp_path):
    exported, expected = mlp().to(was), other(mlp()).to(to)
    save(exported.state_dict(), tmp_path / "x")
    model = tiered(mlp().to(to))
    zcompile.load(model, tmp_path / "x")
    expected.load_state_dict(exported.state_dict())
    assert_alike(model, expected)
    assert {p.dtype for p in model.parameters()} == {to}


def test_a_cast_that_loses_imaginary_parts_is_refused(tmp_path):
    model = nn.Linear(2, 2)
    torch.save({**model.state_dict(), "bias": torch.tensor([1j, 2])}, tmp_path / "x")
    with pytest.raises(CheckpointMismatch, match=r"bias: complex64\[2\] would lose its imaginary"):
        zcompile.load(model, tmp_path / "x", strict=False)


def test_strict_is_that_of_load_state_dict(tmp_path):
    values = dict(mlp().state_dict())
    del values["0.bias"]
    torch.save({**values, "more": torch.ones(1)}, tmp_path / "x")
    model = tiered(mlp())
    with pytest.raises(CheckpointMismatch) as caught:
        zcompile.load(model, tmp_path / "x")
    assert str(caught.value).splitlines()[1:] == [
        "    0.bias: missing, the model has float32[32]",
        "    more: float32[1], the model has none",
    ]
    assert_alike(model, other(mlp()))
    expected = other(mlp())
    found = expected.load_state_dict(torch.load(tmp_path / "x"), strict=False)
    assert zcompile.load(model, tmp_path / "x", strict=False) == found
    assert_alike(model, expected)


def apart(values):
    """A state dict of which no two tensors share memory."""
    return {name: value.clone() for name, value in values.items()}


def in_one(values, tmp_path, save):
    save(values, tmp_path / "x")
    return tmp_path / "x"


def large():
    return GPT(layers=1, vocabulary=4200)


FILES = {
    "safetensors": lambda v, at: in_one(v, at, safetensors.torch.save_file),
    "torch.save": lambda v, at: in_one(v, at, torch.save),
    "shards": lambda v, at: sharded(at / "c", v),
}


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("files", FILES)
def test_values_of_a_tied_weight_that_differ_are_refused(files, strict, tmp_path, monkeypatch):
    """`load_state_dict` keeps the last of them, and says nothing."""
    monkeypatch.setattr(stream, "BLOCK_BYTES", 64 * KiB)
    plain = large()
    assert plain.head.weight.nbytes > LEAST_DIRECT_BYTES, "it is read in pieces"
    values = apart(plain.state_dict())
    path = FILES[files](values, tmp_path)
    model = tiered(large())
    assert zcompile.load(model, path, strict=strict) == ([], [])
    assert_alike(model, plain)
    (tmp_path / "others").mkdir()
    values["head.weight"][-1, -1] += 1
    path = FILES[files](values, tmp_path / "others")
    names = r"(head|embed).weight: has other values than (head|embed).weight, and the model has one"
    for each in model, plain:
        with pytest.raises(CheckpointMismatch, match=rf"{names} .* does not tie them"):
            zcompile.load(other(each), path, strict=strict)
        assert_alike(each, other(large()))


def test_parameters_over_one_memory_are_as_tied(tmp_path):
    """Each is one of its own, and the values of one go where those of the other went."""

    def build():
        made = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
        made[1].weight = nn.Parameter(made[0].weight.data)
        return made

    values = apart(build().state_dict())
    torch.save(values, tmp_path / "same")
    torch.save({**values, "1.weight": values["1.weight"] + 1}, tmp_path / "x")
    for model in build(), tiered(build()):
        with pytest.raises(CheckpointMismatch, match=r"1.weight: has other values than 0.weight"):
            zcompile.load(model, tmp_path / "x")
        zcompile.load(model, tmp_path / "same")
        assert_equal(model[1].weight, values["0.weight"])


class Code:
    def __reduce__(self):
        return os.system, ("touch ran",)


@pytest.mark.parametrize("of_today", [True, False])
def test_code_in_a_pickle_is_not_run(of_today, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    values = {**mlp().state_dict(), "x": Code()}
    torch.save(values, "x.bin", _use_new_zipfile_serialization=of_today)
    with pytest.raises(
        CheckpointInvalid, match=r"x.bin holds more than tensors: it names \w+.system, which weight"
    ):
        zcompile.load(mlp(), "x.bin")
    assert not (tmp_path / "ran").exists()


def cut(path):
    torch.save(mlp().state_dict(), path)
    os.truncate(path, path.stat().st_size - 600)


def cut_in_half(path):
    torch.save({"a": torch.zeros(1 << 14)}, path)
    os.truncate(path, path.stat().st_size // 2)


def cut_old(path):
    torch.save(mlp().state_dict(), path, _use_new_zipfile_serialization=False)
    os.truncate(path, path.stat().st_size - 600)


def flipped(path):
    torch.save(mlp().state_dict(), path)
    content = bytearray(path.read_bytes())
    content[70:90] = b"\xff" * 20
    path.write_bytes(content)


def a_zip(path):
    with zipfile.ZipFile(path, "w") as made:
        made.writestr("a", "b")


BROKEN = {
    "cut": (cut, "is damaged or cut short"),
    "cut in half": (cut_in_half, "is damaged or cut short: it ends too early; copy it again"),
    "cut, old": (cut_old, "is damaged or cut short"),
    "flipped": (flipped, "is damaged"),
    "a zip": (a_zip, "is damaged or cut short"),
    "a pickle": (lambda p: p.write_bytes(pickle.dumps({"a": 1})), "is damaged"),
    "garbage": (lambda p: p.write_bytes(b"\x80\x02garbage"), "is damaged, or no file of torch.sa"),
    "a list": (lambda p: torch.save([torch.ones(1)], p), "holds a list, and no mapping of names"),
    "a number": (lambda p: torch.save({"a": 1}, p), "has 'a', a int and no tensor"),
    "sparse": (lambda p: torch.save({"a": torch.eye(3).to_sparse()}, p), "has 'a', which is not d"),
    "nested": (
        lambda p: torch.save({"state_dict": mlp().state_dict(), "epoch": 3}, p),
        r"keeps its tensors under 'state_dict'.*weights_only=True.\['state_dict'\]",
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_what_holds_no_weights_is_told(name, tmp_path):
    make, told = BROKEN[name]
    make(tmp_path / "x.bin")
    model = tiered(mlp())
    with pytest.raises(CheckpointInvalid, match=told) as caught:
        zcompile.load(model, tmp_path / "x.bin", strict=False)
    assert str(tmp_path / "x.bin") in str(caught.value)
    assert_alike(model, other(mlp()))


def test_a_missing_or_wrong_shard_is_told_before_anything_changes(tmp_path):
    folder = sharded(tmp_path / "c", mlp().state_dict())
    first, second = sorted(folder.glob("*.bin"))
    kept = second.read_bytes()
    second.unlink()
    model = tiered(mlp())
    with pytest.raises(
        CheckpointInvalid, match=rf"{second.name} does not exist, and pytorch_model.bin.index"
    ):
        zcompile.load(model, folder)
    torch.save({}, second)
    with pytest.raises(CheckpointInvalid, match=rf"{second.name} lacks '0.bias', which pytorch_mo"):
        zcompile.load(model, folder)
    second.write_bytes(kept)
    with pytest.raises(CheckpointInvalid, match=r"has '0.weight', and so has .*00001-of-00002.bin"):
        zcompile.load(model, [folder, first])
    assert_alike(model, other(mlp()))
    with pytest.raises(CheckpointInvalid, match=r"neither model.safetensors nor pytorch_model.bin"):
        zcompile.load(model, tmp_path)


def test_a_load_that_fails_in_the_middle_says_what_the_model_holds(tmp_path, monkeypatch):
    plain = mlp()
    torch.save(plain.state_dict(), tmp_path / "x.bin")
    with torch.device("meta"):
        model = mlp()
    zcompile.offload(model, **SMALL)
    fill = stream.Loader.fill

    def failing(loader, file, name, row, target):
        if name == "2.weight":
            raise IOFault(5, "read", tmp_path / "x.bin", name, 0, 0, row.nbytes, "Input/output")
        fill(loader, file, name, row, target)

    with monkeypatch.context() as patched:
        patched.setattr(stream.Loader, "fill", failing)
        with pytest.raises(IOFault) as caught:
            zcompile.load(model, tmp_path / "x.bin")
    (note,) = caught.value.__notes__
    assert note.startswith("the load ended after 2 of 4 tensors")
    assert "'2.weight' it may be in part" in note
    with pytest.raises(ValueUnset, match=r"'2.(weight|bias)' has no value yet.*zcompile.l"):
        model(torch.ones(1, 8))
    zcompile.load(model, tmp_path / "x.bin")
    assert_alike(model, plain)
