"""Stock optimizers on tiered parameters: every bit as on plain ones, state and all."""

import copy

import pytest
import torch
from pairs import assert_equal, assert_same, entries, mlp, on_disk, plain_of, same_training, train
from torch import nn, optim
from torch.optim import lr_scheduler

import zcompile
from zcompile.frontend.offload import session_behind
from zcompile.ir.types import EntryKind

FORMS = {"fused": {"fused": True}, "foreach": {"foreach": True}, "loop": {"foreach": False}}
FUSED = {
    "adamw": (optim.AdamW, {}),
    "adam": (optim.Adam, {"weight_decay": 0.1}),
    "amsgrad": (optim.Adam, {"amsgrad": True}),
    "maximize": (optim.AdamW, {"maximize": True}),
    "sgd": (optim.SGD, {"weight_decay": 0.01}),
    "momentum": (optim.SGD, {"momentum": 0.9, "dampening": 0.1}),
    "nesterov": (optim.SGD, {"momentum": 0.9, "nesterov": True}),
    "adagrad": (optim.Adagrad, {}),
}
OTHERS = {
    "rmsprop": (optim.RMSprop, {"momentum": 0.9, "centered": True}),
    "nadam": (optim.NAdam, {}),
    "radam": (optim.RAdam, {}),
    "adamax": (optim.Adamax, {}),
    "adadelta": (optim.Adadelta, {}),
    "rprop": (optim.Rprop, {}),
    "asgd": (optim.ASGD, {}),
}
CASES = [(name, form) for name in FUSED for form in FORMS] + [
    (name, form) for name in OTHERS for form in ("foreach", "loop")
]


def assert_same_state(plain: optim.Optimizer, tiered: optim.Optimizer) -> None:
    ours, theirs = tiered.state_dict(), plain.state_dict()
    assert ours["param_groups"] == theirs["param_groups"]
    assert ours["state"].keys() == theirs["state"].keys()
    for index, state in theirs["state"].items():
        for key, value in state.items():
            if isinstance(value, torch.Tensor):
                assert_equal(value, ours["state"][index][key])
            else:
                assert ours["state"][index][key] == value


def both(tmp_path, make_optimizer, steps=3, **fields):
    """Trains twins; returns models and optimizers, compared."""
    plain, tiered = mlp(), on_disk(mlp(), tmp_path, **fields)
    first, second = make_optimizer(plain), make_optimizer(tiered)
    assert train(plain, first, steps) == train(tiered, second, steps)
    assert_same(plain, tiered)
    assert_same_state(first, second)
    return plain, tiered, first, second


@pytest.mark.parametrize(("name", "form"), CASES)
def test_a_stock_optimizer_gives_the_same_bits(name, form, tmp_path):
    kind, options = {**FUSED, **OTHERS}[name]
    *_, optimizer = both(
        tmp_path, lambda m: kind(m.parameters(), lr=1e-2, **options, **FORMS[form])
    )
    wide = [
        v
        for s in optimizer.state.values()
        for v in s.values()
        if isinstance(v, torch.Tensor) and v.dim()
    ]
    assert all(hasattr(value, "entry") for value in wide), "the state rests in the store"


@pytest.mark.parametrize(
    "make",
    [
        lambda m: optim.Adafactor(m.parameters()),
        lambda m: optim.AdamW(m.parameters(), lr=torch.tensor(1e-2)),
        lambda m: optim.AdamW(m.parameters(), lr=torch.tensor(1e-2), fused=True),
        lambda m: optim.Adam(m.parameters(), weight_decay=0.1, decoupled_weight_decay=True),
    ],
    ids=["adafactor", "tensor lr", "fused tensor lr", "decoupled"],
)
def test_other_ways_of_asking_give_the_same_bits(make, tmp_path):
    both(tmp_path, make)


