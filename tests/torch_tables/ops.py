"""Every op of torch's own table on tiered tensors, beside the same on plain ones.

A *case* is one call: an op, a sample of its arguments, a way to call it, and which of the tensors
among the arguments are tiered. `cases` says which there are, `Case.run` compares.
"""

import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.testing._internal.common_methods_invocations import op_db
from torch.testing._internal.opinfo.core import BinaryUfuncInfo, UnaryUfuncInfo
from torch.utils import _pytree as trees
from torch_tables.comparing import differences, gradient_differences
from torch_tables.outcomes import Outcome, judged
from torch_tables.tiers import Tier, is_tiered, plain

UNWRITTEN = frozenset(
    {
        "empty",
        "empty_like",
        "empty_permuted",
        "empty_strided",
        "new_empty",
        "new_empty_strided",
        "resize_",
        "resize_as_",
    }
)
"""Ops whose results hold whatever memory held; only their metadata can be compared."""
MOST_SINGLE = 4
"""Of the tensors of a sample, so many are tiered alone; then all at once."""


@dataclass
class Side:
    """One of the two calls: the arguments, what came of them."""

    leaves: list[Any]
    spec: Any
    params: dict[int, Any]
    out: Any = None
    result: Any = None
    error: BaseException | None = None
    more: dict[str, Any] = field(default_factory=dict)
    seeds: set[int] = field(default_factory=set)  # addresses of what backward was given


def _address(tensor: torch.Tensor) -> int:
    """Of its memory; 0 for a tensor without, as the gradient of `sgn`."""
    return 0 if torch._is_zerotensor(tensor) else tensor.untyped_storage().data_ptr()


