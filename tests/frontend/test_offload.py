"""Offloading a model: what stays the same, what is refused, what is freed; and `meta`."""

import copy
import gc
import io
import os
import weakref
from unittest import mock

import numpy as np
import pytest
import torch
from pairs import (
    ON_DISK,
    assert_equal,
    assert_same,
    batches,
    entries,
    mlp,
    on_disk,
    plain_of,
    train,
)
from torch import nn
from torch.nn.utils import prune

import zcompile
from zcompile.errors import DiskOwned, ParameterChanged, Unsupported, ValueUnset
from zcompile.frontend import offload
from zcompile.frontend.offload import session_behind
from zcompile.ir.types import EntryKind
from zcompile.runtime.closing import wait_for_dead_stores
from zcompile.runtime.device.pages import machine_bytes
from zcompile.runtime.store.store import Store


def test_the_objects_stay_the_same(tmp_path):
    model = mlp()
    params, optimizer = list(model.parameters()), torch.optim.AdamW(model.parameters())
    params[0]._no_weight_decay = True
    assert on_disk(model, tmp_path) is model
    assert all(a is b for a, b in zip(params, model.parameters(), strict=True))
    assert all(p.entry.home == "disk" for p in params)
    assert isinstance(params[0], nn.Parameter)
    assert params[0]._no_weight_decay
    plain = mlp()
    first = torch.optim.AdamW(plain.parameters())
    assert train(plain, first) == train(model, optimizer)
    assert_same(plain, model)


HOLDERS = {
    "nobody": lambda p: None,
    "a name": lambda p: p.data,
    "a part": lambda p: p.detach()[1:],
    "its storage": lambda p: p.untyped_storage(),
    "numpy": lambda p: p.detach().numpy(),
}


@pytest.mark.parametrize("holder", HOLDERS)
def test_values_are_copied_first_only_where_somebody_may_write_them(holder, tmp_path, monkeypatch):
    read, put = [], Store.put_whole

    def noted(store, entry, source, **given):
        read.append(source.data_ptr())
        return put(store, entry, source, **given)

    monkeypatch.setattr(Store, "put_whole", noted)
    param = nn.Parameter(torch.randn(300, 7))
    address, values = param.data_ptr(), param.tolist()
    held = HOLDERS[holder](param)
    model = nn.Module()
    model.register_parameter("weight", param)
    on_disk(model, tmp_path)
    assert (read == [address]) is (held is None)
    assert param.tolist() == values


def test_an_array_that_is_written_behind_the_offload_changes_nothing(tmp_path):
    array = np.ones((300, 7), dtype=np.float32)
    model = nn.Module()
    model.register_parameter("weight", nn.Parameter(torch.from_numpy(array)))
    read, put = [], Store.put_whole

    def noted(store, entry, source, **given):
        read.append(source.data_ptr())
        array[:] = 2  # before the bytes are read
        return put(store, entry, source, **given)

    with mock.patch.object(Store, "put_whole", noted):
        on_disk(model, tmp_path)
    assert read != [array.ctypes.data]
    assert model.weight.eq(1).all()


def test_gradients_that_were_there_move_along(tmp_path):
    plain, model = mlp(), mlp()
    for m in (plain, model):
        m(torch.ones(2, 16)).sum().backward()
    on_disk(model, tmp_path)
    assert entries(model, EntryKind.GRAD) == [
        f"{n}.grad" for n in ("0.bias", "0.weight", "2.bias", "2.weight")
    ]
    for m in (plain, model):
        m(torch.ones(2, 16)).sum().backward()
    for a, b in zip(plain.parameters(), model.parameters(), strict=True):
        assert_equal(a.grad, b.grad)


def test_buffers_move_to_the_device_and_stay_plain(tmp_path):
    model = on_disk(nn.BatchNorm1d(4), tmp_path)
    assert all(type(b) is torch.Tensor for b in model.buffers())


def test_tied_weights_are_one_entry(tmp_path):
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].weight = model[0].weight
    on_disk(model, tmp_path)
    assert model[1].weight is model[0].weight
    assert entries(model) == ["0.bias", "0.weight", "1.bias"]


def test_tying_later_frees_what_was_there(tmp_path):
    model = on_disk(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), tmp_path)
    model[1].weight = model[0].weight
    assert entries(model) == ["0.bias", "0.weight", "1.bias"]


