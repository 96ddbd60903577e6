"""A `Trainer` for models that several ranks train together, and what makes others such a one.

from zcompile.integrations.transformers import Trainer

class Tuner(OverRanks, trl.SFTTrainer): ...
"""

from typing import Any

import transformers

from zcompile.frontend.rank_zero import rank_zero_reads
from zcompile.integrations.accelerate import Accelerator


class OverRanks:
    """Put before a class of trainers, it lets ranks train the model that they hold shares of: the
    model is not wrapped, and rank 0 writes the files of one process. With one process it does
    nothing."""

    model: Any
    optimizer: Any
    accelerator: Any

    def create_accelerator_and_postprocess(self) -> None:
        """As transformers does; the accelerator leaves shared models unwrapped."""
        super().create_accelerator_and_postprocess()  # type: ignore[misc]  # of the trainer behind
        # It is made by the trainer itself, of a class that cannot be named.
        self.accelerator.__class__ = Accelerator

    def _save(
        self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None
    ) -> None:
        with rank_zero_reads(self.model):
            super()._save(output_dir, state_dict)  # type: ignore[misc]  # of the trainer behind

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        with rank_zero_reads(self.optimizer):
            super()._save_optimizer_and_scheduler(output_dir)  # type: ignore[misc]  # of the same


class Trainer(OverRanks, transformers.Trainer):
    """The `Trainer` of transformers, also for models that several ranks train together."""
