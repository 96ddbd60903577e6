"""Programs run in slices, of the batch and of tokens, and are compared with what is not sliced:

    plain eager code                     its outputs and gradients
    the graph as it was captured         close to those
    it through all passes, uncut         equal to the graph, bit by bit
    it in slices                         close to the graph
    those slices through all passes      equal to the slices, bit by bit

What fails is shortened by leaving out lines.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from fuzz.slices.drawing import drawn, runs
from fuzz.slices.program import SEED, SIMPLEST, Program, built, computed
from in_slices import UNCUT, BatchInSlices, TokensInSlices
from joint import Joint, catch, results
from torch import Tensor

from zcompile.ir.torch_compat import is_tangent
from zcompile.passes.slice_batch.stages import batch_graph
from zcompile.passes.tile_tokens.regions import regions_of

TOLERANCE = 1e-9
"""Of the largest number of a result, or of 1: sums of float64 in another order differ by some
1e-15, what is wrong by far more."""

TORCHS = "view size is not compatible with input tensor's size and stride"
"""What a graph raises as it was captured, with any backend, where torch traced an op with other
strides than the op gives, as the gradient of softplus."""

Results = dict[str, Any]
Told = Callable[[Program], None]
"""Told of each program before it is run."""


class Different(AssertionError):
    """Two results of a program that should be the same are not, or there is none."""

    def __init__(self, program: Program, reason: str) -> None:
        super().__init__(program.text(reason))
        self.program = program


@dataclass(frozen=True)
class Sliced:
    """What of a program ran in slices."""

    batch: bool
    tokens: bool


def hunt(number: int, programs: int, told: Told | None = None) -> Different | None:
    """The first of so many programs that fails, shrunk; the same for the same `number`."""
    for n in range(programs):
        program = drawn(f"{number}.{n}")
        if told is not None:
            told(program)
        if (found := failure(program)) is not None:
            return shrunk(found)
    return None


def check(program: Program) -> Sliced:
    """raises  Different"""
    model, given = built(program)
    joint = catch(model, *given)
    try:
        whole = results(joint, SEED)
    except RuntimeError as error:  # on purpose: of torch's own, which has nothing to be compared
        if TORCHS not in str(error):
            raise
        return Sliced(batch=False, tokens=False)
    eager = computed(program, _tangents(joint))
    _hold(program, "the graph", _known(whole, eager), _known(eager, eager), TOLERANCE)
    _hold(program, "all passes, uncut", results(joint.through(*UNCUT), SEED), whole)
    found = Sliced(batch_graph(joint.graph) is not None, bool(regions_of(joint.graph)))
    if found.batch:
        made = joint.through(BatchInSlices(program.slices, program.level))
        _hold_slices(program, "slices of the batch", made, whole)
    if found.tokens:
        made = joint.through(TokensInSlices(program.tokens))
        _hold_slices(program, "slices of tokens", made, whole)
    return found


def _hold_slices(program: Program, what: str, made: Joint, whole: Results) -> None:
    sliced = results(made, SEED)
    _hold(program, what, sliced, whole, TOLERANCE)
    _hold(program, f"all passes after {what}", results(made.through(*UNCUT), SEED), sliced)


def _tangents(joint: Joint) -> list[Tensor]:
    """What backward starts from: the last inputs of a joint graph."""
    count = sum(map(is_tangent, joint.graph.find_nodes(op="placeholder")))
    return joint.values[len(joint.values) - count :]


def _known(found: Results, eager: Results) -> Results:
    """Results by the names of eager code, in which the gradient of x is no output of the graph;
    without gradients of zeros, which torch makes of what backward does not reach."""
    made = {}
    for name, value in found.items():
        if isinstance(value, Tensor) and not name.startswith("input "):
            is_input = name.startswith("output ") and name not in eager
            made["grad of x" if is_input else name] = value
    return {n: value for n, value in made.items() if n.startswith("output ") or value.any()}


def _hold(
    program: Program, what: str, found: Results, expected: Results, tolerance: float | None = None
) -> None:
    """Two results are the same; without a tolerance, to the last bit. raises  Different"""
    if found.keys() != expected.keys():
        only = sorted(found.keys() ^ expected.keys())
        raise Different(program, f"{what}: only one has {', '.join(only)}")
    for name, value in expected.items():
        if (reason := _difference(found[name], value, tolerance)) is not None:
            raise Different(program, f"{what}: {name} {reason}")


def _difference(one: Any, other: Any, tolerance: float | None) -> str | None:
    if not isinstance(other, Tensor):
        return None if one == other else f"is {one} instead of {other}"
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return f"is {one.dtype}{[*one.shape]} instead of {other.dtype}{[*other.shape]}"
    if torch.equal(one, other):
        return None
    apart, most = (float(t.double().abs().max()) for t in (one.double() - other.double(), other))
    if tolerance is not None and apart <= tolerance * max(1.0, most):
        return None
    return f"is {apart:.2g} off, of at most {most:.2g}"


def failure(program: Program) -> Different | None:
    """How a program fails, if it does: by another result, or by an error."""
    try:
        check(program)
    except Different as found:
        return found
    except Exception as error:  # noqa: BLE001  # on purpose: whatever it is, the program is told
        said = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
        different = Different(program, said)
        different.__cause__ = error
        return different
    return None


def shrunk(found: Different) -> Different:
    """The failure of a program with as few of the same lines as still fail."""
    again = True
    while again:
        again = False
        for shorter in _shorter(found.program):
            if runs(shorter) and (other := failure(shorter)) is not None:
                found, again = other, True
                break
    return found


def _shorter(program: Program) -> Iterator[Program]:
    """The program with one line less, but for the first, and with a simpler result."""
    for at in reversed(range(1, len(program.lines))):
        yield replace(program, lines=program.lines[:at] + program.lines[at + 1 :])
    if program.result != SIMPLEST:
        yield replace(program, result=SIMPLEST)