def test_a_parameter_in_the_place_of_a_tiered_one_becomes_tiered(tmp_path):
    model = on_disk(mlp(), tmp_path)
    value = torch.randn(7, 16)
    model[0].weight = nn.Parameter(value.clone(), requires_grad=False)
    assert_equal(value, model[0].weight)
    assert model[0].weight.entry.home == "disk"
    assert not model[0].weight.requires_grad


def test_offloading_twice_is_refused(tmp_path):
    model = on_disk(mlp(), tmp_path)
    with pytest.raises(Unsupported, match=r"offloaded already, or was until it was closed") as told:
        zcompile.offload(model, device_memory="1MiB")
    todo = (
        "call zcompile.offload once, or only zcompile.init; for other budgets build the model anew"
    )
    assert f"closed; {todo}" in str(told.value)
    assert zcompile.offload(model) is model
    grown = nn.Sequential(model, nn.Linear(2, 2))
    with pytest.raises(Unsupported, match=r"without budgets, takes in parameters that were added"):
        zcompile.offload(grown, device_memory="1MiB")
    grown.append(zcompile.offload(nn.Linear(2, 2), device_memory="1MiB", host_memory="1MiB"))
    with pytest.raises(Unsupported, match=r"offloaded one by one.* offload the whole model once"):
        zcompile.offload(grown)


def adapted(model):
    """`model` beside a layer that is trained in its place, as adapters are."""
    model.requires_grad_(False)
    return nn.ModuleDict({"base": model, "added": nn.Linear(16, 4)})


def test_parameters_that_were_added_are_taken_in(tmp_path):
    torch.manual_seed(1)
    plain = adapted(mlp())
    torch.manual_seed(1)
    model = adapted(on_disk(mlp(), tmp_path))
    optimizer = torch.optim.AdamW(model["added"].parameters())
    assert zcompile.offload(model) is model
    assert model["added"].weight.entry.home == "disk"
    assert session_behind(model) is session_behind(model["base"])
    assert session_behind(model).root() is model
    x = torch.randn(4, 16)
    for m, opt in (plain, torch.optim.AdamW(plain["added"].parameters())), (model, optimizer):
        for _ in range(2):
            (m["base"](x) + m["added"](x)).square().sum().backward()
            opt.step()
            opt.zero_grad()
    assert_same(plain, model)
    assert zcompile.stats(model)["steps"] == 2


def test_what_was_added_and_cannot_move_stays_and_the_rest_is_as_it_was(tmp_path):
    model = adapted(on_disk(mlp(), tmp_path))
    before = plain_of(model["base"][0].weight).clone()
    model["added"].bias.register_hook(lambda grad: grad)
    with pytest.raises(Unsupported, match=r"'added.bias' has hooks already"):
        zcompile.offload(model)
    assert all(type(p) is nn.Parameter for p in model["added"].parameters())
    assert_equal(before, model["base"][0].weight)


def test_a_module_that_is_moved_stays_where_it_was_offloaded_to(tmp_path):
    model = on_disk(mlp(), tmp_path)
    zcompile.stats(model, reset=True)
    assert model.cpu() is model.to("cpu") is model.to(torch.device("cpu"), torch.float32)
    assert sum(zcompile.stats(model)["bytes"].values()) == 0
    plain = mlp()
    made = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (plain, model)]
    assert train(plain, made[0]) == train(model, made[1])


@pytest.mark.parametrize("move", [lambda m: m.to("cuda"), lambda m: m.cuda(1), lambda m: m.cuda()])
def test_a_move_to_a_device_it_does_not_compute_on_is_refused(move, tmp_path):
    model = on_disk(mlp(), tmp_path)
    with pytest.raises(Unsupported, match=r"is moved to 'cuda.*offload device='cuda"):
        move(model)
    assert_same(mlp(), model)


