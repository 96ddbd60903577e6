"""LoRA: adapters of `peft` learn in memory on a frozen base that rests on disk.

    python examples/lora_peft.py                              # a small Llama with random values
    python examples/lora_peft.py --model DIRECTORY            # as save_pretrained writes
    python examples/lora_peft.py --output adapter --steps 500

The base is loaded a weight at a time, so it may be larger than memory. What is saved is the
adapter alone; `PeftModel.from_pretrained(base, "adapter")` takes an offloaded base too.
"""

import argparse

import torch
from torch import nn

import zcompile
from examples import options
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
    with options.config(args) as config:
        device = torch.device(str(config.device))
        torch.manual_seed(args.seed)
        if args.plain:
            base = pretrained(args.model).to(device)
        else:
            with zcompile.init(config):
                base = pretrained(args.model)
        lora = peft.LoraConfig(r=args.rank, target_modules=["q_proj", "v_proj"])
        model = peft.get_peft_model(base, lora)
        model.print_trainable_parameters()
        if not args.plain:
            model.compile(backend="zinf")
        trained = [param for param in model.parameters() if param.requires_grad]
        optimizer = torch.optim.AdamW(trained, lr=1e-3)
        data = batches(read_text(args.data, SEQUENCE + 1), BATCH, SEQUENCE, args.seed, device)
        losses = []
        for step in range(args.steps):
            ids = next(data).ids
            loss = model(input_ids=ids, labels=ids).loss
            loss.backward()
            nn.utils.clip_grad_norm_(trained, 1.0)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
            print(f"step {step + 1}  loss {loss.item():.4f}")
        if args.output is not None:
            model.save_pretrained(args.output)
        if not args.plain:
            print(
                {link: nbytes for link, nbytes in zcompile.stats(base)["bytes"].items() if nbytes}
            )
            zcompile.close(base)
    return losses


if __name__ == "__main__":
    options.main(parser(), run)
