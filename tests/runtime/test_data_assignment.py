"""Programs with `p.data = x` do the same on tiered parameters as on plain ones."""

import copy
import gc
import io
import logging

import numpy
import pytest
import torch
from pairs import (
    Holder,
    assert_equal,
    assert_same,
    batches,
    entries,
    mlp,
    on_disk,
    parameter_pair,
    plain_of,
)
from sampled import crossed
from torch import nn, optim
from torch.nn.utils import parameters_to_vector, vector_to_parameters
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import zcompile
from zcompile.errors import ParameterChanged, Unsupported
from zcompile.ir import handles
from zcompile.runtime.eager.unbacked import Unbacked
from zcompile.runtime.store import sources


def same_program(program, tmp_path, mode="eager", make=mlp, **fields):
    """Runs `program(model, call)` on a plain and a tiered model; compares what it returns."""
    torch._dynamo.reset()
    plain, tiered = make(), on_disk(make(), tmp_path, **fields)
    torch.manual_seed(7)
    expected = program(plain, plain)
    torch.manual_seed(7)
    call = torch.compile(tiered, backend="zinf") if mode == "compiled" else tiered
    found = program(tiered, call)
    assert len(expected) == len(found)
    for a, b in zip(expected, found, strict=True):
        assert_equal(a, b)
    assert_same(plain, tiered)
    return plain, tiered


def values(tensors):
    return [plain_of(t).clone() for t in tensors]


def loss_of(call, seed=1):
    ((x, y),) = batches(1)
    return nn.functional.cross_entropy(call(x * seed), y)


def step(call, optimizer, seed=1):
    loss_of(call, seed).backward()
    optimizer.step()
    optimizer.zero_grad()


class Ema:
    """The class seen in countless training scripts."""

    def __init__(self, model, decay):
        self.model, self.decay = model, decay
        self.shadow = {n: p.data.clone() for n, p in model.named_parameters()}
        self.backup = {}

    def update(self):
        for n, p in self.model.named_parameters():
            average = (1.0 - self.decay) * p.data + self.decay * self.shadow[n]
            self.shadow[n] = average.clone()

    def apply_shadow(self):
        for n, p in self.model.named_parameters():
            self.backup[n] = p.data
            p.data = self.shadow[n]

    def restore(self):
        for n, p in self.model.named_parameters():
            p.data = self.backup[n]
        self.backup = {}


def ema(model, call):
    optimizer, average, seen = optim.AdamW(model.parameters(), lr=0.1), Ema(model, 0.5), []
    for n in range(3):
        step(call, optimizer, n + 1)
        average.update()
        average.apply_shadow()
        with torch.no_grad():
            seen.append(loss_of(call))
        average.restore()
        seen.append(loss_of(call).detach())
    return seen + values(average.shadow.values())


def ema_with_plain_shadows(model, call):
    optimizer, seen = optim.SGD(model.parameters(), lr=0.1), []
    shadow = [torch.zeros(p.shape) for p in model.parameters()]
    for n in range(3):
        step(call, optimizer, n + 1)
        with torch.no_grad():
            for s, p in zip(shadow, model.parameters(), strict=True):
                s.mul_(0.9).add_(p.detach(), alpha=0.1)
        backup = [p.data for p in model.parameters()]
        for p, s in zip(model.parameters(), shadow, strict=True):
            p.data = s
        with torch.no_grad():
            seen.append(loss_of(call))
        for p, b in zip(model.parameters(), backup, strict=True):
            p.data = b
    return seen + values(shadow)


def swap(model, call):
    a, b = model[0], model[3]
    optimizer = optim.AdamW(model.parameters(), lr=0.1)
    step(call, optimizer)
    a.weight.data, b.weight.data = b.weight.data, a.weight.data
    step(call, optimizer, 2)
    return values([a.weight, b.weight])


def twins():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 4)
    )


def swap_in_flight(model, call):
    """Gradients of a forward go to the parameters that it was called with."""
    loss = loss_of(call)
    a, b = model[0].weight, model[3].weight
    a.data, b.data = b.data, a.data
    loss.backward()
    return values([a.grad, b.grad, a, b])


def swap_biases_in_flight(model, call):
    """As above, of what no backward reads: a compiled one need not know what they show."""
    loss = loss_of(call)
    a, b = model[0].bias, model[2].bias
    a.data, b.data = b.data, a.data
    loss.backward()
    return values([a.grad, b.grad, a, b])


def maml(model, call):
    """The weights of before are kept, adapted, and put back; the gradients are those adapted."""
    outer, seen = optim.SGD(model.parameters(), lr=0.1), []
    for n in range(2):
        kept = [p.data for p in model.parameters()]
        for p in model.parameters():
            p.data = p.data.clone()
        inner = optim.SGD(model.parameters(), lr=0.05)
        for k in range(2):
            step(call, inner, n + k + 1)
        outer.zero_grad()
        loss = loss_of(call, 3)
        loss.backward()
        seen.append(loss.detach())
        for p, old in zip(model.parameters(), kept, strict=True):
            p.data = old
        outer.step()
    return seen


def lookahead(model, call):
    fast = optim.Adam(model.parameters(), lr=0.1)
    slow = [p.data.clone() for p in model.parameters()]
    for n in range(4):
        step(call, fast, n + 1)
        if n % 2:
            for p, s in zip(model.parameters(), slow, strict=True):
                s.add_(p.data - s, alpha=0.5)
                p.data = s
                s.mul_(1.0)
            slow = [p.data.clone() for p in model.parameters()]
    return values(slow)