@pytest.mark.filterwarnings("ignore:.*weight_norm. is deprecated")
def test_a_module_that_keeps_what_was_computed_of_a_parameter_is_named():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    prune.identity(model[0], "weight")  # keeps such a thing, by a graph that saved no parameter
    nn.utils.weight_norm(model[1])
    with pytest.raises(Unsupported, match=r"^'1' keeps as its \.weight what was .* '1\.weight_g'"):
        zcompile.offload(model, device="cpu", device_memory="1MiB")
    assert not any(hasattr(p, "entry") for p in model.parameters())
    model[1].weight = None
    zcompile.offload(model, device="cpu", device_memory="1MiB")
    assert all(hasattr(p, "entry") for p in model.parameters())


@pytest.mark.parametrize(
    "spoil",
    [
        lambda m: m[0].weight.register_hook(lambda g: g),
        lambda m: m[0].weight.register_post_accumulate_grad_hook(lambda p: None),
        lambda m: setattr(m, "refs", [weakref.ref(m[0].weight)]),
        lambda m: m.append(nn.LazyLinear(3)),
    ],
    ids=["hook", "post hook", "weak", "lazy"],
)
def test_what_would_be_lost_on_the_way_is_refused_and_nothing_moves(spoil, tmp_path):
    model = mlp()
    spoil(model)
    with pytest.raises(Unsupported, match=r"parameter '.*weight.*'"):
        on_disk(model, tmp_path)
    assert all(isinstance(p, nn.Parameter) and not hasattr(p, "entry") for p in model.parameters())
    assert os.listdir(next(tmp_path.iterdir())) in ([], ["zinf.lock"])


def test_two_models_need_two_directories(tmp_path):
    first = zcompile.offload(mlp(), **ON_DISK, disk=tmp_path)
    with pytest.raises(DiskOwned, match="another model of this process, a Sequential; call"):
        zcompile.offload(mlp(), **ON_DISK, disk=tmp_path)
    del first
    gc.collect()
    zcompile.offload(mlp(), **ON_DISK, disk=tmp_path)


def meta(tmp_path):
    with torch.device("meta"):
        model = mlp()
    return on_disk(model, tmp_path)


@pytest.mark.parametrize(
    "use",
    [
        lambda m: m(torch.ones(1, 16)),
        lambda m: repr(m[0].weight),
        lambda m: torch.save(m.state_dict(), io.BytesIO()),
        lambda m: copy.deepcopy(m),
        lambda m: m[0].weight.detach().mul_(2),
        lambda m: m[0].weight.sum(),
    ],
    ids=["call", "print", "save", "copy", "write", "sum"],
)
def test_a_meta_model_has_no_values_until_it_is_given_some(use, tmp_path):
    model = meta(tmp_path)
    with pytest.raises(
        ValueUnset, match=r"'0.\w+' has no value yet: .*zcompile.load.model, path. gives it one"
    ):
        use(model)
    model.load_state_dict(mlp().state_dict())
    assert_same(mlp(), model)
    use(model)


def test_a_meta_model_takes_values_of_an_offloaded_one_or_new_ones(tmp_path):
    model = meta(tmp_path)
    model.load_state_dict(on_disk(mlp(), tmp_path).state_dict())
    assert_same(mlp(), model)
    model = meta(tmp_path)
    torch.manual_seed(0)
    model[0].reset_parameters()
    torch.manual_seed(0)
    assert_equal(nn.Linear(16, 32).weight, model[0].weight)
    nn.init.ones_(model[2].weight)
    nn.init.constant_(model[2].bias, 2)
    assert plain_of(model[2].weight).eq(1).all()
    assert plain_of(model[2].bias).eq(2).all()


def test_nothing_is_left_when_model_and_optimizer_are_gone(tmp_path):
    model = on_disk(mlp(), tmp_path)
    store = session_behind(model)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
    train(model, optimizer)
    model(torch.ones(1, 16)).sum().backward()
    assert (len(entries(model, EntryKind.GRAD)), len(entries(model, EntryKind.STATE))) == (4, 8)
    model.zero_grad()
    assert len(entries(model)) == 12
    del optimizer
    gc.collect()
    assert len(entries(model)) == 4
    gone = weakref.ref(store)
    del model, store
    gc.collect()
    assert gone() is None
    wait_for_dead_stores()
    assert [p for p in tmp_path.rglob("*") if p.suffix == ".tier"] == []


