"""Small dumps: of a run that trained for three steps, and one written through the same records."""

from pathlib import Path
from typing import Any

import torch
from offloaded import SMALL
from small_models import mlp
from torch import nn

import zcompile
from zcompile.ir import serialize as rf
from zcompile.ir.serialize import encode

STAGES = ("captured", "gather-params", "cut-regions")


def node(
    name: str,
    target: str,
    *args: str,
    nbytes: int = 0,
    live: int = 0,
    param: str | None = None,
    op: str = "call_function",
    phase: str = "forward",
) -> rf.NodeRecord:
    return rf.NodeRecord(
        name=name,
        op=op,
        target=target,
        phase=phase,
        args=args,
        shape=(4, 32),
        dtype="f32",
        nbytes=nbytes,
        live_bytes=live,
        module="up" if param else None,
        param=param,
    )


def stage_nodes(step: int) -> tuple[rf.NodeRecord, ...]:
    """x @ up.weight.T, as captured, gathered, and with the fetch moved up."""
    handle = node("up_weight", "up_weight", op="placeholder", param="up.weight")
    x = node("x", "x", op="placeholder", nbytes=128)
    clone = node("clone", "aten.clone", "%x", nbytes=128, live=128)
    t = node("t", "aten.t", "%full", live=1152)
    mm = node("mm", "aten.mm", "%clone", "%t", nbytes=512, live=1664)
    end = node("output", "output", "[%mm]", op="output")
    if step == 0:
        full = node("full", "zinf.gather", "%up_weight", nbytes=1024, param="up.weight")
        return (handle, x, clone, full, t, mm, end)
    fetch = node("pending", "zinf.fetch", "%up_weight", nbytes=1024, live=1024, param="up.weight")
    wait = node("full", "zinf.wait", "%pending", live=1152, param="up.weight")
    release = node("release", "zinf.release", "%full", live=1664, param="up.weight")
    if step == 1:
        return (handle, x, clone, fetch, wait, t, mm, release, end)
    return (handle, x, fetch, clone, wait, t, mm, release, end)


def text(nodes: tuple[rf.NodeRecord, ...]) -> str:
    return "".join(f"%{n.name} = {n.target}({', '.join(n.args)})\n" for n in nodes)


def instructions() -> list[rf.InstructionRecord]:
    return [
        rf.InstructionRecord(0, "h2d", "fetch", "up.weight", 1024, 0, 0),
        rf.InstructionRecord(1, "compute", "run", "clone", 0, None, None, (), (1,), (2,)),
        rf.InstructionRecord(2, "compute", "wait", "up.weight", 1024, 0, None, (0,)),
        rf.InstructionRecord(3, "compute", "run", "t mm", 0, None, 1, (), (2, 3), (4,)),
        rf.InstructionRecord(4, "compute", "free", "up.weight", 1024, 0, None),
    ]


def write_graph(run: Path, index: int) -> None:
    graph = rf.graph_dir(run, index)
    graph.mkdir()
    did = ({}, {"zinf.gather": -1, "zinf.fetch": 1, "zinf.wait": 1, "zinf.release": 1}, {})
    rows = []
    for step, name in enumerate(STAGES):
        nodes = stage_nodes(step)
        rows.append(rf.PassRecord(step, name, did[step], 1536, 1664, ("a note",) * (step == 2)))
        rf.text_file(graph, step, name).write_text(text(nodes))
        rf.nodes_file(graph, step, name).write_text(encode(nodes))
    rf.passes_file(graph).write_text(encode(rows))
    param = rf.ParamRecord("up_weight", "up.weight", (32, 8), "f32", 1024, "disk")
    plan = rf.PlanRecord(f"frame {index}", 4096, (param,), 2, 2)
    rf.plan_file(graph).write_text(encode(plan))
    rf.schedule_file(graph, "forward").write_text(encode(instructions()))
    rows_text = (f"{i.index}  {i.stream}  {i.kind}  {i.name}\n" for i in instructions())
    rf.schedule_text_file(graph, "forward").write_text("".join(rows_text))


def write_run(root: Path, graphs: int = 1) -> Path:
    """A new run-<n> below `root`."""
    run = rf.new_run(root)
    for index in range(graphs):
        write_graph(run, index)
    names = tuple(f"frame {index}" for index in range(graphs))
    config = {"device": "cpu", "disk": ["/data"]}
    rf.run_file(run).write_text(encode(rf.RunRecord("0.1.0", "2.13.0", config, names)))
    return run


def real_run(root: Path, rows: int = 2, **config: Any) -> nn.Module:
    """A model in the third step of its training, of `rows` samples, whose second is in `root`."""
    torch._dynamo.reset()
    model = zcompile.offload(mlp(), **{**SMALL, **config}, dump=root)
    compiled = torch.compile(model, backend="zinf")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        compiled(torch.ones(rows, 8)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model