def lookahead_that_shares(model, call):
    """The slow weights are the parameter's own from then on: what one writes the other sees."""
    fast = optim.Adam(model.parameters(), lr=0.1)
    slow = [torch.full_like(p.data, 0.25) for p in model.parameters()]
    for p, s in zip(model.parameters(), slow, strict=True):
        p.data = s
    step(call, fast)
    with torch.no_grad():
        for s in slow:
            s.mul_(0.5)
    return [loss_of(call).detach(), *values(slow)]


def plain_that_shares(model, call):
    mine = [torch.full(p.shape, 0.25) for p in model.parameters()]
    for p, s in zip(model.parameters(), mine, strict=True):
        p.data = s
    step(call, optim.Adam(model.parameters(), lr=0.1))
    with torch.no_grad():
        for s in mine:
            s.mul_(0.5)
    return [loss_of(call).detach(), *values(mine)]


def old_data_stays(model, call):
    old = [p.data for p in model.parameters()]
    before = values(old)
    for p in model.parameters():
        p.data = torch.randn_like(p)
    step(call, optim.SGD(model.parameters(), lr=0.1))
    return [*values(old), *before]


def temporaries(model, call):
    optimizer = optim.Adam(model.parameters(), lr=0.1)
    for n in range(3):
        step(call, optimizer, n + 1)
        for p in model.parameters():
            p.data = p.data * 0.9
            p.data = p.data.to(torch.float32) + 0.125
            p.data = torch.randn(p.shape) * 0.01 + p.data
    return []


def through_a_vector(model, call):
    optimizer, seen = optim.SGD(model.parameters(), lr=0.1), []
    for n in range(2):
        step(call, optimizer, n + 1)
        vector = parameters_to_vector(model.parameters()).detach()
        vector_to_parameters(vector * 0.5, model.parameters())
        seen.append(loss_of(call).detach())
        vector_to_parameters(vector, model.parameters())
        step(call, optimizer, 3)
    return seen


def averaged(model, call):
    optimizer, seen = optim.SGD(model.parameters(), lr=0.1), []
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    for n in range(3):
        step(call, optimizer, n + 1)
        average.update_parameters(model)
    kept = [p.data for p in model.parameters()]
    for p, q in zip(model.parameters(), average.module.parameters(), strict=True):
        p.data = q.data
    seen.append(loss_of(call).detach())
    for p, q in zip(model.parameters(), kept, strict=True):
        p.data = q
    step(call, optimizer)
    return [*seen, *values(average.module.parameters())]


def two_with_one_data(model, call):
    """Weights tied by their data keep a gradient each."""
    a, b = model[0].weight, model[2].weight
    b.data = a.data
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    loss_of(call).backward()
    seen = values([a.grad, b.grad])
    optimizer.step()
    return [*seen, *values([a, b]), loss_of(call).detach()]


def data_of_a_gradient(model, call):
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    for n in range(2):
        loss_of(call, n + 1).backward()
        for p in model.parameters():
            old = p.grad.data
            p.grad.data = p.grad.data / 2
            old.zero_()
        optimizer.step()
        optimizer.zero_grad()
    return []


def own_state_dict(model, call):
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    step(call, optimizer)
    kept = {name: value.clone() for name, value in model.state_dict().items()}
    step(call, optimizer, 2)
    model.load_state_dict(kept, assign=True)
    seen = [loss_of(call).detach()]
    step(call, optim.SGD(model.parameters(), lr=0.1), 2)
    return seen


def conversions(model, call):
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    step(call, optimizer)
    old = [p.data for p in model.parameters()]
    model.to("cpu").float()
    step(call, optimizer, 2)
    return values(old)


def a_part_of_another(model, call):
    """The data of a bias is a row of another tensor."""
    rows = torch.zeros_like(model[3].weight)
    for n in (0, 2, 3):
        model[n].bias.data = rows[n]
    step(call, optim.SGD(model.parameters(), lr=0.1))
    seen = values([rows])
    with torch.no_grad():
        rows.fill_(0.5)
    return [*seen, loss_of(call).detach()]


PROGRAMS = [
    ema,
    ema_with_plain_shadows,
    swap,
    swap_in_flight,
    swap_biases_in_flight,
    maml,
    lookahead,
    lookahead_that_shares,
    plain_that_shares,
    old_data_stays,
    temporaries,
    through_a_vector,
    averaged,
    two_with_one_data,
    data_of_a_gradient,
    own_state_dict,
    conversions,
    a_part_of_another,
]


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda p: p.__name__)
def test_a_program_does_what_it_does_on_plain_parameters(program, tmp_path):
    same_program(program, tmp_path, make=twins)


HANDLES = [ema, swap_biases_in_flight, two_with_one_data]
"""Some of which the compiled graph is called with other handles than it was compiled with."""


@pytest.mark.parametrize(
    "program",
    [
        p if p in HANDLES else pytest.param(p, marks=pytest.mark.slow)
        for p in PROGRAMS
        if p is not swap_in_flight
    ],
    ids=lambda p: p.__name__,
)
def test_a_compiled_model_shows_what_its_parameters_point_to(program, tmp_path):
    same_program(program, tmp_path, "compiled", make=twins)


def test_swapping_is_seen_by_the_plan_of_a_whole_step(tmp_path):
    def program(model, call):
        optimizer, seen = optim.AdamW(model.parameters(), lr=0.1), []
        for n in range(6):
            step(call, optimizer, n % 3 + 1)
            if n > 2:
                a, b = model[0].weight, model[3].weight
                a.data, b.data = b.data, a.data
            if n == 4:
                model[2].weight.data = torch.full((16, 16), 0.125)
            seen.append(loss_of(call).detach())
        return seen

    same_program(program, tmp_path, "compiled", make=twins)


