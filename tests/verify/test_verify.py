"""One broken graph per rule, the sentence it earns, and the line that is marked."""

from dataclasses import replace

import pytest
import torch
from joint import Joint, captured
from sampled import sampled
from small_models import SMALL_MODELS, UNALIKE

from zcompile.config import Config
from zcompile.errors import GraphInvalid
from zcompile.ir import ops, printer
from zcompile.ir.graph import find, insert, output_of, phase_of, positions, region_of, set_region
from zcompile.ir.types import Phase
from zcompile.passes.pipeline import pipeline
from zcompile.verify.graph import RULES, verify

PASSES = pipeline(Config(device="cpu"))
FACTS = frozenset(fact for fact, _ in RULES if fact is not None)
aten = torch.ops.aten


def planned(model: str = "mlp") -> Joint:
    """After all passes: all facts hold."""
    return captured(model).through(*PASSES)


def no_value(joint: Joint) -> str:
    node = find(joint.graph, aten.relu.default)[0]
    del node.meta["val"]
    return f"%{node.name} has no value to reason about"


def unknown_parameter(joint: Joint) -> str:
    fetch = find(joint.graph, ops.fetch)[0]
    params = {k: v for k, v in joint.plan.params.items() if k != fetch.args[0].name}
    joint.plan = replace(joint.plan, params=params)
    return f"%{fetch.name} names no known parameter"


def reader_before_source(joint: Joint) -> str:
    relu = find(joint.graph, aten.relu.default)[0]
    source = relu.args[0]
    source.prepend(relu)
    return f"%{relu.name} reads %{source.name}, which comes later"


def dynamic_parameter(joint: Joint) -> str:
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    size = ShapeEnv().create_unbacked_symint()
    fetch = find(joint.graph, ops.fetch)[0]
    # A stand-in for a tensor of dynamic size: torch.empty would ask for the number.
    made = torch.empty(2, device="meta").as_subclass(Dynamic)
    made.sizes = (size,)
    fetch.meta["val"] = made
    return f"%{fetch.name} has a dynamic size; parameters are static"


class Dynamic(torch.Tensor):
    """A tensor that says it has a symbolic size."""

    def size(self):
        return self.sizes


def read_before_wait(joint: Joint) -> str:
    wait = find(joint.graph, ops.wait)[0]
    reader = next(u for u in wait.users if u.target is not ops.release)
    reader.replace_input_with(wait, wait.args[0])
    return f"%{reader.name} reads %{wait.args[0].name} before its wait"


def forward_after_backward(joint: Joint) -> str:
    relu = find(joint.graph, aten.relu.default)[0]
    with joint.graph.inserting_before(output_of(joint.graph)):
        node = insert(
            joint.graph,
            aten.neg.default,
            relu,
            like=relu,
            phase=Phase.FORWARD,
            val=relu.meta["val"],
        )
    return f"%{node.name} is forward and stands among backward nodes"


def full_into_backward(joint: Joint) -> str:
    wait = find(joint.graph, ops.wait)[0]
    mm = next(n for n in find(joint.graph, aten.mm.default) if phase_of(n) is Phase.BACKWARD)
    mm.args = (wait, mm.args[1])
    return f"%{mm.name} takes %{wait.name} from forward to backward"


def full_returned(joint: Joint) -> str:
    wait = find(joint.graph, ops.wait)[0]
    output = output_of(joint.graph)
    output.args = ((*output.args[0], wait),)
    return f"the graph returns %{wait.name}, whose bytes are given back"


def read_after_release(joint: Joint) -> str:
    release = find(joint.graph, ops.release)[0]
    (full,) = release.args
    reader = release.prev
    while reader.target in ops.OURS:
        reader = reader.prev
    reader.prepend(release)
    (alias,) = [n for n in reader.all_input_nodes if n is full or full in n.all_input_nodes]
    return f"%{reader.name} reads %{alias.name}, released above"


