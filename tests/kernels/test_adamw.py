"""AdamW over rows: the kernel against its formula, the formula against torch, and the op."""

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from fences import DEVICE, Fenced
from kernels.mutants import changed, mutants
from sampled import crossed
from torch import Tensor, library

from triton_kernels.adamw import reference
from triton_kernels.adamw.op import adamw

TOLERANCE = 2e-6
"""Largest difference, in units of the largest number: some roundings of 6e-8 of an update whose
length is the learning rate. A device fuses what the interpreter does not."""
RATES = {"lr": 1e-3, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.1}
SIZES = (1, 5, 1000, 1024, 4096, 7777, 0, 40_000)
"""One element, less than a block, whole blocks, a tail, nothing, and more than one piece."""


def placed(tensor: Tensor) -> Tensor:
    return tensor.clone().to(DEVICE)


@dataclass
class Step:
    """Operands of one step; `grads` and `narrow` are in dtypes of their own."""

    params: list[Tensor]
    grads: list[Tensor]
    exp_avgs: list[Tensor]
    exp_avg_sqs: list[Tensor]
    narrow: list[Tensor]
    steps: list[Tensor]
    scale: Tensor | None = None
    found_inf: Tensor | None = None
    rates: dict[str, Any] = field(default_factory=lambda: {**RATES, "maximize": False})

    def arguments(self) -> list[Any]:
        lists = [self.params, self.grads, self.exp_avgs, self.exp_avg_sqs, self.narrow, self.steps]
        return [*lists, self.scale, self.found_inf, *self.rates.values()]

    def copy(self, where: Any = placed) -> "Step":
        lists = (self.params, self.grads, self.exp_avgs, self.exp_avg_sqs, self.narrow)
        made = [[where(t) for t in column] for column in lists]
        steps = [t.to(DEVICE) for t in self.steps]
        scale, found = (x if x is None else x.to(DEVICE) for x in (self.scale, self.found_inf))
        return Step(*made, steps, scale, found, dict(self.rates))

    def written(self) -> list[Tensor]:
        return [*self.params, *self.exp_avgs, *self.exp_avg_sqs, *self.narrow]


def step(
    sizes: Any = SIZES,
    grad: torch.dtype = torch.float32,
    narrow: torch.dtype | None = None,
    seed: int = 0,
    **rates: Any,
) -> Step:
    source = torch.Generator().manual_seed(seed)

    def drawn(scale: float) -> list[Tensor]:
        return [torch.randn(n, generator=source) * scale for n in sizes]

    return Step(
        drawn(1.0),
        [g.to(grad) for g in drawn(1.0)],
        drawn(0.01),
        [v.abs() for v in drawn(1e-3)],
        [] if narrow is None else [torch.zeros(n, dtype=narrow) for n in sizes],
        [torch.tensor(float(1 + n)) for n in range(len(sizes))],
        rates={**RATES, "maximize": False, **rates},
    )


def launched(given: Step, module: Any = None, shift: int = 0) -> Step:
    """What the kernel makes of operands between canaries."""
    from triton_kernels.adamw import kernel

    fenced = Fenced()
    made = given.copy(lambda t: fenced(t, shift=shift))
    (module or kernel).launch(*made.arguments(), 0)
    fenced.hold()
    return made


def expected(given: Step) -> Step:
    made = given.copy()
    reference.adamw(*made.arguments())
    return made


