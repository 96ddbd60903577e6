"""Contracts of the private torch APIs by which regions are compiled by Inductor."""

import tempfile
import threading
from functools import cache
from pathlib import Path
from unittest.mock import patch

import torch
from contracts_of_failures import CONTRACTS, contract
from fresh_processes import in_fresh_process
from torch import fx, nn
from torch._inductor import exc

from zcompile.ir import torch_compat as private

__all__ = ["CONTRACTS", "contract"]

CPU = torch.device("cpu")
aten = torch.ops.aten


def graph_of(*calls):
    """A graph over one input: each call reads the result of the one before; all are results."""
    graph = fx.Graph()
    value = graph.placeholder("x")
    made = []
    for target, *rest in calls:
        value = graph.call_function(target, (value, *rest))
        made.append(value)
    graph.output(tuple(made))
    return fx.GraphModule(nn.Module(), graph)


LAYOUT = ((8, 64), (64, 1), torch.float32, CPU)


def on_a_thread(work):
    done = []
    thread = threading.Thread(target=lambda: done.append(work()))
    thread.start()
    thread.join()
    return done[0]


@cache
def compiled():
    gm = graph_of((aten.exp.default,), (aten.sum.dim_IntList, [1], True))
    return on_a_thread(lambda: private.compile_by_inductor(gm, [LAYOUT], 1, cached=False))


@contract
def compile_by_inductor() -> None:
    """The calling thread may be in any state. What is allocated, called and returned is known; the
    results have the layouts of eager, and another layout is asked for in vain."""
    made = compiled()
    x = torch.randn(8, 64)
    with torch.no_grad():
        results = made.call(x)
    for found, wanted in zip(results, (x.exp(), x.exp().sum(1, keepdim=True)), strict=True):
        torch.testing.assert_close(found, wanted)
        assert found.stride() == wanted.stride()
    assert made.facts == private.CompiledFacts(
        nbytes=8 * 64 * 4 + 8 * 4, kernels=1, strides=((64, 1), (1, 1))
    )
    assert made.artifact is None, "nothing is saved where caches are off"
    with patch("torch._inductor.cpp_builder.run_compile_cmd", side_effect=AssertionError):
        assert compiled.__wrapped__().facts == made.facts, "no C++ is compiled again for the facts"
    library = graph_of((aten.exp.default,), (aten.mm.default, torch.empty(0)))
    library.graph.find_nodes(op="call_function", target=aten.mm.default)[0].args = (
        library.graph.find_nodes(op="placeholder")[0],
        library.graph.find_nodes(op="placeholder")[0],
    )
    library.recompile()
    square = ((8, 8), (8, 1), torch.float32, CPU)
    found = on_a_thread(lambda: private.compile_by_inductor(library, [square], 1, cached=False))
    assert "mm" in found.facts.called
    twice = graph_of((aten.exp.default,))
    (exp,) = twice.graph.find_nodes(op="call_function", target=aten.exp.default)
    (output,) = twice.graph.find_nodes(op="output")
    output.args = ((exp, exp),)
    twice.recompile()
    found = on_a_thread(lambda: private.compile_by_inductor(twice, [LAYOUT], 1, cached=False))
    assert found.facts.shared


@cache
def kept():
    gm = graph_of((aten.gelu.default,), (aten.sum.dim_IntList, [1], True))
    return on_a_thread(lambda: private.compile_by_inductor(gm, [LAYOUT], 1))


@contract
def save_compiled() -> None:
    """One file, over what was there before."""
    assert kept().artifact is not None
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "artifact"
        path.write_text("another")
        private.save_compiled(kept().artifact, str(path))
        assert b"CacheCompiledArtifact" in path.read_bytes()
        assert [found.name for found in Path(folder).iterdir()] == ["artifact"]


def loaded(artifact: str, values: str) -> list[bool]:
    """Of each result of what is loaded, whether its bits are those that were made before."""
    x, wanted = torch.load(values)
    found = private.load_compiled(artifact)(x)
    return [torch.equal(one, other) for one, other in zip(found, wanted, strict=True)]


@contract
def load_compiled() -> None:
    """In another process, which has compiled nothing: the same bits."""
    made = kept()
    x = torch.randn(8, 64)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder)
        private.save_compiled(made.artifact, str(path / "artifact"))
        torch.save((x, [r.clone() for r in made.call(x)]), path / "values")
        found = in_fresh_process(loaded, str(path / "artifact"), str(path / "values"))
    assert found == [True] * len(made.call(x))


@contract
def is_flex_attention() -> None:
    """It is one op in a graph, and its gradient another; Inductor's caches keep code of both."""
    from torch._higher_order_ops.flex_attention import flex_attention, flex_attention_backward

    graph = fx.Graph()
    for op in (flex_attention, flex_attention_backward):
        assert op.cacheable()
        assert private.is_flex_attention(graph.call_function(op))
    assert not private.is_flex_attention(graph.call_function(aten.mm.default))


@contract
def missing_compiler() -> None:
    """Torch itself looks, and says so by a class of its own."""
    assert private.missing_compiler(CPU) == ""
    assert issubclass(exc.InvalidCxxCompiler, RuntimeError)
    if not torch.cuda.is_available():
        assert "Triton" in private.missing_compiler(torch.device("cuda"))


@contract
def compiled_for() -> None:
    """Widths of vectors, of which code for one is wrong on another."""
    assert private.compiled_for(CPU) == private.compiled_for(CPU)
    assert torch.backends.cpu.get_cpu_capability() in private.compiled_for(CPU)


@contract
def inductor_folder() -> None:
    assert Path(private.inductor_folder()).is_dir()