@dataclass(frozen=True)
class Case:
    """One call.

    way     "function", "method", "inplace", "inplace-grad", "inplace-leaf", "out", "out-self",
            "out-resized"
    tiered  positions, among the leaves of (input, args, kwargs), of what is tiered; -1: `out`
    """

    op: Any
    dtype: torch.dtype
    number: int
    sample: Any
    way: str
    tiered: tuple[int, ...]

    @property
    def name(self) -> str:
        return f"{op_name(self.op)} {_short(self.dtype)} #{self.number} {self.way} {self.where}"

    @property
    def where(self) -> str:
        return "tiered=" + ",".join("out" if n < 0 else str(n) for n in self.tiered)

    def run(self, tier: Tier) -> Outcome:
        """raises  nothing that torch or zcompile raises"""
        expected = self._call(None)
        found = self._call(tier)
        outcome = judged(expected, found, self._differences)
        if outcome.kind in ("refused", "raises"):
            asked = self._arguments(None) if outcome.kind == "refused" else expected
            if why := list(self._changes(asked, found)):
                return Outcome("different", f"{outcome.kind} ({outcome.why}), then {why}")
        values = outcome.kind == "different" and "other values" in outcome.why
        if values or outcome.kind == "rounded":
            again = self._call(None)
            if list(self._differences(expected, again)):
                return Outcome("random", outcome.why)
        if outcome.kind == "equal" and expected.error is None and self.way == "detached":
            why = list(self._aliases(expected, found)) if self._written else []
            return Outcome("different", "; ".join(why)) if why else outcome
        return outcome

    @property
    def _written(self) -> bool:
        """Whether results hold something that was computed."""
        return self.op.name not in UNWRITTEN

    def _call(self, tier: Tier | None) -> Side:
        side = self._arguments(tier)
        _seed(3)
        grads = not self.way.startswith("out") and self.way not in ("inplace", "detached")
        with warnings.catch_warnings(), torch.set_grad_enabled(grads):
            warnings.simplefilter("ignore")
            try:
                side.result = self._perform(side, tier)
                self._afterwards(side)
            except Exception as error:  # noqa: BLE001  # on purpose: whatever torch raises, ours is to
                side.error = error
        return side

    def _arguments(self, tier: Tier | None) -> Side:
        """Fresh copies of the sample's tensors; those of `tiered` as parameters, on `tier` if
        there is one."""
        leaves, spec = _leaves(self.sample)
        copies: dict[int, Any] = {}
        params: dict[int, Any] = {}
        for n, leaf in enumerate(leaves):
            if not _is_plain(leaf):
                if isinstance(leaf, Tensor) and leaf.is_leaf and leaf.requires_grad:
                    leaves[n] = leaf.detach().clone().requires_grad_()  # else calls add gradients
                continue
            if id(leaf) not in copies:
                made = _copy_of(leaf)
                if n in self.tiered:
                    trains = leaf.requires_grad
                    made = tier.put(made, trains) if tier else nn.Parameter(made, trains)
                    params[n] = made
                    if self.way in ("detached", "inplace") or self.way.startswith("out"):
                        made = made.detach()
                else:
                    made.requires_grad_(leaf.requires_grad and leaf.is_leaf)
                    params[n] = made
                copies[id(leaf)] = made
            leaves[n] = copies[id(leaf)]
        return Side(leaves, spec, params)

    def _perform(self, side: Side, tier: Tier | None) -> Any:
        input_, args, kwargs = trees.tree_unflatten(side.leaves, side.spec)
        op = self.op
        if self.way in ("function", "detached"):
            return op.op(input_, *args, **kwargs)
        if self.way == "method":
            return op.method_variant(input_, *args, **kwargs)
        if self.way in ("inplace", "inplace-leaf"):
            result = op.inplace_variant(input_, *args, **kwargs)
            side.more["is self"] = result is input_
            return result
        if self.way == "inplace-grad":
            return op.inplace_variant(input_.clone(), *args, **kwargs)
        side.out = self._out(side, tier)
        result = op.op(input_, *args, **kwargs, out=side.out)
        side.more["is out"] = [
            a is b for a, b in zip(_tensors(result), _tensors(side.out), strict=False)
        ]
        return result

    def _out(self, side: Side, tier: Tier | None) -> Any:
        copies = self._arguments(None)  # some ops write to their arguments
        input_, args, kwargs = trees.tree_unflatten(copies.leaves, copies.spec)
        _seed(3)
        like = self.op.op(input_, *args, **kwargs)
        _seed(3)
        if self.way == "out-self" and isinstance(like, Tensor) and _alike(like, input_):
            return side.leaves[0]

        def made(value: Any) -> Any:
            if not isinstance(value, Tensor):
                return value
            blank = torch.empty_strided(value.size(), value.stride(), dtype=value.dtype)
            blank = blank.fill_(7)
            if self.way == "out-resized":
                blank = torch.full(() if value.numel() > 1 else (2, 3), 7, dtype=value.dtype)
            if -1 not in self.tiered:
                return blank
            return tier.put(blank, False) if tier else nn.Parameter(blank, requires_grad=False)

        return trees.tree_map(made, like)

    def _afterwards(self, side: Side) -> None:
        """Backward, where there is any; else a write to each result that shares memory with a
        tiered argument, to show whether it does here as well."""
        results = [t for t in _tensors(side.result) if t.layout is torch.strided]
        if self.way == "detached":
            return
        given = self.sample.output_process_fn_grad(side.result)
        roots = [t for t in _tensors(given) if t.requires_grad]
        if not roots or not torch.is_grad_enabled():
            return
        seeds = []
        for n, root in enumerate(roots):
            generator = torch.Generator().manual_seed(11 + n)
            made = torch.randn(root.size(), generator=generator, dtype=torch.float64)
            seeds.append(made.to(root.dtype))
        side.more["roots"] = len(results)
        side.seeds = {_address(seed) for seed in seeds}
        torch.autograd.backward(roots, seeds)

    def _differences(self, expected: Side, found: Side) -> Iterator[str]:
        values = self._written
        yield from differences(expected.result, found.result, "result", values)
        if expected.out is not None:
            yield from differences(expected.out, found.out, "out", values)
        for n, param in expected.params.items():
            yield from differences(param, found.params[n], f"argument {n}", values)
            a, b = param.grad, found.params[n].grad
            if (a is None) != (b is None):
                yield f"gradient {n}: {'missing' if b is None else 'came'}"
            elif a is not None:
                yield from gradient_differences(a, b, f"gradient {n}")
                goes_home = (
                    is_tiered(found.params[n])
                    and a.layout is torch.strided
                    # What backward was given is the caller's memory, and stays so. `prod` over one
                    # element passes it on for a subclass alone, where torch has another formula.
                    and _address(a) not in expected.seeds
                    and (is_tiered(b) or _address(b) not in found.seeds)
                )
                if goes_home and not is_tiered(b):
                    yield f"gradient {n}: stays in memory"
        if expected.more != found.more:
            yield f"{found.more}, not {expected.more}"

    def _changes(self, expected: Side, found: Side) -> Iterator[str]:
        """What an op that failed did to its arguments, beside what it should have done."""
        for n, param in expected.params.items():
            yield from differences(param.detach(), found.params[n].detach(), f"argument {n}")

    def _aliases(self, expected: Side, found: Side) -> Iterator[str]:
        """Where a plain result shares memory with an argument, a write to it is seen there."""
        tiered = [expected.leaves[n] for n in self.tiered]
        homes = {t.untyped_storage().data_ptr() for t in tiered if t.numel()}
        pairs = zip(_tensors(expected.result), _tensors(found.result), strict=True)
        for n, (a, b) in enumerate(pairs):
            if a.layout is not torch.strided or not a.numel():
                continue
            if a.untyped_storage().data_ptr() not in homes:
                continue
            before = [plain(expected.params[m]).clone() for m in self.tiered]
            errors = []
            for result in (a, b):
                try:
                    with torch.no_grad():
                        result.copy_(torch.full((), 3).to(result.dtype))
                    errors.append(None)
                except Exception as error:  # noqa: BLE001  # on purpose: whatever torch raises, ours is to
                    errors.append(error)
            if (errors[0] is None) != (errors[1] is None):
                yield f"a write to result {n} gives {errors[1]!r}, not {errors[0]!r}"
            for m, old in zip(self.tiered, before, strict=True):
                now = expected.params[m]
                told = list(differences(now, found.params[m], f"argument {m}, result {n} written"))
                if told and not list(differences(old, plain(found.params[m]), "")):
                    told.append("the write was lost")
                yield from told


