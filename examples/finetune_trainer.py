"""All weights of a causal language model are trained by `transformers.Trainer`, from disk.

    python examples/finetune_trainer.py                       # a small Llama with random values
    python examples/finetune_trainer.py --model DIRECTORY     # as save_pretrained writes
    python examples/finetune_trainer.py --output tuned --steps 500
    torchrun --nproc-per-node 2 examples/finetune_trainer.py --output tuned

Three lines differ from an ordinary program: the model is made inside `zcompile.init` (in
`options.built`), it is compiled, and `Trainer` is zcompile's, which leaves it unwrapped where
several processes train it. Checkpoints and the trained model are saved as ever. A byte is a token
here; for a tokenizer of your own see pretrain.py.
"""

import argparse
import tempfile
from pathlib import Path
from typing import Any

import torch

from examples import finetune_hf, options
from examples.text import VOCABULARY, InputInvalid, batches, read_text

BATCH, SEQUENCE = 4, 64


def parser_of_models(about: str) -> argparse.ArgumentParser:
    """The options of programs that take a pretrained model further."""
    made = options.parser_of_tiers(about, device_memory="8MiB", host_memory="4MiB")
    options.plain_too(made, steps=20)
    made.add_argument("--model", type=Path, metavar="DIR", help="weights to start from")
    made.add_argument("--data", type=Path, nargs="+", default=[], metavar="FILE", help="text")
    made.add_argument("--output", type=Path, metavar="DIR", help="where to save what was learnt")
    return made


def parser() -> argparse.ArgumentParser:
    made = parser_of_models(__doc__ or "")
    made.add_argument("--save-steps", type=options.positive, default=500, help="default 500")
    made.add_argument("--resume", type=Path, metavar="DIR", help="one of its checkpoints")
    return made


def pretrained(path: Path | None) -> Any:
    """The model in a directory, or a small one with random values. raises InputInvalid"""
    if path is None:
        return finetune_hf.model({**finetune_hf.SMALL, "vocab_size": VOCABULARY})
    from transformers import AutoModelForCausalLM

    try:
        return AutoModelForCausalLM.from_pretrained(
            path, attn_implementation="eager", local_files_only=True
        )
    except (OSError, ValueError) as error:
        raise InputInvalid(
            f"--model {path} cannot be loaded: {error}; give a directory that save_pretrained wrote"
        ) from error


def examples_of(args: argparse.Namespace) -> list[dict[str, torch.Tensor]]:
    """One for each sequence that the training reads: ids, which are labels too."""
    text = read_text(args.data, SEQUENCE + 1)
    data = batches(text, BATCH, SEQUENCE, args.seed, torch.device("cpu"))
    return [{"input_ids": x, "labels": x} for _ in range(args.steps) for x in next(data).ids]


def run(args: argparse.Namespace) -> list[float]:
    """The loss of each step.

    raises  InputInvalid, and what `zcompile` raises
    """
    try:
        from transformers import TrainingArguments

        from zcompile.integrations.transformers import Trainer
    except ImportError as error:
        raise InputInvalid(
            "this example needs transformers and accelerate: pip install transformers accelerate"
        ) from error
    with (
        tempfile.TemporaryDirectory() as temporary,
        options.built(args, lambda: pretrained(args.model)) as (model, device),
    ):
        if not args.plain:
            model.compile(backend="zinf")
        output = str(args.output or temporary)
        trainer = Trainer(
            model,
            TrainingArguments(
                output,
                max_steps=args.steps,
                per_device_train_batch_size=BATCH,
                learning_rate=1e-3,
                logging_steps=1,
                save_steps=args.save_steps,
                report_to=[],
                use_cpu=device.type == "cpu",
                seed=args.seed,
            ),
            train_dataset=examples_of(args),  # type: ignore[arg-type]
        )
        trainer.train(resume_from_checkpoint=args.resume and str(args.resume))
        trainer.save_model(output)
        return [row["loss"] for row in trainer.state.log_history if "loss" in row]


if __name__ == "__main__":
    options.main(parser(), run)
