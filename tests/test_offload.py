"""Offloading a model: what stays the same, what is refused, what is freed; and `init`, `meta`."""

import copy
import gc
import io
import os
import subprocess
import sys
import weakref

import pytest
import safetensors.torch
import torch
import transformers
from pairs import (
    ON_DISK,
    Holder,
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

import zcompile
from zcompile.errors import DiskOwned, Unsupported, ValueUnset
from zcompile.offloading import session_behind
from zcompile.specs import Kind


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


def test_gradients_that_were_there_move_along(tmp_path):
    plain, model = mlp(), mlp()
    for m in (plain, model):
        m(torch.ones(2, 16)).sum().backward()
    on_disk(model, tmp_path)
    assert entries(model, Kind.GRAD) == [f"{n}.grad" for n in ("0.bias", "0.weight", "2.bias", "2.weight")]
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
    with pytest.raises(Unsupported, match="offloaded already; call zcompile.offload once"):
        zcompile.offload(model, device_memory="1MiB")
    assert zcompile.offload(model) is model
    with pytest.raises(Unsupported, match="some parameters .* tiered already; offload the whole"):
        zcompile.offload(nn.Sequential(model, nn.Linear(2, 2)))


@pytest.mark.parametrize("spoil", [
    lambda m: m[0].weight.register_hook(lambda g: g),
    lambda m: m[0].weight.register_post_accumulate_grad_hook(lambda p: None),
    lambda m: setattr(m, "refs", [weakref.ref(m[0].weight)]),
    lambda m: m.append(nn.LazyLinear(3)),
    lambda m: m.append(nn.LSTM(4, 4)),
], ids=["hook", "post hook", "weak", "lazy", "lstm"])  # fmt: skip
def test_what_would_be_lost_on_the_way_is_refused_and_nothing_moves(spoil, tmp_path):
    model = mlp()
    spoil(model)
    with pytest.raises(Unsupported, match="parameter '.*weight.*'"):
        on_disk(model, tmp_path)
    assert all(isinstance(p, nn.Parameter) and not hasattr(p, "entry") for p in model.parameters())
    assert os.listdir(next(tmp_path.iterdir())) in ([], ["zinf.lock"])


def test_two_models_need_two_directories(tmp_path):
    first = zcompile.offload(mlp(), **ON_DISK, disk=tmp_path)
    with pytest.raises(DiskOwned, match="another model of this process; give each model a dir"):
        zcompile.offload(mlp(), **ON_DISK, disk=tmp_path)
    del first
    gc.collect()
    zcompile.offload(mlp(), **ON_DISK, disk=tmp_path)


def meta(tmp_path):
    with torch.device("meta"):
        model = mlp()
    return on_disk(model, tmp_path)


@pytest.mark.parametrize("use", [
    lambda m: m(torch.ones(1, 16)),
    lambda m: repr(m[0].weight),
    lambda m: torch.save(m.state_dict(), io.BytesIO()),
    lambda m: copy.deepcopy(m),
    lambda m: m[0].weight.detach().mul_(2),
    lambda m: m[0].weight.sum(),
], ids=["call", "print", "save", "copy", "write", "sum"])  # fmt: skip
def test_a_meta_model_has_no_values_until_it_is_given_some(use, tmp_path):
    model = meta(tmp_path)
    with pytest.raises(ValueUnset, match=r"has no value yet: .*load one with model.load_state_dict"):
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


def test_saved_files_are_plain_and_load_anywhere(tmp_path):
    model = on_disk(mlp(), tmp_path)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    train(model, optimizer)
    torch.save({"m": model.state_dict(), "o": optimizer.state_dict()}, tmp_path / "both.pt")
    script = (
        "import sys, torch\n"
        f"saved = torch.load({str(tmp_path / 'both.pt')!r})\n"
        "assert not any(name.startswith('zcompile') for name in sys.modules)\n"
        "states = [v for s in saved['o']['state'].values() for v in s.values()]\n"
        "assert {type(v) for v in (*saved['m'].values(), *states)} == {torch.Tensor}\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True, cwd="/")
    plain = mlp()
    first = torch.optim.AdamW(plain.parameters(), fused=True)
    train(plain, first)
    saved = torch.load(tmp_path / "both.pt")
    for name, value in plain.state_dict().items():
        assert_equal(value, saved["m"][name])


@pytest.mark.parametrize("assign", [False, True])
def test_a_plain_state_dict_is_taken_over(assign, tmp_path):
    plain = mlp()
    train(plain, torch.optim.SGD(plain.parameters(), lr=0.1))
    model = on_disk(mlp(), tmp_path)
    model.load_state_dict(copy.deepcopy(plain.state_dict()), assign=assign)
    assert_same(plain, model)
    assert entries(model) == ["0.bias", "0.weight", "2.bias", "2.weight"]
    with pytest.raises(RuntimeError, match="Missing key"):
        model.load_state_dict({}, strict=True)
    mlp().load_state_dict(model.state_dict(), strict=True)


def test_safetensors_reads_into_tiers_and_refuses_to_write_them_unasked(tmp_path):
    plain, model = mlp(), on_disk(mlp(), tmp_path)
    train(plain, torch.optim.SGD(plain.parameters(), lr=0.1))
    safetensors.torch.save_file(plain.state_dict(), tmp_path / "m.safetensors")
    safetensors.torch.load_model(model, tmp_path / "m.safetensors")
    assert_same(plain, model)
    with pytest.raises(Unsupported, match=r"no memory of its own; use tensor.cpu\(\)"):
        safetensors.torch.save_file(model.state_dict(), tmp_path / "n.safetensors")
    copies = {name: value.cpu() for name, value in model.state_dict().items()}
    safetensors.torch.save_file(copies, tmp_path / "n.safetensors")
    for name, value in safetensors.torch.load_file(tmp_path / "n.safetensors").items():
        assert_equal(plain.state_dict()[name], value)


def test_nothing_is_left_when_model_and_optimizer_are_gone(tmp_path):
    model = on_disk(mlp(), tmp_path)
    store = session_behind(model)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
    train(model, optimizer)
    model(torch.ones(1, 16)).sum().backward()
    assert (len(entries(model, Kind.GRAD)), len(entries(model, Kind.STATE))) == (4, 8)
    model.zero_grad()
    assert len(entries(model)) == 12
    del optimizer
    gc.collect()
    assert len(entries(model)) == 4
    gone = weakref.ref(store)
    del model, store
    gc.collect()
    assert gone() is None
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


class Aliased(nn.Module):
    """Parameters that their maker goes on using under another name."""

    def __init__(self) -> None:
        super().__init__()
        weight = nn.Parameter(torch.empty(4, 4))
        self.first = weight
        nn.init.normal_(weight)
        self.inner = nn.Linear(4, 4, bias=False)
        self.inner.weight = weight
        self.frozen = nn.Parameter(torch.randn(3), requires_grad=False)
        self.register_buffer("steps", torch.arange(3))
        self.layers = nn.ModuleList(nn.Linear(3, 3) for _ in range(2))
        self.layers[1] = nn.Linear(3, 2)


def gpt2() -> nn.Module:
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(
        n_layer=2, n_embd=16, n_head=2, vocab_size=50, n_positions=16,
        bos_token_id=0, eos_token_id=0))  # fmt: skip


BUILDS = {
    "linear": lambda: nn.Linear(16, 8),
    "conv": lambda: nn.Conv2d(3, 8, 3),
    "embedding": lambda: nn.Embedding(10, 4, padding_idx=2),
    "layer norm": lambda: nn.LayerNorm(8),
    "batch norm": lambda: nn.BatchNorm1d(4),
    "attention": lambda: nn.MultiheadAttention(8, 2),
    "lstm": lambda: nn.LSTM(8, 4),
    "encoder": lambda: nn.TransformerEncoder(
        nn.TransformerEncoderLayer(16, 2, 32), 2, enable_nested_tensor=False
    ),
    "weight norm": lambda: nn.utils.parametrizations.weight_norm(nn.Linear(4, 4)),
    "parameter list": lambda: nn.ParameterList([nn.Parameter(torch.randn(3))]),
    "aliased": Aliased,
    "gpt2": gpt2,
}


@pytest.mark.parametrize("name", BUILDS)
def test_init_gives_the_values_and_names_of_a_plain_model(name, tmp_path):
    torch.manual_seed(0)
    plain, after = BUILDS[name](), torch.rand(1)
    torch.manual_seed(0)
    with zcompile.init(**ON_DISK, disk=tmp_path):
        model = BUILDS[name]()
    assert torch.equal(torch.rand(1), after)
    assert_same(plain, model)
    assert [p.entry.name for p in model.parameters()] == [n for n, _ in plain.named_parameters()]
    assert [p.entry.home for p in model.parameters()] == ["disk"] * len(entries(model))
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        assert p.requires_grad == q.requires_grad
    assert zcompile.offload(model) is model


def test_a_recurrent_model_built_under_init_trains(tmp_path):
    torch.manual_seed(0)
    plain = nn.LSTM(8, 4)
    torch.manual_seed(0)
    with zcompile.init(**ON_DISK, disk=tmp_path):
        model = nn.LSTM(8, 4)
    x = torch.randn(3, 2, 8)
    for m in (plain, model):
        optimizer = torch.optim.AdamW(m.parameters(), lr=1e-2)
        for _ in range(2):
            m(x)[0].square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert_same(plain, model)


def test_an_exception_inside_init_leaves_nothing_behind(tmp_path):
    def build():
        with zcompile.init(**ON_DISK, disk=tmp_path):
            mlp()
            raise KeyError("x")

    with pytest.raises(KeyError):
        build()
    assert type(nn.Linear(2, 2).weight) is nn.Parameter
    gc.collect()
    assert [p for p in tmp_path.iterdir() if p.suffix == ".tier"] == []
    zcompile.offload(mlp(), **ON_DISK, disk=tmp_path)


def test_a_model_built_under_init_never_exists_whole(tmp_path):
    with zcompile.init(**ON_DISK, disk=tmp_path):
        model = nn.Sequential(*(Holder(torch.zeros(256, 64)) for _ in range(40)))
    peak = zcompile.stats(model)["peak"]
    assert sum(p.nbytes for p in model.parameters()) == 40 * 65536
    assert peak["host"] <= 256 * 1024
    assert peak["device"] <= 1024 * 1024


def test_a_plain_model_beside_an_offloaded_one_is_left_alone(tmp_path):
    on_disk(mlp(), tmp_path)
    plain = mlp()
    plain[0].weight = nn.Parameter(torch.zeros(32, 16))
    assert type(plain[0].weight) is nn.Parameter
    plain.half().float()
    assert all(type(p) is nn.Parameter for p in plain.parameters())


def test_batches_are_the_same_each_time():
    first, second = list(batches(2)), list(batches(2))
    assert all(torch.equal(a, b) for x, y in zip(first, second, strict=True)
               for a, b in zip(x, y, strict=True))  # fmt: skip
