"""Steps of real runs as a dump holds them."""

import json

import torch
from offloaded import SMALL
from small_models import mlp

import zcompile
from zcompile.cli import main


def test_a_real_run_writes_its_second_step_when_the_third_begins(tmp_path, capsys):
    torch._dynamo.reset()
    model = zcompile.offload(mlp(), **SMALL, dump=tmp_path)
    compiled = torch.compile(model, backend="zinf")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        compiled(torch.ones(2, 8)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert main(["timeline", str(tmp_path), "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["step"] == 2
    assert list(shown["measured"]["phases"]) == ["forward", "backward", "step"]
    moments = shown["moments"]
    assert all(m["begin_s"] <= m["end_s"] for m in moments)
    assert all(m["predicted_begin_s"] <= m["predicted_end_s"] for m in moments)
    assert {m["call"] for m in moments} >= {0, 1, 2}
    assert 0 < shown["predicted"]["compute_s"] <= shown["predicted"]["step_s"]
    measured = shown["measured"]
    assert sum(measured["phases"].values()) == measured["step_s"]
    walked = moments[-1]["end_s"] - moments[0]["begin_s"]
    assert measured["step_s"] > walked, "what lies before the first call is part of a step"
