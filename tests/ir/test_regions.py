"""Regions are told apart by structure alone, so compile time does not grow with depth."""

import pytest
import torch
from joint import captured, catch
from small_models import GPT
from torch import fx

import zcompile
from zcompile.config import Config
from zcompile.frontend.dry_run.device import is_blank
from zcompile.frontend.dry_run.session import DryRunRegions
from zcompile.ir.graph import is_compute, region_of
from zcompile.ir.regions import compile_region, inputs_of, is_product, outputs_of, structure
from zcompile.passes.pipeline import pipeline

aten = torch.ops.aten


def traced(build, *inputs: torch.Tensor) -> list[fx.Node]:
    """The compute nodes of a graph that `build` writes; values are filled in by running it."""
    graph = fx.Graph()
    places = [graph.placeholder(f"input_{i}") for i in range(len(inputs))]
    for place, value in zip(places, inputs, strict=True):
        place.meta["val"] = value
    graph.output(tuple(build(graph, *places)))
    for node in graph.nodes:
        if node.op == "call_function":
            args = [a.meta["val"] if isinstance(a, fx.Node) else a for a in node.args]
            node.meta["val"] = node.target(*args, **node.kwargs)
    return [n for n in graph.nodes if is_compute(n)]


def linear(graph, x, w):
    return [graph.call_function(aten.mm.default, (x, graph.call_function(aten.t.default, (w,))))]


X, W = torch.ones(2, 3), torch.ones(4, 3)


def test_names_do_not_count():
    one, other = traced(linear, X, W), traced(linear, X, W)
    for number, node in enumerate(other):
        node.name = f"renamed_{number}"
    assert structure(one) == structure(other)


@pytest.mark.parametrize(
    ("x", "w"),
    [
        (torch.ones(5, 3), W),  # shape
        (X.double(), W.double()),  # dtype
        (torch.ones(3, 2).t(), W),  # stride
    ],
)
def test_shapes_strides_and_dtypes_count(x, w):
    assert structure(traced(linear, X, W)) != structure(traced(linear, x, w))


def test_arguments_wiring_and_results_count():
    def summed(dim):
        return lambda g, x: [g.call_function(aten.sum.dim_IntList, (x, [dim], True))]

    def sub(a, b):
        return lambda g, *xs: [g.call_function(aten.sub.Tensor, (xs[a], xs[b]))]

    def both(g, x):
        return [
            (y := g.call_function(aten.neg.default, (x,))),
            g.call_function(aten.exp.default, (y,)),
        ]

    square = torch.ones(2, 2)
    assert structure(traced(summed(0), square)) != structure(traced(summed(1), square))
    # Inputs are numbered by first use: (a - b) and (b - a) are the same region, (a - a) is not.
    assert structure(traced(sub(0, 1), square, square)) == structure(
        traced(sub(1, 0), square, square)
    )
    assert structure(traced(sub(0, 0), square, square)) != structure(
        traced(sub(0, 1), square, square)
    )
    assert structure(traced(both, square)) != structure(traced(lambda g, x: both(g, x)[1:], square))


def test_a_region_computes_what_its_nodes_compute():
    nodes = traced(linear, torch.randn(2, 3), torch.randn(4, 3))
    region = compile_region(nodes, {})
    values = [n.meta["val"] for n in inputs_of(nodes)]
    (result,) = region.call([*values])
    assert torch.equal(result, outputs_of(nodes)[0].meta["val"])
    assert region.text == "t mm"


def test_the_text_of_a_region_names_ops_by_their_namespace_if_it_is_not_torchs_own():
    def build(graph, x):
        wide = torch.ops.prims.convert_element_type.default
        y = graph.call_function(wide, (x, torch.float64))
        return [graph.call_function(aten.add.Tensor, (y, y))]

    region = compile_region(traced(build, X), {})
    assert region.text == "prims.convert_element_type add"


def test_a_region_is_compiled_once():
    compiled = {}
    assert compile_region(traced(linear, X, W), compiled) is compile_region(
        traced(linear, X, W), compiled
    )
    assert len(compiled) == 1


def test_a_variant_that_makes_its_results_elsewhere_shares_what_is_compiled():
    compiled = {}
    nodes = traced(linear, X, W)
    plain, placed = compile_region(nodes, compiled), compile_region(nodes, compiled, (0,))
    assert placed.call is plain.call
    assert placed.key == plain.key
    target = torch.empty(2, 4)
    (made,) = placed.call_into([n.meta["val"] for n in inputs_of(nodes)], [target])
    assert made is target
    assert torch.equal(target, outputs_of(nodes)[0].meta["val"])


def test_in_a_dry_run_each_region_makes_blanks_and_so_do_its_variants():
    compiled = DryRunRegions()
    nodes = traced(linear, X, W)
    plain, placed = compile_region(nodes, compiled), compile_region(nodes, compiled, (0,))
    assert compile_region(nodes, compiled) is plain
    for region in (plain, placed):
        (result,) = region.call([n.meta["val"] for n in inputs_of(nodes)])
        assert is_blank(result)


def test_every_region_of_a_graph_computes_alone_what_it_computes_in_the_graph():
    joint = captured("transformer block").through(*pipeline(Config(device="cpu")))
    regions: dict[int, list[fx.Node]] = {}
    for node in joint.graph.nodes:
        if is_compute(node):
            regions.setdefault(region_of(node), []).append(node)
    compiled = {}
    for nodes in regions.values():
        region = compile_region(nodes, compiled)
        assert len(outputs_of(nodes)) >= 1
        assert all(n.op != "output" for n in nodes)
        assert compiled[region.key] is region
    assert len(compiled) < len(regions)


def distinct_regions(layers: int) -> dict[str, int]:
    torch.manual_seed(0)
    model = GPT(layers)
    joint = catch(model, torch.randint(0, 32, (2, 6)))
    stats = zcompile.stats(model)
    joint.session.close()
    return stats


@pytest.mark.slow  # test_join_regions.py: equal blocks share one
def test_depth_adds_no_distinct_region():
    shallow, deep = distinct_regions(1), distinct_regions(4)
    assert deep["regions"] > 3 * shallow["regions"]
    assert deep["distinct_regions"] == shallow["distinct_regions"]


def test_only_a_row_major_product_can_be_placed():
    (turned, product) = traced(linear, X, W)
    assert is_product(product)
    assert not is_product(turned)
    product.meta["val"] = product.meta["val"].t()
    assert not is_product(product)


def test_a_placed_output_lies_where_it_is_wanted_and_has_the_same_bits():
    def build(graph, x, w):
        product = linear(graph, x, w)[0]
        return [product, graph.call_function(aten.sum.default, (x,))]

    x, w = torch.randn(64, 48), torch.randn(96, 48)
    compiled = {}
    region = compile_region(traced(build, x, w), compiled, placed=(0,))
    plain = compile_region(traced(build, x, w), compiled)
    assert region.key == plain.key
    target = torch.full((64, 96), torch.nan)
    made, total = region.call_into([x, w], [target])
    assert made.data_ptr() == target.data_ptr()
    for one, other in zip((made, total), plain.call([x, w]), strict=True):
        assert torch.equal(one, other)
