"""What the state of a training is, by name, and that putting it back forgets nothing."""

import collections
import json
import math

import pytest
import torch
from offloaded import SMALL
from small_models import GPT, dropout, mlp
from torch import nn

import zcompile
from zcompile.checkpoint.plain_values import Packer, unpack
from zcompile.checkpoint.state import Fact, TrainingState, describe, fact_of, restore
from zcompile.errors import CheckpointMismatch, Unsupported


class Kept:
    """A state copied to memory, its meta gone through JSON."""

    where = "the memory"

    def __init__(self, state: TrainingState) -> None:
        self.meta = json.loads(json.dumps(state.meta, allow_nan=False))
        self._values = {
            **{name: value.on_host() for name, value in state.tiered.items()},
            **{name: value.clone() for name, value in state.plain.items()},
        }

    def facts(self) -> dict[str, Fact]:
        return {name: fact_of(value) for name, value in self._values.items()}

    def fill(self, name, target) -> None:
        target.copy_(self._values[name])


def keep(model, optimizer=None, **extra) -> Kept:
    return Kept(describe(model, optimizer, extra))


def step(model, optimizer, shape=(4, 8)) -> float:
    loss = model(torch.randn(shape)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def same(a: nn.Module, b: nn.Module) -> bool:
    pairs = zip(a.state_dict().values(), b.state_dict().values(), strict=True)
    return all(torch.equal(x.cpu(), y.cpu()) for x, y in pairs)


OPTIMIZERS = {
    "AdamW, fused": lambda ps: torch.optim.AdamW(ps, lr=1e-2, fused=True),
    "AdamW, foreach": lambda ps: torch.optim.AdamW(ps, lr=1e-2, foreach=True),
    "Adam, amsgrad": lambda ps: torch.optim.Adam(ps, lr=1e-2, amsgrad=True),
    "SGD": lambda ps: torch.optim.SGD(ps, lr=1e-2),
    "SGD, momentum": lambda ps: torch.optim.SGD(ps, lr=1e-2, momentum=0.9, fused=True),
    "NAdam": lambda ps: torch.optim.NAdam(ps, lr=1e-2),
    "Adagrad": lambda ps: torch.optim.Adagrad(ps, lr=1e-2),
    "Adafactor": lambda ps: torch.optim.Adafactor(ps, lr=1e-2),
    "lr is a tensor": lambda ps: torch.optim.AdamW(ps, lr=torch.tensor(1e-2), foreach=False),
}


@pytest.mark.parametrize("made", OPTIMIZERS)
@pytest.mark.parametrize("tiered", [False, True])
def test_training_goes_on_as_if_nothing_had_happened(made, tiered):
    def fresh(seed):
        torch.manual_seed(seed)
        model = dropout()
        if tiered:
            zcompile.offload(model, **SMALL)
        return model, OPTIMIZERS[made](model.parameters())

    model, optimizer = fresh(0)
    for _ in range(2):
        step(model, optimizer)
    kept = keep(model, optimizer)
    expected = [step(model, optimizer) for _ in range(3)]
    other, resumed = fresh(1)
    step(other, resumed)  # has states of its own
    assert restore(kept, other, resumed) == {}
    assert [step(other, resumed) for _ in range(3)] == expected
    assert same(model, other)


def test_names_are_those_of_state_dict_and_a_tied_parameter_has_one():
    model = zcompile.offload(GPT(layers=1), **SMALL)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randint(0, 32, (1, 4))).sum().backward()
    optimizer.step()
    state = describe(model, optimizer)
    assert state.meta["aliases"] == {"head.weight": "embed.weight"}
    names = [name for name in model.state_dict() if name != "head.weight"]
    assert [n[6:] for n in state.tiered if n.startswith("model.")] == names
    assert {"optimizer.embed.weight.exp_avg", "optimizer.embed.weight.exp_avg_sq"} <= set(
        state.tiered
    )
    assert {"optimizer.norm.bias.step", "rng.cpu"} <= set(state.plain)


