"""Tiered tensors copied, pickled, converted; and what only a tensor with memory can do."""

import copy
import io
import pickle
import subprocess
import sys

import numpy
import pytest
import torch
from host_copies import Copies
from pairs import Holder, assert_equal, assert_same, entries, mlp, on_disk, parameter_pair, plain_of
from torch import nn

from zcompile.errors import ParameterChanged, Unsupported


def rows():
    return torch.randn(12, 8)


def test_a_copy_is_tiered_and_its_own(tmp_path):
    model = on_disk(mlp(), tmp_path)
    branch = copy.deepcopy(model)
    with torch.no_grad():
        branch[0].weight.zero_()
    assert_same(mlp(), model)
    assert len(entries(model)) == 8
    assert branch[0].weight.requires_grad
    assert copy.copy(model)[0].weight is model[0].weight


def test_copying_keeps_ties_and_leaves_gradients_behind_as_torch_does(tmp_path):
    for offloaded in (False, True):
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        model[1].weight = model[0].weight
        if offloaded:
            on_disk(model, tmp_path)
        model(torch.ones(1, 4)).sum().backward()
        branch = copy.deepcopy(model)
        assert branch[1].weight is branch[0].weight
        assert [p.grad for p in branch.parameters()] == [None] * 3
        assert model[0].weight.grad is not None


def test_what_shares_bytes_shares_them_in_a_copy(tmp_path):
    plain, tiered = parameter_pair(rows, tmp_path)
    found = []
    for param in (plain, tiered):
        (param * param).sum().backward()
        state = {"all": param.data, "row": param.data[3], "grad": param.grad}
        copied = copy.deepcopy(state)
        copied["all"].add_(1)
        copied["grad"].zero_()
        found.append([plain_of(value) for value in (*copied.values(), *state.values())])
    for ours, theirs in zip(*found, strict=True):
        assert torch.equal(ours, theirs)


def test_a_copied_parameter_lies_as_torch_would_have_it(tmp_path):
    for make in (rows, lambda: rows().t(), lambda: rows()[:, :5], lambda: rows()[::2]):
        plain, tiered = parameter_pair(make, tmp_path)
        assert_equal(copy.deepcopy(plain), copy.deepcopy(tiered))


def test_a_conversion_that_changes_nothing_gives_the_tensor_itself(tmp_path):
    plain, tiered = parameter_pair(rows, tmp_path)
    for param in (plain, tiered):
        with torch.no_grad():
            same = [param.float(), param.to(torch.float32), param.to(param.device)]
        assert all(one is param for one in same)
        (same[0] * same[0]).sum().backward()
    assert_equal(plain.grad, tiered.grad)


def test_what_is_no_leaf_is_not_copied(tmp_path):
    _, tiered = parameter_pair(rows, tmp_path)
    with pytest.raises(RuntimeError, match="graph leaves"):
        copy.deepcopy(tiered[0])


def test_pickles_are_plain(tmp_path):
    model = on_disk(mlp(), tmp_path)
    model[0].weight.requires_grad_(False)
    loaded = pickle.loads(pickle.dumps(model))
    assert [type(p) for p in loaded.parameters()] == [nn.Parameter] * 4
    assert [p.requires_grad for p in loaded.parameters()] == [False, True, True, True]
    assert_same_values(model, loaded)


def assert_same_values(tiered, plain):
    for ours, theirs in zip(tiered.parameters(), plain.parameters(), strict=True):
        assert_equal(theirs, ours)


CONVERSIONS = {
    "float": lambda m: m.float(),
    "cpu": lambda m: m.cpu(),
    "to device": lambda m: m.to("cpu"),
    "to device and dtype": lambda m: m.to("cpu", torch.float32),
    "to dtype": lambda m: m.to(torch.float32),
    "train": lambda m: m.train(),
    "apply": lambda m: m.apply(lambda child: None),
}


@pytest.mark.parametrize("name", CONVERSIONS)
def test_a_conversion_to_what_it_is_changes_nothing(name, tmp_path):
    model = on_disk(mlp(), tmp_path)
    before = list(model.parameters())
    assert CONVERSIONS[name](model) is model
    assert all(a is b for a, b in zip(before, model.parameters(), strict=True))
    assert_same(mlp(), model)
    model(torch.ones(2, 16)).sum().backward()
    assert all(hasattr(p.grad, "entry") for p in model.parameters())


@pytest.mark.parametrize("name", ["half", "bfloat16", "double"])
def test_a_conversion_to_another_dtype_says_when_to_do_it(name, tmp_path):
    model = on_disk(mlp(), tmp_path)
    with pytest.raises(
        ParameterChanged, match=r"'0.weight' was given .data .* before zcompile.off"
    ):
        getattr(model, name)()
    assert_same(mlp(), model)
    narrow = on_disk(getattr(mlp(), name)(), tmp_path)
    assert getattr(narrow, name)() is narrow


