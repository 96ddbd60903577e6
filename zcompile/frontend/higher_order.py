"""Parameters for ops that have graphs of their own: `torch.cond`, `nested_compile_region`, others.

Torch dispatches such a *higher-order* op by rules for each kind of operand, and there are none for
a subclass, as tiered parameters are. The graph of a region is therefore traced into where it is
called, and any other such op is given a view of each parameter, which is gathered for it whole.
"""

from torch import fx

from zcompile.ir.torch_compat import region_called, stays_one_op
from zcompile.runtime.eager.tensor import TieredTensor


def keep_tiered_from_higher_order(gm: fx.GraphModule) -> None:
    """Let no higher-order op that stays one op where a graph of Dynamo is traced have a tiered
    operand."""
    modules = [module for module in gm.modules() if isinstance(module, fx.GraphModule)]
    nodes = [node for module in modules for node in module.graph.nodes]
    if any([_trace_into(node) or _view_operands(node) for node in nodes]):
        for module in modules:  # also those that torch changed, whose code nobody had called yet
            module.recompile()


def _trace_into(node: fx.Node) -> bool:
    """Whether `node` called a region; a call of its graph as a module takes its place."""
    called = region_called(node)
    if called is None:
        return False
    with node.graph.inserting_before(node):
        call = node.graph.call_module(*called)
    call.meta.update(node.meta)
    node.replace_all_uses_with(call)
    node.graph.erase_node(node)
    return True


def _view_operands(node: fx.Node) -> bool:
    """Whether `node` is a higher-order op that had tiered operands, and has views of them now."""
    tiered = [
        operand
        for operand in node.all_input_nodes
        if isinstance(operand.meta.get("example_value"), TieredTensor)
    ]
    if not tiered or not stays_one_op(node.target):
        return False
    for operand in tiered:
        with node.graph.inserting_before(node):
            view = node.graph.call_method("view_as", (operand, operand))
        node.replace_input_with(operand, view)
    return True
