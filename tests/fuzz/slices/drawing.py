"""How programs are drawn: line after line, each tried out by plain code before the next."""

import random
from dataclasses import replace
from string import Formatter

from fuzz.slices import phrases
from fuzz.slices.program import MOST, SIMPLEST, SIZES, Program, computed

LINES = 3
"""Of a program, at most, beside the first."""
LARGEST = 1e3
"""Of its numbers: roundings of larger ones are no small differences any more."""


def drawn(seed: str) -> Program:
    """The program of a seed."""
    chosen = random.Random(seed)
    while True:
        batch, *_ = sizes = chosen.choice(SIZES)
        program = Program(
            sizes,
            lines=(chosen.choice(phrases.STARTS),),
            result=SIMPLEST,
            slices=chosen.choice([n for n in (2, 3, batch, batch) if n <= batch]),
            level=chosen.choice((0, 1, 9)),
            tokens=chosen.choice((2, 4)),
        )
        for _ in range(chosen.randint(1, LINES)):
            program = longer(program, chosen)
        program = replace(program, result=filled(chosen.choice(phrases.RESULTS), chosen))
        if runs(program):
            return program


def longer(program: Program, chosen: random.Random) -> Program:
    """The program with another line, one that goes with the sizes that x has there."""
    while True:
        line = filled(chosen.choice(chosen.choice(phrases.STEPS)), chosen)
        more = replace(program, lines=(*program.lines, line))
        if runs(more):
            return more


def filled(phrase: str, chosen: random.Random) -> str:
    """A phrase, with something for each of its names."""
    one, other = chosen.sample(range(3), 2)
    given = {
        "d": str(one),
        "e": str(other),
        "n": f"x.shape[{one}]",
        "k": str(chosen.randint(1, 2)),
        "p": chosen.choice(phrases.broadcast("m.table")),
        "q": chosen.choice(phrases.broadcast("m.square")),
        "t": phrases.along(chosen.choice(("m.table", "m.places")), {one, other}),
        "c": chosen.choice(phrases.broadcast("m.places")),
    }
    return Formatter().vformat(phrase, (), given)


def runs(program: Program) -> bool:
    """Whether plain code can compute it, x stays small, and so do its numbers."""
    try:
        found = computed(program)
    except (
        RuntimeError,
        IndexError,
        ValueError,
        TypeError,
    ):  # on purpose: torch refuses it plainly
        return False
    made = found["output 0"]
    if program.result == SIMPLEST and (made.dim() != 3 or max(made.shape) > MOST):
        return False
    return all(bool((value.abs() < LARGEST).all()) for value in found.values())
