"""A list op whose like was called before keeps its schedule; whatever that depends on, it sees."""

import copy
from collections import Counter
from itertools import product

import narrow_runs
import pytest
import torch
from pairs import assert_same, mlp, on_disk, same_training, train
from planned_runs import adamw, begun, expected, gpt, ids, offloaded, same, values
from planned_runs import train as train_gpt
from sampled import crossed, sampled, sampled_rows
from torch import nn, optim

import zcompile
from zcompile.frontend.offload import session_behind
from zcompile.ir.schedule import Borrow, Run
from zcompile.planner import step_plan
from zcompile.runtime.eager import clipping, dispatch, streaming
from zcompile.runtime.eager.clipping import SCALES
from zcompile.runtime.gradients import on_device
from zcompile.runtime.relocate import move
from zcompile.runtime.widening import WIDE_BYTES, most_wide

WHERE = {
    "disk": {},
    "host": {"host_memory": "4MiB"},
    "far host": {"host_memory": "4MiB", "throttle": {"h2d": "1GB/s"}},
}
FORMS = {"fused": {"fused": True}, "foreach": {"foreach": True}}


def group_of(optimizer: optim.Optimizer, **options: object) -> None:
    optimizer.param_groups[0].update(options)


def freeze(model, optimizer):
    model[0].weight.requires_grad_(False)
    model[0].weight.grad = None


def thaw_and_add(model, optimizer):
    extra = model[2].bias
    kept = [p for p in optimizer.param_groups[0]["params"] if p is not extra]
    optimizer.param_groups[0]["params"] = kept
    optimizer.add_param_group({"params": [extra], "lr": 0.1})


def lose_a_state(model, optimizer):
    del optimizer.state[model[0].bias]


def reload_states(model, optimizer):
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))


def clip(model, optimizer):
    nn.utils.clip_grad_norm_(model.parameters(), 1e-3)


def skip_one(model, optimizer):
    model[2].weight.grad = None


def other_gradient(model, optimizer):
    model[0].weight.grad = torch.ones(32, 16)


def strided_gradient(model, optimizer):
    model[0].weight.grad = torch.ones(16, 32).t()


def new_data(model, optimizer):
    model[0].weight.data = torch.full((32, 16), 0.5)


CHANGES = {
    "lr": lambda m, o: group_of(o, lr=0.3),
    "lr as a tensor": lambda m, o: group_of(o, lr=torch.tensor(0.3), foreach=False),
    "betas": lambda m, o: group_of(o, betas=(0.5, 0.6)),
    "weight decay": lambda m, o: group_of(o, weight_decay=0.5),
    "maximize": lambda m, o: group_of(o, maximize=True),
    "foreach": lambda m, o: group_of(o, fused=False, foreach=True),
    "a loop": lambda m, o: group_of(o, fused=False, foreach=False),
    "frozen": freeze,
    "another group": thaw_and_add,
    "a state anew": lose_a_state,
    "states reloaded": reload_states,
    "clipped": clip,
    "no gradient": skip_one,
    "another gradient": other_gradient,
    "a gradient that lies otherwise": strided_gradient,
    "new values": new_data,
}


@pytest.mark.parametrize(("change", "where", "form"), crossed(CHANGES, WHERE, FORMS))
def test_a_change_between_two_steps_is_seen(change, where, form, tmp_path):
    def run(model, call):
        optimizer = optim.AdamW(model.parameters(), lr=1e-2, **FORMS[form])
        losses = train(call, optimizer, 3)
        losses += train(call, optimizer, 1, before=lambda: CHANGES[change](model, optimizer))
        return losses + train(call, optimizer, 2)

    same_training(run, tmp_path, "eager", **WHERE[where])


@pytest.mark.parametrize("to_none", [False, True])
def test_gradients_may_stay_between_steps(to_none, tmp_path):
    def run(model, call):
        optimizer = optim.AdamW(model.parameters(), lr=1e-2, fused=True)
        for step in range(4):
            call(torch.full((2, 16), 0.1 * step)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=to_none if step != 1 else not to_none)

    same_training(run, tmp_path, "eager")


