"""torchrun starts ranks again after one has died: as many, fewer, or more. The run goes on from its
last commit, and the numbers are those of one process that nothing happened to."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from durable_ranks import expected_after
from rank_pool import free_port

ROOT = Path(__file__).parents[2]
PATIENCE_S = 200

SCRIPT = """
import os, signal, sys, time
from pathlib import Path
import torch, zcompile
from durable_ranks import built
from rank_models import adamw, state_of, train
from zcompile.errors import NothingCommitted

here, dies = Path(sys.argv[1]), sys.argv[2]
rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
model = zcompile.offload(
    built(), device="cpu", device_memory="4MiB", host_memory="64MiB", disk=here, durable=True
)
optimizer, run = adamw(model.parameters()), torch.compile(model, backend="zinf")
try:
    begin = zcompile.resume(here, model, optimizer)["step"]
except NothingCommitted:
    begin = 0
print(f"rank {rank} of {ranks} begins at {begin}", flush=True)
for step in range(begin, 6):
    mine = rank == ranks - 1 if dies == "alone" else "HOST" not in os.environ
    if step == 2 and mine and not (here / "died").exists():
        (here / "died").touch()
        if dies == "with its node":
            os.kill(os.getppid(), signal.SIGKILL)
        os.kill(os.getpid(), signal.SIGKILL)
    while step == 4 and ranks == 1 and dies == "with its node":
        (here / "alone").touch()
        time.sleep(0.1)  # until torchrun has found another node
    train(model, run, optimizer, rank, ranks, steps=[step])
print(f"rank {rank} of {ranks} ends with {state_of(model, optimizer)}", flush=True)
"""


def started(path: Path, *options: str, dies: str, **more: str) -> subprocess.Popen[str]:
    (script := path / "script.py").write_text(SCRIPT)
    env = {
        **{name: text for name, text in os.environ.items() if "XDIST" not in name},
        "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}:{ROOT / 'tests' / 'helpers'}",
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "1",
        **more,
    }
    launch = [sys.executable, "-m", "torch.distributed.run", "--max-restarts=3", *options]
    return subprocess.Popen(
        [*launch, str(script), str(path), dies],
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def ended(process: subprocess.Popen[str]) -> str:
    try:
        text, _ = process.communicate(timeout=PATIENCE_S)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    return text


def begins(text: str) -> list[tuple[int, int]]:
    """(ranks, step) at which the runs began, each once, in order."""
    rows = re.findall(r"rank \d+ of (\d+) begins at (\d+)", text)
    return list(dict.fromkeys((int(ranks), int(step)) for ranks, step in rows))


@pytest.mark.ranks(2)
def test_torchrun_starts_as_many_ranks_again(tmp_path):
    text = ended(started(tmp_path, "--standalone", "--nproc-per-node=2", dies="alone"))
    assert begins(text) == [(2, 0), (2, 2)], text
    last = str(expected_after(6)[-1])
    assert re.findall("ends with (.*)", text) == [last] * 2


@pytest.mark.slow
@pytest.mark.ranks(2)
def test_torchrun_goes_on_with_fewer_ranks_and_with_more(tmp_path):
    """A node dies; the other goes on alone, until a third joins it."""
    options = (
        "--nnodes=1:2",
        "--nproc-per-node=1",
        "--rdzv-backend=c10d",
        f"--rdzv-endpoint=127.0.0.1:{free_port()}",
        "--rdzv-conf=last_call_timeout=5,keep_alive_interval=1,keep_alive_max_attempt=3",
        "--local-addr=127.0.0.1",
    )
    host = started(tmp_path, *options, dies="with its node", HOST="1")
    second = started(tmp_path, *options, dies="with its node")
    nodes = [host, second]
    try:
        until = time.monotonic() + PATIENCE_S
        while not (tmp_path / "alone").exists():
            assert time.monotonic() < until, "nobody goes on alone"
            time.sleep(0.1)
        third = started(tmp_path, *options, dies="with its node")
        nodes.append(third)
        texts = [ended(host), ended(third)]
    finally:
        for node in nodes:
            if node.poll() is None:
                os.killpg(node.pid, signal.SIGKILL)
    assert begins(texts[0]) == [(2, 0), (1, 2), (2, 4)], texts[0]
    last = str(expected_after(6)[-1])
    for text in texts:
        assert re.findall("ends with (.*)", text) == [last], text
