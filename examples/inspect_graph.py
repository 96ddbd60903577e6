"""Writes what every pass does to a small model, and says how to look at it.

python examples/inspect_graph.py runs
"""

import argparse
import tempfile
from pathlib import Path

import torch

import zcompile
from examples.train_gpt import Shape, model

STEPS = 5
"""The fourth is the first planned one of which the times are kept."""


def write_dump(directory: Path) -> None:
    """Compile and train a GPT of two layers, with a dump into `directory`: two steps are watched,
    the rest is planned, and a step is written when the next one begins."""
    torch.manual_seed(0)
    gpt = model(Shape(layers=2, width=64, heads=2, context=16))
    with tempfile.TemporaryDirectory(prefix="zcompile-") as disk:
        zcompile.offload(
            gpt, device="cpu", device_memory="1MiB", host_memory="1MiB", disk=disk, dump=directory
        )
        compiled = torch.compile(gpt, backend="zinf")
        optimizer = torch.optim.AdamW(gpt.parameters(), fused=True)
        ids = torch.randint(256, (2, 16))
        for _ in range(STEPS):
            compiled(ids, ids).backward()
            optimizer.step()
            optimizer.zero_grad()
        zcompile.close(gpt)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("directory", type=Path, nargs="?", default=Path("runs"))
    directory = parser.parse_args().directory
    write_dump(directory)
    print(f"{directory} holds what every pass did. Next:")
    print(f"  zinf show {directory}                   one line per pass")
    print(f"  zinf show {directory} release-params    the graph after a pass")
    print(f"  zinf diff {directory} 07 09             two stages compared")
    print(f"  zinf schedule {directory}               what the runtime walks")
    print(f"  zinf timeline {directory}               a step measured, beside the predicted one")
    print(f"  zinf report {directory} -o report.html  all of it on a page")
    print(f"  zinf explain {directory} blocks.1.mlp_in.weight    the life of a parameter")


if __name__ == "__main__":
    main()