def test_two_groups_of_one_shape_take_turns(tmp_path):
    def make():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16))

    def run(model, call):
        optimizer = optim.AdamW(
            [
                {"params": model[0].parameters(), "lr": 1e-2},
                {"params": model[1].parameters(), "lr": 1e-1},
            ],
            fused=True,
        )
        for step in range(4):
            call(torch.full((2, 16), 0.1 * step)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()

    same_training(run, tmp_path, "eager", make)


def without(optimizer, params):
    params[-1].grad = None


def at_rest(optimizer, params):
    params[0].requires_grad_(False)
    params[0].grad = None


def kept(optimizer, params):
    for param in params:
        param.grad.zero_()


PLANNED = {
    "lr": lambda o, ps: group_of(o, lr=0.3),
    "foreach": lambda o, ps: group_of(o, fused=False, foreach=True),
    "no gradient": without,
    "frozen": at_rest,
    "zeros": kept,
    "a state anew": lambda o, ps: o.state.pop(ps[1]),
    "states reloaded": lambda o, ps: reload_states(None, o),
    "clipped": lambda o, ps: nn.utils.clip_grad_norm_(ps, 1e-3),
}


@pytest.mark.parametrize("change", sampled(PLANNED, "frozen"))
def test_a_change_is_seen_where_all_rests_on_the_device(change):
    """As in eager, before, in and after the step in which it happens."""

    def run(model, call):
        optimizer, params = adamw(model), list(model.parameters())
        for step in range(7):
            nothing = [] if step != 4 else [lambda: PLANNED[change](optimizer, params)]
            train_once(call, optimizer, lambda calls=nothing: [call() for call in calls], step)

    plain, (model, compiled) = gpt(), offloaded(device_memory="16MiB")
    run(plain, plain)
    run(model, compiled)
    assert same(model, values(plain))


def test_rows_are_made_once_for_all_steps(counted, tmp_path):
    model = on_disk(mlp(), tmp_path)
    optimizer = optim.AdamW(model.parameters(), fused=True)
    optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    train(model, optimizer, 6)
    assert counted["rows"] <= 3, "the first makes states; in the second they have their kind"
    assert counted["again"] >= 3


def clipped_as_usual(params):
    nn.utils.clip_grad_norm_(params, 1e-3)


def scaled(by):
    def scale(params):
        with torch.no_grad():
            torch._foreach_mul_([p.grad for p in params], by)

    return scale


CLIPPED_OTHERWISE = {
    "not at all": lambda ps: None,
    "twice": lambda ps: [clipped_as_usual(ps) for _ in range(2)],
    "one by one": lambda ps: nn.utils.clip_grad_norm_(ps, 1e-3, foreach=False),
    "some": lambda ps: clipped_as_usual(ps[:2]),
    "all, in two groups": lambda ps: [clipped_as_usual(ps[:2]), clipped_as_usual(ps[2:])],
    "by a number": scaled(0.25),
    "by a tensor of another dtype": scaled(torch.tensor(0.25, dtype=torch.float64)),
    "read": lambda ps: [clipped_as_usual(ps), float(ps[0].grad.sum())],
    "a part": lambda ps: [clipped_as_usual(ps), ps[0].grad[0].mul_(0.5)],
}


@pytest.mark.parametrize(("otherwise", "where"), crossed(CLIPPED_OTHERWISE, WHERE))
def test_a_step_that_clips_otherwise_is_seen(otherwise, where, tmp_path):
    def run(model, call):
        optimizer = optim.AdamW(model.parameters(), lr=1e-2, fused=True)
        params = list(model.parameters())
        losses = []
        for step in range(7):
            clip = CLIPPED_OTHERWISE[otherwise] if step == 4 else clipped_as_usual
            losses += train(call, optimizer, 1, before=lambda clip=clip: clip(params))
        return losses

    same_training(run, tmp_path, "eager", **WHERE[where])


@pytest.mark.parametrize("where", WHERE)
def test_rows_are_made_once_where_clipping_waits_for_the_step(counted, where, tmp_path):
    deferred = []

    def run(model, call):
        optimizer, params = optim.AdamW(model.parameters(), fused=True), list(model.parameters())

        def clip():
            clipped_as_usual(params)
            deferred.extend(len(p.grad.entry.deferred) for p in params if hasattr(p.grad, "entry"))

        return train(call, optimizer, 6, before=clip)

    same_training(run, tmp_path, "eager", **WHERE[where])
    assert set(deferred) == {1}
    assert counted["rows"] <= 3, "the first makes states; in the second they have their kind"
    assert counted["again"] >= 3


@pytest.mark.slow
def test_a_plan_makes_them_anew_once(counted):
    model, compiled, optimizer = begun(3, device_memory="16MiB")
    rows = counted["rows"]
    train_gpt(model, compiled, optimizer, 3, 6, clip=False)
    assert counted["rows"] <= rows + 1
    assert counted["again"] >= 2


def test_what_rests_on_the_device_is_updated_in_one_call():
    model, compiled, optimizer = begun(3, device_memory="16MiB")
    train_gpt(model, compiled, optimizer, 3, 5)
    assert same(model, expected(adamw, end=5))
    session = session_behind(model)
    (schedule,) = {
        r.schedule.serial: r.schedule
        for known in session.repeats.values()
        for r in known
        if r.schedule.name == "_fused_adamw_"
    }.values()
    assert sum(isinstance(x, Run) for x in schedule.instructions) == 1
    assert sum(isinstance(x, Borrow) for x in schedule.instructions) == 4 * len(
        list(model.parameters())
    )


@pytest.mark.slow  # its bits are seen above
def test_clipping_what_rests_on_the_device_is_not_put_off():
    model, compiled, optimizer = begun(3, device_memory="16MiB")
    seen = []

    def look():
        nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
        seen.extend(p.grad.entry.deferred for p in model.parameters())

    train_once(compiled, optimizer, look)
    assert len(seen) == len(list(model.parameters()))
    assert not any(seen)
    assert any(kind[0] in SCALES for kind in session_behind(model).repeats)


def train_once(compiled, optimizer, before, step=0):
    tokens = ids(step)
    logits = compiled(tokens[:, :-1])
    nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).backward()
    before()
    optimizer.step()
    optimizer.zero_grad()


