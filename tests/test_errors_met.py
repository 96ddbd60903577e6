"""Each error a user will meet, met: what is done, and the sentence that comes of it."""

import errno
import os
import re

import pytest
import torch
from joint import refused_after_trials
from pairs import ON_DISK, Holder, assert_same, mlp, on_disk
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import zcompile
from zcompile.errors import (
    BudgetExceeded,
    ConfigInvalid,
    DeviceTooSmall,
    DiskOwned,
    DiskUnusable,
    ModelWrapped,
    ParameterChanged,
    TierFull,
    UnknownOption,
    Unsupported,
    ValueUnset,
    ZinfError,
)
from zcompile.ir.units import Bytes


def met(kind, sentence, act):
    """`act()` raises `kind`, and all of `sentence` is in it, in order."""
    with pytest.raises(kind) as caught:
        act()
    found = caught.value
    while not isinstance(found, ZinfError):  # Dynamo wraps what a backend raises
        found = found.inner_exception
    text = re.sub(r"\s+", " ", str(found))
    assert re.search(sentence, text), text
    return found


def compiled(model):
    torch._dynamo.reset()
    return torch.compile(model, backend="zinf")


def test_an_eager_use_larger_than_the_device_budget(tmp_path):
    model = on_disk(nn.Linear(256, 128), tmp_path, device_memory="64KiB")
    x, value = torch.ones(1, 256), model.weight.tolist()
    met(
        BudgetExceeded,
        r"gathering 'weight' needs 128 KiB on the device, the budget is 64.0 KiB "
        r".*to fit: .* device_memory=.131584B. or more",
        lambda: model(x),
    )
    assert model.weight.tolist() == value


def test_a_compiled_use_larger_than_the_device_budget_names_what_would_do(tmp_path):
    model = on_disk(nn.Linear(256, 128), tmp_path, device_memory="512B")
    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed) as caught:
        compiled(model)(torch.ones(1, 256))
    error = caught.value.inner_exception
    assert isinstance(error, BudgetExceeded)
    assert "the budget is 512 B" in str(error)
    assert "device_memory" in str(error).split("to fit:")[1]

    def attempt(budget):
        torch._dynamo.reset()
        again = on_disk(nn.Linear(256, 128), tmp_path, device_memory=Bytes(budget))
        compiled(again)(torch.ones(1, 256))

    attempt(refused_after_trials(attempt, error.needed_bytes).needed_bytes)


def test_an_optimizer_without_room_for_one_chunk(tmp_path):
    model = on_disk(Holder(torch.zeros(64, 64)), tmp_path, device_memory="8KiB")
    model.w.grad = torch.ones(64, 64)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    error = met(
        BudgetExceeded,
        "one chunk of _fused_adamw_ needs 16.0 KiB on the device, the "
        "budget is 8.00 KiB .* to fit: give zcompile.offload device_memory=.16384B. or more",
        optimizer.step,
    )
    roomy = on_disk(Holder(torch.zeros(64, 64)), tmp_path, device_memory=Bytes(error.needed_bytes))
    roomy.w.grad = torch.ones(64, 64)
    torch.optim.AdamW(roomy.parameters(), fused=True).step()


def test_no_disk_and_too_little_host_memory():
    met(
        TierFull,
        r"no tier has 2.00 KiB left for '0.weight' host: 0 B used of 0 B the whole model needs "
        r"10.6 KiB there, of 0 B: weights 2.64 KiB, gradients 2.64 KiB, states 5.28 KiB .of an "
        r"optimizer that keeps 2 of each weight, as AdamW does.; the 1.00 MiB of the device take "
        r"none of it before a step is planned to fit: raise "
        "host_memory, give a directory as disk, or free space on it",
        lambda: zcompile.offload(mlp(), **ON_DISK),
    )


def test_a_model_that_grows_too_large_is_told_so_far():
    def build():
        with zcompile.init(**{**ON_DISK, "host_memory": "1MiB"}):
            frozen = nn.Linear(256, 256, bias=False).requires_grad_(False)
            nn.Sequential(frozen, *(nn.Linear(256, 256, bias=False) for _ in range(8)))

    met(
        TierFull,
        "no tier has 256 KiB left .* what was made of the model so far needs [0-9.]+ MiB there, of "
        "768 KiB: weights 1.00 MiB, gradients 1.00 MiB",
        build,
    )


