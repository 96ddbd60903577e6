"""The memory curve of a graph, and a region in slices, as plan, dump and commands tell them.

Data only, and without torch: commands that read a dump do not import it.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from zcompile.ir.units import show_size


@dataclass(frozen=True)
class MemoryCurve:
    """What values of a graph hold beside the arena while each of its nodes runs.

    nodes     their names, in order: forward, then backward
    backward  index of the first node of backward that computes; if none does, their number
    nbytes    held while each node runs
    where     most is held, for people
    holders   who holds most of it there: name for people -> bytes, the largest first
    """

    nodes: tuple[str, ...]
    backward: int
    nbytes: tuple[int, ...]
    where: str
    holders: Mapping[str, int]

    @cached_property
    def peak(self) -> int:
        """The most bytes held at once."""
        return max(self.nbytes, default=0)

    @property
    def peak_node(self) -> str:
        """The first node at which the most is held; "" of an empty graph."""
        return self.nodes[self.nbytes.index(self.peak)] if self.nodes else ""

    def told(self) -> str:
        """The peak in a few words."""
        return f"{show_size(self.peak)} at %{self.peak_node} in the {self.where}"

    def laid_over(self, other: "MemoryCurve") -> tuple[int, ...]:
        """These bytes at the nodes of `other`: a node that only `other` has, as one that makes a
        value again, holds what the one before it does; one that it lacks counts to the one before.
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
    """before  if every value were kept that backward needs
    after      as it was chosen
    """

    before: MemoryCurve
    after: MemoryCurve

    def told(self) -> str:
        """Both peaks in a few words."""
        if self.before == self.after:
            return f"at most {self.after.told()}; everything is kept"
        return f"at most {self.after.told()}; were everything kept, {self.before.told()}"


@dataclass(frozen=True)
class SlicedRegion:
    """What a region holds in the phase that needs most.

    name          for people: the module that its widest value is of
    tokens        in all
    whole_bytes   of what enters and leaves it, which is there for all tokens
    inside_bytes  of what is made inside, were it made for all tokens at once
    sliced_bytes  of what is made inside, in one slice
    """

    name: str
    slices: int
    tokens: int
    whole_bytes: int
    inside_bytes: int
    sliced_bytes: int

    def told(self) -> str:
        return (
            f"{self.name} runs over {self.slices} slices of its {self.tokens} tokens: "
            f"{show_size(self.inside_bytes)} of values inside become {show_size(self.sliced_bytes)}"
        )