def test_a_compiled_model_has_the_names_of_the_model_itself():
    model = mlp()
    compiled = torch.compile(model, backend="eager")
    assert list(describe(compiled).plain) == list(describe(model).plain)
    model[0] = torch.compile(model[0], backend="eager")
    assert list(describe(compiled).plain) == list(describe(mlp()).plain)


def test_a_state_goes_from_plain_to_tiered_and_back():
    plain, tiered = mlp(), zcompile.offload(mlp(), **SMALL)
    first = torch.optim.AdamW(plain.parameters())
    step(plain, first)
    second = torch.optim.AdamW(tiered.parameters())
    restore(keep(plain, first), tiered, second)
    back = mlp()
    third = torch.optim.AdamW(back.parameters())
    restore(keep(tiered, second), back, third)
    assert same(plain, back)
    assert all(
        torch.equal(first.state[p]["exp_avg"], third.state[q]["exp_avg"])
        for p, q in zip(plain.parameters(), back.parameters(), strict=True)
    )


def test_a_model_on_meta_gets_its_values():
    plain = mlp()
    with torch.device("meta"):
        model = mlp()
    with pytest.raises(CheckpointMismatch, match=r"0.weight: has no value, it is on meta"):
        restore(keep(plain), model)
    zcompile.offload(model, **SMALL)
    restore(keep(plain), model)
    assert same(plain, model)


def test_bf16_parameters_keep_states_of_their_own_dtype():
    model = nn.Linear(4, 4).bfloat16()
    optimizer = torch.optim.SGD(model.parameters())
    optimizer.state[model.weight]["master"] = model.weight.detach().float()
    other = nn.Linear(4, 4).bfloat16()
    resumed = torch.optim.SGD(other.parameters())
    restore(keep(model, optimizer), other, resumed)
    assert resumed.state[other.weight]["master"].dtype is torch.float32


EXTRA = {
    "none": None,
    "flag": True,
    "epoch": 3,
    "rate": 0.1,
    "best": math.inf,
    "name": "run",
    "betas": (0.9, 0.99),
    "milestones": collections.Counter({3: 1, 5: 2}),
    "by step": {1: "a"},
    "ordered": collections.OrderedDict(b=1, a=2),
    "nested": [{"x": (1, [2])}],
    "$odd": {"$": 1},
    "empty": [{}, (), []],
}


def test_extra_comes_back_with_its_types():
    found = restore(keep(mlp(), **EXTRA), mlp())
    assert found == EXTRA
    assert [type(v) for v in found.values()] == [type(v) for v in EXTRA.values()]


def test_tensors_among_extra_come_back_in_their_places():
    data = {"seen": [torch.arange(3), {"seen.0": torch.ones(2, dtype=torch.bool)}]}
    found = restore(keep(mlp(), data=data), mlp())
    assert torch.equal(found["data"]["seen"][0], torch.arange(3))
    assert found["data"]["seen"][1]["seen.0"].all()


def test_tensors_of_one_name_are_two_tensors():
    packer = Packer({})
    packed = packer.pack({"a": {"b": torch.zeros(1)}, "a.b": torch.ones(1)}, "x")
    assert list(packer.tensors) == ["x.a.b", "x.a.b~1"]
    assert unpack(packed, lambda name, on: packer.tensors[name])["a.b"] == 1


NESTS = {
    "lists": lambda inner: [inner],
    "dicts": lambda inner: {"a": inner},
    "tuples": lambda inner: (inner,),
    "dicts of numbers": lambda inner: {1: inner},
    "keys": lambda inner: {(1, 2): inner},
    "ordered": lambda inner: collections.OrderedDict(a=inner),
    "all": lambda inner: {"a": [({1: inner}, 2)]},
}


def below(calls, call):
    """`call()`, where a program has come so deep."""
    return call() if calls == 0 else below(calls - 1, call)


def fits(value):
    try:
        describe(mlp(), extra={"v": value})
    except Unsupported:
        return False
    return True


