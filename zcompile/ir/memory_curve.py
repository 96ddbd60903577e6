"""Holds the live bytes of a graph, node by node, and what became of its activations, as plan, dump
and commands keep and print them.

Data only, and without torch: commands that read a dump do not import it. `memory/footprint.py`
counts.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from zcompile.errors import quoted
from zcompile.ir.units import show_size


@dataclass(frozen=True)
class MemoryCurve:
    """Bytes that values of a graph hold outside the arena while each of its nodes runs.

    nodes     their names, in order: forward, then backward
    backward  index of the first node of backward that computes; if none does, their number
    nbytes    live while each node runs
    where     the place of the peak, for people
    holders   the largest values at the peak: name for people -> bytes, the largest first
    """

    nodes: tuple[str, ...]
    backward: int
    nbytes: tuple[int, ...]
    where: str
    holders: Mapping[str, int]

    @cached_property
    def peak(self) -> int:
        """Largest number of bytes live at one node."""
        return max(self.nbytes, default=0)

    @property
    def peak_node(self) -> str:
        """Name of the first node at the peak; "" of an empty graph."""
        return self.nodes[self.nbytes.index(self.peak)] if self.nodes else ""

    def describe(self) -> str:
        """The peak in a few words."""
        return f"{show_size(self.peak)} at %{self.peak_node} in the {self.where}"

    def laid_over(self, other: "MemoryCurve") -> tuple[int, ...]:
        """The bytes of this curve at the nodes of `other`.

        A node that only `other` has, such as one that recomputes a value, gets the bytes of the
        node before it; a node that `other` lacks counts to the node before it.
        """
        at = {name: index for index, name in enumerate(other.nodes)}
        most: list[int | None] = [None] * len(other.nodes)
        now = 0
        for name, nbytes in zip(self.nodes, self.nbytes, strict=True):
            now = at.get(name, now)
            if most:
                most[now] = max(nbytes, most[now] or 0)
        laid, held = [], 0
        for found in most:
            held = held if found is None else found
            laid.append(held)
        return tuple(laid)


@dataclass(frozen=True)
class Memory:
    """Memory curves of one graph, before and after choosing what becomes of saved values.

    before  if every value were saved that backward needs
    after   as it was chosen
    """

    before: MemoryCurve
    after: MemoryCurve

    def describe(self) -> str:
        """Both peaks in a few words."""
        if self.before == self.after:
            return f"at most {self.after.describe()}; everything is kept"
        return f"at most {self.after.describe()}; were everything kept, {self.before.describe()}"


@dataclass(frozen=True)
class Activation:
    """What becomes of one value of forward that backward needs.

    node     that makes it
    name     for people
    action   "keep" (saved), "again" (recomputed in backward), or the tier it is offloaded to
    seconds  that this is expected to cost by itself: of recomputing, or of the links
    why      for people
    left_at  position of a node before which the memory of one that is offloaded is not given back
    """

    node: str
    name: str
    nbytes: int
    action: str
    seconds: float
    why: str
    left_at: int = 0


@dataclass(frozen=True)
class ActivationCost:
    """Expected seconds of a step that saved values cost together.

    again_s    of compute that is done again
    exposed_s  of transfers, beyond what compute hides
    least_s    lower bound of any choice that fits; None: not known
    """

    again_s: float
    exposed_s: float
    least_s: float | None


@dataclass(frozen=True)
class SlicedRegion:
    """Bytes of a region that runs over slices of tokens, or of the batch, in the phase that needs
    most.

    name          for people: the module that its widest value, or largest weight, is of
    tokens        in all; or samples
    whole_bytes   of values that enter and leave the region, which are there for all of them
    inside_bytes  of values made inside, were they made for all of them at once
    sliced_bytes  of values made inside, in one slice
    unit          what it has slices of
    """

    name: str
    slices: int
    tokens: int
    whole_bytes: int
    inside_bytes: int
    sliced_bytes: int
    unit: str = "tokens"

    def describe(self) -> str:
        """The slices and what they save, in one sentence."""
        return (
            f"{quoted(self.name)} runs over {self.slices} slices of its {self.tokens} {self.unit}: "
            f"{show_size(self.inside_bytes)} of values inside become {show_size(self.sliced_bytes)}"
        )
