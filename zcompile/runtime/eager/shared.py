"""Ops on tensors that several ranks hold shares of, called outside of compiled graphs.

All ranks call them. What they are about to do is compared first: the op, the tensors it is about,
numbers such as the learning rate, the values of plain operands, and the state of the generator that
an op draws from. Ops of torch's optimizers that wait to be joined are compared all together, when
the step ends. Elementwise ops change shares where they rest; norms of gradients are summed over
ranks; everything else gathers whole tensors on every rank.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from zcompile.ir.torch_compat import Dispatched
from zcompile.runtime.eager.clipping import MEASURES, is_gradient
from zcompile.runtime.eager.fillings import LIKES, NEWS
from zcompile.runtime.eager.rows import Application
from zcompile.runtime.norms import measure_of
from zcompile.runtime.ranks.fabric import Fabric, LoneReading
from zcompile.runtime.session import session_of
from zcompile.runtime.store.store import Entry, unexchanged_error

aten = torch.ops.aten
ONE_RANK = LIKES | NEWS | {aten.rand_like.default, aten.randn_like.default, aten.detach_.default}
"""Ops that ask a tiered tensor for no values."""
MOST_NAMED = 3
"""Most tensors of an op that an error names."""
VALUED = ("cpu", "cuda")
"""Types of devices where plain operands have values."""
MOST_NUMBERS = 8
"""Most numbers of an op that an error tells."""


def fabric_of(cls: type, args: Sequence[Any], kwargs: dict[str, Any]) -> Fabric | None:
    """The ranks that hold the operands of an op; None, if this process alone does."""
    for value in (*args, *kwargs.values()):
        for leaf in value if type(value) in (list, tuple) else (value,):
            if isinstance(leaf, cls):
                tiered: Any = leaf
                return tiered.entry.store.fabric  # type: ignore[no-any-return]  # of an entry
    return None


@dataclass
class Agreement:
    """What the ranks have to agree on before ops are done.

    details  on which all must agree
    names    of the tensors that the ops are about, each once, as keys
    numbers  that they are called with, for people; likewise
    """

    details: list[object] = field(default_factory=list)
    names: dict[str, None] = field(default_factory=dict)
    numbers: dict[str, None] = field(default_factory=dict)

    def add(self, other: "Agreement") -> None:
        """Ops of the same call come after these."""
        self.details += other.details
        self.names |= other.names
        self.numbers |= other.numbers

    def reach(self, fabric: Fabric, what: str) -> None:
        """Compare with the other ranks; they wait for each other.

        what    the same on all ranks
        raises  RanksDiffer, RankFailed
        """
        shown = ", ".join(map(repr, [*self.names][:MOST_NAMED]))
        more = f" and {len(self.names) - MOST_NAMED} more" if len(self.names) > MOST_NAMED else ""
        numbers = f" with {', '.join([*self.numbers][:MOST_NUMBERS])}" if self.numbers else ""
        fabric.agree(what, *self.details, text=f"of {shown}{more}{numbers}")


def agree_on_op(
    fabric: Fabric, cls: type, func: Dispatched, leaves: Sequence[Any], kwargs: dict[str, Any]
) -> None:
    """Compare an op with what the other ranks are about to do. raises  RanksDiffer, RankFailed"""
    if func not in ONE_RANK:
        agreement_on(cls, func, leaves, kwargs).reach(fabric, f"call {func}")


def check_exchanged(cls: type, leaves: Sequence[Any]) -> None:
    """Check that no operand is a gradient that this rank has summed alone, before any rank is
    asked. raises  Unsupported"""
    for leaf in leaves:
        if isinstance(leaf, cls):
            tiered: Any = leaf
            if tiered.entry.unexchanged:
                raise unexchanged_error(tiered.entry.name)


def check_read_alone(reads: LoneReading, cls: type, app: Application) -> None:
    """Check that an op only reads what rank 0 may read alone, and that this is rank 0.

    raises  Unsupported
    """
    if app.func in ONE_RANK:
        return
    if changed := [tensor for tensor in app.written() if isinstance(tensor, cls)]:
        tiered: Any = changed[0]
        raise reads.refusal(f"change {tiered.entry.name!r} by {app.func}")
    for tensor in app.tensors():
        if isinstance(tensor, cls):
            tiered = tensor
            reads.check_readable(tiered.entry)


def agreement_on(
    cls: type, func: Dispatched, leaves: Sequence[Any], kwargs: dict[str, Any]
) -> Agreement:
    """What the ranks have to agree on before an op is done."""
    # What is only read, as by a forward, may meet other values on each rank.
    keeps = func._schema.is_mutable or func._schema.name.startswith("aten::_foreach")
    names: list[str] = []
    born = False
    details: list[object] = [str(func)]
    for leaf in leaves:
        if isinstance(leaf, cls):
            tiered: Any = leaf
            names.append(tiered.entry.name)
            born = born or tiered.entry.key in session_of(tiered.entry).births
            details += (tiered.entry.name, tiered.entry_layout)
        elif isinstance(leaf, Tensor):
            details.append(leaf if keeps and leaf.device.type in VALUED else str(type(leaf)))
        else:
            details.append(str(type(leaf)))
            if isinstance(leaf, int | float | complex | str | torch.dtype | None):
                details.append(leaf)
    if torch.Tag.nondeterministic_seeded in func.tags and not born:  # its value is compared then
        details += ("draws from", _random_state(kwargs.get("generator"), leaves))
    numbers = [f"{key}={value}" for key, value in kwargs.items() if isinstance(value, float)]
    numbers += [f"{leaf}" for leaf in leaves if isinstance(leaf, float) and not numbers]
    return Agreement(details, dict.fromkeys(names), dict.fromkeys(numbers))


def _random_state(generator: torch.Generator | None, leaves: Sequence[Any]) -> Tensor:
    """The state of the generator that an op draws from: its own, or that of the device."""
    if generator is not None:
        return generator.get_state()
    device = next((leaf.device for leaf in leaves if isinstance(leaf, Tensor)), None)
    if device is not None and device.type == "cuda":
        return torch.cuda.get_rng_state(device)
    return torch.get_rng_state()


def agree_on_found_inf(fabric: Fabric, func: Dispatched, args: Sequence[Any]) -> None:
    """Let all ranks skip a step of which one has found gradients that are not finite."""
    if func._schema.name == "aten::_amp_foreach_non_finite_check_and_unscale_":
        found = args[1]
        found.copy_(fabric.sums(found.detach().double().reshape(-1), largest=True).view_as(found))


# --- Norms ---


def norms_over_ranks(
    cls: type, fabric: Fabric, func: Dispatched, args: Sequence[Any], kwargs: dict[str, Any]
) -> Any | None:
    """The norms of gradients, each summed in float64 over the shares of all ranks; None for what
    else is asked.

    All of them cross at once. A gradient that every rank has whole is measured likewise, so that
    the number of ranks does not decide how it rounds.
    """
    if func not in MEASURES or not args:
        return None
    lists = isinstance(args[0], list)
    tensors: list[Any] = args[0] if lists else [args[0]]
    if not all(is_gradient(cls, tensor) for tensor in tensors):
        return None
    if func is aten.linalg_vector_norm.default and (len(args) > 2 or "dim" in kwargs):
        return None
    rest = tuple(tuple(a) if isinstance(a, list) else a for a in args[1:])
    order = measure_of(func, rest, tuple(sorted(kwargs.items())), lists).order
    if order is None or order <= 0:
        return None
    # Entries rest on the host and on the device: numbers meet on the host.
    own = torch.stack([_power_sum(tensor.entry, tensor.dtype, order).cpu() for tensor in tensors])
    shared = [n for n, tensor in enumerate(tensors) if tensor.entry.partition is not None]
    if shared:
        own[shared] = fabric.sums(own[shared], largest=order == float("inf"))
    values = own if order == float("inf") else own.pow(1.0 / order)
    made = [
        value.to(tensor.device, kwargs.get("dtype") or tensor.dtype.to_real())
        for value, tensor in zip(values, tensors, strict=True)
    ]
    return made if lists else made[0]


def _power_sum(entry: Entry, dtype: torch.dtype, order: float) -> Tensor:
    """Over the elements of a gradient that this rank holds: the sum of |x|**order, or the largest
    |x|; float64 []."""
    session = session_of(entry)
    if session.can_view_in_place(entry):
        memory = session.view_in_place(entry, 0, entry.nbytes, False)
    else:
        memory = session.read_here(entry)
    part = entry.partition
    values = memory.view(dtype)[: None if part is None else part.own_count]
    wide = values.to(torch.complex128 if dtype.is_complex else torch.float64).abs()
    if order == float("inf"):
        return wide.amax() if wide.numel() else wide.new_zeros(())
    return (wide * wide if order == 2 else wide.pow(order)).sum()