@pytest.mark.parametrize("durable", [False, True], ids=["checkpoint", "durable"])
@pytest.mark.parametrize("nest", NESTS)
def test_what_is_saved_can_be_resumed_however_deep_it_nests(tmp_path, nest, durable):
    fields = {**SMALL, "disk": tmp_path / "d", "durable": True} if durable else SMALL
    model = zcompile.offload(mlp(), **fields)
    zcompile.save(path := tmp_path / ("d" if durable else "c"), model)  # what others were in before
    value, kept = 0, None
    while fits(value):
        value, kept = NESTS[nest](value), value
    deeper = value
    for _ in range(5000):
        deeper = NESTS[nest](deeper)
    for one in (value, deeper):
        with pytest.raises(Unsupported, match=r"^extra\.v.* nests more than 200 deep"):
            zcompile.save(path, model, v=one)
    below(100, lambda: zcompile.save(path, model, v=kept))
    zcompile.close(model)
    again = zcompile.offload(mlp(), **fields)
    found = below(100, lambda: zcompile.resume(path, again))
    assert found["v"] == kept
    zcompile.close(again)


@pytest.mark.parametrize(
    ("extra", "why"),
    [
        ({"a": [object()]}, r"extra.a.0 is a builtins.object, which a checkpoint cannot keep"),
        ({"f": len}, r"extra.f is a builtins.builtin_function_or_method"),
        ({"s": torch.eye(2).to_sparse()}, r"extra.s is a tensor of layout torch.sparse_coo"),
    ],
)
def test_what_cannot_be_kept_is_named(extra, why):
    with pytest.raises(Unsupported, match=why):
        describe(mlp(), extra=extra)


def test_an_optimizer_of_another_model_is_refused():
    with pytest.raises(Unsupported, match=r"group 0 of SGD holds a parameter of shape \[32, 8\]"):
        describe(mlp(), torch.optim.SGD(mlp().parameters()))


def test_all_that_does_not_fit_is_told_at_once_and_nothing_changes():
    kept = keep(mlp())
    other = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 9), nn.Linear(2, 2))
    before = [p.clone() for p in other.parameters()]
    with pytest.raises(CheckpointMismatch) as caught:
        restore(kept, other, torch.optim.SGD(other.parameters()))
    assert str(caught.value).splitlines() == [
        "the memory does not fit:",
        "    2.bias: float32[8], the model has float32[9]",
        "    2.weight: float32[8, 32], the model has float32[9, 32]",
        "    3.bias: missing, the model has float32[2]",
        "    3.weight: missing, the model has float32[2, 2]",
        "    it holds no optimizer; resume without one",
    ]
    assert all(torch.equal(a, b) for a, b in zip(before, other.parameters(), strict=True))


def test_an_optimizer_with_other_groups_is_refused():
    model = mlp()
    kept = keep(model, torch.optim.SGD(model.parameters()))
    split = [{"params": list(model[0].parameters())}, {"params": list(model[2].parameters())}]
    with pytest.raises(CheckpointMismatch, match="has 1 groups of parameters, this one has 2"):
        restore(kept, model, torch.optim.SGD(split))
    with pytest.raises(CheckpointMismatch, match=r"group 0 of its optimizer trains 2.bias, 2.wei"):
        restore(kept, model, torch.optim.SGD(model[0].parameters()))
    with pytest.raises(CheckpointMismatch, match="is of the optimizer SGD, this one is AdamW"):
        restore(kept, model, torch.optim.AdamW(model.parameters()))


class WithState(nn.Linear):
    """A module that keeps more than tensors."""

    seen = 0

    def get_extra_state(self):
        return {"seen": self.seen}

    def set_extra_state(self, state):
        self.seen = state["seen"]


def test_what_modules_keep_beside_tensors_comes_back():
    model = nn.Sequential(WithState(2, 2))
    model[0].seen = 7
    other = nn.Sequential(WithState(2, 2))
    restore(keep(model), other)
    assert other[0].seen == 7
