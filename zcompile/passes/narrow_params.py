"""Fetches parameters that are only read after a cast in the dtype of that cast.

Asked for by `param_dtype`, a pass does so when a graph is compiled (`NarrowParams`). Where whole
steps are planned, the graph stays as it is, and a second program of each phase reads copies
(`reading_copies`, `with_copy_entries`); the plan says whether it is walked.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import ClassVar, NamedTuple

import torch
from torch import fx

from zcompile.ir import ops
from zcompile.ir.copies import copy_graph
from zcompile.ir.graph import CASTS, find, output_of, readers_of, region_of
from zcompile.ir.partition import range_of_fetch
from zcompile.ir.plan import GraphPlan, Note, layout_of_fetch
from zcompile.ir.schedule import Cast, CopyRead, EntryIndex, ReadValue, RegionProgram, Run
from zcompile.ir.types import SMALL_BYTES
from zcompile.passes.base import Fact, Pass


@dataclass(frozen=True)
class NarrowParams(Pass):
    """Where every reader of a gathered parameter casts it to `dtype`, fetch a copy in `dtype`.

        %p = zinf.fetch(%w, .., f32)              %p = zinf.fetch(%w, .., bf16)
        %f = zinf.wait(%p)                ->      %f = zinf.wait(%p)
        %c = aten._to_copy(%f, bf16)              %y = aten.mm(%x, %f)
        %y = aten.mm(%x, %c)

    The store keeps such a copy beside the parameter and makes it by the same cast, so no bit
    changes. This is how autocast reads weights: half the bytes travel, and the optimizer still
    updates the float32 master. Only for parameters that rest on disk: a copy of a parameter on the
    host would take more of the host, or rest on disk itself. And for those of which ranks hold
    shares, wherever these rest, since what crosses must not depend on that: each rank has a copy of
    its share, and half the bytes are gathered.

    What ranks gather in tiles comes as it is.

    dtype  of the copies; None leaves all as it is
    alike  a parameter of which ranks hold shares comes in one dtype wherever the graph reads it, so
           that all of it may be kept for both phases
    """

    dtype: torch.dtype | None = None
    alike: bool = False

    name: ClassVar[str] = "narrow-params"
    needs: ClassVar[frozenset[Fact]] = frozenset({Fact.PARAMS_GATHERED})
    gives: ClassVar[frozenset[Fact]] = frozenset({Fact.PARAMS_NARROWED})

    def rewrite(self, graph: fx.Graph, plan: GraphPlan) -> GraphPlan:
        if self.dtype is None:
            return plan
        fetches = find(graph, ops.fetch)
        narrow = {fetch for fetch in fetches if self._may_be_narrow(graph, fetch, plan)}
        if self.alike:
            wide = {fetch.args[0] for fetch in fetches if fetch not in narrow}
            shared = {fetch for fetch in narrow if plan.spec_of(fetch).share is not None}
            narrow -= {fetch for fetch in shared if fetch.args[0] in wide}
        for fetch in fetches:
            if fetch in narrow:
                (wait,) = fetch.users
                _narrow(graph, fetch, wait, list(wait.users), self.dtype)
        if not narrow:
            text = (
                "no parameter on disk, or of which ranks hold shares, is read only after a cast to "
                f"{self.dtype} (autocast)"
            )
            return replace(plan, notes=(*plan.notes, Note(self.name, None, text)))
        return plan

    def _may_be_narrow(self, graph: fx.Graph, fetch: fx.Node, plan: GraphPlan) -> bool:
        """Whether all readers of what is fetched cast it, and a copy of it may be kept."""
        (wait,) = fetch.users
        spec, dtype = plan.spec_of(fetch), self.dtype
        if range_of_fetch(spec, layout_of_fetch(fetch)) is not None:
            return False
        if spec.share is None and (spec.home != "disk" or not spec.layout.covers(spec.nbytes)):
            return False
        return dtype is not None and all(_casts(graph, wait, cast, dtype) for cast in wait.users)


def _casts(graph: fx.Graph, wait: fx.Node, user: fx.Node, dtype: torch.dtype) -> bool:
    """Whether `user` is a cast to `dtype`, and does nothing else."""
    if user.target not in CASTS or output_of(graph) in user.users:
        return False
    value, result = wait.meta["val"], user.meta["val"]
    plain = set(user.kwargs) <= {"dtype"} or user.kwargs.get("device") in (None, value.device)
    same = result.dtype is dtype and result.stride() == value.stride()
    return plain and same and value.dtype.itemsize > result.dtype.itemsize


def _narrow(
    graph: fx.Graph, fetch: fx.Node, wait: fx.Node, casts: list[fx.Node], dtype: torch.dtype
) -> None:
    """Let a fetch bring what its casts make."""
    for node in (fetch, wait):
        node.meta["val"] = casts[0].meta["val"]
    _, size, stride, offset, _, device = fetch.args
    fetch.args = (fetch.args[0], size, stride, offset, dtype, device)
    for cast in casts:
        cast.replace_all_uses_with(wait)
        graph.erase_node(cast)


# --- A second program, that reads copies ---


def reading_copies(graph: fx.Graph, plan: GraphPlan) -> fx.Graph | None:
    """A copy of the graph of one phase whose large parameters come in the dtype that they are cast
    to; None, if all are read as they are.

        %f = zinf.wait(%p)     f32                %f = zinf.wait(%p)     bf16
        %c = aten._to_copy(%f, bf16)      ->      %y = aten.mm(%x, %f)
        zinf.release(%f)                          zinf.release(%f)
        %y = aten.mm(%x, %c)

    Nodes stay in the regions that they were cut into. Copies are of one dtype, that of the first
    cast. A parameter that is read wide as well, or of which only a part is read, comes as it is.
    """
    if not has_copies_to_read(graph, plan):
        return None
    made, _ = copy_graph(graph)
    found: dict[fx.Node, fx.Node] = {}
    for read in _read_after_casts(made, plan):
        _narrow(made, read.fetch, read.wait, read.casts, read.dtype)
        found[read.wait] = read.release
    _release_later(made, found)
    return made


def has_copies_to_read(graph: fx.Graph, plan: GraphPlan) -> bool:
    """Whether the graph of one phase reads large parameters only after a cast."""
    return next(_read_after_casts(graph, plan), None) is not None


def casts_shares(graph: fx.Graph, plan: GraphPlan) -> bool:
    """Whether the graph of one phase narrows any parameter that is gathered.

    That is so on all ranks or on none: it asks for nothing that is up to what one of them measures,
    or to the sizes of its batches. Where it is so and nothing could come as a copy, as of a
    parameter that is read wide as well, ranks ask each other in vain.
    """
    waits = (
        wait
        for fetch in find(graph, ops.fetch)
        if plan.spec_of(fetch).share is not None
        for wait in fetch.users
    )
    return any(
        user.target in CASTS and user.meta["val"].dtype.itemsize < wait.meta["val"].dtype.itemsize
        for wait in waits
        for user in wait.users
    )


class _ReadAfterCasts(NamedTuple):
    """A fetch of which only casts to one dtype are read."""

    fetch: fx.Node
    wait: fx.Node
    casts: list[fx.Node]
    release: fx.Node
    dtype: torch.dtype


def _read_after_casts(graph: fx.Graph, plan: GraphPlan) -> Iterator[_ReadAfterCasts]:
    """What may come as a copy, in the dtype of the first cast."""
    dtype: torch.dtype | None = None
    for fetch in find(graph, ops.fetch):
        spec, (wait,) = plan.spec_of(fetch), fetch.users
        casts = [user for user in wait.users if user.target is not ops.release]
        releases = [user for user in wait.users if user.target is ops.release]
        known = bool(casts) and casts[0].target in CASTS
        wanted = dtype or (casts[0].meta["val"].dtype if known else None)
        whole = spec.layout.covers(spec.nbytes) and not spec.shared
        if (
            spec.activation
            or range_of_fetch(spec, layout_of_fetch(fetch)) is not None
            or spec.nbytes <= SMALL_BYTES
            or not (whole or spec.share is not None)
            or len(releases) != 1
            or not casts
            or wanted is None
            or not all(_casts(graph, wait, cast, wanted) for cast in casts)
        ):
            continue
        dtype = wanted
        yield _ReadAfterCasts(fetch, wait, casts, releases[0], dtype)


def _release_later(graph: fx.Graph, releases: Mapping[fx.Node, fx.Node]) -> None:
    """Move each release behind the region that reads its value last, now that views of the value
    are read and not of a cast of it."""
    last_of = {region: node for node in graph.nodes if (region := region_of(node)) is not None}
    for wait, release in releases.items():
        reader = max(readers_of(wait) - {release})
        region = region_of(reader)
        (reader if region is None else last_of[region]).append(release)


def with_copy_entries(program: RegionProgram, wide: RegionProgram) -> RegionProgram:
    """The program of `reading_copies` with copies as entries of their own, that follow those of the
    handles.

    wide  the program of the same phase that reads parameters as they are. What a region computes is
          taken to last as long as there, until it is seen.
    """
    own = len(wide.outline.handles)
    index: dict[EntryIndex, int] = {}
    copies: list[CopyRead] = []
    names: dict[int, str] = {}

    def placed(value: ReadValue) -> ReadValue:
        if value.cast is None:
            return value
        if value.entry not in index:
            index[value.entry] = own + len(copies)
            copies.append(_copy_read(value, value.cast))
        name = f"{value.name} in {_said(value.cast)}"
        names[index[value.entry]] = name
        return value._replace(entry=EntryIndex(index[value.entry]), name=name, cast=None)

    values = [placed(value) for value in program.values]
    before = {name: run for run in wide.regions for name in run.names}
    return replace(
        program,
        outline=replace(
            program.outline, copies=tuple(copies), names={**program.outline.names, **names}
        ),
        regions=tuple(_costing_as(run, before) for run in program.regions),
    ).with_values(values)


def _copy_read(value: ReadValue, cast: Cast) -> CopyRead:
    """The copy that brings a value: of all of it, or of the share that this rank holds."""
    share, itemsize = value.share, cast.copy_dtype.itemsize
    if share is None:
        return CopyRead(value.entry, cast, value.nbytes, value.nbytes // itemsize)
    numel = value.layout.numel
    first, last = (min(numel, at // itemsize) for at in (share.begin, share.end))
    return CopyRead(value.entry, cast, share.nbytes, last - first)


def _said(cast: Cast) -> str:
    return str(cast.copy_dtype).removeprefix("torch.")


def _costing_as(run: Run, before: Mapping[str, Run]) -> Run:
    """The region, with the costs of the one that made its first result before casts were taken
    away."""
    of = next((before[name] for name in run.names if name in before), None)
    if of is None or of.region.key == run.region.key:
        return run
    return replace(run, region=replace(run.region, parts=of.region.parts or (of.region,)))
