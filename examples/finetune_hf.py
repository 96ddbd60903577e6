"""A causal language model from `transformers` learns from real text, its states on disk.

    python examples/finetune_hf.py                        # a small Llama
    python examples/finetune_hf.py --config config.json   # any causal model's config.json
    python examples/finetune_hf.py --check                # equal to eager to the last bit?

Nothing is downloaded: the model is built from its configuration, with random values, and a byte is
a token. To start from trained values, load them into the model before `zcompile.offload`.
"""

import argparse
import json
import sys
from pathlib import Path

import torch
from torch import Tensor, nn

import zcompile
from examples import options, report
from examples.loop import train
from examples.text import VOCABULARY, Batch, InputInvalid

SMALL = {
    "model_type": "llama",
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
}
"""The fields of the default configuration: 4.8 M parameters with a vocabulary of bytes."""


def model(fields: dict[str, object] | None = None) -> nn.Module:
    """A causal model with random values. raises InputInvalid"""
    try:
        import transformers
    except ImportError as error:
        raise InputInvalid("this example needs transformers: pip install transformers") from error
    given = dict(fields or SMALL)
    kind = given.pop("model_type", None)
    try:
        config = transformers.AutoConfig.for_model(kind, **given, use_cache=False)
        # Its sdpa attention asks whether it is being compiled, and then takes a mask instead of
        # is_causal=True: another kernel, which rounds otherwise. This one is the same either way.
        made: nn.Module = transformers.AutoModelForCausalLM.from_config(
            config, attn_implementation="eager"
        )
    except (TypeError, ValueError, KeyError) as error:
        raise InputInvalid(
            f"no causal model can be built with model_type={kind!r}: {error}; give "
            "the config.json of a causal language model"
        ) from error
    return made


def read_fields(path: Path | None, least_positions: int) -> dict[str, object]:
    """The configuration as a dictionary, for a vocabulary of bytes. raises InputInvalid"""
    if path is None:
        fields: object = SMALL
    else:
        try:
            fields = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise InputInvalid(
                f"--config {path} cannot be read: {error}; give a file of JSON, as "
                "save_pretrained writes"
            ) from error
    if not isinstance(fields, dict) or "model_type" not in fields:
        raise InputInvalid(f"--config {path} has no model_type, as in {{'model_type': 'llama'}}")
    return {"max_position_embeddings": least_positions, **fields, "vocab_size": VOCABULARY}


def loss_of(causal: nn.Module, batch: Batch) -> Tensor:
    """The model shifts the labels by itself, so they are the ids."""
    loss: Tensor = causal(input_ids=batch.ids, labels=batch.ids).loss
    return loss


def parser() -> argparse.ArgumentParser:
    made = options.parser(
        __doc__ or "",
        steps=20,
        batch=4,
        sequence=64,
        lr=1e-3,
        device_memory="4MiB",
        host_memory="4MiB",
    )
    made.add_argument(
        "--config",
        type=Path,
        metavar="FILE.json",
        help="of a causal model; the vocabulary becomes bytes",
    )
    return made


def run(args: argparse.Namespace) -> int:
    """Train, tell, compare; the exit code.

    raises  InputInvalid, and what `zcompile` raises
    """
    fields = read_fields(args.config, args.seq)
    task = options.task(args, lambda: model(fields), loss_of)
    with options.config(args) as config:
        device = torch.device(str(config.device))
        torch.manual_seed(task.seed)
        causal = zcompile.offload(task.build(), config)
        causal.compile(backend="zinf")
        with options.ranks() as ranks:
            print(report.opening(causal, config, ranks.size))
            tokens = task.tokens_per_step * ranks.size
            progress = report.Progress("step", task.steps, tokens, causal)
            losses = train(task, causal, device, progress, options.keeping(args), ranks)
            print(report.closing(losses, zcompile.stats(causal), config))
            return options.check(task, causal, losses, device, ranks) if args.check else 0


if __name__ == "__main__":
    sys.exit(options.main(parser(), run))
