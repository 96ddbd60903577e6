"""Calls the backward of a graph where gradients of some results are undefined.

autograd hands on that they are (`ir/torch_compat.py::hand_on_undefined`). For each set of such
results torch traces the graph once more, when a call first needs it: forward as before, and
backward as of a graph in which nobody asked for those gradients (`torch_compat.py::traced_again`).
So whatever a formula of autograd decides by the layout of a gradient, or by whether there is one,
is decided as in eager PyTorch. Forward has run by then: the new graph is taken only if all that its
backward reads is computed, and saved, by the forward that runs. Otherwise, and beyond a number of
sets, undefined gradients are zeros, and `stats` tells it.
"""

from collections.abc import Callable, Collection, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, fx

from zcompile.frontend.own_thread import on_own_thread
from zcompile.ir.eager_formulas import FORMULAS, INSTEAD, LEFT_WHOLE
from zcompile.ir.torch_compat import (
    aot_backend,
    is_part_of_tangent,
    is_tangent,
    symbols_of,
    traced_again,
    traced_inputs,
    unheard_graphs,
    without_python_kernels,
)
from zcompile.memory.sized import SizeReader, sizes_as

Call = Callable[[list[Any]], Any]
T = TypeVar("T")

MOST_SETS = 32
"""Most sets of undefined gradients of one graph that it is traced for."""
TOO_MANY = f"more than {MOST_SETS} choices of its results were differentiated"


def takes_undefined(backward: fx.Graph) -> bool:
    """Whether the backward may be called with None for the gradients of some results.

    Not that of results of a subclass, whose gradients come in parts; nor where zeros could not be
    made for such a result, since its size is dynamic and nothing else tells it.
    """
    places = backward.find_nodes(op="placeholder")
    tangents = [node for node in places if is_tangent(node)]
    if len(tangents) < 2 or any(is_part_of_tangent(node) for node in places):
        return False
    told = {*SizeReader(backward, passed_over=is_tangent).names}
    return all(
        symbols_of(n) <= told
        for node in tangents
        for n in (*node.meta["val"].size(), *node.meta["val"].stride())
    )


class _Traced(Exception):
    """Ends the tracing of a graph: its joint graph is there, and what was made of it."""

    def __init__(self, made: Any) -> None:
        super().__init__("traced")
        self.made = made


@dataclass(frozen=True)
class Tracing:
    """What a graph of Dynamo is traced again from.

    inputs    what its inputs are traced as
    autocast  types of devices for which autocast is on, with its dtype
    cached    whether autocast keeps what it casts
    device    that the model computes on
    """

    gm: fx.GraphModule
    inputs: list[Any]
    autocast: Sequence[tuple[str, torch.dtype]]
    cached: bool
    device: torch.device

    @classmethod
    def of(cls, gm: fx.GraphModule, device: torch.device) -> "Tracing | None":
        """How a graph is about to be traced on this thread; None, if it cannot be repeated."""
        inputs = traced_inputs(gm)
        if inputs is None:
            return None
        kinds = [kind for kind in {"cpu", device.type} if torch.is_autocast_enabled(kind)]
        cast = [(kind, torch.get_autocast_dtype(kind)) for kind in kinds]
        return cls(gm, inputs, cast, torch.is_autocast_cache_enabled(), device)

    def without(
        self, left_out: Collection[int], use: Callable[[fx.GraphModule, int], T]
    ) -> T | Exception:
        """What `use` makes of the joint graph, and of the number of its results, in which results
        at the positions `left_out`, among those that take gradients, have none; or the error that
        was raised meanwhile."""

        def partition(
            joint: fx.GraphModule, inputs: Any, *, num_fwd_outputs: int, **_: Any
        ) -> tuple[fx.GraphModule, fx.GraphModule]:
            raise _Traced(use(joint, num_fwd_outputs))

        def trace() -> T:
            backend = aot_backend(_unused, _unused, _unused, partition, FORMULAS)
            with ExitStack() as stack:
                # Threads of autograd wait for this one, where the device has some.
                stack.enter_context(torch.autograd.set_multithreading_enabled(False))
                for kind, dtype in self.autocast:
                    cast = torch.autocast(kind, dtype=dtype, cache_enabled=self.cached)
                    stack.enter_context(cast)
                stack.enter_context(unheard_graphs())
                stack.enter_context(without_python_kernels(LEFT_WHOLE, INSTEAD))
                stack.enter_context(traced_again(self.inputs, left_out))
                try:
                    backend(self.gm, list(self.inputs))
                except _Traced as traced:
                    made: T = traced.made
                    return made
            raise AssertionError("a graph that is differentiated has a joint graph")

        return on_own_thread(trace, self.device, "zinf-tracing")