def test_a_write_is_still_counted_for_backward(tmp_path):
    """A backward after its parameters were written is refused, as for plain tensors."""
    torch._dynamo.reset()
    model = on_disk(mlp(), tmp_path)
    compiled = torch.compile(model, backend="zinf")
    optimizer = optim.AdamW(model.parameters(), fused=True)
    train(compiled, optimizer, 4)
    loss = compiled(torch.ones(2, 16)).sum()
    for param in model.parameters():
        param.grad = torch.ones_like(param).cpu()
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_nothing_is_kept_of_a_model_that_is_gone(tmp_path):
    plain, tiered = mlp(), on_disk(mlp(), tmp_path)
    for model in (plain, tiered):
        for _ in range(2):
            train(model, optim.AdamW(model.parameters(), fused=True), 3)
    assert_same(plain, tiered)
    session = session_behind(tiered)
    assert all(len(known) <= 8 for known in session.repeats.values())


def test_a_plain_tensor_may_stand_where_a_tiered_one_was(tmp_path):
    model = on_disk(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), tmp_path)
    first, second = model[0].weight, model[1].weight
    before, plain = first.detach().clone(), torch.ones(8, 8)
    with torch.no_grad():
        for _ in range(4):  # so that the call is kept
            torch._foreach_mul_([first, second], 2.0)
        torch._foreach_mul_([first, plain], 2.0)
    assert torch.equal(first, 32 * before)
    assert plain.eq(2.0).all()