@pytest.mark.parametrize("form", [{"fused": True}, {"foreach": True}, {"foreach": False}])
def test_disk_space_is_used_again(form, tmp_path):
    model = on_disk(mlp(), tmp_path)
    optimizer = torch.optim.AdamW(model.parameters(), **form)
    train(model, optimizer, 2)

    def blocks():
        return sum(p.stat().st_blocks for p in tmp_path.rglob("*") if p.is_file())

    before, peak = blocks(), zcompile.stats(model)["peak"]["disk"]
    train(model, optimizer, 20)
    assert blocks() == before
    assert zcompile.stats(model)["peak"]["disk"] == peak


def test_a_plain_model_beside_an_offloaded_one_is_left_alone(tmp_path):
    on_disk(mlp(), tmp_path)
    plain = mlp()
    plain[0].weight = nn.Parameter(torch.zeros(32, 16))
    assert type(plain[0].weight) is nn.Parameter
    plain.half().float()
    assert all(type(p) is nn.Parameter for p in plain.parameters())


def test_batches_are_the_same_each_time():
    first, second = list(batches(2)), list(batches(2))
    assert all(
        torch.equal(a, b)
        for x, y in zip(first, second, strict=True)
        for a, b in zip(x, y, strict=True)
    )


def test_a_closed_model_gives_its_directory_back(tmp_path):
    first = zcompile.offload(mlp(), **{**ON_DISK, "disk": tmp_path})
    loss = first(torch.randn(2, 16)).sum()  # keeps the parameters alive, as a notebook does
    with pytest.raises(DiskOwned, match=r"call zcompile\.close\(model\) with it first"):
        zcompile.offload(mlp(), **{**ON_DISK, "disk": tmp_path})
    zcompile.close(first)
    zcompile.close(first)
    second = zcompile.offload(mlp(), **{**ON_DISK, "disk": tmp_path})
    assert_same(mlp(), second)
    with pytest.raises(ParameterChanged, match="its store was closed"):
        first(torch.randn(2, 16))
    del loss


def test_only_an_offloaded_model_can_be_closed():
    with pytest.raises(Unsupported, match="no tiered parameters"):
        zcompile.close(mlp())


def test_after_a_step_that_broke_off_a_forward_is_not_taken_for_one(tmp_path, caplog):
    model = zcompile.offload(mlp(), **{**ON_DISK, "disk": tmp_path})
    session_behind(model).begin_step("AdamW")
    model(torch.randn(2, 16)).sum().backward()
    assert "gathered whole" not in caplog.text


def test_a_percentage_is_of_the_memory_of_the_machine_on_the_emulated_device():
    model = zcompile.offload(mlp(), device="cpu", device_memory="1%", host_memory="0.5%")
    session = session_behind(model)
    assert session.device_budget == machine_bytes() // 100
    assert session.config.host_memory == machine_bytes() * 5 // 1000
    zcompile.close(model)


def test_one_warning_says_that_the_device_is_emulated(monkeypatch, caplog):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    offload._tell_that_the_device_is_emulated.cache_clear()
    zcompile.close(zcompile.offload(mlp(), device="cpu", host_memory="16MiB"))
    assert not caplog.records
    for _ in range(2):
        zcompile.close(zcompile.offload(mlp(), host_memory="16MiB"))
    assert [r.levelname for r in caplog.records] == ["WARNING"]
    assert "no CUDA device" in caplog.text


HOLDS = {
    "numpy, by DLPack": lambda p: np.from_dlpack(p.requires_grad_(False)),
    "torch, by DLPack": lambda p: torch.from_dlpack(p.requires_grad_(False)),
    "a view": lambda p: p[0],
    "a graph": lambda p: p * torch.ones(4, requires_grad=True),
}


@pytest.mark.parametrize("holds", HOLDS)
def test_a_parameter_that_something_within_torch_refers_to_is_refused_until_that_is_dropped(
    holds, tmp_path
):
    model = nn.Linear(4, 4)
    held = HOLDS[holds](model.weight)
    before = [p.detach().clone() for p in model.parameters()]
    refused = r"'weight' cannot be moved, .*a view of it, .*graph .*DLPack.*drop that first"
    with pytest.raises(Unsupported, match=refused):
        on_disk(model, tmp_path)
    assert all(map(torch.equal, model.parameters(), before))
    del held
    on_disk(model, tmp_path)
    assert all(map(torch.equal, model.parameters(), before))