@pytest.fixture
def nearly_full(monkeypatch):
    """Files that cannot grow beyond 4 MiB."""
    really = os.posix_fallocate

    def grow(fd, offset, nbytes):
        if offset + nbytes > 4 << 20:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        really(fd, offset, nbytes)

    monkeypatch.setattr(os, "posix_fallocate", grow)


def test_a_disk_that_is_full_halfway_leaves_the_model_as_it_was(tmp_path, nearly_full):
    model = nn.Sequential(*(Holder(torch.full((512, 1024), float(n))) for n in range(3)))
    params = list(model.parameters())
    params[0].grad, params[0].tag = torch.ones(512, 1024), "mine"
    met(
        TierFull,
        "no tier has 2.00 MiB left for '1.w' host: .* disk: 4.00 MiB used of .* to fit: "
        "raise host_memory, give a directory as disk, or free space on it",
        lambda: on_disk(model, tmp_path),
    )
    assert all(a is b for a, b in zip(params, model.parameters(), strict=True))
    assert [type(p) for p in params] == [nn.Parameter] * 3
    assert [p.unique().tolist() for p in params] == [[0.0], [1.0], [2.0]]
    assert params[0].grad.eq(1).all()
    assert params[0].tag == "mine"
    zcompile.offload(model, **{**ON_DISK, "host_memory": "16MiB"})
    (model[0].w * 2).sum().backward()
    assert hasattr(model[0].w.grad, "entry"), "the hooks of the second offload are called"


def test_a_disk_that_is_full_in_the_step_leaves_the_parameters(tmp_path, nearly_full):
    model = on_disk(Holder(torch.zeros(512, 1024)), tmp_path)
    model.w.grad = torch.ones(512, 1024)
    met(TierFull, "no tier has 2.00 MiB left for 'w.*'", torch.optim.Adam(model.parameters()).step)
    assert not model.w.detach().cpu().any()


@pytest.mark.parametrize(
    ("prepare", "sentence"),
    [
        (
            lambda path: path.rmdir(),
            r"disk='.*/here' does not exist, and neither does the "
            "directory that it would be made in; create that or give another directory",
        ),
        (
            lambda path: (path / "here").touch(),
            r"disk='.*/here' is not a directory; give a directory",
        ),
    ],
    ids=["missing", "a file"],
)
def test_a_disk_that_is_no_directory(prepare, sentence, tmp_path):
    (parent := tmp_path / "parent").mkdir()
    prepare(parent)
    met(DiskUnusable, sentence, lambda: zcompile.offload(mlp(), **ON_DISK, disk=parent / "here"))