def test_values_that_wait_for_backward_are_those_of_the_forward(tmp_path):
    def program(model, call):
        loss = loss_of(call)
        for p in model.parameters():
            p.data = torch.zeros_like(p)
        loss.backward()
        return values(p.grad for p in model.parameters())

    same_program(program, tmp_path, "eager", make=twins)


class Scales(nn.Module):
    """Eager torch saves the weight itself, of which it reads in backward what it shows then."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.weight = nn.Parameter(torch.randn(16))

    def forward(self, x):
        return x * self.weight * self.weight


@pytest.mark.parametrize(("how", "make"), crossed(["new", "swapped", "written"], [twins, Scales]))
def test_a_compiled_backward_refuses_a_parameter_that_shows_other_data(make, how, tmp_path):
    torch._dynamo.reset()
    model = on_disk(make(), tmp_path)
    x = torch.ones(8, 16, requires_grad=True)
    loss = torch.compile(model, backend="zinf")(x).square().sum()
    p = [p for p in model.parameters() if p.dim() == 2 or isinstance(model, Scales)][-1]
    kept = p.data
    if how == "swapped":
        p.data = kept.clone()
    else:
        p.data = torch.zeros_like(p)
    with torch.no_grad():
        if how == "written":
            p.add_(1)
    with pytest.raises(ParameterChanged, match=r"got another .data between a compiled forward"):
        loss.backward(retain_graph=True)
    assert p.grad is None


@pytest.mark.parametrize("make", [twins, Scales])
def test_a_parameter_that_shows_again_what_it_did_is_none_of_that(make, tmp_path):
    def program(model, call):
        loss = loss_of(call)
        kept = [p.data for p in model.parameters()]
        for p in model.parameters():
            p.data = torch.zeros_like(p)
        seen = [loss_of(call).detach()]
        for p, old in zip(model.parameters(), kept, strict=True):
            p.data = old
        loss.backward()
        return [*seen, *values(p.grad for p in model.parameters())]

    same_program(program, tmp_path, "compiled", make=make)


def test_another_part_of_the_same_memory_is_other_data_too(tmp_path):
    torch._dynamo.reset()
    model = Scales()
    model.more = nn.Parameter(torch.randn(2, 16))
    on_disk(model, tmp_path)
    both = torch.zeros_like(model.more)
    model.weight.data = both[0]
    loss = torch.compile(model, backend="zinf")(torch.ones(8, 16, requires_grad=True)).sum()
    model.weight.data = both[1]
    with pytest.raises(ParameterChanged, match=r"got another .data"):
        loss.backward()


def test_parameters_that_share_memory_before_offload_share_it_afterwards(tmp_path):
    def make():
        model = twins()
        model[2].weight.data = model[0].weight.data
        return model

    def program(model, call):
        optimizer = optim.SGD(model.parameters(), lr=0.1)
        step(call, optimizer)
        with torch.no_grad():
            model[0].weight.mul_(0.5)
        return values([model[0].weight, model[2].weight])

    _, tiered = same_program(program, tmp_path, make=make)
    assert len([n for n in entries(tiered) if n.endswith("weight")]) == 3


def test_parameters_that_share_part_of_their_memory_are_refused(tmp_path):
    model, flat = twins(), torch.zeros(300)
    model[0].weight.data = flat[:256].view(16, 16)
    model[2].weight.data = flat[40:296].view(16, 16)
    with pytest.raises(Unsupported, match=r"'0.weight' and '2.weight' share a part"):
        on_disk(model, tmp_path)
    model[2].weight.data = model[2].weight.data.clone()
    on_disk(model, tmp_path)


def only(tmp_path, **fields):
    return on_disk(Holder(torch.zeros(4, 4)), tmp_path, **fields).w


@pytest.mark.parametrize(
    "share",
    [
        lambda x: x.view(16).view(4, 4),
        lambda x: nn.Parameter(x).data,
        lambda x: x.detach(),
        lambda x: torch.stack([x, x])[0],
        lambda x: nn.Parameter(x.clone()),
    ],
    ids=["view", "parameter's", "detached", "part", "parameter"],
)
def test_a_write_to_memory_that_data_was_taken_from_is_told_at_the_next_use(share, tmp_path):
    p = only(tmp_path)
    x = share(torch.ones(4, 4))
    y = x.detach()
    p.data = x
    assert p.sum().item() == 16
    with torch.no_grad():
        y.mul_(2)
    for use in (
        lambda: p.sum(),
        lambda: p.detach().numpy(),
        lambda: (p * 2).sum(),
        lambda: repr(p),
    ):
        with pytest.raises(ParameterChanged, match=r"'w' took the values of a plain tensor.*clone"):
            use()
    p.data = x
    assert p.sum().item() == 32
    del x, y
    assert p.sum().item() == 32
    assert not p.entry.sources


def test_a_compiled_call_tells_it_too(tmp_path):
    torch._dynamo.reset()
    model = on_disk(mlp(), tmp_path)
    call = torch.compile(model, backend="zinf")
    vector = parameters_to_vector(model.parameters()).detach()
    vector_to_parameters(vector, model.parameters())
    loss_of(call).backward()
    vector.zero_()
    with pytest.raises(ParameterChanged, match="written since"):
        loss_of(call)
    vector_to_parameters(vector, model.parameters())
    assert loss_of(call).item() == pytest.approx(1.3862944)


def test_memory_that_is_dropped_is_given_back(tmp_path):
    p = only(tmp_path)
    big = torch.ones(2, 4, 4)
    p.data = big[0]
    assert len(p.entry.sources) == 1
    del big
    p.sum()
    assert not p.entry.sources


def test_a_vector_that_is_dropped_is_given_back_by_all_who_took_parts_of_it(tmp_path):
    model = on_disk(mlp(), tmp_path)
    vector = parameters_to_vector(model.parameters()).detach()
    vector_to_parameters(vector, model.parameters())
    loss_of(model)
    assert all(p.entry.sources for p in model.parameters())
    del vector
    loss_of(model)
    assert not any(p.entry.sources for p in model.parameters())


def test_a_model_whose_parameters_are_parts_of_a_vector_does_not_keep_that(tmp_path):
    model = mlp()
    vector_to_parameters(parameters_to_vector(model.parameters()).detach(), model.parameters())
    on_disk(model, tmp_path)
    loss_of(model)
    assert not any(p.entry.sources for p in model.parameters())


def test_two_that_took_the_memory_of_one_array_lie_in_one_memory(tmp_path):
    model, x = on_disk(twins(), tmp_path), torch.from_numpy(numpy.ones((16, 16), numpy.float32))
    a, b = model[0].weight, model[2].weight
    a.data = x
    b.data = x
    with torch.no_grad():
        a.mul_(2)
    assert a.sum().item() == b.sum().item() == 512


@pytest.mark.parametrize("written", ["before", "after"])
def test_two_that_took_parts_of_the_memory_of_one_array_are_not_written_apart(written, tmp_path):
    array = torch.from_numpy(numpy.ones((17, 16), numpy.float32))
    model, x, y = on_disk(twins(), tmp_path), array[:16], array[1:]
    a, b = model[0].weight, model[2].weight
    a.data = x
    if written == "after":
        b.data = y
        assert a.sum().item() == b.sum().item() == 256
    with torch.no_grad():
        a.mul_(2)  # torch shows that in b too
    use = b.sum if written == "after" else lambda: setattr(b, "data", y)
    with pytest.raises(ParameterChanged, match=r"shares its .data with '0.weight'"):
        use()
    b.data = a.data
    assert a.sum().item() == b.sum().item() == 512


def test_a_state_dict_that_was_assigned_may_not_be_written(tmp_path):
    model = on_disk(mlp(), tmp_path)
    kept = {name: torch.ones_like(value.cpu()) for name, value in model.state_dict().items()}
    model.load_state_dict(kept, assign=True)
    kept["0.weight"].zero_()
    with pytest.raises(ParameterChanged, match=r"'0.weight' took the values"):
        model(torch.ones(1, 16))
    del kept
    gc.collect()
    assert model[0].weight.detach().eq(1).all()


def by_state_dict(layer, x):
    layer.load_state_dict({"w": x}, assign=True)


def by_name(layer, x):
    layer.w = nn.Parameter(x)


def through_data(x):
    x.data.add_(1)


def through_storage(x):
    x.untyped_storage().fill_(0)


def through_an_array(x):
    x.numpy()[:] = 0


def through_another_over_its_storage(x):
    torch.empty(0).set_(x.untyped_storage()).fill_(3)


def taken_away(x):
    x.untyped_storage().resize_(0)


WRITES = [
    through_data,
    through_storage,
    through_an_array,
    through_another_over_its_storage,
    taken_away,
]


SIDES = [4, 256]
"""Of matrices whose bytes are always compared, and of such that torch watches."""


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("trained", [False, True])
@pytest.mark.parametrize("write", WRITES, ids=lambda f: f.__name__)
@pytest.mark.parametrize("give", [by_state_dict, by_name], ids=lambda f: f.__name__)
def test_a_value_that_was_given_is_not_written_unseen(give, write, trained, side, tmp_path):
    layer, x = on_disk(Holder(torch.zeros(side, side)), tmp_path), torch.ones(side, side)
    give(layer, x)
    assert layer.w.sum().item() == side**2
    if trained:
        with torch.no_grad():
            layer.w.add_(1)
    write(x)
    for _ in range(2):
        with pytest.raises(ParameterChanged, match=r"'w' took the values of a plain tensor"):
            layer.w.sum()
    layer.w.data = torch.full((side, side), 2.0)
    assert layer.w.sum().item() == 2 * side**2


def by_data(layer, x):
    layer.w.data = x


GIVES = [by_state_dict, by_name, by_data]


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("give", GIVES, ids=lambda f: f.__name__)
@pytest.mark.parametrize("gone", [False, True])
def test_another_library_that_had_the_memory_before_does_not_write_it_unseen(
    gone, give, side, tmp_path
):
    """By DLPack, as `torch.from_dlpack` does too: torch's marks are not on what it writes to."""
    layer, x = on_disk(Holder(torch.zeros(side, side)), tmp_path), torch.ones(side, side)
    other = torch.from_dlpack(x)
    give(layer, x)
    if gone:
        del x
    other.mul_(2)
    for _ in range(2):
        with pytest.raises(ParameterChanged, match=r"'w' took the values of a plain tensor"):
            layer.w.sum()
    del other
    gc.collect()


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("give", GIVES, ids=lambda f: f.__name__)
def test_memory_that_was_shown_to_numpy_before_is_not_written_unseen(give, side, tmp_path):
    layer, x = on_disk(Holder(torch.zeros(side, side)), tmp_path), torch.ones(side, side)
    x.numpy()  # torch gives it away no more, and does not watch it
    give(layer, x)
    x.data.mul_(2)
    if isinstance(x, Unbacked):  # p.data = x makes both one, where nobody else has the memory
        assert layer.w.sum().item() == 2 * side**2
        return
    with pytest.raises(ParameterChanged, match=r"'w' took the values of a plain tensor"):
        layer.w.sum()


