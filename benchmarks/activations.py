"""Training in parts of the memory that eager takes, beside checkpoints and save_on_cpu.

    python -m benchmarks.activations --width 384 --tokens 256 --batch 8 [--model llama]

One process, interleaved: every round runs a step of every variant, each right after one of eager,
in turns forwards and backwards. What counts is the median over rounds of a variant's seconds over
those of the eager step before it, on a clock and in CPU time of all threads. Of eager variants the
peak is counted as storages that are alive while the step runs, parameters, gradients and states
included; of ours it is what `zcompile.stats` measured, beside what was planned. `save_on_cpu` of
tensors that are on the CPU copies nothing: on an emulated device it is eager. Ours is bit-equal to
eager, or the run ends.
"""

import argparse
import statistics
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

import zcompile
from examples.train_gpt import Block, Shape
from zcompile.frontend.offload import session_behind
from zcompile.ir.units import show_size

WARM_UP = 7
"""Steps: compiled, seen, planned as a whole, and planned once more at the costs found by then."""


class GPT(nn.Module):
    """Blocks over embedded tokens, and a mean as loss; `again`: each block is a checkpoint."""

    def __init__(self, args: argparse.Namespace, again: bool = False) -> None:
        super().__init__()
        self.again = again
        self.embed = nn.Embedding(args.vocabulary, args.width)
        shape = Shape(args.layers, args.width, args.heads)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(args.layers))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.again else block(x)
        return x.square().mean()


class Llama(nn.Module):
    """A Llama of `transformers` and its own loss; `again`: its own checkpoints, one per layer."""

    def __init__(self, args: argparse.Namespace, again: bool = False) -> None:
        super().__init__()
        from transformers import LlamaConfig, LlamaForCausalLM

        config = LlamaConfig(
            vocab_size=args.vocabulary,
            hidden_size=args.width,
            intermediate_size=3 * args.width,
            num_hidden_layers=args.layers,
            num_attention_heads=args.heads,
            num_key_value_heads=args.heads,
            max_position_embeddings=args.tokens,
            use_cache=False,
        )
        self.inner = LlamaForCausalLM(config)
        if again:
            self.inner.gradient_checkpointing_enable({"use_reentrant": False})

    def forward(self, ids: Tensor) -> Tensor:
        loss: Tensor = self.inner(ids, labels=ids).loss
        return loss


MODELS: Mapping[str, Callable[..., nn.Module]] = {"gpt": GPT, "llama": Llama}