def never_released(joint: Joint) -> str:
    release = find(joint.graph, ops.release)[-1]
    (full,) = release.args
    joint.graph.erase_node(release)
    return f"%{full.name} is released 0 times"


def computes_with_a_sink(joint: Joint) -> str:
    sink = find(joint.graph, ops.reduce_grad)[0]
    with joint.graph.inserting_after(sink):
        insert(
            joint.graph,
            aten.neg.default,
            sink,
            like=sink,
            phase=Phase.BACKWARD,
            val=sink.meta["val"],
        )
    return f"something computes with %{sink.name}, which holds nothing"


def view_of_another_region(joint: Joint) -> str:
    view = find(joint.graph, aten.t.default)[0]
    (reader,) = view.users
    set_region(view, region_of(view) + 1)
    return f"%{reader.name} reads %{view.name}, a view made in another region"


CASES = {
    no_value: "values_are_known",
    unknown_parameter: "handles_are_params",
    reader_before_source: "order_is_topological",
    dynamic_parameter: "tensors_have_sizes",
    read_before_wait: "pending_is_only_waited_for",
    forward_after_backward: "forward_comes_first",
    full_into_backward: "full_stays_in_its_phase",
    full_returned: "full_stays_in_its_phase",
    read_after_release: "nothing_reads_released",
    never_released: "everything_is_released_once",
    computes_with_a_sink: "grads_of_sinks_stay",
    view_of_another_region: "views_stay_in_their_region",
}
"""What breaks a graph, and the rule that sees it."""


@pytest.mark.parametrize("break_it", CASES, ids=lambda case: case.__name__)
def test_a_broken_graph_earns_its_sentence_and_its_line_is_marked(break_it):
    joint = planned()
    rules = {rule.__name__: rule for _, rule in RULES}
    sentence = break_it(joint)
    (culprit, why), *_ = rules[CASES[break_it]](joint.graph, joint.plan)
    assert why == sentence
    with pytest.raises(GraphInvalid, match="after a-pass, ") as caught:
        verify(joint.graph, joint.plan, after="a-pass", facts=FACTS)
    assert caught.value.why == sentence
    (marked,) = [row for row in str(caught.value).splitlines() if row.startswith("  > ")]
    assert marked == f"  > {printer.line(culprit)}"


def test_every_rule_has_a_case():
    assert set(CASES.values()) == {rule.__name__ for _, rule in RULES}


def test_a_rule_waits_for_the_pass_that_establishes_it():
    joint = planned()
    never_released(joint)
    verify(joint.graph, joint.plan, after="a-pass", facts=FACTS - {"PARAMS_RELEASED"})


def test_a_parameter_released_twice_is_refused():
    joint = planned()
    release = find(joint.graph, ops.release)[-1]
    with joint.graph.inserting_after(release):
        joint.graph.node_copy(release)
    with pytest.raises(GraphInvalid, match=r"reads %.*, released above"):
        verify(joint.graph, joint.plan, after="a-pass", facts=FACTS)


@pytest.mark.parametrize("model", sampled(SMALL_MODELS, *UNALIKE))
def test_what_the_passes_make_breaks_no_rule(model):
    joint = planned(model)
    verify(joint.graph, joint.plan, after="the last pass", facts=FACTS)


@pytest.mark.parametrize("model", ["mlp", "module called twice", "view in two places"])
def test_no_release_can_stand_earlier_without_being_seen(model):
    """Every release, moved up over its last reader."""
    count = len(find(planned(model).graph, ops.release))
    for index in range(count):
        joint = planned(model)
        release = find(joint.graph, ops.release)[index]
        where = positions(joint.graph)
        reader = max(
            (
                n
                for n in joint.graph.nodes
                if where[n] < where[release] and n.target not in ops.OURS
            ),
            key=where.__getitem__,
        )
        reader.prepend(release)
        with pytest.raises(GraphInvalid, match="released above"):
            verify(joint.graph, joint.plan, after="a-pass", facts=FACTS)