@pytest.mark.parametrize("side", SIDES)
def test_another_library_that_had_the_memory_before_offload_does_not_write_it_unseen(
    side, tmp_path
):
    model = Holder(torch.ones(side, side))
    other = torch.from_dlpack(model.w.detach())
    on_disk(model, tmp_path)
    other.mul_(2)
    with pytest.raises(ParameterChanged, match=r"'w' took the values of a plain tensor"):
        model.w.sum()
    del other
    assert model.w.sum().item() == side**2


def test_memory_that_processes_share_is_not_left_unsaid(tmp_path):
    model = mlp().share_memory()
    with pytest.raises(Unsupported, match=r"'0.weight' lies in memory that other processes share"):
        on_disk(model, tmp_path)
    for p in model.parameters():
        p.data = p.data.clone()
    on_disk(model, tmp_path)
    x = torch.ones(32, 16).share_memory_()
    with pytest.raises(Unsupported, match=r"other processes share"):
        model[0].weight = nn.Parameter(x)
    model[0].weight.data = x
    assert type(x) is torch.Tensor
    assert x.is_shared()
    x.data.mul_(2)
    with pytest.raises(ParameterChanged, match=r"'0.weight' took the values of a plain tensor"):
        model[0].weight.sum()


class Wide(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.w, self.b = nn.Parameter(torch.randn(192, 192)), nn.Parameter(torch.randn(192))

    def forward(self, x):
        return x @ self.w + self.b


READS = {
    "numpy": lambda x: x.numpy().sum(),
    "save": lambda x: torch.save(x, io.BytesIO()),
    "address": lambda x: x.data_ptr(),
}


@pytest.mark.parametrize("read", READS)
@pytest.mark.parametrize("kept", ["before offload", "assigned"])
def test_what_held_the_memory_may_be_read_after_training(kept, read, tmp_path):
    """Though torch cannot tell a reader from a writer, and the parameters have moved on."""
    plain, model = Wide(), Wide()
    state = model.state_dict()
    on_disk(model, tmp_path)
    if kept == "assigned":
        model.load_state_dict(state, assign=True)
    optimizers = [optim.SGD(m.parameters(), lr=0.1) for m in (plain, model)]
    for n in range(3):
        for m, optimizer in zip((plain, model), optimizers, strict=True):
            m(torch.ones(2, 192) * n).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        for name in state:
            READS[read](state[name])
    assert_same(plain, model)
    for name in state:
        assert torch.equal(state[name], Wide().state_dict()[name])
    state["w"].data[0, 0] = 7
    for _ in range(2):
        with pytest.raises(ParameterChanged, match=r"'w' took .* drop what else holds that memory"):
            model(torch.ones(2, 192))
    state.clear()
    assert_same(plain, model)


def test_memory_that_nobody_touched_is_not_read_at_each_use(tmp_path, monkeypatch):
    model, sums, summed = Wide(), [], sources._checksum_of
    on_disk(model, tmp_path)
    vector = parameters_to_vector(model.parameters()).detach().cpu().clone()
    vector_to_parameters(vector, model.parameters())
    monkeypatch.setattr(sources, "_checksum_of", lambda value: sums.append(value) or summed(value))
    for _ in range(3):
        model(torch.ones(2, 192))
    assert {value.numel() for value in sums} == {192}, "what is small, and only that"
    with torch.no_grad():
        model.w.mul_(2)
    for _ in range(3):
        model(torch.ones(2, 192))
    assert sum(value.numel() == 192**2 for value in sums) == 1, "what it was before it was written"
    vector.untyped_storage()[0] = 1
    with pytest.raises(ParameterChanged, match=r"'w' took the values of a plain tensor"):
        model(torch.ones(2, 192))


@pytest.mark.parametrize("held", [False, True])
def test_a_line_says_that_others_hold_memory_that_offload_moved(held, tmp_path, caplog):
    model = mlp()
    state = model.state_dict() if held else {}
    with caplog.at_level(logging.INFO, "zcompile.frontend.offload"):
        on_disk(model, tmp_path)
    lines = [record.getMessage() for record in caplog.records]
    assert [line for line in lines if "left memory that others hold" in line] == [
        f"{len(state)} parameters, '0.weight' first, left memory that others hold, as a state_dict "
        "from before does: what is written to them from now on is not seen there"
    ] * held


def test_a_write_is_told_though_who_wrote_has_let_go(tmp_path):
    layer = on_disk(Holder(torch.zeros(4, 4)), tmp_path)
    for give in (by_state_dict, by_name):
        x = torch.ones(4, 4)
        give(layer, x)
        x.data.add_(1)
        del x
        with pytest.raises(ParameterChanged, match=r"'w' took the values of a plain tensor"):
            layer.w.sum()
        assert layer.w.sum().item() == 16
        assert not layer.w.entry.sources


@pytest.mark.parametrize("give", [by_state_dict, by_name], ids=lambda f: f.__name__)
def test_a_value_that_was_given_may_be_read(give, tmp_path):
    layer, x = on_disk(Holder(torch.zeros(4, 4)), tmp_path), torch.ones(4, 4)
    give(layer, x)
    assert (x + x.data).sum().item() == 32
    torch.save(x, tmp_path / "x.pt")
    assert layer.w.sum().item() == x.numpy().sum() == 16
    array = x.numpy()
    assert layer.w.sum().item() == 16
    array[:] = 2
    with pytest.raises(ParameterChanged, match=r"'w' took the values of a plain tensor"):
        layer.w.sum()


def test_a_vector_that_parameters_were_parts_of_before_offload_is_not_written_unseen(tmp_path):
    model = mlp()
    flat = parameters_to_vector(model.parameters()).detach()
    vector_to_parameters(flat, model.parameters())
    on_disk(model, tmp_path)
    loss_of(model)
    flat[-1] = 5.0  # the last bias
    model[0].weight.sum()
    with pytest.raises(ParameterChanged, match=r"'2.bias' took the values"):
        loss_of(model)


def test_a_storage_with_a_name_counts_as_a_holder_of_memory(tmp_path):
    p, x = only(tmp_path), torch.ones(4, 4)
    storage = x.untyped_storage()
    p.data = x
    assert p.sum().item() == 16
    storage.fill_(0)
    with pytest.raises(ParameterChanged, match=r"'w' took the values of a plain tensor"):
        p.sum()
    del storage
    p.data = x
    assert p.sum().item() == 0


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(16, 16, bias=False), nn.Linear(16, 16, bias=False)
        self.last.weight = self.first.weight

    def forward(self, x):
        return self.last(self.first(x).relu())


def tied_values_by_state_dict(model, call):
    kept = {name: torch.full_like(plain_of(v), 0.125) for name, v in model.state_dict().items()}
    kept["last.weight"] = kept["first.weight"]
    model.load_state_dict(kept, assign=True)
    del kept
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    step(call, optimizer)
    with torch.no_grad():
        model.first.weight[3].mul_(2)
    step(call, optimizer)
    return values([model.first.weight, model.last.weight])


def tied_parameters_by_state_dict(model, call):
    one = nn.Parameter(torch.full((16, 16), 0.125))
    model.load_state_dict({"first.weight": one, "last.weight": one}, assign=True)
    assert model.first.weight is model.last.weight
    step(call, optim.SGD(model.parameters(), lr=0.1))
    return []


def tied_by_its_own_state_dict(model, call):
    model.load_state_dict(model.state_dict(), assign=True)
    step(call, optim.SGD(model.parameters(), lr=0.1))
    return values([model.first.weight, model.last.weight])


@pytest.mark.parametrize(
    ("program", "mode"),
    crossed(
        [tied_values_by_state_dict, tied_parameters_by_state_dict, tied_by_its_own_state_dict],
        ["eager", "compiled"],
    ),
)
def test_what_lies_in_one_memory_does_so_after_it_was_assigned(program, mode, tmp_path):
    same_program(program, tmp_path, mode, make=Tied)


def test_a_state_dict_that_was_written_may_be_assigned_again(tmp_path):
    model = on_disk(Tied(), tmp_path)
    kept = {name: plain_of(v) for name, v in model.state_dict().items()}
    model.load_state_dict(kept, assign=True)
    kept["first.weight"].zero_()
    kept["last.weight"].data.fill_(1)
    model.load_state_dict(kept, assign=True)
    assert model.first.weight.sum().item() == 0
    assert model.last.weight.sum().item() == 256


def test_memory_that_a_parameter_had_before_offload_may_not_be_written(tmp_path):
    mine = torch.ones(4, 4)
    model = Holder(mine)
    on_disk(model, tmp_path)
    assert model.w.sum().item() == 16
    mine.add_(1)
    with pytest.raises(ParameterChanged, match="'w' took the values"):
        model.w.sum()
    del mine
    assert model.w.sum().item() == 16


def test_the_data_of_another_offloaded_model_may_not_be_written_by_either(tmp_path):
    a, b = only(tmp_path), only(tmp_path)
    with torch.no_grad():
        b.fill_(3)
    a.data = b.data
    assert a.sum().item() == b.sum().item() == 48
    with torch.no_grad():
        b.fill_(4)
    with pytest.raises(ParameterChanged, match="another offloaded model"):
        a.sum()
    a.data = b.data
    assert a.sum().item() == b.sum().item() == 64
    with torch.no_grad():
        a.fill_(5)
    with pytest.raises(ParameterChanged, match="another offloaded model"):
        b.sum()


def test_a_tensor_that_was_given_is_tiered_and_keeps_its_marks(tmp_path):
    p, x = only(tmp_path), torch.ones(4, 4)
    x.mark = "kept"
    p.data = x
    assert x.mark == "kept"
    x.add_(1)
    assert p.sum().item() == 32
    with torch.no_grad():
        p.add_(1)
    assert x.sum().item() == 48
    assert not x.requires_grad
    assert x.entry is p.entry


def test_a_tensor_of_inference_mode_may_be_given(tmp_path):
    p = only(tmp_path)
    with torch.inference_mode():
        x, many = torch.ones(4, 4), torch.full((2, 4, 4), 2.0)
    p.data = x
    assert p.sum().item() == 16
    p.data = many[0]
    assert p.sum().item() == 32


def test_values_of_an_array_are_taken(tmp_path):
    p, array = only(tmp_path), numpy.ones((4, 4), dtype=numpy.float32)
    p.data = torch.from_numpy(array)
    assert p.sum().item() == 16
    array[:] = 2  # nobody knows whether there still is an array
    assert p.sum().item() == 16


def test_what_nobody_names_any_more_is_freed(tmp_path):
    model = on_disk(mlp(), tmp_path)
    count = len(entries(model))
    for _ in range(3):
        backup = [p.data for p in model.parameters()]
        for p in model.parameters():
            p.data = torch.zeros_like(p)
        for p, b in zip(model.parameters(), backup, strict=True):
            p.data = b
    del backup, p, b
    gc.collect()
    assert len(entries(model)) == count
    assert_same(mlp(), model)


def test_temporaries_take_no_entry_of_their_own(tmp_path):
    p = only(tmp_path)
    key = p.entry.key
    p.data = torch.ones(4, 4)
    p.data = p.data * 2
    assert p.entry.key == key
    old = p.data
    p.data = torch.zeros(4, 4)
    assert p.entry.key != key
    assert old.sum().item() == 32


def test_copies_in_another_dtype_go_with_their_entry(tmp_path):
    torch._dynamo.reset()
    model = nn.Linear(64, 64, bias=False)
    on_disk(model, tmp_path, param_dtype=torch.bfloat16, device_memory="4MiB")
    call = torch.compile(model, backend="zinf")
    for _ in range(3):
        old = model.weight.data
        model.weight.data = torch.zeros_like(old)
        with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
            assert not call(torch.ones(2, 64)).any()
    del old
    gc.collect()
    assert len(entries(model)) == 2


def test_names_follow_the_parameter(tmp_path):
    model = on_disk(twins(), tmp_path)
    a, b = model[0].weight, model[3].weight
    a.data, b.data = b.data, a.data
    assert (a.entry.name, b.entry.name) == ("0.weight", "3.weight")
    model(torch.ones(1, 16)).sum().backward()
    assert (a.grad.entry.name, b.grad.entry.name) == ("0.weight.grad", "3.weight.grad")
    a.data = b.data
    with pytest.raises(ParameterChanged, match=r"parameter '0.weight' was given .data"):
        a.data = torch.zeros(3)


@pytest.mark.parametrize("value", [torch.empty(4, 4, device="meta"), torch.eye(4).to_sparse()])
def test_what_has_no_bytes_of_its_own_is_refused(value, tmp_path):
    p = only(tmp_path)
    with pytest.raises(ParameterChanged, match=r"was given .data of torch.float32"):
        p.data = value
    assert p.sum().item() == 0


def test_other_ways_to_give_a_tensor_other_memory_raise(tmp_path):
    model = on_disk(twins(), tmp_path)
    a, b = model[0].weight, model[2].weight
    before = values([a, b])
    with pytest.raises(RuntimeError, match="Cannot swap"):
        torch.utils.swap_tensors(a, b)
    for take in (
        lambda: a.detach().set_(),
        lambda: a.detach().set_(b.detach()),
        lambda: a.detach().set_(torch.zeros(256).untyped_storage(), 0, (16, 16), (16, 1)),
        lambda: torch.zeros(16, 16).set_(a.detach()),
        lambda: a.detach().resize_as_(torch.zeros(3)),
    ):
        with pytest.raises(Unsupported, match="in place"):
            take()
    for value, old in zip(values([a, b]), before, strict=True):
        assert_equal(old, value)


@pytest.mark.parametrize("inference", [False, True])
def test_a_plain_tensor_does_not_point_to_memory_that_is_not_there(inference, tmp_path):
    """Torch let it, and the next use of it ended the process."""
    p, averaged = only(tmp_path), nn.Parameter(torch.ones(4, 4))
    with torch.inference_mode(inference):
        refuses_tiered_data(p, averaged)


def refuses_tiered_data(p, averaged):
    plain = torch.ones(4, 4)
    for x in (plain, averaged):
        for value in (p, p.data, p[:], torch.zeros_like(p)):
            with pytest.raises(Unsupported, match=r"given \.data of a tiered one.*x\.data\.copy_"):
                x.data = value
        assert x.sum().item() == 16
        x.data.copy_(p)
        assert x.sum().item() == 0


def test_tensors_that_are_no_parameters_may_be_swapped(tmp_path):
    model = on_disk(twins(), tmp_path)
    a, b = torch.zeros_like(model[0].weight).detach(), torch.ones_like(model[0].weight).detach()
    torch.utils.swap_tensors(a, b)
    assert (a.sum().item(), b.sum().item()) == (256, 0)


def test_what_is_saved_is_what_the_parameters_show(tmp_path):
    def program(model, call):
        optimizer = optim.AdamW(model.parameters(), lr=0.1)
        step(call, optimizer)
        a, b = model[0].weight, model[3].weight
        a.data, b.data = b.data, a.data
        model[2].bias.data = torch.ones_like(model[3].weight)[1]
        zcompile.save(tmp_path / f"kept{len(list(tmp_path.iterdir()))}", model, optimizer)
        return []

    _, tiered = same_program(program, tmp_path, make=twins)
    (path,) = [p for p in tmp_path.iterdir() if p.name.startswith("kept")][-1:]
    other = twins()
    zcompile.resume(path, other, optim.AdamW(other.parameters(), lr=0.1))
    assert_same(other, tiered)
    assert_same(copy.deepcopy(other), tiered)


def test_a_commit_holds_what_the_parameters_show(tmp_path):
    disk = tmp_path / "durable"
    disk.mkdir()
    fields = {"device": "cpu", "device_memory": "1MiB", "host_memory": "256KiB", "durable": True}
    model = zcompile.offload(twins(), disk=disk, **fields)
    optimizer = optim.AdamW(model.parameters(), lr=0.1)
    plain = twins()
    beside = optim.AdamW(plain.parameters(), lr=0.1)
    for n in range(3):
        for each, opt in ((model, optimizer), (plain, beside)):
            a, b = each[0].weight, each[3].weight
            a.data, b.data = b.data, a.data
            if n == 1:
                each[2].weight.data = torch.full((16, 16), 0.5)
            step(each, opt, n + 1)
    zcompile.close(model)
    del model, optimizer, a, b, each, opt
    gc.collect()
    again = zcompile.offload(twins(), disk=disk, **fields)
    optimizer = optim.AdamW(again.parameters(), lr=0.1)
    assert zcompile.resume(disk, again, optimizer)["step"] == 3
    assert_same(plain, again)
    step(again, optimizer)
    step(plain, beside)
    assert_same(plain, again)


def test_autograd_does_not_hear_of_what_is_written_through_data(tmp_path):
    plain, tiered = parameter_pair(lambda: torch.randn(48, 40), tmp_path)
    for param in (plain, tiered):
        loss, before = param.exp().sum() + (param * param).sum(), param._version
        param.data.mul_(0.5)
        assert param._version == before
        loss.backward()
        loss = (param * param).sum()
        with torch.no_grad():
            param.detach().mul_(0.5)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()
    assert_equal(plain, tiered)
    assert_equal(plain.grad, tiered.grad)


def test_a_parameter_that_is_back_where_it_was_is_not_written_before_a_backward(tmp_path):
    torch._dynamo.reset()
    model = on_disk(twins(), tmp_path)
    loss = loss_of(torch.compile(model, backend="zinf"))
    a, b = model[0].weight, model[2].weight
    for _ in range(2):
        a.data, b.data = b.data, a.data
    with torch.no_grad():
        b.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize("writes", ["a", "b"])
def test_a_write_is_seen_by_graphs_that_came_by_another_handle(writes, tmp_path):
    """The forward is called with swapped weights; they are swapped back, and once more."""
    torch._dynamo.reset()
    model = on_disk(twins(), tmp_path)
    a, b = model[0].weight, model[3].weight
    a.data, b.data = b.data, a.data
    x = torch.ones(8, 16, requires_grad=True)
    loss = torch.compile(model, backend="zinf")(x).square().sum()
    for _ in range(2):
        a.data, b.data = b.data, a.data
    with torch.no_grad():
        (a if writes == "a" else b).add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_a_view_keeps_its_history_when_data_is_written(tmp_path):
    for param in parameter_pair(lambda: torch.randn(48, 40), tmp_path):
        view = param[:, ::3]
        param.data.mul_(0.5)
        param.requires_grad_(False)
        assert not view.is_leaf


def gradients_in_one_buffer(model, call):
    """As in code that adds up or scales all gradients at once."""
    params, at, seen = list(model.parameters()), 0, []
    buffer = torch.zeros(sum(p.numel() for p in params))
    optimizer = optim.AdamW(params, lr=0.1)
    for p in params:
        p.grad = buffer[at : at + p.numel()].view_as(p)
        at += p.numel()
    for n in range(3):
        buffer.zero_()
        loss_of(call, n + 1).backward()
        buffer.div_(2)
        seen.append(buffer.clone())
        nn.utils.clip_grad_norm_(params, 0.1)
        optimizer.step()
    return [*seen, buffer]


def a_gradient_with_a_name(model, call):
    mine, seen = torch.ones(16, 16), []
    model[0].weight.grad = mine
    optimizer = optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for n in range(3):
        loss_of(call, n + 1).backward()
        mine.mul_(0.5)
        optimizer.step()
        seen.append(mine.clone())
    return seen


def a_detached_part_as_gradient(model, call):
    rows = torch.zeros(2, 16)
    model[0].bias.grad = rows[1].detach()
    for n in range(2):
        loss_of(call, n + 1).backward()
        rows.mul_(0.5)
    optim.SGD(model.parameters(), lr=0.1).step()
    return [rows]


@pytest.mark.parametrize(
    ("program", "mode"),
    crossed(
        [gradients_in_one_buffer, a_gradient_with_a_name, a_detached_part_as_gradient],
        ["eager", "compiled"],
    ),
)
def test_a_gradient_that_a_user_holds_stays_the_same_memory(program, mode, tmp_path):
    same_program(program, tmp_path, mode, make=twins)


def test_a_gradient_that_nobody_else_holds_moves_to_the_tiers(tmp_path):
    model = on_disk(twins(), tmp_path)
    for p in model.parameters():
        p.grad = torch.zeros(p.shape)
    loss_of(model).backward()
    assert all(p.grad.entry for p in model.parameters())
    model.zero_grad()
    a, b = model[0].weight, model[2].weight
    (torch.cat([a, b]).square().sum() + a.sum() + (a @ b).sum()).backward()
    assert a.grad.entry
    assert b.grad.entry
    a.grad = torch.zeros(16, 16)
    optim.SGD(model.parameters(), lr=0.1).step()
    assert a.grad.entry


def test_handles_of_parameters_that_are_back_home_cost_nothing(tmp_path, monkeypatch):
    model = on_disk(twins(), tmp_path)
    a, b = model[0].weight, model[2].weight
    handles_, listed = [a._handle, b._handle], [a.entry, b.entry]
    for _ in range(2):
        a.data, b.data = b.data, a.data
    gc.collect()
    assert handles.leaves_of(handles_, listed) is listed

    class Long(dict):
        """Not to be walked for one entry."""

        def values(self):
            raise AssertionError

    a.data = b.data
    monkeypatch.setattr(handles, "_SHARES", Long(handles._SHARES))
    assert [id(p) for p in handles.owners_of(b.entry)] == [id(b), id(a)]


def test_an_elementwise_op_on_one_element_is_no_reason_for_a_warning(tmp_path, caplog):
    model = on_disk(nn.Sequential(nn.Linear(16, 1), nn.PReLU()), tmp_path)
    for kind in (optim.SGD, optim.AdamW, optim.Adagrad):
        optimizer = kind(model.parameters(), lr=0.1, weight_decay=0.1, foreach=False)
        model(torch.ones(2, 16)).sum().backward()
        optimizer.step()
    assert not caplog.records
