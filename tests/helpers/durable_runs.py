"""A small durable training, and what it is compared with."""

import gc
from pathlib import Path

import torch
from torch import Tensor, nn

import zcompile
from zcompile.frontend.offload import session_behind
from zcompile.runtime.durable.commit import CommitLog

ON_DISK = {"device": "cpu", "device_memory": "4MiB", "host_memory": "256KiB", "durable": True}
ON_HOST = {**ON_DISK, "host_memory": "64MiB"}
WIDTH = 192


class Net(nn.Module):
    """Large and small parameters, a buffer that changes, random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.norm = nn.BatchNorm1d(2 * WIDTH)
        self.drop = nn.Dropout(0.2)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.drop(self.norm(self.up(x))))


class Run:
    """A training of `Net`, plain or durable; `device` is one of `fields`."""

    def __init__(self, disk: Path | None = None, make=torch.optim.AdamW, **fields: object) -> None:
        torch.manual_seed(0)
        self.model: nn.Module = Net()
        self.device = torch.device(str(fields.get("device", "cpu")))
        if disk is not None:
            zcompile.offload(self.model, disk=disk, **{**ON_DISK, **fields})
        else:
            self.model.to(self.device)
        self.optimizer = make(self.model.parameters(), lr=1e-2)
        self.call = self.model
        self.disk = disk

    @property
    def commit_log(self) -> CommitLog:
        found = session_behind(self.model).commit_log
        assert found is not None
        return found

    def train(self, begin: int, end: int) -> "Run":
        for number in range(begin, end):
            x = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(number))
            self.call(x.to(self.device)).square().mean().backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
        return self

    def close(self) -> None:
        session_behind(self.model).close()

    def resume(self) -> dict[str, object]:
        return zcompile.resume(self.disk, self.model, self.optimizer)

    def state(self) -> list[Tensor]:
        """Everything that training goes on from."""
        tensors = list(self.model.state_dict().values())
        for param in self.model.parameters():
            state = self.optimizer.state.get(param, {})
            tensors += [state[key] for key in sorted(state) if isinstance(state[key], Tensor)]
        random = [torch.get_rng_state()]
        if self.device.type == "cuda":
            random.append(torch.cuda.get_rng_state(self.device))
        return [plain(t) for t in tensors] + random


def plain(tensor: Tensor) -> Tensor:
    value = tensor.on_host() if hasattr(tensor, "on_host") else tensor
    return value.detach().cpu().clone()


def same(a: list[Tensor], b: list[Tensor]) -> bool:
    return len(a) == len(b) and all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def after_a_crash(disk: Path, make=torch.optim.AdamW, **fields: object) -> Run:
    """A new run over what an earlier one committed."""
    gc.collect()
    return Run(disk, make, **fields)


def flip(path: Path, offset: int) -> None:
    """Change one bit of a file."""
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 16]))
