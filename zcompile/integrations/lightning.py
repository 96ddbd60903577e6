"""Strategies for Lightning's Trainer stream checkpoints, and leave what is offloaded in place.

    trainer = lightning.Trainer(strategy=OffloadStrategy("cuda"), devices=1)
    trainer = lightning.Trainer(strategy=RanksStrategy(), devices=4)

Lightning by itself makes a checkpoint in memory before it writes it, reads one whole, and at the
end of `fit` moves model and optimizer states to the CPU. Over several devices it wraps the model.
"""

import io
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy, Strategy
from torch import Tensor
from torch.optim import Optimizer

from zcompile.checkpoint.checkpoint import resume, save
from zcompile.checkpoint.state import fabric_behind
from zcompile.errors import Unsupported
from zcompile.frontend.no_sync import no_sync

OF_PROCESSES = {
    "accelerator",
    "parallel_devices",
    "cluster_environment",
    "checkpoint_io",
    "precision_plugin",
    "process_group_backend",
    "timeout",
    "start_method",
}
"""Options of `DDPStrategy` that are about processes, and not about what wraps the model."""
STREAMED = ("state_dict", "optimizer_states")
"""What of a checkpoint of Lightning is written as tensors; the rest is small."""


class _StreamedCheckpoints(Strategy):
    """A checkpoint is a directory that `zcompile.save` writes.

    It holds torch's random states too, so that a resumed run has the same shuffles and dropout.
    Checkpoints that Lightning wrote as files are read as well.
    """

    _is_loaded = False

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        """True: a checkpoint is read when the optimizer stands."""
        return True

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any = None
    ) -> None:
        """Write a checkpoint as a directory.

        raises  Unsupported, if `on_save_checkpoint` changed which weights are to be saved; what
                `zcompile.save` raises
        """
        if checkpoint["state_dict"].keys() != self.lightning_module_state_dict().keys():
            raise Unsupported(
                "on_save_checkpoint changed which weights are saved, and a streamed checkpoint has "
                "all of them",
                "leave the strategy out, or write what you want by zcompile.save in a callback",
            )
        rest = {key: value for key, value in checkpoint.items() if key not in STREAMED}
        optimizer = self._optimizer() if "optimizer_states" in checkpoint else None
        save(filepath, self._module(), optimizer, lightning=_packed(rest))

    def load_checkpoint(
        self, checkpoint_path: str | Path, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Read weights, and for a fit the optimizer's states, into where they rest; returns the
        rest, or all that is in a file.

        raises  what `zcompile.resume` raises
        """
        self._is_loaded = Path(checkpoint_path).is_dir()
        if not self._is_loaded:
            found: dict[str, Any] = super().load_checkpoint(checkpoint_path, weights_only)
            return found
        optimizer = self._optimizer()
        extra = resume(checkpoint_path, self._module(), optimizer)
        rest: dict[str, Any] = torch.load(
            io.BytesIO(extra["lightning"].numpy().tobytes()), weights_only=weights_only
        )
        return {**rest, "state_dict": {}, "optimizer_states": []}

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Nothing is left to do for a directory."""
        if not self._is_loaded:
            super().load_model_state_dict(checkpoint, strict)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Nothing is left to do for a directory."""
        if not self._is_loaded:
            super().load_optimizer_state_dict(checkpoint)

    def teardown(self) -> None:
        """End a run: what is offloaded stays where it rests."""
        self.precision_plugin.teardown()
        if self.accelerator is not None:
            self.accelerator.teardown()
        self.checkpoint_io.teardown()

    def _module(self) -> torch.nn.Module:
        assert self.lightning_module is not None
        return self.lightning_module

    def _optimizer(self) -> Optimizer | None:
        """The optimizer. raises  Unsupported, if there are several"""
        if len(self.optimizers) > 1:
            raise Unsupported(
                f"a streamed checkpoint holds one optimizer, and there are {len(self.optimizers)}",
                "use one with several groups, or leave the strategy out",
            )
        return self.optimizers[0] if self.optimizers else None


class OffloadStrategy(_StreamedCheckpoints, SingleDeviceStrategy):
    """Trains on one device; a checkpoint is a directory that `zcompile.save` writes.

    device  that `zcompile.offload` was given: "cuda" or "cpu"
    """

    strategy_name = "zcompile"

    def __init__(self, device: str | torch.device = "cpu", **options: Any) -> None:
        super().__init__(device=device, **options)


class RanksStrategy(_StreamedCheckpoints, DDPStrategy):
    """Trains over several processes, each of which offloads the model, and so holds shares of it;
    what `DistributedDataParallel` would do, ranks do themselves. All of them write a checkpoint.

    It starts processes as `DDPStrategy` does, or is started by torchrun.
    """

    strategy_name = "zcompile_ranks"

    def __init__(self, **options: Any) -> None:
        """
        options  of `DDPStrategy`, but for those that are about `DistributedDataParallel` itself
        raises   Unsupported, for those
        """
        if told := [name for name in options if name not in OF_PROCESSES]:
            raise Unsupported(
                f"RanksStrategy was given {', '.join(told)}, which tells DistributedDataParallel "
                "what to do, and wraps no model in that",
                "leave it out",
            )
        super().__init__(**options)

    def setup(self, trainer: Trainer) -> None:
        """As of any strategy: `DDPStrategy` would send the values of rank 0 to the others.

        raises  Unsupported, if ranks do not share the model, or with `sync_batchnorm`
        """
        if self._layer_sync is not None:
            raise Unsupported(
                "sync_batchnorm=True is asked for, which would put other modules in the place of "
                "those that are offloaded",
                "leave it out: batch statistics are those of each rank",
            )
        Strategy.setup(self, trainer)

    @contextmanager
    def block_backward_sync(self) -> Generator[None]:
        """As of `DDPStrategy`, which Lightning enters for all micro-batches but the last: ranks
        exchange gradients once for all of them."""
        with no_sync(self._module()):
            yield

    def _setup_model(self, model: Any) -> Any:
        if fabric_behind(model) is None:
            raise Unsupported(
                "RanksStrategy was given a model that ranks do not share: each would train its own",
                "build and offload it in configure_model, where ranks know of each other; or take "
                "lightning's own strategy for a plain model",
            )
        return model


def _packed(values: dict[str, Any]) -> Tensor:
    """What `torch.save` makes of values: uint8 [n]."""
    file = io.BytesIO()
    torch.save(values, file)
    return torch.frombuffer(file.getbuffer(), dtype=torch.uint8).clone()
