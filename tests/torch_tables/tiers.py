"""Tensors put on a tier one at a time: the host, the disk, or the device itself."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import zcompile
from zcompile.frontend.offload import _become_tiered, session_behind
from zcompile.ir.units import MiB
from zcompile.runtime.relocate import move
from zcompile.runtime.session import Session

TIERS = ("host", "disk", "device")
DEVICE_BYTES, HOST_BYTES = 128 * MiB, 64 * MiB
"""The largest parameter of torch's tables takes 18 MiB, and so does its gradient."""


class Tier:
    """A store whose entries all rest on one tier; where they do not, `put` fails.

    Nothing is planned (`residency=False`): an entry stays where it is put first.
    """

    def __init__(self, name: str, directory: Path) -> None:
        assert name in TIERS
        self.name = name
        fields: dict[str, Any] = {
            "device": "cpu",
            "device_memory": DEVICE_BYTES,
            "host_memory": HOST_BYTES,
            "residency": False,
        }
        if name == "disk":  # the least host budget there is, and all of it staging
            directory.mkdir(parents=True, exist_ok=True)
            fields |= {"host_memory": "256KiB", "disk": directory}
        model = nn.Module()
        model.register_parameter("first", nn.Parameter(torch.zeros(())))
        self._model = zcompile.offload(model, **fields)
        self.session: Session = session_behind(model)
        if name == "device":
            self.session.homes.device.window_bytes = DEVICE_BYTES // 2
        self._count = 0

    def put(self, value: Tensor, trains: bool) -> nn.Parameter:
        """A parameter with the value and the strides of `value`, at rest on this tier."""
        param = nn.Parameter(value, requires_grad=trains)
        self._count += 1
        _become_tiered(self.session, f"p{self._count}", param)
        self.settle(param)
        return param

    def settle(self, param: Any) -> None:
        """On the device: the parameter and the gradients to come have berths there."""
        entry = param.entry
        if self.name == "device":
            rest_on_device(self.session, param)
        assert entry.nbytes == 0 or entry.home == self.name, entry.home

    def clear(self) -> int:
        """Between two cases: berths of the dead are given back. How many entries are alive."""
        alive = len(self.session.entries()) - 1  # the model's own
        if self.name == "device":
            self.session.drain()
            self.session.homes.device.clear()
        return alive

    def close(self) -> None:
        zcompile.close(self._model)


def rest_on_device(session: Session, param: Any) -> None:
    """`param` and the gradients that it will get have berths on the device; it moves there."""
    entry = param.entry
    if entry.nbytes:
        for ref in (entry.ref, entry.ref.gradient):
            assert session.homes.device.plan(ref, entry.name, entry.nbytes), "the device is full"
        assert move(session, entry, "device")


def is_tiered(value: object) -> bool:
    return isinstance(value, torch.Tensor) and hasattr(value, "on_host")


def plain(tensor: Tensor) -> Tensor:
    """The value, wherever it rests, as an ordinary tensor."""
    tensor = tensor.detach()
    return tensor.on_host() if is_tiered(tensor) else tensor