def test_lbfgs_gives_the_same_bits(tmp_path):
    x, y = torch.randn(8, 16), torch.randint(4, (8,))

    def run(model, call):
        optimizer = optim.LBFGS(model.parameters(), lr=0.1, max_iter=3)

        def closure():
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(call(x), y)
            loss.backward()
            return loss

        return [optimizer.step(closure).item() for _ in range(2)]

    same_training(run, tmp_path, "eager")


@torch.no_grad()
def in_step(model):
    """Whether ops on the parameters count as an optimizer's; False for a plain model."""
    return hasattr(model[0].weight, "entry") and session_behind(model).in_step


def test_what_a_closure_computes_is_no_part_of_the_step(tmp_path):
    x, y = torch.randn(8, 16), torch.randint(4, (8,))

    def run(model, call, **how):
        optimizer = optim.AdamW(model.parameters(), **how)

        def closure():
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(call(x), y)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            assert not in_step(model)
            return loss

        return [optimizer.step(closure).item(), optimizer.step(closure=closure).item()]

    same_training(run, tmp_path, "eager")


def test_gradients_that_a_closure_assigns_are_those_of_the_step(tmp_path):
    def run(model, call):
        optimizer = optim.AdamW(model.parameters())

        def closure():
            for param in model.parameters():
                param.grad = torch.ones_like(param).cpu()

        optimizer.step(closure)

    _, tiered = same_training(run, tmp_path, "eager")
    assert "0.weight.grad" in entries(tiered, EntryKind.GRAD)


def test_the_optimizer_of_plain_adapters_has_the_steps_of_a_frozen_model_planned(tmp_path):
    def make():
        torch.manual_seed(0)
        base = mlp().requires_grad_(False)
        return base

    def run(model, call):
        torch.manual_seed(1)
        adapter, idle = nn.Linear(16, 16), nn.Linear(2, 2)
        optimizer = optim.AdamW(adapter.parameters())
        stranger = optim.AdamW(idle.parameters())
        losses = []
        for _ in range(4):
            loss = call(adapter(torch.ones(4, 16))).square().sum()
            stranger.step()  # before backward: it is no step of the model
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses

    _, tiered = same_training(run, tmp_path, "compiled", make, machine="desktop-24gb")
    stats = zcompile.stats(tiered)
    assert stats["steps"] == 4
    assert stats["predicted"] is not None


def test_an_optimizer_of_others_ends_no_step_of_a_model_that_is_trained(tmp_path):
    model = on_disk(mlp(), tmp_path)
    call = torch.compile(model, backend="zinf")
    call(torch.ones(4, 16)).sum().backward()
    optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1).step()
    assert zcompile.stats(model)["steps"] == 0


def test_sparse_gradients_stay_sparse(tmp_path):
    def make():
        torch.manual_seed(0)
        return nn.Embedding(10, 4, sparse=True)

    def run(model, call):
        optimizer = optim.SparseAdam(list(model.parameters()))
        for _ in range(2):
            call(torch.tensor([1, 2, 1])).sum().backward()
            assert model.weight.grad.is_sparse
            optimizer.step()
            optimizer.zero_grad()

    same_training(run, tmp_path, "eager", make)


def test_groups_keep_their_options(tmp_path):
    both(
        tmp_path,
        lambda m: optim.AdamW(
            [
                {"params": [m[0].weight, m[2].weight], "weight_decay": 0.1},
                {"params": [m[0].bias, m[2].bias], "weight_decay": 0.0, "lr": 1e-3},
            ],
            lr=1e-2,
            fused=True,
        ),
    )


