"""How programs are drawn: each rule says one of its phrases, filled in by what torch's side has.

Hypothesis draws, leaves some rules out of some programs (so that what remains meets more often).
"""

from collections.abc import Callable, Sequence
from string import Formatter
from typing import Any, ClassVar, TypeVar

import torch
from fuzz import phrases
from fuzz.program import Program
from fuzz.setting import OPTIMIZERS
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule
from torch import Tensor

T = TypeVar("T")

PARAMS = (
    "m.first.weight",
    "m.second.weight",
    "m.left",
    "m.right",
    "m.first.bias",
    "m.second.bias",
    "m.turned",
    "m.conv",
    "m.narrow",
    "m.scale",
    "m.frozen",
)
VARIABLES = 6
"""So many names for tensors; a name that is used again lets go of what it was for."""
QUIETLY = "with torch.no_grad(): "


NOT_YET: tuple[str, ...] = ()
"""Steps with such a text are known to fail, and left out until what they wait for is mended."""


class Machine(RuleBasedStateMachine):
    """budget    one of `setting.BUDGETS`
    compiled  whether the compiled model is called too
    without   steps with such a text are left out, to look past a defect that is known
    told      of each step before it is run
    """

    budget: ClassVar[str] = "roomy"
    compiled: ClassVar[bool] = False
    without: ClassVar[tuple[str, ...]] = NOT_YET
    told: ClassVar[Callable[[Program, str], None]] = staticmethod(lambda program, step: None)

    def __init__(self) -> None:
        super().__init__()
        self.program: Any = None  # of class Program, once it has begun
        self.names = 0
        self.broken = False

    @initialize(looks=st.sampled_from([True, True, False]))
    def begin(self, looks: bool) -> None:
        self.program = Program(self.budget, looks)

    def teardown(self) -> None:
        if self.program is None:
            return
        try:
            if not self.broken:
                self.program.compare()
        finally:
            self.program.close()

    # What programs do

    @rule(data=st.data())
    def view(self, data: st.DataObject) -> None:
        how, source = one(data, ["", "", QUIETLY]), self.tensor(data)
        for _ in range(whole(data, 1, 2)):
            name = self.name()
            self.step(f"{how}{name} = {self.filled(data, phrases.VIEWS, t=source)}")
            if not isinstance(self.program.plain.get(name), Tensor):
                return
            source = name

    @rule(data=st.data())
    def write(self, data: st.DataObject) -> None:
        self.step(one(data, [QUIETLY, QUIETLY, QUIETLY, ""]) + self.filled(data, phrases.WRITES))

    @rule(data=st.data())
    def write_through_a_view(self, data: st.DataObject) -> None:
        target = self.filled(data, phrases.VIEWS)
        self.step(QUIETLY + self.filled(data, phrases.WRITES, t=target))

    @rule(data=st.data())
    def write_data(self, data: st.DataObject) -> None:
        target = f"{self.tensor(data)}.data"
        self.step(one(data, ["", QUIETLY]) + self.filled(data, phrases.WRITES, t=target))

    @rule(data=st.data())
    def read(self, data: st.DataObject) -> None:
        name = self.name(one(data, ["v", "t"]))
        self.step(f"{one(data, ['', QUIETLY])}{name} = {self.filled(data, phrases.READS)}")

    @rule(data=st.data())
    def point_data_elsewhere(self, data: st.DataObject) -> None:
        self.say(data, phrases.DATA)

    @rule(data=st.data())
    def evaluate_another_and_restore(self, data: st.DataObject) -> None:
        given = {"p": self.parameter(data), "name": self.name()}
        for phrase in phrases.EVALUATE_ANOTHER:
            self.step(self.filled(data, [phrase], **given))

    @rule(data=st.data())
    def swap(self, data: st.DataObject) -> None:
        self.say(data, phrases.SWAPS)

    @rule(data=st.data())
    def gradient(self, data: st.DataObject) -> None:
        self.say(data, phrases.GRADIENTS)

    @rule(data=st.data())
    def clip(self, data: st.DataObject) -> None:
        self.say(data, phrases.CLIPS)

    @rule(data=st.data())
    def toggle(self, data: st.DataObject) -> None:
        self.say(data, phrases.TOGGLES)

    @rule(data=st.data())
    def backward(self, data: st.DataObject) -> None:
        self.say(data, phrases.BACKWARDS)

    @rule(data=st.data())
    def backward_of_tensors(self, data: st.DataObject) -> None:
        loss = self.filled(data, phrases.LOSSES)
        self.step(one(data, [f"loss = {loss}", f"({loss}).backward()"]))

    @precondition(lambda self: self.compiled)
    @rule(data=st.data())
    def compiled_call(self, data: st.DataObject) -> None:
        self.say(data, phrases.COMPILED)

    @rule(data=st.data())
    def hook(self, data: st.DataObject) -> None:
        self.say(data, phrases.HOOKS)

    @precondition(lambda self: self.hooks())
    @rule(data=st.data())
    def remove_hook(self, data: st.DataObject) -> None:
        self.step(f"{one(data, self.hooks())}.remove()")

    @rule(data=st.data())
    def fail(self, data: st.DataObject) -> None:
        self.say(data, phrases.FAILURES)

    @rule(data=st.data())
    def train(self, data: st.DataObject) -> None:
        self.say(data, phrases.TRAINING)

    @rule(data=st.data())
    def keep(self, data: st.DataObject) -> None:
        self.say(data, phrases.KEEPING)

    @rule(data=st.data())
    def move(self, data: st.DataObject) -> None:
        for _ in range(whole(data, 1, 3)):
            self.say(data, phrases.MOVES)

    # How a phrase is filled in

    def say(self, data: st.DataObject, choice: Sequence[str]) -> None:
        self.step(self.filled(data, choice))

    def step(self, text: str) -> None:
        if any(part in text for part in self.without):
            return
        self.told(self.program, text)
        try:
            self.program.run(text)
        except BaseException:
            self.broken = True
            raise

    def filled(self, data: st.DataObject, choice: Sequence[str], **given: str) -> str:
        """One of the phrases; names that are not `given` are drawn."""
        phrase = one(data, choice)
        for _, field, _, _ in Formatter().parse(phrase):
            if field and field not in given:
                if "t" not in given and field in OF_TENSOR:
                    given["t"] = given.get("p") or self.tensor(data)
                given[field] = getattr(self, f"draw_{field}")(data, given)
        return phrase.format(**given)

    def draw_t(self, data: st.DataObject, given: dict[str, str]) -> str:
        return self.tensor(data)

    def draw_a(self, data: st.DataObject, given: dict[str, str]) -> str:
        """A tensor that broadcasts to the shape of `t`."""
        shape = self.of(given["t"]).shape
        made = ["torch.randn({0})", "torch.ones({0}, dtype=torch.float64)", "torch.tensor(0.5)"]
        fits = [e for e in self.tensors() if _broadcasts(self.of(e).shape, shape)]
        return one(data, [*(text.format(tuple(shape)) for text in made), *fits, *fits])

    draw_b = draw_a

    def draw_like(self, data: st.DataObject, given: dict[str, str]) -> str:
        like = self.of(given["t"])
        size, dtype = tuple(like.shape), like.dtype
        made = [f"torch.randn({size}).to({dtype})"]
        if len(size) == 2:
            made.append(f"torch.randn({size[::-1]}).to({dtype}).t()")
        fits = [e for e in self.tensors() if self.kind(e) == (like.shape, dtype)]
        copied = [f"{one(data, fits)}.detach().clone()"] if fits else []
        return one(data, [*made, *copied, *fits, *fits])

    def draw_p(self, data: st.DataObject, given: dict[str, str]) -> str:
        return self.parameter(data)

    def draw_q(self, data: st.DataObject, given: dict[str, str]) -> str:
        alike = [e for e in PARAMS if self.kind(e) == self.kind(given["p"])]
        return one(data, [e for e in alike if e != given["p"]] or alike)

    def draw_g(self, data: st.DataObject, given: dict[str, str]) -> str:
        """A parameter with a gradient, if there is one."""
        return one(data, [e for e in PARAMS if self.of(e).grad is not None] or PARAMS)

    def draw_dim(self, data: st.DataObject, given: dict[str, str]) -> str:
        return str(whole(data, 0, self.of(given["t"]).dim() - 1))

    def draw_before(self, data: st.DataObject, given: dict[str, str]) -> str:
        """What stands before the index into a dimension."""
        given["dim"] = self.draw_dim(data, given)
        return ":, " * int(given["dim"])

    def draw_at(self, data: st.DataObject, given: dict[str, str]) -> str:
        return str(whole(data, 0, self.length(given) - 1))

    def draw_step(self, data: st.DataObject, given: dict[str, str]) -> str:
        return str(whole(data, 1, 5))

    def draw_count(self, data: st.DataObject, given: dict[str, str]) -> str:
        return str(whole(data, 1, self.length(given) - int(given.get("at", 0))))

    def length(self, given: dict[str, str]) -> int:
        size = self.of(given["t"]).shape
        return size[int(given.get("dim", 0))] if size else 0

    def draw_strided(self, data: st.DataObject, given: dict[str, str]) -> str:
        """Sizes, strides and an offset that stay within what torch's storage has."""
        tensor = self.of(given["t"])
        room = tensor.untyped_storage().nbytes() // tensor.dtype.itemsize
        offset = whole(data, 0, min(room - 1, 40))
        sizes, strides, left = [], [], room - 1 - offset
        for _ in range(whole(data, 1, 2)):
            strides.append(whole(data, 0, 9))
            sizes.append(whole(data, 1, min(8, left // strides[-1] + 1) if strides[-1] else 3))
            left -= (sizes[-1] - 1) * strides[-1]
        return f"{tuple(sizes)}, {tuple(strides)}, {offset}"

    def draw_name(self, data: st.DataObject, given: dict[str, str]) -> str:
        return self.name()

    def draw_key(self, data: st.DataObject, given: dict[str, str]) -> str:
        return self.name("k")

    def draw_then(self, data: st.DataObject, given: dict[str, str]) -> str:
        return one(data, ["", "", "double", "raise"])

    def draw_kind(self, data: st.DataObject, given: dict[str, str]) -> str:
        return one(data, sorted(OPTIMIZERS))

    def draw_state(self, data: st.DataObject, given: dict[str, str]) -> str:
        states = self.program.plain["opt"].state.get(self.of("m.first.weight"), {})
        return one(data, [k for k, v in states.items() if isinstance(v, Tensor)] or ["step"])

    # What there is

    def of(self, expression: str) -> Tensor:
        """What torch's side has there; nothing in particular, where that raises."""
        try:
            value = eval(expression, self.program.plain)
        except Exception:  # noqa: BLE001  # on purpose: the step itself is to raise it
            value = None
        return value if isinstance(value, Tensor) else torch.zeros(())

    def kind(self, expression: str) -> tuple[torch.Size, torch.dtype]:
        tensor = self.of(expression)
        return tensor.shape, tensor.dtype

    def parameter(self, data: st.DataObject) -> str:
        return one(data, PARAMS)

    def tensor(self, data: st.DataObject) -> str:
        return one(data, self.tensors())

    def tensors(self) -> list[str]:
        """Expressions for parameters, gradients, variables."""
        grads = [f"{p}.grad" for p in PARAMS if self.of(p).grad is not None]
        plain = self.program.plain
        named = sorted(k for k in plain if k[0] in "vt" and k[1:].isdigit())
        named = [name for name in named if isinstance(plain[name], Tensor)]
        return [*PARAMS, *grads, *named, *named]

    def name(self, letter: str = "v") -> str:
        self.names += 1
        return f"{letter}{self.names % VARIABLES}"

    def hooks(self) -> list[str]:
        names = () if self.program is None else self.program.plain
        return sorted(name for name in names if name.startswith("hk"))


OF_TENSOR = frozenset({"a", "b", "like", "dim", "before", "at", "count", "strided"})
"""Names in phrases that depend on what `t` is."""


def one(data: st.DataObject, values: Sequence[T]) -> T:
    return data.draw(st.sampled_from(values))


def whole(data: st.DataObject, low: int, high: int) -> int:
    return data.draw(st.integers(low, max(low, high)))


def _broadcasts(shape: torch.Size, to: torch.Size) -> bool:
    if len(shape) > len(to):
        return False
    return all(a in (1, b) for a, b in zip(reversed(shape), reversed(to), strict=False))
