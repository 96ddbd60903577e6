"""Inductor's code for a GPU, where there is none: it is written, and neither compiled nor run.

    python absent_card.py       prints a JSON object: phase -> what is known of its code

Torch's questions to the card are answered from here, for the whole process; so a test starts one.
"""

import json
import sys
from collections.abc import Callable
from dataclasses import asdict
from operator import getitem
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch import fx, nn

from zcompile.ir.torch_compat import CompiledFacts, compile_by_inductor

CARD = torch.device("cuda", 0)
WRITER = "torch._inductor.codegen.wrapper.PythonWrapperCodegen"
PROPERTIES = SimpleNamespace(
    name="H100",
    major=9,
    minor=0,
    multi_processor_count=132,
    total_memory=80 << 30,
    warp_size=32,
    max_threads_per_multi_processor=2048,
    regs_per_multiprocessor=65536,
    shared_memory_per_block=48 << 10,
    shared_memory_per_block_optin=227 << 10,
    shared_memory_per_multiprocessor=228 << 10,
    L2_cache_size=50 << 20,
)


class Driver:
    """Triton's driver of the card."""

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return CARD


def pretend() -> None:
    """Have torch find a card, for code that is written and no more."""
    import torch._higher_order_ops.flex_attention  # the module, behind the op's name
    import torch._inductor.async_compile
    import torch._inductor.codegen.wrapper
    import torch._inductor.fx_passes.fuse_attention
    import torch._inductor.fx_passes.misc_patterns
    import torch._inductor.fx_passes.pad_mm
    from triton.runtime import driver

    module = sys.modules["torch._higher_order_ops.flex_attention"]

    def in_order(out: torch.Tensor, strides: tuple[int, ...]) -> torch.Tensor:
        """As torch's, which copies; a value that is not there has nothing to copy."""
        from torch._inductor.ir import get_fill_order

        order = module._construct_strides(out.shape, get_fill_order(strides))
        return out.new_empty_strided(out.shape, order)

    driver.set_active(Driver())
    module._permute_strides = in_order
    answers: dict[str, Any] = {
        "torch.cuda.get_device_properties": PROPERTIES,
        "torch.cuda._get_device_properties": PROPERTIES,
        "torch.cuda.get_device_capability": (9, 0),
        "torch.cuda.current_device": 0,
        "torch.cuda.is_available": True,
        "torch.cuda.device_count": 1,
        "torch.cuda.get_rng_state": torch.zeros(16, dtype=torch.uint8),
        "torch.cuda.set_rng_state": None,
        "torch.cuda.synchronize": None,
        "torch.cuda._lazy_init": None,
        "torch.cuda._lazy_call": None,
        "torch.cuda._exchange_device": 0,
        "torch.cuda._maybe_exchange_device": 0,
        "torch._C._cuda_getCurrentRawStream": 0,
        # Patterns are traced with values on the card, kernels are compiled and timed on it.
        "torch._inductor.fx_passes.fuse_attention._sfdp_init": None,
        "torch._inductor.fx_passes.misc_patterns._misc_patterns_init": None,
        "torch._inductor.fx_passes.pad_mm._pad_mm_init": None,
        f"{WRITER}.generate_and_run_autotune_block": None,
        "torch._inductor.async_compile.AsyncCompile.triton": SimpleNamespace(run=None),
    }
    for name, answer in answers.items():
        patch(name, lambda *_, _answer=answer, **__: _answer, create=True).start()
    patch("torch.version.cuda", "12.6").start()


# --- The two phases of flex_attention ---

BATCH, HEADS, TOKENS, WIDTH, TILE = 2, 2, 256, 64, 128
OPTIONS = {
    "BACKEND": "AUTO",
    "PRESCALE_QK": False,
    "ROWS_GUARANTEED_SAFE": False,
    "BLOCKS_ARE_CONTIGUOUS": False,
    "WRITE_DQ": True,
    "OUTPUT_LOGSUMEXP": True,
    "OUTPUT_MAX": False,
}


def graph_of(names: str, body: Callable[..., Any]) -> fx.GraphModule:
    graph = fx.Graph()
    given = [graph.placeholder(name) for name in names.split()]
    graph.output(body(graph, *given))
    return fx.GraphModule(nn.Module(), graph)


def row_major(*size: int, dtype: torch.dtype = torch.float32) -> Any:
    return size, tuple(torch.empty(size, device="meta").stride()), dtype, CARD


def facts_of(backward: bool) -> CompiledFacts:
    """Of the code for causal attention, or for its gradient."""
    root, graph = nn.Module(), fx.Graph()
    root.score = graph_of("s b h i j", lambda graph, s, b, h, i, j: s)
    root.mask = graph_of(
        "b h i j",
        lambda graph, b, h, i, j: graph.call_function(torch.ops.aten.ge.Tensor, (i, j)),
    )
    root.joint = graph_of("s b h i j ds", lambda graph, s, b, h, i, j, ds: [ds, *[None] * 4])
    value, row = row_major(BATCH, HEADS, TOKENS, WIDTH), row_major(BATCH, HEADS, TOKENS)
    tiles = TOKENS // TILE
    counts = row_major(1, 1, tiles, dtype=torch.int32)
    numbers = row_major(1, 1, tiles, tiles, dtype=torch.int32)
    operands = [graph.placeholder(f"operand_{n}") for n in range(7 if backward else 3)]
    blocks = [graph.placeholder(f"blocks_{n}") for n in range(8)]
    score, mask = graph.get_attr("score"), graph.get_attr("mask")
    given = (TOKENS, TOKENS, *blocks, *[None] * 4, TILE, TILE, mask)
    layouts = [value] * 3
    if backward:
        layouts += [value, row, value, row]
        graphs, op = (score, graph.get_attr("joint")), "flex_attention_backward"
    else:
        graphs, op = (score,), "flex_attention"
    called = graph.call_function(
        getattr(torch.ops.higher_order, op),
        (*operands, *graphs, given, 0.125, OPTIONS, (), ()),
    )
    parts = range(3 if backward else 2)
    graph.output(tuple(graph.call_function(getitem, (called, part)) for part in parts))
    layouts += [counts, numbers] * 4
    found = compile_by_inductor(fx.GraphModule(root, graph), layouts, 1, cached=False).facts
    assert found is not None, "nothing is cached"
    return found


if __name__ == "__main__":
    pretend()
    told = {phase: asdict(facts_of(phase == "backward")) for phase in ("forward", "backward")}
    sys.stdout.write(json.dumps(told) + "\n")