def test_a_disk_one_may_not_write_to(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # root may write anywhere
    met(
        DiskUnusable,
        "is not writable; give a directory one may write to",
        lambda: zcompile.offload(mlp(), **ON_DISK, disk=tmp_path),
    )


def test_a_disk_given_twice(tmp_path):
    met(
        ConfigInvalid,
        "names a directory twice",
        lambda: zcompile.offload(mlp(), **ON_DISK, disk=(tmp_path, tmp_path)),
    )


def test_a_second_model_over_the_same_directory(tmp_path):
    first = zcompile.offload(mlp(), **ON_DISK, disk=tmp_path)
    met(
        DiskOwned,
        "is in use by another model of this process, .* give each model a directory",
        lambda: zcompile.offload(mlp(), **ON_DISK, disk=tmp_path),
    )
    assert_same(mlp(), first)


def test_a_device_without_the_memory_that_is_asked_for(tmp_path):
    met(
        DeviceTooSmall,
        "device_memory asks for 900 TiB on cpu, which has .* free; lower device_m",
        lambda: on_disk(mlp(), tmp_path, device_memory="900TiB"),
    )


@pytest.mark.parametrize(
    ("fields", "kind", "sentence"),
    [
        (
            {"device_memmory": 1},
            UnknownOption,
            "zcompile.offload does not know 'device_memmory'; did "
            r"you mean 'device_memory'\? \(known: activations, .*tile_bytes, updates\)",
        ),
        ({"device_memory": "20 apples"}, ConfigInvalid, "device_memory='20 apples' cannot be used"),
        ({"device_memory": 20}, ConfigInvalid, "20 means 20 bytes; did you mean '20GiB'"),
        (
            {"host_memory": "1KiB"},
            ConfigInvalid,
            "host_memory=1024 is too small: .* at least 256 KiB",
        ),
        (
            {"device": "tpu"},
            ConfigInvalid,
            "device='tpu' is not a torch device; use 'cuda' or 'cpu'",
        ),
        ({"throttle": {"disk": 1}}, UnknownOption, "throttle does not know 'disk'; did you mean"),
        (
            {"config": {"device": "cpu"}},
            ConfigInvalid,
            "is not a zcompile.Config; pass fields by name",
        ),
    ],
    ids=["unknown", "size", "unit", "host", "device", "throttle", "config"],
)
def test_a_field_that_cannot_be_used(fields, kind, sentence, tmp_path):
    model = mlp()
    met(kind, sentence, lambda: zcompile.offload(model, **{**ON_DISK, "disk": tmp_path, **fields}))
    assert all(type(p) is nn.Parameter for p in model.parameters())


def test_a_wrapped_model():
    met(
        ModelWrapped,
        "is wrapped in DataParallel; remove the wrapper and give zcompile.offload",
        lambda: zcompile.offload(nn.DataParallel(mlp())),
    )

    class Replicated(DistributedDataParallel):
        def __init__(self):
            nn.Module.__init__(self)

    met(
        ModelWrapped,
        "is wrapped in DistributedDataParallel; .* sharding parameters is done here",
        lambda: zcompile.offload(Replicated()),
    )


def test_what_is_not_a_module():
    met(
        Unsupported,
        "dict is not a torch.nn.Module; give zcompile.offload the model itself",
        lambda: zcompile.offload({}),
    )
    met(
        Unsupported,
        r"Linear is a class, and .*; give zcompile.offload an object of it: Linear\(\.\.\.\)",
        lambda: zcompile.offload(nn.Linear),
    )
    met(
        Unsupported,
        "Linear is a class, and no model .*; give zcompile.plan an object of it",
        lambda: zcompile.plan(nn.Linear, torch.ones(2, 2), machine="rtx3090-24gb"),
    )


@pytest.mark.parametrize(
    ("word", "field"), [("nvme", "disk"), ("vram", "device_memory"), ("ram", "host_memory")]
)
def test_what_others_call_a_field(word, field):
    met(
        UnknownOption,
        f"zcompile.offload does not know '{word}'; did you mean '{field}'",
        lambda: zcompile.offload(mlp(), **{word: "1GiB"}),
    )


def test_more_of_the_host_than_there_is():
    met(
        ConfigInvalid,
        r"host_memory='1000 TiB' is more than the [\d.]+ [MGT]iB that this machine has",
        lambda: zcompile.offload(mlp(), device="cpu", host_memory="1000TiB"),
    )


def test_a_parameter_changed_behind_our_back(tmp_path):
    model = on_disk(mlp(), tmp_path)

    def change():
        model[0].weight.data = torch.zeros(3)

    met(
        ParameterChanged,
        r"parameter '0.weight' was given .data of torch.float32 \(3,\) .* in "
        r"place of torch.float32 \(32, 16\) .*; change shape, dtype or strides before zcompile.off",
        change,
    )
    assert_same(mlp(), model)


def test_a_parameter_whose_store_was_closed(tmp_path):
    model = on_disk(mlp(), tmp_path)
    model[0].weight.entry.store.close()
    met(ParameterChanged, "parameter '0.weight' .*", lambda: model[0].weight.detach().sum())


def test_a_parameter_in_a_forked_child(tmp_path):
    model = on_disk(mlp(), tmp_path)
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            model[0].weight.tolist()
        except ParameterChanged as error:
            os.write(writing, str(error).encode())
        os._exit(0)
    os.waitpid(child, 0)
    text = os.read(reading, 4096).decode()
    assert re.search("rests in process .*, this is a child .* start the child with 'spawn'", text)
    assert_same(mlp(), model)


def test_a_compiled_meta_model_without_values(tmp_path):
    with torch.device("meta"):
        model = mlp()
    call = compiled(on_disk(model, tmp_path))
    met(
        ValueUnset,
        "'0.(bias|weight)' has no value yet: .*zcompile.load.model, path.* model.load_state_dict",
        lambda: call(torch.ones(1, 16)),
    )
    model.load_state_dict(mlp().state_dict())
    assert torch.equal(call(torch.ones(1, 16)), mlp()(torch.ones(1, 16)))


def test_a_model_that_was_not_offloaded_has_no_stats():
    met(
        Unsupported,
        r"has no tiered parameters; call zcompile.offload\(model\) first",
        lambda: zcompile.stats(mlp()),
    )