class Alive(TorchDispatchMode):
    """Counts the storages that ops make, as long as a tensor over them lives."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._tensors: dict[int, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(made):
            if isinstance(tensor, Tensor):
                self.count(tensor)
        return made

    def count(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key, nbytes = storage.data_ptr(), storage.nbytes()
        if not nbytes:
            return
        if not self._tensors.get(key):
            self.now += nbytes
            self.peak = max(self.peak, self.now)
        self._tensors[key] = self._tensors.get(key, 0) + 1
        weakref.finalize(tensor, self._dead, key, nbytes)

    def _dead(self, key: int, nbytes: int) -> None:
        self._tensors[key] -= 1
        if not self._tensors[key]:
            self.now -= nbytes


def nothing() -> None:
    """Of a variant that leaves nothing under way."""


@dataclass
class Variant:
    """A way to train: its model, how it is called, and what its steps took.

    rest    waits for what a step leaves under way, within the step's time
    ratios  of a step over the eager one before it: seconds on a clock, and of CPU time
    """

    name: str
    model: nn.Module
    call: Callable[[Tensor], Tensor]
    optimizer: torch.optim.Optimizer
    around: Callable[[], AbstractContextManager[Any]] = nullcontext
    rest: Callable[[], None] = nothing
    budget: int | None = None
    seconds: list[float] = field(default_factory=list)
    cpu_seconds: list[float] = field(default_factory=list)
    losses: list[Tensor] = field(default_factory=list)
    ratios: list[tuple[float, float]] = field(default_factory=list)
    peak: int = 0
    planned: int | None = None

    def step(self, ids: Tensor) -> None:
        since, cpu_since = time.perf_counter(), time.process_time()
        with self.around():
            loss = self.call(ids)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.rest()
        self.seconds.append(time.perf_counter() - since)
        self.cpu_seconds.append(time.process_time() - cpu_since)
        self.losses.append(loss.detach())

    def step_after(self, plain: "Variant", ids: Tensor) -> None:
        """A step of `plain`, then one of this: only such pairs count."""
        plain.step(ids)
        self.step(ids)
        self.ratios.append(
            (self.seconds[-1] / plain.seconds[-1], self.cpu_seconds[-1] / plain.cpu_seconds[-1])
        )


def eager(
    name: str,
    args: argparse.Namespace,
    again: bool = False,
    around: Callable[[], AbstractContextManager[Any]] = nullcontext,
) -> Variant:
    torch.manual_seed(0)
    model = MODELS[args.model](args, again)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    return Variant(name, model, model, optimizer, around)


def ours(args: argparse.Namespace, part: float, budget: int) -> Variant:
    torch.manual_seed(0)
    model = MODELS[args.model](args)
    zcompile.offload(
        model,
        device="cpu",
        device_memory=budget,
        host_memory=args.host_memory,
        activations=args.activations,
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    compiled = torch.compile(model, backend="zinf")
    return Variant(
        f"zcompile, 1/{part:g}",
        model,
        compiled,
        optimizer,
        rest=session_behind(model).drain,
        budget=budget,
    )


def peak_of(variant: Variant, ids: Tensor) -> int:
    """Of one eager step."""
    with Alive() as alive:
        for tensor in tree_leaves([p.data for p in variant.model.parameters()]):
            alive.count(tensor)
        for state in variant.optimizer.state.values():
            for tensor in state.values():
                alive.count(tensor)
        variant.step(ids)
    return alive.peak


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, default in (
        ("layers", 12),
        ("width", 128),
        ("heads", 4),
        ("tokens", 64),
        ("batch", 4),
        ("vocabulary", 256),
        ("rounds", 7),
    ):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--model", choices=sorted(MODELS), default="gpt")
    parser.add_argument("--parts", type=float, nargs="+", default=[1, 2, 4, 8, 12])
    parser.add_argument("--activations", default="auto")
    parser.add_argument("--host-memory", default="1GiB")
    return parser.parse_args()


def warm_up(variants: Sequence[Variant], ids: Tensor) -> None:
    for variant in variants:
        while len(variant.losses) < WARM_UP:
            variant.step(ids)


def show(args: argparse.Namespace, variants: Sequence[Variant]) -> None:
    """A table of the rounds that came after the first steps."""
    print(f"`python -m benchmarks.activations` with {vars(args)}\n")
    print("| variant | budget | peak | / planned | seconds a step | over eager | CPU over eager |")
    print("| --- | ---: | ---: | ---: | ---: | ---: | ---: |")
    for variant in variants:
        took = statistics.median(variant.seconds[WARM_UP:])
        clock, cpu = map(statistics.median, zip(*variant.ratios or [(1.0, 1.0)], strict=True))
        budget = "" if variant.budget is None else show_size(variant.budget)
        planned = ""
        if variant.planned is not None:
            equal = variant.peak == variant.planned
            planned = "equal" if equal else f"{variant.peak / variant.planned:.4f}"
        print(
            f"| {variant.name} | {budget} | {show_size(variant.peak)} | {planned} | {took:.4f} | "
            f"{clock:.2f} | {cpu:.2f} |"
        )


def main() -> None:
    args = parsed()
    torch.manual_seed(1)
    ids = torch.randint(0, args.vocabulary, (args.batch, args.tokens))
    plain = eager("eager", args)
    others = [
        eager("checkpoint per block", args, again=True),
        eager("save_on_cpu", args, around=torch.autograd.graph.save_on_cpu),
    ]
    for variant in (plain, *others):
        variant.step(ids)
        variant.peak = peak_of(variant, ids)
    mine = [ours(args, part, int(plain.peak / part)) for part in args.parts]
    # Each is compiled once, for itself; a reset between them would have all but the last compiled,
    # and planned, anew among the rounds that count.
    torch._dynamo.config.recompile_limit += len(mine)
    for variant in mine:
        warm_up([variant], ids)
    warm_up([plain, *others], ids)
    for number in range(args.rounds):
        for variant in (*others, *mine)[:: 1 if number % 2 else -1]:
            variant.step_after(plain, ids)
    for variant in mine:
        assert all(map(torch.equal, variant.losses, plain.losses)), f"{variant.name}: other losses"
        told = zcompile.stats(variant.model)
        variant.peak = told["peak"]["together"]
        variant.planned = told["planned_peak"]["together"]
    show(args, (plain, *others, *mine))
    for variant in mine:
        session_behind(variant.model).close()


if __name__ == "__main__":
    main()
