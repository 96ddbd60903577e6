"""An `Accelerator` for models that several ranks train together: it wraps none of them, and rank 0
saves what all hold shares of.

    from zcompile.integrations.accelerate import Accelerator

With one process it is accelerate's own.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import accelerate
from torch import nn
from torch.optim import Optimizer

from zcompile.checkpoint.state import fabric_behind
from zcompile.errors import Unsupported
from zcompile.frontend.no_sync import no_sync
from zcompile.frontend.rank_zero import rank_zero_reads


class Accelerator(accelerate.Accelerator):  # type: ignore[misc]  # accelerate is not typed
    """Leaves a model unwrapped whose ranks exchange gradients themselves, once for all
    micro-batches of a step; what rank 0 saves, the others send it. All ranks call what saves, as
    accelerate asks for anyway."""

    def prepare_model(
        self,
        model: nn.Module,
        device_placement: bool | None = None,
        evaluation_mode: bool = False,
    ) -> nn.Module:
        """As accelerate's; an offloaded model that ranks share is not given to
        `DistributedDataParallel`."""
        unwrapped = evaluation_mode or fabric_behind(model) is not None
        made: nn.Module = super().prepare_model(model, device_placement, unwrapped)
        return made

    @contextmanager
    def no_sync(self, model: nn.Module) -> Iterator[None]:
        """As accelerate's, which `accumulate` enters for all micro-batches but the last: ranks
        exchange gradients once for all of them."""
        shared = no_sync(model) if fabric_behind(model) is not None else nullcontext()
        with super().no_sync(model), shared:
            yield

    def save_state(
        self, output_dir: str | None = None, safe_serialization: bool = True, **options: Any
    ) -> str:
        """As accelerate's: the files of one process, written by rank 0.

        raises  what writing raises, on rank 0; RankZeroFailed on the others then; RankFailed;
                Unsupported, with `save_on_each_node`
        """
        refuse_files_on_each_node(self.project_configuration.save_on_each_node, *self._models)
        kinds = (nn.Module, Optimizer)
        others = [held for held in self._custom_objects if isinstance(held, kinds)]
        with rank_zero_reads(*self._models, *self._optimizers, *others):
            where: str = super().save_state(output_dir, safe_serialization, **options)
        return where

    def save_model(
        self,
        model: nn.Module,
        save_directory: str | os.PathLike[str],
        max_shard_size: int | str = "10GB",
        safe_serialization: bool = True,
    ) -> None:
        """As accelerate's, with the errors of `save_state`."""
        refuse_files_on_each_node(self.project_configuration.save_on_each_node, model)
        with rank_zero_reads(model):
            super().save_model(model, save_directory, max_shard_size, safe_serialization)


def refuse_files_on_each_node(asked: bool, *models: nn.Module) -> None:
    """Refuse that a rank of each node saves what rank 0 alone reads.

    asked   whether `save_on_each_node` is
    raises  Unsupported, if it is, and ranks hold shares of a model
    """
    if asked and any(fabric_behind(model) is not None for model in models):
        raise Unsupported(
            "save_on_each_node=True is asked for, and rank 0 alone reads a model that ranks "
            "hold shares of",
            "leave it out, and save to a directory that all nodes see",
        )
