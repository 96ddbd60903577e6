"""A diffusion UNet of `diffusers` learns to take noise away, its states on disk.

    python examples/denoise_unet.py
    python examples/denoise_unet.py --steps 200 --device-memory 64MiB --disk /mnt/nvme

The pictures are drawn by the program: discs of random size and place. `--eager` leaves the model
uncompiled: the same bits, slower, and the way round where torch fails to compile a UNet.
"""

import argparse
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from examples import loop, options
from examples.text import InputInvalid

SIZE = 16


def pictures(count: int, generator: torch.Generator) -> Tensor:
    """Discs, from -1 to 1: float32 [count, 1, SIZE, SIZE]"""
    x, y, radius = torch.rand(3, count, 1, 1, generator=generator)
    at = torch.linspace(0, 1, SIZE)
    far = (at.view(1, 1, -1) - x) ** 2 + (at.view(1, -1, 1) - y) ** 2
    return torch.where(far < (radius / 3 + 0.1) ** 2, 1.0, -1.0).unsqueeze(1)


def unet(width: int) -> Any:
    """raises  InputInvalid"""
    try:
        from diffusers import UNet2DModel
    except ImportError as error:
        raise InputInvalid("this example needs diffusers: pip install diffusers") from error
    return UNet2DModel(
        sample_size=SIZE,
        in_channels=1,
        out_channels=1,
        layers_per_block=1,
        block_out_channels=(width, 2 * width),
        down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"),
        attention_head_dim=8,
        norm_num_groups=8,
    )


def parser() -> argparse.ArgumentParser:
    made = options.parser_of_tiers(__doc__ or "", device_memory="32MiB", host_memory="4MiB")
    options.plain_too(made, steps=20)
    made.add_argument("--width", type=options.positive, default=32, help="channels; default 32")
    made.add_argument("--batch", type=options.positive, default=8, help="pictures; default 8")
    made.add_argument("--eager", action="store_true", help="do not compile")
    return made


def run(args: argparse.Namespace) -> list[float]:
    """The loss of each step.

    raises  InputInvalid, and what `zcompile` raises
    """
    if args.width % 8:
        raise InputInvalid(f"--width {args.width} is not a multiple of 8, the groups of its norms")
    generator = torch.Generator().manual_seed(args.seed)
    with options.built(args, lambda: unet(args.width)) as (model, device):
        if not args.eager and not args.plain:
            model.compile(backend="zinf")
        # As DDPM: noise of 1000 strengths, which the model is to name.
        kept = torch.cumprod(1 - torch.linspace(1e-4, 0.02, 1000), 0)

        def losses() -> Iterator[Tensor]:
            while True:
                clean = pictures(args.batch, generator)
                noise = torch.randn(clean.shape, generator=generator)
                when = torch.randint(1000, (args.batch,), generator=generator)
                share = kept[when].view(-1, 1, 1, 1)
                noisy = share.sqrt() * clean + (1 - share).sqrt() * noise
                found = model(noisy.to(device), when.to(device)).sample
                yield nn.functional.mse_loss(found, noise.to(device))

        return loop.learn(model, losses(), args.steps, lr=1e-3)


if __name__ == "__main__":
    options.main(parser(), run)