def assert_close(made: Step, wanted: Step) -> None:
    for found, right in zip(made.written(), wanted.written(), strict=True):
        found, right = found.cpu(), right.cpu()
        if right.dtype is torch.float32:
            least = float(right.nan_to_num(posinf=0, neginf=0).abs().max()) if len(right) else 0
            torch.testing.assert_close(
                found, right, rtol=TOLERANCE, atol=TOLERANCE * least, equal_nan=True
            )
    for p, copy in zip(made.params, made.narrow, strict=False):
        assert torch.equal(copy, p.to(copy.dtype)), "a copy is the parameter, rounded"
    for found, right in zip(made.grads, wanted.grads, strict=True):
        torch.testing.assert_close(found.cpu(), right.cpu(), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(
    ("grad", "narrow"),
    crossed([torch.float32, torch.bfloat16, torch.float16], [None, torch.bfloat16, torch.float16]),
)
def test_the_kernel_computes_its_formula(grad, narrow):
    given = step(grad=grad, narrow=narrow)
    given.scale = torch.tensor(0.5)
    assert_close(launched(given), expected(given))


@pytest.mark.parametrize(
    "rates", [{"weight_decay": 0.0}, {"maximize": True}, {"beta1": 0.0}, {"lr": 0.0}]
)
def test_rates_of_every_kind(rates):
    given = step((5, 1500), **rates)
    given.found_inf = torch.tensor(0.0)
    assert_close(launched(given), expected(given))


@pytest.mark.parametrize("shift", [1, 2])
def test_rows_may_begin_anywhere(shift):
    given = step((5, 1500), torch.bfloat16, torch.bfloat16)
    assert_close(launched(given, shift=shift), expected(given))


def test_a_step_in_which_an_infinity_was_found_leaves_every_bit():
    given = step(narrow=torch.bfloat16)
    given.grads[1][0] = torch.inf
    given.found_inf = torch.tensor(1.0)
    made = launched(given)
    for found, before in zip(made.written(), given.written(), strict=True):
        assert torch.equal(found.cpu(), before)


@pytest.mark.parametrize("value", [torch.inf, -torch.inf, torch.nan])
def test_what_is_no_number_stays_with_its_element(value):
    given = step((5, 1500))
    given.grads[0][2] = value
    given.params[1][7] = value
    made, wanted = launched(given), expected(given)
    assert_close(made, wanted)
    bad = [~p.isfinite().cpu() for p in made.params]
    assert [int(b.sum()) for b in bad] == [1, 1]


def test_an_infinite_weight_stays_infinite_without_decay():
    given = step((5,), weight_decay=0.0)
    given.params[0][3] = torch.inf
    assert launched(given).params[0][3] == torch.inf


def test_nothing_is_launched_for_no_elements():
    given = step((0, 0))
    launched(given)


def test_few_programs_compute_the_same():
    from triton_kernels.adamw import kernel

    given = step((5, 70_000))
    made = given.copy()
    kernel.launch(*made.arguments(), 1)
    assert_close(made, launched(given))


def test_the_formula_is_torchs():
    given = step()
    params = [torch.nn.Parameter(p.clone()) for p in given.params]
    optimizer = torch.optim.AdamW(
        params, lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1, foreach=False
    )
    for n, p in enumerate(params):
        p.grad = given.grads[n] * 0.5
        state = {"exp_avg": given.exp_avgs[n].clone(), "exp_avg_sq": given.exp_avg_sqs[n].clone()}
        optimizer.state[p] = {"step": given.steps[n] - 1, **state}
    optimizer.step()
    given.scale = torch.tensor(0.5)
    made = expected(given)
    for found, p in zip(made.params, params, strict=True):
        torch.testing.assert_close(found.cpu(), p.detach(), rtol=1e-6, atol=1e-7)
    for n, p in enumerate(params):
        torch.testing.assert_close(made.exp_avgs[n].cpu(), optimizer.state[p]["exp_avg"])
        torch.testing.assert_close(made.exp_avg_sqs[n].cpu(), optimizer.state[p]["exp_avg_sq"])


@pytest.mark.parametrize(("old", "new"), mutants("adamw"))
def test_a_kernel_that_is_wrong_is_noticed(old, new, tmp_path):
    module = changed("adamw", old, new, tmp_path)
    given = step((5, 1024, 1500, 40_000), torch.bfloat16, torch.bfloat16)
    given.scale = torch.tensor(0.5)

    def compare() -> None:
        for found in (0.0, 1.0):
            given.found_inf = torch.tensor(found)
            assert_close(launched(given, module), expected(given))

    with pytest.raises(AssertionError):
        compare()


def test_the_op_keeps_its_contract():
    given = step((5, 12), torch.bfloat16, torch.bfloat16).copy()
    library.opcheck(torch.ops.triton_kernels.adamw.default, tuple(given.arguments()))


def test_the_op_works_in_a_compiled_function():
    given = step((5, 12))

    def run(made: Step) -> None:
        adamw(*made.arguments())

    plain, compiled = (given.copy() for _ in range(2))
    run(plain)
    torch.compile(run, backend="aot_eager", fullgraph=True)(compiled)
    for a, b in zip(plain.written(), compiled.written(), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize(
    ("change", "error", "told"),
    [
        (lambda s: s.params.pop(), ValueError, "1 params and 2 exp_avgs"),
        (lambda s: s.grads.append(s.grads[0]), ValueError, "2 params and 3 grads"),
        (lambda s: s.narrow.append(s.params[0]), ValueError, "2 params and 1 narrow"),
        (lambda s: s.grads.__setitem__(0, s.grads[0].bfloat16()), TypeError, "torch.bfloat16, tor"),
        (
            lambda s: s.params.__setitem__(0, s.params[0].double()),
            TypeError,
            "takes one of torch.f",
        ),
        (lambda s: s.grads.__setitem__(0, s.grads[0][:4]), ValueError, r"grads\[0\] of size \[4\]"),
        (lambda s: s.steps.__setitem__(0, torch.tensor(1)), TypeError, "steps of torch.float32, t"),
        (lambda s: setattr(s, "scale", torch.ones(2)), TypeError, "is one torch.float32 number"),
    ],
)
def test_operands_that_it_cannot_take_are_refused(change, error, told):
    given = step((5, 12))
    change(given)
    with pytest.raises(error, match=told):
        adamw(*given.arguments())