@pytest.mark.parametrize(
    "make",
    [
        lambda o: lr_scheduler.CosineAnnealingLR(o, 5),
        lambda o: lr_scheduler.OneCycleLR(o, 0.1, total_steps=6),
        lambda o: lr_scheduler.LambdaLR(o, lambda step: 0.9**step),
        lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=0),
    ],
    ids=["cosine", "one cycle", "lambda", "plateau"],
)
def test_a_scheduler_changes_both_alike(make, tmp_path):
    def run(model, call):
        optimizer = optim.AdamW(model.parameters(), lr=1e-2, fused=True)
        scheduler = make(optimizer)
        losses = []
        for _ in range(4):
            losses += train(call, optimizer, 1)
            plateau = isinstance(scheduler, lr_scheduler.ReduceLROnPlateau)
            scheduler.step(losses[-1]) if plateau else scheduler.step()
        return losses, [group["lr"] for group in optimizer.param_groups]

    same_training(run, tmp_path, "eager")


@pytest.mark.parametrize("fused", [False, True])
def test_a_grad_scaler_unscales_skips_and_updates(fused, tmp_path):
    def run(model, call):
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        optimizer = optim.AdamW(model.parameters(), lr=1e-2, fused=fused)
        seen = []
        for step in range(3):
            x = torch.full((8, 16), 0.1)
            scaler.scale(call(x).square().mean()).backward()
            if step == 1:
                model[0].weight.grad.mul_(float("inf"))
            if not fused:
                scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            seen.append(scaler.get_scale())
        return seen

    same_training(run, tmp_path, "eager")


def test_a_step_smaller_than_a_parameter_streams_it(tmp_path):
    def make():
        torch.manual_seed(0)
        return nn.Linear(96, 512)

    def run(model, call):
        optimizer = optim.AdamW(model.parameters(), lr=1e-2, fused=True)
        for step in range(2):
            torch.manual_seed(step)
            for param in model.parameters():
                param.grad = torch.randn_like(param).cpu()
            optimizer.step()

    _, tiered = same_training(run, tmp_path, "eager", make, device_memory="64KiB")
    assert tiered.weight.nbytes > 2 * 64 * 1024


def test_a_copied_optimizer_goes_its_own_way(tmp_path):
    plain, tiered, first, second = both(tmp_path, lambda m: optim.AdamW(m.parameters()))
    branch, branch_optimizer = copy.deepcopy((tiered, second))
    expected, expected_optimizer = copy.deepcopy((plain, first))
    train(branch, branch_optimizer, 2)
    train(expected, expected_optimizer, 2)
    assert_same(expected, branch)
    assert_same(plain, tiered)
    assert_same_state(expected_optimizer, branch_optimizer)


def test_state_of_a_plain_optimizer_becomes_tiered_and_continues(tmp_path):
    plain = mlp()
    first = optim.AdamW(plain.parameters(), fused=True)
    train(plain, first)
    tiered = on_disk(mlp(), tmp_path)
    second = optim.AdamW(tiered.parameters(), fused=True)
    tiered.load_state_dict(plain.state_dict())
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    assert train(plain, first) == train(tiered, second)
    assert_same(plain, tiered)
    assert_same_state(first, second)
    assert len(entries(tiered, EntryKind.STATE)) == 8


def test_state_of_another_offloaded_model_is_copied(tmp_path):
    _, source, _, optimizer = both(tmp_path, lambda m: optim.AdamW(m.parameters()))
    target = on_disk(mlp(), tmp_path)
    target.load_state_dict(source.state_dict())
    second = optim.AdamW(target.parameters())
    second.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    before = [value.detach().cpu() for value in source.state_dict().values()]
    train(target, second)
    train(source, optimizer)
    for ours, theirs in zip(source.parameters(), target.parameters(), strict=True):
        assert torch.equal(plain_of(ours), plain_of(theirs))
    assert not torch.equal(before[0], plain_of(target[0].weight))


def test_states_have_the_names_people_know(tmp_path):
    _, tiered, _, _ = both(tmp_path, lambda m: optim.AdamW(m.parameters()))
    assert entries(tiered, EntryKind.STATE)[:2] == ["0.bias.exp_avg", "0.bias.exp_avg_sq"]


