"""A model beside its offloaded and compiled twin, and whether the two are still equal."""

import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import zcompile
from zcompile.frontend import backend
from zcompile.frontend.offload import session_behind
from zcompile.runtime.session import Session

SMALL = {"device": "cpu", "device_memory": "1MiB", "host_memory": "16MiB"}


@dataclass
class Twins:
    """plain    the eager model, untouched
    model    its twin, offloaded
    call     the twin, compiled
    graphs   one item per graph that the backend was given
    """

    plain: nn.Module
    model: nn.Module
    call: Any
    graphs: list[object]

    @property
    def session(self) -> Session:
        return session_behind(self.model)

    def same(self) -> bool:
        """Parameters, gradients and buffers, bit by bit."""
        pairs = zip(self.model.parameters(), self.plain.parameters(), strict=True)
        buffers = zip(self.model.buffers(), self.plain.buffers(), strict=True)
        return all(equal(p, q) and equal(p.grad, q.grad) for p, q in pairs) and all(
            torch.equal(a, b) for a, b in buffers
        )

    def train(self, *inputs: Any, seed: int = 0) -> bool:
        """One forward and backward of both; whether outputs and gradients agree."""
        results = []
        for model in (self.call, self.plain):
            torch.manual_seed(seed)
            out = model(*inputs)
            out = out if isinstance(out, Tensor) else out[0]
            out.float().square().mean().backward()
            results.append(out)
        return torch.equal(*results) and self.same()


def equal(tiered: Tensor | None, plain: Tensor | None) -> bool:
    if tiered is None or plain is None:
        return tiered is plain
    return torch.equal(tiered.detach().cpu(), plain.detach())


def twins(model: nn.Module, *, dynamic: bool | None = None, **config: Any) -> Twins:
    """`model` and an offloaded twin, compiled by a backend that counts its graphs."""
    torch._dynamo.reset()
    plain = copy.deepcopy(model)
    zcompile.offload(model, **{**SMALL, **config})
    graphs: list[object] = []

    def counting(gm: Any, inputs: Any) -> Any:
        graphs.append(gm)
        return backend.zinf(gm, inputs)

    return Twins(plain, model, torch.compile(model, backend=counting, dynamic=dynamic), graphs)
