"""A `Trainer` for models that several ranks train together, and what makes others such a one.

from zcompile.integrations.transformers import Trainer

class Tuner(OverRanks, trl.SFTTrainer): ...
"""

from typing import Any

import accelerate
import transformers

from zcompile.errors import Unsupported
from zcompile.frontend.rank_zero import rank_zero_reads
from zcompile.integrations.accelerate import Accelerator, refuse_files_on_each_node

LEAST_VERSION = 5
"""Of transformers: before, `Trainer.save_model` calls `_save` on rank 0 alone."""


class OverRanks:
    """Put before a class of trainers, it lets ranks train the model that they hold shares of: the
    model is not wrapped, and rank 0 writes the files of one process. With one process it does
    nothing."""

    args: Any
    model: Any
    optimizer: Any
    accelerator: Any

    def create_accelerator_and_postprocess(self) -> None:
        """As transformers does; the accelerator leaves shared models unwrapped.

        raises  Unsupported, for what is made otherwise than is known here
        """
        version = transformers.__version__
        if int(version.split(".")[0]) < LEAST_VERSION:
            raise Unsupported(
                f"transformers {version} is installed, and its trainers save on rank 0 otherwise "
                f"than those of {LEAST_VERSION}",
                f"install transformers {LEAST_VERSION}, or start one process",
            )
        super().create_accelerator_and_postprocess()  # type: ignore[misc]  # of the trainer behind
        made = type(self.accelerator)
        if made is accelerate.Accelerator:  # transformers makes it, of no class that we could name
            self.accelerator.__class__ = Accelerator
        elif not issubclass(made, Accelerator):
            raise Unsupported(
                f"the trainer makes an accelerator of its own class {made.__qualname__}, which "
                "would wrap the model",
                "derive that from zcompile.integrations.accelerate.Accelerator",
            )

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        refuse_files_on_each_node(self.args.save_on_each_node, self.model)
        with rank_zero_reads(self.model):
            super()._save(output_dir, state_dict)  # type: ignore[misc]  # of the trainer behind

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        refuse_files_on_each_node(self.args.save_on_each_node, self.model)
        with rank_zero_reads(self.optimizer):
            super()._save_optimizer_and_scheduler(output_dir)  # type: ignore[misc]  # of the same


class Trainer(OverRanks, transformers.Trainer):
    """The `Trainer` of transformers, also for models that several ranks train together."""