def test_a_plain_optimizer_is_left_alone(tmp_path):
    on_disk(mlp(), tmp_path)
    plain = mlp()
    optimizer = optim.AdamW(plain.parameters())
    train(plain, optimizer)
    assert all(type(v) is torch.Tensor for s in optimizer.state.values() for v in s.values())


def test_averaged_models_follow(tmp_path):
    def run(model, call):
        ema = optim.swa_utils.AveragedModel(
            model, multi_avg_fn=optim.swa_utils.get_ema_multi_avg_fn(0.9)
        )
        mean, own = optim.swa_utils.AveragedModel(model), copy.deepcopy(model)
        optimizer = optim.AdamW(model.parameters(), lr=1e-2)
        for _ in range(2):
            train(call, optimizer, 1)
            ema.update_parameters(model)
            mean.update_parameters(model)
            with torch.no_grad():
                for a, b in zip(own.parameters(), model.parameters(), strict=True):
                    a.mul_(0.9).add_(b, alpha=0.1)
                    a.lerp_(b, 0.1)
                    a.data = a.data * 0.9 + b.data * 0.1
        return [p.sum().item() for m in (ema, mean, own) for p in m.parameters()]

    same_training(run, tmp_path, "eager")


class Orthogonal(optim.Optimizer):
    """A third-party optimizer: a matrix product per parameter, which no stream can do."""

    def __init__(self, params):
        super().__init__(params, {})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for param in group["params"]:
                if param.dim() == 2:
                    param.add_(param.grad @ param.grad.t() @ param.grad, alpha=-0.1)


def test_an_optimizer_of_ones_own_works_tensor_by_tensor_and_is_told_once(tmp_path, caplog):
    both(tmp_path, lambda m: Orthogonal(m.parameters()))
    told = [r for r in caplog.records if "gathered whole" in r.message]
    assert [r.message.split()[0] for r in told] == ["Orthogonal"]


def test_a_streamed_optimizer_is_told_nothing(tmp_path, caplog):
    both(tmp_path, lambda m: optim.AdamW(m.parameters(), fused=True))
    assert not [r for r in caplog.records if "gathered whole" in r.message]


def test_an_optimizer_that_is_told_nothing_chooses_as_for_plain_tensors(tmp_path, monkeypatch):
    """On CUDA it takes list kernels, which round otherwise than the loop does."""
    from torch.optim import optimizer

    monkeypatch.setattr(optimizer, "_get_foreach_kernels_supported_devices", lambda: ["cpu"])
    for model in (mlp(), on_disk(mlp(), tmp_path)):
        params = list(model.parameters())
        assert optimizer._default_to_fused_or_foreach(params, False) == (False, True)


@pytest.mark.parametrize("options", [{"foreach": True}, {"foreach": False}])
def test_a_backward_after_the_step_of_its_weights_is_refused_as_by_torch(options, tmp_path):
    for model in (mlp(), on_disk(mlp(), tmp_path)):
        optimizer = optim.AdamW(model.parameters(), **options)
        for _ in range(3):  # the third step is like the second
            model(torch.ones(2, 16)).sum().backward()
            before = [param._version for param in model.parameters()]
            stale = model(torch.ones(2, 16)).square().sum()
            optimizer.step()
            assert all(p._version > v for p, v in zip(model.parameters(), before, strict=True))
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                stale.backward()
            optimizer.zero_grad()


@pytest.mark.parametrize(
    "write",
    [
        lambda ts: torch._foreach_add_(ts, 1.0),
        lambda ts: torch._foreach_mul_(ts, torch._foreach_norm(ts)),
        lambda ts: torch._foreach_copy_(ts, [torch.zeros_like(t) for t in ts]),
    ],
)
def test_list_ops_count_what_they_write_as_torch_does(write, tmp_path):
    for model in (mlp(), on_disk(mlp(), tmp_path)):
        tensors = [param.detach() for param in model.parameters()]
        for _ in range(3):
            before = [t._version for t in tensors]
            write(tensors)
            assert all(t._version > v for t, v in zip(tensors, before, strict=True))
