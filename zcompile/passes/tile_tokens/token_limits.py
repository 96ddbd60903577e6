"""Why hidden values that are large do not run over slices of tokens: sentences for people."""

from collections.abc import Sequence

from torch import fx

from zcompile.ir.graph import aliases_of, module_of, phase_of
from zcompile.ir.saved_values import SavedValues, is_value, storage_bytes
from zcompile.ir.torch_compat import Dispatched, is_random
from zcompile.ir.types import Phase
from zcompile.ir.units import show_size
from zcompile.passes.tile_tokens.rules import PRODUCTS, Tokens
from zcompile.passes.tile_tokens.token_regions import Region, tokens_of


def whole_because(graph: fx.Graph, regions: Sequence[Region], least: int) -> list[str]:
    """Of each module with a value of more than `least` bytes that is in no region, and could be if
    tokens had a fixed number, or nothing drew random numbers: which it is."""
    values, numbers = SavedValues(graph), tokens_of(graph)
    inside = {node for region in regions for node in region.inside}
    found: dict[str, str] = {}
    for node in graph.nodes:
        if node.op != "call_function" or not is_value(node) or values.root(node) is not node:
            continue
        nbytes = storage_bytes(node)
        if nbytes <= least or node in inside or phase_of(node) is not Phase.FORWARD:
            continue
        name = module_of(node) or node.name
        if name not in found and (why := _reason(values, numbers, node)):
            found[name] = f"{show_size(nbytes)} of {name} are not cut into slices of tokens: {why}"
    return list(found.values())


def _reason(values: SavedValues, numbers: Sequence[Tokens], node: fx.Node) -> str:
    if node.target in PRODUCTS and not isinstance(node.meta["val"].shape[0], int):
        return "how many there are is known at run time only"
    if not any(tokens.lead(node) for tokens in numbers):
        return ""
    users = (user for alias in aliases_of(node) for user in alias.users)
    for near in (values.maker(node), *users):
        if isinstance(near.target, Dispatched) and is_random(near):
            return f"%{near.name} draws random numbers, which is not repeated"
    return ""