def cases(op: Any, dtype: torch.dtype, most: int | None = None) -> Iterator[Case]:
    """The cases of an op; `most` samples of it at most, spread over all that there are."""
    for number, sample in chosen_samples(op, dtype, most):
        yield from cases_of(op, dtype, number, sample)


def chosen_samples(op: Any, dtype: torch.dtype, most: int | None) -> Sequence[tuple[int, Any]]:
    _seed(1)
    trains = op.supports_autograd and (dtype.is_floating_point or dtype.is_complex)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        samples = list(enumerate(op.sample_inputs("cpu", dtype, requires_grad=trains)))
    if most is None or len(samples) <= most:
        return samples
    return [samples[n * (len(samples) - 1) // max(1, most - 1)] for n in range(most)]


def cases_of(op: Any, dtype: torch.dtype, number: int, sample: Any) -> Iterator[Case]:
    leaves, _ = _leaves(sample)
    seen: set[int] = set()
    tensors = []
    for n, leaf in enumerate(leaves):
        if _is_plain(leaf) and id(leaf) not in seen:
            seen.add(id(leaf))
            tensors.append(n)

    def case(way: str, *tiered: int) -> Case:
        return Case(op, dtype, number, sample, way, tiered)

    if tensors:
        together = [tuple(tensors)]
        if len(tensors) > 1:
            together += [(n,) for n in tensors[:MOST_SINGLE]]
        for tiered in together:
            yield case("function", *tiered)
            yield case("detached", *tiered)
        if isinstance(sample.input, Tensor) and op.method_variant is not None:
            yield case("method", *tensors)
        if isinstance(sample.input, Tensor) and op.inplace_variant is not None:
            for tiered in together:
                yield case("inplace", *tiered)
            yield case("inplace-grad", *tensors)
            yield case("inplace-leaf", *tensors)
    if op.supports_out:
        yield case("out", -1)
        if tensors:
            yield case("out", -1, *tensors)
            yield case("out", *tensors)
            if isinstance(op, UnaryUfuncInfo | BinaryUfuncInfo):
                yield case("out-self", *tensors)
        yield case("out-resized", -1)


def ops_named(names: Sequence[str] | None = None) -> list[Any]:
    """Of torch's table; `names` that this version of torch lacks are left out."""
    return [op for op in op_db if names is None or op.name in names or op_name(op) in names]


def op_names() -> list[str]:
    """All that run on a CPU."""
    return sorted({op_name(op) for op in op_db if not op.name.startswith("jiterator")})


def op_name(op: Any) -> str:
    return f"{op.name}.{op.variant_test_name}" if op.variant_test_name else str(op.name)


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _leaves(sample: Any) -> tuple[list[Any], Any]:
    return trees.tree_flatten((sample.input, sample.args, sample.kwargs))


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in trees.tree_leaves(tree) if isinstance(leaf, Tensor)]


def _seed(number: int) -> None:
    """As `torch.manual_seed`, which also tells every other kind of device, at a cost."""
    torch.default_generator.manual_seed(number)


def _alike(a: Tensor, b: Tensor) -> bool:
    return a.size() == b.size() and a.dtype == b.dtype


def _is_plain(leaf: object) -> bool:
    """Whether it may be a parameter: dense numbers in memory."""
    if type(leaf) not in (Tensor, nn.Parameter) or leaf.layout is not torch.strided:
        return False
    return not (leaf.is_quantized or leaf.is_nested) and leaf.device.type == "cpu"


def _copy_of(tensor: Tensor) -> Tensor:
    """A copy with the strides of the original, also where it has gaps or overlaps itself."""
    tensor = tensor.detach().resolve_conj().resolve_neg()
    if not tensor.numel():
        return torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype)
    rows = zip(tensor.size(), tensor.stride(), strict=True)
    span = 1 + sum((n - 1) * s for n, s in rows)
    flat = tensor.as_strided((span,), (1,)).clone()
    return flat.as_strided(tensor.size(), tensor.stride())