def test_channels_last_comes_before_offload(tmp_path):
    model = on_disk(nn.Sequential(nn.Conv2d(3, 8, 3)), tmp_path)
    with pytest.raises(ParameterChanged, match=r"strides before zcompile\.offload"):
        model.to(memory_format=torch.channels_last)


def test_in_place_through_a_conversion_still_writes_through(tmp_path):
    _, tiered = parameter_pair(rows, tmp_path)
    with torch.no_grad():
        tiered.to("cpu").fill_(3)
        tiered.float().add_(1)
    assert tiered.detach().eq(4).all()


@pytest.mark.parametrize(
    "value", [torch.zeros(3), torch.zeros(12, 8, dtype=torch.float64), torch.zeros(8, 12).t()]
)
def test_data_of_another_kind_is_refused(value, tmp_path):
    plain, tiered = parameter_pair(rows, tmp_path)
    with pytest.raises(ParameterChanged, match=r"in place of torch.float32 \(12, 8\)"):
        tiered.data = value
    assert_equal(plain, tiered)


@pytest.mark.parametrize(
    "use",
    [
        lambda p: p.storage(),
        lambda p: p.share_memory_(),
        lambda p: p.apply_(lambda x: x),
        lambda p: torch.from_dlpack(p),
        lambda p: numpy.from_dlpack(p),
        lambda p: p.t_(),
        lambda p: p.unsqueeze_(0),
        lambda p: p.set_(torch.zeros(2)),
        lambda p: p.resize_(3),
    ],
    ids=[
        "storage",
        "share",
        "apply",
        "dlpack",
        "numpy dlpack",
        "t_",
        "unsqueeze_",
        "set_",
        "resize_",
    ],
)
def test_what_needs_memory_of_its_own_says_so(use, tmp_path):
    plain, tiered = parameter_pair(rows, tmp_path)
    with pytest.raises(Unsupported, match="tiered tensor"):
        use(tiered.detach())
    assert_equal(plain, tiered)


@pytest.mark.parametrize("take", [lambda p: p, lambda p: p.t(), lambda p: p.data])
def test_code_in_c_gets_an_error_and_no_address(take, tmp_path):
    """Whoever read from what `to_dlpack` gave ended the process."""
    plain, tiered = parameter_pair(rows, tmp_path)
    with pytest.raises(RuntimeError, match="Cannot access data pointer of Tensor"):
        torch.utils.dlpack.to_dlpack(take(tiered.detach()))
    assert_equal(plain, tiered)


ON_A_STORAGE = """
import torch, zcompile
from torch import nn
model = zcompile.offload(nn.Linear(64, 64), device_memory="4MiB", host_memory="32MiB")
p, values = model.weight, torch.ones(64, 64).untyped_storage()
for use in (
    lambda: p.untyped_storage()[0], lambda: p.untyped_storage().__setitem__(0, 1),
    lambda: p.untyped_storage().fill_(0), lambda: p.untyped_storage().copy_(values),
    lambda: p.detach().untyped_storage().tolist(), lambda: p.untyped_storage().clone(),
    lambda: p.storage_type(),
    lambda: torch.empty(0).set_(p.detach().storage()), lambda: p._typed_storage()[0],
):
    try:
        print("gave", use(), flush=True)
    except zcompile.ZinfError as error:
        print(error, flush=True)
print("shared:", p.is_shared())
"""


@pytest.mark.slow
def test_what_needs_a_storage_says_so_and_does_not_end_the_process():
    told = subprocess.run(
        [sys.executable, "-c", ON_A_STORAGE], capture_output=True, text=True, check=False
    )
    assert told.returncode == 0, (told.returncode, told.stdout, told.stderr[-2000:])
    *refused, shared = told.stdout.splitlines()
    assert len(refused) == 9
    for line in refused:
        assert "storage()" in line
        assert ": a tiered tensor has no memory of its own" in line
    assert shared == "shared: False"


def test_numpy_asks_to_detach_as_torch_does(tmp_path):
    _, tiered = parameter_pair(rows, tmp_path)
    with pytest.raises(RuntimeError, match=r"use tensor.detach\(\).numpy\(\)"):
        tiered.numpy()


def test_a_tensor_larger_than_the_arena_is_read(tmp_path):
    plain, tiered = parameter_pair(lambda: torch.randn(300, 257), tmp_path, device_memory="64KiB")
    assert repr(tiered) == repr(plain)
    assert tiered.tolist() == plain.tolist()
    assert_equal(plain, copy.deepcopy(tiered))
    assert_equal(plain, pickle.loads(pickle.dumps(tiered)))
    with torch.no_grad():
        assert_equal(plain.double(), tiered.double())
        assert_equal(plain, tiered.clone())
        assert_equal(plain * 2, tiered * 2)
        assert_equal(plain, on_disk(Holder(torch.zeros(300, 257)), tmp_path).w.copy_(tiered))


def ties(model):
    """Which names of a state dict lie in one memory: found by writing to each."""
    values = model.state_dict() if isinstance(model, nn.Module) else model
    found = []
    with torch.no_grad():
        for name, value in values.items():
            for other, seen in values.items():
                before = plain_of(seen).clone()
                value.add_(1)
                if not torch.equal(before, plain_of(seen)):
                    found.append((name, other))
    return found


