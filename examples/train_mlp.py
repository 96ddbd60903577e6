"""The smallest use: a plain loop on the CPU trains 32 MiB of weights in a device arena of 8 MiB."""

import tempfile

import torch
from torch import nn

import zcompile


def main() -> None:
    torch.manual_seed(0)
    hidden = [layer for _ in range(8) for layer in (nn.Linear(1024, 1024), nn.GELU())]
    model = nn.Sequential(nn.Linear(64, 1024), nn.GELU(), *hidden, nn.Linear(1024, 8))
    with tempfile.TemporaryDirectory(prefix="zcompile-") as disk:
        zcompile.offload(model, device="cpu", device_memory="8MiB", host_memory="4MiB", disk=disk)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
        compiled = torch.compile(model, backend="zinf")
        inputs, targets = torch.randn(64, 64), torch.randint(8, (64,))
        for step in range(6):
            loss = nn.functional.cross_entropy(compiled(inputs), targets)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            print(f"step {step}  loss {loss.item():.4f}")
        measured = zcompile.stats(model)
    for tier, nbytes in measured["peak"].items():
        print(f"{tier}: at most {nbytes / 2**20:.1f} MiB in use")


if __name__ == "__main__":
    main()
