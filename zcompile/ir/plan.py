"""Holds what has been decided about a graph: a pass takes a `GraphPlan` and returns it, changed or
not.

Data only. Passes decide, `memory/footprint.py` counts the memory curves, the dump and the report
keep them, the commands draw them.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from torch import fx

from zcompile.ir.memory_curve import Activation, ActivationCost, Memory, MemoryCurve, SlicedRegion
from zcompile.ir.partition import range_of_fetch
from zcompile.ir.types import Layout, NodeName, ParamSpec, Phase, Work


def layout_of_fetch(fetch: fx.Node) -> Layout:
    """The layout in its entry, or in the entry's copy, of what a fetch or gather brings."""
    _, size, stride, offset, dtype, _ = fetch.args
    return Layout(tuple(size), tuple(stride), offset, dtype)  # type: ignore[arg-type]  # op schema


@dataclass(frozen=True)
class Note:
    """Something that a pass left undone, and why; the dump prints it."""

    by: str
    node: NodeName | None
    text: str


@dataclass(frozen=True)
class Rounding:
    """A place where a pass gave up bits equal to eager's.

    by     name of the pass
    where  the weight, or module, whose results or gradients may round otherwise
    why    for people
    """

    by: str
    where: str
    why: str


def _no_slices() -> Mapping[NodeName, int]:
    return MappingProxyType({})


def _not_counted() -> Mapping[Phase, Work]:
    return MappingProxyType({})


@dataclass(frozen=True)
class GraphMemory:
    """Bytes of the device that graphs hold outside the arena, at their peak.

    nbytes        by graphs compiled before; once the budget is split, by this one or those
    where         the place of the peak, for people
    holders       the largest values there: names for people, and bytes
    device_bytes  of arena and values together; None as long as the budget is not split
    """

    nbytes: int = 0
    where: str = ""
    holders: tuple[tuple[str, int], ...] = ()
    device_bytes: int | None = None

    def with_fetches(self, phase: str) -> str:
        """The place where values and fetched parameters are live together, for people."""
        if not self.nbytes:
            return f"{phase} pass of the model"
        return f"{self.where}, with what the {phase} pass fetches at once,"


NOTHING_BESIDE = GraphMemory()


@dataclass(frozen=True)
class BatchSlices:
    """A batch that runs in slices.

    slices  how many
    cuts    calls of forward before which a stage begins: all slices run through one stage before
            the first runs through the next
    """

    slices: int
    cuts: tuple[NodeName, ...]


@dataclass(frozen=True)
class GraphPlan:
    """The decisions about one graph.

    params           handle -> what is behind it: a parameter, whose handle is a placeholder, or a
                     value that forward offloads for backward
    budget_bytes     of the device, and once it is split of its arena; None without tiered
                     parameters
    beside           memory of graphs outside the arena
    cuts             handle of each weight that is to be cut -> most bytes of a tile; None as long
                     as that is not decided
    slices           first node of each region that is to run over slices of tokens -> how many
    batch            slices of the batch; None: the batch runs whole
    sliced           regions that run over slices of tokens, or of the batch, in graph order
    notes            what was left undone, and why
    activations      what becomes of each value that backward needs, in the order they are made
    activation_cost  of those together; None as long as they are not planned
    kept             memory curve if all of those were saved; None: they are
    held             memory curve as it was chosen; None as long as the budget is not split
    roundings        where results may round otherwise than eager's; empty: every bit is the same
    traced_work      work of each phase as it was traced, before any pass; empty, if no pass ran
    least_bytes      of an arena in which the fetches of either phase surely find addresses
    """

    params: Mapping[NodeName, ParamSpec]
    budget_bytes: int | None = None
    beside: GraphMemory = NOTHING_BESIDE
    cuts: Mapping[str, int] | None = None
    slices: Mapping[NodeName, int] = field(default_factory=_no_slices)
    batch: BatchSlices | None = None
    sliced: tuple[SlicedRegion, ...] = ()
    notes: tuple[Note, ...] = ()
    activations: tuple[Activation, ...] = ()
    activation_cost: ActivationCost | None = None
    kept: MemoryCurve | None = None
    held: MemoryCurve | None = None
    roundings: tuple[Rounding, ...] = ()
    traced_work: Mapping[Phase, Work] = field(default_factory=_not_counted)
    least_bytes: int = 0

    def spec_of(self, fetch: fx.Node) -> ParamSpec:
        """The parameter that a fetch brings."""
        (handle,) = [n for n in fetch.all_input_nodes if n.name in self.params]
        return self.params[NodeName(handle.name)]

    def fetched_bytes(self, fetch: fx.Node) -> int:
        """Bytes of the arena that a fetch fills: of a tensor whose shares ranks gather, all, in the
        dtype that it is fetched in, or those of a tile."""
        spec, brings = self.spec_of(fetch), layout_of_fetch(fetch)
        if spec.share is None:
            return brings.nbytes
        if (tile := range_of_fetch(spec, brings)) is not None:
            return tile.nbytes
        return spec.nbytes // spec.layout.dtype.itemsize * brings.dtype.itemsize

    @property
    def memory(self) -> Memory | None:
        """Memory curves with all saved values kept, and as it was chosen; None as long as the
        budget is not split."""
        return None if self.held is None else Memory(self.kept or self.held, self.held)