def _unused(gm: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
    raise AssertionError("tracing ends before anything is compiled")


@dataclass(frozen=True)
class Fewer:
    """A backward for one set of undefined gradients.

    call      in the boxed convention
    inputs    names of its inputs, among those of the backward of all gradients
    left_out  names of handles whose parameters get no gradient, among the same
    """

    call: Call
    inputs: Sequence[str]
    left_out: Sequence[str]


class Backwards:
    """The backward of a graph, for each set of undefined gradients.

    graph      of all gradients
    whole      runs it, in the boxed convention
    make       makes the backward without the gradients at some positions among all; or says why
               there is none
    leave_out  is told before a backward which handles get no gradient
    tell       is told the reason where undefined gradients are zeros
    """

    def __init__(
        self,
        graph: fx.Graph,
        whole: Call,
        make: Callable[[Collection[int]], Fewer | str],
        leave_out: Callable[[Sequence[Any]], None],
        tell: Callable[[str], None],
    ) -> None:
        self._whole, self._make, self._leave_out, self._tell = whole, make, leave_out, tell
        places = graph.find_nodes(op="placeholder")
        self._at = {node.name: i for i, node in enumerate(places)}
        self._tangents = {i: node.meta["val"] for i, node in enumerate(places) if is_tangent(node)}
        self._sizes = SizeReader(graph, passed_over=is_tangent)
        self._made: dict[tuple[int, ...], tuple[Call, Sequence[int], Sequence[int]] | None] = {}

    def __call__(self, args: list[Any]) -> Any:
        """Run the backward for what is there; `args` is emptied."""
        undefined = tuple([i for i in self._tangents if args[i] is None])
        if not undefined:
            return self._whole(args)
        if undefined not in self._made:
            self._made[undefined] = self._fewer(undefined)
        made = self._made[undefined]
        if made is None:
            for i in undefined:
                args[i] = self._zeros(self._tangents[i], args)
            return self._whole(args)
        call, inputs, left_out = made
        given = [args[i] for i in inputs]
        self._leave_out([args[i] for i in left_out])
        args.clear()
        return call(given)

    def _fewer(
        self, undefined: tuple[int, ...]
    ) -> tuple[Call, Sequence[int], Sequence[int]] | None:
        number = {i: position for position, i in enumerate(self._tangents)}
        known = len(self._made) >= MOST_SETS
        made = TOO_MANY if known else self._make([number[i] for i in undefined])
        if isinstance(made, str):
            self._tell(made)
            return None
        inputs, left_out = ([self._at[n] for n in names] for names in (made.inputs, made.left_out))
        return made.call, inputs, left_out

    def _zeros(self, traced: Tensor, args: Sequence[Any]) -> Tensor:
        """Zeros as autograd would hand on, as they were traced."""
        size = sizes_as(dict(zip(self._sizes.names, self._sizes.read(args), strict=True)))
        return torch.empty_strided(
            [size(n) for n in traced.size()],
            [size(n) for n in traced.stride()],
            dtype=traced.dtype,
            device=traced.device,
        ).zero_()
