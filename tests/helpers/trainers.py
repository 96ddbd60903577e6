"""Models that the `Trainer` of transformers has trained, and what it logged of them."""

import re
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import Trainer, TrainingArguments


def data() -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    rows = torch.randint(3, 96, (8, 12), generator=generator)
    return [{"input_ids": row, "labels": row} for row in rows]


def trained(
    model: nn.Module,
    output: Path,
    resume: Path | None = None,
    kind: type[Trainer] = Trainer,
    **options: Any,
) -> Trainer:
    """A Trainer, by default a stock one, that has trained `model`."""
    options = {"max_steps": 3, "save_strategy": "no", **options}
    args = TrainingArguments(
        str(output),
        per_device_train_batch_size=2,
        learning_rate=1e-2,
        logging_steps=1,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        **options,
    )
    trainer = kind(model, args, train_dataset=data(), eval_dataset=data()[:4])
    trainer.train(resume_from_checkpoint=None if resume is None else str(resume))
    return trainer


def log(trainer: Trainer) -> list[dict[str, float]]:
    """Losses, norms of gradients, results of evaluations: all that is no time."""
    timed = re.compile("runtime|per_second|total_flos")
    rows = trainer.state.log_history
    return [{k: v for k, v in row.items() if not timed.search(k)} for row in rows]
