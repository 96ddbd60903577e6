"""LoRA: adapters of `peft` learn in memory on a frozen base that rests on disk.

    python examples/lora_peft.py                              # a small Llama with random values
    python examples/lora_peft.py --model DIRECTORY            # as save_pretrained writes
    python examples/lora_peft.py --output adapter --steps 500

The base is loaded a weight at a time, so it may be larger than memory. What is saved is the
adapter alone; `PeftModel.from_pretrained(base, "adapter")` takes an offloaded base too.
"""

import argparse
from collections.abc import Iterator

from torch import Tensor

from examples import loop, options
from examples.finetune_trainer import BATCH, SEQUENCE, parser_of_models, pretrained
from examples.text import InputInvalid, batches, read_text


def parser() -> argparse.ArgumentParser:
    made = parser_of_models(__doc__ or "")
    made.add_argument("--rank", type=options.positive, default=8, help="default 8")
    return made


def run(args: argparse.Namespace) -> list[float]:
    """The loss of each step.

    raises  InputInvalid, and what `zcompile` raises
    """
    try:
        import peft
    except ImportError as error:
        raise InputInvalid("this example needs peft: pip install peft") from error
    lora = peft.LoraConfig(r=args.rank, target_modules=["q_proj", "v_proj"])
    text = read_text(args.data, SEQUENCE + 1)
    with options.built(args, lambda: pretrained(args.model)) as (base, device):
        model = peft.get_peft_model(base, lora)
        model.print_trainable_parameters()
        if not args.plain:
            model.compile(backend="zinf")

        def losses() -> Iterator[Tensor]:
            for batch in batches(text, BATCH, SEQUENCE, args.seed, device):
                yield model(input_ids=batch.ids, labels=batch.ids).loss

        values = loop.learn(model, losses(), args.steps, lr=1e-3)
        if args.output is not None:
            model.save_pretrained(args.output)
    return values


if __name__ == "__main__":
    options.main(parser(), run)
