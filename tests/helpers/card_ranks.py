"""One rank of a training on a CUDA card, as a process of its own: what `tests/ranks/test_cards.py`
starts. Its last line says what has become of it, as JSON."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from rank_models import adamw, state_of, train, words
from rank_pool import free_port
from torch import Tensor, nn

import zcompile
from zcompile.errors import RankFailed
from zcompile.frontend.backend import zinf

PATIENCE_S = 300.0


def on_device(run: Any, device: str) -> Any:
    """Calls a model with a batch that is brought to the device."""

    def call(ids: Tensor, wanted: Tensor) -> Any:
        return run(ids.to(device), wanted.to(device))

    return call


def eagerly(steps: int, clip: float = 0.0, device: str = "cuda:0") -> dict[str, str]:
    """What stock PyTorch makes of all batches on the device, in one process."""
    model: nn.Module = words().to(device)
    made = adamw(model.parameters())
    train(model, on_device(model, device), made, 0, 1, clip, range(steps))
    return state_of(model, made)


def ranks_train(
    ranks: int, steps: int, fields: dict[str, Any], **more: Any
) -> list[dict[str, Any] | None]:
    """What each of so many ranks on one device tells; None of one that was killed.

    more  as of `_train`
    """
    told = json.dumps({"steps": steps, "fields": fields, **more})
    known = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(ranks)}
    here = [str(Path(__file__).parent), *sys.path]
    processes = [
        subprocess.Popen(
            [sys.executable, __file__, told],
            env={**os.environ, **known, "RANK": str(rank), "PYTHONPATH": os.pathsep.join(here)},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(ranks)
    ]
    found: list[dict[str, Any] | None] = []
    try:
        for process in processes:
            out, _ = process.communicate(timeout=PATIENCE_S)
            lines: Sequence[str] = out.splitlines()
            found.append(json.loads(lines[-1]) if process.returncode == 0 else None)
    finally:
        for process in processes:
            process.kill()
    return found


def _train(
    steps: int,
    fields: dict[str, Any],
    clip: float = 0.0,
    resumes: bool = False,
    dies: int | None = None,
) -> dict[str, Any]:
    """Train this rank for so many steps, from the last commit on if it `resumes`; rank 1 is killed
    before step `dies`."""
    torch.distributed.init_process_group("gloo")
    rank, ranks = torch.distributed.get_rank(), torch.distributed.get_world_size()
    model: nn.Module = words()
    zcompile.offload(model, **fields)
    made, begin = adamw(model.parameters()), 0
    if resumes:
        begin = zcompile.resume(fields["disk"], model, made)["step"]
    run = on_device(torch.compile(model, backend=zinf), fields["device"])
    try:
        for step in range(begin, steps):
            if rank == 1 and step == dies:
                os.kill(os.getpid(), signal.SIGKILL)
            train(model, run, made, rank, ranks, clip, range(step, step + 1))
    except RankFailed as error:
        return {"failed": str(error), "rank": error.rank}
    found = {"begun": begin, "state": state_of(model, made)}
    zcompile.close(model)
    return found


if __name__ == "__main__":
    said = _train(**json.loads(sys.argv[1]))
    sys.stdout.write(json.dumps(said) + "\n")
    sys.stdout.flush()
    os._exit(0)
