"""A ViT of `transformers`, or a model of `timm`, tells pictures apart, its states on disk.

    python examples/train_vision.py                             # a small ViT with random values
    python examples/train_vision.py --model resnet18 --size 64  # by timm, which needs torchvision

The pictures are drawn by the program: stripes, which run in one of four directions. Nothing is
downloaded; for trained values, call `zcompile.load(model, path)` before the optimizer is made.
"""

import argparse
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from examples import loop, options
from examples.text import InputInvalid

CLASSES = 4


def pictures(count: int, size: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Stripes with noise, float32 [count, 3, size, size]; their directions, int64 [count]."""
    kinds = torch.randint(CLASSES, (count,), generator=generator)
    angle = kinds.view(-1, 1, 1) * torch.pi / CLASSES
    at = torch.arange(size, dtype=torch.float32)
    along = angle.cos() * at.view(1, 1, -1) + angle.sin() * at.view(1, -1, 1)
    phase = torch.rand(count, 1, 1, generator=generator)
    stripes = torch.sin(along + 2 * torch.pi * phase).unsqueeze(1).expand(-1, 3, -1, -1)
    return stripes + 0.1 * torch.randn(stripes.shape, generator=generator), kinds


class Logits(nn.Module):
    """A classifier of transformers that returns its logits alone."""

    def __init__(self, classifier: nn.Module) -> None:
        super().__init__()
        self.classifier = classifier

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.classifier(images).logits
        return logits


def vit(size: int, width: int, layers: int) -> nn.Module:
    """raises  InputInvalid"""
    try:
        from transformers import ViTConfig, ViTForImageClassification
    except ImportError as error:
        raise InputInvalid("this example needs transformers: pip install transformers") from error
    config = ViTConfig(
        image_size=size,
        patch_size=size // 8,
        hidden_size=width,
        intermediate_size=4 * width,
        num_hidden_layers=layers,
        num_attention_heads=max(1, width // 64),
        num_labels=CLASSES,
    )
    return Logits(ViTForImageClassification(config))


def of_timm(name: str, size: int) -> nn.Module:
    """raises  InputInvalid"""
    try:
        import timm
    except (ImportError, RuntimeError) as error:  # torchvision of another torch ends so
        raise InputInvalid(
            f"--model {name} is made by timm, which cannot be imported: {error}; install timm, and "
            "the torchvision that belongs to your torch, or leave --model at vit"
        ) from error
    if name not in timm.list_models():
        raise InputInvalid(f"timm has no model {name!r}; timm.list_models() names those it has")
    sizes = {"img_size": size} if name.startswith("vit") else {}  # others take any
    made: nn.Module = timm.create_model(name, num_classes=CLASSES, **sizes)
    return made


def parser() -> argparse.ArgumentParser:
    made = options.parser_of_tiers(__doc__ or "", device_memory="16MiB", host_memory="4MiB")
    options.plain_too(made, steps=20)
    made.add_argument("--model", default="vit", help="vit, of transformers, or a name of timm")
    made.add_argument("--size", type=options.positive, default=32, help="of pictures; default 32")
    made.add_argument("--width", type=options.positive, default=192, help="of vit; default 192")
    made.add_argument("--layers", type=options.positive, default=6, help="of vit; default 6")
    made.add_argument("--batch", type=options.positive, default=8, help="pictures; default 8")
    return made


def run(args: argparse.Namespace) -> list[float]:
    """The loss of each step.

    raises  InputInvalid, and what `zcompile` raises
    """
    if args.size % 8:
        raise InputInvalid(f"--size {args.size} is not a multiple of 8, the patches of a side")

    def build() -> nn.Module:
        if args.model == "vit":
            return vit(args.size, args.width, args.layers)
        return of_timm(args.model, args.size)

    generator = torch.Generator().manual_seed(args.seed)
    with options.built(args, build) as (model, device):
        if not args.plain:
            model.compile(backend="zinf")

        def losses() -> Iterator[Tensor]:
            while True:
                images, kinds = pictures(args.batch, args.size, generator)
                yield nn.functional.cross_entropy(model(images.to(device)), kinds.to(device))

        return loop.learn(model, losses(), args.steps, lr=1e-3)


if __name__ == "__main__":
    options.main(parser(), run)
