"""Counts bytes that calls of a graph hold outside the arena whatever is cut, moved or made again.

A lower bound, found in one sweep without trying anything out: what one op reads and makes is there
at once. Left out is what a pass may split: values of a region that may run over slices of tokens,
all but one slice of what may be made in slices of the batch, gradients on their way home, what is
computed of weights alone, and, in backward, what forward made and may come back through the arena.
"""

from collections.abc import Collection, Mapping
from dataclasses import replace
from types import MappingProxyType

from torch import fx

from zcompile.ir import ops
from zcompile.ir.graph import is_compute, phase_of
from zcompile.ir.types import Phase
from zcompile.memory.footprint import Footprint, Storage, unique

NO_BATCH: Mapping[fx.Node, bool] = MappingProxyType({})


def least_held(
    held: Footprint,
    sliced: Collection[fx.Node],
    inside: Collection[fx.Node],
    batch: Mapping[fx.Node, bool] = NO_BATCH,
    slices: int = 1,
) -> tuple[Storage, ...]:
    """The storages that are there at once, where they take most.

    held    of the graph, before anything is cut
    sliced  nodes of regions that may run over slices of tokens
    inside  storages that only slices of these need to hold, by the nodes that make them
    batch   nodes that may run over slices of the batch -> whether what they make has a batch
    slices  most slices of the batch; of what such a node makes, and reads of another, one is there
    """
    apart = _of_weights(held.nodes) | _leaving(held.nodes)
    most: tuple[Storage, ...] = ()
    for node in held.nodes:
        if not is_compute(node):
            continue
        found = [
            storage
            for storage in unique(held.of.get(n, ()) for n in (node, *node.all_input_nodes))
            if storage.maker not in apart
            and storage.maker not in inside
            and (phase_of(node) is Phase.FORWARD or not _is_of_forward(storage))
        ]
        if node in batch:
            found = [_slice_of(s, slices) if batch.get(s.maker) else s for s in found]
        # The values that a slice reads need not be there together with those that it makes.
        for together in ([storage] for storage in found) if node in sliced else (found,):
            if _nbytes(together) > _nbytes(most):
                most = tuple(together)
    return most


def _slice_of(storage: Storage, slices: int) -> Storage:
    return replace(storage, nbytes=storage.nbytes // slices)


def _nbytes(storages: Collection[Storage]) -> int:
    return sum(storage.nbytes for storage in storages)


def _is_of_forward(storage: Storage) -> bool:
    return storage.maker.op == "call_function" and phase_of(storage.maker) is Phase.FORWARD


def _of_weights(nodes: Collection[fx.Node]) -> set[fx.Node]:
    """What is computed of gathered weights, and of nothing else but constants."""
    found: set[fx.Node] = set()
    constant: set[fx.Node] = set()
    for node in nodes:
        if node.target in (ops.gather, ops.fetch, ops.wait):
            found.add(node)
        elif node.op == "call_function":
            rest = [n for n in node.all_input_nodes if n not in constant]
            if not rest:
                constant.add(node)
            elif all(n in found for n in rest):
                found.add(node)
    return found


def _leaving(nodes: Collection[fx.Node]) -> set[fx.Node]:
    """What backward makes for its results alone: gradients of weights leave in tiles."""
    found: set[fx.Node] = set()
    for node in reversed(list(nodes)):
        backward = node.op == "call_function" and phase_of(node) is Phase.BACKWARD
        if backward and all(user.op == "output" or user in found for user in node.users):
            found.add(node)
    return found
