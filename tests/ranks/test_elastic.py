"""torchrun starts ranks again after one has died: the run goes on from its last commit, and the
numbers are those of one process that nothing happened to."""

import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from durable_ranks import expected_after

ROOT = Path(__file__).parents[2]
PATIENCE_S = 200

SCRIPT = """
import os, signal, sys
from pathlib import Path
import torch, zcompile
from durable_ranks import built
from rank_models import adamw, state_of, train
from zcompile.errors import NothingCommitted

here = Path(sys.argv[1])
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
    if step == 2 and "NODE" not in os.environ and rank == 1 and not (here / "died").exists():
        (here / "died").touch()
        os.kill(os.getpid(), signal.SIGKILL)
    if step == 2 and os.environ.get("NODE") == "that dies":
        os.kill(os.getppid(), signal.SIGKILL)  # torchrun itself, which would start this rank again
        os.kill(os.getpid(), signal.SIGKILL)
    train(model, run, optimizer, rank, ranks, steps=[step])
print(f"rank {rank} of {ranks} ends with {state_of(model, optimizer)}", flush=True)
"""


def started(path: Path, *options: str, **variables: str) -> subprocess.Popen[str]:
    (script := path / "script.py").write_text(SCRIPT)
    env = {
        **{name: text for name, text in os.environ.items() if "XDIST" not in name},
        "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}:{ROOT / 'tests' / 'helpers'}",
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "1",
        **variables,
    }
    launch = [sys.executable, "-m", "torch.distributed.run", "--max-restarts=3", *options]
    return subprocess.Popen(
        [*launch, str(script), str(path)],
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
@pytest.mark.slow
def test_torchrun_starts_as_many_ranks_again(tmp_path):
    text = ended(started(tmp_path, "--standalone", "--nproc-per-node=2"))
    assert begins(text) == [(2, 0), (2, 2)], text
    last = str(expected_after(6)[-1])
    # Two processes write to one pipe: their lines may share one.
    assert re.findall(r"ends with (\{.*?\})", text) == [last] * 2


@pytest.mark.ranks(2)
@pytest.mark.slow
def test_torchrun_goes_on_with_the_nodes_that_are_left(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as free:
        meeting = f"127.0.0.1:{free.getsockname()[1]}"
    options = "--nnodes=1:2", "--nproc-per-node=1", "--rdzv-backend=c10d", "--rdzv-id=elastic"
    # The one that is first waits for the other before it starts alone.
    left, dies = (
        started(
            tmp_path,
            *options,
            f"--rdzv-endpoint={meeting}",
            f"--rdzv-conf=is_host={int(stays)},last_call_timeout=60",
            NODE="that stays" if stays else "that dies",
        )
        for stays in (True, False)
    )
    ended(dies)
    text = ended(left)
    assert begins(text) == [(2, 0), (1, 2)], text
    assert f"rank 0 of 1 ends with {expected_after(6)[-1]}" in text