class Scaled(nn.Module):
    """Has a gradient of one number."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(64, 64), nn.Linear(64, 64)
        self.scale = nn.Parameter(torch.tensor(0.5))

    def forward(self, x):
        return self.second(torch.relu(self.first(x))) * self.scale


def step_with(model, call, optimizer, change, seed):
    call(
        torch.randn(8, 64, generator=torch.Generator().manual_seed(seed))
    ).square().mean().backward()
    with torch.no_grad():
        change(model)
    optimizer.step()
    optimizer.zero_grad()


def send_one_away(model):
    """From here on some gradients rest on the device, and one does not."""
    session, grads = session_behind(model), grads_of(model.parameters())
    session.settle()
    assert move(session, model.second.weight.grad.entry, "host")
    assert {grad.entry.on_device for grad in grads} == {True, False}


@pytest.fixture(scope="module")
def mixed():
    """A model with gradients of both kinds, and plain PyTorch beside: of each a model, how it is
    called, and its optimizer."""
    torch._dynamo.reset()
    room = {"device_memory": "16MiB", "host_memory": "64MiB"}
    tiered = zcompile.offload(Scaled(), device="cpu", **room)
    plain = Scaled()
    pairs = tuple(
        (model, call, optim.AdamW(model.parameters(), lr=1e-2, fused=True))
        for model, call in ((tiered, torch.compile(tiered, backend="zinf")), (plain, plain))
    )
    for step in range(6):
        for pair in pairs:
            step_with(*pair, lambda model: clipped_as_usual(model.parameters()), step)
    return pairs


def grads_of(params):
    return [p.grad for p in params]


def by_one_of_them(params):
    scale, *others = sorted(params, key=lambda p: p.dim())
    torch._foreach_mul_([*grads_of(others), scale.grad], scale.grad)


def with_one_twice(params):
    torch._foreach_mul_([*grads_of(params), params[0].grad, params[-1].grad], 0.3)


def clipped_and_scaled_back(params):
    clipped_as_usual(params)
    torch._foreach_mul_(grads_of(params), torch.tensor(1e3))


MIXED = {
    "twice": CLIPPED_OTHERWISE["twice"],
    "some": CLIPPED_OTHERWISE["some"],
    "by a number": scaled(0.25),
    "by an integer": scaled(torch.tensor(3)),
    "one twice in the list": with_one_twice,
    "clipped and scaled back": clipped_and_scaled_back,
    "by one of them, the last": by_one_of_them,
    "more often than changes wait": lambda ps: [scaled(0.9)(ps) for _ in range(6)],
}


@pytest.mark.parametrize("otherwise", MIXED)
def test_gradients_on_the_device_and_elsewhere_are_multiplied_as_in_eager(otherwise, mixed):
    def change(model):
        if hasattr(model.scale, "entry"):
            send_one_away(model)
        MIXED[otherwise](list(model.parameters()))

    for step in range(2):
        for pair in mixed:
            step_with(*pair, change, 100 + step)
    (tiered, _, _), (plain, _, _) = mixed
    assert_same(plain, tiered)


def test_a_list_of_which_one_cannot_wait_is_left_as_it_was(mixed, monkeypatch):
    """Of some gradients a change is deferred, others are multiplied: neither, if one fails."""

    def fails_at_the_last(entry):
        seen.append(entry)
        if len(seen) == most:
            raise OSError("it cannot be written")

    def change(model):
        nonlocal most
        send_one_away(model)
        assert move(session_behind(model), model.first.bias.grad.entry, "host")
        grads = grads_of(model.parameters())
        most = sum(not g.entry.on_device for g in grads)
        before = [g.on_host().clone() for g in grads]
        with monkeypatch.context() as patch:
            patch.setattr(clipping, "before_write", fails_at_the_last)
            with pytest.raises(OSError, match="it cannot be written"):
                torch._foreach_mul_(grads, 0.5)
        assert 1 < most < len(grads)
        assert all(map(torch.equal, (g.on_host() for g in grads), before))

    seen, most = [], 0
    (tiered, call, optimizer), plain = mixed
    step_with(tiered, call, optimizer, change, 200)
    step_with(*plain, lambda model: None, 200)
    assert_same(plain[0], tiered)


# --- Gradients that rest narrow, and copies that are written along ---

AUTOCAST = {
    "copies": {},
    "room for all": {"device_memory": "64MiB"},
    "nothing is planned": {"residency": False},
}
"""How a model under autocast is offloaded: by `narrow_runs`, where a plan may keep copies."""


@pytest.fixture
def copies_pay(monkeypatch):
    monkeypatch.setattr(step_plan, "NARROW_PAYS", 0.0)
    monkeypatch.setattr(step_plan, "LATE_PAYS", float("inf"))


def autocast_pair(how, clip=None):
    """Plain training under autocast, and the same offloaded."""
    plain, model = narrow_runs.mlp(), narrow_runs.mlp()
    model, call = narrow_runs.offloaded(model, **AUTOCAST[how])
    return narrow_runs.Run(plain, plain, clip=clip), narrow_runs.Run(model, call, clip=clip)


def the_same(plain, run):
    values_of = narrow_runs.values
    return run.losses == plain.losses and all(
        map(torch.equal, values_of(plain.model), values_of(run.model))
    )


@pytest.mark.parametrize(
    ("how", "clip"), sampled_rows(product(AUTOCAST, [None, 1e-3]), ("copies", 1e-3))
)
def test_rows_are_made_once_of_gradients_that_rest_narrow(how, clip, counted, copies_pay):
    plain, run = (each.steps(0, 3) for each in autocast_pair(how, clip))
    run.backward(3)
    plain.backward(3)
    grads = [p.grad.entry for p in run.model.parameters()]
    assert all(entry.narrow is not None for entry in grads)
    assert all(bool(p.entry.copies) is (how == "copies") for p in run.model.parameters())
    before = dict(counted)
    for each in (plain, run):
        each.step()
        each.steps(4, 7)
    assert counted == {"rows": before["rows"], "again": before["again"] + 4}
    assert the_same(plain, run)


def test_copies_that_are_made_anew_change_nothing_of_another_model(tmp_path, monkeypatch):
    """A step that writes copies in another dtype along tells nobody that an entry is not what it
    was."""
    monkeypatch.setattr(step_plan, "NARROW_PAYS", 0.0)
    monkeypatch.setattr(step_plan, "LATE_PAYS", float("inf"))
    other = on_disk(mlp(), tmp_path)
    optimizer = optim.AdamW(other.parameters(), fused=True)
    run = narrow_runs.Run(*narrow_runs.offloaded(narrow_runs.mlp())).steps(0, 4)
    assert all(p.entry.copies for p in run.model.parameters())
    train(other, optimizer, 4)
    looked = []
    look = dispatch.list_call

    def looks(cls, func, args, kwargs):
        looked.extend([func] * (func._schema.name == "aten::_fused_adamw_"))
        return look(cls, func, args, kwargs)

    monkeypatch.setattr(dispatch, "list_call", looks)
    train(other, optimizer, 1)
    assert not looked, "the operands of the step are kept"
    run.steps(4, 6)
    assert looked, "of the one with copies they are not"
    looked.clear()
    train(other, optimizer, 2)
    assert not looked


def ops_of_a_step(run):
    """Op -> how often a step of an optimizer, with clipping, called it: list ops also as torch was
    asked for them, with tiered tensors."""
    run.backward(4)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as seen:
        run.step()
    return Counter(event.name.removeprefix("aten::") for event in seen.events())


WEIGHT_BYTES = 4 * narrow_runs.WIDTH**2
BATCHES = {"at once": (1 << 24, 1), "two at once": (2 * WEIGHT_BYTES, 2), "one by one": (1, 4)}
"""Bytes that may be widened at once, and so in how many calls those of four weights are."""


@pytest.fixture
def wide_at_once(monkeypatch):
    """Lets that many bytes be wide at once."""

    def so_many(most):
        for user in (streaming, on_device):
            monkeypatch.setattr(user, "most_wide", lambda device_bytes: most)

    return so_many


def test_a_small_device_has_a_small_part_of_itself_for_wide_values():
    assert most_wide(1 << 36) == WIDE_BYTES
    assert most_wide(1 << 22) == 1 << 16


@pytest.mark.parametrize(("most", "calls"), BATCHES.values(), ids=BATCHES)
def test_gradients_that_rest_narrow_are_widened_and_stepped_by_few_calls(most, calls, wide_at_once):
    wide_at_once(most)
    plain, run = (each.steps(0, 4) for each in autocast_pair("room for all", 1e-3))
    assert all(p.grad is None for p in run.model.parameters())
    ops = ops_of_a_step(run)
    assert ops["_foreach_copy_"] == calls
    assert ops["_fused_adamw_"] == ops["_foreach_mul_"] == 1 + calls
    plain.steps(4, 5)
    assert the_same(plain, run)


@pytest.mark.parametrize(("most", "calls"), BATCHES.values(), ids=BATCHES)
def test_norms_of_gradients_that_stay_narrow_are_taken_by_few_calls(most, calls, wide_at_once):
    wide_at_once(most)
    plain, run = (each.steps(0, 4) for each in autocast_pair("room for all", 1e-3))
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as seen:
        run.backward(4)
    ops = Counter(event.name for event in seen.events())
    homes = {p.grad.entry.home for p in run.model.parameters()}
    assert len(homes) == 2, "they are measured together, wherever they rest on the device"
    assert ops["aten::_foreach_copy_"] == ops["aten::_foreach_norm"] == calls
    run.step()
    plain.steps(4, 5)
    assert the_same(plain, run)


def test_nothing_is_widened_to_be_measured_where_nobody_clips():
    _, run = (each.steps(0, 4) for each in autocast_pair("room for all"))
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as seen:
        run.backward(4)
    assert not any(event.name == "aten::_foreach_copy_" for event in seen.events())
    assert all(p.grad.entry.narrow is not None for p in run.model.parameters())


def wide_gradient(run):
    run.model[0].weight.grad = torch.ones(narrow_runs.WIDTH, narrow_runs.WIDTH)


def written_gradient(run):
    with torch.no_grad():
        run.model[0].weight.grad[0].mul_(0.5)


def written_weight(run):
    with torch.no_grad():
        run.model[0].weight.mul_(0.5)


def written_gradients(run):
    with torch.no_grad():
        torch._foreach_mul_([p.grad for p in run.model.parameters()], 0.5)


AUTOCAST_CHANGES = {
    "summed": lambda run: run.backward(99),
    "a wide gradient": wide_gradient,
    "a gradient is written": written_gradient,
    "all gradients are written": written_gradients,
    "a weight is written": written_weight,
    "no gradient": lambda run: setattr(run.model[0].weight, "grad", None),
    "foreach": lambda run: group_of(run.optimizer, fused=False, foreach=True),
    "states reloaded": lambda run: reload_states(None, run.optimizer),
    "weights reloaded": lambda run: run.model.load_state_dict(
        {name: value * 0.5 for name, value in run.model.state_dict().items()}
    ),
}


@pytest.mark.parametrize(
    ("change", "how"), crossed(AUTOCAST_CHANGES, AUTOCAST), ids=lambda name: name
)
def test_a_change_is_seen_where_gradients_rest_narrow(change, how, copies_pay):
    plain, run = (each.steps(0, 5) for each in autocast_pair(how))
    for each in (plain, run):
        each.backward(5)
        AUTOCAST_CHANGES[change](each)
        each.step()
        each.steps(6, 8)
    assert the_same(plain, run)