def tied_mlp(how):
    model = nn.Sequential(*[nn.Linear(4, 4, bias=False) for _ in range(3)])
    if how == "object":
        model[2].weight = model[0].weight
    else:
        model[2].weight.data = model[0].weight.data
    return model


@pytest.mark.parametrize("how", ["object", "data"])
def test_what_is_tied_is_saved_once_and_loaded_tied(how, tmp_path):
    plain, tiered = tied_mlp(how), on_disk(tied_mlp(how), tmp_path)
    for name, model in (("plain", plain), ("tiered", tiered)):
        torch.save(model.state_dict(), tmp_path / name)
    sizes = [(tmp_path / name).stat().st_size for name in ("plain", "tiered")]
    assert abs(sizes[0] - sizes[1]) < 64
    expected, found = (torch.load(tmp_path / name) for name in ("plain", "tiered"))
    assert ties(expected) == ties(found) == ties(plain)
    with torch.no_grad():
        tiered[0].weight.zero_()
        again = io.BytesIO()
        torch.save(tiered.state_dict(), again)
        again.seek(0)
        assert not torch.load(again)["2.weight"].any()


class Kinds(nn.Module):
    """What torch pickles in its different ways: dtypes old and new, a lazy view, parameters."""

    def __init__(self) -> None:
        super().__init__()
        eighth = torch.randn(3, 4).to(torch.float8_e4m3fn)
        self.eighth = nn.Parameter(eighth, requires_grad=False)
        self.complex = nn.Parameter(torch.randn(4, dtype=torch.complex64))
        self.none = nn.Parameter(torch.zeros(0, 2))
        self.turned = nn.Parameter(torch.randn(4, 6).t())

    def values(self):
        conj, part = self.complex.detach().conj(), self.turned.data[2:]
        return {"param": self.turned, "conj": conj, "part": part, **self.state_dict()}


def saved_kinds(tmp_path, save):
    """What `save` makes of a plain model and of a tiered one with the same values."""
    torch.manual_seed(0)
    plain = save(Kinds().values())
    torch.manual_seed(0)
    return plain, save(on_disk(Kinds(), tmp_path).values())


def saved_by_torch(values, **how):
    kept = io.BytesIO()
    torch.save(values, kept, **how)
    return kept.getvalue()


def test_torch_writes_the_file_that_it_writes_of_plain_tensors(tmp_path):
    plain, tiered = saved_kinds(tmp_path, saved_by_torch)
    assert plain == tiered


@pytest.mark.parametrize(
    ("save", "load"),
    [
        (lambda values: saved_by_torch(values, _use_new_zipfile_serialization=False), torch.load),
        (pickle.dumps, pickle.load),
    ],
    ids=["old format", "pickle"],
)
def test_other_picklers_take_the_values_too(save, load, tmp_path):
    def save_old_dtypes(values):
        values.pop("eighth")  # which torch writes here and does not read again
        return save(values)

    plain, tiered = (load(io.BytesIO(data)) for data in saved_kinds(tmp_path, save_old_dtypes))
    assert plain.keys() == tiered.keys()
    for name, value in plain.items():
        assert type(tiered[name]) is type(value)
        assert tiered[name].is_conj() is value.is_conj()
        assert_equal(value, tiered[name])


def test_views_of_other_dtypes_are_not_saved_together_as_in_torch(tmp_path):
    for param in parameter_pair(lambda: torch.randn(4, dtype=torch.complex64), tmp_path):
        values = [param.detach(), torch.view_as_real(param.detach())]
        with pytest.raises(RuntimeError, match="view the same data as different types"):
            saved_by_torch(values)


def test_one_entry_at_a_time_is_in_memory_while_torch_saves(monkeypatch, tmp_path):
    model = on_disk(nn.Sequential(*[nn.Linear(64, 64) for _ in range(6)]), tmp_path)
    copies = Copies(monkeypatch)
    torch.save(model.state_dict(), tmp_path / "saved.pt")
    assert copies.read_bytes == sum(p.nbytes for p in model.parameters())
    assert copies.most_bytes == 64 * 64 * 4
    assert copies.left_bytes() == 0


@pytest.mark.parametrize("take", [lambda w: w, lambda w: w.data, lambda w: w[1:], lambda w: w.t()])
def test_a_shallow_copy_shares_the_bytes(take, tmp_path):
    for param in parameter_pair(lambda: torch.ones(4, 4), tmp_path):
        one = take(param).detach() if take(param) is not param else param
        other = copy.copy(one)
        assert type(other) is type(one)
        assert isinstance(other, nn.Parameter) is isinstance(one, nn.Parameter)
        assert other.requires_grad is one.requires_grad
        with torch.no_grad():
            other.mul_(3)
        assert one.eq(3).all()
        if other.requires_grad:
            (other.sum() * 2 + one.sum()).backward()
            assert (other.grad.sum().item(), one.grad.sum().item()) == (32, 16)
